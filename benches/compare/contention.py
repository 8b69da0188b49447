#!/usr/bin/env python3
"""Decode with one core taken: what Russet and llama.cpp keep of their quiet one-thread speed.

    contention.py [--repeats 5]

Uses as many threads as there are cores while another process keeps one core busy. Needs what compare.py needs, and
its converted files.
"""
import argparse
import os
import statistics
import subprocess
import sys

from compare import ROOT, gguf_files, measure_elsewhere, run_russet


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--repeats", type=int, default=5, help="interleaved repeats [default: 5]")
    a = p.parse_args()
    cores = len(os.sched_getaffinity(0))
    _, requantized = gguf_files(ROOT / "target/compare/gguf")
    binary = ROOT / "target/release/russet"
    competitors = {
        "russet": lambda threads: run_russet(binary, threads, "decode", 1),
        "llama.cpp Q4_0": lambda threads: measure_elsewhere("llama", requantized, threads, "decode", 1),
    }
    samples = {}
    for _ in range(a.repeats):
        for name, run in competitors.items():
            samples.setdefault((name, "quiet"), []).append(run(1)["decode_tps"])
            busy = subprocess.Popen([sys.executable, "-c", "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"])
            try:
                samples.setdefault((name, "busy"), []).append(run(cores)["decode_tps"])
            finally:
                busy.kill()
                busy.wait()
    print(f"| decode, tokens/s | quiet, 1 thread | one of {cores} cores busy, {cores} threads | kept |\n|---|---|---|---|")
    for name in competitors:
        quiet, busy = (statistics.median(samples[name, state]) for state in ["quiet", "busy"])
        print(f"| {name} | {quiet:.1f} | {busy:.1f} | {busy / quiet:.0%} |")


if __name__ == "__main__":
    main()
