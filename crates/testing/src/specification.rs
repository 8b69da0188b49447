//! What to make and what to run: the jobs the oracle understands, and their defaults.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

/// Element type of a fixture's weights, and with them of its activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Float {
    #[default]
    Bfloat16,
    Float16,
    Float32,
}

/// How a fixture's linear layers and embeddings are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Unquantized, in the fixture's [`Float`].
    #[default]
    Dense,
    /// MLX's affine quantization.
    Affine {
        /// Bits per weight: 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// Weights that share a scale and a bias: 32, 64 or 128.
        group: u32,
    },
    /// 4-bit floats, a power-of-two scale per 32.
    Mxfp4,
    /// 4-bit floats, an 8-bit float scale per 16.
    Nvfp4,
    /// 8-bit floats, a power-of-two scale per 32.
    Mxfp8,
}

/// A checkpoint for `oracle/make_fixture.py` to write.
#[derive(Clone, Debug, PartialEq)]
pub struct FixtureSpec {
    /// A name from `make_fixture.py --list`.
    pub arch: &'static str,
    /// Seed of the random weights.
    pub seed: u64,
    /// Type of the weights.
    pub dtype: Float,
    /// Storage of linear layers and embeddings.
    pub format: Format,
    /// Whether some modules are quantized unlike the rest.
    pub mixed: bool,
    /// Number of safetensors files.
    pub shards: u32,
    /// Whether tensors have the names and shapes of an unconverted checkpoint.
    pub hub: bool,
    /// Number of layers.
    pub layers: u32,
    /// Hidden size.
    pub hidden: u32,
    /// Keys of config.json to set; they win over everything but the dtype and the quantization.
    pub set: Map<String, Value>,
    /// Keys of config.json to leave out.
    pub unset: Vec<&'static str>,
}

impl FixtureSpec {
    /// The smallest useful checkpoint of `arch`: dense bfloat16, two layers, 64 wide.
    pub fn new(arch: &'static str) -> Self {
        Self {
            arch,
            seed: 0,
            dtype: Float::default(),
            format: Format::default(),
            mixed: false,
            shards: 1,
            hub: false,
            layers: 2,
            hidden: 64,
            set: Map::new(),
            unset: Vec::new(),
        }
    }

    /// This specification with `key` of config.json set to `value`.
    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.set.insert(key.to_owned(), value);
        self
    }

    /// This specification with `key` left out of config.json.
    #[must_use]
    pub fn without(mut self, key: &'static str) -> Self {
        self.unset.push(key);
        self
    }
}

impl Serialize for FixtureSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (mode, bits, group) = match self.format {
            Format::Dense => ("affine", 0, None),
            Format::Affine { bits, group } => ("affine", bits, Some(group)),
            Format::Mxfp4 => ("mxfp4", 4, None),
            Format::Nvfp4 => ("nvfp4", 4, None),
            Format::Mxfp8 => ("mxfp8", 8, None),
        };
        json!({
            "arch": self.arch, "seed": self.seed, "dtype": self.dtype, "mode": mode, "bits": bits, "group": group,
            "mixed": self.mixed, "shards": self.shards, "hub": self.hub, "layers": self.layers,
            "hidden": self.hidden, "set": self.set, "unset": self.unset,
        })
        .serialize(serializer)
    }
}

/// A prompt as token ids. Its [`Display`](fmt::Display) form is the one the command line takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// These ids.
    List(Vec<u32>),
    /// Ids below 256 from a fixed linear congruential generator.
    Random {
        /// How many.
        count: usize,
        /// State the generator starts from.
        seed: u32,
    },
}

impl Tokens {
    /// The token ids.
    pub fn ids(&self) -> Vec<u32> {
        match self {
            Self::List(ids) => ids.clone(),
            Self::Random { count, seed } => {
                let next = |x: &u32| Some(x.wrapping_mul(1_103_515_245).wrapping_add(12_345) & 0x7fff_ffff);
                std::iter::successors(Some(*seed), next)
                    .skip(1)
                    .take(*count)
                    .map(|x| (x >> 8) % 256)
                    .collect()
            }
        }
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::List(ids) => f.write_str(&ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
            Self::Random { count, seed } => write!(f, "rand:{count}:{seed}"),
        }
    }
}

impl Serialize for Tokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The sampler: mlx-lm's `make_sampler` options. The default is greedy.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "mlx-lm's names")]
pub struct Sampling {
    pub temp: f64,
    pub top_p: f64,
    pub min_p: f64,
    pub min_tokens_to_keep: u32,
    pub top_k: u32,
    pub xtc_probability: f64,
    pub xtc_threshold: f64,
    pub xtc_special_tokens: Vec<u32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temp: 0.0,
            top_p: 0.0,
            min_p: 0.0,
            min_tokens_to_keep: 1,
            top_k: 0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            xtc_special_tokens: Vec::new(),
        }
    }
}

/// The logits processors: mlx-lm's `make_logits_processors` options. The default is none.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "mlx-lm's names")]
pub struct Processors {
    pub logit_bias: BTreeMap<u32, f64>,
    pub repetition_penalty: Option<f64>,
    pub repetition_context_size: u32,
    pub presence_penalty: Option<f64>,
    pub presence_context_size: u32,
    pub frequency_penalty: Option<f64>,
    pub frequency_context_size: u32,
}

impl Default for Processors {
    fn default() -> Self {
        Self {
            logit_bias: BTreeMap::new(),
            repetition_penalty: None,
            repetition_context_size: 20,
            presence_penalty: None,
            presence_context_size: 20,
            frequency_penalty: None,
            frequency_context_size: 20,
        }
    }
}

