"""Small but shape-faithful configs, one per architecture."""

VOCAB = 512  # 256 byte tokens, merges and specials; the rest is padding


def _base(hidden, layers, **kw):
    c = dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        rope_theta=10000.0,
    )
    c.update(kw)
    return c


def _gemma4(hidden, layers, pattern, **kw):
    """gemma4: nested text_config, sliding/full layers, rope per layer type."""
    types = (pattern * (layers // len(pattern) + 1))[:layers]
    types[-1] = "full_attention"
    t = dict(
        model_type="gemma4_text",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=None,
        head_dim=64,
        global_head_dim=128,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        sliding_window=16,
        max_position_embeddings=4096,
        attention_k_eq_v=False,
        final_logit_softcapping=30.0,
        use_double_wide_mlp=False,
        enable_moe_block=False,
        layer_types=types,
        tie_word_embeddings=True,
        pad_token_id=0,
        rope_parameters={
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    )
    t.update(kw)
    return dict(
        model_type="gemma4",
        architectures=["Gemma4ForConditionalGeneration"],
        text_config=t,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        image_token_id=VOCAB - 1,
        boi_token_id=VOCAB - 2,
        eoi_token_id=VOCAB - 3,
    )


S, F = "sliding_attention", "full_attention"


def _qwen35(hidden, layers, moe=False):
    t = dict(
        model_type="qwen3_5_moe_text" if moe else "qwen3_5_text",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=False,
        attention_bias=False,
        full_attention_interval=4,
        rope_parameters={
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
        },
    )
    if moe:
        t.update(
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            norm_topk_prob=True,
        )
    return dict(
        model_type="qwen3_5_moe" if moe else "qwen3_5",
        architectures=["Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"],
        text_config=t,
        tie_word_embeddings=False,
        image_token_id=VOCAB - 1,
        vision_start_token_id=VOCAB - 2,
        vision_end_token_id=VOCAB - 3,
    )


YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}

# name -> (default hidden, default layers, builder(hidden, layers), tokenizer family)
ARCHS = {
    "gemma4-dense": (128, 6, lambda h, l: _gemma4(
        h, l, [S, S, F], attention_k_eq_v=True, num_global_key_value_heads=1), "gemma"),
    "gemma4-e4b": (128, 8, lambda h, l: _gemma4(
        h, l, [S, F], num_kv_shared_layers=max(2, l // 2), hidden_size_per_layer_input=64), "gemma"),
    "gemma4-e2b": (128, 8, lambda h, l: _gemma4(
        h, l, [S, F], num_kv_shared_layers=max(2, l // 2), hidden_size_per_layer_input=64,
        use_double_wide_mlp=True, num_key_value_heads=1), "gemma"),
    "gemma4-moe": (128, 6, lambda h, l: _gemma4(
        h, l, [S, S, F], attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
        num_experts=8, top_k_experts=2, moe_intermediate_size=64), "gemma"),
    "gemma4-text": (128, 8, lambda h, l: _gemma4(
        h, l, [S, F], num_kv_shared_layers=max(2, l // 2), hidden_size_per_layer_input=64)["text_config"], "gemma"),
    "gemma4-unified": (128, 6, lambda h, l: dict(_gemma4(
        h, l, [S, S, F], attention_k_eq_v=True, num_global_key_value_heads=1), model_type="gemma4_unified"), "gemma"),
    "minicpm5": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="llama", architectures=["LlamaForCausalLM"], head_dim=64,
              tie_word_embeddings=False, rms_norm_eps=1e-5)), "minicpm5"),
    "qwen3": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="qwen3", head_dim=64, tie_word_embeddings=True, rope_theta=1e6)), "qwen"),
    "qwen3-embedding": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="qwen3", head_dim=64, tie_word_embeddings=True, rope_theta=1e6)), "qwen"),
    "qwen3_moe": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="qwen3_moe", head_dim=64, tie_word_embeddings=False, num_experts=8,
              num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[1],
              moe_intermediate_size=64, norm_topk_prob=True)), "qwen"),
    "qwen3_5": (128, 8, lambda h, l: _qwen35(h, l), "qwen"),
    "qwen3_5-flat": (128, 8, lambda h, l: dict(_qwen35(h, l)["text_config"], model_type="qwen3_5"), "qwen"),
    "qwen3_5_text": (128, 8, lambda h, l: _qwen35(h, l)["text_config"], "qwen"),
    "qwen3_5_moe": (128, 4, lambda h, l: _qwen35(h, l, moe=True), "qwen"),
    "llama": (128, 4, lambda h, l: _base(h, l, model_type="llama", tie_word_embeddings=True), "qwen"),
    "llama-sliding": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="llama", tie_word_embeddings=False, sliding_window=16,
              layer_types=([S, F] * l)[:l], attention_bias=True, mlp_bias=True)), "qwen"),
    "mistral": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="mistral", tie_word_embeddings=False)), "qwen"),
    "iquestcoder": (128, 2, lambda h, l: dict(
        _base(h, l, model_type="iquestcoder", tie_word_embeddings=False)), "qwen"),
    "xverse": (128, 2, lambda h, l: dict(
        _base(h, l, model_type="xverse", tie_word_embeddings=False)), "qwen"),
    "smollm3": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="smollm3", tie_word_embeddings=True, no_rope_layer_interval=4)), "qwen"),
    "qwen2": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="qwen2", tie_word_embeddings=True, rope_theta=1e6)), "qwen"),
    "qwen2-yarn": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="qwen2", tie_word_embeddings=False, rope_theta=1e6,
              rope_scaling=dict(YARN_ROPE))), "qwen"),
    "gemma": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="gemma", head_dim=64)), "gemma"),
    "gemma2": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="gemma2", head_dim=64, query_pre_attn_scalar=64.0,
              attn_logit_softcapping=50.0, final_logit_softcapping=30.0)), "gemma"),
    "phi3": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="phi3", tie_word_embeddings=False, original_max_position_embeddings=512,
              rope_scaling={"type": "longrope",
                            "short_factor": [1.0] * (h // 4 // 2),
                            "long_factor": [1.0 + 0.1 * i for i in range(h // 4 // 2)]})), "qwen"),
    "olmo2": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="olmo2", tie_word_embeddings=False)), "qwen"),
    "glm4": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="glm4", attention_bias=True, head_dim=64, partial_rotary_factor=0.5)), "qwen"),
    "granite": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="granite", logits_scaling=8.0, attention_multiplier=0.015625,
              embedding_multiplier=12.0, residual_multiplier=0.22, attention_bias=False,
              mlp_bias=False, tie_word_embeddings=True)), "qwen"),
    "starcoder2": (128, 4, lambda h, l: dict(
        _base(h, l, model_type="starcoder2", norm_epsilon=1e-5, tie_word_embeddings=True)), "qwen"),
}
PLUS_ONE = {"gemma", "gemma2"}  # norms stored as (weight - 1)
# Model types whose classes drop these tensors of upstream checkpoints.
DROPS_INV_FREQ = {"llama", "mistral", "iquestcoder", "xverse", "smollm3", "qwen2", "olmo2"}
DROPS_TIED_HEAD = {"llama", "mistral", "iquestcoder", "xverse", "smollm3", "qwen2", "qwen3", "qwen3_moe", "granite"}


def register_model_types():
    """Make known to mlx-lm what mlx-optiq adds to it: the text model of Qwen3.5 on its own."""
    import sys
    import types

    from mlx_lm.models import qwen3_5
    module = types.ModuleType("mlx_lm.models.qwen3_5_text")
    module.Model, module.ModelArgs = qwen3_5.TextModel, qwen3_5.TextModelArgs
    sys.modules[module.__name__] = module
