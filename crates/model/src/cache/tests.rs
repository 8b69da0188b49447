//! Caches of every kind under any sequence of operations: each row is in the state of its tokens and of nothing
//! else. Keys and values are exactly those of its tokens, and queries see exactly those they should; recurrent
//! states and the outputs of the CPU kernels have the bits of a fresh run of the row alone.

use std::rc::Rc;
use std::sync::Arc;

use proptest::prelude::*;
use russet_kernels::cpu::{FloatType, Precision};
use russet_kernels::ops::{self, KvType, Matrix, Ops, Residual};
use russet_mlx::fast::Mask;
use russet_mlx::{Array, Dtype, MappedFile};

use super::*;
use crate::Tier;
use crate::layers::delta_rules;

/// The kind of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Full,
    /// A ring of `size` tokens, of which the first `keep` stay.
    Rotating {
        size: i32,
        keep: i32,
    },
    Kernel(KvType),
    /// With this one of the delta rules.
    Recurrent(usize),
}

const fn ring(size: i32) -> Kind {
    Kind::Rotating { size, keep: 0 }
}

/// The caches of models: dense, with windows, gemma4's and qwen3_5's, with MLX and with the CPU kernels.
const MODELS: [&[Kind]; 13] = [
    &[Kind::Full],
    &[Kind::Full, ring(5)],
    &[ring(12)],
    &[ring(300), Kind::Full],
    &[Kind::Rotating { size: 8, keep: 3 }],
    &[Kind::Full, Kind::Rotating { size: 12, keep: 4 }],
    &[Kind::Kernel(KvType::F16)],
    &[Kind::Kernel(KvType::F32), Kind::Kernel(KvType::F32)],
    &[Kind::Recurrent(BF16)],
    &[Kind::Recurrent(F32)],
    &[Kind::Recurrent(F32), Kind::Full],
    &[Kind::Recurrent(KERNELS)],
    &[Kind::Recurrent(KERNELS), Kind::Kernel(KvType::F16)],
];

const BF16: usize = 0;
const F32: usize = 1;
const KERNELS: usize = 2;

/// What padding holds. It must never be seen.
const PADDING: f32 = -1.0;

/// The key of a token; its value is one more. Both are exact in float16.
fn key(token: u32, position: usize) -> f32 {
    ((token as usize * 74 + position * 22) % 2018) as f32
}

/// Heads of keys and values, and the width of one for the CPU kernels.
const HEADS: usize = 2;
const WIDTH: usize = 4;

/// What computes.
struct Computer {
    ops: Arc<Ops>,
    /// An output projection that changes nothing.
    identity: Arc<Matrix>,
    delta_rules: Vec<(Rc<dyn Recurrence>, Dtype)>,
}

thread_local! {
    static COMPUTER: Computer = {
        let size = HEADS * WIDTH;
        let identity: Vec<u8> =
            (0..size * size).flat_map(|i| f32::from(i % (size + 1) == 0).to_le_bytes()).collect();
        let values = MappedFile::of_parts(&[&identity]).unwrap().slice(MappedFile::PARTS, identity.len());
        Computer {
            ops: Ops::new(Some(2), Precision::default()),
            identity: Arc::new(Matrix::dense(FloatType::F32, size, size, values.unwrap()).unwrap()),
            delta_rules: delta_rules::recurrences(),
        }
    };
}

/// What a layer made of a call.
enum Seen {
    /// What each query may see of which keys and values.
    Columns(Mask, [Array; 2]),
    /// Outputs `[rows, seq, width]`: the layer's, and that of a layer that uses its keys and values.
    Output(Vec<Array>),
}

/// Sequences of tokens, and caches of several kinds that have consumed them.
#[derive(Clone, Debug)]
struct State {
    kinds: &'static [Kind],
    cache: Cache,
    sequences: Vec<Vec<u32>>,
}