/// A generation for `oracle/reference.py` to run and record.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReferenceSpec {
    /// The prompt.
    pub tokens: Tokens,
    /// Tokens to generate (mlx-lm's `max_tokens`).
    pub steps: u32,
    /// Most prompt tokens in one call (mlx-lm's `prefill_step_size`).
    pub prefill_chunk: u32,
    /// Seed of the sampler.
    pub seed: Option<u64>,
    /// How a token is picked.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// What is done to the logits before that.
    #[serde(flatten)]
    pub processors: Processors,
    /// Record each layer's output in each call, as `layer.CALL.LAYER`.
    pub dump_layers: bool,
    /// Record the caches after the last step, as `cache.LAYER.PART`.
    pub dump_cache: bool,
}

impl ReferenceSpec {
    /// Greedy decoding of `steps` tokens, with mlx-lm's prefill chunk of 2048.
    pub fn new(tokens: Tokens, steps: u32) -> Self {
        Self {
            tokens,
            steps,
            prefill_chunk: 2048,
            seed: None,
            sampling: Sampling::default(),
            processors: Processors::default(),
            dump_layers: false,
            dump_cache: false,
        }
    }
}

/// Several generations at once for `oracle/batch.py` to run and record: for row II `tokens.II`, `logprobs.II` and
/// the state of its cache as it leaves, `cache.II.LAYER.PART`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchSpec {
    /// The sequences.
    pub rows: Vec<BatchRow>,
    /// Most rows that generate at once (mlx-lm's `completion_batch_size`).
    pub width: u32,
    /// Most rows whose prompts are read at once (mlx-lm's `prefill_batch_size`).
    pub prefill_width: u32,
    /// Most prompt tokens of a row in one call (mlx-lm's `prefill_step_size`).
    pub prefill_chunk: u32,
}

/// A sequence of a [`BatchSpec`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchRow {
    /// The prompt.
    pub tokens: Tokens,
    /// Tokens to generate.
    pub steps: u32,
    /// The call of the generator before which it joins.
    pub join: u32,
    /// The call before which it is taken away, unless it has ended.
    pub leave: Option<u32>,
}

/// A rotary embedding applied to a random input; recorded are `input`, `freqs` (where the type has a table) and
/// `output.OFFSET`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RopeSpec {
    /// Features of a head that are rotated.
    pub dims: u32,
    /// `rope_theta`.
    pub base: f64,
    /// Pairs of neighbours are rotated, instead of halves.
    pub traditional: bool,
    /// The config's `rope_scaling`, or null.
    pub scaling: Value,
    /// The config's `max_position_embeddings`.
    pub max_position_embeddings: Option<u32>,
    /// Shape of the input: batch, heads, length, head dimension.
    pub shape: [u32; 4],
    /// Type of the input.
    pub dtype: Float,
    /// Seed of the input.
    pub seed: u64,
    /// Position of the first row, once per output.
    pub offsets: Vec<u32>,
}

/// The sampler taken apart; recorded are `logits`, `logprobs`, the result of each enabled stage on that of the one
/// before (`top_p`, `min_p`, `xtc`, `top_k`), and `draws` of the whole sampler on `logprobs` with the random `keys`
/// after each. The generator is seeded anew before `xtc` and before the draws.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SamplerSpec {
    /// Number of logits.
    pub vocabulary: u32,
    /// Type of the logits.
    pub dtype: Float,
    /// Standard deviation of the random logits.
    pub scale: f64,
    /// Seed of the logits, and of the generator afterwards.
    pub seed: u64,
    /// Number of draws.
    pub draws: u32,
    /// The stages.
    #[serde(flatten)]
    pub sampling: Sampling,
}

/// An embedding by last-token pooling; recorded are `hidden` `[tokens, hidden]` and `embedding`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EmbeddingSpec {
    /// The text.
    pub tokens: Tokens,
    /// How many numbers of the embedding are kept; all where absent.
    pub dimensions: Option<u32>,
}

/// A layer's cache through a row of updates; recorded are, for step III, `keys_in.III` and `values_in.III`,
/// `keys_out.III` and `values_out.III`, `mask.III` where mlx-lm makes an array, `trimmed.III`, and the state after it as
/// `state.III.PART` (keys, values, offset; for a rotating cache also keep, maximum size, index). The metadata's
/// settings hold `masks`: `none`, `causal` or `array` per step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheSpec {
    /// Rows of a rotating cache; none makes a plain one.
    pub max_size: Option<u32>,
    /// First rows that a rotating cache never drops.
    pub keep: u32,
    /// Window of the mask.
    pub window: Option<u32>,
    /// Key and value heads.
    pub heads: u32,
    /// Features of a head.
    pub head_dim: u32,
    /// Type of keys and values.
    pub dtype: Float,
    /// Seed of keys and values.
    pub seed: u64,
    /// Rows to append, or to trim where negative.
    pub steps: Vec<i32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Oracle;

    #[test]
    fn random_tokens_are_those_of_the_python_scripts() {
        let Some(oracle) = Oracle::get() else { return };
        let scripts = crate::environment::scripts_dir();
        let script = "import sys; sys.path.insert(0, sys.argv[1])\n\
                      from reference import parse_tokens\n\
                      print([parse_tokens(t) for t in sys.argv[2:]])";
        let all = [
            Tokens::Random { count: 1000, seed: 1 },
            Tokens::Random { count: 3, seed: u32::MAX },
            Tokens::List(vec![5, 0, 255]),
        ];
        let texts = all.each_ref().map(Tokens::to_string);
        let mut args = vec![scripts.to_str().unwrap()];
        args.extend(texts.iter().map(String::as_str));
        let python: Vec<Vec<u32>> = serde_json::from_str(&oracle.run_script(script, &args, "")).unwrap();
        assert_eq!(python, all.each_ref().map(Tokens::ids));
    }
}
