//! Quantized products over weights as stored, for one row or a few of activations. Rows of weights are taken one
//! at a time, in the order of memory. (Interleaved weights take the tiles of [`super::qmm`].)

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use super::buffer::Buffer;
use super::codec::{Affine, Codec, E4m3, Fp4};
use super::quant::{QuantFormat, QuantizedMatrix};
use super::simd::{Isa, Kernel, Simd};

/// One row of a prepared input.
#[derive(Clone, Copy)]
pub(crate) struct InputRow {
    /// Its tile.
    pub(crate) tile: *const u8,
    /// The tile's rows, padding included.
    pub(crate) rows: usize,
    /// Which of them it is.
    pub(crate) row: usize,
    /// Planes of the integer layout; 0 for f32 tiles.
    pub(crate) planes: usize,
}

/// Multiplies rows of a matrix with one row of input.
///
/// # Safety
/// The input has the matrix's columns, in integer layout for its format or in f32 tiles; `y` has an element for
/// each of `rows`, which the matrix has.
pub(crate) unsafe fn multiply_rows(
    isa: Isa,
    matrix: &QuantizedMatrix<'_>,
    x: InputRow,
    rows: Range<usize>,
    y: *mut f32,
    scratch: &mut Buffer,
) {
    let job = RowsJob { matrix, x, rows, y, scratch };
    match matrix.format {
        QuantFormat::Affine { bits: 2, .. } => job.run::<Affine<2>>(isa),
        QuantFormat::Affine { bits: 3, .. } => job.run::<Affine<3>>(isa),
        QuantFormat::Affine { bits: 4, .. } => job.run::<Affine<4>>(isa),
        QuantFormat::Affine { bits: 5, .. } => job.run::<Affine<5>>(isa),
        QuantFormat::Affine { bits: 6, .. } => job.run::<Affine<6>>(isa),
        QuantFormat::Affine { .. } => job.run::<Affine<8>>(isa),
        QuantFormat::Mxfp4 => job.run::<Fp4<32>>(isa),
        QuantFormat::Nvfp4 => job.run::<Fp4<16>>(isa),
        QuantFormat::Mxfp8 => job.run::<E4m3>(isa),
    }
}

struct RowsJob<'a> {
    matrix: &'a QuantizedMatrix<'a>,
    x: InputRow,
    rows: Range<usize>,
    y: *mut f32,
    scratch: &'a mut Buffer,
}

impl RowsJob<'_> {
    fn run<C: Codec>(self, isa: Isa) {
        match self.x.planes {
            2 => isa.run(Rows::<C, 2>(self, PhantomData)),
            1 => isa.run(Rows::<C, 1>(self, PhantomData)),
            _ => isa.run(Rows::<C, 0>(self, PhantomData)),
        }
    }
}

struct Rows<'a, C, const PLANES: usize>(RowsJob<'a>, PhantomData<C>);

/// Floats by which vector loads may run over an array.
const SLACK: usize = 16;

/// The columns that one vector of codes covers come to this, or a divisor of it.
const VECTOR: usize = 64;

/// A row of input laid out for rows of weights.
#[derive(Clone, Copy)]
struct Input {
    /// Plane after plane of `columns` integers.
    planes: *const u8,
    /// f32: for each vector of codes, the columns of its lanes' first codes, of their second codes, and so on.
    values: *const f32,
    /// By lane of a vector of codes, its block's step.
    steps: *const f32,
    /// By group, what its scale and its bias are multiplied with, but for the sum over codes.
    of_scale: *const f32,
    of_bias: *const f32,
    /// The matrix's, to a multiple of [`VECTOR`].
    columns: usize,
}

impl<C: Codec, const PLANES: usize> Kernel for Rows<'_, C, PLANES> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let RowsJob { matrix, x, rows, y, scratch } = self.0;
        let format = matrix.format;
        let group = format.group();
        let groups = matrix.cols / group;
        // SAFETY: scales are read and written where the scratch has room for them; vectors of codes are read
        // inside a row, its last part from a copy.
        unsafe {
            let (input, scales) = spread_input::<S, C, PLANES>(x, matrix.cols, group, scratch);
            for row in rows.clone() {
                let mut sum = S::zero();
                let stored = matrix.row_part(matrix.scales, row);
                if let QuantFormat::Affine { scales: float, .. } = format {
                    let biases = matrix.row_part(matrix.biases, row);
                    for g in (0..groups).step_by(S::LANES) {
                        let at = g * float.bytes();
                        let n = S::LANES.min(groups - g);
                        let (scale, bias) = if n == S::LANES {
                            (
                                S::load_as(float, stored.as_ptr().add(at)),
                                S::load_as(float, biases.as_ptr().add(at)),
                            )
                        } else {
                            (
                                S::load_first_as(float, stored.as_ptr().add(at), n),
                                S::load_first_as(float, biases.as_ptr().add(at), n),
                            )
                        };
                        S::store(scales.add(g), scale);
                        sum = S::fma(scale, S::load(input.of_scale.add(g)), sum);
                        sum = S::fma(bias, S::load(input.of_bias.add(g)), sum);
                    }
                } else {
                    let table = format.fp_scales();
                    for (g, &byte) in stored.iter().enumerate() {
                        scales.add(g).write(table[usize::from(byte)]);
                    }
                    for g in (0..groups).step_by(S::LANES) {
                        sum = S::fma(S::load(scales.add(g)), S::load(input.of_scale.add(g)), sum);
                    }
                }

                let codes = matrix.row_codes(row);
                let width = 4 * S::LANES;
                let whole = matrix.cols / width * width;
                for column in (0..whole).step_by(width) {
                    let source = codes.as_ptr().add(column * C::BITS as usize / 8);
                    S::prefetch(source.wrapping_add(4096));
                    let scale = S::expand(scales.add(column / group), group / 4);
                    sum = multiply::<S, C, PLANES>(source, input, column, scale, sum);
                }
                if whole < matrix.cols {
                    let mut last = [0u8; VECTOR];
                    let source = &codes[whole * C::BITS as usize / 8..];
                    last[..source.len()].copy_from_slice(source);
                    let scale = S::expand(scales.add(whole / group), group / 4);
                    sum = multiply::<S, C, PLANES>(last.as_ptr(), input, whole, scale, sum);
                }
                y.add(row - rows.start).write(S::sum(sum));
            }
        }
    }
}

