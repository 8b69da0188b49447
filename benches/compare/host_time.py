#!/usr/bin/env python3
"""Compare the host's time for one decode step with mlx-lm's: building the graph, and handing it to the device.

    host_time.py BINARY [--repeats 5] [--steps 200]

BINARY is what `cargo bench --bench host_time --no-run` builds. The models have the layers of real ones, but tiny
widths and random weights (4-bit, group size 64), so that a step is mostly the host's work. Russet and mlx-lm take
turns; a repeat gives medians over its steps, the table the median of the repeats.

Needs mlx and mlx-lm (requirements.txt beside this file).
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "oracle"))

# Name in the table → architecture of the fixture and its layers.
MODELS = {"llama, 32 layers": ("llama", 32), "gemma4 as E4B, 35 layers": ("gemma4-e4b", 35)}
PARTS = ["build", "launch", "step"]
PROMPT, WARM_UP = 64, 20  # as in host_time.rs


def run_mlx_lm(folder, steps):
    """As host_time.rs does it."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
    model, _ = load_model(folder)
    cache = make_prompt_cache(model)

    def next_token(tokens):
        logits = model(tokens, cache=cache)[:, -1, :]
        return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)

    token = next_token(mx.arange(PROMPT)[None])
    mx.eval(token)
    samples = []
    for step in range(WARM_UP + steps):
        start = time.perf_counter()
        token = next_token(token[None])
        built = time.perf_counter()
        mx.async_eval(token)
        launched = time.perf_counter()
        token.item()
        if step >= WARM_UP:
            samples.append([built - start, launched - built, time.perf_counter() - start])
    return {part: statistics.median(values) * 1e6 for part, values in zip(PARTS, zip(*samples))}


def run_russet(binary, folder, steps):
    out = subprocess.run([binary, folder, str(steps)], check=True, capture_output=True, text=True)
    return json.loads(out.stdout)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("binary")
    p.add_argument("--repeats", type=int, default=5, help="interleaved repeats [default: 5]")
    p.add_argument("--steps", type=int, default=200, help="steps of a repeat [default: 200]")
    a = p.parse_args()
    import mlx.core as mx
    from make_fixture import make_fixture
    print(f"MLX {mx.__version__} on {mx.default_device()}, {a.repeats} interleaved repeats of {a.steps} steps; "
          "microseconds, median (min–max).\n")
    print("| model | part | Russet | mlx-lm | mlx-lm / Russet |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for name, (arch, layers) in MODELS.items():
            folder = Path(temporary) / arch
            make_fixture(folder, {"arch": arch, "layers": layers, "bits": 4, "group": 64})
            results = [(run_russet(a.binary, folder, a.steps), run_mlx_lm(folder, a.steps)) for _ in range(a.repeats)]
            for part in PARTS:
                sides = [[result[side][part] for result in results] for side in (0, 1)]
                medians = [statistics.median(side) for side in sides]
                cells = [f"{m:.0f} ({min(s):.0f}–{max(s):.0f})" for m, s in zip(medians, sides)]
                print(f"| {name} | {part} | {' | '.join(cells)} | {medians[1] / medians[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
