//! Profiles: fingerprints, resolution, files of profiles, and what each of them refuses.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use russet_model::profile::{
    Artifact, ArtifactChoice, ArtifactFingerprint, Capability, ConfigFingerprint, GraphKind, Implementation,
    LoaderKind, LoopKind, Profile, ProfileError, ProfileOptions, Resolution, Specialization, read_profiles,
};
use russet_model::{Checkpoint, CpuOptions, Error, Fidelity, LoadOptions, Model, Tier};
use russet_testing::{Format, TinyCheckpoint};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// A commit.
const REVISION: &str = "0123456789abcdef0123456789abcdef01234567";
const QWEN38: &str = "hf:mlx-community/Qwen3.8-27B-OptiQ-4bit@b04599de95d7a9bfbd7f208d347c0f10d9432a42";
const GLM52: &str =
    "hf:mateogrgic/GLM-5.2-colibri-int4-with-int8-mtp@3cc8db99b1b13fc79325d987ba3c1c430766b3b8";

/// A directory with nothing but a config.json.
struct Config(TempDir);

impl Config {
    fn new(config: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        Self(dir)
    }

    fn with_kv(config: &Value, kv: &str) -> Self {
        let new = Self::new(config);
        fs::write(new.0.path().join("kv_config.json"), kv).unwrap();
        new
    }

    fn checkpoint(&self) -> Checkpoint {
        Checkpoint::open(self.0.path()).unwrap()
    }

    fn fingerprint(&self) -> Result<String, Error> {
        Ok(ConfigFingerprint::of(&self.checkpoint())?.to_string())
    }

    fn choose(&self, options: &ProfileOptions) -> Result<Resolution, Error> {
        Resolution::choose(&self.checkpoint(), options)
    }

    fn resolve(&self, options: &ProfileOptions) -> Result<Resolution, Error> {
        Resolution::resolve(&self.checkpoint(), options)
    }
}

fn llama() -> Value {
    Value::Object(TinyCheckpoint::llama(Format::Dense).config)
}

/// An object with `more` set in it.
fn with(mut config: Value, more: Value) -> Value {
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// The shape of the artifact that the built-in profile is for.
fn qwen38() -> Value {
    let layers: Vec<&str> =
        (1..=64).map(|i| if i % 4 == 0 { "full_attention" } else { "linear_attention" }).collect();
    json!({"model_type": "qwen3_5", "text_config": {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "layer_types": layers,
    }})
}

/// The shape of the artifact that the built-in profile is for.
fn glm52() -> Value {
    json!({
        "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
        "num_key_value_heads": 64, "qk_head_dim": 256, "n_routed_experts": 256, "num_experts_per_tok": 8,
    })
}

fn minicpm5() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 130_560, "tie_word_embeddings": false,
    })
}

fn artifact(text: &str) -> ArtifactFingerprint {
    text.parse().unwrap()
}

/// An engine that can do everything, and a checkpoint that is the artifact `fingerprint`.
fn capable(fingerprint: &str) -> ProfileOptions {
    let capabilities = Capability::ALL.iter().copied().collect();
    ProfileOptions { artifact: fingerprint.parse().unwrap(), extra: Vec::new(), capabilities }
}

/// An exact profile of the tiny llama under the name `hf:me/mine@1`.
fn mine(id: &str) -> Profile {
    exact(id, GraphKind::UniversalDense, Specialization::Artifact { implementation: None }).unwrap()
}

fn exact(id: &str, graph: GraphKind, specialization: Specialization) -> Result<Profile, ProfileError> {
    let config = Config::new(&llama()).fingerprint().unwrap().parse().unwrap();
    let artifact = Artifact { fingerprint: artifact("hf:me/mine@1"), config };
    Profile::exact(id, artifact, Tier::L1, graph.capabilities(), graph, specialization)
}

#[track_caller]
fn assert_message<T>(result: Result<T, Error>, parts: &[&str]) {
    let message = result.err().expect("an error").to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not contain {part:?}");
    }
}

/// The profile's error, without the directory.
#[track_caller]
fn profile_error<T>(result: Result<T, Error>) -> ProfileError {
    match result.err().expect("an error") {
        Error::Profile { source, .. } => source,
        other => panic!("{other}"),
    }
}

mod config_fingerprints {
    use super::*;

    /// What oracle/config_fingerprints.py recorded.
    fn recorded() -> Vec<Value> {
        serde_json::from_str(include_str!("../../../oracle/config_fingerprints.json")).unwrap()
    }

    #[test]
    fn equal_those_recorded() {
        let cases = recorded();
        assert!(cases.len() > 90);
        for case in cases {
            let config = match &case["kv_config"] {
                Value::Null => Config::new(&case["config"]),
                kv => Config::with_kv(&case["config"], &kv.to_string()),
            };
            assert_eq!(config.fingerprint().unwrap(), case["fingerprint"], "{case}");
        }
    }

    #[test]
    fn of_known_artifacts_are_those_of_their_profiles() {
        assert_eq!(Config::new(&qwen38()).fingerprint().unwrap(), "50117975cb405944");
        assert_eq!(Config::new(&glm52()).fingerprint().unwrap(), "8b49d0941e18f1b9");
        let trap = with(glm52(), json!({"head_dim": 192}));
        assert_eq!(Config::new(&trap).fingerprint().unwrap(), "8b49d0941e18f1b9");
    }

    /// Every field that counts, with a value that is not the default.
    fn relevant() -> Vec<(&'static str, Value)> {
        vec![
            ("layer_types", json!(["full_attention"])),
            ("hidden_size", json!(96)),
            ("head_dim", json!(48)),
            ("global_head_dim", json!(80)),
            ("num_attention_heads", json!(8)),
            ("num_key_value_heads", json!(1)),
            ("num_global_key_value_heads", json!(3)),
            ("attention_k_eq_v", json!(true)),
            ("num_kv_shared_layers", json!(1)),
            ("enable_moe_block", json!(true)),
            ("hidden_size_per_layer_input", json!(7)),
            ("sliding_window", json!(16)),
            ("final_logit_softcapping", json!(30)),
        ]
    }

