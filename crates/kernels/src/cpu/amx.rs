//! Matrix–matrix products on Intel's matrix units (AMX-BF16), nearly as exact as f32: every float becomes the sum
//! of two bf16 numbers, itself rounded and the rest rounded, and a product is `hi hi + lo hi + hi lo`, accumulated
//! in f32. What is left out is below 3·10⁻⁵ of each term.
//!
//! Codes of at most four bits have a faster way, [`codes`], which rounds activations to twelve bits.
//!
//! A *step* is 32 columns. For each step, prepared activations hold the upper halves of rows 0–15 and 16–31 and
//! then the rests of the same, `[16 rows][32 columns]` bf16 each; weights hold the same for a pair of panels,
//! `[16 column pairs][16 rows][2 columns]` each.

#![allow(unsafe_code)]

pub(crate) mod codes;

use std::arch::asm;
use std::arch::x86_64::*;

use super::buffer::Buffer;
use super::input::InputTile;
use super::mm::{Source, fill_panel};
use super::qmm::Output;
use super::quant::PANEL;
use super::simd::Isa;

/// Rows of activations in a tile of prepared input.
pub(crate) const ROWS: usize = 32;

/// Rows of weights that are multiplied at a time.
pub(crate) const OUTPUTS: usize = 2 * PANEL;

/// Columns of a step.
pub(crate) const STEP: usize = 32;

/// Bytes of one matrix register.
const REGISTER: usize = 1024;

/// Bytes of a step's upper halves and rests.
const STEP_BYTES: usize = 4 * REGISTER;

/// Columns for which weights are converted at a time: their halves stay in the innermost cache.
const COLUMNS: usize = 256;

