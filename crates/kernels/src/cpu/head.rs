//! What is done with logits: softmax, logsumexp, argmax, top-k.

#![allow(unsafe_code)]

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use super::Cpu;
use super::error::{KernelError, parameter};
use super::norm::{load, save};
use super::simd::{Kernel, Simd, exp};

/// Turns a row of scores into probabilities; scores of −∞ get 0. A row that is empty or all −∞ is left as it is.
pub fn softmax(cpu: &Cpu, row: &mut [f32]) {
    let largest = cpu.isa().run(Largest(row));
    if largest > f32::NEG_INFINITY {
        let sum = cpu.isa().run(Exponentials { row, largest });
        cpu.isa().run(Scale { row, factor: 1.0 / sum });
    }
}

/// `ln Σ exp(row)`, −∞ for an empty row.
pub fn logsumexp(cpu: &Cpu, row: &[f32]) -> f32 {
    let largest = cpu.isa().run(Largest(row));
    if largest == f32::NEG_INFINITY { largest } else { largest + cpu.isa().run(SumExp { row, largest }).ln() }
}

/// The index of the largest element, the lowest where several are; NaN is passed over.
///
/// # Errors
/// Where the row is empty.
pub fn argmax(cpu: &Cpu, row: &[f32]) -> Result<usize, KernelError> {
    if row.is_empty() {
        return Err(parameter("argmax row", "empty", "of at least one element"));
    }
    let largest = cpu.isa().run(Largest(row));
    Ok(row.iter().position(|&x| x == largest).unwrap_or(0))
}

/// The `k` largest elements with their indices, largest first, the lower index first where they tie; NaN is passed
/// over. Fewer, where the row has fewer.
pub fn top_k(row: &[f32], k: usize) -> Vec<(usize, f32)> {
    let mut heap = BinaryHeap::with_capacity(k.min(row.len()) + 1);
    let mut smallest = f32::NEG_INFINITY;
    for (index, &value) in row.iter().enumerate() {
        // Later elements equal to the smallest kept have higher indices.
        if value.is_nan() || (heap.len() == k && value <= smallest) || k == 0 {
            continue;
        }
        heap.push(Reverse(Ranked { value, index }));
        if heap.len() > k {
            heap.pop();
        }
        if heap.len() == k {
            smallest = heap.peek().map_or(smallest, |least| least.0.value);
        }
    }
    heap.into_sorted_vec().into_iter().map(|Reverse(ranked)| (ranked.index, ranked.value)).collect()
}

#[derive(PartialEq)]
struct Ranked {
    value: f32,
    index: usize,
}

impl Eq for Ranked {}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        // −0 and 0 tie. There is no NaN.
        let values = self.value.partial_cmp(&other.value).unwrap_or(Ordering::Equal);
        values.then(other.index.cmp(&self.index))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The largest element; −∞ where there is none.
struct Largest<'a>(&'a [f32]);

impl Kernel for Largest<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        let mut largest = S::splat(f32::NEG_INFINITY);
        for i in (0..self.0.len()).step_by(S::LANES) {
            let n = S::LANES.min(self.0.len() - i);
            // SAFETY: `n` elements are there from `i` on.
            let v = unsafe {
                let p = self.0.as_ptr().add(i);
                if n == S::LANES { S::load(p) } else { S::load_first(p, n, f32::NEG_INFINITY) }
            };
            largest = S::select_lt(largest, v, v, largest);
        }
        S::max_lane(largest)
    }
}

/// Sums the exponentials of a row.
struct SumExp<'a> {
    row: &'a [f32],
    largest: f32,
}

impl Kernel for SumExp<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        let mut sum = S::zero();
        for i in (0..self.row.len()).step_by(S::LANES) {
            let n = S::LANES.min(self.row.len() - i);
            // SAFETY: `n` elements are there from `i` on.
            let v = unsafe { S::load_first(self.row.as_ptr().add(i), n, f32::NEG_INFINITY) };
            sum = S::add(sum, exp::<S>(S::sub(v, S::splat(self.largest))));
        }
        S::sum(sum)
    }
}

/// Replaces a row by its exponentials and sums them.
struct Exponentials<'a> {
    row: &'a mut [f32],
    largest: f32,
}

