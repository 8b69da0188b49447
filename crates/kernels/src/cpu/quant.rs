//! Quantized matrices: MLX's row-major format and the interleaved one that kernels prefer.
//!
//! **Row-major**, as stored: each row's codes are packed into little-endian u32 words, code i of a row in bits
//! `i * bits` upward; scales and biases are `[rows, cols / group]`. Used in place.
//!
//! **Interleaved**: panels of [`PANEL`] rows. A panel holds, group after group of columns, the codes of all its
//! rows, then their scales, then their biases, so a product reads one stream. In a block of 32 columns (16 for
//! nvfp4), codes lie in planes of 8, 4, 2 or 1 bits, of which the code widths are sums: 6 bits are a plane of 4
//! and one of 2. A plane is a sequence of words of 4 bytes, each for all rows of the panel; in a plane of `w`
//! bits, word j's byte b holds, from bit `w * s` upward, part of the code of column `4 * (j * 8 / w + s) + b`.
//! So a shift and a mask give four consecutive codes for every row. The size is that of the row-major form, but
//! for rows padded to whole panels, and the 8-bit scales of the fp modes, which are widened to bf16.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::Cpu;
use super::buffer::{Buffer, SharedMut};
use super::error::{KernelError, check_len, parameter, product};
use super::float::FloatType;
use super::simd::unpack8;

/// Rows of a panel: the lanes of the widest vectors.
pub(crate) const PANEL: usize = 16;

/// Encoding of a quantized matrix (MLX's modes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantFormat {
    /// `scale * code + bias` per group, codes unsigned.
    Affine {
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// Columns that share a scale and a bias: 32, 64 or 128.
        group: usize,
        /// Type of the scales and biases.
        scales: FloatType,
    },
    /// e2m1 codes in groups of 32 with e8m0 scales.
    Mxfp4,
    /// e2m1 codes in groups of 16 with e4m3 scales.
    Nvfp4,
    /// e4m3 codes in groups of 32 with e8m0 scales.
    Mxfp8,
}

impl QuantFormat {
    /// Bits of a code.
    pub fn bits(self) -> u32 {
        match self {
            Self::Affine { bits, .. } => bits,
            Self::Mxfp4 | Self::Nvfp4 => 4,
            Self::Mxfp8 => 8,
        }
    }

