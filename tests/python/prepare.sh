#!/usr/bin/env bash
# Fetches what the browser, the Python clients and the notebooks need: packages of the system (under CI=true, as root) and of Python,
# the latter into folders below target/. The scripts fetch it themselves where this did not run; here it can happen while
# something else compiles.
set -euo pipefail
cd "$(dirname "$0")/../.."
missing=()
command -v chromium >/dev/null && command -v chromedriver >/dev/null || missing+=(chromium chromium-driver)
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ] && [ "${CI:-}" = true ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi
notebooks/run.sh --prepare
. tests/python/setting.sh
make_venv openai selenium
