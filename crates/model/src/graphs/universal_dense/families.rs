//! The families that [`universal_dense`](super) runs: which fields of a config they read, with the
//! reference's defaults, and in what they differ from llama.

use super::{Args, LayerArgs, Leftovers, LogitsForm, MlpStorage, NormNames, QkvStorage};
use crate::layers::{Activation, NormKind, QkNorm, Rope};
use crate::{Fields, Result};

/// Reads a config.
pub(in crate::graphs) type Family = fn(&Fields<'_>) -> Result<(Args, Rope)>;

/// `mlx_lm.models.llama`, and the types that mlx-lm maps to it.
pub(in crate::graphs) fn llama(config: &Fields<'_>) -> Result<(Args, Rope)> {
    let args = Args::read(config, Activation::Silu, config.size("head_dim")?)?;
    let args = Args { layers: sliding_layers(config, args.layers)?, ..args }.with_biases(config)?;
    let rope = scaled_rope(config, &args, theta_or(config, 1e4)?, args.max_positions)?;
    Ok((args, rope))
}

/// `mlx_lm.models.smollm3`: some layers have no positions, and sliding ones keep all tokens.
pub(in crate::graphs) fn smollm3(config: &Fields<'_>) -> Result<(Args, Rope)> {
    let (mut args, rope) = llama(config)?;
    let rotary = rotary_layers(config, args.layers.len())?;
    for (layer, rotary) in args.layers.iter_mut().zip(rotary) {
        *layer = LayerArgs { rotary, rotating: false, ..*layer };
    }
    Ok((args, rope))
}

/// `mlx_lm.models.qwen2`: queries, keys and values have biases.
pub(in crate::graphs) fn qwen2(config: &Fields<'_>) -> Result<(Args, Rope)> {
    config.required_size("num_key_value_heads")?;
    let args = Args { qkv_bias: true, ..Args::read(config, Activation::Silu, None)? };
    let max_positions = args.max_positions.or(Some(32_768));
    let rope = scaled_rope(config, &args, theta_or(config, 1e6)?, max_positions)?;
    Ok((args, rope))
}

/// `mlx_lm.models.qwen3`: each head of queries and keys is normalized.
pub(in crate::graphs) fn qwen3(config: &Fields<'_>) -> Result<(Args, Rope)> {
    config.required_size("num_key_value_heads")?;
    config.required_size("max_position_embeddings")?;
    let args = Args::read(config, Activation::Silu, Some(config.required_size("head_dim")?))?;
    let args = Args {
        tied: config.required_flag("tie_word_embeddings")?,
        leftovers: Leftovers { inverse_frequencies: false, ..args.leftovers },
        qk_norm: QkNorm::PerHead { eps: args.norm_eps },
        ..args
    };
    // Newer configs have theta and scaling in one object.
    let parameters = config.object("rope_parameters")?;
    [Some(config), parameters.as_ref()].into_iter().flatten().try_for_each(refuse_partial_rope)?;
    let theta = match (config.positive("rope_theta")?, &parameters) {
        (None, Some(parameters)) => parameters.required_positive("rope_theta")?,
        _ => config.required_positive("rope_theta")?,
    };
    let scaling = config.object("rope_scaling")?.or(parameters);
    let rope = Rope::new(args.head_dim, theta, false, scaling.as_ref(), args.max_positions)?;
    Ok((args, rope))
}

/// `mlx_lm.models.gemma`: norms store one less than their gain, and embeddings are scaled up.
pub(in crate::graphs) fn gemma(config: &Fields<'_>) -> Result<(Args, Rope)> {
    config.required_size("num_key_value_heads")?;
    let args = Args::read(config, Activation::Gelu, Some(config.required_size("head_dim")?))?;
    let args = Args {
        tied: true,
        leftovers: Leftovers::default(),
        norm: NormKind::RmsPlusOne,
        embedding_multiplier: Some(f64::from(args.hidden).sqrt()),
        ..args
    };
    let traditional = config.flag("rope_traditional")?.unwrap_or(false);
    let rope = plain_rope(config, args.head_dim, theta_or(config, 1e4)?, traditional)?;
    Ok((args, rope))
}

/// `mlx_lm.models.gemma2`: a gemma with two more norms per block, and with capped scores and logits. The
/// reference attends to all tokens in every layer.
pub(in crate::graphs) fn gemma2(config: &Fields<'_>) -> Result<(Args, Rope)> {
    let (args, rope) = gemma(config)?;
    let positive_or =
        |field: &str, default| config.positive(field).map(|value: Option<f64>| value.unwrap_or(default));
    let args = Args {
        activation: Activation::GeluTanh,
        norms: NormNames {
            before_attention: Some("input_layernorm"),
            after_attention: Some("post_attention_layernorm"),
            before_mlp: Some("pre_feedforward_layernorm"),
            after_mlp: Some("post_feedforward_layernorm"),
        },
        attention_scale: 1.0 / positive_or("query_pre_attn_scalar", 144.0)?.sqrt(),
        attention_softcap: Some(positive_or("attn_logit_softcapping", 50.0)?),
        logits: LogitsForm::Capped(positive_or("final_logit_softcapping", 30.0)?),
        ..args
    };
    Ok((args, rope))
}

/// `mlx_lm.models.phi3`: fused projections, and a rope of its own.
pub(in crate::graphs) fn phi3(config: &Fields<'_>) -> Result<(Args, Rope)> {
    let args = Args::read(config, Activation::Silu, None)?;
    let args = Args {
        tied: config.flag("tie_word_embeddings")?.unwrap_or(false),
        leftovers: Leftovers::default(),
        qkv: QkvStorage::Fused,
        mlp: MlpStorage::FusedGated,
        ..args
    };
    let dims = rotary_dims(config, &args, config.positive("partial_rotary_factor")?.unwrap_or(1.0))?;
    let theta = theta_or(config, 1e4)?;
    let traditional = config.flag("rope_traditional")?.unwrap_or(false);
    let scaling = config.object("rope_scaling")?.filter(|scaling| scaling.iter().next().is_some());
    let Some(scaling) = scaling else {
        return Ok((args, Rope::new(dims, theta, traditional, None, None)?));
    };
    if scaling.get("long_factor").is_none() {
        return Err(scaling.error("long_factor", "is missing"));
    }
    let rope = match scaling.required_text("type")? {
        "longrope" | "su" => {
            let field = "original_max_position_embeddings";
            let original = config.size(field)?.unwrap_or(4096);
            if original == 1 {
                return Err(config.error(field, "must be greater than 1"));
            }
            let max_positions = args.max_positions.unwrap_or(131_072);
            Rope::longrope(dims, theta, &scaling, f64::from(original), max_positions)?
        }
        "linear" => Rope::new(dims, theta, traditional, Some(&scaling), None)?,
        other => {
            let message =
                format!("'{}' is not supported (known: longrope, su, linear)", other.escape_debug());
            return Err(scaling.error("type", message));
        }
    };
    Ok((args, rope))
}

/// `mlx_lm.models.olmo2`: norms after attention and MLP instead of before, and of whole queries and keys.
pub(in crate::graphs) fn olmo2(config: &Fields<'_>) -> Result<(Args, Rope)> {
    let args = Args::read(config, Activation::Silu, config.size("head_dim")?)?;
    let args = Args {
        leftovers: Leftovers { tied_head: false, ..args.leftovers },
        norms: NormNames {
            before_attention: None,
            after_attention: Some("post_attention_layernorm"),
            before_mlp: None,
            after_mlp: Some("post_feedforward_layernorm"),
        },
        qk_norm: QkNorm::AllHeads { eps: args.norm_eps },
        ..args
    };
    let args = args.with_biases(config)?;
    let rope = scaled_rope(config, &args, theta_or(config, 1e4)?, args.max_positions)?;
    Ok((args, rope))
}

/// `mlx_lm.models.glm4`: norms on both sides of attention and MLP, and heads rotated in part.
pub(in crate::graphs) fn glm4(config: &Fields<'_>) -> Result<(Args, Rope)> {
    config.required_size("num_key_value_heads")?;
    let args = Args::read(config, Activation::Silu, Some(config.required_size("head_dim")?))?;
    let args = Args {
        tied: false,
        leftovers: Leftovers::default(),
        norms: NormNames {
            before_attention: Some("input_layernorm"),
            after_attention: Some("post_self_attn_layernorm"),
            before_mlp: Some("post_attention_layernorm"),
            after_mlp: Some("post_mlp_layernorm"),
        },
        qkv_bias: config.required_flag("attention_bias")?,
        mlp: MlpStorage::FusedGated,
        ..args
    };
    refuse_rope_scaling(config)?;
    let dims = rotary_dims(config, &args, config.required_positive("partial_rotary_factor")?)?;
    let traditional = config.flag("rope_traditional")?.unwrap_or(true);
    let rope = Rope::new(dims, config.required_positive("rope_theta")?, traditional, None, None)?;
    Ok((args, rope))
}

/// `mlx_lm.models.granite`: multipliers of embeddings, scores, residuals and logits.
pub(in crate::graphs) fn granite(config: &Fields<'_>) -> Result<(Args, Rope)> {
    for field in ["num_key_value_heads", "max_position_embeddings"] {
        config.required_size(field)?;
    }
    for field in ["attention_bias", "mlp_bias"] {
        config.required_flag(field)?;
    }
    let args = Args::read(config, Activation::Silu, None)?;
    let args = Args {
        leftovers: Leftovers { inverse_frequencies: false, ..args.leftovers },
        attention_scale: config.required_positive("attention_multiplier")?,
        embedding_multiplier: Some(config.required_positive("embedding_multiplier")?),
        residual_multiplier: Some(config.required_positive("residual_multiplier")?),
        logits: LogitsForm::Scaled(config.required_positive("logits_scaling")?),
        ..args
    };
    let args = args.with_biases(config)?;
    let rope = scaled_rope(config, &args, config.required_positive("rope_theta")?, args.max_positions)?;
    Ok((args, rope))
}

/// `mlx_lm.models.starcoder2`: layer normalization, biases everywhere, and an MLP without a gate.
pub(in crate::graphs) fn starcoder2(config: &Fields<'_>) -> Result<(Args, Rope)> {
    config.required_size("num_key_value_heads")?;
    let norm_eps = config.positive("norm_epsilon")?.unwrap_or(1e-5);
    let vocabulary = config.size("vocab_size")?.unwrap_or(49_152);
    let args = Args {
        leftovers: Leftovers::default(),
        norm: NormKind::Layer,
        qkv_bias: true,
        output_bias: true,
        mlp: MlpStorage::Plain,
        mlp_bias: true,
        ..Args::new(config, Activation::Gelu, None, norm_eps, vocabulary)?
    };
    let rope = plain_rope(config, args.head_dim, theta_or(config, 1e5)?, false)?;
    Ok((args, rope))
}

impl Args {
    /// A plain llama with the sizes of the config; `head_dim` is that of equal parts of the hidden states where
    /// absent.
    fn read(config: &Fields<'_>, activation: Activation, head_dim: Option<i32>) -> Result<Self> {
        let norm_eps = config.required_positive("rms_norm_eps")?;
        let vocabulary = config.required_size("vocab_size")?;
        Self::new(config, activation, head_dim, norm_eps, vocabulary)
    }

    fn new(
        config: &Fields<'_>,
        activation: Activation,
        head_dim: Option<i32>,
        norm_eps: f64,
        vocabulary: i32,
    ) -> Result<Self> {
        check_activation(config, activation)?;
        let hidden = config.required_size("hidden_size")?;
        let heads = config.required_size("num_attention_heads")?;
        let kv_heads = config.size("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            let message = format!("{kv_heads} does not divide num_attention_heads {heads}");
            return Err(config.error("num_key_value_heads", message));
        }
        let head_dim = head_dim.unwrap_or(hidden / heads);
        if head_dim < 2 || head_dim % 2 != 0 {
            return Err(config.error("head_dim", format!("{head_dim} is not a positive even number")));
        }
        for (field, heads) in [("num_attention_heads", heads), ("num_key_value_heads", kv_heads)] {
            if heads.checked_mul(head_dim).is_none() {
                return Err(config.error(field, format!("{heads} × head_dim {head_dim} is too large")));
            }
        }
        let count = config.required_layers()?;
        let layer = LayerArgs { window: None, rotating: false, rotary: true };
        Ok(Self {
            hidden,
            layers: vec![layer; count as usize],
            intermediate: config.required_size("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            vocabulary,
            max_positions: config.size("max_position_embeddings")?,
            tied: config.flag("tie_word_embeddings")?.unwrap_or(true),
            leftovers: Leftovers { inverse_frequencies: true, tied_head: true },
            norm: NormKind::Rms,
            norm_eps,
            norms: NormNames {
                before_attention: Some("input_layernorm"),
                after_attention: None,
                before_mlp: Some("post_attention_layernorm"),
                after_mlp: None,
            },
            qk_norm: QkNorm::None,
            qkv: QkvStorage::Separate,
            qkv_bias: false,
            output_bias: false,
            attention_scale: f64::from(head_dim).powf(-0.5),
            attention_softcap: None,
            mlp: MlpStorage::Gated,
            mlp_bias: false,
            activation,
            embedding_multiplier: None,
            residual_multiplier: None,
            logits: LogitsForm::Plain,
        })
    }

    /// With the biases that the config asks for.
    fn with_biases(self, config: &Fields<'_>) -> Result<Self> {
        let attention = config.flag("attention_bias")?.unwrap_or(false);
        let mlp_bias = config.flag("mlp_bias")?.unwrap_or(false);
        Ok(Self { qkv_bias: attention, output_bias: attention, mlp_bias, ..self })
    }
}

/// A family has one activation whatever the config says; a config that says otherwise is refused.
fn check_activation(config: &Fields<'_>, activation: Activation) -> Result<()> {
    let names = match activation {
        Activation::Sigmoid => ["sigmoid", "sigmoid"],
        Activation::Silu => ["silu", "swish"],
        // Configs name either; the reference computes what it always does.
        Activation::Gelu | Activation::GeluTanh => ["gelu", "gelu_pytorch_tanh"],
    };
    for field in ["hidden_act", "hidden_activation"] {
        if let Some(other) = config.text(field)?.filter(|name| !names.contains(name)) {
            let message = format!("'{}' is not supported (supported: {})", other.escape_debug(), names[0]);
            return Err(config.error(field, message));
        }
    }
    Ok(())
}

/// The layers with the windows that `layer_types` gives them.
fn sliding_layers(config: &Fields<'_>, layers: Vec<LayerArgs>) -> Result<Vec<LayerArgs>> {
    let Some(names) = config.texts("layer_types")? else { return Ok(layers) };
    if names.len() != layers.len() {
        let message = format!("has {} entries for {} layers", names.len(), layers.len());
        return Err(config.error("layer_types", message));
    }
    let layer = |(name, layer): (&&str, LayerArgs)| match *name {
        "full_attention" => Ok(layer),
        "sliding_attention" => {
            let window = Some(config.required_size("sliding_window")?);
            Ok(LayerArgs { window, rotating: true, ..layer })
        }
        other => Err(config.error("layer_types", format!("unknown layer type '{}'", other.escape_debug()))),
    };
    if !names.contains(&"full_attention") {
        return Err(config.error("layer_types", "needs at least one full_attention layer"));
    }
    names.iter().zip(layers).map(layer).collect()
}

/// Which layers are rotated: `no_rope_layers` is 0 where they are not, by default in every fourth.
fn rotary_layers(config: &Fields<'_>, count: usize) -> Result<Vec<bool>> {
    let interval = config.size("no_rope_layer_interval")?.unwrap_or(4) as usize;
    let Some(flags) = config.numbers("no_rope_layers")? else {
        return Ok((1..=count).map(|i| i % interval != 0).collect());
    };
    if flags.len() != count {
        let message = format!("has {} entries for {count} layers", flags.len());
        return Err(config.error("no_rope_layers", message));
    }
    Ok(flags.iter().map(|&flag| flag != 0.0).collect())
}

fn theta_or(config: &Fields<'_>, default: f64) -> Result<f64> {
    Ok(config.positive("rope_theta")?.unwrap_or(default))
}

/// Whole heads rotated, scaled as `rope_scaling` says.
fn scaled_rope(config: &Fields<'_>, args: &Args, theta: f64, max_positions: Option<i32>) -> Result<Rope> {
    refuse_partial_rope(config)?;
    let traditional = config.flag("rope_traditional")?.unwrap_or(false);
    let scaling = config.object("rope_scaling")?;
    Rope::new(args.head_dim, theta, traditional, scaling.as_ref(), max_positions)
}

/// Whole heads rotated (`nn.RoPE`).
fn plain_rope(config: &Fields<'_>, dims: i32, theta: f64, traditional: bool) -> Result<Rope> {
    refuse_partial_rope(config)?;
    refuse_rope_scaling(config)?;
    Rope::new(dims, theta, traditional, None, None)
}

/// The part of each head that is rotated.
fn rotary_dims(config: &Fields<'_>, args: &Args, fraction: f64) -> Result<i32> {
    let dims = (f64::from(args.head_dim) * fraction) as i32;
    if dims < 2 || dims % 2 != 0 || dims > args.head_dim {
        let message =
            format!("{fraction} of head_dim {} are {dims} rotated channels, not an even part", args.head_dim);
        return Err(config.error("partial_rotary_factor", message));
    }
    Ok(dims)
}

/// The reference ignores the field, and would compute other positions than the config asks for.
fn refuse_partial_rope(config: &Fields<'_>) -> Result<()> {
    match config.number("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(_) => {
            Err(config.error("partial_rotary_factor", "other than 1 is not supported for this model type"))
        }
    }
}

/// As [`refuse_partial_rope`].
fn refuse_rope_scaling(config: &Fields<'_>) -> Result<()> {
    match config.object("rope_scaling")? {
        None => Ok(()),
        Some(_) => Err(config.error("rope_scaling", "is not supported for this model type")),
    }
}
