//! What loading the starter model costs, measured inside a process that does nothing else.

mod common;

use russet_mlx::memory;
use russet_model::{Fidelity, LoadOptions, Model, Tier};

/// The most memory that this process has had in RAM, in bytes; known on Linux only.
fn peak_rss() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
    Some(peak.unwrap().trim().parse::<usize>().unwrap() * 1024)
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
    if let Some(peak) = peak_rss() {
        assert!(peak < footprint.weights + 120_000_000, "{peak} bytes in RAM");
    }
}
