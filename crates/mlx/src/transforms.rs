#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::array::{raw, wrap_all};
use crate::bridge::{RawArray, ffi};
use crate::{Array, Error, Result};

/// Computes the arrays and waits for them.
pub fn eval(arrays: &[Array]) -> Result<()> {
    Ok(ffi::eval(raw(arrays))?)
}

/// Starts computing the arrays. Errors surface where a value is waited for.
pub fn async_eval(arrays: &[Array]) -> Result<()> {
    Ok(ffi::async_eval(raw(arrays))?)
}

type BoxedFunction = Box<dyn Fn(&[Array]) -> Result<Vec<Array>>>;

/// The Rust side of a compiled function.
pub(crate) struct RustFunction(BoxedFunction);

pub(crate) fn run_function(function: &RustFunction, inputs: &[RawArray]) -> Result<Vec<RawArray>> {
    // SAFETY: Array is a transparent wrapper of RawArray.
    let inputs: &[Array] = unsafe { std::slice::from_raw_parts(inputs.as_ptr().cast(), inputs.len()) };
    // The function only reads its captures, so that a panic leaves nothing half-changed.
    let outputs = catch_unwind(AssertUnwindSafe(|| (function.0)(inputs)))
        .map_err(|_| Error::new("panic in a compiled function"))??;
    Ok(outputs.into_iter().map(|a| a.0).collect())
}

/// A function that MLX has traced and fused.
pub struct Compiled {
    function: cxx::SharedPtr<ffi::Compiled>,
}

/// Compiles a pure function of arrays (`mlx.core.compile`). It is traced at its first call, and again
/// for new dtypes, or for new shapes unless `shapeless`.
///
/// On the CPU MLX compiles fused functions with a C++ compiler at run time: use it on GPUs only.
pub fn compile(
    function: impl Fn(&[Array]) -> Result<Vec<Array>> + 'static,
    shapeless: bool,
) -> Result<Compiled> {
    Ok(Compiled { function: ffi::compile(Box::new(RustFunction(Box::new(function))), shapeless)? })
}

impl Compiled {
    /// Adds a call to the graph.
    pub fn call(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let function = self.function.as_ref().ok_or_else(|| Error::new("function was not compiled"))?;
        wrap_all(ffi::call(function, raw(inputs)))
    }
}
