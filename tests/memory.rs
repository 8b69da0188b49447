//! What loading the starter model costs, measured inside a process that does nothing else.

mod common;

use nix::sys::resource::{UsageWho, getrusage};
use russet_mlx::memory;
use russet_model::{Fidelity, Model};

/// The most memory that this process has had in RAM, in bytes.
fn peak_rss() -> usize {
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    getrusage(UsageWho::RUSAGE_SELF).unwrap().max_rss() as usize * unit
}

#[test]
fn loading_copies_no_weight() {
    let dir = common::starter();
    let (active, rss) = (memory::active(), peak_rss());
    let model = Model::load(&dir, Fidelity::Auto).unwrap();
    let footprint = model.footprint(0);
    assert!(footprint.weights > 98_000_000, "{footprint:?}");
    if !footprint.weights_mapped {
        // A GPU has its own memory; the weights must be copied there.
        return;
    }
    let copied = memory::active() - active;
    assert!(copied < 1_000_000, "loading allocated {copied} bytes");
    assert!(memory::peak() < active + 1_000_000, "loading allocated {} bytes for a moment", memory::peak());
    assert!(peak_rss() < footprint.weights + 120_000_000, "{} bytes in RAM, {rss} before", peak_rss());
}