#[derive(Clone, Debug)]
enum Operation {
    /// Each row gets some tokens, as many as the list says in turn.
    Append(Vec<usize>),
    Snapshot,
    /// Goes back to the last snapshot, and leaves what there was as the first.
    Restore,
    Trim(usize),
    /// A single sequence tries some tokens and keeps the first of them.
    Round(usize, usize),
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
    /// A row forks: a copy of it joins.
    Fork(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    let rows = || 0..16_usize;
    prop_oneof![
        4 => prop::collection::vec(1..8_usize, 1..4).prop_map(Operation::Append),
        6 => Just(Operation::Append(vec![1])),
        2 => Just(Operation::Snapshot),
        2 => Just(Operation::Restore),
        3 => (0..6_usize).prop_map(Operation::Trim),
        2 => (1..6_usize).prop_flat_map(|n| (Just(n), 0..=n)).prop_map(|(n, keep)| Operation::Round(n, keep)),
        2 => any::<u32>().prop_map(Operation::Filter),
        3 => prop::collection::vec(0..20_usize, 1..4).prop_map(Operation::Join),
        1 => rows().prop_map(Operation::Rejoin),
        1 => rows().prop_map(Operation::Reload),
        1 => rows().prop_map(Operation::Extract),
        1 => rows().prop_map(Operation::Fork),
    ]
}

/// The next tokens of a sequence: any that differ.
fn tokens(sequence: &[u32], count: usize, salt: usize) -> Vec<u32> {
    (0..count).map(|i| ((sequence.len() + i) * 31 + salt * 7) as u32 % 97).collect()
}

/// `[rows, seq, width]` made of each row's next tokens.
fn rows_of(
    sequences: &[Vec<u32>],
    new: &[Vec<u32>],
    width: usize,
    value: impl Fn(u32, usize, usize) -> f32,
) -> Array {
    let longest = new.iter().map(Vec::len).max().unwrap();
    let mut data = Vec::new();
    for (sequence, new) in sequences.iter().zip(new) {
        for i in 0..longest {
            data.extend((0..width).map(|channel| match new.get(i) {
                Some(&token) => value(token, sequence.len() + i, channel),
                None => PADDING,
            }));
        }
    }
    Array::from_slice(&data, [sequences.len() as i32, longest as i32, width as i32]).unwrap()
}

/// Something between -1 and 1 that differs from channel to channel.
fn spread(token: u32, position: usize, channel: usize) -> f32 {
    ((token as usize * 7919 + position * 611 + channel * 1409) % 2001) as f32 / 1000.0 - 1.0
}

impl State {
    fn empty(kinds: &'static [Kind], rows: usize) -> Self {
        let layer = |&kind: &Kind| match kind {
            Kind::Full => LayerCache::Full(KvCache::new()),
            Kind::Rotating { size, keep } => LayerCache::Rotating(RotatingKvCache::new(size, keep)),
            Kind::Kernel(kv) => LayerCache::Kernel(KernelKvCache::new(kv)),
            Kind::Recurrent(_) => LayerCache::Recurrent(RecurrentCache::new()),
        };
        let one = || Cache::new(kinds.iter().map(layer).collect());
        let cache = Cache::merge((0..rows).map(|_| one()).collect()).unwrap();
        Self { kinds, cache, sequences: vec![Vec::new(); rows] }
    }

    /// One that has read `sequence` alone and in one call.
    fn fresh(kinds: &'static [Kind], sequence: &[u32]) -> Self {
        let mut one = Self::empty(kinds, 1);
        if !sequence.is_empty() {
            one.append(&[sequence.to_vec()]);
        }
        one
    }

    /// Whether rows of a call have the same length.
    fn is_even(&self) -> bool {
        self.kinds.iter().any(|kind| matches!(kind, Kind::Kernel(_) | Kind::Recurrent(KERNELS)))
    }

    /// Whether there can be a batch.
    fn is_single(&self) -> bool {
        self.kinds.iter().any(|kind| matches!(kind, Kind::Rotating { keep: 1.., .. }))
    }

    /// Appends `new[i]` to row `i`; returns what each layer makes of it.
    fn append(&mut self, new: &[Vec<u32>]) -> Vec<Seen> {
        let lengths: Vec<i32> = new.iter().map(|new| new.len() as i32).collect();
        self.cache.begin_padded(&lengths).unwrap();
        let layers = self.cache.layers.iter_mut().zip(self.kinds);
        let seen = layers.map(|(layer, &kind)| append_to(layer, kind, &self.sequences, new));
        let seen = seen.collect();
        self.cache.end_padded().unwrap();
        for (sequence, new) in self.sequences.iter_mut().zip(new) {
            sequence.extend(new);
        }
        seen
    }

