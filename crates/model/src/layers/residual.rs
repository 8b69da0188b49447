use russet_kernels::ops;
use russet_mlx::Array;

use super::Norm;
use crate::Result;

/// How the output `y` of attention or of an MLP joins the hidden states `x`.
pub enum Residual {
    /// `x + y`
    Plain,
    /// `x + norm(y)`
    Norm(Norm),
    /// `x + y * factor`
    Scaled(f64),
    /// `y` alone.
    Replaced,
}

impl Residual {
    /// `x` with `y` added.
    pub fn add(&self, x: &Array, y: &Array) -> Result<Array> {
        Ok(match self {
            Self::Plain => x.add(y)?,
            Self::Norm(norm) => x.add(&norm.forward(y)?)?,
            Self::Scaled(factor) => x.add(&y.multiply(*factor)?)?,
            Self::Replaced => y.clone(),
        })
    }

    /// The same for the CPU kernels.
    pub(super) fn kernel(&self) -> ops::Residual {
        match self {
            Self::Plain => ops::Residual::Plain,
            Self::Norm(norm) => ops::Residual::Norm(norm.kernel().clone()),
            Self::Scaled(factor) => ops::Residual::Scaled(*factor as f32),
            Self::Replaced => ops::Residual::Replaced,
        }
    }
}
