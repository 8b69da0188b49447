//! The reference instruction set: arrays of eight lanes.

use super::{Kernel, Simd};

const LANES: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map<A: Copy, B>(a: [A; LANES], f: impl Fn(A) -> B) -> [B; LANES] {
    a.map(f)
}

#[inline(always)]
fn zip<A: Copy, B: Copy, C>(a: [A; LANES], b: [B; LANES], f: impl Fn(A, B) -> C) -> [C; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Eight codes of `BITS` bits as eight bytes; reads `BITS` bytes.
#[inline(always)]
pub(crate) unsafe fn unpack8<const BITS: u32>(p: *const u8) -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: `BITS` bytes are readable by contract, and BITS <= 8.
    unsafe { std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), BITS as usize) };
    let packed = u64::from_le_bytes(bytes);
    let mask = (1u64 << BITS) - 1;
    (0..8).fold(0, |codes, i| codes | (packed >> (i * BITS) & mask) << (8 * i))
}

// SAFETY of the memory operations: each reads or writes exactly the lanes that the trait's contract covers, with
// unaligned accesses.
impl Simd for Portable {
    const LANES: usize = LANES;
    type F32 = [f32; LANES];
    type I32 = [i32; LANES];

    #[inline]
    unsafe fn vectorize<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }

    #[inline(always)]
    fn splat(x: f32) -> Self::F32 {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F32 {
        // SAFETY: see above the impl.
        unsafe { p.cast::<Self::F32>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::F32) {
        // SAFETY: see above the impl.
        unsafe { p.cast::<Self::F32>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::F32 {
        // SAFETY: see above the impl.
        map(unsafe { p.cast::<[u8; LANES]>().read_unaligned() }, f32::from)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F32 {
        // SAFETY: see above the impl.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        map(bits, |b| half::f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F32 {
        // SAFETY: see above the impl.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        map(bits, |b| f32::from_bits(u32::from(b) << 16))
    }
    #[inline(always)]
    fn add(a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(a: Self::F32) -> Self::F32 {
        map(a, f32::abs)
    }
    #[inline(always)]
    fn sum(a: Self::F32) -> f32 {
        ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]))
    }
    #[inline(always)]
    fn max_lane(a: Self::F32) -> f32 {
        a.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
    }
    #[inline(always)]
    fn select_lt(a: Self::F32, b: Self::F32, x: Self::F32, y: Self::F32) -> Self::F32 {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn round(a: Self::F32) -> Self::I32 {
        map(a, |x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    unsafe fn expand(p: *const f32, per: usize) -> Self::F32 {
        // SAFETY: see above the impl.
        std::array::from_fn(|l| unsafe { p.add(l / per).read_unaligned() })
    }

    #[inline(always)]
    fn splat_i(x: i32) -> Self::I32 {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load_i(p: *const u8) -> Self::I32 {
        // SAFETY: see above the impl.
        map(unsafe { p.cast::<Self::I32>().read_unaligned() }, i32::from_le)
    }
    #[inline(always)]
    unsafe fn store_i(p: *mut i32, v: Self::I32) {
        // SAFETY: see above the impl.
        unsafe { p.cast::<Self::I32>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn splat_load(p: *const u8) -> Self::I32 {
        // SAFETY: see above the impl.
        [i32::from_le(unsafe { p.cast::<i32>().read_unaligned() }); LANES]
    }
    #[inline(always)]
    fn add_i(a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn sub_i(a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    fn and(a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn or(a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, |a, b| a | b)
    }
    #[inline(always)]
    fn shl(a: Self::I32, n: u32) -> Self::I32 {
        map(a, |a| a << n)
    }
    #[inline(always)]
    fn shr(a: Self::I32, n: u32) -> Self::I32 {
        map(a, |a| (a as u32 >> n) as i32)
    }
    #[inline(always)]
    fn sar(a: Self::I32, n: u32) -> Self::I32 {
        map(a, |a| a >> n)
    }
    #[inline(always)]
    fn to_f32(a: Self::I32) -> Self::F32 {
        map(a, |a| a as f32)
    }
    #[inline(always)]
    fn bits_to_f32(a: Self::I32) -> Self::F32 {
        map(a, |a| f32::from_bits(a as u32))
    }
    #[inline(always)]
    fn lookup16(a: Self::I32, table: &[u8; 16]) -> Self::I32 {
        map(a, |a| i32::from_le_bytes(a.to_le_bytes().map(|b| table[usize::from(b & 15)])))
    }
    #[inline(always)]
    fn dot(acc: Self::I32, codes: Self::I32, x: Self::I32, _wide: bool) -> Self::I32 {
        std::array::from_fn(|i| {
            let (c, x) = (codes[i].to_le_bytes(), x[i].to_le_bytes());
            (0..4).fold(acc[i], |sum, b| sum.wrapping_add(i32::from(c[b]) * i32::from(x[b] as i8)))
        })
    }
    #[inline(always)]
    unsafe fn store_low_bytes(p: *mut u8, v: Self::I32) {
        // SAFETY: see above the impl.
        unsafe { p.cast::<[u8; LANES]>().write_unaligned(map(v, |v| v as u8)) }
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: u32>(p: *const u8) -> Self::I32 {
        let mut out = [0; LANES];
        for i in 0..LANES / 2 {
            // SAFETY: see above the impl.
            let codes = unsafe { unpack8::<BITS>(p.add(i * BITS as usize)) };
            out[2 * i] = codes as i32;
            out[2 * i + 1] = (codes >> 32) as i32;
        }
        out
    }
}
