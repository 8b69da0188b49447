use std::f64::consts::PI;

use russet_kernels::cpu::{Rotations, inverse_frequencies};
use russet_mlx::fast::{Frequencies, Offset, rope};
use russet_mlx::{Array, Dtype, concatenate, select};

use crate::cache::LayerCache;
use crate::{Fields, Result};

/// Positions of the first tokens of a call.
#[derive(Debug)]
pub enum Positions {
    /// Of a sequence.
    Single(i32),
    /// Of each sequence of a batch, and the same as an array.
    Rows(Vec<i32>, Array),
}

impl Positions {
    /// Those that follow what `cache` has consumed.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn after(cache: &LayerCache) -> Result<Self> {
        let lengths = cache.lengths();
        Ok(match lengths[..] {
            [offset] => Self::Single(offset),
            _ => {
                let array = Array::from_slice(&lengths, [lengths.len() as i32])?;
                Self::Rows(lengths, array)
            }
        })
    }

    /// The position in a row.
    pub(crate) fn row(&self, row: usize) -> i32 {
        match self {
            Self::Single(offset) => *offset,
            Self::Rows(offsets, _) => offsets.get(row).copied().unwrap_or(0),
        }
    }

    fn offset(&self) -> Offset<'_> {
        match self {
            Self::Single(offset) => Offset::Scalar(*offset),
            Self::Rows(_, offsets) => Offset::Array(offsets),
        }
    }
}

/// Rotary position embedding with every scaling of mlx-lm's `initialize_rope`.
///
/// Tables are built once, with the reference's operations in its order, because their bits decide
/// the logits' bits.
#[derive(Debug)]
pub struct Rope {
    dims: i32,
    traditional: bool,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// `nn.RoPE`: angles `scale * position * base ** (-2 i / dims)`.
    Base { base: f64, scale: f64 },
    /// `DynamicNTKScalingRoPE`: the base grows with the length.
    Dynamic { base: f64, factor: f64, max_position: f64 },
    /// A table of wavelengths over 2π; the input is multiplied by `input_scale` first, unless 1.
    Table {
        freqs: Array,
        /// `1 / freqs`, for the CPU kernels.
        inverse: Vec<f32>,
        input_scale: f64,
    },
}

impl Rope {
    /// Rotary embedding of the first `dims` channels.
    ///
    /// `scaling` is the config's `rope_scaling` (or `rope_parameters`) object and `max_position` its
    /// `max_position_embeddings`.
    ///
    /// # Errors
    /// For an unknown type and for missing or impossible parameters, naming the field.
    pub fn new(
        dims: i32,
        base: f64,
        traditional: bool,
        scaling: Option<&Fields<'_>>,
        max_position: Option<i32>,
    ) -> Result<Self> {
        let kind = match scaling {
            None => Kind::Base { base, scale: 1.0 },
            Some(scaling) => Kind::from_scaling(dims, base, scaling, max_position)?,
        };
        Ok(Self { dims, traditional: traditional && !kind.never_traditional(scaling), kind })
    }

    /// The longrope of `scaling`, for configs that keep the original context elsewhere.
    ///
    /// # Errors
    /// For missing or impossible parameters, naming the field.
    pub fn longrope(
        dims: i32,
        base: f64,
        scaling: &Fields<'_>,
        original: f64,
        max_position: i32,
    ) -> Result<Self> {
        Ok(Self { dims, traditional: false, kind: longrope(dims, base, scaling, original, max_position)? })
    }

    /// Rotates `x` `[batch, heads, seq, head_dim]`, which begins at `positions`.
    pub fn forward(&self, x: &Array, positions: &Positions) -> Result<Array> {
        let apply = |x: &Array, frequencies, scale: f64| {
            rope(x, self.dims, self.traditional, frequencies, scale as f32, positions.offset())
        };
        Ok(match &self.kind {
            Kind::Base { base, scale } => apply(x, Frequencies::Base(*base as f32), *scale)?,
            Kind::Dynamic { .. } => match positions {
                Positions::Single(offset) => {
                    let base = self.dynamic_base(x.dim(-2)? + offset);
                    apply(x, Frequencies::Base(base as f32), 1.0)?
                }
                // A base for each row: the reference has no batches here.
                Positions::Rows(offsets, _) => {
                    let rows = (0..).zip(offsets).map(|(row, offset)| {
                        self.forward(&x.slice_axis(0, row, row + 1)?, &Positions::Single(*offset))
                    });
                    concatenate(&rows.collect::<Result<Vec<_>>>()?, 0)?
                }
            },
            Kind::Table { freqs, input_scale, .. } => {
                let scaled = if *input_scale == 1.0 { x.clone() } else { self.scale_input(x, *input_scale)? };
                apply(&scaled, Frequencies::Table(freqs), 1.0)?
            }
        })
    }

