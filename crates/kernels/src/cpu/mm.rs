//! Matrix–matrix products in f32: panels of weights are turned into f32, tiles of activations multiply them.
//!
//! The path of dense weights, of mxfp8, and of [`Precision::F32`](super::Precision::F32).

#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are indexed in step with pointers")]

use std::ops::Range;

use super::buffer::Buffer;
use super::codec::{Affine, Codec, E4m3, Fp4};
use super::float::DenseMatrix;
use super::input::InputTile;
use super::qmm::Output;
use super::quant::{PANEL, QuantFormat};
use super::simd::{Isa, Kernel, Simd};

/// Columns of a panel that are turned into f32 at a time: a panel of them stays in the inner caches.
const COLUMNS: usize = 512;

/// Where a panel's weights come from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// Rows `first..` of a dense matrix.
    Dense(DenseMatrix<'a>, usize),
    /// A panel in interleaved form.
    Panel(QuantFormat, &'a [u8]),
}

/// Multiplies all tiles of an input with one panel.
///
/// # Safety
/// The source has `cols` columns, and so have the tiles, which are in f32 layout; the output has the tiles' rows,
/// from the input's first on.
pub(crate) unsafe fn multiply_panel(
    isa: Isa,
    source: Source<'_>,
    cols: usize,
    tiles: impl Iterator<Item = InputTile> + Clone,
    out: Output,
    scratch: &mut Buffer,
) {
    isa.run(PanelJob { source, cols, tiles, out, scratch });
}

struct PanelJob<'a, T> {
    source: Source<'a>,
    cols: usize,
    tiles: T,
    out: Output,
    scratch: &'a mut Buffer,
}

impl<T: Iterator<Item = InputTile> + Clone> Kernel for PanelJob<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { source, cols, tiles, out, scratch } = self;
        scratch.ensure(COLUMNS * PANEL * 4);
        let weights = scratch.as_mut_ptr().cast::<f32>();
        for start in (0..cols).step_by(COLUMNS) {
            let columns = start..cols.min(start + COLUMNS);
            // SAFETY: the scratch holds a panel of `COLUMNS` columns; the machine has `S`; tiles and output by
            // the contract of `multiply_panel`.
            unsafe {
                S::vectorize(Fill { source, columns: columns.clone(), out: weights });
                for tile in tiles.clone() {
                    let out = Output { y: out.y.wrapping_add(tile.first_row * out.stride), ..out };
                    let job = TileJob { weights, columns: columns.clone(), tile, out };
                    match tile.padded_rows {
                        1 => S::vectorize(Tile::<1>(job)),
                        2 => S::vectorize(Tile::<2>(job)),
                        4 => S::vectorize(Tile::<4>(job)),
                        _ => S::vectorize(Tile::<8>(job)),
                    }
                }
            }
        }
    }
}

/// Writes columns of a panel as `[columns, PANEL]` f32.
///
/// # Safety
/// The source has the columns, whole groups of them; `out` has room for them.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn fill_panel(isa: Isa, source: Source<'_>, columns: Range<usize>, out: *mut f32) {
    isa.run(Fill { source, columns, out });
}

/// Writes columns of a panel as `[columns, PANEL]` f32. Whoever makes one vouches for what [`fill_panel`] asks.
struct Fill<'a> {
    source: Source<'a>,
    columns: Range<usize>,
    out: *mut f32,
}

impl Kernel for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { source, columns, out } = self;
        // SAFETY: `out` has room for the columns, which the source has.
        unsafe {
            match source {
                Source::Dense(matrix, first) => fill_dense::<S>(&matrix, first, columns, out),
                Source::Panel(format, panel) => {
                    let panel = panel.as_ptr();
                    match format {
                        QuantFormat::Affine { bits: 2, .. } => {
                            fill::<S, Affine<2>>(format, panel, columns, out)
                        }
                        QuantFormat::Affine { bits: 3, .. } => {
                            fill::<S, Affine<3>>(format, panel, columns, out)
                        }
                        QuantFormat::Affine { bits: 4, .. } => {
                            fill::<S, Affine<4>>(format, panel, columns, out)
                        }
                        QuantFormat::Affine { bits: 5, .. } => {
                            fill::<S, Affine<5>>(format, panel, columns, out)
                        }
                        QuantFormat::Affine { bits: 6, .. } => {
                            fill::<S, Affine<6>>(format, panel, columns, out)
                        }
                        QuantFormat::Affine { .. } => fill::<S, Affine<8>>(format, panel, columns, out),
                        QuantFormat::Nvfp4 => fill::<S, Fp4<16>>(format, panel, columns, out),
                        QuantFormat::Mxfp4 => fill::<S, Fp4<32>>(format, panel, columns, out),
                        QuantFormat::Mxfp8 => fill::<S, E4m3>(format, panel, columns, out),
                    }
                }
            }
        }
    }
}