    #[test]
    fn react_to_each_field_that_counts() {
        let plain = Config::new(&llama()).fingerprint().unwrap();
        let mut all = BTreeSet::from([plain]);
        for (field, value) in relevant() {
            let changed = Config::new(&with(llama(), json!({ field: value }))).fingerprint().unwrap();
            assert!(all.insert(changed), "{field}");
        }
        // Experts count where there is a block of them.
        let moe = json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 2});
        for (field, value) in [("num_experts", 8), ("top_k_experts", 1)] {
            let config = with(with(llama(), moe.clone()), json!({ field: value }));
            assert!(all.insert(Config::new(&config).fingerprint().unwrap()), "{field}");
        }
        for kv in [
            json!([]),
            json!([{"layer_idx": 0, "bits": 4, "group_size": 32}]),
            json!([{"layer_idx": 1, "bits": 4, "group_size": 32}]),
            json!([{"layer_idx": 0, "bits": 8, "group_size": 32}]),
            json!([{"layer_idx": 0, "bits": 4, "group_size": 64}]),
        ] {
            assert!(all.insert(Config::with_kv(&llama(), &kv.to_string()).fingerprint().unwrap()), "{kv}");
        }
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_filter("finite", |x| x.is_finite()).prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(2, 8, 3, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                prop::collection::vec((".*", inner), 0..3)
                    .prop_map(|entries| Value::Object(Map::from_iter(entries))),
            ]
        })
    }

    /// Fields that the fingerprint reads.
    const READ: [&str; 23] = [
        "model_type",
        "text_config",
        "layer_types",
        "num_hidden_layers",
        "hidden_size",
        "head_dim",
        "global_head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "num_global_key_value_heads",
        "attention_k_eq_v",
        "num_kv_shared_layers",
        "enable_moe_block",
        "num_experts",
        "n_routed_experts",
        "top_k_experts",
        "num_experts_per_tok",
        "hidden_size_per_layer_input",
        "sliding_window",
        "final_logit_softcapping",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
    ];

    proptest! {
        #[test]
        fn ignore_all_other_fields(fields in prop::collection::vec(("[a-z_]{1,20}", json_value()), 0..6)) {
            let more: Map<String, Value> =
                fields.into_iter().filter(|(name, _)| !READ.contains(&name.as_str())).collect();
            let plain = Config::new(&llama()).fingerprint().unwrap();
            let changed = Config::new(&with(llama(), Value::Object(more))).fingerprint().unwrap();
            prop_assert_eq!(plain, changed);
        }

        #[test]
        fn do_not_depend_on_order_or_nesting(order in Just(relevant()).prop_shuffle(), taken in 0..13_usize) {
            let fields: Map<String, Value> =
                order.iter().take(taken).map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            let sorted: std::collections::BTreeMap<_, _> = fields.clone().into_iter().collect();
            let flat = with(json!({"model_type": "gemma4"}), Value::Object(fields));
            let nested = json!({"text_config": sorted, "model_type": "gemma4"});
            prop_assert_eq!(
                Config::new(&flat).fingerprint().unwrap(),
                Config::new(&nested).fingerprint().unwrap()
            );
        }

        #[test]
        fn any_value_of_any_field_is_read_or_refused_by_name(i in 0..READ.len(), value in json_value()) {
            let field = READ[i];
            if let Err(e) = Config::new(&with(glm52(), json!({ field: value }))).fingerprint() {
                let message = e.to_string();
                prop_assert!(message.contains("config.json: field \"") && message.contains(field), "{message}");
            }
        }
    }

    #[test]
    fn fields_of_the_wrong_kind_are_named() {
        for (field, value, part) in [
            ("hidden_size", json!("64"), "expected an integer from 1 to"),
            ("hidden_size", json!(0), "expected an integer from 1 to"),
            ("sliding_window", json!(-1), "expected an integer from 0 to"),
            ("sliding_window", json!(1.5), "expected an integer from 0 to"),
            ("layer_types", json!(["full_attention", 1]), "expected a list of strings"),
            ("attention_k_eq_v", json!(1), "expected true or false"),
            ("final_logit_softcapping", json!("30"), "expected a finite number"),
            ("num_hidden_layers", json!(1 << 24), "is more than 4096"),
        ] {
            let name = format!("config.json: field \"{field}\"");
            assert_message(
                Config::new(&with(llama(), json!({ field: value }))).fingerprint(),
                &[&name, part],
            );
        }
        let nested = json!({"model_type": "gemma4", "text_config": {"head_dim": []}});
        assert_message(Config::new(&nested).fingerprint(), &["field \"text_config.head_dim\""]);
        assert_message(Config::new(&json!({})).fingerprint(), &["field \"model_type\": is missing"]);
    }

    #[test]
    fn a_kv_config_that_is_damaged_is_refused() {
        for (kv, parts) in [
            ("{", ["kv_config.json", "is not valid JSON"]),
            ("{}", ["kv_config.json", "is not a JSON list"]),
            ("[1]", ["kv_config.json", "entry 0: expected an object, got 1"]),
            (r#"[{"bits": 4}]"#, ["kv_config.json", "field \"[0].layer_idx\": is missing"]),
            (
                r#"[{"layer_idx": 0, "bits": 4}, {"layer_idx": 1}]"#,
                ["kv_config.json", "field \"[1].bits\": is missing"],
            ),
            (
                r#"[{"layer_idx": -1, "bits": 4}]"#,
                ["kv_config.json", "field \"[0].layer_idx\": expected an integer"],
            ),
            (
                r#"[{"layer_idx": 0, "bits": 4, "group_size": "64"}]"#,
                ["kv_config.json", "field \"[0].group_size\": expected an integer"],
            ),
        ] {
            assert_message(Config::with_kv(&llama(), kv).fingerprint(), &parts);
        }
    }

    #[test]
    fn are_read_and_shown_as_16_digits() {
        for text in ["0000000000000000", "00000000000000ff", "50117975cb405944"] {
            assert_eq!(text.parse::<ConfigFingerprint>().unwrap().to_string(), text);
        }
        for text in ["", "0", "50117975CB405944", "50117975cb40594", "50117975cb4059440", "+0117975cb405944"]
        {
            assert_eq!(text.parse::<ConfigFingerprint>(), Err(ProfileError::ConfigFingerprint));
        }
        assert!(ProfileError::ConfigFingerprint.to_string().contains("16 hexadecimal digits"));
    }
}

mod artifact_fingerprints {
    use super::*;

