//! Loading: what files may hold, what their absence means, and how errors read.
#![allow(missing_docs, reason = "tests")]

mod common;

use std::collections::BTreeSet;

use common::{
    Checkpoint, all, byte_level_bpe, byte_level_config, byte_level_decoder, sentencepiece,
    sentencepiece_config, sentencepiece_decoder, write,
};
use proptest::prelude::*;
use russet_text::{EosTokenIds, Error, Tokenizer, ToolParser};
use serde_json::{Map, Value, json};

fn bpe(config: &Value) -> Checkpoint {
    Checkpoint::new(&byte_level_bpe(&byte_level_decoder()), config)
}

/// The error of loading a folder after `change` was made to a good one.
fn broken(change: impl FnOnce(&std::path::Path)) -> String {
    let checkpoint = bpe(&byte_level_config());
    change(checkpoint.folder.path());
    Tokenizer::from_dir(checkpoint.folder.path()).unwrap_err().to_string()
}

#[test]
fn missing_and_broken_files_are_named() {
    let remove = |folder: &std::path::Path| std::fs::remove_file(folder.join("tokenizer.json")).unwrap();
    assert!(broken(remove).contains("tokenizer.json: the file does not exist"));
    for (file, contents, expected) in [
        ("tokenizer.json", "", "EOF"),
        ("tokenizer.json", "{\"model\": ", "EOF"),
        ("tokenizer.json", "[]", "tokenizer.json is not usable"),
        ("tokenizer.json", "{}", "tokenizer.json is not usable"),
        ("tokenizer.json", "{\"model\": {\"type\": \"Unheard\"}}", "tokenizer.json is not usable"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not usable"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not usable"),
        ("tokenizer_config.json", "{\"eos_token\": 3}", "`eos_token` of"),
        ("tokenizer_config.json", "{\"eos_token\": {\"text\": \"x\"}}", "an object with a string `content`"),
        ("tokenizer_config.json", "{\"added_tokens_decoder\": {\"x\": \"y\"}}", "under a token id"),
        ("tokenizer_config.json", "{\"chat_template\": 3}", "`chat_template` must be a string"),
        (
            "tokenizer_config.json",
            "{\"chat_template\": [{\"name\": \"x\"}]}",
            "`chat_template` must be a string",
        ),
        ("special_tokens_map.json", "{\"bos_token\": []}", "special_tokens_map.json"),
    ] {
        let error = broken(|folder| write(folder, file, contents));
        assert!(error.contains(expected) && error.contains(file), "{file} = {contents}: {error}");
    }
    let error = broken(|folder| std::fs::write(folder.join("chat_template.jinja"), b"\xff").unwrap());
    assert!(error.contains("chat_template.jinja is not usable"), "{error}");
    let error = Tokenizer::from_dir(std::path::Path::new("/nowhere")).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "{error}");
    let error = broken(|folder| {
        remove(folder);
        std::fs::create_dir(folder.join("tokenizer.json")).unwrap();
    });
    assert!(error.contains("cannot read"), "{error}");
}

#[test]
fn a_vocabulary_with_absurd_ids_is_refused() {
    let mut tokenizer = byte_level_bpe(&byte_level_decoder());
    tokenizer["model"]["vocab"]["absurd"] = u32::MAX.into();
    let error = broken(|folder| write(folder, "tokenizer.json", &tokenizer.to_string()));
    assert!(error.contains("token id 4294967295 is larger than any vocabulary"), "{error}");
}

#[test]
fn vocab_size_counts_to_the_highest_id_with_added_tokens() {
    let checkpoint = bpe(&byte_level_config());
    let highest = checkpoint.tokenizer.token_to_id("\u{fffd}").unwrap();
    assert_eq!(checkpoint.tokenizer.vocab_size(), highest as usize + 1);
    // A token that only the configuration names is added behind the others, as in Transformers.
    let mut config = byte_level_config();
    config["bos_token"] = "<|new|>".into();
    let more = bpe(&config).tokenizer;
    assert_eq!(more.bos_token_id(), Some(highest + 1));
    assert_eq!(more.vocab_size(), highest as usize + 2);
    assert_eq!(more.encode("<|new|>", false).unwrap(), [highest + 1]);
    // Gaps in the ids count too.
    let mut gap = byte_level_bpe(&byte_level_decoder());
    gap["model"]["vocab"]["far"] = 1000.into();
    let gap = Checkpoint::new(&gap, &byte_level_config()).tokenizer;
    assert_eq!((gap.vocab_size(), gap.id_to_token(999)), (1001, None));
}

