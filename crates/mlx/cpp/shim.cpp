#include "shim.h"

#include <cstdlib>  // defines __GLIBC__, where that is what it is
#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "mlx/backend/cpu/encoder.h"
#include "mlx/backend/cuda/cuda.h"
#include "mlx/backend/metal/metal.h"
#include "mlx/fast.h"
#include "mlx/primitives.h"
#include "mlx/version.h"
#include "russet-mlx/src/bridge.rs.h"

namespace russet {

namespace mx = mlx::core;

namespace {

mx::Shape to_shape(Ints d) { return mx::Shape(d.begin(), d.end()); }
std::vector<int> to_ints(Ints d) { return std::vector<int>(d.begin(), d.end()); }
std::vector<array> to_vector(Arrays a) { return std::vector<array>(a.begin(), a.end()); }
std::optional<array> to_optional(Optional a) {
  return a.empty() ? std::nullopt : std::optional<array>(a[0]);
}
rust::Vec<array> to_rust(std::vector<array> arrays) {
  rust::Vec<array> out;
  out.reserve(arrays.size());
  for (auto& a : arrays) out.push_back(std::move(a));
  return out;
}

// The code of a dtype is the position of its name in mx::Dtype::Val; src/dtype.rs has the same order.
const mx::Dtype DTYPES[] = {mx::bool_,  mx::uint8,   mx::uint16,  mx::uint32,  mx::uint64,   mx::int8,     mx::int16,
                            mx::int32,  mx::int64,   mx::float16, mx::float32, mx::float64,  mx::bfloat16, mx::complex64};
mx::Dtype to_dtype(uint8_t code) {
  if (code >= std::size(DTYPES)) throw std::invalid_argument("unknown dtype code");
  return DTYPES[code];
}
uint8_t dtype_code(mx::Dtype d) { return static_cast<uint8_t>(d.val()); }

// MLX's CPU allocator returns a null buffer where there is no memory.
mx::allocator::Data allocate(size_t bytes) {
  auto data = mx::allocator::malloc(bytes);
  if (bytes > 0 && !data.buffer().ptr()) {
    throw std::runtime_error("out of memory: cannot allocate " + std::to_string(bytes) + " bytes");
  }
  return data;
}

mx::Device device(bool gpu) { return gpu ? mx::Device::gpu : mx::Device::cpu; }

} // namespace

void array_drop(array& a) noexcept { a.~array(); }
array array_clone(const array& a) noexcept { return a; }

array from_bytes(rust::Slice<const uint8_t> data, Ints shape, uint8_t dtype) {
  auto d = to_dtype(dtype);
  auto s = to_shape(shape);
  size_t count = 1;
  for (auto n : s) {
    if (n < 0) throw std::invalid_argument("negative dimension");
    count *= n;
  }
  if (count * mx::size_of(d) != data.size()) throw std::invalid_argument("data length and shape differ");
  auto owned = allocate(data.size());
  std::memcpy(owned.buffer().raw_ptr(), data.data(), data.size());
  array out(std::move(s), d, nullptr, {});
  out.set_data(std::move(owned));
  out.set_status(array::available);
  return out;
}

// Zero copy on the CPU build: there a Buffer points to an 8 byte header that holds the allocation's
// size, followed by the data, so a Buffer 8 bytes before foreign data reads as that data. The header
// is read by operations that ask for the buffer's size: the caller guarantees 8 readable bytes in
// front. Tests check the layout against this version of MLX (tests/mapped.rs). Other builds copy:
// Metal and CUDA buffers can't point into the middle of a file mapping.
array from_external(const uint8_t* data, Ints shape, uint8_t dtype, rust::Box<Owner> owner) {
  auto d = to_dtype(dtype);
  auto s = to_shape(shape);
  auto held = std::make_shared<rust::Box<Owner>>(std::move(owner));
  if (mx::is_available(mx::Device::gpu)) {
    size_t count = 1;
    for (auto n : s) count *= n;
    return from_bytes(rust::Slice<const uint8_t>(data, count * mx::size_of(d)), shape, dtype);
  }
  static const ptrdiff_t header = [] {
    auto probe = mx::allocator::malloc(64);
    return static_cast<char*>(probe.buffer().raw_ptr()) - static_cast<char*>(probe.buffer().ptr());
  }();
  if (header != 8) throw std::runtime_error("MLX's CPU allocator has an unknown layout");
  mx::allocator::Data external(mx::allocator::Buffer(const_cast<uint8_t*>(data) - header),
                               [held](mx::allocator::Buffer) {});
  return array(std::move(external), std::move(s), d);
}

array scalar_float(double value, uint8_t dtype) {
  auto d = to_dtype(dtype);
  // As MLX's Python binding does: through float, except for float64.
  return d == mx::float64 ? array(value, d) : array(static_cast<float>(value), d);
}
array scalar_int(int64_t value, uint8_t dtype) { return array(value, to_dtype(dtype)); }
array full(Ints shape, const array& value, uint8_t dtype) { return mx::full(to_shape(shape), value, to_dtype(dtype)); }
array arange(double start, double stop, double step, uint8_t dtype) {
  return mx::arange(start, stop, step, to_dtype(dtype));
}
array tri(int32_t rows, int32_t columns, int32_t diagonal, uint8_t dtype) {
  return mx::tri(rows, columns, diagonal, to_dtype(dtype));
}

rust::Vec<int32_t> shape(const array& a) {
  rust::Vec<int32_t> out;
  for (auto n : a.shape()) out.push_back(n);
  return out;
}
rust::Vec<int64_t> strides(const array& a) {
  rust::Vec<int64_t> out;
  for (auto n : a.strides()) out.push_back(n);
  return out;
}
size_t size(const array& a) noexcept { return a.size(); }
size_t ndim(const array& a) noexcept { return a.ndim(); }
uint8_t dtype(const array& a) noexcept { return dtype_code(a.dtype()); }
bool is_row_contiguous(const array& a) noexcept { return a.flags().row_contiguous; }
bool is_available(const array& a) { return a.is_available(); }
const uint8_t* data_ptr(const array& a) {
  if (!a.is_available()) throw std::runtime_error("array is not evaluated");
  return a.data<uint8_t>();
}
size_t buffer_bytes(const array& a) {
  if (a.status() == array::unscheduled) throw std::runtime_error("array is not evaluated");
  return a.buffer_size();
}
array detached(const array& a) {
  if (!a.is_available()) throw std::runtime_error("array is not evaluated");
  array out(a.shape(), a.dtype(), nullptr, {});
  out.copy_shared_buffer(a);
  out.set_status(array::available);
  return out;
}

void eval(Arrays a) { mx::eval(to_vector(a)); }
void async_eval(Arrays a) { mx::async_eval(to_vector(a)); }
void synchronize() { mx::synchronize(); }

array unary(Unary op, const array& a) {
  switch (op) {
    case Unary::Abs: return mx::abs(a);
    case Unary::Negative: return mx::negative(a);
    case Unary::Sign: return mx::sign(a);
    case Unary::LogicalNot: return mx::logical_not(a);
    case Unary::Floor: return mx::floor(a);
    case Unary::Ceil: return mx::ceil(a);
    case Unary::Square: return mx::square(a);
    case Unary::Sqrt: return mx::sqrt(a);
    case Unary::Rsqrt: return mx::rsqrt(a);
    case Unary::Reciprocal: return mx::reciprocal(a);
    case Unary::Exp: return mx::exp(a);
    case Unary::Expm1: return mx::expm1(a);
    case Unary::Log: return mx::log(a);
    case Unary::Log1p: return mx::log1p(a);
    case Unary::Sin: return mx::sin(a);
    case Unary::Cos: return mx::cos(a);
    case Unary::Tanh: return mx::tanh(a);
    case Unary::Erf: return mx::erf(a);
    case Unary::Sigmoid: return mx::sigmoid(a);
    case Unary::IsNan: return mx::isnan(a);
    case Unary::IsInf: return mx::isinf(a);
    case Unary::IsFinite: return mx::isfinite(a);
  }
  throw std::invalid_argument("unknown unary operation");
}

array binary(Binary op, const array& a, const array& b) {
  switch (op) {
    case Binary::Add: return mx::add(a, b);
    case Binary::Subtract: return mx::subtract(a, b);
    case Binary::Multiply: return mx::multiply(a, b);
    case Binary::Divide: return mx::divide(a, b);
    case Binary::FloorDivide: return mx::floor_divide(a, b);
    case Binary::Remainder: return mx::remainder(a, b);
    case Binary::Power: return mx::power(a, b);
    case Binary::Maximum: return mx::maximum(a, b);
    case Binary::Minimum: return mx::minimum(a, b);
    case Binary::LogAddExp: return mx::logaddexp(a, b);
    case Binary::Equal: return mx::equal(a, b);
    case Binary::NotEqual: return mx::not_equal(a, b);
    case Binary::Less: return mx::less(a, b);
    case Binary::LessEqual: return mx::less_equal(a, b);
    case Binary::Greater: return mx::greater(a, b);
    case Binary::GreaterEqual: return mx::greater_equal(a, b);
    case Binary::LogicalAnd: return mx::logical_and(a, b);
    case Binary::LogicalOr: return mx::logical_or(a, b);
    case Binary::BitwiseAnd: return mx::bitwise_and(a, b);
    case Binary::BitwiseOr: return mx::bitwise_or(a, b);
    case Binary::LeftShift: return mx::left_shift(a, b);
    case Binary::RightShift: return mx::right_shift(a, b);
  }
  throw std::invalid_argument("unknown binary operation");
}

array reduce(Reduction op, const array& a, Ints axes, bool keepdims) {
  auto ax = to_ints(axes);
  switch (op) {
    case Reduction::Sum: return mx::sum(a, ax, keepdims);
    case Reduction::Prod: return mx::prod(a, ax, keepdims);
    case Reduction::Max: return mx::max(a, ax, keepdims);
    case Reduction::Min: return mx::min(a, ax, keepdims);
    case Reduction::Mean: return mx::mean(a, ax, keepdims);
    case Reduction::LogSumExp: return mx::logsumexp(a, ax, keepdims);
    case Reduction::All: return mx::all(a, ax, keepdims);
    case Reduction::Any: return mx::any(a, ax, keepdims);
  }
  throw std::invalid_argument("unknown reduction");
}

array scan(Scan op, const array& a, int32_t axis, bool reverse, bool inclusive) {
  switch (op) {
    case Scan::Sum: return mx::cumsum(a, axis, reverse, inclusive);
    case Scan::Prod: return mx::cumprod(a, axis, reverse, inclusive);
    case Scan::Max: return mx::cummax(a, axis, reverse, inclusive);
    case Scan::Min: return mx::cummin(a, axis, reverse, inclusive);
  }
  throw std::invalid_argument("unknown scan");
}

array softmax(const array& a, int32_t axis, bool precise) { return mx::softmax(a, std::vector<int>{axis}, precise); }
array round(const array& a, int32_t decimals) { return mx::round(a, decimals); }
array clip(const array& a, Optional low, Optional high) { return mx::clip(a, to_optional(low), to_optional(high)); }
array where(const array& condition, const array& a, const array& b) { return mx::where(condition, a, b); }
array astype(const array& a, uint8_t dtype) { return mx::astype(a, to_dtype(dtype)); }
array view(const array& a, uint8_t dtype) { return mx::view(a, to_dtype(dtype)); }
array array_equal(const array& a, const array& b, bool equal_nan) { return mx::array_equal(a, b, equal_nan); }

array reshape(const array& a, Ints shape) { return mx::reshape(a, to_shape(shape)); }
array flatten(const array& a, int32_t start, int32_t end) { return mx::flatten(a, start, end); }
array unflatten(const array& a, int32_t axis, Ints shape) { return mx::unflatten(a, axis, to_shape(shape)); }
array transpose(const array& a, Ints axes) { return axes.empty() ? mx::transpose(a) : mx::transpose(a, to_ints(axes)); }
array swap_axes(const array& a, int32_t a1, int32_t a2) { return mx::swapaxes(a, a1, a2); }
array move_axis(const array& a, int32_t source, int32_t destination) { return mx::moveaxis(a, source, destination); }
array expand_dims(const array& a, Ints axes) { return mx::expand_dims(a, to_ints(axes)); }
array squeeze(const array& a, Ints axes) { return mx::squeeze(a, to_ints(axes)); }
array broadcast_to(const array& a, Ints shape) { return mx::broadcast_to(a, to_shape(shape)); }
array contiguous(const array& a) { return mx::contiguous(a); }
array copy(const array& a) { return mx::copy(a); }
array slice(const array& a, Ints start, Ints stop, Ints strides) {
  return mx::slice(a, to_shape(start), to_shape(stop), to_shape(strides));
}
array slice_update(const array& a, const array& update, Ints start, Ints stop, Ints strides) {
  return mx::slice_update(a, update, to_shape(start), to_shape(stop), to_shape(strides));
}
array dynamic_slice(const array& a, const array& start, Ints axes, Ints size) {
  return mx::slice(a, start, to_ints(axes), to_shape(size));
}
array dynamic_slice_update(const array& a, const array& update, const array& start, Ints axes) {
  return mx::slice_update(a, update, start, to_ints(axes));
}
array concatenate(Arrays a, int32_t axis) { return mx::concatenate(to_vector(a), axis); }
array stack(Arrays a, int32_t axis) { return mx::stack(to_vector(a), axis); }
rust::Vec<array> split(const array& a, Ints indices, int32_t axis) {
  return to_rust(mx::split(a, to_shape(indices), axis));
}
array repeat(const array& a, int32_t repeats, int32_t axis) { return mx::repeat(a, repeats, axis); }
array tile(const array& a, Ints repetitions) { return mx::tile(a, to_ints(repetitions)); }
array pad(const array& a, Ints low, Ints high, const array& value) {
  std::vector<int> axes(low.size());
  for (size_t i = 0; i < axes.size(); i++) axes[i] = static_cast<int>(i);
  return mx::pad(a, axes, to_shape(low), to_shape(high), value);
}
array roll(const array& a, int32_t shift, int32_t axis) { return mx::roll(a, shift, axis); }

array take(const array& a, const array& indices, int32_t axis) { return mx::take(a, indices, axis); }
array take_along_axis(const array& a, const array& indices, int32_t axis) {
  return mx::take_along_axis(a, indices, axis);
}
array put_along_axis(const array& a, const array& indices, const array& values, int32_t axis) {
  return mx::put_along_axis(a, indices, values, axis);
}
array gather(const array& a, Arrays indices, Ints axes, Ints slice_sizes) {
  return mx::gather(a, to_vector(indices), to_ints(axes), to_shape(slice_sizes));
}
array scatter(const array& a, Arrays indices, const array& updates, Ints axes) {
  return mx::scatter(a, to_vector(indices), updates, to_ints(axes));
}
array scatter_add(const array& a, Arrays indices, const array& updates, Ints axes) {
  return mx::scatter_add(a, to_vector(indices), updates, to_ints(axes));
}

array argmax(const array& a, int32_t axis, bool keepdims) { return mx::argmax(a, axis, keepdims); }
array argmin(const array& a, int32_t axis, bool keepdims) { return mx::argmin(a, axis, keepdims); }
array sort(const array& a, int32_t axis) { return mx::sort(a, axis); }
array argsort(const array& a, int32_t axis) { return mx::argsort(a, axis); }
array partition(const array& a, int32_t kth, int32_t axis) { return mx::partition(a, kth, axis); }
array argpartition(const array& a, int32_t kth, int32_t axis) { return mx::argpartition(a, kth, axis); }
array topk(const array& a, int32_t k, int32_t axis) { return mx::topk(a, k, axis); }

array matmul(const array& a, const array& b) { return mx::matmul(a, b); }
array addmm(const array& c, const array& a, const array& b, float alpha, float beta) {
  return mx::addmm(c, a, b, alpha, beta);
}
array gather_mm(const array& a, const array& b, Optional lhs, Optional rhs, bool sorted) {
  return mx::gather_mm(a, b, to_optional(lhs), to_optional(rhs), sorted);
}
rust::Vec<array> quantize(const array& w, const Quantization& q, Optional global_scale) {
  return to_rust(mx::quantize(w, q.group_size, q.bits, std::string(q.mode), to_optional(global_scale)));
}
array dequantize(const array& w, const array& scales, Optional biases, const Quantization& q, Optional global_scale,
                 int32_t dtype) {
  auto d = dtype < 0 ? std::nullopt : std::optional<mx::Dtype>(to_dtype(static_cast<uint8_t>(dtype)));
  return mx::dequantize(w, scales, to_optional(biases), q.group_size, q.bits, std::string(q.mode),
                        to_optional(global_scale), d);
}
array quantized_matmul(const array& x, const array& w, const array& scales, Optional biases, bool transpose,
                       const Quantization& q) {
  return mx::quantized_matmul(x, w, scales, to_optional(biases), transpose, q.group_size, q.bits, std::string(q.mode));
}
array gather_qmm(const array& x, const array& w, const array& scales, Optional biases, Optional lhs, Optional rhs,
                 bool transpose, const Quantization& q, Optional global_scale, bool sorted) {
  return mx::gather_qmm(x, w, scales, to_optional(biases), to_optional(lhs), to_optional(rhs), transpose, q.group_size,
                        q.bits, std::string(q.mode), to_optional(global_scale), sorted);
}
array qqmm(const array& x, const array& w, Optional scales, const Quantization& q) {
  return mx::qqmm(x, w, to_optional(scales), q.group_size, q.bits, std::string(q.mode));
}
array conv1d(const array& input, const array& weight, int32_t stride, int32_t padding, int32_t dilation,
             int32_t groups) {
  return mx::conv1d(input, weight, stride, padding, dilation, groups);
}
array conv_general(const array& input, const array& weight, Ints stride, Ints padding, Ints dilation, int32_t groups) {
  return mx::conv_general(input, weight, to_ints(stride), to_ints(padding), to_ints(padding), to_ints(dilation),
                          std::vector<int>{1}, groups);
}

array rms_norm(const array& x, Optional weight, float eps) { return mx::fast::rms_norm(x, to_optional(weight), eps); }
array layer_norm(const array& x, Optional weight, Optional bias, float eps) {
  return mx::fast::layer_norm(x, to_optional(weight), to_optional(bias), eps);
}
array rope(const array& x, int32_t dims, bool traditional, float base, bool has_base, float scale, const array& offset,
           Optional freqs) {
  return mx::fast::rope(x, dims, traditional, has_base ? std::optional<float>(base) : std::nullopt, scale, offset,
                        to_optional(freqs));
}
array rope_at(const array& x, int32_t dims, bool traditional, float base, bool has_base, float scale, int32_t offset,
              Optional freqs) {
  return mx::fast::rope(x, dims, traditional, has_base ? std::optional<float>(base) : std::nullopt, scale, offset,
                        to_optional(freqs));
}
array scaled_dot_product_attention(const array& q, const array& k, const array& v, float scale, rust::Str mode,
                                   Optional mask, Optional sinks) {
  return mx::fast::scaled_dot_product_attention(q, k, v, scale, std::string(mode), to_optional(mask),
                                                to_optional(sinks));
}

array random_key(uint64_t seed) { return mx::random::key(seed); }
array random_split(const array& key, int32_t count) { return mx::random::split(key, count); }
array random_uniform(const array& low, const array& high, Ints shape, uint8_t dtype, const array& key) {
  return mx::random::uniform(low, high, to_shape(shape), to_dtype(dtype), key);
}
array random_normal(Ints shape, uint8_t dtype, const array& key) {
  return mx::random::normal(to_shape(shape), to_dtype(dtype), std::nullopt, std::nullopt, key);
}
array random_randint(const array& low, const array& high, Ints shape, uint8_t dtype, const array& key) {
  return mx::random::randint(low, high, to_shape(shape), to_dtype(dtype), key);
}
array random_categorical(const array& logits, int32_t axis, const array& key) {
  return mx::random::categorical(logits, axis, key);
}
array random_gumbel(Ints shape, uint8_t dtype, const array& key) {
  return mx::random::gumbel(to_shape(shape), to_dtype(dtype), key);
}

namespace {

struct HeldOp {
  explicit HeldOp(rust::Box<RustOp> o) : op(std::move(o)) {}
  rust::Box<RustOp> op;
};

// Shapes and strides point into the array's descriptor, which outlives the call.
View view_of(const array& a) {
  return View{const_cast<array&>(a).data<uint8_t>(),
              rust::Slice<const int32_t>(a.shape().data(), a.ndim()),
              rust::Slice<const int64_t>(a.strides().data(), a.ndim()),
              a.data_size() * a.itemsize(), dtype_code(a.dtype()), a.flags().row_contiguous};
}

class RustPrimitive : public mx::Primitive {
 public:
  RustPrimitive(mx::Stream stream, std::shared_ptr<HeldOp> op, std::vector<int> in_place)
      : mx::Primitive(stream), op_(std::move(op)), in_place_(std::move(in_place)) {}

  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    // An output that starts from an input takes over its buffer when nobody else holds it, and a
    // copy otherwise. The operation never sees that input, so that no memory is borrowed twice.
    struct Copy {
      array from, to;
    };
    // Every output has its own list of the inputs; the other lists would keep inputs from being taken over.
    for (auto& o : outputs) {
      if (&o.inputs() != &inputs && !o.is_tracer()) o.inputs().clear();
    }
    std::vector<Copy> copies;
    std::vector<bool> hidden(inputs.size(), false);
    for (size_t i = 0; i < outputs.size(); i++) {
      auto& out = outputs[i];
      if (in_place_[i] < 0) {
        out.set_data(allocate(out.nbytes()));
        continue;
      }
      auto& in = inputs[in_place_[i]];
      hidden[in_place_[i]] = true;
      if (in.is_donatable() && in.flags().row_contiguous) {
        out.copy_shared_buffer(in);
      } else if (in.flags().row_contiguous) {
        out.set_data(allocate(out.nbytes()));
        copies.push_back({array::unsafe_weak_copy(in), array::unsafe_weak_copy(out)});
      } else {
        throw std::invalid_argument("an input that is updated in place must be row contiguous");
      }
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<array> in, out;
    for (size_t i = 0; i < inputs.size(); i++) {
      encoder.set_input_array(inputs[i]);
      if (!hidden[i]) in.push_back(array::unsafe_weak_copy(inputs[i]));
    }
    for (auto& o : outputs) {
      encoder.set_output_array(o);
      out.push_back(array::unsafe_weak_copy(o));
    }
    encoder.dispatch([op = op_, in = std::move(in), out = std::move(out), copies = std::move(copies)]() {
      for (auto& c : copies) {
        std::memcpy(const_cast<array&>(c.to).data<uint8_t>(), c.from.data<uint8_t>(), c.from.nbytes());
      }
      std::vector<View> views;
      views.reserve(in.size() + out.size());
      for (auto& a : in) views.push_back(view_of(a));
      for (auto& a : out) views.push_back(view_of(a));
      rust::Slice<const View> all(views.data(), views.size());
      run_op(*op->op, rust::Slice<const View>(views.data(), in.size()),
             rust::Slice<const View>(views.data() + in.size(), out.size()));
    });
  }
  void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
    throw std::runtime_error("an operation written in Rust runs on the CPU only");
  }
  const char* name() const override { return "RustPrimitive"; }

