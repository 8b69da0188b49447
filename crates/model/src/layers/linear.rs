use std::sync::Arc;

use russet_kernels::ops::{Matrix, Ops};
use russet_mlx::{Array, QuantizationMode, Quantized};

use super::{Loader, Norm};
use crate::Result;

/// `y = x @ W.T (+ bias)` with a dense or packed weight `[out, in]` (`nn.Linear`,
/// `nn.QuantizedLinear`, `nn.QQLinear`).
pub struct Linear(Weight);

enum Weight {
    /// Transposed at load, `[in, out]`.
    Dense(Array, Option<Array>),
    Quantized(Quantized, Option<Array>),
    /// The input is quantized as well.
    QuantizedInput(Quantized),
    /// For the CPU kernels.
    Kernel(Arc<Ops>, Arc<Matrix>),
}

impl Linear {
    /// Takes the module `path` from the weights.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load(loader: &mut Loader<'_>, path: &str, inputs: i32, outputs: i32, bias: bool) -> Result<Self> {
        let bias = match bias {
            true => Some(loader.weights.take(&format!("{path}.bias"), &[outputs])?),
            false => None,
        };
        if let Some(ops) = loader.linear_kernels(path)? {
            let matrix = loader.matrix(path, outputs, inputs, bias.as_ref())?;
            return Ok(Self(Weight::Kernel(ops, matrix)));
        }
        let bias = bias.map(|b| b.array);
        Ok(Self(match loader.stored(path, outputs, inputs)?.into_quantized() {
            Err(weight) => Weight::Dense(weight.array.transpose_all()?, bias),
            Ok(weight) if loader.quantize_activations => {
                let mode = weight.quantization.mode;
                if bias.is_some() || !matches!(mode, QuantizationMode::Nvfp4 | QuantizationMode::Mxfp8) {
                    let message = "quantize_activations needs mode nvfp4 or mxfp8 and no bias";
                    return Err(loader.weights.error(path, message));
                }
                Weight::QuantizedInput(weight)
            }
            Ok(weight) => Weight::Quantized(weight, bias),
        }))
    }

    /// `[.., in]` → `[.., out]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match &self.0 {
            // One rounding, unlike a product followed by an addition.
            Weight::Dense(w, Some(bias)) => bias.addmm(x, w, 1.0, 1.0)?,
            Weight::Dense(w, None) => x.matmul(w)?,
            Weight::Quantized(w, Some(bias)) => w.matmul(x, true)?.add(bias)?,
            Weight::Quantized(w, None) => w.matmul(x, true)?,
            Weight::QuantizedInput(w) => w.matmul_quantized_input(x)?,
            Weight::Kernel(ops, matrix) => ops.project(x, None, vec![matrix.clone()])?.swap_remove(0),
        })
    }

    /// The matrix for the CPU kernels, where they compute.
    pub(super) fn kernel(&self) -> Option<(&Arc<Ops>, &Arc<Matrix>)> {
        match &self.0 {
            Weight::Kernel(ops, matrix) => Some((ops, matrix)),
            _ => None,
        }
    }
}

/// `norm(x)` through each of `linears`.
pub fn project<const N: usize>(norm: Option<&Norm>, linears: [&Linear; N], x: &Array) -> Result<[Array; N]> {
    let kernels: Option<Vec<_>> = linears.iter().map(|linear| linear.kernel()).collect();
    let outputs = match kernels.as_deref() {
        Some([(ops, _), ..]) => {
            let matrices = kernels.iter().flatten().map(|(_, matrix)| (*matrix).clone()).collect();
            ops.project(x, norm.map(Norm::kernel), matrices)?
        }
        _ => {
            let x = norm.map_or_else(|| Ok(x.clone()), |norm| norm.forward(x))?;
            linears.iter().map(|linear| linear.forward(&x)).collect::<Result<_>>()?
        }
    };
    as_many(outputs)
}

/// Projections of one input: a matrix each, or one matrix with the rows of all.
pub struct Projections<const N: usize>(Form<N>);

enum Form<const N: usize> {
    Separate([Linear; N]),
    /// The product is split where the second and later projections begin.
    Fused(Linear, Vec<i32>),
}

impl<const N: usize> Projections<N> {
    /// A matrix each.
    pub fn separate(linears: [Linear; N]) -> Self {
        Self(Form::Separate(linears))
    }

    /// Takes the module `path` with the rows of all projections and without a bias. For the CPU kernels the
    /// matrix itself is split.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit the sizes.
    pub fn load_fused(loader: &mut Loader<'_>, path: &str, inputs: i32, outputs: [i32; N]) -> Result<Self> {
        let total = outputs.iter().try_fold(0_i32, |sum, &rows| sum.checked_add(rows));
        let total =
            total.ok_or_else(|| loader.weights.error(path, format!("{outputs:?} rows are too many")))?;
        if let Some(ops) = loader.linear_kernels(path)? {
            let matrices = loader.split_matrix(path, total, outputs, inputs)?;
            return Ok(Self::separate(matrices.map(|matrix| Linear(Weight::Kernel(ops.clone(), matrix)))));
        }
        let ends = outputs.iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end)
        });
        let starts = ends.take(N - 1).collect();
        Ok(Self(Form::Fused(Linear::load(loader, path, inputs, total, false)?, starts)))
    }

    /// `norm(x)` through each projection.
    pub fn forward(&self, norm: Option<&Norm>, x: &Array) -> Result<[Array; N]> {
        match &self.0 {
            Form::Separate(linears) => project(norm, linears.each_ref(), x),
            Form::Fused(linear, starts) => {
                let [product] = project(norm, [linear], x)?;
                as_many(product.split(starts, -1)?)
            }
        }
    }

    /// The matrices for the CPU kernels, where they compute.
    pub(super) fn kernels(&self) -> Option<[(&Arc<Ops>, &Arc<Matrix>); N]> {
        let Form::Separate(linears) = &self.0 else { return None };
        let kernels: Option<Vec<_>> = linears.iter().map(Linear::kernel).collect();
        kernels?.try_into().ok()
    }
}

fn as_many<const N: usize>(arrays: Vec<Array>) -> Result<[Array; N]> {
    arrays.try_into().map_err(|_| russet_mlx::Error::new("projection returned too few arrays").into())
}