    fn of(path: &str) -> Option<String> {
        ArtifactFingerprint::from_path(Path::new(path)).map(|f| f.to_string())
    }

    #[test]
    fn come_from_snapshots_wherever_the_cache_lies() {
        let expected = Some(format!("hf:owner/name@{REVISION}"));
        for place in ["/a/hub", "/", "/models--x--y/refs", "relative", "/caché"] {
            let snapshot = format!("{place}/models--owner--name/snapshots/{REVISION}");
            assert_eq!(of(&snapshot), expected);
            assert_eq!(of(&format!("{snapshot}/")), expected);
            assert_eq!(of(&format!("{snapshot}/sub/folder")), expected);
        }
        let upper = REVISION.to_uppercase();
        assert_eq!(of(&format!("/hub/models--owner--name/snapshots/{upper}")), expected);
        assert_eq!(of(&format!("/hub/MODELS--owner--name/Snapshots/{REVISION}")), expected);
        assert_eq!(of(&format!(r"C:\hub\models--owner--name\snapshots\{REVISION}\x")), expected);
        let long = "f".repeat(64);
        let path = format!("/hub/models--owner--name--with--dashes/snapshots/{long}");
        assert_eq!(of(&path), Some(format!("hf:owner/name--with--dashes@{long}")));
    }

    #[test]
    fn are_none_for_everything_else() {
        for path in [
            "/models/llama".to_owned(),
            "/hub/models--owner--name".to_owned(),
            "/hub/models--owner--name/snapshots".to_owned(),
            "/hub/models--owner--name/snapshots/main".to_owned(),
            format!("/hub/models--owner--name/refs/{REVISION}"),
            format!("/hub/models--owner--name/x/snapshots/{REVISION}"),
            format!("/hub/models--owner/snapshots/{REVISION}"),
            format!("/hub/models----name/snapshots/{REVISION}"),
            format!("/hub/models--owner--/snapshots/{REVISION}"),
            format!("/hub/datasets--owner--name/snapshots/{REVISION}"),
            format!("/hub/xmodels--owner--name/snapshots/{REVISION}"),
            format!("/hub/models--owner--name/snapshots/{}", &REVISION[1..]),
            format!("/hub/models--owner--name/snapshots/{}", "f".repeat(65)),
            format!("/hub/models--owner--name/snapshots/g{}", &REVISION[1..]),
            format!("/hub/models--owner--na me/snapshots/{REVISION}"),
            format!("/hub/models--owner--\u{1b}[2J/snapshots/{REVISION}"),
        ] {
            assert_eq!(of(&path), None, "{path}");
        }
    }

    #[test]
    fn given_by_hand_are_any_text_without_spaces() {
        for text in [QWEN38, "sha256:00", "mine"] {
            assert_eq!(artifact(text).to_string(), text);
            assert_eq!(text.parse(), Ok(ArtifactChoice::Is(artifact(text))));
        }
        assert_eq!("none".parse(), Ok(ArtifactChoice::None));
        for text in ["", " ", "a b", "a\n", "\u{1b}"] {
            assert_eq!(text.parse::<ArtifactChoice>(), Err(ProfileError::ArtifactFingerprint));
        }
        assert!(ProfileError::ArtifactFingerprint.to_string().contains("hf:owner/name@"));
    }
}

mod profiles {
    use super::*;

    #[test]
    fn loader_and_loop_follow_from_the_graph() {
        for graph in GraphKind::ALL {
            let colibri = *graph == GraphKind::Glm52;
            assert_eq!(graph.loader() == LoaderKind::Colibri, colibri);
            let diffusion = *graph == GraphKind::DiffusionGemma;
            assert_eq!(graph.loop_kind() == LoopKind::Diffusion, diffusion);
            let own = format!("{graph}-graph");
            let required = graph.capabilities();
            assert!(required.iter().any(|c| c.id() == own), "{graph}");
            assert_eq!(required.contains(&Capability::ColibriContainer), colibri);
            assert_eq!(required.contains(&Capability::Safetensors), !colibri);
            assert_eq!(required.contains(&Capability::Diffusion), diffusion);
            assert_eq!(required.contains(&Capability::Autoregressive), !diffusion);
            assert_eq!(required.contains(&Capability::StreamedExperts), colibri);
            assert_eq!(required.contains(&Capability::RecurrentState), *graph == GraphKind::Qwen35);
        }
    }

    #[test]
    fn oracle_and_claim_follow_from_the_tier() {
        let promise = |tier: Tier| (tier.id(), tier.oracle(), tier.claim());
        assert_eq!(promise(Tier::L1), ("l1", Some("mlx-lm"), "bit-exact"));
        assert_eq!(promise(Tier::L2), ("l2", Some("mlx-optiq"), "bit-exact"));
        assert_eq!(promise(Tier::L3), ("l3", None, "measured"));
    }

    #[test]
    fn capabilities_have_the_ids_that_users_know() {
        let ids: Vec<&str> = Capability::ALL.iter().map(|c| c.id()).collect();
        assert_eq!(
            ids.join(" "),
            "autoregressive colibri-container diffusion diffusion-gemma-graph gemma4-graph generated-graph \
             glm5.2-graph minicpm5-graph mixed-precision-kv native-mtp qwen3-graph qwen3-moe-graph qwen3.5-graph \
             recurrent-state safetensors streamed-experts universal-dense-graph vision-sidecar"
        );
    }

    #[test]
    fn an_id_must_not_be_empty() {
        for id in ["", "  ", "a\nb", "\u{1b}[2J"] {
            let refused = exact(id, GraphKind::Qwen3, Specialization::Dedicated).unwrap_err();
            assert_eq!(refused, ProfileError::Id);
        }
        assert_eq!(
            ProfileError::Id.to_string(),
            "a profile needs an id that is not empty and has no control characters"
        );
    }

    #[test]
    fn an_implementation_needs_a_name() {
        assert_eq!(Implementation::new(""), None);
        assert_eq!(Implementation::new(" \t"), None);
        assert_eq!(Implementation::new("fast").unwrap().name(), "fast");
    }

