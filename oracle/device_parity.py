#!/usr/bin/env python3
"""Compare a built russet with mlx-lm on this machine's device, bit for bit, and their speed.

    device_parity.py RUSSET_BINARY [--arch qwen3,gemma2] [--jobs 8] [--speed]

For machines on which the test suite can't set up its own environment (a lent GPU, say): it uses the Python packages
that are installed. Llamas are compared in all dtypes and formats, the other architectures in bfloat16, dense and with
4 bits. Prints one line per recording; exits with 1 when any bit differs that MLX itself computes right. --speed also
measures prefill and decode of both on a 4-bit llama of 1.2 billion parameters with random weights.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

FLOATS = ["bfloat16", "float16", "float32"]
FORMATS = [{"bits": 0}, {"bits": 4, "group": 64}, {"bits": 8, "group": 32}, {"mode": "mxfp4"}, {"mode": "nvfp4"},
           {"mode": "mxfp8"}]
# Fixtures of every dtype and format, and the lengths of their prompts.
LLAMAS = {"llama": [1, 3, 257, 2049], "llama-sliding": [1, 300]}
# Fixtures of one dtype and two formats. Windows are 16 tokens wide; the last prompt takes two chunks.
FAMILIES = ["minicpm5", "mistral", "iquestcoder", "xverse", "smollm3", "qwen2", "qwen3", "gemma", "gemma2", "phi3",
            "olmo2", "glm4", "granite", "starcoder2", "qwen3_moe", "qwen3_5", "qwen3_5-flat", "qwen3_5_text",
            "qwen3_5_moe", "gemma4-dense", "gemma4-unified", "gemma4-e4b", "gemma4-e2b", "gemma4-moe", "gemma4-text"]
PROMPTS = [1, 17, 300, 2049]


def cases():
    """Fixtures and the lengths of the prompts that are run on them."""
    for arch, prompts in LLAMAS.items():
        for dtype in FLOATS:
            for form in FORMATS:
                yield {"arch": arch, "dtype": dtype, "layers": 2, **form}, prompts
    for arch in FAMILIES:
        for form in FORMATS[:2]:
            yield {"arch": arch, "dtype": "bfloat16", **form}, PROMPTS


def differences(expected, actual):
    """What differs between two recordings, array by array; empty when every bit is equal."""
    import mlx.core as mx
    a, b = mx.load(str(expected)), mx.load(str(actual))
    out = [f"{name} missing in one" for name in set(a) ^ set(b)]
    for name in sorted(set(a) & set(b)):
        x, y = a[name], b[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            out.append(f"{name} is {y.shape} {y.dtype} instead of {x.shape} {x.dtype}")
        elif not mx.array_equal(x.view(mx.uint8), y.view(mx.uint8)).item():
            worst = mx.abs(x.astype(mx.float32) - y.astype(mx.float32)).max().item()
            out.append(f"{name} differs by up to {worst:.3g}")
    return ", ".join(out)


def wrong_products(model):
    """Which quantized products of a checkpoint MLX gets wrong on this device for 17 rows, by shape.

    They read memory that isn't theirs (docs/fidelity.md names the kernel), so no two programs agree on them.
    """
    import mlx.core as mx
    settings = json.loads((model / "config.json").read_text()).get("quantization", {})
    common = {name: settings[name] for name in ["bits", "group_size", "mode"] if name in settings}
    tensors = mx.load(str(model / "model.safetensors"))
    wrong = set()
    for scales in [name for name in tensors if name.endswith(".scales")]:
        module = scales.removesuffix(".scales")
        own = settings.get(module)
        options = {**common, **(own if isinstance(own, dict) else {})}
        parts = [tensors.get(f"{module}.{part}") for part in ["weight", "scales", "biases"]]
        if parts[0].ndim != 2:  # stacked experts take kernels of their own
            continue
        dense = mx.dequantize(*parts, **options)
        x = mx.random.normal((17, dense.shape[1])).astype(dense.dtype)
        expected, actual = x @ dense.T, mx.quantized_matmul(x, *parts, **options)
        # Rounding stays far below half of the largest value; the comparison is false for NaN as well.
        if not mx.all(mx.abs(actual - expected) <= 0.5 * mx.abs(expected).max()).item():
            wrong.add(f"{dense.shape[0]} x {dense.shape[1]}")
    return sorted(wrong)


def run_case(binary, fixture, prompts):
    """Prints how the recordings of one fixture compare; returns how many differ for another reason than MLX's."""
    from make_fixture import make_fixture
    from reference import make_reference
    name, failures = " ".join(f"{value}" for value in fixture.values()), 0
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        try:
            make_fixture(model, fixture)
        except Exception as e:
            print(f"{name}: no fixture on this device: {e}")
            return 0
        for prompt in prompts:
            tokens = f"rand:{prompt}:{prompt}"
            expected, actual = (Path(temporary) / f"{side}.safetensors" for side in ["expected", "actual"])
            try:
                make_reference(model, expected, {"tokens": tokens, "steps": 24})
            except Exception as e:
                print(f"{name}, {prompt} tokens: mlx-lm fails on this device: {e}")
                continue
            subprocess.run([binary, "eval", "logits", "--model", model, "--tokens", tokens, "--steps", "24", "--temp",
                            "0", "--fidelity", "l1", "--out", actual], check=True)
            different = differences(expected, actual)
            wrong = wrong_products(model) if different else []
            failures += bool(different) and not wrong
            reason = f"; not comparable, MLX's own products are wrong: {', '.join(wrong)}" if wrong else ""
            print(f"{name}, {prompt} tokens: {different or 'equal in every bit'}{reason}", flush=True)
    return failures


