#!/usr/bin/env python3
"""Run mlx-lm's batch generator on a checkpoint and save what the engine must reproduce bit for bit.

    batch.py MODEL_DIR --spec '{"rows": [{"tokens": "rand:9:1", "steps": 8, "join": 0, "leave": null}, ...]}' --out FILE

A row joins before call `join` of the generator, and leaves before call `leave` unless it ends by its number of steps
first. README.md lists the arrays of the file.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx

from reference import cache_state, parse_tokens, save

# What is run when a specification does not say otherwise; the widths are mlx-lm's defaults.
DEFAULTS = dict(width=32, prefill_width=8, prefill_chunk=2048)
ROW_DEFAULTS = dict(tokens="rand:24:1", steps=8, join=0, leave=None)


def generate(model, rows, s):
    from mlx_lm.generate import BatchGenerator
    generator = BatchGenerator(model, completion_batch_size=s.width, prefill_batch_size=s.prefill_width,
                               prefill_step_size=s.prefill_chunk)
    arrays, row_of, ended = {}, {}, set()
    tokens, logprobs = [[] for _ in rows], [[] for _ in rows]

    def end(i, cache):
        ended.add(i)
        arrays[f"tokens.{i:02d}"] = mx.array(tokens[i], mx.int32)
        if tokens[i]:
            arrays[f"logprobs.{i:02d}"] = mx.stack(logprobs[i])
        for name, value in cache_state(cache).items():
            arrays[name.replace("cache", f"cache.{i:02d}")] = mx.contiguous(value)
        mx.eval(arrays)  # before the batch writes into the buffers again

    call = 0
    while len(ended) < len(rows):
        leaving = {uid: i for uid, i in row_of.items() if rows[i].leave == call and i not in ended}
        if leaving:
            for uid, (cache, _) in generator.remove(list(leaving), return_prompt_caches=True).items():
                end(leaving[uid], cache)
        joining = [i for i, row in enumerate(rows) if row.join == call]
        if joining:
            uids = generator.insert([parse_tokens(rows[i].tokens) for i in joining],
                                    max_tokens=[rows[i].steps for i in joining])
            row_of |= dict(zip(uids, joining))
        for response in generator.next()[1]:
            i = row_of[response.uid]
            tokens[i].append(response.token)
            logprobs[i].append(response.logprobs)
            if response.finish_reason:
                end(i, response.prompt_cache)
        call += 1
    generator.close()
    return arrays


def make_batch(model_dir, out, spec):
    """Run the checkpoint in `model_dir` as `spec` says and save the results in the file `out`."""
    from mlx_lm.utils import load_model
    options = {key: value for key, value in spec.items() if key != "rows"}
    unknown = set(options) - set(DEFAULTS) | {key for row in spec["rows"] for key in set(row) - set(ROW_DEFAULTS)}
    if unknown:
        raise ValueError(f"unknown batch options {sorted(unknown)}")
    settings = {**DEFAULTS, **options, "rows": [{**ROW_DEFAULTS, **row} for row in spec["rows"]]}
    rows = [argparse.Namespace(**row) for row in settings["rows"]]
    model, _ = load_model(Path(model_dir))
    save(out, generate(model, rows, argparse.Namespace(**settings)), settings)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model_dir")
    p.add_argument("--spec", type=json.loads, required=True, metavar="JSON")
    p.add_argument("--out", required=True)
    a = p.parse_args()
    make_batch(a.model_dir, a.out, a.spec)


if __name__ == "__main__":
    main()