    /// The rotations of `length` positions from `offset` on, for the CPU kernels.
    pub(crate) fn rotations(&self, offset: i32, length: i32) -> Rotations {
        let mut rotations = Rotations::default();
        let plain = |base: f64| inverse_frequencies(base as f32, self.dims as usize);
        let mut prepare = |inverse: &[f32], scale: f64, amplitude: f64| {
            rotations.prepare(inverse, offset as usize, length as usize, scale as f32, amplitude as f32);
        };
        match &self.kind {
            Kind::Base { base, scale } => prepare(&plain(*base), *scale, 1.0),
            Kind::Dynamic { .. } => prepare(&plain(self.dynamic_base(offset + length)), 1.0, 1.0),
            Kind::Table { inverse, input_scale, .. } => prepare(inverse, 1.0, *input_scale),
        }
        rotations
    }

    /// Whether rotated pairs are neighbours.
    pub(crate) fn is_traditional(&self) -> bool {
        self.traditional
    }

    /// The base for a sequence of `length` tokens; that of the config unless it is dynamic.
    fn dynamic_base(&self, length: i32) -> f64 {
        match self.kind {
            Kind::Dynamic { base, factor, max_position } => {
                let length = f64::from(length).max(max_position);
                let dims = f64::from(self.dims);
                let growth = (factor * length / max_position) - (factor - 1.0);
                base * growth.powf(dims / (dims - 2.0))
            }
            Kind::Base { base, .. } => base,
            Kind::Table { .. } => 1.0,
        }
    }

    /// Multiplies the rotated channels.
    fn scale_input(&self, x: &Array, scale: f64) -> Result<Array> {
        if x.dim(-1)? == self.dims {
            return Ok(x.multiply(scale)?);
        }
        let rotated = x.slice_axis(-1, 0, self.dims)?.multiply(scale)?;
        Ok(x.slice_update_axis(&rotated, -1, 0, self.dims)?)
    }
}

impl Kind {
    fn table(freqs: Array, input_scale: f64) -> Result<Self> {
        let inverse = freqs.reciprocal()?.to_vec()?;
        Ok(Self::Table { freqs, inverse, input_scale })
    }

    /// longrope ignores `traditional`.
    fn never_traditional(&self, scaling: Option<&Fields<'_>>) -> bool {
        scaling.is_some_and(|s| rope_type(s).is_ok_and(|t| t == "longrope"))
    }

    fn from_scaling(dims: i32, base: f64, scaling: &Fields<'_>, max_position: Option<i32>) -> Result<Self> {
        let kind = match rope_type(scaling)? {
            "default" => Self::Base { base, scale: 1.0 },
            "mrope" => {
                // Text alone makes the three position streams equal, and mrope plain.
                let sections = scaling.numbers("mrope_section")?.unwrap_or_default();
                if sections.len() != 3 {
                    return Err(scaling.error("mrope_section", "expected a list of 3 numbers"));
                }
                Self::Base { base, scale: 1.0 }
            }
            "linear" => Self::Base { base, scale: 1.0 / scaling.required_positive("factor")? },
            "dynamic" => {
                let max_position = max_position.ok_or_else(|| {
                    scaling.error("rope_type", "dynamic needs max_position_embeddings in the config")
                })?;
                if dims <= 2 {
                    return Err(scaling.error("rope_type", "dynamic needs more than 2 rotary dimensions"));
                }
                let factor = scaling.required_positive("factor")?;
                Self::Dynamic { base, factor, max_position: f64::from(max_position) }
            }
            "llama3" => Self::table(llama3(dims, base, scaling)?, 1.0)?,
            "yarn" | "deepseek_yarn" | "telechat3-yarn" => yarn(dims, base, scaling)?,
            "longrope" => {
                let original = scaling.required_positive("original_max_position_embeddings")?;
                let max_position = max_position.ok_or_else(|| {
                    scaling.error("rope_type", "longrope needs max_position_embeddings in the config")
                })?;
                longrope(dims, base, scaling, original, max_position)?
            }
            "proportional" => Self::table(proportional(dims, base, scaling)?, 1.0)?,
            other => {
                return Err(scaling.error(
                    "rope_type",
                    format!(
                        "'{}' is not supported (known: default, linear, dynamic, llama3, yarn, \
                         deepseek_yarn, telechat3-yarn, longrope, proportional, mrope)",
                        other.escape_debug()
                    ),
                ));
            }
        };
        Ok(kind)
    }
}

/// `type`, or else `rope_type`, or else `default`.
fn rope_type<'a>(scaling: &Fields<'a>) -> Result<&'a str> {
    let named = scaling.text("type")?.filter(|t| !t.is_empty());
    Ok(match named {
        Some(name) => name,
        None => scaling.text("rope_type")?.unwrap_or("default"),
    })
}

/// `base ** (arange(0, dims, 2) / dims)` in `f32`.
fn wavelengths(dims: i32, base: f64) -> Result<Array> {
    let exponents = Array::arange(0.0, f64::from(dims), 2.0, Dtype::F32)?.divide(dims)?;
    Ok(exponents.power_of(base)?)
}

