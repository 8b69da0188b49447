//! Operations as methods of [`Array`], named as in MLX.

use crate::array::{IntoShape, Operand, optional, raw, wrap, wrap_all};
use crate::bridge::ffi;
use crate::{Array, Dtype, Error, Result};

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        impl Array {
            $($(#[$doc])*
            pub fn $name(&self) -> Result<Self> {
                wrap(ffi::unary(ffi::Unary::$op, &self.0))
            })*
        }
    };
}

unary! {
    /// `|x|`
    abs => Abs;
    /// `-x`
    negative => Negative;
    /// -1, 0 or 1.
    sign => Sign;
    /// Elementwise `not`.
    logical_not => LogicalNot;
    /// Round down.
    floor => Floor;
    /// Round up.
    ceil => Ceil;
    /// `x * x`
    square => Square;
    /// Square root.
    sqrt => Sqrt;
    /// `1 / sqrt(x)`
    rsqrt => Rsqrt;
    /// `1 / x`
    reciprocal => Reciprocal;
    /// `e ** x`
    exp => Exp;
    /// `e ** x - 1`
    expm1 => Expm1;
    /// Natural logarithm.
    log => Log;
    /// `log(1 + x)`
    log1p => Log1p;
    /// Sine.
    sin => Sin;
    /// Cosine.
    cos => Cos;
    /// Hyperbolic tangent.
    tanh => Tanh;
    /// Error function.
    erf => Erf;
    /// `1 / (1 + e ** -x)`
    sigmoid => Sigmoid;
    /// Whether each element is NaN.
    isnan => IsNan;
    /// Whether each element is an infinity.
    isinf => IsInf;
    /// Whether each element is neither NaN nor an infinity.
    isfinite => IsFinite;
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        impl Array {
            $($(#[$doc])*
            pub fn $name<'a>(&self, other: impl Into<Operand<'a>>) -> Result<Self> {
                wrap(ffi::binary(ffi::Binary::$op, &self.0, &other.into().meet(self)?.0))
            })*
        }
    };
}

binary! {
    /// `self + other`
    add => Add;
    /// `self - other`
    subtract => Subtract;
    /// `self * other`
    multiply => Multiply;
    /// `self / other`; integers give a float.
    divide => Divide;
    /// Division rounded down.
    floor_divide => FloorDivide;
    /// Remainder with the sign of the divisor.
    remainder => Remainder;
    /// `self ** other`
    power => Power;
    /// Elementwise maximum.
    maximum => Maximum;
    /// Elementwise minimum.
    minimum => Minimum;
    /// `log(e ** self + e ** other)`
    logaddexp => LogAddExp;
    /// `self == other`
    equal => Equal;
    /// `self != other`
    not_equal => NotEqual;
    /// `self < other`
    less => Less;
    /// `self <= other`
    less_equal => LessEqual;
    /// `self > other`
    greater => Greater;
    /// `self >= other`
    greater_equal => GreaterEqual;
    /// Elementwise `and`.
    logical_and => LogicalAnd;
    /// Elementwise `or`.
    logical_or => LogicalOr;
    /// Bitwise `and`.
    bitwise_and => BitwiseAnd;
    /// Bitwise `or`.
    bitwise_or => BitwiseOr;
    /// `self << other`
    left_shift => LeftShift;
    /// `self >> other`
    right_shift => RightShift;
}

/// Operations whose left operand is a weak number.
impl Array {
    /// `value - self`
    pub fn subtract_from<'a>(&self, value: impl Into<Operand<'a>>) -> Result<Self> {
        value.into().meet(self)?.subtract(self)
    }

    /// `value / self`
    pub fn divide_into<'a>(&self, value: impl Into<Operand<'a>>) -> Result<Self> {
        value.into().meet(self)?.divide(self)
    }

    /// `base ** self`
    pub fn power_of<'a>(&self, base: impl Into<Operand<'a>>) -> Result<Self> {
        base.into().meet(self)?.power(self)
    }
}

macro_rules! reduction {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        impl Array {
            $($(#[$doc])*
            pub fn $name(&self, axes: impl IntoShape, keepdims: bool) -> Result<Self> {
                wrap(ffi::reduce(ffi::Reduction::$op, &self.0, axes.dims(), keepdims))
            })*
        }
    };
}

reduction! {
    /// Sum over `axes`.
    sum => Sum;
    /// Product over `axes`.
    prod => Prod;
    /// Maximum over `axes`.
    max => Max;
    /// Minimum over `axes`.
    min => Min;
    /// Mean over `axes`.
    mean => Mean;
    /// `log(sum(exp(x)))` over `axes`.
    logsumexp => LogSumExp;
    /// Whether all elements over `axes` are true.
    all => All;
    /// Whether any element over `axes` is true.
    any => Any;
}

