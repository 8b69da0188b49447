//! Stored float types.

use super::error::KernelError;
use super::error::{check_len, parameter, product};

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
