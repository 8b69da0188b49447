//! `russet run` on a tiny checkpoint.

mod common;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{
    Copy, ENVIRONMENT, Finished, LETTERS, RUSSET, interrupt, llama, russet, russet_reading, start, text,
};
use russet_testing::{FixtureSpec, Oracle};
use serde_json::{Value, json};

/// What the fixture's chat template makes of the one message "hello".
const HELLO: &str = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n";

/// Options after which every answer consists of `count` letters.
fn letters<'a>(args: &[&'a str], count: &'a str) -> Vec<&'a str> {
    [args, &["--max-tokens", count], &LETTERS].concat()
}

/// The JSON result of `russet run` with these arguments.
#[track_caller]
fn result(args: &[&str]) -> Value {
    russet(&[&["run", "--json"], args].concat()).json()
}

#[test]
fn text_goes_to_standard_output_and_statistics_to_standard_error() {
    let Some(model) = llama() else { return };
    let finished = russet(&letters(&["run", &model, "hello"], "5"));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let answer = finished.stdout.strip_suffix('\n').unwrap();
    assert!(answer.len() == 5 && answer.bytes().all(|b| b.is_ascii_lowercase()), "{finished:?}");
    let lines: Vec<&str> = finished.stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{finished:?}");
    assert!(lines[0].starts_with("prompt: 22 tokens, ") && lines[0].contains("first token"), "{}", lines[0]);
    assert!(lines[1].starts_with("answer: 5 tokens, ") && lines[1].contains("; fidelity L"), "{}", lines[1]);
}

#[test]
fn model_and_prompt_may_be_given_in_every_way() {
    let Some(model) = llama() else { return };
    let args = |args: &[&'static str]| -> Vec<String> {
        letters(&[&["run"], args].concat(), "8").iter().map(|arg| arg.replace("MODEL", &model)).collect()
    };
    let run = |given: &[&'static str], stdin: &str| {
        let args = args(given);
        russet_reading(stdin, &args.iter().map(String::as_str).collect::<Vec<_>>()).text()
    };
    let expected = run(&["MODEL", "hello"], "");
    assert_ne!(expected, run(&["MODEL", "hellp"], ""));
    for given in [
        ["--model", "MODEL", "--prompt", "hello"].as_slice(),
        &["-m", "MODEL", "-p", "hello"],
        &["--model", "MODEL", "hello"],
        &["--prompt", "hello", "MODEL"],
    ] {
        assert_eq!(run(given, "not the prompt"), expected, "{given:?}");
    }
    for given in [
        ["MODEL"].as_slice(),
        &["--model", "MODEL"],
        &["MODEL", "-"],
        &["MODEL", "--prompt", "-"],
        &["-m", "MODEL", "-p", "-"],
    ] {
        assert_eq!(run(given, "hello"), expected, "{given:?}");
    }
}

#[test]
fn a_prompt_from_standard_input_is_taken_as_it_is() {
    let Some(model) = llama() else { return };
    let args = ["run", &model, "--raw", "--json", "--max-tokens", "0"];
    let tokens = |prompt: &str| russet_reading(prompt, &args).json()["timings"]["prompt_tokens"].clone();
    assert_eq!(tokens("xyz"), 3);
    assert_eq!(tokens("xyz\n"), 4);
    assert_eq!(tokens(" xyz"), 4);
}

#[test]
fn a_single_positional_that_names_no_model_is_a_prompt_for_the_starter() {
    russet(&["run", "Why is the sky blue?", "--offline"]).fails(1, &["starter model is not installed"]);
    russet(&["run", "hello", "--offline"]).fails(1, &["starter model is not installed"]);
}

#[test]
fn a_model_that_cannot_be_used_is_reported_before_the_prompt_is_read() {
    for args in [
        ["run", "/no-such-model"].as_slice(),
        &["run", "./no-such-model"],
        &["run", "--model", "no-such-model"],
        &["run", "no-such-model", "hello"],
        &["run", "--prompt", "hello", "no-such-model"],
    ] {
        russet(args).fails(1, &["no-such-model"]);
    }
}

#[test]
fn a_model_or_prompt_that_is_given_twice_is_refused() {
    let Some(model) = llama() else { return };
    for args in [
        ["run", "--model", &model, "--prompt", "a", "b"].as_slice(),
        &["run", "--model", &model, &model, "a"],
        &["run", "--prompt", "a", &model, "b"],
    ] {
        russet(args).fails(1, &["twice"]);
    }
}

