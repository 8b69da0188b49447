//! A sequence's state in a file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

use russet_mlx::{Array, Dtype, save_safetensors};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Cache, KernelKvCache, KeysValues, KvCache, LayerCache, RecurrentCache, RotatingKvCache};
use crate::weights::map_file;
use crate::{Error, Result, TensorInfo, Tier, WeightFiles};

/// What a saved state is good for. A file is read only if all of this is equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheKey {
    /// The artifact's fingerprint, or the config's where the artifact is unknown.
    pub model: String,
    /// A digest of the checkpoint's config and weights.
    pub checkpoint: String,
    /// The fidelity that computed it.
    pub tier: Tier,
    /// Who computed it, and what keys and values are kept in.
    pub numerics: String,
    /// MLX's version.
    pub mlx: String,
    /// The device, whose kernels decide about bits.
    pub device: String,
    /// Tokens consumed.
    pub tokens: usize,
    /// A digest of their ids.
    pub token_ids: String,
}

impl CacheKey {
    /// A digest for [`CacheKey::token_ids`].
    pub fn digest_tokens(tokens: &[u32]) -> String {
        let mut digest = Sha256::new();
        tokens.iter().for_each(|token| digest.update(token.to_le_bytes()));
        hex(&digest.finalize())
    }

    /// The parts by name.
    fn parts(&self) -> [(&'static str, String); 8] {
        [
            ("model", self.model.clone()),
            ("checkpoint", self.checkpoint.clone()),
            ("tier", self.tier.to_string()),
            ("numerics", self.numerics.clone()),
            ("mlx", self.mlx.clone()),
            ("device", self.device.clone()),
            ("tokens", self.tokens.to_string()),
            ("token_ids", self.token_ids.clone()),
        ]
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The version of the format, and the mark of a file of this kind.
const FORMAT: (&str, &str) = ("russet-cache", "1");
/// The metadata that describes the layers.
const LAYERS: &str = "layers";

/// What a layer's two tensors do not say.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Layer {
    Full,
    Rotating { max_size: i32, keep: i32, index: i32 },
    Kernel,
    Recurrent,
}

impl Layer {
    /// The names of its tensors behind `layers.N.`.
    fn names(&self) -> [&'static str; 2] {
        match self {
            Self::Full | Self::Rotating { .. } | Self::Kernel => ["keys", "values"],
            Self::Recurrent => ["tail", "memory"],
        }
    }
}

impl Cache {
    /// Writes the state to a safetensors file, as little as it needs. The file appears whole or not at all.
    ///
    /// # Errors
    /// When this is not the state of one sequence of the tokens that `key` names, or the file can't be written.
    pub fn save(&self, path: &Path, key: &CacheKey) -> Result<()> {
        let tokens = i32::try_from(key.tokens).unwrap_or(i32::MAX);
        if tokens == 0 || self.rows() != 1 || self.layers.iter().any(|layer| layer.offset() != tokens) {
            return Err(Error::Input(format!(
                "the state of {} sequences of {} tokens can't be saved as one of {}",
                self.rows(),
                self.offset(),
                key.tokens
            )));
        }
        let mut arrays = BTreeMap::new();
        let mut layers = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            let (layer, pair) = layer.saved()?;
            arrays.extend(layer.names().map(|name| format!("layers.{i}.{name}")).into_iter().zip(pair));
            layers.push(layer);
        }
        let layers = serde_json::to_string(&layers).map_err(|e| Error::Input(e.to_string()))?;
        let mut metadata: BTreeMap<String, String> =
            key.parts().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        metadata.insert(FORMAT.0.to_owned(), FORMAT.1.to_owned());
        metadata.insert(LAYERS.to_owned(), layers);

        // MLX's writer insists on the extension.
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.safetensors", std::process::id()));
        let temporary = path.with_file_name(name);
        let written = save_safetensors(&temporary, &arrays, &metadata).map_err(Error::from).and_then(|()| {
            File::open(&temporary).and_then(|file| file.sync_all()).map_err(Error::io(&temporary))?;
            fs::rename(&temporary, path).map_err(Error::io(path))
        });
        if written.is_err() {
            // What is there of it is of no use.
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Reads what [`Cache::save`] wrote. `like` is the state of the same model after some tokens.
    ///
    /// # Errors
    /// When the file was saved for another key, or does not hold exactly a state like that: other layers, shapes,
    /// dtypes or lengths.
    pub fn load(path: &Path, key: &CacheKey, like: &Self) -> Result<Self> {
        let map = map_file(path)?;
        let (mut tensors, metadata) = WeightFiles::parse_header_and_metadata(path, map.bytes())?;
        let fail = |message: String| Error::file(path, message);
        if metadata.get(FORMAT.0).map(String::as_str) != Some(FORMAT.1) {
            return Err(fail(format!("is no saved cache of this format ({} {})", FORMAT.0, FORMAT.1)));
        }
        for (name, expected) in key.parts() {
            let found = metadata.get(name).map_or("", String::as_str);
            if found != expected {
                return Err(fail(format!(
                    "was saved for the {name} '{}' and is of no use for '{expected}': read the tokens again",
                    found.escape_debug().take(MAX_SHOWN).collect::<String>()
                )));
            }
        }
        let layers = metadata.get(LAYERS).map_or("", String::as_str);
        let layers: Vec<Layer> =
            serde_json::from_str(layers).map_err(|e| fail(format!("does not describe its layers: {e}")))?;
        if layers.len() != like.layers.len() {
            return Err(fail(format!("has {} layers, the model {}", layers.len(), like.layers.len())));
        }
        let tokens = i32::try_from(key.tokens).map_err(|_| fail(format!("has {} tokens", key.tokens)))?;
        let layers = layers.iter().zip(&like.layers).enumerate().map(|(i, (layer, like))| {
            let expected =
                like.expected(layer, tokens).map_err(|message| fail(format!("layer {i}: {message}")))?;
            let mut arrays = Vec::new();
            for (name, (shape, dtype)) in layer.names().into_iter().zip(expected) {
                let name = format!("layers.{i}.{name}");
                let info = tensors.remove(&name).ok_or_else(|| tensor(path, &name, "is missing".into()))?;
                if (&info.shape, info.dtype) != (&shape, dtype) {
                    let TensorInfo { shape: found, dtype: found_dtype, .. } = info;
                    let message =
                        format!("is {found_dtype} {found:?}, the model's state is {dtype} {shape:?}");
                    return Err(tensor(path, &name, message));
                }
                arrays.push(Array::from_bytes(info.data(map.bytes()), shape, dtype)?);
            }
            like.restored(layer, tokens, arrays)
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        match tensors.keys().next() {
            Some(name) => Err(tensor(path, name, "is not part of this model's state".into())),
            None => Ok(Self::new(layers)),
        }
    }
}

/// Characters of a file's text that errors show.
const MAX_SHOWN: usize = 80;

fn tensor(path: &Path, name: &str, message: String) -> Error {
    Error::Tensor { path: path.to_owned(), name: name.to_owned(), message }
}

/// Shape and dtype.
type Form = (Vec<i32>, Dtype);

impl LayerCache {
    /// The two tensors and the rest of the state.
    fn saved(&self) -> Result<(Layer, [Array; 2])> {
        let pair = |buffer: Option<KeysValues>| {
            let buffer = buffer.ok_or_else(|| Error::Input("a layer has no keys and values".into()))?;
            Ok::<_, Error>(<[Array; 2]>::from(buffer.into_pair()))
        };
        Ok(match self {
            Self::Full(cache) => (Layer::Full, pair(cache.compacted()?.buffer)?),
            Self::Rotating(cache) => {
                let RotatingKvCache { max_size, keep, index, buffer, .. } = cache.compacted()?;
                (Layer::Rotating { max_size, keep, index }, pair(buffer)?)
            }
            Self::Kernel(cache) => (Layer::Kernel, cache.to_arrays()?),
            Self::Recurrent(cache) => {
                let arrays = <[Array; 2]>::try_from(cache.extract(0)?.arrays());
                (Layer::Recurrent, arrays.map_err(|_| Error::Input("a layer has no state".into()))?)
            }
            Self::BatchFull(_) | Self::BatchRotating(_) | Self::BatchKernel(_) => {
                return Err(Error::Input("a batch is saved row by row".into()));
            }
        })
    }

    /// The forms of the tensors of `tokens` tokens in a layer like this one, if `layer` can be one.
    fn expected(&self, layer: &Layer, tokens: i32) -> std::result::Result<[Form; 2], String> {
        let sized = |of: &KeysValues, columns: i32| {
            [&of.keys, &of.values].map(|a| {
                let mut shape = a.shape();
                shape[2] = columns;
                (shape, a.dtype())
            })
        };
        let other = || format!("{layer:?} is not the kind of state that the model keeps");
        match (self, layer) {
            (Self::Full(KvCache { buffer: Some(like), .. }), Layer::Full) => Ok(sized(like, tokens)),
            (Self::Rotating(like), &Layer::Rotating { max_size, keep, index }) => {
                if (like.max_size, like.keep) != (max_size, keep) {
                    return Err(other());
                }
                // A ring may be written anywhere behind the kept columns, others at their end.
                let columns = tokens.min(max_size);
                if index != columns && !(columns == max_size && (keep..max_size).contains(&index)) {
                    return Err(format!("index {index} is none of a ring of {columns} columns"));
                }
                like.buffer.as_ref().map(|like| sized(like, columns)).ok_or_else(other)
            }
            (Self::Kernel(like), Layer::Kernel) => {
                let (shape, dtype) = like.form(tokens).map_err(|e| e.to_string())?;
                Ok([(shape.clone(), dtype), (shape, dtype)])
            }
            (Self::Recurrent(like), Layer::Recurrent) => {
                let forms: Vec<Form> = like.arrays().iter().map(|a| (a.shape(), a.dtype())).collect();
                forms.try_into().map_err(|_| other())
            }
            _ => Err(other()),
        }
    }

    /// The state of `tokens` tokens from tensors of the expected forms.
    fn restored(&self, layer: &Layer, tokens: i32, arrays: Vec<Array>) -> Result<Self> {
        let [first, second] =
            <[Array; 2]>::try_from(arrays).map_err(|_| Error::Input("a layer has two tensors".into()))?;
        let pair = |keys, values| Some(KeysValues { keys, values });
        Ok(match (self, layer) {
            (Self::Rotating(like), &Layer::Rotating { index, .. }) => {
                let buffer = pair(first, second);
                Self::Rotating(RotatingKvCache { buffer, offset: tokens, index, ..*like })
            }
            (Self::Kernel(_), _) => Self::Kernel(KernelKvCache::of_arrays(&first, &second)?),
            (Self::Recurrent(_), _) => Self::Recurrent(RecurrentCache::restored(first, second, tokens)),
            _ => Self::Full(KvCache { buffer: pair(first, second), offset: tokens }),
        })
    }
}
