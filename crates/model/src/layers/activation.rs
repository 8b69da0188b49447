use std::f64::consts::{PI, SQRT_2};

use russet_mlx::{Array, Compiled, Device, compile};

use crate::Result;

pub use russet_kernels::cpu::Activation;

/// `activation(gate) * up`, by the reference's functions.
///
/// On a GPU what the reference compiles is compiled, so that the same fused kernel runs. On the CPU
/// compiling would call a C++ compiler at run time; the bits are the same without.
pub struct GatedActivation {
    pub(super) kind: Activation,
    /// Whether the reference compiles the whole of it: `mlx_lm.models.activations.swiglu` and
    /// `mlx_lm.models.gemma4_text.geglu`. Other gates call a function of `mlx.nn`, and multiply after it.
    whole: bool,
    compiled: Option<Compiled>,
}

impl GatedActivation {
    /// Prepares the activation for the default device.
    pub fn new(kind: Activation) -> Result<Self> {
        if kind == Activation::Silu {
            return Self::whole(kind);
        }
        Ok(Self { kind, whole: false, compiled: compile_on_gpu(move |x| activate(kind, &x[0]))? })
    }

    /// [`GatedActivation::new`], compiled with the multiplication.
    pub fn whole(kind: Activation) -> Result<Self> {
        let compiled = compile_on_gpu(move |x| activate(kind, &x[0])?.multiply(&x[1]))?;
        Ok(Self { kind, whole: true, compiled })
    }

    /// `gate` and `up` have the same shape.
    pub fn forward(&self, gate: &Array, up: &Array) -> Result<Array> {
        Ok(match &self.compiled {
            None => activate(self.kind, gate)?.multiply(up)?,
            Some(f) if self.whole => f.call(&[gate.clone(), up.clone()])?.swap_remove(0),
            Some(f) => f.call(std::slice::from_ref(gate))?.swap_remove(0).multiply(up)?,
        })
    }
}

/// An activation alone (`mlx.nn`), compiled as [`GatedActivation`] is.
pub struct PlainActivation {
    pub(super) kind: Activation,
    compiled: Option<Compiled>,
}

impl PlainActivation {
    /// Prepares the activation for the default device.
    pub fn new(kind: Activation) -> Result<Self> {
        Ok(Self { kind, compiled: compile_on_gpu(move |x| activate(kind, &x[0]))? })
    }

    /// Each element on its own.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match &self.compiled {
            None => activate(self.kind, x)?,
            Some(f) => f.call(std::slice::from_ref(x))?.swap_remove(0),
        })
    }
}

/// `tanh(x / cap) * cap` (`mlx_lm.models.gemma4_text.logit_softcap`), compiled as [`GatedActivation`] is.
pub struct Softcap {
    cap: f64,
    compiled: Option<Compiled>,
}

impl Softcap {
    /// Prepares the function for the default device.
    pub fn new(cap: f64) -> Result<Self> {
        Ok(Self { cap, compiled: compile_on_gpu(move |x| softcap(cap, &x[0]))? })
    }

    /// Each element on its own.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match &self.compiled {
            None => softcap(self.cap, x)?,
            Some(f) => f.call(std::slice::from_ref(x))?.swap_remove(0),
        })
    }
}

fn softcap(cap: f64, x: &Array) -> russet_mlx::Result<Array> {
    x.divide(cap)?.tanh()?.multiply(cap)
}

fn compile_on_gpu(
    f: impl Fn(&[Array]) -> russet_mlx::Result<Array> + 'static,
) -> russet_mlx::Result<Option<Compiled>> {
    match Device::default_device() {
        Device::Cpu => Ok(None),
        Device::Gpu => compile(move |x| Ok(vec![f(x)?]), true).map(Some),
    }
}

/// `mlx.nn.silu`, `gelu` and `gelu_approx`, in the order of their operations.
fn activate(kind: Activation, x: &Array) -> russet_mlx::Result<Array> {
    match kind {
        Activation::Silu => x.multiply(&x.sigmoid()?),
        Activation::Sigmoid => x.sigmoid(),
        Activation::Gelu => x.multiply(&x.divide(SQRT_2)?.erf()?.add(1)?)?.divide(2),
        Activation::GeluTanh => {
            let inner = x.add(&x.power(3)?.multiply(0.044715)?)?.multiply((2.0 / PI).sqrt())?;
            x.multiply(0.5)?.multiply(&inner.tanh()?.add(1)?)
        }
    }
}
