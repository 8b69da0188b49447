use russet_mlx::{Array, Compiled, Device, compile};

use crate::Result;

/// `silu(gate) * up` (`mlx_lm.models.activations.swiglu`).
///
/// On a GPU it is compiled, as in the reference, so that the same fused kernel runs. On the CPU
/// compiling would call a C++ compiler at run time; the bits are the same without.
pub struct Swiglu {
    compiled: Option<Compiled>,
}

impl Swiglu {
    /// Prepares the activation for the default device.
    pub fn new() -> Result<Self> {
        let compiled = match Device::default_device() {
            Device::Cpu => None,
            Device::Gpu => Some(compile(|x| Ok(vec![swiglu(&x[0], &x[1])?]), true)?),
        };
        Ok(Self { compiled })
    }

    /// `gate` and `up` have the same shape.
    pub fn forward(&self, gate: &Array, up: &Array) -> Result<Array> {
        Ok(match &self.compiled {
            Some(f) => f.call(&[gate.clone(), up.clone()])?.swap_remove(0),
            None => swiglu(gate, up)?,
        })
    }
}

fn swiglu(gate: &Array, up: &Array) -> russet_mlx::Result<Array> {
    gate.multiply(&gate.sigmoid()?)?.multiply(up)
}
