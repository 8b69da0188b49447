use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use super::*;
use crate::gguf::{
    Tensor, TensorType,
    tests::{Builder, dequantize},
};

const F32: u32 = 0;
const F16: u32 = 1;
const Q4_0: u32 = 2;
const Q4_1: u32 = 3;
const Q8_0: u32 = 8;

const HIDDEN: usize = 64;
const INNER: usize = 96;
const HEADS: usize = 2;
const KV_HEADS: usize = 1;
const HEAD_DIM: usize = 32;
const VOCAB: usize = 8;

/// Data of a tensor: reproducible, every code used, scales finite and small.
fn data(kind: u32, elements: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    let half = |next: &mut dyn FnMut() -> u32| {
        half::f16::from_f32((next() % 2001) as f32 / 1000.0 - 1.0).to_le_bytes()
    };
    let (header, codes) = match kind {
        F32 => {
            return (0..elements)
                .flat_map(|_| (((next() % 513) as f32 - 256.0) / 128.0).to_le_bytes())
                .collect();
        }
        F16 => (1, 0),
        Q4_0 => (1, 16),
        Q4_1 => (2, 16),
        _ => (1, 32),
    };
    let blocks = if kind == F16 { elements } else { elements / 32 };
    let mut out = Vec::new();
    for _ in 0..blocks {
        (0..header).for_each(|_| out.extend(half(&mut next)));
        (0..codes).for_each(|_| out.push(next() as u8));
    }
    out
}

