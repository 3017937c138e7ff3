# What the scripts with Python clients share: a virtual environment below target/, and a running server with a key.
# Sourced from the repository's root; what must be ended or removed is, however a script ends.

mkdir -p "${CARGO_TARGET_DIR:-target}"
target=$(realpath "${CARGO_TARGET_DIR:-target}")
work=$(mktemp -d -p "$target")
server=
binary=${1:-$target/release/argodrive}
clean_up() {
    if [ -n "$server" ]; then kill -TERM "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap clean_up EXIT

# Ends the script: skipped, or failed where nothing may be.
skip() {
    echo "skipped: $1"
    if [ "${CI:-}" = true ]; then exit 1; fi
    exit 0
}

# The packages named, at the versions of requirements.txt, in a virtual environment that is kept between runs.
make_venv() {
    command -v python3 >/dev/null || skip "there is no python3"
    venv=$target/python-clients
    if [ ! -x "$venv/bin/pip" ]; then
        rm -rf "$venv"
        python3 -m venv "$venv" || skip "python3 cannot make a virtual environment (python3-venv)"
    fi
    local wanted=() package
    for package in "$@"; do wanted+=("$(grep "^$package==" tests/python/requirements.txt)"); done
    "$venv/bin/pip" install --quiet --disable-pip-version-check "${wanted[@]}" || skip "${wanted[*]} cannot be installed"
}

# Makes a store of argo-mini.
import_model() {
    [ -x "$binary" ] || { echo "no binary at $binary: cargo build --release" >&2; exit 2; }
    "$binary" import models/argo-mini --store "$work/argo-mini" --trunk bf16 >/dev/null
}

# Serves it with the key `sesame`; sets url.
start_server() {
    echo sesame >"$work/key"
    "$binary" serve --store "$work/argo-mini" --listen 127.0.0.1:0 --api-key-file "$work/key" "$@" >"$work/out" &
    server=$!
    for _ in $(seq 600); do
        if ! kill -0 "$server" 2>/dev/null; then echo "the server has ended" >&2; exit 1; fi
        url=$(sed -n 's/^serving .* on //p' "$work/out")
        [ -z "$url" ] || return 0
        sleep 0.1
    done
    echo "the server does not start" >&2
    exit 1
}

# Ends the server; it must end well.
stop_server() {
    kill -TERM "$server"
    local code=0
    wait "$server" || code=$?
    server=
    [ "$code" -eq 0 ] || { echo "the server ended with $code" >&2; exit 1; }
}
