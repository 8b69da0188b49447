//! Several sequences at once: mixed lengths, joins and leaves.

use serde_json::json;

use super::{FLOATS, dense, gemma4_forms, llama, qwen3_5_fixture, qwen3_5_moe_fixture, qwen3_moe};
use crate::specification::{BatchRow, BatchSpec, FixtureSpec, Float, Format, Tokens};

/// Generations in one batch on a fixture.
#[derive(Clone, Debug)]
pub struct BatchCase {
    /// What the case is about; unique in its list.
    pub name: String,
    /// The checkpoint.
    pub fixture: FixtureSpec,
    /// The batch.
    pub batch: BatchSpec,
}

/// A prompt of `count` tokens, unlike that of other rows.
fn row(index: usize, count: usize, steps: u32) -> BatchRow {
    let tokens = Tokens::Random { count, seed: (100 * index + count) as u32 };
    BatchRow { tokens, steps, join: 0, leave: None }
}

/// Prompts that all join at the start and generate as many tokens.
fn together(counts: &[usize], steps: u32) -> Vec<BatchRow> {
    counts.iter().enumerate().map(|(i, &count)| row(i, count, steps)).collect()
}

/// Rows that come and go: by their number of steps, taken away while they generate or while their prompt is read,
/// several at once, the longest first, and all but one.
fn coming_and_going() -> Vec<BatchRow> {
    let joining = |index, count, steps, join| BatchRow { join, ..row(index, count, steps) };
    let taken =
        |index, count, join, leave| BatchRow { leave: Some(leave), ..joining(index, count, 99, join) };
    vec![
        row(0, 40, 3),
        row(1, 3, 20),
        row(2, 11, 1),
        joining(3, 1, 6, 1),
        joining(4, 30, 12, 2),
        joining(5, 2, 9, 2),
        taken(6, 17, 3, 8),
        taken(7, 60, 4, 5),
        joining(8, 5, 4, 6),
        taken(9, 16, 9, 13),
        joining(10, 25, 10, 20),
        joining(11, 1, 2, 40),
    ]
}

/// Sixteen rows of which each joins a call after the one before.
fn staggered() -> Vec<BatchRow> {
    (0..16).map(|i| BatchRow { join: i as u32, ..row(i, 1 + 7 * i % 23, 8 + i as u32 % 5) }).collect()
}

/// Batches by name: prefill width, prefill chunk and rows.
fn shapes() -> Vec<(&'static str, u32, u32, Vec<BatchRow>)> {
    vec![
        ("joins and leaves", 8, 2048, coming_and_going()),
        ("joins and leaves in chunks", 8, 9, coming_and_going()),
        ("joins and leaves, prompts one by one", 1, 16, coming_and_going()),
        ("1 row", 8, 2048, together(&[19], 8)),
        ("1 row of 1 token", 8, 2048, together(&[1], 8)),
        ("1 long row", 8, 100, together(&[290], 12)),
        ("2 rows", 8, 2048, together(&[14, 15], 8)),
        ("2 equal rows", 8, 2048, together(&[9, 9], 10)),
        ("2 rows in chunks", 8, 7, together(&[31, 10], 8)),
        ("3 rows", 8, 2048, together(&[1, 17, 6], 12)),
        ("3 long rows", 8, 128, together(&[255, 257, 20], 8)),
        ("8 rows", 8, 2048, together(&[1, 2, 3, 16, 17, 30, 5, 18], 10)),
        ("8 rows, prompts in pairs", 2, 8, together(&[1, 2, 3, 16, 17, 30, 5, 18], 10)),
        ("8 rows, prompts one by one", 1, 16, together(&[20, 2, 3, 16, 17, 30, 5, 18], 5)),
        ("16 rows one after the other", 8, 2048, staggered()),
    ]
}

