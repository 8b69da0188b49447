/// Values, counted by size.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    /// No values yet, to be counted up to each of these bounds, which ascend.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len()], count: 0, sum: 0.0 }
    }

    /// Counts a value; what is not finite is not counted.
    pub fn observe(&mut self, value: f64) {
        if !value.is_finite() {
            return;
        }
        for (count, bound) in self.counts.iter_mut().zip(self.bounds) {
            *count += u64::from(value <= *bound);
        }
        self.count += 1;
        self.sum += value;
    }

    /// The bounds, each with the number of values that are at most as large.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        self.bounds.iter().copied().zip(self.counts.iter().copied())
    }

    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their sum.
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_at_each_bound_that_it_is_within() {
        let mut histogram = Histogram::new(&[1.0, 2.5, 5.0]);
        for value in [1.0, 3.0, 20000.0, f64::NAN, f64::INFINITY] {
            histogram.observe(value);
        }
        assert_eq!(histogram.buckets().collect::<Vec<_>>(), [(1.0, 1), (2.5, 1), (5.0, 2)]);
        assert_eq!((histogram.count(), histogram.sum()), (3, 20004.0));
    }
}
