#!/usr/bin/env python3
"""Load `russet serve` with many streaming clients and watch its memory and throughput.

    load.py [--clients 200] [--minutes 10] [--out DIR] [-- SERVE ARGUMENTS]

Starts the release binary of this checkout on the starter model. Every client asks for one answer after the other, each
as a stream: prompts of 5 to 700 tokens, some shared and some new, answers of 8 to 96 tokens, greedy and sampled. One
in fifty is left before its end. A 429 waits as long as it says; anything else that is not an answer is an error.
Every ten seconds the server's memory and its tokens are noted. The report compares the first and the last third of
the time after a warm-up of a third, in which the prompt cache fills, gives the slope of the memory over it with what a
straight line leaves over, and goes to load.json and load.md in DIR. Exits with 1 after an error.

Uses Python's standard library alone.
"""
import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
INTERVAL = 10
WORDS = "river stone lantern winter garden copper window letter market island engine candle harbor meadow".split()


class Counts:
    def __init__(self):
        self.answers = self.refused = self.left = self.tokens = 0
        self.errors = []
        self.first_token, self.per_answer = [], []


def prompt(rng):
    """A third share their first 300 words, so that the prompt cache has something to find."""
    shared = " ".join(WORDS[i * i % len(WORDS)] for i in range(300)) if rng.random() < 1 / 3 else ""
    own = " ".join(rng.choice(WORDS) for _ in range(rng.choice([4, 20, 60, 200, 400])))
    return f"{shared} {own}".strip()


async def answer(address, rng, counts):
    body = {"prompt": prompt(rng), "max_tokens": rng.randint(8, 96), "stream": True}
    if rng.random() < 0.5:
        body |= {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(1 << 30)}
    else:
        body |= {"temperature": 0}
    leaves_after = rng.randint(1, 8) if rng.random() < 0.02 else None
    data = json.dumps(body).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n").encode()
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(head + data)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := (await reader.readline()).strip()):
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        if status == 429:
            counts.refused += 1
            await asyncio.sleep(float(headers["retry-after"]))
            return
        if status != 200:
            raise RuntimeError(f"status {status}: {(await reader.read())[:300]!r}")
        pieces, finished, done = 0, False, False
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"in a stream: {event['error']}")
            if pieces == 0:
                counts.first_token.append(time.monotonic() - begin)
            pieces += 1
            finished |= event["choices"][0]["finish_reason"] is not None
            if pieces == leaves_after:
                counts.left += 1
                return
        if not (finished and done):
            raise RuntimeError("a stream ended without its end")
        counts.answers += 1
        counts.per_answer.append(time.monotonic() - begin)
    finally:
        writer.close()


async def client(address, seed, counts, end):
    rng = random.Random(seed)
    while time.monotonic() < end:
        try:
            await answer(address, rng, counts)
        except Exception as error:  # what is counted, whatever it is
            counts.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(1)


async def get(address, path):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.0\r\nHost: {address[0]}:{address[1]}\r\n\r\n".encode())
    body = (await reader.read()).split(b"\r\n\r\n", 1)[1]
    writer.close()
    return json.loads(body)


def memory(pid):
    """Bytes in RAM: all, and those that are the process's own."""
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(re.search(rf"^{name}:\s+(\d+) kB", status, re.M)[1]) * 1024 for name in ["VmRSS", "RssAnon"]]


async def watch(address, pid, samples, end):
    begin = time.monotonic()
    while time.monotonic() < end:
        stats = await get(address, "/stats")
        rss, own = memory(pid)
        samples.append({"seconds": time.monotonic() - begin, "rss": rss, "anonymous": own,
                        "generated_tokens": stats["generated_tokens"], "running": stats["requests"]["running"],
                        "waiting": stats["requests"]["waiting"], "prompt_cache_bytes": stats["prompt_cache"]["bytes"]})
        await asyncio.sleep(INTERVAL)


async def load(address, pid, clients, seconds):
    counts, samples = Counts(), []
    end = time.monotonic() + seconds
    await asyncio.gather(watch(address, pid, samples, end),
                         *(client(address, seed, counts, end) for seed in range(clients)))
    deadline = time.monotonic() + 60
    while (stats := await get(address, "/stats"))["requests"]["running"] and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return counts, samples, stats


