use russet_mlx::{Array, QuantizationMode, Quantized};

use super::Loader;
use crate::Result;

/// `y = x @ W.T (+ bias)` with a dense or packed weight `[out, in]` (`nn.Linear`,
/// `nn.QuantizedLinear`, `nn.QQLinear`).
pub struct Linear {
    weight: Weight,
    bias: Option<Array>,
}

enum Weight {
    /// Transposed at load, `[in, out]`.
    Dense(Array),
    Quantized(Quantized),
    /// The input is quantized as well.
    QuantizedInput(Quantized),
}

impl Linear {
    /// Takes the module `path` from the weights.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, inputs: i32, outputs: i32, bias: bool) -> Result<Self> {
        let weight = match loader.quantization_of(path, inputs)? {
            Some(q) => {
                let quantized = loader.quantized(path, outputs, inputs, q)?;
                if loader.quantize_activations {
                    if bias || !matches!(q.mode, QuantizationMode::Nvfp4 | QuantizationMode::Mxfp8) {
                        let message = "quantize_activations needs mode nvfp4 or mxfp8 and no bias";
                        return Err(loader.weights.error(path, message));
                    }
                    Weight::QuantizedInput(quantized)
                } else {
                    Weight::Quantized(quantized)
                }
            }
            None => {
                let weight = loader.weights.take(&format!("{path}.weight"), &[outputs, inputs])?;
                Weight::Dense(weight.transpose_all()?)
            }
        };
        let bias = if bias { Some(loader.weights.take(&format!("{path}.bias"), &[outputs])?) } else { None };
        Ok(Self { weight, bias })
    }

    /// `[.., in]` → `[.., out]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match (&self.weight, &self.bias) {
            // One rounding, unlike a product followed by an addition.
            (Weight::Dense(w), Some(bias)) => bias.addmm(x, w, 1.0, 1.0)?,
            (Weight::Dense(w), None) => x.matmul(w)?,
            (Weight::Quantized(w), Some(bias)) => w.matmul(x, true)?.add(bias)?,
            (Weight::Quantized(w), None) => w.matmul(x, true)?,
            (Weight::QuantizedInput(w), _) => w.matmul_quantized_input(x)?,
        })
    }
}
