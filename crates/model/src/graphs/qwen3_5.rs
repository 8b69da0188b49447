//! Qwen3.5: gated delta nets with a full-attention layer every few layers, dense or with experts. Reference:
//! `mlx_lm.models.qwen3_5` and `qwen3_5_moe`.

use std::rc::Rc;

use russet_mlx::Array;

use super::{Graph, Shape, checks};
use crate::cache::{Cache, KernelKvCache, KvCache, LayerCache, RecurrentCache};
use crate::layers::{
    Activation, Attention, AttentionArgs, AttentionCall, DeltaFunctions, DeltaSizes, Embedding, ExpertSizes,
    GatedDeltaNet, GatedMlp, Linear, Loader, MlpArgs, Norm, NormKind, QkNorm, Residual, Rope, SparseArgs,
    SparseMlp, project,
};
use crate::{Checkpoint, Error, Fields, Numerics, Result, Weights};

/// The text config, with the reference's defaults.
struct Args {
    hidden: i32,
    layers: i32,
    /// Every so many layers, the last of them attends in full.
    interval: i32,
    intermediate: i32,
    /// The experts that all layers have in the place of a dense MLP.
    experts: Option<SparseArgs>,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    delta: DeltaSizes,
    norm_eps: f64,
    vocabulary: i32,
    max_positions: i32,
    attention_bias: bool,
    tied: bool,
}

/// Elements of one layer's state; more would not be a state of fixed, small size.
const MAX_STATE: i64 = 1 << 28;

impl Args {
    /// `sparse` configs must say how many experts there are.
    fn read(config: &Fields<'_>, sparse: bool) -> Result<Self> {
        let size = |field: &str, default: i32| Ok::<_, Error>(config.size(field)?.unwrap_or(default));
        if let Some(other) = config.text("hidden_act")?.filter(|&name| name != "silu") {
            let message = format!("'{}' is not supported (supported: silu)", other.escape_debug());
            return Err(config.error("hidden_act", message));
        }
        let hidden = size("hidden_size", 4096)?;
        let layers = config.layers()?.unwrap_or(32);
        let heads = size("num_attention_heads", 32)?;
        let kv_heads = size("num_key_value_heads", 8)?;
        if heads % kv_heads != 0 {
            let message = format!("{kv_heads} does not divide num_attention_heads {heads}");
            return Err(config.error("num_key_value_heads", message));
        }
        let head_dim = size("head_dim", hidden / heads)?;
        // Queries lie beside their gates.
        if heads.checked_mul(2).and_then(|n| n.checked_mul(head_dim)).is_none() {
            let message = format!("2 × {heads} × head_dim {head_dim} is too large");
            return Err(config.error("num_attention_heads", message));
        }
        Ok(Self {
            hidden,
            layers,
            interval: Self::interval(config, layers)?,
            intermediate: size("intermediate_size", 14336)?,
            experts: Self::experts(config, hidden, sparse)?,
            heads,
            kv_heads,
            head_dim,
            delta: Self::delta(config, hidden)?,
            norm_eps: config.positive("rms_norm_eps")?.unwrap_or(1e-6),
            vocabulary: size("vocab_size", 151_936)?,
            max_positions: size("max_position_embeddings", 131_072)?,
            attention_bias: config.flag("attention_bias")?.unwrap_or(false),
            tied: config.flag("tie_word_embeddings")?.unwrap_or(false),
        })
    }

    /// `full_attention_interval`. The reference reads nothing else; a list of layer types must say the same.
    fn interval(config: &Fields<'_>, layers: i32) -> Result<i32> {
        let interval = config.size("full_attention_interval")?.unwrap_or(4);
        // The reference fails without layers of both kinds.
        if interval < 2 || interval > layers {
            let kind = if interval < 2 { "linear" } else { "full" };
            let message = format!("{interval} leaves none of {layers} layers with {kind} attention");
            return Err(config.error("full_attention_interval", message));
        }
        if let Some(types) = config.texts("layer_types")? {
            if types.len() != layers as usize {
                let message = format!("has {} entries for {layers} layers", types.len());
                return Err(config.error("layer_types", message));
            }
            let expected = |i| if is_full(i, interval) { "full_attention" } else { "linear_attention" };
            if let Some((i, name)) = (0..).zip(types).find(|&(i, name)| name != expected(i)) {
                let (name, expected) = (name.escape_debug(), expected(i));
                let message = format!(
                    "layer {i} is '{name}', full_attention_interval {interval} makes it '{expected}'"
                );
                return Err(config.error("layer_types", message));
            }
        }
        Ok(interval)
    }

