#!/usr/bin/env python3
"""Record config fingerprints: the first 16 hexadecimal digits of the SHA-256 over what JavaScript's JSON.stringify prints
for the config fields that shape a graph.

    config_fingerprints.py > config_fingerprints.json

Needs nothing but Python. crates/model/tests/profiles.rs compares Russet's fingerprints with the recording.
"""

import hashlib
import json
import random
from decimal import Decimal

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
UNDEFINED = object()


def js_number(x):
    """What JavaScript prints for a number: https://tc39.es/ecma262/#sec-numeric-types-number-tostring."""
    x = float(x)
    if x == 0:
        return "0"
    # repr gives the shortest digits that read back as the number.
    sign, digits, exponent = Decimal(repr(x)).normalize().as_tuple()
    digits, n = "".join(map(str, digits)), len(digits) + exponent
    k = len(digits)
    if k <= n <= 21:
        text = digits + "0" * (n - k)
    elif 0 < n <= 21:
        text = digits[:n] + "." + digits[n:]
    elif -6 < n <= 0:
        text = "0." + "0" * -n + digits
    else:
        text = digits[0] + ("." + digits[1:] if k > 1 else "") + f"e{n - 1:+d}"
    return ("-" if sign else "") + text


def js_json(x):
    """JSON.stringify."""
    if isinstance(x, dict):
        return "{" + ",".join(f"{js_json(k)}:{js_json(v)}" for k, v in x.items() if v is not UNDEFINED) + "}"
    if isinstance(x, list):
        return "[" + ",".join(map(js_json, x)) + "]"
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return js_number(x)
    return json.dumps(x, ensure_ascii=False)


def fingerprint(config, kv_config):
    model_type = config["model_type"]
    text = {k: v for k, v in (config.get("text_config") or config).items() if v is not None}
    if model_type == "diffusion_gemma":
        text = {
            "hidden_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
            "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024, "final_logit_softcapping": 30.0,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "layer_types": [FULL if i % 6 == 5 else SLIDING for i in range(30)],
        } | text
    elif model_type == "glm_moe_dsa":
        # Its head_dim field is not the width of a head.
        width = text.get("qk_head_dim") or text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        text = {
            "enable_moe_block": True, "num_experts": text["n_routed_experts"],
            "top_k_experts": text["num_experts_per_tok"], "layer_types": [FULL] * text["num_hidden_layers"],
        } | text | {"head_dim": width}
    elif model_type == "llama":
        text = {"layer_types": [FULL] * text["num_hidden_layers"]} | text

    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    head_dim = text.get("head_dim", hidden // heads if hidden and heads else None)
    kv_heads = text.get("num_key_value_heads", UNDEFINED)
    moe = text.get("enable_moe_block", False)
    payload = {
        "layerTypes": text.get("layer_types", []),
        "hiddenSize": text.get("hidden_size", UNDEFINED),
        "headDim": head_dim,
        "globalHeadDim": text.get("global_head_dim", head_dim),
        "numAttentionHeads": text.get("num_attention_heads", UNDEFINED),
        "numKeyValueHeads": kv_heads,
        "numGlobalKeyValueHeads": text.get("num_global_key_value_heads", kv_heads),
        "attentionKEqV": text.get("attention_k_eq_v", False),
        "numKvSharedLayers": text.get("num_kv_shared_layers", 0),
        "enableMoeBlock": moe,
        "numExperts": text.get("num_experts", 0) if moe else 0,
        "topKExperts": text.get("top_k_experts", 0) if moe else 0,
        "hiddenSizePerLayerInput": text.get("hidden_size_per_layer_input", 0),
        "slidingWindow": text.get("sliding_window", 0),
        "finalLogitSoftcapping": text.get("final_logit_softcapping"),
        "kvQuant": None if kv_config is None else [
            {"layerIdx": e["layer_idx"], "bits": e["bits"], "groupSize": e.get("group_size", 64)} for e in kv_config],
    }
    return hashlib.sha256(js_json(payload).encode()).hexdigest()[:16]


def base(model_type, **fields):
    return dict(model_type=model_type, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16,
                num_key_value_heads=8, vocab_size=32000, rms_norm_eps=1e-6) | fields


def named_configs():
    """Configs of known models and of every special rule."""
    qwen38 = dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, head_dim=256,
                  layer_types=[FULL if i % 4 == 3 else LINEAR for i in range(64)])
    glm52 = dict(model_type="glm_moe_dsa", hidden_size=6144, num_hidden_layers=78, num_attention_heads=64,
                 num_key_value_heads=64, head_dim=192, qk_nope_head_dim=192, qk_rope_head_dim=64,
                 n_routed_experts=256, num_experts_per_tok=8)
    gemma4 = dict(hidden_size=2560, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
                  global_head_dim=512, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=1024,
                  layer_types=[SLIDING] * 5 + [FULL], final_logit_softcapping=30.0)
    moe = dict(enable_moe_block=True, num_experts=128, top_k_experts=8)
    mixed = [dict(layer_idx=0, bits=8, group_size=64), dict(layer_idx=3, bits=4, group_size=32)]
    yield "Qwen3.8-27B-OptiQ-4bit", dict(model_type="qwen3_5", text_config=qwen38), None
    yield "GLM-5.2-colibri", glm52 | dict(qk_head_dim=256), None
    yield "GLM-5.2 without qk_head_dim", glm52, None
    yield "MiniCPM5", dict(model_type="llama", hidden_size=1536, num_hidden_layers=24, num_attention_heads=16,
                           num_key_value_heads=2, head_dim=128, vocab_size=130560, tie_word_embeddings=False), None
    yield "diffusion_gemma, all defaults", dict(model_type="diffusion_gemma", canvas_length=256), None
    yield "diffusion_gemma, some fields", dict(model_type="diffusion_gemma", hidden_size=64, head_dim=32), None
    yield "llama", base("llama"), None
    yield "llama without KV heads", {k: v for k, v in base("llama").items() if k != "num_key_value_heads"}, None
    yield "llama without sizes", dict(model_type="llama", num_hidden_layers=2), None
    yield "llama with nulls", base("llama", head_dim=None, sliding_window=None, layer_types=None), None
    yield "llama with layer types", base("llama", layer_types=[FULL, SLIDING] * 2, sliding_window=16), None
    yield "mistral", base("mistral"), None
    yield "qwen3_moe, experts do not count", base("qwen3_moe", num_experts=128, num_experts_per_tok=8), None
    yield "gemma4", dict(model_type="gemma4", text_config=gemma4), None
    yield "gemma4 with one width of heads", dict(model_type="gemma4", text_config=gemma4 | dict(global_head_dim=0)), None
    yield "gemma4 with experts", dict(model_type="gemma4", text_config=gemma4 | moe), None
    yield "gemma4 with per-layer inputs", dict(model_type="gemma4", text_config=gemma4 | dict(
        num_kv_shared_layers=2, hidden_size_per_layer_input=256)), None
    yield "gemma4 with mixed KV", dict(model_type="gemma4", text_config=gemma4), mixed
    yield "no KV entries", base("qwen3"), []
    yield "KV without group size", base("qwen3"), [dict(layer_idx=1, bits=8)]
    yield "layer types that need escapes", base("qwen3", layer_types=['"\\/\b\f\n\r\t\x01\x7f', "é€😀\u2028"]), None
    for softcap in [30, 30.5, 0.1, 1e21, 1.5e21, 123456789012345680000, 1e20, 1e-6, 1.25e-6, 1e-7, 1.7976931348623157e308,
                    5e-324, -2.5, 0, -0.0, 1 / 3, 100]:
        yield f"softcap {softcap!r}", base("gemma2", final_logit_softcapping=softcap), None