    /// Columns that share a scale.
    pub fn group(self) -> usize {
        match self {
            Self::Affine { group, .. } => group,
            Self::Mxfp4 | Self::Mxfp8 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// Columns of a block: what activations share a scale over.
    pub(crate) fn block(self) -> usize {
        self.group().min(32)
    }

    /// Whether codes are integers up to a factor, so that integer dot products serve.
    pub(crate) fn has_integer_codes(self) -> bool {
        self != Self::Mxfp8
    }

    fn is_affine(self) -> bool {
        matches!(self, Self::Affine { .. })
    }

    /// Bytes of a stored scale.
    fn scale_bytes(self) -> usize {
        match self {
            Self::Affine { scales, .. } => scales.bytes(),
            _ => 1,
        }
    }

    /// The type of scales (and biases) in interleaved form.
    pub(crate) fn interleaved_scale(self) -> FloatType {
        match self {
            Self::Affine { scales, .. } => scales,
            _ => FloatType::Bf16,
        }
    }

    /// Bytes of the codes of a block in a panel.
    pub(crate) fn block_bytes(self) -> usize {
        self.block() * PANEL * self.bits() as usize / 8
    }

    /// Bytes of a group in a panel.
    pub(crate) fn group_bytes(self) -> usize {
        let scales = PANEL * self.interleaved_scale().bytes();
        self.group() / self.block() * self.block_bytes() + if self.is_affine() { 2 * scales } else { scales }
    }

    fn panel_bytes(self, cols: usize) -> usize {
        cols / self.group() * self.group_bytes()
    }

    fn check(self, rows: usize, cols: usize) -> Result<(), KernelError> {
        if let Self::Affine { bits, group, .. } = self {
            if !matches!(bits, 2..=6 | 8) {
                return Err(parameter("bits", bits, "2, 3, 4, 5, 6 or 8"));
            }
            if !matches!(group, 32 | 64 | 128) {
                return Err(parameter("group size", group, "32, 64 or 128"));
            }
        }
        if rows == 0 || cols == 0 || !cols.is_multiple_of(self.group()) {
            let shape = format!("[{rows}, {cols}]");
            return Err(parameter("quantized shape", shape, "without a zero and whole groups wide"));
        }
        Ok(())
    }

    /// The values of all 8-bit scales of an fp mode, as [`read_scale`](Self::read_scale) gives them.
    pub(crate) fn fp_scales(self) -> &'static [f32; 256] {
        static TABLES: [OnceLock<[f32; 256]>; 4] = [const { OnceLock::new() }; 4];
        let table = match self {
            Self::Affine { .. } => 0,
            Self::Mxfp4 => 1,
            Self::Nvfp4 => 2,
            Self::Mxfp8 => 3,
        };
        TABLES[table].get_or_init(|| std::array::from_fn(|byte| self.read_scale(&[byte as u8])))
    }

    /// The value of a stored scale. An fp4 code counts in halves, which its scale takes up.
    pub(crate) fn read_scale(self, bytes: &[u8]) -> f32 {
        let byte = bytes.first().copied().unwrap_or(0);
        match self {
            Self::Affine { scales, .. } => scales.read(bytes),
            Self::Mxfp4 => 0.5 * e8m0(byte),
            Self::Nvfp4 => 0.5 * e4m3(byte),
            Self::Mxfp8 => e8m0(byte),
        }
    }

    /// The number that a code stands for, to be multiplied by [`read_scale`](Self::read_scale)'s value.
    pub(crate) fn code_value(self, code: u8) -> f32 {
        match self {
            Self::Affine { .. } => f32::from(code),
            Self::Mxfp4 | Self::Nvfp4 => {
                f32::from(FP4_CODES[usize::from(code & 15)]) - f32::from(FP4_CENTER as u8)
            }
            Self::Mxfp8 => e4m3(code),
        }
    }
}

/// Twice the e2m1 values 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives, raised by [`FP4_CENTER`].
pub(crate) const FP4_CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
pub(crate) const FP4_CENTER: i32 = 12;

/// 2^(byte − 127).
fn e8m0(byte: u8) -> f32 {
    f32::from_bits(if byte == 0 { 0x0040_0000 } else { u32::from(byte) << 23 })
}

/// One sign bit, four exponent bits with a bias of 7, three mantissa bits.
pub(crate) fn e4m3(byte: u8) -> f32 {
    let magnitude = f32::from_bits(u32::from(byte & 127) << 20) * E4M3_RESCALE;
    if byte & 128 == 0 { magnitude } else { -magnitude }
}

/// 2^(127 − 7): moves an e4m3 exponent, read as an f32's, to its place.
pub(crate) const E4M3_RESCALE: f32 = f32::from_bits((127 + 120) << 23);

/// A quantized matrix in MLX's row-major format, used where it lies.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedMatrix<'a> {
    pub(crate) format: QuantFormat,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) codes: &'a [u8],
    pub(crate) scales: &'a [u8],
    pub(crate) biases: &'a [u8],
}

impl<'a> QuantizedMatrix<'a> {
    /// A matrix of `rows` outputs and `cols` inputs over the bytes of MLX's `weight`, `scales` and `biases`
    /// (empty for the fp modes), little-endian and at any alignment.
    ///
    /// # Errors
    /// Where the format is not one of MLX's, `cols` is not a multiple of the group, or a buffer has another
    /// length than the shape needs.
    pub fn new(
        format: QuantFormat,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        scales: &'a [u8],
        biases: &'a [u8],
    ) -> Result<Self, KernelError> {
        format.check(rows, cols)?;
        product("quantized shape", &[rows, cols, 8])?;
        check_len("quantized codes (bytes)", codes.len(), rows * (cols * format.bits() as usize / 8))?;
        let scale_bytes = rows * (cols / format.group()) * format.scale_bytes();
        check_len("quantization scales (bytes)", scales.len(), scale_bytes)?;
        check_len(
            "quantization biases (bytes)",
            biases.len(),
            if format.is_affine() { scale_bytes } else { 0 },
        )?;
        Ok(Self { format, rows, cols, codes, scales, biases })
    }

