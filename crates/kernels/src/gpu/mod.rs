//! Kernels for GPUs. A kernel is one source in the common subset of Metal, CUDA and C++; a prelude per language
//! says what differs. The tests compile the same source for the CPU and run it there.

mod causal_conv_silu;
mod gated_delta;

pub use causal_conv_silu::CausalConvSilu;
pub use gated_delta::GatedDelta;

use russet_mlx::{Backend, Kernel, KernelSource, Result};

/// Prepares the kernel whose function template is `source`, of the same name. `arguments` end with where a thread
/// is, which `position` gives for Metal and for CUDA.
fn prepare(
    backend: Backend,
    [name, source]: [&str; 2],
    [inputs, outputs]: [&[&str]; 2],
    call: &str,
    position: [&str; 2],
) -> Result<Kernel> {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let (prelude, position) = match backend {
        Backend::Metal => (include_str!("metal.h"), position[0]),
        Backend::Cuda => (include_str!("cuda.h"), position[1]),
    };
    let source = KernelSource {
        name: name.to_owned(),
        inputs: owned(inputs),
        outputs: owned(outputs),
        body: format!("{call}, {position});"),
        header: format!("{prelude}{source}"),
        ensure_row_contiguous: true,
        atomic_outputs: false,
        shared_memory: 0,
    };
    Kernel::new(backend, source)
}
