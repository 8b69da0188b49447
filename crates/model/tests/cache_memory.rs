//! Copies of caches hold their own memory and no more. In a test binary of its own, because MLX's counters are
//! the process's.

use russet_mlx::{Array, Dtype, eval, memory};
use russet_model::Cache;
use russet_model::cache::{KvCache, LayerCache, RotatingKvCache};

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

#[test]
fn copies_keep_nothing_else_alive() {
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
