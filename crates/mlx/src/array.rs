#![allow(unsafe_code)]

use std::fmt;
use std::slice;

use crate::bridge::{RawArray, ffi};
use crate::{Dtype, Element, Error, Result};

/// An MLX array: a reference-counted node of a lazily evaluated graph.
///
/// Cloning is cheap and shares the node. An array belongs to the thread that made it:
///
/// ```compile_fail
/// fn assert_send<T: Send>() {}
/// assert_send::<russet_mlx::Array>();
/// ```
///
/// ```compile_fail
/// fn assert_sync<T: Sync>() {}
/// assert_sync::<russet_mlx::Array>();
/// ```
#[derive(Clone)]
#[repr(transparent)]
pub struct Array(pub(crate) RawArray);

/// Either an array or a *weak* number, which takes the dtype of the array that it meets.
///
/// This is MLX's Python rule: `x * 0.5` with `x` in bfloat16 stays bfloat16, and the constant is
/// rounded to bfloat16 first (by way of `f32`). A float next to an integer array gives `f32`; an
/// integer next to a bool array gives `i32`.
#[derive(Clone, Copy)]
pub enum Operand<'a> {
    /// An array with its own dtype.
    Array(&'a Array),
    /// A weak float.
    Float(f64),
    /// A weak integer.
    Int(i64),
}

impl<'a> From<&'a Array> for Operand<'a> {
    fn from(a: &'a Array) -> Self {
        Self::Array(a)
    }
}
impl From<f64> for Operand<'_> {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}
impl From<i32> for Operand<'_> {
    fn from(value: i32) -> Self {
        Self::Int(value.into())
    }
}
impl From<i64> for Operand<'_> {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl Operand<'_> {
    /// The operand as an array, weak numbers in the dtype that meeting `like` gives them.
    pub(crate) fn meet(self, like: &Array) -> Result<Array> {
        match self {
            Self::Array(a) => Ok(a.clone()),
            Self::Float(v) => Array::weak_float(v, like.dtype()),
            Self::Int(v) => Array::weak_int(v, like.dtype()),
        }
    }
}

/// A list of dimensions: `[i32; N]`, `&[i32]`, `&Vec<i32>`.
pub trait IntoShape {
    /// The dimensions.
    fn dims(&self) -> &[i32];
}
impl<const N: usize> IntoShape for [i32; N] {
    fn dims(&self) -> &[i32] {
        self
    }
}
impl<const N: usize> IntoShape for &[i32; N] {
    fn dims(&self) -> &[i32] {
        *self
    }
}
impl IntoShape for &[i32] {
    fn dims(&self) -> &[i32] {
        self
    }
}
impl IntoShape for Vec<i32> {
    fn dims(&self) -> &[i32] {
        self
    }
}
impl IntoShape for &Vec<i32> {
    fn dims(&self) -> &[i32] {
        self
    }
}

pub(crate) fn wrap(raw: std::result::Result<RawArray, cxx::Exception>) -> Result<Array> {
    Ok(Array(raw?))
}

pub(crate) fn wrap_all(raw: std::result::Result<Vec<RawArray>, cxx::Exception>) -> Result<Vec<Array>> {
    Ok(raw?.into_iter().map(Array).collect())
}

pub(crate) fn raw(arrays: &[Array]) -> &[RawArray] {
    // SAFETY: Array is a transparent wrapper of RawArray.
    unsafe { slice::from_raw_parts(arrays.as_ptr().cast(), arrays.len()) }
}

/// An optional array as the bridge takes it: a slice of zero or one.
pub(crate) fn optional(array: Option<&Array>) -> &[RawArray] {
    array.map_or(&[], |a| slice::from_ref(&a.0))
}

impl Array {
    /// Copies `data` into a new array of `shape`.
    ///
    /// # Errors
    /// When the length of `data` is not the product of `shape`.
    pub fn from_slice<T: Element>(data: &[T], shape: impl IntoShape) -> Result<Self> {
        Self::from_bytes(bytemuck::cast_slice(data), shape, T::DTYPE)
    }

