// The C++ side of the cxx bridge (src/bridge.rs). Thin: it converts argument types and nothing else,
// except for the primitive that runs Rust code and for arrays over memory that MLX does not own.
#pragma once

#include <cstring>
#include <memory>

#include "mlx/mlx.h"
#include "rust/cxx.h"

// `array` is one std::shared_ptr, which libstdc++ and libc++ allow to be moved with memcpy, so Rust
// may hold it inline.
static_assert(sizeof(mlx::core::array) == 2 * sizeof(void*));
static_assert(alignof(mlx::core::array) == alignof(void*));
template <>
struct rust::IsRelocatable<mlx::core::array> : std::true_type {};

namespace russet {

using mlx::core::array;
using Arrays = rust::Slice<const array>;
// Zero or one array.
using Optional = rust::Slice<const array>;
using Ints = rust::Slice<const int32_t>;

enum class Unary : uint8_t;
enum class Binary : uint8_t;
enum class Reduction : uint8_t;
enum class Scan : uint8_t;
struct Quantization;
struct KernelLaunch;
struct KernelSource;
struct TemplateArgument;
struct OutputSpec;
struct View;
struct RustOp;
struct RustFunction;
struct Owner;
struct DeviceProperty;
struct NamedString;

void array_drop(array& a) noexcept;
array array_clone(const array& a) noexcept;

array from_bytes(rust::Slice<const uint8_t> data, Ints shape, uint8_t dtype);
array from_external(const uint8_t* data, Ints shape, uint8_t dtype, rust::Box<Owner> owner);
array scalar_float(double value, uint8_t dtype);
array scalar_int(int64_t value, uint8_t dtype);
array full(Ints shape, const array& value, uint8_t dtype);
array arange(double start, double stop, double step, uint8_t dtype);
array tri(int32_t rows, int32_t columns, int32_t diagonal, uint8_t dtype);

rust::Vec<int32_t> shape(const array& a);
rust::Vec<int64_t> strides(const array& a);
size_t size(const array& a) noexcept;
size_t ndim(const array& a) noexcept;
uint8_t dtype(const array& a) noexcept;
bool is_row_contiguous(const array& a) noexcept;
bool is_available(const array& a);
const uint8_t* data_ptr(const array& a);
size_t buffer_bytes(const array& a);
array detached(const array& a);

void eval(Arrays a);
void async_eval(Arrays a);
void synchronize();

array unary(Unary op, const array& a);
array binary(Binary op, const array& a, const array& b);
array reduce(Reduction op, const array& a, Ints axes, bool keepdims);
array scan(Scan op, const array& a, int32_t axis, bool reverse, bool inclusive);
array softmax(const array& a, int32_t axis, bool precise);
array round(const array& a, int32_t decimals);
array clip(const array& a, Optional low, Optional high);
array where(const array& condition, const array& a, const array& b);
array astype(const array& a, uint8_t dtype);
array view(const array& a, uint8_t dtype);
array array_equal(const array& a, const array& b, bool equal_nan);

array reshape(const array& a, Ints shape);
array flatten(const array& a, int32_t start, int32_t end);
array unflatten(const array& a, int32_t axis, Ints shape);
array transpose(const array& a, Ints axes);
array swap_axes(const array& a, int32_t a1, int32_t a2);
array move_axis(const array& a, int32_t source, int32_t destination);
array expand_dims(const array& a, Ints axes);
array squeeze(const array& a, Ints axes);
array broadcast_to(const array& a, Ints shape);
array contiguous(const array& a);
array copy(const array& a);
array slice(const array& a, Ints start, Ints stop, Ints strides);
array slice_update(const array& a, const array& update, Ints start, Ints stop, Ints strides);
array dynamic_slice(const array& a, const array& start, Ints axes, Ints size);
array dynamic_slice_update(const array& a, const array& update, const array& start, Ints axes);
array concatenate(Arrays a, int32_t axis);
array stack(Arrays a, int32_t axis);
rust::Vec<array> split(const array& a, Ints indices, int32_t axis);
array repeat(const array& a, int32_t repeats, int32_t axis);
array tile(const array& a, Ints repetitions);
array pad(const array& a, Ints low, Ints high, const array& value);
array roll(const array& a, int32_t shift, int32_t axis);

array take(const array& a, const array& indices, int32_t axis);
array take_along_axis(const array& a, const array& indices, int32_t axis);
array put_along_axis(const array& a, const array& indices, const array& values, int32_t axis);
array gather(const array& a, Arrays indices, Ints axes, Ints slice_sizes);
array scatter(const array& a, Arrays indices, const array& updates, Ints axes);
array scatter_add(const array& a, Arrays indices, const array& updates, Ints axes);

array argmax(const array& a, int32_t axis, bool keepdims);
array argmin(const array& a, int32_t axis, bool keepdims);
array sort(const array& a, int32_t axis);
array argsort(const array& a, int32_t axis);
array partition(const array& a, int32_t kth, int32_t axis);
array argpartition(const array& a, int32_t kth, int32_t axis);
array topk(const array& a, int32_t k, int32_t axis);

array matmul(const array& a, const array& b);
array addmm(const array& c, const array& a, const array& b, float alpha, float beta);
array gather_mm(const array& a, const array& b, Optional lhs, Optional rhs, bool sorted);
rust::Vec<array> quantize(const array& w, const Quantization& q, Optional global_scale);
array dequantize(const array& w, const array& scales, Optional biases, const Quantization& q, Optional global_scale,
                 int32_t dtype);
array quantized_matmul(const array& x, const array& w, const array& scales, Optional biases, bool transpose,
                       const Quantization& q);
array gather_qmm(const array& x, const array& w, const array& scales, Optional biases, Optional lhs, Optional rhs,
                 bool transpose, const Quantization& q, Optional global_scale, bool sorted);
array qqmm(const array& x, const array& w, Optional scales, const Quantization& q);
array conv1d(const array& input, const array& weight, int32_t stride, int32_t padding, int32_t dilation, int32_t groups);
array conv_general(const array& input, const array& weight, Ints stride, Ints padding, Ints dilation, int32_t groups);

array rms_norm(const array& x, Optional weight, float eps);
array layer_norm(const array& x, Optional weight, Optional bias, float eps);
array rope(const array& x, int32_t dims, bool traditional, float base, bool has_base, float scale, const array& offset,
           Optional freqs);
array rope_at(const array& x, int32_t dims, bool traditional, float base, bool has_base, float scale, int32_t offset,
              Optional freqs);
array scaled_dot_product_attention(const array& q, const array& k, const array& v, float scale, rust::Str mode,
                                   Optional mask, Optional sinks);

array random_key(uint64_t seed);
array random_split(const array& key, int32_t count);
array random_uniform(const array& low, const array& high, Ints shape, uint8_t dtype, const array& key);
array random_normal(Ints shape, uint8_t dtype, const array& key);
array random_randint(const array& low, const array& high, Ints shape, uint8_t dtype, const array& key);
array random_categorical(const array& logits, int32_t axis, const array& key);
array random_gumbel(Ints shape, uint8_t dtype, const array& key);

rust::Vec<array> rust_primitive(rust::Box<RustOp> op, Arrays inputs, rust::Slice<const OutputSpec> outputs);

struct Compiled;
std::shared_ptr<Compiled> compile(rust::Box<RustFunction> function, bool shapeless);
rust::Vec<array> call(const Compiled& f, Arrays inputs);

struct Kernel;
std::shared_ptr<Kernel> metal_kernel(const KernelSource& source);
std::shared_ptr<Kernel> cuda_kernel(const KernelSource& source);
rust::Vec<array> launch(const Kernel& kernel, Arrays inputs, const KernelLaunch& launch);

rust::Vec<array> load_safetensors(rust::Str path, rust::Vec<rust::String>& names, rust::Vec<NamedString>& metadata);
void save_safetensors(rust::Str path, rust::Slice<const rust::String> names, Arrays arrays,
                      rust::Slice<const NamedString> metadata);

rust::String version();
bool metal_available();
bool cuda_available();
bool gpu_available();
bool default_device_is_gpu();
void set_default_device(bool gpu);
rust::Vec<DeviceProperty> device_info();
int32_t new_stream(bool gpu);
int32_t default_stream(bool gpu);
void set_default_stream(int32_t index, bool gpu);
void clear_streams();

size_t active_memory();
size_t peak_memory();
void reset_peak_memory();
size_t cache_memory();
void clear_cache();
void trim_memory();
void drop_code();
size_t set_memory_limit(size_t bytes);
size_t set_cache_limit(size_t bytes);
size_t set_wired_limit(size_t bytes);

} // namespace russet
