//! Dense decoder-only transformers. Reference: `mlx_lm.models.llama`.

use russet_mlx::Array;

use super::{Graph, Shape};
use crate::cache::{Cache, KernelKvCache, KvCache, LayerCache, RotatingKvCache};
use crate::layers::{
    Attention, AttentionCall, AttentionSizes, Embedding, GatedMlp, Linear, Loader, RmsNorm, Rope, project,
};
use crate::{Checkpoint, Fields, Numerics, Result};

/// The config of a llama-shaped model, with the reference's defaults.
struct Args {
    hidden: i32,
    layers: Vec<LayerType>,
    intermediate: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    norm_eps: f64,
    vocabulary: i32,
    max_positions: Option<i32>,
    attention_bias: bool,
    mlp_bias: bool,
    tied: bool,
    sliding_window: Option<i32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LayerType {
    Full,
    Sliding,
}

impl Args {
    fn llama(config: &Fields<'_>) -> Result<Self> {
        check_activation(config)?;
        let hidden = config.required_size("hidden_size")?;
        let heads = config.required_size("num_attention_heads")?;
        let kv_heads = config.size("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            let message = format!("{kv_heads} does not divide num_attention_heads {heads}");
            return Err(config.error("num_key_value_heads", message));
        }
        let head_dim = config.size("head_dim")?.unwrap_or(hidden / heads);
        if head_dim < 2 || head_dim % 2 != 0 {
            return Err(config.error("head_dim", format!("{head_dim} is not a positive even number")));
        }
        for (field, heads) in [("num_attention_heads", heads), ("num_key_value_heads", kv_heads)] {
            if heads.checked_mul(head_dim).is_none() {
                return Err(config.error(field, format!("{heads} × head_dim {head_dim} is too large")));
            }
        }
        let (layers, sliding_window) = layer_types(config)?;
        Ok(Self {
            hidden,
            layers,
            intermediate: config.required_size("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            norm_eps: config.required_positive("rms_norm_eps")?,
            vocabulary: config.required_size("vocab_size")?,
            max_positions: config.size("max_position_embeddings")?,
            attention_bias: config.flag("attention_bias")?.unwrap_or(false),
            mlp_bias: config.flag("mlp_bias")?.unwrap_or(false),
            tied: config.flag("tie_word_embeddings")?.unwrap_or(true),
            sliding_window,
        })
    }

    fn rope(&self, config: &Fields<'_>) -> Result<Rope> {
        let theta = config.positive("rope_theta")?.unwrap_or(10000.0);
        let traditional = config.flag("rope_traditional")?.unwrap_or(false);
        let scaling = config.object("rope_scaling")?;
        Rope::new(self.head_dim, theta, traditional, scaling.as_ref(), self.max_positions)
    }
}

/// The graph computes swiglu whatever the config says; a config that says otherwise is refused.
fn check_activation(config: &Fields<'_>) -> Result<()> {
    match config.text("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => {
            let message = format!("'{}' is not supported (supported: silu)", other.escape_debug());
            Err(config.error("hidden_act", message))
        }
    }
}

/// More layers than any model has: a corrupt or hostile file.
const MAX_LAYERS: i32 = 4096;

fn layer_types(config: &Fields<'_>) -> Result<(Vec<LayerType>, Option<i32>)> {
    let count = config.required_size("num_hidden_layers")?;
    if count > MAX_LAYERS {
        return Err(config.error("num_hidden_layers", format!("{count} is more than {MAX_LAYERS}")));
    }
    let Some(names) = config.texts("layer_types")? else {
        return Ok((vec![LayerType::Full; count as usize], None));
    };
    if names.len() != count as usize {
        let message = format!("has {} entries for {count} layers", names.len());
        return Err(config.error("layer_types", message));
    }
    let types = names
        .iter()
        .map(|name| match *name {
            "full_attention" => Ok(LayerType::Full),
            "sliding_attention" => Ok(LayerType::Sliding),
            other => {
                Err(config.error("layer_types", format!("unknown layer type '{}'", other.escape_debug())))
            }
        })
        .collect::<Result<Vec<_>>>()?;
    if !types.contains(&LayerType::Full) {
        return Err(config.error("layer_types", "needs at least one full_attention layer"));
    }
    let window = match types.contains(&LayerType::Sliding) {
        true => Some(config.required_size("sliding_window")?),
        false => None,
    };
    Ok((types, window))
}

struct Block {
    input_layernorm: RmsNorm,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    attention: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
}

impl Block {
    fn load(loader: &mut Loader<'_>, path: &str, args: &Args) -> Result<Self> {
        let norm = |loader: &mut Loader<'_>, name: &str| {
            RmsNorm::load(loader, &format!("{path}.{name}"), args.hidden, args.norm_eps)
        };
        let linear = |loader: &mut Loader<'_>, name: &str, heads: i32| {
            let outputs = heads * args.head_dim;
            let path = format!("{path}.self_attn.{name}");
            Linear::load(loader, &path, args.hidden, outputs, args.attention_bias)
        };
        let sizes = AttentionSizes {
            hidden: args.hidden,
            heads: args.heads,
            kv_heads: args.kv_heads,
            head_dim: args.head_dim,
        };
        let scale = f64::from(args.head_dim).powf(-0.5);
        let (attention, mlp) = (format!("{path}.self_attn"), format!("{path}.mlp"));
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            q_proj: linear(loader, "q_proj", args.heads)?,
            k_proj: linear(loader, "k_proj", args.kv_heads)?,
            v_proj: linear(loader, "v_proj", args.kv_heads)?,
            attention: Attention::load(loader, &attention, sizes, scale, args.attention_bias)?,
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            mlp: GatedMlp::load(loader, &mlp, args.hidden, args.intermediate, args.mlp_bias)?,
        })
    }

    fn forward(&self, x: &Array, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Array> {
        let qkv = project(&self.input_layernorm, [&self.q_proj, &self.k_proj, &self.v_proj], x)?;
        let h = self.attention.forward_add(&qkv, x, call, cache)?;
        self.mlp.forward_add(&self.post_attention_layernorm, &h)
    }
}

