//! Quantized products over panels of interleaved weights: tiles of up to eight rows of activations by one panel.
//! One row makes it the matrix–vector product. Activations are integers; for one row they may be f32.
//!
//! With q the activations' integers, t their scale, c the codes' center, a group's part of an output is
//! `s t Σ (code − c) q + (b + c s) Σ x`: the sum over integers is exact, the bias enters once a block.

#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are indexed in step with pointers")]

use std::marker::PhantomData;

use super::codec::{Affine, Codec, E4m3, Fp4};
use super::input::InputTile;
use super::quant::{PANEL, QuantFormat};
use super::simd::{Kernel, Simd};

/// Where one panel's outputs go: `[rows, stride]`, from the panel's first column.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) y: *mut f32,
    pub(crate) stride: usize,
    /// Columns that exist, at most [`PANEL`].
    pub(crate) cols: usize,
}

/// Multiplies tiles of input with one panel.
///
/// Whoever makes one vouches that the panel has `groups` groups in `format`; the tiles that many columns, in
/// integer layout of `planes` planes for the format, or be one of one row of f32 and `planes` 0; the output the tiles' rows, from the input's first on.
pub(crate) struct Tiles<T> {
    pub(crate) format: QuantFormat,
    pub(crate) panel: *const u8,
    pub(crate) groups: usize,
    pub(crate) tiles: T,
    pub(crate) planes: usize,
    pub(crate) out: Output,
}

