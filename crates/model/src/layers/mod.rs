//! Blocks that graphs share. Each follows the operations of its counterpart in `mlx.nn` or mlx-lm.

mod activation;
mod embedding;
mod linear;
mod norm;
mod rope;

pub use activation::Swiglu;
pub use embedding::Embedding;
pub use linear::Linear;
pub use norm::RmsNorm;
pub use rope::Rope;

use russet_mlx::{Dtype, Quantization, Quantized};

use crate::quantization::infer;
use crate::{QuantizationConfig, Result, Weights};

/// What loading a module needs to know besides its own sizes.
pub struct Loader<'a> {
    /// The tensors that are left.
    pub weights: &'a mut Weights,
    quantization: Option<&'a QuantizationConfig>,
    quantize_activations: bool,
    packed_elements: u64,
}

impl<'a> Loader<'a> {
    /// Loads from `weights`. `quantize_activations` quantizes the inputs of linear layers as well.
    pub fn new(
        weights: &'a mut Weights,
        quantization: Option<&'a QuantizationConfig>,
        quantize_activations: bool,
    ) -> Self {
        Self { weights, quantization, quantize_activations, packed_elements: 0 }
    }

    /// Elements of the packed matrices taken so far.
    pub(crate) fn packed_elements(&self) -> u64 {
        self.packed_elements
    }

    /// The packing of the module `path` with a dense last dimension of `columns`: what the config says
    /// of it, else what its tensors say, else none.
    fn quantization_of(&self, path: &str, columns: i32) -> Result<Option<Quantization>> {
        let Some(config) = self.quantization else { return Ok(None) };
        if let Some(choice) = config.module(path) {
            return Ok(choice);
        }
        let (weight, scales) = (format!("{path}.weight"), format!("{path}.scales"));
        let Some(scales) = self.weights.get(&scales) else { return Ok(None) };
        let packed = self.weights.get(&weight).and_then(|w| w.shape().last().copied()).unwrap_or(0);
        let groups = scales.shape().last().copied().unwrap_or(0);
        infer(columns, packed, groups, scales.dtype() != Dtype::U8)
            .map(Some)
            .map_err(|message| self.weights.error(path, message))
    }

    /// Takes a packed matrix `[rows, columns]`.
    fn quantized(
        &mut self,
        path: &str,
        rows: i32,
        columns: i32,
        quantization: Quantization,
    ) -> Result<Quantized> {
        let affine = quantization.mode == russet_mlx::QuantizationMode::Affine;
        if columns % quantization.group_size != 0 {
            let message =
                format!("{columns} columns are no multiple of group size {}", quantization.group_size);
            return Err(self.weights.error(path, message));
        }
        // A group always fills whole words, a row of nvfp4 groups not always a multiple of 32 elements.
        let groups = columns / quantization.group_size;
        let packed = [rows, groups * (quantization.group_size * quantization.bits / 32)];
        let groups = [rows, groups];
        let weight = self.weights.take_exact(&format!("{path}.weight"), &packed, Dtype::U32)?;
        let scales = format!("{path}.scales");
        let (scales, biases) = if affine {
            let scales = self.weights.take(&scales, &groups)?;
            let name = format!("{path}.biases");
            let biases = self.weights.take_exact(&name, &groups, scales.dtype())?;
            (scales, Some(biases))
        } else {
            (self.weights.take_exact(&scales, &groups, Dtype::U8)?, None)
        };
        self.packed_elements += rows as u64 * columns as u64;
        Ok(Quantized { weight, scales, biases, quantization })
    }
}
