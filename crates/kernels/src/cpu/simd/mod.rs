//! The vector operations that kernels are written in, once for all instruction sets.
//!
//! A kernel is a [`Kernel`]: its `run` is generic over [`Simd`] and always inlined into the instruction set's
//! `vectorize`, the one function compiled with that set's features. Values of `S::F32` and `S::I32` exist only
//! there, which is what makes the value operations safe to call.

#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use super::float::FloatType;
pub(crate) use portable::{Portable, unpack8};

/// An instruction set that kernels can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// As [`Avx512`](Self::Avx512), and matrix registers for many rows of activations: AMX-BF16 and AMX-INT8.
    Amx,
    /// 512-bit vectors with integer dot products: AVX-512 F, BW, DQ, VL, VBMI and VNNI.
    Avx512,
    /// 256-bit vectors: AVX2, FMA, F16C and BMI2.
    Avx2,
    /// 128-bit vectors with integer dot products: NEON and dotprod.
    Neon,
    /// Plain Rust: the reference, on every machine.
    Portable,
}

impl Isa {
    /// The instruction sets of this machine, best first.
    pub fn available() -> &'static [Isa] {
        static AVAILABLE: OnceLock<Vec<Isa>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            [Isa::Amx, Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable]
                .into_iter()
                .filter(|isa| isa.detect())
                .collect()
        })
    }

    /// The best instruction set of this machine.
    pub fn best() -> Isa {
        Self::available().first().copied().unwrap_or(Isa::Portable)
    }

    fn detect(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512.detect() && super::amx::available(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.detect()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("dotprod"),
            Isa::Portable => true,
            #[allow(unreachable_patterns, reason = "sets of other architectures")]
            _ => false,
        }
    }

    /// Runs a kernel with this instruction set; with the portable one where the machine lacks it.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: a set in `available` is one that this machine has.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Isa::Amx | Isa::Avx512 if Self::available().contains(&self) => x86::Avx512::vectorize(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 if Self::available().contains(&self) => x86::Avx2::vectorize(kernel),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon if Self::available().contains(&self) => neon::Neon::vectorize(kernel),
                _ => Portable::vectorize(kernel),
            }
        }
    }

    /// Rows of activations that one tile of the matrix–matrix kernels takes with this instruction set.
    pub(crate) fn tile_rows(self) -> usize {
        match self {
            Isa::Amx | Isa::Avx512 => 8,
            _ => 4,
        }
    }
}

/// A computation that any instruction set can carry out. `run` must be `#[inline(always)]`, and so must be all
/// that it calls which takes or returns vectors.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self) -> Self::Output;
}

