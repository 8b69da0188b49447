//! The kernels as operations on arrays: few, fused nodes of MLX's graph.
//!
//! Activations are f32, `[batch, seq, width]` and row contiguous; weights are as stored, or interleaved at
//! load. Keys and values are kept in float16 or float32 and appended in place.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use half::f16;
use russet_mlx::{
    Array, CpuOp, Dtype, Element, Error, Input, MappedSlice, Output, OutputSpec, Result, custom,
};

use crate::cpu::{
    self, Activation, Attention, Cpu, DenseMatrix, FloatType, Interleaved, KernelError, KeyValues, Mask,
    Precision, PreparedInput, Product, QuantFormat, QuantizedMatrix, Rotations, Weights,
};

/// How operations compute: the processor, and the precision of activations in products.
#[derive(Debug)]
pub struct Ops {
    cpu: Cpu,
    precision: Precision,
}

/// A weight matrix `[outputs, inputs]` in the form that kernels read.
#[derive(Debug)]
pub struct Matrix {
    storage: Storage,
    /// A quantized matrix in the form that is faster to read, once [`Ops::interleave`] has made it.
    interleaved: OnceLock<Interleaved>,
    bias: Option<Vec<f32>>,
}

#[derive(Debug)]
enum Storage {
    Dense { float: FloatType, rows: usize, columns: usize, values: MappedSlice },
    Quantized(StoredQuantized),
}

/// The parts of a quantized matrix as a checkpoint stores them.
#[derive(Clone, Debug)]
pub struct StoredQuantized {
    /// The packing.
    pub format: QuantFormat,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
    /// Packed codes.
    pub codes: MappedSlice,
    /// Scales.
    pub scales: MappedSlice,
    /// Biases, for affine packing.
    pub biases: Option<MappedSlice>,
}

impl StoredQuantized {
    fn view(&self) -> std::result::Result<QuantizedMatrix<'_>, KernelError> {
        let biases = self.biases.as_ref().map_or(&[][..], MappedSlice::bytes);
        QuantizedMatrix::new(
            self.format,
            self.rows,
            self.columns,
            self.codes.bytes(),
            self.scales.bytes(),
            biases,
        )
    }
}

impl Matrix {
    /// A float matrix used where it lies.
    ///
    /// # Errors
    /// When `values` does not have the bytes of the shape.
    pub fn dense(float: FloatType, rows: usize, columns: usize, values: MappedSlice) -> Result<Self> {
        DenseMatrix::new(float, rows, columns, values.bytes()).map_err(error)?;
        Ok(Self::new(Storage::Dense { float, rows, columns, values }))
    }

    /// A quantized matrix used where it lies.
    ///
    /// # Errors
    /// When the parts do not have the bytes of the shape.
    pub fn quantized(stored: StoredQuantized) -> Result<Self> {
        stored.view().map_err(error)?;
        Ok(Self::new(Storage::Quantized(stored)))
    }

    fn new(storage: Storage) -> Self {
        Self { storage, interleaved: OnceLock::new(), bias: None }
    }

