#!/usr/bin/env bash
# Fuzzes every parser of bytes from outside for some seconds each (600 unless told otherwise): fuzz/run.sh [SECONDS [NAME...]]
# Coverage guides it (libFuzzer); no nightly compiler is needed, because no sanitizer is used: the code under test is safe Rust. A panic, more
# than 256 MiB or 10 s with one input is a finding, kept under fuzz/artifacts/. As many run at once as there are processors.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-600}
shift || true
names=("$@")
if [ ${#names[@]} -eq 0 ]; then
    for folder in corpus/*/; do
        names+=("$(basename "$folder")")
    done
fi
# What cargo-fuzz gives the compiler, without a sanitizer.
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
host=$(rustc -vV | sed -n 's/^host: //p')
cargo build --locked --release --target "$host" --target-dir target
one() {
    mkdir -p "work/$1" "artifacts/$1" # what is found stays out of the committed corpus
    if "target/$2/release/parse" --parser="$1" -max_total_time="$3" -timeout=10 -rss_limit_mb=256 -max_len=131072 \
        -artifact_prefix="artifacts/$1/" -print_final_stats=1 "work/$1" "corpus/$1" >"work/$1.log" 2>&1; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "work/$1.log")
        peak=$(sed -n 's/^stat::peak_rss_mb: *//p' "work/$1.log")
        echo "$1: nothing found in $3 s, $runs inputs, at most $peak MiB"
    else
        echo "$1: FOUND, see work/$1.log and artifacts/$1/"
        return 1
    fi
}
export -f one
printf '%s\n' "${names[@]}" | xargs -P "$(nproc)" -I{} bash -c "one {} $host $seconds"
