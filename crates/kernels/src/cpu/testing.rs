//! What kernel tests share: random data, references in f64, every instruction set of the machine.

use super::quant::{QuantFormat, QuantizedMatrix};
use super::{Cpu, FloatType, Isa};

/// A small generator of reproducible noise.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In [0, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal.
    pub(crate) fn normal(&mut self) -> f32 {
        ((0..6).map(|_| self.unit()).sum::<f32>() - 3.0) * 1.414
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| (self.next() >> 32) as u8).collect()
    }
}

/// Every instruction set of this machine, with one thread and with three.
pub(crate) fn cpus() -> Vec<Cpu> {
    let mut cpus = Vec::new();
    for &isa in Isa::available() {
        cpus.push(Cpu::with_isa(1, isa));
        cpus.push(Cpu::with_isa(3, isa));
    }
    cpus
}

/// `values` as stored in `float`, behind `offset` bytes, so that they are unaligned.
pub(crate) fn stored(float: FloatType, values: &[f32], offset: usize) -> Vec<u8> {
    let mut bytes = vec![0xaa; offset];
    for &v in values {
        match float {
            FloatType::F16 => bytes.extend(half::f16::from_f32(v).to_le_bytes()),
            FloatType::Bf16 => bytes.extend(half::bf16::from_f32(v).to_le_bytes()),
            FloatType::F32 => bytes.extend(v.to_le_bytes()),
        }
    }
    bytes
}

/// A random quantized matrix whose buffers start at odd addresses.
pub(crate) struct RandomMatrix {
    format: QuantFormat,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl RandomMatrix {
    pub(crate) fn new(format: QuantFormat, rows: usize, cols: usize, rng: &mut Rng) -> Self {
        let mut codes = rng.bytes(1 + rows * cols * format.bits() as usize / 8);
        let groups = rows * cols / format.group();
        let (scales, biases) = match format {
            QuantFormat::Affine { bits, scales, .. } => {
                let top = ((1u32 << bits) - 1) as f32;
                let s: Vec<f32> = (0..groups).map(|_| (0.2 + 0.1 * rng.unit()) / top).collect();
                let b: Vec<f32> = s.iter().map(|s| -s * top * (0.5 + 0.05 * rng.normal())).collect();
                (stored(scales, &s, 1), stored(scales, &b, 1))
            }
            QuantFormat::Mxfp4 | QuantFormat::Mxfp8 => {
                if format == QuantFormat::Mxfp8 {
                    // No NaN codes.
                    codes.iter_mut().filter(|c| **c & 127 == 127).for_each(|c| *c &= 0x87);
                }
                ((0..=groups).map(|_| 118 + (rng.next() >> 40) as u8 % 8).collect(), vec![0])
            }
            QuantFormat::Nvfp4 => {
                ((0..=groups).map(|_| 20 + (rng.next() >> 40) as u8 % 40).collect(), vec![0])
            }
        };
        Self { format, rows, cols, codes, scales, biases }
    }

    /// Makes the first group's scale and bias the least there are: zero, where the format has it.
    pub(crate) fn clear_first_group(&mut self) {
        let groups = self.rows * self.cols / self.format.group();
        for values in [&mut self.scales, &mut self.biases] {
            let width = (values.len() - 1) / groups;
            values[1..1 + width].fill(0);
        }
    }

    pub(crate) fn view(&self) -> QuantizedMatrix<'_> {
        let (c, s, b) = (&self.codes[1..], &self.scales[1..], &self.biases[1..]);
        QuantizedMatrix::new(self.format, self.rows, self.cols, c, s, b).unwrap()
    }
}

/// The exact weights, in f64, bit by bit from the stored form.
pub(crate) fn dequantized(m: &QuantizedMatrix<'_>) -> Vec<f64> {
    let (bits, group) = (m.format().bits() as usize, m.format().group());
    let mut out = Vec::with_capacity(m.rows() * m.cols());
    for row in 0..m.rows() {
        let codes = m.row_codes(row);
        let width = m.scales.len() / m.rows() / (m.cols() / group);
        for col in 0..m.cols() {
            let code = (0..bits).fold(0u8, |code, b| {
                let at = col * bits + b;
                code | (codes[at / 8] >> (at % 8) & 1) << b
            });
            let g = col / group * width;
            let scale = f64::from(m.format().read_scale(&m.row_part(m.scales, row)[g..]));
            let bias = match m.format() {
                QuantFormat::Affine { scales, .. } => f64::from(scales.read(&m.row_part(m.biases, row)[g..])),
                _ => 0.0,
            };
            out.push(scale * f64::from(m.format().code_value(code)) + bias);
        }
    }
    out
}

/// `x Wᵀ` in f64, and with the absolute values of every factor: what rounding errors scale with.
pub(crate) fn product_f64(w: &[f64], x: &[f32], cols: usize) -> (Vec<f64>, Vec<f64>) {
    let mut out = (Vec::new(), Vec::new());
    for x in x.chunks_exact(cols) {
        for w in w.chunks_exact(cols) {
            out.0.push(w.iter().zip(x).map(|(w, &x)| w * f64::from(x)).sum());
            out.1.push(w.iter().zip(x).map(|(w, &x)| (w * f64::from(x)).abs()).sum());
        }
    }
    out
}

/// Root mean square of the difference relative to that of the reference.
pub(crate) fn relative_error(y: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(y.len(), reference.len());
    let difference: f64 = y.iter().zip(reference).map(|(&y, r)| (f64::from(y) - r).powi(2)).sum();
    let norm: f64 = reference.iter().map(|r| r * r).sum();
    if norm == 0.0 { difference.sqrt() } else { (difference / norm).sqrt() }
}
