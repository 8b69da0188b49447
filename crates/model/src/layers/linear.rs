use std::sync::Arc;

use russet_kernels::ops::{Matrix, Ops};
use russet_mlx::{Array, QuantizationMode, Quantized};

use super::{Loader, RmsNorm};
use crate::Result;

/// `y = x @ W.T (+ bias)` with a dense or packed weight `[out, in]` (`nn.Linear`,
/// `nn.QuantizedLinear`, `nn.QQLinear`).
pub struct Linear(Weight);

enum Weight {
    /// Transposed at load, `[in, out]`.
    Dense(Array, Option<Array>),
    Quantized(Quantized, Option<Array>),
    /// The input is quantized as well.
    QuantizedInput(Quantized),
    /// For the CPU kernels.
    Kernel(Arc<Ops>, Arc<Matrix>),
}

impl Linear {
    /// Takes the module `path` from the weights.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, inputs: i32, outputs: i32, bias: bool) -> Result<Self> {
        let bias = match bias {
            true => Some(loader.weights.take(&format!("{path}.bias"), &[outputs])?),
            false => None,
        };
        if let Some(ops) = loader.numerics.kernels() {
            if loader.quantize_activations {
                return Err(loader
                    .weights
                    .error(path, "quantize_activations has no CPU kernels: use fidelity l1"));
            }
            let matrix = loader.matrix(path, outputs, inputs, bias.as_ref())?;
            return Ok(Self(Weight::Kernel(ops.clone(), matrix)));
        }
        let bias = bias.map(|b| b.array);
        Ok(Self(match loader.stored(path, outputs, inputs)?.into_quantized() {
            Err(weight) => Weight::Dense(weight.array.transpose_all()?, bias),
            Ok(weight) if loader.quantize_activations => {
                let mode = weight.quantization.mode;
                if bias.is_some() || !matches!(mode, QuantizationMode::Nvfp4 | QuantizationMode::Mxfp8) {
                    let message = "quantize_activations needs mode nvfp4 or mxfp8 and no bias";
                    return Err(loader.weights.error(path, message));
                }
                Weight::QuantizedInput(weight)
            }
            Ok(weight) => Weight::Quantized(weight, bias),
        }))
    }

    /// `[.., in]` → `[.., out]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match &self.0 {
            // One rounding, unlike a product followed by an addition.
            Weight::Dense(w, Some(bias)) => bias.addmm(x, w, 1.0, 1.0)?,
            Weight::Dense(w, None) => x.matmul(w)?,
            Weight::Quantized(w, Some(bias)) => w.matmul(x, true)?.add(bias)?,
            Weight::Quantized(w, None) => w.matmul(x, true)?,
            Weight::QuantizedInput(w) => w.matmul_quantized_input(x)?,
            Weight::Kernel(ops, matrix) => ops.project(x, None, vec![matrix.clone()])?.swap_remove(0),
        })
    }

    /// `residual + forward(x)`.
    pub fn forward_add(&self, x: &Array, residual: &Array) -> Result<Array> {
        Ok(residual.add(&self.forward(x)?)?)
    }

    /// The matrix for the CPU kernels, where they compute.
    pub(super) fn kernel(&self) -> Option<(&Arc<Ops>, &Arc<Matrix>)> {
        match &self.0 {
            Weight::Kernel(ops, matrix) => Some((ops, matrix)),
            _ => None,
        }
    }
}

/// `norm(x)` through each of `linears`.
pub fn project<const N: usize>(norm: &RmsNorm, linears: [&Linear; N], x: &Array) -> Result<[Array; N]> {
    let kernels: Option<Vec<_>> = linears.iter().map(|linear| linear.kernel()).collect();
    let outputs = match kernels.as_deref() {
        Some([(ops, _), ..]) => {
            let matrices = kernels.iter().flatten().map(|(_, matrix)| (*matrix).clone()).collect();
            ops.project(x, Some(norm.kernel()), matrices)?
        }
        _ => {
            let x = norm.forward(x)?;
            linears.iter().map(|linear| linear.forward(&x)).collect::<Result<_>>()?
        }
    };
    outputs.try_into().map_err(|_| russet_mlx::Error::new("projection returned too few arrays").into())
}