/// A dense transformer.
struct UniversalDense {
    args: Args,
    rope: Rope,
    numerics: Numerics,
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    /// `None` when tied to the embedding.
    lm_head: Option<Linear>,
}

/// Builds the graph for `model_type` llama and the types that mlx-lm maps to it.
pub(crate) fn llama(checkpoint: &Checkpoint, loader: &mut Loader<'_>) -> Result<Box<dyn Graph>> {
    let config = checkpoint.config();
    let args = Args::llama(&config)?;
    let rope = args.rope(&config)?;

    let tied = args.tied;
    loader
        .weights
        .discard(|name| name.contains("self_attn.rotary_emb.inv_freq") || (tied && name == "lm_head.weight"));
    let embed_tokens = Embedding::load(loader, "model.embed_tokens", args.vocabulary, args.hidden)?;
    let blocks = (0..args.layers.len())
        .map(|i| Block::load(loader, &format!("model.layers.{i}"), &args))
        .collect::<Result<Vec<_>>>()?;
    let norm = RmsNorm::load(loader, "model.norm", args.hidden, args.norm_eps)?;
    let lm_head = match tied {
        true => None,
        false => Some(Linear::load(loader, "lm_head", args.hidden, args.vocabulary, false)?),
    };
    let numerics = loader.numerics.clone();
    Ok(Box::new(UniversalDense { args, rope, numerics, embed_tokens, blocks, norm, lm_head }))
}

impl UniversalDense {
    /// What the layers of one type share in a call, by the cache of the first of them.
    fn call(&self, layer_type: LayerType, length: i32, cache: &Cache) -> Result<Option<AttentionCall<'_>>> {
        let window = match layer_type {
            LayerType::Full => None,
            LayerType::Sliding => self.args.sliding_window,
        };
        let first = self.args.layers.iter().position(|&t| t == layer_type);
        first
            .and_then(|i| cache.layers.get(i))
            .map(|layer| AttentionCall::new(&self.rope, layer, length, window))
            .transpose()
    }
}

impl Graph for UniversalDense {
    fn forward(&self, tokens: &Array, cache: &mut Cache) -> Result<Array> {
        let length = tokens.dim(1)?;
        let mut h = self.embed_tokens.forward(tokens)?;
        let full = self.call(LayerType::Full, length, cache)?;
        let sliding = self.call(LayerType::Sliding, length, cache)?;
        for ((block, layer_type), cache) in self.blocks.iter().zip(&self.args.layers).zip(&mut cache.layers) {
            let call = if *layer_type == LayerType::Sliding { &sliding } else { &full };
            let Some(call) = call else { continue };
            h = block.forward(&h, call, cache)?;
        }
        self.norm.forward(&h)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        match &self.lm_head {
            Some(head) => head.forward(hidden),
            None => self.embed_tokens.as_linear(hidden),
        }
    }

    fn new_cache(&self) -> Cache {
        let layer = |layer_type: &LayerType| match (&self.numerics, layer_type, self.args.sliding_window) {
            (Numerics::Kernels { kv, .. }, ..) => LayerCache::Kernel(KernelKvCache::new(*kv)),
            (Numerics::Mlx, LayerType::Sliding, Some(window)) => {
                LayerCache::Rotating(RotatingKvCache::new(window, 0))
            }
            (Numerics::Mlx, ..) => LayerCache::Full(KvCache::new()),
        };
        Cache { layers: self.args.layers.iter().map(layer).collect() }
    }

    fn shape(&self) -> Shape {
        let args = &self.args;
        let per_token = 2 * args.kv_heads as usize * args.head_dim as usize;
        let limit = |layer_type: &LayerType| match layer_type {
            LayerType::Full => None,
            // The kernels' cache keeps all tokens.
            LayerType::Sliding if matches!(self.numerics, Numerics::Kernels { .. }) => None,
            LayerType::Sliding => args.sliding_window.map(|w| w as usize),
        };
        Shape {
            vocabulary: args.vocabulary,
            hidden: args.hidden,
            layers: args.layers.len() as i32,
            max_positions: args.max_positions,
            kv: args.layers.iter().map(|t| (per_token, limit(t))).collect(),
        }
    }
}
