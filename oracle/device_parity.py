#!/usr/bin/env python3
"""Compare a built russet with mlx-lm on this machine's device, bit for bit, and their speed.

    device_parity.py RUSSET_BINARY [--folder DIR] [--speed]

For machines on which the test suite can't set up its own environment (a lent GPU, say): it uses the Python packages
that are installed. Prints one line per case; exits with 1 when any bit differs. --speed also measures prefill and
decode of both on a 4-bit llama of 1.2 billion parameters with random weights.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

FLOATS = ["bfloat16", "float16", "float32"]
FORMATS = [{"bits": 0}, {"bits": 4, "group": 64}, {"bits": 8, "group": 32}, {"mode": "mxfp4"}, {"mode": "nvfp4"},
           {"mode": "mxfp8"}]
PROMPTS = {"llama": [1, 3, 257, 2049], "llama-sliding": [1, 300], "qwen3_5": [1, 3, 300]}
# Three layers with linear attention and one with full attention.
LAYERS = {"qwen3_5": 4}


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


def parity(binary, folder):
    from make_fixture import make_fixture
    from reference import make_reference
    failures, number = 0, 0
    cases = [(arch, dtype, fmt) for arch in PROMPTS for dtype in FLOATS for fmt in FORMATS]
    for arch, dtype, fmt in cases:
        name = f"{arch} {dtype} {json.dumps(fmt)}"
        number += 1
        model = folder / f"model-{number}"
        try:
            make_fixture(model, {"arch": arch, "dtype": dtype, "layers": LAYERS.get(arch, 2), "hidden": 128, **fmt})
        except Exception as e:
            print(f"{name}: no fixture on this device: {e}")
            continue
        for prompt in PROMPTS[arch]:
            tokens = f"rand:{prompt}:{prompt}"
            expected, actual = folder / "expected.safetensors", folder / "actual.safetensors"
            try:
                make_reference(model, expected, {"tokens": tokens, "steps": 24})
            except Exception as e:
                print(f"{name}, {prompt} tokens: mlx-lm fails on this device: {e}")
                continue
            subprocess.run([binary, "eval", "logits", "--model", model, "--tokens", tokens, "--steps", "24", "--temp",
                            "0", "--fidelity", "l1", "--out", actual], check=True)
            different = differences(expected, actual)
            failures += bool(different)
            print(f"{name}, {prompt} tokens: {different or 'equal in every bit'}", flush=True)
    return failures


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
    p.add_argument("--folder", type=Path, help="where fixtures go [default: a temporary folder]")
    p.add_argument("--speed", action="store_true")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        failures = parity(a.binary, folder)
        if a.speed:
            speed(a.binary, folder)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
