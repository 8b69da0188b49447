mod layout;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use russet_mlx::{Array, Dtype, MappedFile, MappedSlice};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use sha2::{Digest, Sha256};

use crate::checkpoint::read_json_object;
use crate::{Error, Result};

const INDEX: &str = "model.safetensors.index.json";

/// One tensor of a weight file, as its header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The dimensions.
    pub shape: Vec<i32>,
    /// The stored element type.
    pub dtype: Dtype,
    /// Position of the data in the file.
    offset: usize,
}

impl TensorInfo {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().map(|&n| n as usize).product()
    }

    /// Bytes of the data.
    pub fn nbytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The data in `file`, whose header gave this.
    pub(crate) fn data<'a>(&self, file: &'a [u8]) -> &'a [u8] {
        file.get(self.offset..self.offset + self.nbytes()).unwrap_or_default()
    }
}

type Tensors = BTreeMap<String, TensorInfo>;
type Metadata = BTreeMap<String, String>;

/// The weight files of a checkpoint, mapped and with their headers checked.
///
/// Strict: every file of the index must exist and no other `model*.safetensors` may lie beside them;
/// names of tensors must agree between index and headers.
#[derive(Debug)]
pub struct WeightFiles {
    dir: PathBuf,
    files: Vec<(PathBuf, MappedFile)>,
    /// Name → (index into `files`, description).
    tensors: BTreeMap<String, (usize, TensorInfo)>,
}

impl WeightFiles {
    /// Maps the weight files of `dir` and checks their headers. Reads no weights.
    ///
    /// # Errors
    /// For missing or stray shards, an index that names paths outside the directory, and files whose
    /// headers do not describe them exactly.
    pub fn open(dir: &Path) -> Result<Self> {
        let present = weight_file_names(dir)?;
        let index = read_index(&dir.join(INDEX))?;
        let names = match &index {
            Some(index) => {
                let named: BTreeSet<String> = index.values().cloned().collect();
                if let Some(missing) = named.difference(&present).next() {
                    return Err(Error::file(
                        &dir.join(missing),
                        format!("is named in {INDEX} but does not exist; download the checkpoint again"),
                    ));
                }
                if let Some(stray) = present.difference(&named).next() {
                    return Err(Error::file(
                        &dir.join(stray),
                        format!("is not named in {INDEX}; remove it, it would mix two checkpoints"),
                    ));
                }
                named
            }
            None => present,
        };
        if names.is_empty() {
            return Err(Error::file(dir, "has no model*.safetensors"));
        }

        let mut weights = Self { dir: dir.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        for name in &names {
            weights.add_file(dir.join(name))?;
        }
        if let Some(index) = index {
            weights.check_index(&index)?;
        }
        Ok(weights)
    }

    fn add_file(&mut self, path: PathBuf) -> Result<()> {
        let map = map_file(&path)?;
        let tensors = Self::parse_header(&path, map.bytes())?;
        let file = self.files.len();
        for (name, info) in tensors {
            if let Some((other, _)) = self.tensors.insert(name.clone(), (file, info)) {
                let other = self.files.get(other).map_or(&path, |f| &f.0);
                return Err(Error::Tensor { message: format!("is also in {}", other.display()), path, name });
            }
        }
        self.files.push((path, map));
        Ok(())
    }

    fn check_index(&self, index: &BTreeMap<String, String>) -> Result<()> {
        let index_path = self.dir.join(INDEX);
        for (name, file) in index {
            let found = self.tensors.get(name).map(|(i, _)| &self.files[*i].0);
            if found.and_then(|path| path.file_name()) != Some(file.as_ref()) {
                return Err(Error::Tensor {
                    path: index_path,
                    name: name.clone(),
                    message: format!("is not in {file}, where the index says it is"),
                });
            }
        }
        match self.tensors.keys().find(|name| !index.contains_key(*name)) {
            Some(name) => Err(Error::Tensor {
                path: index_path,
                name: name.clone(),
                message: "is in a shard but not in the index".into(),
            }),
            None => Ok(()),
        }
    }

    /// The tensors that the header of the safetensors file `file` describes. `path` is its name for errors.
    ///
    /// The format in full: names occur once, and data ranges fit their shapes and follow one another
    /// from the end of the header to the end of the file, without gaps or overlaps.
    ///
    /// # Errors
    /// Naming the first tensor whose entry is wrong, when the header can be read at all.
    pub fn parse_header(path: &Path, file: &[u8]) -> Result<BTreeMap<String, TensorInfo>> {
        Self::parse_header_and_metadata(path, file).map(|(tensors, _)| tensors)
    }

    /// [`WeightFiles::parse_header`], and the header's metadata.
    pub(crate) fn parse_header_and_metadata(path: &Path, file: &[u8]) -> Result<(Tensors, Metadata)> {
        let fail = |message: String| Error::file(path, format!("is not a valid safetensors file: {message}"));
        let (length, rest) = file
            .split_first_chunk()
            .ok_or_else(|| fail(format!("it has only {} bytes; download it again", file.len())))?;
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER_BYTES {
            return Err(fail(format!("its header would have {length} bytes")));
        }
        let (header, data) = rest
            .split_at_checked(length as usize)
            .ok_or_else(|| fail(format!("it ends inside its header of {length} bytes; download it again")))?;
        let Header(entries, metadata) =
            serde_json::from_slice(header).map_err(|e| fail(format!("its header is wrong: {e}")))?;

        let mut entries: Vec<(String, Entry)> = entries.into_iter().collect();
        entries.sort_by_key(|(_, entry)| entry.data_offsets);
        let mut tensors = BTreeMap::new();
        let mut end = 0;
        for (name, entry) in entries {
            let (info, stop) = entry
                .check(end, data.len() as u64, file.len() - data.len())
                .map_err(|message| Error::Tensor { path: path.to_owned(), name: name.clone(), message })?;
            end = stop;
            tensors.insert(name, info);
        }
        if end != data.len() as u64 {
            return Err(fail(format!("its tensors take {end} bytes of data, it has {}", data.len())));
        }
        Ok((tensors, metadata))
    }

    /// A digest of what the files hold: names, dtypes and shapes of all tensors and the first bytes of each. It
    /// tells checkpoints apart; it does not notice each change of a byte.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for (name, (file, info)) in &self.tensors {
            digest.update(format!("{name:?} {} {:?}", info.dtype, info.shape));
            let data = info.data(self.files[*file].1.bytes());
            digest.update(&data[..data.len().min(FINGERPRINT_SAMPLE)]);
        }
        digest.finalize().into()
    }

    /// Tells the system that what has been read of the files is not needed soon; see [`MappedSlice::release`].
    pub fn release(&self) {
        for (_, map) in &self.files {
            if let Ok(all) = map.slice(0, map.bytes().len()) {
                all.release();
            }
        }
    }

    /// The tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, (_, info))| (name.as_str(), info))
    }

    /// The files with their sizes in bytes.
    pub fn files(&self) -> impl Iterator<Item = (&Path, usize)> {
        self.files.iter().map(|(path, map)| (path.as_path(), map.bytes().len()))
    }

    /// All tensors; on the CPU they share the mapped memory.
    pub fn load(&self) -> Result<Weights> {
        let mut tensors = BTreeMap::new();
        for (name, (file, info)) in &self.tensors {
            let map = &self.files[*file].1;
            let tensor = Tensor {
                array: map.array(info.offset, &info.shape, info.dtype)?,
                data: map.slice(info.offset, info.nbytes())?,
            };
            tensors.insert(name.clone(), tensor);
        }
        Ok(Weights { dir: self.dir.clone(), tensors })
    }
}

