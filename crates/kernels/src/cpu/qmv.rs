//! Quantized matrix–vector products over weights as stored, one row at a time: a product of many rows reads them
//! in the order of memory. (Interleaved weights take the one-row tile of [`super::qmm`].)

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use super::buffer::Buffer;
use super::codec::{Affine, Codec, Fp4};
use super::quant::{QuantFormat, QuantizedMatrix};
use super::simd::{Isa, Kernel, Simd};

/// Multiplies rows of a matrix with one row of input, `x` in integer layout of `planes` planes for the format.
///
/// # Safety
/// `x` holds the matrix's columns; `y` has an element for each of `rows`, which the matrix has.
pub(crate) unsafe fn multiply_rows(
    isa: Isa,
    matrix: &QuantizedMatrix<'_>,
    x: *const u8,
    planes: usize,
    rows: Range<usize>,
    y: *mut f32,
    scratch: &mut Buffer,
) {
    let job = RowsJob { matrix, x, planes, rows, y, scratch };
    match matrix.format {
        QuantFormat::Affine { bits: 2, .. } => job.run::<Affine<2>>(isa),
        QuantFormat::Affine { bits: 3, .. } => job.run::<Affine<3>>(isa),
        QuantFormat::Affine { bits: 4, .. } => job.run::<Affine<4>>(isa),
        QuantFormat::Affine { bits: 5, .. } => job.run::<Affine<5>>(isa),
        QuantFormat::Affine { bits: 6, .. } => job.run::<Affine<6>>(isa),
        QuantFormat::Affine { .. } => job.run::<Affine<8>>(isa),
        QuantFormat::Nvfp4 => job.run::<Fp4<16>>(isa),
        // mxfp8 has no integer codes and no integer layout.
        QuantFormat::Mxfp4 | QuantFormat::Mxfp8 => job.run::<Fp4<32>>(isa),
    }
}

struct RowsJob<'a> {
    matrix: &'a QuantizedMatrix<'a>,
    x: *const u8,
    planes: usize,
    rows: Range<usize>,
    y: *mut f32,
    scratch: &'a mut Buffer,
}

impl RowsJob<'_> {
    fn run<C: Codec>(self, isa: Isa) {
        if self.planes == 2 {
            isa.run(Rows::<C, 2>(self, PhantomData));
        } else {
            isa.run(Rows::<C, 1>(self, PhantomData));
        }
    }
}

struct Rows<'a, C, const PLANES: usize>(RowsJob<'a>, PhantomData<C>);

/// Floats by which vector loads may run over an array of blocks or groups.
const SLACK: usize = 16;