macro_rules! scan {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        impl Array {
            $($(#[$doc])*
            pub fn $name(&self, axis: i32, reverse: bool, inclusive: bool) -> Result<Self> {
                wrap(ffi::scan(ffi::Scan::$op, &self.0, axis, reverse, inclusive))
            })*
        }
    };
}

scan! {
    /// Cumulative sum.
    cumsum => Sum;
    /// Cumulative product.
    cumprod => Prod;
    /// Cumulative maximum.
    cummax => Max;
    /// Cumulative minimum.
    cummin => Min;
}

/// Elementwise and type operations.
impl Array {
    /// Softmax over `axis`. `precise` accumulates in `f32`; the two forms differ in half precision.
    pub fn softmax(&self, axis: i32, precise: bool) -> Result<Self> {
        wrap(ffi::softmax(&self.0, axis, precise))
    }

    /// Rounds half to even at the given decimal.
    pub fn round(&self, decimals: i32) -> Result<Self> {
        wrap(ffi::round(&self.0, decimals))
    }

    /// Limits values to `[low, high]`, each bound optional.
    pub fn clip(&self, low: Option<&Array>, high: Option<&Array>) -> Result<Self> {
        wrap(ffi::clip(&self.0, optional(low), optional(high)))
    }

    /// Converts to `dtype`.
    pub fn astype(&self, dtype: Dtype) -> Result<Self> {
        wrap(ffi::astype(&self.0, dtype as u8))
    }

    /// Reinterprets the bytes as `dtype`; the last dimension scales with the element size.
    pub fn view(&self, dtype: Dtype) -> Result<Self> {
        wrap(ffi::view(&self.0, dtype as u8))
    }

    /// Whether shapes and all values are equal, as a 0-d bool array.
    pub fn array_equal(&self, other: &Array, equal_nan: bool) -> Result<Self> {
        wrap(ffi::array_equal(&self.0, &other.0, equal_nan))
    }
}

/// `condition ? a : b`, elementwise. A weak number takes the dtype of the other choice.
///
/// # Errors
/// When both choices are numbers, or shapes do not broadcast.
pub fn select<'a, 'b>(
    condition: &Array,
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'b>>,
) -> Result<Array> {
    let (a, b) = match (a.into(), b.into()) {
        (Operand::Array(a), b) => (a.clone(), b.meet(a)?),
        (a, Operand::Array(b)) => (a.meet(b)?, b.clone()),
        _ => return Err(Error::new("select needs at least one array to choose from")),
    };
    wrap(ffi::where_(&condition.0, &a.0, &b.0))
}

/// Shapes and views.
impl Array {
    /// New dimensions for the same elements; one of them may be -1.
    pub fn reshape(&self, shape: impl IntoShape) -> Result<Self> {
        wrap(ffi::reshape(&self.0, shape.dims()))
    }

    /// Merges dimensions `start..=end` into one.
    pub fn flatten(&self, start: i32, end: i32) -> Result<Self> {
        wrap(ffi::flatten(&self.0, start, end))
    }

    /// Splits dimension `axis` into `shape`.
    pub fn unflatten(&self, axis: i32, shape: impl IntoShape) -> Result<Self> {
        wrap(ffi::unflatten(&self.0, axis, shape.dims()))
    }

    /// Reorders dimensions.
    pub fn transpose(&self, axes: impl IntoShape) -> Result<Self> {
        wrap(ffi::transpose(&self.0, axes.dims()))
    }

    /// Reverses the order of all dimensions.
    pub fn transpose_all(&self) -> Result<Self> {
        wrap(ffi::transpose(&self.0, &[]))
    }

    /// Exchanges two dimensions.
    pub fn swap_axes(&self, a: i32, b: i32) -> Result<Self> {
        wrap(ffi::swap_axes(&self.0, a, b))
    }

    /// Moves a dimension to another position.
    pub fn move_axis(&self, source: i32, destination: i32) -> Result<Self> {
        wrap(ffi::move_axis(&self.0, source, destination))
    }

    /// Inserts dimensions of size 1.
    pub fn expand_dims(&self, axes: impl IntoShape) -> Result<Self> {
        wrap(ffi::expand_dims(&self.0, axes.dims()))
    }

    /// Removes dimensions of size 1.
    pub fn squeeze(&self, axes: impl IntoShape) -> Result<Self> {
        wrap(ffi::squeeze(&self.0, axes.dims()))
    }

    /// Repeats dimensions of size 1 without copying.
    pub fn broadcast_to(&self, shape: impl IntoShape) -> Result<Self> {
        wrap(ffi::broadcast_to(&self.0, shape.dims()))
    }

