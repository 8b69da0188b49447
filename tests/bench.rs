//! `russet bench`.

mod common;

use common::{llama, russet};
use serde_json::Value;

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn json_has_the_documented_keys_and_plausible_values() {
    let Some(model) = llama() else { return };
    let options =
        ["--prompt-tokens", "7", "--gen-tokens", "5", "--runs", "3", "--threads", "1", "--fidelity", "l1"];
    let report = russet(&[&["bench", "--json", &model], options.as_slice()].concat()).json();
    assert_eq!(
        keys(&report),
        [
            "model",
            "device",
            "threads",
            "fidelity",
            "prompt_tokens",
            "gen_tokens",
            "sequences",
            "weights_bytes",
            "peak_rss_bytes",
            "prefill_tps",
            "decode_tps",
            "ttft_ms",
        ]
    );
    assert_eq!(report["model"], model.rsplit('/').next().unwrap());
    assert_eq!(report["fidelity"], "L1");
    let counts =
        ["threads", "prompt_tokens", "gen_tokens", "weights_bytes"].map(|key| report[key].as_u64().unwrap());
    assert_eq!(counts, [1, 7, 5, 213_632]);
    let peak = report["peak_rss_bytes"].as_u64().unwrap();
    assert!((1 << 22..1 << 32).contains(&peak), "{peak}");
    for key in ["prefill_tps", "decode_tps", "ttft_ms"] {
        assert_eq!(keys(&report[key]), ["median", "min", "max"]);
        let [median, min, max] = ["median", "min", "max"].map(|name| report[key][name].as_f64().unwrap());
        assert!(0.0 < min && min <= median && median <= max, "{key}: {report}");
    }
    // Time to the first token is the time of the prompt: the fastest run is the same by both.
    let [tps, ms] =
        [("prefill_tps", "max"), ("ttft_ms", "min")].map(|(key, name)| report[key][name].as_f64().unwrap());
    assert!((tps * ms / 1e3 - 7.0).abs() < 1e-6, "{report}");
}

#[test]
fn rates_are_those_of_all_sequences_together() {
    let Some(model) = llama() else { return };
    let options = ["--prompt-tokens", "9", "--gen-tokens", "5", "--runs", "1", "--sequences", "4"];
    let report = russet(&[&["bench", "--json", &model], options.as_slice()].concat()).json();
    assert_eq!(report["sequences"], 4);
    let value = |key: &str| report[key]["median"].as_f64().unwrap();
    assert!((value("prefill_tps") * value("ttft_ms") / 1e3 - 36.0).abs() < 1e-6, "{report}");
}

#[test]
fn threads_and_fidelity_that_ran_are_named() {
    let Some(model) = llama() else { return };
    let short = ["--prompt-tokens", "2", "--gen-tokens", "2", "--runs", "1", "--threads", "2"];
    let report = russet(&[&["bench", "--json", &model], short.as_slice()].concat()).json();
    // MLX has no threads to choose.
    let expected = if report["device"] == "cpu" { ("L3", 2) } else { ("L1", 1) };
    assert_eq!((report["fidelity"].as_str().unwrap(), report["threads"].as_u64().unwrap()), expected);
}

#[test]
fn text_is_a_table() {
    let Some(model) = llama() else { return };
    let text = russet(&["bench", &model, "--prompt-tokens", "3", "--gen-tokens", "2", "--runs", "2"]).text();
    let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(
        words.contains(&vec!["prompt_tokens", "3"]) && words.contains(&vec!["weights_bytes", "0.2", "MB"]),
        "{text}"
    );
    assert!(words.contains(&vec!["median", "min", "max"]), "{text}");
    for label in ["prefill_tps", "decode_tps", "ttft_ms"] {
        let row = words.iter().find(|row| row[0] == label).unwrap();
        assert!(row.len() == 4 && row[1..].iter().all(|n| n.parse::<f64>().unwrap() > 0.0), "{text}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let Some(model) = llama() else { return };
    russet(&["bench", &model, "--prompt-tokens", "4096"]).fails(1, &["--prompt-tokens", "context of 4096"]);
    russet(&["bench", &model, "--gen-tokens", "4294967295"]).fails(1, &["--gen-tokens", "context of 4096"]);
    russet(&["bench", &model, "--fidelity", "l2"]).fails(1, &["l2"]);
    russet(&["bench", "no-such-model"]).fails(1, &["no-such-model"]);
}
