//! The engine: many requests at once, on every kind of cache.

mod common;

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Numbers, alone, collect, fixtures, load, start, start_faulty, submit};
use russet_engine::{
    Answer, Engine, EngineOptions, Error, FinishReason, Output, Refusal, Request, Sampling, SubmitOptions,
};
use russet_model::Tier;

/// Requests of mixed lengths: many begin alike, every third draws tokens, every fifth looks back at those before.
fn requests(numbers: &mut Numbers) -> Vec<Request> {
    let shared = numbers.prompt(300);
    let request = |i: u64| {
        let length = [1, 2, 3, 15, 16, 17, 40, 270][numbers.below(8)];
        let mut prompt = shared[..numbers.below(2) * numbers.below(280)].to_vec();
        prompt.extend(numbers.prompt(length));
        let mut request = Request::new(prompt, 1 + numbers.below(20));
        if i.is_multiple_of(3) {
            request.seed = i;
            request.sampling = Sampling { temperature: 0.9, top_p: 0.9, ..Sampling::default() };
        }
        if i.is_multiple_of(5) {
            request.sampling.repetition_penalty = Some(1.3);
        }
        request
    };
    (0..100).map(request).collect()
}

#[test]
fn every_answer_is_that_of_the_request_alone() {
    for (name, dir) in fixtures().unwrap_or_default() {
        let model = load(&dir, Tier::L3);
        let mut numbers = Numbers(1);
        let requests = requests(&mut numbers);
        let expected: Vec<_> = requests.iter().map(|request| alone(&model, request)).collect();
        // A width that is often full, and a prompt cache that is too small for all.
        let options = EngineOptions { width: 7, prompt_cache: 1 << 20, ..EngineOptions::default() };
        let engine = start(&dir, Tier::L3, options);
        let mut pending: Vec<(usize, Answer)> = Vec::new();
        let check = |i: usize, answer: Answer| {
            let (tokens, text, end, _) = collect(answer);
            assert_eq!((tokens, text, end.unwrap()), expected[i], "{name}: {:?}", requests[i]);
        };
        for _ in 0..2000 {
            let i = numbers.below(requests.len());
            pending.push((i, submit(&engine, &requests[i])));
            while pending.len() > 20 {
                let (i, answer) = pending.swap_remove(numbers.below(20));
                if numbers.below(6) == 0 {
                    drop(answer); // a client that leaves
                } else {
                    check(i, answer);
                }
            }
        }
        pending.into_iter().for_each(|(i, answer)| check(i, answer));
        let status = engine.status();
        assert_eq!((status.failed, &status.stopped), (0, &None));
        assert!(status.prompt_cache.hits > 0 && status.prompt_cache.evictions > 0, "{name}: {status:?}");
    }
}

#[test]
fn a_repeated_prompt_is_read_once() {
    for (name, dir) in fixtures().unwrap_or_default() {
        for tier in [Tier::L1, Tier::L3] {
            let engine = start(&dir, tier, EngineOptions::default());
            let mut numbers = Numbers(2);
            let prompt = numbers.prompt(60);
            let first = collect(submit(&engine, &Request::new(prompt.clone(), 6)));
            assert_eq!(first.3, 0);
            // The same again: all but the last token is known.
            let again = collect(submit(&engine, &Request::new(prompt.clone(), 6)));
            assert_eq!((&again.0, again.3), (&first.0, 59), "{name} {tier}");
            // Also where the answer was a single token.
            let other = Request::new(numbers.prompt(50), 1);
            assert_eq!([(); 2].map(|()| collect(submit(&engine, &other)).3), [0, 49], "{name} {tier}");
            // One token more or less than was ever read.
            let longer = [prompt.as_slice(), &[7]].concat();
            for prompt in [&longer[..], &prompt[..59], &longer[..], &prompt[..59]] {
                let (tokens, _, end, _) = collect(submit(&engine, &Request::new(prompt.to_vec(), 3)));
                assert!(end.is_ok() && tokens.len() <= 3);
            }
            // A prompt of one token has nothing that could be known.
            for _ in 0..2 {
                assert_eq!(collect(submit(&engine, &Request::new(vec![9], 3))).3, 0);
            }
        }
    }
}

