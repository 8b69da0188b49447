//! What loading the starter model costs, measured inside a process that does nothing else.

mod common;

use std::process::{Command, Stdio};
use std::time::Duration;

use russet_mlx::memory;
use russet_model::{Fidelity, LoadOptions, Model, Tier};

/// The most memory that a process has had in RAM, in bytes; known on Linux only, and while it runs.
fn peak_rss(process: &str) -> Option<usize> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
    Some(peak?.trim().parse::<usize>().unwrap() * 1024)
}

#[test]
fn loading_copies_no_weight() {
    let dir = common::starter();
    let active = memory::active();
    let model = Model::load(&dir, &LoadOptions::new(Fidelity::Tier(Tier::L1))).unwrap();
    let footprint = model.footprint(0);
    assert!(footprint.weights > 98_000_000, "{footprint:?}");
    if !footprint.weights_mapped {
        // A GPU has its own memory; the weights must be copied there.
        return;
    }
    let copied = memory::active() - active;
    assert!(copied < 1_000_000, "loading allocated {copied} bytes");
    assert!(memory::peak() < active + 1_000_000, "loading allocated {} bytes for a moment", memory::peak());
    if let Some(peak) = peak_rss("self") {
        assert!(peak < footprint.weights + 120_000_000, "{peak} bytes in RAM");
    }
}

/// The tokenizer's tables are gone before the weights come.
#[test]
fn an_answer_needs_little_more_than_the_weights() {
    const WEIGHTS: f64 = 98.3e6;
    common::starter();
    for (options, limit) in [(["--no-repack", "--offline"], 1.35), (["--fidelity=l3", "--offline"], 1.45)] {
        let args = ["run", "Once upon a time", "--raw", "--temp", "0", "--max-tokens", "24"];
        let mut child =
            Command::new(common::RUSSET).args(args).args(options).stdout(Stdio::null()).spawn().unwrap();
        let (process, mut peak) = (child.id().to_string(), 0);
        while child.try_wait().unwrap().is_none() {
            peak = peak.max(peak_rss(&process).unwrap_or(0));
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(child.wait().unwrap().success());
        if cfg!(target_os = "linux") {
            assert!((WEIGHTS..limit * WEIGHTS).contains(&(peak as f64)), "{options:?}: {peak} bytes in RAM");
        }
    }
}
