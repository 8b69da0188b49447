//! Dense decoder-only transformers: one graph, described per family in [`families`].
//!
//! The order of operations is that of `mlx_lm.models`; families differ in which norms, biases, multipliers
//! and caps they have, and in how matrices are stored.

pub(super) mod families;

use russet_mlx::Array;

use super::{Graph, Shape};
use crate::cache::{Cache, KernelKvCache, KvCache, LayerCache, RotatingKvCache};
use crate::layers::{
    Activation, Attention, AttentionArgs, AttentionCall, Embedding, GatedMlp, Linear, Loader, MlpArgs, Norm,
    NormKind, PlainMlp, Projections, QkNorm, Residual, Rope,
};
use crate::{Checkpoint, EmbeddingRecipe, Error, Numerics, Result};
use families::Family;

/// A family's graph with the sizes of a config.
pub(super) struct Args {
    hidden: i32,
    layers: Vec<LayerArgs>,
    intermediate: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    vocabulary: i32,
    max_positions: Option<i32>,
    /// Whether the head is the embedding's table.
    tied: bool,
    leftovers: Leftovers,

    norm: NormKind,
    norm_eps: f64,
    norms: NormNames,
    qk_norm: QkNorm,

    qkv: QkvStorage,
    qkv_bias: bool,
    output_bias: bool,
    attention_scale: f64,
    attention_softcap: Option<f64>,

    mlp: MlpStorage,
    mlp_bias: bool,
    activation: Activation,

    embedding_multiplier: Option<f64>,
    residual_multiplier: Option<f64>,
    logits: LogitsForm,
}

#[derive(Clone, Copy)]
struct LayerArgs {
    /// A query sees this many keys; all up to its own where absent.
    window: Option<i32>,
    /// Whether the layer's cache is a ring of the window's size.
    rotating: bool,
    /// Whether queries and keys are rotated.
    rotary: bool,
}

/// Names of a block's norms, in the order in which they are applied.
struct NormNames {
    before_attention: Option<&'static str>,
    after_attention: Option<&'static str>,
    before_mlp: Option<&'static str>,
    after_mlp: Option<&'static str>,
}

enum QkvStorage {
    /// `q_proj`, `k_proj`, `v_proj`.
    Separate,
    /// `qkv_proj`.
    Fused,
}

enum MlpStorage {
    /// `gate_proj`, `up_proj`, `down_proj`.
    Gated,
    /// `gate_up_proj`, `down_proj`.
    FusedGated,
    /// `c_fc`, `c_proj`.
    Plain,
}

enum LogitsForm {
    Plain,
    /// `logits / scale`
    Scaled(f64),
    /// `cap * tanh(logits / cap)`
    Capped(f64),
}

/// Tensors that the reference drops when it loads a checkpoint.
#[derive(Clone, Copy, Default)]
struct Leftovers {
    /// `rotary_emb.inv_freq` of attention layers.
    inverse_frequencies: bool,
    /// `lm_head.weight` of a tied model.
    tied_head: bool,
}

enum Mlp {
    Gated(GatedMlp),
    Plain(PlainMlp),
}

struct Block {
    before_attention: Option<Norm>,
    qkv: Projections<3>,
    attention: Attention,
    after_attention: Residual,
    before_mlp: Option<Norm>,
    mlp: Mlp,
    after_mlp: Residual,
}

