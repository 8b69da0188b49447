use russet_mlx::{Array, fast};

use super::Loader;
use crate::Result;

/// Root-mean-square norm with a gain (`nn.RMSNorm`).
pub struct RmsNorm {
    weight: Array,
    eps: f32,
}

impl RmsNorm {
    /// Takes the gain `path.weight` `[size]`.
    ///
    /// # Errors
    /// When the tensor is missing or of another size.
    pub fn load(loader: &mut Loader<'_>, path: &str, size: i32, eps: f64) -> Result<Self> {
        let weight = loader.weights.take(&format!("{path}.weight"), &[size])?;
        Ok(Self { weight, eps: eps as f32 })
    }

    /// Normalizes the last dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(fast::rms_norm(x, Some(&self.weight), self.eps)?)
    }
}
