//! Copies of caches hold their own memory and no more. In a test binary of its own, because MLX's counters are
//! the process's.

use std::rc::Rc;

use russet_mlx::{Array, Dtype, eval, memory};
use russet_model::cache::{
    KvCache, LayerCache, Recurrence, RecurrentCache, RecurrentInputs, RecurrentState, RotatingKvCache,
};
use russet_model::{Cache, Result};

/// What small buffers may add up to.
const SLACK: usize = 64 << 10;

fn append(cache: &mut Cache, shape: [i32; 4]) {
    let new = Array::full(shape, 1.0, Dtype::F32).unwrap();
    for layer in &mut cache.layers {
        layer.update(&new, &new).unwrap();
    }
    eval(&cache.arrays()).unwrap();
}

fn active() -> usize {
    memory::clear_cache().unwrap();
    memory::active()
}

/// One test, because they would count each other's memory.
#[test]
fn copies_keep_nothing_else_alive() {
    copies_of_keys_and_values();
    copies_of_rings_that_keep_their_first_tokens();
    copies_of_recurrent_states();
}

fn copies_of_rings_that_keep_their_first_tokens() {
    let before = active();
    let mut cache = Cache::new(vec![LayerCache::Rotating(RotatingKvCache::new(256, 4))]);
    append(&mut cache, [1, 4, 2000, 64]);
    let with_cache = active() - before;
    let copy = cache.compacted().unwrap();
    drop(cache);
    let size = 256 * 4 * 64 * 4 * 2;
    assert_eq!(copy.nbytes(), size);
    assert!(active() - before <= size + SLACK && with_cache > 3 * size, "{with_cache}");
}

/// A rule whose state only has a size.
struct Counting;

impl Recurrence for Counting {
    fn advance(
        &self,
        inputs: &RecurrentInputs,
        state: Option<&RecurrentState>,
    ) -> Result<(Array, RecurrentState)> {
        let rows = inputs.qkv.dim(0)?;
        let state = match state {
            Some(RecurrentState { tail, memory }) => {
                RecurrentState { tail: tail.add(1.0)?, memory: memory.add(1.0)? }
            }
            None => RecurrentState {
                tail: Array::full([rows, 3, 4096], 1.0, Dtype::F32)?,
                memory: Array::full([rows, 8, 64, 64], 1.0, Dtype::F32)?,
            },
        };
        Ok((inputs.qkv.clone(), state))
    }
}

fn copies_of_recurrent_states() {
    let rule: Rc<dyn Recurrence> = Rc::new(Counting);
    let advance = |cache: &mut Cache| {
        let input = Array::zeros([cache.rows() as i32, 1, 1], Dtype::F32).unwrap();
        let LayerCache::Recurrent(layer) = &mut cache.layers[0] else { unreachable!() };
        let inputs = RecurrentInputs { qkv: input.clone(), a: input.clone(), b: input };
        layer.advance(&rule, inputs).unwrap();
        eval(&cache.arrays()).unwrap();
    };
    let row = (3 * 4096 + 8 * 64 * 64) * 4;
    let before = active();
    let alone = || {
        let mut cache = Cache::new(vec![LayerCache::Recurrent(RecurrentCache::new())]);
        advance(&mut cache);
        cache
    };
    let mut batch = Cache::merge((0..6).map(|_| alone()).collect()).unwrap();
    advance(&mut batch);
    let with_batch = active() - before;
    assert!(with_batch >= 6 * row, "{with_batch}");
    let rows = [1, 4].map(|row| batch.extract(row).unwrap());
    // A filtered batch holds its own rows only as well.
    batch.filter(&[0, 5]).unwrap();
    advance(&mut batch);
    let with_rows = active() - before;
    assert!(with_rows <= 4 * row + SLACK, "{with_rows} bytes for 4 rows of {row}");
    let copy = rows[0].compacted().unwrap();
    drop((rows, batch));
    assert_eq!(copy.nbytes(), row);
    assert!(active() - before <= row + SLACK);
    drop(copy);
    assert!(active() <= before + SLACK);
}

fn copies_of_keys_and_values() {
    // With one head and no padding a row is a piece of the batch's buffer, which a mere contiguous copy would
    // share.
    for heads in [1, 4] {
        let dim = 64;
        for (layer, most) in [
            (LayerCache::Full(KvCache::new()), usize::MAX),
            (LayerCache::Rotating(RotatingKvCache::new(1024, 0)), 1024),
        ] {
            let layer = || layer.clone();
            let before = active();
            let caches = [1024, 1024, 700, 1].map(|length| {
                let mut cache = Cache::new(vec![layer()]);
                append(&mut cache, [1, heads, length, dim]);
                cache
            });
            let mut batch = Cache::merge(caches.to_vec()).unwrap();
            drop(caches);
            append(&mut batch, [4, heads, 1, dim]);
            let with_batch = active() - before;
            let token = heads as usize * dim as usize * 4 * 2;
            assert!(with_batch >= 4 * 1024 * token, "{with_batch}");

            // Right after several tokens at once, when a ring is longer than its window.
            let mut longer = batch.clone();
            append(&mut longer, [4, heads, 300, dim]);
            assert_eq!(longer.extract(0).unwrap().nbytes(), 1325.min(most) * token);
            drop(longer);

            let rows: Vec<Cache> = (0..4).map(|row| batch.extract(row).unwrap()).collect();
            drop(batch);
            let tokens: usize = rows.iter().map(|row| (row.offset() as usize).min(most)).sum();
            let with_rows = active() - before;
            assert!(with_rows <= tokens * token + SLACK, "{heads}: {with_rows} bytes for {tokens} tokens");
            assert_eq!(rows.iter().map(Cache::nbytes).sum::<usize>(), tokens * token);

            // The row of two tokens goes on in a buffer of 256; its copy takes what it needs.
            let mut grown = rows[3].clone();
            drop(rows);
            append(&mut grown, [1, heads, 1, dim]);
            let with_grown = active() - before;
            let copy = grown.compacted().unwrap();
            drop(grown);
            assert_eq!(copy.offset(), 3);
            assert_eq!(copy.nbytes(), 3 * token);
            assert!(active() - before <= 3 * token + SLACK && with_grown > 200 * token, "{with_grown}");

            // A trimmed cache still holds what it forgot, its copy does not.
            let mut long = Cache::new(vec![layer()]);
            append(&mut long, [1, heads, 1000, dim]);
            long.trim(990).unwrap();
            let short = long.compacted().unwrap();
            drop((long, copy));
            assert!(active() - before <= 10 * token + SLACK, "{}", active() - before);
            drop(short);
            assert!(active() <= before + SLACK);
        }
    }
}
