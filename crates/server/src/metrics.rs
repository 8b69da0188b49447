//! Numbers for Prometheus: those of the engine, and what the server sees of requests and answers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use russet_engine::{EngineStatus, MemoryPlan, Statistics};

/// What the server counts.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// Responses by route and status.
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
    pub(crate) inter_token: Histogram<SECONDS>,
    prefill_rate: Histogram<RATES>,
    decode_rate: Histogram<RATES>,
    tokens: Mutex<Tokens>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tokens {
    prompt: u64,
    cached: u64,
}

/// Bounds of short times: in seconds.
const SECONDS: usize = 0;
/// Bounds of rates: in tokens per second.
const RATES: usize = 1;

const BOUNDS: [[f64; 12]; 2] = [
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0],
    [1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10000.0],
];

/// Counts of values by size, with the bounds of that index.
#[derive(Debug, Default)]
pub(crate) struct Histogram<const OF: usize>(Mutex<Counts>);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// How many were at most as large as the bound of the same index.
    within: [u64; 12],
    count: u64,
    sum: f64,
}

impl<const OF: usize> Histogram<OF> {
    fn bounds() -> &'static [f64] {
        BOUNDS.get(OF).map_or(&[], <[f64; 12]>::as_slice)
    }

    pub(crate) fn observe(&self, value: f64) {
        // 0 / 0 is not a rate.
        if !value.is_finite() {
            return;
        }
        let mut counts = lock(&self.0);
        for (count, bound) in counts.within.iter_mut().zip(Self::bounds()) {
            *count += u64::from(value <= *bound);
        }
        counts.count += 1;
        counts.sum += value;
    }

    fn write(&self, out: &mut Page, name: &str, help: &str) {
        let counts = *lock(&self.0);
        out.histogram(name, help, Self::bounds(), &counts.within, counts.count, counts.sum);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Plain numbers: there is no half-made change to protect from.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of a path in metrics; there are only so many, whatever is asked for.
fn route(path: &str) -> &'static str {
    const ROUTES: [&str; 8] = [
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/stats",
        "/version",
        "/metrics",
    ];
    match ROUTES.into_iter().find(|route| *route == path) {
        Some(route) => route,
        None if path.starts_with("/v1/models/") => "/v1/models/{id}",
        None => "other",
    }
}

impl Metrics {
    pub(crate) fn responded(&self, path: &str, status: u16) {
        *lock(&self.responses).entry((route(path), status)).or_default() += 1;
    }

    pub(crate) fn answered(&self, statistics: &Statistics) {
        if statistics.generated_tokens > 0 {
            self.prefill_rate.observe(statistics.prefill_rate());
        }
        if statistics.generated_tokens > 1 {
            self.decode_rate.observe(statistics.decode_rate());
        }
        let mut tokens = lock(&self.tokens);
        tokens.prompt += statistics.prompt_tokens as u64;
        tokens.cached += statistics.cached_tokens as u64;
    }