    /// Adds `bias` `[outputs]` to the products.
    ///
    /// # Errors
    /// When it has another length.
    pub fn with_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        if bias.len() != self.rows() {
            return Err(Error::new(format!("bias has {} values for {} outputs", bias.len(), self.rows())));
        }
        self.bias = Some(bias);
        Ok(self)
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        match &self.storage {
            Storage::Dense { rows, .. } => *rows,
            Storage::Quantized(stored) => stored.rows,
        }
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        match &self.storage {
            Storage::Dense { columns, .. } => *columns,
            Storage::Quantized(stored) => stored.columns,
        }
    }

    /// Bytes of memory besides the mapped file.
    pub fn owned_bytes(&self) -> usize {
        self.interleaved.get().map_or(0, Interleaved::bytes)
    }

    fn weights(&self) -> Result<Weights<'_>> {
        if let Some(matrix) = self.interleaved.get() {
            return Ok(matrix.into());
        }
        Ok(match &self.storage {
            Storage::Dense { float, rows, columns, values } => {
                DenseMatrix::new(*float, *rows, *columns, values.bytes()).map_err(error)?.into()
            }
            Storage::Quantized(stored) => stored.view().map_err(error)?.into(),
        })
    }

    /// Matrices of one kind take the same prepared input.
    fn kind(&self) -> Kind {
        let format = match &self.storage {
            Storage::Dense { .. } => return Kind::Dense,
            Storage::Quantized(stored) => stored.format,
        };
        match format {
            QuantFormat::Affine { .. } | QuantFormat::Mxfp4 => Kind::Blocks32,
            QuantFormat::Nvfp4 => Kind::Blocks16,
            QuantFormat::Mxfp8 => Kind::Floats,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Dense,
    Blocks32,
    Blocks16,
    Floats,
}

/// A root-mean-square norm.
#[derive(Debug)]
pub struct Norm {
    /// The gain.
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Codes that are interleaved into one piece of memory: enough for huge pages, little enough that file and
/// copy are not in memory twice.
const INTERLEAVE_BATCH: usize = 16 << 20;

/// Arguments of [`Ops::attention`].
pub struct AttentionCall {
    /// The projection of the attention's output.
    pub output: Arc<Matrix>,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// A query sees this many keys; all up to its own where absent.
    pub window: Option<usize>,
    /// Rotations of the new positions, if any.
    pub rotations: Option<Arc<Rotations>>,
    /// Whether rotated pairs are neighbours.
    pub traditional: bool,
    /// Rows of the cache before the call.
    pub offset: usize,
    /// Rows that the cache shall have room for; growing copies.
    pub capacity: usize,
    /// What keys and values are kept in.
    pub kv: KvType,
}

/// The type that keys and values are kept in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Half the bytes of `F32`; values beyond its range are held at its largest.
    #[default]
    F16,
    /// Exact.
    F32,
}

impl KvType {
    /// As an array's dtype.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F16 => Dtype::F16,
            Self::F32 => Dtype::F32,
        }
    }
}

/// What [`Ops::attention`] returns.
pub struct AttentionOutput {
    /// Residual plus projected attention, `[1, seq, hidden]`.
    pub hidden: Array,
    /// Keys `[kv_heads, capacity, head_dim]`; rows beyond those used are undefined.
    pub keys: Array,
    /// Values, like the keys.
    pub values: Array,
}

impl Ops {
    /// Operations on `threads` threads (the physical cores where absent).
    pub fn new(threads: Option<usize>, precision: Precision) -> Arc<Self> {
        Arc::new(Self { cpu: Cpu::new(threads), precision })
    }

    /// Threads that share an operation.
    pub fn threads(&self) -> usize {
        self.cpu.pool().threads()
    }

    /// The instruction set in use.
    pub fn instruction_set(&self) -> cpu::Isa {
        self.cpu.isa()
    }

