//! NEON with dot products.

// SAFETY, for the whole module: by the trait's contract the functions run only inside `vectorize`, on a machine
// that has the features; memory operations are given pointers valid for what they access, at any alignment. The
// instructions given as assembly have no stable intrinsics; they touch their registers only, or prefetch.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Kernel, Simd, unpack8};

#[derive(Clone, Copy)]
pub(super) struct Neon;

/// Functions whose bodies are intrinsics.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $t:ty),*) -> $r:ty = $body:expr;)*) => {
        $(#[inline(always)] fn $name($($arg: $t),*) -> $r {
            #[allow(unused_unsafe, reason = "some intrinsics are safe")]
            unsafe { $body }
        })*
    };
}

macro_rules! memory_functions {
    ($(fn $name:ident($($arg:ident: $t:ty),*) $(-> $r:ty)? = $body:expr;)*) => {
        $(#[inline(always)] unsafe fn $name($($arg: $t),*) $(-> $r)? { unsafe { $body } })*
    };
}

/// Adds four products of signed bytes to each lane.
#[inline(always)]
unsafe fn sdot(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = acc;
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

impl Simd for Neon {
    const LANES: usize = 4;
    type F32 = float32x4_t;
    type I32 = int32x4_t;

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }

    functions! {
        fn splat(x: f32) -> float32x4_t = vdupq_n_f32(x);
        fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t = vaddq_f32(a, b);
        fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t = vsubq_f32(a, b);
        fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t = vdivq_f32(a, b);
        fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcgtq_f32(a, b), a, b);
        fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcltq_f32(a, b), a, b);
        fn abs(a: float32x4_t) -> float32x4_t = vabsq_f32(a);
        fn sum(a: float32x4_t) -> f32 = vaddvq_f32(a);
        fn sum4(v: [float32x4_t; 4]) -> [f32; 4] = {
            let s = vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
            std::mem::transmute::<float32x4_t, [f32; 4]>(s)
        };
        fn max_lane(a: float32x4_t) -> f32 = vmaxvq_f32(a);
        fn select_lt(a: float32x4_t, b: float32x4_t, x: float32x4_t, y: float32x4_t) -> float32x4_t =
            vbslq_f32(vcltq_f32(a, b), x, y);
        fn round(a: float32x4_t) -> int32x4_t = vcvtnq_s32_f32(a);
        fn splat_i(x: i32) -> int32x4_t = vdupq_n_s32(x);
        fn add_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vaddq_s32(a, b);
        fn sub_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vsubq_s32(a, b);
        fn and(a: int32x4_t, b: int32x4_t) -> int32x4_t = vandq_s32(a, b);
        fn or(a: int32x4_t, b: int32x4_t) -> int32x4_t = vorrq_s32(a, b);
        fn shl(a: int32x4_t, n: u32) -> int32x4_t = vshlq_s32(a, vdupq_n_s32(n as i32));
        fn shr(a: int32x4_t, n: u32) -> int32x4_t =
            vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-(n as i32))));
        fn sar(a: int32x4_t, n: u32) -> int32x4_t = vshlq_s32(a, vdupq_n_s32(-(n as i32)));
        fn to_f32(a: int32x4_t) -> float32x4_t = vcvtq_f32_s32(a);
        fn bits_to_f32(a: int32x4_t) -> float32x4_t = vreinterpretq_f32_s32(a);
        fn lookup16(a: int32x4_t, table: &[u8; 16]) -> int32x4_t =
            vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_s32(a)));
    }
    memory_functions! {
        fn load(p: *const f32) -> float32x4_t = vld1q_f32(p);
        fn store(p: *mut f32, v: float32x4_t) = vst1q_f32(p, v);
        fn load_bf16(p: *const u16) -> float32x4_t = vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p)));
        fn load_i(p: *const u8) -> int32x4_t = vreinterpretq_s32_u8(vld1q_u8(p));
        fn store_i(p: *mut i32, v: int32x4_t) = vst1q_s32(p, v);
        fn splat_load(p: *const u8) -> int32x4_t = vdupq_n_s32(p.cast::<i32>().read_unaligned());
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> float32x4_t {
        unsafe {
            let bytes = vreinterpret_u8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> float32x4_t {
        unsafe {
            let halves = vld1_u16(p);
            let floats: float32x4_t;
            asm!(
                "fcvtl {0:v}.4s, {1:v}.4h",
                lateout(vreg) floats, in(vreg) halves,
                options(pure, nomem, nostack, preserves_flags)
            );
            floats
        }
    }
    #[inline(always)]
    unsafe fn expand(p: *const f32, _per: usize) -> float32x4_t {
        unsafe { vdupq_n_f32(p.read_unaligned()) }
    }
    #[inline(always)]
    fn dot(acc: int32x4_t, codes: int32x4_t, x: int32x4_t, wide: bool) -> int32x4_t {
        unsafe {
            let (codes, x) = (vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(x));
            if !wide {
                return sdot(acc, codes, x);
            }
            // code = (code − 128) + 64 + 64, all signed bytes.
            let sum = sdot(acc, veorq_s8(codes, vdupq_n_s8(-128)), x);
            sdot(sdot(sum, vdupq_n_s8(64), x), vdupq_n_s8(64), x)
        }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(p: *mut u8, v: int32x4_t) {
        unsafe {
            let halves = vmovn_s32(v);
            let bytes = vmovn_s16(vcombine_s16(halves, halves));
            p.cast::<u32>().write_unaligned(vget_lane_u32::<0>(vreinterpret_u32_s8(bytes)));
        }
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: u32>(p: *const u8) -> int32x4_t {
        unsafe {
            match BITS {
                8 => Self::load_i(p),
                4 => {
                    let packed = vld1_u8(p);
                    let (low, high) = (vand_u8(packed, vdup_n_u8(15)), vshr_n_u8::<4>(packed));
                    vreinterpretq_s32_u8(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)))
                }
                _ => {
                    let codes = [unpack8::<BITS>(p), unpack8::<BITS>(p.add(BITS as usize))];
                    Self::load_i(codes.as_ptr().cast())
                }
            }
        }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        unsafe {
            asm!("prfm pldl1keep, [{0}]", in(reg) p, options(readonly, nostack, preserves_flags));
        }
    }
}
