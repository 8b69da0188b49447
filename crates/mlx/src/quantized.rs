use std::fmt;
use std::str::FromStr;

use crate::array::{optional, wrap, wrap_all};
use crate::bridge::ffi;
use crate::{Array, Dtype, Error, Result};

/// How MLX packs quantized values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizationMode {
    /// `value = code * scale + bias`, scale and bias per group in a float dtype.
    Affine,
    /// OCP microscaling FP4: e2m1 values, e8m0 scales, groups of 32.
    Mxfp4,
    /// OCP microscaling FP8: e4m3 values, e8m0 scales, groups of 32.
    Mxfp8,
    /// NVIDIA FP4: e2m1 values, e4m3 scales, groups of 16.
    Nvfp4,
}

impl QuantizationMode {
    /// The name used in MLX and in config files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Affine => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

impl fmt::Display for QuantizationMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for QuantizationMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [Self::Affine, Self::Mxfp4, Self::Mxfp8, Self::Nvfp4]
            .into_iter()
            .find(|mode| mode.name() == name)
            .ok_or_else(|| {
                Error::new(format!("unknown quantization mode '{name}' (known: affine, mxfp4, mxfp8, nvfp4)"))
            })
    }
}

/// The parameters of a quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// Elements that share a scale.
    pub group_size: i32,
    /// Bits per element.
    pub bits: i32,
    /// The packing.
    pub mode: QuantizationMode,
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mode {
            QuantizationMode::Affine => write!(f, "{}-bit affine, group {}", self.bits, self.group_size),
            mode => write!(f, "{mode}"),
        }
    }
}

impl Quantization {
    fn to_ffi(self) -> ffi::Quantization {
        ffi::Quantization { group_size: self.group_size, bits: self.bits, mode: self.mode.name().to_owned() }
    }
}

/// A quantized matrix: packed weight, scales, and biases for the affine mode.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// `uint32`, `[.., out, in * bits / 32]`.
    pub weight: Array,
    /// `[.., out, in / group_size]`.
    pub scales: Array,
    /// Like `scales`; affine mode only.
    pub biases: Option<Array>,
    /// The packing.
    pub quantization: Quantization,
}

impl Quantized {
    /// Quantizes `w` `[.., out, in]` along its last dimension.
    pub fn quantize(w: &Array, quantization: Quantization) -> Result<Self> {
        let mut parts = wrap_all(ffi::quantize(&w.0, &quantization.to_ffi(), &[]))?.into_iter();
        let (Some(weight), Some(scales)) = (parts.next(), parts.next()) else {
            return Err(Error::new("quantize returned too few arrays"));
        };
        let biases = if quantization.mode == QuantizationMode::Affine { parts.next() } else { None };
        Ok(Self { weight, scales, biases, quantization })
    }

    /// The float matrix; in affine mode in the dtype of the scales unless `dtype` is given.
    pub fn dequantize(&self, dtype: Option<Dtype>) -> Result<Array> {
        let dtype = dtype.map_or(-1, |d| d as i32);
        let biases = optional(self.biases.as_ref());
        let q = self.quantization.to_ffi();
        wrap(ffi::dequantize(&self.weight.0, &self.scales.0, biases, &q, &[], dtype))
    }

    /// `x @ w.T` (`transpose`) or `x @ w`.
    pub fn matmul(&self, x: &Array, transpose: bool) -> Result<Array> {
        let biases = optional(self.biases.as_ref());
        let q = self.quantization.to_ffi();
        wrap(ffi::quantized_matmul(&x.0, &self.weight.0, &self.scales.0, biases, transpose, &q))
    }

    /// Products with matrices chosen by index from a stack of them (mixture of experts).
    pub fn gather_matmul(
        &self,
        x: &Array,
        lhs_indices: Option<&Array>,
        rhs_indices: Option<&Array>,
        transpose: bool,
        global_scale: Option<&Array>,
        sorted_indices: bool,
    ) -> Result<Array> {
        wrap(ffi::gather_qmm(
            &x.0,
            &self.weight.0,
            &self.scales.0,
            optional(self.biases.as_ref()),
            optional(lhs_indices),
            optional(rhs_indices),
            transpose,
            &self.quantization.to_ffi(),
            optional(global_scale),
            sorted_indices,
        ))
    }

    /// `x @ w.T` with `x` quantized the same way first (modes nvfp4 and mxfp8).
    pub fn matmul_quantized_input(&self, x: &Array) -> Result<Array> {
        wrap(ffi::qqmm(&x.0, &self.weight.0, optional(Some(&self.scales)), &self.quantization.to_ffi()))
    }
}
