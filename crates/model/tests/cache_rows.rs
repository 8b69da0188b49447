//! Caches of MLX under any sequence of operations: each row holds the keys and values of its tokens and of
//! nothing else, and masks show exactly those.

use proptest::prelude::*;
use russet_mlx::fast::Mask;
use russet_mlx::{Array, Dtype};
use russet_model::cache::{CacheKey, KvCache, LayerCache, RotatingKvCache};
use russet_model::{Cache, Tier};

/// What padding holds. It must never be seen.
const PADDING: f32 = -1.0;

/// The key of a token; its value is one more.
fn key(token: u32, position: usize) -> f32 {
    (token * 4096 + 2 * position as u32) as f32
}

/// Sequences of tokens, and caches of several kinds that have consumed them.
#[derive(Clone, Debug)]
struct State {
    cache: Cache,
    sequences: Vec<Vec<u32>>,
}

#[derive(Clone, Debug)]
enum Operation {
    /// Each row gets some tokens, as many as the list says in turn.
    Append(Vec<usize>),
    Snapshot,
    Restore,
    Trim(usize),
    /// Keeps the rows whose bits are set.
    Filter(u32),
    /// New sequences of these lengths join.
    Join(Vec<usize>),
    /// A row leaves and joins again as the last.
    Rejoin(usize),
    /// A row is saved, and read into a batch of one.
    Reload(usize),
    /// The same without a file.
    Extract(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    let rows = || 0..16_usize;
    prop_oneof![
        4 => prop::collection::vec(1..8_usize, 1..4).prop_map(Operation::Append),
        6 => Just(Operation::Append(vec![1])),
        1 => Just(Operation::Snapshot),
        1 => Just(Operation::Restore),
        2 => (0..6_usize).prop_map(Operation::Trim),
        2 => any::<u32>().prop_map(Operation::Filter),
        3 => prop::collection::vec(0..20_usize, 1..4).prop_map(Operation::Join),
        1 => rows().prop_map(Operation::Rejoin),
        1 => rows().prop_map(Operation::Reload),
        1 => rows().prop_map(Operation::Extract),
    ]
}

/// The caches of a model's layers, by the sizes of their rings; 0 is none.
fn empty(rings: &[i32]) -> Cache {
    let layer = |&ring: &i32| match ring {
        0 => LayerCache::Full(KvCache::new()),
        ring => LayerCache::Rotating(RotatingKvCache::new(ring, 0)),
    };
    Cache::new(rings.iter().map(layer).collect())
}

/// The next tokens of a sequence: any that differ.
fn tokens(sequence: &[u32], count: usize, salt: usize) -> Vec<u32> {
    (0..count).map(|i| ((sequence.len() + i) * 31 + salt * 7) as u32 % 97).collect()
}

/// Keys or values of the rows' next tokens, `plus` added to each.
fn rows_of(sequences: &[Vec<u32>], new: &[Vec<u32>], plus: f32) -> Array {
    let longest = new.iter().map(Vec::len).max().unwrap();
    let mut data = Vec::new();
    for (sequence, new) in sequences.iter().zip(new) {
        // Two heads of one feature.
        for _ in 0..2 {
            data.extend((0..longest).map(|i| match new.get(i) {
                Some(&token) => key(token, sequence.len() + i) + plus,
                None => PADDING,
            }));
        }
    }
    Array::from_slice(&data, [sequences.len() as i32, 2, longest as i32, 1]).unwrap()
}

impl State {
    /// Appends `new[i]` to row `i`; returns of each layer what its queries would see.
    fn append(&mut self, new: &[Vec<u32>]) -> Vec<(Mask, Array, Array)> {
        let lengths: Vec<i32> = new.iter().map(|new| new.len() as i32).collect();
        let longest = lengths.iter().copied().max().unwrap();
        self.cache.begin_padded(&lengths).unwrap();
        let (keys, values) = (rows_of(&self.sequences, new, 0.0), rows_of(&self.sequences, new, 1.0));
        let seen = self.cache.layers.iter_mut().map(|layer| {
            let mask = layer.mask(longest, None).unwrap();
            let (keys, values) = layer.update(&keys, &values).unwrap();
            (mask, keys, values)
        });
        let seen = seen.collect();
        self.cache.end_padded().unwrap();
        for (sequence, new) in self.sequences.iter_mut().zip(new) {
            sequence.extend(new);
        }
        seen
    }

