use proptest::prelude::*;

use super::*;

/// Writes GGUF files, sound or not.
#[derive(Debug, Clone, Default)]
pub(crate) struct Builder {
    metadata: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

impl Builder {
    /// Adds a value from its type and its bytes.
    pub(crate) fn raw(mut self, key: &str, kind: u32, bytes: &[u8]) -> Self {
        self.metadata.push((key.to_owned(), [&kind.to_le_bytes(), bytes].concat()));
        self
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub(crate) fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub(crate) fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[value.into()])
    }

    pub(crate) fn string(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value))
    }

    pub(crate) fn strings(self, key: &str, values: &[&str]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| string(value)).collect();
        self.raw(key, 9, &[&8u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &bytes].concat())
    }

    pub(crate) fn i32s(self, key: &str, values: &[i32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key, 9, &[&5u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &bytes].concat())
    }

    /// Removes a metadata key.
    pub(crate) fn without(mut self, key: &str) -> Self {
        self.metadata.retain(|(other, _)| other != key);
        self
    }

    /// Adds a tensor. `shape` is outermost first.
    pub(crate) fn tensor(mut self, name: &str, shape: &[usize], kind: u32, data: Vec<u8>) -> Self {
        let dimensions = shape.iter().rev().map(|&dimension| dimension as u64).collect();
        self.tensors.push((name.to_owned(), dimensions, kind, data));
        self
    }

    /// Removes a tensor.
    pub(crate) fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|(other, ..)| other != name);
        self
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut offset = 0;
        let offsets: Vec<u64> = self
            .tensors
            .iter()
            .map(|(.., data)| {
                let here = offset;
                offset = (offset + data.len() as u64).next_multiple_of(DEFAULT_ALIGNMENT);
                here
            })
            .collect();
        self.build_at(&offsets)
    }

    /// Builds a file with given data offsets; the data section holds the data one after the other, padded.
    fn build_at(&self, offsets: &[u64]) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            file.extend(string(key));
            file.extend(value);
        }
        for ((name, dimensions, kind, _), offset) in self.tensors.iter().zip(offsets) {
            file.extend(string(name));
            file.extend((dimensions.len() as u32).to_le_bytes());
            file.extend(dimensions.iter().flat_map(|dimension| dimension.to_le_bytes()));
            file.extend(kind.to_le_bytes());
            file.extend(offset.to_le_bytes());
        }
        for (.., data) in &self.tensors {
            file.resize(file.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
            file.extend(data);
        }
        file
    }
}

