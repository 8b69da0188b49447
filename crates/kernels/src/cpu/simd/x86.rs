//! AVX2 and AVX-512.

// SAFETY, for the whole module: by the trait's contract the functions run only inside `vectorize`, on a machine
// that has the features; memory operations are given pointers valid for what they access and use unaligned
// loads and stores only.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::arch::x86_64::*;

use super::{FloatType, Kernel, Simd};

/// Functions whose bodies are intrinsics.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $t:ty),*) -> $r:ty = $body:expr;)*) => {
        $(#[inline(always)] fn $name($($arg: $t),*) -> $r { unsafe { $body } })*
    };
}

macro_rules! memory_functions {
    ($(fn $name:ident($($arg:ident: $t:ty),*) $(-> $r:ty)? = $body:expr;)*) => {
        $(#[inline(always)] unsafe fn $name($($arg: $t),*) $(-> $r)? { unsafe { $body } })*
    };
}

#[derive(Clone, Copy)]
pub(super) struct Avx512;

/// For each code width below 8, the bytes that make up each 64-bit word of eight codes, and the codes' bit
/// offsets in it.
const fn unpack_tables(bits: u32) -> ([u8; 64], [u8; 64]) {
    let (mut bytes, mut offsets) = ([0; 64], [0; 64]);
    let mut i = 0;
    while i < 64 {
        let (word, at) = (i / 8, i as u32 % 8);
        let byte = word as u32 * bits + at;
        bytes[i] = if byte < 8 * bits { byte as u8 } else { 0 };
        offsets[i] = (at * bits) as u8;
        i += 1;
    }
    (bytes, offsets)
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    type F32 = __m512;
    type I32 = __m512i;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }

    functions! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn abs(a: __m512) -> __m512 = _mm512_abs_ps(a);
        fn sum(a: __m512) -> f32 = _mm512_reduce_add_ps(a);
        fn sum4(v: [__m512; 4]) -> [f32; 4] = {
            let a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
            let b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
            let s = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b));
            let s = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps::<1>(s));
            let s = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s));
            std::mem::transmute::<__m128, [f32; 4]>(s)
        };
        fn max_lane(a: __m512) -> f32 = _mm512_reduce_max_ps(a);
        fn select_lt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 =
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x);
        fn round(a: __m512) -> __m512i = _mm512_cvtps_epi32(a);
        fn splat_i(x: i32) -> __m512i = _mm512_set1_epi32(x);
        fn add_i(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        fn sub_i(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi32(a, b);
        fn and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        fn or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        fn shl(a: __m512i, n: u32) -> __m512i = _mm512_sll_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn shr(a: __m512i, n: u32) -> __m512i = _mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn sar(a: __m512i, n: u32) -> __m512i = _mm512_sra_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn to_f32(a: __m512i) -> __m512 = _mm512_cvtepi32_ps(a);
        fn bits_to_f32(a: __m512i) -> __m512 = _mm512_castsi512_ps(a);
        fn lookup16(a: __m512i, table: &[u8; 16]) -> __m512i =
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), a);
    }
    memory_functions! {
        fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        fn store(p: *mut f32, v: __m512) = _mm512_storeu_ps(p, v);
        fn load_u8(p: *const u8) -> __m512 =
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())));
        fn load_f16(p: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        fn load_bf16(p: *const u16) -> __m512 =
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))));
        fn load_i(p: *const u8) -> __m512i = _mm512_loadu_si512(p.cast());
        fn store_i(p: *mut i32, v: __m512i) = _mm512_storeu_si512(p.cast(), v);
        fn splat_load(p: *const u8) -> __m512i = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
        fn store_low_bytes(p: *mut u8, v: __m512i) = _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v));
        fn load_first(p: *const f32, n: usize, fill: f32) -> __m512 =
            _mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(n), p);
        fn store_first(p: *mut f32, v: __m512, n: usize) = _mm512_mask_storeu_ps(p, first(n), v);
    }
    #[inline(always)]
    unsafe fn load_first_as(t: FloatType, p: *const u8, n: usize) -> __m512 {
        unsafe {
            match t {
                FloatType::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p.cast())),
                FloatType::Bf16 => {
                    let halves = _mm256_maskz_loadu_epi16(first(n), p.cast());
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
                }
                FloatType::F32 => _mm512_maskz_loadu_ps(first(n), p.cast()),
            }
        }
    }
    #[inline(always)]
    unsafe fn expand(p: *const f32, per: usize) -> __m512 {
        unsafe {
            let lanes = |shift| {
                let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(shift))
            };
            match per {
                4 => _mm512_permutexvar_ps(lanes(2), _mm512_broadcast_f32x4(_mm_loadu_ps(p))),
                8 => {
                    let pair = _mm_castsi128_ps(_mm_loadl_epi64(p.cast()));
                    _mm512_permutexvar_ps(lanes(3), _mm512_broadcast_f32x2(pair))
                }
                _ => _mm512_set1_ps(p.read_unaligned()),
            }
        }
    }
    #[inline(always)]
    fn dot(acc: __m512i, codes: __m512i, x: __m512i, _wide: bool) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, codes, x) }
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: u32>(p: *const u8) -> __m512i {
        unsafe {
            if BITS == 8 {
                return Self::load_i(p);
            }
            let tables = const { unpack_tables(BITS) };
            let packed = _mm512_maskz_loadu_epi8((1u64 << (8 * BITS)) - 1, p.cast());
            let words = _mm512_permutexvar_epi8(Self::load_i(tables.0.as_ptr()), packed);
            let codes = _mm512_multishift_epi64_epi8(Self::load_i(tables.1.as_ptr()), words);
            _mm512_and_si512(codes, _mm512_set1_epi8(((1u32 << BITS) - 1) as i8))
        }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

#[inline(always)]
fn first(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

#[derive(Clone, Copy)]
pub(super) struct Avx2;

impl Simd for Avx2 {
    const LANES: usize = 8;
    type F32 = __m256;
    type I32 = __m256i;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }

    functions! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fn abs(a: __m256) -> __m256 = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        fn sum(a: __m256) -> f32 = {
            let s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
            _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)))
        };
        fn sum4(v: [__m256; 4]) -> [f32; 4] = {
            let s = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
            let s = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s));
            std::mem::transmute::<__m128, [f32; 4]>(s)
        };
        fn max_lane(a: __m256) -> f32 = {
            let s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let s = _mm_max_ps(s, _mm_movehl_ps(s, s));
            _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)))
        };
        fn select_lt(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 =
            _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b));
        fn round(a: __m256) -> __m256i = _mm256_cvtps_epi32(a);
        fn splat_i(x: i32) -> __m256i = _mm256_set1_epi32(x);
        fn add_i(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        fn sub_i(a: __m256i, b: __m256i) -> __m256i = _mm256_sub_epi32(a, b);
        fn and(a: __m256i, b: __m256i) -> __m256i = _mm256_and_si256(a, b);
        fn or(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        fn shl(a: __m256i, n: u32) -> __m256i = _mm256_sll_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn shr(a: __m256i, n: u32) -> __m256i = _mm256_srl_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn sar(a: __m256i, n: u32) -> __m256i = _mm256_sra_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn to_f32(a: __m256i) -> __m256 = _mm256_cvtepi32_ps(a);
        fn bits_to_f32(a: __m256i) -> __m256 = _mm256_castsi256_ps(a);
        fn lookup16(a: __m256i, table: &[u8; 16]) -> __m256i =
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), a);
    }
    memory_functions! {
        fn load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        fn store(p: *mut f32, v: __m256) = _mm256_storeu_ps(p, v);
        fn load_u8(p: *const u8) -> __m256 =
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())));
        fn load_f16(p: *const u16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        fn load_bf16(p: *const u16) -> __m256 =
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))));
        fn load_i(p: *const u8) -> __m256i = _mm256_loadu_si256(p.cast());
        fn store_i(p: *mut i32, v: __m256i) = _mm256_storeu_si256(p.cast(), v);
        fn splat_load(p: *const u8) -> __m256i = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
    }
    #[inline(always)]
    unsafe fn expand(p: *const f32, per: usize) -> __m256 {
        unsafe {
            if per >= 8 {
                return _mm256_set1_ps(p.read_unaligned());
            }
            _mm256_set_m128(_mm_set1_ps(p.add(1).read_unaligned()), _mm_set1_ps(p.read_unaligned()))
        }
    }
    #[inline(always)]
    fn dot(acc: __m256i, codes: __m256i, x: __m256i, wide: bool) -> __m256i {
        unsafe {
            if !wide {
                let pairs = _mm256_maddubs_epi16(codes, x);
                return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
            let even = _mm256_madd_epi16(
                _mm256_and_si256(codes, _mm256_set1_epi16(255)),
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)),
            );
            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(codes), _mm256_srai_epi16::<8>(x));
            _mm256_add_epi32(acc, _mm256_add_epi32(even, odd))
        }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(p: *mut u8, v: __m256i) {
        unsafe {
            let low = _mm256_set1_epi64x(0x0c08_0400);
            let bytes = _mm256_shuffle_epi8(v, low);
            p.cast::<i32>().write_unaligned(_mm256_extract_epi32::<0>(bytes));
            p.add(4).cast::<i32>().write_unaligned(_mm256_extract_epi32::<4>(bytes));
        }
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: u32>(p: *const u8) -> __m256i {
        unsafe {
            match BITS {
                8 => Self::load_i(p),
                4 => {
                    let packed = _mm_loadu_si128(p.cast());
                    let low = _mm_and_si128(packed, _mm_set1_epi8(15));
                    let high = _mm_and_si128(_mm_srli_epi16::<4>(packed), _mm_set1_epi8(15));
                    _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high))
                }
                _ => {
                    let mask = 0x0101_0101_0101_0101 * ((1u64 << BITS) - 1);
                    let codes = |i: usize| {
                        let mut packed = 0u64;
                        std::ptr::copy_nonoverlapping(
                            p.add(i * BITS as usize),
                            (&raw mut packed).cast(),
                            BITS as usize,
                        );
                        _pdep_u64(packed, mask) as i64
                    };
                    _mm256_setr_epi64x(codes(0), codes(1), codes(2), codes(3))
                }
            }
        }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
