//! The parity matrix: every model type, stored in every way, with prompts and chunks around every boundary.

use std::fmt::Write;

use super::{Case, case};
use crate::specification::{FixtureSpec, Float, Format};

/// A way to store a checkpoint.
#[derive(Clone, Copy)]
pub(super) struct Storage {
    pub(super) dtype: Float,
    pub(super) format: Format,
    pub(super) mixed: bool,
}

impl Storage {
    const fn new(dtype: Float, format: Format) -> Self {
        Self { dtype, format, mixed: false }
    }

    /// `fixture` stored this way.
    pub(super) fn of(self, fixture: &FixtureSpec) -> FixtureSpec {
        FixtureSpec { dtype: self.dtype, format: self.format, mixed: self.mixed, ..fixture.clone() }
    }
}

const AFFINE4: Format = Format::Affine { bits: 4, group: 64 };
const AFFINE8: Format = Format::Affine { bits: 8, group: 32 };
const FLOAT32: Storage = Storage::new(Float::Float32, Format::Dense);

const BFLOAT16: Storage = Storage::new(Float::Bfloat16, Format::Dense);

/// How each model type is stored.
pub(super) const STORAGES: [Storage; 4] = [
    FLOAT32,
    Storage::new(Float::Bfloat16, AFFINE4),
    Storage::new(Float::Bfloat16, AFFINE8),
    Storage { mixed: true, ..Storage::new(Float::Bfloat16, AFFINE4) },
];

/// Ways to store a checkpoint that the features of a model type take in turn.
pub(super) fn storage(turn: usize, plain: &FixtureSpec) -> Storage {
    const TURNS: [Storage; 8] = [
        STORAGES[0],
        STORAGES[1],
        STORAGES[2],
        STORAGES[3],
        Storage::new(Float::Float16, AFFINE8),
        Storage::new(Float::Float16, Format::Mxfp4),
        Storage::new(Float::Bfloat16, Format::Nvfp4),
        BFLOAT16,
    ];
    TURNS[turn % if has_experts(plain) { TURNS.len() - 1 } else { TURNS.len() }]
}

/// MLX's CPU backend has unquantized experts in float32 only.
fn has_experts(fixture: &FixtureSpec) -> bool {
    fixture.arch.ends_with("moe")
}

/// Prompts and chunks where something changes: one token has no prefill, two have a prefill of one; windows are 16
/// tokens wide; from 32 tokens on, the two experts of each are sorted; caches grow by 256 rows; all tokens but the
/// last are read in chunks.
const PROMPTS: [(&[usize], usize); 3] =
    [(&[1, 2, 15, 16, 17, 33, 255, 256, 257], 2048), (&[2, 3, 18], 1), (&[7, 8, 9, 40], 7)];
/// The longest prompt that is read in one chunk of 2048, one token less, and one more.
const LONG: [usize; 3] = [2048, 2049, 2050];

/// The cases of a model type: each way to store it with each prompt, the hub's layout, and shards.
pub(super) fn grid(plain: &FixtureSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |fixture: &FixtureSpec, counts: &[usize], chunk: usize| {
        cases.extend(counts.iter().map(|&count| case("", fixture, count, chunk)));
    };
    for (i, storage) in STORAGES.into_iter().enumerate() {
        let fixture = FixtureSpec { seed: 500 + i as u64, ..storage.of(plain) };
        for (counts, chunk) in PROMPTS {
            push(&fixture, counts, chunk);
        }
        push(&FixtureSpec { shards: 3, ..fixture }, &[1, 40], 7);
    }
    push(&FixtureSpec { seed: 500, ..FLOAT32.of(plain) }, &LONG, 2048);
    // The reference takes the text model of a qwen3_5 by itself only as converted.
    let hub_storages = match plain.arch {
        "qwen3_5_text" => vec![],
        _ if has_experts(plain) => vec![FLOAT32],
        _ => vec![FLOAT32, BFLOAT16],
    };
    for storage in hub_storages {
        let hub = FixtureSpec { seed: 500, hub: true, ..storage.of(plain) };
        push(&hub, &[1, 40, 257], 2048);
        push(&FixtureSpec { shards: 4, ..hub }, &[40], 7);
    }
    cases
}