    /// Copies quantized matrices into memory of their own in a form that is faster to read. The pages of
    /// the files that were read for that are given back.
    ///
    /// # Errors
    /// When memory is refused.
    pub fn interleave(&self, matrices: &[Arc<Matrix>]) -> Result<()> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        for matrix in matrices {
            let Storage::Quantized(stored) = &matrix.storage else { continue };
            batch.push((&**matrix, stored));
            bytes += stored.codes.bytes().len();
            if bytes >= INTERLEAVE_BATCH {
                self.interleave_batch(&batch)?;
                batch.clear();
                bytes = 0;
            }
        }
        self.interleave_batch(&batch)
    }

    fn interleave_batch(&self, batch: &[(&Matrix, &StoredQuantized)]) -> Result<()> {
        let views: Vec<_> = batch
            .iter()
            .map(|(_, stored)| Ok([stored.view().map_err(error)?]))
            .collect::<Result<Vec<_>>>()?;
        let views: Vec<&[QuantizedMatrix<'_>]> = views.iter().map(|v| &v[..]).collect();
        let interleaved = Interleaved::pack(&self.cpu, &views).map_err(error)?;
        for ((matrix, stored), interleaved) in batch.iter().zip(interleaved) {
            matrix.interleaved.get_or_init(|| interleaved);
            for part in
                [Some(&stored.codes), Some(&stored.scales), stored.biases.as_ref()].into_iter().flatten()
            {
                part.release();
            }
        }
        Ok(())
    }

    /// Rows of `table` for `tokens` (u32, any shape): `[.., hidden]`.
    pub fn embed(self: &Arc<Self>, table: &Arc<Matrix>, tokens: &Array) -> Result<Array> {
        let shape = with_last(tokens.shape(), table.columns(), true);
        let op = Embed { ops: self.clone(), table: table.clone() };
        one(custom(op, std::slice::from_ref(tokens), vec![OutputSpec::new(shape, Dtype::F32)])?)
    }

    /// Products of `norm(x)` with each of `matrices`.
    pub fn project(
        self: &Arc<Self>,
        x: &Array,
        norm: Option<&Arc<Norm>>,
        matrices: Vec<Arc<Matrix>>,
    ) -> Result<Vec<Array>> {
        let outputs = matrices
            .iter()
            .map(|m| OutputSpec::new(with_last(x.shape(), m.rows(), false), Dtype::F32))
            .collect();
        custom(Project { ops: self.clone(), norm: norm.cloned(), matrices }, std::slice::from_ref(x), outputs)
    }

    /// `activation(gate(n)) * up(n)` with `n = norm(x)`.
    pub fn gated(
        self: &Arc<Self>,
        x: &Array,
        norm: Option<&Arc<Norm>>,
        gate: &Arc<Matrix>,
        up: &Arc<Matrix>,
        activation: Activation,
    ) -> Result<Array> {
        if gate.rows() != up.rows() {
            return Err(Error::new("gate and up projections have different widths"));
        }
        let shape = with_last(x.shape(), gate.rows(), false);
        let op =
            Gated { ops: self.clone(), norm: norm.cloned(), gate: gate.clone(), up: up.clone(), activation };
        one(custom(op, std::slice::from_ref(x), vec![OutputSpec::new(shape, Dtype::F32)])?)
    }

    /// `residual + matrix(x)`.
    pub fn project_add(self: &Arc<Self>, x: &Array, matrix: &Arc<Matrix>, residual: &Array) -> Result<Array> {
        let output = OutputSpec::in_place(residual.shape(), Dtype::F32, 1);
        let op = ProjectAdd { ops: self.clone(), matrix: matrix.clone() };
        one(custom(op, &[x.clone(), residual.clone()], vec![output])?)
    }

    /// Rotates queries and keys, appends keys and values to the cache, attends, projects and adds `residual`.
    ///
    /// `queries`, `keys`, `values` are `[1, seq, heads * head_dim]`; `cache` is what the previous call returned.
    pub fn attention(
        self: &Arc<Self>,
        call: AttentionCall,
        [queries, keys, values]: [&Array; 3],
        residual: &Array,
        cache: Option<(Array, Array)>,
    ) -> Result<AttentionOutput> {
        let shape = vec![dim(call.kv_heads)?, dim(call.capacity)?, dim(call.head_dim)?];
        let dtype = call.kv.dtype();
        let mut inputs = vec![queries.clone(), keys.clone(), values.clone(), residual.clone()];
        let mut outputs = vec![OutputSpec::in_place(residual.shape(), Dtype::F32, 3)];
        match cache {
            Some((old_keys, old_values)) => {
                for (i, old) in [old_keys, old_values].into_iter().enumerate() {
                    outputs.push(match old.shape() == shape {
                        true => OutputSpec::in_place(shape.clone(), dtype, 4 + i),
                        false => OutputSpec::new(shape.clone(), dtype),
                    });
                    inputs.push(old);
                }
            }
            None => outputs.extend(vec![OutputSpec::new(shape, dtype); 2]),
        }
        let op = Attend { ops: self.clone(), call };
        let [hidden, keys, values] = <[Array; 3]>::try_from(custom(op, &inputs, outputs)?)
            .map_err(|_| Error::new("attention returned too few arrays"))?;
        Ok(AttentionOutput { hidden, keys, values })
    }

    /// Multiplies `rows` rows of `x` with each matrix into the output beside it, biases added.
    fn multiply(
        &self,
        x: &[f32],
        rows: usize,
        prepared: &mut PreparedInput,
        products: &mut [(&Matrix, &mut [f32])],
    ) -> Result<()> {
        // Neighbours of one kind share the prepared input and the dispatch to the threads.
        for group in products.chunk_by_mut(|a, b| a.0.kind() == b.0.kind()) {
            let Some((first, _)) = group.first() else { continue };
            prepared.prepare(&self.cpu, x, rows, self.precision, first.weights()?).map_err(error)?;
            let mut batch = group
                .iter_mut()
                .map(|(matrix, out)| Product::new(matrix.weights()?, prepared, out).map_err(error))
                .collect::<Result<Vec<_>>>()?;
            cpu::matmul(&self.cpu, &mut batch).map_err(error)?;
        }
        for (matrix, out) in products {
            if let Some(bias) = &matrix.bias {
                for row in out.chunks_exact_mut(bias.len()) {
                    row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
                }
            }
        }
        Ok(())
    }
}

