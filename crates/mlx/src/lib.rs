//! Safe binding to Apple's [MLX](https://github.com/ml-explore/mlx) array library.
//!
//! The crate links the library as its makers build it (see `build.rs`), the one the Python reference
//! runs, which is what makes bit-exact comparison meaningful.
//!
//! # Rules
//!
//! - **Lazy arrays.** An [`Array`] is a node of a graph; [`eval`], [`async_eval`] and the accessors
//!   that return data run it.
//! - **One thread.** MLX's streams belong to the thread that made them, so `Array` is neither `Send`
//!   nor `Sync`: one thread owns all graphs.
//! - **Errors are values.** Every operation returns a [`Result`] with MLX's message.
//! - **Weak scalars.** A number next to an array takes the array's dtype, as in MLX's Python API:
//!   see [`Operand`]. There is no way to meet an array with a strong `f32` by accident.

mod array;
#[allow(unsafe_code)]
mod bridge;
mod custom;
mod device;
mod dtype;
mod error;
pub mod fast;
mod io;
mod kernel;
#[allow(unsafe_code)]
mod mapped;
pub mod memory;
mod ops;
mod quantized;
pub mod random;
mod transforms;

pub use array::{Array, IntoShape, Operand};
pub use custom::{CpuOp, Input, Output, OutputSpec, custom};
pub use device::{Device, DeviceInfo, Stream};
pub use dtype::{Dtype, Element};
pub use error::{Error, Result};
pub use io::{SafetensorsFile, load_safetensors, save_safetensors};
pub use kernel::{Backend, Kernel, KernelLaunch, KernelSource, TemplateArgument};
pub use mapped::{MappedFile, MappedSlice};
pub use ops::{concatenate, select, stack};
pub use quantized::{Quantization, QuantizationMode, Quantized};
pub use transforms::{Compiled, async_eval, compile, eval};

/// The version of the linked MLX library.
pub fn version() -> String {
    bridge::ffi::version()
}
