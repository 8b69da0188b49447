use std::rc::Rc;

use crate::array::{raw, wrap_all};
use crate::bridge::ffi;
use crate::custom::OutputSpec;
use crate::{Array, Dtype, Error, Result};

/// The language of a custom GPU kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Metal Shading Language (`mlx.core.fast.metal_kernel`).
    Metal,
    /// CUDA C++ (`mlx.core.fast.cuda_kernel`).
    Cuda,
}

/// The source of a custom GPU kernel. MLX generates the signature from the names.
#[derive(Clone, Debug)]
pub struct KernelSource {
    /// A name for caches and error messages.
    pub name: String,
    /// Input names as the body uses them.
    pub inputs: Vec<String>,
    /// Output names as the body uses them.
    pub outputs: Vec<String>,
    /// The body of the kernel function.
    pub body: String,
    /// Code before the kernel function.
    pub header: String,
    /// Copy inputs to row-major memory first.
    pub ensure_row_contiguous: bool,
    /// Metal: outputs are atomic types.
    pub atomic_outputs: bool,
    /// CUDA: bytes of dynamic shared memory.
    pub shared_memory: i32,
}

/// The value of a kernel template parameter.
#[derive(Clone, Copy, Debug)]
pub enum TemplateArgument {
    /// `int`
    Int(i32),
    /// `bool`
    Bool(bool),
    /// A type name.
    Dtype(Dtype),
}

/// One run of a kernel.
#[derive(Clone, Debug)]
pub struct KernelLaunch<'a> {
    /// Shape and dtype of each output.
    pub outputs: Vec<(Vec<i32>, Dtype)>,
    /// Threads in each dimension.
    pub grid: [i32; 3],
    /// Threads of one group in each dimension.
    pub threadgroup: [i32; 3],
    /// Template parameters by name.
    pub template_arguments: Vec<(&'a str, TemplateArgument)>,
    /// Value to fill the outputs with first.
    pub init_value: Option<f32>,
}

/// A custom GPU kernel.
///
/// Making a Metal kernel succeeds everywhere and fails at evaluation without Metal; making a CUDA
/// kernel fails without CUDA.
#[derive(Clone)]
pub struct Kernel {
    kernel: cxx::SharedPtr<ffi::Kernel>,
    // Compiled code and streams belong to a thread.
    _not_send: std::marker::PhantomData<Rc<()>>,
}

impl Kernel {
    /// Prepares a kernel; it is compiled at its first run.
    pub fn new(backend: Backend, source: KernelSource) -> Result<Self> {
        let source = ffi::KernelSource {
            name: source.name,
            inputs: source.inputs,
            outputs: source.outputs,
            body: source.body,
            header: source.header,
            ensure_row_contiguous: source.ensure_row_contiguous,
            atomic_outputs: source.atomic_outputs,
            shared_memory: source.shared_memory,
        };
        let kernel = match backend {
            Backend::Metal => ffi::metal_kernel(&source)?,
            Backend::Cuda => ffi::cuda_kernel(&source)?,
        };
        Ok(Self { kernel, _not_send: std::marker::PhantomData })
    }

    /// Adds a run to the graph; returns the outputs.
    pub fn launch(&self, inputs: &[Array], launch: &KernelLaunch<'_>) -> Result<Vec<Array>> {
        let kernel = self.kernel.as_ref().ok_or_else(|| Error::new("kernel was not made"))?;
        let template_arguments = launch
            .template_arguments
            .iter()
            .map(|&(name, value)| {
                let (value, kind) = match value {
                    TemplateArgument::Int(v) => (i64::from(v), 0),
                    TemplateArgument::Bool(v) => (i64::from(v), 1),
                    TemplateArgument::Dtype(v) => (v as i64, 2),
                };
                ffi::TemplateArgument { name: name.to_owned(), value, kind }
            })
            .collect();
        let outputs = launch
            .outputs
            .iter()
            .map(|(shape, dtype)| OutputSpec::new(shape.clone(), *dtype).into_ffi())
            .collect();
        let launch = ffi::KernelLaunch {
            outputs,
            grid: launch.grid,
            threadgroup: launch.threadgroup,
            template_arguments,
            init_value: launch.init_value.unwrap_or_default(),
            has_init_value: launch.init_value.is_some(),
        };
        wrap_all(ffi::launch(kernel, raw(inputs), &launch))
    }
}