def parity(binary, architectures, jobs):
    """Runs cases side by side, each in a process of its own; returns how many failed or were not equal."""
    def run(case):
        with tempfile.TemporaryDirectory() as kernels:
            # Kernels compiled at run time are written there, not always at once: processes must not share them.
            out = subprocess.run([sys.executable, __file__, binary, "--case", json.dumps(case)], capture_output=True,
                                 text=True, env={**os.environ, "MLX_PTX_CACHE_DIR": kernels})
        failure = f"{json.dumps(case[0])} failed: {out.stderr[-2000:]}\n" if out.returncode and out.stderr else ""
        print(out.stdout + failure, end="", flush=True)
        return out.returncode != 0

    chosen = [case for case in cases() if not architectures or case[0]["arch"] in architectures]
    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(run, chosen))


def speed(binary, folder):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from make_fixture import make_fixture
    from mlx_lm.utils import load_model
    model = folder / "large"
    sizes = {"intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
             "vocab_size": 128256, "max_position_embeddings": 131072}
    make_fixture(model, {"arch": "llama", "bits": 4, "group": 64, "layers": 16, "hidden": 2048, "set": sizes})
    loaded, _ = load_model(model)
    tokens = mx.array([i * 2654435761 % 128256 for i in range(512)])
    for repeat in range(4):
        report = json.loads(subprocess.run(
            [binary, "bench", model, "--prompt-tokens", "512", "--gen-tokens", "128", "--runs", "1", "--json"],
            check=True, capture_output=True, text=True).stdout)
        start, first = time.perf_counter(), None
        for i, _ in enumerate(generate_step(tokens, loaded, max_tokens=129)):
            if i == 0:
                first = time.perf_counter()
        end = time.perf_counter()
        print(f"repeat {repeat}: russet prefill {report['prefill_tps']['median']:.0f}, decode "
              f"{report['decode_tps']['median']:.0f} tokens/s; mlx-lm prefill {512 / (first - start):.0f}, decode "
              f"{128 / (end - first):.0f} tokens/s", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("binary")
    p.add_argument("--arch", help="architectures to compare, separated by commas [default: all]")
    p.add_argument("--jobs", type=int, default=1, help="fixtures that are compared at once [default: 1]")
    p.add_argument("--speed", action="store_true")
    p.add_argument("--case", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.case:
        sys.exit(1 if run_case(a.binary, *json.loads(a.case)) else 0)
    failures = parity(a.binary, a.arch and a.arch.split(","), a.jobs)
    if a.speed:
        with tempfile.TemporaryDirectory() as temporary:
            speed(a.binary, Path(temporary))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
