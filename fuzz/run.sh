#!/usr/bin/env bash
# Runs every fuzz target, or those named, for SECONDS each: fuzz/run.sh SECONDS [TARGET...]
#
# Starts from the committed seeds; what it finds and builds stays in the target folder. The sanitizer needs unstable
# compiler options, which RUSTC_BOOTSTRAP=1 allows a stable compiler to take.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ ${1:-} =~ ^[0-9]+$ ]] || { echo "usage: fuzz/run.sh SECONDS [TARGET...]" >&2; exit 2; }
seconds=$1
shift

target=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
PATH=$target/tools/bin:$PATH
if ! command -v cargo-fuzz >/dev/null; then
    cargo install cargo-fuzz --version 0.13.2 --locked --root "$target/tools" --target-dir "$target/tools/build"
    rm -rf "$target/tools/build"
fi
export RUSTC_BOOTSTRAP=1
host=$(rustc -vV | sed -n 's/^host: //p')
cargo fuzz build --fuzz-dir fuzz --target-dir "$target/fuzz" --target "$host" --sanitizer address
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_odr_violation=0}

# The targets write checkpoints; in memory where that is possible.
memory=/dev/shm
[[ -w $memory ]] || memory=$target
TMPDIR=$(mktemp -d "$memory/russet-fuzz-XXXXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

targets=($(cargo fuzz list --fuzz-dir fuzz))
(($# == 0)) || targets=("$@")
for name in "${targets[@]}"; do
    corpus=$target/fuzz/corpus/$name artifacts=$target/fuzz/artifacts/$name
    mkdir -p "$corpus" "$artifacts"
    options=(-max_total_time="$seconds" -timeout=20 -artifact_prefix="$artifacts/" -print_final_stats=1 -print_funcs=0
        -verbosity=0)
    [[ ! -e fuzz/dictionaries/$name ]] || options+=(-dict="fuzz/dictionaries/$name")
    echo "== fuzz: $name, $seconds s"
    # Not by `cargo fuzz run`, which makes folders beside the sources. Without libFuzzer's proposal for a dictionary.
    "$target/fuzz/$host/release/$name" "$corpus" "fuzz/seeds/$name" "${options[@]}" 2>&1 |
        grep -vE '^#{6} |# Uses: '
done
