//! Small checkpoints made without Python, for tests that break them.

mod sparse;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};

use crate::Format;

const HIDDEN: usize = 32;
const LAYERS: usize = 2;
const INTERMEDIATE: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const VOCABULARY: usize = 48;

/// A checkpoint of two layers in float32 with an untied head. All of it can be changed before it is written.
#[derive(Clone, Debug)]
pub struct TinyCheckpoint {
    /// What config.json will hold.
    pub config: Map<String, Value>,
    /// The tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
}

/// A tensor of a [`TinyCheckpoint`].
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its elements, row-major and little-endian.
    pub data: Vec<u8>,
}

impl Tensor {
    /// A tensor whose elements all have the bytes `element`.
    pub fn filled(dtype: Dtype, shape: &[usize], element: &[u8]) -> Self {
        Self { dtype, shape: shape.to_vec(), data: element.repeat(shape.iter().product()) }
    }

    /// Float32 values in [-0.1, 0.1).
    fn random(shape: &[usize], random: &mut impl FnMut() -> u32) -> Self {
        let value = |x: u32| (f64::from(x) / f64::from(1_u32 << 31) - 1.0) as f32 / 10.0;
        let data = (0..shape.iter().product::<usize>()).flat_map(|_| value(random()).to_le_bytes()).collect();
        Self { dtype: Dtype::F32, shape: shape.to_vec(), data }
    }
}

impl TinyCheckpoint {
    /// A llama with an untied head, whose linear layers and embedding are stored in `format`.
    pub fn llama(format: Format) -> Self {
        Self::dense("llama", format)
    }

    /// Model types that [`TinyCheckpoint::dense`] knows.
    pub const DENSE_TYPES: [&'static str; 11] = [
        "gemma",
        "gemma2",
        "glm4",
        "granite",
        "llama",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "starcoder2",
    ];

    /// A dense transformer. Its head is untied where the type allows it.
    pub fn dense(model_type: &str, format: Format) -> Self {
        let mut config = json!({
            "model_type": model_type, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
            "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
            "tie_word_embeddings": false,
        });
        for (field, value) in object(own_fields(model_type)) {
            config[field] = value;
        }
        let mut checkpoint = Self::new(config, format);
        let mut random = random_words();
        let mut matrices = vec![("model.embed_tokens".to_owned(), VOCABULARY, HIDDEN)];
        if !model_type.starts_with("gemma") {
            matrices.push(("lm_head".into(), VOCABULARY, HIDDEN));
        }
        let mut norms = vec![("model.norm".to_owned(), HIDDEN)];
        for layer in 0..LAYERS {
            let path = |name: &str| format!("model.layers.{layer}.{name}");
            matrices.extend(layer_matrices(model_type).into_iter().map(|(name, r, c)| (path(name), r, c)));
            norms.extend(layer_norms(model_type).into_iter().map(|(name, size)| (path(name), size)));
        }
        for (name, rows, columns) in &matrices {
            checkpoint.matrix(name, *rows, *columns, format, &mut random);
        }
        for (name, size) in &norms {
            checkpoint.ones(&format!("{name}.weight"), *size);
        }
        let matrices = matrices.iter().map(|(name, rows, _)| (name, *rows));
        let norms = norms.iter().map(|(name, size)| (name, *size));
        let biases: Vec<_> = match model_type {
            "qwen2" | "glm4" => matrices.filter(|(name, _)| is_qkv(name)).collect(),
            "starcoder2" => matrices.chain(norms).filter(|(name, _)| !is_table(name)).collect(),
            _ => Vec::new(),
        };
        for (name, size) in biases {
            checkpoint.ones(&format!("{name}.bias"), size);
        }
        checkpoint
    }