 private:
  std::shared_ptr<HeldOp> op_;
  std::vector<int> in_place_;
};

} // namespace

rust::Vec<array> rust_primitive(rust::Box<RustOp> op, Arrays inputs, rust::Slice<const OutputSpec> outputs) {
  auto stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  std::vector<int> in_place;
  for (auto& o : outputs) {
    mx::Shape s(o.shape.begin(), o.shape.end());
    auto d = to_dtype(o.dtype);
    if (o.in_place >= 0) {
      if (static_cast<size_t>(o.in_place) >= inputs.size()) throw std::invalid_argument("in-place input out of range");
      for (auto used : in_place) {
        if (used == o.in_place) throw std::invalid_argument("two outputs update the same input in place");
      }
      auto& in = inputs[o.in_place];
      if (in.shape() != s || in.dtype() != d) {
        throw std::invalid_argument("an output updated in place must have its input's shape and dtype");
      }
    }
    in_place.push_back(o.in_place);
    shapes.push_back(std::move(s));
    dtypes.push_back(d);
  }
  auto primitive =
      std::make_shared<RustPrimitive>(stream, std::make_shared<HeldOp>(std::move(op)), std::move(in_place));
  return to_rust(array::make_arrays(std::move(shapes), dtypes, primitive, to_vector(inputs)));
}