    /// The encoding.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Rows, the outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, the inputs of a product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of codes, scales and biases.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + self.biases.len()
    }

    /// The matrix of a range of rows, such as one expert's of a stack.
    ///
    /// # Errors
    /// Where the range is empty or leaves the matrix.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<Self, KernelError> {
        if rows.start >= rows.end || rows.end > self.rows {
            return Err(parameter("row range", format!("{rows:?}"), "a non-empty part of the matrix"));
        }
        let part = |bytes: &'a [u8]| {
            let per_row = bytes.len() / self.rows;
            &bytes[rows.start * per_row..rows.end * per_row]
        };
        Ok(Self {
            rows: rows.len(),
            codes: part(self.codes),
            scales: part(self.scales),
            biases: part(self.biases),
            ..*self
        })
    }

    pub(crate) fn row_codes(&self, row: usize) -> &'a [u8] {
        let bytes = self.codes.len() / self.rows;
        &self.codes[row * bytes..][..bytes]
    }

    /// The scales of a row, or the biases.
    pub(crate) fn row_part(&self, part: &'a [u8], row: usize) -> &'a [u8] {
        let bytes = part.len() / self.rows;
        &part[row * bytes..][..bytes]
    }
}

/// A quantized matrix in interleaved form: panels of 16 rows, whose codes, scales and biases form one stream. It
/// takes as much memory as the stored form, but for rows padded to whole panels, and for the 8-bit scales of the
/// fp modes, which are widened to 16 bits.
#[derive(Debug)]
pub struct Interleaved {
    format: QuantFormat,
    rows: usize,
    cols: usize,
    /// Shared with the matrices packed beside it.
    memory: Arc<Buffer>,
    range: Range<usize>,
}

impl Interleaved {
    /// Bytes that interleaving a matrix takes.
    ///
    /// # Errors
    /// Where [`QuantizedMatrix::new`] would refuse the shape.
    pub fn bytes_for(format: QuantFormat, rows: usize, cols: usize) -> Result<usize, KernelError> {
        format.check(rows, cols)?;
        product("quantized shape", &[rows.saturating_add(PANEL), cols, 8])?;
        Ok(rows.div_ceil(PANEL) * format.panel_bytes(cols))
    }

    /// Interleaves the rows of `parts`, one matrix under the other: projections that share an input become one.
    ///
    /// # Errors
    /// Where there is no part, or their formats or widths differ.
    pub fn new(cpu: &Cpu, parts: &[QuantizedMatrix<'_>]) -> Result<Self, KernelError> {
        let mut packed = Self::pack(cpu, &[parts])?;
        packed.pop().ok_or_else(|| parameter("matrices to interleave", "none", "at least one"))
    }

    /// Makes several matrices, each as [`new`](Self::new) would from its parts, in one piece of memory: small ones
    /// then share huge pages, which makes products with them up to a fifth faster. The memory is freed with the
    /// last of them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn pack(cpu: &Cpu, matrices: &[&[QuantizedMatrix<'_>]]) -> Result<Vec<Self>, KernelError> {
        let mut ranges = Vec::with_capacity(matrices.len());
        let mut end = 0usize;
        for parts in matrices {
            let Some(&QuantizedMatrix { format, cols, .. }) = parts.first() else {
                return Err(parameter("matrices to interleave", "none", "at least one"));
            };
            if parts.iter().any(|p| p.format != format || p.cols != cols) {
                return Err(parameter("matrices to interleave", "different", "of one format and width"));
            }
            let rows = parts.iter().map(|p| p.rows).sum();
            let start = end.next_multiple_of(64);
            end = start.saturating_add(Self::bytes_for(format, rows, cols)?);
            ranges.push((format, rows, cols, start..end));
        }
        let mut memory = Buffer::zeroed(product("interleaved weights", &[end])?);
        let out = SharedMut::new(&mut memory);
        for (parts, (format, rows, cols, range)) in matrices.iter().zip(&ranges) {
            let panel_bytes = format.panel_bytes(*cols);
            cpu.pool().ranges(rows.div_ceil(PANEL), 1, |panels| {
                for panel in panels {
                    let at = range.start + panel * panel_bytes;
                    // SAFETY: each panel is written by the one chunk that claimed it, and lies in the buffer.
                    let bytes = unsafe { out.slice(at..at + panel_bytes) };
                    let mut first = 0;
                    for part in *parts {
                        // The rows of this panel that the part has.
                        let (from, to) = (panel * PANEL, (panel + 1) * PANEL);
                        for row in from.max(first)..to.min(first + part.rows) {
                            interleave_row(part, row - first, row % PANEL, bytes);
                        }
                        first += part.rows;
                    }
                }
            })?;
        }
        let memory = Arc::new(memory);
        let matrix =
            |(format, rows, cols, range)| Self { format, rows, cols, memory: Arc::clone(&memory), range };
        Ok(ranges.into_iter().map(matrix).collect())
    }

