//! `russet fit`, against what a process really takes.

mod common;

use std::process::{Command, Stdio};

use common::watch_memory;
use serde_json::Value;

fn fit(args: &[&str]) -> Value {
    let home = common::shared_home();
    russet_json(&[&["fit", "--json", "--home", home.to_str().unwrap()], args].concat())
}

fn russet_json(args: &[&str]) -> Value {
    let output = Command::new(common::RUSSET).args(args).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
}

#[test]
fn the_prediction_is_within_a_tenth_of_what_a_run_takes() {
    common::starter();
    let home = common::shared_home();
    // A prompt that leaves the state most of the memory that is not weights.
    let prompt = "one two three four five six seven eight ".repeat(220);
    for fidelity in ["l3", "l1"] {
        // MLX is too slow on a CPU for a prompt of this length.
        let (prompt, tokens) = if fidelity == "l3" { (&prompt[..], 8) } else { ("one two three", 1) };
        let mut child = Command::new(common::RUSSET)
            .args([
                "run",
                "--raw",
                "--json",
                "--temp",
                "0",
                "--fidelity",
                fidelity,
                "--max-tokens",
                &tokens.to_string(),
            ])
            .args(["--home", home.to_str().unwrap(), prompt])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let peak = watch_memory(&mut child);
        let output = child.wait_with_output().unwrap();
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        let context = result["timings"]["prompt_tokens"].as_u64().unwrap() + tokens;
        assert!(fidelity == "l1" || context > 1500, "{context} tokens");
        let plan = fit(&["--fidelity", fidelity, "--context", &context.to_string()]);
        let total = plan["total_bytes"].as_f64().unwrap();
        if cfg!(target_os = "linux") {
            let ratio = total / peak as f64;
            assert!(
                (0.9..1.1).contains(&ratio),
                "{fidelity}: {total} bytes predicted, {peak} used: {ratio:.2}"
            );
        }
    }
}

#[test]
fn what_does_not_fit_is_said_with_the_numbers() {
    common::starter();
    let roomy = fit(&["--context", "1000"]);
    assert_eq!(roomy["fits"], true);
    assert_eq!(roomy["longest_sequence"], roomy["max_positions"]);
    let (fixed, state) = (
        roomy["weights_bytes"].as_u64().unwrap() + roomy["overhead_bytes"].as_u64().unwrap(),
        roomy["state_bytes_per_sequence"].as_u64().unwrap(),
    );
    let budget = (fixed + state).to_string();
    let exact = fit(&["--context", "1000", "--memory-budget", &budget]);
    assert_eq!((&exact["fits"], &exact["longest_sequence"]), (&true.into(), &1000.into()));
    let two = fit(&["--context", "1000", "--sequences", "2", "--memory-budget", &budget]);
    assert_eq!(two["fits"], false);
    let output = Command::new(common::RUSSET)
        .args(["fit", "--context", "1001", "--memory-budget", &budget, "--home"])
        .arg(common::shared_home())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("fits             no"));
}
