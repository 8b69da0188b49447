//! The gated delta net of linear-attention layers (Yang et al., "Gated Delta Networks"), as in
//! `mlx_lm.models.qwen3_5`.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;

use russet_kernels::gpu::{CausalConvSilu, GatedDelta};
use russet_kernels::ops::{self, Ops};
use russet_mlx::random::{self, KeySequence};
use russet_mlx::{Array, Backend, Compiled, Device, DeviceInfo, Dtype, compile, concatenate, fast, stack};

use super::{Activation, Linear, Loader, Norm, NormKind, PlainActivation, project};
use crate::cache::{LayerCache, Recurrence, RecurrentInputs, RecurrentState};
use crate::{Error, Result};

/// Head counts and widths of a gated delta net.
#[derive(Clone, Copy, Debug)]
pub struct DeltaSizes {
    /// Width of the hidden states.
    pub hidden: i32,
    /// Heads of queries and keys.
    pub key_heads: i32,
    /// Heads of values, a multiple of `key_heads`.
    pub value_heads: i32,
    /// Width of a query or key.
    pub key_dim: i32,
    /// Width of a value.
    pub value_dim: i32,
    /// Rows that the convolution sees, at least 2.
    pub taps: i32,
}

impl DeltaSizes {
    /// Width of all keys of a token.
    fn keys(&self) -> i32 {
        self.key_heads * self.key_dim
    }

    /// Width of all values of a token.
    fn values(&self) -> i32 {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys and values.
    fn channels(&self) -> i32 {
        2 * self.keys() + self.values()
    }
}

/// A gated delta net.
pub struct GatedDeltaNet {
    in_proj_qkv: Linear,
    in_proj_z: Linear,
    in_proj_b: Linear,
    in_proj_a: Linear,
    recurrence: Rc<dyn Recurrence>,
    norm: Norm,
    functions: Rc<DeltaFunctions>,
    out_proj: Linear,
    value_dim: i32,
}

impl GatedDeltaNet {
    /// Takes the tensors under `path`.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(
        loader: &mut Loader<'_>,
        path: &str,
        sizes: DeltaSizes,
        norm_eps: f64,
        functions: &Rc<DeltaFunctions>,
    ) -> Result<Self> {
        let mut linear = |name: &str, inputs, outputs| {
            Linear::load(loader, &format!("{path}.{name}"), inputs, outputs, false)
        };
        let DeltaSizes { hidden, value_heads, value_dim, .. } = sizes;
        Ok(Self {
            in_proj_qkv: linear("in_proj_qkv", hidden, sizes.channels())?,
            in_proj_z: linear("in_proj_z", hidden, sizes.values())?,
            in_proj_b: linear("in_proj_b", hidden, value_heads)?,
            in_proj_a: linear("in_proj_a", hidden, value_heads)?,
            out_proj: linear("out_proj", sizes.values(), hidden)?,
            recurrence: DeltaRule::load(loader, path, sizes, functions)?,
            norm: Norm::load(loader, &format!("{path}.norm"), NormKind::Rms, value_dim, norm_eps)?,
            functions: functions.clone(),
            value_dim,
        })
    }

    /// `x + net(norm(x))`.
    ///
    /// # Errors
    /// When the cache is not of the kind that computes here.
    pub fn forward_add(&self, norm: &Norm, x: &Array, cache: &mut LayerCache) -> Result<Array> {
        let LayerCache::Recurrent(cache) = cache else {
            return Err(Error::Input("the cache was made for another model".into()));
        };
        let linears = [&self.in_proj_qkv, &self.in_proj_z, &self.in_proj_b, &self.in_proj_a];
        let [qkv, z, b, a] = project(Some(norm), linears, x)?;
        let y = cache.advance(&self.recurrence, RecurrentInputs { qkv, a, b })?;
        if let Some((ops, output)) = self.out_proj.kernel() {
            return Ok(ops.gated_output(&y, &z, self.norm.kernel(), output, x)?);
        }
        let (batch, length) = (x.dim(0)?, x.dim(1)?);
        let heads = |x: &Array| x.reshape([batch, length, -1, self.value_dim]);
        let (y, z) = (heads(&y)?, heads(&z)?);
        let y = self.functions.gate.call(&[y.clone(), z, self.norm.forward(&y)?])?.swap_remove(0);
        Ok(x.add(&self.out_proj.forward(&y.reshape([batch, length, -1])?)?)?)
    }
}