    /// The encoding.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Rows, the outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, the inputs of a product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.range.len()
    }

    /// All rows, to multiply with.
    pub fn view(&self) -> InterleavedRows<'_> {
        InterleavedRows {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            data: &self.memory[self.range.clone()],
        }
    }

    /// A range of rows that begins on a panel (a multiple of 16) and ends on one or at the last row, such as one
    /// expert's of a stack.
    ///
    /// # Errors
    /// Where the range is empty, leaves the matrix, or cuts a panel.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<InterleavedRows<'_>, KernelError> {
        let whole =
            rows.start.is_multiple_of(PANEL) && (rows.end.is_multiple_of(PANEL) || rows.end == self.rows);
        if rows.start >= rows.end || rows.end > self.rows || !whole {
            let rule = "a non-empty part of the matrix in whole panels of 16 rows";
            return Err(parameter("row range", format!("{rows:?}"), rule));
        }
        let panel = self.format.panel_bytes(self.cols);
        let data = &self.view().data[rows.start / PANEL * panel..rows.end.div_ceil(PANEL) * panel];
        Ok(InterleavedRows { format: self.format, rows: rows.len(), cols: self.cols, data })
    }
}

/// Rows of an [`Interleaved`] matrix.
#[derive(Debug, Clone, Copy)]
pub struct InterleavedRows<'a> {
    format: QuantFormat,
    rows: usize,
    cols: usize,
    data: &'a [u8],
}

impl<'a> InterleavedRows<'a> {
    /// The encoding.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Rows, the outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, the inputs of a product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Writes a row as f32. `row < rows`, and `out` has `cols` elements.
    pub(crate) fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let format = self.format;
        let (slot, block_bytes) = (row % PANEL, format.block_bytes());
        let float = format.interleaved_scale();
        let scales_at = format.group() / format.block() * block_bytes + slot * float.bytes();
        let groups = self.panel(row / PANEL).chunks_exact(format.group_bytes());
        for (group, out) in groups.zip(out.chunks_exact_mut(format.group())) {
            let scale = float.read(&group[scales_at..]);
            let bias = if format.is_affine() {
                float.read(&group[scales_at + PANEL * float.bytes()..])
            } else {
                0.0
            };
            for (block, out) in group.chunks_exact(block_bytes).zip(out.chunks_exact_mut(format.block())) {
                for (column, out) in out.iter_mut().enumerate() {
                    let (t, byte) = (column / 4, column % 4);
                    let plane = |lower: usize, width: usize| {
                        let (word, shift) = (lower + t * width / 8, width * (t % (8 / width)));
                        block[(word * PANEL + slot) * 4 + byte] >> shift & (((1u16 << width) - 1) as u8)
                    };
                    let code = match format.bits() {
                        2 => plane(0, 2),
                        3 => plane(0, 2) | plane(2, 1) << 2,
                        4 => plane(0, 4),
                        5 => plane(0, 4) | plane(4, 1) << 4,
                        6 => plane(0, 4) | plane(4, 2) << 4,
                        _ => plane(0, 8),
                    };
                    *out = scale * format.code_value(code) + bias;
                }
            }
        }
    }

    /// `panel < rows.div_ceil(PANEL)`.
    pub(crate) fn panel(&self, panel: usize) -> &'a [u8] {
        let bytes = self.format.panel_bytes(self.cols);
        &self.data[panel * bytes..][..bytes]
    }
}