/// A llama model of one layer whose matrices have the given types, in the order of `MATRICES`.
pub(crate) fn llama(kinds: [u32; 8]) -> Builder {
    let mut builder = Builder::default()
        .string("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 128)
        .u32("llama.embedding_length", HIDDEN as u32)
        .u32("llama.feed_forward_length", INNER as u32)
        .u32("llama.attention.head_count", HEADS as u32)
        .u32("llama.attention.head_count_kv", KV_HEADS as u32)
        .u32("llama.rope.dimension_count", HEAD_DIM as u32)
        .f32("llama.rope.freq_base", 100_000.0)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "smollm")
        .bool("tokenizer.ggml.add_bos_token", false)
        .bool("tokenizer.ggml.add_space_prefix", false)
        .strings(
            "tokenizer.ggml.tokens",
            &["<|im_start|>", "<|im_end|>", "<tool>", "a", "b", "Ġ", "ab", "Ġab"],
        )
        .i32s("tokenizer.ggml.token_type", &[3, 3, 4, 1, 1, 1, 1, 1])
        .strings("tokenizer.ggml.merges", &["a b", "Ġ ab"])
        .u32("tokenizer.ggml.bos_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 1)
        .u32("tokenizer.ggml.padding_token_id", 1)
        .string("tokenizer.chat_template", "{{ messages }}");
    for (index, ((name, _, rows, columns), kind)) in MATRICES.into_iter().zip(kinds).enumerate() {
        builder = builder.tensor(name, &[rows, columns], kind, data(kind, rows * columns, index as u32));
    }
    for (index, (name, _)) in NORMS.into_iter().enumerate() {
        builder = builder.tensor(name, &[HIDDEN], F32, data(F32, HIDDEN, 100 + index as u32));
    }
    builder
}

const MATRICES: [(&str, &str, usize, usize); 8] = [
    ("token_embd.weight", "model.embed_tokens", VOCAB, HIDDEN),
    ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
    ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
    ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj", INNER, HIDDEN),
    ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj", INNER, HIDDEN),
    ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj", HIDDEN, INNER),
];

const NORMS: [(&str, &str); 3] = [
    ("output_norm.weight", "model.norm"),
    ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm"),
    ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm"),
];

/// Converts a file into a directory.
fn write(builder: &Builder) -> TempDir {
    let file = builder.build();
    let gguf = Gguf::parse(&file).unwrap();
    let directory = tempfile::tempdir().unwrap();
    Checkpoint::from_gguf(&gguf).unwrap().write(directory.path(), &mut |_| {}).unwrap();
    directory
}

fn error(builder: Builder) -> Error {
    let file = builder.build();
    Checkpoint::from_gguf(&Gguf::parse(&file).unwrap()).unwrap_err()
}

fn json(directory: &TempDir, name: &str) -> Json {
    serde_json::from_slice(&fs::read(directory.path().join(name)).unwrap()).unwrap()
}

/// A module's weight as MLX computes it (`code * scale + bias` in f32), and its bits (none where not quantized).
fn mlx_weight(tensors: &SafeTensors<'_>, module: &str) -> (Vec<f32>, Option<usize>) {
    let tensor = |suffix: &str| tensors.tensor(&format!("{module}.{suffix}"));
    let halves = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks(2).map(|b| half::f16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect()
    };
    let weight = tensor("weight").unwrap();
    match weight.dtype() {
        Dtype::F16 => (halves(weight.data()), None),
        Dtype::F32 => {
            (weight.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(), None)
        }
        _ => {
            let (scales, biases) = (tensor("scales").unwrap(), tensor("biases").unwrap());
            let bits = weight.shape()[1] / scales.shape()[1];
            assert_eq!(weight.dtype(), Dtype::U32);
            assert_eq!((scales.dtype(), biases.dtype()), (Dtype::F16, Dtype::F16));
            let (scales, biases) = (halves(scales.data()), halves(biases.data()));
            let words = weight.data().chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
            let codes = words.flat_map(|word| {
                (0..32 / bits).map(move |i| (word >> (i * bits)) & ((1u64 << bits) - 1) as u32)
            });
            let weight =
                codes.enumerate().map(|(i, code)| code as f32 * scales[i / 32] + biases[i / 32]).collect();
            (weight, Some(bits))
        }
    }
}

/// The rows of a query or key projection in the order of MLX checkpoints.
fn split_pairs(weight: &[f32], columns: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = weight.chunks(columns).collect();
    let heads = rows.chunks(HEAD_DIM);
    let order = heads.flat_map(|head| (0..2).flat_map(move |part| head.iter().skip(part).step_by(2)));
    order.flat_map(|row| row.iter().copied()).collect()
}

/// Checks that every matrix of a converted model has the values of the GGUF file's.
fn assert_lossless(builder: &Builder) {
    let file = builder.build();
    let gguf = Gguf::parse(&file).unwrap();
    let directory = write(builder);
    let bytes = fs::read(directory.path().join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    for (name, module, _, columns) in MATRICES {
        let source: &Tensor<'_> = &gguf.tensors()[name];
        let mut expected = dequantize(source);
        if name.contains("attn_q") || name.contains("attn_k") {
            expected = split_pairs(&expected, columns);
        }
        let (weight, bits) = mlx_weight(&tensors, module);
        assert_eq!(bits, weights::bits(source.dtype), "{name}");
        assert!(weight == expected, "{name} as {:?} differs", source.dtype);
    }
}

#[test]
fn weights_of_every_type_keep_their_values() {
    for kind in [F32, F16, Q4_0, Q4_1, Q8_0] {
        assert_lossless(&llama([kind; 8]));
    }
    assert_lossless(&llama([Q8_0, Q4_0, Q4_1, F16, F32, Q8_0, Q4_1, Q4_0]));
}

#[test]
fn the_header_says_mlx_and_the_data_are_aligned() {
    let directory = write(&llama([Q4_1; 8]));
    let bytes = fs::read(directory.path().join("model.safetensors")).unwrap();
    let (header_len, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "mlx");
    assert_eq!((8 + header_len) % 8, 0);
    let header: Json = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    for (name, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let size = if tensor["dtype"] == "U32" { 4 } else { 2 };
        assert_eq!(tensor["data_offsets"][0].as_u64().unwrap() % size, 0, "{name}");
    }
}

#[test]
fn norms_become_f16_only_where_nothing_is_lost() {
    let exact = llama([Q4_1; 8]);
    let mut inexact = vec![1.0f32; HIDDEN];
    inexact[HIDDEN - 1] = 0.1;
    let data = inexact.iter().flat_map(|value| value.to_le_bytes()).collect();
    let inexact =
        exact.clone().without_tensor("output_norm.weight").tensor("output_norm.weight", &[HIDDEN], F32, data);
    for (builder, norm) in [(exact, Dtype::F16), (inexact, Dtype::F32)] {
        let file = builder.build();
        let gguf = Gguf::parse(&file).unwrap();
        let directory = write(&builder);
        let bytes = fs::read(directory.path().join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        for (name, module) in NORMS {
            assert!(mlx_weight(&tensors, module).0 == dequantize(&gguf.tensors()[name]), "{name}");
        }
        assert_eq!(tensors.tensor("model.norm.weight").unwrap().dtype(), norm);
        assert_eq!(tensors.tensor("model.layers.0.input_layernorm.weight").unwrap().dtype(), Dtype::F16);
    }
}

#[test]
fn config_holds_the_metadata() {
    let directory = write(&llama([Q8_0, Q4_1, Q4_1, Q4_1, Q4_1, Q4_1, Q4_1, Q4_1]));
    let config = json(&directory, "config.json");
    let quantization = serde_json::json!({
        "group_size": 32, "bits": 4, "mode": "affine",
        "model.embed_tokens": { "group_size": 32, "bits": 8, "mode": "affine" },
    });
    for (key, value) in [
        ("model_type", "llama".into()),
        ("hidden_size", HIDDEN.into()),
        ("intermediate_size", INNER.into()),
        ("num_hidden_layers", 1.into()),
        ("num_attention_heads", HEADS.into()),
        ("num_key_value_heads", KV_HEADS.into()),
        ("head_dim", HEAD_DIM.into()),
        ("max_position_embeddings", 128.into()),
        ("rms_norm_eps", 1e-5.into()),
        ("rope_theta", 100_000.0.into()),
        ("vocab_size", VOCAB.into()),
        ("tie_word_embeddings", true.into()),
        ("bos_token_id", 0.into()),
        ("eos_token_id", 1.into()),
        ("quantization", quantization.clone()),
        ("quantization_config", quantization),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert_eq!(json(&directory, "generation_config.json")["eos_token_id"], 1);
}

#[test]
fn a_model_without_quantized_tensors_has_no_quantization() {
    assert_eq!(json(&write(&llama([F16; 8])), "config.json").get("quantization"), None);
    let eight_bits = json(&write(&llama([Q8_0; 8])), "config.json")["quantization"].clone();
    assert_eq!(eight_bits, serde_json::json!({ "group_size": 32, "bits": 8, "mode": "affine" }));
}

#[test]
fn an_untied_head_is_kept() {
    let builder =
        llama([Q4_0; 8]).tensor("output.weight", &[VOCAB, HIDDEN], F16, data(F16, VOCAB * HIDDEN, 7));
    let directory = write(&builder);
    assert_eq!(json(&directory, "config.json")["tie_word_embeddings"], false);
    let bytes = fs::read(directory.path().join("model.safetensors")).unwrap();
    let head = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(head.tensor("lm_head.weight").unwrap().data(), data(F16, VOCAB * HIDDEN, 7));
}

#[test]
fn the_tokenizer_is_rebuilt() {
    let directory = write(&llama([F16; 8]));
    let tokenizer = json(&directory, "tokenizer.json");
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    assert_eq!(vocab.len(), VOCAB);
    assert_eq!((&vocab["<|im_end|>"], &vocab["Ġab"]), (&1.into(), &7.into()));
    assert_eq!(tokenizer["model"]["merges"], serde_json::json!([["a", "b"], ["Ġ", "ab"]]));
    let added: Vec<_> = tokenizer["added_tokens"].as_array().unwrap().iter().collect();
    let summary: Vec<_> =
        added.iter().map(|t| (t["id"].as_u64().unwrap(), t["special"].as_bool().unwrap())).collect();
    assert_eq!(summary, [(0, true), (1, true), (2, false)]);
    let pretokenizers = tokenizer["pre_tokenizer"]["pretokenizers"].as_array().unwrap();
    assert_eq!(
        (&pretokenizers[0]["type"], &pretokenizers[1]["type"]),
        (&"Digits".into(), &"ByteLevel".into())
    );

    let config = json(&directory, "tokenizer_config.json");
    assert_eq!(config["eos_token"], "<|im_end|>");
    assert_eq!(config["bos_token"], "<|im_start|>");
    assert_eq!(config["chat_template"], "{{ messages }}");
    assert_eq!(config["model_max_length"], 128);
}

#[test]
fn the_rebuilt_tokenizer_splits_digits_and_restores_text() {
    let bytes: Vec<char> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    let mut tokens: Vec<String> = ["<|im_start|>", "<|im_end|>", "ab", "Ġab", "12"].map(str::to_owned).into();
    tokens.extend(bytes.iter().map(char::to_string));
    let (tokens, rows): (Vec<&str>, _) = (tokens.iter().map(String::as_str).collect(), tokens.len());
    let types: Vec<i32> = (0..rows).map(|id| if id < 2 { 3 } else { 1 }).collect();
    let builder = ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"]
        .into_iter()
        .fold(llama([F16; 8]), |builder, key| builder.without(key))
        .strings("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .strings("tokenizer.ggml.merges", &["a b", "Ġ ab", "1 2"])
        .without_tensor("token_embd.weight")
        .tensor("token_embd.weight", &[rows, HIDDEN], F16, data(F16, rows * HIDDEN, 0));
    let directory = write(&builder);
    let tokenizer = tokenizers::Tokenizer::from_file(directory.path().join("tokenizer.json")).unwrap();
    let text = "ab 12 ab<|im_end|>\n½ é日本🎉 ab's";
    let encoding = tokenizer.encode(text, true).unwrap();
    assert_eq!(encoding.get_tokens()[..6], ["ab", "Ġ", "1", "2", "Ġab", "<|im_end|>"]);
    assert_eq!(tokenizer.decode(encoding.get_ids(), false).unwrap(), text);
    assert!(!tokenizer.decode(encoding.get_ids(), true).unwrap().contains("im_end"));
}

#[test]
fn inconsistent_tokenizers_are_refused() {
    let with = |key: &str, values: &[&str]| error(llama([F16; 8]).without(key).strings(key, values));
    let tokens = "tokenizer.ggml.tokens";
    let token_types = llama([F16; 8]).without("tokenizer.ggml.token_type");
    let twice = token_types.clone().without(tokens).strings(tokens, &["a", "b", "a"]);
    assert!(error(twice).to_string().contains("\"a\" occurs twice"));
    let many = token_types.without(tokens).strings(tokens, &["1", "2", "3", "4", "5", "6", "7", "8", "9"]);
    assert!(error(many).to_string().contains("9 tokens, but the embedding has 8 rows"));
    for merge in ["ab", "a x", "b a", " a", "a b "] {
        assert!(matches!(with("tokenizer.ggml.merges", &[merge]), Error::Tokenizer { .. }), "{merge:?}");
    }
    let key = "tokenizer.ggml.token_type";
    assert!(matches!(error(llama([F16; 8]).without(key).i32s(key, &[1])), Error::InvalidKey { .. }));
    let key = "tokenizer.ggml.eos_token_id";
    assert!(matches!(error(llama([F16; 8]).without(key).u32(key, 8)), Error::InvalidKey { .. }));
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (key, value) in [
        ("general.architecture", "qwen2"),
        ("llama.rope.scaling.type", "yarn"),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.pre", "llama-bpe"),
    ] {
        let message = error(llama([F16; 8]).without(key).string(key, value)).to_string();
        assert!(message.contains(key) && message.contains(value), "{message}");
    }
    assert!(matches!(error(llama([F16; 8]).u32("llama.expert_count", 8)), Error::Unsupported { .. }));
    let key = "tokenizer.ggml.add_bos_token";
    assert!(matches!(error(llama([F16; 8]).without(key).bool(key, true)), Error::Unsupported { .. }));
}

#[test]
fn missing_and_absurd_metadata_are_refused_by_name() {
    for key in [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
    ] {
        assert_eq!(error(llama([F16; 8]).without(key)), Error::MissingKey { key });
        let message = error(llama([F16; 8]).without(key).string(key, "x")).to_string();
        assert!(message.contains(key), "{message}");
    }
    for (key, value) in [
        ("llama.block_count", 0),
        ("llama.block_count", u32::MAX),
        ("llama.embedding_length", u32::MAX),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 7),
        ("llama.rope.dimension_count", 16),
        ("llama.attention.key_length", 33),
    ] {
        error(llama([F16; 8]).without(key).u32(key, value));
    }
    for value in [f32::NAN, -1.0, 0.0, f32::INFINITY] {
        let key = "llama.attention.layer_norm_rms_epsilon";
        assert!(matches!(error(llama([F16; 8]).without(key).f32(key, value)), Error::InvalidKey { .. }));
    }
}

#[test]
fn missing_unexpected_and_misshapen_tensors_are_refused_by_name() {
    for (name, ..) in MATRICES {
        let tensor = name.to_owned();
        assert_eq!(error(llama([F16; 8]).without_tensor(name)), Error::MissingTensor { tensor });
    }
    let extra = llama([F16; 8]).tensor("rope_freqs.weight", &[16], F32, vec![0; 64]);
    assert_eq!(error(extra), Error::UnexpectedTensor { tensor: "rope_freqs.weight".to_owned() });
    let name = "blk.0.ffn_up.weight";
    let transposed =
        llama([F16; 8]).without_tensor(name).tensor(name, &[HIDDEN, INNER], F16, vec![0; 2 * HIDDEN * INNER]);
    assert!(matches!(error(transposed), Error::Shape { .. }));
    let name = "output_norm.weight";
    let quantized = llama([F16; 8]).without_tensor(name).tensor(name, &[HIDDEN], Q8_0, data(Q8_0, HIDDEN, 1));
    assert_eq!(error(quantized), Error::QuantizedNorm { tensor: name.to_owned() });
}

#[test]
fn scales_without_an_exact_affine_form_are_refused() {
    let replace = |kind: u32, header: &[f32]| {
        let name = "token_embd.weight";
        let mut bytes = data(kind, VOCAB * HIDDEN, 1);
        let block = bytes.len() / (VOCAB * HIDDEN / 32);
        let header: Vec<u8> =
            header.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect();
        bytes[5 * block..5 * block + header.len()].copy_from_slice(&header);
        llama([F16; 8]).without_tensor(name).tensor(name, &[VOCAB, HIDDEN], kind, bytes)
    };
    // 512 * 128 = 65536 is beyond f16; 511.75 * 128 is its largest number.
    for builder in [
        replace(Q8_0, &[512.0]),
        replace(Q4_0, &[8200.0]),
        replace(Q4_0, &[f32::NAN]),
        replace(Q4_1, &[f32::INFINITY, 0.0]),
        replace(Q4_1, &[0.0, f32::NAN]),
    ] {
        assert!(matches!(error(builder), Error::Inexact { row: 2, .. }));
    }
    assert_lossless(&replace(Q8_0, &[511.75]));
    assert_lossless(&replace(Q4_0, &[-8188.0]));
    // The smallest subnormal.
    assert_lossless(&replace(Q8_0, &[2f32.powi(-24)]));
}

#[test]
fn progress_ends_at_the_total() {
    let file = llama([Q4_1; 8]).build();
    let gguf = Gguf::parse(&file).unwrap();
    let checkpoint = Checkpoint::from_gguf(&gguf).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut reports = Vec::new();
    checkpoint.write(directory.path(), &mut |progress| reports.push(progress)).unwrap();
    assert!(reports.is_sorted_by_key(|report| report.done));
    let last = reports.last().unwrap();
    assert_eq!((last.done, last.total), (checkpoint.weights_bytes(), Some(checkpoint.weights_bytes())));
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let file = llama([F16; 8]).build();
    let gguf = Gguf::parse(&file).unwrap();
    let missing = Path::new("/nonexistent/model");
    let error = Checkpoint::from_gguf(&gguf).unwrap().write(missing, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/model/config.json"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the blocks hold, the values survive or the tensor is refused.
    #[test]
    fn arbitrary_blocks_are_lossless_or_refused(
        kind in prop::sample::select(vec![F16, Q4_0, Q4_1, Q8_0]),
        random in prop::collection::vec(any::<u8>(), VOCAB * HIDDEN * 2),
    ) {
        let name = "token_embd.weight";
        let dtype = match kind {
            F16 => TensorType::F16,
            Q4_0 => TensorType::Q4_0,
            Q4_1 => TensorType::Q4_1,
            _ => TensorType::Q8_0,
        };
        let len = VOCAB * HIDDEN / dtype.block_elements() * dtype.block_bytes();
        let mut bytes = random[..len].to_vec();
        if kind != F16 {
            // Half of the cases keep to small scales, or hardly any would be accepted.
            if random[len] % 2 == 0 {
                bytes.chunks_mut(dtype.block_bytes()).for_each(|block| {
                    block[1] &= 0x9f;
                    if kind == Q4_1 {
                        block[3] &= 0x9f;
                    }
                });
            }
        } else {
            // Not-a-number is not equal to itself, which the comparison needs.
            bytes.chunks_mut(2).for_each(|element| element[1] &= 0xbf);
        }
        let builder = llama([Q4_1; 8]).without_tensor(name).tensor(name, &[VOCAB, HIDDEN], kind, bytes);
        let file = builder.build();
        match Checkpoint::from_gguf(&Gguf::parse(&file).unwrap()) {
            Ok(_) => assert_lossless(&builder),
            Err(error) => prop_assert!(matches!(error, Error::Inexact { .. }), "{error}"),
        }
    }
}
