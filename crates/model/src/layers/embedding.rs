use russet_mlx::{Array, Quantized};

use super::Loader;
use crate::Result;

/// A table of token vectors `[vocabulary, hidden]` (`nn.Embedding`, `nn.QuantizedEmbedding`).
pub enum Embedding {
    /// Float rows.
    Dense(Array),
    /// Packed rows.
    Quantized(Quantized),
}

impl Embedding {
    /// Takes the module `path` from the weights.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, vocabulary: i32, hidden: i32) -> Result<Self> {
        Ok(match loader.quantization_of(path, hidden)? {
            Some(q) => Self::Quantized(loader.quantized(path, vocabulary, hidden, q)?),
            None => Self::Dense(loader.weights.take(&format!("{path}.weight"), &[vocabulary, hidden])?),
        })
    }

    /// Token ids `[batch, seq]` → vectors `[batch, seq, hidden]`.
    pub fn forward(&self, tokens: &Array) -> Result<Array> {
        Ok(match self {
            Self::Dense(table) => table.take(tokens, 0)?,
            Self::Quantized(table) => {
                let rows = Quantized {
                    weight: table.weight.take(tokens, 0)?,
                    scales: table.scales.take(tokens, 0)?,
                    biases: table.biases.as_ref().map(|b| b.take(tokens, 0)).transpose()?,
                    quantization: table.quantization,
                };
                rows.dequantize(None)?
            }
        })
    }

    /// The table as the weight of a tied head: `[.., hidden]` → `[.., vocabulary]`.
    pub fn as_linear(&self, x: &Array) -> Result<Array> {
        Ok(match self {
            Self::Dense(table) => x.matmul(&table.transpose_all()?)?,
            Self::Quantized(table) => table.matmul(x, true)?,
        })
    }
}
