//! `russet chat`, over a pipe and in a terminal.

mod common;

use common::{Copy, ENVIRONMENT, Finished, LETTERS, RUSSET, llama, russet_reading, text};
use russet_testing::{FixtureSpec, Oracle};
use serde_json::{Value, json};

/// A conversation over a pipe, with answers of four letters; `lines` are what the user types.
fn chat(model: &str, args: &[&str], lines: &[&str]) -> Finished {
    let args = [&["chat", model, "-n", "4"], args, LETTERS.as_slice()].concat();
    let finished = russet_reading(lines.join("\n"), &args);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    finished
}

/// The numbers of prompt tokens in what /stats printed.
fn prompt_tokens(finished: &Finished) -> Vec<usize> {
    let lines = finished.stderr.lines();
    let counts = lines.filter_map(|line| line.strip_prefix("prompt: ")?.split(' ').next()?.parse().ok());
    counts.collect()
}

/// Tokens around a message in the fixture's template: `<|im_start|>`, role, line break, `<|im_end|>`, line break.
fn message(role: usize, content: usize) -> usize {
    role + content + 4
}

const SYSTEM: usize = 6;
/// "er" is a token.
const USER: usize = 3;
const ASSISTANT: usize = 9;
/// `<|im_start|>assistant` and a line break.
const OPENING: usize = ASSISTANT + 2;

#[test]
fn every_line_is_answered_until_the_input_ends() {
    let Some(model) = llama() else { return };
    let finished = chat(&model, &[], &["xyz", "", "   ", "zyx"]);
    let lines: Vec<&str> = finished.stdout.lines().collect();
    assert_eq!(lines.len(), 2, "{finished:?}");
    assert!(lines.concat().bytes().all(|b| b.is_ascii_lowercase()) && lines.concat().len() == 8, "{lines:?}");
    assert!(finished.stderr.contains(", fidelity L"), "{finished:?}");
    assert!(finished.stderr.contains("/help lists commands."), "{finished:?}");
}

#[test]
fn the_conversation_so_far_reaches_the_model() {
    let Some(model) = llama() else { return };
    let finished = chat(&model, &[], &["xyz", "/stats", "xyz", "/stats", "xyz", "/stats"]);
    let turn = message(USER, 3) + message(ASSISTANT, 4);
    let first = message(USER, 3) + OPENING;
    let counts = prompt_tokens(&finished);
    assert_eq!(counts[0], first);
    // An answer may use the fixture's merged pairs, "he", "in" and "er".
    for (i, &count) in counts.iter().enumerate() {
        assert!((first + i * (turn - 2)..=first + i * turn).contains(&count), "{i}: {finished:?}");
    }
    assert_eq!(counts.len(), 3);
}

#[test]
fn reset_forgets_the_conversation() {
    let Some(model) = llama() else { return };
    let finished = chat(&model, &[], &["xyz", "/stats", "xyz", "/reset", "xyz", "/stats"]);
    let counts = prompt_tokens(&finished);
    assert_eq!(counts[0], counts[1]);
    // The same prompt, decoded greedily, has the same answer.
    let answers: Vec<&str> = finished.stdout.lines().collect();
    assert_eq!(answers[0], answers[2]);
}

#[test]
fn system_sets_the_system_message_and_starts_anew() {
    let Some(model) = llama() else { return };
    let lines = ["xyz", "/system zzzz", "xyz", "/stats", "/system", "xyz", "/stats"];
    let first = message(USER, 3) + OPENING;
    let with_system = first + message(SYSTEM, 4);
    assert_eq!(prompt_tokens(&chat(&model, &[], &lines)), [with_system, first]);
    let lines = ["xyz", "/stats", "/system zzzzzz", "xyz", "/stats"];
    let given = chat(&model, &["--system", "zzzz"], &lines);
    assert_eq!(prompt_tokens(&given), [with_system, with_system + 2]);
}

