#!/usr/bin/env python3
"""Run mlx-lm on a checkpoint and save what the engine must reproduce bit for bit.

    reference.py MODEL_DIR [--tokens '1,2,3'] [--steps 8] [--prefill-chunk 2048] ... --out FILE

The loop is mlx-lm's generate_step; a logits processor put before all others records the raw logits. README.md lists
the arrays of the file.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

# What is run when a specification does not say otherwise; the sampling options are mlx-lm's, with its defaults.
DEFAULTS = dict(tokens="rand:24:1", steps=8, prefill_chunk=2048, seed=None, temp=0.0, top_p=0.0, top_k=0, min_p=0.0,
                min_tokens_to_keep=1, xtc_probability=0.0, xtc_threshold=0.1, xtc_special_tokens=[], logit_bias={},
                repetition_penalty=None, repetition_context_size=20, presence_penalty=None, presence_context_size=20,
                frequency_penalty=None, frequency_context_size=20, dump_layers=False, dump_cache=False)


def parse_tokens(text):
    """Token ids from '1,2,3', '@FILE' or 'rand:COUNT[:SEED[:HIGH]]' (a linear congruential generator)."""
    if text.startswith("@"):
        text = Path(text[1:]).read_text()
    if text.startswith("rand:"):
        numbers = [int(n) for n in text.split(":")[1:]]
        count, x, high = numbers + [1, 256][len(numbers) - 1:]
        out = []
        for _ in range(count):
            x = (x * 1103515245 + 12345) & 0x7FFFFFFF
            out.append((x >> 8) % high)
        return out
    return [int(t) for t in text.replace(" ", "").split(",") if t]


class LayerOutputs:
    """Records the output of each decoder layer in each call of the model."""

    def __init__(self, layers):
        self.arrays = {}
        self.index = {id(layer): i for i, layer in enumerate(layers)}
        self.calls = [0] * len(layers)
        self.originals = [(cls, cls.__call__) for cls in {type(layer) for layer in layers}]
        for cls, original in self.originals:
            cls.__call__ = self.recording(original)

    def recording(self, original):
        def call(layer, *args, **kwargs):
            out = original(layer, *args, **kwargs)
            i = self.index.get(id(layer))
            if i is not None:
                self.arrays[f"layer.{self.calls[i]:03d}.{i:03d}"] = out[0] if isinstance(out, tuple) else out
                self.calls[i] += 1
            return out
        return call

    def close(self):
        for cls, original in self.originals:
            cls.__call__ = original


def cache_state(cache):
    """The state of every layer's cache by name: buffers with their unused rows, and scalars as 0-d arrays."""
    arrays = {}
    for i, layer in enumerate(cache):
        for name, value in tree_flatten(list(layer.state)):
            if value is not None:
                arrays[f"cache.{i:03d}.{name}"] = value if isinstance(value, mx.array) else mx.array(value)
    return arrays


def generate(model, s):
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    raw, picks, logprobs = [], [], []

    def record(_, logits):
        raw.append(logits[0])  # the array as it is now: later processors write into theirs
        return logits

    processors = make_logits_processors(
        logit_bias={int(k): v for k, v in s.logit_bias.items()},
        repetition_penalty=s.repetition_penalty, repetition_context_size=s.repetition_context_size,
        presence_penalty=s.presence_penalty, presence_context_size=s.presence_context_size,
        frequency_penalty=s.frequency_penalty, frequency_context_size=s.frequency_context_size)
    sample = make_sampler(temp=s.temp, top_p=s.top_p, min_p=s.min_p, min_tokens_to_keep=s.min_tokens_to_keep,
                          top_k=s.top_k, xtc_probability=s.xtc_probability, xtc_threshold=s.xtc_threshold,
                          xtc_special_tokens=s.xtc_special_tokens)

    def sampler(logprobs):
        picks.append(sample(logprobs))
        return picks[-1]

    tokens = parse_tokens(s.tokens)
    if s.seed is not None:
        mx.random.seed(s.seed)
    cache = make_prompt_cache(model)
    for _, row in generate_step(mx.array(tokens), model, max_tokens=s.steps, sampler=sampler,
                                logits_processors=[record] + processors, prompt_cache=cache,
                                prefill_step_size=s.prefill_chunk):
        logprobs.append(row)
    # generate_step runs one step ahead: steps + 1 forward passes ran and were recorded.
    arrays = {"prompt_tokens": mx.array(tokens, mx.int32), "prompt_logits": raw[0],
              "tokens": mx.concatenate([pick.reshape(1) for pick in picks]).astype(mx.int32)}
    if s.steps:
        arrays["step_logits"] = mx.stack(raw[1:])
        arrays["logprobs"] = mx.stack(logprobs)
    if s.dump_cache:
        arrays |= cache_state(cache)
    return arrays


def save(out, arrays, settings):
    """Save `arrays` with the versions, the device and the settings that gave them."""
    import mlx_lm
    mx.save_safetensors(str(out), {k: mx.contiguous(v) for k, v in arrays.items()}, metadata={
        "format": "mlx", "mlx": mx.__version__, "mlx_lm": mlx_lm.__version__, "device": str(mx.default_device()),
        "settings": json.dumps(settings, sort_keys=True)})


def make_reference(model_dir, out, spec):
    """Run the checkpoint in `model_dir` as `spec` says and save the results in the file `out`."""
    from architectures import register_model_types
    from mlx_lm.utils import load_model
    register_model_types()
    unknown = set(spec) - set(DEFAULTS)
    if unknown:
        raise ValueError(f"unknown reference options {sorted(unknown)}")
    settings = {**DEFAULTS, **spec}
    s = argparse.Namespace(**settings)
    model, _ = load_model(Path(model_dir))
    outputs = LayerOutputs(model.layers) if s.dump_layers else None
    try:
        arrays = generate(model, s)
    finally:
        if outputs:
            outputs.close()
    if outputs:
        arrays |= outputs.arrays
    save(out, arrays, settings)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model_dir")
    p.add_argument("--out", required=True)
    p.add_argument("--tokens", help="'1,2,3', @FILE or rand:COUNT[:SEED[:HIGH]]")
    p.add_argument("--logit-bias", type=json.loads, metavar="JSON", help='{"TOKEN": BIAS, ...}')
    p.add_argument("--xtc-special-tokens", type=json.loads, metavar="JSON", help="[TOKEN, ...]")
    p.add_argument("--dump-layers", action="store_true", help="each decoder layer's output, per call")
    p.add_argument("--dump-cache", action="store_true", help="cache state after the last step")
    for name in ["steps", "prefill-chunk", "seed", "top-k", "min-tokens-to-keep", "repetition-context-size",
                 "presence-context-size", "frequency-context-size"]:
        p.add_argument(f"--{name}", type=int)
    for name in ["temp", "top-p", "min-p", "xtc-probability", "xtc-threshold", "repetition-penalty",
                 "presence-penalty", "frequency-penalty"]:
        p.add_argument(f"--{name}", type=float)
    a = vars(p.parse_args())
    make_reference(a.pop("model_dir"), a.pop("out"), {k: v for k, v in a.items() if v is not None})


if __name__ == "__main__":
    main()