/// What the gated delta nets of a model share: functions that the reference compiles once for all.
pub struct DeltaFunctions {
    silu: PlainActivation,
    decay: Pure,
    step: Pure,
    gate: Pure,
    /// The whole convolution as one kernel, where that has the bits of its operations.
    convolution: OnceCell<Option<CausalConvSilu>>,
    /// All steps as one kernel, which the reference has on Metal.
    steps: Option<GatedDelta>,
}

impl DeltaFunctions {
    /// Prepares them for the default device.
    pub fn new() -> Result<Self> {
        let steps = match gpu()? {
            Some(Backend::Metal) => Some(GatedDelta::new(Backend::Metal)?),
            _ => None,
        };
        Ok(Self {
            convolution: OnceCell::new(),
            steps,
            silu: PlainActivation::new(Activation::Silu)?,
            decay: Pure::new(decay, true)?,
            step: Pure::new(step, false)?,
            gate: Pure::new(precise_swiglu, true)?,
        })
    }
}

/// The convolution and the delta rule with MLX's operations.
struct DeltaRule {
    sizes: DeltaSizes,
    /// `[channels, taps, 1]`
    conv: Array,
    a_log: Array,
    dt_bias: Array,
    functions: Rc<DeltaFunctions>,
}

/// The same with the CPU kernels.
struct KernelDeltaRule {
    ops: Arc<Ops>,
    rule: Arc<ops::DeltaRule>,
}

impl DeltaRule {
    fn load(
        loader: &mut Loader<'_>,
        path: &str,
        sizes: DeltaSizes,
        functions: &Rc<DeltaFunctions>,
    ) -> Result<Rc<dyn Recurrence>> {
        let mut take = |name: &str, shape: &[i32]| {
            Ok::<_, Error>(loader.weights.take(&format!("{path}.{name}"), shape)?.array)
        };
        let conv = take("conv1d.weight", &[sizes.channels(), sizes.taps, 1])?;
        let a_log = take("A_log", &[sizes.value_heads])?;
        let dt_bias = take("dt_bias", &[sizes.value_heads])?;
        if let Some(ops) = loader.numerics.kernels() {
            let floats = |x: &Array| x.astype(Dtype::F32)?.to_vec::<f32>();
            let rule = ops::DeltaRule {
                key_heads: sizes.key_heads as usize,
                value_heads: sizes.value_heads as usize,
                key_dim: sizes.key_dim as usize,
                value_dim: sizes.value_dim as usize,
                conv: floats(&conv)?,
                a_log: floats(&a_log)?,
                dt_bias: floats(&dt_bias)?,
            };
            return Ok(Rc::new(KernelDeltaRule { ops: ops.clone(), rule: Arc::new(rule) }));
        }
        let rule = Self { sizes, conv, a_log, dt_bias, functions: functions.clone() };
        if functions.convolution.get().is_none() {
            let kernel = rule.proven_convolution()?;
            functions.convolution.get_or_init(|| kernel);
        }
        Ok(Rc::new(rule))
    }