    fn run(&mut self, operation: &Operation, snapshots: &mut Vec<Self>, rings: &[i32]) {
        let count = self.sequences.len();
        match operation {
            Operation::Append(lengths) => {
                let new = |i: usize| tokens(&self.sequences[i], lengths[i % lengths.len()], i);
                let new: Vec<_> = (0..count).map(new).collect();
                self.append(&new);
            }
            Operation::Snapshot => snapshots.push(self.clone()),
            Operation::Restore => {
                if let Some(snapshot) = snapshots.pop() {
                    *self = snapshot;
                }
            }
            Operation::Trim(trimmed) => match self.cache.trim(*trimmed) {
                Ok(()) => self.sequences.iter_mut().for_each(|s| s.truncate(s.len() - trimmed)),
                Err(e) => {
                    let short = self.sequences.iter().any(|s| s.len() < *trimmed);
                    assert!(short || rings.iter().any(|&ring| ring > 0), "{e}");
                }
            },
            Operation::Filter(bits) => {
                let rows: Vec<usize> = (0..count).filter(|row| bits >> row & 1 == 1).collect();
                match self.cache.filter(&rows) {
                    Ok(()) => self.sequences = rows.iter().map(|&row| self.sequences[row].clone()).collect(),
                    Err(e) => assert!(rows.is_empty(), "{e}"),
                }
            }
            Operation::Join(lengths) => {
                if count + lengths.len() > 16 {
                    return;
                }
                let fresh = lengths.iter().map(|&length| {
                    let mut one = Self { cache: empty(rings), sequences: vec![Vec::new()] };
                    if length > 0 {
                        one.append(&[tokens(&[], length, length)]);
                    }
                    one
                });
                let fresh: Vec<Self> = fresh.collect();
                let caches = fresh.iter().map(|one| one.cache.clone()).collect();
                self.cache.extend(Cache::merge(caches).unwrap()).unwrap();
                self.sequences.extend(fresh.into_iter().flat_map(|one| one.sequences));
            }
            Operation::Rejoin(row) => {
                let row = row % count;
                let rest: Vec<usize> = (0..count).filter(|&other| other != row).collect();
                if rest.is_empty() {
                    return;
                }
                let left = self.cache.extract(row).unwrap();
                self.cache.filter(&rest).unwrap();
                self.cache.extend(left).unwrap();
                let sequence = self.sequences.remove(row);
                self.sequences.push(sequence);
            }
            Operation::Reload(row) => {
                let row = row % count;
                if self.sequences[row].is_empty() {
                    return;
                }
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("cache");
                let key = key_of(&self.sequences[row]);
                self.cache.extract(row).unwrap().save(&path, &key).unwrap();
                let mut like = Self { cache: empty(rings), sequences: vec![Vec::new()] };
                like.append(&[vec![0]]);
                let cache = Cache::load(&path, &key, &like.cache).unwrap();
                *self = Self { cache, sequences: vec![self.sequences[row].clone()] };
            }
            Operation::Extract(row) => {
                let row = row % count;
                let cache = self.cache.extract(row).unwrap();
                *self = Self { cache, sequences: vec![self.sequences[row].clone()] };
            }
        }
    }

