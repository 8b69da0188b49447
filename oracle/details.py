"""Inputs and outputs of single parts of the reference: rotary embeddings, sampler stages, caches.

Each function saves one safetensors file; README.md lists its arrays. Used through worker.py.
"""

import mlx.core as mx

from reference import cache_state, save


def rope_details(out, spec):
    """Rotary embedding of one random input at several offsets.

    spec: dims, base, traditional, scaling (the config's rope_scaling or null), max_position_embeddings, and the input:
    shape [batch, heads, length, head dim], dtype, seed, offsets.
    """
    from mlx_lm.models.rope_utils import initialize_rope
    rope = initialize_rope(spec["dims"], spec["base"], spec["traditional"], spec["scaling"],
                           spec["max_position_embeddings"])
    mx.random.seed(spec["seed"])
    x = mx.random.normal(spec["shape"]).astype(getattr(mx, spec["dtype"]))
    arrays = {"input": x}
    if hasattr(rope, "_freqs"):
        arrays["freqs"] = rope._freqs
    for offset in spec["offsets"]:
        # A copy, because the types that scale their input write into it.
        arrays[f"output.{offset}"] = rope(mx.array(x), offset=offset)
    save(out, arrays, spec)


def sampler_details(out, spec):
    """Each enabled stage of the sampler applied to the result of the one before, then a row of draws.

    spec: vocabulary, dtype, seed, scale (standard deviation of the random logits), draws, and make_sampler's options
    temp, top_p, min_p, min_tokens_to_keep, xtc_probability, xtc_threshold, xtc_special_tokens, top_k.
    """
    from mlx_lm import sample_utils
    mx.random.seed(spec["seed"])
    logits = (mx.random.normal([1, spec["vocabulary"]]) * spec["scale"]).astype(getattr(mx, spec["dtype"]))
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    arrays = {"logits": logits, "logprobs": logprobs}
    x = logprobs
    if 0 < spec["top_p"] < 1:
        x = arrays["top_p"] = sample_utils.apply_top_p(x, spec["top_p"])
    if spec["min_p"]:
        x = arrays["min_p"] = sample_utils.apply_min_p(x, spec["min_p"], spec["min_tokens_to_keep"])
    if spec["xtc_probability"] > 0:
        mx.random.seed(spec["seed"])
        x = arrays["xtc"] = sample_utils.apply_xtc(x, spec["xtc_probability"], spec["xtc_threshold"],
                                                   spec["xtc_special_tokens"])
        mx.eval(x)
    if spec["top_k"] > 0:
        x = arrays["top_k"] = sample_utils.apply_top_k(x, spec["top_k"])

    options = ["temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold",
               "xtc_special_tokens"]
    sampler = sample_utils.make_sampler(**{name: spec[name] for name in options})
    mx.random.seed(spec["seed"])
    draws, keys = [], []
    for _ in range(spec["draws"]):
        draws.append(sampler(logprobs))
        mx.eval(draws[-1])
        keys.append(mx.array(mx.random.state[0]))
    arrays["draws"] = mx.concatenate(draws).astype(mx.int32)
    arrays["keys"] = mx.stack(keys)
    save(out, arrays, spec)


def cache_details(out, spec):
    """A layer's cache after each of a row of updates, with what the update returned and the mask made before it.

    spec: max_size and keep (a rotating cache) or max_size null (a plain one), window (for the mask, or null), heads,
    head_dim, dtype, seed, and steps: a positive number appends so many rows, a negative one trims so many.
    """
    from mlx_lm.models.base import create_attention_mask
    from mlx_lm.models.cache import KVCache, RotatingKVCache
    mx.random.seed(spec["seed"])
    cache = KVCache() if spec["max_size"] is None else RotatingKVCache(spec["max_size"], spec["keep"])
    arrays, masks = {}, []
    for i, rows in enumerate(spec["steps"]):
        if rows < 0:
            arrays[f"trimmed.{i:03d}"] = mx.array(cache.trim(-rows) if cache.is_trimmable() else 0)
            masks.append("none")
        else:
            mask = create_attention_mask(mx.zeros([1, rows, 1]), cache, window_size=spec["window"])
            masks.append("array" if isinstance(mask, mx.array) else mask or "none")
            if masks[-1] == "array":
                arrays[f"mask.{i:03d}"] = mask
            shape, dtype = [1, spec["heads"], rows, spec["head_dim"]], getattr(mx, spec["dtype"])
            for name in ("keys", "values"):
                arrays[f"{name}_in.{i:03d}"] = mx.random.normal(shape).astype(dtype)
            arrays[f"keys_out.{i:03d}"], arrays[f"values_out.{i:03d}"] = cache.update_and_fetch(
                arrays[f"keys_in.{i:03d}"], arrays[f"values_in.{i:03d}"])
        state = {k.replace("cache.000", f"state.{i:03d}"): mx.contiguous(v) for k, v in cache_state([cache]).items()}
        mx.eval(state)  # before the next update writes into the buffers
        arrays |= state
    save(out, arrays, {**spec, "masks": masks})
