//! Time that grammars take: to prepare a vocabulary, to compile, and for the mask of each token of an answer.
//!
//! `cargo bench -p russet-text -- MODEL` prints a table for the tokenizer in that folder.

#![allow(clippy::print_stdout, reason = "a benchmark prints")]
#![allow(missing_docs, reason = "a benchmark")]

use std::path::Path;
use std::time::{Duration, Instant};

use russet_text::{EosTokenIds, Error, GrammarCompiler, GrammarSource, Tokenizer};
use serde_json::json;

const REPEATS: usize = 20;

/// A grammar, and an answer that follows it.
fn cases() -> Vec<(&'static str, GrammarSource, String)> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email"},
            "kind": {"enum": ["employee", "customer", "supplier"]},
            "friends": {"type": "array", "items": {"$ref": "#"}, "maxItems": 5},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let friend = r#"{"name": "Zoë Müller", "age": 31, "email": "zoe@example.org", "kind": "customer"}"#;
    let text = format!(
        r#"{{"name": "A person whose name is a sentence", "age": 42, "kind": "employee", "friends": [{friend}, {friend}]}}"#
    );
    let names: Vec<String> = (0..1000).map(|i| format!("choice number {i}")).collect();
    vec![
        ("JSON object", GrammarSource::JsonObject, text.clone()),
        ("JSON schema", GrammarSource::JsonSchema(person), text),
        (
            "regex",
            GrammarSource::Regex(r"(\d{1,3}\.){3}\d{1,3} - [A-Z][a-z]+ \w*".into()),
            "192.168.10.1 - Some words".into(),
        ),
        ("1000 choices", GrammarSource::Choice(names), "choice number 777".into()),
        (
            "Lark, arithmetic",
            GrammarSource::Lark(
                "start: term ((\"+\" | \"-\") term)*\nterm: factor ((\"*\" | \"/\") factor)*\n\
                 factor: NUMBER | \"(\" start \")\"\nNUMBER: /[0-9]+(\\.[0-9]+)?/\n%ignore /[ ]{1,2}/"
                    .into(),
            ),
            "(1 + 2.5) * (3 - (4 / 5)) + 678 * 90".into(),
        ),
    ]
}

fn main() -> Result<(), Error> {
    let Some(dir) = std::env::args().skip(1).find(|argument| !argument.starts_with('-')) else {
        println!("give the folder of a model");
        return Ok(());
    };
    let tokenizer = Tokenizer::from_dir(Path::new(&dir))?;
    let eos = EosTokenIds::new(None, None, &tokenizer)?;
    let begun = Instant::now();
    let compiler = GrammarCompiler::new(&tokenizer, &eos)?;
    println!("{} tokens, prepared in {} ms", tokenizer.vocab_size(), begun.elapsed().as_millis());
    println!("{:18} {:>12} {:>12}   µs a token: median, 99 %, longest", "", "compile ms", "start µs");
    for (name, source, text) in cases() {
        let tokens = tokenizer.encode(&text, false)?;
        let (mut compile, mut start, mut steps) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let begun = Instant::now();
            let grammar = compiler.compile(&source)?;
            compile.push(begun.elapsed());
            let begun = Instant::now();
            let mut constraint = grammar.start();
            start.push(begun.elapsed());
            for &token in &tokens {
                let begun = Instant::now();
                let mask = constraint.mask()?;
                std::hint::black_box(mask.to_bytes(tokenizer.vocab_size()));
                constraint.commit(token)?;
                steps.push(begun.elapsed());
            }
        }
        let [compile, start] = [compile, start].map(|mut times| at(&mut times, 0.5));
        let [median, most, longest] = [0.5, 0.99, 1.0].map(|part| at(&mut steps, part).as_secs_f64() * 1e6);
        println!(
            "{name:18} {:12.2} {:12.1}   {median:.1}, {most:.1}, {longest:.1}",
            compile.as_secs_f64() * 1e3,
            start.as_secs_f64() * 1e6,
        );
    }
    Ok(())
}

/// The time that this part of all stay below.
fn at(times: &mut [Duration], part: f64) -> Duration {
    times.sort();
    times[((times.len() - 1) as f64 * part) as usize]
}
