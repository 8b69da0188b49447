//! Numbers for Prometheus: those of the engine, and what the server sees of requests and answers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use russet_engine::{EngineStatus, Histogram, MemoryPlan, Statistics};

use crate::web;

/// What the server counts.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Responses by route and status.
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
    inter_token: Mutex<Histogram>,
    prefill_rate: Mutex<Histogram>,
    decode_rate: Mutex<Histogram>,
    tokens: Mutex<Tokens>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tokens {
    prompt: u64,
    cached: u64,
}

const SECONDS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
const TOKENS_PER_SECOND: &[f64] =
    &[1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10000.0];

impl Default for Metrics {
    fn default() -> Self {
        Self {
            responses: Mutex::default(),
            inter_token: Mutex::new(Histogram::new(SECONDS)),
            prefill_rate: Mutex::new(Histogram::new(TOKENS_PER_SECOND)),
            decode_rate: Mutex::new(Histogram::new(TOKENS_PER_SECOND)),
            tokens: Mutex::default(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Plain numbers: there is no half-made change to protect from.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The endpoints, save those with something of the request in their path.
const ROUTES: [&str; 9] = [
    "/v1/chat/completions",
    "/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/health",
    "/stats",
    "/version",
    "/metrics",
];

/// The name of a path in metrics; there are only so many, whatever is asked for.
fn route(path: &str) -> &'static str {
    match ROUTES.into_iter().find(|route| *route == path) {
        Some(route) => route,
        None if path.starts_with("/v1/models/") => "/v1/models/{id}",
        None => web::file(path).map_or("other", |file| file.path),
    }
}

impl Metrics {
    pub(crate) fn responded(&self, path: &str, status: u16) {
        *lock(&self.responses).entry((route(path), status)).or_default() += 1;
    }

    /// Seconds between two tokens of an answer.
    pub(crate) fn token_after(&self, seconds: f64) {
        lock(&self.inter_token).observe(seconds);
    }

    pub(crate) fn answered(&self, statistics: &Statistics) {
        if statistics.generated_tokens > 0 {
            lock(&self.prefill_rate).observe(statistics.prefill_rate());
        }
        if statistics.generated_tokens > 1 {
            lock(&self.decode_rate).observe(statistics.decode_rate());
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
        let help = "Bytes of this process in memory, mapped weights included.";
        out.single("process_resident_memory_bytes", "gauge", help, resident_memory() as f64);
        let help = "Bytes that MLX uses.";
        out.single("russet_mlx_active_memory_bytes", "gauge", help, engine.memory.active as f64);
        let help = "The most bytes that MLX has used.";
        out.single("russet_mlx_peak_memory_bytes", "gauge", help, engine.memory.peak as f64);
        let help = "Bytes that MLX keeps for reuse.";
        out.single("russet_mlx_cached_memory_bytes", "gauge", help, engine.memory.cached as f64);
        let help = "From a request's arrival to its first token.";
        out.histogram("russet_time_to_first_token_seconds", help, &engine.time_to_first_token);
        let help = "Requests that ran at each step.";
        out.histogram("russet_batch_size", help, &engine.batch_size);
        let help = "Between two tokens of an answer.";
        out.histogram("russet_inter_token_seconds", help, &lock(&self.inter_token));
        let help = "Prompt tokens read per second, by answer.";
        out.histogram("russet_prefill_tokens_per_second", help, &lock(&self.prefill_rate));
        let help = "Tokens generated per second, by answer.";
        out.histogram("russet_decode_tokens_per_second", help, &lock(&self.decode_rate));
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

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        for (bound, count) in histogram.buckets() {
            self.sample(&bucket, &format!("{{le=\"{bound}\"}}"), count as f64);
        }
        self.sample(&bucket, "{le=\"+Inf\"}", histogram.count() as f64);
        self.sample(&format!("{name}_sum"), "", histogram.sum());
        self.sample(&format!("{name}_count"), "", histogram.count() as f64);
    }
}

/// Bytes of this process in memory; 0 where the system does not say.
pub(crate) fn resident_memory() -> u64 {
    let Ok(own) = sysinfo::get_current_pid() else { return 0 };
    let mut system = sysinfo::System::new();
    let memory = sysinfo::ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(sysinfo::ProcessesToUpdate::Some(&[own]), false, memory);
    system.process(own).map_or(0, sysinfo::Process::memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_a_name_and_is_documented() {
        let document = include_str!("../openapi.json");
        let document: serde_json::Value = serde_json::from_str(document).unwrap();
        let documented = document["paths"].as_object().unwrap();
        for path in documented.keys() {
            assert_eq!(route(path), path);
        }
        for path in ROUTES {
            assert!(documented.contains_key(path), "openapi.json lacks {path}");
        }
        for path in ["/nothing", "/web/nothing.js", "/v1/models/", "/v1/models/own/er"] {
            assert!(["other", "/v1/models/{id}"].contains(&route(path)), "{path}");
        }
    }

    #[test]
    fn a_histogram_is_written_with_its_buckets() {
        let mut histogram = Histogram::new(&[1.0, 2.5]);
        for value in [1.0, 2.0, 20000.0] {
            histogram.observe(value);
        }
        let mut page = Page::default();
        page.histogram("rate", "A rate.", &histogram);
        let lines: Vec<&str> = page.0.lines().collect();
        let expected = [
            "# HELP rate A rate.",
            "# TYPE rate histogram",
            "rate_bucket{le=\"1\"} 1",
            "rate_bucket{le=\"2.5\"} 2",
            "rate_bucket{le=\"+Inf\"} 3",
            "rate_sum 20003",
            "rate_count 3",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn this_process_is_in_memory() {
        assert!((1 << 20..1 << 40).contains(&resident_memory()));
    }
}
