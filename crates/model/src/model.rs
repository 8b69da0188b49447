use std::path::Path;

use russet_mlx::{Array, Device, DeviceInfo, Dtype, MappedFile};
use sha2::{Digest, Sha256};

use crate::cache::{CacheKey, LayerCache, hex};
use crate::graphs::{self, Graph, Shape};
use crate::layers::Loader;
use crate::profile::{ProfileOptions, Resolution};
use crate::{
    Cache, Checkpoint, CpuOptions, Error, Fidelity, Numerics, QuantizationConfig, Result, Tier, WeightFiles,
};

/// How a model is loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// The fidelity asked for.
    pub fidelity: Fidelity,
    /// How the CPU kernels run.
    pub cpu: CpuOptions,
    /// How the profile is resolved.
    pub profile: ProfileOptions,
}

impl LoadOptions {
    /// Loading at `fidelity`, the rest as by default.
    pub fn new(fidelity: Fidelity) -> Self {
        Self { fidelity, ..Self::default() }
    }
}

/// A loaded model.
pub struct Model {
    checkpoint: Checkpoint,
    resolution: Resolution,
    quantization: Option<QuantizationConfig>,
    numerics: Numerics,
    files: WeightFiles,
    graph: Box<dyn Graph>,
    parameters: u64,
    /// Bytes of matrices in memory of their own.
    owned_bytes: usize,
    /// Bytes per value of keys and values.
    kv_value_size: usize,
    /// Bytes of a sequence's state that do not grow with its length.
    state_bytes: usize,
}

/// Where a model's memory goes, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// All tensors of the weight files.
    pub weights: usize,
    /// Whether weights that are not interleaved stay in the mapped files, shared with the page cache.
    pub weights_mapped: bool,
    /// Weights that were interleaved into memory of their own.
    pub weights_interleaved: usize,
    /// Keys and values for the context asked for, and the state of recurrent layers.
    pub kv_cache: usize,
}

/// What the state of a sequence needs in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSizes {
    /// As [`Shape::kv`].
    layers: Vec<(usize, Option<usize>)>,
    /// Bytes of a key's or value's element.
    value_size: usize,
    /// Bytes that do not grow with the sequence.
    state_bytes: usize,
}

impl KvSizes {
    /// Bytes for a sequence of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> usize {
        let layer = |(per_token, limit): &(usize, Option<usize>)| {
            per_token.saturating_mul(limit.map_or(tokens, |limit| limit.min(tokens)))
        };
        let values = self.layers.iter().map(layer).fold(0, usize::saturating_add);
        values.saturating_mul(self.value_size).saturating_add(self.state_bytes)
    }
}