struct Compiled {
  std::function<std::vector<array>(const std::vector<array>&)> call;
};

std::shared_ptr<Compiled> compile(rust::Box<RustFunction> function, bool shapeless) {
  auto held = std::make_shared<rust::Box<RustFunction>>(std::move(function));
  auto traced = [held](const std::vector<array>& inputs) {
    auto result = run_function(**held, Arrays(inputs.data(), inputs.size()));
    return std::vector<array>(result.begin(), result.end());
  };
  return std::make_shared<Compiled>(Compiled{mx::compile(traced, shapeless)});
}
rust::Vec<array> call(const Compiled& f, Arrays inputs) { return to_rust(f.call(to_vector(inputs))); }

struct Kernel {
  mx::fast::CustomKernelFunction run;
};

namespace {
std::vector<std::string> to_strings(const rust::Vec<rust::String>& v) {
  std::vector<std::string> out;
  for (auto& s : v) out.emplace_back(s);
  return out;
}
std::tuple<int, int, int> to_tuple(const std::array<int32_t, 3>& v) { return {v[0], v[1], v[2]}; }
} // namespace

std::shared_ptr<Kernel> metal_kernel(const KernelSource& s) {
  return std::make_shared<Kernel>(Kernel{mx::fast::metal_kernel(
      std::string(s.name), to_strings(s.inputs), to_strings(s.outputs), std::string(s.body), std::string(s.header),
      s.ensure_row_contiguous, s.atomic_outputs)});
}
std::shared_ptr<Kernel> cuda_kernel(const KernelSource& s) {
  return std::make_shared<Kernel>(Kernel{mx::fast::cuda_kernel(
      std::string(s.name), to_strings(s.inputs), to_strings(s.outputs), std::string(s.body), std::string(s.header),
      s.ensure_row_contiguous, s.shared_memory)});
}
rust::Vec<array> launch(const Kernel& kernel, Arrays inputs, const KernelLaunch& l) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (auto& o : l.outputs) {
    shapes.emplace_back(o.shape.begin(), o.shape.end());
    dtypes.push_back(to_dtype(o.dtype));
  }
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> arguments;
  for (auto& t : l.template_arguments) {
    mx::fast::TemplateArg value = static_cast<int>(t.value);
    if (t.kind == 1) value = t.value != 0;
    if (t.kind == 2) value = to_dtype(static_cast<uint8_t>(t.value));
    arguments.emplace_back(std::string(t.name), value);
  }
  auto init = l.has_init_value ? std::optional<float>(l.init_value) : std::nullopt;
  return to_rust(kernel.run(to_vector(inputs), shapes, dtypes, to_tuple(l.grid), to_tuple(l.threadgroup), arguments,
                            init, false, {}));
}