/// Buffers of the thread that runs operations, kept so that a step allocates nothing.
#[derive(Default)]
struct Scratch {
    prepared: PreparedInput,
    normalized: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    third: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// The first `len` elements of a buffer that grows as needed.
fn take(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

fn rows_of(x: &[f32], columns: usize) -> Result<usize> {
    match columns {
        0 => Err(Error::new("matrix without columns")),
        _ if x.len() % columns != 0 => {
            Err(Error::new(format!("{} activations are no rows of {columns}", x.len())))
        }
        _ => Ok(x.len() / columns),
    }
}

/// `norm(x)` in `buffer`, or `x` itself.
fn normalized<'a>(
    ops: &Ops,
    norm: Option<&Norm>,
    x: &'a [f32],
    columns: usize,
    buffer: &'a mut Vec<f32>,
) -> Result<&'a [f32]> {
    let Some(norm) = norm else { return Ok(x) };
    let out = take(buffer, x.len());
    cpu::rms_norm(&ops.cpu, x, columns, Some(&norm.weight), norm.eps, out).map_err(error)?;
    Ok(out)
}

struct Embed {
    ops: Arc<Ops>,
    table: Arc<Matrix>,
}

impl CpuOp for Embed {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let [tokens] = inputs else { return Err(wrong_count()) };
        let [out] = outputs else { return Err(wrong_count()) };
        cpu::embed(&self.ops.cpu, self.table.weights()?, tokens.as_slice::<u32>()?, out.as_mut_slice()?)
            .map_err(error)
    }
}

struct Project {
    ops: Arc<Ops>,
    norm: Option<Arc<Norm>>,
    matrices: Vec<Arc<Matrix>>,
}

impl CpuOp for Project {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let [x] = inputs else { return Err(wrong_count()) };
        let x = x.as_slice::<f32>()?;
        let columns = self.matrices.first().map_or(0, |m| m.columns());
        let rows = rows_of(x, columns)?;
        SCRATCH.with_borrow_mut(|scratch| {
            let x = normalized(&self.ops, self.norm.as_deref(), x, columns, &mut scratch.normalized)?;
            let mut products = self
                .matrices
                .iter()
                .zip(outputs)
                .map(|(matrix, out)| Ok((&**matrix, out.as_mut_slice::<f32>()?)))
                .collect::<Result<Vec<_>>>()?;
            self.ops.multiply(x, rows, &mut scratch.prepared, &mut products)
        })
    }
}

struct Gated {
    ops: Arc<Ops>,
    norm: Option<Arc<Norm>>,
    gate: Arc<Matrix>,
    up: Arc<Matrix>,
    activation: Activation,
}

