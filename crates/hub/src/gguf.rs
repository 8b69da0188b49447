//! Reader for GGUF files, versions 2 and 3, little-endian.
//!
//! [`Gguf::parse`] checks the whole file before it returns: every count, string, array, dimension, offset and
//! alignment, and that no two tensors share bytes. It borrows from the bytes it is given (a memory map or a
//! slice) and allocates in proportion to the number of keys and tensors only, so a hostile file can neither make
//! it read out of bounds nor make it allocate more than a small multiple of the file's own size.
//!
//! Format: `docs/gguf.md` of the ggml project.

use std::collections::BTreeMap;

/// Longest metadata key the format allows, in bytes.
const MAX_KEY_BYTES: usize = 65_535;
/// Longest tensor name the format allows, in bytes.
const MAX_TENSOR_NAME_BYTES: usize = 64;
/// Most dimensions a ggml tensor has.
const MAX_RANK: u32 = 4;
/// Deepest array-in-array nesting accepted. Known files use none.
const MAX_ARRAY_DEPTH: u32 = 4;
/// Alignment of tensor data where `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;

/// What is wrong with a GGUF file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file does not begin with `GGUF`.
    #[error("not a GGUF file: it does not begin with the bytes \"GGUF\"")]
    NotGguf,
    /// A version other than 2 or 3 (big-endian files show here as well).
    #[error("GGUF version {version:#x} is not supported (2 and 3, little-endian, are)")]
    Version {
        /// The version field as read in little-endian order.
        version: u32,
    },
    /// The file ends inside a field.
    #[error("the file ends inside {what} at byte {offset}")]
    Truncated {
        /// The field being read.
        what: &'static str,
        /// Where the field begins.
        offset: usize,
    },
    /// A key or a tensor name is longer than the format allows.
    #[error("{what} at byte {offset} is longer than the {limit} bytes that the format allows")]
    NameTooLong {
        /// What the name names.
        what: &'static str,
        /// Where the name begins.
        offset: usize,
        /// The format's limit in bytes.
        limit: usize,
    },
    /// A string is not UTF-8.
    #[error("{what} at byte {offset} is not valid UTF-8")]
    InvalidUtf8 {
        /// The field being read.
        what: &'static str,
        /// Where the string begins.
        offset: usize,
    },
    /// A boolean other than 0 or 1.
    #[error("boolean at byte {offset} is neither 0 nor 1")]
    InvalidBool {
        /// Where the value lies.
        offset: usize,
    },
    /// A metadata value has an unknown type.
    #[error("metadata value type {id} at byte {offset} is unknown")]
    UnknownValueType {
        /// The type as stored.
        id: u32,
        /// Where the type lies.
        offset: usize,
    },
    /// Arrays nest deeper than any real file needs.
    #[error("metadata arrays nest deeper than {MAX_ARRAY_DEPTH} levels at byte {offset}")]
    TooDeep {
        /// Where the innermost array begins.
        offset: usize,
    },
    /// A metadata key occurs twice.
    #[error("metadata key {key:?} occurs twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// A tensor name occurs twice.
    #[error("tensor {tensor:?} occurs twice")]
    DuplicateTensor {
        /// The tensor's name.
        tensor: String,
    },
    /// `general.alignment` is not a power of two.
    #[error("general.alignment must be an unsigned power of two")]
    Alignment,
    /// A tensor has no dimension, or too many.
    #[error("tensor {tensor:?} has {rank} dimensions (1 to {MAX_RANK} are possible)")]
    Rank {
        /// The tensor's name.
        tensor: String,
        /// The number of dimensions as stored.
        rank: u32,
    },
    /// A dimension is zero, or the sizes overflow.
    #[error("tensor {tensor:?} has a dimension of zero or more elements than can be addressed")]
    Shape {
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor type Russet does not read.
    #[error(
        "tensor {tensor:?} has ggml type {id}, which is not supported (F32, F16, Q4_0, Q4_1 and Q8_0 are)"
    )]
    TensorType {
        /// The tensor's name.
        tensor: String,
        /// The type as stored.
        id: u32,
    },
    /// The rows of a quantized tensor are not whole blocks.
    #[error("tensor {tensor:?}: rows of {row} elements are not whole blocks of {block}")]
    PartialBlock {
        /// The tensor's name.
        tensor: String,
        /// Elements in a row.
        row: usize,
        /// Elements in a block.
        block: usize,
    },
    /// A tensor's data is not where the alignment demands.
    #[error("tensor {tensor:?}: data offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned {
        /// The tensor's name.
        tensor: String,
        /// The offset as stored.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor's data reaches past the end of the file.
    #[error("tensor {tensor:?}: {bytes} bytes at data offset {offset} reach past the end of the file")]
    OutOfBounds {
        /// The tensor's name.
        tensor: String,
        /// The offset as stored.
        offset: u64,
        /// Size of the tensor's data.
        bytes: usize,
    },
    /// Two tensors share bytes.
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
    },
}

