//! Gemma 4, its text model: sliding and full layers with heads of different widths. Larger models use keys
//! as values or have a mixture of experts in each layer; smaller ones share keys and values between layers
//! and have an input of its own for each layer. Reference: `mlx_lm.models.gemma4_text`, and
//! `mlx_lm.models.gemma4` for checkpoints whose text model lies inside of a larger one.

use std::path::Path;

use russet_mlx::Array;
use serde_json::json;

use super::{Graph, Shape, checks};
use crate::cache::{Cache, KernelKvCache, KvCache, LayerCache, RotatingKvCache};
use crate::layers::{
    Activation, Attention, AttentionArgs, AttentionCall, Embedding, ExpertSizes, Experts, GatedActivation,
    GatedMlp, Linear, Loader, MlpArgs, Norm, NormKind, PerLayerInput, QkNorm, Residual, Rope, SharedKv,
    Softcap, project, top_k,
};
use crate::{Checkpoint, Error, Fields, Numerics, Result, Weights};

/// The text config, with the reference's defaults.
struct Args {
    hidden: i32,
    layers: Vec<LayerArgs>,
    heads: i32,
    norm_eps: f64,
    vocabulary: i32,
    max_positions: i32,
    sliding_window: i32,
    per_layer_inputs: Option<PerLayerSizes>,
    experts: Option<ExpertArgs>,
    softcap: Option<f64>,
    tied: bool,
}