/// # Safety
/// In a kernel of `S`; `columns`, whole groups of the panel, fit in `out`.
#[inline(always)]
unsafe fn fill<S: Simd, C: Codec>(
    format: QuantFormat,
    panel: *const u8,
    columns: Range<usize>,
    out: *mut f32,
) {
    let scale_type = format.interleaved_scale();
    let blocks = format.group() / C::BLOCK;
    // SAFETY: offsets are those of the panel's groups and of the output's columns.
    unsafe {
        for first in (0..PANEL).step_by(S::LANES) {
            for group in columns.start / format.group()..columns.end / format.group() {
                let codes = panel.add(group * format.group_bytes());
                let scales = codes.add(blocks * format.block_bytes());
                let scale = S::load_as(scale_type, scales.add(first * scale_type.bytes()));
                let bias = if C::AFFINE {
                    S::load_as(scale_type, scales.add((PANEL + first) * scale_type.bytes()))
                } else {
                    S::mul(scale, S::splat(-C::CENTER as f32))
                };
                for block in 0..blocks {
                    let codes = codes.add(block * format.block_bytes() + first * 4);
                    let column = group * format.group() + block * C::BLOCK - columns.start;
                    for t in 0..C::BLOCK / 4 {
                        let mut four = C::columns::<S>(codes, t);
                        for b in 0..4 {
                            let byte = S::and(four, S::splat_i(255));
                            let value = S::fma(C::value::<S>(byte), scale, bias);
                            S::store(out.add((column + 4 * t + b) * PANEL + first), value);
                            four = S::shr(four, 8);
                        }
                    }
                }
            }
        }
    }
}

/// # Safety
/// In a kernel of `S`; `columns` are the matrix's and fit in `out`.
#[inline(always)]
unsafe fn fill_dense<S: Simd>(matrix: &DenseMatrix<'_>, first: usize, columns: Range<usize>, out: *mut f32) {
    let bytes = matrix.float.bytes();
    let rows = PANEL.min(matrix.rows - first);
    for slot in 0..PANEL {
        let mut lanes = [0.0f32; 16];
        for start in (0..columns.len()).step_by(S::LANES) {
            let n = S::LANES.min(columns.len() - start);
            // SAFETY: `n` values of the row are read, with vectors only where it has that many left; `n` floats
            // are written.
            unsafe {
                if slot < rows {
                    let at = ((first + slot) * matrix.cols + columns.start + start) * bytes;
                    let source = &matrix.data[at..at + n * bytes];
                    if n == S::LANES {
                        S::store(lanes.as_mut_ptr(), S::load_as(matrix.float, source.as_ptr()));
                    } else {
                        for (lane, value) in lanes.iter_mut().zip(source.chunks_exact(bytes)) {
                            *lane = matrix.float.read(value);
                        }
                    }
                }
                for (i, &lane) in lanes.iter().enumerate().take(n) {
                    out.add((start + i) * PANEL + slot).write(lane);
                }
            }
        }
    }
}

struct TileJob {
    weights: *const f32,
    columns: Range<usize>,
    tile: InputTile,
    out: Output,
}

struct Tile<const ROWS: usize>(TileJob);

impl<const ROWS: usize> Kernel for Tile<ROWS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: by the contract of `multiply_panel`.
        unsafe {
            match PANEL / S::LANES {
                1 => strip::<S, ROWS, 1>(&self.0, 0),
                2 => strip::<S, ROWS, 2>(&self.0, 0),
                _ => {
                    strip::<S, ROWS, 2>(&self.0, 0);
                    strip::<S, ROWS, 2>(&self.0, 2);
                }
            }
        }
    }
}

/// # Safety
/// As [`multiply_panel`], in a kernel of `S`, with a tile of `ROWS` padded rows; the weights are `[columns, PANEL]`.
#[inline(always)]
unsafe fn strip<S: Simd, const ROWS: usize, const V: usize>(job: &TileJob, first: usize) {
    let TileJob { weights, columns, tile, out } = job;
    // SAFETY: the weights hold `columns.len()` columns, the tile holds `columns` of `ROWS` rows; the output's
    // existing rows and columns are touched.
    unsafe {
        let x = tile.data.cast::<f32>().add(columns.start * ROWS);
        let weights = weights.add(first * S::LANES);
        let sums = multiply_add::<S, ROWS, V>(x, (1, ROWS), weights, PANEL, columns.len());
        for (r, sums) in sums.iter().enumerate().take(tile.rows) {
            for (v, &sum) in sums.iter().enumerate() {
                let lane = (first + v) * S::LANES;
                let n = S::LANES.min(out.cols.saturating_sub(lane));
                if n == 0 {
                    continue;
                }
                let y = out.y.add(r * out.stride + lane);
                let earlier = if columns.start == 0 { S::zero() } else { S::load_first(y, n, 0.0) };
                S::store_first(y, S::add(sum, earlier), n);
            }
        }
    }
}

/// The products of `ROWS` rows of `depth` factors with `V` vectors of columns: `Σ x[r, k] w[k, ·]`, where
/// `x[r, k]` is at `r * steps.0 + k * steps.1` and `w[k, ·]` at `k * stride`.
///
/// # Safety
/// In a kernel of `S`; all of these are readable.
#[inline(always)]
pub(crate) unsafe fn multiply_add<S: Simd, const ROWS: usize, const V: usize>(
    x: *const f32,
    steps: (usize, usize),
    w: *const f32,
    stride: usize,
    depth: usize,
) -> [[S::F32; V]; ROWS] {
    let mut sums = [[S::zero(); V]; ROWS];
    for k in 0..depth {
        // SAFETY: by contract.
        unsafe {
            let mut column = [S::zero(); V];
            for v in 0..V {
                column[v] = S::load(w.add(k * stride + v * S::LANES));
            }
            for r in 0..ROWS {
                let x = S::splat(x.add(r * steps.0 + k * steps.1).read());
                for v in 0..V {
                    sums[r][v] = S::fma(x, column[v], sums[r][v]);
                }
            }
        }
    }
    sums
}