def random_configs(count):
    rng = random.Random(20)
    optional = dict(
        num_key_value_heads=lambda: rng.choice([1, 2, 8]),
        head_dim=lambda: rng.choice([64, 96, 128]),
        global_head_dim=lambda: rng.choice([128, 512]),
        num_global_key_value_heads=lambda: rng.choice([1, 4]),
        attention_k_eq_v=lambda: rng.random() < 0.5,
        num_kv_shared_layers=lambda: rng.randrange(4),
        enable_moe_block=lambda: rng.random() < 0.5,
        num_experts=lambda: rng.randrange(256),
        top_k_experts=lambda: rng.randrange(16),
        hidden_size_per_layer_input=lambda: rng.choice([0, 256]),
        sliding_window=lambda: rng.choice([0, 512, 4096]),
        final_logit_softcapping=lambda: rng.choice([30.0, rng.lognormvariate(0, 30)]),
        layer_types=lambda: [rng.choice([FULL, SLIDING, LINEAR]) for _ in range(rng.randrange(6))],
        rope_theta=lambda: rng.random(),
    )
    for i in range(count):
        text = dict(hidden_size=rng.randrange(1, 1 << 14), num_attention_heads=rng.randrange(1, 65), num_hidden_layers=4)
        for field, draw in optional.items():
            if rng.random() < 0.6:
                text[field] = draw()
        model_type = rng.choice(["llama", "qwen3", "gemma4", "diffusion_gemma"])
        config = dict(model_type=model_type, text_config=text) if rng.random() < 0.5 else dict(text, model_type=model_type)
        kv = [dict(layer_idx=j, bits=rng.choice([4, 8]), group_size=rng.choice([32, 64])) for j in range(rng.randrange(3))]
        yield f"random {i}", config, kv or None


if __name__ == "__main__":
    cases = [*named_configs(), *random_configs(60)]
    lines = [json.dumps(dict(name=name, config=config, kv_config=kv, fingerprint=fingerprint(config, kv)))
             for name, config, kv in cases]
    print("[\n" + ",\n".join(lines) + "\n]")