rust::Vec<array> load_safetensors(rust::Str path, rust::Vec<rust::String>& names, rust::Vec<NamedString>& metadata) {
  auto [arrays, meta] = mx::load_safetensors(std::string(path));
  rust::Vec<array> out;
  for (auto& [name, a] : arrays) {
    names.push_back(name);
    out.push_back(a);
  }
  for (auto& [name, value] : meta) metadata.push_back(NamedString{name, value});
  return out;
}
void save_safetensors(rust::Str path, rust::Slice<const rust::String> names, Arrays arrays,
                      rust::Slice<const NamedString> metadata) {
  std::unordered_map<std::string, array> map;
  for (size_t i = 0; i < names.size(); i++) map.insert_or_assign(std::string(names[i]), arrays[i]);
  std::unordered_map<std::string, std::string> meta;
  for (auto& m : metadata) meta.insert_or_assign(std::string(m.name), std::string(m.value));
  mx::save_safetensors(std::string(path), map, meta);
}

rust::String version() { return mx::version(); }
bool metal_available() { return mx::metal::is_available(); }
bool cuda_available() { return mx::cu::is_available(); }
bool gpu_available() { return mx::is_available(mx::Device::gpu); }
bool default_device_is_gpu() { return mx::default_device() == mx::Device::gpu; }
void set_default_device(bool gpu) { mx::set_default_device(device(gpu)); }
rust::Vec<DeviceProperty> device_info() {
  rust::Vec<DeviceProperty> out;
  for (auto& [name, value] : mx::device_info(mx::default_device())) {
    DeviceProperty p{name, "", 0};
    if (auto* text = std::get_if<std::string>(&value)) p.text = *text;
    if (auto* number = std::get_if<size_t>(&value)) p.number = *number;
    out.push_back(std::move(p));
  }
  return out;
}
int32_t new_stream(bool gpu) { return mx::new_stream(device(gpu)).index; }
int32_t default_stream(bool gpu) { return mx::default_stream(device(gpu)).index; }
void set_default_stream(int32_t index, bool gpu) { mx::set_default_stream(mx::Stream(index, device(gpu))); }
void clear_streams() { mx::clear_streams(); }