    /// Runs operation number `at`: what follows a snapshot differs from what followed it before.
    fn run(&mut self, operation: &Operation, at: usize, snapshots: &mut Vec<Self>) {
        let count = self.sequences.len();
        match operation {
            Operation::Append(lengths) => {
                let step = usize::from(!self.is_even());
                let new =
                    |i: usize| tokens(&self.sequences[i], lengths[i * step % lengths.len()], at + 30 * i);
                let new: Vec<_> = (0..count).map(new).collect();
                self.append(&new);
            }
            Operation::Snapshot => snapshots.push(self.clone()),
            Operation::Restore => {
                if let Some(snapshot) = snapshots.pop() {
                    snapshots.insert(0, std::mem::replace(self, snapshot));
                }
            }
            Operation::Trim(trimmed) => match self.cache.trim(*trimmed) {
                Ok(()) => self.sequences.iter_mut().for_each(|s| s.truncate(s.len() - trimmed)),
                Err(e) => {
                    let short = self.sequences.iter().any(|s| s.len() < *trimmed);
                    let mut layers = self.cache.layers.iter().zip(self.kinds);
                    assert!(short || layers.any(|(layer, kind)| may_lose(layer, *kind)), "{e}");
                }
            },
            Operation::Round(tried, keep) => {
                if count > 1 {
                    return;
                }
                let before = self.clone();
                self.cache.begin_round();
                self.append(&[tokens(&self.sequences[0], *tried, at)]);
                match self.cache.rollback(*keep as i32) {
                    Ok(()) => self.sequences[0].truncate(before.sequences[0].len() + keep),
                    Err(e) => {
                        assert!(self.cache.layers.iter().any(|layer| !layer.is_trimmable()), "{e}");
                        *self = before;
                    }
                }
            }
            Operation::Filter(bits) => {
                let rows: Vec<usize> = (0..count).filter(|row| bits >> row & 1 == 1).collect();
                match self.cache.filter(&rows) {
                    Ok(()) => self.sequences = rows.iter().map(|&row| self.sequences[row].clone()).collect(),
                    Err(e) => assert!(rows.is_empty(), "{e}"),
                }
            }
            Operation::Join(lengths) => {
                if count + lengths.len() > 16 || self.is_single() {
                    return;
                }
                let fresh = lengths
                    .iter()
                    .map(|&length| Self::fresh(self.kinds, &tokens(&[], length, length)))
                    .collect::<Vec<_>>();
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
                let like = Self::fresh(self.kinds, &[0]);
                let cache = Cache::load(&path, &key, &like.cache).unwrap();
                *self = Self { kinds: self.kinds, cache, sequences: vec![self.sequences[row].clone()] };
            }
            Operation::Extract(row) => {
                let row = row % count;
                let cache = self.cache.extract(row).unwrap();
                *self = Self { kinds: self.kinds, cache, sequences: vec![self.sequences[row].clone()] };
            }
            Operation::Fork(row) => {
                if count == 16 || self.is_single() {
                    return;
                }
                let row = row % count;
                // A clone shares its memory with the row that stays.
                let mut copy = self.cache.clone();
                copy.filter(&[row]).unwrap();
                self.cache.extend(copy).unwrap();
                self.sequences.push(self.sequences[row].clone());
            }
        }
    }

