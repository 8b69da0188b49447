//! Indexes of sharded weights: the first byte chooses which shards lie in the directory, the rest is the index.

#![no_main]

use std::fs;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use russet_model::WeightFiles;
use russet_testing::{Dtype, Format, Tensor, TinyCheckpoint};
use tempfile::TempDir;

const INDEX: &str = "model.safetensors.index.json";

/// Directories with the first one, two and three of three shards, each with the tensor that is named as the shard.
static DIRECTORIES: LazyLock<[TempDir; 3]> = LazyLock::new(|| {
    let mut checkpoint = TinyCheckpoint::llama(Format::Dense);
    [1, 2, 3].map(|count| {
        let directory = tempfile::tempdir().expect("a temporary directory");
        for name in &["a", "b", "c"][..count] {
            checkpoint.tensors.insert((*name).into(), Tensor::filled(Dtype::F32, &[1], &[0; 4]));
            let file = directory.path().join(format!("model-{name}.safetensors"));
            fs::write(file, checkpoint.safetensors([*name])).expect("a shard");
        }
        directory
    })
});

fuzz_target!(|input: &[u8]| {
    let Some((choice, index)) = input.split_first() else { return };
    let count = usize::from(*choice) % DIRECTORIES.len();
    let directory = DIRECTORIES[count].path();
    fs::write(directory.join(INDEX), index).expect("an index");
    match WeightFiles::open(directory) {
        Ok(files) => {
            assert_eq!(files.tensors().count(), count + 1);
            files.load().expect("arrays over the checked files");
        }
        Err(e) => assert!(e.to_string().contains("model"), "names no file: {e}"),
    }
});