    /// The convolution's kernel, if there is a GPU on which it has the bits of its operations.
    fn proven_convolution(&self) -> Result<Option<CausalConvSilu>> {
        let Some(backend) = gpu()? else { return Ok(None) };
        let kernel = CausalConvSilu::new(backend)?;
        let mut keys = KeySequence::new(0)?;
        let mut normal = |rows| {
            let shape = [1, rows, self.sizes.channels()];
            random::normal(shape, self.conv.dtype(), &keys.next_key()?)
        };
        for rows in [1, 2, 3, 4, 7, 64, 2048] {
            let (x, tail) = (normal(rows)?, normal(self.sizes.taps - 1)?);
            if !CausalConvSilu::fits(&x, &tail, &self.conv) {
                return Ok(None);
            }
            let [y, new_tail] = kernel.call(&x, &tail, &self.conv)?;
            let (expected, expected_tail) = self.convolve_by_operations(&x, tail)?;
            if y.to_bytes()? != expected.to_bytes()? || new_tail.to_bytes()? != expected_tail.to_bytes()? {
                return Ok(None);
            }
        }
        Ok(Some(kernel))
    }

    /// The convolution of rows that follow `tail`, and their own tail.
    fn convolve(&self, qkv: &Array, tail: Option<&Array>) -> Result<(Array, Array)> {
        let tail = match tail {
            Some(tail) => tail.clone(),
            None => Array::zeros([qkv.dim(0)?, self.sizes.taps - 1, self.sizes.channels()], qkv.dtype())?,
        };
        match self.functions.convolution.get() {
            Some(Some(kernel)) if CausalConvSilu::fits(qkv, &tail, &self.conv) => {
                let [y, tail] = kernel.call(qkv, &tail, &self.conv)?;
                Ok((y, tail))
            }
            _ => self.convolve_by_operations(qkv, tail),
        }
    }

    fn convolve_by_operations(&self, qkv: &Array, tail: Array) -> Result<(Array, Array)> {
        let rows = concatenate(&[tail, qkv.clone()], 1)?;
        let tail = rows.slice_axis(1, 1 - self.sizes.taps, i32::MAX)?.contiguous()?;
        let convolved = rows.conv1d(&self.conv, 1, 0, 1, self.sizes.channels())?;
        Ok((self.functions.silu.forward(&convolved)?, tail))
    }
}

impl DeltaRule {
    /// The delta rule token by token.
    fn steps_by_operations(
        &self,
        [q, k, v, decay, beta]: [&Array; 5],
        mut memory: Array,
    ) -> Result<[Array; 2]> {
        let repeats = self.sizes.value_heads / self.sizes.key_heads;
        let repeat = |x: &Array| if repeats > 1 { x.repeat(repeats, -2) } else { Ok(x.clone()) };
        let (q, k) = (repeat(q)?, repeat(k)?);
        let length = v.dim(1)?;
        let mut outputs = Vec::with_capacity(length as usize);
        for t in 0..length {
            let token = |x: &Array| x.slice_axis(1, t, t + 1)?.squeeze([1]);
            let inputs = [token(&q)?, token(&k)?, token(v)?, token(decay)?, token(beta)?, memory];
            let [y, next] = <[Array; 2]>::try_from(self.functions.step.call(&inputs)?)
                .map_err(|_| russet_mlx::Error::new("the delta rule returned another number of arrays"))?;
            outputs.push(y);
            memory = next;
        }
        Ok([stack(&outputs, 1)?, memory])
    }
}