#[test]
fn an_empty_prompt_is_refused() {
    let Some(model) = llama() else { return };
    russet(&["run", &model, ""]).fails(1, &["the prompt is empty"]);
    russet(&["run", &model]).fails(1, &["the prompt is empty"]);
    russet(&["run", &model, "--raw", "--prompt", ""]).fails(1, &["the prompt is empty"]);
    russet_reading(b"\xff\xfe".as_slice(), &["run", &model])
        .fails(1, &["prompt from standard input", "UTF-8"]);
    // Nothing is installed for it.
    russet(&["run", ""]).fails(1, &["the prompt is empty"]);
}

#[test]
fn the_chat_template_is_applied_unless_raw() {
    let Some(model) = llama() else { return };
    let chat = result(&letters(&[&model, "hello"], "4"));
    let raw = result(&letters(&[&model, HELLO, "--raw"], "4"));
    assert_eq!(chat["timings"]["prompt_tokens"], 22);
    assert_eq!(chat["tokens"], raw["tokens"]);
    // "he" is a token of its own.
    assert_eq!(result(&[&model, "hello", "--raw", "-n", "0"])["timings"]["prompt_tokens"], 4);
}

#[test]
fn a_system_message_comes_first() {
    let Some(model) = llama() else { return };
    let rendered = format!("<|im_start|>system\nBe brief.<|im_end|>\n{HELLO}");
    let expected = result(&letters(&[&model, &rendered, "--raw"], "4"));
    for flag in ["--system", "--system-prompt"] {
        let actual = result(&letters(&[&model, "hello", flag, "Be brief."], "4"));
        assert_eq!(actual["tokens"], expected["tokens"]);
        assert_eq!(actual["timings"]["prompt_tokens"], expected["timings"]["prompt_tokens"]);
    }
}

#[test]
fn values_for_the_chat_template_reach_it() {
    let Some(model) = llama() else { return };
    let rendered = format!("{HELLO}<think>\n\n</think>\n\n");
    let expected = result(&letters(&[&model, &rendered, "--raw"], "4"));
    let values = r#"{"enable_thinking": false}"#;
    let actual = result(&letters(&[&model, "hello", "--chat-template-config", values], "4"));
    assert_eq!(actual["tokens"], expected["tokens"]);
    assert_eq!(actual["timings"]["prompt_tokens"], expected["timings"]["prompt_tokens"]);
}

#[test]
fn without_a_chat_template_the_prompt_is_given_as_it_is() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    copy.remove_template();
    let raw = result(&letters(&[&model, "hello", "--raw"], "4"));
    let plain = result(&letters(&[&copy.arg(), "hello"], "4"));
    assert_eq!(plain["tokens"], raw["tokens"]);
    russet(&["run", &copy.arg(), "hello", "--system", "Be brief."]).fails(1, &["--system", "chat template"]);
}

#[test]
fn a_chat_template_that_fails_is_reported_and_raw_still_works() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    for (template, parts) in [
        ("{% for m in messages %}", ["chat template", "end"]),
        ("{{ raise_exception('no system messages here') }}", ["chat template", "no system messages here"]),
        ("{{ messages[0].content.nope.nope }}", ["chat template", "undefined"]),
        ("{{ no_such_function() }}", ["chat template", "no_such_function"]),
    ] {
        copy.set_template(template);
        russet(&["run", &copy.arg(), "hello"]).fails(1, &parts);
        russet(&["run", &copy.arg(), "hello", "--raw", "-n", "1"]).text();
    }
}

#[test]
fn json_has_text_tokens_reason_seed_and_timings() {
    let Some(model) = llama() else { return };
    let finished = russet(&letters(&["run", &model, "hello", "--json", "--seed", "7"], "6"));
    assert_eq!(finished.stderr, "");
    let result = finished.json();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&result), ["model", "fidelity", "text", "tokens", "finish_reason", "seed", "timings"]);
    assert_eq!(
        keys(&result["timings"]),
        ["prompt_tokens", "generated_tokens", "ttft_ms", "prefill_tps", "decode_tps", "peak_memory_bytes"]
    );
    assert!(model.ends_with(result["model"].as_str().unwrap()), "{result}");
    assert!(["L1", "L3"].contains(&result["fidelity"].as_str().unwrap()), "{result}");
    assert_eq!(result["finish_reason"], "length");
    assert_eq!((&result["seed"], &result["timings"]["generated_tokens"]), (&json!(7), &json!(6)));
    let letters: String = result["tokens"].as_array().unwrap().iter().map(letter).collect();
    assert_eq!(result["text"], letters);
    for (name, value) in result["timings"].as_object().unwrap() {
        assert!(value.as_f64().unwrap() > 0.0, "{name}: {value}");
    }
    let streamed = russet(&self::letters(&["run", &model, "hello", "--seed", "7"], "6")).text();
    assert_eq!(streamed, letters + "\n");
}