/// In what a layer differs from others.
#[derive(Clone, Copy)]
struct LayerArgs {
    kind: LayerType,
    head_dim: i32,
    kv_heads: i32,
    /// Where keys and values come from.
    kv: KvSource,
    /// Whether later layers use its keys and values too.
    donor: bool,
    intermediate: i32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LayerType {
    Full,
    Sliding,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum KvSource {
    /// `k_proj` and `v_proj`.
    Own,
    /// `k_proj` for both; norms and positions differ.
    KeysAsValues,
    /// The last layer of the same type that has its own.
    Shared,
}

#[derive(Clone, Copy)]
struct PerLayerSizes {
    vocabulary: i32,
    width: i32,
}

#[derive(Clone, Copy)]
struct ExpertArgs {
    sizes: ExpertSizes,
    chosen: i32,
}

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

impl Args {
    /// `text` is the config of the text model, `vocabulary` what the config around it says.
    fn new(text: &Fields<'_>, vocabulary: i32) -> Result<Self> {
        checks::activation(text, "hidden_activation", &["gelu_pytorch_tanh"])?;
        let hidden = text.size("hidden_size")?.unwrap_or(1536);
        let heads = text.size("num_attention_heads")?.unwrap_or(8);
        let layers = Self::layers(text, heads)?;
        Ok(Self {
            hidden,
            heads,
            norm_eps: text.positive("rms_norm_eps")?.unwrap_or(1e-6),
            vocabulary,
            max_positions: text.size("max_position_embeddings")?.unwrap_or(131_072),
            sliding_window: text.size("sliding_window")?.unwrap_or(512),
            per_layer_inputs: Self::per_layer_inputs(text, vocabulary, layers.len() as i32)?,
            experts: Self::experts(text, hidden)?,
            softcap: match text.is_null("final_logit_softcapping") {
                true => None,
                false => Some(text.positive("final_logit_softcapping")?.unwrap_or(30.0)),
            },
            tied: flag(text, "tie_word_embeddings", true)?,
            layers,
        })
    }

    fn layers(text: &Fields<'_>, heads: i32) -> Result<Vec<LayerArgs>> {
        let count = text.layers()?.unwrap_or(35) as usize;
        let kinds = layer_types(text, count)?;
        let shared = text.count("num_kv_shared_layers")?.unwrap_or(20) as usize;
        let own = count.checked_sub(shared).filter(|&n| n > 0).ok_or_else(|| {
            let message = format!("{shared} of {count} layers leave none with keys and values of its own");
            text.error("num_kv_shared_layers", message)
        })?;
        let keys_as_values = flag(text, "attention_k_eq_v", false)?;
        let head_dim = text.size("head_dim")?.unwrap_or(256);
        let global_head_dim = match count_or_null(text, "global_head_dim")?.unwrap_or(512) {
            0 => head_dim,
            dim => dim,
        };
        let kv_heads = text.size("num_key_value_heads")?.unwrap_or(1);
        let global_kv_heads = text.size("num_global_key_value_heads")?.filter(|_| keys_as_values);
        for (field, dim) in [("head_dim", head_dim), ("global_head_dim", global_head_dim)] {
            checks::head_dim(text, field, dim, heads)?;
        }
        checks::kv_heads(text, "num_key_value_heads", kv_heads, heads)?;
        if let Some(kv_heads) = global_kv_heads {
            checks::kv_heads(text, "num_global_key_value_heads", kv_heads, heads)?;
        }
        let intermediate = text.size("intermediate_size")?.unwrap_or(6144);
        let double_wide = flag(text, "use_double_wide_mlp", true)?;

        let layer = |(i, &kind): (usize, &LayerType)| {
            let full = kind == LayerType::Full;
            if i >= own && !kinds[..own].contains(&kind) {
                let message = format!(
                    "layer {i} shares keys and values, but none of the {own} layers before the shared ones is \
                     {}",
                    kind.name()
                );
                return Err(text.error("num_kv_shared_layers", message));
            }
            Ok(LayerArgs {
                kind,
                head_dim: if full { global_head_dim } else { head_dim },
                kv_heads: global_kv_heads.filter(|_| full).unwrap_or(kv_heads),
                kv: match i < own {
                    true if keys_as_values && full => KvSource::KeysAsValues,
                    true => KvSource::Own,
                    false => KvSource::Shared,
                },
                donor: kinds[..own].iter().rposition(|&k| k == kind) == Some(i)
                    && kinds[own..].contains(&kind),
                intermediate: if i >= own && double_wide { 2 * intermediate } else { intermediate },
            })
        };
        kinds.iter().enumerate().map(layer).collect()
    }

    fn per_layer_inputs(text: &Fields<'_>, vocabulary: i32, layers: i32) -> Result<Option<PerLayerSizes>> {
        let field = "hidden_size_per_layer_input";
        let width = count_or_null(text, field)?.unwrap_or(256);
        if width == 0 {
            return Ok(None);
        }
        if layers.checked_mul(width).is_none() {
            return Err(text.error(field, format!("{width} for each of {layers} layers is too large")));
        }
        let sizes =
            PerLayerSizes { vocabulary: text.size("vocab_size_per_layer_input")?.unwrap_or(262_144), width };
        if sizes.vocabulary < vocabulary {
            let message = format!("{} is less than vocab_size {vocabulary}", sizes.vocabulary);
            return Err(text.error("vocab_size_per_layer_input", message));
        }
        Ok(Some(sizes))
    }

    fn experts(text: &Fields<'_>, hidden: i32) -> Result<Option<ExpertArgs>> {
        if !flag(text, "enable_moe_block", false)? {
            return Ok(None);
        }
        let count = text.required_size("num_experts")?;
        let intermediate = text.required_size("moe_intermediate_size")?;
        let chosen = text.required_size("top_k_experts")?;
        checks::chosen_experts(text, "top_k_experts", chosen, count)?;
        Ok(Some(ExpertArgs { sizes: ExpertSizes { count, hidden, intermediate }, chosen }))
    }

    /// The layers that have keys and values of their own.
    fn own_layers(&self) -> &[LayerArgs] {
        let own = self.layers.iter().take_while(|layer| layer.kv != KvSource::Shared).count();
        &self.layers[..own]
    }

    fn rope(&self, text: &Fields<'_>, kind: LayerType) -> Result<Option<Rope>> {
        let Some(head_dim) = self.layers.iter().find(|layer| layer.kind == kind).map(|l| l.head_dim) else {
            return Ok(None);
        };
        let default = match kind {
            LayerType::Full => {
                json!({"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"})
            }
            LayerType::Sliding => json!({"rope_theta": 1e4}),
        };
        let parameters = match text.object("rope_parameters")? {
            Some(parameters) => parameters.object(kind.name())?,
            None => default.as_object().map(|map| Fields::new(Path::new("config.json"), map)),
        };
        let theta = match &parameters {
            Some(parameters) => parameters.positive("rope_theta")?,
            None => None,
        };
        let traditional = flag(text, "rope_traditional", false)?;
        let max_positions = Some(self.max_positions);
        Rope::new(head_dim, theta.unwrap_or(1e4), traditional, parameters.as_ref(), max_positions).map(Some)
    }
}

/// A flag that the reference takes for false where it is null.
fn flag(text: &Fields<'_>, field: &str, default: bool) -> Result<bool> {
    Ok(text.flag(field)?.unwrap_or(default && !text.is_null(field)))
}

/// A number that the reference takes for 0 where it is null.
fn count_or_null(text: &Fields<'_>, field: &str) -> Result<Option<i32>> {
    if text.is_null(field) { Ok(Some(0)) } else { text.count(field) }
}

fn layer_types(text: &Fields<'_>, count: usize) -> Result<Vec<LayerType>> {
    let Some(names) = text.texts("layer_types")? else {
        let pattern = text.size("sliding_window_pattern")?.unwrap_or(5) as usize;
        let kind = |i: usize| if i % pattern == pattern - 1 { LayerType::Full } else { LayerType::Sliding };
        return Ok((0..count).map(kind).collect());
    };
    if names.len() != count {
        let message = format!("has {} entries for {count} layers", names.len());
        return Err(text.error("layer_types", message));
    }
    let kind = |name: &&str| match *name {
        FULL => Ok(LayerType::Full),
        SLIDING => Ok(LayerType::Sliding),
        other => Err(text.error("layer_types", format!("unknown layer type '{}'", other.escape_debug()))),
    };
    names.iter().map(kind).collect()
}

impl LayerType {
    fn name(self) -> &'static str {
        match self {
            Self::Full => FULL,
            Self::Sliding => SLIDING,
        }
    }
}

/// What the reference does to the names and shapes of tensors. `nested` is a checkpoint of a larger model;
/// layers from `own` on have no keys and values of their own.
fn sanitize(weights: &mut Weights, nested: bool, own: usize) -> Result<()> {
    const UNUSED: [&str; 5] = ["self_attn.rotary_emb", "input_max", "input_min", "output_max", "output_min"];
    weights.rename(|name| {
        let name = if nested { text_name(name)? } else { name.to_owned() };
        if UNUSED.iter().any(|part| name.contains(part)) || is_shared_projection(&name, own) {
            return None;
        }
        Some(name)
    })?;
    weights.split_experts("experts.switch_glu")
}

/// The name of a tensor of the text model; none for the other parts of a larger model.
fn text_name(name: &str) -> Option<String> {
    const OTHER_PARTS: [&str; 6] = [
        "vision_tower",
        "multi_modal_projector",
        "audio_tower",
        "embed_audio",
        "embed_vision",
        "vision_embedder",
    ];
    let inner = name.strip_prefix("model.");
    let rest = inner.unwrap_or(name);
    if OTHER_PARTS.iter().any(|part| rest.starts_with(part)) {
        return None;
    }
    Some(match inner {
        Some(inner) if inner.starts_with("language_model") => {
            inner.replace("language_model.", "language_model.model.")
        }
        _ => rest.to_owned(),
    })
}

/// Whether a tensor is of keys or values of a layer that uses those of another.
fn is_shared_projection(name: &str, own: usize) -> bool {
    const PARTS: [&str; 3] = [".self_attn.k_proj", ".self_attn.v_proj", ".self_attn.k_norm"];
    let layer = name.split("layers.").nth(1).and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    PARTS.iter().any(|part| name.contains(part)) && layer.is_some_and(|layer| layer >= own)
}

/// The reference compiles the activation and the multiplication after it as one.
fn geglu() -> Result<GatedActivation> {
    GatedActivation::whole(Activation::GeluTanh)
}

/// Picks experts for each token, by the token's direction alone.
struct Router {
    norm: Norm,
    proj: Linear,
    per_expert_scale: Array,
    chosen: i32,
}

impl Router {
    fn load(loader: &mut Loader<'_>, path: &str, args: &Args, experts: ExpertArgs) -> Result<Self> {
        let count = experts.sizes.count;
        let factor = f64::from(args.hidden).powf(-0.5);
        Ok(Self {
            norm: Norm::load_scaled(loader, &format!("{path}.scale"), factor, args.hidden, args.norm_eps)?,
            proj: Linear::load(loader, &format!("{path}.proj"), args.hidden, count, false)?,
            per_expert_scale: loader.weights.take(&format!("{path}.per_expert_scale"), &[count])?.array,
            chosen: experts.chosen,
        })
    }