    #[test]
    fn what_the_composition_needs_must_be_required() {
        let artifact =
            || Artifact { fingerprint: artifact("a"), config: "0000000000000000".parse().unwrap() };
        let declare = |required: &[Capability], graph, specialization| {
            let required = required.iter().copied().collect();
            Profile::exact("mine", artifact(), Tier::L1, required, graph, specialization)
        };
        for graph in GraphKind::ALL {
            for specialization in [
                Specialization::Artifact { implementation: None },
                Specialization::Dedicated,
                Specialization::Generated,
                Specialization::Generic,
            ] {
                let mut needed = graph.capabilities();
                if specialization == Specialization::Generated {
                    needed.insert(Capability::GeneratedGraph);
                }
                let refused = declare(&[], *graph, specialization.clone()).unwrap_err();
                let missing: Vec<Capability> = needed.iter().copied().collect();
                assert_eq!(
                    refused,
                    ProfileError::Underdeclared { id: "mine".into(), missing: missing.clone() }
                );
                for lacking in &missing {
                    let required: Vec<Capability> =
                        missing.iter().copied().filter(|c| c != lacking).collect();
                    let message = declare(&required, *graph, specialization.clone()).unwrap_err().to_string();
                    let expected = format!(
                        "profile 'mine' does not require what its composition needs: {lacking}; add it"
                    );
                    assert!(message.starts_with(&expected), "{message}");
                }
                let all = declare(Capability::ALL, *graph, specialization).unwrap();
                assert_eq!(all.required().len(), Capability::ALL.len());
            }
        }
    }
}

mod families {
    use super::*;

    #[test]
    fn each_config_gets_the_profile_of_its_family() {
        let of = |model_type: &str| json!({ "model_type": model_type });
        for (config, id, tier, composition, required) in [
            (of("glm_moe_dsa"), "glm5.2-colibri", Tier::L3, "glm5.2 dedicated", "streamed-experts"),
            (
                of("diffusion_gemma"),
                "diffusion-gemma-dedicated",
                Tier::L2,
                "diffusion-gemma dedicated",
                "diffusion",
            ),
            (minicpm5(), "minicpm5-dedicated", Tier::L1, "minicpm5 dedicated", "minicpm5-graph"),
            (of("qwen3_5"), "qwen3.5-dedicated", Tier::L1, "qwen3.5 dedicated", "recurrent-state"),
            (of("qwen3_5_text"), "qwen3.5-dedicated", Tier::L1, "qwen3.5 dedicated", "recurrent-state"),
            (of("qwen3_5_moe"), "qwen3.5-dedicated", Tier::L1, "qwen3.5 dedicated", "recurrent-state"),
            (of("qwen3_5_moe_text"), "qwen3.5-dedicated", Tier::L1, "qwen3.5 dedicated", "recurrent-state"),
            (of("qwen3_moe"), "qwen3-moe-dedicated", Tier::L1, "qwen3-moe dedicated", "qwen3-moe-graph"),
            (of("qwen3"), "qwen3-dedicated", Tier::L1, "qwen3 dedicated", "qwen3-graph"),
            (of("gemma4"), "gemma4-dedicated", Tier::L1, "gemma4 dedicated", "gemma4-graph"),
            (of("gemma4_unified"), "gemma4-dedicated", Tier::L1, "gemma4 dedicated", "gemma4-graph"),
            (of("gemma4_text"), "gemma4-dedicated", Tier::L1, "gemma4 dedicated", "gemma4-graph"),
            (llama(), "universal-dense", Tier::L1, "universal-dense generic", "universal-dense-graph"),
            (of("mistral"), "universal-dense", Tier::L1, "universal-dense generic", "universal-dense-graph"),
            (
                of("iquestcoder"),
                "universal-dense",
                Tier::L1,
                "universal-dense generic",
                "universal-dense-graph",
            ),
            (of("xverse"), "universal-dense", Tier::L1, "universal-dense generic", "universal-dense-graph"),
        ] {
            let resolution = Config::new(&config).resolve(&capable("none"));
            // Graphs that this build lacks are chosen all the same.
            let resolution = resolution.or_else(|_| Config::new(&config).choose(&capable("none"))).unwrap();
            let profile = resolution.profile();
            assert_eq!((profile.id(), profile.tier()), (id, tier));
            let shown = format!("{} {}", profile.graph(), profile.specialization().id());
            assert_eq!(shown, composition);
            assert!(profile.required().iter().any(|c| c.id() == required), "{id}");
            assert_eq!(profile.required(), &profile.graph().capabilities());
            assert!(!resolution.is_exact() && profile.artifact().is_none());
            assert_eq!(resolution.artifact(), None);
        }
    }

    #[test]
    fn minicpm5_is_told_by_every_field_of_its_shape() {
        for (field, value) in [
            ("model_type", json!("mistral")),
            ("hidden_size", json!(1024)),
            ("num_hidden_layers", json!(23)),
            ("num_attention_heads", json!(8)),
            ("num_key_value_heads", json!(4)),
            ("head_dim", json!(96)),
            ("vocab_size", json!(130_561)),
            ("tie_word_embeddings", json!(true)),
            ("tie_word_embeddings", Value::Null),
            ("vocab_size", json!("130560")),
        ] {
            let config = Config::new(&with(minicpm5(), json!({ field: value })));
            assert_eq!(config.choose(&capable("none")).unwrap().profile().id(), "universal-dense", "{field}");
        }
    }

    #[test]
    fn drafters_are_refused() {
        for model_type in ["gemma4_assistant", "llama_assistant", "_assistant"] {
            assert_message(
                Config::new(&json!({ "model_type": model_type })).choose(&capable("none")),
                &["field \"model_type\"", model_type, "is a drafter: it helps another model"],
            );
        }
    }

    #[test]
    fn what_no_family_takes_is_refused_with_those_there_are() {
        let choose = |model_type| Config::new(&json!({ "model_type": model_type })).choose(&capable("none"));
        assert_message(
            choose("gpt2"),
            &[
                "config.json: field \"model_type\": 'gpt2' is not supported; dedicated: gemma4*, diffusion_gemma, \
                 glm_moe_dsa, qwen3_5, qwen3_5_moe, qwen3, qwen3_moe, MiniCPM5; generic: ",
                "llama",
            ],
        );
        assert_message(choose("phi-msft"), &["'phi-msft' is not supported (mlx-lm runs it as 'phixtral')"]);
        let message = choose("gpt2").unwrap_err().to_string();
        let generic: Vec<&str> = message.rsplit_once("generic: ").unwrap().1.split(", ").collect();
        assert!(generic.is_sorted(), "{message}");
    }
}