    fn experts(config: &Fields<'_>, hidden: i32, required: bool) -> Result<Option<SparseArgs>> {
        let count = match required {
            true => config.required_count("num_experts")?,
            false => config.count("num_experts")?.unwrap_or(0),
        };
        if count == 0 {
            return Ok(None);
        }
        // Every layer has experts in the reference, whatever these fields say.
        if let Some(step) = config.size("decoder_sparse_step")?.filter(|&step| step != 1) {
            let message = format!("{step} is not supported (supported: 1)");
            return Err(config.error("decoder_sparse_step", message));
        }
        if config.numbers("mlp_only_layers")?.is_some_and(|layers| !layers.is_empty()) {
            return Err(config.error("mlp_only_layers", "is not supported: all layers have experts"));
        }
        let chosen = config.required_size("num_experts_per_tok")?;
        checks::chosen_experts(config, "num_experts_per_tok", chosen, count)?;
        Ok(Some(SparseArgs {
            experts: ExpertSizes {
                count,
                hidden,
                intermediate: config.required_size("moe_intermediate_size")?,
            },
            chosen,
            normalize: config.flag("norm_topk_prob")?.unwrap_or(true),
            shared_intermediate: Some(config.required_size("shared_expert_intermediate_size")?),
        }))
    }

    fn delta(config: &Fields<'_>, hidden: i32) -> Result<DeltaSizes> {
        let size = |field: &str, default: i32| Ok::<_, Error>(config.size(field)?.unwrap_or(default));
        let sizes = DeltaSizes {
            hidden,
            key_heads: size("linear_num_key_heads", 16)?,
            value_heads: size("linear_num_value_heads", 64)?,
            key_dim: size("linear_key_head_dim", 192)?,
            value_dim: size("linear_value_head_dim", 128)?,
            taps: size("linear_conv_kernel_dim", 4)?,
        };
        let DeltaSizes { key_heads, value_heads, key_dim, value_dim, taps, .. } = sizes;
        if value_heads % key_heads != 0 {
            let message = format!("{key_heads} does not divide linear_num_value_heads {value_heads}");
            return Err(config.error("linear_num_key_heads", message));
        }
        if taps < 2 {
            return Err(config.error("linear_conv_kernel_dim", format!("{taps} is less than 2")));
        }
        let [key_heads, value_heads, key_dim, value_dim, taps] =
            [key_heads, value_heads, key_dim, value_dim, taps].map(i64::from);
        let channels = 2 * key_heads * key_dim + value_heads * value_dim;
        let memory = (value_heads * value_dim).saturating_mul(key_dim);
        if memory > MAX_STATE || channels.saturating_mul(taps) > MAX_STATE {
            let message = format!(
                "{value_heads} heads, of {value_dim} and keys of {key_dim} values each, need too large a state"
            );
            return Err(config.error("linear_num_value_heads", message));
        }
        Ok(sizes)
    }

    fn is_full(&self, layer: i32) -> bool {
        is_full(layer, self.interval)
    }
}

fn is_full(layer: i32, interval: i32) -> bool {
    (layer + 1) % interval == 0
}

/// The rotary embedding that `rope_parameters` describes.
fn rope(config: &Fields<'_>, args: &Args) -> Result<Rope> {
    let parameters = config.object("rope_parameters")?;
    let Some(parameters) = parameters.filter(|p| p.iter().next().is_some()) else {
        for field in ["rope_theta", "rope_scaling", "partial_rotary_factor"] {
            if config.get(field).is_some() {
                return Err(config.error(field, "is not read: it belongs into rope_parameters"));
            }
        }
        return Rope::new(rotary_dims(config, args, 0.25)?, 100_000.0, false, None, Some(args.max_positions));
    };
    let fraction = parameters.positive("partial_rotary_factor")?.unwrap_or(0.25);
    let theta = parameters.positive("rope_theta")?.unwrap_or(100_000.0);
    let dims = rotary_dims(&parameters, args, fraction)?;
    Rope::new(dims, theta, false, Some(&parameters), Some(args.max_positions))
}

fn rotary_dims(parameters: &Fields<'_>, args: &Args, fraction: f64) -> Result<i32> {
    let dims = (f64::from(args.head_dim) * fraction) as i32;
    if fraction > 1.0 || dims < 2 || dims % 2 != 0 {
        let message = format!("{fraction} of head_dim {} is not a positive even number of it", args.head_dim);
        return Err(parameters.error("partial_rotary_factor", message));
    }
    Ok(dims)
}

struct Block {
    input_layernorm: Norm,
    mixer: Mixer,
    post_attention_layernorm: Norm,
    mlp: Mlp,
}

enum Mlp {
    Dense(GatedMlp),
    Sparse(SparseMlp),
}

enum Mixer {
    Linear(GatedDeltaNet),
    Full { q_proj: Linear, k_proj: Linear, v_proj: Linear, attention: Attention },
}