/// One instruction set: vectors of `LANES` 32-bit lanes.
///
/// Except for `vectorize`, the functions may be called only from a [`Kernel::run`] of the same `S`. The memory
/// operations, which are unsafe, need pointers valid for the lanes (or `n` lanes) named, at any alignment.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    const LANES: usize;
    /// f32 lanes.
    type F32: Copy;
    /// i32 lanes, or `4 * LANES` bytes.
    type I32: Copy;

    /// Runs a kernel compiled for this instruction set.
    ///
    /// # Safety
    /// The machine has it.
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output;

    fn splat(x: f32) -> Self::F32;
    unsafe fn load(p: *const f32) -> Self::F32;
    unsafe fn store(p: *mut f32, v: Self::F32);
    /// Loads `LANES` floats of type `t`.
    #[inline(always)]
    unsafe fn load_as(t: FloatType, p: *const u8) -> Self::F32 {
        // SAFETY: the same contract.
        unsafe {
            match t {
                FloatType::F16 => Self::load_f16(p.cast()),
                FloatType::Bf16 => Self::load_bf16(p.cast()),
                FloatType::F32 => Self::load(p.cast()),
            }
        }
    }
    /// `LANES` bytes as floats.
    unsafe fn load_u8(p: *const u8) -> Self::F32;
    unsafe fn load_f16(p: *const u16) -> Self::F32;
    unsafe fn load_bf16(p: *const u16) -> Self::F32;
    fn add(a: Self::F32, b: Self::F32) -> Self::F32;
    fn sub(a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(a: Self::F32, b: Self::F32) -> Self::F32;
    fn div(a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once except by the portable set.
    fn fma(a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `b` where either is NaN, or unspecified.
    fn max(a: Self::F32, b: Self::F32) -> Self::F32;
    /// `b` where either is NaN, or unspecified.
    fn min(a: Self::F32, b: Self::F32) -> Self::F32;
    fn abs(a: Self::F32) -> Self::F32;
    fn sum(a: Self::F32) -> f32;
    /// The sums of four vectors.
    #[inline(always)]
    fn sum4(v: [Self::F32; 4]) -> [f32; 4] {
        [Self::sum(v[0]), Self::sum(v[1]), Self::sum(v[2]), Self::sum(v[3])]
    }
    fn max_lane(a: Self::F32) -> f32;
    /// `a < b ? x : y`, lane by lane.
    fn select_lt(a: Self::F32, b: Self::F32, x: Self::F32, y: Self::F32) -> Self::F32;
    /// Nearest integers, ties to even; unspecified outside i32.
    fn round(a: Self::F32) -> Self::I32;
    /// Lane `l` is `p[l / per]`, for a power of two `per >= 4`; reads `LANES.div_ceil(per)` floats.
    unsafe fn expand(p: *const f32, per: usize) -> Self::F32;

    fn splat_i(x: i32) -> Self::I32;
    unsafe fn load_i(p: *const u8) -> Self::I32;
    unsafe fn store_i(p: *mut i32, v: Self::I32);
    /// The 4 bytes at `p`, in every lane.
    unsafe fn splat_load(p: *const u8) -> Self::I32;
    fn add_i(a: Self::I32, b: Self::I32) -> Self::I32;
    fn sub_i(a: Self::I32, b: Self::I32) -> Self::I32;
    fn and(a: Self::I32, b: Self::I32) -> Self::I32;
    fn or(a: Self::I32, b: Self::I32) -> Self::I32;
    /// Shift left of each lane by `n`, a constant once inlined (so are those below).
    fn shl(a: Self::I32, n: u32) -> Self::I32;
    /// Logical shift right of each lane.
    fn shr(a: Self::I32, n: u32) -> Self::I32;
    /// Arithmetic shift right of each lane.
    fn sar(a: Self::I32, n: u32) -> Self::I32;
    fn to_f32(a: Self::I32) -> Self::F32;
    fn bits_to_f32(a: Self::I32) -> Self::F32;
    /// Byte by byte, `table[a & 15]`; the bytes of `a` are below 16.
    fn lookup16(a: Self::I32, table: &[u8; 16]) -> Self::I32;
    /// Adds to each lane the dot product of its four unsigned `codes` with its four signed bytes of `x`.
    /// Codes above 63 need `wide`, a
    /// constant once inlined.
    fn dot(acc: Self::I32, codes: Self::I32, x: Self::I32, wide: bool) -> Self::I32;
    /// Writes the low byte of each lane: `LANES` bytes.
    unsafe fn store_low_bytes(p: *mut u8, v: Self::I32);
    /// `4 * LANES` consecutive codes of `BITS` bits, one a byte; reads exactly `4 * LANES * BITS / 8` bytes.
    unsafe fn unpack<const BITS: u32>(p: *const u8) -> Self::I32;

    /// The first `n <= LANES` floats of type `t` at `p`; 0 in the other lanes.
    #[inline(always)]
    unsafe fn load_first_as(t: FloatType, p: *const u8, n: usize) -> Self::F32 {
        let mut buffer = [0u8; 64];
        // SAFETY: `n` floats at `p` are readable by contract, and n <= LANES <= 16.
        unsafe {
            std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), n * t.bytes());
            Self::load_as(t, buffer.as_ptr())
        }
    }
    /// The first `n <= LANES` floats at `p`; `fill` in the other lanes.
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize, fill: f32) -> Self::F32 {
        let mut buffer = [fill; 16];
        // SAFETY: `n` floats at `p` are readable by contract, and n <= LANES <= 16.
        unsafe {
            std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), n);
            Self::load(buffer.as_ptr())
        }
    }
    /// Writes the first `n <= LANES` lanes.
    #[inline(always)]
    unsafe fn store_first(p: *mut f32, v: Self::F32, n: usize) {
        let mut buffer = [0.0; 16];
        // SAFETY: `n` floats at `p` are writable by contract, and n <= LANES <= 16.
        unsafe {
            Self::store(buffer.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), p, n);
        }
    }
    #[inline(always)]
    fn zero() -> Self::F32 {
        Self::splat(0.0)
    }
    /// Hints that the cache line at `p`, which may be any address, is wanted soon.
    #[inline(always)]
    fn prefetch(_p: *const u8) {}
}