    /// A Qwen3.5 checkpoint: a layer with linear attention and one with full attention.
    pub fn qwen3_5(format: Format) -> Self {
        let (key_heads, value_heads) = (KV_HEADS, HEADS);
        let values = value_heads * HEAD_DIM;
        let channels = 2 * key_heads * HEAD_DIM + values;
        let config = json!({
            "model_type": "qwen3_5", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
            "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
            "tie_word_embeddings": false, "full_attention_interval": LAYERS, "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads, "linear_key_head_dim": HEAD_DIM,
            "linear_value_head_dim": HEAD_DIM, "linear_conv_kernel_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        });
        let mut checkpoint = Self::new(config, format);
        let mut random = random_words();
        let mut matrix = |name: &str, rows, columns| {
            checkpoint.matrix(&format!("language_model.{name}"), rows, columns, format, &mut random);
        };
        matrix("model.embed_tokens", VOCABULARY, HIDDEN);
        matrix("lm_head", VOCABULARY, HIDDEN);
        for layer in 0..LAYERS {
            let mixer = match layer + 1 == LAYERS {
                true => [
                    ("self_attn.q_proj", 2 * HEADS * HEAD_DIM, HIDDEN),
                    ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
                    ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
                    ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
                ]
                .to_vec(),
                false => [
                    ("linear_attn.in_proj_qkv", channels, HIDDEN),
                    ("linear_attn.in_proj_z", values, HIDDEN),
                    ("linear_attn.in_proj_b", value_heads, HIDDEN),
                    ("linear_attn.in_proj_a", value_heads, HIDDEN),
                    ("linear_attn.out_proj", HIDDEN, values),
                ]
                .to_vec(),
            };
            let mlp = [
                ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
                ("mlp.up_proj", INTERMEDIATE, HIDDEN),
                ("mlp.down_proj", HIDDEN, INTERMEDIATE),
            ];
            for (name, rows, columns) in mixer.into_iter().chain(mlp) {
                matrix(&format!("model.layers.{layer}.{name}"), rows, columns);
            }
        }
        for layer in 0..LAYERS {
            let path = format!("language_model.model.layers.{layer}");
            for name in ["input_layernorm", "post_attention_layernorm"] {
                checkpoint.ones(&format!("{path}.{name}.weight"), HIDDEN);
            }
            if layer + 1 == LAYERS {
                checkpoint.ones(&format!("{path}.self_attn.q_norm.weight"), HEAD_DIM);
                checkpoint.ones(&format!("{path}.self_attn.k_norm.weight"), HEAD_DIM);
            } else {
                checkpoint.ones(&format!("{path}.linear_attn.norm.weight"), HEAD_DIM);
                for (name, shape) in [
                    ("conv1d.weight", &[channels, 4, 1][..]),
                    ("A_log", &[value_heads]),
                    ("dt_bias", &[value_heads]),
                ] {
                    let tensor = Tensor::random(shape, &mut random);
                    checkpoint.tensors.insert(format!("{path}.linear_attn.{name}"), tensor);
                }
            }
        }
        checkpoint.ones("language_model.model.norm.weight", HIDDEN);
        checkpoint
    }

    fn new(config: Value, format: Format) -> Self {
        let mut config = object(config);
        if let Some((mode, bits, group)) = packing(format) {
            let quantization = json!({ "group_size": group, "bits": bits, "mode": mode });
            config.insert("quantization".into(), quantization);
        }
        Self { config, tensors: BTreeMap::new() }
    }

    fn ones(&mut self, name: &str, size: usize) {
        let ones = Tensor::filled(Dtype::F32, &[size], &1_f32.to_le_bytes());
        self.tensors.insert(name.to_owned(), ones);
    }

    fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        columns: usize,
        format: Format,
        random: &mut impl FnMut() -> u32,
    ) {
        let mut insert = |part: &str, tensor| self.tensors.insert(format!("{name}.{part}"), tensor);
        let Some((_, bits, group)) = packing(format) else {
            insert("weight", Tensor::random(&[rows, columns], random));
            return;
        };
        let words = columns * bits / 32;
        let data = (0..rows * words).flat_map(|_| random().to_le_bytes()).collect();
        insert("weight", Tensor { dtype: Dtype::U32, shape: vec![rows, words], data });
        let groups = [rows, columns / group];
        match format {
            Format::Dense => {}
            Format::Affine { .. } => {
                insert("scales", Tensor::random(&groups, random));
                insert("biases", Tensor::random(&groups, random));
            }
            // 2⁻⁷ as a power of two (e8m0), and 2⁻³ in e4m3.
            Format::Mxfp4 | Format::Mxfp8 => {
                drop(insert("scales", Tensor::filled(Dtype::U8, &groups, &[120])))
            }
            Format::Nvfp4 => drop(insert("scales", Tensor::filled(Dtype::U8, &groups, &[0x20]))),
        }
    }

    /// This checkpoint with `key` of config.json set to `value`.
    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.config.insert(key.to_owned(), value);
        self
    }

    /// This checkpoint without `key` in config.json.
    #[must_use]
    pub fn without(mut self, key: &str) -> Self {
        self.config.remove(key);
        self
    }

