//! Kernels for the CPU.
//!
//! Every operation takes a [`Cpu`]: a thread pool and an instruction set. Inputs and outputs are slices; all
//! lengths are checked and every failure is a [`KernelError`]. Activations are f32. Weights are as stored, at any
//! alignment, so they can be used in a mapped file.

mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod buffer;
mod codec;
mod embedding;
mod error;
mod experts;
mod float;
mod gated_delta;
mod head;
mod input;
mod matmul;
mod mm;
mod mv;
mod norm;
pub mod pool;
mod qmm;
mod qmv;
mod quant;
mod rope;
mod simd;
#[cfg(test)]
mod testing;

pub use activation::{Activation, activate, gated};
pub use attention::{Attention, KeyValues, Mask, attention};
pub use embedding::embed;
pub use error::KernelError;
pub use experts::{ExpertScratch, Experts, expert_matmul};
pub use float::{DenseMatrix, FloatType};
pub use gated_delta::{DeltaShape, causal_conv_silu, delta_gates, gated_delta};
pub use head::{argmax, logsumexp, softmax, top_k};
pub use input::{Precision, PreparedInput};
pub use matmul::{Product, Weights, matmul};
pub use norm::{layer_norm, rms_norm};
pub use pool::Pool;
pub(crate) use quant::PANEL;
pub use quant::{Interleaved, InterleavedRows, QuantFormat, QuantizedMatrix};
pub use rope::{Rotations, inverse_frequencies, rope};
pub use simd::Isa;

/// The processor as kernels use it.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    isa: Isa,
}

impl Cpu {
    /// `threads` threads (the physical cores where `None`) and the machine's best instruction set.
    pub fn new(threads: Option<usize>) -> Self {
        Self::with_isa(threads.unwrap_or_else(pool::physical_cores), Isa::best())
    }

    /// As [`new`](Self::new), with another instruction set; one that the machine lacks is replaced by the
    /// portable one.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        let isa = if Isa::available().contains(&isa) { isa } else { Isa::Portable };
        Self { pool: Pool::new(threads), isa }
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}