impl CpuOp for Gated {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let ([x], [out]) = (inputs, outputs) else { return Err(wrong_count()) };
        let x = x.as_slice::<f32>()?;
        let (columns, width) = (self.gate.columns(), self.gate.rows());
        let rows = rows_of(x, columns)?;
        SCRATCH.with_borrow_mut(|scratch| {
            let x = normalized(&self.ops, self.norm.as_deref(), x, columns, &mut scratch.normalized)?;
            let gate = take(&mut scratch.first, rows * width);
            let up = take(&mut scratch.second, rows * width);
            let mut products = [(&*self.gate, &mut *gate), (&*self.up, &mut *up)];
            self.ops.multiply(x, rows, &mut scratch.prepared, &mut products)?;
            cpu::gated(&self.ops.cpu, self.activation, gate, up, width, width, out.as_mut_slice()?)
                .map_err(error)
        })
    }
}

struct ProjectAdd {
    ops: Arc<Ops>,
    matrix: Arc<Matrix>,
}

impl CpuOp for ProjectAdd {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let ([x], [out]) = (inputs, outputs) else { return Err(wrong_count()) };
        let x = x.as_slice::<f32>()?;
        SCRATCH.with_borrow_mut(|scratch| {
            add_product(&self.ops, &self.matrix, x, &mut scratch.prepared, &mut scratch.first, out)
        })
    }
}

/// `out += matrix(x)`.
fn add_product(
    ops: &Ops,
    matrix: &Matrix,
    x: &[f32],
    prepared: &mut PreparedInput,
    buffer: &mut Vec<f32>,
    out: &mut Output<'_>,
) -> Result<()> {
    let rows = rows_of(x, matrix.columns())?;
    let product = take(buffer, rows * matrix.rows());
    ops.multiply(x, rows, prepared, &mut [(matrix, &mut *product)])?;
    let out = out.as_mut_slice::<f32>()?;
    out.iter_mut().zip(product).for_each(|(y, p)| *y += *p);
    Ok(())
}

struct Attend {
    ops: Arc<Ops>,
    call: AttentionCall,
}

impl CpuOp for Attend {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        match self.call.kv {
            KvType::F16 => self.attend::<f16>(inputs, outputs),
            KvType::F32 => self.attend::<f32>(inputs, outputs),
        }
    }
}

/// A type that keys and values are kept in.
trait KvElement: Element {
    const FLOAT: FloatType;
    fn round(value: f32) -> Self;
}
impl KvElement for f16 {
    const FLOAT: FloatType = FloatType::F16;
    fn round(value: f32) -> Self {
        // What is finite stays finite; an infinity is a fault that must show in the logits.
        let largest = if value.is_finite() { Self::MAX.to_f32() } else { f32::INFINITY };
        Self::from_f32(value.clamp(-largest, largest))
    }
}
impl KvElement for f32 {
    const FLOAT: FloatType = FloatType::F32;
    fn round(value: f32) -> Self {
        value
    }
}

