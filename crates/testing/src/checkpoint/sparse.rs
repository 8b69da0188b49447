//! Checkpoints with experts.

use std::collections::BTreeMap;

use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{
    HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, Tensor, TinyCheckpoint, VOCABULARY, object,
    packing,
};
use crate::Format;

const EXPERTS: usize = 4;

impl TinyCheckpoint {
    /// A qwen3_moe whose first layer is sparse and whose second is dense.
    pub fn qwen3_moe(format: Format) -> Self {
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
            "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM, "num_experts": EXPERTS, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
            "mlp_only_layers": [1], "moe_intermediate_size": HIDDEN, "norm_topk_prob": true, "rope_theta": 1e4,
            "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
            "tie_word_embeddings": false,
        });
        let mut builder = Builder::new(config, format);
        builder.matrix("model.embed_tokens", &[VOCABULARY, HIDDEN]);
        builder.matrix("lm_head", &[VOCABULARY, HIDDEN]);
        for layer in 0..LAYERS {
            let path = format!("model.layers.{layer}");
            builder.attention(&format!("{path}.self_attn"), HEAD_DIM, ["k_proj", "v_proj"]);
            builder.ones(&format!("{path}.self_attn"), ["q_norm", "k_norm"], HEAD_DIM);
            if layer == 0 {
                builder.matrix(&format!("{path}.mlp.gate"), &[EXPERTS, HIDDEN]);
                builder.mlp(&format!("{path}.mlp.switch_mlp"), &[EXPERTS], HIDDEN);
            } else {
                builder.mlp(&format!("{path}.mlp"), &[], INTERMEDIATE);
            }
            builder.ones(&path, ["input_layernorm", "post_attention_layernorm"], HIDDEN);
        }
        builder.ones("model", ["norm"], HIDDEN);
        builder.checkpoint
    }

    /// [`TinyCheckpoint::qwen3_5`] with experts and a shared one in both layers.
    pub fn qwen3_5_moe(format: Format) -> Self {
        let mut builder = Builder { checkpoint: Self::qwen3_5(format), format, state: 1 };
        let checkpoint = &mut builder.checkpoint;
        checkpoint.tensors.retain(|name, _| !name.contains(".mlp."));
        checkpoint.config.extend(object(json!({
            "model_type": "qwen3_5_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2,
            "moe_intermediate_size": HIDDEN, "shared_expert_intermediate_size": INTERMEDIATE,
        })));
        for layer in 0..LAYERS {
            let mlp = format!("language_model.model.layers.{layer}.mlp");
            builder.matrix(&format!("{mlp}.gate"), &[EXPERTS, HIDDEN]);
            builder.mlp(&format!("{mlp}.switch_mlp"), &[EXPERTS], HIDDEN);
            builder.mlp(&format!("{mlp}.shared_expert"), &[], INTERMEDIATE);
            builder.matrix(&format!("{mlp}.shared_expert_gate"), &[1, HIDDEN]);
        }
        builder.checkpoint
    }

    /// A gemma4 with experts, inputs of layers, and a sliding and a full layer that each give their keys and values
    /// to another. The full ones use keys as values.
    pub fn gemma4(format: Format) -> Self {
        const PER_LAYER: usize = 32;
        let types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"];
        let text = json!({
            "hidden_size": HIDDEN, "num_hidden_layers": types.len(), "intermediate_size": INTERMEDIATE,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "global_head_dim": 2 * HEAD_DIM, "attention_k_eq_v": true, "num_kv_shared_layers": 2,
            "layer_types": types, "sliding_window": 4, "hidden_size_per_layer_input": PER_LAYER,
            "vocab_size_per_layer_input": VOCABULARY, "enable_moe_block": true, "num_experts": EXPERTS,
            "top_k_experts": 2, "moe_intermediate_size": HIDDEN, "max_position_embeddings": 64,
        });
        let config = json!({ "model_type": "gemma4", "vocab_size": VOCABULARY, "text_config": text });
        let mut builder = Builder::new(config, format);
        let model = "language_model.model";
        builder.matrix(&format!("{model}.embed_tokens"), &[VOCABULARY, HIDDEN]);
        let per_layer = types.len() * PER_LAYER;
        builder.matrix(&format!("{model}.embed_tokens_per_layer"), &[VOCABULARY, per_layer]);
        builder.matrix(&format!("{model}.per_layer_model_projection"), &[per_layer, HIDDEN]);
        builder.ones(model, ["per_layer_projection_norm"], PER_LAYER);
        for (layer, kind) in types.iter().enumerate() {
            let path = format!("{model}.layers.{layer}");
            let attention = format!("{path}.self_attn");
            let (sliding, shared) = (*kind == types[0], layer >= 2);
            let head_dim = if sliding { HEAD_DIM } else { 2 * HEAD_DIM };
            match (shared, sliding) {
                (true, _) => builder.attention(&attention, head_dim, []),
                (false, true) => builder.attention(&attention, head_dim, ["k_proj", "v_proj"]),
                (false, false) => builder.attention(&attention, head_dim, ["k_proj"]),
            }
            builder.ones(&attention, ["q_norm"], head_dim);
            if !shared {
                builder.ones(&attention, ["k_norm"], head_dim);
            }
            builder.mlp(&format!("{path}.mlp"), &[], if shared { 2 * INTERMEDIATE } else { INTERMEDIATE });
            builder.matrix(&format!("{path}.router.proj"), &[EXPERTS, HIDDEN]);
            builder.vector(&format!("{path}.router.scale"), HIDDEN);
            builder.vector(&format!("{path}.router.per_expert_scale"), EXPERTS);
            builder.mlp(&format!("{path}.experts.switch_glu"), &[EXPERTS], HIDDEN);
            builder.matrix(&format!("{path}.per_layer_input_gate"), &[PER_LAYER, HIDDEN]);
            builder.matrix(&format!("{path}.per_layer_projection"), &[HIDDEN, PER_LAYER]);
            builder.vector(&format!("{path}.layer_scalar"), 1);
            let norms = [
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm",
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "post_per_layer_input_norm",
            ];
            builder.ones(&path, norms, HIDDEN);
        }
        builder.ones(model, ["norm"], HIDDEN);
        builder.checkpoint
    }
}