fn llama3(dims: i32, base: f64, scaling: &Fields<'_>) -> Result<Array> {
    let factor = scaling.required_positive("factor")?;
    let low = scaling.positive("low_freq_factor")?.unwrap_or(1.0);
    let high = scaling.positive("high_freq_factor")?.unwrap_or(4.0);
    let old_context = scaling.positive("original_max_position_embeddings")?.unwrap_or(8192.0);
    if low == high {
        return Err(scaling.error("high_freq_factor", "must differ from low_freq_factor"));
    }

    // The reference divides an integer range here.
    let exponents = Array::arange(0.0, f64::from(dims), 2.0, Dtype::I32)?.divide(dims)?;
    let freqs = exponents.power_of(base)?;
    let wavelens = freqs.multiply(2.0 * PI)?;
    let freqs = select(&wavelens.greater(old_context / low)?, &freqs.multiply(factor)?, &freqs)?;
    let medium = wavelens.greater(old_context / high)?.bitwise_and(&wavelens.less(old_context / low)?)?;
    let smooth = wavelens.divide_into(old_context)?.subtract(low)?.divide(high - low)?;
    let scale = smooth.subtract_from(1)?.divide(factor)?.add(&smooth)?;
    Ok(select(&medium, &freqs.divide(&scale)?, &freqs)?)
}

fn yarn(dims: i32, base: f64, scaling: &Fields<'_>) -> Result<Kind> {
    let factor = scaling.required_positive("factor")?;
    let original = scaling.positive("original_max_position_embeddings")?.unwrap_or(4096.0);
    let beta_fast = scaling.positive("beta_fast")?.unwrap_or(32.0);
    let beta_slow = scaling.positive("beta_slow")?.unwrap_or(1.0);
    let mscale = scaling.number("mscale")?.unwrap_or(1.0);
    let mscale_all_dim = scaling.number("mscale_all_dim")?.unwrap_or(0.0);

    let correction_dim =
        |rotations: f64| (f64::from(dims) * (original / (rotations * 2.0 * PI)).ln()) / (2.0 * base.ln());
    let low = correction_dim(beta_fast).floor().max(0.0);
    let mut high = correction_dim(beta_slow).ceil().min(f64::from(dims - 1));
    if low == high {
        high += 0.001;
    }
    let attention_scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };

    let extrapolated = wavelengths(dims, base)?;
    let interpolated = extrapolated.multiply(factor)?;
    let ramp = Array::arange(0.0, f64::from(dims / 2), 1.0, Dtype::F32)?.subtract(low)?.divide(high - low)?;
    let (zero, one) = (Array::scalar_int(0, Dtype::F32)?, Array::scalar_int(1, Dtype::F32)?);
    let mask = ramp.clip(Some(&zero), Some(&one))?.subtract_from(1.0)?;
    let blend = interpolated.multiply(&mask)?.add(&extrapolated.multiply(&mask.subtract_from(1)?)?)?;
    let freqs = interpolated.multiply(&extrapolated)?.divide(&blend)?;
    Kind::table(freqs, attention_scale(mscale) / attention_scale(mscale_all_dim))
}

fn longrope(dims: i32, base: f64, scaling: &Fields<'_>, original: f64, max_position: i32) -> Result<Kind> {
    // Required by the reference, which then uses the long factors at every position.
    if scaling.get("short_factor").is_none() {
        return Err(scaling.error("short_factor", "is missing"));
    }
    let factors = match scaling.get("long_factor") {
        Some(v) if v.is_number() => vec![scaling.required_number("long_factor")?],
        _ => scaling.numbers("long_factor")?.ok_or_else(|| scaling.error("long_factor", "is missing"))?,
    };
    if factors.len() != 1 && factors.len() as i64 != i64::from(dims / 2) {
        let message = format!("has {} values, expected {}", factors.len(), dims / 2);
        return Err(scaling.error("long_factor", message));
    }
    if original <= 1.0 {
        return Err(scaling.error("original_max_position_embeddings", "must be greater than 1"));
    }
    let factors: Vec<f32> = factors.iter().map(|&f| f as f32).collect();
    let factors = Array::from_slice(&factors, [factors.len() as i32])?;
    let freqs = factors.multiply(&wavelengths(dims, base)?)?;
    let ratio = f64::from(max_position) / original;
    let input_scale = if ratio <= 1.0 { 1.0 } else { (1.0 + ratio.ln() / original.ln()).sqrt() };
    Kind::table(freqs, input_scale)
}

fn proportional(dims: i32, base: f64, scaling: &Fields<'_>) -> Result<Array> {
    let fraction = scaling.positive("partial_rotary_factor")?.unwrap_or(1.0);
    let factor = scaling.positive("factor")?.unwrap_or(1.0);
    if fraction > 1.0 {
        return Err(scaling.error("partial_rotary_factor", "must not be greater than 1"));
    }
    let rotated = (f64::from(dims) * fraction) as i32;
    let exponents = Array::arange(0.0, f64::from(rotated), 2.0, Dtype::F32)?.divide(dims)?;
    let freqs = exponents.power_of(base)?.multiply(factor)?;
    // An infinite wavelength leaves a channel pair as it is.
    let still = Array::full([(dims - rotated) / 2], f64::INFINITY, Dtype::F32)?;
    Ok(concatenate(&[freqs, still], 0)?)
}