impl Block {
    fn load(loader: &mut Loader<'_>, path: &str, args: &Args, layer: LayerArgs) -> Result<Self> {
        let norm = |loader: &mut Loader<'_>, name: Option<&str>| {
            name.map(|name| args.load_norm(loader, &format!("{path}.{name}"))).transpose()
        };
        let residual = |norm: Option<Norm>| match (norm, args.residual_multiplier) {
            (Some(norm), _) => Residual::Norm(norm),
            (None, Some(factor)) => Residual::Scaled(factor),
            (None, None) => Residual::Plain,
        };
        let (attention, mlp) = (format!("{path}.self_attn"), format!("{path}.mlp"));
        let attention_args = AttentionArgs {
            hidden: args.hidden,
            heads: args.heads,
            kv_heads: args.kv_heads,
            head_dim: args.head_dim,
            scale: args.attention_scale,
            rotary: layer.rotary,
            qk_norm: args.qk_norm,
            value_norm: None,
            softcap: args.attention_softcap,
            output_gate: false,
            output_bias: args.output_bias,
        };
        let mlp_args = MlpArgs {
            hidden: args.hidden,
            intermediate: args.intermediate,
            bias: args.mlp_bias,
            activation: args.activation,
        };
        Ok(Self {
            before_attention: norm(loader, args.norms.before_attention)?,
            qkv: args.load_qkv(loader, &attention)?,
            attention: Attention::load(loader, &attention, attention_args)?,
            after_attention: residual(norm(loader, args.norms.after_attention)?),
            before_mlp: norm(loader, args.norms.before_mlp)?,
            mlp: match args.mlp {
                MlpStorage::Gated => Mlp::Gated(GatedMlp::load(loader, &mlp, mlp_args)?),
                MlpStorage::FusedGated => Mlp::Gated(GatedMlp::load_fused(loader, &mlp, mlp_args)?),
                MlpStorage::Plain => Mlp::Plain(PlainMlp::load(loader, &mlp, mlp_args)?),
            },
            after_mlp: residual(norm(loader, args.norms.after_mlp)?),
        })
    }

    fn forward(&self, x: &Array, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Array> {
        let qkv = self.qkv.forward(self.before_attention.as_ref(), x)?;
        let h = self.attention.forward_add(&qkv, x, &self.after_attention, call, cache)?;
        let norm = self.before_mlp.as_ref();
        match &self.mlp {
            Mlp::Gated(mlp) => mlp.forward_add(norm, &h, &self.after_mlp),
            Mlp::Plain(mlp) => mlp.forward_add(norm, &h, &self.after_mlp),
        }
    }
}

impl Args {
    fn load_norm(&self, loader: &mut Loader<'_>, path: &str) -> Result<Norm> {
        Norm::load(loader, path, self.norm, self.hidden, self.norm_eps)
    }

    fn load_qkv(&self, loader: &mut Loader<'_>, path: &str) -> Result<Projections<3>> {
        let [q, kv] = [self.heads, self.kv_heads].map(|heads| heads * self.head_dim);
        let mut linear = |name: &str, outputs| {
            Linear::load(loader, &format!("{path}.{name}"), self.hidden, outputs, self.qkv_bias)
        };
        match self.qkv {
            QkvStorage::Separate => {
                let projections = [linear("q_proj", q)?, linear("k_proj", kv)?, linear("v_proj", kv)?];
                Ok(Projections::separate(projections))
            }
            QkvStorage::Fused => {
                Projections::load_fused(loader, &format!("{path}.qkv_proj"), self.hidden, [q, kv, kv])
            }
        }
    }

    fn discard_leftovers(&self, loader: &mut Loader<'_>) {
        let Leftovers { inverse_frequencies, tied_head } = self.leftovers;
        loader.weights.discard(|name| {
            (inverse_frequencies && name.contains("self_attn.rotary_emb.inv_freq"))
                || (tied_head && self.tied && name == "lm_head.weight")
        });
    }
}

/// A dense transformer.
struct UniversalDense {
    args: Args,
    rope: Rope,
    numerics: Numerics,
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    head: Head,
}

/// What turns hidden states into logits.
enum Head {
    /// The embedding's table.
    Tied,
    /// `lm_head`.
    Separate(Linear),
    /// Nothing: the checkpoint of an embedding model may be the backbone alone.
    None,
}

/// Builds the graph that `family` describes.
pub(super) fn build(
    checkpoint: &Checkpoint,
    loader: &mut Loader<'_>,
    family: Family,
) -> Result<Box<dyn Graph>> {
    let (args, rope) = family(&checkpoint.config())?;
    args.discard_leftovers(loader);
    let is_backbone = rename_backbone(checkpoint, loader)?;
    let embed_tokens = Embedding::load(loader, "model.embed_tokens", args.vocabulary, args.hidden)?;
    let blocks = args
        .layers
        .iter()
        .enumerate()
        .map(|(i, &layer)| Block::load(loader, &format!("model.layers.{i}"), &args, layer))
        .collect::<Result<Vec<_>>>()?;
    let norm = args.load_norm(loader, "model.norm")?;
    let head = match args.tied {
        true => Head::Tied,
        false if is_backbone => Head::None,
        false => Head::Separate(Linear::load(loader, "lm_head", args.hidden, args.vocabulary, false)?),
    };
    let numerics = loader.numerics.clone();
    Ok(Box::new(UniversalDense { args, rope, numerics, embed_tokens, blocks, norm, head }))
}