impl Kernel for Exponentials<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        let mut sum = S::zero();
        for i in (0..self.row.len()).step_by(S::LANES) {
            let n = S::LANES.min(self.row.len() - i);
            // SAFETY: `n` elements are there from `i` on.
            unsafe {
                let v = S::load_first(self.row.as_ptr().add(i), n, f32::NEG_INFINITY);
                let e = exp::<S>(S::sub(v, S::splat(self.largest)));
                save::<S>(self.row, i, e);
                sum = S::add(sum, e);
            }
        }
        S::sum(sum)
    }
}

struct Scale<'a> {
    row: &'a mut [f32],
    factor: f32,
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for i in (0..self.row.len()).step_by(S::LANES) {
            // SAFETY: `i` is inside the row.
            unsafe {
                let v = S::mul(load::<S>(self.row, i), S::splat(self.factor));
                save::<S>(self.row, i, v);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{Rng, cpus};

    #[test]
    fn softmax_and_logsumexp_match_f64() {
        let mut rng = Rng::new(1);
        for n in [1, 3, 16, 100, 4097] {
            let mut x: Vec<f32> = rng.normals(n).iter().map(|x| x * 10.0 - 500.0).collect();
            if n > 2 {
                x[1] = f32::NEG_INFINITY;
            }
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = x.iter().map(|&x| f64::from(x - largest).exp()).sum();
            for cpu in cpus() {
                let exact = f64::from(largest) + sum.ln();
                assert!((f64::from(logsumexp(&cpu, &x)) - exact).abs() < 1e-6 * exact.abs());
                let mut p = x.clone();
                softmax(&cpu, &mut p);
                for (&p, &x) in p.iter().zip(&x) {
                    let exact = f64::from(x - largest).exp() / sum;
                    assert!((f64::from(p) - exact).abs() <= 2e-6 * exact, "{cpu:?} {n}: {p} for {exact}");
                }
            }
        }
    }

    #[test]
    fn rows_without_a_finite_score_are_no_error() {
        for cpu in cpus() {
            assert_eq!(logsumexp(&cpu, &[]), f32::NEG_INFINITY);
            assert_eq!(logsumexp(&cpu, &[f32::NEG_INFINITY; 3]), f32::NEG_INFINITY);
            let mut row = [f32::NEG_INFINITY; 3];
            softmax(&cpu, &mut row);
            assert_eq!(row, [f32::NEG_INFINITY; 3]);
        }
    }

    #[test]
    fn argmax_takes_the_lowest_index_and_passes_over_nan() {
        for cpu in cpus() {
            for n in [1, 5, 16, 17, 1000] {
                for at in [0, n / 2, n - 1] {
                    let mut x = vec![-1.0; n];
                    x[at..].fill(2.0);
                    assert_eq!(argmax(&cpu, &x).unwrap(), at);
                }
            }
            assert_eq!(argmax(&cpu, &[f32::NAN, 1.0, f32::NAN, 3.0, 3.0]).unwrap(), 3);
            assert_eq!(argmax(&cpu, &[f32::NEG_INFINITY; 2]).unwrap(), 0);
            assert!(argmax(&cpu, &[]).is_err());
        }
    }

    #[test]
    fn top_k_is_the_head_of_the_sorted_row() {
        let mut rng = Rng::new(2);
        for n in [0, 1, 7, 500] {
            let x: Vec<f32> = (0..n).map(|_| (rng.normal() * 5.0).round()).collect();
            let mut sorted: Vec<(usize, f32)> = x.iter().copied().enumerate().collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            for k in [0, 1, 5, 600] {
                let sorted: Vec<_> = sorted.iter().take(k).map(|&(i, v)| (i, v + 0.0)).collect();
                let top: Vec<_> = top_k(&x, k).into_iter().map(|(i, v)| (i, v + 0.0)).collect();
                assert_eq!(top.len(), sorted.len());
                assert_eq!(
                    top.iter().map(|t| t.1).collect::<Vec<_>>(),
                    sorted.iter().map(|t| t.1).collect::<Vec<_>>()
                );
            }
        }
        assert_eq!(top_k(&[1.0, f32::NAN, 3.0, 3.0, 2.0], 3), [(2, 3.0), (3, 3.0), (4, 2.0)]);
    }
}