    /// The chosen experts and their weights, `[batch, seq, chosen]` each.
    fn forward(&self, x: &Array) -> Result<[Array; 2]> {
        let [scores] = project(Some(&self.norm), [&self.proj], x)?;
        let (indices, scores) = top_k(&scores, self.chosen)?;
        let weights = scores.softmax(-1, false)?.multiply(&self.per_expert_scale.take(&indices, 0)?)?;
        Ok([indices, weights])
    }
}

/// Experts beside the dense MLP, and the norms that join the two.
struct Mixture {
    post_norm_1: Norm,
    router: Router,
    pre_norm_2: Norm,
    experts: Experts,
    post_norm_2: Norm,
}

struct Block {
    input_layernorm: Norm,
    q_proj: Linear,
    k_proj: Option<Linear>,
    v_proj: Option<Linear>,
    attention: Attention,
    post_attention: Residual,
    pre_feedforward_layernorm: Norm,
    mlp: GatedMlp,
    mixture: Option<Mixture>,
    post_feedforward: Residual,
    per_layer_input: Option<PerLayerInput>,
    layer_scalar: Array,
}

/// Whose keys and values a layer attends to.
enum Kv<'a> {
    Own(&'a mut LayerCache),
    Shared(&'a SharedKv),
}

impl Block {
    fn load(loader: &mut Loader<'_>, path: &str, args: &Args, layer: LayerArgs) -> Result<Self> {
        let LayerArgs { head_dim, kv_heads, kv, intermediate, .. } = layer;
        let (hidden, eps) = (args.hidden, args.norm_eps);
        let norm = |loader: &mut Loader<'_>, name: &str| {
            Norm::load(loader, &format!("{path}.{name}"), NormKind::Rms, hidden, eps)
        };
        let linear = |loader: &mut Loader<'_>, name: &str, heads: i32| {
            Linear::load(loader, &format!("{path}.self_attn.{name}"), hidden, heads * head_dim, false)
        };
        let own_keys = kv != KvSource::Shared;
        let attention = AttentionArgs {
            hidden,
            heads: args.heads,
            kv_heads,
            head_dim,
            scale: 1.0,
            rotary: true,
            qk_norm: if own_keys { QkNorm::PerHead { eps } } else { QkNorm::PerQueryHead { eps } },
            value_norm: own_keys.then_some(eps),
            softcap: None,
            output_gate: false,
            output_bias: false,
        };
        let mlp = MlpArgs { hidden, intermediate, bias: false, activation: Activation::GeluTanh };
        let mlp = GatedMlp::load(loader, &format!("{path}.mlp"), mlp)?.gated_by(geglu()?);
        let mixture = match args.experts {
            None => None,
            Some(experts) => Some(Mixture {
                post_norm_1: norm(loader, "post_feedforward_layernorm_1")?,
                router: Router::load(loader, &format!("{path}.router"), args, experts)?,
                pre_norm_2: norm(loader, "pre_feedforward_layernorm_2")?,
                experts: Experts::load(
                    loader,
                    &format!("{path}.experts.switch_glu"),
                    experts.sizes,
                    geglu()?,
                )?,
                post_norm_2: norm(loader, "post_feedforward_layernorm_2")?,
            }),
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            q_proj: linear(loader, "q_proj", args.heads)?,
            k_proj: own_keys.then(|| linear(loader, "k_proj", kv_heads)).transpose()?,
            v_proj: (kv == KvSource::Own).then(|| linear(loader, "v_proj", kv_heads)).transpose()?,
            attention: Attention::load(loader, &format!("{path}.self_attn"), attention)?,
            post_attention: Residual::Norm(norm(loader, "post_attention_layernorm")?),
            pre_feedforward_layernorm: norm(loader, "pre_feedforward_layernorm")?,
            mlp,
            mixture,
            post_feedforward: Residual::Norm(norm(loader, "post_feedforward_layernorm")?),
            per_layer_input: args
                .per_layer_inputs
                .map(|sizes| PerLayerInput::load(loader, path, hidden, sizes.width, eps))
                .transpose()?,
            layer_scalar: loader.weights.take(&format!("{path}.layer_scalar"), &[1])?.array,
        })
    }

    /// `inputs` are those of all layers, of which this is number `layer`.
    fn forward(
        &self,
        x: &Array,
        call: &AttentionCall<'_>,
        kv: Kv<'_>,
        inputs: Option<(&Array, i32)>,
    ) -> Result<Array> {
        let norm = Some(&self.input_layernorm);
        let h = match kv {
            Kv::Shared(kv) => {
                let [queries] = project(norm, [&self.q_proj], x)?;
                self.attention.forward_shared_add(&queries, x, &self.post_attention, call, kv)?
            }
            Kv::Own(cache) => {
                let qkv = self.project(norm, x)?;
                self.attention.forward_add(&qkv, x, &self.post_attention, call, cache)?
            }
        };
        let norm = Some(&self.pre_feedforward_layernorm);
        let mut h = match &self.mixture {
            None => self.mlp.forward_add(norm, &h, &self.post_feedforward)?,
            Some(mixture) => {
                let dense = self.mlp.forward_add(norm, &h, &Residual::Replaced)?;
                self.post_feedforward.add(&h, &mixture.forward(&dense, &h)?)?
            }
        };
        if let (Some(own), Some((inputs, layer))) = (&self.per_layer_input, inputs) {
            h = own.forward_add(&h, inputs, layer)?;
        }
        Ok(h.multiply(&self.layer_scalar)?)
    }

    fn project(&self, norm: Option<&Norm>, x: &Array) -> Result<[Array; 3]> {
        match (&self.k_proj, &self.v_proj) {
            (Some(k_proj), Some(v_proj)) => project(norm, [&self.q_proj, k_proj, v_proj], x),
            (Some(k_proj), None) => {
                let [queries, keys] = project(norm, [&self.q_proj, k_proj], x)?;
                Ok([queries, keys.clone(), keys])
            }
            (None, _) => Err(Error::Input("the layer has no keys and values of its own".into())),
        }
    }
}