    /// Copies raw little-endian bytes into a new array of `shape` and `dtype`.
    ///
    /// # Errors
    /// When the length of `data` does not fit.
    pub fn from_bytes(data: &[u8], shape: impl IntoShape, dtype: Dtype) -> Result<Self> {
        wrap(ffi::from_bytes(data, shape.dims(), dtype as u8))
    }

    /// A 0-d array of an explicit dtype, rounded as MLX's Python binding rounds a float.
    pub fn scalar(value: f64, dtype: Dtype) -> Result<Self> {
        wrap(ffi::scalar_float(value, dtype as u8))
    }

    /// A 0-d array of an explicit dtype from an integer.
    pub fn scalar_int(value: i64, dtype: Dtype) -> Result<Self> {
        wrap(ffi::scalar_int(value, dtype as u8))
    }

    fn weak_float(value: f64, met: Dtype) -> Result<Self> {
        Self::scalar(value, if met.is_float() { met } else { Dtype::F32 })
    }

    fn weak_int(value: i64, met: Dtype) -> Result<Self> {
        let range = match met {
            Dtype::U8 => Some((0, 0xff)),
            Dtype::U16 => Some((0, 0xffff)),
            Dtype::U32 => Some((0, 0xffff_ffff)),
            Dtype::I8 => Some((-0x80, 0x7f)),
            Dtype::I16 => Some((-0x8000, 0x7fff)),
            Dtype::I32 => Some((i64::from(i32::MIN), i64::from(i32::MAX))),
            _ => None,
        };
        if range.is_some_and(|(low, high)| value < low || value > high) {
            return Err(Error::new(format!("{value} does not fit in {met}")));
        }
        Self::scalar_int(value, if met == Dtype::Bool { Dtype::I32 } else { met })
    }

    /// An array of `shape` filled with `value`.
    pub fn full(shape: impl IntoShape, value: f64, dtype: Dtype) -> Result<Self> {
        let value = Self::scalar(value, dtype)?;
        wrap(ffi::full(shape.dims(), &value.0, dtype as u8))
    }

    /// An array of zeros.
    pub fn zeros(shape: impl IntoShape, dtype: Dtype) -> Result<Self> {
        Self::full(shape, 0.0, dtype)
    }

    /// An array of ones.
    pub fn ones(shape: impl IntoShape, dtype: Dtype) -> Result<Self> {
        Self::full(shape, 1.0, dtype)
    }

    /// `start, start + step, …` up to but not including `stop`.
    pub fn arange(start: f64, stop: f64, step: f64, dtype: Dtype) -> Result<Self> {
        wrap(ffi::arange(start, stop, step, dtype as u8))
    }

    /// A matrix with ones on and below the given diagonal and zeros elsewhere.
    pub fn tri(rows: i32, columns: i32, diagonal: i32, dtype: Dtype) -> Result<Self> {
        wrap(ffi::tri(rows, columns, diagonal, dtype as u8))
    }

    /// The dimensions.
    pub fn shape(&self) -> Vec<i32> {
        ffi::shape(&self.0)
    }

    /// The size of dimension `axis`; negative counts from the end.
    ///
    /// # Errors
    /// When there is no such axis.
    pub fn dim(&self, axis: i32) -> Result<i32> {
        let shape = self.shape();
        let index = if axis < 0 { axis + shape.len() as i32 } else { axis };
        usize::try_from(index)
            .ok()
            .and_then(|i| shape.get(i).copied())
            .ok_or_else(|| Error::new(format!("array of {} dimensions has no axis {axis}", shape.len())))
    }

    /// Steps between neighbours of each dimension, in elements. Meaningful once evaluated.
    pub fn strides(&self) -> Vec<i64> {
        ffi::strides(&self.0)
    }

    /// Number of elements.
    pub fn size(&self) -> usize {
        ffi::size(&self.0)
    }

    /// Number of dimensions.
    pub fn ndim(&self) -> usize {
        ffi::ndim(&self.0)
    }

