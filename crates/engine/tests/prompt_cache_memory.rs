//! The prompt cache's memory, in a process that has no other.

mod common;

use common::{Numbers, collect, fixtures, start, submit};
use russet_engine::{EngineOptions, Request};
use russet_mlx::memory;
use russet_model::Tier;

#[test]
fn the_prompt_cache_stays_below_its_cap_and_frees_what_it_drops() {
    for (name, dir) in fixtures().unwrap_or_default() {
        const CAP: usize = 1 << 20;
        let engine = start(&dir, Tier::L3, EngineOptions { prompt_cache: CAP, ..EngineOptions::default() });
        let mut numbers = Numbers(3);
        let mut used = Vec::new();
        for _ in 0..500 {
            let prompt = {
                let length = 1 + numbers.below(200);
                numbers.prompt(length)
            };
            let (.., end, _) = collect(submit(&engine, &Request::new(prompt, 2)));
            assert!(end.is_ok());
            let status = engine.status();
            assert!(status.prompt_cache_bytes <= CAP, "{name}: {} bytes", status.prompt_cache_bytes);
            used.push(memory::active());
        }
        assert!(engine.status().prompt_cache.evictions > 0, "{name}");
        // Once the cache is full, memory does not grow any more.
        let most = |range: std::ops::Range<usize>| used[range].iter().max().copied().unwrap();
        assert!(most(400..500) <= most(100..400) + CAP / 4, "{name}: {used:?}");
    }
}