impl Mixture {
    /// `dense` is what the dense MLP makes of `x`.
    fn forward(&self, dense: &Array, x: &Array) -> Result<Array> {
        let dense = self.post_norm_1.forward(dense)?;
        let [indices, weights] = self.router.forward(x)?;
        let sparse = self.experts.forward(&self.pre_norm_2.forward(x)?, &indices, &weights)?;
        Ok(dense.add(&self.post_norm_2.forward(&sparse)?)?)
    }
}

/// What gives each layer an input of its own.
struct PerLayerInputs {
    embed_tokens: Embedding,
    model_projection: Linear,
    projection_norm: Norm,
    layers: i32,
    sizes: PerLayerSizes,
    hidden: i32,
}

impl PerLayerInputs {
    fn load(loader: &mut Loader<'_>, path: &str, args: &Args, sizes: PerLayerSizes) -> Result<Self> {
        let layers = args.layers.len() as i32;
        let columns = layers * sizes.width;
        let (table, projection) = ("embed_tokens_per_layer", "per_layer_model_projection");
        let norm = format!("{path}.per_layer_projection_norm");
        Ok(Self {
            embed_tokens: Embedding::load(loader, &format!("{path}.{table}"), sizes.vocabulary, columns)?,
            model_projection: Linear::load(
                loader,
                &format!("{path}.{projection}"),
                args.hidden,
                columns,
                false,
            )?,
            projection_norm: Norm::load(loader, &norm, NormKind::Rms, sizes.width, args.norm_eps)?,
            layers,
            sizes,
            hidden: args.hidden,
        })
    }

