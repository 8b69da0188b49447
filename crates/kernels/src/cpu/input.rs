//! Activations made ready for products: rounded to integers where that is wanted, and laid out in tiles.

#![allow(unsafe_code)]

use super::Cpu;
#[cfg(target_arch = "x86_64")]
use super::amx;
use super::buffer::{Buffer, SharedMut};
use super::error::{KernelError, check_len, parameter, product};
use super::matmul::Weights;
use super::qmv::InputRow;
use super::simd::{Isa, Kernel, Simd};

/// How activations enter a product. With quantized weights, accumulation is exact within a block and f32 across
/// blocks, and weights are never rounded; dense weights multiply f32 activations.
///
/// Where there are matrix registers, many rows go through them at any precision but f32: if not as integers,
/// activations and weights are sums of two bf16 numbers each, with an error below 3e-5 of each term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// As they are.
    F32,
    /// Rounded to multiples of the largest magnitude in 32 columns (16 for nvfp4) divided by 32639: nearly
    /// lossless, with a relative error of products of a few 1e-5. Instruction sets on which f32 is as fast
    /// for several rows use that instead.
    #[default]
    Int16,
    /// As `Int16`, but many rows that meet codes of at most four bits in matrix registers are rounded to
    /// multiples of the largest magnitude in 32 columns divided by 2039: a relative error of some 1e-4.
    Int12,
    /// The same with 127 steps: a relative error of several 1e-3.
    Int8,
}

/// What [`Precision::Int16`] rounds to: the largest number whose upper byte, rounded, and lower byte are signed.
const INT16_STEPS: f32 = 32_639.0;
const INT8_STEPS: f32 = 127.0;

/// Blocks whose magnitudes are all below this are taken as zero: its inverse is still a float.
const SMALLEST_MAXIMUM: f32 = 1e-30;

/// Dense products of at most this many rows take rows as they are.
const PLAIN_ROWS: usize = 8;

/// Products of at least this many rows use matrix registers, where there are any.
#[cfg(target_arch = "x86_64")]
const AMX_ROWS: usize = 9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// f32 rows, one after the other.
    Plain,
    /// f32 tiles, `[columns][rows of the tile]`.
    F32Tiles,
    /// Integer tiles. A tile holds block after block; a block of `R` rows holds, for each plane, `R` times the
    /// 4 bytes of columns `4 * t..`, for each t; then `R` scales, `R` integer sums, `R` f32 sums.
    ///
    /// Two planes are the upper and the lower byte of 16-bit integers, both signed; one plane is 8-bit integers.
    Integer { block: usize, planes: usize },
    /// bf16 halves in the tiles of [`amx`](super::amx).
    #[cfg(target_arch = "x86_64")]
    Halves,
    /// 12-bit integers in the tiles of [`amx::codes`](super::amx::codes).
    #[cfg(target_arch = "x86_64")]
    Int12,
}

/// Activations prepared for products with weights of one kind; reusable, so that a loop allocates nothing.
#[derive(Debug)]
pub struct PreparedInput {
    pub(crate) rows: usize,
    /// Rows of each of the sequences that these are of.
    pub(crate) sequence: usize,
    pub(crate) cols: usize,
    pub(crate) layout: Layout,
    /// Rows of a tile, but for the last.
    pub(crate) tile_rows: usize,
    data: Buffer,
}

impl Default for PreparedInput {
    fn default() -> Self {
        Self { rows: 0, sequence: 0, cols: 0, layout: Layout::Plain, tile_rows: 1, data: Buffer::empty() }
    }
}

/// One tile of prepared input.
#[derive(Clone, Copy)]
pub(crate) struct InputTile {
    pub(crate) data: *const u8,
    pub(crate) first_row: usize,
    /// Rows that exist.
    pub(crate) rows: usize,
    /// Rows laid out.
    pub(crate) padded_rows: usize,
}

impl PreparedInput {
    /// Prepares `x`, `rows` rows of `weights.cols()` activations, for products with `weights` and others of the
    /// same kind: affine formats of at most four bits are of one kind, the others in groups of 32 and more are,
    /// and dense matrices.
    ///
    /// # Errors
    /// Where `x` has another length, or there are no rows.
    pub fn prepare(
        &mut self,
        cpu: &Cpu,
        x: &[f32],
        rows: usize,
        precision: Precision,
        weights: Weights<'_>,
    ) -> Result<(), KernelError> {
        self.prepare_batch(cpu, x, (rows, rows), precision, weights)
    }

