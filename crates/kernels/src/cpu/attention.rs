//! Scaled dot-product attention with grouped heads: `softmax(scale · q kᵀ) v`, without the matrix of scores.
//!
//! Keys are taken a block at a time with a running maximum and sum (Milakov and Gimelshein, "Online normalizer
//! calculation for softmax"; Dao et al., "FlashAttention"). The query heads that share a key head are rows of one
//! computation. Few rows (decoding) read keys and values where they lie and split the context over the threads;
//! many (prefill) turn a block into f32 once for all rows and multiply in tiles. Positions are exact up to 2²⁴.

#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are indexed in step with pointers")]

use std::cell::RefCell;
use std::ops::Range;

use super::Cpu;
use super::buffer::{Buffer, SharedMut};
use super::embedding::dequantize_row;
use super::error::{KernelError, check_len, parameter, product};
use super::float::FloatType;
use super::mm::multiply_add;
use super::quant::{QuantFormat, QuantizedMatrix};
use super::simd::{Kernel, Simd, exp, tanh};

/// Keys of a block.
const KEYS: usize = 64;

/// Rows (queries times query heads of a key head) up to which keys and values are read in place.
const FEW_ROWS: usize = 8;

/// Rows of a task of prefill.
const MANY_ROWS: usize = 96;

/// Keys below which a context is not split further.
const SPLIT_KEYS: usize = 256;

/// Keys or values of a sequence, `[heads, keys, width]`.
#[derive(Debug, Clone, Copy)]
pub enum KeyValues<'a> {
    /// Floats, at any alignment.
    Dense {
        /// Their type.
        float: FloatType,
        /// Little-endian values.
        data: &'a [u8],
        /// Elements from one head to the next.
        head_stride: usize,
        /// Elements from one key to the next.
        key_stride: usize,
    },
    /// Affine codes: row `head * head_stride + key` of a matrix as wide as a head.
    Quantized {
        /// The matrix.
        rows: QuantizedMatrix<'a>,
        /// Rows from one head to the next.
        head_stride: usize,
    },
}

/// Which keys a query sees. Queries are the last tokens of the context: the last query is at the last key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All.
    Full,
    /// Those up to its own position.
    Causal,
    /// The last so many up to its own position.
    Window(usize),
}

