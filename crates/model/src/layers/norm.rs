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
    weight: Option<Array>,
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
        Ok(Self { weight: Some(gain(&stored)?), bias, eps, kernel: Arc::new(kernel), ops })
    }

    /// Root-mean-square with `factor` times the tensor `name` `[size]` as its gain.
    ///
    /// # Errors
    /// When the tensor is missing or of another size.
    pub fn load_scaled(
        loader: &mut Loader<'_>,
        name: &str,
        factor: f64,
        size: i32,
        eps: f64,
    ) -> Result<Self> {
        let stored = loader.weights.take(name, &[size])?.array;
        // The reference multiplies in the gain's dtype, in each call; the kernels in f32.
        let kernel = stored.astype(Dtype::F32)?.multiply(factor)?.to_vec()?;
        Ok(Self::rms(loader, Some(stored.multiply(factor)?), kernel, eps))
    }

    /// Root-mean-square of rows of `size`, without a gain.
    pub fn without_gain(loader: &Loader<'_>, size: i32, eps: f64) -> Self {
        Self::rms(loader, None, vec![1.0; size as usize], eps)
    }

    fn rms(loader: &Loader<'_>, weight: Option<Array>, kernel: Vec<f32>, eps: f64) -> Self {
        let eps = eps as f32;
        let kernel = Arc::new(ops::Norm::Rms { weight: kernel, eps });
        Self { weight, bias: None, eps, kernel, ops: loader.numerics.kernels().cloned() }
    }

    /// Normalizes the last dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match (&self.ops, &self.bias) {
            (Some(ops), _) => ops.normalize(x, &self.kernel)?,
            (None, None) => fast::rms_norm(x, self.weight.as_ref(), self.eps)?,
            (None, Some(bias)) => fast::layer_norm(x, self.weight.as_ref(), Some(bias), self.eps)?,
        })
    }

    pub(super) fn kernel(&self) -> &Arc<ops::Norm> {
        &self.kernel
    }
}