impl Attend {
    fn attend<T: KvElement>(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let call = &self.call;
        let (queries, keys, values, old) = match inputs {
            [q, k, v, old @ ..] => (q.as_slice::<f32>()?, k.as_slice::<f32>()?, v.as_slice::<f32>()?, old),
            _ => return Err(wrong_count()),
        };
        let [hidden, cached_keys, cached_values] = outputs else { return Err(wrong_count()) };
        let (q_width, kv_width) = (call.heads * call.head_dim, call.kv_heads * call.head_dim);
        let rows = rows_of(queries, q_width)?;
        if keys.len() != rows * kv_width || values.len() != keys.len() {
            return Err(Error::new("keys and values do not have the rows of the queries"));
        }
        let length = call.offset + rows;
        if length > call.capacity {
            return Err(Error::new(format!("{length} rows do not fit a cache of {}", call.capacity)));
        }
        let cached_keys = cached_keys.as_mut_slice::<T>()?;
        let cached_values = cached_values.as_mut_slice::<T>()?;
        // A cache that grew: only then are old buffers among the inputs.
        if let [old_keys, old_values] = old {
            copy_rows(old_keys.as_slice()?, cached_keys, call)?;
            copy_rows(old_values.as_slice()?, cached_values, call)?;
        }

        SCRATCH.with_borrow_mut(|scratch| {
            let rotated_queries = take(&mut scratch.first, queries.len());
            rotated_queries.copy_from_slice(queries);
            let rotated_keys = take(&mut scratch.second, keys.len());
            rotated_keys.copy_from_slice(keys);
            if let Some(rotations) = &call.rotations {
                for (x, heads, width) in [
                    (&mut *rotated_queries, call.heads, q_width),
                    (&mut *rotated_keys, call.kv_heads, kv_width),
                ] {
                    let strides = (call.head_dim, width);
                    cpu::rope(&self.ops.cpu, x, heads, call.head_dim, strides, rotations, call.traditional)
                        .map_err(error)?;
                }
            }
            append_rows(rotated_keys, cached_keys, call);
            append_rows(values, cached_values, call);

            let attended = take(&mut scratch.third, queries.len());
            let cached = |rows| KeyValues::Dense {
                float: T::FLOAT,
                data: bytemuck::cast_slice(rows),
                head_stride: call.capacity * call.head_dim,
                key_stride: call.head_dim,
            };
            let args = Attention {
                queries: rotated_queries,
                query_strides: (call.head_dim, q_width),
                keys: cached(cached_keys),
                values: cached(cached_values),
                query_heads: call.heads,
                key_heads: call.kv_heads,
                query_len: rows,
                key_len: length,
                head_dim: call.head_dim,
                value_dim: call.head_dim,
                scale: call.scale,
                softcap: None,
                mask: call.window.map_or(Mask::Causal, Mask::Window),
            };
            cpu::attention(&self.ops.cpu, &args, attended, (call.head_dim, q_width)).map_err(error)?;
            let (prepared, buffer) = (&mut scratch.prepared, &mut scratch.normalized);
            add_product(&self.ops, &call.output, attended, prepared, buffer, hidden)
        })
    }
}

/// Copies the used rows of a smaller cache.
fn copy_rows<T: KvElement>(old: &[T], new: &mut [T], call: &AttentionCall) -> Result<()> {
    let (old_head, new_head) = (old.len() / call.kv_heads, call.capacity * call.head_dim);
    let used = call.offset * call.head_dim;
    if used > old_head.min(new_head) {
        return Err(Error::new("the cache has fewer rows than the sequence"));
    }
    for (old, new) in old.chunks_exact(old_head).zip(new.chunks_exact_mut(new_head)) {
        new[..used].copy_from_slice(&old[..used]);
    }
    Ok(())
}

/// Writes `[seq, kv_heads, head_dim]` behind the used rows of `[kv_heads, capacity, head_dim]`.
fn append_rows<T: KvElement>(rows: &[f32], cache: &mut [T], call: &AttentionCall) {
    let (dim, heads) = (call.head_dim, call.kv_heads);
    for (i, row) in rows.chunks_exact(heads * dim).enumerate() {
        for (head, values) in row.chunks_exact(dim).enumerate() {
            let at = (head * call.capacity + call.offset + i) * dim;
            for (target, &value) in cache[at..at + dim].iter_mut().zip(values) {
                *target = T::round(value);
            }
        }
    }
}

/// `shape` with its last dimension replaced, or with one more where `append`.
fn with_last(mut shape: Vec<i32>, last: usize, append: bool) -> Vec<i32> {
    if !append {
        shape.pop();
    }
    shape.push(i32::try_from(last).unwrap_or(i32::MAX));
    shape
}

fn dim(n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| Error::new(format!("dimension {n} is too large")))
}

fn one(mut arrays: Vec<Array>) -> Result<Array> {
    arrays.pop().ok_or_else(|| Error::new("operation returned no array"))
}

fn wrong_count() -> Error {
    Error::new("wrong number of inputs or outputs")
}

fn error(e: KernelError) -> Error {
    Error::new(e.to_string())
}
