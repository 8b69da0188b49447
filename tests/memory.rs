//! What loading the starter model costs, measured inside a process that does nothing else.

mod common;

use std::process::{Command, Stdio};

use common::{peak_rss, watch_memory};
use russet_mlx::memory;
use russet_model::{Fidelity, LoadOptions, Model, Tier};

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
    for (options, limit) in [(["--no-repack", "--offline"], 1.2), (["--fidelity=l3", "--offline"], 1.35)] {
        let args = ["run", "Once upon a time", "--raw", "--temp", "0", "--max-tokens", "24"];
        let mut child =
            Command::new(common::RUSSET).args(args).args(options).stdout(Stdio::null()).spawn().unwrap();
        let peak = watch_memory(&mut child);
        assert!(child.wait().unwrap().success());
        if cfg!(target_os = "linux") {
            assert!((WEIGHTS..limit * WEIGHTS).contains(&(peak as f64)), "{options:?}: {peak} bytes in RAM");
        }
    }
}