/// Type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64].get(id as usize).copied()
    }

    /// Bytes of one value, where all values of the type have the same size.
    fn size(self) -> Option<usize> {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => Some(1),
            U16 | I16 => Some(2),
            U32 | I32 | F32 => Some(4),
            U64 | I64 | F64 => Some(8),
            String | Array => None,
        }
    }
}

/// A metadata value. Integers of every width are widened; floats keep theirs, because the shortest decimal form
/// of a float depends on it.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// An unsigned integer of 8 to 64 bits.
    Unsigned(u64),
    /// A signed integer of 8 to 64 bits.
    Signed(i64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// A boolean.
    Bool(bool),
    /// A UTF-8 string.
    String(&'a str),
    /// An array of values of one type.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// The value as an unsigned integer, if it is one or is a signed integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(value) => Some(value),
            Value::Signed(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }

    /// The value as a string.
    pub fn as_str(&self) -> Option<&'a str> {
        match self {
            Value::String(value) => Some(value),
            _ => None,
        }
    }

    /// The value as a boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The value as an array.
    pub fn as_array(&self) -> Option<Array<'a>> {
        match self {
            Value::Array(value) => Some(*value),
            _ => None,
        }
    }
}

/// An array of metadata values of one type, decoded as it is iterated. Its bytes were checked when the file was
/// parsed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let element = self.element;
        let mut reader = Reader { bytes: self.bytes, offset: 0 };
        (0..self.len).map_while(move |_| reader.value(element, 0).ok())
    }
}

/// Type of a tensor's elements.
///
/// Quantized types hold rows of 32-element blocks; `d` and `m` are 16-bit floats, `q` the stored code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// `(q - 8) * d`, unsigned 4-bit codes: `d`, then 16 bytes whose low nibbles are elements 0 to 15 and whose
    /// high nibbles are elements 16 to 31.
    Q4_0,
    /// `q * d + m`, unsigned 4-bit codes: `d`, `m`, then nibbles as in [`TensorType::Q4_0`].
    Q4_1,
    /// `q * d`, signed 8-bit codes: `d`, then 32 bytes.
    Q8_0,
}

impl TensorType {
    fn from_id(id: u32) -> Option<Self> {
        match id {
            0 => Some(Self::F32),
            1 => Some(Self::F16),
            2 => Some(Self::Q4_0),
            3 => Some(Self::Q4_1),
            8 => Some(Self::Q8_0),
            _ => None,
        }
    }

    /// Elements in a block (1 where the type is not quantized).
    pub fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 2 + 2 + 16,
            Self::Q8_0 => 2 + 32,
        }
    }
}

/// A tensor of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: TensorType,
    /// Dimensions, outermost first (the reverse of the order in the file). Never empty, none zero.
    pub shape: Vec<usize>,
    /// The tensor's bytes: rows along the last dimension, each of whole blocks.
    pub data: &'a [u8],
}

impl Tensor<'_> {
    /// Elements along the last dimension.
    pub fn row_elements(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_elements() / self.dtype.block_elements() * self.dtype.block_bytes()
    }
}

/// A parsed GGUF file: metadata and tensors, borrowed from the file's bytes.
#[derive(Debug, Clone)]
pub struct Gguf<'a> {
    metadata: BTreeMap<&'a str, Value<'a>>,
    tensors: BTreeMap<&'a str, Tensor<'a>>,
}

impl<'a> Gguf<'a> {
    /// Parses and checks a whole file.
    ///
    /// # Errors
    /// [`Error`] says what in the file is wrong or unsupported.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let mut reader = Reader { bytes, offset: 0 };
        if reader.take(4, "the magic number").ok() != Some(b"GGUF") {
            return Err(Error::NotGguf);
        }
        let version = reader.u32("the version")?;
        if !matches!(version, 2 | 3) {
            return Err(Error::Version { version });
        }
        let tensor_count = reader.u64("the tensor count")?;
        let metadata_count = reader.u64("the metadata count")?;