/// The letter of a token of [`LETTERS`].
fn letter(token: &Value) -> char {
    char::from(u8::try_from(token.as_u64().unwrap()).unwrap())
}

#[test]
fn equal_seeds_give_equal_tokens_and_omitted_seeds_differ() {
    let Some(model) = llama() else { return };
    let sampled = |seed: &[&str]| {
        let args = [&[model.as_str(), "hello", "--temp", "1"], seed].concat();
        result(&letters(&args, "24"))
    };
    assert_eq!(sampled(&["--seed", "1"])["tokens"], sampled(&["--seed", "1"])["tokens"]);
    assert_ne!(sampled(&["--seed", "1"])["tokens"], sampled(&["--seed", "2"])["tokens"]);

    let runs: Vec<Value> = (0..4).map(|_| sampled(&[])).collect();
    let distinct = |field: &str| runs.iter().map(|run| run[field].to_string()).collect::<BTreeSet<_>>().len();
    assert_eq!((distinct("seed"), distinct("tokens")), (4, 4), "{runs:?}");
    // The seed that was drawn repeats the answer.
    assert_eq!(sampled(&["--seed", &runs[0]["seed"].to_string()])["tokens"], runs[0]["tokens"]);
}

#[test]
fn a_stop_string_ends_the_text_before_it_wherever_tokens_split_it() {
    let Some(model) = llama() else { return };
    let args = [model.as_str(), "hello", "--temp", "1", "--seed", "5"];
    let whole = result(&letters(&args, "40"));
    let text = whole["text"].as_str().unwrap();
    // Three letters are three tokens.
    let stop = &text[20..23];
    let end = text.find(stop).unwrap();
    for stops in [["--stop", stop, "--stop", "Z"], ["--stop", "\n\n", "--stop", stop]] {
        let args = letters(&[args.as_slice(), &stops].concat(), "40");
        let stopped = result(&args);
        assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&json!(text[..end]), &json!("stop")));
        assert_eq!(stopped["tokens"].as_array().unwrap().len(), end + 3);
        assert_eq!(russet(&[&["run"], args.as_slice()].concat()).text(), format!("{}\n", &text[..end]));
    }
    // What could have become a stop string is text in the end.
    let unfinished = format!("{}Z", &text[38..]);
    let result = result(&letters(&[args.as_slice(), &["--stop", &unfinished]].concat(), "40"));
    assert_eq!((&result["text"], &result["finish_reason"]), (&whole["text"], &json!("length")));
}

#[test]
fn max_tokens_is_kept() {
    let Some(model) = llama() else { return };
    for count in [0, 1, 2, 300] {
        let result = result(&letters(&[&model, "hello"], &count.to_string()));
        assert_eq!(result["tokens"].as_array().unwrap().len(), count);
        assert_eq!(result["text"].as_str().unwrap().len(), count);
        assert_eq!(result["finish_reason"], "length");
    }
    let finished = russet(&["run", &model, "hello", "--max-tokens", "0"]);
    assert!(finished.stderr.contains("answer: 0 tokens, 0.0 tokens/s"), "{finished:?}");
    assert_eq!(finished.text(), "\n");
}

#[test]
fn an_end_of_sequence_token_ends_the_answer_and_is_no_text() {
    let Some(model) = llama() else { return };
    // <|im_end|>
    let result = result(&[&model, "hello", "--logit-bias", "264:99"]);
    assert_eq!((&result["tokens"], &result["text"]), (&json!([264]), &json!("")));
    assert_eq!(result["finish_reason"], "stop");
}

