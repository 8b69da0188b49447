//! Products of a dense matrix with one or a few rows: each weight is read once, in the order of memory.

#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are indexed in step with pointers")]

use std::ops::Range;

use super::float::DenseMatrix;
use super::qmm::Output;
use super::simd::{Isa, Kernel, Simd};

/// Multiplies rows `range` of a matrix with `rows` rows of f32 input; the output's first column is the range's.
///
/// # Safety
/// `x` holds `rows` rows of the matrix's columns; the output has as many rows, and a column for each of `range`,
/// which the matrix has.
pub(crate) unsafe fn multiply_rows(
    isa: Isa,
    matrix: &DenseMatrix<'_>,
    x: *const f32,
    rows: usize,
    range: Range<usize>,
    out: Output,
) {
    isa.run(Rows { matrix, x, rows, range, out });
}

struct Rows<'a> {
    matrix: &'a DenseMatrix<'a>,
    x: *const f32,
    rows: usize,
    range: Range<usize>,
    out: Output,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { matrix, x, rows, range, out } = self;
        for row in range.clone() {
            let bytes = matrix.cols * matrix.float.bytes();
            let weights = &matrix.data[row * bytes..][..bytes];
            let y = out.y.wrapping_add(row - range.start);
            let mut done = 0;
            // SAFETY: by the contract of `multiply_rows`; the parts are rows `done..` of input and output.
            unsafe {
                while done < rows {
                    let (x, y) = (x.add(done * matrix.cols), y.add(done * out.stride));
                    // As many chains for one row as for several: a row adds up in the same order in any company.
                    done += match rows - done {
                        1 => dots::<S, 1, 4>(matrix, weights, x, y, out.stride),
                        _ => dots::<S, 2, 4>(matrix, weights, x, y, out.stride),
                    };
                }
            }
        }
    }
}

/// Dot products of one row of weights with `ROWS` rows of input, each in `CHAINS` independent sums; returns
/// `ROWS`.
///
/// # Safety
/// In a kernel of `S`; `x` holds the rows, `y` an element at each stride.
#[inline(always)]
unsafe fn dots<S: Simd, const ROWS: usize, const CHAINS: usize>(
    matrix: &DenseMatrix<'_>,
    weights: &[u8],
    x: *const f32,
    y: *mut f32,
    stride: usize,
) -> usize {
    let (cols, bytes) = (matrix.cols, matrix.float.bytes());
    let mut sums = [[S::zero(); CHAINS]; ROWS];
    // SAFETY: vectors are loaded only where the row has that many columns left, the rest one by one.
    unsafe {
        let step = CHAINS * S::LANES;
        let mut column = 0;
        while column + step <= cols {
            let source = weights.as_ptr().add(column * bytes);
            S::prefetch(source.wrapping_add(4096));
            for chain in 0..CHAINS {
                let w = S::load_as(matrix.float, source.add(chain * S::LANES * bytes));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = S::load(x.add(r * cols + column + chain * S::LANES));
                    sums[chain] = S::fma(w, x, sums[chain]);
                }
            }
            column += step;
        }
        for (r, sums) in sums.iter().enumerate() {
            let mut sum = sums[0];
            for &chain in &sums[1..] {
                sum = S::add(sum, chain);
            }
            let mut at = column;
            while at + S::LANES <= cols {
                let w = S::load_as(matrix.float, weights.as_ptr().add(at * bytes));
                sum = S::fma(w, S::load(x.add(r * cols + at)), sum);
                at += S::LANES;
            }
            let mut total = S::sum(sum);
            for at in at..cols {
                total += matrix.float.read(&weights[at * bytes..]) * x.add(r * cols + at).read();
            }
            y.add(r * stride).write(total);
        }
    }
    ROWS
}
