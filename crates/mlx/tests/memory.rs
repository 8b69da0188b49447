//! MLX's memory counter. It is one for the process, so that these checks are one test, alone in its binary.

use std::io::Write;

use russet_mlx::{Array, Dtype, MappedFile, eval, memory};

#[test]
fn arrays_free_their_memory_and_mapped_ones_use_none() {
    memory::clear_cache().unwrap();
    let before = memory::active();
    let x = Array::full([1 << 20], 1.0, Dtype::F32).unwrap().add(1.0).unwrap();
    eval(std::slice::from_ref(&x)).unwrap();
    assert!(memory::active() >= before + (4 << 20));
    drop(x);
    assert!(memory::active() < before + (4 << 20));

    if !MappedFile::is_zero_copy() {
        return;
    }
    let values: Vec<f32> = (0..1 << 18).map(|i| i as f32).collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[0xa5; 64]).unwrap();
    file.write_all(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let map = MappedFile::open(file.path()).unwrap();
    let before = memory::active();
    let x = map.array(64, [1 << 18], Dtype::F32).unwrap();
    x.eval().unwrap();
    assert_eq!(memory::active(), before);
    assert_eq!(x.as_slice::<f32>().unwrap().as_ptr().cast(), map.bytes()[64..].as_ptr());
    assert_eq!(x.to_vec::<f32>().unwrap(), values);
}
