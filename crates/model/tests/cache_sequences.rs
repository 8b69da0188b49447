//! The caches of whole models under any sequence of operations: what comes out has the bits of a run that made
//! only the calls that were kept. The rows of a batch have other bits than alone with MLX, so that the run to
//! compare with has the same joins and leaves.

use std::mem;

use proptest::prelude::*;
use russet_mlx::{Array, Device};
use russet_model::{Cache, Fidelity, LoadOptions, Model, Tier};
use russet_testing::{Format, TinyCheckpoint};
use serde_json::json;

/// A window over the first of two layers; recurrent and full layers; layers that share keys and values, with
/// windows and experts; experts alone.
fn checkpoints() -> [TinyCheckpoint; 4] {
    let llama = TinyCheckpoint::llama(Format::Dense)
        .with("layer_types", json!(["sliding_attention", "full_attention"]))
        .with("sliding_window", json!(8));
    let [qwen3_5, gemma4, qwen3_moe] =
        [TinyCheckpoint::qwen3_5, TinyCheckpoint::gemma4, TinyCheckpoint::qwen3_moe];
    [llama, qwen3_5(Format::Dense), gemma4(Format::Dense), qwen3_moe(Format::Dense)]
}

fn load(checkpoint: &TinyCheckpoint, tier: Tier) -> Model {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    Model::load(dir.path(), &LoadOptions::new(Fidelity::Tier(tier))).unwrap()
}

/// What changes the rows of a batch, or what they have read.
#[derive(Clone, Debug)]
enum Call {
    /// The next tokens of each row.
    Read(Vec<Vec<u32>>),
    /// A sequence with these tokens joins.
    Join(Vec<u32>),
    /// Only these rows stay.
    Filter(Vec<usize>),
    /// A row leaves and joins again as the last.
    Rejoin(usize),
}

#[derive(Clone, Debug)]
enum Operation {
    /// Each row gets some tokens, as many as the list says in turn.
    Read(Vec<usize>),
    Snapshot,
    /// Goes back to the last snapshot.
    Restore,
    /// Trims the tokens of the last call.
    Undo,
    Join(usize),
    Filter(u32),
    Rejoin(usize),
    /// The same, through a file.
    Reload(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => prop::collection::vec(1..7_usize, 1..4).prop_map(Operation::Read),
        3 => Just(Operation::Read(vec![1])),
        2 => Just(Operation::Snapshot),
        2 => Just(Operation::Restore),
        2 => Just(Operation::Undo),
        2 => (1..12_usize).prop_map(Operation::Join),
        1 => any::<u32>().prop_map(Operation::Filter),
        1 => (0..8_usize).prop_map(Operation::Rejoin),
        2 => (0..8_usize).prop_map(Operation::Reload),
    ]
}

/// A cache, the calls that led to it, and the tokens of its rows.
#[derive(Clone)]
struct State {
    cache: Cache,
    calls: Vec<Call>,
    rows: Vec<Vec<u32>>,
}

/// Hidden states and logits of a call, as bytes.
fn read(model: &Model, cache: &mut Cache, new: &[Vec<u32>]) -> Vec<u8> {
    let lengths: Vec<i32> = new.iter().map(|new| new.len() as i32).collect();
    let longest = new.iter().map(Vec::len).max().unwrap();
    let padded: Vec<u32> =
        new.iter().flat_map(|new| (0..longest).map(|i| new.get(i).copied().unwrap_or(0))).collect();
    let tokens = Array::from_slice(&padded, [new.len() as i32, longest as i32]).unwrap();
    cache.begin_padded(&lengths).unwrap();
    let hidden = model.forward(&tokens, cache).unwrap();
    cache.end_padded().unwrap();
    model.logits(&hidden).unwrap().to_bytes().unwrap()
}

fn rejoin(cache: &mut Cache, row: usize, through: impl Fn(Cache) -> Cache) {
    let rest: Vec<usize> = (0..cache.rows()).filter(|&other| other != row).collect();
    let left = through(cache.extract(row).unwrap());
    if rest.is_empty() {
        *cache = left;
        return;
    }
    cache.filter(&rest).unwrap();
    cache.extend(left).unwrap();
}

impl State {
    fn new(model: &Model) -> Self {
        Self { cache: model.new_cache(), calls: Vec::new(), rows: vec![Vec::new()] }
    }