/// Embedding models are published as backbones too, whose tensors lack the prefix `model.` (mlx-optiq's embedder
/// loads them so). Gives them their names; returns whether it was one.
fn rename_backbone(checkpoint: &Checkpoint, loader: &mut Loader<'_>) -> Result<bool> {
    let is_bare = !loader.weights.names().any(|name| name.starts_with("model."));
    if !is_bare || EmbeddingRecipe::open(checkpoint.dir())?.is_none() {
        return Ok(false);
    }
    loader.weights.rename(|name| Some(format!("model.{name}")))?;
    Ok(true)
}

impl UniversalDense {
    /// What the layers with `window` share in a call, by the cache of the first of them.
    fn call(&self, window: Option<i32>, length: i32, cache: &Cache) -> Result<Option<AttentionCall<'_>>> {
        let first = self.args.layers.iter().position(|layer| layer.window == window);
        first
            .and_then(|i| cache.layers.get(i))
            .map(|layer| AttentionCall::new(&self.rope, layer, length, window))
            .transpose()
    }
}

impl Graph for UniversalDense {
    fn forward(
        &self,
        tokens: &Array,
        cache: &mut Cache,
        each_layer: &mut dyn FnMut(&Array),
    ) -> Result<Array> {
        let length = tokens.dim(1)?;
        let mut h = self.embed_tokens.forward(tokens)?;
        if let Some(factor) = self.args.embedding_multiplier {
            h = h.multiply(factor)?;
        }
        let full = self.call(None, length, cache)?;
        let window = self.args.layers.iter().find_map(|layer| layer.window);
        let sliding = self.call(window, length, cache)?;
        for ((block, layer), cache) in self.blocks.iter().zip(&self.args.layers).zip(&mut cache.layers) {
            let call = if layer.window.is_some() { &sliding } else { &full };
            let Some(call) = call else { continue };
            h = block.forward(&h, call, cache)?;
            each_layer(&h);
        }
        self.norm.forward(&h)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = match &self.head {
            Head::Separate(head) => head.forward(hidden)?,
            Head::Tied => self.embed_tokens.as_linear(hidden)?,
            Head::None => {
                return Err(Error::Input(
                    "the checkpoint has no lm_head: it computes embeddings, no text".into(),
                ));
            }
        };
        Ok(match self.args.logits {
            LogitsForm::Plain => logits,
            LogitsForm::Scaled(scale) => logits.divide(scale)?,
            LogitsForm::Capped(cap) => logits.divide(cap)?.tanh()?.multiply(cap)?,
        })
    }

    fn new_cache(&self) -> Cache {
        let layer = |layer: &LayerArgs| match (&self.numerics, layer) {
            (Numerics::Kernels { kv, .. }, _) => LayerCache::Kernel(KernelKvCache::new(*kv)),
            (Numerics::Mlx, LayerArgs { window: Some(window), rotating: true, .. }) => {
                LayerCache::Rotating(RotatingKvCache::new(*window, 0))
            }
            (Numerics::Mlx, _) => LayerCache::Full(KvCache::new()),
        };
        Cache::new(self.args.layers.iter().map(layer).collect())
    }

    fn shape(&self) -> Shape {
        let args = &self.args;
        let per_token = 2 * args.kv_heads as usize * args.head_dim as usize;
        // The kernels' cache keeps all tokens.
        let rings = matches!(self.numerics, Numerics::Mlx);
        let limit = |layer: &LayerArgs| layer.window.filter(|_| rings && layer.rotating).map(|w| w as usize);
        Shape {
            vocabulary: args.vocabulary,
            hidden: args.hidden,
            layers: args.layers.len() as i32,
            max_positions: args.max_positions,
            kv: args.layers.iter().map(|layer| (per_token, limit(layer))).collect(),
        }
    }
}