#[test]
fn answers_end_with_the_context_and_longer_prompts_are_refused() {
    let Some(oracle) = Oracle::get() else { return };
    let model = text(&oracle.fixture(&FixtureSpec::new("llama").with("max_position_embeddings", json!(32))));
    let prompt = "x".repeat(30);
    let answer = result(&letters(&[&model, &prompt, "--raw"], "100"));
    assert_eq!((&answer["text"].as_str().unwrap().len(), &answer["finish_reason"]), (&2, &json!("length")));
    let prompt = "x".repeat(32);
    russet(&["run", &model, &prompt, "--raw"]).fails(1, &["32 tokens", "context of 32"]);
}

#[test]
fn sampling_options_out_of_range_are_named() {
    let Some(model) = llama() else { return };
    for (option, values) in [
        ("--temp", ["-1", "nan", "inf"].as_slice()),
        ("--top-p", &["-0.1", "1.5", "nan"]),
        ("--top-k", &["-1", "512"]),
        ("--min-p", &["-0.1", "2", "nan"]),
        ("--min-tokens-to-keep", &["0", "-3", "513"]),
        ("--xtc-probability", &["-0.1", "1.1"]),
        ("--xtc-threshold", &["-0.1", "0.6"]),
        ("--repetition-penalty", &["-1", "nan", "inf"]),
        ("--repetition-context-size", &["-1"]),
        ("--presence-penalty", &["nan"]),
        ("--presence-context-size", &["-1"]),
        ("--frequency-penalty", &["inf"]),
        ("--frequency-context-size", &["-1"]),
        ("--logit-bias", &["512:1", "4000000000:1", "5:nan"]),
    ] {
        for value in values {
            let option = option.trim_start_matches('-');
            russet(&["run", &model, "hello", &format!("--{option}"), value]).fails(1, &[option]);
        }
    }
}

#[test]
fn sampling_defaults_come_from_generation_config_and_flags_override_them() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    copy.edit("generation_config.json", |config| {
        config["do_sample"] = json!(true);
        config["temperature"] = json!(1.5);
        config["top_k"] = json!(9);
        config["top_p"] = json!(0.9);
        config["repetition_penalty"] = json!(1.2);
    });
    let tokens = |model: &str, flags: &[&str]| {
        result(&[&[model, "hello", "-n", "24", "--seed", "3", "--logit-bias", "264:-99"], flags].concat())
            ["tokens"]
            .clone()
    };
    let explicit = ["--temp", "1.5", "--top-k", "9", "--top-p", "0.9", "--repetition-penalty", "1.2"];
    let recommended = tokens(&copy.arg(), &[]);
    assert_eq!(recommended, tokens(&model, &explicit));
    assert_ne!(recommended, tokens(&model, &[]));
    for i in (0..explicit.len()).step_by(2) {
        let neutral = ["0", "0", "1", "1"][i / 2];
        let overridden = [explicit[i], neutral];
        let expected = [&explicit[..i], &overridden, &explicit[i + 2..]].concat();
        assert_eq!(tokens(&copy.arg(), &overridden), tokens(&model, &expected), "{overridden:?}");
    }
    // The fixture's own config says not to sample.
    assert_eq!(tokens(&model, &[]), tokens(&model, &["--temp", "0"]));
}

#[test]
fn the_fidelity_asked_for_runs_or_is_refused() {
    let Some(model) = llama() else { return };
    let device = russet(&["inspect", "--json", &model]).json()["device"].clone();
    let on_cpu = device == "cpu";
    let tier = |fidelity| result(&[&model, "hello", "-n", "1", "--fidelity", fidelity])["fidelity"].clone();
    assert_eq!(tier("l1"), "L1");
    assert_eq!(tier("auto"), if on_cpu { "L3" } else { "L1" });
    if on_cpu {
        assert_eq!(tier("l3"), "L3");
    } else {
        russet(&["run", &model, "hello", "--fidelity", "l3"]).fails(1, &["l3", "use l1"]);
    }
    russet(&["run", &model, "hello", "--fidelity", "l2"]).fails(1, &["l2", "use l1"]);
    russet(&["run", &model, "hello", "--fidelity", "xx"]).fails(2, &["'xx'", "auto, l1, l2 or l3"]);
}

/// A model whose context no generation fills in the time of a test.
fn endless() -> Option<String> {
    let spec = FixtureSpec::new("llama").with("max_position_embeddings", json!(100_000));
    Some(text(&Oracle::get()?.fixture(&spec)))
}