size_t active_memory() { return mx::get_active_memory(); }
size_t peak_memory() { return mx::get_peak_memory(); }
void reset_peak_memory() { mx::reset_peak_memory(); }
size_t cache_memory() { return mx::get_cache_memory(); }
void clear_cache() { mx::clear_cache(); }
void trim_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
#ifdef __linux__
static int drop_code_of(dl_phdr_info* object, size_t, void*) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (int i = 0; i < object->dlpi_phnum; i++) {
    const auto& segment = object->dlpi_phdr[i];
    // Pages that can be written to may have been, and then exist nowhere else.
    if (segment.p_type != PT_LOAD || !(segment.p_flags & PF_X) || (segment.p_flags & PF_W)) {
      continue;
    }
    const uintptr_t begin = object->dlpi_addr + segment.p_vaddr;
    const uintptr_t first = begin / page * page, end = (begin + segment.p_filesz) / page * page;
    if (end > first) {
      madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
    }
  }
  return 0;
}
#endif
void drop_code() {
#ifdef __linux__
  dl_iterate_phdr(drop_code_of, nullptr);
#endif
}
size_t set_memory_limit(size_t bytes) { return mx::set_memory_limit(bytes); }
size_t set_cache_limit(size_t bytes) { return mx::set_cache_limit(bytes); }
size_t set_wired_limit(size_t bytes) { return mx::set_wired_limit(bytes); }

} // namespace russet