    /// The tensors with these names as a safetensors file.
    pub fn safetensors<'a>(&'a self, names: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
        let views = names.into_iter().map(|name| {
            let tensor = &self.tensors[name];
            let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data);
            (name, view.unwrap_or_else(|e| panic!("{name}: {e}")))
        });
        safetensors::serialize(views, None).unwrap()
    }

    /// Writes config.json and model.safetensors into `dir`.
    pub fn write(&self, dir: &Path) {
        self.write_config(dir);
        fs::write(dir.join("model.safetensors"), self.safetensors(self.tensors.keys().map(String::as_str)))
            .unwrap();
    }

    /// Writes config.json, two shards and their index into `dir`. The first shard holds the tensors whose
    /// names come first.
    pub fn write_sharded(&self, dir: &Path) {
        self.write_config(dir);
        let names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        let mut weight_map = Map::new();
        for (i, names) in names.chunks(names.len().div_ceil(2)).enumerate() {
            let file = format!("model-0000{}-of-00002.safetensors", i + 1);
            fs::write(dir.join(&file), self.safetensors(names.iter().copied())).unwrap();
            weight_map.extend(names.iter().map(|name| ((*name).to_owned(), file.clone().into())));
        }
        let index = json!({ "metadata": {}, "weight_map": weight_map });
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    fn write_config(&self, dir: &Path) {
        fs::write(dir.join("config.json"), Value::Object(self.config.clone()).to_string()).unwrap();
    }
}

/// The same numbers in each run.
fn random_words() -> impl FnMut() -> u32 {
    let mut state = 1_u64;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    }
}

/// Fields that a type has besides llama's.
fn own_fields(model_type: &str) -> Value {
    match model_type {
        "gemma" => json!({ "head_dim": HEAD_DIM }),
        "gemma2" => json!({
            "head_dim": HEAD_DIM, "query_pre_attn_scalar": 8.0, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }),
        "glm4" => json!({
            "head_dim": HEAD_DIM, "attention_bias": true, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        }),
        "granite" => json!({
            "logits_scaling": 8.0, "attention_multiplier": 0.1, "embedding_multiplier": 12.0,
            "residual_multiplier": 0.2, "attention_bias": false, "mlp_bias": false, "rope_theta": 10000.0,
        }),
        "phi3" => json!({
            "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5,
            "rope_scaling": { "type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0] },
        }),
        "qwen3" => json!({ "head_dim": HEAD_DIM, "rope_theta": 10000.0 }),
        "smollm3" => json!({ "no_rope_layers": [1, 0] }),
        "starcoder2" => json!({ "norm_epsilon": 1e-5 }),
        _ => json!({}),
    }
}

/// Matrices of a layer: name, rows, columns.
fn layer_matrices(model_type: &str) -> Vec<(&'static str, usize, usize)> {
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let mut matrices = match model_type {
        "phi3" => vec![("self_attn.qkv_proj", q + 2 * kv, HIDDEN)],
        _ => vec![
            ("self_attn.q_proj", q, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
        ],
    };
    matrices.push(("self_attn.o_proj", HIDDEN, q));
    matrices.extend(match model_type {
        "starcoder2" => vec![("mlp.c_fc", INTERMEDIATE, HIDDEN), ("mlp.c_proj", HIDDEN, INTERMEDIATE)],
        "phi3" | "glm4" => {
            vec![("mlp.gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("mlp.down_proj", HIDDEN, INTERMEDIATE)]
        }
        _ => vec![
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ],
    });
    matrices
}

/// Norms of a layer: name and size.
fn layer_norms(model_type: &str) -> Vec<(&'static str, usize)> {
    let mut norms = vec![("post_attention_layernorm", HIDDEN)];
    norms.extend(match model_type {
        "olmo2" => vec![
            ("post_feedforward_layernorm", HIDDEN),
            ("self_attn.q_norm", HEADS * HEAD_DIM),
            ("self_attn.k_norm", KV_HEADS * HEAD_DIM),
        ],
        "qwen3" => {
            vec![("input_layernorm", HIDDEN), ("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM)]
        }
        "gemma2" => vec![
            ("input_layernorm", HIDDEN),
            ("pre_feedforward_layernorm", HIDDEN),
            ("post_feedforward_layernorm", HIDDEN),
        ],
        "glm4" => vec![
            ("input_layernorm", HIDDEN),
            ("post_self_attn_layernorm", HIDDEN),
            ("post_mlp_layernorm", HIDDEN),
        ],
        _ => vec![("input_layernorm", HIDDEN)],
    });
    norms
}

fn is_qkv(name: &str) -> bool {
    ["q_proj", "k_proj", "v_proj"].iter().any(|projection| name.ends_with(projection))
}

/// Whether this is the embedding or the head.
fn is_table(name: &str) -> bool {
    ["embed_tokens", "lm_head"].iter().any(|table| name.ends_with(table))
}

/// Mode, bits and group size.
fn packing(format: Format) -> Option<(&'static str, usize, usize)> {
    match format {
        Format::Dense => None,
        Format::Affine { bits, group } => Some(("affine", bits as usize, group as usize)),
        Format::Mxfp4 => Some(("mxfp4", 4, 32)),
        Format::Nvfp4 => Some(("nvfp4", 4, 16)),
        Format::Mxfp8 => Some(("mxfp8", 8, 32)),
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other} is no object"),
    }
}
