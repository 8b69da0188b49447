//! The cxx bridge: declarations of the C++ shim in `cpp/shim.h`.
//!
//! Private to this crate. Every function that can throw returns a `Result`.
#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::too_many_arguments,
    clippy::undocumented_unsafe_blocks
)]

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::custom::{RustOp, run_op};
use crate::transforms::{RustFunction, run_function};

/// The two words of `mlx::core::array` (one `std::shared_ptr`), owned inline so that `&[Array]`
/// crosses the bridge without allocation.
#[repr(C)]
pub(crate) struct RawArray([*mut u8; 2], PhantomData<*mut u8>);

// SAFETY: shim.h asserts size and alignment, and that a shared_ptr may be moved by memcpy.
unsafe impl cxx::ExternType for RawArray {
    type Id = cxx::type_id!("mlx::core::array");
    type Kind = cxx::kind::Trivial;
}

impl Drop for RawArray {
    fn drop(&mut self) {
        ffi::array_drop(self);
    }
}

impl Clone for RawArray {
    fn clone(&self) -> Self {
        ffi::array_clone(self)
    }
}

/// Keeps memory alive that an array borrows. MLX may drop it on one of its own threads.
pub(crate) struct Owner(#[allow(dead_code)] pub(crate) Arc<dyn Any + Send + Sync>);

#[cxx::bridge(namespace = "russet")]
pub(crate) mod ffi {
    enum Unary {
        Abs,
        Negative,
        Sign,
        LogicalNot,
        Floor,
        Ceil,
        Square,
        Sqrt,
        Rsqrt,
        Reciprocal,
        Exp,
        Expm1,
        Log,
        Log1p,
        Sin,
        Cos,
        Tanh,
        Erf,
        Sigmoid,
        IsNan,
        IsInf,
        IsFinite,
    }

    enum Binary {
        Add,
        Subtract,
        Multiply,
        Divide,
        FloorDivide,
        Remainder,
        Power,
        Maximum,
        Minimum,
        LogAddExp,
        Equal,
        NotEqual,
        Less,
        LessEqual,
        Greater,
        GreaterEqual,
        LogicalAnd,
        LogicalOr,
        BitwiseAnd,
        BitwiseOr,
        LeftShift,
        RightShift,
    }

    enum Reduction {
        Sum,
        Prod,
        Max,
        Min,
        Mean,
        LogSumExp,
        All,
        Any,
    }

    enum Scan {
        Sum,
        Prod,
        Max,
        Min,
    }

    struct Quantization {
        group_size: i32,
        bits: i32,
        mode: String,
    }

    /// One operand of an operation written in Rust, valid during the call.
    struct View<'a> {
        data: *mut u8,
        shape: &'a [i32],
        strides: &'a [i64],
        /// Bytes from the first element to the end of the last one in memory.
        extent: usize,
        dtype: u8,
        row_contiguous: bool,
    }

    struct OutputSpec {
        shape: Vec<i32>,
        dtype: u8,
        /// Index of the input whose contents the output starts with, or -1.
        in_place: i32,
    }

    struct KernelSource {
        name: String,
        inputs: Vec<String>,
        outputs: Vec<String>,
        body: String,
        header: String,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
        shared_memory: i32,
    }

    struct TemplateArgument {
        name: String,
        value: i64,
        /// 0 integer, 1 bool, 2 dtype code.
        kind: u8,
    }

    struct KernelLaunch {
        outputs: Vec<OutputSpec>,
        grid: [i32; 3],
        threadgroup: [i32; 3],
        template_arguments: Vec<TemplateArgument>,
        init_value: f32,
        has_init_value: bool,
    }

    struct DeviceProperty {
        name: String,
        text: String,
        number: usize,
    }

    struct NamedString {
        name: String,
        value: String,
    }

    extern "Rust" {
        type Owner;
        type RustOp;
        fn run_op(op: &RustOp, inputs: &[View], outputs: &[View]) -> Result<()>;
        type RustFunction;
        fn run_function(function: &RustFunction, inputs: &[RawArray]) -> Result<Vec<RawArray>>;
    }

    impl Vec<RawArray> {}

    unsafe extern "C++" {
        include!("shim.h");

        #[namespace = "mlx::core"]
        #[cxx_name = "array"]
        type RawArray = crate::bridge::RawArray;
        type Compiled;
        type Kernel;

        fn array_drop(a: &mut RawArray);
        fn array_clone(a: &RawArray) -> RawArray;

        fn from_bytes(data: &[u8], shape: &[i32], dtype: u8) -> Result<RawArray>;
        unsafe fn from_external(
            data: *const u8,
            shape: &[i32],
            dtype: u8,
            owner: Box<Owner>,
        ) -> Result<RawArray>;
        fn scalar_float(value: f64, dtype: u8) -> Result<RawArray>;
        fn scalar_int(value: i64, dtype: u8) -> Result<RawArray>;
        fn full(shape: &[i32], value: &RawArray, dtype: u8) -> Result<RawArray>;
        fn arange(start: f64, stop: f64, step: f64, dtype: u8) -> Result<RawArray>;
        fn tri(rows: i32, columns: i32, diagonal: i32, dtype: u8) -> Result<RawArray>;

        fn shape(a: &RawArray) -> Vec<i32>;
        fn strides(a: &RawArray) -> Vec<i64>;
        fn size(a: &RawArray) -> usize;
        fn ndim(a: &RawArray) -> usize;
        fn dtype(a: &RawArray) -> u8;
        fn is_row_contiguous(a: &RawArray) -> bool;
        fn is_available(a: &RawArray) -> Result<bool>;
        fn data_ptr(a: &RawArray) -> Result<*const u8>;
        fn buffer_bytes(a: &RawArray) -> Result<usize>;
        fn detached(a: &RawArray) -> Result<RawArray>;

        fn eval(a: &[RawArray]) -> Result<()>;
        fn async_eval(a: &[RawArray]) -> Result<()>;
        fn synchronize() -> Result<()>;

        fn unary(op: Unary, a: &RawArray) -> Result<RawArray>;
        fn binary(op: Binary, a: &RawArray, b: &RawArray) -> Result<RawArray>;
        fn reduce(op: Reduction, a: &RawArray, axes: &[i32], keepdims: bool) -> Result<RawArray>;
        fn scan(op: Scan, a: &RawArray, axis: i32, reverse: bool, inclusive: bool) -> Result<RawArray>;
        fn softmax(a: &RawArray, axis: i32, precise: bool) -> Result<RawArray>;
        fn round(a: &RawArray, decimals: i32) -> Result<RawArray>;
        fn clip(a: &RawArray, low: &[RawArray], high: &[RawArray]) -> Result<RawArray>;
        #[cxx_name = "where"]
        fn where_(condition: &RawArray, a: &RawArray, b: &RawArray) -> Result<RawArray>;
        fn astype(a: &RawArray, dtype: u8) -> Result<RawArray>;
        fn view(a: &RawArray, dtype: u8) -> Result<RawArray>;
        fn array_equal(a: &RawArray, b: &RawArray, equal_nan: bool) -> Result<RawArray>;

        fn reshape(a: &RawArray, shape: &[i32]) -> Result<RawArray>;
        fn flatten(a: &RawArray, start: i32, end: i32) -> Result<RawArray>;
        fn unflatten(a: &RawArray, axis: i32, shape: &[i32]) -> Result<RawArray>;
        fn transpose(a: &RawArray, axes: &[i32]) -> Result<RawArray>;
        fn swap_axes(a: &RawArray, a1: i32, a2: i32) -> Result<RawArray>;
        fn move_axis(a: &RawArray, source: i32, destination: i32) -> Result<RawArray>;
        fn expand_dims(a: &RawArray, axes: &[i32]) -> Result<RawArray>;
        fn squeeze(a: &RawArray, axes: &[i32]) -> Result<RawArray>;
        fn broadcast_to(a: &RawArray, shape: &[i32]) -> Result<RawArray>;
        fn contiguous(a: &RawArray) -> Result<RawArray>;
        fn copy(a: &RawArray) -> Result<RawArray>;
        fn slice(a: &RawArray, start: &[i32], stop: &[i32], strides: &[i32]) -> Result<RawArray>;
        fn slice_update(
            a: &RawArray,
            update: &RawArray,
            start: &[i32],
            stop: &[i32],
            strides: &[i32],
        ) -> Result<RawArray>;
        fn dynamic_slice(a: &RawArray, start: &RawArray, axes: &[i32], size: &[i32]) -> Result<RawArray>;
        fn dynamic_slice_update(
            a: &RawArray,
            update: &RawArray,
            start: &RawArray,
            axes: &[i32],
        ) -> Result<RawArray>;
        fn concatenate(a: &[RawArray], axis: i32) -> Result<RawArray>;
        fn stack(a: &[RawArray], axis: i32) -> Result<RawArray>;
        fn split(a: &RawArray, indices: &[i32], axis: i32) -> Result<Vec<RawArray>>;
        fn repeat(a: &RawArray, repeats: i32, axis: i32) -> Result<RawArray>;
        fn tile(a: &RawArray, repetitions: &[i32]) -> Result<RawArray>;
        fn pad(a: &RawArray, low: &[i32], high: &[i32], value: &RawArray) -> Result<RawArray>;
        fn roll(a: &RawArray, shift: i32, axis: i32) -> Result<RawArray>;

        fn take(a: &RawArray, indices: &RawArray, axis: i32) -> Result<RawArray>;
        fn take_along_axis(a: &RawArray, indices: &RawArray, axis: i32) -> Result<RawArray>;
        fn put_along_axis(a: &RawArray, indices: &RawArray, values: &RawArray, axis: i32)
        -> Result<RawArray>;
        fn gather(a: &RawArray, indices: &[RawArray], axes: &[i32], slice_sizes: &[i32]) -> Result<RawArray>;
        fn scatter(a: &RawArray, indices: &[RawArray], updates: &RawArray, axes: &[i32]) -> Result<RawArray>;
        fn scatter_add(
            a: &RawArray,
            indices: &[RawArray],
            updates: &RawArray,
            axes: &[i32],
        ) -> Result<RawArray>;

        fn argmax(a: &RawArray, axis: i32, keepdims: bool) -> Result<RawArray>;
        fn argmin(a: &RawArray, axis: i32, keepdims: bool) -> Result<RawArray>;
        fn sort(a: &RawArray, axis: i32) -> Result<RawArray>;
        fn argsort(a: &RawArray, axis: i32) -> Result<RawArray>;
        fn partition(a: &RawArray, kth: i32, axis: i32) -> Result<RawArray>;
        fn argpartition(a: &RawArray, kth: i32, axis: i32) -> Result<RawArray>;
        fn topk(a: &RawArray, k: i32, axis: i32) -> Result<RawArray>;

        fn matmul(a: &RawArray, b: &RawArray) -> Result<RawArray>;
        fn addmm(c: &RawArray, a: &RawArray, b: &RawArray, alpha: f32, beta: f32) -> Result<RawArray>;
        fn gather_mm(
            a: &RawArray,
            b: &RawArray,
            lhs: &[RawArray],
            rhs: &[RawArray],
            sorted: bool,
        ) -> Result<RawArray>;
        fn quantize(w: &RawArray, q: &Quantization, global_scale: &[RawArray]) -> Result<Vec<RawArray>>;
        fn dequantize(
            w: &RawArray,
            scales: &RawArray,
            biases: &[RawArray],
            q: &Quantization,
            global_scale: &[RawArray],
            dtype: i32,
        ) -> Result<RawArray>;
        fn quantized_matmul(
            x: &RawArray,
            w: &RawArray,
            scales: &RawArray,
            biases: &[RawArray],
            transpose: bool,
            q: &Quantization,
        ) -> Result<RawArray>;
        fn gather_qmm(
            x: &RawArray,
            w: &RawArray,
            scales: &RawArray,
            biases: &[RawArray],
            lhs: &[RawArray],
            rhs: &[RawArray],
            transpose: bool,
            q: &Quantization,
            global_scale: &[RawArray],
            sorted: bool,
        ) -> Result<RawArray>;
        fn qqmm(x: &RawArray, w: &RawArray, scales: &[RawArray], q: &Quantization) -> Result<RawArray>;
        fn conv1d(
            input: &RawArray,
            weight: &RawArray,
            stride: i32,
            padding: i32,
            dilation: i32,
            groups: i32,
        ) -> Result<RawArray>;
        fn conv_general(
            input: &RawArray,
            weight: &RawArray,
            stride: &[i32],
            padding: &[i32],
            dilation: &[i32],
            groups: i32,
        ) -> Result<RawArray>;

        fn rms_norm(x: &RawArray, weight: &[RawArray], eps: f32) -> Result<RawArray>;
        fn layer_norm(x: &RawArray, weight: &[RawArray], bias: &[RawArray], eps: f32) -> Result<RawArray>;
        fn rope(
            x: &RawArray,
            dims: i32,
            traditional: bool,
            base: f32,
            has_base: bool,
            scale: f32,
            offset: &RawArray,
            freqs: &[RawArray],
        ) -> Result<RawArray>;
        fn rope_at(
            x: &RawArray,
            dims: i32,
            traditional: bool,
            base: f32,
            has_base: bool,
            scale: f32,
            offset: i32,
            freqs: &[RawArray],
        ) -> Result<RawArray>;
        fn scaled_dot_product_attention(
            q: &RawArray,
            k: &RawArray,
            v: &RawArray,
            scale: f32,
            mode: &str,
            mask: &[RawArray],
            sinks: &[RawArray],
        ) -> Result<RawArray>;

        fn random_key(seed: u64) -> Result<RawArray>;
        fn random_split(key: &RawArray, count: i32) -> Result<RawArray>;
        fn random_uniform(
            low: &RawArray,
            high: &RawArray,
            shape: &[i32],
            dtype: u8,
            key: &RawArray,
        ) -> Result<RawArray>;
        fn random_normal(shape: &[i32], dtype: u8, key: &RawArray) -> Result<RawArray>;
        fn random_randint(
            low: &RawArray,
            high: &RawArray,
            shape: &[i32],
            dtype: u8,
            key: &RawArray,
        ) -> Result<RawArray>;
        fn random_categorical(logits: &RawArray, axis: i32, key: &RawArray) -> Result<RawArray>;
        fn random_gumbel(shape: &[i32], dtype: u8, key: &RawArray) -> Result<RawArray>;

        fn rust_primitive(
            op: Box<RustOp>,
            inputs: &[RawArray],
            outputs: &[OutputSpec],
        ) -> Result<Vec<RawArray>>;

        fn compile(function: Box<RustFunction>, shapeless: bool) -> Result<SharedPtr<Compiled>>;
        fn call(f: &Compiled, inputs: &[RawArray]) -> Result<Vec<RawArray>>;

        fn metal_kernel(source: &KernelSource) -> Result<SharedPtr<Kernel>>;
        fn cuda_kernel(source: &KernelSource) -> Result<SharedPtr<Kernel>>;
        fn launch(kernel: &Kernel, inputs: &[RawArray], launch: &KernelLaunch) -> Result<Vec<RawArray>>;

        fn load_safetensors(
            path: &str,
            names: &mut Vec<String>,
            metadata: &mut Vec<NamedString>,
        ) -> Result<Vec<RawArray>>;
        fn save_safetensors(
            path: &str,
            names: &[String],
            arrays: &[RawArray],
            metadata: &[NamedString],
        ) -> Result<()>;

        fn version() -> String;
        fn metal_available() -> bool;
        fn cuda_available() -> bool;
        fn gpu_available() -> bool;
        fn default_device_is_gpu() -> bool;
        fn set_default_device(gpu: bool) -> Result<()>;
        fn device_info() -> Result<Vec<DeviceProperty>>;
        fn new_stream(gpu: bool) -> Result<i32>;
        fn default_stream(gpu: bool) -> Result<i32>;
        fn set_default_stream(index: i32, gpu: bool) -> Result<()>;
        fn clear_streams() -> Result<()>;

        fn active_memory() -> usize;
        fn peak_memory() -> usize;
        fn reset_peak_memory();
        fn cache_memory() -> usize;
        fn clear_cache() -> Result<()>;
        fn trim_memory();
        fn drop_code();
        fn set_memory_limit(bytes: usize) -> Result<usize>;
        fn set_cache_limit(bytes: usize) -> Result<usize>;
        fn set_wired_limit(bytes: usize) -> Result<usize>;
    }
}
