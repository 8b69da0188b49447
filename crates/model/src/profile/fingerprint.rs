//! Which artifact a checkpoint is, and which graph its config asks for.

use std::fmt;
use std::path::{Path, absolute};
use std::str::FromStr;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::ProfileError;
use crate::checkpoint::read_json;
use crate::config::show;
use crate::{Checkpoint, Error, Fields, Result};

/// The identity of a published artifact, weights included: `hf:owner/name@revision`, or whatever else the
/// caller vouches for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArtifactFingerprint(String);

impl ArtifactFingerprint {
    /// The artifact whose snapshot in a Hugging Face cache `dir` is or is in:
    /// `…/models--OWNER--NAME/snapshots/REVISION`, the revision being a commit. Where the cache lies does not
    /// matter. Other directories have no identity: their contents may change.
    pub fn from_path(dir: &Path) -> Option<Self> {
        let dir = absolute(dir).ok()?;
        let path = dir.to_string_lossy();
        let parts: Vec<&str> = path.split(['/', '\\']).collect();
        let snapshot = |parts: &[&str]| {
            let [repository, snapshots, revision] = parts else { return None };
            let is_revision =
                (40..=64).contains(&revision.len()) && revision.bytes().all(|b| b.is_ascii_hexdigit());
            let (prefix, repository) = repository.split_at_checked("models--".len())?;
            (prefix.eq_ignore_ascii_case("models--")
                && snapshots.eq_ignore_ascii_case("snapshots")
                && is_revision)
                .then(|| (repository.to_owned(), revision.to_ascii_lowercase()))
        };
        let (repository, revision) = parts.windows(3).find_map(snapshot)?;
        let (owner, name) = repository.split_once("--")?;
        if owner.is_empty() || name.is_empty() {
            return None;
        }
        format!("hf:{owner}/{name}@{revision}").parse().ok()
    }

    /// The fingerprint that a built-in profile states.
    pub(super) fn known(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl FromStr for ArtifactFingerprint {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        if text.is_empty() || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(ProfileError::ArtifactFingerprint);
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for ArtifactFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A digest of the config fields that shape a graph: 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigFingerprint([u8; 8]);

impl ConfigFingerprint {
    /// The fingerprint of a checkpoint's config.json and, if there is one, its kv_config.json.
    ///
    /// # Errors
    /// When a field that counts has a value of the wrong kind, or kv_config.json can't be read.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let digest = Sha256::digest(canonical(checkpoint)?);
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&digest[..8]);
        Ok(Self(bytes))
    }

    /// The fingerprint with this value, most significant digit first.
    pub(super) const fn from_u64(value: u64) -> Self {
        Self(value.to_be_bytes())
    }
}

impl FromStr for ConfigFingerprint {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        match u64::from_str_radix(text, 16) {
            Ok(value) if text.len() == 16 && text.bytes().all(digit) => Ok(Self::from_u64(value)),
            _ => Err(ProfileError::ConfigFingerprint),
        }
    }
}

impl fmt::Display for ConfigFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

/// What a family's configs mean where they are silent.
#[derive(Default)]
struct Defaults {
    hidden: Option<i32>,
    heads: Option<i32>,
    kv_heads: Option<i32>,
    global_kv_heads: Option<i32>,
    head_dim: Option<i32>,
    global_head_dim: Option<i32>,
    layer_types: Vec<&'static str>,
    sliding_window: i32,
    softcap: Option<f64>,
    moe: bool,
    experts: i32,
    top_k: i32,
}

impl Defaults {
    fn of(model_type: &str, text: &Fields<'_>) -> Result<Self> {
        const FULL: &str = "full_attention";
        const SLIDING: &str = "sliding_attention";
        let all_full = || -> Result<_> { Ok(vec![FULL; text.layers()?.unwrap_or(0) as usize]) };
        Ok(match model_type {
            "llama" => Self { layer_types: all_full()?, ..Self::default() },
            // Its head_dim is the width of the part without positions only.
            "glm_moe_dsa" => {
                let parts = text.size("qk_nope_head_dim")?.zip(text.size("qk_rope_head_dim")?);
                let head_dim = text.size("qk_head_dim")?.or(parts.map(|(nope, rope)| nope + rope));
                Self { layer_types: all_full()?, head_dim, moe: true, ..Self::default() }
            }
            "diffusion_gemma" => Self {
                hidden: Some(2816),
                heads: Some(16),
                kv_heads: Some(8),
                global_kv_heads: Some(2),
                head_dim: Some(256),
                global_head_dim: Some(512),
                layer_types: [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL].repeat(5),
                sliding_window: 1024,
                softcap: Some(30.0),
                moe: true,
                experts: 128,
                top_k: 8,
            },
            _ => Self::default(),
        })
    }
}