    /// The same values in row-major memory. Shares the buffer when the values already lie so and the
    /// buffer is at most 16 KiB larger than they are.
    pub fn contiguous(&self) -> Result<Self> {
        wrap(ffi::contiguous(&self.0))
    }

    /// Elements `start..stop` of each dimension (clamped; negative counts from the end).
    pub fn slice(&self, start: impl IntoShape, stop: impl IntoShape) -> Result<Self> {
        wrap(ffi::slice(&self.0, start.dims(), stop.dims(), &vec![1; self.ndim()]))
    }

    /// Elements `start..stop` of one dimension.
    pub fn slice_axis(&self, axis: i32, start: i32, stop: i32) -> Result<Self> {
        let mut stops = self.shape();
        let mut starts = vec![0; stops.len()];
        let index = axis_index(axis, stops.len())?;
        starts[index] = start;
        stops[index] = stop;
        self.slice(starts, stops)
    }

    /// A copy with `start..stop` replaced by `update`; in place when nothing else holds the buffer.
    pub fn slice_update(&self, update: &Array, start: impl IntoShape, stop: impl IntoShape) -> Result<Self> {
        let strides = vec![1; self.ndim()];
        wrap(ffi::slice_update(&self.0, &update.0, start.dims(), stop.dims(), &strides))
    }

    /// [`Array::slice_update`] of one dimension, whole in all others.
    pub fn slice_update_axis(&self, update: &Array, axis: i32, start: i32, stop: i32) -> Result<Self> {
        let mut stops = self.shape();
        let mut starts = vec![0; stops.len()];
        let index = axis_index(axis, stops.len())?;
        starts[index] = start;
        stops[index] = stop;
        self.slice_update(update, starts, stops)
    }

    /// A slice of `size` whose position along `axes` is itself an array.
    pub fn dynamic_slice(&self, start: &Array, axes: impl IntoShape, size: impl IntoShape) -> Result<Self> {
        wrap(ffi::dynamic_slice(&self.0, &start.0, axes.dims(), size.dims()))
    }

    /// A copy with `update` written at a position that is itself an array.
    pub fn dynamic_slice_update(&self, update: &Array, start: &Array, axes: impl IntoShape) -> Result<Self> {
        wrap(ffi::dynamic_slice_update(&self.0, &update.0, &start.0, axes.dims()))
    }

    /// Cuts at `indices` along `axis`.
    pub fn split(&self, indices: impl IntoShape, axis: i32) -> Result<Vec<Self>> {
        wrap_all(ffi::split(&self.0, indices.dims(), axis))
    }

    /// Repeats each element along `axis`.
    pub fn repeat(&self, repeats: i32, axis: i32) -> Result<Self> {
        wrap(ffi::repeat(&self.0, repeats, axis))
    }

    /// Repeats the whole array along each dimension.
    pub fn tile(&self, repetitions: impl IntoShape) -> Result<Self> {
        wrap(ffi::tile(&self.0, repetitions.dims()))
    }

    /// Adds `low[i]` elements before and `high[i]` after dimension `i`, filled with `value`.
    pub fn pad<'a>(
        &self,
        low: impl IntoShape,
        high: impl IntoShape,
        value: impl Into<Operand<'a>>,
    ) -> Result<Self> {
        wrap(ffi::pad(&self.0, low.dims(), high.dims(), &value.into().meet(self)?.0))
    }

    /// Rotates elements along `axis`.
    pub fn roll(&self, shift: i32, axis: i32) -> Result<Self> {
        wrap(ffi::roll(&self.0, shift, axis))
    }
}

fn axis_index(axis: i32, ndim: usize) -> Result<usize> {
    let index = if axis < 0 { axis + ndim as i32 } else { axis };
    usize::try_from(index)
        .ok()
        .filter(|&i| i < ndim)
        .ok_or_else(|| Error::new(format!("array of {ndim} dimensions has no axis {axis}")))
}

/// Joins arrays along an existing dimension.
pub fn concatenate(arrays: &[Array], axis: i32) -> Result<Array> {
    wrap(ffi::concatenate(raw(arrays), axis))
}

/// Joins arrays along a new dimension.
pub fn stack(arrays: &[Array], axis: i32) -> Result<Array> {
    wrap(ffi::stack(raw(arrays), axis))
}

/// Gathering, scattering and ordering.
impl Array {
    /// Elements at `indices` along `axis`.
    pub fn take(&self, indices: &Array, axis: i32) -> Result<Self> {
        wrap(ffi::take(&self.0, &indices.0, axis))
    }

    /// One element per index, matching all other dimensions.
    pub fn take_along_axis(&self, indices: &Array, axis: i32) -> Result<Self> {
        wrap(ffi::take_along_axis(&self.0, &indices.0, axis))
    }

