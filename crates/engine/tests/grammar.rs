//! Answers that follow grammars, beside others that do not, on every kind of cache.

mod common;

use std::sync::atomic::Ordering;

use common::{Numbers, alone, collect, fixtures, load, start, start_faulty};
use russet_engine::{
    Answer, Engine, EngineOptions, Error, FinishReason, Output, Request, Sampling, SubmitOptions,
};
use russet_model::Tier;
use russet_text::{Grammar, GrammarCompiler, GrammarSource};
use serde_json::{Value, json};

/// What a grammar is for, and whether a whole answer is one of it.
struct Form {
    source: GrammarSource,
    valid: fn(&str) -> bool,
}

fn json_text(text: &str, valid: impl FnOnce(&Value) -> bool) -> bool {
    serde_json::from_str(text).is_ok_and(|value| valid(&value))
}

fn forms() -> Vec<Form> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "é", "😀"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    });
    let is_person = |text: &str| {
        json_text(text, |value| {
            value.as_object().unwrap().len() == 3
                && value["name"].as_str().unwrap().chars().count() <= 5
                && value["age"].as_u64().unwrap() <= 150
                && (1..=3).contains(&value["tags"].as_array().unwrap().len())
                && value["tags"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|tag| ["a", "é", "😀"].contains(&tag.as_str().unwrap()))
        })
    };
    let letters = |text: &str| {
        let body = text.strip_suffix('!').unwrap_or("");
        (3..=9).contains(&body.len()) && body.bytes().all(|byte| (b'a'..=b'f').contains(&byte))
    };
    let choice = ["yes", "no", " perhaps", "日本"].map(String::from).to_vec();
    vec![
        Form { source: GrammarSource::JsonSchema(person), valid: is_person },
        Form { source: GrammarSource::Regex("[a-f]{3,9}!".into()), valid: letters },
        Form {
            source: GrammarSource::Choice(choice),
            valid: |text| ["yes", "no", " perhaps", "日本"].contains(&text),
        },
        Form {
            source: GrammarSource::Lark(
                "start: \"<\" part{1,4} \">\"\npart: /[0-9]{1,2}/ | \"(\" part \")\"".into(),
            ),
            valid: |text| {
                text.starts_with('<')
                    && text.ends_with('>')
                    && text.matches('(').count() == text.matches(')').count()
            },
        },
        Form { source: GrammarSource::JsonObject, valid: |text| json_text(text, Value::is_object) },
    ]
}

fn compile(engine: &Engine, source: &GrammarSource) -> Grammar {
    let facts = engine.facts();
    GrammarCompiler::new(&facts.tokenizer, &facts.eos).unwrap().compile(source).unwrap()
}

fn submit(engine: &Engine, request: &Request, grammar: Option<&Grammar>) -> Answer {
    let options = SubmitOptions { grammar: grammar.cloned(), ..SubmitOptions::default() };
    engine.submit(request.clone(), options).unwrap()
}

/// Requests that pick tokens in every way.
fn requests(numbers: &mut Numbers, count: u64) -> Vec<Request> {
    let request = |i: u64| {
        let length = [1, 5, 17, 40, 270][numbers.below(5)];
        let mut request = Request::new(numbers.prompt(length), 20 + numbers.below(100));
        request.seed = i;
        if i % 4 != 3 {
            request.sampling = Sampling { temperature: 1.0, ..Sampling::default() };
        }
        match i % 5 {
            1 => request.sampling.top_p = 0.9,
            2 => request.sampling.repetition_penalty = Some(1.3),
            3 => {
                request.sampling.top_k = 5;
                request.sampling.min_p = 0.05;
                request.sampling.logit_bias = vec![(97, 5.0), (5, 50.0)];
            }
            _ => {}
        }
        request
    };
    (0..count).map(request).collect()
}

