//! Products of affine codes of at most four bits on AMX-INT8, one instruction for 16 rows, 16 outputs and 32 columns.
//!
//! Activations are rounded to 2039 steps of the largest magnitude in a block of 32 columns and written as
//! `16 upper + lower`, two bytes that fit side by side in a row of a matrix register. The other operand holds the
//! codes, centered, times 16, and below them the codes again: so one exact sum over integers has both parts in it.
//! Scales and steps are applied block by block; biases meet the blocks' sums in a product of bf16 halves.

#![allow(clippy::needless_range_loop, reason = "arrays of vectors are indexed in step with pointers")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::TileConfiguration;
use crate::cpu::buffer::Buffer;
use crate::cpu::codec::{Affine, Codec};
use crate::cpu::input::InputTile;
use crate::cpu::qmm::Output;
use crate::cpu::quant::{PANEL, QuantFormat};
use crate::cpu::simd::{Isa, Kernel, Simd};

/// Rows of activations in a tile of prepared input.
pub(crate) const ROWS: usize = 16;

/// Columns that share a step.
const BLOCK: usize = 32;

/// Steps of the largest magnitude: the upper byte is at most 127, the lower part at most 7.
const STEPS: f32 = 2039.0;

/// Blocks whose magnitudes are all below this are taken as zero: its inverse is still a float.
const SMALLEST_MAXIMUM: f32 = 1e-30;

/// Bytes of one matrix register.
const REGISTER: usize = 1024;

/// A block of a tile of input: `[16 rows][32 upper bytes, 32 lower bytes]`, then the rows' steps.
const INPUT_BLOCK: usize = REGISTER + 4 * ROWS;

/// Blocks whose sums fill one register: `[16 rows][8 blocks][sum, its rest, sum, 0]` in bf16.
const SUM_BLOCKS: usize = 8;

/// Blocks of weights that are laid out at a time: they stay in the innermost cache.
const BLOCKS: usize = 16;

/// Whether weights of this format can take this way.
pub(crate) fn accepts(format: QuantFormat) -> bool {
    matches!(format, QuantFormat::Affine { bits: ..=4, .. })
}

/// Bytes of a tile of prepared input.
pub(crate) fn tile_bytes(cols: usize) -> usize {
    let blocks = cols / BLOCK;
    blocks * INPUT_BLOCK + blocks.div_ceil(SUM_BLOCKS) * REGISTER
}

/// Writes a tile of input: rows of `cols` floats, at most [`ROWS`] of them.
///
/// # Panics
/// Where `target` has not [`tile_bytes`] bytes, or there are more rows.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn round_rows(source: &[f32], cols: usize, target: &mut [u8]) {
    assert!(source.len() <= ROWS * cols && target.len() == tile_bytes(cols));
    target.fill(0);
    let (blocks, sums) = target.split_at_mut(cols / BLOCK * INPUT_BLOCK);
    for (row, x) in source.chunks_exact(cols).enumerate() {
        for (b, (x, block)) in x.chunks_exact(BLOCK).zip(blocks.chunks_exact_mut(INPUT_BLOCK)).enumerate() {
            // SAFETY: `x` holds two vectors; a row of a block four times 16 bytes.
            let total = unsafe {
                let [first, second] = [0, 16].map(|i| _mm512_loadu_ps(x.as_ptr().add(i)));
                let total = _mm512_reduce_add_ps(_mm512_add_ps(first, second));
                let largest =
                    _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
                let (step, inverse) = if total.is_nan() {
                    (f32::NAN, 0.0)
                } else if largest < SMALLEST_MAXIMUM {
                    (0.0, 0.0)
                } else {
                    (largest / STEPS, STEPS / largest)
                };
                let bytes = block.as_mut_ptr().add(row * 64);
                for (i, x) in [first, second].into_iter().enumerate() {
                    let q = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
                    let upper = _mm512_srai_epi32::<4>(_mm512_add_epi32(q, _mm512_set1_epi32(8)));
                    let lower = _mm512_sub_epi32(q, _mm512_slli_epi32::<4>(upper));
                    _mm_storeu_si128(bytes.add(16 * i).cast(), _mm512_cvtepi32_epi8(upper));
                    _mm_storeu_si128(bytes.add(32 + 16 * i).cast(), _mm512_cvtepi32_epi8(lower));
                }
                block[REGISTER + 4 * row..][..4].copy_from_slice(&step.to_ne_bytes());
                total
            };
            let (sum, rest) = halves(total);
            let place = &mut sums[b / SUM_BLOCKS * REGISTER + row * 64 + b % SUM_BLOCKS * 8..][..6];
            place[..2].copy_from_slice(&sum.to_ne_bytes());
            place[2..4].copy_from_slice(&rest.to_ne_bytes());
            place[4..].copy_from_slice(&sum.to_ne_bytes());
        }
    }
}

/// A number rounded to bf16, and the rest, rounded to bf16.
fn halves(x: f32) -> (u16, u16) {
    let round = |x: f32| (x.to_bits().wrapping_add(0x8000) >> 16) as u16;
    let upper = round(x);
    (upper, round(x - f32::from_bits(u32::from(upper) << 16)))
}