    /// A copy with `values` at `indices` along `axis`.
    pub fn put_along_axis<'a>(
        &self,
        indices: &Array,
        values: impl Into<Operand<'a>>,
        axis: i32,
    ) -> Result<Self> {
        wrap(ffi::put_along_axis(&self.0, &indices.0, &values.into().meet(self)?.0, axis))
    }

    /// MLX's general gather: slices of `slice_sizes` at `indices` (one array per axis of `axes`).
    pub fn gather(
        &self,
        indices: &[Array],
        axes: impl IntoShape,
        slice_sizes: impl IntoShape,
    ) -> Result<Self> {
        wrap(ffi::gather(&self.0, raw(indices), axes.dims(), slice_sizes.dims()))
    }

    /// MLX's general scatter: a copy with `updates` assigned at `indices`. For duplicate indices one
    /// of the updates wins.
    pub fn scatter(&self, indices: &[Array], updates: &Array, axes: impl IntoShape) -> Result<Self> {
        wrap(ffi::scatter(&self.0, raw(indices), &updates.0, axes.dims()))
    }

    /// [`Array::scatter`] that adds instead of assigning; duplicates add up.
    pub fn scatter_add(&self, indices: &[Array], updates: &Array, axes: impl IntoShape) -> Result<Self> {
        wrap(ffi::scatter_add(&self.0, raw(indices), &updates.0, axes.dims()))
    }

    /// Index of the largest element along `axis`; the lowest of equal ones.
    pub fn argmax(&self, axis: i32, keepdims: bool) -> Result<Self> {
        wrap(ffi::argmax(&self.0, axis, keepdims))
    }

    /// Index of the smallest element along `axis`; the lowest of equal ones.
    pub fn argmin(&self, axis: i32, keepdims: bool) -> Result<Self> {
        wrap(ffi::argmin(&self.0, axis, keepdims))
    }

    /// Sorts ascending along `axis`.
    pub fn sort(&self, axis: i32) -> Result<Self> {
        wrap(ffi::sort(&self.0, axis))
    }

    /// Indices that sort ascending along `axis`.
    pub fn argsort(&self, axis: i32) -> Result<Self> {
        wrap(ffi::argsort(&self.0, axis))
    }

    /// Partial sort: element `kth` is in its sorted place, smaller ones before, larger after.
    pub fn partition(&self, kth: i32, axis: i32) -> Result<Self> {
        wrap(ffi::partition(&self.0, kth, axis))
    }

    /// Indices of [`Array::partition`].
    pub fn argpartition(&self, kth: i32, axis: i32) -> Result<Self> {
        wrap(ffi::argpartition(&self.0, kth, axis))
    }

    /// The `k` largest elements along `axis`, in no particular order.
    pub fn topk(&self, k: i32, axis: i32) -> Result<Self> {
        wrap(ffi::topk(&self.0, k, axis))
    }
}

/// Matrix products and convolutions.
impl Array {
    /// `self @ other`
    pub fn matmul(&self, other: &Array) -> Result<Self> {
        wrap(ffi::matmul(&self.0, &other.0))
    }

    /// `alpha * (a @ b) + beta * self` in one rounding.
    pub fn addmm(&self, a: &Array, b: &Array, alpha: f32, beta: f32) -> Result<Self> {
        wrap(ffi::addmm(&self.0, &a.0, &b.0, alpha, beta))
    }

    /// Products of matrices chosen by index (mixture of experts).
    pub fn gather_mm(
        &self,
        other: &Array,
        lhs_indices: Option<&Array>,
        rhs_indices: Option<&Array>,
        sorted_indices: bool,
    ) -> Result<Self> {
        let (lhs, rhs) = (optional(lhs_indices), optional(rhs_indices));
        wrap(ffi::gather_mm(&self.0, &other.0, lhs, rhs, sorted_indices))
    }

    /// 1-d convolution: input `[batch, length, channels]`, weight `[out, kernel, channels / groups]`.
    pub fn conv1d(
        &self,
        weight: &Array,
        stride: i32,
        padding: i32,
        dilation: i32,
        groups: i32,
    ) -> Result<Self> {
        wrap(ffi::conv1d(&self.0, &weight.0, stride, padding, dilation, groups))
    }

    /// n-d convolution, channels last: 2-d with two values in `stride`, `padding`, `dilation`, 3-d
    /// with three.
    pub fn conv_general(
        &self,
        weight: &Array,
        stride: impl IntoShape,
        padding: impl IntoShape,
        dilation: impl IntoShape,
        groups: i32,
    ) -> Result<Self> {
        let (stride, padding, dilation) = (stride.dims(), padding.dims(), dilation.dims());
        wrap(ffi::conv_general(&self.0, &weight.0, stride, padding, dilation, groups))
    }
}
