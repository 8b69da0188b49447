//! Arrays over mapped files: zero copy on the CPU, any alignment, nothing written.

use std::io::Write;

use russet_mlx::{Array, Dtype, MappedFile, Quantization, QuantizationMode, Quantized};

/// A file with `prefix` bytes of padding before `data`.
fn file(prefix: usize, data: &[u8]) -> (tempfile::NamedTempFile, MappedFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![0xa5; prefix]).unwrap();
    file.write_all(data).unwrap();
    let map = MappedFile::open(file.path()).unwrap();
    (file, map)
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[test]
fn unaligned_weights_give_the_same_bits() {
    let values: Vec<f32> = (0..64 * 128).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let w = Array::from_slice(&values, [64, 128]).unwrap();
    let quantization = Quantization { group_size: 64, bits: 4, mode: QuantizationMode::Affine };
    let q = Quantized::quantize(&w, quantization).unwrap();
    let x = Array::from_slice(&values[..128], [1, 128]).unwrap();
    let expected = q.matmul(&x, true).unwrap().to_bytes().unwrap();
    for shift in 8..17 {
        let (_f1, weight) = file(shift, &q.weight.to_bytes().unwrap());
        let (_f2, scales) = file(shift, &q.scales.to_bytes().unwrap());
        let mapped = Quantized {
            weight: weight.array(shift, q.weight.shape(), Dtype::U32).unwrap(),
            scales: scales.array(shift, q.scales.shape(), Dtype::F32).unwrap(),
            biases: q.biases.clone(),
            quantization,
        };
        assert_eq!(mapped.matmul(&x, true).unwrap().to_bytes().unwrap(), expected, "shift {shift}");
    }
}

#[test]
fn mapping_outlives_its_handle_and_is_never_written() {
    let (_file, map) = file(8, &bytes(&[1.0, 2.0, 3.0, 4.0]));
    let x = map.array(8, [4], Dtype::F32).unwrap();
    drop(map);
    // x is the last holder of its data when the addition runs, which must not reuse the mapping.
    let y = x.add(1.0).unwrap();
    drop(x);
    assert_eq!(y.to_vec::<f32>().unwrap(), [2.0, 3.0, 4.0, 5.0]);
    let (_file, map) = file(8, &bytes(&[1.0; 64]));
    let x = map.array(8, [64], Dtype::F32).unwrap();
    let update = Array::zeros([1], Dtype::F32).unwrap();
    let y = x.slice_update(&update, [0], [1]).unwrap();
    drop(x);
    assert_eq!(y.to_vec::<f32>().unwrap()[..2], [0.0, 1.0]);
    assert_eq!(map.bytes()[8..12], 1.0f32.to_le_bytes());
}

#[test]
fn ranges_outside_the_file_are_refused() {
    let (_file, map) = file(8, &[0; 16]);
    assert!(map.array(8, [4], Dtype::F32).is_ok());
    assert!(map.array(8, [5], Dtype::F32).is_err(), "past the end");
    assert!(map.array(0, [1], Dtype::F32).is_err(), "inside the first 8 bytes");
    assert!(map.array(usize::MAX, [1], Dtype::F32).is_err());
    assert!(map.array(8, [i32::MAX, i32::MAX, i32::MAX], Dtype::F32).is_err());
    assert!(map.array(8, [-1], Dtype::F32).is_err());
}

#[test]
fn parts_lie_in_memory_as_in_a_file() {
    let (a, b) = (bytes(&[1.0, 2.0]), bytes(&[3.0, 4.0, 5.0, 6.0]));
    let map = MappedFile::of_parts(&[&a, &[], &b]).unwrap();
    let x = map.array(MappedFile::PARTS, [3, 2], Dtype::F32).unwrap();
    let slice = map.slice(MappedFile::PARTS, 24).unwrap();
    drop(map);
    assert_eq!(x.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    // There is no file to read the bytes from again.
    slice.release();
    assert_eq!(slice.bytes(), [a, b].concat());
    assert!(MappedFile::of_parts(&[]).unwrap().slice(MappedFile::PARTS, 0).is_ok());
    // Longer than a page, which releasing would drop.
    let map = MappedFile::of_parts(&[&[7; 1 << 20]]).unwrap();
    let slice = map.slice(MappedFile::PARTS, 1 << 20).unwrap();
    slice.release();
    assert!(slice.bytes().iter().all(|&b| b == 7));
}

#[test]
fn contiguous_reads_the_size_header_without_harm() {
    let (_file, map) = file(8, &bytes(&[1.0, 2.0, 3.0, 4.0]));
    let x = map.array(8, [2, 2], Dtype::F32).unwrap();
    assert_eq!(x.contiguous().unwrap().to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(
        x.transpose_all().unwrap().contiguous().unwrap().to_vec::<f32>().unwrap(),
        [1.0, 3.0, 2.0, 4.0]
    );
}