/// A part of a panel's columns laid out for the product.
#[derive(Clone, Copy)]
struct Weights {
    /// `[blocks][2][8][16 rows][4 columns]`: the codes times 16, then the codes.
    codes: *mut u8,
    /// `[blocks][16 rows]` f32.
    scales: *mut f32,
    /// The same for biases, the center's share included.
    biases: *mut f32,
    /// The counterpart of the blocks' sums, `[blocks][2][16 rows][2]` in bf16: bias and bias; rest and 0.
    halves: *mut u8,
}

/// Multiplies tiles of input with a panel.
///
/// # Safety
/// The machine has AMX-INT8 and may use it. The panel has `cols` columns of a format that [`accepts`] does, and so
/// have the tiles, which are in the layout of this module; the output has the tiles' rows, from the input's first on.
pub(crate) unsafe fn multiply_panel(
    isa: Isa,
    format: QuantFormat,
    panel: &[u8],
    cols: usize,
    tiles: impl Iterator<Item = InputTile> + Clone,
    out: Output,
    scratch: &mut Buffer,
) {
    let floats = BLOCKS * PANEL * 4;
    scratch.ensure(BLOCKS * REGISTER + 2 * floats + BLOCKS / SUM_BLOCKS * REGISTER + 2 * REGISTER);
    let codes = scratch.as_mut_ptr();
    let scales = codes.wrapping_add(BLOCKS * REGISTER);
    let weights = Weights {
        codes,
        scales: scales.cast(),
        biases: scales.wrapping_add(floats).cast(),
        halves: scales.wrapping_add(2 * floats),
    };
    let sums = scales.wrapping_add(2 * floats + BLOCKS / SUM_BLOCKS * REGISTER);
    let all = cols / BLOCK;
    // SAFETY: the scratch was cut as sized above; the rest by contract.
    unsafe {
        let _tiles = TileConfiguration::load();
        for start in (0..all).step_by(BLOCKS) {
            let blocks = BLOCKS.min(all - start);
            weights.halves.write_bytes(0, BLOCKS / SUM_BLOCKS * REGISTER);
            isa.run(LayOut { format, panel, start, blocks, weights });
            split_biases(weights, blocks);
            for tile in tiles.clone() {
                let x = tile.data.add(start * INPUT_BLOCK);
                let x_sums = tile.data.add(all * INPUT_BLOCK + start / SUM_BLOCKS * REGISTER);
                let y = Output { y: out.y.add(tile.first_row * out.stride), ..out };
                multiply_tile(x, x_sums, weights, blocks, y, tile.rows, start > 0, sums);
            }
        }
    }
}

/// Lays out `blocks` blocks of a panel from block `start` on.
struct LayOut<'a> {
    format: QuantFormat,
    panel: &'a [u8],
    start: usize,
    blocks: usize,
    weights: Weights,
}

impl Kernel for LayOut<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: by the contract of `multiply_panel`, whence this kernel comes.
        unsafe {
            match self.format.bits() {
                2 => self.lay_out::<S, Affine<2>>(),
                3 => self.lay_out::<S, Affine<3>>(),
                _ => self.lay_out::<S, Affine<4>>(),
            }
        }
    }
}

impl LayOut<'_> {
    /// # Safety
    /// In a kernel of `S`; `C` is the format's codec; the panel has the blocks and the weights room for them.
    #[inline(always)]
    unsafe fn lay_out<S: Simd, C: Codec>(self) {
        let Self { format, panel, start, blocks, weights } = self;
        let (upper, lower) = const { centered(C::CENTER) };
        let scale_type = format.interleaved_scale();
        let per_group = format.group() / BLOCK;
        // SAFETY: offsets are those of the panel's groups and of the places in the weights.
        unsafe {
            for b in 0..blocks {
                let (group, in_group) = ((start + b) / per_group, (start + b) % per_group);
                let group = panel.as_ptr().add(group * format.group_bytes());
                let scales = group.add(per_group * format.block_bytes());
                let codes = group.add(in_group * format.block_bytes());
                for first in (0..PANEL).step_by(S::LANES) {
                    let scale = S::load_as(scale_type, scales.add(first * scale_type.bytes()));
                    let bias = S::load_as(scale_type, scales.add((PANEL + first) * scale_type.bytes()));
                    S::store(weights.scales.add(b * PANEL + first), scale);
                    let bias = S::fma(S::splat(C::CENTER as f32), scale, bias);
                    S::store(weights.biases.add(b * PANEL + first), bias);
                    for t in 0..8 {
                        let four = C::columns::<S>(codes.add(first * 4), t);
                        let place = weights.codes.add(b * REGISTER + t * 64 + first * 4);
                        S::store_i(place.cast(), S::lookup16(four, &upper));
                        S::store_i(place.add(REGISTER / 2).cast(), S::lookup16(four, &lower));
                    }
                }
            }
        }
    }
}

