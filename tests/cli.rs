//! The command line: help, completions, wrong usage, exit codes.

mod common;

use common::russet;

/// Every command, as the arguments that reach it.
const COMMANDS: [&[&str]; 10] = [
    &["run"],
    &["chat"],
    &["inspect"],
    &["ls"],
    &["bench"],
    &["eval"],
    &["eval", "logits"],
    &["eval", "compare"],
    &["eval", "error"],
    &["completions"],
];

const SHELLS: [&str; 5] = ["bash", "elvish", "fish", "powershell", "zsh"];

fn help(command: &[&str], flag: &str) -> String {
    russet(&[command, &[flag]].concat()).text()
}

/// The entries of a help page: what is left of the gap on lines that begin one, and all text right of it.
fn entries(help: &str) -> Vec<(String, String)> {
    let mut entries: Vec<(String, String)> = Vec::new();
    let mut in_list = false;
    for line in help.lines() {
        let indent = line.len() - line.trim_start().len();
        if line.is_empty() {
            continue;
        } else if indent == 0 {
            in_list = line.ends_with(':');
        } else if in_list && (indent == 2 || (indent == 6 && line.trim_start().starts_with("--"))) {
            let line = line.trim_start();
            let (name, text) = line.split_once("  ").unwrap_or((line, ""));
            entries.push((name.to_owned(), text.trim().to_owned()));
        } else if let Some((_, text)) = entries.last_mut() {
            text.push_str(line.trim());
        }
    }
    entries
}

#[test]
fn every_argument_of_every_command_has_a_help_text() {
    for flag in ["-h", "--help"] {
        for command in [&[&[] as &[&str]], COMMANDS.as_slice()].concat() {
            let page = help(command, flag);
            let entries = entries(&page);
            let names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
            for expected in ["-h, --help", "-V, --version"] {
                assert!(names.contains(&expected), "{command:?}: no {expected} among {names:?}");
            }
            for (name, text) in &entries {
                assert!(text.len() > 5, "{command:?} {flag}: {name} has no help text in\n{page}");
            }
            assert!(page.lines().all(|line| line.chars().count() <= 100), "{page}");
        }
    }
}

#[test]
fn help_lists_all_commands_and_flags() {
    let names = |command: &[&str]| -> String {
        entries(&help(command, "--help")).into_iter().map(|(name, _)| name + "\n").collect()
    };
    let all = names(&[]);
    for command in COMMANDS {
        let listed = if command.len() == 1 { all.clone() } else { names(&command[..1]) };
        assert!(listed.contains(command[command.len() - 1]), "{command:?} is not in {listed}");
    }
    let loading = [
        "--offline",
        "--home",
        "--fidelity",
        "--prefill-chunk",
        "--threads",
        "--activations",
        "--kv-cache",
        "--artifact",
        "--profiles",
        "--no-repack",
    ];
    let prompting = ["--system", "--chat-template-config", "--max-tokens", "--stop"];
    let sampling = [
        "--temp",
        "--top-p",
        "--top-k",
        "--min-p",
        "--min-tokens-to-keep",
        "--xtc-probability",
        "--xtc-threshold",
        "--repetition-penalty",
        "--repetition-context-size",
        "--presence-penalty",
        "--presence-context-size",
        "--frequency-penalty",
        "--frequency-context-size",
        "--logit-bias",
        "--seed",
    ];
    let expected: [(&[&str], Vec<&str>); 8] = [
        (
            &["run"],
            [
                &["--model", "--prompt", "--raw", "--json"],
                loading.as_slice(),
                prompting.as_slice(),
                sampling.as_slice(),
            ]
            .concat(),
        ),
        (&["chat"], [loading.as_slice(), prompting.as_slice(), sampling.as_slice()].concat()),
        (&["inspect"], [&["--json", "--context"], loading.as_slice()].concat()),
        (&["ls"], vec!["--json", "--home"]),
        (&["bench"], [&["--prompt-tokens", "--gen-tokens", "--runs", "--json"], loading.as_slice()].concat()),
        (
            &["eval", "logits"],
            [&["--model", "--tokens", "--steps", "--out"], loading.as_slice(), sampling.as_slice()].concat(),
        ),
        (&["eval", "compare"], vec!["--json"]),
        (&["eval", "error"], [&["--model", "--text", "--json"], loading.as_slice()].concat()),
    ];
    for (command, flags) in expected {
        let names = names(command);
        for flag in flags {
            assert!(names.split([' ', '\n']).any(|word| word == flag), "{command:?} has no {flag}: {names}");
        }
    }
}

#[test]
fn help_documents_exit_codes() {
    let help = help(&[], "--help");
    assert!(help.contains("Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted."), "{help}");
}

#[test]
fn version_is_that_of_the_package() {
    let version = format!("russet {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(russet(&["--version"]).text(), version);
    assert_eq!(russet(&["-V"]).text(), version);
    assert!(russet(&["run", "--version"]).text().ends_with(&format!(" {}\n", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn completions_exist_for_every_shell_and_know_commands_and_flags() {
    for shell in SHELLS {
        let script = russet(&["completions", shell]).text();
        for word in ["russet", "inspect", "compare", "max-tokens"] {
            assert!(script.contains(word), "no {word} in the script for {shell}");
        }
    }
    russet(&["completions", "tcl"]).fails(2, &["'tcl'", "possible values", "bash"]);
}

#[test]
fn unknown_flags_and_commands_are_refused_with_a_suggestion() {
    for (args, suggestion) in [
        (["inspct", "x"], "'inspect'"),
        (["run", "--tmep=1"], "'--temp'"),
        (["chat", "--max-token=1"], "'--max-tokens'"),
        (["bench", "--prompt-token=1"], "'--prompt-tokens'"),
        (["eval", "logit"], "'logits'"),
        (["ls", "--jsn"], "'--json'"),
    ] {
        russet(&args).fails(2, &["similar", suggestion, "--help"]);
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        ["run", "a", "b", "c"].as_slice(),
        &["run", "--max-tokens", "-1", "x"],
        &["run", "--max-tokens", "many", "x"],
        &["run", "--seed", "-1", "x"],
        &["run", "--logit-bias", "5", "x"],
        &["run", "--logit-bias", "5:high", "x"],
        &["run", "--chat-template-config", "[1]", "x"],
        &["run", "--chat-template-config", "{", "x"],
        &["run", "--raw", "--system", "s", "x"],
        &["run", "--prefill-chunk", "0", "x"],
        &["run", "--fidelity", "l4", "x"],
        &["run", "--threads", "0", "x"],
        &["run", "--artifact", "", "x"],
        &["run", "--artifact", "a b", "x"],
        &["run", "--threads", "1000000", "x"],
        &["run", "--activations", "int4", "x"],
        &["bench", "--runs", "0"],
        &["bench", "--gen-tokens", "0"],
        &["inspect", "a", "b"],
        &["inspect", "a", "--context", "18446744073709551615"],
        &["eval", "logits", "--tokens", "1"],
        &["eval", "logits", "--tokens", "1", "--out", "x.safetensors", "--steps", "18446744073709551615"],
        &["eval", "compare", "a"],
        &["eval", "error"],
    ] {
        let finished = russet(args);
        assert_eq!(finished.code, Some(2), "{args:?}: {finished:?}");
        assert!(finished.stderr.starts_with("error: "), "{args:?}: {finished:?}");
    }
    // Without a command, help is what helps.
    let finished = russet(&[]);
    assert_eq!(finished.code, Some(2));
    assert!(finished.stderr.contains("Usage: russet <COMMAND>"), "{}", finished.stderr);
}
