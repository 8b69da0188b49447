use russet_mlx::{Array, Backend, Dtype, Error, Kernel, KernelLaunch, Result, TemplateArgument};

/// The causal convolution of linear-attention layers, its activation and its new tail in one kernel, so that a
/// prompt's rows are not copied behind those of the tail first.
pub struct CausalConvSilu(Kernel);

const TAPS: i32 = 4;

/// Threads of a group.
const GROUP: i32 = 256;

/// The most groups of a CUDA launch in all dimensions but the first.
const MAX_GRID: i32 = 65_535;

impl CausalConvSilu {
    /// Prepares the kernel; it is compiled at its first run.
    ///
    /// # Errors
    /// For CUDA, where there is none.
    pub fn new(backend: Backend) -> Result<Self> {
        let source = ["causal_conv_silu", include_str!("causal_conv_silu.h")];
        let names: [&[&str]; 2] = [&["x", "tail", "weight"], &["out", "new_tail"]];
        let call =
            format!("causal_conv_silu<T, {TAPS}>(x, tail, weight, out, new_tail, x_shape[1], x_shape[2]");
        let position = [
            "thread_position_in_grid.x, thread_position_in_grid.y, thread_position_in_grid.z",
            "blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y, blockIdx.z",
        ];
        super::prepare(backend, source, names, &call, position).map(Self)
    }

    /// Whether [`CausalConvSilu::call`] takes these inputs.
    pub fn fits(x: &Array, tail: &Array, weight: &Array) -> bool {
        sizes(x, tail, weight).is_some()
    }

    /// `x` `[batch, rows, channels]`, the `tail` `[batch, 3, channels]` of the rows before it and `weight`
    /// `[channels, 4, 1]`, all bfloat16 or all float32 → silu of the convolution, like `x`, and the tail after it.
    ///
    /// # Errors
    /// When shapes or types do not fit, naming them.
    pub fn call(&self, x: &Array, tail: &Array, weight: &Array) -> Result<[Array; 2]> {
        let Some([batch, rows, channels]) = sizes(x, tail, weight) else {
            return Err(Error::new(format!(
                "convolution of {x:?} after {tail:?} with {weight:?}: expected [batch, rows, channels] after \
                 [batch, 3, channels] with [channels, 4, 1], all bfloat16 or all float32"
            )));
        };
        let launch = KernelLaunch {
            outputs: vec![(x.shape(), x.dtype()), (tail.shape(), x.dtype())],
            grid: [channels, rows + TAPS - 1, batch],
            threadgroup: [channels.min(GROUP), 1, 1],
            template_arguments: vec![("T", TemplateArgument::Dtype(x.dtype()))],
            init_value: None,
        };
        self.0
            .launch(&[x.clone(), tail.clone(), weight.clone()], &launch)?
            .try_into()
            .map_err(|_| Error::new("the convolution returned another number of arrays"))
    }
}

/// Batch, rows and channels of inputs that fit.
fn sizes(x: &Array, tail: &Array, weight: &Array) -> Option<[i32; 3]> {
    let [batch, rows, channels] = x.shape().try_into().ok()?;
    let fits = [tail.dtype(), weight.dtype()] == [x.dtype(); 2]
        && matches!(x.dtype(), Dtype::Bf16 | Dtype::F32)
        && tail.shape() == [batch, TAPS - 1, channels]
        && weight.shape() == [channels, TAPS, 1]
        // Metal gets very small arrays in another way; indices are 32 bits wide.
        && (batch > 0 && rows > 0 && channels >= 8)
        && batch.max(rows + TAPS) <= MAX_GRID
        && batch.checked_mul(rows + TAPS)?.checked_mul(channels).is_some();
    fits.then_some([batch, rows, channels])
}