impl Recurrence for DeltaRule {
    fn advance(
        &self,
        inputs: &RecurrentInputs,
        state: Option<&RecurrentState>,
    ) -> Result<(Array, RecurrentState)> {
        let DeltaSizes { key_heads, value_heads, key_dim, value_dim, .. } = self.sizes;
        let RecurrentInputs { qkv, a, b } = inputs;
        let (batch, length) = (qkv.dim(0)?, qkv.dim(1)?);
        let (convolved, tail) = self.convolve(qkv, state.map(|s| &s.tail))?;

        let keys = self.sizes.keys();
        let [q, k, v] = <[Array; 3]>::try_from(convolved.split([keys, 2 * keys], -1)?)
            .map_err(|_| russet_mlx::Error::new("split returned another number of arrays"))?;
        let q = q.reshape([batch, length, key_heads, key_dim])?;
        let k = k.reshape([batch, length, key_heads, key_dim])?;
        let v = v.reshape([batch, length, value_heads, value_dim])?;
        // The reference's epsilon is for sums of squares, this norm's for their mean.
        let scale = f64::from(key_dim).powf(-0.5);
        let eps = (NORM_EPS * scale.powi(2)) as f32;
        let q = fast::rms_norm(&q, None, eps)?.multiply(scale.powi(2))?;
        let k = fast::rms_norm(&k, None, eps)?.multiply(scale)?;

        let beta = b.sigmoid()?;
        let decay =
            self.functions.decay.call(&[self.a_log.clone(), a.clone(), self.dt_bias.clone()])?.swap_remove(0);
        let memory = match state {
            Some(state) => state.memory.clone(),
            None => Array::zeros([batch, value_heads, value_dim, key_dim], Dtype::F32)?,
        };
        let [y, memory] = match &self.functions.steps {
            Some(kernel) if GatedDelta::supports(key_dim) => {
                kernel.call([&q, &k, &v, &decay, &beta], &memory)?
            }
            _ => self.steps_by_operations([&q, &k, &v, &decay, &beta], memory)?,
        };
        Ok((y.reshape([batch, length, -1])?, RecurrentState { tail, memory }))
    }
}

impl Recurrence for KernelDeltaRule {
    fn advance(
        &self,
        inputs: &RecurrentInputs,
        state: Option<&RecurrentState>,
    ) -> Result<(Array, RecurrentState)> {
        let RecurrentInputs { qkv, a, b } = inputs;
        let state = state.map(|s| [&s.tail, &s.memory]);
        let [y, tail, memory] = self.ops.gated_delta(&self.rule, [qkv, a, b], state)?;
        Ok((y, RecurrentState { tail, memory }))
    }
}

/// Added to sums of squares of queries and keys, whatever the model's epsilon (`GatedDeltaNet.__call__`).
const NORM_EPS: f64 = 1e-6;

/// The kind of the GPU that computes, if one does.
fn gpu() -> Result<Option<Backend>> {
    Ok(match Device::default_device() {
        Device::Cpu => None,
        Device::Gpu if DeviceInfo::query()?.metal => Some(Backend::Metal),
        Device::Gpu => Some(Backend::Cuda),
    })
}

/// A function that the reference compiles. On a GPU it is compiled as well, so that the same fused kernels run; on
/// the CPU compiling would call a C++ compiler at run time, and the bits are the same without.
struct Pure {
    function: fn(&[Array]) -> russet_mlx::Result<Vec<Array>>,
    compiled: Option<Compiled>,
}

impl Pure {
    fn new(function: fn(&[Array]) -> russet_mlx::Result<Vec<Array>>, shapeless: bool) -> Result<Self> {
        let compiled = match Device::default_device() {
            Device::Cpu => None,
            Device::Gpu => Some(compile(function, shapeless)?),
        };
        Ok(Self { function, compiled })
    }

    fn call(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        Ok(match &self.compiled {
            None => (self.function)(inputs)?,
            Some(compiled) => compiled.call(inputs)?,
        })
    }
}

/// `exp(-exp(a_log) * softplus(a + dt_bias))` in `f32` (`gated_delta.compute_g`).
fn decay(inputs: &[Array]) -> russet_mlx::Result<Vec<Array>> {
    let [a_log, a, dt_bias] = inputs else { return Err(russet_mlx::Error::new("decay takes 3 arrays")) };
    let rate = a_log.astype(Dtype::F32)?.exp()?.negative()?;
    let softplus = a.add(dt_bias)?.logaddexp(0)?;
    Ok(vec![rate.multiply(&softplus)?.exp()?])
}