    /// [`PreparedInput::prepare`] for `rows` rows of several sequences, each of `sequence` rows. How they are computed
    /// depends on the latter alone: a sequence gets the same bits in any company.
    ///
    /// # Errors
    /// As [`PreparedInput::prepare`].
    pub fn prepare_batch(
        &mut self,
        cpu: &Cpu,
        x: &[f32],
        (rows, sequence): (usize, usize),
        precision: Precision,
        weights: Weights<'_>,
    ) -> Result<(), KernelError> {
        let cols = weights.cols();
        if rows == 0 {
            return Err(parameter("activation rows", rows, "at least 1"));
        }
        check_len("activations", x.len(), product("activations", &[rows, cols])?)?;
        let layout = layout_for(weights, precision, sequence, cpu.isa());
        let tile_rows = match layout {
            // A row alone takes another path than tiles of several.
            Layout::F32Tiles if sequence == 1 => 1,
            #[cfg(target_arch = "x86_64")]
            Layout::Halves => amx::ROWS,
            #[cfg(target_arch = "x86_64")]
            Layout::Int12 => amx::codes::ROWS,
            _ => cpu.isa().tile_rows(),
        };
        *self = Self {
            rows,
            sequence,
            cols,
            layout,
            tile_rows,
            data: std::mem::replace(&mut self.data, Buffer::empty()),
        };
        let tiles = self.tiles();
        let padded = (tiles - 1) * tile_rows + self.tile(tiles - 1).padded_rows;
        let row_bytes = product("activations", &[padded, self.row_bytes()])? / padded;
        self.data.ensure(padded * row_bytes);
        let out = SharedMut::new(&mut self.data);
        let this = &*self;
        cpu.pool().ranges(tiles, 1, |range| {
            for index in range {
                let tile = this.tile(index);
                let source = &x[tile.first_row * cols..][..tile.rows * cols];
                let start = index * tile_rows * row_bytes;
                // SAFETY: each tile is written by the one chunk that claimed it, and lies in the buffer.
                let target = unsafe { out.slice(start..start + tile.padded_rows * row_bytes) };
                match layout {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: the layout is chosen where the machine has AMX only, which comes with AVX-512.
                    Layout::Halves => unsafe { amx::split_rows(source, cols, target) },
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: as above.
                    Layout::Int12 => unsafe { amx::codes::round_rows(source, cols, target) },
                    _ => cpu.isa().run(FillTile { layout, rows: tile.padded_rows, cols, source, target }),
                }
            }
        })
    }

    /// Bytes of a row's share of its tile.
    fn row_bytes(&self) -> usize {
        match self.layout {
            Layout::Plain | Layout::F32Tiles => 4 * self.cols,
            Layout::Integer { block, planes } => self.cols / block * (block * planes + 12),
            #[cfg(target_arch = "x86_64")]
            Layout::Halves => amx::tile_bytes(self.cols) / amx::ROWS,
            #[cfg(target_arch = "x86_64")]
            Layout::Int12 => amx::codes::tile_bytes(self.cols) / amx::codes::ROWS,
        }
    }

    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(self.tile_rows)
    }

    pub(crate) fn tile(&self, index: usize) -> InputTile {
        let first_row = index * self.tile_rows;
        let rows = self.tile_rows.min(self.rows - first_row);
        let data = self.data.as_ptr().wrapping_add(first_row * self.row_bytes());
        let padded_rows = match self.layout {
            #[cfg(target_arch = "x86_64")]
            Layout::Halves | Layout::Int12 => self.tile_rows,
            _ => rows.next_power_of_two(),
        };
        InputTile { data, first_row, rows, padded_rows }
    }

    /// Planes of the integer layout; 0 for the others.
    pub(crate) fn planes(&self) -> usize {
        if let Layout::Integer { planes, .. } = self.layout { planes } else { 0 }
    }

    /// A row of a layout in tiles. `row < self.rows`.
    pub(crate) fn row(&self, row: usize) -> InputRow {
        let tile = self.tile(row / self.tile_rows);
        let (row, rows) = (row % self.tile_rows, tile.padded_rows);
        InputRow { tile: tile.data, rows, row, planes: self.planes() }
    }

    /// The rows of the plain layout.
    pub(crate) fn plain(&self) -> *const f32 {
        self.data.as_ptr().cast()
    }
}