impl Mixer {
    fn full(loader: &mut Loader<'_>, path: &str, args: &Args) -> Result<Self> {
        let Args { hidden, heads, kv_heads, head_dim, attention_bias, .. } = *args;
        let mut linear = |name: &str, outputs| {
            Linear::load(loader, &format!("{path}.{name}"), hidden, outputs, attention_bias)
        };
        let (q_proj, k_proj) =
            (linear("q_proj", 2 * heads * head_dim)?, linear("k_proj", kv_heads * head_dim)?);
        let v_proj = linear("v_proj", kv_heads * head_dim)?;
        let attention = AttentionArgs {
            hidden,
            heads,
            kv_heads,
            head_dim,
            scale: f64::from(head_dim).powf(-0.5),
            rotary: true,
            qk_norm: QkNorm::PerHead { eps: args.norm_eps },
            value_norm: None,
            softcap: None,
            output_gate: true,
            output_bias: attention_bias,
        };
        Ok(Self::Full { q_proj, k_proj, v_proj, attention: Attention::load(loader, path, attention)? })
    }
}

impl Block {
    fn load(
        loader: &mut Loader<'_>,
        path: &str,
        full: bool,
        args: &Args,
        functions: &Rc<DeltaFunctions>,
    ) -> Result<Self> {
        let norm = |loader: &mut Loader<'_>, name: &str| {
            Norm::load(loader, &format!("{path}.{name}"), NormKind::Rms, args.hidden, args.norm_eps)
        };
        let dense = MlpArgs {
            hidden: args.hidden,
            intermediate: args.intermediate,
            bias: false,
            activation: Activation::Silu,
        };
        let mlp = format!("{path}.mlp");
        let mlp = match args.experts {
            None => Mlp::Dense(GatedMlp::load(loader, &mlp, dense)?),
            Some(experts) => Mlp::Sparse(SparseMlp::load(loader, &mlp, experts)?),
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            mixer: match full {
                true => Mixer::full(loader, &format!("{path}.self_attn"), args)?,
                false => Mixer::Linear(GatedDeltaNet::load(
                    loader,
                    &format!("{path}.linear_attn"),
                    args.delta,
                    args.norm_eps,
                    functions,
                )?),
            },
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            mlp,
        })
    }

    fn forward(&self, x: &Array, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Array> {
        let h = match &self.mixer {
            Mixer::Linear(net) => net.forward_add(&self.input_layernorm, x, cache)?,
            Mixer::Full { q_proj, k_proj, v_proj, attention } => {
                let qkv = project(Some(&self.input_layernorm), [q_proj, k_proj, v_proj], x)?;
                attention.forward_add(&qkv, x, &Residual::Plain, call, cache)?
            }
        };
        let norm = &self.post_attention_layernorm;
        match &self.mlp {
            Mlp::Dense(mlp) => mlp.forward_add(Some(norm), &h, &Residual::Plain),
            Mlp::Sparse(mlp) => mlp.forward_add(norm, &h),
        }
    }
}

/// A Qwen3.5 model without its vision tower.
struct Qwen35 {
    args: Args,
    rope: Rope,
    numerics: Numerics,
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    /// `None` when tied to the embedding.
    lm_head: Option<Linear>,
}

/// Builds the graph for `model_type` qwen3_5 and qwen3_5_moe.
pub(crate) fn qwen3_5(checkpoint: &Checkpoint, loader: &mut Loader<'_>) -> Result<Box<dyn Graph>> {
    rename(loader.weights)?;
    Ok(Box::new(Qwen35::load(checkpoint, loader, "language_model.")?))
}

/// Builds the graph for `model_type` qwen3_5_text and qwen3_5_moe_text, whose tensors have no prefix
/// (`optiq.mlx_lm_patches.qwen3_5_text`).
pub(crate) fn qwen3_5_text(checkpoint: &Checkpoint, loader: &mut Loader<'_>) -> Result<Box<dyn Graph>> {
    Ok(Box::new(Qwen35::load(checkpoint, loader, "")?))
}

/// Drops the vision tower and gives the tensors of the hub's checkpoints the names of converted ones.
fn rename(weights: &mut Weights) -> Result<()> {
    weights.rename(|name| {
        if name.starts_with("vision_tower") || name.starts_with("model.visual") {
            None
        } else if let Some(rest) = name.strip_prefix("model.language_model") {
            Some(format!("language_model.model{rest}"))
        } else if name.starts_with("language_model.") {
            Some(name.to_owned())
        } else {
            Some(format!("language_model.{name}"))
        }
    })
}

