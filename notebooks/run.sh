#!/usr/bin/env bash
# Executes the notebooks on results made here: `notebooks/run.sh [<argodrive binary> [<demo folder>]]`. Without a demo folder the
# demo runs first; `--prepare` alone only installs what is needed. Executed copies and figures: target/notebooks/out. Needs Python
# 3.11 or newer with venv; without it (or without a package index) this is a skip, and under CI=true a failure.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../target}
work=$target/notebooks
venv=$work/venv
mkdir -p "$work"
work=$(cd "$work" && pwd)

skip() {
    echo "notebooks: $1" >&2
    [ "${CI:-}" = true ] && exit 1
    echo "notebooks: SKIPPED" >&2
    exit 0
}

if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
    python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || skip "Python 3.11 or newer with venv is needed"
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt" || skip "packages could not be installed"
    cp "$here/requirements.txt" "$venv/"
fi
[ "${1:-}" != --prepare ] || exit 0
binary=$(realpath "${1:-$target/release/argodrive}")
[ -x "$binary" ] || { echo "notebooks: no binary at $binary: cargo build --release" >&2; exit 2; }

# What a command that measures may end with: 1 is a measurement that was rejected, and notebooks must show that too.
measure() {
    local code=0
    "$@" || code=$?
    [ "$code" -le 1 ] || { echo "notebooks: $* ended with $code" >&2; exit 1; }
}
demo=${2:-}
if [ -z "$demo" ]; then
    demo=$work/argodrive-demo
    rm -rf "$demo"
    measure "$binary" demo --folder "$demo"
fi
demo=$(realpath "$demo")

# Which copy is read, with drives slow enough that a busy machine keeps their pace.
sed 's/rate = "[^"]*"/rate = "10MB\/s"/; s/latency = "[^"]*"/latency = "10ms"/' "$demo/drives.toml" > "$work/slow.toml"
for dispatch in first-hit split; do
    cat > "$work/$dispatch.toml" <<EOF
store = "$demo/store"
plan = "$demo/full-mirror.plan.json"
drives = "$work/slow.toml"
prompt = "The fox"
max_new = 6
[reader]
dispatch = "$dispatch"
EOF
done
measure "$binary" ab "$work/first-hit.toml" "$work/split.toml" --pairs 6 --floor-pairs 6 --out "$demo/results"

"$venv/bin/python" "$here/execute.py" "$demo" "$work/out"