/// Arguments of [`attention`].
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Queries: head h's row i begins at `h * query_strides.0 + i * query_strides.1`.
    pub queries: &'a [f32],
    /// Elements from one head to the next, and from one query to the next.
    pub query_strides: (usize, usize),
    /// Keys, as wide as queries.
    pub keys: KeyValues<'a>,
    /// Values.
    pub values: KeyValues<'a>,
    /// Number of query heads, a multiple of `key_heads`.
    pub query_heads: usize,
    /// Number of key and value heads; head h of the queries uses head `h / (query_heads / key_heads)`.
    pub key_heads: usize,
    /// Number of queries.
    pub query_len: usize,
    /// Number of keys.
    pub key_len: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values.
    pub value_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Where given, scores s become `cap · tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Which keys queries see.
    pub mask: Mask,
}

/// Computes attention into `out`, where head h's row i begins at `h * out_strides.0 + i * out_strides.1`. A query
/// that sees no key gets zeros.
///
/// # Errors
/// Where shapes and strides leave the buffers or overlap in the output, or the heads do not divide.
pub fn attention(
    cpu: &Cpu,
    args: &Attention<'_>,
    out: &mut [f32],
    out_strides: (usize, usize),
) -> Result<(), KernelError> {
    args.check(out.len(), out_strides)?;
    let group = args.query_heads / args.key_heads;
    let out = Out { y: SharedMut::new(out), strides: out_strides };
    if args.query_len * group > FEW_ROWS {
        let queries = (MANY_ROWS / group).clamp(1, args.query_len);
        let blocks = args.query_len.div_ceil(queries);
        // The blocks with the longest contexts come first, so that threads end together.
        return cpu.pool().run(args.key_heads * blocks, &|task| {
            let (block, head) = (blocks - 1 - task / args.key_heads, task % args.key_heads);
            let queries = block * queries..args.query_len.min((block + 1) * queries);
            SCRATCH.with_borrow_mut(|scratch| cpu.isa().run(ManyRows { args, head, queries, out, scratch }));
        });
    }
    let rows = args.query_len * group;
    let visible = args.visible(0).start..args.key_len;
    let wanted =
        if cpu.pool().threads() == 1 { 1 } else { (3 * cpu.pool().threads()).div_ceil(args.key_heads) };
    let parts = (visible.len() / SPLIT_KEYS).clamp(1, wanted);
    PARTIALS.with_borrow_mut(|partials| {
        let row_floats = args.value_dim + 2;
        let floats = args.key_heads * parts * rows * row_floats;
        partials.ensure(4 * floats);
        let shared = SharedMut::new(partials);
        cpu.pool().run(args.key_heads * parts, &|task| {
            let (head, part) = (task / parts, task % parts);
            let bound = |part: usize| visible.start + visible.len() * part / parts;
            let keys = bound(part)..bound(part + 1);
            let partial = shared.at(4 * task * rows * row_floats).cast();
            SCRATCH.with_borrow_mut(|scratch| cpu.isa().run(FewRows { args, head, keys, partial, scratch }));
        })?;
        let partials = partials.as_ptr().cast::<f32>();
        cpu.isa().run(Combine { args, parts, partials, out });
        Ok(())
    })
}

thread_local! {
    static SCRATCH: RefCell<Buffer> = const { RefCell::new(Buffer::empty()) };
    /// For each head, part of the context and row: the unnormalized output, its largest score, its sum.
    static PARTIALS: RefCell<Buffer> = const { RefCell::new(Buffer::empty()) };
}

#[derive(Clone, Copy)]
struct Out {
    y: SharedMut<f32>,
    strides: (usize, usize),
}

impl Attention<'_> {
    fn check(&self, out: usize, out_strides: (usize, usize)) -> Result<(), KernelError> {
        let dims =
            [self.query_heads, self.key_heads, self.query_len, self.key_len, self.head_dim, self.value_dim];
        if dims.contains(&0) || !self.query_heads.is_multiple_of(self.key_heads) {
            let rule = "without a zero, query heads a multiple of key heads";
            return Err(parameter("attention shape", format!("{dims:?}"), rule));
        }
        if self.mask != Mask::Full && self.query_len > self.key_len {
            return Err(parameter(
                "queries",
                self.query_len,
                "at most as many as keys, unless all are visible",
            ));
        }
        // The last element that strides reach.
        let reach = |what, heads: usize, rows: usize, width: usize, strides: (usize, usize)| {
            let heads = product(what, &[heads - 1, strides.0])?;
            let rows = product(what, &[rows - 1, strides.1])?;
            product(what, &[heads.saturating_add(rows).saturating_add(width), 8]).map(|bytes| bytes / 8)
        };
        let at_least = |what, actual, expected| {
            if actual >= expected { Ok(()) } else { Err(KernelError::Length { what, expected, actual }) }
        };
        let (heads, queries) = (self.query_heads, self.query_len);
        at_least(
            "attention queries",
            self.queries.len(),
            reach("attention queries", heads, queries, self.head_dim, self.query_strides)?,
        )?;
        at_least(
            "attention output",
            out,
            reach("attention output", heads, queries, self.value_dim, out_strides)?,
        )?;
        let (head, row) = out_strides;
        let apart = (row >= self.value_dim && (heads == 1 || head >= row.saturating_mul(queries)))
            || (head >= self.value_dim && (queries == 1 || row >= head.saturating_mul(heads)));
        if !apart && heads * queries > 1 {
            return Err(parameter(
                "output strides",
                format!("{out_strides:?}"),
                "such that rows do not overlap",
            ));
        }
        for (what, kv, width) in
            [("attention keys", self.keys, self.head_dim), ("attention values", self.values, self.value_dim)]
        {
            match kv {
                KeyValues::Dense { float, data, head_stride, key_stride } => {
                    let strides = (head_stride, key_stride);
                    at_least(
                        what,
                        data.len() / float.bytes(),
                        reach(what, self.key_heads, self.key_len, width, strides)?,
                    )?;
                }
                KeyValues::Quantized { rows, head_stride } => {
                    if !matches!(rows.format(), QuantFormat::Affine { .. }) {
                        return Err(parameter(
                            what,
                            format!("{:?}", rows.format()),
                            "affine where quantized",
                        ));
                    }
                    check_len(what, rows.cols(), width)?;
                    at_least(
                        what,
                        rows.rows(),
                        reach(what, self.key_heads, self.key_len, 1, (head_stride, 1))?,
                    )?;
                }
            }
        }
        Ok(())
    }

    /// The keys that query `query` sees.
    #[inline(always)]
    fn visible(&self, query: usize) -> Range<usize> {
        // One past its own position; `check` saw to it that there is one.
        let end =
            |mask| if mask == Mask::Full { self.key_len } else { self.key_len - self.query_len + query + 1 };
        match self.mask {
            Mask::Window(window) => end(self.mask).saturating_sub(window)..end(self.mask),
            mask => 0..end(mask),
        }
    }
}

/// Rows of keys or values in memory.
#[derive(Clone, Copy)]
struct RowsView {
    float: FloatType,
    data: *const u8,
    /// Bytes from one row to the next.
    stride: usize,
}

/// Keys `keys` of a head: as they lie, or dequantized into `scratch`, which holds `KEYS` rows.
///
/// # Safety
/// In a kernel of `S`; `keys`, at most `KEYS`, are of the sequence.
#[inline(always)]
unsafe fn rows_of<S: Simd>(
    kv: &KeyValues<'_>,
    width: usize,
    head: usize,
    keys: Range<usize>,
    scratch: *mut f32,
) -> RowsView {
    match *kv {
        KeyValues::Dense { float, data, head_stride, key_stride } => RowsView {
            float,
            data: data.as_ptr().wrapping_add((head * head_stride + keys.start * key_stride) * float.bytes()),
            stride: key_stride * float.bytes(),
        },
        KeyValues::Quantized { rows, head_stride } => {
            for (i, key) in keys.enumerate() {
                // SAFETY: by contract.
                unsafe { dequantize_row::<S>(&rows, head * head_stride + key, scratch.add(i * width)) }
            }
            RowsView { float: FloatType::F32, data: scratch.cast(), stride: 4 * width }
        }
    }
}

/// Applies scale, soft cap and the mask's bounds to a block's scores, from key `start` on, then turns them into
/// exponentials relative to the running maximum. Returns the factor of what was summed before.
///
/// # Safety
/// In a kernel of `S`; `scores` holds `KEYS`.
#[inline(always)]
unsafe fn soften<S: Simd>(
    args: &Attention<'_>,
    scores: *mut f32,
    start: usize,
    keys: usize,
    query: usize,
    state: &mut (f32, f32),
) -> f32 {
    let visible = args.visible(query);
    let visible = visible.start.saturating_sub(start).min(keys)..visible.end.saturating_sub(start).min(keys);
    let visible = visible.start..visible.end.max(visible.start);
    // SAFETY: all accesses are to the block of scores.
    unsafe {
        for masked in (0..visible.start).chain(visible.end..KEYS) {
            scores.add(masked).write(f32::NEG_INFINITY);
        }
        if visible.is_empty() {
            for i in 0..KEYS {
                scores.add(i).write(0.0);
            }
            return 1.0;
        }
        if let Some(cap) = args.softcap {
            for i in (0..KEYS).step_by(S::LANES) {
                let s = S::load(scores.add(i));
                let capped = S::mul(S::splat(cap), tanh::<S>(S::div(s, S::splat(cap))));
                // The infinities of masked keys stay.
                S::store(scores.add(i), S::select_lt(s, S::splat(f32::MIN), s, capped));
            }
        }
        let mut largest = S::splat(state.0);
        for i in (0..KEYS).step_by(S::LANES) {
            largest = S::max(largest, S::load(scores.add(i)));
        }
        let largest = S::max_lane(largest);
        let mut sum = S::zero();
        for i in (0..KEYS).step_by(S::LANES) {
            let e = exp::<S>(S::sub(S::load(scores.add(i)), S::splat(largest)));
            S::store(scores.add(i), e);
            sum = S::add(sum, e);
        }
        let keep = if state.0 == f32::NEG_INFINITY { 0.0 } else { (state.0 - largest).exp() };
        *state = (largest, state.1 * keep + S::sum(sum));
        keep
    }
}

/// Decoding: a part of the context for all rows of a head.
struct FewRows<'a> {
    args: &'a Attention<'a>,
    head: usize,
    keys: Range<usize>,
    partial: *mut f32,
    scratch: &'a mut Buffer,
}

impl Kernel for FewRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { args, head, keys, partial, scratch } = self;
        let group = args.query_heads / args.key_heads;
        let rows = group * args.query_len;
        let (dim, value_dim) = (args.head_dim, args.value_dim);
        let padded = dim.next_multiple_of(16);
        let row_floats = value_dim + 2;
        // Scaled queries; scores; dequantized rows, if any are.
        let floats = rows * padded + FEW_ROWS * KEYS + KEYS * dim.max(value_dim) + 16;
        scratch.ensure(4 * floats);
        let queries = scratch.as_mut_ptr().cast::<f32>();
        // SAFETY: the scratch is cut as sized above; keys, values, queries and the partial output are used at
        // places that `check` found inside them.
        unsafe {
            let scores = queries.add(rows * padded);
            let dequantized = scores.add(FEW_ROWS * KEYS);
            let mut states = [(f32::NEG_INFINITY, 0.0); FEW_ROWS];
            for row in 0..rows {
                let (query, head) = (row / group, head * group + row % group);
                let source =
                    args.queries.as_ptr().add(head * args.query_strides.0 + query * args.query_strides.1);
                for d in 0..padded {
                    let value = if d < dim { source.add(d).read() * args.scale } else { 0.0 };
                    queries.add(row * padded + d).write(value);
                }
                for d in 0..value_dim {
                    partial.add(row * row_floats + d).write(0.0);
                }
            }
            for start in keys.clone().step_by(KEYS) {
                let n = KEYS.min(keys.end - start);
                let view = rows_of::<S>(&args.keys, dim, head, start..start + n, dequantized);
                let mut row = 0;
                while row < rows {
                    let (q, s) = (queries.add(row * padded), scores.add(row * KEYS));
                    row += match rows - row {
                        1 => score_rows::<S, 1>(view, n, dim, q, padded, s),
                        2 | 3 => score_rows::<S, 2>(view, n, dim, q, padded, s),
                        _ => score_rows::<S, 4>(view, n, dim, q, padded, s),
                    };
                }
                let mut keeps = [1.0; FEW_ROWS];
                for row in 0..rows {
                    let scores = scores.add(row * KEYS);
                    keeps[row] = soften::<S>(args, scores, start, n, row / group, &mut states[row]);
                }
                let view = rows_of::<S>(&args.values, value_dim, head, start..start + n, dequantized);
                let mut row = 0;
                while row < rows {
                    let (p, keeps) = (scores.add(row * KEYS), &keeps[row..]);
                    let out = partial.add(row * row_floats);
                    row += match rows - row {
                        1 => sum_values::<S, 1>(view, n, value_dim, p, keeps, out, row_floats),
                        2 | 3 => sum_values::<S, 2>(view, n, value_dim, p, keeps, out, row_floats),
                        _ => sum_values::<S, 4>(view, n, value_dim, p, keeps, out, row_floats),
                    };
                }
            }
            for (row, state) in states.iter().enumerate().take(rows) {
                partial.add(row * row_floats + value_dim).write(state.0);
                partial.add(row * row_floats + value_dim + 1).write(state.1);
            }
        }
    }
}

/// Scores of `ROWS` queries with `n` keys; returns `ROWS`.
///
/// # Safety
/// In a kernel of `S`; the view has `n` rows of `dim`, queries are `[ROWS, padded]`, scores `[ROWS, KEYS]`.
#[inline(always)]
unsafe fn score_rows<S: Simd, const ROWS: usize>(
    view: RowsView,
    n: usize,
    dim: usize,
    queries: *const f32,
    padded: usize,
    scores: *mut f32,
) -> usize {
    // SAFETY: by contract; the keys of a last, incomplete four are looked up again and their scores dropped.
    unsafe {
        for first in (0..n).step_by(4) {
            let keys: [*const u8; 4] =
                std::array::from_fn(|i| view.data.add((first + i).min(n - 1) * view.stride));
            S::prefetch(keys[0].wrapping_add(8 * view.stride));
            S::prefetch(keys[2].wrapping_add(8 * view.stride));
            let mut sums = [[S::zero(); 4]; ROWS];
            let mut d = 0;
            while d < dim {
                let width = S::LANES.min(dim - d);
                let mut key = [S::zero(); 4];
                for i in 0..4 {
                    let source = keys[i].add(d * view.float.bytes());
                    key[i] = if width == S::LANES {
                        S::load_as(view.float, source)
                    } else {
                        S::load_first_as(view.float, source, width)
                    };
                }
                for r in 0..ROWS {
                    let q = S::load(queries.add(r * padded + d));
                    for i in 0..4 {
                        sums[r][i] = S::fma(key[i], q, sums[r][i]);
                    }
                }
                d += S::LANES;
            }
            for r in 0..ROWS {
                let four = S::sum4(sums[r]);
                std::ptr::copy_nonoverlapping(four.as_ptr(), scores.add(r * KEYS + first), 4.min(n - first));
            }
        }
    }
    ROWS
}

/// Scales the `ROWS` outputs by `keeps` and adds the values weighted by `p`; returns `ROWS`.
///
/// # Safety
/// In a kernel of `S`; the view has `n` rows of `dim`, `p` is `[ROWS, KEYS]`, `out` `[ROWS, stride]`.
#[inline(always)]
unsafe fn sum_values<S: Simd, const ROWS: usize>(
    view: RowsView,
    n: usize,
    dim: usize,
    p: *const f32,
    keeps: &[f32],
    out: *mut f32,
    stride: usize,
) -> usize {
    // SAFETY: by contract.
    unsafe {
        let mut d = 0;
        while d < dim {
            let width = S::LANES.min(dim - d);
            let mut sums = [S::zero(); ROWS];
            for r in 0..ROWS {
                sums[r] = S::mul(S::load_first(out.add(r * stride + d), width, 0.0), S::splat(keeps[r]));
            }
            for key in 0..n {
                let source = view.data.add(key * view.stride + d * view.float.bytes());
                let v = if width == S::LANES {
                    S::load_as(view.float, source)
                } else {
                    S::load_first_as(view.float, source, width)
                };
                for r in 0..ROWS {
                    sums[r] = S::fma(S::splat(p.add(r * KEYS + key).read()), v, sums[r]);
                }
            }
            for r in 0..ROWS {
                S::store_first(out.add(r * stride + d), sums[r], width);
            }
            d += S::LANES;
        }
    }
    ROWS
}

/// Adds up what parts of the context gave.
struct Combine<'a> {
    args: &'a Attention<'a>,
    parts: usize,
    partials: *const f32,
    out: Out,
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { args, parts, partials, out } = self;
        let group = args.query_heads / args.key_heads;
        let rows = group * args.query_len;
        let dim = args.value_dim;
        let row_floats = dim + 2;
        for head in 0..args.key_heads {
            for row in 0..rows {
                let to = (head * group + row % group) * out.strides.0 + row / group * out.strides.1;
                // SAFETY: `FewRows` wrote all parts of all rows; outputs are inside by `check`.
                unsafe {
                    let part = |part: usize| partials.add(((head * parts + part) * rows + row) * row_floats);
                    let mut largest = f32::NEG_INFINITY;
                    for p in 0..parts {
                        largest = largest.max(part(p).add(dim).read());
                    }
                    let weight = |p: usize| {
                        let own = part(p).add(dim).read();
                        if own == f32::NEG_INFINITY { 0.0 } else { (own - largest).exp() }
                    };
                    let mut sum = 0.0;
                    for p in 0..parts {
                        sum += weight(p) * part(p).add(dim + 1).read();
                    }
                    for d in (0..dim).step_by(S::LANES) {
                        let width = S::LANES.min(dim - d);
                        let mut total = S::zero();
                        for p in 0..parts {
                            let share = S::load_first(part(p).add(d), width, 0.0);
                            total = S::fma(share, S::splat(weight(p)), total);
                        }
                        let total = if sum == 0.0 { S::zero() } else { S::div(total, S::splat(sum)) };
                        S::store_first(out.y.at(to + d), total, width);
                    }
                }
            }
        }
    }
}

/// Prefill: a block of queries for all query heads of a key head.
///
/// Rows lie side by side in vectors and keys one under the other, so that the softmax needs no sums across lanes
/// and keys no transposition: scores are the products of rows of keys with columns of queries.
struct ManyRows<'a> {
    args: &'a Attention<'a>,
    head: usize,
    queries: Range<usize>,
    out: Out,
    scratch: &'a mut Buffer,
}

impl Kernel for ManyRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        if S::LANES == 16 {
            many_rows::<S, 8>(self);
        } else {
            many_rows::<S, 4>(self);
        }
    }
}

/// Vectors of rows whose scores are computed together.
const STRIP: usize = 2;

#[inline(always)]
fn many_rows<S: Simd, const TILE: usize>(job: ManyRows<'_>) {
    let ManyRows { args, head, queries, out, scratch } = job;
    let group = args.query_heads / args.key_heads;
    let rows = group * queries.len();
    let (dim, value_dim) = (args.head_dim, args.value_dim);
    let columns = value_dim.next_multiple_of(STRIP * S::LANES);
    let strip = STRIP * S::LANES;
    let padded = rows.next_multiple_of(strip);
    // Queries [dim, rows]; outputs [rows, columns]; largest score, sum, first and last visible key of each row; a
    // block's keys [KEYS, dim] and values [KEYS, columns]; scores [KEYS, strip]; dequantized rows.
    let sizes = [dim * padded, padded * columns, 4 * padded, KEYS * dim, KEYS * columns, KEYS * strip];
    let floats = sizes.iter().sum::<usize>() + KEYS * dim.max(value_dim) + 16;
    scratch.ensure(4 * floats);
    scratch[..4 * floats].fill(0);
    let base = scratch.as_mut_ptr().cast::<f32>();
    let part = |i: usize| base.wrapping_add(sizes[..i].iter().sum());
    let (packed, outputs, states, keys, values, scores) =
        (part(0), part(1), part(2), part(3), part(4), part(5));
    let dequantized = part(6);
    let (largest, sums) = (states, states.wrapping_add(padded));
    let (starts, ends) = (states.wrapping_add(2 * padded), states.wrapping_add(3 * padded));
    // SAFETY: the scratch is cut as sized above; keys, values, queries and outputs are used at places that `check`
    // found inside them; the outputs of a task are its own.
    unsafe {
        for row in 0..rows {
            let (query, head) = (queries.start + row / group, head * group + row % group);
            let source =
                args.queries.as_ptr().add(head * args.query_strides.0 + query * args.query_strides.1);
            for d in 0..dim {
                packed.add(d * padded + row).write(source.add(d).read() * args.scale);
            }
            let visible = args.visible(query);
            starts.add(row).write(visible.start as f32);
            ends.add(row).write(visible.end as f32);
        }
        for row in 0..padded {
            largest.add(row).write(f32::MIN);
        }
        let visible = args.visible(queries.start).start..args.visible(queries.end - 1).end;
        for start in visible.clone().step_by(KEYS) {
            let n = KEYS.min(visible.end - start);
            let view = rows_of::<S>(&args.keys, dim, head, start..start + n, dequantized);
            widen::<S>(view, n, dim, keys, dim);
            let view = rows_of::<S>(&args.values, value_dim, head, start..start + n, dequantized);
            widen::<S>(view, n, value_dim, values, columns);
            for first in (0..padded).step_by(strip) {
                for key in (0..n).step_by(TILE) {
                    // Keys beyond the last are left from an earlier block, or zero; they are not used.
                    let x = keys.add(key * dim);
                    let tile = multiply_add::<S, TILE, STRIP>(x, (dim, 1), packed.add(first), padded, dim);
                    for (i, tile) in tile.iter().enumerate() {
                        for (v, &score) in tile.iter().enumerate() {
                            S::store(scores.add((key + i) * strip + v * S::LANES), score);
                        }
                    }
                }
                // Whether some row of the strip does not see the whole block.
                let last_row = rows.min(first + strip) - 1;
                let seen_from = args.visible(queries.start + last_row / group).start;
                let seen_to = args.visible(queries.start + first / group).end;
                let masked = start < seen_from || seen_to < start + n;
                let mut keeps = [0.0; 2 * 16];
                for v in 0..STRIP {
                    let row = first + v * S::LANES;
                    let scores = scores.add(v * S::LANES);
                    let bounds = (S::load(starts.add(row)), S::load(ends.add(row)));
                    let before = S::load(largest.add(row));
                    let mut most = before;
                    for key in 0..n {
                        let at = scores.add(key * strip);
                        let mut score = S::load(at);
                        if let Some(cap) = args.softcap {
                            score = S::mul(S::splat(cap), tanh::<S>(S::div(score, S::splat(cap))));
                        }
                        if masked {
                            let position = S::splat((start + key) as f32);
                            let hidden = S::splat(f32::NEG_INFINITY);
                            score = S::select_lt(position, bounds.1, score, hidden);
                            score = S::select_lt(position, bounds.0, hidden, score);
                        }
                        if masked || args.softcap.is_some() {
                            S::store(at, score);
                        }
                        most = S::max(most, score);
                    }
                    let mut sum = S::zero();
                    for key in 0..n {
                        let at = scores.add(key * strip);
                        let e = exp::<S>(S::sub(S::load(at), most));
                        S::store(at, e);
                        sum = S::add(sum, e);
                    }
                    let keep = exp::<S>(S::sub(before, most));
                    S::store(keeps.as_mut_ptr().add(v * S::LANES), keep);
                    S::store(largest.add(row), most);
                    S::store(sums.add(row), S::fma(S::load(sums.add(row)), keep, sum));
                }
                for tile in (0..strip).step_by(TILE) {
                    if first + tile >= rows {
                        break;
                    }
                    for column in (0..columns).step_by(STRIP * S::LANES) {
                        let x = scores.add(tile);
                        let part =
                            multiply_add::<S, TILE, STRIP>(x, (1, strip), values.add(column), columns, n);
                        for (r, part) in part.iter().enumerate() {
                            let keep = S::splat(keeps[tile + r]);
                            for (v, &part) in part.iter().enumerate() {
                                let out = outputs.add((first + tile + r) * columns + column + v * S::LANES);
                                S::store(out, S::fma(S::load(out), keep, part));
                            }
                        }
                    }
                }
            }
        }
        for row in 0..rows {
            let (query, head) = (queries.start + row / group, head * group + row % group);
            let to = head * out.strides.0 + query * out.strides.1;
            let sum = sums.add(row).read();
            let factor = S::splat(if sum == 0.0 { 0.0 } else { 1.0 / sum });
            for d in (0..value_dim).step_by(S::LANES) {
                let value = S::mul(S::load(outputs.add(row * columns + d)), factor);
                S::store_first(out.y.at(to + d), value, S::LANES.min(value_dim - d));
            }
        }
    }
}

/// Writes `n` rows of `width` as f32, `stride` apart.
///
/// # Safety
/// In a kernel of `S`; the view has the rows, `out` room for them.
#[inline(always)]
unsafe fn widen<S: Simd>(view: RowsView, n: usize, width: usize, out: *mut f32, stride: usize) {
    for key in 0..n {
        for d in (0..width).step_by(S::LANES) {
            // SAFETY: by contract; no more than the rest of a row is read and written.
            unsafe {
                let source = view.data.add(key * view.stride + d * view.float.bytes());
                let out = out.add(key * stride + d);
                if d + S::LANES <= width {
                    S::store(out, S::load_as(view.float, source));
                } else {
                    let rest = width - d;
                    S::store_first(out, S::load_first_as(view.float, source, rest), rest);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{RandomMatrix, Rng, cpus, dequantized, relative_error, stored};

    struct Case {
        heads: (usize, usize),
        lens: (usize, usize),
        dims: (usize, usize),
        mask: Mask,
        softcap: Option<f32>,
    }

    const CASE: Case =
        Case { heads: (6, 2), lens: (1, 300), dims: (64, 64), mask: Mask::Causal, softcap: None };

    /// Attention in f64 over rows `[heads, len, dim]`.
    fn reference(case: &Case, scale: f32, q: &[f32], k: &[f64], v: &[f64]) -> Vec<f64> {
        let (group, (queries, keys), (dim, value_dim)) = (case.heads.0 / case.heads.1, case.lens, case.dims);
        let mut out = Vec::new();
        for head in 0..case.heads.0 {
            for i in 0..queries {
                let position = keys - queries.min(keys) + i;
                let q = &q[(head * queries + i) * dim..][..dim];
                let at = head / group * keys;
                let scores: Vec<f64> = (0..keys)
                    .map(|j| {
                        let k = &k[(at + j) * dim..][..dim];
                        let s =
                            q.iter().zip(k).map(|(&q, k)| f64::from(q) * k).sum::<f64>() * f64::from(scale);
                        let s = case.softcap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh());
                        let seen = match case.mask {
                            Mask::Full => true,
                            Mask::Causal => j <= position,
                            Mask::Window(w) => j <= position && position - j < w,
                        };
                        if seen { s } else { f64::NEG_INFINITY }
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..value_dim {
                    let total: f64 = (0..keys).map(|j| weights[j] * v[(at + j) * value_dim + d]).sum();
                    out.push(if sum > 0.0 { total / sum } else { 0.0 });
                }
            }
        }
        out
    }

    fn run(
        cpu: &Cpu,
        case: &Case,
        scale: f32,
        q: &[f32],
        keys: KeyValues<'_>,
        values: KeyValues<'_>,
    ) -> Vec<f32> {
        let mut out = vec![f32::NAN; case.heads.0 * case.lens.0 * case.dims.1];
        let args = Attention {
            queries: q,
            query_strides: (case.lens.0 * case.dims.0, case.dims.0),
            keys,
            values,
            query_heads: case.heads.0,
            key_heads: case.heads.1,
            query_len: case.lens.0,
            key_len: case.lens.1,
            head_dim: case.dims.0,
            value_dim: case.dims.1,
            scale,
            softcap: case.softcap,
            mask: case.mask,
        };
        attention(cpu, &args, &mut out, (case.lens.0 * case.dims.1, case.dims.1)).unwrap();
        out
    }

    fn dense(float: FloatType, data: &[u8], len: usize, dim: usize) -> KeyValues<'_> {
        KeyValues::Dense { float, data, head_stride: len * dim, key_stride: dim }
    }

    fn decoded(float: FloatType, data: &[u8]) -> Vec<f64> {
        data.chunks_exact(float.bytes()).map(|b| f64::from(float.read(b))).collect()
    }

    fn check_dense(case: &Case, float: FloatType, rng: &mut Rng) {
        let (heads, (queries, keys), (dim, value_dim)) = (case.heads, case.lens, case.dims);
        let q = rng.normals(heads.0 * queries * dim);
        let k = stored(float, &rng.normals(heads.1 * keys * dim), 1);
        let v = stored(float, &rng.normals(heads.1 * keys * value_dim), 1);
        let scale = 1.0 / (dim as f32).sqrt();
        let expected = reference(case, scale, &q, &decoded(float, &k[1..]), &decoded(float, &v[1..]));
        for cpu in cpus() {
            let y = run(
                &cpu,
                case,
                scale,
                &q,
                dense(float, &k[1..], keys, dim),
                dense(float, &v[1..], keys, value_dim),
            );
            let error = relative_error(&y, &expected);
            assert!(
                error < 2e-6,
                "{cpu:?} {float:?} {:?} {:?} {:?}: {error:e}",
                case.lens,
                case.dims,
                case.mask
            );
        }
    }

    #[test]
    fn one_query_over_contexts_of_any_length_matches_f64() {
        let mut rng = Rng::new(1);
        for (i, keys) in [1, 2, 15, 63, 64, 65, 300, 1500].into_iter().enumerate() {
            let float = [FloatType::F32, FloatType::Bf16, FloatType::F16][i % 3];
            check_dense(&Case { lens: (1, keys), ..CASE }, float, &mut rng);
        }
    }

    #[test]
    fn masks_and_shapes_match_f64_for_few_and_many_queries() {
        let mut rng = Rng::new(2);
        for lens in [(2, 2), (3, 70), (17, 17), (64, 200), (130, 130)] {
            for mask in [Mask::Full, Mask::Causal, Mask::Window(1), Mask::Window(33)] {
                check_dense(&Case { lens, mask, ..CASE }, FloatType::Bf16, &mut rng);
            }
        }
        for dims in [(8, 8), (80, 80), (128, 64), (33, 40), (256, 256)] {
            for lens in [(1, 90), (20, 90)] {
                check_dense(&Case { dims, lens, ..CASE }, FloatType::F32, &mut rng);
            }
        }
        for heads in [(1, 1), (8, 1), (20, 2)] {
            for lens in [(1, 90), (20, 90)] {
                check_dense(&Case { heads, lens, ..CASE }, FloatType::F32, &mut rng);
            }
        }
    }

    #[test]
    fn soft_capped_scores_match_f64() {
        let mut rng = Rng::new(3);
        for lens in [(1, 90), (20, 90)] {
            check_dense(&Case { lens, softcap: Some(2.0), ..CASE }, FloatType::F32, &mut rng);
        }
    }

    #[test]
    fn quantized_keys_and_values_match_f64() {
        let mut rng = Rng::new(4);
        for (bits, group) in [(4, 32), (8, 64), (2, 32), (3, 32), (5, 64), (6, 32)] {
            let format = QuantFormat::Affine { bits, group, scales: FloatType::Bf16 };
            for lens in [(1, 100), (30, 100)] {
                let case = Case { lens, ..CASE };
                let k = RandomMatrix::new(format, 2 * 100, 64, &mut rng);
                let v = RandomMatrix::new(format, 2 * 100, 64, &mut rng);
                let q = rng.normals(6 * lens.0 * 64);
                let expected = reference(&case, 1.0, &q, &dequantized(&k.view()), &dequantized(&v.view()));
                for cpu in cpus() {
                    let k = KeyValues::Quantized { rows: k.view(), head_stride: 100 };
                    let v = KeyValues::Quantized { rows: v.view(), head_stride: 100 };
                    let error = relative_error(&run(&cpu, &case, 1.0, &q, k, v), &expected);
                    assert!(error < 5e-6, "{cpu:?} {bits} bits {lens:?}: {error:e}");
                }
            }
        }
    }

    #[test]
    fn one_dominant_score_gives_its_value_and_no_nan() {
        let mut rng = Rng::new(5);
        for lens in [(1, 80), (16, 80)] {
            let case = Case { lens, mask: Mask::Full, ..CASE };
            let q = vec![1e18; 6 * lens.0 * 64];
            let mut k = vec![-1.0f32; 2 * 80 * 64];
            k[7 * 64..8 * 64].fill(1.0);
            k[87 * 64..88 * 64].fill(1.0);
            let k = stored(FloatType::F32, &k, 0);
            let values = rng.normals(2 * 80 * 64);
            let v = stored(FloatType::F32, &values, 0);
            for cpu in cpus() {
                let f = FloatType::F32;
                let y = run(&cpu, &case, 1.0, &q, dense(f, &k, 80, 64), dense(f, &v, 80, 64));
                for (row, y) in y.chunks_exact(64).enumerate() {
                    let head = row / lens.0 / 3;
                    assert_eq!(y, &values[(head * 80 + 7) * 64..][..64]);
                }
            }
        }
    }

    #[test]
    fn strides_place_queries_keys_and_outputs() {
        // Tokens first, heads inside, as a projection leaves them: the same numbers as heads first.
        let mut rng = Rng::new(6);
        for len in [1, 20] {
            let case = Case { lens: (len, 50), ..CASE };
            let q = rng.normals(6 * len * 64);
            let k = rng.normals(2 * 50 * 64);
            let turned = |x: &[f32], heads: usize, len: usize| {
                let mut out = vec![0.0; x.len()];
                for (i, row) in x.chunks_exact(64).enumerate() {
                    out[(i % len * heads + i / len) * 64..][..64].copy_from_slice(row);
                }
                out
            };
            let bytes = stored(FloatType::F32, &k, 0);
            let turned_bytes = stored(FloatType::F32, &turned(&k, 2, 50), 0);
            for cpu in cpus() {
                let kv = dense(FloatType::F32, &bytes, 50, 64);
                let expected = run(&cpu, &case, 0.1, &q, kv, kv);
                let tokens_first = KeyValues::Dense {
                    float: FloatType::F32,
                    data: &turned_bytes,
                    head_stride: 64,
                    key_stride: 128,
                };
                let q = turned(&q, 6, len);
                let mut out = vec![0.0; expected.len()];
                let args = Attention {
                    queries: &q,
                    query_strides: (64, 6 * 64),
                    keys: tokens_first,
                    values: tokens_first,
                    query_heads: 6,
                    key_heads: 2,
                    query_len: len,
                    key_len: 50,
                    head_dim: 64,
                    value_dim: 64,
                    scale: 0.1,
                    softcap: None,
                    mask: Mask::Causal,
                };
                attention(&cpu, &args, &mut out, (64, 6 * 64)).unwrap();
                assert_eq!(out, turned(&expected, 6, len));
                assert!(attention(&cpu, &args, &mut out[1..], (64, 6 * 64)).is_err());
                assert!(attention(&cpu, &args, &mut out, (0, 6 * 64)).is_err(), "heads would overlap");
                assert!(attention(&cpu, &Attention { key_len: 51, ..args }, &mut out, (64, 6 * 64)).is_err());
                assert!(
                    attention(&cpu, &Attention { key_heads: 4, ..args }, &mut out, (64, 6 * 64)).is_err()
                );
            }
        }
    }
}
