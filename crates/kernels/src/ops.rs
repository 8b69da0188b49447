//! The kernels as operations on arrays: few, fused nodes of MLX's graph.
//!
//! Activations are f32, `[batch, seq, width]` and row contiguous; weights are as stored, or interleaved at
//! load. Keys and values are kept in float16 or float32 and appended in place.

mod experts;
mod gated_input;
mod kv;

pub use gated_input::GatedInputCall;

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use half::f16;
use half::slice::HalfFloatSliceExt;
use russet_mlx::{
    Array, CpuOp, Dtype, Element, Error, Input, MappedSlice, Output, OutputSpec, Result, custom,
};

use crate::cpu::{
    self, Activation, Attention, Cpu, DeltaShape, DenseMatrix, ExpertScratch, FloatType, Interleaved,
    KernelError, KeyValues, Mask, PANEL, Precision, PreparedInput, Product, QuantFormat, QuantizedMatrix,
    Rotations, Weights,
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
    /// Matrices of as many rows each that lie one under the other; 1 unless they are a layer's experts.
    experts: usize,
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
        Self { storage, interleaved: OnceLock::new(), bias: None, experts: 1 }
    }

    /// Says that this is the stack of the matrices of `count` experts.
    ///
    /// # Errors
    /// When it does not have as many rows for each.
    pub fn of_experts(mut self, count: usize) -> Result<Self> {
        if count == 0 || !self.rows().is_multiple_of(count) {
            return Err(Error::new(format!("{} rows are no matrices of {count} experts", self.rows())));
        }
        self.experts = count;
        Ok(self)
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

    /// The matrices of the first `rows[0]` outputs, of the `rows[1]` outputs after them, and so on. Biases are
    /// not split.
    ///
    /// # Errors
    /// When the numbers do not add up to the outputs, or there is a bias.
    pub fn split<const N: usize>(self, rows: [usize; N]) -> Result<[Self; N]> {
        let total = self.rows();
        if rows.iter().sum::<usize>() != total || rows.contains(&0) || self.bias.is_some() {
            return Err(Error::new(format!("a matrix of {total} outputs can't be split into {rows:?}")));
        }
        let mut start = 0;
        let parts = rows.iter().map(|&count| {
            // Rows of all parts of a matrix follow one another without gaps.
            let part = |whole: &MappedSlice| {
                let row = whole.bytes().len() / total;
                whole.part(start * row, count * row)
            };
            let matrix = match &self.storage {
                Storage::Dense { float, columns, values, .. } => {
                    Self::dense(*float, count, *columns, part(values)?)
                }
                Storage::Quantized(stored) => Self::quantized(StoredQuantized {
                    rows: count,
                    codes: part(&stored.codes)?,
                    scales: part(&stored.scales)?,
                    biases: stored.biases.as_ref().map(part).transpose()?,
                    ..stored.clone()
                }),
            };
            start += count;
            matrix
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        parts.try_into().map_err(|_| Error::new("a matrix was split into too few parts"))
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
            QuantFormat::Affine { bits: ..=4, .. } => Kind::FewBits,
            QuantFormat::Affine { .. } | QuantFormat::Mxfp4 => Kind::Blocks32,
            QuantFormat::Nvfp4 => Kind::Blocks16,
            QuantFormat::Mxfp8 => Kind::Floats,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Dense,
    FewBits,
    Blocks32,
    Blocks16,
    Floats,
}

/// A norm of rows as wide as its gain.
#[derive(Debug)]
pub enum Norm {
    /// Root-mean-square.
    Rms {
        /// The gain.
        weight: Vec<f32>,
        /// Added to the mean square.
        eps: f32,
    },
    /// Layer normalization.
    Layer {
        /// The gain.
        weight: Vec<f32>,
        /// Added to the result.
        bias: Vec<f32>,
        /// Added to the variance.
        eps: f32,
    },
}

impl Norm {
    fn run(&self, cpu: &Cpu, x: &[f32], out: &mut [f32]) -> Result<()> {
        match self {
            Self::Rms { weight, eps } => cpu::rms_norm(cpu, x, weight.len(), Some(weight), *eps, out),
            Self::Layer { weight, bias, eps } => {
                cpu::layer_norm(cpu, x, weight.len(), Some(weight), Some(bias), *eps, out)
            }
        }
        .map_err(error)
    }
}

/// How a product `y` joins the hidden states `x`.
#[derive(Clone, Debug)]
pub enum Residual {
    /// `x + y`
    Plain,
    /// `x + norm(y)`
    Norm(Arc<Norm>),
    /// `x + y * factor`
    Scaled(f32),
    /// `y`, in the place of `x`.
    Replaced,
}

/// Arguments of [`Ops::mlp`].
pub struct MlpCall {
    /// Norm of the input, if any.
    pub norm: Option<Arc<Norm>>,
    /// The projection that is activated.
    pub inner: Arc<Matrix>,
    /// The projection that it then multiplies, if any.
    pub gated: Option<Arc<Matrix>>,
    /// The projection of the result.
    pub output: Arc<Matrix>,
    /// The activation.
    pub activation: Activation,
    /// How the output joins the input.
    pub residual: Residual,
}

/// Codes that are interleaved into one piece of memory: enough for huge pages, little enough that file and
/// copy are not in memory twice.
const INTERLEAVE_BATCH: usize = 4 << 20;

/// Arguments of [`Ops::attention`].
pub struct AttentionCall {
    /// Norms of queries, of keys and of values, of a head each or of all heads, by their widths.
    pub norms: [Option<Arc<Norm>>; 3],
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
    /// Where given, scores `s` become `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// Whether queries have gates behind those of each head, whose sigmoids multiply the head's output.
    pub output_gate: bool,
    /// A query sees this many keys; all up to its own where absent.
    pub window: Option<usize>,
    /// Whether rotated pairs are neighbours.
    pub traditional: bool,
    /// The sequences of the batch, each with as many new rows as the others.
    pub sequences: Vec<KvSequence>,
    /// How the output joins the hidden states.
    pub residual: Residual,
}

/// Where the keys and values of a sequence of an [`AttentionCall`] are.
pub struct KvSequence {
    /// Keys and values, to be appended to.
    pub cache: KvBuffer,
    /// Where the rows before the new ones are, if not in `cache` yet.
    pub copy_from: Option<KvBuffer>,
    /// Rows before the new ones.
    pub offset: usize,
    /// Rotations of the new positions, if any.
    pub rotations: Option<Arc<Rotations>>,
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
    /// Bytes of a value.
    pub fn size(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Keys and values of one layer, `[kv_heads, capacity, head_dim]` each, in memory that operations write in
/// place. A clone is another handle of the same memory.
///
/// The lock is for soundness alone: operations of a sequence run one after the other.
#[derive(Clone, Debug)]
pub struct KvBuffer {
    rows: Arc<Mutex<Rows>>,
    capacity: usize,
    head_dim: usize,
    bytes: usize,
}

#[derive(Debug)]
enum Rows {
    F16 { keys: Vec<f16>, values: Vec<f16> },
    F32 { keys: Vec<f32>, values: Vec<f32> },
}

impl KvBuffer {
    /// Zeroed memory for `capacity` rows. The system gives pages only where rows are written.
    ///
    /// # Errors
    /// When that would be more than the address space.
    pub fn new(kv: KvType, kv_heads: usize, capacity: usize, head_dim: usize) -> Result<Self> {
        let count = kv_heads.checked_mul(capacity).and_then(|n| n.checked_mul(head_dim));
        let bytes = count.and_then(|n| n.checked_mul(2 * kv.size())).filter(|&n| n < isize::MAX as usize);
        let (Some(count), Some(bytes)) = (count, bytes) else {
            return Err(Error::new(format!("a cache of {capacity} rows is too large")));
        };
        let rows = match kv {
            KvType::F16 => Rows::F16 { keys: zeroed(count)?, values: zeroed(count)? },
            KvType::F32 => Rows::F32 { keys: zeroed(count)?, values: zeroed(count)? },
        };
        Ok(Self { rows: Arc::new(Mutex::new(rows)), capacity, head_dim, bytes })
    }

    /// Rows that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of the memory, rows that are not used included.
    pub fn nbytes(&self) -> usize {
        self.bytes
    }

    /// Whether there are other handles of the memory, such as those of operations that have not run.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.rows) > 1
    }

    fn lock(&self) -> Result<MutexGuard<'_, Rows>> {
        self.rows.lock().map_err(|_| Error::new("an operation on this cache failed half-way"))
    }
}

/// `count` zeros; an error where memory is refused.
fn zeroed<T: bytemuck::Zeroable>(count: usize) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(count)
        .map_err(|()| Error::new(format!("no memory for {count} cached values")))
}

/// What [`Ops::attention`] returns.
pub struct AttentionOutput {
    /// The hidden states with the projected attention added, `[batch, seq, hidden]`.
    pub hidden: Array,
    /// Available once the caches have the new rows. The next call on one of them takes it, so that graphs run in
    /// order.
    pub appended: Array,
}

/// The recurrent part of a gated delta net: a causal convolution and the delta rule.
#[derive(Debug)]
pub struct DeltaRule {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Weights of the convolution, `[channels, taps]`; channels are all queries, all keys, all values.
    pub conv: Vec<f32>,
    /// Logarithm of the decay rate of each value head.
    pub a_log: Vec<f32>,
    /// Added to the decay's input, for each value head.
    pub dt_bias: Vec<f32>,
}

impl DeltaRule {
    fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }
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

    /// Precision of activations in products with quantized weights.
    pub fn precision(&self) -> Precision {
        self.precision
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
            // An expert is read on its own, so panels must not straddle two.
            if matrix.experts > 1 && !(matrix.rows() / matrix.experts).is_multiple_of(PANEL) {
                continue;
            }
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

    /// `norm(x)`.
    pub fn normalize(self: &Arc<Self>, x: &Array, norm: &Arc<Norm>) -> Result<Array> {
        let op = Normalize { ops: self.clone(), norm: norm.clone() };
        one(custom(op, std::slice::from_ref(x), vec![OutputSpec::new(x.shape(), Dtype::F32)])?)
    }

    /// `x` with `output(activation(inner(n)) * gated(n))` added, where `n = norm(x)`.
    pub fn mlp(self: &Arc<Self>, x: &Array, call: MlpCall) -> Result<Array> {
        let width = call.inner.rows();
        if call.output.columns() != width || call.gated.as_ref().is_some_and(|m| m.rows() != width) {
            return Err(Error::new("the projections of an MLP do not fit"));
        }
        let op = Mlp { ops: self.clone(), call };
        one(custom(op, std::slice::from_ref(x), vec![OutputSpec::in_place(x.shape(), Dtype::F32, 0)])?)
    }

    /// Normalizes and rotates queries and keys, appends keys and values to the cache, attends, projects, and adds
    /// to `hidden`.
    ///
    /// `queries`, `keys`, `values` are `[batch, seq, heads * head_dim]`, queries twice as wide with gates; `after`
    /// is what the previous calls on the caches returned as `appended`.
    pub fn attention(
        self: &Arc<Self>,
        call: AttentionCall,
        [queries, keys, values]: [&Array; 3],
        hidden: &Array,
        after: Vec<Array>,
    ) -> Result<AttentionOutput> {
        let mut inputs = vec![queries.clone(), keys.clone(), values.clone(), hidden.clone()];
        inputs.extend(after);
        let outputs =
            vec![OutputSpec::in_place(hidden.shape(), Dtype::F32, 3), OutputSpec::new(vec![1], Dtype::U32)];
        let op = Attend { ops: self.clone(), call, appends: true };
        let [hidden, appended] = <[Array; 2]>::try_from(custom(op, &inputs, outputs)?)
            .map_err(|_| Error::new("attention returned too few arrays"))?;
        Ok(AttentionOutput { hidden, appended })
    }

    /// The convolution and the delta rule of a gated delta net over the tokens of each sequence of a batch.
    ///
    /// `qkv` is `[batch, seq, channels]`, `a` and `b` are `[batch, seq, value_heads]`. `state` is what the call
    /// before returned behind the outputs, `None` at the start. Returns the outputs `[batch, seq, values]`, the
    /// convolution's tail `[batch, taps - 1, channels]` and the memory
    /// `[batch, value_heads, value_dim, key_dim]`; state that nothing else holds is updated in place.
    pub fn gated_delta(
        self: &Arc<Self>,
        rule: &Arc<DeltaRule>,
        [qkv, a, b]: [&Array; 3],
        state: Option<[&Array; 2]>,
    ) -> Result<[Array; 3]> {
        let size = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let taps = rule.conv.len() / rule.channels().max(1);
        let batch = qkv.dim(0)?;
        let tail = vec![batch, size(taps) - 1, size(rule.channels())];
        let memory = vec![batch, size(rule.value_heads), size(rule.value_dim), size(rule.key_dim)];
        let [old_tail, old_memory] = match state {
            Some(state) => state.map(Array::clone),
            None => [Array::zeros(&tail, Dtype::F32)?, Array::zeros(&memory, Dtype::F32)?],
        };
        let outputs = vec![
            OutputSpec::new(with_last(qkv.shape(), rule.values(), false), Dtype::F32),
            OutputSpec::in_place(tail, Dtype::F32, 3),
            OutputSpec::in_place(memory, Dtype::F32, 4),
        ];
        let op = GatedDelta { ops: self.clone(), rule: rule.clone() };
        custom(op, &[qkv.clone(), a.clone(), b.clone(), old_tail, old_memory], outputs)?
            .try_into()
            .map_err(|_| Error::new("the delta rule returned too few arrays"))
    }

    /// `residual + output(norm(x) * silu(gate))`, where the norm is that of each head.
    pub fn gated_output(
        self: &Arc<Self>,
        x: &Array,
        gate: &Array,
        norm: &Arc<Norm>,
        output: &Arc<Matrix>,
        residual: &Array,
    ) -> Result<Array> {
        let op = GatedOutput { ops: self.clone(), norm: norm.clone(), output: output.clone() };
        let outputs = vec![OutputSpec::in_place(residual.shape(), Dtype::F32, 2)];
        one(custom(op, &[x.clone(), gate.clone(), residual.clone()], outputs)?)
    }

    /// [`Ops::attention`] with keys and values that another layer has appended behind the `offset` rows of the
    /// cache: as many as there are queries.
    pub fn attention_shared(
        self: &Arc<Self>,
        call: AttentionCall,
        queries: &Array,
        hidden: &Array,
        after: Vec<Array>,
    ) -> Result<Array> {
        let mut inputs = vec![queries.clone(), hidden.clone()];
        inputs.extend(after);
        let op = Attend { ops: self.clone(), call, appends: false };
        one(custom(op, &inputs, vec![OutputSpec::in_place(hidden.shape(), Dtype::F32, 1)])?)
    }

    /// Multiplies the rows of `x`, `sequence` of each sequence, with each matrix into the output beside it, biases
    /// added.
    fn multiply(
        &self,
        x: &[f32],
        sequence: usize,
        prepared: &mut PreparedInput,
        products: &mut [(&Matrix, &mut [f32])],
    ) -> Result<()> {
        // Neighbours of one kind share the prepared input and the dispatch to the threads.
        for group in products.chunk_by_mut(|a, b| a.0.kind() == b.0.kind()) {
            let Some((first, _)) = group.first() else { continue };
            let rows = (rows_of(x, first.columns())?, sequence);
            prepared.prepare_batch(&self.cpu, x, rows, self.precision, first.weights()?).map_err(error)?;
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
    experts: ExpertScratch,
    choices: Vec<(usize, usize)>,
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

/// Rows of each sequence in an array `[batch, seq, features]`.
fn sequence_rows(shape: &[i32]) -> usize {
    let rows = shape.len().checked_sub(2).and_then(|axis| shape.get(axis));
    rows.map_or(1, |&rows| rows.max(1) as usize)
}

fn rows_of(x: &[f32], columns: usize) -> Result<usize> {
    match columns {
        0 => Err(Error::new("matrix without columns")),
        _ if !x.len().is_multiple_of(columns) => {
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
    buffer: &'a mut Vec<f32>,
) -> Result<&'a [f32]> {
    let Some(norm) = norm else { return Ok(x) };
    let out = take(buffer, x.len());
    norm.run(&ops.cpu, x, out)?;
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
        let sequence = sequence_rows(x.shape());
        let x = x.as_slice::<f32>()?;
        SCRATCH.with_borrow_mut(|scratch| {
            let x = normalized(&self.ops, self.norm.as_deref(), x, &mut scratch.normalized)?;
            let mut products = self
                .matrices
                .iter()
                .zip(outputs)
                .map(|(matrix, out)| Ok((&**matrix, out.as_mut_slice::<f32>()?)))
                .collect::<Result<Vec<_>>>()?;
            self.ops.multiply(x, sequence, &mut scratch.prepared, &mut products)
        })
    }
}

struct Normalize {
    ops: Arc<Ops>,
    norm: Arc<Norm>,
}

impl CpuOp for Normalize {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let ([x], [out]) = (inputs, outputs) else { return Err(wrong_count()) };
        self.norm.run(&self.ops.cpu, x.as_slice()?, out.as_mut_slice()?)
    }
}

struct Mlp {
    ops: Arc<Ops>,
    call: MlpCall,
}

impl CpuOp for Mlp {
    fn run(&self, _: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        // The output starts as the input.
        let [x] = outputs else { return Err(wrong_count()) };
        let MlpCall { norm, inner, gated, output, activation, residual } = &self.call;
        let cpu = &self.ops.cpu;
        let width = inner.rows();
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { prepared, normalized: buffer, first, second, third, .. } = scratch;
            let sequence = sequence_rows(x.shape());
            let input = x.as_mut_slice::<f32>()?;
            let rows = rows_of(input, inner.columns())?;
            let input = normalized(&self.ops, norm.as_deref(), input, buffer)?;
            let (inner_product, activated) = (take(first, rows * width), take(third, rows * width));
            match gated {
                None => {
                    self.ops.multiply(input, sequence, prepared, &mut [(inner, &mut *inner_product)])?;
                    cpu::activate(cpu, *activation, inner_product, activated).map_err(error)?;
                }
                Some(gated) => {
                    let up = take(second, rows * width);
                    let mut products = [(&**inner, &mut *inner_product), (&**gated, &mut *up)];
                    self.ops.multiply(input, sequence, prepared, &mut products)?;
                    cpu::gated(cpu, *activation, inner_product, up, width, width, activated)
                        .map_err(error)?;
                }
            }
            add_product(&self.ops, (output, residual), activated, prepared, [buffer, first], x)
        })
    }
}

/// Adds the product of `matrix` with `x` to `out`, in the way that stands beside the matrix.
fn add_product(
    ops: &Ops,
    (matrix, residual): (&Matrix, &Residual),
    x: &[f32],
    prepared: &mut PreparedInput,
    [buffer, spare]: [&mut Vec<f32>; 2],
    out: &mut Output<'_>,
) -> Result<()> {
    let product = take(buffer, rows_of(x, matrix.columns())? * matrix.rows());
    ops.multiply(x, sequence_rows(out.shape()), prepared, &mut [(matrix, &mut *product)])?;
    let out = out.as_mut_slice::<f32>()?;
    match residual {
        Residual::Plain => out.iter_mut().zip(product).for_each(|(y, p)| *y += *p),
        Residual::Replaced => out.copy_from_slice(product),
        Residual::Scaled(factor) => out.iter_mut().zip(product).for_each(|(y, p)| *y += *p * factor),
        Residual::Norm(norm) => {
            let normalized = take(spare, product.len());
            norm.run(&ops.cpu, product, normalized)?;
            out.iter_mut().zip(normalized).for_each(|(y, p)| *y += *p);
        }
    }
    Ok(())
}

struct Attend {
    ops: Arc<Ops>,
    call: AttentionCall,
    /// Whether keys and values come with the queries.
    appends: bool,
}

impl CpuOp for Attend {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let call = &self.call;
        let [q_norm, k_norm, v_norm] = &call.norms;
        let ([q, rest @ ..], [hidden, appended @ ..]) = (inputs, outputs) else { return Err(wrong_count()) };
        let queries = q.as_slice::<f32>()?;
        let (q_width, kv_width) = (call.heads * call.head_dim, call.kv_heads * call.head_dim);
        let rows = rows_of(queries, if call.output_gate { 2 * q_width } else { q_width })?;
        // Of each sequence.
        let new = rows / call.sequences.len().max(1);
        if new == 0 || rows != new * call.sequences.len() {
            return Err(Error::new(format!(
                "{rows} queries are not those of {} caches",
                call.sequences.len()
            )));
        }

        SCRATCH.with_borrow_mut(|scratch| {
            let gated = if call.output_gate { queries.len() } else { 0 };
            let (own, gates) = take(&mut scratch.normalized, gated).split_at_mut(gated / 2);
            let queries = match call.output_gate {
                false => queries,
                true => {
                    for (i, both) in queries.chunks_exact(2 * call.head_dim).enumerate() {
                        let head = i * call.head_dim..(i + 1) * call.head_dim;
                        own[head.clone()].copy_from_slice(&both[..call.head_dim]);
                        gates[head].copy_from_slice(&both[call.head_dim..]);
                    }
                    &*own
                }
            };
            let rotated_queries = take(&mut scratch.first, queries.len());
            self.normalize_and_rotate(q_norm.as_deref(), queries, call.heads, rotated_queries)?;
            if self.appends {
                let ([k, v, ..], [appended]) = (rest, appended) else { return Err(wrong_count()) };
                let (keys, values) = (k.as_slice::<f32>()?, v.as_slice::<f32>()?);
                if keys.len() != rows * kv_width || values.len() != keys.len() {
                    return Err(Error::new("keys and values do not have the rows of the queries"));
                }
                let rotated_keys = take(&mut scratch.second, keys.len());
                self.normalize_and_rotate(k_norm.as_deref(), keys, call.kv_heads, rotated_keys)?;
                let values = normalized(&self.ops, v_norm.as_deref(), values, &mut scratch.third)?;
                let parts =
                    rotated_keys.chunks_exact(new * kv_width).zip(values.chunks_exact(new * kv_width));
                for (sequence, (keys, values)) in call.sequences.iter().zip(parts) {
                    sequence.append(keys, values, call)?;
                }
                appended.as_mut_slice::<u32>()?.fill(0);
            }

            let attended = take(&mut scratch.third, queries.len());
            let parts =
                rotated_queries.chunks_exact(new * q_width).zip(attended.chunks_exact_mut(new * q_width));
            for (sequence, (queries, out)) in call.sequences.iter().zip(parts) {
                match &*sequence.cache.lock()? {
                    Rows::F16 { keys, values } => self.attend(sequence, queries, [keys, values], out)?,
                    Rows::F32 { keys, values } => self.attend(sequence, queries, [keys, values], out)?,
                }
            }
            let attended = match call.output_gate {
                false => attended,
                true => {
                    let out = take(&mut scratch.first, attended.len());
                    cpu::gated(&self.ops.cpu, Activation::Sigmoid, gates, attended, q_width, q_width, out)
                        .map_err(error)?;
                    out
                }
            };
            let buffers = [&mut scratch.normalized, &mut scratch.second];
            let output = (&*call.output, &call.residual);
            add_product(&self.ops, output, attended, &mut scratch.prepared, buffers, hidden)
        })
    }
}

fn wrong_type() -> Error {
    Error::new("the cache to copy from has another type")
}

/// A type that keys and values are kept in.
trait KvElement: Element {
    const FLOAT: FloatType;
    fn round(values: &[f32], out: &mut [Self]);
}
impl KvElement for f16 {
    const FLOAT: FloatType = FloatType::F16;
    fn round(values: &[f32], out: &mut [Self]) {
        let mut clamped = [0.0; 64];
        for (values, out) in values.chunks(clamped.len()).zip(out.chunks_mut(clamped.len())) {
            let clamped = &mut clamped[..values.len()];
            for (clamped, &value) in clamped.iter_mut().zip(values) {
                // What is finite stays finite; an infinity is a fault that must show in the logits.
                let largest = if value.is_finite() { Self::MAX.to_f32() } else { f32::INFINITY };
                *clamped = value.clamp(-largest, largest);
            }
            out.convert_from_f32_slice(clamped);
        }
    }
}
impl KvElement for f32 {
    const FLOAT: FloatType = FloatType::F32;
    fn round(values: &[f32], out: &mut [Self]) {
        out.copy_from_slice(values);
    }
}

impl Attend {
    /// Queries or keys of all sequences as they are compared.
    fn normalize_and_rotate(
        &self,
        norm: Option<&Norm>,
        x: &[f32],
        heads: usize,
        out: &mut [f32],
    ) -> Result<()> {
        match norm {
            Some(norm) => norm.run(&self.ops.cpu, x, out)?,
            None => out.copy_from_slice(x),
        }
        let AttentionCall { sequences, head_dim, traditional, .. } = &self.call;
        let strides = (*head_dim, heads * head_dim);
        for (sequence, out) in sequences.iter().zip(out.chunks_exact_mut(x.len() / sequences.len())) {
            let Some(rotations) = &sequence.rotations else { continue };
            cpu::rope(&self.ops.cpu, out, heads, *head_dim, strides, rotations, *traditional)
                .map_err(error)?;
        }
        Ok(())
    }

    /// The attention of the new rows of one sequence.
    fn attend<T: KvElement>(
        &self,
        sequence: &KvSequence,
        queries: &[f32],
        [keys, values]: [&[T]; 2],
        out: &mut [f32],
    ) -> Result<()> {
        let call = &self.call;
        let capacity = sequence.cache.capacity;
        let width = call.heads * call.head_dim;
        let rows = rows_of(queries, width)?;
        let length = sequence.offset + rows;
        check_capacity(keys, length, capacity, call)?;
        let cached = |rows| KeyValues::Dense {
            float: T::FLOAT,
            data: bytemuck::cast_slice(rows),
            head_stride: capacity * call.head_dim,
            key_stride: call.head_dim,
        };
        let args = Attention {
            queries,
            query_strides: (call.head_dim, width),
            keys: cached(keys),
            values: cached(values),
            query_heads: call.heads,
            key_heads: call.kv_heads,
            query_len: rows,
            key_len: length,
            head_dim: call.head_dim,
            value_dim: call.head_dim,
            scale: call.scale,
            softcap: call.softcap,
            mask: call.window.map_or(Mask::Causal, Mask::Window),
        };
        cpu::attention(&self.ops.cpu, &args, out, (call.head_dim, width)).map_err(error)
    }
}

/// Checks that the first `length` rows lie in keys (or values) of `capacity` rows.
fn check_capacity<T>(keys: &[T], length: usize, capacity: usize, call: &AttentionCall) -> Result<()> {
    if length > capacity || keys.len() != capacity * call.kv_heads * call.head_dim {
        return Err(Error::new(format!("{length} rows do not fit a cache of {capacity}")));
    }
    Ok(())
}

impl KvSequence {
    /// Writes new rows `[seq, kv_heads, head_dim]` behind the others.
    fn append(&self, new_keys: &[f32], new_values: &[f32], call: &AttentionCall) -> Result<()> {
        let source = match &self.copy_from {
            Some(source) => Some((source.lock()?, source.capacity)),
            None => None,
        };
        match &mut *self.cache.lock()? {
            Rows::F16 { keys, values } => {
                if let Some((source, capacity)) = &source {
                    let Rows::F16 { keys: old_keys, values: old_values } = &**source else {
                        return Err(wrong_type());
                    };
                    self.copy_rows(old_keys, keys, *capacity, call)?;
                    self.copy_rows(old_values, values, *capacity, call)?;
                }
                self.append_rows(new_keys, keys, call)?;
                self.append_rows(new_values, values, call)
            }
            Rows::F32 { keys, values } => {
                if let Some((source, capacity)) = &source {
                    let Rows::F32 { keys: old_keys, values: old_values } = &**source else {
                        return Err(wrong_type());
                    };
                    self.copy_rows(old_keys, keys, *capacity, call)?;
                    self.copy_rows(old_values, values, *capacity, call)?;
                }
                self.append_rows(new_keys, keys, call)?;
                self.append_rows(new_values, values, call)
            }
        }
    }

    /// Copies the rows before the new ones from a cache of another capacity.
    fn copy_rows<T: KvElement>(
        &self,
        old: &[T],
        new: &mut [T],
        old_capacity: usize,
        call: &AttentionCall,
    ) -> Result<()> {
        let (old_head, new_head) = (old_capacity * call.head_dim, self.cache.capacity * call.head_dim);
        let used = self.offset * call.head_dim;
        if used > old_head.min(new_head) || old_head == 0 {
            return Err(Error::new("the cache has fewer rows than the sequence"));
        }
        for (old, new) in old.chunks_exact(old_head).zip(new.chunks_exact_mut(new_head)) {
            new[..used].copy_from_slice(&old[..used]);
        }
        Ok(())
    }

    /// Writes `[seq, kv_heads, head_dim]` behind the used rows of `[kv_heads, capacity, head_dim]`.
    fn append_rows<T: KvElement>(&self, rows: &[f32], cache: &mut [T], call: &AttentionCall) -> Result<()> {
        let (dim, heads, capacity) = (call.head_dim, call.kv_heads, self.cache.capacity);
        check_capacity(cache, self.offset + rows.len() / (heads * dim), capacity, call)?;
        for (i, row) in rows.chunks_exact(heads * dim).enumerate() {
            for (head, values) in row.chunks_exact(dim).enumerate() {
                let at = (head * capacity + self.offset + i) * dim;
                T::round(values, &mut cache[at..at + dim]);
            }
        }
        Ok(())
    }
}

/// Added to sums of squares of queries and keys.
const DELTA_EPS: f32 = 1e-6;

struct GatedDelta {
    ops: Arc<Ops>,
    rule: Arc<DeltaRule>,
}

impl CpuOp for GatedDelta {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let ([qkv, a, b], [out, tail, memory]) = (inputs, outputs) else { return Err(wrong_count()) };
        let (qkv, a, b) = (qkv.as_slice::<f32>()?, a.as_slice::<f32>()?, b.as_slice::<f32>()?);
        let DeltaRule { key_heads, value_heads, key_dim, value_dim, conv, a_log, dt_bias } = &*self.rule;
        let (keys, values, channels) = (self.rule.keys(), self.rule.values(), self.rule.channels());
        let cpu = &self.ops.cpu;
        let (tail, memory) = (tail.as_mut_slice::<f32>()?, memory.as_mut_slice::<f32>()?);
        let out = out.as_mut_slice::<f32>()?;
        let sequences = rows_of(memory, value_heads * value_dim * key_dim)?;
        let len = rows_of(qkv, channels)? / sequences.max(1);
        let shape = DeltaShape {
            len,
            key_heads: *key_heads,
            value_heads: *value_heads,
            key_dim: *key_dim,
            value_dim: *value_dim,
        };
        SCRATCH.with_borrow_mut(|scratch| {
            for i in 0..sequences {
                let part = |of: usize| i * (of / sequences)..(i + 1) * (of / sequences);
                let (qkv, a, b) = (&qkv[part(qkv.len())], &a[part(a.len())], &b[part(b.len())]);
                let (tail_part, memory_part, out_part) =
                    (part(tail.len()), part(memory.len()), part(out.len()));
                let convolved = take(&mut scratch.first, qkv.len());
                cpu::causal_conv_silu(cpu, qkv, channels, conv, &mut tail[tail_part], convolved)
                    .map_err(error)?;

                // Queries, keys and values apart, and the first two with a length of 1 each.
                let (apart, v) = take(&mut scratch.second, qkv.len()).split_at_mut(2 * len * keys);
                let (q, k) = apart.split_at_mut(len * keys);
                for (i, row) in convolved.chunks_exact(channels).enumerate() {
                    q[i * keys..(i + 1) * keys].copy_from_slice(&row[..keys]);
                    k[i * keys..(i + 1) * keys].copy_from_slice(&row[keys..2 * keys]);
                    v[i * values..(i + 1) * values].copy_from_slice(&row[2 * keys..]);
                }
                let normalized = take(&mut scratch.third, 2 * len * keys);
                let scale = (*key_dim as f32).sqrt().recip();
                let eps = DELTA_EPS * scale * scale;
                cpu::rms_norm(cpu, apart, *key_dim, None, eps, normalized).map_err(error)?;
                let (q, k) = normalized.split_at_mut(len * keys);
                q.iter_mut().for_each(|x| *x *= scale * scale);
                k.iter_mut().for_each(|x| *x *= scale);

                let (decay, beta) = take(&mut scratch.normalized, 2 * a.len()).split_at_mut(a.len());
                cpu::delta_gates(a, b, a_log, dt_bias, decay, beta).map_err(error)?;
                let (memory, out) = (&mut memory[memory_part], &mut out[out_part]);
                cpu::gated_delta(cpu, shape, q, k, v, decay, beta, memory, out).map_err(error)?;
            }
            Ok(())
        })
    }
}

struct GatedOutput {
    ops: Arc<Ops>,
    norm: Arc<Norm>,
    output: Arc<Matrix>,
}

impl CpuOp for GatedOutput {
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()> {
        let ([x, gate], [out]) = (inputs, outputs) else { return Err(wrong_count()) };
        let (x, gate) = (x.as_slice::<f32>()?, gate.as_slice::<f32>()?);
        let (cpu, width) = (&self.ops.cpu, self.output.columns());
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { prepared, normalized: buffer, first, second, third, .. } = scratch;
            let normalized = take(first, x.len());
            self.norm.run(cpu, x, normalized)?;
            let inner = take(second, x.len());
            cpu::gated(cpu, Activation::Silu, gate, normalized, width, width, inner).map_err(error)?;
            add_product(&self.ops, (&self.output, &Residual::Plain), inner, prepared, [buffer, third], out)
        })
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

fn one(mut arrays: Vec<Array>) -> Result<Array> {
    arrays.pop().ok_or_else(|| Error::new("operation returned no array"))
}

fn wrong_count() -> Error {
    Error::new("wrong number of inputs or outputs")
}

fn error(e: KernelError) -> Error {
    Error::new(e.to_string())
}