mod resolution {
    use super::*;

    #[test]
    fn an_artifact_gets_its_own_profile() {
        for (config, fingerprint, id, tier) in [
            (qwen38(), QWEN38, "qwen3.8-27b-optiq-4bit", Tier::L1),
            (glm52(), GLM52, "glm5.2-colibri-int4-int8-mtp", Tier::L3),
        ] {
            let resolution = Config::new(&config).choose(&capable(fingerprint)).unwrap();
            let profile = resolution.profile();
            assert_eq!((profile.id(), profile.tier()), (id, tier));
            assert!(resolution.is_exact());
            assert_eq!(resolution.artifact(), Some(&artifact(fingerprint)));
            assert_eq!(profile.artifact().unwrap().fingerprint, artifact(fingerprint));
            assert_eq!(profile.artifact().unwrap().config, resolution.config());
            assert_eq!(*profile.specialization(), Specialization::Artifact { implementation: None });
            assert_eq!(resolution.reason(), "the artifact has a profile of its own");
        }
        let required = |id: &str, config, fingerprint| {
            let resolution = Config::new(&config).choose(&capable(fingerprint)).unwrap();
            assert_eq!(resolution.profile().id(), id);
            resolution.profile().required().iter().map(|c| c.id()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            required("qwen3.8-27b-optiq-4bit", qwen38(), QWEN38),
            "autoregressive qwen3.5-graph recurrent-state safetensors vision-sidecar"
        );
        assert_eq!(
            required("glm5.2-colibri-int4-int8-mtp", glm52(), GLM52),
            "autoregressive colibri-container glm5.2-graph streamed-experts"
        );
    }

    #[test]
    fn the_path_of_a_snapshot_tells_the_artifact() {
        let cache = tempfile::tempdir().unwrap();
        let snapshot: PathBuf = [
            "models--mlx-community--Qwen3.8-27B-OptiQ-4bit",
            "snapshots",
            "b04599de95d7a9bfbd7f208d347c0f10d9432a42",
        ]
        .iter()
        .fold(cache.path().to_owned(), |path, part| path.join(part));
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(snapshot.join("config.json"), qwen38().to_string()).unwrap();
        let checkpoint = Checkpoint::open(&snapshot).unwrap();
        let resolution = Resolution::choose(&checkpoint, &ProfileOptions::default()).unwrap();
        assert_eq!(resolution.profile().id(), "qwen3.8-27b-optiq-4bit");
        // Unless the caller says otherwise.
        let none = ProfileOptions { artifact: ArtifactChoice::None, ..ProfileOptions::default() };
        let resolution = Resolution::choose(&checkpoint, &none).unwrap();
        assert_eq!(resolution.profile().id(), "qwen3.5-dedicated");
        assert_eq!((resolution.artifact(), resolution.is_exact()), (None, false));
        assert!(resolution.reason().contains("not known to be a published artifact"));
    }

    #[test]
    fn an_artifact_without_a_profile_gets_its_family_s() {
        let resolution = Config::new(&llama()).resolve(&capable("hf:some/other@1")).unwrap();
        assert_eq!(resolution.profile().id(), "universal-dense");
        assert_eq!(resolution.artifact(), Some(&artifact("hf:some/other@1")));
        assert!(!resolution.is_exact());
        assert_eq!(resolution.reason(), "model_type 'llama'; the artifact has no profile of its own");
        let mistral = Config::new(&json!({"model_type": "mistral"})).resolve(&capable("none")).unwrap();
        assert_eq!(
            mistral.reason(),
            "model_type 'mistral', which mlx-lm runs as 'llama'; not known to be a published artifact"
        );
    }

    #[test]
    fn a_config_that_is_not_the_artifact_s_is_refused() {
        let changed = with(qwen38(), json!({"text_config": {"hidden_size": 64}}));
        let found: ConfigFingerprint = Config::new(&changed).fingerprint().unwrap().parse().unwrap();
        let result = Config::new(&changed).choose(&capable(QWEN38));
        let declared: ConfigFingerprint = "50117975cb405944".parse().unwrap();
        assert_message(
            Config::new(&changed).choose(&capable(QWEN38)),
            &["profile 'qwen3.8-27b-optiq-4bit' is for artifact hf:mlx-community/", "refusing to fall back"],
        );
        assert_eq!(
            profile_error(result),
            ProfileError::Config {
                id: "qwen3.8-27b-optiq-4bit".into(),
                artifact: artifact(QWEN38),
                declared,
                found
            }
        );
    }

    #[test]
    fn a_graph_that_does_not_run_the_config_is_refused() {
        // The model type is no part of the fingerprint.
        let changed = with(qwen38(), json!({"model_type": "gemma4"}));
        let result = Config::new(&changed).choose(&capable(QWEN38));
        assert_message(
            Config::new(&changed).choose(&capable(QWEN38)),
            &["has the graph qwen3.5, which does not run model_type 'gemma4'; refusing to fall back"],
        );
        assert_eq!(
            profile_error(result),
            ProfileError::Graph {
                id: "qwen3.8-27b-optiq-4bit".into(),
                graph: GraphKind::Qwen35,
                model_type: "gemma4".into()
            }
        );
    }

    #[test]
    fn two_profiles_of_one_artifact_are_refused() {
        let options = ProfileOptions { extra: vec![mine("one"), mine("two")], ..capable("hf:me/mine@1") };
        let result = Config::new(&llama()).choose(&options);
        assert_message(
            Config::new(&llama()).choose(&options),
            &["several profiles are for artifact hf:me/mine@1: one, two; keep one of them"],
        );
        let ids = vec!["one".into(), "two".into()];
        assert_eq!(
            profile_error(result),
            ProfileError::Ambiguous { artifact: artifact("hf:me/mine@1"), ids }
        );
        // For other artifacts they do not matter.
        let options = ProfileOptions { artifact: ArtifactChoice::None, ..options };
        assert_eq!(Config::new(&llama()).resolve(&options).unwrap().profile().id(), "universal-dense");
    }

    #[test]
    fn a_second_profile_of_a_built_in_artifact_is_refused() {
        let graph = GraphKind::Qwen35;
        let artifact =
            Artifact { fingerprint: artifact(QWEN38), config: "50117975cb405944".parse().unwrap() };
        let specialization = Specialization::Artifact { implementation: None };
        let second =
            Profile::exact("second", artifact, Tier::L1, graph.capabilities(), graph, specialization)
                .unwrap();
        let options = ProfileOptions { extra: vec![second], ..capable(QWEN38) };
        assert_message(
            Config::new(&qwen38()).choose(&options),
            &["several profiles", "qwen3.8-27b-optiq-4bit, second"],
        );
    }

    #[test]
    fn an_extra_profile_is_used_for_its_artifact() {
        let options = ProfileOptions { extra: vec![mine("mine")], ..capable("hf:me/mine@1") };
        let resolution = Config::new(&llama()).resolve(&options).unwrap();
        assert_eq!(*resolution.profile(), mine("mine"));
        assert!(resolution.is_exact());
    }

    #[test]
    fn what_the_engine_lacks_is_named() {
        let mut options = capable("none");
        options.capabilities.remove(&Capability::Safetensors);
        options.capabilities.remove(&Capability::UniversalDenseGraph);
        let config = Config::new(&llama());
        assert_message(
            config.resolve(&options),
            &[
                "this engine lacks safetensors, universal-dense-graph, which profile 'universal-dense' requires; \
                 refusing to fall back",
            ],
        );
        let missing = vec![Capability::Safetensors, Capability::UniversalDenseGraph];
        let expected = ProfileError::EngineLacks { id: "universal-dense".into(), missing: missing.clone() };
        assert_eq!(profile_error(config.resolve(&options)), expected);
        // It is chosen all the same.
        let chosen = config.choose(&options).unwrap();
        assert_eq!(chosen.missing().iter().copied().collect::<Vec<_>>(), missing);
        assert_eq!(profile_error(chosen.check_engine(&config.checkpoint())), expected);
    }

    #[test]
    fn each_lacking_capability_is_enough() {
        for lacking in GraphKind::UniversalDense.capabilities() {
            let mut options = capable("none");
            options.capabilities.remove(&lacking);
            assert_message(
                Config::new(&llama()).resolve(&options),
                &[&format!("this engine lacks {lacking}, ")],
            );
        }
    }

    #[test]
    fn this_engine_lacks_the_vision_sidecar_of_qwen38() {
        let options = ProfileOptions { artifact: QWEN38.parse().unwrap(), ..ProfileOptions::default() };
        assert_message(
            Config::new(&qwen38()).resolve(&options),
            &["this engine lacks ", "vision-sidecar", "qwen3.8-27b-optiq-4bit", "refusing to fall back"],
        );
    }

    #[test]
    fn an_implementation_that_the_engine_lacks_is_refused() {
        let implementation = Implementation::new("fast");
        let specialization = Specialization::Artifact { implementation };
        let profile = exact("mine", GraphKind::UniversalDense, specialization).unwrap();
        let options = ProfileOptions { extra: vec![profile], ..capable("hf:me/mine@1") };
        let config = Config::new(&llama());
        assert_message(
            config.resolve(&options),
            &[
                "this engine lacks the implementation 'fast', which profile 'mine' names; refusing to fall back",
            ],
        );
        let expected = ProfileError::Implementation { id: "mine".into(), name: "fast".into() };
        assert_eq!(profile_error(config.resolve(&options)), expected);
    }

    #[test]
    fn a_model_type_that_a_family_does_not_run_yet_is_refused() {
        let config = Config::new(&json!({"model_type": "gemma4_future"}));
        assert_eq!(config.choose(&capable("none")).unwrap().profile().id(), "gemma4-dedicated");
        assert_message(
            config.resolve(&capable("none")),
            &["field \"model_type\": graph gemma4 does not run 'gemma4_future' yet"],
        );
    }
}

mod construction {
    use super::*;