impl Model {
    /// Loads the checkpoint in `dir`. On the CPU no weight is copied.
    ///
    /// # Errors
    /// When the checkpoint is not exactly what its config says, or the fidelity is not available.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let checkpoint = Checkpoint::open(dir)?;
        let resolution = Resolution::resolve(&checkpoint, &options.profile)?;
        Self::from_profile(checkpoint, resolution, options.fidelity, options.cpu)
    }

    /// Loads a checkpoint with a profile that was resolved before.
    ///
    /// # Errors
    /// When the profile was resolved for another config, and as [`Model::load`].
    pub fn from_profile(
        checkpoint: Checkpoint,
        resolution: Resolution,
        fidelity: Fidelity,
        cpu: CpuOptions,
    ) -> Result<Self> {
        resolution.check(&checkpoint)?;
        let promised = resolution.profile().tier();
        let numerics = Numerics::resolve(fidelity, promised, cpu)?;
        let config = checkpoint.config();
        let quantization = QuantizationConfig::from_config(&config)?;
        let quantize_activations = config.flag("quantize_activations")?.unwrap_or(false);

        let files = WeightFiles::open(checkpoint.dir())?;
        let mut weights = files.load()?;
        let mut loader = Loader::new(&mut weights, &numerics, quantization.as_ref(), quantize_activations);
        let graph = graphs::build(resolution.profile().graph(), &checkpoint, &mut loader)?;
        let (packed, owned_bytes) = (loader.packed_elements(), loader.interleave()?);
        weights.finish()?;
        files.release();

        let dense: u64 = files
            .tensors()
            .filter(|(name, info)| {
                info.dtype != Dtype::U32 && !name.ends_with(".scales") && !name.ends_with(".biases")
            })
            .map(|(_, info)| info.elements() as u64)
            .sum();
        let (activations, state_bytes) = activations_and_state(graph.as_ref())?;
        let kv_value_size = match numerics {
            Numerics::Mlx => activations.size(),
            Numerics::Kernels { kv, .. } => kv.size(),
        };
        let parameters = packed + dense;
        Ok(Self {
            checkpoint,
            resolution,
            quantization,
            numerics,
            files,
            graph,
            parameters,
            owned_bytes,
            kv_value_size,
            state_bytes,
        })
    }

    /// This model with another graph around its own, for instance one that fails at will.
    #[must_use]
    pub fn with_graph(mut self, around: impl FnOnce(Box<dyn Graph>) -> Box<dyn Graph>) -> Self {
        self.graph = around(self.graph);
        self
    }

    /// The config files it came from.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The profile it was built by, and why.
    pub fn resolution(&self) -> &Resolution {
        &self.resolution
    }

    /// The quantization of the checkpoint.
    pub fn quantization(&self) -> Option<&QuantizationConfig> {
        self.quantization.as_ref()
    }

    /// The fidelity that runs: what the profile promises, unless Russet's kernels compute.
    pub fn tier(&self) -> Tier {
        match self.numerics {
            Numerics::Mlx => self.resolution.profile().tier(),
            Numerics::Kernels { .. } => Tier::L3,
        }
    }

    /// Who computes.
    pub fn numerics(&self) -> &Numerics {
        &self.numerics
    }

    /// The weight files.
    pub fn files(&self) -> &WeightFiles {
        &self.files
    }

    /// Sizes of the model.
    pub fn shape(&self) -> Shape {
        self.graph.shape()
    }

    /// An empty cache for one sequence.
    pub fn new_cache(&self) -> Cache {
        self.graph.new_cache()
    }

    /// What the saved state of a sequence of `tokens` is good for.
    ///
    /// # Errors
    /// When MLX can't name the device.
    pub fn cache_key(&self, tokens: &[u32]) -> Result<CacheKey> {
        let mut checkpoint = Sha256::new();
        self.checkpoint
            .config()
            .iter()
            .for_each(|(name, value)| checkpoint.update(format!("{name:?}:{value}")));
        checkpoint.update(self.files.fingerprint());
        let config = || format!("config {}", self.resolution.config());
        let device = match Device::default_device() {
            Device::Cpu => "cpu".to_owned(),
            Device::Gpu => {
                DeviceInfo::query()?.text.remove("device_name").unwrap_or_else(|| "gpu".to_owned())
            }
        };
        Ok(CacheKey {
            model: self.resolution.artifact().map_or_else(config, ToString::to_string),
            checkpoint: hex(&checkpoint.finalize()),
            tier: self.tier(),
            numerics: self.numerics.to_string(),
            mlx: russet_mlx::version(),
            device,
            tokens: tokens.len(),
            token_ids: CacheKey::digest_tokens(tokens),
        })
    }

    /// Writes the state of the sequence `tokens` to the file `path`; see [`Cache::save`].
    pub fn save_cache(&self, cache: &Cache, tokens: &[u32], path: &Path) -> Result<()> {
        cache.save(path, &self.cache_key(tokens)?)
    }

    /// Reads the state of the sequence `tokens` from the file `path`; see [`Cache::load`].
    pub fn load_cache(&self, tokens: &[u32], path: &Path) -> Result<Cache> {
        Cache::load(path, &self.cache_key(tokens)?, &one_token(self.graph.as_ref())?.0)
    }

    /// Token ids `[batch, seq]` → hidden states `[batch, seq, hidden]`; appends to the cache.
    pub fn forward(&self, tokens: &Array, cache: &mut Cache) -> Result<Array> {
        self.forward_layers(tokens, cache, &mut |_| {})
    }

    /// [`Model::forward`] that shows `each_layer` the output `[batch, seq, hidden]` of every layer in order, not
    /// evaluated yet.
    pub fn forward_layers(
        &self,
        tokens: &Array,
        cache: &mut Cache,
        each_layer: &mut dyn FnMut(&Array),
    ) -> Result<Array> {
        self.graph.forward(tokens, cache, each_layer)
    }

    /// The hidden state of the last of `tokens` after the final norm, `[1, 1, hidden]`, computed from all of them
    /// without leaving a cache.
    ///
    /// # Errors
    /// For no tokens, and when MLX fails.
    pub fn last_hidden(&self, tokens: &[u32]) -> Result<Array> {
        // At L1 in one call, as the reference does it.
        let chunk = match self.numerics {
            Numerics::Mlx => tokens.len().max(1),
            Numerics::Kernels { .. } => self.numerics.default_prefill_chunk(),
        };
        let mut cache = self.new_cache();
        cache.reserve(tokens.len());
        let mut last = None;
        for tokens in tokens.chunks(chunk) {
            let length = tokens.len() as i32;
            let hidden = self.forward(&Array::from_slice(tokens, [1, length])?, &mut cache)?;
            let row = hidden.slice_axis(1, length - 1, length)?;
            row.eval()?;
            last = Some(row);
        }
        last.ok_or_else(|| Error::Input("there are no tokens".into()))
    }

    /// Hidden states → logits.
    pub fn logits(&self, hidden: &Array) -> Result<Array> {
        self.graph.logits(hidden)
    }

    /// Refuses ids that the embedding table does not have: MLX would read outside of it.
    ///
    /// # Errors
    /// Naming the first such id.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocabulary = self.shape().vocabulary;
        match tokens.iter().find(|&&t| i64::from(t) >= i64::from(vocabulary)) {
            None => Ok(()),
            Some(token) => Err(Error::Input(format!(
                "token id {token} is outside the model's vocabulary of {vocabulary}"
            ))),
        }
    }

    /// The number of parameters, packed weights counted by their elements.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// Memory for a context of `tokens` tokens.
    pub fn footprint(&self, tokens: usize) -> Footprint {
        Footprint {
            weights: self.files.tensors().map(|(_, info)| info.nbytes()).sum(),
            weights_mapped: MappedFile::is_zero_copy(),
            weights_interleaved: self.owned_bytes,
            kv_cache: self.kv_sizes().bytes(tokens),
        }
    }

    /// What the state of a sequence needs.
    pub fn kv_sizes(&self) -> KvSizes {
        let mut layers = self.shape().kv;
        if let Numerics::Kernels { .. } = self.numerics {
            // The kernels' caches keep all tokens and leave what is outside a window unread.
            layers.iter_mut().for_each(|(_, limit)| *limit = None);
        }
        KvSizes { layers, value_size: self.kv_value_size, state_bytes: self.state_bytes }
    }
}

/// The state after one token, and its hidden states. Nothing is computed for them.
fn one_token(graph: &dyn Graph) -> Result<(Cache, Array)> {
    let mut cache = graph.new_cache();
    let hidden = graph.forward(&Array::zeros([1, 1], Dtype::U32)?, &mut cache, &mut |_| {})?;
    Ok((cache, hidden))
}

/// The dtype of the hidden states, and the bytes of state of recurrent layers.
fn activations_and_state(graph: &dyn Graph) -> Result<(Dtype, usize)> {
    let (cache, hidden) = one_token(graph)?;
    let recurrent = cache.layers.iter().filter(|layer| matches!(layer, LayerCache::Recurrent(_)));
    Ok((hidden.dtype(), recurrent.map(LayerCache::nbytes).sum()))
}