/// Multiplies tiles of input with a pair of panels (or the last panel alone).
///
/// # Safety
/// The machine has AMX-BF16 and may use it. The sources have `cols` columns, and so have the tiles, which are in
/// the layout of this module; the output has the tiles' rows, from the input's first on, and at most
/// [`OUTPUTS`] columns, as many as the sources have rows.
pub(crate) unsafe fn multiply_panels(
    isa: Isa,
    sources: &[Source<'_>],
    cols: usize,
    tiles: impl Iterator<Item = InputTile> + Clone,
    out: Output,
    scratch: &mut Buffer,
) {
    let panel_bytes = COLUMNS * PANEL * 4;
    let halves_bytes = COLUMNS / STEP * STEP_BYTES;
    scratch.ensure(panel_bytes + halves_bytes + ROWS * OUTPUTS * 4);
    let (panel, rest) = scratch.split_at_mut(panel_bytes);
    let (halves, edge) = rest.split_at_mut(halves_bytes);
    let panel = panel.as_mut_ptr().cast::<f32>();
    let edge = Output { y: edge.as_mut_ptr().cast(), stride: OUTPUTS, cols: OUTPUTS };
    // SAFETY: the parts of the scratch have room for a block of columns and a tile of output; the rest by contract.
    unsafe {
        let _tiles = TileConfiguration::load();
        for start in (0..cols).step_by(COLUMNS) {
            let columns = start..cols.min(start + COLUMNS);
            let steps = columns.len().div_ceil(STEP);
            if sources.len() < 2 || !columns.len().is_multiple_of(STEP) {
                halves[..steps * STEP_BYTES].fill(0);
            }
            for (i, &source) in sources.iter().enumerate() {
                fill_panel(isa, source, columns.clone(), panel);
                split_panel(panel, columns.len(), halves.as_mut_ptr().add(i * REGISTER));
            }
            for tile in tiles.clone() {
                let x = tile.data.add(start / STEP * STEP_BYTES);
                let y = Output { y: out.y.add(tile.first_row * out.stride), ..out };
                let whole = tile.rows == ROWS && out.cols == OUTPUTS;
                if !whole && start > 0 {
                    copy(y, edge, tile.rows, out.cols);
                }
                multiply_tile(x, halves.as_ptr(), steps, if whole { y } else { edge }, start == 0);
                if !whole {
                    copy(edge, y, tile.rows, out.cols);
                }
            }
        }
    }
}

/// Copies the part of an output that exists.
///
/// # Safety
/// Both have `rows` rows of `cols` columns.
unsafe fn copy(from: Output, to: Output, rows: usize, cols: usize) {
    for row in 0..rows {
        // SAFETY: by contract.
        unsafe { to.y.add(row * to.stride).copy_from_nonoverlapping(from.y.add(row * from.stride), cols) };
    }
}

/// The shape of the eight matrix registers, 16 rows of 64 bytes each, set while this lives.
struct TileConfiguration;

impl TileConfiguration {
    /// # Safety
    /// The machine has AMX and may use it.
    unsafe fn load() -> Self {
        #[repr(align(64))]
        struct Configuration([u8; 64]);
        const ALL: Configuration = {
            let mut bytes = [0; 64];
            bytes[0] = 1;
            let mut register = 0;
            while register < 8 {
                bytes[16 + 2 * register] = 64;
                bytes[48 + register] = 16;
                register += 1;
            }
            Configuration(bytes)
        };
        // SAFETY: the instruction reads 64 bytes. Compiled code uses no matrix registers of its own.
        unsafe { asm!("ldtilecfg [{}]", in(reg) ALL.0.as_ptr(), options(nostack, preserves_flags)) };
        Self
    }
}

impl Drop for TileConfiguration {
    fn drop(&mut self) {
        // SAFETY: whoever loaded the configuration had the machine for it.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// 32 rows of input by 32 rows of weights, set or (unless `first`) added to what the output holds.
///
/// # Safety
/// A [`TileConfiguration`] is loaded; both operands hold `steps > 0` steps, the output 32 rows and columns.
unsafe fn multiply_tile(x: *const u8, w: *const u8, steps: usize, out: Output, first: bool) {
    let lower = out.y.wrapping_add(PANEL * out.stride);
    // SAFETY: registers 0–3 are the quarters of the output, loaded and stored where it lies; 4–5 are read from
    // the weights' steps, 6–7 from the input's. The order of loads lets each register be used twice.
    unsafe {
        asm!(
            "test {first:e}, {first:e}",
            "jz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{upper} + {stride}*1]",
            "tileloadd tmm1, [{upper} + {stride}*1 + 64]",
            "tileloadd tmm2, [{lower} + {stride}*1]",
            "tileloadd tmm3, [{lower} + {stride}*1 + 64]",
            "3:",
            "tileloadd tmm6, [{x} + {line}*1]",
            "tileloadd tmm4, [{w} + {line}*1]",
            "tdpbf16ps tmm0, tmm6, tmm4",
            "tileloadd tmm5, [{w} + {line}*1 + 1024]",
            "tdpbf16ps tmm1, tmm6, tmm5",
            "tileloadd tmm7, [{x} + {line}*1 + 1024]",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tdpbf16ps tmm3, tmm7, tmm5",
            "tileloadd tmm6, [{x} + {line}*1 + 2048]",
            "tdpbf16ps tmm0, tmm6, tmm4",
            "tdpbf16ps tmm1, tmm6, tmm5",
            "tileloadd tmm7, [{x} + {line}*1 + 3072]",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tdpbf16ps tmm3, tmm7, tmm5",
            "tileloadd tmm6, [{x} + {line}*1]",
            "tileloadd tmm4, [{w} + {line}*1 + 2048]",
            "tdpbf16ps tmm0, tmm6, tmm4",
            "tileloadd tmm5, [{w} + {line}*1 + 3072]",
            "tdpbf16ps tmm1, tmm6, tmm5",
            "tileloadd tmm7, [{x} + {line}*1 + 1024]",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tdpbf16ps tmm3, tmm7, tmm5",
            "add {x}, 4096",
            "add {w}, 4096",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{upper} + {stride}*1], tmm0",
            "tilestored [{upper} + {stride}*1 + 64], tmm1",
            "tilestored [{lower} + {stride}*1], tmm2",
            "tilestored [{lower} + {stride}*1 + 64], tmm3",
            first = in(reg) i32::from(first),
            upper = in(reg) out.y,
            lower = in(reg) lower,
            stride = in(reg) out.stride * 4,
            line = in(reg) 64usize,
            x = inout(reg) x => _,
            w = inout(reg) w => _,
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// A float rounded to bf16, and the rest rounded to bf16, both half away from zero; both in the upper halves of
/// lanes, the lower halves of the second unspecified.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn split(x: __m512) -> (__m512i, __m512i) {
    let half = _mm512_set1_epi32(0x8000);
    let rounded = _mm512_add_epi32(_mm512_castps_si512(x), half);
    let upper = _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    let rest = _mm512_castps_si512(_mm512_sub_ps(x, _mm512_castsi512_ps(upper)));
    (upper, _mm512_add_epi32(rest, half))
}

/// The upper halves of `even` and of `odd`, alternating.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave(even: __m512i, odd: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd)
}

/// The upper halves of `first`, then those of `second`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn concatenate(first: __m512i, second: __m512i) -> __m512i {
    const ODD: [u16; 32] = {
        let mut odd = [0; 32];
        let mut i = 0;
        while i < 32 {
            odd[i] = 2 * i as u16 + 1;
            i += 1;
        }
        odd
    };
    // SAFETY: the table has the size of a vector.
    let odd = unsafe { _mm512_loadu_si512(ODD.as_ptr().cast()) };
    _mm512_permutex2var_epi16(first, odd, second)
}

/// Splits a panel `[columns, PANEL]` of f32 into its place in the steps at `out`; missing columns stay as they are.
///
/// # Safety
/// The machine has AVX-512; `out` has room for the panel's part of the steps.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_panel(panel: *const f32, columns: usize, out: *mut u8) {
    let zero = _mm512_setzero_ps();
    for pair in 0..columns.div_ceil(2) {
        // SAFETY: columns below `columns` are read, a pair's place is written.
        unsafe {
            let column = panel.add(2 * pair * PANEL);
            let even = _mm512_loadu_ps(column);
            let odd = if 2 * pair + 1 < columns { _mm512_loadu_ps(column.add(PANEL)) } else { zero };
            let ((even, even_rest), (odd, odd_rest)) = (split(even), split(odd));
            let place = out.add(pair / 16 * STEP_BYTES + pair % 16 * 64);
            _mm512_storeu_si512(place.cast(), interleave(even, odd));
            _mm512_storeu_si512(place.add(2 * REGISTER).cast(), interleave(even_rest, odd_rest));
        }
    }
}

/// Bytes of a tile of prepared input.
pub(crate) fn tile_bytes(cols: usize) -> usize {
    cols.div_ceil(STEP) * STEP_BYTES
}

/// Writes a tile of input: rows of `cols` floats, at most [`ROWS`] of them.
///
/// # Panics
/// Where `target` has not [`tile_bytes`] bytes, or there are more rows.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn split_rows(source: &[f32], cols: usize, target: &mut [u8]) {
    assert!(source.len() <= ROWS * cols && target.len() == tile_bytes(cols));
    if source.len() < ROWS * cols || !cols.is_multiple_of(STEP) {
        target.fill(0);
    }
    for (row, x) in source.chunks_exact(cols).enumerate() {
        for (step, x) in x.chunks(STEP).enumerate() {
            let mask = ((1u64 << x.len()) - 1) as u32;
            // SAFETY: the mask keeps loads inside of the step's columns; rows and steps are inside of the target.
            unsafe {
                let first = _mm512_maskz_loadu_ps(mask as u16, x.as_ptr());
                let second = _mm512_maskz_loadu_ps((mask >> 16) as u16, x.as_ptr().wrapping_add(16));
                let ((first, first_rest), (second, second_rest)) = (split(first), split(second));
                let place = target.as_mut_ptr().add(step * STEP_BYTES + row / 16 * REGISTER + row % 16 * 64);
                _mm512_storeu_si512(place.cast(), concatenate(first, second));
                _mm512_storeu_si512(place.add(2 * REGISTER).cast(), concatenate(first_rest, second_rest));
            }
        }
    }
}

/// Whether a processor with AVX-512 has AMX as well, and the system lets this process use it.
pub(crate) fn available() -> bool {
    /// AMX-BF16, AMX-TILE, AMX-INT8.
    const WANTED: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    // SAFETY: every x86-64 processor has the instruction, and one with AVX-512, whose users ask, has leaf 7.
    #[allow(unused_unsafe, reason = "the function is safe in newer versions of Rust")]
    let features = unsafe { __cpuid_count(7, 0) }.edx;
    features & WANTED == WANTED && permitted()
}

/// Asks the kernel for the matrix registers' state, which it saves only for processes that did.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two integers and changes nothing but the permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}