#[test]
fn commands_that_only_inform() {
    let Some(model) = llama() else { return };
    let finished = chat(&model, &[], &["/stats", "/help", "/nonsense at all", "/reset now"]);
    assert!(finished.stdout.starts_with("No answer yet.\n"), "{finished:?}");
    for command in ["/reset", "/system", "/stats", "/help", "/quit", "ctrl-C", "ctrl-D"] {
        assert!(finished.stdout.contains(command), "{command}: {finished:?}");
    }
    assert!(finished.stdout.contains("Unknown command /nonsense."), "{finished:?}");
    assert!(finished.stdout.ends_with("Unknown command /reset. /help lists commands.\n"), "{finished:?}");
}

#[test]
fn quit_ends_the_program() {
    let Some(model) = llama() else { return };
    for command in ["/quit", "/exit"] {
        assert_eq!(chat(&model, &[], &[command, "xyz"]).stdout, "");
    }
}

#[test]
fn a_message_that_cannot_be_answered_is_forgotten() {
    let Some(oracle) = Oracle::get() else { return };
    let model = text(&oracle.fixture(&FixtureSpec::new("llama").with("max_position_embeddings", json!(64))));
    let finished = chat(&model, &[], &["xyz", "/stats", "/reset", &"z".repeat(100), "xyz", "/stats"]);
    assert!(finished.stderr.contains("error: the prompt has 118 tokens"), "{finished:?}");
    let counts = prompt_tokens(&finished);
    assert_eq!(counts, [counts[0], counts[0]]);
}

#[test]
fn without_a_chat_template_there_is_no_chat() {
    let Some(model) = llama() else { return };
    let copy = Copy::of(&model);
    copy.remove_template();
    russet_reading("hello", &["chat", &copy.arg()]).fails(1, &["no chat template", "--raw"]);
}

/// Types into a chat in a pseudo-terminal and notes what it shows.
const TERMINAL: &str = r#"
import json, os, pty, select, sys, time

program, environment, args = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
pid, terminal = pty.fork()
if pid == 0:
    os.execve(program, [program] + args, os.environ | environment | {"TERM": "xterm"})

unread = ""

def read_until(text):
    global unread
    end = time.time() + 60
    while text not in unread:
        if time.time() > end:
            sys.exit(f"no {text!r} within a minute in {unread!r}")
        if select.select([terminal], [], [], 1)[0]:
            try:
                unread += os.read(terminal, 65536).decode()
            except OSError:
                sys.exit(f"the program ended before it showed {text!r}: {unread!r}")
    read, unread = unread.split(text, 1)
    return read + text

def at_prompt():
    read_until("\x1b[?2004h")  # the editor takes over the terminal
    read_until("> ")

def type(keys):
    os.write(terminal, keys.encode())

steps = {}
at_prompt()
type("hello\r")
steps["echo"] = read_until("hello")
for _ in range(5):  # some of an answer that never ends
    read_until("a")
type("\x03")
steps["stopped"] = read_until("[stopped]")
at_prompt()
type("/stats\r")
steps["stats"] = read_until("fidelity")
at_prompt()
type("\x03")  # at the prompt, it stops nothing
at_prompt()
type("/help\r")
steps["help"] = read_until("ctrl-C stops an answer.")
at_prompt()
type("\x1b[A\x1b[A\r")  # two lines up in the history
steps["history"] = read_until("/stats") + read_until("fidelity")
at_prompt()
type("\x04")
steps["code"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(steps))
"#;

#[test]
fn in_a_terminal_ctrl_c_stops_the_answer_only_and_ctrl_d_leaves() {
    let Some(oracle) = Oracle::get() else { return };
    let spec = FixtureSpec::new("llama").with("max_position_embeddings", json!(100_000));
    let model = text(&oracle.fixture(&spec));
    let environment = Value::from_iter(ENVIRONMENT).to_string();
    let args = ["chat", &model, "-n", "100000", "--temp", "1", "--seed", "1"];
    let args = [&[RUSSET, &environment], args.as_slice(), &LETTERS].concat();
    let steps: Value = serde_json::from_str(&oracle.run_script(TERMINAL, &args, "")).unwrap();
    let shows = |step: &str, text: &str| assert!(steps[step].as_str().unwrap().contains(text), "{steps}");
    shows("stopped", "[stopped]");
    shows("stats", "answer: ");
    shows("help", "/reset");
    shows("history", "/stats");
    assert_eq!(steps["code"], 0, "{steps}");
}