/// The delta rule for one token (`gated_delta._gated_delta_step_ops`): `q`, `k` `[batch, heads, key_dim]`, `v`
/// `[batch, heads, value_dim]`, `decay`, `beta` `[batch, heads]`, `memory` → the output like `v`, and the memory.
fn step(inputs: &[Array]) -> russet_mlx::Result<Vec<Array>> {
    let [q, k, v, decay, beta, memory] = inputs else {
        return Err(russet_mlx::Error::new("the delta rule takes 6 arrays"));
    };
    let (q_row, k_row) = (q.expand_dims([-2])?, k.expand_dims([-2])?);
    let memory = memory.multiply(&decay.expand_dims([-2, -1])?)?;
    let remembered = memory.multiply(&k_row)?.sum([-1], false)?;
    let delta = v.subtract(&remembered)?.multiply(&beta.expand_dims([-1])?)?;
    let memory = memory.add(&k_row.multiply(&delta.expand_dims([-1])?)?)?;
    let y = memory.multiply(&q_row)?.sum([-1], false)?;
    Ok(vec![y.astype(q.dtype())?, memory])
}

/// `silu(gate) * x` in `f32`, in the type of `like` (`mlx_lm.models.activations.precise_swiglu`).
fn precise_swiglu(inputs: &[Array]) -> russet_mlx::Result<Vec<Array>> {
    let [like, gate, x] = inputs else { return Err(russet_mlx::Error::new("swiglu takes 3 arrays")) };
    let gate = gate.astype(Dtype::F32)?;
    let gate = gate.multiply(&gate.sigmoid()?)?;
    Ok(vec![gate.multiply(&x.astype(Dtype::F32)?)?.astype(like.dtype())?])
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use russet_kernels::cpu::Precision;
    use russet_mlx::eval;
    use russet_mlx::random::{self, KeySequence};

    use super::*;
    use crate::cache::{Cache, RecurrentCache};

    const SIZES: DeltaSizes =
        DeltaSizes { hidden: 1, key_heads: 2, value_heads: 4, key_dim: 24, value_dim: 12, taps: 4 };

    fn normal(keys: &mut KeySequence, shape: &[i32], dtype: Dtype) -> Array {
        random::normal(shape, Dtype::F32, &keys.next_key().unwrap()).unwrap().astype(dtype).unwrap()
    }

    /// With MLX in two types, and with the CPU kernels.
    pub(crate) fn recurrences() -> Vec<(Rc<dyn Recurrence>, Dtype)> {
        let mut keys = KeySequence::new(1).unwrap();
        let functions = Rc::new(DeltaFunctions::new().unwrap());
        let mut mlx = |dtype| {
            let rule = DeltaRule {
                sizes: SIZES,
                conv: normal(&mut keys, &[SIZES.channels(), SIZES.taps, 1], dtype),
                a_log: normal(&mut keys, &[SIZES.value_heads], Dtype::F32),
                dt_bias: normal(&mut keys, &[SIZES.value_heads], dtype),
                functions: functions.clone(),
            };
            (Rc::new(rule) as Rc<dyn Recurrence>, dtype)
        };
        let mut all = vec![mlx(Dtype::Bf16), mlx(Dtype::F32)];
        let floats =
            |keys: &mut KeySequence, count: i32| normal(keys, &[count], Dtype::F32).to_vec().unwrap();
        let rule = ops::DeltaRule {
            key_heads: SIZES.key_heads as usize,
            value_heads: SIZES.value_heads as usize,
            key_dim: SIZES.key_dim as usize,
            value_dim: SIZES.value_dim as usize,
            conv: floats(&mut keys, SIZES.channels() * SIZES.taps),
            a_log: floats(&mut keys, SIZES.value_heads),
            dt_bias: floats(&mut keys, SIZES.value_heads),
        };
        let ops = Ops::new(Some(2), Precision::default());
        all.push((Rc::new(KernelDeltaRule { ops, rule: Arc::new(rule) }), Dtype::F32));
        all
    }

    /// Channels before the convolution, and heads of values.
    pub(crate) fn widths() -> [i32; 2] {
        [SIZES.channels(), SIZES.value_heads]
    }

    fn inputs(batch: i32, rows: i32, dtype: Dtype) -> RecurrentInputs {
        let mut keys = KeySequence::new(rows as u64).unwrap();
        let mut normal = |width| normal(&mut keys, &[batch, rows, width], dtype);
        RecurrentInputs {
            qkv: normal(SIZES.channels()),
            a: normal(SIZES.value_heads),
            b: normal(SIZES.value_heads),
        }
    }

    /// Rows `start..stop`.
    fn rows(inputs: &RecurrentInputs, start: i32, stop: i32) -> RecurrentInputs {
        let part = |x: &Array| x.slice_axis(1, start, stop).unwrap().contiguous().unwrap();
        RecurrentInputs { qkv: part(&inputs.qkv), a: part(&inputs.a), b: part(&inputs.b) }
    }

    fn empty() -> Cache {
        Cache::new(vec![LayerCache::Recurrent(RecurrentCache::new())])
    }

    fn advance(cache: &mut Cache, recurrence: &Rc<dyn Recurrence>, inputs: RecurrentInputs) -> Result<Array> {
        match &mut cache.layers[0] {
            LayerCache::Recurrent(layer) => layer.advance(recurrence, inputs),
            _ => unreachable!(),
        }
    }

    fn bits(arrays: &[Array]) -> Vec<Vec<u8>> {
        arrays.iter().map(|a| a.to_bytes().unwrap()).collect()
    }

    #[derive(Clone, Debug)]
    enum Step {
        Append(i32),
        /// Tokens of a round, and how many of them stay.
        Round(i32, i32),
        /// A round that is never ended.
        Abandon(i32),
        Commit(i32),
        Snapshot,
        Restore,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1..6).prop_map(Step::Append),
            (1..6).prop_flat_map(|n| (Just(n), 0..=n)).prop_map(|(n, keep)| Step::Round(n, keep)),
            (1..4).prop_map(Step::Abandon),
            (1..6).prop_map(Step::Commit),
            Just(Step::Snapshot),
            Just(Step::Restore),
        ];
        prop::collection::vec(step, 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

        #[test]
        fn any_sequence_of_steps_leaves_the_bits_of_a_fresh_run(steps in steps()) {
            for (recurrence, dtype) in recurrences() {
                let source = inputs(1, 64, dtype);
                // Rows of `source` that the cache has consumed, and the next that was not tried yet.
                let (mut cache, mut kept, mut next) = (empty(), Vec::new(), 0);
                let mut snapshot = (cache.clone(), kept.clone());
                let mut take = |count: i32| {
                    let first = next;
                    next += count;
                    (rows(&source, first, next), (first..next).collect::<Vec<_>>())
                };
                for step in &steps {
                    match *step {
                        Step::Append(count) => {
                            let (inputs, new) = take(count);
                            advance(&mut cache, &recurrence, inputs).unwrap();
                            kept.extend(new);
                        }
                        Step::Round(count, keep) => {
                            let (inputs, new) = take(count);
                            cache.begin_round();
                            advance(&mut cache, &recurrence, inputs).unwrap();
                            cache.rollback(keep).unwrap();
                            kept.extend(&new[..keep as usize]);
                        }
                        Step::Abandon(count) => {
                            let before = cache.clone();
                            cache.begin_round();
                            advance(&mut cache, &recurrence, take(count).0).unwrap();
                            cache = before;
                        }
                        Step::Commit(count) => {
                            let (inputs, new) = take(count);
                            cache.begin_round();
                            advance(&mut cache, &recurrence, inputs).unwrap();
                            cache.commit().unwrap();
                            kept.extend(new);
                        }
                        Step::Snapshot => snapshot = (cache.clone(), kept.clone()),
                        Step::Restore => (cache, kept) = snapshot.clone(),
                    }
                    prop_assert_eq!(cache.offset() as usize, kept.len());
                }
                let mut fresh = empty();
                for &row in &kept {
                    advance(&mut fresh, &recurrence, rows(&source, row, row + 1)).unwrap();
                }
                prop_assert_eq!(bits(&cache.arrays()), bits(&fresh.arrays()), "{}", dtype);
            }
        }
    }

    #[test]
    fn outputs_do_not_depend_on_how_tokens_are_cut() {
        for (recurrence, dtype) in recurrences() {
            let source = inputs(1, 9, dtype);
            let whole = advance(&mut empty(), &recurrence, source.clone()).unwrap();
            let mut cache = empty();
            let parts = [(0, 1), (1, 4), (4, 9)]
                .map(|(start, stop)| advance(&mut cache, &recurrence, rows(&source, start, stop)).unwrap());
            assert_eq!(bits(&[concatenate(&parts, 1).unwrap()]), bits(&[whole]), "{dtype}");
        }
    }

    #[test]
    fn rounds_out_of_order_are_refused() {
        for (recurrence, dtype) in recurrences() {
            let message = |result: Result<()>| result.unwrap_err().to_string();
            let mut cache = empty();
            assert!(message(cache.commit()).contains("no round"));
            assert!(message(cache.rollback(0)).contains("no round"));
            cache.begin_round();
            assert!(message(cache.rollback(0)).contains("no forward pass"));
            let source = inputs(1, 4, dtype);
            advance(&mut cache, &recurrence, source.clone()).unwrap();
            let second = advance(&mut cache, &recurrence, source.clone()).unwrap_err().to_string();
            assert!(second.contains("one forward pass"), "{second}");
            let before = bits(&cache.arrays());
            for keep in [-1, 5] {
                assert!(
                    message(cache.rollback(keep)).contains(&format!("{keep} tokens to keep of a round of 4"))
                );
            }
            assert_eq!(bits(&cache.arrays()), before);
            cache.rollback(2).unwrap();
            assert!(message(cache.rollback(1)).contains("no round"));
            assert_eq!(cache.offset(), 2);
            // A round that a failed step left over.
            cache.begin_round();
            advance(&mut cache, &recurrence, source.clone()).unwrap();
            cache.begin_round();
            advance(&mut cache, &recurrence, source).unwrap();
            cache.rollback(0).unwrap();
            assert_eq!(cache.offset(), 6);
        }
        let (mlx, dtype) = recurrences().swap_remove(0);
        let mut cache = empty();
        cache.begin_round();
        advance(&mut cache, &mlx, inputs(2, 3, dtype)).unwrap();
        assert!(cache.rollback(1).unwrap_err().to_string().contains("a cache of 2 rows"));
    }

    #[test]
    fn recurrent_layers_are_not_trimmed_and_keep_their_size() {
        for (recurrence, dtype) in recurrences() {
            let mut cache = empty();
            let expected = (SIZES.taps - 1) * SIZES.channels() * dtype.size() as i32
                + 4 * SIZES.value_heads * SIZES.value_dim * SIZES.key_dim;
            for count in [1, 5, 40] {
                advance(&mut cache, &recurrence, inputs(1, count, dtype)).unwrap();
                assert_eq!(cache.nbytes(), expected as usize);
            }
            let layer = &mut cache.layers[0];
            assert!(!layer.is_trimmable());
            assert_eq!((layer.trim(3), layer.offset()), (0, 46));
        }
    }

    #[test]
    fn the_state_does_not_pin_what_it_came_from() {
        for (recurrence, dtype) in recurrences() {
            let mut cache = empty();
            advance(&mut cache, &recurrence, inputs(1, 500, dtype)).unwrap();
            let arrays = cache.arrays();
            eval(&arrays).unwrap();
            for array in &arrays {
                // MLX shares buffers that are up to 16 KiB larger.
                assert!(array.buffer_bytes().unwrap() <= array.nbytes() + (16 << 10), "{dtype}");
            }
        }
    }
}
