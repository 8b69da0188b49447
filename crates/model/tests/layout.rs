//! Tensors renamed, stacked and cut on their way into a model.

use russet_model::{WeightFiles, Weights};
use russet_testing::{Dtype, Format, Tensor, TinyCheckpoint};
use tempfile::TempDir;

fn tensor(shape: &[usize], values: impl IntoIterator<Item = u32>) -> Tensor {
    let data = values.into_iter().flat_map(|v| (v as f32).to_le_bytes()).collect();
    Tensor { dtype: Dtype::F32, shape: shape.to_vec(), data }
}

/// The tensors in a file, with the folder that holds it.
fn weights(tensors: impl IntoIterator<Item = (&'static str, Tensor)>) -> (TempDir, Weights) {
    let mut checkpoint = TinyCheckpoint::llama(Format::Dense);
    checkpoint.tensors = tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path());
    let weights = WeightFiles::open(dir.path()).unwrap().load().unwrap();
    (dir, weights)
}

/// The values for MLX, and the bytes for the CPU kernels.
fn values(weights: &mut Weights, name: &str, shape: &[i32]) -> Vec<f32> {
    let tensor = weights.take(name, shape).unwrap();
    let values = tensor.array.to_vec::<f32>().unwrap();
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(tensor.data.bytes(), bytes);
    values
}

fn message(result: Result<(), russet_model::Error>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn tensors_are_renamed_or_dropped() {
    let (_dir, mut weights) =
        weights([("a.x", tensor(&[1], [1])), ("a.y", tensor(&[1], [2])), ("b", tensor(&[1], [3]))]);
    weights.rename(|name| Some(name.strip_prefix("a.")?.to_owned())).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["x", "y"]);
    assert_eq!(values(&mut weights, "y", &[1]), [2.0]);
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let (_dir, mut weights) = weights([("a", tensor(&[1], [1])), ("b", tensor(&[1], [2]))]);
    let message = message(weights.rename(|_| Some("c".into())));
    assert!(message.contains("\"b\"") && message.contains("\"c\""), "{message}");
}

#[test]
fn parts_are_stacked_in_order() {
    let (_dir, mut weights) = weights([("a", tensor(&[1, 2], [3, 4])), ("b", tensor(&[1, 2], [1, 2]))]);
    weights.stack(["b".to_owned(), "a".to_owned()], "c").unwrap();
    assert_eq!(values(&mut weights, "c", &[2, 1, 2]), [1.0, 2.0, 3.0, 4.0]);
    weights.finish().unwrap();
}

#[test]
fn stacks_with_gaps_or_of_different_parts_are_refused() {
    let stack = |tensors: [(&'static str, Tensor); 2], parts: &[&str]| {
        let (_dir, mut weights) = weights(tensors);
        message(weights.stack(parts.iter().map(|&part| part.to_owned()), "a"))
    };
    let ones = || tensor(&[1], [1]);
    assert!(stack([("a", ones()), ("b", ones())], &["b", "c"]).contains("\"c\": is missing"));
    let wider = tensor(&[2], [1, 2]);
    assert!(stack([("b", ones()), ("c", wider)], &["b", "c"]).contains("\"c\": is float32 [2]"));
    let half = Tensor { dtype: Dtype::F16, shape: vec![1], data: vec![0; 2] };
    assert!(stack([("b", ones()), ("c", half)], &["b", "c"]).contains("\"c\": is float16 [1]"));
    // Stored whole as well.
    assert!(stack([("a", ones()), ("b", ones())], &["b"]).contains("\"a\": is stored twice"));
}

#[test]
fn halves_of_rows_are_cut_apart_in_every_matrix() {
    let (_dir, mut weights) = weights([("a", tensor(&[2, 4, 3], 0..24))]);
    weights.halve("a", ["b", "c"]).unwrap();
    let expected = |rows: [u32; 4]| -> Vec<f32> {
        rows.iter().flat_map(|row| (row * 3..row * 3 + 3).map(|v| v as f32)).collect()
    };
    assert_eq!(values(&mut weights, "b", &[2, 2, 3]), expected([0, 1, 4, 5]));
    assert_eq!(values(&mut weights, "c", &[2, 2, 3]), expected([2, 3, 6, 7]));
    weights.finish().unwrap();
}

#[test]
fn what_has_no_halves_is_refused() {
    for (shape, values) in [(vec![3, 2], 6), (vec![4], 4), (vec![], 1), (vec![2, 0], 0)] {
        let (_dir, mut weights) = weights([("a", tensor(&shape, 0..values))]);
        let message = message(weights.halve("a", ["b", "c"]));
        assert!(message.contains("\"a\": has shape"), "{message}");
    }
    let (_dir, mut weights) = weights([]);
    assert!(message(weights.halve("a", ["b", "c"])).contains("\"a\": is missing"));
}