    fn written(checkpoint: &TinyCheckpoint) -> (TempDir, Checkpoint) {
        let dir = tempfile::tempdir().unwrap();
        checkpoint.write(dir.path());
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        (dir, checkpoint)
    }

    fn build(checkpoint: Checkpoint, resolution: Resolution) -> Result<Model, Error> {
        Model::from_profile(checkpoint, resolution, Fidelity::Auto, CpuOptions::default())
    }

    #[test]
    fn a_model_has_the_profile_it_was_built_by() {
        let (dir, _) = written(&TinyCheckpoint::llama(Format::Dense));
        let options = ProfileOptions { extra: vec![mine("mine")], ..capable("hf:me/mine@1") };
        let options = LoadOptions { profile: options, ..LoadOptions::new(Fidelity::Tier(Tier::L1)) };
        let model = Model::load(dir.path(), &options).unwrap();
        assert_eq!(model.resolution().profile().id(), "mine");
        assert_eq!(model.tier(), Tier::L1);
    }

    #[test]
    fn the_tier_of_the_profile_is_the_one_there_is() {
        let (dir, _) = written(&TinyCheckpoint::llama(Format::Dense));
        let artifact = Artifact {
            fingerprint: artifact("hf:me/mine@1"),
            config: Config::new(&llama()).fingerprint().unwrap().parse().unwrap(),
        };
        let graph = GraphKind::UniversalDense;
        let specialization = Specialization::Dedicated;
        let profile =
            Profile::exact("l2", artifact, Tier::L2, graph.capabilities(), graph, specialization).unwrap();
        let load = |tier| {
            let options = ProfileOptions { extra: vec![profile.clone()], ..capable("hf:me/mine@1") };
            Model::load(
                dir.path(),
                &LoadOptions { profile: options, ..LoadOptions::new(Fidelity::Tier(tier)) },
            )
        };
        assert_eq!(load(Tier::L2).unwrap().tier(), Tier::L2);
        assert_message(
            load(Tier::L1),
            &[
                "fidelity l1 (bit-exact with mlx-lm) is not defined",
                "promises l2 (bit-exact with mlx-optiq): use l2",
            ],
        );
    }

