//! Qwen3 with sparse layers. Reference: `mlx_lm.models.qwen3_moe`.

use russet_mlx::Array;

use super::{Graph, Shape, checks};
use crate::cache::{Cache, KernelKvCache, KvCache, LayerCache};
use crate::layers::{
    Activation, Attention, AttentionArgs, AttentionCall, Embedding, ExpertSizes, GatedMlp, Linear, Loader,
    MlpArgs, Norm, NormKind, QkNorm, Residual, Rope, SparseArgs, SparseMlp, project,
};
use crate::{Checkpoint, Fields, Numerics, Result, Weights};

struct Args {
    hidden: i32,
    intermediate: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    rope_theta: f64,
    norm_eps: f64,
    vocabulary: i32,
    max_positions: i32,
    tied: bool,
    experts: SparseArgs,
    /// Per layer, whether its MLP is a mixture of experts.
    sparse: Vec<bool>,
}

impl Args {
    fn new(config: &Fields<'_>) -> Result<Self> {
        checks::activation(config, "hidden_act", &["silu", "swish"])?;
        let hidden = config.required_size("hidden_size")?;
        let heads = config.required_size("num_attention_heads")?;
        let kv_heads = config.required_size("num_key_value_heads")?;
        let head_dim = config.required_size("head_dim")?;
        checks::head_dim(config, "head_dim", head_dim, heads)?;
        checks::kv_heads(config, "num_key_value_heads", kv_heads, heads)?;
        let experts = ExpertSizes {
            count: config.required_count("num_experts")?,
            hidden,
            intermediate: config.required_size("moe_intermediate_size")?,
        };
        let chosen = config.required_size("num_experts_per_tok")?;
        let sparse = sparse_layers(config, experts.count)?;
        if sparse.contains(&true) {
            checks::chosen_experts(config, "num_experts_per_tok", chosen, experts.count)?;
        }
        Ok(Self {
            hidden,
            intermediate: config.required_size("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            rope_theta: config.required_positive("rope_theta")?,
            norm_eps: config.required_positive("rms_norm_eps")?,
            vocabulary: config.required_size("vocab_size")?,
            max_positions: config.required_size("max_position_embeddings")?,
            tied: config.required_flag("tie_word_embeddings")?,
            experts: SparseArgs {
                experts,
                chosen,
                normalize: config.required_flag("norm_topk_prob")?,
                shared_intermediate: None,
            },
            sparse,
        })
    }
}

/// Every layer whose number, counted from 1, `decoder_sparse_step` divides is sparse, but for those in
/// `mlp_only_layers`, which are counted from 0.
fn sparse_layers(config: &Fields<'_>, experts: i32) -> Result<Vec<bool>> {
    let count = config.required_layers()?;
    let step = config.required_size("decoder_sparse_step")?;
    let dense =
        config.numbers("mlp_only_layers")?.ok_or_else(|| config.error("mlp_only_layers", "is missing"))?;
    let sparse = |i: i32| !dense.contains(&f64::from(i)) && experts > 0 && (i + 1) % step == 0;
    Ok((0..count).map(sparse).collect())
}

enum Mlp {
    Dense(GatedMlp),
    Sparse(SparseMlp),
}

struct Block {
    input_layernorm: Norm,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    attention: Attention,
    post_attention_layernorm: Norm,
    mlp: Mlp,
}

impl Block {
    fn load(loader: &mut Loader<'_>, path: &str, args: &Args, sparse: bool) -> Result<Self> {
        let norm = |loader: &mut Loader<'_>, name: &str| {
            Norm::load(loader, &format!("{path}.{name}"), NormKind::Rms, args.hidden, args.norm_eps)
        };
        let linear = |loader: &mut Loader<'_>, name: &str, heads: i32| {
            let path = format!("{path}.self_attn.{name}");
            Linear::load(loader, &path, args.hidden, heads * args.head_dim, false)
        };
        let attention = AttentionArgs {
            hidden: args.hidden,
            heads: args.heads,
            kv_heads: args.kv_heads,
            head_dim: args.head_dim,
            scale: f64::from(args.head_dim).powf(-0.5),
            rotary: true,
            qk_norm: QkNorm::PerHead { eps: args.norm_eps },
            value_norm: None,
            softcap: None,
            output_gate: false,
            output_bias: false,
        };
        let mlp = format!("{path}.mlp");
        let mlp = match sparse {
            true => Mlp::Sparse(SparseMlp::load(loader, &mlp, args.experts)?),
            false => Mlp::Dense(GatedMlp::load(
                loader,
                &mlp,
                MlpArgs {
                    hidden: args.hidden,
                    intermediate: args.intermediate,
                    bias: false,
                    activation: Activation::Silu,
                },
            )?),
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            q_proj: linear(loader, "q_proj", args.heads)?,
            k_proj: linear(loader, "k_proj", args.kv_heads)?,
            v_proj: linear(loader, "v_proj", args.kv_heads)?,
            attention: Attention::load(loader, &format!("{path}.self_attn"), attention)?,
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            mlp,
        })
    }

    fn forward(&self, x: &Array, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Array> {
        let qkv = project(Some(&self.input_layernorm), [&self.q_proj, &self.k_proj, &self.v_proj], x)?;
        let h = self.attention.forward_add(&qkv, x, &Residual::Plain, call, cache)?;
        let norm = &self.post_attention_layernorm;
        match &self.mlp {
            Mlp::Dense(mlp) => mlp.forward_add(Some(norm), &h, &Residual::Plain),
            Mlp::Sparse(mlp) => mlp.forward_add(norm, &h),
        }
    }
}