#[test]
fn prompts_get_special_tokens_unless_they_begin_with_bos() {
    let tokenizer =
        Checkpoint::new(&sentencepiece(&sentencepiece_decoder(true), true), &sentencepiece_config())
            .tokenizer;
    assert_eq!(tokenizer.bos_token_id(), Some(1));
    let plain = tokenizer.encode_prompt("the").unwrap();
    assert_eq!(plain[0], 1);
    assert_eq!(tokenizer.encode_prompt("<s>the").unwrap().iter().filter(|token| **token == 1).count(), 1);
    // tokenizer.json asks for truncation to 4 tokens and padding to 16; neither is wanted.
    assert_eq!(plain.len(), 2);
    assert!(tokenizer.encode("the the the the the", true).unwrap().len() > 5);
}

#[test]
fn thinking_markers_come_from_the_vocabulary() {
    let single = bpe(&byte_level_config()).tokenizer;
    let markers = single.thinking_markers().unwrap();
    assert_eq!((markers.start.as_str(), markers.end.as_str()), ("<think>", "</think>"));
    assert_eq!(markers.start_tokens, [single.token_to_id("<think>").unwrap()]);
    let spm = Checkpoint::new(&sentencepiece(&sentencepiece_decoder(false), false), &sentencepiece_config());
    let markers = spm.tokenizer.thinking_markers().unwrap();
    assert_eq!((markers.start.as_str(), markers.end.as_str()), ("<|channel>thought", "<channel|>"));
    assert!(markers.start_tokens.len() > 1);
    assert!(!all().iter().find(|(name, _)| name.contains("wordpiece")).unwrap().1.tokenizer.has_thinking());
}

#[test]
fn the_tool_parser_is_told_or_shown() {
    let parser = |template: &str, more: Value| {
        let mut config = byte_level_config();
        config["chat_template"] = template.into();
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let tokenizer = bpe(&config).tokenizer;
        let parser = tokenizer.tool_parser().map(|parser| parser.map_or("none", ToolParser::name));
        (tokenizer.takes_tools(), parser.map_err(|error| error.to_string()))
    };
    assert_eq!(parser("{{ messages }}", json!({})), (false, Ok("none")));
    assert_eq!(parser("{{ tools }}[TOOL_CALLS]", json!({})), (true, Ok("mistral")));
    let told = json!({"tool_parser_type": "gemma4", "chat_template_type": "muse_spark"});
    assert_eq!(parser("[TOOL_CALLS]", told), (false, Ok("gemma4")));
    assert_eq!(
        parser("[TOOL_CALLS]", json!({"chat_template_type": "muse_spark"})),
        (false, Ok("muse_spark"))
    );
    assert_eq!(parser("[TOOL_CALLS]", json!({"chat_template_type": "deepseek_v32"})), (false, Ok("mistral")));
    let error = parser("[TOOL_CALLS]", json!({"tool_parser_type": "klingon"})).1.unwrap_err();
    assert!(error.contains("\"klingon\"") && error.contains("json_tools"), "{error}");
}

#[test]
fn templates_are_chosen_as_by_transformers() {
    let none = Map::new();
    let message = [json!({"role": "user", "content": "Hi"})];
    let render = |checkpoint: &Checkpoint, tools| {
        checkpoint
            .tokenizer
            .apply_chat_template(&message, tools, true, &none)
            .map_err(|error| error.to_string())
    };
    let mut config = byte_level_config();
    let bare = bpe(&config);
    assert!(!bare.tokenizer.has_chat_template());
    assert!(render(&bare, None).unwrap_err().contains("no chat template"));

    config["chat_template"] = "config".into();
    assert_eq!(render(&bpe(&config), None).unwrap(), "config");
    // A file wins over the configuration.
    let file = Checkpoint::with_template(&byte_level_bpe(&byte_level_decoder()), &config, Some("file"));
    assert_eq!(render(&file, None).unwrap(), "file");
    // Further files are templates by their name.
    std::fs::create_dir(file.folder.path().join("additional_chat_templates")).unwrap();
    write(file.folder.path(), "additional_chat_templates/tool_use.jinja", "tools");
    let file = Checkpoint { tokenizer: Tokenizer::from_dir(file.folder.path()).unwrap(), ..file };
    assert_eq!(render(&file, Some(&[])).unwrap(), "tools");
    assert_eq!(render(&file, None).unwrap(), "file");

    config["chat_template"] = json!([
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"},
    ]);
    assert_eq!(render(&bpe(&config), None).unwrap(), "plain");
    assert_eq!(render(&bpe(&config), Some(&[])).unwrap(), "tools");
    config["chat_template"] = json!([{"name": "rag", "template": "x"}]);
    assert!(render(&bpe(&config), None).unwrap_err().contains("it has rag"));

    // A broken template is an error only where it is used.
    config["chat_template"] = "{% if %}".into();
    let broken = bpe(&config);
    assert!(broken.tokenizer.encode_prompt("x").is_ok() && broken.tokenizer.has_chat_template());
    assert!(render(&broken, None).unwrap_err().contains("chat template `default` is not valid"));
}

