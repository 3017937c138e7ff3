#!/usr/bin/env bash
# Opens the page of a running `argodrive serve` in a real browser (tests/python/dashboard.py); pictures of it are left in
# target/dashboard-*.png. Usage: tests/browser.sh [binary]. Without a browser it is skipped; under CI=true that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/python/setting.sh
if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then
    if [ "${CI:-}" = true ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null
    else
        skip "there is no chromium with chromedriver"
    fi
fi
make_venv selenium
# two emulated drives, so that there is something to tell apart
mkdir "$work/amber" "$work/blue"
for name in amber blue; do
    printf '[[drive]]\nname = "%s"\npath = "%s"\nemulate = { rate = "40MB/s", latency = "1ms" }\n' "$name" "$work/$name"
done >"$work/drives.toml"
import_model
"$binary" plan --store "$work/argo-mini" --drives "$work/drives.toml" --policy layouts/round-robin.toml \
    --out "$work/plan.json" >/dev/null
"$binary" stage "$work/plan.json" >/dev/null
# past runs: the committed ones, and one of each kind of end made now
cp -r results/samples "$work/results"
decode() {
    "$binary" decode --store "$work/argo-mini" --plan "$work/plan.json" --prompt "Once upon a time" --max-new 8 --assert \
        --out "$work/results" "$@" >/dev/null 2>&1
}
decode --drives "$work/drives.toml" || true
decode --drives "$work/drives.toml" --dispatch least-inflight && { echo "a run that cannot count was accepted" >&2; exit 1; }
start_server --plan "$work/plan.json" --drives "$work/drives.toml" --results "$work/results"
"$venv/bin/python" tests/python/dashboard.py "$url" argo-mini sesame "$work/profile" "$target"
stop_server