fn layout_for(weights: Weights<'_>, precision: Precision, rows: usize, isa: Isa) -> Layout {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Amx && rows >= AMX_ROWS && precision != Precision::F32 {
        let rounds = matches!(precision, Precision::Int12 | Precision::Int8);
        let is_small = weights.quant_format().is_some_and(amx::codes::accepts);
        return if rounds && is_small { Layout::Int12 } else { Layout::Halves };
    }
    let Some(format) = weights.quant_format() else {
        return if rows <= PLAIN_ROWS { Layout::Plain } else { Layout::F32Tiles };
    };
    // Without a dot product of bytes, two planes of them cost more than f32 once tiles have several rows.
    let slow_planes = isa == Isa::Avx2 && rows > 2;
    let planes = match precision {
        Precision::Int16 | Precision::Int12 if !slow_planes => 2,
        Precision::Int8 => 1,
        _ => return Layout::F32Tiles,
    };
    if format.has_integer_codes() {
        Layout::Integer { block: format.block(), planes }
    } else {
        Layout::F32Tiles
    }
}

struct FillTile<'a> {
    layout: Layout,
    /// Rows of the tile; those beyond the source are zero.
    rows: usize,
    cols: usize,
    source: &'a [f32],
    target: &'a mut [u8],
}

impl Kernel for FillTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { layout, rows, cols, source, target } = self;
        let real_rows = source.len() / cols;
        if rows > real_rows {
            target.fill(0);
        }
        match layout {
            Layout::F32Tiles if rows > 1 => {
                for (m, row) in source.chunks_exact(cols).enumerate() {
                    for (&x, out) in row.iter().zip(target.chunks_exact_mut(4 * rows)) {
                        out[4 * m..4 * m + 4].copy_from_slice(&x.to_ne_bytes());
                    }
                }
            }
            Layout::Plain | Layout::F32Tiles => {
                for (&x, out) in source.iter().zip(target.chunks_exact_mut(4)) {
                    out.copy_from_slice(&x.to_ne_bytes());
                }
            }
            Layout::Integer { block, planes } => {
                let block_bytes = rows * (block * planes + 12);
                for (m, row) in source.chunks_exact(cols).enumerate() {
                    for (x, out) in row.chunks_exact(block).zip(target.chunks_exact_mut(block_bytes)) {
                        // SAFETY: `x` holds a block, `out` a block of `rows` rows, and m < rows.
                        unsafe { quantize_block::<S>(x, planes, m, rows, out.as_mut_ptr()) }
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Layout::Halves | Layout::Int12 => {}
        }
    }
}

/// Writes row `m` of a block of `rows` rows.
///
/// # Safety
/// In a kernel of `S`; `out` has room for the block; `x` holds 16 or 32 floats.
#[inline(always)]
unsafe fn quantize_block<S: Simd>(x: &[f32], planes: usize, m: usize, rows: usize, out: *mut u8) {
    // SAFETY: loads stay in `x`, whose length is a multiple of LANES; bytes in the local planes; words in `out`.
    unsafe {
        let (mut largest, mut total) = (S::zero(), S::zero());
        for i in (0..x.len()).step_by(S::LANES) {
            let v = S::load(x.as_ptr().add(i));
            largest = S::max(largest, S::abs(v));
            total = S::add(total, v);
        }
        let (largest, total) = (S::max_lane(largest), S::sum(total));
        let steps = if planes == 2 { INT16_STEPS } else { INT8_STEPS };
        let (scale, inverse) = if total.is_nan() {
            (f32::NAN, 0.0)
        } else if largest < SMALLEST_MAXIMUM {
            (0.0, 0.0)
        } else {
            (largest / steps, steps / largest)
        };
        let mut bytes = [[0u8; 32]; 2];
        let mut sum = S::zero();
        for i in (0..x.len()).step_by(S::LANES) {
            let q = S::round(S::mul(S::load(x.as_ptr().add(i)), S::splat(inverse)));
            // At most 32 * 32639 in all: exact in f32.
            sum = S::add(sum, S::to_f32(q));
            if planes == 2 {
                let upper = S::sar(S::add_i(q, S::splat_i(128)), 8);
                S::store_low_bytes(bytes[0].as_mut_ptr().add(i), upper);
                S::store_low_bytes(bytes[1].as_mut_ptr().add(i), S::sub_i(q, S::shl(upper, 8)));
            } else {
                S::store_low_bytes(bytes[0].as_mut_ptr().add(i), q);
            }
        }
        let words = out.cast::<[u8; 4]>();
        for (plane, bytes) in bytes.iter().take(planes).enumerate() {
            for (t, word) in bytes.chunks_exact(4).take(x.len() / 4).enumerate() {
                let word = [word[0], word[1], word[2], word[3]];
                words.add((plane * (x.len() / 4) + t) * rows + m).write(word);
            }
        }
        let tail = words.add(planes * (x.len() / 4) * rows + m);
        tail.write(scale.to_ne_bytes());
        tail.add(rows).write((S::sum(sum) as i32).to_ne_bytes());
        tail.add(2 * rows).write(total.to_ne_bytes());
    }
}