    /// `[batch, seq, layers, width]` of token ids and the scaled embeddings.
    fn forward(&self, tokens: &Array, embeddings: &Array) -> Result<Array> {
        let split = |x: Array| x.unflatten(-1, [self.layers, self.sizes.width]);
        let width = f64::from(self.sizes.width);
        let inputs = split(self.embed_tokens.forward(tokens)?.multiply(width.sqrt())?)?;
        let projected = self.model_projection.forward(embeddings)?;
        let projected = split(projected.multiply(f64::from(self.hidden).powf(-0.5))?)?;
        let projected = self.projection_norm.forward(&projected)?;
        Ok(projected.add(&inputs)?.multiply(2f64.powf(-0.5))?)
    }
}

struct Gemma4 {
    args: Args,
    full_rope: Option<Rope>,
    sliding_rope: Option<Rope>,
    numerics: Numerics,
    embed_tokens: Embedding,
    per_layer_inputs: Option<PerLayerInputs>,
    blocks: Vec<Block>,
    norm: Norm,
    /// `None` when tied to the embedding.
    lm_head: Option<Linear>,
    softcap: Option<Softcap>,
}

/// Builds the graph of a checkpoint whose config has the text model's in `text_config`.
pub(crate) fn nested(checkpoint: &Checkpoint, loader: &mut Loader<'_>) -> Result<Box<dyn Graph>> {
    let config = checkpoint.config();
    let text = config.object("text_config")?.ok_or_else(|| config.error("text_config", "is missing"))?;
    build(&text, config.size("vocab_size")?, true, loader)
}