/// A checkpoint in the making.
struct Builder {
    checkpoint: TinyCheckpoint,
    format: Format,
    state: u64,
}

impl Builder {
    fn new(config: Value, format: Format) -> Self {
        let mut config = object(config);
        if let Some((mode, bits, group)) = packing(format) {
            let quantization = json!({ "group_size": group, "bits": bits, "mode": mode });
            config.insert("quantization".into(), quantization);
        }
        Self { checkpoint: TinyCheckpoint { config, tensors: BTreeMap::new() }, format, state: 1 }
    }

    fn random(&mut self) -> u32 {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 32) as u32
    }

    fn insert(&mut self, name: String, tensor: Tensor) {
        self.checkpoint.tensors.insert(name, tensor);
    }

    /// Float32 values in [-0.1, 0.1).
    fn floats(&mut self, shape: &[usize]) -> Tensor {
        let value = |x: u32| (f64::from(x) / f64::from(1_u32 << 31) - 1.0) as f32 / 10.0;
        let count = shape.iter().product::<usize>();
        let data = (0..count).flat_map(|_| value(self.random()).to_le_bytes()).collect();
        Tensor { dtype: Dtype::F32, shape: shape.to_vec(), data }
    }

    /// Matrices of the last two of the dimensions `shape`.
    fn matrix(&mut self, name: &str, shape: &[usize]) {
        let Some((_, bits, group)) = packing(self.format) else {
            let weight = self.floats(shape);
            return self.insert(format!("{name}.weight"), weight);
        };
        let (columns, rows) = shape.split_last().expect("a matrix has dimensions");
        let with_last = |last: usize| [rows, &[last]].concat();
        let (packed, groups) = (with_last(columns * bits / 32), with_last(columns / group));
        let data = (0..packed.iter().product::<usize>()).flat_map(|_| self.random().to_le_bytes()).collect();
        self.insert(format!("{name}.weight"), Tensor { dtype: Dtype::U32, shape: packed, data });
        match self.format {
            Format::Dense => {}
            Format::Affine { .. } => {
                for part in ["scales", "biases"] {
                    let values = self.floats(&groups);
                    self.insert(format!("{name}.{part}"), values);
                }
            }
            // 2⁻⁷ as a power of two (e8m0), and 2⁻³ in e4m3.
            Format::Mxfp4 | Format::Mxfp8 => {
                self.insert(format!("{name}.scales"), Tensor::filled(Dtype::U8, &groups, &[120]));
            }
            Format::Nvfp4 => {
                self.insert(format!("{name}.scales"), Tensor::filled(Dtype::U8, &groups, &[0x20]));
            }
        }
    }

    fn vector(&mut self, name: &str, size: usize) {
        let values = self.floats(&[size]);
        self.insert(name.to_owned(), values);
    }

    fn ones<const N: usize>(&mut self, path: &str, names: [&str; N], size: usize) {
        for name in names {
            let ones = Tensor::filled(Dtype::F32, &[size], &1_f32.to_le_bytes());
            self.insert(format!("{path}.{name}.weight"), ones);
        }
    }

    fn attention<const N: usize>(&mut self, path: &str, head_dim: usize, kv_projections: [&str; N]) {
        self.matrix(&format!("{path}.q_proj"), &[HEADS * head_dim, HIDDEN]);
        for name in kv_projections {
            self.matrix(&format!("{path}.{name}"), &[KV_HEADS * head_dim, HIDDEN]);
        }
        self.matrix(&format!("{path}.o_proj"), &[HIDDEN, HEADS * head_dim]);
    }

    /// A gated MLP, or a stack of them.
    fn mlp(&mut self, path: &str, stack: &[usize], width: usize) {
        for (name, rows, columns) in
            [("gate_proj", width, HIDDEN), ("up_proj", width, HIDDEN), ("down_proj", HIDDEN, width)]
        {
            self.matrix(&format!("{path}.{name}"), &[stack, &[rows, columns]].concat());
        }
    }
}