        let mut metadata = BTreeMap::new();
        for _ in 0..metadata_count {
            let key = reader.name("a metadata key", MAX_KEY_BYTES)?;
            let kind = reader.value_type()?;
            let value = reader.value(kind, 0)?;
            if metadata.insert(key, value).is_some() {
                return Err(Error::DuplicateKey { key: key.to_owned() });
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(Value::Unsigned(value)) if value.is_power_of_two() => *value,
            Some(_) => return Err(Error::Alignment),
        };

        let mut headers = BTreeMap::new();
        for _ in 0..tensor_count {
            let (name, header) = reader.tensor_header()?;
            if headers.insert(name, header).is_some() {
                return Err(Error::DuplicateTensor { tensor: name.to_owned() });
            }
        }
        // Padding may be missing where there are no tensors.
        let data_start =
            (reader.offset as u64).checked_next_multiple_of(alignment).ok_or(Error::Alignment)?;
        let data = usize::try_from(data_start).ok().and_then(|start| bytes.get(start..)).unwrap_or_default();

        let mut tensors = BTreeMap::new();
        let mut ranges = Vec::with_capacity(headers.len());
        for (name, header) in headers {
            let (tensor, start) = header.locate(name, data, alignment)?;
            ranges.push((start, start + tensor.data.len(), name));
            tensors.insert(name, tensor);
        }
        ranges.sort_unstable();
        if let Some(((_, _, first), (_, _, second))) =
            ranges.iter().zip(ranges.iter().skip(1)).find(|((_, end, _), (start, _, _))| start < end)
        {
            return Err(Error::Overlap { first: (*first).to_owned(), second: (*second).to_owned() });
        }
        Ok(Self { metadata, tensors })
    }

    /// The metadata value stored under `key`.
    pub fn value(&self, key: &str) -> Option<&Value<'a>> {
        self.metadata.get(key)
    }

    /// All metadata, by key.
    pub fn metadata(&self) -> &BTreeMap<&'a str, Value<'a>> {
        &self.metadata
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<&'a str, Tensor<'a>> {
        &self.tensors
    }
}

/// A tensor's entry in the file's header.
struct TensorHeader {
    dtype: TensorType,
    shape: Vec<usize>,
    bytes: usize,
    offset: u64,
}

impl TensorHeader {
    /// Finds the tensor's bytes in the data section. Returns the tensor and where its bytes begin there.
    fn locate<'a>(self, name: &str, data: &'a [u8], alignment: u64) -> Result<(Tensor<'a>, usize), Error> {
        let Self { dtype, shape, bytes, offset } = self;
        if offset % alignment != 0 {
            return Err(Error::Misaligned { tensor: name.to_owned(), offset, alignment });
        }
        let range = usize::try_from(offset).ok().and_then(|start| Some((start, start.checked_add(bytes)?)));
        match range.and_then(|(start, end)| Some((start, data.get(start..end)?))) {
            Some((start, data)) => Ok((Tensor { dtype, shape, data }, start)),
            None => Err(Error::OutOfBounds { tensor: name.to_owned(), offset, bytes }),
        }
    }
}

