use std::collections::BTreeMap;

use russet_mlx::{Quantization, QuantizationMode};
use serde_json::Value;

use crate::{Fields, Result};

/// The `quantization` object of a config: defaults and per-module choices.
#[derive(Clone, Debug)]
pub struct QuantizationConfig {
    default: Quantization,
    modules: BTreeMap<String, Option<Quantization>>,
}

impl QuantizationConfig {
    /// Reads `quantization`, or the quantization methods of other tools that keep weights in MLX's
    /// layout from `quantization_config`, or from that of the text model; `None` for a dense checkpoint.
    ///
    /// # Errors
    /// For unknown modes and methods, and for group sizes and bit widths that MLX does not have.
    pub fn from_config(config: &Fields<'_>) -> Result<Option<Self>> {
        if let Some(object) = config.object("quantization")? {
            return Self::parse(&object).map(Some);
        }
        let own = config.object("quantization_config")?;
        let text = config.object("text_config")?;
        let of_text = text.map(|text| text.object("quantization_config")).transpose()?.flatten();
        let Some(object) = own.or(of_text) else { return Ok(None) };
        let mode = match object.required_text("quant_method")? {
            "mxfp4" => QuantizationMode::Mxfp4,
            "mxfp8" => QuantizationMode::Mxfp8,
            // Power-of-two scales over 32 × 32 blocks are mxfp8.
            "fp8"
                if object.text("scale_fmt")? == Some("ue8m0")
                    && object.numbers("weight_block_size")?.as_deref() == Some(&[32.0, 32.0]) =>
            {
                QuantizationMode::Mxfp8
            }
            method => {
                return Err(object.error(
                    "quant_method",
                    format!(
                        "'{}' is not supported; convert the checkpoint to MLX's format first",
                        method.escape_debug()
                    ),
                ));
            }
        };
        let default = defaults(mode);
        Ok(Some(Self { default, modules: BTreeMap::new() }))
    }

    fn parse(object: &Fields<'_>) -> Result<Self> {
        let default = parameters(object)?;
        let mut modules = BTreeMap::new();
        for (path, value) in object.iter() {
            if matches!(path, "group_size" | "bits" | "mode") {
                continue;
            }
            let choice = match value {
                Value::Bool(true) => Some(default),
                Value::Bool(false) => None,
                Value::Object(_) => object.object(path)?.as_ref().map(parameters).transpose()?,
                // Other scalars are notes of conversion tools, such as "quant_method".
                _ => continue,
            };
            modules.insert(path.to_owned(), choice);
        }
        Ok(Self { default, modules })
    }

    /// The config-wide default.
    pub fn default_quantization(&self) -> Quantization {
        self.default
    }

    /// The modules that the config names, with their packing; `None` for dense ones.
    pub fn modules(&self) -> impl Iterator<Item = (&str, Option<Quantization>)> {
        self.modules.iter().map(|(path, q)| (path.as_str(), *q))
    }

    /// The choice that the config makes for the module `path`: `None` when it names no such module,
    /// `Some(None)` when it leaves the module dense.
    pub fn module(&self, path: &str) -> Option<Option<Quantization>> {
        self.modules.get(path).copied()
    }
}

fn defaults(mode: QuantizationMode) -> Quantization {
    let (group_size, bits) = match mode {
        QuantizationMode::Affine => (64, 4),
        QuantizationMode::Mxfp4 => (32, 4),
        QuantizationMode::Mxfp8 => (32, 8),
        QuantizationMode::Nvfp4 => (16, 4),
    };
    Quantization { group_size, bits, mode }
}

/// Group size, bits and mode of one object; what is missing takes the mode's default.
fn parameters(object: &Fields<'_>) -> Result<Quantization> {
    let mode = match object.text("mode")? {
        Some(name) => name.parse().map_err(|e: russet_mlx::Error| object.error("mode", e.to_string()))?,
        None => QuantizationMode::Affine,
    };
    let default = defaults(mode);
    let quantization = Quantization {
        group_size: object.size("group_size")?.unwrap_or(default.group_size),
        bits: object.size("bits")?.unwrap_or(default.bits),
        mode,
    };
    check(quantization).map_err(|(field, message)| object.error(field, message))?;
    Ok(quantization)
}

fn check(q: Quantization) -> std::result::Result<(), (&'static str, String)> {
    let (groups, bits): (&[i32], &[i32]) = match q.mode {
        QuantizationMode::Affine => (&[32, 64, 128], &[2, 3, 4, 5, 6, 8]),
        QuantizationMode::Mxfp4 => (&[32], &[4]),
        QuantizationMode::Mxfp8 => (&[32], &[8]),
        QuantizationMode::Nvfp4 => (&[16], &[4]),
    };
    if !groups.contains(&q.group_size) {
        return Err(("group_size", format!("{} is not one of {groups:?} of mode {}", q.group_size, q.mode)));
    }
    if !bits.contains(&q.bits) {
        return Err(("bits", format!("{} is not one of {bits:?} of mode {}", q.bits, q.mode)));
    }
    Ok(())
}

/// The packing of a module that the config does not name, from the shapes of its tensors
/// (`mlx_lm.utils.infer_quant_config`).
///
/// `columns` is the last dimension of the unquantized weight, `packed` that of the packed weight,
/// `groups` that of the scales.
pub(crate) fn infer(
    columns: i32,
    packed: i32,
    groups: i32,
    float_scales: bool,
) -> std::result::Result<Quantization, String> {
    if groups < 1 || columns < 1 {
        return Err("has empty scales".into());
    }
    let group_size = columns / groups;
    let bits = i64::from(packed) * 32 / i64::from(columns);
    let bits = i32::try_from(bits).unwrap_or(i32::MAX);
    let mode = match (float_scales, bits, group_size) {
        (true, ..) => QuantizationMode::Affine,
        (false, 4, 16) => QuantizationMode::Nvfp4,
        (false, 4, 32) => QuantizationMode::Mxfp4,
        (false, 8, 32) => QuantizationMode::Mxfp8,
        _ => return Err(format!("has scales of no known mode: {bits} bits, group size {group_size}")),
    };
    let quantization = Quantization { group_size, bits, mode };
    check(quantization).map_err(|(field, message)| format!("{field} {message}"))?;
    Ok(quantization)
}