/// The text whose digest is the fingerprint: compact JSON as JavaScript writes it, in which fields that are
/// absent and have no default are left out.
fn canonical(checkpoint: &Checkpoint) -> Result<String> {
    let model_type = checkpoint.model_type()?;
    let config = checkpoint.config();
    let text = config.object("text_config")?.unwrap_or(config);
    let defaults = Defaults::of(model_type, &text)?;

    let hidden = text.size("hidden_size")?.or(defaults.hidden);
    let heads = text.size("num_attention_heads")?.or(defaults.heads);
    let kv_heads = text.size("num_key_value_heads")?.or(defaults.kv_heads);
    let global_kv_heads = text.size("num_global_key_value_heads")?.or(defaults.global_kv_heads).or(kv_heads);
    let stated_head_dim = match model_type {
        "glm_moe_dsa" => None,
        _ => text.size("head_dim")?,
    };
    let head_dim = stated_head_dim.or(defaults.head_dim).or(hidden.zip(heads).map(|(h, n)| h / n));
    // 0 is head_dim in the reference, but stays 0 here.
    let global_head_dim = text.count("global_head_dim")?.or(defaults.global_head_dim).or(head_dim);
    let layer_types = text.texts("layer_types")?.unwrap_or(defaults.layer_types);
    let moe = text.flag("enable_moe_block")?.unwrap_or(defaults.moe);
    let experts = text.count("num_experts")?.or(text.count("n_routed_experts")?).unwrap_or(defaults.experts);
    let top_k = text.count("top_k_experts")?.or(text.count("num_experts_per_tok")?).unwrap_or(defaults.top_k);
    let softcap = text.number("final_logit_softcapping")?.or(defaults.softcap);

    let number = |n: i32| Some(n.to_string());
    let or_null = |text: Option<String>| Some(text.unwrap_or_else(|| "null".into()));
    let fields = [
        ("layerTypes", Some(Value::from(layer_types).to_string())),
        ("hiddenSize", hidden.and_then(number)),
        ("headDim", or_null(head_dim.and_then(number))),
        ("globalHeadDim", or_null(global_head_dim.and_then(number))),
        ("numAttentionHeads", heads.and_then(number)),
        ("numKeyValueHeads", kv_heads.and_then(number)),
        ("numGlobalKeyValueHeads", global_kv_heads.and_then(number)),
        ("attentionKEqV", Some(text.flag("attention_k_eq_v")?.unwrap_or(false).to_string())),
        ("numKvSharedLayers", number(text.count("num_kv_shared_layers")?.unwrap_or(0))),
        ("enableMoeBlock", Some(moe.to_string())),
        ("numExperts", number(if moe { experts } else { 0 })),
        ("topKExperts", number(if moe { top_k } else { 0 })),
        ("hiddenSizePerLayerInput", number(text.count("hidden_size_per_layer_input")?.unwrap_or(0))),
        ("slidingWindow", number(text.count("sliding_window")?.unwrap_or(defaults.sliding_window))),
        ("finalLogitSoftcapping", or_null(softcap.map(javascript_number))),
        ("kvQuant", or_null(kv_quant(checkpoint)?)),
    ];
    let fields: Vec<String> =
        fields.into_iter().filter_map(|(key, value)| Some(format!("\"{key}\":{}", value?))).collect();
    Ok(format!("{{{}}}", fields.join(",")))
}

/// The entries of kv_config.json: which layers keep keys and values quantized, and how.
fn kv_quant(checkpoint: &Checkpoint) -> Result<Option<String>> {
    let path = checkpoint.dir().join("kv_config.json");
    let Some(value) = read_json(&path)? else { return Ok(None) };
    let Value::Array(entries) = &value else { return Err(Error::file(&path, "is not a JSON list")) };
    let entries = entries.iter().enumerate().map(|(i, entry)| {
        let Value::Object(map) = entry else {
            return Err(Error::file(&path, format!("entry {i}: expected an object, got {}", show(entry))));
        };
        let fields = Fields::within(&path, format!("[{i}]."), map);
        let required = |field: &str| fields.count(field)?.ok_or_else(|| fields.error(field, "is missing"));
        let (layer, bits) = (required("layer_idx")?, required("bits")?);
        let group = fields.count("group_size")?.unwrap_or(64);
        Ok(format!("{{\"layerIdx\":{layer},\"bits\":{bits},\"groupSize\":{group}}}"))
    });
    Ok(Some(format!("[{}]", entries.collect::<Result<Vec<_>>>()?.join(","))))
}

/// A finite number as JavaScript prints it: the shortest digits that read back as it, without a fraction
/// that is zero, and with an exponent only below 1e-6 and from 1e21 on.
fn javascript_number(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let sign = if value < 0.0 { "-" } else { "" };
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    // The value is 0.DIGITS × 10^point.
    let point = exponent.parse::<i32>().unwrap_or(0) + 1;
    let count = digits.len() as i32;
    let unsigned = match point {
        1..=21 if count <= point => digits + &"0".repeat((point - count) as usize),
        1..=21 => format!("{}.{}", &digits[..point as usize], &digits[point as usize..]),
        -5..=0 => format!("0.{}{digits}", "0".repeat(-point as usize)),
        _ => {
            let exponent = point - 1;
            let plus = if exponent > 0 { "+" } else { "" };
            match digits.split_at(1) {
                (first, "") => format!("{first}e{plus}{exponent}"),
                (first, rest) => format!("{first}.{rest}e{plus}{exponent}"),
            }
        }
    };
    format!("{sign}{unsigned}")
}