    /// Compares with what the sequences say.
    fn check(&self) {
        let lengths: Vec<i32> = self.sequences.iter().map(|s| s.len() as i32).collect();
        for (layer, kind) in self.cache.layers.iter().zip(self.kinds) {
            assert_eq!(layer.lengths(), lengths, "{kind:?}");
        }
        for (row, sequence) in self.sequences.iter().enumerate() {
            let alone = self.cache.extract(row).unwrap();
            assert_eq!((alone.rows(), alone.lengths()), (1, vec![lengths[row]]));
            if sequence.is_empty() {
                continue;
            }
            for (layer, kind) in alone.layers.iter().zip(self.kinds) {
                let what = format!("{kind:?}, row {row}");
                match layer {
                    LayerCache::Recurrent(_) => assert_fresh_state(layer, *kind, sequence, &what),
                    LayerCache::Kernel(cache) => {
                        // It keeps nothing of the batch alive, and has no unused rows.
                        assert!(!cache.filled().unwrap().is_shared(), "{what}");
                        let held = cache.to_arrays().unwrap();
                        assert_eq!(cache.nbytes(), held[0].nbytes() + held[1].nbytes(), "{what}");
                        assert_held(&held, *kind, sequence, &what);
                    }
                    _ => assert_held(&layer.arrays(), *kind, sequence, &what),
                }
            }
        }
        for count in [1, 3] {
            let mut probe = self.clone();
            let new: Vec<_> = self.sequences.iter().map(|sequence| tokens(sequence, count, 50)).collect();
            let alone: Vec<Vec<Seen>> = self
                .sequences
                .iter()
                .zip(&new)
                .filter(|_| {
                    self.kinds.iter().any(|kind| matches!(kind, Kind::Kernel(_) | Kind::Recurrent(_)))
                })
                .map(|(sequence, new)| Self::fresh(self.kinds, sequence).append(std::slice::from_ref(new)))
                .collect();
            for (l, (seen, &kind)) in probe.append(&new).iter().zip(self.kinds).enumerate() {
                match seen {
                    Seen::Columns(mask, columns) => probe.check_columns(kind, count, mask, columns),
                    Seen::Output(outputs) => {
                        for (row, alone) in alone.iter().enumerate() {
                            let Seen::Output(alone) = &alone[l] else { unreachable!() };
                            for output in outputs {
                                let own = output.slice_axis(0, row as i32, row as i32 + 1).unwrap();
                                assert_eq!(
                                    bits(&own),
                                    bits(&alone[0]),
                                    "{kind:?}, row {row}, {count} tokens"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    /// Checks what the last `count` tokens see in a layer with keys and values.
    fn check_columns(&self, kind: Kind, count: usize, mask: &Mask, columns: &[Array; 2]) {
        for (plus, array) in [0.0, 1.0].into_iter().zip(columns) {
            for (row, sequence) in self.sequences.iter().enumerate() {
                for query in 0..count {
                    let expected = positions_seen(kind, sequence.len() - count, count, query);
                    let mut expected: Vec<f32> =
                        expected.into_iter().map(|i| key(sequence[i], i) + plus).collect();
                    let mut seen = visible(mask, array, row, query, count);
                    expected.sort_by(f32::total_cmp);
                    seen.sort_by(f32::total_cmp);
                    assert_eq!(seen, expected, "{kind:?}, row {row}, query {query} of {count}");
                }
            }
        }
    }
}

fn bits(array: &Array) -> Vec<u8> {
    array.contiguous().unwrap().to_bytes().unwrap()
}

/// Whether a layer may refuse to take tokens back.
fn may_lose(layer: &LayerCache, kind: Kind) -> bool {
    !layer.is_trimmable() && matches!(kind, Kind::Rotating { .. } | Kind::Recurrent(_))
}

/// Appends to one layer.
fn append_to(layer: &mut LayerCache, kind: Kind, sequences: &[Vec<u32>], new: &[Vec<u32>]) -> Seen {
    let (rows, longest) = (new.len() as i32, new.iter().map(Vec::len).max().unwrap() as i32);
    let keys_plus = |plus: f32, width: usize| {
        rows_of(sequences, new, width, |token, position, _| key(token, position) + plus)
    };
    match kind {
        Kind::Full | Kind::Rotating { .. } => {
            // Two heads of one feature.
            let heads = |x: Array| {
                x.reshape([rows, longest, HEADS as i32, 1]).unwrap().transpose([0, 2, 1, 3]).unwrap()
            };
            let mask = layer.mask(longest, None).unwrap();
            let (keys, values) =
                layer.update(&heads(keys_plus(0.0, HEADS)), &heads(keys_plus(1.0, HEADS))).unwrap();
            let shared = layer.keys_values().unwrap();
            assert_eq!([bits(&shared.0), bits(&shared.1)], [bits(&keys), bits(&values)]);
            Seen::Columns(mask, [keys, values])
        }
        Kind::Kernel(_) => {
            let width = HEADS * WIDTH;
            let queries = rows_of(sequences, new, width, spread);
            Seen::Output(attend(layer, &queries, [&keys_plus(0.0, width), &keys_plus(1.0, width)]))
        }
        Kind::Recurrent(rule) => {
            let (rule, dtype) = COMPUTER.with(|computer| computer.delta_rules[rule].clone());
            let input = |width: i32, salt: usize| {
                let value = |token, position, channel| spread(token, position, channel * 3 + salt);
                rows_of(sequences, new, width as usize, value).astype(dtype).unwrap()
            };
            let [channels, heads] = delta_rules::widths();
            let inputs = RecurrentInputs { qkv: input(channels, 0), a: input(heads, 1), b: input(heads, 2) };
            let LayerCache::Recurrent(cache) = layer else { unreachable!() };
            Seen::Output(vec![cache.advance(&rule, inputs).unwrap()])
        }
    }
}

/// The attention of the CPU kernels, which appends, and that of a layer that uses the same keys and values.
fn attend(layer: &mut LayerCache, queries: &Array, [keys, values]: [&Array; 2]) -> Vec<Array> {
    let length = queries.dim(1).unwrap();
    let offsets = layer.lengths();
    let caches = layer.kernel_rows_mut().unwrap();
    let appends = caches.iter_mut().map(|cache| cache.begin_append(length, HEADS, WIDTH).unwrap());
    let appends: Vec<_> = appends.collect();
    let after = appends.iter().filter_map(|append| append.after.clone()).collect();
    let sequences = appends.into_iter().zip(&offsets).map(|(append, &offset)| ops::KvSequence {
        cache: append.buffer,
        copy_from: append.copy_from,
        offset: offset as usize,
        rotations: None,
    });
    let sequences = sequences.collect();
    let call = |identity: &Arc<Matrix>, sequences| ops::AttentionCall {
        norms: [None, None, None],
        output: identity.clone(),
        heads: HEADS,
        kv_heads: HEADS,
        head_dim: WIDTH,
        scale: 1e-3,
        softcap: None,
        output_gate: false,
        window: None,
        traditional: false,
        sequences,
        residual: Residual::Replaced,
    };
    let hidden = Array::zeros(queries.shape(), Dtype::F32).unwrap();
    COMPUTER.with(|Computer { ops, identity, .. }| {
        let out = ops.attention(call(identity, sequences), [queries, keys, values], &hidden, after).unwrap();
        caches.iter_mut().for_each(|cache| cache.end_append(out.appended.clone(), length));
        let (mut sharing, mut after) = (Vec::new(), Vec::new());
        for (cache, &offset) in caches.iter().zip(&offsets) {
            let (cache, appended) = cache.appended_rows().unwrap();
            after.extend(appended);
            let offset = offset as usize;
            sharing.push(ops::KvSequence { cache, copy_from: None, offset, rotations: None });
        }
        let shared = ops.attention_shared(call(identity, sharing), queries, &hidden, after).unwrap();
        vec![out.hidden, shared]
    })
}

/// The positions that query `query` of `count` behind `former` tokens sees in a layer with keys and values.
fn positions_seen(kind: Kind, former: usize, count: usize, query: usize) -> Vec<usize> {
    let Kind::Rotating { size, keep } = kind else { return (0..=former + query).collect() };
    let (size, keep) = (size as usize, keep as usize);
    // Before a call a ring drops tokens but for one less than its size, those that stay not among them.
    let mut columns: Vec<usize> = match former < size {
        true => (0..former).collect(),
        false => (0..keep).chain(former - (size - 1 - keep)..former).collect(),
    };
    let held = columns.len();
    columns.extend(former..former + count);
    columns[(held + query + 1).saturating_sub(size)..=held + query].to_vec()
}

/// The columns of `row` that `query` of `count` may see.
fn visible(mask: &Mask, array: &Array, row: usize, query: usize, count: usize) -> Vec<f32> {
    let (rows, columns) = (array.dim(0).unwrap(), array.dim(2).unwrap() as usize);
    let held = array.to_vec::<f32>().unwrap();
    let held = &held[row * HEADS * columns..][..columns];
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

/// Checks keys and values `[1, heads, columns, width]` of a sequence.
fn assert_held(keys_values: &[Array], kind: Kind, sequence: &[u32], what: &str) {
    let (size, keep) = match kind {
        Kind::Rotating { size, keep } => (size as usize, keep as usize),
        _ => (sequence.len(), 0),
    };
    let kept = sequence.len().min(size);
    let keep = keep.min(kept);
    let first = sequence.len() - (kept - keep);
    let mut expected: Vec<f32> =
        (0..keep).chain(first..sequence.len()).map(|i| key(sequence[i], i)).collect();
    expected[keep..].sort_by(f32::total_cmp);
    assert_eq!(keys_values.len(), 2, "{what}");
    for (array, plus) in keys_values.iter().zip([0.0, 1.0]) {
        let (columns, width) = (array.dim(2).unwrap() as usize, array.dim(3).unwrap() as usize);
        let held = array.astype(Dtype::F32).unwrap().to_vec::<f32>().unwrap();
        for head in held.chunks(columns * width) {
            for feature in 0..width {
                let column = |i: usize| head[i * width + feature] - plus;
                // Several tokens at once may leave older ones, which nothing sees any more.
                let mut last: Vec<f32> = (columns - (kept - keep)..columns).map(column).collect();
                last.sort_by(f32::total_cmp);
                assert_eq!((0..keep).map(column).chain(last).collect::<Vec<_>>(), expected, "{what}");
            }
        }
    }
}

/// Checks that a recurrent layer's state has the bits of a fresh run.
fn assert_fresh_state(layer: &LayerCache, kind: Kind, sequence: &[u32], what: &str) {
    let mut fresh = LayerCache::Recurrent(RecurrentCache::new());
    append_to(&mut fresh, kind, &[Vec::new()], &[sequence.to_vec()]);
    let [state, fresh] = [layer, &fresh].map(|layer| layer.arrays().iter().map(bits).collect::<Vec<_>>());
    assert_eq!(state.len(), 2, "{what}");
    assert_eq!(state, fresh, "{what}");
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

/// Runs the operations, and checks after each, or only in the end: until then nothing may have been computed.
fn assert_exact(kinds: &'static [Kind], operations: &[Operation], after_each: bool) {
    let mut state = State::empty(kinds, 1);
    let mut snapshots = Vec::new();
    for (at, operation) in operations.iter().enumerate() {
        state.run(operation, at, &mut snapshots);
        if after_each {
            state.check();
        }
    }
    state.check();
    // What was left behind is as it was.
    snapshots.iter().for_each(State::check);
}

fn assert_any_operations_exact(models: impl Fn(&[Kind]) -> bool, cases: u32) {
    for kinds in MODELS.into_iter().filter(|kinds| models(kinds)) {
        let operations = prop::collection::vec(operation(), 1..24);
        proptest!(ProptestConfig::with_cases(cases), |(operations in operations, after_each: bool)| {
            assert_exact(kinds, &operations, after_each);
        });
    }
}

fn is_recurrent(kinds: &[Kind]) -> bool {
    kinds.iter().any(|kind| matches!(kind, Kind::Recurrent(_)))
}

#[test]
fn any_operations_leave_the_keys_and_values_of_each_row() {
    assert_any_operations_exact(|kinds| !is_recurrent(kinds), 60);
}

#[test]
fn any_operations_leave_the_recurrent_state_of_each_row() {
    assert_any_operations_exact(is_recurrent, 12);
}

#[test]
fn what_a_pending_copy_reads_is_not_overwritten() {
    use Operation::{Append, Restore, Snapshot, Trim};
    let operations = [Append(vec![9]), Snapshot, Append(vec![1]), Restore, Trim(4), Append(vec![2])];
    for kinds in MODELS {
        assert_exact(kinds, &operations, false);
    }
}

#[test]
fn a_pending_call_sees_its_own_tokens() {
    for kinds in MODELS {
        let mut state = State::fresh(kinds, &[1, 2, 3]);
        let pending = state.append(&[vec![4, 5, 6]]);
        if state.cache.trim(2).is_err() {
            assert!(is_recurrent(kinds) || kinds.contains(&ring(5)), "{kinds:?}");
            continue;
        }
        state.sequences[0].truncate(4);
        state.append(&[vec![7, 8, 9]]);
        state.check();
        let expected = State::fresh(kinds, &[1, 2, 3]).append(&[vec![4, 5, 6]]);
        for (pending, expected) in pending.iter().zip(&expected) {
            match (pending, expected) {
                (Seen::Columns(_, a), Seen::Columns(_, b)) => {
                    assert_eq!(a.each_ref().map(bits), b.each_ref().map(bits))
                }
                (Seen::Output(a), Seen::Output(b)) => {
                    a.iter().for_each(|a| assert_eq!(bits(a), bits(&b[0]), "{kinds:?}"))
                }
                _ => unreachable!(),
            }
        }
    }
}

#[test]
fn caches_grow_past_their_first_buffer() {
    const GROWING: &[Kind] = &[Kind::Full, ring(257), ring(400)];
    const KERNEL: &[Kind] = &[Kind::Kernel(KvType::F16)];
    let long = |n| Operation::Append(vec![n]);
    let one = || Operation::Append(vec![1]);
    let operations = [long(255), one(), one(), Operation::Join(vec![3, 256, 300]), one(), long(250), one()];
    for kinds in [GROWING, KERNEL] {
        assert_exact(kinds, &operations, true);
    }
}

#[test]
fn what_a_batch_can_not_do_is_refused() {
    const KINDS: &[Kind] = &[Kind::Full, ring(4)];
    const LONGER: &[Kind] = &[Kind::Full, ring(5)];
    const FULL: &[Kind] = &[Kind::Full];
    const RINGS: [&[Kind]; 3] = [&[ring(4)], &[ring(5)], &[ring(8)]];
    let message = |result: Result<()>| result.unwrap_err().to_string();
    let refused = |result: Result<Cache>| result.unwrap_err().to_string();
    let empty = |kinds| State::empty(kinds, 1).cache;
    let mut state = State::empty(KINDS, 1);
    state.append(&[vec![1, 2, 3]]);
    let mut batch = Cache::merge(vec![state.cache.clone(), state.cache.clone()]).unwrap();

    assert!(refused(Cache::merge(Vec::new())).contains("at least one"));
    assert!(refused(Cache::merge(vec![batch.clone(), batch.clone()])).contains("extend"));
    assert!(refused(Cache::merge(vec![state.cache.clone(), empty(FULL)])).contains("models"));
    assert!(refused(Cache::merge(vec![empty(FULL), empty(RINGS[0])])).contains("models"));
    assert!(refused(Cache::merge(vec![empty(RINGS[1]), empty(RINGS[0])])).contains("sizes"));
    assert!(message(batch.extend(empty(FULL))).contains("models"));
    assert!(message(batch.extend(empty(LONGER))).contains("sizes"));
    let mut keeping = empty(&[Kind::Rotating { size: 8, keep: 4 }]);
    assert!(message(keeping.extend(empty(RINGS[2]))).contains("first 4 tokens"));
    assert!(message(batch.filter(&[])).contains("at least one row"));
    assert!(message(batch.filter(&[0, 2])).contains("no row 2"));
    assert!(message(batch.filter(&[1, 0])).contains("order"));
    assert!(batch.extract(2).unwrap_err().to_string().contains("no row 2"));
    assert!(message(batch.begin_padded(&[1])).contains("2 rows"));
    assert!(message(batch.begin_padded(&[1, 0])).contains("[1, 0]"));
    assert!(message(batch.trim(4)).contains("sequence of 3"));
    assert!(refused(batch.compacted()).contains("row by row"));
    // Nothing of that changed it.
    assert_eq!(batch.lengths(), [3, 3]);
    State { kinds: KINDS, cache: batch, sequences: vec![vec![1, 2, 3]; 2] }.check();

    let mut kernels = State::empty(&[Kind::Kernel(KvType::F16)], 2).cache;
    assert!(message(kernels.begin_padded(&[1, 2])).contains("equal length"));
}
