#!/usr/bin/env python3
"""Write a tiny checkpoint of one architecture.

    make_fixture.py ARCH OUT_DIR [options]        (make_fixture.py --list)

mlx-lm's own model class is built from a small config, filled with seeded random numbers, quantised with MLX's
quantiser if asked to, and saved. Tensor names and layouts are therefore exactly what mlx-lm loads. The same options
give the same bytes.
"""

import argparse
import contextlib
import copy
import io
import json
import math
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from architectures import ARCHS, DROPS_INV_FREQ, DROPS_TIED_HEAD, PLUS_ONE, register_model_types
from fixture_tokenizer import write_tokenizer

# What is made when a specification does not say otherwise.
DEFAULTS = dict(seed=0, dtype="bfloat16", bits=0, group=None, mode="affine", mixed=False, layers=None, hidden=None,
                set={}, unset=[], shards=1, hub=False)


def randomise(model, dtype, plus_one=False):
    """Give every parameter a value that shows when it is dropped or swapped."""
    def fill(path, v):
        name = path.rsplit(".", 1)[-1]
        if not isinstance(v, mx.array) or not mx.issubdtype(v.dtype, mx.floating):
            return v
        if name == "A_log":  # the recurrent decay stays float32, as in released checkpoints
            return mx.log(mx.random.uniform(0.5, 4.0, v.shape))
        if name == "dt_bias":
            w = mx.random.uniform(-1.0, 1.0, v.shape)
        elif name == "layer_scalar":
            w = mx.random.uniform(0.6, 1.2, v.shape)
        elif name in ("per_expert_scale", "scale"):
            w = mx.random.uniform(0.7, 1.3, v.shape)
        elif name == "weight" and v.ndim == 1:  # a norm gain
            w = (0.0 if plus_one else 1.0) + 0.2 * mx.random.normal(v.shape)
        elif name == "bias" or v.ndim == 1:
            w = 0.1 * mx.random.normal(v.shape)
        elif "embed" in path:
            w = mx.random.normal(v.shape) * (1.0 / math.sqrt(v.shape[-1]))
        else:
            fan = v.shape[-1] if "conv" not in path else math.prod(v.shape[1:])
            w = mx.random.normal(v.shape) * (1.3 / math.sqrt(fan))
        return w.astype(dtype)

    model.update(tree_map_with_path(fill, model.parameters()))
    mx.eval(model.parameters())


def quantize(model, config, bits, group, mode, mixed):
    """Quantise `model`; returns the config with its `quantization` entry.

    With `mixed`, modules differ from the rest in every way a checkpoint may say so: parameters of their own with and
    without a mode, `true`, `false`, and parameters that only the tensors' shapes tell.
    """
    from mlx_lm.utils import quantize_model
    own = getattr(model, "quant_predicate", None)
    other = {"bits": 4 if bits == 8 else 8, "group_size": 64 if group == 32 else 32}
    explicit = {}

    def predicate(path, module):
        base = own(path, module) if own else True
        if isinstance(base, dict) or not base:
            return base
        if "embed_tokens" in path or path.endswith("lm_head"):
            return dict(other)
        if path.endswith((".0.mlp.down_proj", ".0.mlp.switch_mlp.down_proj", ".0.experts.switch_glu.down_proj")):
            return dict(other, mode="affine")
        if path.endswith((".1.mlp.up_proj", ".1.experts.switch_glu.up_proj", ".2.mlp.switch_mlp.up_proj")):
            unrecorded.append(path)
            return dict(other)
        if path.endswith(".1.mlp.gate_proj"):
            explicit[path] = True
        if path.endswith(".1.self_attn.v_proj"):
            explicit[path] = False
            return False
        return base

    unrecorded = []
    with contextlib.redirect_stdout(io.StringIO()):
        # MLX chooses the group size and width of the other modes itself.
        model, config = quantize_model(model, config, group, bits if mode == "affine" else None, mode=mode,
                                       quant_predicate=predicate if mixed else own)
    config["quantization"].update(explicit)
    for path in unrecorded:
        del config["quantization"][path]
    mx.eval(model.parameters())
    return config