def line(points):
    """The slope of a straight line through the points, and the deviation that it leaves."""
    xs, ys = zip(*points)
    slope, base = statistics.linear_regression(xs, ys)
    return slope, statistics.pstdev(y - (slope * x + base) for x, y in points)


def rate(samples):
    first, last = samples[0], samples[-1]
    return (last["generated_tokens"] - first["generated_tokens"]) / (last["seconds"] - first["seconds"])


def quantiles(values):
    values = sorted(values)
    return {q: values[min(len(values) - 1, int(len(values) * q / 100))] for q in [50, 95, 99]} if values else {}


def report(counts, samples, stats, clients, seconds):
    warm = [s for s in samples if s["seconds"] >= seconds / 3]
    third = len(warm) // 3
    slope, noise = line([(s["seconds"] / 60, s["anonymous"]) for s in warm])
    begin, end = rate(warm[:third + 1]), rate(warm[-third - 1:])
    return {
        "date": time.strftime("%Y-%m-%d"), "clients": clients, "seconds": seconds, "answers": counts.answers,
        "left": counts.left, "refused": counts.refused, "errors": len(counts.errors),
        "error_samples": counts.errors[:5], "generated_tokens": stats["generated_tokens"],
        "tokens_per_second": {"all": rate(warm), "begin": begin, "end": end, "end/begin": end / begin},
        "memory": {"first": warm[0]["anonymous"], "last": warm[-1]["anonymous"],
                   "least": min(s["anonymous"] for s in warm), "most": max(s["anonymous"] for s in warm),
                   "slope_per_minute": slope, "noise": noise, "rss": warm[-1]["rss"]},
        "first_token_seconds": quantiles(counts.first_token), "answer_seconds": quantiles(counts.per_answer),
        "stats": stats, "samples": samples,
    }


def text(r):
    mb, m, t = (lambda value: f"{value / 1e6:.1f} MB"), r["memory"], r["tokens_per_second"]
    first = ", ".join(f"{q} %: {s:.1f} s" for q, s in r["first_token_seconds"].items())
    return f"""{r['date']}, {r['clients']} clients, {r['seconds'] / 60:.0f} minutes

| | |
|---|---|
| answers, left by the client, 429, errors | {r['answers']}, {r['left']}, {r['refused']}, {r['errors']} |
| tokens per second: all, first third, last third, ratio | {t['all']:.0f}, {t['begin']:.0f}, {t['end']:.0f}, \
{t['end/begin']:.3f} |
| memory of its own after the warm-up: first, last, least, most | {mb(m['first'])}, {mb(m['last'])}, \
{mb(m['least'])}, {mb(m['most'])} |
| its slope, and the deviation from that line | {m['slope_per_minute'] / 1e6:+.2f} MB a minute, {mb(m['noise'])} |
| time to the first token, with the wait in the queue | {first} |
"""


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--clients", type=int, default=200)
    p.add_argument("--minutes", type=float, default=10)
    p.add_argument("--out", type=Path, default=ROOT / "target/load", help="where results go")
    p.add_argument("serve", nargs="*", help="more arguments of russet serve, after --")
    a = p.parse_args()
    binary = ROOT / "target/release/russet"
    if not binary.exists():
        raise SystemExit("build first: cargo build --release")
    a.out.mkdir(parents=True, exist_ok=True)
    log = open(a.out / "serve.log", "w+")
    arguments = [binary, "serve", "--port", "0", "--log-level", "WARNING", *a.serve]
    server = subprocess.Popen(arguments, stderr=log)
    try:
        while not (found := re.search(r"listening on http://([\d.]+):(\d+)", (a.out / "serve.log").read_text())):
            if server.poll() is not None:
                raise SystemExit((a.out / "serve.log").read_text())
            time.sleep(0.1)
        address = (found[1], int(found[2]))
        counts, samples, stats = asyncio.run(load(address, server.pid, a.clients, a.minutes * 60))
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    r = report(counts, samples, stats, a.clients, a.minutes * 60)
    r["exit_code"] = code
    (a.out / "load.json").write_text(json.dumps(r, indent=1) + "\n")
    (a.out / "load.md").write_text(text(r))
    print(text(r))
    for error in r["error_samples"]:
        print(error, file=sys.stderr)
    return 1 if r["errors"] or code else 0


if __name__ == "__main__":
    sys.exit(main())
