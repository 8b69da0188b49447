use std::sync::Arc;

use russet_kernels::ops::{Norm, Ops};
use russet_mlx::{Array, Dtype, fast};

use super::Loader;
use crate::Result;

/// Root-mean-square norm with a gain (`nn.RMSNorm`).
pub struct RmsNorm {
    weight: Array,
    eps: f32,
    /// The same for the CPU kernels, which mostly normalize inside of the operation that follows.
    kernel: Arc<Norm>,
    ops: Option<Arc<Ops>>,
}

impl RmsNorm {
    /// Takes the gain `path.weight` `[size]`.
    ///
    /// # Errors
    /// When the tensor is missing or of another size.
    pub fn load(loader: &mut Loader<'_>, path: &str, size: i32, eps: f64) -> Result<Self> {
        let weight = loader.weights.take(&format!("{path}.weight"), &[size])?.array;
        let eps = eps as f32;
        let kernel = Norm { weight: weight.astype(Dtype::F32)?.to_vec()?, eps };
        Ok(Self { weight, eps, kernel: Arc::new(kernel), ops: loader.numerics.kernels().cloned() })
    }

    /// Normalizes the last dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match &self.ops {
            Some(ops) => ops.normalize(x, &self.kernel)?,
            None => fast::rms_norm(x, Some(&self.weight), self.eps)?,
        })
    }

    pub(super) fn kernel(&self) -> &Arc<Norm> {
        &self.kernel
    }
}