    /// Compares with what the sequences say.
    fn check(&self, rings: &[i32]) {
        let lengths: Vec<i32> = self.sequences.iter().map(|s| s.len() as i32).collect();
        for (layer, &ring) in self.cache.layers.iter().zip(rings) {
            assert_eq!(layer.lengths(), lengths, "{ring}");
        }
        for (row, sequence) in self.sequences.iter().enumerate() {
            let alone = self.cache.extract(row).unwrap();
            assert_eq!(alone.lengths(), [lengths[row]]);
            for (layer, &ring) in alone.layers.iter().zip(rings) {
                let kept = if ring == 0 { sequence.len() } else { sequence.len().min(ring as usize) };
                let first = sequence.len() - kept;
                let mut expected: Vec<f32> =
                    sequence.iter().enumerate().skip(first).map(|(i, &token)| key(token, i)).collect();
                expected.sort_by(f32::total_cmp);
                let arrays = layer.arrays();
                assert_eq!(arrays.is_empty(), sequence.is_empty(), "{ring}");
                for (array, plus) in arrays.iter().zip([0.0, 1.0]) {
                    let held = array.to_vec::<f32>().unwrap();
                    for head in held.chunks(held.len() / 2) {
                        // Several tokens at once may leave older ones, which nothing sees any more.
                        let mut last: Vec<f32> = head[head.len() - kept..].iter().map(|x| x - plus).collect();
                        last.sort_by(f32::total_cmp);
                        assert_eq!(last, expected, "ring {ring}, row {row}");
                    }
                }
            }
        }
        for count in [1, 3] {
            let mut probe = self.clone();
            let new: Vec<_> = self.sequences.iter().map(|sequence| tokens(sequence, count, 50)).collect();
            for ((mask, keys, values), &ring) in probe.append(&new).into_iter().zip(rings) {
                for (plus, array) in [(0.0, keys), (1.0, values)] {
                    for (row, sequence) in probe.sequences.iter().enumerate() {
                        for query in 0..count {
                            let end = sequence.len() - count + query + 1;
                            let start = if ring == 0 { 0 } else { end.saturating_sub(ring as usize) };
                            let mut expected: Vec<f32> =
                                (start..end).map(|i| key(sequence[i], i) + plus).collect();
                            let mut seen = visible(&mask, &array, row, query, count);
                            expected.sort_by(f32::total_cmp);
                            seen.sort_by(f32::total_cmp);
                            assert_eq!(seen, expected, "ring {ring}, row {row}, query {query} of {count}");
                        }
                    }
                }
            }
        }
    }
}

/// The columns of `row` that `query` of `count` may see.
fn visible(mask: &Mask, array: &Array, row: usize, query: usize, count: usize) -> Vec<f32> {
    let (rows, columns) = (array.dim(0).unwrap(), array.dim(2).unwrap() as usize);
    let held = array.to_vec::<f32>().unwrap();
    let held = &held[row * 2 * columns..][..columns];
    let sees = match mask {
        Mask::None => vec![true; columns],
        Mask::Causal => (0..columns).map(|column| column <= columns - count + query).collect(),
        Mask::Array(mask) => {
            let all = mask.broadcast_to([rows, 1, count as i32, columns as i32]).unwrap();
            let bytes = all.astype(Dtype::U8).unwrap().to_bytes().unwrap();
            bytes[(row * count + query) * columns..][..columns].iter().map(|&byte| byte == 1).collect()
        }
    };
    held.iter().zip(sees).filter(|(_, sees)| *sees).map(|(x, _)| *x).collect()
}

fn key_of(sequence: &[u32]) -> CacheKey {
    CacheKey {
        model: "tiny".into(),
        checkpoint: "none".into(),
        tier: Tier::L1,
        numerics: "none".into(),
        mlx: russet_mlx::version(),
        device: "cpu".into(),
        tokens: sequence.len(),
        token_ids: CacheKey::digest_tokens(sequence),
    }
}

fn assert_exact(rings: &[i32], operations: &[Operation]) {
    let mut state = State { cache: empty(rings), sequences: vec![Vec::new()] };
    let mut snapshots = Vec::new();
    for operation in operations {
        state.run(operation, &mut snapshots, rings);
        state.check(rings);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn any_operations_leave_the_tokens_of_each_row(
        rings in prop_oneof![Just(vec![0]), Just(vec![0, 5]), Just(vec![12]), Just(vec![300, 0])],
        operations in prop::collection::vec(operation(), 1..24),
    ) {
        assert_exact(&rings, &operations);
    }
}

#[test]
fn caches_grow_past_their_first_buffer() {
    let long = |n| Operation::Append(vec![n]);
    let one = || Operation::Append(vec![1]);
    let operations = [long(255), one(), one(), Operation::Join(vec![3, 256, 300]), one(), long(250), one()];
    assert_exact(&[0, 257, 400], &operations);
}

#[test]
fn what_a_batch_can_not_do_is_refused() {
    let message = |result: russet_model::Result<()>| result.unwrap_err().to_string();
    let mut state = State { cache: empty(&[0, 4]), sequences: vec![Vec::new()] };
    state.append(&[vec![1, 2, 3]]);
    let mut batch = Cache::merge(vec![state.cache.clone(), state.cache.clone()]).unwrap();

    assert!(Cache::merge(Vec::new()).unwrap_err().to_string().contains("at least one"));
    assert!(Cache::merge(vec![batch.clone(), batch.clone()]).unwrap_err().to_string().contains("extend"));
    assert!(Cache::merge(vec![state.cache.clone(), empty(&[0])]).unwrap_err().to_string().contains("models"));
    assert!(Cache::merge(vec![empty(&[0]), empty(&[4])]).unwrap_err().to_string().contains("models"));
    assert!(Cache::merge(vec![empty(&[5]), empty(&[4])]).unwrap_err().to_string().contains("sizes"));
    assert!(message(batch.extend(empty(&[0]))).contains("models"));
    assert!(message(batch.extend(empty(&[0, 5]))).contains("sizes"));
    let keeping = Cache::new(vec![LayerCache::Rotating(RotatingKvCache::new(8, 4))]);
    assert!(message(keeping.clone().extend(empty(&[8]))).contains("first 4 tokens"));
    assert!(message(batch.filter(&[])).contains("at least one row"));
    assert!(message(batch.filter(&[0, 2])).contains("no row 2"));
    assert!(message(batch.filter(&[1, 0])).contains("order"));
    assert!(batch.extract(2).unwrap_err().to_string().contains("no row 2"));
    assert!(message(batch.begin_padded(&[1])).contains("2 rows"));
    assert!(message(batch.begin_padded(&[1, 0])).contains("[1, 0]"));
    assert!(message(batch.trim(4)).contains("sequence of 3"));
    assert!(batch.compacted().unwrap_err().to_string().contains("row by row"));
    // Nothing of that changed it.
    assert_eq!(batch.lengths(), [3, 3]);
    State { cache: batch, sequences: vec![vec![1, 2, 3]; 2] }.check(&[0, 4]);
}