/// Brings the tensors of the hub's checkpoints into the form of converted ones. Their convolutions tell: those
/// of the hub are `[channels, 1, taps]`, and its norms store one less than the gain.
fn convert(weights: &mut Weights, args: &Args, prefix: &str) -> Result<()> {
    let is_raw_conv = |name: &str, array: &Array| {
        name.contains("conv1d.weight") && array.shape().last().is_some_and(|&last| last != 1)
    };
    const NORMS: [&str; 5] = [
        ".input_layernorm.weight",
        ".post_attention_layernorm.weight",
        "model.norm.weight",
        ".q_norm.weight",
        ".k_norm.weight",
    ];
    let raw = weights.names().any(|name| weights.get(name).is_some_and(|array| is_raw_conv(name, array)));
    weights.discard(|name| name.contains("mtp.") || (args.tied && name == format!("{prefix}lm_head.weight")));
    if raw {
        weights.replace(|name, array| {
            if is_raw_conv(name, array) && array.ndim() == 3 {
                array.move_axis(2, 1).map(Some)
            } else if NORMS.iter().any(|norm| name.ends_with(norm)) && array.ndim() == 1 {
                array.add(1.0).map(Some)
            } else {
                Ok(None)
            }
        })?;
    }
    if let Some(experts) = args.experts {
        // One by one only where mlx-optiq mends the reference (`optiq.mlx_lm_patches.qwen3_5_moe_unfused`).
        for layer in 0..args.layers {
            let mlp = format!("{prefix}model.layers.{layer}.mlp");
            weights.stack_experts(&mlp, experts.experts.count)?;
        }
        weights.split_experts("switch_mlp")?;
    }
    Ok(())
}

impl Qwen35 {
    fn load(checkpoint: &Checkpoint, loader: &mut Loader<'_>, prefix: &str) -> Result<Self> {
        let sparse = checkpoint.model_type()?.starts_with("qwen3_5_moe");
        let config = checkpoint.config();
        let config = config.object("text_config")?.unwrap_or(config);
        let args = Args::read(&config, sparse)?;
        let rope = rope(&config, &args)?;
        convert(loader.weights, &args, prefix)?;

        let Args { hidden, vocabulary, norm_eps, .. } = args;
        let model = format!("{prefix}model");
        let embed_tokens = Embedding::load(loader, &format!("{model}.embed_tokens"), vocabulary, hidden)?;
        let functions = Rc::new(DeltaFunctions::new()?);
        let blocks = (0..args.layers)
            .map(|i| Block::load(loader, &format!("{model}.layers.{i}"), args.is_full(i), &args, &functions))
            .collect::<Result<Vec<_>>>()?;
        let norm = Norm::load(loader, &format!("{model}.norm"), NormKind::Rms, hidden, norm_eps)?;
        let lm_head = match args.tied {
            true => None,
            false => Some(Linear::load(loader, &format!("{prefix}lm_head"), hidden, vocabulary, false)?),
        };
        let numerics = loader.numerics.clone();
        Ok(Self { args, rope, numerics, embed_tokens, blocks, norm, lm_head })
    }

    /// What the full-attention layers share in a call with `length` new tokens.
    fn call(&self, length: i32, cache: &Cache) -> Result<AttentionCall<'_>> {
        let first_full = cache.layers.get(self.args.interval as usize - 1);
        let first_full =
            first_full.ok_or_else(|| Error::Input("the cache was made for another model".into()))?;
        AttentionCall::new(&self.rope, first_full, length, None)
    }
}

impl Graph for Qwen35 {
    fn forward(
        &self,
        tokens: &Array,
        cache: &mut Cache,
        each_layer: &mut dyn FnMut(&Array),
    ) -> Result<Array> {
        let mut h = self.embed_tokens.forward(tokens)?;
        let call = self.call(tokens.dim(1)?, cache)?;
        for (block, cache) in self.blocks.iter().zip(&mut cache.layers) {
            h = block.forward(&h, &call, cache)?;
            each_layer(&h);
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
        let layer = |i| match (self.args.is_full(i), &self.numerics) {
            (false, _) => LayerCache::Recurrent(RecurrentCache::new()),
            (true, Numerics::Mlx) => LayerCache::Full(KvCache::new()),
            (true, Numerics::Kernels { kv, .. }) => LayerCache::Kernel(KernelKvCache::new(*kv)),
        };
        Cache::new((0..self.args.layers).map(layer).collect())
    }

    fn shape(&self) -> Shape {
        let args = &self.args;
        let per_token = |i| if args.is_full(i) { 2 * (args.kv_heads * args.head_dim) as usize } else { 0 };
        Shape {
            vocabulary: args.vocabulary,
            hidden: args.hidden,
            layers: args.layers,
            max_positions: Some(args.max_positions),
            kv: (0..args.layers).map(|i| (per_token(i), None)).collect(),
        }
    }
}