    /// Bytes of the elements (not of the buffer behind a view, see [`Array::buffer_bytes`]).
    pub fn nbytes(&self) -> usize {
        self.size() * self.dtype().size()
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        Dtype::from_code(ffi::dtype(&self.0))
    }

    /// Whether the elements lie in memory in row-major order without gaps. Meaningful once evaluated.
    pub fn is_row_contiguous(&self) -> bool {
        ffi::is_row_contiguous(&self.0)
    }

    /// Whether the value has been computed.
    pub fn is_available(&self) -> Result<bool> {
        Ok(ffi::is_available(&self.0)?)
    }

    /// Bytes of the whole buffer that keeps this array alive, larger than [`Array::nbytes`] for a view.
    ///
    /// # Errors
    /// When the array has not been evaluated.
    pub fn buffer_bytes(&self) -> Result<usize> {
        Ok(ffi::buffer_bytes(&self.0)?)
    }

    /// Computes the value and waits for it.
    pub fn eval(&self) -> Result<()> {
        Ok(ffi::eval(slice::from_ref(&self.0))?)
    }

    /// The same values under a new node without history, so that it holds nothing but its buffer.
    ///
    /// # Errors
    /// When the array has not been evaluated.
    pub fn detached(&self) -> Result<Self> {
        wrap(ffi::detached(&self.0))
    }

    /// Evaluates, and borrows the elements in row-major order without copying.
    ///
    /// # Errors
    /// When `T` is not the array's element type, the memory is not row contiguous (use
    /// [`Array::to_vec`]) or not aligned for `T`.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        if T::DTYPE != self.dtype() {
            return Err(Error::new(format!("array is {}, asked for {}", self.dtype(), T::DTYPE)));
        }
        bytemuck::try_cast_slice(self.as_bytes()?)
            .map_err(|_| Error::new(format!("array memory is not aligned for {}", T::DTYPE)))
    }

    /// Evaluates, and borrows the bytes of the elements in row-major order without copying.
    ///
    /// # Errors
    /// When the memory is not row contiguous.
    pub fn as_bytes(&self) -> Result<&[u8]> {
        self.eval()?;
        if self.size() == 0 {
            return Ok(&[]);
        }
        if !self.is_row_contiguous() {
            return Err(Error::new("array memory is not row contiguous"));
        }
        let data = ffi::data_ptr(&self.0)?;
        // SAFETY: the array is evaluated and row contiguous, so its elements are nbytes() initialized
        // bytes from `data`. While `self` is borrowed its buffer has an owner, so that no operation
        // takes the buffer over to write to it.
        Ok(unsafe { slice::from_raw_parts(data, self.nbytes()) })
    }

    /// Evaluates, and copies the elements out in row-major order.
    ///
    /// # Errors
    /// When `T` is not the array's element type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype() {
            return Err(Error::new(format!("array is {}, asked for {}", self.dtype(), T::DTYPE)));
        }
        let bytes = self.to_bytes()?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    /// Evaluates, and copies the bytes of the elements out in row-major order.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.eval()?;
        if self.is_row_contiguous() {
            return Ok(self.as_bytes()?.to_vec());
        }
        Ok(self.contiguous()?.as_bytes()?.to_vec())
    }

    /// Evaluates, and reads the only element, converted to `T`'s dtype.
    ///
    /// # Errors
    /// When the array does not have exactly one element.
    pub fn item<T: Element>(&self) -> Result<T> {
        if self.size() != 1 {
            return Err(Error::new(format!("array of shape {:?} is not a single element", self.shape())));
        }
        let values =
            if self.dtype() == T::DTYPE { self.to_vec()? } else { self.astype(T::DTYPE)?.to_vec()? };
        values.first().copied().ok_or_else(|| Error::new("array is empty"))
    }
}

impl fmt::Debug for Array {
    /// Shape and dtype; the values would have to be computed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({:?}, {})", self.shape(), self.dtype())
    }
}
