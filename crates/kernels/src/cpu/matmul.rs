//! Products of weights with activations: `y = x Wᵀ`.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use super::Cpu;
#[cfg(target_arch = "x86_64")]
use super::amx;
use super::buffer::{Buffer, SharedMut};
use super::error::{KernelError, check_len, parameter, product};
use super::float::DenseMatrix;
use super::input::{Layout, PreparedInput};
use super::qmm::Output;
use super::quant::{Interleaved, InterleavedRows, PANEL, QuantFormat, QuantizedMatrix};
use super::{mm, mv, qmm, qmv};

/// Quantized weights are used row by row as stored for at most this many rows of input; beyond, interleaving a
/// panel at a time pays.
const STORED_ROWS: usize = 4;

/// A matrix to multiply with, `[outputs, inputs]`.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// Floats as stored.
    Dense(DenseMatrix<'a>),
    /// Quantized, as stored.
    Quantized(QuantizedMatrix<'a>),
    /// Quantized, interleaved at load.
    Interleaved(InterleavedRows<'a>),
}

impl<'a> From<DenseMatrix<'a>> for Weights<'a> {
    fn from(matrix: DenseMatrix<'a>) -> Self {
        Self::Dense(matrix)
    }
}

impl<'a> From<QuantizedMatrix<'a>> for Weights<'a> {
    fn from(matrix: QuantizedMatrix<'a>) -> Self {
        Self::Quantized(matrix)
    }
}

impl<'a> From<InterleavedRows<'a>> for Weights<'a> {
    fn from(rows: InterleavedRows<'a>) -> Self {
        Self::Interleaved(rows)
    }
}

impl<'a> From<&'a Interleaved> for Weights<'a> {
    fn from(matrix: &'a Interleaved) -> Self {
        Self::Interleaved(matrix.view())
    }
}

impl Weights<'_> {
    /// Rows, the outputs of a product.
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(m) => m.rows(),
            Self::Quantized(m) => m.rows(),
            Self::Interleaved(m) => m.rows(),
        }
    }

    /// Columns, the inputs of a product.
    pub fn cols(&self) -> usize {
        match self {
            Self::Dense(m) => m.cols(),
            Self::Quantized(m) => m.cols(),
            Self::Interleaved(m) => m.cols(),
        }
    }

    /// A range of rows, where the weights are as stored; [`Interleaved::slice_rows`] does it for the others.
    ///
    /// # Errors
    /// Where the range is empty or leaves the matrix, or the weights are interleaved.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<Self, KernelError> {
        match self {
            Self::Dense(m) => Ok(Self::Dense(m.slice_rows(rows)?)),
            Self::Quantized(m) => Ok(Self::Quantized(m.slice_rows(rows)?)),
            Self::Interleaved(_) => Err(parameter("weights", "interleaved", "as stored to be cut here")),
        }
    }

    pub(crate) fn quant_format(&self) -> Option<QuantFormat> {
        match self {
            Self::Dense(_) => None,
            Self::Quantized(m) => Some(m.format()),
            Self::Interleaved(m) => Some(m.format()),
        }
    }
}

/// One product of a [`matmul`].
#[derive(Debug)]
pub struct Product<'a> {
    weights: Weights<'a>,
    input: &'a PreparedInput,
    output: SharedMut<f32>,
    borrows: PhantomData<&'a mut [f32]>,
}

impl<'a> Product<'a> {
    /// The product of a matrix with activations prepared for weights of its kind, to be written to `output`,
    /// `[input rows, weights.rows()]`.
    ///
    /// # Errors
    /// Where the input was prepared for another width or kind of weights, or the output has another length.
    pub fn new(
        weights: impl Into<Weights<'a>>,
        input: &'a PreparedInput,
        output: &'a mut [f32],
    ) -> Result<Self, KernelError> {
        let weights = weights.into();
        if input.cols != weights.cols() {
            let rule = "as many as the matrix has columns";
            return Err(parameter("activation columns", input.cols, rule));
        }
        let fits = match (weights.quant_format(), input.layout) {
            #[cfg(target_arch = "x86_64")]
            (_, Layout::Halves) => true,
            #[cfg(target_arch = "x86_64")]
            (Some(format), Layout::Int12) => amx::codes::accepts(format),
            (None, Layout::Plain | Layout::F32Tiles) | (Some(_), Layout::F32Tiles) => true,
            (Some(format), Layout::Integer { block, .. }) => {
                format.has_integer_codes() && format.block() == block
            }
            _ => false,
        };
        if !fits {
            return Err(parameter("activations", "prepared for others", "prepared for weights of this kind"));
        }
        check_len("product output", output.len(), product("product output", &[input.rows, weights.rows()])?)?;
        Ok(Self { weights, input, output: SharedMut::new(output), borrows: PhantomData })
    }

