use std::sync::Arc;

use russet_kernels::ops::{Matrix, Ops};
use russet_mlx::{Array, Quantized};

use super::Loader;
use crate::Result;

/// A table of token vectors `[vocabulary, hidden]` (`nn.Embedding`, `nn.QuantizedEmbedding`).
pub struct Embedding(Table);

enum Table {
    Dense(Array),
    Quantized(Quantized),
    /// For the CPU kernels.
    Kernel(Arc<Ops>, Arc<Matrix>),
}

impl Embedding {
    /// Takes the module `path` from the weights.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, vocabulary: i32, hidden: i32) -> Result<Self> {
        if let Some(ops) = loader.numerics.kernels() {
            let matrix = loader.matrix(path, vocabulary, hidden, None)?;
            return Ok(Self(Table::Kernel(ops.clone(), matrix)));
        }
        Ok(Self(match loader.stored(path, vocabulary, hidden)?.into_quantized() {
            Err(table) => Table::Dense(table.array),
            Ok(table) => Table::Quantized(table),
        }))
    }

    /// Token ids `[batch, seq]` → vectors `[batch, seq, hidden]`.
    pub fn forward(&self, tokens: &Array) -> Result<Array> {
        Ok(match &self.0 {
            Table::Dense(table) => table.take(tokens, 0)?,
            Table::Quantized(table) => {
                let rows = Quantized {
                    weight: table.weight.take(tokens, 0)?,
                    scales: table.scales.take(tokens, 0)?,
                    biases: table.biases.as_ref().map(|b| b.take(tokens, 0)).transpose()?,
                    quantization: table.quantization,
                };
                rows.dequantize(None)?
            }
            Table::Kernel(ops, table) => ops.embed(table, tokens)?,
        })
    }

    /// The table as the weight of a tied head: `[.., hidden]` → `[.., vocabulary]`.
    pub fn as_linear(&self, x: &Array) -> Result<Array> {
        Ok(match &self.0 {
            Table::Dense(table) => x.matmul(&table.transpose_all()?)?,
            Table::Quantized(table) => table.matmul(x, true)?,
            Table::Kernel(ops, table) => ops.project(x, None, vec![table.clone()])?.swap_remove(0),
        })
    }
}