/// eˣ with a relative error below 2e-7 (about 1.5 units in the last place) for x in [-87.3, 88.7]; 0 below
/// that, infinite above; NaN for NaN.
///
/// Reduction x = n ln 2 + r with ln 2 in two parts, then a polynomial of degree 7 in r.
#[inline(always)]
pub(crate) fn exp<S: Simd>(x: S::F32) -> S::F32 {
    const LOW: f32 = -87.336_54;
    const HIGH: f32 = 88.722_83;
    let clamped = S::min(S::splat(HIGH), S::max(S::splat(LOW), x));
    let n = S::round(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
    let nf = S::to_f32(n);
    let r = S::fma(nf, S::splat(-0.693_359_4), clamped);
    let r = S::fma(nf, S::splat(2.121_944_4e-4), r);
    let mut p = S::splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = S::fma(p, r, S::splat(c));
    }
    // 2ⁿ in two factors, since n reaches 128, whose power of two is not a float.
    let half = S::sar(n, 1);
    let pow = |n| S::bits_to_f32(S::shl(S::add_i(n, S::splat_i(127)), 23));
    let value = S::mul(S::mul(p, pow(half)), pow(S::sub_i(n, half)));
    let value = S::select_lt(x, S::splat(LOW), S::zero(), value);
    S::select_lt(S::splat(HIGH), x, S::splat(f32::INFINITY), value)
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(x: S::F32) -> S::F32 {
    let e = exp::<S>(S::sub(S::zero(), x));
    S::div(S::splat(1.0), S::add(S::splat(1.0), e))
}

/// tanh x = 1 − 2 / (1 + e²ˣ), and x − x³/3 + 2x⁵/15 − 17x⁷/315 where |x| is small and that would cancel.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(x: S::F32) -> S::F32 {
    let e = exp::<S>(S::add(x, x));
    let large = S::sub(S::splat(1.0), S::div(S::splat(2.0), S::add(S::splat(1.0), e)));
    let x2 = S::mul(x, x);
    let mut p = S::splat(62.0 / 2835.0);
    for c in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0] {
        p = S::fma(p, x2, S::splat(c));
    }
    S::select_lt(S::abs(x), S::splat(0.25), S::mul(x, p), large)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_portable_set_is_always_there_and_last() {
        assert_eq!(Isa::available().last(), Some(&Isa::Portable));
        assert_eq!(Isa::available().first(), Some(&Isa::best()));
    }

    /// Applies one of the functions below to up to 16 numbers.
    struct Apply(u8, [f32; 16]);

    impl Kernel for Apply {
        type Output = [f32; 16];

        #[inline(always)]
        fn run<S: Simd>(self) -> [f32; 16] {
            let mut out = [0.0; 16];
            for i in (0..16).step_by(S::LANES) {
                // SAFETY: both arrays have 16 elements.
                unsafe {
                    let x = S::load(self.1.as_ptr().add(i));
                    let y = match self.0 {
                        0 => exp::<S>(x),
                        1 => tanh::<S>(x),
                        _ => sigmoid::<S>(x),
                    };
                    S::store(out.as_mut_ptr().add(i), y);
                }
            }
            out
        }
    }

    #[test]
    fn exponentials_have_the_documented_errors() {
        for &isa in Isa::available() {
            for block in 0..2000u16 {
                let x: [f32; 16] =
                    std::array::from_fn(|i| (f32::from(block) - 1000.0) * 0.087 + i as f32 * 0.005);
                let results: [[f32; 16]; 3] = [0, 1, 2].map(|f| isa.run(Apply(f, x)));
                for (i, &x) in x.iter().enumerate() {
                    let x = f64::from(x);
                    let exact = [x.exp(), x.tanh(), 1.0 / (1.0 + (-x).exp())];
                    for (f, limit) in [2e-7, 5e-7, 4e-7].into_iter().enumerate() {
                        let error = (f64::from(results[f][i]) - exact[f]).abs();
                        assert!(error <= limit * exact[f].abs(), "{isa:?} function {f} of {x}: {error:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn exponentials_of_extremes_are_their_limits() {
        for &isa in Isa::available() {
            let mut x = [0.0; 16];
            x[..6].copy_from_slice(&[f32::NEG_INFINITY, -1e30, -0.0, 1e30, f32::INFINITY, f32::NAN]);
            let exp = isa.run(Apply(0, x));
            assert_eq!(exp[..5], [0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY], "{isa:?}");
            assert!(exp[5].is_nan(), "{isa:?}");
            let tanh = isa.run(Apply(1, x));
            assert_eq!(tanh[..5], [-1.0, -1.0, 0.0, 1.0, 1.0], "{isa:?}");
        }
    }
}
