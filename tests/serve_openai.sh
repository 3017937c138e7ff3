#!/usr/bin/env bash
# Runs clients against a running `argodrive serve`: the openai package's own (tests/python/openai_client.py).
# Usage: tests/serve_openai.sh [binary]. Without python3 it is skipped; under CI=true that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/python/setting.sh
make_venv openai
import_model
start_server --queue 2 --cache-bytes 4MiB
"$venv/bin/python" tests/python/openai_client.py "$url/v1" argo-mini sesame
stop_server