def hub_layout(arch, weights, config):
    """`weights` as an unconverted upstream checkpoint names and stacks them, with tensors that mlx-lm drops at load."""
    def rename(name, old, new):
        return name.replace(old, new, 1) if name.startswith(old) else name

    nested = "text_config" in config
    out = {rename(rename(k, "language_model.model.", "model.language_model."), "language_model.lm_head.", "lm_head.")
           if nested else k: v for k, v in weights.items()}
    fused = ".experts.switch_glu." if arch.startswith("gemma4") else ".switch_mlp."
    for k in [k for k in out if k.endswith(f"{fused}gate_proj.weight")]:
        base = k.removesuffix(f"{fused}gate_proj.weight")
        gate, up, down = (out.pop(f"{base}{fused}{n}_proj.weight") for n in ["gate", "up", "down"])
        if arch == "qwen3_moe":
            for name, stack in [("gate", gate), ("up", up), ("down", down)]:
                for e in range(stack.shape[0]):
                    out[f"{base}.experts.{e}.{name}_proj.weight"] = mx.contiguous(stack[e])
        else:
            out[f"{base}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=-2)
            out[f"{base}.experts.down_proj"] = down
    if arch.startswith("qwen3_5"):
        for k, v in out.items():
            if k.endswith("conv1d.weight"):
                out[k] = mx.contiguous(v.moveaxis(2, 1))
            elif k.endswith("norm.weight") and not k.endswith("linear_attn.norm.weight"):
                out[k] = v - 1.0
        out |= {f"{m}.weight": mx.random.normal((4, 4)) for m in ["model.visual.merger", "mtp.layers.0.input_layernorm"]}
    if arch.startswith("gemma4"):
        text = config.get("text_config", config)
        n = text["num_hidden_layers"]
        prefix = "model.language_model.layers" if nested else "model.layers"
        dropped = [f"{prefix}.{n - 1}.self_attn.rotary_emb.inv_freq", f"{prefix}.0.mlp.gate_proj.input_max"]
        # Layers that share keys and values have their own too, unused.
        for i in range(n - text["num_kv_shared_layers"], n):
            dropped += [f"{prefix}.{i}.self_attn.{m}.weight" for m in ["k_proj", "v_proj", "k_norm"]]
        if nested:
            dropped += [f"model.{m}.weight" for m in [
                "vision_tower.patch_embedder.input_proj", "audio_tower.layers.0.norm_out",
                "embed_vision.embedding_projection", "embed_audio.embedding_projection", "vision_embedder.patch",
                "multi_modal_projector.linear"]]
        out |= {name: mx.random.normal((4, 4)) for name in dropped}
    if config["model_type"] in DROPS_INV_FREQ:
        out["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.random.normal((4,))
    if config["model_type"] in DROPS_TIED_HEAD and config.get("tie_word_embeddings", True):
        out["lm_head.weight"] = mx.random.normal(out["model.embed_tokens.weight"].shape)
    return out


def save_weights(out, weights, shards):
    names = sorted(weights)
    total = sum(v.nbytes for v in weights.values())
    if shards == 1:
        mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
        return
    weight_map, step = {}, -(-len(names) // shards)
    for i in range(shards):
        part = names[i * step:(i + 1) * step]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mx.save_safetensors(str(out / file), {k: weights[k] for k in part}, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def make_fixture(out, spec):
    """Write the checkpoint that `spec` describes into the folder `out`."""
    unknown = set(spec) - set(DEFAULTS) - {"arch"}
    if unknown:
        raise ValueError(f"unknown fixture options {sorted(unknown)}")
    s = argparse.Namespace(**{**DEFAULTS, **spec})
    if s.hub and (s.bits or s.mode != "affine"):
        raise ValueError("the layout of the hub is that of dense checkpoints")
    if s.arch not in ARCHS:
        raise ValueError(f"unknown architecture {s.arch}; known are {', '.join(ARCHS)}")
    hidden, layers, build, family = ARCHS[s.arch]
    config = build(s.hidden or hidden, s.layers or layers)
    for key, value in s.set.items():
        text = config.get("text_config", config)
        target = config if key in config and key not in text else text
        target[key] = value
    for key in s.unset:
        target = config["text_config"] if key in config.get("text_config", {}) else config
        target.pop(key)
    dtype = getattr(mx, s.dtype)
    mx.random.seed(s.seed)

    from mlx_lm.utils import _get_classes
    register_model_types()
    args = copy.deepcopy(config)  # some model classes take keys out of it
    model_class, args_class = _get_classes(args)
    model = model_class(args_class.from_dict(args))
    model.eval()
    randomise(model, dtype, plus_one=s.arch in PLUS_ONE)
    if s.bits or s.mode != "affine":
        config = quantize(model, config, s.bits, s.group, s.mode, s.mixed)

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    if s.hub:
        weights = hub_layout(s.arch, weights, config)
    save_weights(out, weights, s.shards)
    eos = write_tokenizer(out, family)
    config.update(torch_dtype=s.dtype, dtype=s.dtype, eos_token_id=eos)
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    (out / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": eos, "do_sample": False, "temperature": 1.0, "top_k": 20, "top_p": 0.95}))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("arch", nargs="?")
    p.add_argument("out", nargs="?")
    p.add_argument("--list", action="store_true", help="name the architectures")
    p.add_argument("--seed", type=int)
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    p.add_argument("--bits", type=int, choices=[0, 2, 3, 4, 5, 6, 8], help="affine width; 0 leaves the weights dense")
    p.add_argument("--group", type=int, help="group size; default 64 (mxfp4, mxfp8: 32; nvfp4: 16)")
    p.add_argument("--mode", choices=["affine", "mxfp4", "mxfp8", "nvfp4"])
    p.add_argument("--mixed", action="store_true", help="modules quantised unlike the rest")
    p.add_argument("--layers", type=int)
    p.add_argument("--hidden", type=int)
    p.add_argument("--set", action="append", default=[], metavar="KEY=JSON",
                   help="set a key of the (text) config, repeatable")
    p.add_argument("--unset", action="append", metavar="KEY", help="leave a key of the config out, repeatable")
    p.add_argument("--shards", type=int)
    p.add_argument("--hub", action="store_true", default=None, help="the layout before conversion (dense weights only)")
    a = vars(p.parse_args())
    if a.pop("list"):
        print("\n".join(ARCHS))
        return
    out = a.pop("out")
    if not out:
        p.error("an architecture and a folder to write to are needed")
    a["set"] = {k: json.loads(v) for k, v in (item.split("=", 1) for item in a["set"])}
    make_fixture(out, {k: v for k, v in a.items() if v is not None})


if __name__ == "__main__":
    main()