#[test]
fn a_chat_goes_on_after_its_answers_where_that_is_wanted() {
    for (name, dir) in fixtures().unwrap_or_default() {
        for (cache_answers, tier) in
            [(true, Tier::L1), (true, Tier::L3), (false, Tier::L1), (false, Tier::L3)]
        {
            let engine = start(&dir, tier, EngineOptions { cache_answers, ..EngineOptions::default() });
            let mut numbers = Numbers(3);
            let mut chat = numbers.prompt(40);
            // No end of text: it would hide what the answers have in common.
            let sampling =
                Sampling { logit_bias: vec![(0, -1e9), (1, -1e9), (2, -1e9)], ..Sampling::default() };
            let mut known = 0;
            for turn in 0..4 {
                let request = Request { sampling: sampling.clone(), ..Request::new(chat.clone(), 12) };
                let (tokens, _, end, cached) = collect(submit(&engine, &request));
                assert!(end.is_ok());
                if cache_answers {
                    assert_eq!(cached, known, "{name} {tier}, turn {turn}");
                } else {
                    assert_eq!(cached, 0, "{name} {tier}, turn {turn}: shorter than a block");
                }
                chat.extend(&tokens);
                // The state may lack the last token, which nothing has consumed.
                known = chat.len() - usize::from(tier == Tier::L3);
                chat.extend(numbers.prompt(9));
            }
            // A chat that parts from it earlier goes on from the last turn that both have.
            let fork = [&chat[..40], &numbers.prompt(30)].concat();
            let (.., cached) = collect(submit(&engine, &Request::new(fork, 3)));
            assert_eq!(cached, if cache_answers { 39 } else { 0 }, "{name} {tier}");
        }
    }
}

#[test]
fn who_leaves_frees_the_row_and_who_is_late_is_told() {
    let Some((_, dir)) = fixtures().and_then(|all| all.into_iter().next()) else { return };
    let engine = start(&dir, Tier::L3, EngineOptions { width: 1, ..EngineOptions::default() });
    let long = Request::new(vec![1, 2, 3], 900);
    let mut answer = submit(&engine, &long);
    assert!(matches!(answer.blocking_next(), Some(Output::Token { .. })));
    drop(answer);
    let (tokens, _, end, _) = collect(submit(&engine, &Request::new(vec![4, 5], 5)));
    assert!(end.is_ok() && !tokens.is_empty());
    let status = engine.status();
    assert_eq!(status.cancelled, 1);
    assert!(status.generated_tokens < 500, "{status:?}");

    let late = SubmitOptions { deadline: Some(Instant::now()), ..SubmitOptions::default() };
    let (.., end, _) = collect(engine.submit(long.clone(), late).unwrap());
    assert!(matches!(end, Err(Error::Deadline)), "{end:?}");

    let mut last = submit(&engine, &long);
    assert!(matches!(last.blocking_next(), Some(Output::Token { .. })));
    engine.stop(Instant::now() + Duration::from_millis(20));
    let (.., end, _) = collect(last);
    assert!(
        matches!(end, Ok(FinishReason::Cancelled | FinishReason::Length | FinishReason::Stop)),
        "{end:?}"
    );
    assert!(matches!(engine.submit(long, SubmitOptions::default()), Err(Refusal::Stopped(_))));
    assert!(engine.status().stopped.is_some());
}

#[test]
fn what_can_t_be_run_is_refused_with_a_reason() {
    let Some((_, dir)) = fixtures().and_then(|all| all.into_iter().next()) else { return };
    let engine = start(&dir, Tier::L3, EngineOptions { width: 1, queue: 2, ..EngineOptions::default() });
    let refused = |request: Request| match engine.submit(request, SubmitOptions::default()) {
        Ok(_) => panic!("taken"),
        Err(refusal) => refusal.to_string(),
    };
    assert!(refused(Request::new(vec![], 3)).contains("the prompt is empty"));
    assert!(refused(Request::new(vec![320], 3)).contains("token id 320 is outside"));
    assert!(refused(Request::new(vec![1; 4096], 3)).contains("fills the model's context of 4096"));
    let mut request = Request::new(vec![1], 3);
    request.sampling.top_p = 2.0;
    assert!(refused(request).contains("top-p: 2 is not in [0, 1]"));

    // One runs, two wait, the next is one too many.
    let long = Request::new(vec![1, 2], 2000);
    let mut running = submit(&engine, &long);
    assert!(matches!(running.blocking_next(), Some(Output::Token { .. })));
    let waiting = [submit(&engine, &long), submit(&engine, &long)];
    assert!(matches!(engine.submit(long.clone(), SubmitOptions::default()), Err(Refusal::Busy(2))));
    drop((running, waiting));
    while engine.status().waiting > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (.., end, _) = collect(submit(&engine, &Request::new(vec![3], 2)));
    assert!(end.is_ok());
}