/// By code, the centered code times 16, and the centered code, as signed bytes.
const fn centered(center: i32) -> ([u8; 16], [u8; 16]) {
    let (mut upper, mut lower) = ([0; 16], [0; 16]);
    let mut code = 0;
    while code < 2 * center {
        upper[code as usize] = (16 * (code - center)) as u8;
        lower[code as usize] = (code - center) as u8;
        code += 1;
    }
    (upper, lower)
}

/// Writes the biases' halves beside the blocks' sums.
///
/// # Safety
/// The machine has AVX-512; the weights hold the blocks' biases.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_biases(weights: Weights, blocks: usize) {
    for b in 0..blocks {
        // SAFETY: a block's place among the halves is two lines.
        unsafe {
            let (bias, rest) = super::split(_mm512_loadu_ps(weights.biases.add(b * PANEL)));
            let place = weights.halves.add(b * 128);
            _mm512_storeu_si512(place.cast(), super::interleave(bias, bias));
            _mm512_storeu_si512(place.add(64).cast(), _mm512_srli_epi32::<16>(rest));
        }
    }
}

/// 16 rows of input by a panel, set or (with `add`) added to what the output holds.
///
/// # Safety
/// A [`TileConfiguration`] is loaded; the operands have `blocks > 0` blocks, the output `rows` rows; `scratch` has
/// room for two registers.
#[allow(clippy::too_many_arguments, reason = "the operands of an inner loop")]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn multiply_tile(
    x: *const u8,
    x_sums: *const u8,
    weights: Weights,
    blocks: usize,
    out: Output,
    rows: usize,
    add: bool,
    scratch: *mut u8,
) {
    let columns = ((1u32 << out.cols) - 1) as __mmask16;
    // SAFETY: registers are loaded from and stored to places of their size, by contract; outputs that exist are
    // touched. Compiled code uses no matrix registers.
    unsafe {
        multiply_sums(x_sums, weights.halves, blocks.div_ceil(SUM_BLOCKS), scratch);
        let mut y = [_mm512_setzero_ps(); ROWS];
        for r in 0..ROWS {
            y[r] = _mm512_loadu_ps(scratch.add(64 * r).cast());
            if add && r < rows {
                y[r] = _mm512_add_ps(y[r], _mm512_maskz_loadu_ps(columns, out.y.add(r * out.stride)));
            }
        }
        // The next block's sums are under way while this one's are scaled.
        multiply_block(x, weights.codes, scratch);
        for b in 0..blocks {
            let next = b + 1;
            if next < blocks {
                let sums = scratch.add(next % 2 * REGISTER);
                multiply_block(x.add(next * INPUT_BLOCK), weights.codes.add(next * REGISTER), sums);
            }
            let sums = scratch.add(b % 2 * REGISTER);
            let steps = x.add(b * INPUT_BLOCK + REGISTER).cast::<f32>();
            let scale = _mm512_loadu_ps(weights.scales.add(b * PANEL));
            for r in 0..ROWS {
                let sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.add(64 * r).cast()));
                let factor = _mm512_mul_ps(scale, _mm512_set1_ps(steps.add(r).read()));
                y[r] = _mm512_fmadd_ps(sum, factor, y[r]);
            }
        }
        // With constant bounds, so that all of `y` stays in registers.
        for r in 0..ROWS {
            if r < rows {
                _mm512_mask_storeu_ps(out.y.add(r * out.stride), columns, y[r]);
            }
        }
    }
}

/// The integer sums of one block.
///
/// # Safety
/// A [`TileConfiguration`] is loaded; all three point to registers' memory.
#[inline(always)]
unsafe fn multiply_block(x: *const u8, codes: *const u8, sums: *mut u8) {
    // SAFETY: by contract.
    unsafe {
        asm!(
            "tileloadd tmm1, [{x} + {line}*1]",
            "tileloadd tmm2, [{codes} + {line}*1]",
            "tilezero tmm0",
            "tdpbssd tmm0, tmm1, tmm2",
            "tilestored [{sums} + {line}*1], tmm0",
            x = in(reg) x,
            codes = in(reg) codes,
            sums = in(reg) sums,
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _,
            options(nostack, preserves_flags),
        );
    }
}

/// The product of blocks' sums with biases.
///
/// # Safety
/// A [`TileConfiguration`] is loaded; the operands are `count > 0` registers' memory each, the output that of one.
#[inline(always)]
unsafe fn multiply_sums(x: *const u8, halves: *const u8, count: usize, out: *mut u8) {
    // SAFETY: by contract.
    unsafe {
        asm!(
            "tilezero tmm0",
            "2:",
            "tileloadd tmm1, [{x} + {line}*1]",
            "tileloadd tmm2, [{halves} + {line}*1]",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "add {x}, 1024",
            "add {halves}, 1024",
            "dec {count}",
            "jnz 2b",
            "tilestored [{out} + {line}*1], tmm0",
            x = inout(reg) x => _,
            halves = inout(reg) halves => _,
            count = inout(reg) count => _,
            out = in(reg) out,
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _,
            options(nostack),
        );
    }
}
