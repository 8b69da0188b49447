use std::fmt;
use std::sync::Arc;

use russet_kernels::cpu::Precision;
use russet_kernels::ops::{KvType, Ops};
use russet_mlx::Device;

use crate::{Error, Fidelity, Result, Tier};

/// Who computes the operations that layers ask for.
#[derive(Clone, Debug)]
pub enum Numerics {
    /// MLX: the reference's operations in the reference's order.
    Mlx,
    /// Russet's CPU kernels: f32 activations and a measured error.
    Kernels {
        /// The kernels.
        ops: Arc<Ops>,
        /// Whether quantized matrices are interleaved into memory of their own at load.
        interleave: bool,
        /// What keys and values are kept in.
        kv: KvType,
    },
}

/// How the CPU kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads; the physical cores where absent.
    pub threads: Option<usize>,
    /// Precision of activations in products with quantized weights.
    pub precision: Precision,
    /// Interleave quantized matrices at load: faster, for as much memory as the weights take.
    pub interleave: bool,
    /// What keys and values are kept in.
    pub kv: KvType,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self { threads: None, precision: Precision::default(), interleave: true, kv: KvType::default() }
    }
}

impl Numerics {
    /// What computes a model that promises the tier `promised` at the fidelity asked for, on the default
    /// device. Nothing falls back silently.
    ///
    /// # Errors
    /// When the tier does not exist on this device.
    pub fn resolve(fidelity: Fidelity, promised: Tier, options: CpuOptions) -> Result<Self> {
        let kernels = || Self::Kernels {
            ops: Ops::new(options.threads, options.precision),
            interleave: options.interleave,
            kv: options.kv,
        };
        match (fidelity, Device::default_device()) {
            (Fidelity::Auto | Fidelity::Tier(Tier::L3), Device::Cpu) => Ok(kernels()),
            (Fidelity::Auto, Device::Gpu) => Ok(Self::Mlx),
            (Fidelity::Tier(tier), _) if tier == promised => Ok(Self::Mlx),
            (Fidelity::Tier(Tier::L3), Device::Gpu) => Err(Error::Fidelity(format!(
                "fidelity l3 (measured error) exists on the CPU only; on this GPU use {}",
                promised.id()
            ))),
            (Fidelity::Tier(tier), _) => Err(Error::Fidelity(format!(
                "fidelity {} ({}) is not defined for this model, whose profile promises {} ({}): use {}",
                tier.id(),
                tier.meaning(),
                promised.id(),
                promised.meaning(),
                promised.id()
            ))),
        }
    }

    /// Prompt tokens per prefill call, unless the user says otherwise: mlx-lm's number where its bits are
    /// promised. The kernels are as fast with fewer, which take less memory.
    pub fn default_prefill_chunk(&self) -> usize {
        match self {
            Self::Mlx => 2048,
            Self::Kernels { .. } => 256,
        }
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        match self {
            Self::Mlx => 1,
            Self::Kernels { ops, .. } => ops.threads(),
        }
    }
}

impl fmt::Display for Numerics {
    /// Who computes, and how where there is a choice.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mlx => f.write_str("MLX"),
            Self::Kernels { ops, kv, .. } => {
                write!(f, "CPU kernels, activations {:?}, keys and values {kv:?}", ops.precision())
            }
        }
    }
}
