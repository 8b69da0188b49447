#!/usr/bin/env python3
"""Write a checkpoint of random weights in the shape of Llama-2-7B: 4-bit, group size 64, 3.8 GB.

    synthetic.py DIR [--layers 32]

For measuring speed only (`russet bench DIR`): it has no tokenizer. Needs numpy.
"""
import argparse
import json
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, HEADS, VOCABULARY, GROUP = 4096, 11008, 32, 32000, 64


def tensors(layers):
    """Name → (dtype, shape), in the order of the file."""
    def matrix(path, rows, columns):
        yield f"{path}.weight", ("U32", [rows, columns // 8])
        yield f"{path}.scales", ("F16", [rows, columns // GROUP])
        yield f"{path}.biases", ("F16", [rows, columns // GROUP])

    yield from matrix("model.embed_tokens", VOCABULARY, HIDDEN)
    for i in range(layers):
        block = f"model.layers.{i}"
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"]:
            yield from matrix(f"{block}.self_attn.{name}", HIDDEN, HIDDEN)
        for name in ["gate_proj", "up_proj"]:
            yield from matrix(f"{block}.mlp.{name}", INTERMEDIATE, HIDDEN)
        yield from matrix(f"{block}.mlp.down_proj", HIDDEN, INTERMEDIATE)
        for name in ["input_layernorm", "post_attention_layernorm"]:
            yield f"{block}.{name}.weight", ("F16", [HIDDEN])
    yield "model.norm.weight", ("F16", [HIDDEN])
    yield from matrix("lm_head", VOCABULARY, HIDDEN)


def values(name, shape, rng):
    """Codes are uniform; scales and biases make the weights small and centered."""
    if name.endswith((".scales", ".biases")):
        factor = 1.0 if name.endswith(".scales") else -7.5
        return np.full(shape, factor * 0.004, np.float16)
    if len(shape) == 1:
        return np.ones(shape, np.float16)
    return rng.integers(0, 2**32, shape, np.uint32)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dir", type=Path)
    p.add_argument("--layers", type=int, default=32)
    a = p.parse_args()
    a.dir.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": a.layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "quantization": {"group_size": GROUP, "bits": 4},
    }
    (a.dir / "config.json").write_text(json.dumps(config, indent=1))
    header, end = {"__metadata__": {"format": "mlx"}}, 0
    for name, (dtype, shape) in tensors(a.layers):
        start, end = end, end + int(np.prod(shape)) * (4 if dtype == "U32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with open(a.dir / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, (_, shape) in tensors(a.layers):
            f.write(values(name, shape, rng).tobytes())


if __name__ == "__main__":
    main()