/// Bytes of a tensor that [`WeightFiles::fingerprint`] reads: a page.
const FINGERPRINT_SAMPLE: usize = 4096;

/// Maps a file, which must be a regular one: opening a pipe would wait for its writer.
pub(crate) fn map_file(path: &Path) -> Result<MappedFile> {
    if !fs::metadata(path).map_err(Error::io(path))?.is_file() {
        return Err(Error::file(path, "is not a regular file"));
    }
    MappedFile::open(path).map_err(Error::io(path))
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// As MLX sees it.
    pub array: Array,
    /// Its bytes in the file, little-endian and at any alignment.
    pub data: MappedSlice,
}

/// Tensors on their way into a model. Each must be taken exactly once.
pub struct Weights {
    dir: PathBuf,
    tensors: BTreeMap<String, Tensor>,
}

/// The dtypes that weights may have where they are numbers and not codes.
const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

impl Weights {
    /// The names of the tensors that are left.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The array of this name without taking it.
    pub fn get(&self, name: &str) -> Option<&Array> {
        self.tensors.get(name).map(|t| &t.array)
    }

    /// Takes a floating-point tensor of this shape.
    ///
    /// # Errors
    /// When it is missing or of another shape or kind.
    pub fn take(&mut self, name: &str, shape: &[i32]) -> Result<Tensor> {
        self.take_as(name, shape, &FLOATS)
    }

    /// Takes a tensor of this shape and one of these dtypes.
    ///
    /// # Errors
    /// When it is missing or of another shape or dtype.
    pub fn take_as(&mut self, name: &str, shape: &[i32], dtypes: &[Dtype]) -> Result<Tensor> {
        let tensor =
            self.tensors.remove(name).ok_or_else(|| self.error(name, "is missing from the weight files"))?;
        let (found, dtype) = (tensor.array.shape(), tensor.array.dtype());
        if found != shape {
            let message = format!("has shape {found:?}, the config asks for {shape:?}");
            return Err(self.error(name, message));
        }
        if !dtypes.contains(&dtype) {
            let expected: Vec<String> = dtypes.iter().map(Dtype::to_string).collect();
            let message = format!("is {dtype}, expected {}", expected.join(" or "));
            return Err(self.error(name, message));
        }
        Ok(tensor)
    }