    #[test]
    fn a_profile_resolved_for_another_config_is_refused() {
        let resolution = Config::new(&with(llama(), json!({"sliding_window": 16})))
            .resolve(&ProfileOptions::default())
            .unwrap();
        let resolved = resolution.config();
        let (dir, checkpoint) = written(&TinyCheckpoint::llama(Format::Dense));
        let found = ConfigFingerprint::of(&checkpoint).unwrap();
        let error = build(checkpoint, resolution).err().unwrap();
        let message = error.to_string();
        let expected = format!(
            "{}: profile 'universal-dense' was resolved for config fingerprint {resolved}, but this config's is \
             {found}",
            dir.path().display()
        );
        assert_eq!(message, expected);
        let id = "universal-dense".into();
        assert_eq!(profile_error::<()>(Err(error)), ProfileError::OtherConfig { id, resolved, found });
    }

    #[test]
    fn a_profile_whose_graph_does_not_run_the_config_is_refused() {
        let resolution = Config::new(&llama()).resolve(&ProfileOptions::default()).unwrap();
        // The model type is no part of the fingerprint; where it counts, layer types are stated.
        let other = TinyCheckpoint::llama(Format::Dense)
            .with("model_type", json!("gpt2"))
            .with("layer_types", json!(["full_attention", "full_attention"]));
        let (_dir, checkpoint) = written(&other);
        assert_message(build(checkpoint, resolution), &["graph universal-dense", "model_type 'gpt2'"]);
    }

    #[test]
    fn a_profile_that_the_engine_can_t_run_builds_nothing() {
        let mut options = ProfileOptions::default();
        options.capabilities.remove(&Capability::Autoregressive);
        let (_dir, checkpoint) = written(&TinyCheckpoint::llama(Format::Dense));
        let resolution = Resolution::choose(&checkpoint, &options).unwrap();
        assert_message(build(checkpoint, resolution), &["this engine lacks autoregressive, "]);
    }

    #[test]
    fn a_resolution_is_unchanged_by_what_happens_to_its_options() {
        let mut options = ProfileOptions { extra: vec![mine("mine")], ..capable("hf:me/mine@1") };
        let resolution = Config::new(&llama()).resolve(&options).unwrap();
        let before = resolution.clone();
        options.extra.clear();
        options.capabilities.clear();
        assert_eq!(resolution, before);
    }
}

mod files {
    use super::*;

    fn valid() -> Value {
        json!({
            "id": "mine",
            "artifact_fingerprint": "hf:me/mine@1",
            "config_fingerprint": "50117975cb405944",
            "fidelity": {"tier": "l1", "oracle": "mlx-lm", "claim": "bit-exact"},
            "required_capabilities": ["safetensors", "autoregressive", "universal-dense-graph"],
            "execution": {
                "loader": "safetensors", "graph": "universal-dense", "loop": "autoregressive",
                "specialization": "artifact", "implementation": null,
            },
        })
    }

    fn read(text: &str) -> Result<Vec<Profile>, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("profiles.json");
        fs::write(&path, text).unwrap();
        read_profiles(&path)
    }

    fn read_one(profile: &Value) -> Result<Profile, Error> {
        read(&json!({ "profiles": [profile] }).to_string()).map(|mut profiles| profiles.remove(0))
    }

    /// The valid profile with the value at `pointer` replaced, or removed.
    fn edited(pointer: &str, value: Option<Value>) -> Value {
        let mut profile = valid();
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        let parent = profile.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        match value {
            Some(value) => drop(parent.insert(field.to_owned(), value)),
            None => drop(parent.remove(field)),
        }
        profile
    }

    #[track_caller]
    fn assert_refused(pointer: &str, value: Value, field: &str, part: &str) {
        let name = format!("profiles.json: field \"profiles[0].{field}\"");
        assert_message(read_one(&edited(pointer, Some(value))), &[&name, part]);
    }

