//! `russet eval`: recordings equal the reference's in every byte.

mod common;

use std::fs;
use std::path::PathBuf;

use common::{llama, russet, text};
use russet_testing::{Oracle, Processors, Reference, ReferenceSpec, Sampling, Tokens};
use serde_json::{Value, json};
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Records at fidelity L1 to a file of this name.
fn record(folder: &TempDir, name: &str, model: &str, args: &[&str]) -> Reference {
    let out = folder.path().join(format!("{name}.safetensors"));
    let fixed = ["eval", "logits", "--fidelity", "l1", "--model", model, "--out", out.to_str().unwrap()];
    assert_eq!(russet(&[&fixed, args].concat()).text(), "");
    Reference::open(out)
}

#[track_caller]
fn assert_equal(actual: &Reference, expected: &Reference) {
    assert_eq!(expected.difference(actual), None);
}

#[test]
fn a_recording_equals_the_reference_however_tokens_are_given() {
    let (Some(oracle), Some(model)) = (Oracle::get(), llama()) else { return };
    let folder = folder();
    let tokens = Tokens::Random { count: 24, seed: 7 };
    let list = Tokens::List(tokens.ids()).to_string();
    let expected = oracle.reference(model.as_ref(), &ReferenceSpec::new(tokens, 6));
    assert_eq!(expected.names(), ["logprobs", "prompt_logits", "prompt_tokens", "step_logits", "tokens"]);

    let file = folder.path().join("tokens.txt");
    fs::write(&file, list.replace(',', ",\n ") + "\n").unwrap();
    for given in ["rand:24:7", "rand:24:7:256", &list, &format!("@{}", text(&file))] {
        assert_equal(&record(&folder, "a", &model, &["--tokens", given, "--steps", "6"]), &expected);
    }
}

#[test]
fn the_prefill_chunk_is_that_of_the_reference() {
    let (Some(oracle), Some(model)) = (Oracle::get(), llama()) else { return };
    let folder = folder();
    for chunk in [1, 5, 23] {
        let tokens = Tokens::Random { count: 24, seed: 2 };
        let spec = ReferenceSpec { prefill_chunk: chunk, ..ReferenceSpec::new(tokens, 3) };
        let args = ["--tokens", "rand:24:2", "--steps", "3", "--prefill-chunk", &chunk.to_string()];
        assert_equal(&record(&folder, "a", &model, &args), &oracle.reference(model.as_ref(), &spec));
    }
}

#[test]
fn without_steps_the_prompt_alone_is_recorded() {
    let (Some(oracle), Some(model)) = (Oracle::get(), llama()) else { return };
    let spec = ReferenceSpec::new(Tokens::List(vec![5]), 0);
    let actual = record(&folder(), "a", &model, &["--tokens", "5", "--steps", "0"]);
    assert_eq!(actual.names(), ["prompt_logits", "prompt_tokens", "tokens"]);
    assert_equal(&actual, &oracle.reference(model.as_ref(), &spec));
}

#[test]
fn every_sampling_option_is_that_of_the_reference() {
    let (Some(oracle), Some(model)) = (Oracle::get(), llama()) else { return };
    let plain =
        ReferenceSpec { seed: Some(9), ..ReferenceSpec::new(Tokens::Random { count: 8, seed: 3 }, 12) };
    let sampled = |sampling| ReferenceSpec {
        sampling,
        processors: Processors {
            logit_bias: [(7, 1.5), (300, -2.0)].into(),
            repetition_penalty: Some(1.3),
            repetition_context_size: 5,
            presence_penalty: Some(0.5),
            presence_context_size: 6,
            frequency_penalty: Some(0.25),
            frequency_context_size: 7,
        },
        ..plain.clone()
    };
    let processors = [
        "--logit-bias=7:1.5",
        "--logit-bias=300:-2",
        "--repetition-penalty=1.3",
        "--repetition-context-size=5",
        "--presence-penalty=0.5",
        "--presence-context-size=6",
        "--frequency-penalty=0.25",
        "--frequency-context-size=7",
    ];
    let truncation = Sampling {
        temp: 0.8,
        top_p: 0.95,
        min_p: 0.02,
        min_tokens_to_keep: 3,
        top_k: 40,
        xtc_probability: 0.5,
        xtc_threshold: 0.01,
        ..Sampling::default()
    };
    let truncated = [
        "--temp=0.8",
        "--top-p=0.95",
        "--min-p=0.02",
        "--min-tokens-to-keep=3",
        "--top-k=40",
        "--xtc-probability=0.5",
        "--xtc-threshold=0.01",
    ];
    let folder = folder();
    let common = ["--tokens", "rand:8:3", "--steps", "12", "--seed", "9"];
    for (sampling, args) in [(Sampling::default(), [].as_slice()), (truncation, &truncated)] {
        let expected = oracle.reference(model.as_ref(), &sampled(sampling));
        let actual = record(&folder, "a", &model, &[&common, processors.as_slice(), args].concat());
        assert_equal(&actual, &expected);
    }
}