/// A column of the table, and which fixtures count there if no column before it has them.
type Column = (&'static str, fn(&FixtureSpec) -> bool);

const COLUMNS: [Column; 7] = [
    ("hub's layout", |fixture| fixture.hub),
    ("shards", |fixture| fixture.shards > 1),
    ("mixed", |fixture| fixture.mixed),
    ("float32", |fixture| (fixture.dtype, fixture.format) == (Float::Float32, Format::Dense)),
    ("bfloat16 4-bit group 64", |fixture| (fixture.dtype, fixture.format) == (Float::Bfloat16, AFFINE4)),
    ("8-bit group 32", |fixture| fixture.format == AFFINE8),
    ("other storage", |_| true),
];

/// How many recordings there are of each model type, a row each, and each way to store it, as a Markdown table.
pub fn matrix_table(cases: &[Case]) -> String {
    let mut rows: Vec<(&str, [usize; COLUMNS.len()])> = Vec::new();
    for Case { fixture, .. } in cases {
        let row = rows.iter().position(|(arch, _)| *arch == fixture.arch).unwrap_or_else(|| {
            rows.push((fixture.arch, [0; COLUMNS.len()]));
            rows.len() - 1
        });
        let column = COLUMNS.iter().position(|(_, counts)| counts(fixture));
        rows[row].1[column.unwrap_or(COLUMNS.len() - 1)] += 1;
    }
    let mut table = "| checkpoint |".to_owned();
    // Writing to a string does not fail.
    for (name, _) in COLUMNS {
        let _ = write!(table, " {name} |");
    }
    let _ = writeln!(table, " all |\n|---|{}", "---|".repeat(COLUMNS.len() + 1));
    let mut totals = [0; COLUMNS.len()];
    let mut line = |name: &str, counts: &[usize; COLUMNS.len()]| {
        let _ = write!(table, "| {name} |");
        for count in counts.iter().chain([&counts.iter().sum()]) {
            let _ = write!(table, " {count} |");
        }
        table.push('\n');
    };
    for (arch, counts) in &rows {
        line(arch, counts);
        for (total, count) in totals.iter_mut().zip(counts) {
            *total += count;
        }
    }
    line("all", &totals);
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::greedy_cases;

    /// The page that publishes the table.
    const PAGE: &str = include_str!("../../../../docs/fidelity.md");

    #[test]
    fn the_documentation_has_the_table() {
        let table = matrix_table(&greedy_cases());
        assert!(PAGE.contains(&table), "put this table into docs/fidelity.md:\n{table}");
    }

    #[test]
    fn every_model_type_has_every_storage_layout_prompt_and_chunk() {
        let cases = greedy_cases();
        let mut types: Vec<_> = cases.iter().map(|case| case.fixture.arch).collect();
        types.dedup();
        for arch in types {
            let any =
                |f: &dyn Fn(&Case) -> bool| cases.iter().any(|case| case.fixture.arch == arch && f(case));
            for storage in STORAGES {
                let stored = |f: &FixtureSpec| storage.of(f) == *f;
                for (counts, chunk) in PROMPTS {
                    for &count in counts {
                        let here = any(&|case| {
                            let reference = &case.reference;
                            stored(&case.fixture)
                                && (reference.tokens.ids().len(), reference.prefill_chunk)
                                    == (count, chunk as u32)
                        });
                        assert!(here, "{arch}: {count} tokens in chunks of {chunk}");
                    }
                }
                assert!(any(&|case| stored(&case.fixture) && case.fixture.shards > 1), "{arch} in shards");
            }
            assert!(arch == "qwen3_5_text" || any(&|case| case.fixture.hub), "{arch} in the hub's layout");
            for count in LONG {
                assert!(any(&|case| case.reference.tokens.ids().len() == count), "{arch}: {count} tokens");
            }
        }
    }
}
