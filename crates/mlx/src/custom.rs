#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

use crate::array::{raw, wrap_all};
use crate::bridge::ffi;
use crate::{Array, Dtype, Element, Error, Result};

/// A CPU operation written in Rust, run by MLX as a node of the graph.
///
/// It runs on a thread of MLX, after its inputs are computed.
pub trait CpuOp: Send + Sync + 'static {
    /// Computes `outputs` from `inputs`. Inputs that an output started from (see
    /// [`OutputSpec::in_place`]) are not among `inputs`. A panic becomes an error.
    fn run(&self, inputs: &[Input<'_>], outputs: &mut [Output<'_>]) -> Result<()>;
}

/// What an operation returns in one position.
#[derive(Clone, Debug)]
pub struct OutputSpec {
    shape: Vec<i32>,
    dtype: Dtype,
    in_place: Option<usize>,
}

impl OutputSpec {
    /// A new buffer with undefined contents (zeroed bytes are not promised).
    pub fn new(shape: Vec<i32>, dtype: Dtype) -> Self {
        Self { shape, dtype, in_place: None }
    }

    /// An output that starts with the contents of input `index`, which must have the same shape and
    /// dtype and be row contiguous. Its buffer is taken over when nothing else holds it, else copied.
    pub fn in_place(shape: Vec<i32>, dtype: Dtype, index: usize) -> Self {
        Self { shape, dtype, in_place: Some(index) }
    }

    pub(crate) fn into_ffi(self) -> ffi::OutputSpec {
        let in_place = self.in_place.map_or(-1, |i| i32::try_from(i).unwrap_or(i32::MAX));
        ffi::OutputSpec { shape: self.shape, dtype: self.dtype as u8, in_place }
    }
}

/// Adds an operation written in Rust to the graph.
///
/// # Errors
/// When an in-place output does not fit its input. Errors of the operation itself surface when an
/// output is evaluated.
pub fn custom(op: impl CpuOp, inputs: &[Array], outputs: Vec<OutputSpec>) -> Result<Vec<Array>> {
    let outputs: Vec<_> = outputs.into_iter().map(OutputSpec::into_ffi).collect();
    wrap_all(ffi::rust_primitive(Box::new(RustOp(Box::new(op))), raw(inputs), &outputs))
}

/// The Rust side of a custom operation.
pub(crate) struct RustOp(Box<dyn CpuOp>);

/// Entry from C++, on a thread of MLX.
pub(crate) fn run_op(op: &RustOp, inputs: &[ffi::View<'_>], outputs: &[ffi::View<'_>]) -> Result<()> {
    let inputs: Vec<Input<'_>> = inputs.iter().map(Input).collect();
    let mut outputs: Vec<Output<'_>> = outputs.iter().map(Output).collect();
    // A panic leaves only the outputs undefined, and the error keeps them from being read.
    catch_unwind(AssertUnwindSafe(|| op.0.run(&inputs, &mut outputs)))
        .unwrap_or_else(|_| Err(Error::new("panic in an operation written in Rust")))
}

/// An evaluated input of a [`CpuOp`].
pub struct Input<'a>(&'a ffi::View<'a>);

/// An output buffer of a [`CpuOp`], row contiguous.
pub struct Output<'a>(&'a ffi::View<'a>);

impl<'a> Input<'a> {
    /// The dimensions.
    pub fn shape(&self) -> &'a [i32] {
        self.0.shape
    }

    /// Steps between neighbours of each dimension, in elements.
    pub fn strides(&self) -> &'a [i64] {
        self.0.strides
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        Dtype::from_code(self.0.dtype)
    }

    /// The elements in row-major order.
    ///
    /// # Errors
    /// When `T` is not the element type, or the memory is not row contiguous or not aligned for `T`.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        cast(self.as_bytes()?, self.dtype())
    }

    /// The bytes of the elements in row-major order, at any alignment.
    ///
    /// # Errors
    /// When the memory is not row contiguous.
    pub fn as_bytes(&self) -> Result<&'a [u8]> {
        if !self.0.row_contiguous {
            return Err(Error::new("input is not row contiguous"));
        }
        let bytes = elements(self.0.shape) * self.dtype().size();
        // SAFETY: MLX has computed the input; row contiguous means that its elements are the `bytes`
        // bytes from `data`. Nothing writes to it while its consumer runs.
        Ok(unsafe { bytes_at(self.0.data, bytes) })
    }

    /// The memory that the strides of a view walk over, from its first element on.
    ///
    /// # Errors
    /// When `T` is not the element type or the memory is not aligned for it.
    pub fn as_strided<T: Element>(&self) -> Result<(&'a [T], &'a [i64])> {
        if self.0.strides.iter().any(|&s| s < 0) {
            return Err(Error::new("input has negative strides"));
        }
        let last: i64 =
            self.0.shape.iter().zip(self.0.strides).map(|(&n, &s)| i64::from(n.max(1) - 1) * s).sum();
        let count = if elements(self.0.shape) == 0 { 0 } else { last as usize + 1 };
        // SAFETY: with non-negative strides `last` is the position of the view's last element, and MLX
        // keeps every element of a view inside its buffer.
        let bytes = unsafe { bytes_at(self.0.data, count * self.dtype().size()) };
        Ok((cast(bytes, self.dtype())?, self.0.strides))
    }
}

impl Output<'_> {
    /// The dimensions.
    pub fn shape(&self) -> &[i32] {
        self.0.shape
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        Dtype::from_code(self.0.dtype)
    }

    /// The elements in row-major order.
    ///
    /// # Errors
    /// When `T` is not the element type.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let dtype = self.dtype();
        if T::DTYPE != dtype {
            return Err(Error::new(format!("output is {dtype}, asked for {}", T::DTYPE)));
        }
        let bytes = elements(self.0.shape) * dtype.size();
        if bytes == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the buffer was allocated for this output, or taken over from an input that the
        // operation does not see; `&mut self` makes this the only borrow. Any bits are valid elements.
        let bytes = unsafe { slice::from_raw_parts_mut(self.0.data, bytes) };
        bytemuck::try_cast_slice_mut(bytes).map_err(|_| Error::new("output memory is not aligned"))
    }
}

fn elements(shape: &[i32]) -> usize {
    shape.iter().map(|&n| n.max(0) as usize).product()
}

fn cast<T: Element>(bytes: &[u8], dtype: Dtype) -> Result<&[T]> {
    if T::DTYPE != dtype {
        return Err(Error::new(format!("input is {dtype}, asked for {}", T::DTYPE)));
    }
    bytemuck::try_cast_slice(bytes)
        .map_err(|_| Error::new(format!("input memory is not aligned for {}", T::DTYPE)))
}

/// # Safety
/// `data` must be readable for `length` bytes during `'a`, unless `length` is 0.
unsafe fn bytes_at<'a>(data: *const u8, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts(data, length) }
}