#[test]
fn a_recording_says_what_it_was_made_with() {
    let Some(model) = llama() else { return };
    let metadata = record(&folder(), "a", &model, &["--tokens", "1,2", "--steps", "1"]).metadata();
    let of = |name: &str| metadata.get(name).unwrap_or_else(|| panic!("no {name} in {metadata:?}")).as_str();
    assert_eq!((of("format"), of("fidelity"), of("mlx")), ("mlx", "L1", "0.32.4"));
    assert_eq!(of("russet"), env!("CARGO_PKG_VERSION"));
    assert_eq!(of("model"), model.rsplit('/').next().unwrap());
    assert!(of("device").contains("pu"), "{metadata:?}");
    assert!(of("args").contains("tokens: [1, 2]") && of("args").contains("steps: 1"), "{metadata:?}");
}

#[test]
fn wrong_tokens_and_files_are_named() {
    let Some(model) = llama() else { return };
    let folder = folder();
    let out = text(&folder.path().join("a.safetensors"));
    let eval = |tokens: &str, out: &str| {
        russet(&["eval", "logits", "--model", &model, "--tokens", tokens, "--out", out])
    };
    for (tokens, part) in [
        ("1,x", "'x'"),
        ("1,-2", "'-2'"),
        ("4294967296", "'4294967296'"),
        ("rand:", "rand:"),
        ("rand:x", "'x'"),
        ("rand:3:1:0", "rand:3:1:0"),
        ("rand:3:1:9:9", "rand:3:1:9:9"),
        ("rand:4294967295", "at most"),
        ("@/no/such/file", "/no/such/file"),
        ("", "empty"),
        ("rand:0", "empty"),
        ("1,512", "512"),
        ("rand:50:1:100000", "vocabulary of 512"),
    ] {
        eval(tokens, &out).fails(1, &[part]);
    }
    eval("1", &text(&folder.path().join("a.txt"))).fails(1, &["--out", ".safetensors"]);
    eval("1", &text(&folder.path().join("no/such/a.safetensors"))).fails(1, &["no/such/a.safetensors"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "a failure leaves a file");
}

#[cfg(target_os = "linux")]
#[test]
fn a_recording_on_a_full_disk_is_an_error() {
    let Some(model) = llama() else { return };
    let folder = folder();
    let out = folder.path().join("a.safetensors");
    std::os::unix::fs::symlink("/dev/full", &out).unwrap();
    russet(&["eval", "logits", "--model", &model, "--tokens", "1", "--out", &text(&out)])
        .fails(1, &["cannot record logits", "a.safetensors"]);
}

fn compare(a: &Reference, b: &Reference) -> (Value, String, Option<i32>) {
    let [a, b] = [a, b].map(|file| text(file.path()));
    let json = russet(&["eval", "compare", &a, &b, "--json"]);
    let plain = russet(&["eval", "compare", &a, &b]);
    assert_eq!((&json.stderr, json.code), (&String::new(), plain.code));
    (serde_json::from_str(&json.stdout).unwrap(), plain.stdout, json.code)
}

#[test]
fn comparing_equal_recordings_succeeds() {
    let (Some(oracle), Some(model)) = (Oracle::get(), llama()) else { return };
    let spec = ReferenceSpec::new(Tokens::Random { count: 24, seed: 7 }, 6);
    let folder = folder();
    let ours = record(&folder, "a", &model, &["--tokens", "rand:24:7", "--steps", "6"]);
    let (report, text, code) = compare(&oracle.reference(model.as_ref(), &spec), &ours);
    assert_eq!(code, Some(0));
    assert_eq!(
        report,
        json!({
            "bit_equal": true,
            "arrays": {
                "logprobs": true,
                "prompt_logits": true,
                "prompt_tokens": true,
                "step_logits": true,
                "tokens": true,
            },
            "mismatched": [],
            "divergence": {
                "positions": 7,
                "max_difference": 0.0,
                "mean_kl": 0.0,
                "max_kl": 0.0,
                "top1_agreement": 1.0,
            },
        })
    );
    assert_eq!(text.matches("equal in every bit").count(), 5, "{text}");
    assert!(text.contains("positions        7") && text.contains("100.00 %"), "{text}");
}

#[test]
fn comparing_different_recordings_fails_and_says_how_much() {
    let Some(model) = llama() else { return };
    let folder = folder();
    let record = |name, tokens, steps| record(&folder, name, &model, &["--tokens", tokens, "--steps", steps]);
    let a = record("a", "1,2,3", "4");
    let (report, text, code) = compare(&a, &record("b", "3,2,1", "4"));
    assert_eq!(
        (code, &report["bit_equal"], &report["divergence"]["positions"]),
        (Some(1), &json!(false), &json!(5))
    );
    assert_eq!((&report["arrays"]["prompt_logits"], &report["mismatched"]), (&json!(false), &json!([])));
    let number = |name: &str| report["divergence"][name].as_f64().unwrap();
    assert!(number("max_difference") > 0.01 && number("mean_kl") > 0.001, "{report}");
    assert!(number("max_kl") >= number("mean_kl") && number("top1_agreement") <= 1.0, "{report}");
    assert!(text.contains("prompt_logits    differs"), "{text}");

    // Of another number of steps: what has another shape can't be compared.
    let (report, text, code) = compare(&a, &record("c", "1,2,3", "2"));
    assert_eq!(
        (code, &report["bit_equal"], &report["divergence"]["positions"]),
        (Some(1), &json!(false), &json!(1))
    );
    assert_eq!(report["mismatched"], json!(["logprobs", "step_logits", "tokens"]));
    assert_eq!(report["arrays"], json!({"prompt_logits": true, "prompt_tokens": true}));
    assert!(text.contains("step_logits      missing in one file, or of another shape or dtype"), "{text}");
}

#[test]
fn files_that_are_no_recordings_are_named() {
    let Some(model) = llama() else { return };
    let folder = folder();
    let a = record(&folder, "a", &model, &["--tokens", "1", "--steps", "1"]);
    let write = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let whole = fs::read(a.path()).unwrap();
    for (path, part) in [
        (folder.path().join("missing.safetensors"), "missing.safetensors"),
        (folder.path().to_owned(), ""),
        (write("empty.safetensors", b""), "empty.safetensors"),
        (write("garbage.safetensors", &[0xff; 64]), "garbage.safetensors"),
        (write("huge.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"), "huge.safetensors"),
        (write("short.safetensors", &whole[..whole.len() - 100]), "short.safetensors"),
        (format!("{model}/model.safetensors").into(), "no logits"),
    ] {
        for args in [[a.path(), &path], [&path, a.path()]] {
            russet(&["eval", "compare", &text(args[0]), &text(args[1])]).fails(1, &["cannot compare", part]);
        }
    }
}

#[test]
fn the_error_of_the_cpu_kernels_is_measured_on_a_text() {
    let Some(model) = llama() else { return };
    let folder = folder();
    let file = text(&folder.path().join("text.txt"));
    fs::write(&file, "The quick brown fox jumps over the lazy dog.").unwrap();
    let args = ["eval", "error", "--model", &model, "--text", &file];
    if russet(&["inspect", "--json", &model]).json()["device"] != "cpu" {
        russet(&args).fails(1, &["l3"]);
        return;
    }
    let report = russet(&[args.as_slice(), &["--json"]].concat()).json();
    let keys: Vec<&String> = report.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["positions", "max_difference", "mean_kl", "max_kl", "top1_agreement"]);
    let number = |name: &str| report[name].as_f64().unwrap();
    assert!(number("positions") > 30.0 && number("top1_agreement") > 0.9, "{report}");
    assert!(number("mean_kl").abs() < 1e-3 && number("mean_kl") <= number("max_kl"), "{report}");
    let shown = russet(&args).text();
    assert!(shown.contains(&format!("positions        {}\n", report["positions"])), "{shown}");

    russet(&[args.as_slice(), &["--fidelity", "l1"]].concat()).fails(1, &["l3", "L1"]);
    russet(&["eval", "error", "--model", &model, "--text", "/no/such/file"]).fails(1, &["/no/such/file"]);
    fs::write(&file, "").unwrap();
    russet(&args).fails(1, &["no tokens"]);
    fs::write(&file, b"\xff").unwrap();
    russet(&args).fails(1, &["text.txt", "UTF-8"]);
}
