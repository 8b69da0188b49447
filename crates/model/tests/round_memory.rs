//! Memory over many rounds of speculation. Alone in its binary: MLX counts the memory of the whole process.

use russet_mlx::{Array, eval, memory};
use russet_model::{Fidelity, LoadOptions, Model};
use russet_testing::{Format, TinyCheckpoint};

#[test]
fn rounds_do_not_leak() {
    let dir = tempfile::tempdir().unwrap();
    TinyCheckpoint::qwen3_5(Format::Dense).write(dir.path());
    for fidelity in ["l1", "auto"] {
        let fidelity: Fidelity = fidelity.parse().unwrap();
        let model = Model::load(dir.path(), &LoadOptions::new(fidelity)).unwrap();
        let mut cache = model.new_cache();
        let draft = Array::from_slice(&[1_u32; 200], [1, 200]).unwrap();
        let mut used = Vec::new();
        for round in 0..60 {
            let before = cache.clone();
            cache.begin_round();
            eval(&[model.forward(&draft, &mut cache).unwrap()]).unwrap();
            // A step may also fail.
            match round % 3 {
                0 => cache.rollback(0).unwrap(),
                1 => cache.rollback(2).unwrap(),
                _ => cache = before,
            }
            eval(&cache.arrays()).unwrap();
            used.push(memory::active());
        }
        // A round records 50 KiB; the cache itself grows by 40 tokens.
        let growth = used[59].saturating_sub(used[5]);
        assert!(growth < 200 << 10, "{growth} bytes");
    }
}
