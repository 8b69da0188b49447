//! Headers of safetensors files. What Russet accepts is whole, and the format's own library accepts it too.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use russet_model::WeightFiles;
use safetensors::SafeTensors;

fuzz_target!(|file: &[u8]| {
    let Ok(tensors) = WeightFiles::parse_header(Path::new("model.safetensors"), file) else { return };
    let header = u64::from_le_bytes(*file.first_chunk().expect("a length")) as usize;
    let data: usize = tensors.values().map(|tensor| tensor.nbytes()).sum();
    assert_eq!(8 + header + data, file.len());
    let reference = SafeTensors::deserialize(file).expect("a valid file");
    for (name, tensor) in &tensors {
        let view = reference.tensor(name).expect("the same tensors");
        assert_eq!(view.data().len(), tensor.nbytes());
    }
});