/// Builds the graph of a text model on its own.
pub(crate) fn text(checkpoint: &Checkpoint, loader: &mut Loader<'_>) -> Result<Box<dyn Graph>> {
    let config = checkpoint.config();
    build(&config, config.size("vocab_size")?, false, loader)
}

fn build(
    text: &Fields<'_>,
    vocabulary: Option<i32>,
    nested: bool,
    loader: &mut Loader<'_>,
) -> Result<Box<dyn Graph>> {
    let args = Args::new(text, vocabulary.unwrap_or(262_144))?;
    let (full_rope, sliding_rope) = (args.rope(text, LayerType::Full)?, args.rope(text, LayerType::Sliding)?);
    sanitize(loader.weights, nested, args.own_layers().len())?;

    let prefix = if nested { "language_model." } else { "" };
    let path = format!("{prefix}model");
    let embed_tokens =
        Embedding::load(loader, &format!("{path}.embed_tokens"), args.vocabulary, args.hidden)?;
    let per_layer_inputs =
        args.per_layer_inputs.map(|sizes| PerLayerInputs::load(loader, &path, &args, sizes)).transpose()?;
    let blocks = args
        .layers
        .iter()
        .enumerate()
        .map(|(i, &layer)| Block::load(loader, &format!("{path}.layers.{i}"), &args, layer))
        .collect::<Result<Vec<_>>>()?;
    let norm = Norm::load(loader, &format!("{path}.norm"), NormKind::Rms, args.hidden, args.norm_eps)?;
    let lm_head = match args.tied {
        true => None,
        false => {
            Some(Linear::load(loader, &format!("{prefix}lm_head"), args.hidden, args.vocabulary, false)?)
        }
    };
    let softcap = args.softcap.map(Softcap::new).transpose()?;
    let numerics = loader.numerics.clone();
    Ok(Box::new(Gemma4 {
        args,
        full_rope,
        sliding_rope,
        numerics,
        embed_tokens,
        per_layer_inputs,
        blocks,
        norm,
        lm_head,
        softcap,
    }))
}

