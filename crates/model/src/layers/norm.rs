use std::sync::Arc;

use russet_kernels::ops::{self, Ops};
use russet_mlx::{Array, Dtype, fast};

use super::Loader;
use crate::Result;

/// Which norm, and how its gain is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Root-mean-square (`nn.RMSNorm`).
    Rms,
    /// Root-mean-square, with one less than the gain stored (`mlx_lm.models.gemma`).
    RmsPlusOne,
    /// Layer normalization with a bias (`nn.LayerNorm`).
    Layer,
}

/// A norm of the last dimension.
pub struct Norm {
    weight: Array,
    bias: Option<Array>,
    eps: f32,
    /// The same for the CPU kernels, which mostly normalize inside of the operation that follows.
    kernel: Arc<ops::Norm>,
    ops: Option<Arc<Ops>>,
}

impl Norm {
    /// Takes the gain `path.weight` `[size]`, and for layer normalization `path.bias`.
    ///
    /// # Errors
    /// When a tensor is missing or of another size.
    pub fn load(loader: &mut Loader<'_>, path: &str, kind: NormKind, size: i32, eps: f64) -> Result<Self> {
        let stored = loader.weights.take(&format!("{path}.weight"), &[size])?.array;
        let bias = match kind {
            NormKind::Layer => Some(loader.weights.take(&format!("{path}.bias"), &[size])?.array),
            NormKind::Rms | NormKind::RmsPlusOne => None,
        };
        // The reference adds in the gain's dtype, in each call; the kernels in f32.
        let gain = |stored: &Array| match kind {
            NormKind::RmsPlusOne => stored.add(1.0),
            NormKind::Rms | NormKind::Layer => Ok(stored.clone()),
        };
        let eps = eps as f32;
        let weight = gain(&stored.astype(Dtype::F32)?)?.to_vec()?;
        let kernel = match &bias {
            None => ops::Norm::Rms { weight, eps },
            Some(bias) => ops::Norm::Layer { weight, bias: bias.astype(Dtype::F32)?.to_vec()?, eps },
        };
        let ops = loader.numerics.kernels().cloned();
        Ok(Self { weight: gain(&stored)?, bias, eps, kernel: Arc::new(kernel), ops })
    }

    /// Normalizes the last dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match (&self.ops, &self.bias) {
            (Some(ops), _) => ops.normalize(x, &self.kernel)?,
            (None, None) => fast::rms_norm(x, Some(&self.weight), self.eps)?,
            (None, Some(bias)) => fast::layer_norm(x, Some(&self.weight), Some(bias), self.eps)?,
        })
    }

    pub(super) fn kernel(&self) -> &Arc<ops::Norm> {
        &self.kernel
    }
}