#[test]
fn answers_with_and_without_a_grammar_do_not_affect_each_other() {
    for (name, dir) in fixtures().unwrap_or_default() {
        let model = load(&dir, Tier::L3);
        let engine = start(&dir, Tier::L3, EngineOptions { width: 6, ..EngineOptions::default() });
        let forms = forms();
        let grammars: Vec<Grammar> = forms.iter().map(|form| compile(&engine, &form.source)).collect();
        let requests = requests(&mut Numbers(3), 60);
        // Every second has a grammar, in turns.
        let grammar = |i: usize| (i % 2 == 1).then(|| &grammars[i / 2 % grammars.len()]);
        let solo =
            start(&dir, Tier::L3, EngineOptions { width: 1, prompt_cache: 0, ..EngineOptions::default() });
        let expected = requests.iter().enumerate().map(|(i, request)| match grammar(i) {
            None => alone(&model, request),
            Some(grammar) => {
                let (tokens, text, end, _) = collect(submit(&solo, request, Some(grammar)));
                (tokens, text, end.unwrap())
            }
        });
        let expected: Vec<_> = expected.collect();
        let mut complete = vec![0; forms.len()];
        for (i, (_, text, end)) in expected.iter().enumerate().filter(|(i, _)| i % 2 == 1) {
            let form = i / 2 % forms.len();
            if *end == FinishReason::Stop {
                complete[form] += 1;
                assert!((forms[form].valid)(text), "{name} {i}: {text:?}");
            }
        }
        assert!(complete[..4].iter().all(|count| *count > 0), "{name}: {complete:?} answers are complete");
        for _ in 0..2 {
            let answers: Vec<Answer> = requests
                .iter()
                .enumerate()
                .map(|(i, request)| submit(&engine, request, grammar(i)))
                .collect();
            for (i, answer) in answers.into_iter().enumerate() {
                let (tokens, text, end, _) = collect(answer);
                assert_eq!((tokens, text, end.unwrap()), expected[i], "{name} {i}: {:?}", requests[i]);
            }
        }
    }
}

#[test]
fn answers_that_are_complete_are_valid_with_mlx() {
    for (name, dir) in fixtures().unwrap_or_default() {
        let engine = start(&dir, Tier::L1, EngineOptions { width: 4, ..EngineOptions::default() });
        let forms = forms();
        let grammars: Vec<Grammar> = forms.iter().map(|form| compile(&engine, &form.source)).collect();
        let requests = requests(&mut Numbers(9), 24);
        let submit = |(i, request): (usize, &Request)| {
            submit(&engine, request, (i % 3 > 0).then(|| &grammars[i % grammars.len()]))
        };
        let answers: Vec<Answer> = requests.iter().enumerate().map(submit).collect();
        let mut complete = 0;
        for (i, answer) in answers.into_iter().enumerate() {
            let (_, text, end, _) = collect(answer);
            if end.unwrap() == FinishReason::Stop && i % 3 > 0 {
                complete += 1;
                assert!((forms[i % forms.len()].valid)(&text), "{name} {i}: {text:?}");
            }
        }
        assert!(complete > 4, "{name}: {complete} answers are complete");
        // Alone the same as with the others' grammars: the step that is launched ahead waits for the mask.
        let (tokens, text, end, _) = collect(submit((4, &requests[3])));
        let again = collect(submit((4, &requests[3])));
        assert_eq!((tokens, text, end.unwrap()), (again.0, again.1, again.2.unwrap()), "{name}");
    }
}

#[test]
fn limits_stops_and_log_probabilities_compose() {
    let Some((_, dir)) = fixtures().and_then(|all| all.into_iter().next()) else { return };
    for tier in [Tier::L1, Tier::L3] {
        let engine = start(&dir, tier, EngineOptions::default());
        let grammar = compile(&engine, &GrammarSource::Regex("ab[cd]{4}".into()));
        let run = |request: &Request, grammar| {
            let (tokens, text, end, _) = collect(submit(&engine, request, Some(grammar)));
            (tokens.len(), text, end.unwrap())
        };
        let mut request = Request::new(vec![1, 2, 3], 100);
        request.sampling.logit_bias = vec![(u32::from(b'c'), 50.0), (u32::from(b'z'), 90.0)];
        assert_eq!(run(&request, &grammar), (6, "abcccc".into(), FinishReason::Stop), "{tier}");
        // Complete with the last token that it may have.
        request.max_tokens = 6;
        assert_eq!(run(&request, &grammar), (6, "abcccc".into(), FinishReason::Stop), "{tier}");
        request.max_tokens = 4;
        assert_eq!(run(&request, &grammar), (4, "abcc".into(), FinishReason::Length), "{tier}");
        request.stop = vec!["bcc".into()];
        request.max_tokens = 100;
        assert_eq!(run(&request, &grammar), (4, "a".into(), FinishReason::Stop), "{tier}");
        // A grammar that may go on ends with a token of the model's.
        let open = compile(&engine, &GrammarSource::Regex(" a*".into()));
        let eos = *engine.facts().eos.all.iter().next().unwrap();
        request.stop.clear();
        request.sampling.logit_bias = vec![(eos, 90.0)];
        assert_eq!(
            run(&request, &open),
            (2, " ".into(), FinishReason::Stop),
            "{tier}: the first space stays"
        );

        // Only what is allowed has a probability, and these add up to one.
        request.sampling = Sampling::default();
        let options = SubmitOptions {
            top_logprobs: Some(20),
            grammar: Some(grammar.clone()),
            ..SubmitOptions::default()
        };
        let mut answer = engine.submit(request, options).unwrap();
        let mut seen = Vec::new();
        while let Some(output) = answer.blocking_next() {
            if let Output::Token { token, logprobs: Some(logprobs), .. } = output {
                let total: f32 = logprobs.top.iter().map(|(_, logprob)| logprob.exp()).sum();
                assert!((total - 1.0).abs() < 1e-2, "{tier}: {logprobs:?}");
                assert_eq!(logprobs.top[0], (token, logprobs.logprob), "{tier}: greedy");
                seen.push(logprobs.top.len());
            }
        }
        assert_eq!(seen, [1, 1, 2, 2, 2, 2], "{tier}");
    }
}