impl Gemma4 {
    /// What the layers of one type share in a call, by the cache of the first of them.
    fn call<'a>(
        &self,
        kind: LayerType,
        rope: Option<&'a Rope>,
        length: i32,
        cache: &Cache,
    ) -> Result<Option<AttentionCall<'a>>> {
        let window = (kind == LayerType::Sliding).then_some(self.args.sliding_window);
        let first = self.args.layers.iter().position(|layer| layer.kind == kind);
        let cache = first.and_then(|i| cache.layers.get(i));
        let (Some(rope), Some(cache)) = (rope, cache) else { return Ok(None) };
        AttentionCall::new(rope, cache, length, window).map(Some)
    }
}

impl Graph for Gemma4 {
    fn forward(
        &self,
        tokens: &Array,
        cache: &mut Cache,
        each_layer: &mut dyn FnMut(&Array),
    ) -> Result<Array> {
        let length = tokens.dim(1)?;
        let mut h = self.embed_tokens.forward(tokens)?.multiply(f64::from(self.args.hidden).sqrt())?;
        let inputs = match &self.per_layer_inputs {
            Some(inputs) => Some(inputs.forward(tokens, &h)?),
            None => None,
        };
        let full = self.call(LayerType::Full, self.full_rope.as_ref(), length, cache)?;
        let sliding = self.call(LayerType::Sliding, self.sliding_rope.as_ref(), length, cache)?;
        let (mut full_kv, mut sliding_kv) = (None, None);
        for (i, (block, layer)) in self.blocks.iter().zip(&self.args.layers).enumerate() {
            let (call, shared) = match layer.kind {
                LayerType::Full => (&full, &mut full_kv),
                LayerType::Sliding => (&sliding, &mut sliding_kv),
            };
            let call = call.as_ref().ok_or_else(other_cache)?;
            let inputs = inputs.as_ref().map(|inputs| (inputs, i as i32));
            if layer.kv == KvSource::Shared {
                let kv = Kv::Shared(shared.as_ref().ok_or_else(other_cache)?);
                h = block.forward(&h, call, kv, inputs)?;
            } else {
                let cache = cache.layers.get_mut(i).ok_or_else(other_cache)?;
                h = block.forward(&h, call, Kv::Own(cache), inputs)?;
                if layer.donor {
                    *shared = Some(SharedKv::of(cache)?);
                }
            }
            each_layer(&h);
        }
        self.norm.forward(&h)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = match &self.lm_head {
            Some(head) => head.forward(hidden)?,
            None => self.embed_tokens.as_linear(hidden)?,
        };
        match &self.softcap {
            Some(softcap) => softcap.forward(&logits),
            None => Ok(logits),
        }
    }

    fn new_cache(&self) -> Cache {
        let layer = |layer: &LayerArgs| match (&self.numerics, layer.kind) {
            (Numerics::Kernels { kv, .. }, _) => LayerCache::Kernel(KernelKvCache::new(*kv)),
            (Numerics::Mlx, LayerType::Full) => LayerCache::Full(KvCache::new()),
            (Numerics::Mlx, LayerType::Sliding) => {
                LayerCache::Rotating(RotatingKvCache::new(self.args.sliding_window, 0))
            }
        };
        Cache::new(self.args.own_layers().iter().map(layer).collect())
    }

    fn shape(&self) -> Shape {
        // The kernels' cache keeps all tokens.
        let rings = matches!(self.numerics, Numerics::Mlx);
        let window = self.args.sliding_window as usize;
        let kv = |layer: &LayerArgs| {
            let limit = (rings && layer.kind == LayerType::Sliding).then_some(window);
            (2 * layer.kv_heads as usize * layer.head_dim as usize, limit)
        };
        Shape {
            vocabulary: self.args.vocabulary,
            hidden: self.args.hidden,
            layers: self.args.layers.len() as i32,
            max_positions: Some(self.args.max_positions),
            kv: self.args.own_layers().iter().map(kv).collect(),
        }
    }
}

fn other_cache() -> Error {
    Error::Input("the cache was made for another model".into())
}