/// Lays out a row of input in the scratch; also returns room for a row's scales, zero beyond them.
///
/// # Safety
/// As [`multiply_rows`], in a kernel of `S`.
#[inline(always)]
unsafe fn spread_input<S: Simd, C: Codec, const PLANES: usize>(
    x: InputRow,
    cols: usize,
    group: usize,
    scratch: &mut Buffer,
) -> (Input, *mut f32) {
    let columns = cols.next_multiple_of(VECTOR);
    let groups = cols / group + SLACK;
    let floats = 3 * groups + if PLANES == 0 { columns } else { columns / 4 };
    let plane_bytes = PLANES * columns;
    scratch.ensure(plane_bytes + 4 * floats);
    scratch[..plane_bytes + 4 * floats].fill(0);
    let planes = scratch.as_mut_ptr();
    // SAFETY: the scratch is cut as sized above; words of the tile are read where its layout has this row's.
    unsafe {
        let of_scale = planes.add(plane_bytes).cast::<f32>();
        let of_bias = of_scale.add(groups);
        let scales = of_bias.add(groups);
        let values = scales.add(groups);
        if PLANES == 0 {
            let source = x.tile.cast::<f32>();
            for column in 0..cols {
                let value = source.add(column * x.rows + x.row).read();
                let width = 4 * S::LANES;
                let (vector, at) = (column / width, column % width);
                values.add(vector * width + at % 4 * S::LANES + at / 4).write(value);
                *of_bias.add(column / group) += value;
            }
            for g in 0..cols / group {
                if !C::AFFINE {
                    of_scale.add(g).write(-C::CENTER as f32 * of_bias.add(g).read());
                }
            }
        } else {
            let words = C::BLOCK / 4;
            let block_words = x.rows * (PLANES * words + 3);
            for block in 0..cols / C::BLOCK {
                let source = x.tile.cast::<[u8; 4]>().add(block * block_words + x.row);
                for i in 0..PLANES * words {
                    let target = planes.add(i / words * columns + block * C::BLOCK + i % words * 4);
                    target.cast::<[u8; 4]>().write(source.add(i * x.rows).read());
                }
                let tail = |i: usize| source.add((PLANES * words + i) * x.rows).read();
                let step = f32::from_ne_bytes(tail(0));
                let sum = i32::from_ne_bytes(tail(1)) as f32 * step;
                let total = f32::from_ne_bytes(tail(2));
                for lane in 0..words {
                    values.add(block * words + lane).write(step);
                }
                let g = block * C::BLOCK / group;
                *of_scale.add(g) += C::CENTER as f32 * if C::AFFINE { total - sum } else { -sum };
                *of_bias.add(g) += total;
            }
        }
        (Input { planes, values, steps: values, of_scale, of_bias, columns }, scales)
    }
}

/// Adds the products of a vector of codes with the input from `column` on, times their scales.
///
/// # Safety
/// In a kernel of `S`; `source` holds a vector of codes, the input was laid out for `S`, `C` and `PLANES`.
#[inline(always)]
unsafe fn multiply<S: Simd, C: Codec, const PLANES: usize>(
    source: *const u8,
    input: Input,
    column: usize,
    scale: S::F32,
    sum: S::F32,
) -> S::F32 {
    // SAFETY: by contract.
    unsafe {
        let code = C::row::<S>(source);
        if PLANES == 0 {
            let mut dot = S::zero();
            let mut four = code;
            for b in 0..4 {
                let value = C::value::<S>(S::and(four, S::splat_i(255)));
                dot = S::fma(value, S::load(input.values.add(column + b * S::LANES)), dot);
                four = S::shr(four, 8);
            }
            return S::fma(dot, scale, sum);
        }
        let mut dot = S::splat_i(0);
        for plane in 0..PLANES {
            let q = S::load_i(input.planes.add(plane * input.columns + column));
            dot = S::dot(if plane == 1 { S::shl(dot, 8) } else { dot }, code, q, C::WIDE);
        }
        S::fma(S::to_f32(dot), S::mul(scale, S::load(input.steps.add(column / 4))), sum)
    }
}
