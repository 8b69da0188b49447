//! Stored float types.

use super::error::{KernelError, check_len, parameter, product};

/// A float type that tensors are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatType {
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl FloatType {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Stores values, each rounded to the nearest (ties to even), as little-endian bytes: a row of a KV cache.
    ///
    /// # Errors
    /// Where the output has another length than the values need.
    pub fn encode(self, values: &[f32], out: &mut [u8]) -> Result<(), KernelError> {
        check_len("encoded bytes", out.len(), product("encoded values", &[values.len(), self.bytes()])?)?;
        let out = out.chunks_exact_mut(self.bytes());
        match self {
            Self::F16 => {
                out.zip(values)
                    .for_each(|(out, &v)| out.copy_from_slice(&half::f16::from_f32(v).to_le_bytes()));
            }
            Self::Bf16 => {
                out.zip(values)
                    .for_each(|(out, &v)| out.copy_from_slice(&half::bf16::from_f32(v).to_le_bytes()));
            }
            Self::F32 => out.zip(values).for_each(|(out, &v)| out.copy_from_slice(&v.to_le_bytes())),
        }
        Ok(())
    }

    /// The value whose little-endian bytes begin `bytes`; zero where they end too early.
    pub(crate) fn read(self, bytes: &[u8]) -> f32 {
        let half = || bytes.first_chunk().map_or(0, |&b| u16::from_le_bytes(b));
        match self {
            Self::F16 => half::f16::from_bits(half()).to_f32(),
            Self::Bf16 => half::bf16::from_bits(half()).to_f32(),
            Self::F32 => bytes.first_chunk().map_or(0.0, |&b| f32::from_le_bytes(b)),
        }
    }
}

/// A dense row-major matrix as a checkpoint stores it, at any alignment.
#[derive(Debug, Clone, Copy)]
pub struct DenseMatrix<'a> {
    pub(crate) float: FloatType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: &'a [u8],
}

impl<'a> DenseMatrix<'a> {
    /// A `[rows, cols]` matrix over little-endian values.
    ///
    /// # Errors
    /// Where `data` has another length than the shape needs, or a dimension is zero.
    pub fn new(float: FloatType, rows: usize, cols: usize, data: &'a [u8]) -> Result<Self, KernelError> {
        if rows == 0 || cols == 0 {
            return Err(parameter("matrix shape", format!("[{rows}, {cols}]"), "without a zero"));
        }
        check_len("matrix bytes", data.len(), product("matrix shape", &[rows, cols, float.bytes()])?)?;
        Ok(Self { float, rows, cols, data })
    }

    /// Rows, the outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, the inputs of a product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The matrix of a range of rows.
    ///
    /// # Errors
    /// Where the range is empty or leaves the matrix.
    pub fn slice_rows(&self, rows: std::ops::Range<usize>) -> Result<Self, KernelError> {
        if rows.start >= rows.end || rows.end > self.rows {
            return Err(parameter("row range", format!("{rows:?}"), "a non-empty part of the matrix"));
        }
        let bytes = self.cols * self.float.bytes();
        Ok(Self { rows: rows.len(), data: &self.data[rows.start * bytes..rows.end * bytes], ..*self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_values_are_the_nearest_ones() {
        let values = [0.0, -1.5, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 65504.0, f32::INFINITY];
        for (float, expected) in [
            (FloatType::F32, values),
            (FloatType::F16, [0.0, -1.5, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 65504.0, f32::INFINITY]),
            // Ties go to the even neighbour.
            (FloatType::Bf16, [0.0, -1.5, 1.0, 1.0 + 4.0 / 256.0, 65536.0, f32::INFINITY]),
        ] {
            let mut bytes = vec![0; values.len() * float.bytes()];
            float.encode(&values, &mut bytes).unwrap();
            let decoded: Vec<f32> = bytes.chunks_exact(float.bytes()).map(|b| float.read(b)).collect();
            assert_eq!(decoded, expected, "{float:?}");
            assert!(float.encode(&values, &mut bytes[1..]).is_err());
        }
    }
}