fn string(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

/// The elements of a tensor, by the definition of ggml's formats.
pub(crate) fn dequantize(tensor: &Tensor<'_>) -> Vec<f32> {
    let half = |bytes: &[u8]| half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    let nibbles = |bytes: &[u8]| -> Vec<f32> {
        let low = bytes.iter().map(|byte| f32::from(byte & 15));
        low.chain(bytes.iter().map(|byte| f32::from(byte >> 4))).collect()
    };
    let blocks = tensor.data.chunks_exact(tensor.dtype.block_bytes());
    blocks
        .flat_map(|block| match tensor.dtype {
            TensorType::F32 => vec![f32::from_le_bytes(block.try_into().unwrap())],
            TensorType::F16 => vec![half(block)],
            TensorType::Q4_0 => nibbles(&block[2..]).iter().map(|q| (q - 8.0) * half(block)).collect(),
            TensorType::Q4_1 => {
                nibbles(&block[4..]).iter().map(|q| q * half(block) + half(&block[2..])).collect()
            }
            TensorType::Q8_0 => block[2..].iter().map(|&q| f32::from(q as i8) * half(block)).collect(),
        })
        .collect()
}

/// A file with every value type and every tensor type.
fn sample() -> Builder {
    Builder::default()
        .raw("u8", 0, &[200])
        .raw("i8", 1, &[0xff])
        .raw("u16", 2, &40_000u16.to_le_bytes())
        .raw("i16", 3, &(-2i16).to_le_bytes())
        .u32("u32", 4_000_000_000)
        .raw("i32", 5, &(-3i32).to_le_bytes())
        .f32("f32", 1e-5)
        .bool("bool", true)
        .string("string", "Ġhello")
        .strings("strings", &["a", "", "ü"])
        .i32s("i32s", &[1, -1])
        .raw("u64", 10, &u64::MAX.to_le_bytes())
        .raw("i64", 11, &(-4i64).to_le_bytes())
        .raw("f64", 12, &0.1f64.to_le_bytes())
        .tensor("f32", &[2, 3], 0, vec![1; 24])
        .tensor("f16", &[3], 1, vec![2; 6])
        .tensor("q4_0", &[2, 32], 2, vec![3; 36])
        .tensor("q4_1", &[1, 64], 3, vec![4; 40])
        .tensor("q8_0", &[2, 1, 32], 8, vec![5; 68])
}

fn error(builder: Builder) -> Error {
    Gguf::parse(&builder.build()).unwrap_err()
}

#[test]
fn reads_every_value_type() {
    let file = sample().build();
    let gguf = Gguf::parse(&file).unwrap();
    let value = |key: &str| gguf.value(key).cloned().unwrap();
    assert_eq!(value("u8"), Value::Unsigned(200));
    assert_eq!(value("i8"), Value::Signed(-1));
    assert_eq!(value("u16"), Value::Unsigned(40_000));
    assert_eq!(value("i16"), Value::Signed(-2));
    assert_eq!(value("u32"), Value::Unsigned(4_000_000_000));
    assert_eq!(value("i32"), Value::Signed(-3));
    assert_eq!(value("f32"), Value::F32(1e-5));
    assert_eq!(value("bool"), Value::Bool(true));
    assert_eq!(value("string").as_str(), Some("Ġhello"));
    let strings = value("strings").as_array().unwrap();
    assert_eq!((strings.len(), strings.is_empty()), (3, false));
    assert_eq!(strings.iter().filter_map(|value| value.as_str()).collect::<Vec<_>>(), ["a", "", "ü"]);
    let numbers: Vec<_> = value("i32s").as_array().unwrap().iter().collect();
    assert_eq!(numbers, [Value::Signed(1), Value::Signed(-1)]);
    assert_eq!(numbers[1].as_u64(), None);
    assert_eq!(value("u64").as_u64(), Some(u64::MAX));
    assert_eq!(value("i64"), Value::Signed(-4));
    assert_eq!(value("f64"), Value::F64(0.1));
    assert_eq!(gguf.metadata().len(), 14);
}

#[test]
fn reads_every_tensor_type_with_the_outermost_dimension_first() {
    let file = sample().build();
    let gguf = Gguf::parse(&file).unwrap();
    for (name, dtype, shape, byte, bytes) in [
        ("f32", TensorType::F32, vec![2, 3], 1, 24),
        ("f16", TensorType::F16, vec![3], 2, 6),
        ("q4_0", TensorType::Q4_0, vec![2, 32], 3, 36),
        ("q4_1", TensorType::Q4_1, vec![1, 64], 4, 40),
        ("q8_0", TensorType::Q8_0, vec![2, 1, 32], 5, 68),
    ] {
        let tensor = &gguf.tensors()[name];
        assert_eq!((tensor.dtype, &tensor.shape), (dtype, &shape));
        assert_eq!(tensor.data, vec![byte; bytes]);
        assert_eq!(tensor.row_bytes() * shape[..shape.len() - 1].iter().product::<usize>(), bytes);
    }
}

#[test]
fn reads_version_2() {
    let mut file = sample().build();
    file[4] = 2;
    assert_eq!(Gguf::parse(&file).unwrap().tensors().len(), 5);
}

#[test]
fn every_truncation_is_an_error() {
    let file = sample().build();
    for len in 0..file.len() {
        assert!(Gguf::parse(&file[..len]).is_err(), "{len} of {} bytes", file.len());
    }
}

#[test]
fn a_file_of_another_kind_is_refused() {
    assert_eq!(Gguf::parse(b"").unwrap_err(), Error::NotGguf);
    assert_eq!(Gguf::parse(b"{\"a\": 1}").unwrap_err(), Error::NotGguf);
    let mut old = Builder::default().build();
    old[4] = 1;
    assert_eq!(Gguf::parse(&old).unwrap_err(), Error::Version { version: 1 });
    let mut big_endian = Builder::default().build();
    big_endian[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert_eq!(Gguf::parse(&big_endian).unwrap_err(), Error::Version { version: 0x0300_0000 });
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused() {
    for position in [8, 16] {
        let mut file = Builder::default().build();
        file[position..position + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(Gguf::parse(&file), Err(Error::Truncated { .. })));
    }
    for len in [u64::MAX, u64::MAX / 8 + 1, 1 << 40] {
        let bytes = len.to_le_bytes();
        assert!(matches!(error(Builder::default().raw("k", 8, &bytes)), Error::Truncated { .. }));
        for element in [0u32, 7, 8, 9, 10] {
            let array = [&element.to_le_bytes()[..], &bytes].concat();
            assert!(matches!(error(Builder::default().raw("k", 9, &array)), Error::Truncated { .. }));
        }
    }
}

#[test]
fn deep_arrays_are_refused() {
    let nested = |depth: usize| {
        let mut bytes = [9u32.to_le_bytes().as_slice(), &1u64.to_le_bytes()].concat().repeat(depth - 1);
        bytes.extend([0u32.to_le_bytes().as_slice(), &1u64.to_le_bytes(), &[7]].concat());
        Builder::default().raw("k", 9, &bytes)
    };
    let file = nested(4).build();
    let gguf = Gguf::parse(&file).unwrap();
    let mut value = gguf.value("k").cloned().unwrap();
    for _ in 0..4 {
        value = value.as_array().unwrap().iter().next().unwrap();
    }
    assert_eq!(value, Value::Unsigned(7));
    assert!(matches!(error(nested(5)), Error::TooDeep { .. }));
    assert!(matches!(error(nested(100_000)), Error::TooDeep { .. }));
}

#[test]
fn malformed_values_are_refused() {
    assert!(matches!(error(Builder::default().raw("k", 13, &[])), Error::UnknownValueType { id: 13, .. }));
    assert!(matches!(error(Builder::default().raw("k", 7, &[2])), Error::InvalidBool { .. }));
    let bools = [&7u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[1, 9]].concat();
    assert!(matches!(error(Builder::default().raw("k", 9, &bools)), Error::InvalidBool { .. }));
    let invalid = [&1u64.to_le_bytes()[..], &[0xff]].concat();
    assert!(matches!(error(Builder::default().raw("k", 8, &invalid)), Error::InvalidUtf8 { .. }));
    let key = "k".repeat(MAX_KEY_BYTES + 1);
    assert!(matches!(error(Builder::default().u32(&key, 1)), Error::NameTooLong { .. }));
    let twice = Builder::default().u32("k", 1).u32("k", 1);
    assert_eq!(error(twice), Error::DuplicateKey { key: "k".to_owned() });
}

#[test]
fn alignment_must_be_a_power_of_two() {
    for value in [0, 3, 48] {
        assert_eq!(error(Builder::default().u32("general.alignment", value)), Error::Alignment);
    }
    assert_eq!(error(Builder::default().string("general.alignment", "32")), Error::Alignment);
    let huge = Builder::default().raw("general.alignment", 10, &(1u64 << 63).to_le_bytes());
    assert!(matches!(error(huge.tensor("t", &[1], 0, vec![0; 4])), Error::OutOfBounds { .. }));
}

#[test]
fn impossible_tensors_are_refused() {
    let tensor = |shape: &[usize], kind| error(Builder::default().tensor("t", shape, kind, vec![0; 64]));
    assert!(matches!(tensor(&[], 0), Error::Rank { rank: 0, .. }));
    assert!(matches!(tensor(&[1; 5], 0), Error::Rank { rank: 5, .. }));
    assert!(matches!(tensor(&[4, 0], 0), Error::Shape { .. }));
    assert!(matches!(tensor(&[usize::MAX, 2], 0), Error::Shape { .. }));
    assert!(matches!(tensor(&[usize::MAX], 0), Error::Shape { .. }));
    assert!(matches!(tensor(&[1 << 40, 1 << 40], 8), Error::Shape { .. }));
    assert!(matches!(tensor(&[2, 48], 2), Error::PartialBlock { row: 48, block: 32, .. }));
    assert!(matches!(tensor(&[256], 12), Error::TensorType { id: 12, .. }));
    assert!(matches!(tensor(&[17], 0), Error::OutOfBounds { bytes: 68, .. }));
    let name = "t".repeat(MAX_TENSOR_NAME_BYTES + 1);
    assert!(matches!(
        error(Builder::default().tensor(&name, &[1], 0, vec![0; 4])),
        Error::NameTooLong { .. }
    ));
    let twice = Builder::default().tensor("t", &[1], 0, vec![0; 4]).tensor("t", &[1], 0, vec![0; 4]);
    assert!(matches!(error(twice), Error::DuplicateTensor { .. }));
}

#[test]
fn tensor_data_must_be_aligned_inside_the_file_and_apart() {
    let two = Builder::default().tensor("a", &[16], 0, vec![0; 64]).tensor("b", &[16], 0, vec![0; 64]);
    assert!(Gguf::parse(&two.build_at(&[0, 64])).is_ok());
    assert!(Gguf::parse(&two.build_at(&[64, 0])).is_ok());
    for offset in [96, 1 << 40, u64::MAX - 31] {
        let file = two.build_at(&[0, offset]);
        assert!(matches!(Gguf::parse(&file), Err(Error::OutOfBounds { .. })), "{offset}");
    }
    assert!(matches!(Gguf::parse(&two.build_at(&[0, 65])), Err(Error::Misaligned { offset: 65, .. })));
    for offsets in [[0, 32], [32, 0], [0, 0]] {
        assert!(matches!(Gguf::parse(&two.build_at(&offsets)), Err(Error::Overlap { .. })), "{offsets:?}");
    }
}

/// Visits all that a parsed file offers.
fn visit(bytes: &[u8]) {
    let Ok(gguf) = Gguf::parse(bytes) else { return };
    for value in gguf.metadata().values() {
        if let Some(array) = value.as_array() {
            assert_eq!(array.iter().count(), array.len());
        }
    }
    for tensor in gguf.tensors().values() {
        let elements: usize = tensor.shape.iter().product();
        assert_eq!(dequantize(tensor).len(), elements);
        assert_eq!(tensor.data.len() % tensor.row_bytes(), 0);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        visit(&bytes);
        let prefix = b"GGUF\x03\0\0\0";
        let len = bytes.len().min(prefix.len());
        bytes[..len].copy_from_slice(&prefix[..len]);
        visit(&bytes);
    }

    #[test]
    fn damaged_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        words in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>()), 0..3),
    ) {
        let mut file = sample().build();
        for (index, byte) in changes {
            let index = index.index(file.len());
            file[index] = byte;
        }
        for (index, word) in words {
            let index = index.index(file.len() - 8);
            file[index..index + 8].copy_from_slice(&word.to_le_bytes());
        }
        visit(&file);
    }

    #[test]
    fn tensors_are_read_back_as_written(
        tensors in prop::collection::vec((1usize..5, 1usize..4, prop::sample::select(vec![0u32, 1, 2, 3, 8])), 0..6),
        fill in any::<u8>(),
    ) {
        let mut builder = Builder::default().string("general.name", "x");
        let mut expected = Vec::new();
        for (index, (rows, blocks, kind)) in tensors.into_iter().enumerate() {
            let dtype = TensorType::from_id(kind).unwrap();
            let data = vec![fill.wrapping_add(index as u8); rows * blocks * dtype.block_bytes()];
            let shape = vec![rows, blocks * dtype.block_elements()];
            builder = builder.tensor(&index.to_string(), &shape, kind, data.clone());
            expected.push((index.to_string(), dtype, shape, data));
        }
        let file = builder.build();
        let gguf = Gguf::parse(&file).unwrap();
        prop_assert_eq!(gguf.tensors().len(), expected.len());
        for (name, dtype, shape, data) in expected {
            let tensor = &gguf.tensors()[name.as_str()];
            prop_assert_eq!((tensor.dtype, &tensor.shape, tensor.data), (dtype, &shape, data.as_slice()));
        }
    }
}