    /// Drops tensors that the reference drops before its strict load.
    pub fn discard(&mut self, unwanted: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| !unwanted(name));
    }

    /// Ends loading.
    ///
    /// # Errors
    /// When a tensor was not taken: it belongs to no part of the model, so the checkpoint and the
    /// graph do not fit.
    pub fn finish(self) -> Result<()> {
        match self.tensors.keys().next() {
            None => Ok(()),
            Some(name) => {
                Err(self
                    .error(name, format!("is not part of this model ({} such tensors)", self.tensors.len())))
            }
        }
    }

    /// An error about a tensor.
    pub fn error(&self, name: &str, message: impl Into<String>) -> Error {
        Error::Tensor { path: self.dir.clone(), name: name.to_owned(), message: message.into() }
    }
}

/// Names in `dir` that match `model*.safetensors`, which are the files the reference loads.
fn weight_file_names(dir: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(Error::io(dir))? {
        let entry = entry.map_err(Error::io(dir))?;
        if let Ok(name) = entry.file_name().into_string()
            && is_weight_file_name(&name)
        {
            names.insert(name);
        }
    }
    Ok(names)
}

fn is_weight_file_name(name: &str) -> bool {
    // No separators, and nothing that a terminal would obey in an error message.
    name.starts_with("model")
        && name.ends_with(".safetensors")
        && !name.contains(|c: char| matches!(c, '/' | '\\') || c.is_control())
}

/// The `weight_map` of an index file; `None` when there is no index.
fn read_index(path: &Path) -> Result<Option<BTreeMap<String, String>>> {
    let Some(index) = read_json_object(path)? else { return Ok(None) };
    let map = index
        .get("weight_map")
        .and_then(|v| v.as_object())
        .ok_or_else(|| Error::file(path, "has no object \"weight_map\""))?;
    let mut names = BTreeMap::new();
    for (tensor, file) in map {
        let file = file.as_str().unwrap_or_default();
        if !is_weight_file_name(file) {
            return Err(Error::file(
                path,
                format!(
                    "maps tensor \"{tensor}\" to \"{}\", expected the name of a model*.safetensors file in \
                     the same folder",
                    file.escape_debug()
                ),
            ));
        }
        names.insert(tensor.clone(), file.to_owned());
    }
    Ok(Some(names))
}

/// The longest header that is read; the format's own library has the same limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The tensors of a safetensors header. The format's own library would take the last of two tensors
/// with the same name, and its errors do not say which tensor is wrong.
struct Header(BTreeMap<String, Entry>, Metadata);

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    /// Counted from the end of the header.
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
                let (mut entries, mut metadata) = (BTreeMap::new(), Metadata::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        metadata.extend(map.next_value::<Option<Metadata>>()?.unwrap_or_default());
                        continue;
                    }
                    let entry =
                        map.next_value().map_err(|e| A::Error::custom(format!("tensor {name:?}: {e}")))?;
                    if entries.insert(name.clone(), entry).is_some() {
                        return Err(A::Error::custom(format!("tensor {name:?} occurs twice")));
                    }
                }
                Ok(Header(entries, metadata))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

impl Entry {
    /// Checks an entry whose data must start at `start` of the `length` bytes of data, which lie at
    /// `offset` in the file. Returns where its data ends besides.
    fn check(
        &self,
        start: u64,
        length: u64,
        offset: usize,
    ) -> std::result::Result<(TensorInfo, u64), String> {
        let (first, stop) = self.data_offsets;
        if first != start || stop < first {
            return Err(format!("has the data range {first}..{stop}, expected one that starts at {start}"));
        }
        if stop > length {
            return Err(format!("has the data range {first}..{stop}, the file has {length} bytes of data"));
        }
        let dtype = dtype(&self.dtype)
            .ok_or_else(|| format!("has the unsupported dtype '{}'", self.dtype.escape_debug()))?;
        let shape = self
            .shape
            .iter()
            .map(|&n| i32::try_from(n).ok())
            .collect::<Option<Vec<i32>>>()
            .ok_or_else(|| format!("has a dimension that is too large: {:?}", self.shape))?;
        let bytes = self.shape.iter().try_fold(dtype.size() as u64, |n, &d| n.checked_mul(d));
        if bytes != Some(stop - first) {
            return Err(format!(
                "has {} bytes of data, too few or too many for {dtype} {shape:?}",
                stop - first
            ));
        }
        // `first` is at most the length of the file, which fits in memory.
        Ok((TensorInfo { shape, dtype, offset: offset + first as usize }, stop))
    }
}

fn dtype(name: &str) -> Option<Dtype> {
    Some(match name {
        "BOOL" => Dtype::Bool,
        "U8" => Dtype::U8,
        "I8" => Dtype::I8,
        "U16" => Dtype::U16,
        "I16" => Dtype::I16,
        "U32" => Dtype::U32,
        "I32" => Dtype::I32,
        "U64" => Dtype::U64,
        "I64" => Dtype::I64,
        "F16" => Dtype::F16,
        "BF16" => Dtype::Bf16,
        "F32" => Dtype::F32,
        "F64" => Dtype::F64,
        _ => return None,
    })
}