    /// All metrics in Prometheus's text format.
    pub(crate) fn page(&self, engine: &EngineStatus, memory: &MemoryPlan, version: &str) -> String {
        let mut out = Page::default();
        out.family("russet_info", "gauge", "The version that runs.");
        out.sample("russet_info", &format!("{{version=\"{version}\"}}"), 1.0);
        let up = f64::from(u8::from(engine.stopped.is_none()));
        out.single("russet_engine_up", "gauge", "1 while the engine runs.", up);
        out.single(
            "russet_requests_running",
            "gauge",
            "Requests that are answered now.",
            engine.running as f64,
        );
        out.single("russet_requests_waiting", "gauge", "Requests in the queue.", engine.waiting as f64);
        let help = "Requests that ended in the engine, by how.";
        out.family("russet_requests_total", "counter", help);
        for (outcome, count) in
            [("finished", engine.finished), ("cancelled", engine.cancelled), ("failed", engine.failed)]
        {
            out.sample("russet_requests_total", &format!("{{outcome=\"{outcome}\"}}"), count as f64);
        }
        out.family("russet_http_responses_total", "counter", "HTTP responses by route and status.");
        for ((route, status), count) in lock(&self.responses).iter() {
            let labels = format!("{{route=\"{route}\",status=\"{status}\"}}");
            out.sample("russet_http_responses_total", &labels, *count as f64);
        }
        let tokens = *lock(&self.tokens);
        let help = "Prompt tokens of answers that ended.";
        out.single("russet_prompt_tokens_total", "counter", help, tokens.prompt as f64);
        let help = "Prompt tokens of answers that ended whose state was in the prompt cache.";
        out.single("russet_prompt_tokens_cached_total", "counter", help, tokens.cached as f64);
        let help = "Tokens generated.";
        out.single("russet_generated_tokens_total", "counter", help, engine.generated_tokens as f64);
        let cache = &engine.prompt_cache;
        let help = "Bytes of the prompt cache.";
        out.single("russet_prompt_cache_bytes", "gauge", help, engine.prompt_cache_bytes as f64);
        let help = "Prompts of which some tokens were in the prompt cache.";
        out.single("russet_prompt_cache_hits_total", "counter", help, cache.hits as f64);
        let help = "Prompts of which no token was in the prompt cache.";
        out.single("russet_prompt_cache_misses_total", "counter", help, cache.misses as f64);
        let help = "Blocks that were dropped from the prompt cache.";
        out.single("russet_prompt_cache_evictions_total", "counter", help, cache.evictions as f64);
        let help = "Bytes that weights and sequences may take.";
        out.single("russet_memory_budget_bytes", "gauge", help, memory.budget() as f64);
        let help = "Bytes of weights and of what one step needs.";
        out.single("russet_memory_fixed_bytes", "gauge", help, memory.fixed() as f64);
        let ttft = &engine.time_to_first_token;
        let help = "From a request's arrival to its first token.";
        let (name, bounds) = ("russet_time_to_first_token_seconds", russet_engine::Histogram::BOUNDS);
        out.histogram(name, help, &bounds, &ttft.counts, ttft.count, ttft.sum);
        let help = "Between two tokens of an answer.";
        self.inter_token.write(&mut out, "russet_inter_token_seconds", help);
        let help = "Prompt tokens read per second, by answer.";
        self.prefill_rate.write(&mut out, "russet_prefill_tokens_per_second", help);
        let help = "Tokens generated per second, by answer.";
        self.decode_rate.write(&mut out, "russet_decode_tokens_per_second", help);
        out.0
    }
}

/// A page of Prometheus's text format.
#[derive(Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, bounds: &[f64], within: &[u64], count: u64, sum: f64) {
        self.family(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        for (bound, count) in bounds.iter().zip(within) {
            self.sample(&bucket, &format!("{{le=\"{bound}\"}}"), *count as f64);
        }
        self.sample(&bucket, "{le=\"+Inf\"}", count as f64);
        self.sample(&format!("{name}_sum"), "", sum);
        self.sample(&format!("{name}_count"), "", count as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_what_is_within_each_bound() {
        let histogram = Histogram::<RATES>::default();
        for value in [1.0, 3.0, 20000.0, f64::NAN] {
            histogram.observe(value);
        }
        let mut page = Page::default();
        histogram.write(&mut page, "rate", "A rate.");
        let lines: Vec<&str> = page.0.lines().collect();
        assert_eq!(lines.first_chunk(), Some(&["# HELP rate A rate.", "# TYPE rate histogram"]));
        for line in [
            "rate_bucket{le=\"1\"} 1",
            "rate_bucket{le=\"2.5\"} 1",
            "rate_bucket{le=\"5\"} 2",
            "rate_bucket{le=\"10000\"} 2",
            "rate_bucket{le=\"+Inf\"} 3",
            "rate_sum 20004",
            "rate_count 3",
        ] {
            assert!(lines.contains(&line), "{line} is not in {lines:?}");
        }
    }
}