    /// Makes a call, and returns what it computes.
    fn make(&mut self, model: &Model, call: &Call) -> Option<Vec<u8>> {
        let mut out = None;
        match call {
            Call::Read(new) => {
                out = Some(read(model, &mut self.cache, new));
                self.rows.iter_mut().zip(new).for_each(|(row, new)| row.extend(new));
            }
            Call::Join(tokens) => {
                let mut other = model.new_cache();
                read(model, &mut other, std::slice::from_ref(tokens));
                self.cache.extend(other).unwrap();
                self.rows.push(tokens.clone());
            }
            Call::Filter(rows) => {
                self.cache.filter(rows).unwrap();
                self.rows = rows.iter().map(|&row| self.rows[row].clone()).collect();
            }
            Call::Rejoin(row) => {
                rejoin(&mut self.cache, *row, |cache| cache);
                let row = self.rows.remove(*row);
                self.rows.push(row);
            }
        }
        self.calls.push(call.clone());
        out
    }

    fn run(&mut self, model: &Model, operation: &Operation, at: u32, snapshots: &mut Vec<Self>) {
        let count = self.rows.len();
        let tokens = |count: usize, salt: u32| (0..count as u32).map(|i| (i * 31 + salt * 7) % 48).collect();
        match operation {
            Operation::Read(lengths) => {
                // The CPU kernels take no padding.
                let step = usize::from(model.tier() != Tier::L3);
                let length = |row: usize| lengths[row * step % lengths.len()];
                let new = (0..count).map(|row| tokens(length(row), at + 40 * row as u32)).collect();
                self.make(model, &Call::Read(new));
            }
            Operation::Snapshot => snapshots.push(self.clone()),
            Operation::Restore => {
                if let Some(snapshot) = snapshots.pop() {
                    snapshots.insert(0, mem::replace(self, snapshot));
                }
            }
            Operation::Undo => {
                let Some(Call::Read(new)) = self.calls.last() else { return };
                let length = new[0].len();
                if new.iter().all(|new| new.len() == length) && self.cache.trim(length).is_ok() {
                    self.calls.pop();
                    self.rows.iter_mut().for_each(|row| row.truncate(row.len() - length));
                }
            }
            Operation::Join(length) => {
                if count < 8 {
                    self.make(model, &Call::Join(tokens(*length, at)));
                }
            }
            Operation::Filter(bits) => {
                let rows: Vec<usize> = (0..count).filter(|row| bits >> row & 1 == 1).collect();
                if !rows.is_empty() {
                    self.make(model, &Call::Filter(rows));
                }
            }
            Operation::Rejoin(row) => drop(self.make(model, &Call::Rejoin(row % count))),
            Operation::Reload(row) => {
                let row = row % count;
                if self.rows[row].is_empty() {
                    return;
                }
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("cache");
                let tokens = self.rows[row].clone();
                rejoin(&mut self.cache, row, |cache| {
                    model.save_cache(&cache, &tokens, &path).unwrap();
                    model.load_cache(&tokens, &path).unwrap()
                });
                self.rows.remove(row);
                self.rows.push(tokens);
                self.calls.push(Call::Rejoin(row));
            }
        }
    }

    /// Compares with a run that makes the same calls and no others.
    fn check(mut self, model: &Model) {
        let mut fresh = Self::new(model);
        for call in &self.calls {
            fresh.make(model, call);
        }
        assert_eq!(self.rows, fresh.rows);
        let lengths: Vec<i32> = self.rows.iter().map(|row| row.len() as i32).collect();
        assert_eq!(self.cache.lengths(), lengths);
        for (row, length) in lengths.iter().enumerate() {
            let [a, b] = [&self, &fresh].map(|state| state.cache.extract(row).unwrap());
            assert_eq!(a.nbytes(), b.nbytes(), "row {row} of {length} tokens");
            for (a, b) in a.arrays().iter().zip(b.arrays()) {
                assert!(a.to_bytes().unwrap() == b.to_bytes().unwrap(), "row {row}: other state");
            }
        }
        for length in [1, 3] {
            let new = Call::Read(vec![vec![11; length]; self.rows.len()]);
            let (a, b) = (self.make(model, &new), fresh.make(model, &new));
            assert!(a == b, "other logits behind {:?}", self.calls);
        }
    }
}

#[test]
fn any_operations_leave_the_bits_of_the_calls_that_were_kept() {
    let tiers = [Tier::L1, Tier::L3];
    let tiers = &tiers[..if Device::default_device() == Device::Cpu { 2 } else { 1 }];
    for (checkpoint, tier) in checkpoints().iter().flat_map(|c| tiers.iter().map(move |&tier| (c, tier))) {
        let model = load(checkpoint, tier);
        let operations = prop::collection::vec(operation(), 1..14);
        proptest!(ProptestConfig::with_cases(40), |(operations in operations)| {
            let mut state = State::new(&model);
            let mut snapshots = Vec::new();
            for (at, operation) in (0..).zip(&operations) {
                state.run(&model, operation, at, &mut snapshots);
            }
            // What was left behind is as it was.
            snapshots.push(state);
            snapshots.into_iter().for_each(|state| state.check(&model));
        });
    }
}
