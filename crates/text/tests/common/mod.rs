//! Small tokenizers of each kind, written as checkpoint folders.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(missing_docs, reason = "test support")]

use std::path::Path;

use russet_text::Tokenizer;
use serde_json::{Map, Value, json};

/// A folder that holds a tokenizer, and the tokenizer loaded from it.
pub(crate) struct Checkpoint {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) tokenizer: Tokenizer,
}

impl Checkpoint {
    pub(crate) fn new(tokenizer: &Value, config: &Value) -> Self {
        Self::with_template(tokenizer, config, None)
    }

    pub(crate) fn with_template(tokenizer: &Value, config: &Value, template: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "tokenizer.json", &tokenizer.to_string());
        write(folder.path(), "tokenizer_config.json", &config.to_string());
        // Transformers looks for it; nothing in it matters for the text.
        write(folder.path(), "config.json", r#"{"model_type": "llama"}"#);
        if let Some(template) = template {
            write(folder.path(), "chat_template.jinja", template);
        }
        let tokenizer = Tokenizer::from_dir(folder.path()).unwrap();
        Self { folder, tokenizer }
    }
}

pub(crate) fn write(folder: &Path, name: &str, contents: &str) {
    std::fs::write(folder.join(name), contents).unwrap();
}

/// GPT-2's stand-in character for each byte.
pub(crate) fn byte_level(bytes: &[u8]) -> String {
    let keeps = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let stand_in = |byte: u8| {
        let before = (0..byte).filter(|other| !keeps(*other)).count();
        let code = if keeps(byte) { u32::from(byte) } else { 0x100 + u32::try_from(before).unwrap() };
        char::from_u32(code).unwrap()
    };
    bytes.iter().map(|byte| stand_in(*byte)).collect()
}

/// Ids in order, starting after those that exist.
fn extend(vocab: &mut Map<String, Value>, tokens: impl IntoIterator<Item = String>) {
    for token in tokens {
        let id = vocab.len();
        vocab.entry(token).or_insert(id.into());
    }
}

fn added(vocab: &Map<String, Value>, tokens: &[&str]) -> Vec<Value> {
    let next = vocab.len();
    let new: Vec<_> = tokens.iter().filter(|token| !vocab.contains_key(**token)).collect();
    tokens
        .iter()
        .map(|token| {
            let id = vocab.get(*token).cloned().unwrap_or_else(|| {
                (next + new.iter().position(|other| *other == token).unwrap()).into()
            });
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": token.starts_with("<|") || token.starts_with("<s") || *token == "</s>",
            })
        })
        .collect()
}

/// Byte-level BPE as in GPT-2, Llama 3 and Qwen; some tokens begin or end within a character.
pub(crate) fn byte_level_bpe(decoder: &Value) -> Value {
    let mut vocab = Map::new();
    extend(&mut vocab, (0..=255).map(|byte| byte_level(&[byte])));
    let mut merges = Vec::new();
    let pairs: [(&[u8], &[u8]); 12] = [
        (b" ", b"t"),
        (b"h", b"e"),
        (b" t", b"he"),
        (b" ", b" "),
        (b"\n", b"\n"),
        (b"\xc3", b"\xa9"),
        (b"\xe2", b"\x82"),
        (b"\xe2\x82", b"\xac"),
        (b"\xf0", b"\x9f"),
        (b"\xf0\x9f", b"\x98"),
        (b"a", b"\xc3"),
        (b"\n", b"\xe2"),
    ];
    for (a, b) in pairs {
        merges.push(json!([byte_level(a), byte_level(b)]));
        extend(&mut vocab, [byte_level(&[a, b].concat())]);
    }
    let specials = ["<|end|>", "<|start|>", "<think>", "</think>", "日本", "\u{fffd}"];
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added(&vocab, &specials),
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}

pub(crate) fn byte_level_decoder() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
}

pub(crate) fn byte_level_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|end|>", "special": true},
        "clean_up_tokenization_spaces": false, "add_bos_token": true,
    })
}

/// SentencePiece BPE with byte fallback, as in Llama 2 (with `strip`) and Gemma (without).
pub(crate) fn sentencepiece(decoder: &Value, prepend: bool) -> Value {
    let mut vocab = Map::new();
    extend(&mut vocab, ["<unk>", "<s>", "</s>"].map(String::from));
    extend(&mut vocab, (0..=255).map(|byte| format!("<0x{byte:02X}>")));
    extend(&mut vocab, "▁abcdefghijklmnopqrstuvwxyzABC.,:;!?'\n{}[]()日é€\u{fffd}".chars().map(String::from));
    let mut merges = Vec::new();
    for (a, b) in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁"), ("a", "▁")] {
        merges.push(json!([a, b]));
        extend(&mut vocab, [format!("{a}{b}")]);
    }
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let normalizer = if prepend {
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]})
    } else {
        replace
    };
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "<unk>",
        },
        "added_tokens": added(&vocab, &["<unk>", "<s>", "</s>", "<|channel>", "<channel|>"]),
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}

pub(crate) fn sentencepiece_decoder(strip: bool) -> Value {
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if strip {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": decoders})
}

pub(crate) fn sentencepiece_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": false, "normalized": false,
                      "rstrip": false, "single_word": false, "special": true},
        "unk_token": "<unk>", "pad_token": null, "add_bos_token": false,
        "image_token": "<image>", "additional_special_tokens": ["<extra>"],
    })
}

/// WordPiece as in BERT: its decoder removes spaces before punctuation.
pub(crate) fn wordpiece() -> Value {
    let words = ["[UNK]", "the", "##re", "cat", ",", ".", "!", "'", "s", "n't", "do", "é", "a", "##b", "\n"];
    let mut vocab = Map::new();
    extend(&mut vocab, words.map(String::from));
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab,
        },
    })
}

/// Every kind of tokenizer by name.
pub(crate) fn all() -> Vec<(&'static str, Checkpoint)> {
    let byte_level_sequence = json!({"type": "Sequence", "decoders": [byte_level_decoder()]});
    let byte_fallback = json!({"type": "Sequence", "decoders": [
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    ]});
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let plain = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
    let cleaning =
        json!({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": true});
    vec![
        ("bpe", Checkpoint::new(&byte_level_bpe(&byte_level_decoder()), &byte_level_config())),
        ("spm", Checkpoint::new(&sentencepiece(&sentencepiece_decoder(true), true), &sentencepiece_config())),
        (
            "spm_no_strip",
            Checkpoint::new(&sentencepiece(&sentencepiece_decoder(false), false), &sentencepiece_config()),
        ),
        ("naive_byte_level", Checkpoint::new(&byte_level_bpe(&byte_level_sequence), &byte_level_config())),
        (
            "naive_byte_fallback",
            Checkpoint::new(&sentencepiece(&byte_fallback, false), &sentencepiece_config()),
        ),
        ("naive_metaspace", Checkpoint::new(&sentencepiece(&metaspace, true), &sentencepiece_config())),
        ("naive_wordpiece", Checkpoint::new(&wordpiece(), &plain)),
        ("cleaned_wordpiece", Checkpoint::new(&wordpiece(), &cleaning)),
    ]
}