/// A position in the file's bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], Error> {
        let truncated = Error::Truncated { what, offset: self.offset };
        let end = self.offset.checked_add(len).ok_or(truncated.clone())?;
        let taken = self.bytes.get(self.offset..end).ok_or(truncated)?;
        self.offset = end;
        Ok(taken)
    }

    fn take_array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Error> {
        let offset = self.offset;
        self.take(N, what)?.try_into().map_err(|_| Error::Truncated { what, offset })
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.take_array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        self.take_array(what).map(u64::from_le_bytes)
    }

    fn string(&mut self, what: &'static str) -> Result<&'a str, Error> {
        let offset = self.offset;
        let len = self.u64(what)?;
        let len = usize::try_from(len).map_err(|_| Error::Truncated { what, offset })?;
        str::from_utf8(self.take(len, what)?).map_err(|_| Error::InvalidUtf8 { what, offset })
    }

    fn name(&mut self, what: &'static str, limit: usize) -> Result<&'a str, Error> {
        let offset = self.offset;
        let name = self.string(what)?;
        if name.len() > limit {
            return Err(Error::NameTooLong { what, offset, limit });
        }
        Ok(name)
    }

    fn value_type(&mut self) -> Result<ValueType, Error> {
        let offset = self.offset;
        let id = self.u32("a metadata value's type")?;
        ValueType::from_id(id).ok_or(Error::UnknownValueType { id, offset })
    }

    /// Reads a value. `depth` counts the arrays around it.
    fn value(&mut self, kind: ValueType, depth: u32) -> Result<Value<'a>, Error> {
        const WHAT: &str = "a metadata value";
        let offset = self.offset;
        Ok(match kind {
            ValueType::U8 => Value::Unsigned(u8::from_le_bytes(self.take_array(WHAT)?).into()),
            ValueType::I8 => Value::Signed(i8::from_le_bytes(self.take_array(WHAT)?).into()),
            ValueType::U16 => Value::Unsigned(u16::from_le_bytes(self.take_array(WHAT)?).into()),
            ValueType::I16 => Value::Signed(i16::from_le_bytes(self.take_array(WHAT)?).into()),
            ValueType::U32 => Value::Unsigned(u32::from_le_bytes(self.take_array(WHAT)?).into()),
            ValueType::I32 => Value::Signed(i32::from_le_bytes(self.take_array(WHAT)?).into()),
            ValueType::U64 => Value::Unsigned(u64::from_le_bytes(self.take_array(WHAT)?)),
            ValueType::I64 => Value::Signed(i64::from_le_bytes(self.take_array(WHAT)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.take_array(WHAT)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.take_array(WHAT)?)),
            ValueType::Bool => match self.take_array(WHAT)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                _ => return Err(Error::InvalidBool { offset }),
            },
            ValueType::String => Value::String(self.string("a metadata string")?),
            ValueType::Array if depth < MAX_ARRAY_DEPTH => Value::Array(self.array(depth + 1)?),
            ValueType::Array => return Err(Error::TooDeep { offset }),
        })
    }

    /// Reads an array, checking each element so that iterating it later cannot fail.
    fn array(&mut self, depth: u32) -> Result<Array<'a>, Error> {
        const WHAT: &str = "a metadata array";
        let element = self.value_type()?;
        let offset = self.offset;
        let len = self.u64(WHAT)?;
        let len = usize::try_from(len).map_err(|_| Error::Truncated { what: WHAT, offset })?;
        let start = self.offset;
        match element.size() {
            // Any bit pattern is a valid number, so numbers need no look at each.
            Some(size) if element != ValueType::Bool => {
                let bytes = len.checked_mul(size).ok_or(Error::Truncated { what: WHAT, offset })?;
                self.take(bytes, WHAT)?;
            }
            _ => {
                for _ in 0..len {
                    self.value(element, depth)?;
                }
            }
        }
        let bytes = self.bytes.get(start..self.offset).unwrap_or_default();
        Ok(Array { element, len, bytes })
    }

    fn tensor_header(&mut self) -> Result<(&'a str, TensorHeader), Error> {
        const WHAT: &str = "a tensor's header";
        let name = self.name("a tensor's name", MAX_TENSOR_NAME_BYTES)?;
        let tensor = || name.to_owned();
        let rank = self.u32(WHAT)?;
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(Error::Rank { tensor: tensor(), rank });
        }
        let bad_shape = || Error::Shape { tensor: tensor() };
        let mut shape = Vec::new();
        for _ in 0..rank {
            let dimension = usize::try_from(self.u64(WHAT)?).map_err(|_| bad_shape())?;
            if dimension == 0 {
                return Err(bad_shape());
            }
            shape.push(dimension);
        }
        shape.reverse();
        let id = self.u32(WHAT)?;
        let offset = self.u64(WHAT)?;
        let dtype = TensorType::from_id(id).ok_or_else(|| Error::TensorType { tensor: tensor(), id })?;

        let row = shape.last().copied().unwrap_or(1);
        let block = dtype.block_elements();
        if row % block != 0 {
            return Err(Error::PartialBlock { tensor: tensor(), row, block });
        }
        let elements = shape.iter().try_fold(1usize, |product, &dimension| product.checked_mul(dimension));
        let bytes = elements.and_then(|elements| (elements / block).checked_mul(dtype.block_bytes()));
        let bytes = bytes.ok_or_else(bad_shape)?;
        Ok((name, TensorHeader { dtype, shape, bytes, offset }))
    }
}

#[cfg(test)]
pub(crate) mod tests;