#[test]
fn a_grammar_that_fails_ends_its_request_and_no_other() {
    let Some((_, dir)) = fixtures().and_then(|all| all.into_iter().next()) else { return };
    for tier in [Tier::L1, Tier::L3] {
        let engine = start(&dir, tier, EngineOptions::default());
        let facts = engine.facts();
        let eos = facts.tokenizer.id_to_token(*facts.eos.all.iter().next().unwrap()).unwrap();
        // A token that ends answers in the middle of one.
        let impossible = compile(&engine, &GrammarSource::Lark(format!("start: \"abc\" {eos} \"d\"")));
        let possible = compile(&engine, &GrammarSource::Regex("[ab]{20}".into()));
        let request = Request::new(vec![1, 2, 3], 50);
        let answers = [&possible, &impossible, &possible, &impossible]
            .map(|grammar| submit(&engine, &request, Some(grammar)));
        let [a, b, c, d] = answers.map(collect);
        for (_, text, end, _) in [a, c] {
            assert_eq!((text.len(), end.unwrap()), (20, FinishReason::Stop), "{tier}");
        }
        for (_, text, end, _) in [b, d] {
            assert!("abc".starts_with(&text), "{tier}: {text:?}");
            assert!(matches!(end, Err(Error::Text(russet_text::Error::Constraint(_)))), "{tier}: {end:?}");
        }
    }
}

#[test]
fn an_answer_goes_on_where_it_was_after_a_fault_of_another() {
    for (name, dir) in fixtures().unwrap_or_default() {
        for tier in [Tier::L1, Tier::L3] {
            let solo = start(&dir, tier, EngineOptions::default());
            let grammar = compile(&solo, &GrammarSource::Regex("(ab|cd|ef){12,30}!".into()));
            let request = Request {
                sampling: Sampling { temperature: 1.0, ..Sampling::default() },
                ..Request::new(vec![1, 2, 3], 80)
            };
            let (expected, ..) = collect(submit(&solo, &request, Some(&grammar)));
            // A token that a free answer is made to meet after a while, and no grammar allows.
            let (engine, failures) = start_faulty(&dir, tier, u32::from(b'x'), false);
            let mut answers = vec![submit(&engine, &request, Some(&grammar))];
            for length in [3, 6, 9] {
                let forced = compile(&engine, &GrammarSource::Regex(format!("a{{{length}}}x{{50}}")));
                answers.push(submit(&engine, &request, Some(&forced)));
            }
            let mut answers = answers.into_iter();
            let (tokens, text, end, _) = collect(answers.next().unwrap());
            assert!(
                end.is_ok() && text.len() % 2 == 1 || end.unwrap() == FinishReason::Length,
                "{name} {tier}: {text}"
            );
            assert!(tier == Tier::L1 || tokens == expected, "{name} {tier}: {text}");
            for answer in answers {
                let (.., end, _) = collect(answer);
                assert!(end.is_err_and(|e| e.to_string().contains("a fault on purpose")), "{name} {tier}");
            }
            assert!(failures.load(Ordering::Relaxed) > 0);
        }
    }
}