    #[test]
    fn are_read() {
        let profile = read_one(&valid()).unwrap();
        assert_eq!(
            (profile.id(), profile.tier(), profile.graph()),
            ("mine", Tier::L1, GraphKind::UniversalDense)
        );
        assert_eq!(profile.artifact().unwrap().fingerprint, artifact("hf:me/mine@1"));
        assert_eq!(profile.required(), &GraphKind::UniversalDense.capabilities());
        assert_eq!(*profile.specialization(), Specialization::Artifact { implementation: None });
        assert!(read(r#"{"profiles": []}"#).unwrap().is_empty());
        let named = read_one(&edited("/execution/implementation", Some(json!("fast")))).unwrap();
        assert_eq!(named.specialization().implementation(), Some("fast"));
        for (id, specialization) in
            [("dedicated", Specialization::Dedicated), ("generic", Specialization::Generic)]
        {
            let profile = read_one(&edited("/execution/specialization", Some(json!(id)))).unwrap();
            assert_eq!(*profile.specialization(), specialization);
        }
        let mut measured = edited("/fidelity", Some(json!({"tier": "l3", "claim": "measured"})));
        assert_eq!(read_one(&measured).unwrap().tier(), Tier::L3);
        measured["fidelity"]["oracle"] = Value::Null;
        assert_eq!(read_one(&measured).unwrap().tier(), Tier::L3);
    }

    #[test]
    fn every_field_but_the_implementation_is_required() {
        for pointer in [
            "/id",
            "/artifact_fingerprint",
            "/config_fingerprint",
            "/fidelity",
            "/fidelity/tier",
            "/fidelity/claim",
            "/required_capabilities",
            "/execution",
            "/execution/loader",
            "/execution/graph",
            "/execution/loop",
            "/execution/specialization",
        ] {
            let field = format!("field \"profiles[0].{}\": is missing", pointer[1..].replace('/', "."));
            assert_message(read_one(&edited(pointer, None)), &["profiles.json", &field]);
        }
        read_one(&edited("/execution/implementation", None)).unwrap();
    }

    #[test]
    fn unknown_fields_are_refused_with_a_suggestion() {
        for (pointer, suggestion) in [
            ("/artifactFingerprint", "did you mean 'artifact_fingerprint'?"),
            ("/required_capability", "did you mean 'required_capabilities'?"),
            ("/fidelity/teir", "did you mean 'tier'?"),
            ("/execution/implementaton", "did you mean 'implementation'?"),
            ("/zzz", "(known: id, artifact_fingerprint"),
        ] {
            assert_refused(pointer, json!(1), &pointer[1..].replace('/', "."), suggestion);
        }
        assert_message(read(r#"{"profile": []}"#), &["field \"profile\"", "did you mean 'profiles'?"]);
    }

    #[test]
    fn unknown_ids_are_refused_with_a_suggestion() {
        for (pointer, value, suggestion) in [
            ("/fidelity/tier", "l4", "'l4' is unknown"),
            ("/execution/loader", "safetensor", "did you mean 'safetensors'?"),
            ("/execution/graph", "qwen3_5", "did you mean 'qwen3.5'?"),
            ("/execution/loop", "autoregresive", "did you mean 'autoregressive'?"),
            ("/execution/specialization", "artefact", "did you mean 'artifact'?"),
            ("/execution/graph", "zzz", "(known: diffusion-gemma, gemma4, glm5.2"),
        ] {
            assert_refused(pointer, json!(value), &pointer[1..].replace('/', "."), suggestion);
        }
        let capabilities = json!(["safetensors", "auto-regressive"]);
        let field = "required_capabilities[1]";
        assert_refused("/required_capabilities", capabilities, field, "did you mean 'autoregressive'?");
    }

    #[test]
    fn values_of_the_wrong_kind_are_named() {
        for (pointer, value, part) in [
            ("/id", json!(1), "expected a string"),
            ("/fidelity", json!("l1"), "expected an object"),
            ("/execution", json!([]), "expected an object"),
            ("/required_capabilities", json!("safetensors"), "expected a list of strings"),
            ("/required_capabilities", json!([1]), "expected a list of strings"),
            ("/artifact_fingerprint", json!("a b"), "an artifact fingerprint is a text without spaces"),
            ("/config_fingerprint", json!("50117975CB405944"), "16 hexadecimal digits"),
        ] {
            assert_refused(pointer, value, &pointer[1..], part);
        }
    }

    #[test]
    fn an_id_must_not_be_empty() {
        assert_refused(
            "/id",
            json!(""),
            "id",
            "a profile needs an id that is not empty and has no control characters",
        );
    }

    #[test]
    fn both_fingerprints_belong_together() {
        for pointer in ["/artifact_fingerprint", "/config_fingerprint"] {
            let part = "is missing: a profile is for one artifact and its config";
            assert_refused(pointer, Value::Null, &pointer[1..], part);
        }
    }

    #[test]
    fn an_implementation_is_named_by_artifact_specializations_only() {
        assert_refused("/execution/implementation", json!(" "), "execution.implementation", "is blank");
        for specialization in ["dedicated", "generated", "generic"] {
            let mut profile = edited("/execution/implementation", Some(json!("fast")));
            profile["execution"]["specialization"] = json!(specialization);
            assert_message(
                read_one(&profile),
                &["execution.implementation", "only the specialization artifact may name an implementation"],
            );
        }
    }

    #[test]
    fn tier_oracle_and_claim_must_agree() {
        let fidelity = |tier, oracle: Option<&str>, claim| {
            let fidelity = json!({ "tier": tier, "oracle": oracle, "claim": claim });
            read_one(&edited("/fidelity", Some(fidelity))).map(|profile| profile.tier())
        };
        let tiers = [
            ("l1", Some("mlx-lm"), "bit-exact"),
            ("l2", Some("mlx-optiq"), "bit-exact"),
            ("l3", None, "measured"),
        ];
        for (tier, right_oracle, right_claim) in tiers {
            for oracle in [None, Some("mlx-lm"), Some("mlx-optiq")] {
                for claim in ["bit-exact", "measured"] {
                    let read = fidelity(tier, oracle, claim);
                    if (oracle, claim) == (right_oracle, right_claim) {
                        assert_eq!(read.unwrap().id(), tier);
                    } else {
                        let field = if oracle == right_oracle { "claim" } else { "oracle" };
                        let field = format!("field \"profiles[0].fidelity.{field}\": tier {tier} has ");
                        assert_message(read, &[&field]);
                    }
                }
            }
        }
    }

    #[test]
    fn loader_loop_and_graph_must_agree() {
        for graph in GraphKind::ALL {
            for loader in LoaderKind::ALL {
                for loop_kind in LoopKind::ALL {
                    let mut profile = edited(
                        "/required_capabilities",
                        Some(json!(Capability::ALL.iter().map(|c| c.id()).collect::<Vec<_>>())),
                    );
                    profile["execution"]["graph"] = json!(graph.id());
                    profile["execution"]["loader"] = json!(loader.id());
                    profile["execution"]["loop"] = json!(loop_kind.id());
                    let read = read_one(&profile);
                    if *loader != graph.loader() {
                        let part = format!("graph {graph} is loaded by {}, not by {loader}", graph.loader());
                        assert_message(read, &["profiles[0].execution.loader", &part]);
                    } else if *loop_kind != graph.loop_kind() {
                        let part = format!(
                            "graph {graph} runs in the loop {}, not in {loop_kind}",
                            graph.loop_kind()
                        );
                        assert_message(read, &["profiles[0].execution.loop", &part]);
                    } else {
                        assert_eq!(read.unwrap().graph(), *graph);
                    }
                }
            }
        }
    }

    #[test]
    fn what_the_composition_needs_must_be_required() {
        let field = "required_capabilities";
        let part = "profile 'mine' does not require what its composition needs: autoregressive, \
                    universal-dense-graph; add it";
        assert_refused("/required_capabilities", json!(["safetensors", "native-mtp"]), field, part);
        let part = "needs: generated-graph; add it";
        assert_refused("/execution/specialization", json!("generated"), field, part);
    }

    #[test]
    fn only_such_an_object_is_a_file_of_profiles() {
        for (text, part) in [
            ("", "is not valid JSON"),
            ("[]", "is not a JSON object"),
            ("{}", "field \"profiles\": is missing"),
            (r#"{"profiles": {}}"#, "expected a list of objects"),
            (r#"{"profiles": [1]}"#, "expected a list of objects"),
        ] {
            assert_message(read(text), &["profiles.json", part]);
        }
        assert_message(read_profiles(Path::new("/no/such/file")), &["/no/such/file", "does not exist"]);
        assert_message(read_profiles(&std::env::temp_dir()), &["is not a regular file"]);
    }

    #[test]
    fn the_second_profile_is_named_as_such() {
        let second = edited("/id", Some(json!("")));
        let text = json!({ "profiles": [valid(), second] }).to_string();
        assert_message(read(&text), &["field \"profiles[1].id\""]);
    }
}
