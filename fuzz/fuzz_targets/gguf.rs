//! GGUF files: parsing, visiting all metadata, and converting what can be converted.

#![no_main]

use libfuzzer_sys::fuzz_target;
use russet_hub::{convert::Checkpoint, gguf::Gguf};

fuzz_target!(|file: &[u8]| {
    let Ok(gguf) = Gguf::parse(file) else { return };
    for array in gguf.metadata().values().filter_map(|value| value.as_array()) {
        assert_eq!(array.iter().count(), array.len());
    }
    if let Ok(checkpoint) = Checkpoint::from_gguf(&gguf) {
        let directory = tempfile::tempdir().expect("a temporary directory");
        checkpoint.write(directory.path(), &mut |_| {}).expect("a checked conversion can be written");
    }
});