    /// Outputs of a unit of work.
    fn unit_outputs(&self) -> usize {
        match self.input.layout {
            #[cfg(target_arch = "x86_64")]
            Layout::Halves => amx::OUTPUTS,
            _ => PANEL,
        }
    }

    fn panels(&self) -> usize {
        self.weights.rows().div_ceil(self.unit_outputs())
    }

    /// Whether weights are used row by row as they lie, with all rows of the input.
    fn by_rows(&self) -> bool {
        match self.weights {
            Weights::Dense(_) => self.input.layout == Layout::Plain,
            Weights::Quantized(_) => self.input.sequence <= STORED_ROWS,
            Weights::Interleaved(_) => false,
        }
    }

    /// Into how many parts the input's tiles are spread, of at most `most`.
    fn parts(&self, most: usize) -> usize {
        if self.by_rows() { 1 } else { self.input.tiles().min(most) }
    }

    /// Where a panel's weights come from; those that are not interleaved yet are, in the scratch.
    fn source<'b>(&'b self, panel: usize, scratch: &'b mut Buffer) -> mm::Source<'b> {
        match &self.weights {
            Weights::Dense(matrix) => mm::Source::Dense(*matrix, panel * PANEL),
            Weights::Quantized(m) => mm::Source::Panel(m.format(), m.interleave_panel(panel, scratch)),
            Weights::Interleaved(m) => mm::Source::Panel(m.format(), m.panel(panel)),
        }
    }

    /// Computes units of work: unit `u` is part `u % parts` of the input by the outputs of `u / parts`.
    fn compute(&self, cpu: &Cpu, units: Range<usize>, parts: usize, scratch: &mut [Buffer; 3]) {
        let isa = cpu.isa();
        let rows = self.weights.rows();
        let width = self.unit_outputs();
        let outputs = |units: Range<usize>| units.start * width..rows.min(units.end * width);
        let output = |row: usize, columns: &Range<usize>| Output {
            y: self.output.at(row * rows + columns.start),
            stride: rows,
            cols: columns.len(),
        };
        let [scratch, panel_scratch @ ..] = scratch;
        // SAFETY: `new` checked that shapes and layouts agree; the outputs of a unit are its own.
        unsafe {
            if self.by_rows() {
                let columns = outputs(units);
                match self.weights {
                    Weights::Dense(matrix) => {
                        let (x, out) = (self.input.plain(), output(0, &columns));
                        mv::multiply_rows(isa, &matrix, x, self.input.rows, columns, out);
                    }
                    Weights::Quantized(matrix) => {
                        for row in 0..self.input.rows {
                            let y = output(row, &columns).y;
                            qmv::multiply_rows(
                                isa,
                                &matrix,
                                self.input.row(row),
                                columns.clone(),
                                y,
                                scratch,
                            );
                        }
                    }
                    Weights::Interleaved(_) => {}
                }
                return;
            }
            for unit in units {
                let (block, part) = (unit / parts, unit % parts);
                let columns = outputs(block..block + 1);
                let tiles = self.input.tiles();
                let tiles = (tiles * part / parts..tiles * (part + 1) / parts).map(|i| self.input.tile(i));
                let out = output(0, &columns);
                let panel = columns.start / PANEL;
                #[cfg(target_arch = "x86_64")]
                if self.input.layout == Layout::Halves {
                    let [first, second] = panel_scratch;
                    let last = (columns.end - 1) / PANEL;
                    let sources = [self.source(panel, first), self.source(last, second)];
                    let sources = &sources[..columns.len().div_ceil(PANEL)];
                    amx::multiply_panels(isa, sources, self.input.cols, tiles, out, scratch);
                    continue;
                }
                let source = self.source(panel, &mut panel_scratch[0]);
                match source {
                    #[cfg(target_arch = "x86_64")]
                    mm::Source::Panel(format, panel) if self.input.layout == Layout::Int12 => {
                        amx::codes::multiply_panel(isa, format, panel, self.input.cols, tiles, out, scratch);
                    }
                    mm::Source::Panel(format, panel)
                        if self.input.planes() > 0 || self.input.sequence == 1 =>
                    {
                        let (panel, planes) = (panel.as_ptr(), self.input.planes());
                        let groups = self.input.cols / format.group();
                        isa.run(qmm::Tiles { format, panel, groups, tiles, planes, out });
                    }
                    _ => mm::multiply_panel(isa, source, self.input.cols, tiles, out, scratch),
                }
            }
        }
    }
}