#[test]
fn a_reader_that_has_enough_ends_the_run_quietly() {
    let Some(model) = endless() else { return };
    let mut child = start(&letters(&["run", &model, "hello"], "100000"));
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 10]).unwrap();
    drop(stdout);
    let quiet = Finished { code: Some(0), stdout: String::new(), stderr: String::new() };
    assert_eq!(Finished::of(child.wait_with_output().unwrap()), quiet);

    // The same where all is written at once.
    for args in [["run", &model, "hello", "--json"].as_slice(), &["inspect", &model], &["completions", "zsh"]]
    {
        let mut child = start(args);
        drop(child.stdout.take());
        assert_eq!(Finished::of(child.wait_with_output().unwrap()), quiet);
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let Ok(full) = File::options().write(true).open("/dev/full") else {
        let _ = writeln!(std::io::stderr(), "skipped: this system has no /dev/full");
        return;
    };
    let Some(model) = llama() else { return };
    for args in [
        ["run", &model, "hello"].as_slice(),
        &["run", &model, "hello", "--json"],
        &["run", &model, "hello", "-n", "0"],
        &["inspect", &model],
        &["inspect", &model, "--json"],
        &["ls"],
        &["completions", "bash"],
    ] {
        let mut command = Command::new(RUSSET);
        command.args(args).envs(ENVIRONMENT).stdout(full.try_clone().unwrap());
        Finished::of(command.output().unwrap()).fails(1, &["cannot write to standard output"]);

        // A full disk under standard error takes nothing from the result.
        command.stdout(Stdio::piped()).stderr(full.try_clone().unwrap());
        let output = command.output().unwrap();
        assert!(output.status.success() && !output.stdout.is_empty(), "{args:?}: {output:?}");
    }
}

#[test]
fn ctrl_c_ends_an_answer_and_keeps_what_was_generated() {
    let Some(model) = endless() else { return };
    let mut child = start(&letters(&["run", &model, "hello"], "100000"));
    let mut stdout = child.stdout.take().unwrap();
    let mut answer = vec![0; 10];
    stdout.read_exact(&mut answer).unwrap();
    interrupt(&child);
    stdout.read_to_end(&mut answer).unwrap();
    let finished = Finished::of(child.wait_with_output().unwrap());
    assert_eq!(finished.code, Some(130), "{finished:?}");
    let (last, answer) = answer.split_last().unwrap();
    assert_eq!(*last, b'\n');
    assert!(answer.iter().all(u8::is_ascii_lowercase));
    assert!(finished.stderr.contains(&format!("answer: {} tokens", answer.len())), "{finished:?}");
}

#[test]
fn ctrl_c_during_a_json_run_gives_the_result_so_far() {
    let Some(model) = endless() else { return };
    let child = start(&letters(&["run", &model, "hello", "--json"], "100000"));
    std::thread::sleep(Duration::from_millis(700));
    interrupt(&child);
    let finished = Finished::of(child.wait_with_output().unwrap());
    assert_eq!(finished.code, Some(130), "{finished:?}");
    let result: Value = serde_json::from_str(&finished.stdout).unwrap();
    assert_eq!(result["finish_reason"], "cancelled");
    assert_eq!(result["text"].as_str().unwrap().len(), result["tokens"].as_array().unwrap().len());
}

#[test]
fn a_second_ctrl_c_does_not_wait_for_the_work_in_hand() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    // Comparing two trees of 2⁴⁰ leaves takes until the template's time limit.
    copy.set_template(
        "{% macro m(x, y, d) %}{% if d %}{{ m([x, x], [y, y], d - 1) }}{% else %}{{ x == y }}{% endif %}\
         {% endmacro %}{{ m(1, 1, 40) }}",
    );
    let mut child = start(&["run", &copy.arg(), "hello"]);
    std::thread::sleep(Duration::from_millis(1000));
    interrupt(&child);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(child.try_wait().unwrap(), None, "the first ctrl-C waits");
    let start = Instant::now();
    interrupt(&child);
    let finished = Finished::of(child.wait_with_output().unwrap());
    assert_eq!(finished, Finished { code: Some(130), stdout: String::new(), stderr: String::new() });
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[test]
fn ctrl_c_ends_the_wait_for_a_prompt() {
    let Some(model) = llama() else { return };
    let mut child = Command::new(RUSSET)
        .args(["run", &model])
        .envs(ENVIRONMENT)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let stdin = child.stdin.take();
    interrupt(&child);
    let status = child.wait().unwrap();
    drop(stdin);
    // Ended by the signal; a shell reports 128 + 2.
    assert!(!status.success() && status.code() != Some(1), "{status}");
}