impl QuantizedMatrix<'_> {
    /// Interleaves one panel into `scratch`. `panel < rows.div_ceil(PANEL)`.
    pub(crate) fn interleave_panel<'b>(&self, panel: usize, scratch: &'b mut Buffer) -> &'b [u8] {
        let bytes = self.format.panel_bytes(self.cols);
        scratch.ensure(bytes);
        let out = &mut scratch[..bytes];
        let rows = panel * PANEL..self.rows.min((panel + 1) * PANEL);
        if rows.len() < PANEL {
            out.fill(0);
        }
        for row in rows {
            interleave_row(self, row, row % PANEL, out);
        }
        out
    }
}

/// Writes row `row` of a matrix as row `slot` of a panel of `format.panel_bytes(cols)` bytes.
fn interleave_row(matrix: &QuantizedMatrix<'_>, row: usize, slot: usize, panel: &mut [u8]) {
    let format = matrix.format;
    let codes = matrix.row_codes(row);
    match format.bits() {
        2 => interleave_codes::<2>(format, codes, slot, panel),
        3 => interleave_codes::<3>(format, codes, slot, panel),
        4 => interleave_codes::<4>(format, codes, slot, panel),
        5 => interleave_codes::<5>(format, codes, slot, panel),
        6 => interleave_codes::<6>(format, codes, slot, panel),
        _ => interleave_codes::<8>(format, codes, slot, panel),
    }
    let (scales, biases) = (matrix.row_part(matrix.scales, row), matrix.row_part(matrix.biases, row));
    let width = format.interleaved_scale().bytes();
    let scales_at = format.group() / format.block() * format.block_bytes();
    for (g, group) in panel.chunks_exact_mut(format.group_bytes()).enumerate() {
        let at = scales_at + slot * width;
        if format.is_affine() {
            group[at..at + width].copy_from_slice(&scales[g * width..][..width]);
            let at = at + PANEL * width;
            group[at..at + width].copy_from_slice(&biases[g * width..][..width]);
        } else {
            // Powers of two and numbers of three mantissa bits: exact in bf16.
            let scale = half::bf16::from_f32(format.read_scale(&scales[g..]));
            group[at..at + width].copy_from_slice(&scale.to_le_bytes());
        }
    }
}

fn interleave_codes<const BITS: u32>(format: QuantFormat, codes: &[u8], slot: usize, panel: &mut [u8]) {
    let block_bytes = format.block_bytes();
    let row_bytes = block_bytes / PANEL;
    let mut blocks = codes.chunks_exact(row_bytes);
    for group in panel.chunks_exact_mut(format.group_bytes()) {
        for block in group.chunks_exact_mut(block_bytes).take(format.group() / format.block()) {
            let Some(source) = blocks.next() else { return };
            let mut write = |word: usize, value: u32| {
                block[(word * PANEL + slot) * 4..][..4].copy_from_slice(&value.to_le_bytes());
            };
            let column4 = |t: usize| {
                // SAFETY: eight codes of BITS bits, of which a block has whole multiples.
                let codes = unsafe { unpack8::<BITS>(source.as_ptr().add(t / 2 * BITS as usize)) };
                (codes >> (32 * (t % 2))) as u32
            };
            // `lower` of the words come before the plane; it takes the codes' bits from `from` up.
            let mut plane = |lower: usize, width: usize, from: u32| {
                let mask = 0x0101_0101 * ((1u32 << width) - 1);
                for word in 0..format.block() * width / 32 {
                    let value = (0..8 / width).fold(0, |value, s| {
                        value | (column4(word * (8 / width) + s) >> from & mask) << (width * s)
                    });
                    write(lower + word, value);
                }
            };
            match BITS {
                2 => plane(0, 2, 0),
                3 => {
                    plane(0, 2, 0);
                    plane(2, 1, 2);
                }
                4 => plane(0, 4, 0),
                5 => {
                    plane(0, 4, 0);
                    plane(4, 1, 4);
                }
                6 => {
                    plane(0, 4, 0);
                    plane(4, 2, 4);
                }
                _ => (0..format.block() / 4).for_each(|t| write(t, column4(t))),
            }
        }
    }
}
