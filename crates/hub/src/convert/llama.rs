//! The llama architecture: metadata to config, tensor names to module paths.
//!
//! GGUF's keys and tensor names are those of the `llama` architecture in gguf-py's constants; the module paths
//! are those of mlx-lm's `models/llama.py`.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::{
    Error, optional, required,
    weights::{GROUP_SIZE, RowOrder, Weight, bits},
};
use crate::gguf::{Gguf, Tensor, Value};

const POSITIVE: &str = "a positive integer";

/// What config.json says of the graph.
#[derive(Debug)]
pub(crate) struct Config {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    rope_theta: f32,
    pub(crate) vocab_size: usize,
    tie_word_embeddings: bool,
    quantization: Option<Json>,
}

impl Config {
    pub(crate) fn to_json(&self) -> Map<String, Json> {
        let mut map = Map::new();
        let mut set = |key: &str, value: Json| map.insert(key.to_owned(), value);
        set("architectures", json!(["LlamaForCausalLM"]));
        set("model_type", "llama".into());
        set("hidden_size", self.hidden_size.into());
        set("intermediate_size", self.intermediate_size.into());
        set("num_hidden_layers", self.num_hidden_layers.into());
        set("num_attention_heads", self.num_attention_heads.into());
        set("num_key_value_heads", self.num_key_value_heads.into());
        set("head_dim", self.head_dim.into());
        set("max_position_embeddings", self.max_position_embeddings.into());
        set("rms_norm_eps", shortest(self.rms_norm_eps));
        set("rope_theta", shortest(self.rope_theta));
        set("rope_scaling", Json::Null);
        set("vocab_size", self.vocab_size.into());
        set("tie_word_embeddings", self.tie_word_embeddings.into());
        set("attention_bias", false.into());
        set("mlp_bias", false.into());
        set("hidden_act", "silu".into());
        set("dtype", "float16".into());
        if let Some(quantization) = &self.quantization {
            set("quantization", quantization.clone());
            set("quantization_config", quantization.clone());
        }
        map
    }
}

/// The float whose decimal form is the shortest that names `value` among f32s: 1e-5, not 9.999999747378752e-6.
fn shortest(value: f32) -> Json {
    value.to_string().parse::<f64>().unwrap_or(value.into()).into()
}

/// Reads the config and plans every tensor.
pub(crate) fn convert<'a>(gguf: &'a Gguf<'a>) -> Result<(Config, Vec<(String, Weight<'a>)>), Error> {
    supported(gguf, "general.architecture", "llama", Some("absent"))?;
    supported(gguf, "llama.rope.scaling.type", "none", None)?;
    if let Some(experts) =
        optional(gguf, "llama.expert_count", "an integer", Value::as_u64)?.filter(|&n| n > 0)
    {
        let value = experts.to_string();
        return Err(Error::Unsupported { key: "llama.expert_count", value, supported: "0" });
    }

    let hidden_size = required(gguf, "llama.embedding_length", POSITIVE, positive)?;
    let num_attention_heads = required(gguf, "llama.attention.head_count", POSITIVE, positive)?;
    let num_key_value_heads =
        optional(gguf, "llama.attention.head_count_kv", "a positive divisor of head_count", |value| {
            positive(value).filter(|&heads| num_attention_heads % heads == 0)
        })?
        .unwrap_or(num_attention_heads);
    let head_dim = match optional(gguf, "llama.attention.key_length", POSITIVE, positive)? {
        Some(length) => length,
        None if hidden_size % num_attention_heads == 0 => hidden_size / num_attention_heads,
        None => {
            let expected = "a divisor of embedding_length";
            return Err(Error::InvalidKey { key: "llama.attention.head_count", expected });
        }
    };
    if head_dim % 2 != 0 {
        return Err(Error::InvalidKey { key: "llama.attention.key_length", expected: "an even head size" });
    }
    for key in ["llama.rope.dimension_count", "llama.attention.value_length"] {
        optional(gguf, key, "the size of a head", |value| positive(value).filter(|&size| size == head_dim))?;
    }
    let float = |value: &Value<'_>| match value {
        Value::F32(value) if value.is_finite() && *value > 0.0 => Some(*value),
        _ => None,
    };
    let mut config = Config {
        hidden_size,
        intermediate_size: required(gguf, "llama.feed_forward_length", POSITIVE, positive)?,
        num_hidden_layers: required(gguf, "llama.block_count", POSITIVE, positive)?,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        max_position_embeddings: required(gguf, "llama.context_length", POSITIVE, positive)?,
        rms_norm_eps: required(gguf, "llama.attention.layer_norm_rms_epsilon", "a positive f32", float)?,
        rope_theta: optional(gguf, "llama.rope.freq_base", "a positive f32", float)?.unwrap_or(10_000.0),
        vocab_size: gguf
            .tensors()
            .get("token_embd.weight")
            .and_then(|t| t.shape.first())
            .copied()
            .unwrap_or(0),
        tie_word_embeddings: !gguf.tensors().contains_key("output.weight"),
        quantization: None,
    };

    let mut plan =
        Plan { remaining: gguf.tensors().iter().map(|(k, v)| (*k, v)).collect(), ..Plan::default() };
    plan.model(&config)?;
    if let Some(tensor) = plan.remaining.keys().next() {
        return Err(Error::UnexpectedTensor { tensor: (*tensor).to_owned() });
    }
    config.quantization = quantization(&plan.quantized);
    Ok((config, plan.weights))
}

