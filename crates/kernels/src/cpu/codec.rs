//! How codes are read, per code width.

#![allow(unsafe_code)]

use super::quant::{E4M3_RESCALE, FP4_CENTER, FP4_CODES, PANEL};
use super::simd::Simd;

/// Bytes from one word of a plane to the next.
const WORD: usize = 4 * PANEL;

/// A kind of codes. Functions are inlined into kernels.
pub(crate) trait Codec: Copy + 'static {
    const BITS: u32;
    /// Columns of a block.
    const BLOCK: usize;
    /// Codes above 127 occur.
    const WIDE: bool;
    /// Values have a bias per group; else the center is subtracted from codes.
    const AFFINE: bool;
    /// What kernels subtract from codes: about their mean, since the smaller the factors are, the less the
    /// rounding of activations weighs.
    const CENTER: i32;

    /// Codes of columns `4 * t..4 * t + 4`, one row a lane, of a block in a panel; `p` points to the first
    /// lane's row in the block's first word.
    ///
    /// # Safety
    /// Inside a kernel of `S`; the block is readable.
    unsafe fn columns<S: Simd>(p: *const u8, t: usize) -> S::I32;

    /// `4 * LANES` consecutive codes of a row.
    ///
    /// # Safety
    /// Inside a kernel of `S`; `4 * LANES * BITS / 8` bytes are readable.
    unsafe fn row<S: Simd>(p: *const u8) -> S::I32;

    /// The numbers that codes stand for, before [`CENTER`](Self::CENTER) is subtracted; one code in each lane.
    #[inline(always)]
    fn value<S: Simd>(code: S::I32) -> S::F32 {
        S::to_f32(code)
    }

    /// `CENTER * sum`.
    fn center<S: Simd>(sum: S::I32) -> S::I32;
}

/// Affine codes.
#[derive(Clone, Copy)]
pub(crate) struct Affine<const BITS: u32>;

/// e2m1 codes in groups of `BLOCK`.
#[derive(Clone, Copy)]
pub(crate) struct Fp4<const BLOCK: usize>;

/// The part of a plane of `width` bits for columns `4 * t..`; `first` is the plane's first word.
///
/// # Safety
/// As [`Codec::columns`].
#[inline(always)]
unsafe fn plane<S: Simd>(p: *const u8, first: usize, width: usize, t: usize) -> S::I32 {
    let per_word = 8 / width;
    // SAFETY: the word lies in the block.
    let word = unsafe { S::load_i(p.add((first + t / per_word) * WORD)) };
    let shift = (width * (t % per_word)) as u32;
    let shifted = if shift == 0 { word } else { S::shr(word, shift) };
    S::and(shifted, S::splat_i(0x0101_0101 * ((1 << width) - 1)))
}

impl<const BITS: u32> Codec for Affine<BITS> {
    const BITS: u32 = BITS;
    const BLOCK: usize = 32;
    const WIDE: bool = BITS == 8;
    const AFFINE: bool = true;
    const CENTER: i32 = 1 << (BITS - 1);

    #[inline(always)]
    unsafe fn columns<S: Simd>(p: *const u8, t: usize) -> S::I32 {
        // SAFETY: by contract; the planes are those that interleaving writes.
        unsafe {
            match BITS {
                2 => plane::<S>(p, 0, 2, t),
                3 => S::or(plane::<S>(p, 0, 2, t), S::shl(plane::<S>(p, 2, 1, t), 2)),
                4 => plane::<S>(p, 0, 4, t),
                5 => S::or(plane::<S>(p, 0, 4, t), S::shl(plane::<S>(p, 4, 1, t), 4)),
                6 => S::or(plane::<S>(p, 0, 4, t), S::shl(plane::<S>(p, 4, 2, t), 4)),
                _ => S::load_i(p.add(t * WORD)),
            }
        }
    }

    #[inline(always)]
    unsafe fn row<S: Simd>(p: *const u8) -> S::I32 {
        // SAFETY: by contract.
        unsafe { S::unpack::<BITS>(p) }
    }

    #[inline(always)]
    fn center<S: Simd>(sum: S::I32) -> S::I32 {
        S::shl(sum, BITS - 1)
    }
}

impl<const BLOCK: usize> Codec for Fp4<BLOCK> {
    const BITS: u32 = 4;
    const BLOCK: usize = BLOCK;
    const WIDE: bool = false;
    const AFFINE: bool = false;
    const CENTER: i32 = FP4_CENTER;

    #[inline(always)]
    unsafe fn columns<S: Simd>(p: *const u8, t: usize) -> S::I32 {
        // SAFETY: by contract.
        S::lookup16(unsafe { plane::<S>(p, 0, 4, t) }, &FP4_CODES)
    }

    #[inline(always)]
    unsafe fn row<S: Simd>(p: *const u8) -> S::I32 {
        // SAFETY: by contract.
        S::lookup16(unsafe { S::unpack::<4>(p) }, &FP4_CODES)
    }

    #[inline(always)]
    fn center<S: Simd>(sum: S::I32) -> S::I32 {
        S::add_i(S::shl(sum, 3), S::shl(sum, 2))
    }
}

/// e4m3 codes, which are no integers: for f32 activations only.
#[derive(Clone, Copy)]
pub(crate) struct E4m3;

impl Codec for E4m3 {
    const BITS: u32 = 8;
    const BLOCK: usize = 32;
    const WIDE: bool = true;
    const AFFINE: bool = false;
    const CENTER: i32 = 0;

    #[inline(always)]
    unsafe fn columns<S: Simd>(p: *const u8, t: usize) -> S::I32 {
        // SAFETY: by contract.
        unsafe { S::load_i(p.add(t * WORD)) }
    }

    #[inline(always)]
    unsafe fn row<S: Simd>(p: *const u8) -> S::I32 {
        // SAFETY: by contract.
        unsafe { S::load_i(p) }
    }

    #[inline(always)]
    fn value<S: Simd>(code: S::I32) -> S::F32 {
        let magnitude = S::shl(S::and(code, S::splat_i(127)), 20);
        let sign = S::shl(S::and(code, S::splat_i(128)), 24);
        S::mul(S::bits_to_f32(S::or(magnitude, sign)), S::splat(E4M3_RESCALE))
    }

    #[inline(always)]
    fn center<S: Simd>(_sum: S::I32) -> S::I32 {
        S::splat_i(0)
    }
}