impl<C: Codec, const PLANES: usize> Kernel for Rows<'_, C, PLANES> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let RowsJob { matrix, x, rows, y, scratch, .. } = self.0;
        let format = matrix.format;
        let blocks = matrix.cols / C::BLOCK;
        let per_group = format.group() / C::BLOCK;
        let groups = blocks / per_group;
        let width = 4 * S::LANES;
        let padded = matrix.cols.next_multiple_of(64);
        let block_bytes = C::BLOCK * PLANES + 12;

        // The input's planes, each in one piece; per group the factors of its scale and bias; per block the
        // input's step and, row by row, the step times the scale.
        let floats = 2 * (groups + SLACK) + 2 * (blocks + SLACK) + groups + SLACK;
        scratch.ensure(PLANES * padded + 4 * floats);
        let (planes, floats) = scratch.split_at_mut(PLANES * padded);
        planes.fill(0);
        let floats = floats.as_mut_ptr().cast::<f32>();
        // SAFETY: the arrays share the scratch as sized above; the input has `blocks` blocks of `block_bytes`;
        // vectors of codes are read inside a row, its last part from a copy.
        unsafe {
            let of_scale = floats;
            let of_bias = of_scale.add(groups + SLACK);
            let steps = of_bias.add(groups + SLACK);
            let factors = steps.add(blocks + SLACK);
            let scales = factors.add(blocks + SLACK);
            for i in 0..2 * (groups + SLACK) {
                of_scale.add(i).write_unaligned(0.0);
            }
            for block in 0..blocks {
                let source = x.add(block * block_bytes);
                for plane in 0..PLANES {
                    let target = planes.as_mut_ptr().add(plane * padded + block * C::BLOCK);
                    std::ptr::copy_nonoverlapping(source.add(plane * C::BLOCK), target, C::BLOCK);
                }
                let tail = source.add(PLANES * C::BLOCK);
                let step = tail.cast::<f32>().read_unaligned();
                let sum = tail.add(4).cast::<i32>().read_unaligned() as f32 * step;
                let total = tail.add(8).cast::<f32>().read_unaligned();
                steps.add(block).write_unaligned(step);
                let at = of_scale.add(block / per_group);
                let centered = C::CENTER as f32 * if C::AFFINE { total - sum } else { -sum };
                at.write_unaligned(at.read_unaligned() + centered);
                let at = of_bias.add(block / per_group);
                at.write_unaligned(at.read_unaligned() + total);
            }
            for row in rows.clone() {
                let stored = matrix.row_part(matrix.scales, row);
                let mut sum = S::zero();
                if let QuantFormat::Affine { scales: float, .. } = format {
                    let biases = matrix.row_part(matrix.biases, row);
                    let whole = groups / S::LANES * S::LANES;
                    for g in (0..whole).step_by(S::LANES) {
                        let scale = S::load_as(float, stored.as_ptr().add(g * float.bytes()));
                        let bias = S::load_as(float, biases.as_ptr().add(g * float.bytes()));
                        S::store(scales.add(g), scale);
                        sum = S::fma(scale, S::load(of_scale.add(g)), sum);
                        sum = S::fma(bias, S::load(of_bias.add(g)), sum);
                    }
                    if whole < groups {
                        let mut last = [[0u8; 64]; 2];
                        for (last, source) in last.iter_mut().zip([stored, biases]) {
                            let source = &source[whole * float.bytes()..];
                            last[..source.len()].copy_from_slice(source);
                        }
                        let scale = S::load_as(float, last[0].as_ptr());
                        S::store(scales.add(whole), scale);
                        sum = S::fma(scale, S::load(of_scale.add(whole)), sum);
                        sum = S::fma(S::load_as(float, last[1].as_ptr()), S::load(of_bias.add(whole)), sum);
                    }
                } else {
                    for (g, byte) in stored.iter().enumerate() {
                        scales.add(g).write_unaligned(format.read_scale(std::slice::from_ref(byte)));
                    }
                    for g in (groups..groups + SLACK).take(S::LANES) {
                        scales.add(g).write_unaligned(0.0);
                    }
                    for g in (0..groups).step_by(S::LANES) {
                        sum = S::fma(S::load(scales.add(g)), S::load(of_scale.add(g)), sum);
                    }
                }
                if per_group == 1 {
                    for b in (0..blocks).step_by(S::LANES) {
                        S::store(factors.add(b), S::mul(S::load(scales.add(b)), S::load(steps.add(b))));
                    }
                } else {
                    for b in 0..blocks {
                        let scale = scales.add(b / per_group).read_unaligned();
                        factors.add(b).write_unaligned(scale * steps.add(b).read_unaligned());
                    }
                }

                let codes = matrix.row_codes(row);
                let lanes_per_block = C::BLOCK / 4;
                let mut multiply = |source: *const u8, column: usize| {
                    let code = C::row::<S>(source);
                    let mut dot = S::splat_i(0);
                    for plane in 0..PLANES {
                        let q = S::load_i(planes.as_ptr().add(plane * padded + column));
                        dot = S::dot(if plane == 1 { S::shl(dot, 8) } else { dot }, code, q, C::WIDE);
                    }
                    let factor = S::expand(factors.add(column / C::BLOCK), lanes_per_block);
                    sum = S::fma(S::to_f32(dot), factor, sum);
                };
                let whole = matrix.cols / width * width;
                for column in (0..whole).step_by(width) {
                    let source = codes.as_ptr().add(column * C::BITS as usize / 8);
                    S::prefetch(source.wrapping_add(4096));
                    multiply(source, column);
                }
                if whole < matrix.cols {
                    let mut last = [0u8; 64];
                    let source = &codes[whole * C::BITS as usize / 8..];
                    last[..source.len()].copy_from_slice(source);
                    multiply(last.as_ptr(), whole);
                }
                y.add(row - rows.start).write(S::sum(sum));
            }
        }
    }
}