#[test]
fn templates_see_messages_tools_and_variables() {
    let render = |template: &str, messages: &[Value], tools: Option<&[Value]>, variables: Value| {
        let mut config = byte_level_config();
        config["chat_template"] = template.into();
        let tokenizer = bpe(&config).tokenizer;
        tokenizer.apply_chat_template(messages, tools, false, variables.as_object().unwrap())
    };
    let user = [json!({"role": "user", "content": "Hi", "name": null})];
    assert_eq!(
        render("{{ messages[0] | tojson }}", &user, None, json!({})).unwrap(),
        r#"{"role": "user", "content": "Hi"}"#
    );
    assert_eq!(render("{{ enable_thinking }}", &user, None, json!({})).unwrap(), "True");
    assert_eq!(
        render("{{ enable_thinking }}", &user, None, json!({"enable_thinking": false})).unwrap(),
        "False"
    );
    assert_eq!(render("{{ eos_token }}{{ bos_token }}", &user, None, json!({})).unwrap(), "<|end|>");
    assert_eq!(render("{{ eos_token }}", &user, None, json!({"eos_token": "E"})).unwrap(), "E");
    assert_eq!(render("{{ messages | length }}", &user, None, json!({"messages": 3})).unwrap(), "1");
    assert_eq!(render("{{ tools }}{{ documents }}", &user, None, json!({})).unwrap(), "NoneNone");
    assert_eq!(render("{{ tools }}", &user, Some(&[json!({"a": 1.0})]), json!({})).unwrap(), "[{'a': 1.0}]");
    let thinking = [json!({"role": "assistant", "content": "4", "reasoning": "hm"})];
    let source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}";
    assert_eq!(render(source, &thinking, None, json!({})).unwrap(), "hmhm");

    assert!(matches!(render("", &[], None, json!({})), Err(Error::NoMessages)));
    let error = render("", &[json!("Hi")], None, json!({})).unwrap_err();
    assert!(error.to_string().contains("messages[0] must be an object"), "{error}");
    let deep = (0..2000).fold(json!(1), |value, _| Value::Array(vec![value]));
    let error = render("", &user, Some(&[deep]), json!({})).unwrap_err();
    assert!(error.to_string().contains("tools[0] is nested more than"), "{error}");
}

#[test]
fn end_tokens_are_the_union_and_mlx_lms_are_the_subset() {
    let tokenizer = bpe(&byte_level_config()).tokenizer;
    let own = tokenizer.eos_token_id().unwrap();
    let ids = |config: Value, generation: Value| {
        let config = (!config.is_null()).then_some(config);
        EosTokenIds::new(config.as_ref(), Some(&generation), &tokenizer)
    };
    let set = |ids: &[u32]| ids.iter().copied().chain([own]).collect::<BTreeSet<_>>();
    let found = ids(json!(3), json!([4, 5])).unwrap();
    assert_eq!((found.all, found.mlx_lm), (set(&[3, 4, 5]), set(&[4, 5])));
    // 0, an empty list and null do not replace the config's in Python.
    for nothing in [json!(0), json!([]), Value::Null] {
        assert_eq!(ids(json!([3, 6]), nothing).unwrap().mlx_lm, set(&[3, 6]));
    }
    assert_eq!(ids(json!(3), json!([0])).unwrap().mlx_lm, set(&[0]));
    assert_eq!(ids(Value::Null, Value::Null).unwrap().all, set(&[]));
    assert_eq!(ids(json!(-1), json!(7)).unwrap().all, set(&[7]));
    assert!(EosTokenIds::new(None, None, &tokenizer).unwrap().all.contains(&own));
    for wrong in [json!("3"), json!([3, "x"]), json!(1.5), json!({"id": 3}), json!(1u64 << 40)] {
        let error = ids(wrong, Value::Null).unwrap_err().to_string();
        assert!(error.starts_with("eos_token_id of config.json must be a token id"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_files_never_panic(at in 0.0..1.0f64, with in prop::sample::select(vec!["", "0", "\"", "{", "}", "null,", "-1", "\\"])) {
        let folder = tempfile::tempdir().unwrap();
        let source = sentencepiece(&sentencepiece_decoder(true), true).to_string();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let mut at = (at * source.len() as f64) as usize;
        while !source.is_char_boundary(at) {
            at -= 1;
        }
        let next = source[at..].chars().next().map_or(at, |character| at + character.len_utf8());
        write(folder.path(), "tokenizer.json", &format!("{}{with}{}", &source[..at], &source[next..]));
        if let Ok(tokenizer) = Tokenizer::from_dir(folder.path()) {
            let tokens = tokenizer.encode("<s> the é\n", true).unwrap_or_default();
            let _ = tokenizer.decode(&tokens, true);
            let mut detokenizer = tokenizer.detokenizer();
            tokens.iter().for_each(|token| { detokenizer.push(*token); });
        }
    }
}
