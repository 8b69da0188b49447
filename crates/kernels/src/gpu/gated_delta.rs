use russet_mlx::{Array, Backend, Dtype, Error, Kernel, KernelLaunch, Result, TemplateArgument};

/// The gated delta rule over the tokens of a call, in one kernel.
///
/// Sums run in the order of `mlx_lm.models.gated_delta`'s kernels for Metal.
pub struct GatedDelta(Kernel);

/// Threads that run together.
const LANES: i32 = 32;

/// The shapes of a call.
struct Sizes {
    batch: i32,
    key_heads: i32,
    key_dim: i32,
    value_heads: i32,
    value_dim: i32,
}

impl GatedDelta {
    /// Prepares the kernel; it is compiled at its first run.
    ///
    /// # Errors
    /// For CUDA, where there is none.
    pub fn new(backend: Backend) -> Result<Self> {
        let source = ["gated_delta", include_str!("gated_delta.h")];
        let names: [&[&str]; 2] = [&["q", "k", "v", "decay", "beta", "memory"], &["out", "new_memory"]];
        let call =
            "gated_delta<DK, DV, HK, HV, LANES>(q, k, v, decay, beta, memory, out, new_memory, q_shape[1]";
        let position = [
            "thread_index_in_simdgroup, thread_position_in_grid.y, thread_position_in_grid.z",
            "threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z",
        ];
        super::prepare(backend, source, names, call, position).map(Self)
    }

    /// Whether the kernel computes keys of this width.
    pub fn supports(key_dim: i32) -> bool {
        key_dim > 0 && key_dim % LANES == 0
    }

    /// `q`, `k` `[batch, tokens, key_heads, key_dim]` and `v` `[batch, tokens, value_heads, value_dim]` of one type,
    /// `decay` (f32) and `beta` `[batch, tokens, value_heads]`, `memory` (f32)
    /// `[batch, value_heads, value_dim, key_dim]` → the outputs, like `v`, and the memory after them.
    ///
    /// # Errors
    /// When shapes or types do not fit, naming them.
    pub fn call(&self, inputs: [&Array; 5], memory: &Array) -> Result<[Array; 2]> {
        let Some(sizes) = Sizes::of(inputs, memory) else {
            return Err(Error::new(format!(
                "gated delta rule of {inputs:?} on {memory:?}: expected q and k [batch, tokens, key_heads, key_dim], \
                 v [batch, tokens, value_heads, value_dim], decay (float32) and beta [batch, tokens, value_heads] on \
                 float32 [batch, value_heads, value_dim, key_dim], key_dim a multiple of {LANES}"
            )));
        };
        let Sizes { batch, key_heads, key_dim, value_heads, value_dim } = sizes;
        // Eight rows share 32 lanes where that fits: fewer sums cross lanes.
        let (row_lanes, rows) = if key_dim == 128 && value_dim % 8 == 0 { (4, 8) } else { (LANES, 1) };
        let groups = value_dim / rows;
        let [q, _, v, ..] = inputs;
        let launch = KernelLaunch {
            outputs: vec![(v.shape(), q.dtype()), (memory.shape(), Dtype::F32)],
            grid: [LANES, groups, batch * value_heads],
            threadgroup: [LANES, [4, 2, 1].into_iter().find(|n| groups % n == 0).unwrap_or(1), 1],
            template_arguments: vec![
                ("T", TemplateArgument::Dtype(q.dtype())),
                ("DK", TemplateArgument::Int(key_dim)),
                ("DV", TemplateArgument::Int(value_dim)),
                ("HK", TemplateArgument::Int(key_heads)),
                ("HV", TemplateArgument::Int(value_heads)),
                ("LANES", TemplateArgument::Int(row_lanes)),
            ],
            init_value: None,
        };
        let inputs: Vec<Array> = inputs.into_iter().chain([memory]).cloned().collect();
        self.0
            .launch(&inputs, &launch)?
            .try_into()
            .map_err(|_| Error::new("the delta rule returned another number of arrays"))
    }
}

impl Sizes {
    /// Of inputs that fit.
    fn of([q, k, v, decay, beta]: [&Array; 5], memory: &Array) -> Option<Self> {
        let [batch, tokens, key_heads, key_dim] = q.shape().try_into().ok()?;
        let [_, _, value_heads, value_dim] = v.shape().try_into().ok()?;
        let gates = [batch, tokens, value_heads];
        let fits = [k.dtype(), v.dtype()] == [q.dtype(); 2]
            && q.dtype().is_float()
            && beta.dtype().is_float()
            && [decay.dtype(), memory.dtype()] == [Dtype::F32; 2]
            && k.shape() == q.shape()
            && v.shape() == [batch, tokens, value_heads, value_dim]
            && decay.shape() == gates
            && beta.shape() == gates
            && memory.shape() == [batch, value_heads, value_dim, key_dim]
            && batch.min(tokens).min(key_heads).min(value_dim) > 0
            && value_heads > 0
            && value_heads % key_heads == 0
            && GatedDelta::supports(key_dim)
            // Indices are 32 bits wide.
            && [&q.size(), &v.size(), &memory.size()].iter().all(|&&n| n <= i32::MAX as usize);
        fits.then_some(Self { batch, key_heads, key_dim, value_heads, value_dim })
    }
}