/// The `quantization` entry for modules and their bits: 4 bits at the top where any module has them, and an
/// override for each module that differs.
fn quantization(modules: &[(String, usize)]) -> Option<Json> {
    let bits = modules.iter().map(|(_, bits)| *bits).min()?;
    let mut map = Map::from_iter([
        ("group_size".to_owned(), GROUP_SIZE.into()),
        ("bits".to_owned(), bits.into()),
        ("mode".to_owned(), "affine".into()),
    ]);
    for (module, bits) in modules.iter().filter(|(_, other)| *other != bits) {
        map.insert(module.clone(), json!({ "group_size": GROUP_SIZE, "bits": bits, "mode": "affine" }));
    }
    Some(map.into())
}

/// Plans tensors and keeps account of those not planned yet.
#[derive(Default)]
struct Plan<'a> {
    remaining: BTreeMap<&'a str, &'a Tensor<'a>>,
    weights: Vec<(String, Weight<'a>)>,
    quantized: Vec<(String, usize)>,
}

impl<'a> Plan<'a> {
    fn model(&mut self, config: &Config) -> Result<(), Error> {
        let Config { hidden_size: hidden, intermediate_size: inner, head_dim, .. } = *config;
        let too_large = Error::InvalidKey { key: "llama.attention.head_count", expected: "a smaller value" };
        let width = |heads: usize| heads.checked_mul(head_dim).ok_or(too_large.clone());
        let (query, key_value) = (width(config.num_attention_heads)?, width(config.num_key_value_heads)?);
        let split = RowOrder::SplitPairs { head_dim };
        use RowOrder::Stored;

        self.matrix("token_embd", "model.embed_tokens", [config.vocab_size, hidden], Stored)?;
        for layer in 0..config.num_hidden_layers {
            let from = |name: &str| format!("blk.{layer}.{name}");
            let to = |name: &str| format!("model.layers.{layer}.{name}");
            self.norm(&from("attn_norm"), &to("input_layernorm"), hidden)?;
            self.matrix(&from("attn_q"), &to("self_attn.q_proj"), [query, hidden], split)?;
            self.matrix(&from("attn_k"), &to("self_attn.k_proj"), [key_value, hidden], split)?;
            self.matrix(&from("attn_v"), &to("self_attn.v_proj"), [key_value, hidden], Stored)?;
            self.matrix(&from("attn_output"), &to("self_attn.o_proj"), [hidden, query], Stored)?;
            self.norm(&from("ffn_norm"), &to("post_attention_layernorm"), hidden)?;
            self.matrix(&from("ffn_gate"), &to("mlp.gate_proj"), [inner, hidden], Stored)?;
            self.matrix(&from("ffn_up"), &to("mlp.up_proj"), [inner, hidden], Stored)?;
            self.matrix(&from("ffn_down"), &to("mlp.down_proj"), [hidden, inner], Stored)?;
        }
        self.norm("output_norm", "model.norm", hidden)?;
        if !config.tie_word_embeddings {
            self.matrix("output", "lm_head", [config.vocab_size, hidden], Stored)?;
        }
        Ok(())
    }

    fn matrix(&mut self, name: &str, module: &str, shape: [usize; 2], rows: RowOrder) -> Result<(), Error> {
        let (name, tensor) = self.take(name, &shape)?;
        if let Some(bits) = bits(tensor.dtype) {
            self.quantized.push((module.to_owned(), bits));
        }
        self.weights.extend(Weight::convert(name, module, tensor, rows)?);
        Ok(())
    }

    fn norm(&mut self, name: &str, module: &str, size: usize) -> Result<(), Error> {
        let (name, tensor) = self.take(name, &[size])?;
        if bits(tensor.dtype).is_some() {
            return Err(Error::QuantizedNorm { tensor: name.to_owned() });
        }
        self.weights.extend(Weight::convert(name, module, tensor, RowOrder::Stored)?);
        Ok(())
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<(&'a str, &'a Tensor<'a>), Error> {
        let name = format!("{name}.weight");
        let Some((name, tensor)) = self.remaining.remove_entry(name.as_str()) else {
            return Err(Error::MissingTensor { tensor: name });
        };
        if tensor.shape != shape {
            return Err(Error::Shape {
                tensor: name.to_owned(),
                expected: shape.to_vec(),
                actual: tensor.shape.clone(),
            });
        }
        Ok((name, tensor))
    }
}

fn positive(value: &Value<'_>) -> Option<usize> {
    value.as_u64().and_then(|value| usize::try_from(value).ok()).filter(|&value| value > 0)
}

/// Refuses a string other than `only`. `absent` stands for the value where the key is absent; none means that
/// the key may be.
pub(super) fn supported(
    gguf: &Gguf<'_>,
    key: &'static str,
    only: &'static str,
    absent: Option<&str>,
) -> Result<(), Error> {
    let value = optional(gguf, key, "a string", Value::as_str)?;
    match value.or(absent) {
        Some(value) if value != only => {
            Err(Error::Unsupported { key, value: value.to_owned(), supported: only })
        }
        _ => Ok(()),
    }
}