impl<T: Iterator<Item = InputTile>> Kernel for Tiles<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { format, panel, groups, tiles, planes, mut out } = self;
        let start = out.y;
        for tile in tiles {
            out.y = start.wrapping_add(tile.first_row * out.stride);
            let job = TileJob { format, panel, groups, tile, out };
            // SAFETY: the machine has `S`, whose kernel is running; shapes as this type says.
            unsafe {
                match format {
                    QuantFormat::Affine { bits: 2, .. } => job.by_shape::<S, Affine<2>>(planes),
                    QuantFormat::Affine { bits: 3, .. } => job.by_shape::<S, Affine<3>>(planes),
                    QuantFormat::Affine { bits: 4, .. } => job.by_shape::<S, Affine<4>>(planes),
                    QuantFormat::Affine { bits: 5, .. } => job.by_shape::<S, Affine<5>>(planes),
                    QuantFormat::Affine { bits: 6, .. } => job.by_shape::<S, Affine<6>>(planes),
                    QuantFormat::Affine { .. } => job.by_shape::<S, Affine<8>>(planes),
                    QuantFormat::Mxfp4 => job.by_shape::<S, Fp4<32>>(planes),
                    QuantFormat::Nvfp4 => job.by_shape::<S, Fp4<16>>(planes),
                    // It has no integer codes, hence no integer layout.
                    QuantFormat::Mxfp8 => S::vectorize(Tile::<E4m3, 1, 0>(job, PhantomData)),
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct TileJob {
    format: QuantFormat,
    panel: *const u8,
    groups: usize,
    tile: InputTile,
    out: Output,
}

impl TileJob {
    /// # Safety
    /// As [`Tiles`] says, and `C` is the format's codec.
    #[inline(always)]
    unsafe fn by_shape<S: Simd, C: Codec>(self, planes: usize) {
        // SAFETY: the machine has `S`, whose kernel is running.
        unsafe {
            match (self.tile.padded_rows, planes) {
                (_, 0) => S::vectorize(Tile::<C, 1, 0>(self, PhantomData)),
                (1, 1) => S::vectorize(Tile::<C, 1, 1>(self, PhantomData)),
                (1, _) => S::vectorize(Tile::<C, 1, 2>(self, PhantomData)),
                (2, 1) => S::vectorize(Tile::<C, 2, 1>(self, PhantomData)),
                (2, _) => S::vectorize(Tile::<C, 2, 2>(self, PhantomData)),
                (4, 1) => S::vectorize(Tile::<C, 4, 1>(self, PhantomData)),
                (4, _) => S::vectorize(Tile::<C, 4, 2>(self, PhantomData)),
                (_, 1) => S::vectorize(Tile::<C, 8, 1>(self, PhantomData)),
                (_, _) => S::vectorize(Tile::<C, 8, 2>(self, PhantomData)),
            }
        }
    }
}

struct Tile<C, const ROWS: usize, const PLANES: usize>(TileJob, PhantomData<C>);

impl<C: Codec, const ROWS: usize, const PLANES: usize> Kernel for Tile<C, ROWS, PLANES> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: by the contract of `Tiles`, whence this kernel comes.
        unsafe {
            match (PANEL / S::LANES, ROWS) {
                (2, ..=2) => strip::<S, C, ROWS, PLANES, 2>(self.0, 0),
                (4, ..=2) => strip::<S, C, ROWS, PLANES, 4>(self.0, 0),
                (vectors, _) => {
                    for v in 0..vectors {
                        strip::<S, C, ROWS, PLANES, 1>(self.0, v);
                    }
                }
            }
        }
    }
}

/// Bytes by which one row's product asks for weights ahead.
const AHEAD: usize = 4096;

/// Repeats a block for t = 0 … 7, a constant in each copy.
macro_rules! unroll8 {
    ($t:ident, $body:block) => {
        unroll8!(@ $t, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $t:ident, $body:block, $($n:literal)*) => {
        $({ let $t: usize = $n; $body })*
    };
}

/// `V` vectors of the panel's rows, from vector `first` on.
///
/// # Safety
/// As [`Tiles`] says, in a kernel of `S`; the tile has `ROWS` padded rows; `first + V` vectors are a panel at
/// most.
#[inline(always)]
unsafe fn strip<S: Simd, C: Codec, const ROWS: usize, const PLANES: usize, const V: usize>(
    job: TileJob,
    first: usize,
) {
    let TileJob { format, panel, groups, tile, out } = job;
    let steps = C::BLOCK / 4;
    let row_bytes = if PLANES == 0 { 4 * C::BLOCK } else { PLANES * C::BLOCK + 12 };
    let blocks = format.group() / C::BLOCK;
    let (block_bytes, group_bytes) = (format.block_bytes(), format.group_bytes());
    let scale_type = format.interleaved_scale();
    let scale_lane = scale_type.bytes();
    let mut sums = [[S::zero(); V]; ROWS];
    let mut x = tile.data;
    // SAFETY: pointers stay inside the panel's groups and the tile's blocks, whose sizes these are; the stores
    // touch the columns and rows that exist.
    unsafe {
        for group in 0..groups {
            let codes = panel.add(group * group_bytes);
            let scales = codes.add(blocks * block_bytes);
            let mut scale = [S::zero(); V];
            let mut bias = [S::zero(); V];
            for v in 0..V {
                let lane = (first + v) * S::LANES;
                scale[v] = S::load_as(scale_type, scales.add(lane * scale_lane));
                if C::AFFINE {
                    let stored = S::load_as(scale_type, scales.add((PANEL + lane) * scale_lane));
                    bias[v] = S::fma(S::splat(C::CENTER as f32), scale[v], stored);
                }
            }
            for block in 0..blocks {
                let codes = codes.add(block * block_bytes + first * S::LANES * 4);
                if ROWS == 1 && first == 0 {
                    for line in (0..group_bytes / blocks).step_by(64) {
                        S::prefetch(codes.wrapping_add(AHEAD + line));
                    }
                }
                if PLANES == 0 {
                    sums[0] = block_f32::<S, C, V>(codes, x.cast(), scale, bias, sums[0]);
                    x = x.add(row_bytes);
                    continue;
                }
                let tail = x.add(PLANES * C::BLOCK * ROWS);
                let mut dots = [[[S::splat_i(0); V]; ROWS]; 2];
                for r in 0..ROWS {
                    let sum = S::splat_load(tail.add((ROWS + r) * 4));
                    dots[PLANES.saturating_sub(1)][r] = [S::sub_i(S::splat_i(0), C::center::<S>(sum)); V];
                }
                unroll8!(t, {
                    if t < steps {
                        let mut code = [S::splat_i(0); V];
                        for v in 0..V {
                            code[v] = C::columns::<S>(codes.add(v * S::LANES * 4), t);
                        }
                        for (plane, dots) in dots.iter_mut().enumerate().take(PLANES) {
                            for r in 0..ROWS {
                                let q = S::splat_load(x.add(((plane * steps + t) * ROWS + r) * 4));
                                for v in 0..V {
                                    dots[r][v] = S::dot(dots[r][v], code[v], q, C::WIDE);
                                }
                            }
                        }
                    }
                });
                for r in 0..ROWS {
                    let step = S::splat(tail.add(r * 4).cast::<f32>().read_unaligned());
                    let total = S::splat(tail.add((2 * ROWS + r) * 4).cast::<f32>().read_unaligned());
                    for v in 0..V {
                        let dot = if PLANES == 2 {
                            S::add_i(S::shl(dots[0][r][v], 8), dots[1][r][v])
                        } else {
                            dots[0][r][v]
                        };
                        sums[r][v] = S::fma(S::to_f32(dot), S::mul(scale[v], step), sums[r][v]);
                        if C::AFFINE {
                            sums[r][v] = S::fma(bias[v], total, sums[r][v]);
                        }
                    }
                }
                x = x.add(row_bytes * ROWS);
            }
        }
        for (r, sums) in sums.iter().enumerate().take(tile.rows) {
            for (v, &sum) in sums.iter().enumerate() {
                let lane = (first + v) * S::LANES;
                let y = out.y.add(r * out.stride + lane);
                match out.cols.saturating_sub(lane) {
                    0 => {}
                    n if n < S::LANES => S::store_first(y, sum, n),
                    _ => S::store(y, sum),
                }
            }
        }
    }
}

/// A block's part of the outputs for one row of f32.
///
/// # Safety
/// In a kernel of `S`; the block and its columns of `x` are readable.
#[inline(always)]
unsafe fn block_f32<S: Simd, C: Codec, const V: usize>(
    codes: *const u8,
    x: *const f32,
    scale: [S::F32; V],
    bias: [S::F32; V],
    mut sums: [S::F32; V],
) -> [S::F32; V] {
    let mut dots = [S::zero(); V];
    let mut total = S::zero();
    // SAFETY: by contract.
    unsafe {
        for t in 0..C::BLOCK / 4 {
            let mut four = [S::splat_i(0); V];
            for v in 0..V {
                four[v] = C::columns::<S>(codes.add(v * S::LANES * 4), t);
            }
            for b in 0..4 {
                let x = S::splat(x.add(4 * t + b).read());
                total = S::add(total, x);
                for v in 0..V {
                    let value = C::value::<S>(S::and(four[v], S::splat_i(255)));
                    dots[v] = S::fma(value, x, dots[v]);
                    four[v] = S::shr(four[v], 8);
                }
            }
        }
    }
    for v in 0..V {
        // The bias of affine codes already holds the center, which is of no use here.
        let center = S::mul(scale[v], S::splat(-C::CENTER as f32));
        sums[v] = S::fma(dots[v], scale[v], sums[v]);
        sums[v] = S::fma(S::add(bias[v], center), total, sums[v]);
    }
    sums
}