#[test]
fn memory_is_planned_before_it_is_used() {
    let Some((_, dir)) = fixtures().and_then(|all| all.into_iter().next()) else { return };
    let roomy = start(&dir, Tier::L3, EngineOptions::default());
    let plan = roomy.facts().memory.clone();
    // Room for a sequence of 300 tokens.
    let budget = plan.fixed() + plan.sequence(300);
    let options = EngineOptions { memory_budget: Some(budget), ..EngineOptions::default() };
    let engine = start(&dir, Tier::L3, options.clone());
    match engine.submit(Request::new(vec![1; 300], 10), SubmitOptions::default()) {
        Err(Refusal::Memory(message)) => assert!(message.contains("--memory-budget"), "{message}"),
        other => panic!("{other:?}"),
    }
    // The answer is cut to what there is room for; and several take turns.
    let answers = [(); 5].map(|()| submit(&engine, &Request::new(vec![1; 290], 50)));
    for answer in answers {
        let (tokens, _, end, _) = collect(answer);
        assert!(end.is_ok() && tokens.len() <= 10, "{tokens:?}");
    }
    let dir = dir.clone();
    let options = EngineOptions { memory_budget: Some(1000), ..options };
    let error = Engine::start(move || Ok(load(&dir, Tier::L3)), options).err().unwrap().to_string();
    assert!(error.contains("0 MiB") || error.contains("1 MiB"), "{error}");
}

#[test]
fn a_fault_ends_the_request_that_has_it_and_no_other() {
    for (name, dir) in fixtures().unwrap_or_default() {
        let model = load(&dir, Tier::L3);
        let mut numbers = Numbers(5);
        let requests: Vec<Request> = (0..12).map(|_| Request::new(numbers.prompt(8), 30)).collect();
        let expected: Vec<_> = requests.iter().map(|request| alone(&model, request)).collect();
        // A token that some answers meet on their way, and others do not.
        let met = |token: u32| {
            let consumed = |(request, (tokens, ..)): (&Request, &(Vec<u32>, String, FinishReason))| {
                request.prompt.contains(&token) || tokens[..tokens.len() - 1].contains(&token)
            };
            requests.iter().zip(&expected).map(consumed).collect::<Vec<_>>()
        };
        let token = (0..320).find(|&token| (2..9).contains(&met(token).iter().filter(|m| **m).count()));
        let token = token.unwrap_or_else(|| panic!("{name}: no such token"));
        let (engine, failures) = start_faulty(&dir, Tier::L3, token, false);
        let answers: Vec<Answer> = requests.iter().map(|request| submit(&engine, request)).collect();
        for (i, (answer, meets)) in answers.into_iter().zip(met(token)).enumerate() {
            let (tokens, text, end, _) = collect(answer);
            if meets {
                assert!(end.is_err_and(|e| e.to_string().contains("a fault on purpose")), "{name} {i}");
                assert!(expected[i].0.starts_with(&tokens), "{name} {i}");
            } else {
                let (expected_tokens, expected_text, expected_end) = &expected[i];
                assert_eq!(
                    (&tokens, &text, &end.unwrap()),
                    (expected_tokens, expected_text, expected_end),
                    "{name} {i}"
                );
            }
        }
        assert!(failures.load(Ordering::Relaxed) > 0);
        let status = engine.status();
        assert!(status.last_error.is_some_and(|e| e.contains("a fault on purpose")));
        assert_eq!(status.stopped, None);
    }
}

#[test]
fn a_panic_is_told_to_all_and_the_engine_says_that_it_stopped() {
    let Some((_, dir)) = fixtures().and_then(|all| all.into_iter().next()) else { return };
    let (engine, _) = start_faulty(&dir, Tier::L3, 300, true);
    let running = submit(&engine, &Request::new(vec![1, 2], 500));
    let (.., end, _) = collect(submit(&engine, &Request::new(vec![3, 300, 4], 5)));
    let message = "its thread panicked: a panic on purpose";
    assert!(end.is_err_and(|e| e.to_string().contains(message)));
    let (.., end, _) = collect(running);
    assert!(end.is_err_and(|e| e.to_string().contains(message)));
    let status = engine.status();
    assert!(status.stopped.clone().is_some_and(|why| why.contains(message)));
    let refused = engine.submit(Request::new(vec![1], 1), SubmitOptions::default());
    assert!(matches!(refused, Err(Refusal::Stopped(why)) if why.contains(message)));
}

#[test]
fn log_probabilities_are_those_of_the_sampler() {
    let Some((_, dir)) = fixtures().and_then(|all| all.into_iter().next()) else { return };
    let engine = start(&dir, Tier::L3, EngineOptions::default());
    let options = SubmitOptions { top_logprobs: Some(4), ..SubmitOptions::default() };
    let mut answer = engine.submit(Request::new(vec![1, 2, 3], 5), options).unwrap();
    let seen = Mutex::new(0);
    while let Some(output) = answer.blocking_next() {
        if let Output::Token { token, logprobs: Some(logprobs), .. } = output {
            // Greedy: the token is the likeliest.
            assert_eq!(logprobs.top.len(), 4);
            assert_eq!(logprobs.top[0], (token, logprobs.logprob));
            assert!(logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
            assert!(logprobs.logprob < 0.0);
            *seen.lock().unwrap() += 1;
        }
    }
    assert!(*seen.lock().unwrap() > 0);
}