/// Layers of different kinds: keys as values, keys and values of other layers, experts.
fn mixed_forms() -> Vec<(String, FixtureSpec)> {
    let forms = gemma4_forms().into_iter().filter(|(name, _)| ["12b", "e4b", "26b-a4b"].contains(name));
    let forms = forms.map(|(name, fixture)| (format!("gemma4 {name}"), fixture));
    let sparse = [("qwen3_moe", qwen3_moe()), ("qwen3_5_moe", qwen3_5_moe_fixture())];
    forms.chain(sparse.map(|(name, fixture)| (name.to_owned(), fixture))).collect()
}

/// How mixed forms are stored. MLX's CPU backend has unquantized experts in float32 only.
const MIXED_STORAGES: [(Float, Format); 2] =
    [(Float::Float32, Format::Dense), (Float::Bfloat16, Format::Affine { bits: 4, group: 64 })];

/// Every cache kind in every shape, and other families in one that has all.
pub fn batch_cases() -> Vec<BatchCase> {
    let full_first = json!(["full_attention", "sliding_attention", "sliding_attention"]);
    let caches = [
        ("llama", llama("llama")),
        // Windows that prompts pass at once, and while they generate or never.
        ("window 16", llama("llama-sliding")),
        ("window 300, full layer first", {
            FixtureSpec { layers: 3, ..llama("llama") }
                .with("layer_types", full_first)
                .with("sliding_window", json!(300))
        }),
        ("qwen3_5", qwen3_5_fixture()),
    ];
    let formats =
        [Format::Dense, Format::Affine { bits: 4, group: 64 }, Format::Affine { bits: 8, group: 32 }];
    let mut cases = Vec::new();
    let mut push = |name: &str, fixture: &FixtureSpec, dtype: Float, format, batch| {
        let fixture = FixtureSpec { dtype, format, ..fixture.clone() };
        cases.push(BatchCase { name: format!("{name}, {dtype:?} {format:?}"), fixture, batch });
    };
    for (c, (cache, fixture)) in caches.into_iter().enumerate() {
        let fixture = FixtureSpec { seed: 700 + c as u64, ..fixture };
        for (i, (name, prefill_width, prefill_chunk, rows)) in shapes().into_iter().enumerate() {
            let batch = BatchSpec { rows, width: 32, prefill_width, prefill_chunk };
            let name = format!("{cache}, {name}");
            // Each shape in one dtype and format, the first in all dtypes.
            for dtype in if i == 0 { FLOATS.to_vec() } else { vec![FLOATS[(c + i) % 3]] } {
                let format = formats[(c + i + dtype as usize) % 3];
                push(&name, &fixture, dtype, format, batch.clone());
            }
        }
        let rows = coming_and_going()[..9].to_vec();
        let batch = BatchSpec { rows, width: 3, prefill_width: 2, prefill_chunk: 16 };
        push(&format!("{cache}, 3 of 9 rows at once"), &fixture, FLOATS[c % 3], formats[0], batch);
    }
    for (f, (form, fixture)) in mixed_forms().into_iter().enumerate() {
        let fixture = FixtureSpec { seed: 710 + f as u64, ..fixture };
        for (i, (name, prefill_width, prefill_chunk, rows)) in shapes().into_iter().enumerate() {
            let batch = BatchSpec { rows, width: 32, prefill_width, prefill_chunk };
            // The shapes that have all in both.
            for (dtype, format) in
                if i < 3 { MIXED_STORAGES.to_vec() } else { vec![MIXED_STORAGES[(f + i) % 2]] }
            {
                push(&format!("{form}, {name}"), &fixture, dtype, format, batch.clone());
            }
        }
    }
    for (i, family) in dense::FAMILIES.map(dense::family).into_iter().enumerate() {
        // The reference can't mask the grouped heads of a batch here.
        let family =
            if family.arch == "gemma2" { family.with("num_key_value_heads", json!(4)) } else { family };
        let batch = BatchSpec { rows: coming_and_going(), width: 32, prefill_width: 8, prefill_chunk: 9 };
        push(family.arch, &family, FLOATS[i % 3], formats[i / 3 % 3], batch);
    }
    cases
}