thread_local! {
    /// What a kernel needs; two panels interleaved on the fly. Kept, so that products allocate nothing.
    static SCRATCH: RefCell<[Buffer; 3]> = const { RefCell::new([const { Buffer::empty() }; 3]) };
}

/// Computes several products in one go, which costs one dispatch to the threads: the projections of one input,
/// or the experts of a mixture, each on its own tokens.
///
/// # Errors
/// [`KernelError::Panicked`] where a thread panicked.
pub fn matmul(cpu: &Cpu, products: &mut [Product<'_>]) -> Result<(), KernelError> {
    let products = &*products;
    // Where there are fewer panels than chunks to go round, the input's tiles are spread as well.
    let threads = cpu.pool().threads();
    let wanted = if threads == 1 { 1 } else { 6 * threads };
    let panels: usize = products.iter().map(Product::panels).sum();
    let most = wanted.div_ceil(panels.max(1));
    let units = |p: &Product<'_>| p.panels() * p.parts(most);
    cpu.pool().ranges(products.iter().map(units).sum(), 1, |range| {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut skipped = 0;
            for product in products {
                let (start, end) = (range.start.max(skipped), range.end.min(skipped + units(product)));
                if start < end {
                    product.compute(cpu, start - skipped..end - skipped, product.parts(most), scratch);
                }
                skipped += units(product);
            }
        });
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{RandomMatrix, Rng, cpus, dequantized, product_f64, relative_error, stored};
    use crate::cpu::{FloatType, Precision};

    const FLOATS: [FloatType; 3] = [FloatType::F16, FloatType::Bf16, FloatType::F32];

    fn formats() -> Vec<QuantFormat> {
        let mut formats = vec![QuantFormat::Mxfp4, QuantFormat::Nvfp4, QuantFormat::Mxfp8];
        for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
            for (j, group) in [32, 64, 128].into_iter().enumerate() {
                formats.push(QuantFormat::Affine { bits, group, scales: FLOATS[(i + j) % 3] });
            }
        }
        formats
    }

    fn multiply<'a>(
        cpu: &Cpu,
        weights: impl Into<Weights<'a>>,
        x: &[f32],
        rows: usize,
        precision: Precision,
    ) -> Vec<f32> {
        let weights = weights.into();
        let mut input = PreparedInput::default();
        input.prepare(cpu, x, rows, precision, weights).unwrap();
        let mut y = vec![f32::NAN; rows * weights.rows()];
        matmul(cpu, &mut [Product::new(weights, &input, &mut y).unwrap()]).unwrap();
        y
    }

    fn bound(precision: Precision) -> f64 {
        match precision {
            Precision::F32 => 1e-6,
            Precision::Int16 => 1e-4,
            Precision::Int12 => 1.5e-3,
            Precision::Int8 => 2e-2,
        }
    }

    /// Single rows of several sequences have the bits that each has alone, with all weights and on all instruction sets.
    #[test]
    fn a_sequence_gets_the_same_bits_in_any_company() {
        fn check<'a>(
            cpu: &Cpu,
            weights: impl Into<Weights<'a>>,
            x: &[f32],
            precision: Precision,
            what: &str,
        ) {
            let weights = weights.into();
            let (cols, outputs) = (weights.cols(), weights.rows());
            let product = |x: &[f32]| {
                let rows = x.len() / cols;
                let mut input = PreparedInput::default();
                input.prepare_batch(cpu, x, (rows, 1), precision, weights).unwrap();
                let mut y = vec![f32::NAN; rows * outputs];
                matmul(cpu, &mut [Product::new(weights, &input, &mut y).unwrap()]).unwrap();
                y
            };
            let alone: Vec<f32> = x.chunks(cols).flat_map(product).collect();
            for rows in [1, 2, 3, 5, 8, 9, 12, 33] {
                let together = product(&x[..rows * cols]);
                assert!(together == alone[..rows * outputs], "{what}, {precision:?}, {rows} rows");
            }
        }
        let mut rng = Rng::new(7);
        for precision in [Precision::F32, Precision::Int16, Precision::Int12, Precision::Int8] {
            for format in formats() {
                let (outputs, cols) = (35, 3 * format.group());
                let matrix = RandomMatrix::new(format, outputs, cols, &mut rng);
                let x: Vec<f32> = (0..33 * cols).map(|_| rng.normal()).collect();
                for cpu in cpus() {
                    let interleaved = Interleaved::pack(&cpu, &[&[matrix.view()]]).unwrap().remove(0);
                    check(&cpu, &interleaved, &x, precision, &format!("{format:?}"));
                    check(&cpu, matrix.view(), &x, precision, &format!("{format:?} as stored"));
                }
            }
            for float in FLOATS {
                let (outputs, cols) = (35, 150);
                let data = stored(float, &rng.normals(outputs * cols), 0);
                let x = rng.normals(33 * cols);
                for cpu in cpus() {
                    let matrix = DenseMatrix::new(float, outputs, cols, &data).unwrap();
                    check(&cpu, matrix, &x, precision, &format!("{float:?}"));
                }
            }
        }
    }

    #[test]
    fn quantized_products_match_f64_within_the_precision_s_error() {
        let mut rng = Rng::new(1);
        for format in formats() {
            for (rows, groups) in [(1, 1), (16, 3), (35, 5), (70, 2)] {
                let cols = groups * format.group();
                let matrix = RandomMatrix::new(format, rows, cols, &mut rng);
                let weights = dequantized(&matrix.view());
                for m in [1, 2, 3, 5, 17] {
                    let x = rng.normals(m * cols);
                    let (reference, magnitude) = product_f64(&weights, &x, cols);
                    for cpu in cpus() {
                        let interleaved = Interleaved::new(&cpu, &[matrix.view()]).unwrap();
                        for precision in [Precision::F32, Precision::Int16, Precision::Int12, Precision::Int8]
                        {
                            let a = multiply(&cpu, matrix.view(), &x, m, precision);
                            let b = multiply(&cpu, &interleaved, &x, m, precision);
                            for (i, &magnitude) in magnitude.iter().enumerate() {
                                let limit = bound(precision) * magnitude;
                                for y in [a[i], b[i]] {
                                    let error = (f64::from(y) - reference[i]).abs();
                                    assert!(
                                        error <= limit,
                                        "{cpu:?} {format:?} {precision:?} [{m}, {rows}, {cols}] at {i}: {y}, {}",
                                        reference[i]
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn typical_errors_are_those_documented() {
        let mut rng = Rng::new(2);
        for bits in [4, 8] {
            let format = QuantFormat::Affine { bits, group: 32, scales: FloatType::F16 };
            let matrix = RandomMatrix::new(format, 64, 1536, &mut rng);
            let weights = dequantized(&matrix.view());
            for m in [1, 64] {
                let x = rng.normals(m * 1536);
                let (reference, _) = product_f64(&weights, &x, 1536);
                for cpu in cpus() {
                    for (precision, limit) in [
                        (Precision::F32, 2e-6),
                        (Precision::Int16, 6e-5),
                        (Precision::Int12, 6e-4),
                        (Precision::Int8, 9e-3),
                    ] {
                        let y = multiply(&cpu, matrix.view(), &x, m, precision);
                        let error = relative_error(&y, &reference);
                        assert!(error < limit, "{cpu:?} {bits} bits, {m} rows, {precision:?}: {error:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn many_rows_match_f64() {
        let mut rng = Rng::new(3);
        let format = QuantFormat::Affine { bits: 4, group: 64, scales: FloatType::Bf16 };
        let matrix = RandomMatrix::new(format, 40, 576, &mut rng);
        let weights = dequantized(&matrix.view());
        for m in [64, 512] {
            let x = rng.normals(m * 576);
            let (reference, _) = product_f64(&weights, &x, 576);
            for cpu in cpus() {
                for precision in [Precision::F32, Precision::Int16, Precision::Int12, Precision::Int8] {
                    let y = multiply(&cpu, matrix.view(), &x, m, precision);
                    let error = relative_error(&y, &reference);
                    assert!(error < bound(precision), "{cpu:?} {precision:?}: {error:e}");
                }
            }
        }
    }

    #[test]
    fn dense_products_match_f64_for_any_width_and_number_of_rows() {
        let mut rng = Rng::new(4);
        for float in FLOATS {
            for (rows, cols) in [(1, 1), (17, 7), (33, 130), (16, 1100)] {
                let data = stored(float, &rng.normals(rows * cols), 1);
                let matrix = DenseMatrix::new(float, rows, cols, &data[1..]).unwrap();
                let weights: Vec<f64> =
                    data[1..].chunks_exact(float.bytes()).map(|b| f64::from(float.read(b))).collect();
                for m in [1, 2, 3, 4, 7, 8, 9, 16, 17, 64] {
                    let x = rng.normals(m * cols);
                    let (reference, magnitude) = product_f64(&weights, &x, cols);
                    for cpu in cpus() {
                        for (precision, limit) in [(Precision::F32, 2e-6), (Precision::Int16, 3e-5)] {
                            let y = multiply(&cpu, matrix, &x, m, precision);
                            for (i, magnitude) in magnitude.iter().enumerate() {
                                let error = (f64::from(y[i]) - reference[i]).abs();
                                assert!(
                                    error <= limit * magnitude,
                                    "{cpu:?} {float:?} {precision:?} [{m}, {rows}, {cols}] at {i}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn extreme_activations_and_empty_groups_give_finite_outputs() {
        let mut rng = Rng::new(5);
        for format in formats() {
            let cols = 2 * format.group();
            let mut matrix = RandomMatrix::new(format, 20, cols, &mut rng);
            matrix.clear_first_group();
            let weights = dequantized(&matrix.view());
            let mut huge = rng.normals(cols);
            huge[cols / 2] = 1e30;
            let mut tiny = rng.normals(cols);
            tiny.iter_mut().for_each(|x| *x *= 1e-40);
            let mut mixed = vec![0.0; cols];
            mixed[..16].copy_from_slice(&rng.normals(16));
            for x in [vec![0.0; cols], huge, tiny, mixed] {
                for m in [1, 4, 16] {
                    let x = x.repeat(m);
                    let (reference, _) = product_f64(&weights, &x, cols);
                    // Rounding errors scale with the largest activation of a block.
                    let largest = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                    let magnitude = product_f64(&weights, &vec![largest; x.len()], cols).1;
                    for cpu in cpus() {
                        for precision in [Precision::F32, Precision::Int16, Precision::Int12, Precision::Int8]
                        {
                            for y in [
                                multiply(&cpu, matrix.view(), &x, m, precision),
                                multiply(
                                    &cpu,
                                    &Interleaved::new(&cpu, &[matrix.view()]).unwrap(),
                                    &x,
                                    m,
                                    precision,
                                ),
                            ] {
                                for ((y, r), magnitude) in y.iter().zip(&reference).zip(&magnitude) {
                                    let limit = bound(precision) * magnitude + 1e-28;
                                    assert!(
                                        (f64::from(*y) - r).abs() <= limit,
                                        "{cpu:?} {format:?} {precision:?}"
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn nan_activations_give_nan_not_numbers() {
        let mut rng = Rng::new(6);
        for format in [QuantFormat::Mxfp4, QuantFormat::Affine { bits: 4, group: 32, scales: FloatType::F16 }]
        {
            let matrix = RandomMatrix::new(format, 16, 64, &mut rng);
            let mut x = rng.normals(64);
            x[5] = f32::NAN;
            for cpu in cpus() {
                for precision in [Precision::F32, Precision::Int16, Precision::Int12, Precision::Int8] {
                    let y = multiply(&cpu, matrix.view(), &x, 1, precision);
                    assert!(y.iter().all(|y| y.is_nan()), "{cpu:?} {format:?} {precision:?}: {y:?}");
                }
            }
        }
    }

    #[test]
    fn interleaving_several_matrices_puts_their_rows_one_under_the_other() {
        let mut rng = Rng::new(7);
        let format = QuantFormat::Affine { bits: 5, group: 32, scales: FloatType::F32 };
        let parts: Vec<RandomMatrix> =
            [24, 3, 40, 16].iter().map(|&n| RandomMatrix::new(format, n, 96, &mut rng)).collect();
        let x = rng.normals(96);
        for cpu in cpus() {
            let views: Vec<_> = parts.iter().map(RandomMatrix::view).collect();
            let all = Interleaved::new(&cpu, &views).unwrap();
            assert_eq!((all.rows(), all.bytes()), (83, Interleaved::bytes_for(format, 83, 96).unwrap()));
            let together = multiply(&cpu, &all, &x, 1, Precision::Int16);
            let mut apart = Vec::new();
            for view in views {
                apart.extend(multiply(
                    &cpu,
                    &Interleaved::new(&cpu, &[view]).unwrap(),
                    &x,
                    1,
                    Precision::Int16,
                ));
            }
            assert_eq!(together, apart);
            let slice = all.slice_rows(16..48).unwrap();
            assert_eq!(multiply(&cpu, slice, &x, 1, Precision::Int16), together[16..48]);
        }
    }

    #[test]
    fn interleaved_4_bit_weights_take_no_more_memory_than_stored_ones() {
        let mut rng = Rng::new(8);
        let format = QuantFormat::Affine { bits: 4, group: 32, scales: FloatType::F16 };
        let matrix = RandomMatrix::new(format, 48, 96, &mut rng);
        assert_eq!(Interleaved::bytes_for(format, 48, 96).unwrap(), matrix.view().bytes());
    }

    #[test]
    fn several_products_are_computed_in_one_call() {
        let mut rng = Rng::new(9);
        let (four, eight) = (
            QuantFormat::Affine { bits: 4, group: 32, scales: FloatType::F16 },
            QuantFormat::Affine { bits: 8, group: 64, scales: FloatType::F16 },
        );
        let (a, b) = (RandomMatrix::new(four, 50, 64, &mut rng), RandomMatrix::new(eight, 20, 64, &mut rng));
        for m in [1, 6, 30] {
            let x = rng.normals(64 * m);
            for cpu in cpus() {
                let mut input = PreparedInput::default();
                input.prepare(&cpu, &x, m, Precision::Int16, a.view().into()).unwrap();
                let (mut ya, mut yb) = (vec![0.0; 50 * m], vec![0.0; 20 * m]);
                let mut products = [
                    Product::new(a.view(), &input, &mut ya).unwrap(),
                    Product::new(b.view(), &input, &mut yb).unwrap(),
                ];
                matmul(&cpu, &mut products).unwrap();
                assert_eq!(ya, multiply(&cpu, a.view(), &x, m, Precision::Int16));
                assert_eq!(yb, multiply(&cpu, b.view(), &x, m, Precision::Int16));
            }
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let mut rng = Rng::new(10);
        let cpu = Cpu::new(Some(1));
        let format = QuantFormat::Affine { bits: 4, group: 32, scales: FloatType::F16 };
        let matrix = RandomMatrix::new(format, 8, 64, &mut rng);
        let view = matrix.view();
        let mut input = PreparedInput::default();
        assert!(input.prepare(&cpu, &[0.0; 63], 1, Precision::Int16, view.into()).is_err());
        assert!(input.prepare(&cpu, &[], 0, Precision::Int16, view.into()).is_err());
        input.prepare(&cpu, &[0.0; 64], 1, Precision::Int16, view.into()).unwrap();
        assert!(Product::new(view, &input, &mut [0.0; 7]).is_err());
        let wider = RandomMatrix::new(format, 8, 96, &mut rng);
        assert!(Product::new(wider.view(), &input, &mut [0.0; 8]).is_err());
        let other = RandomMatrix::new(QuantFormat::Nvfp4, 8, 64, &mut rng);
        assert!(Product::new(other.view(), &input, &mut [0.0; 8]).is_err());
        let float = DenseMatrix::new(FloatType::F32, 1, 64, &[0; 256]).unwrap();
        assert!(Product::new(float, &input, &mut [0.0; 1]).is_err());

        assert!(QuantizedMatrix::new(format, 8, 48, &[0; 192], &[0; 16], &[0; 16]).is_err());
        assert!(QuantizedMatrix::new(format, 8, 64, &[0; 255], &[0; 32], &[0; 32]).is_err());
        assert!(QuantizedMatrix::new(format, 8, 64, &[0; 256], &[0; 32], &[0; 31]).is_err());
        assert!(QuantizedMatrix::new(format, usize::MAX / 4, 64, &[], &[], &[]).is_err());
        let seven = QuantFormat::Affine { bits: 7, group: 32, scales: FloatType::F16 };
        assert!(Interleaved::bytes_for(seven, 8, 64).is_err());
        assert!(view.slice_rows(4..9).is_err());
        assert!(view.slice_rows(4..4).is_err());
    }
}