struct Qwen3Moe {
    args: Args,
    rope: Rope,
    numerics: Numerics,
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    /// `None` when tied to the embedding.
    lm_head: Option<Linear>,
}

/// Builds the graph for `model_type` qwen3_moe.
pub(crate) fn build(checkpoint: &Checkpoint, loader: &mut Loader<'_>) -> Result<Box<dyn Graph>> {
    let args = Args::new(&checkpoint.config())?;
    // The reference ignores `rope_scaling`.
    let rope = Rope::new(args.head_dim, args.rope_theta, false, None, None)?;
    sanitize(loader.weights, &args)?;
    let embed_tokens = Embedding::load(loader, "model.embed_tokens", args.vocabulary, args.hidden)?;
    let blocks = args
        .sparse
        .iter()
        .enumerate()
        .map(|(i, &sparse)| Block::load(loader, &format!("model.layers.{i}"), &args, sparse))
        .collect::<Result<Vec<_>>>()?;
    let norm = Norm::load(loader, "model.norm", NormKind::Rms, args.hidden, args.norm_eps)?;
    let lm_head = match args.tied {
        true => None,
        false => Some(Linear::load(loader, "lm_head", args.hidden, args.vocabulary, false)?),
    };
    let numerics = loader.numerics.clone();
    Ok(Box::new(Qwen3Moe { args, rope, numerics, embed_tokens, blocks, norm, lm_head }))
}

/// Drops the head of a tied model, and stacks the experts of checkpoints that store them one by one.
fn sanitize(weights: &mut Weights, args: &Args) -> Result<()> {
    weights.discard(|name| args.tied && name == "lm_head.weight");
    for layer in 0..args.sparse.len() {
        weights.stack_experts(&format!("model.layers.{layer}.mlp"), args.experts.experts.count)?;
    }
    Ok(())
}

impl Graph for Qwen3Moe {
    fn forward(
        &self,
        tokens: &Array,
        cache: &mut Cache,
        each_layer: &mut dyn FnMut(&Array),
    ) -> Result<Array> {
        let mut h = self.embed_tokens.forward(tokens)?;
        let Some(first) = cache.layers.first() else { return self.norm.forward(&h) };
        let call = AttentionCall::new(&self.rope, first, tokens.dim(1)?, None)?;
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
        let layer = || match &self.numerics {
            Numerics::Kernels { kv, .. } => LayerCache::Kernel(KernelKvCache::new(*kv)),
            Numerics::Mlx => LayerCache::Full(KvCache::new()),
        };
        Cache::new(self.blocks.iter().map(|_| layer()).collect())
    }

    fn shape(&self) -> Shape {
        let per_token = 2 * self.args.kv_heads as usize * self.args.head_dim as usize;
        Shape {
            vocabulary: self.args.vocabulary,
            hidden: self.args.hidden,
            layers: self.blocks.len() as i32,
            max_positions: Some(self.args.max_positions),
            kv: vec![(per_token, None); self.blocks.len()],
        }
    }
}
