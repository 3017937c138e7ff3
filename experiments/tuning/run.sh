#!/bin/sh
# Does `tune` improve a bad profile, and leave a good one alone? Twice the same command: the first begins with what there is
# when there is no profile (equal shares on unequal drives), the second with what the first has made of it.
#
#   experiments/tuning/run.sh [argodrive] [work folder] [minutes for each]
#
# Run it from the repository's root, on a machine that does nothing else: a pace that is not kept rejects runs. A run that
# was stopped goes on when it is started again.
set -eu
argodrive=${1:-target/release/argodrive}
work=${2:-argodrive-work/tuning}
minutes=${3:-20}
here=$(dirname "$0")

mkdir -p "$work/amber" "$work/blue" "$work/coral"
cp "$here/drives.toml" "$work/drives.toml"
"$argodrive" import models/argo-mini --store "$work/store"

tune() {
    "$argodrive" tune --store "$work/store" --drives "$work/drives.toml" \
        --prompt-file models/prompts/evaluation/once.txt --heat-prompt-file models/prompts/heat/bear.txt \
        --profile "$work/profile.toml" --max-new 8 --minutes "$minutes" --out "$work/results" "$@"
}

if [ ! -e "$work/profile.toml" ]; then
    echo "== a bad start: one copy of every expert, equal shares on drives of 3, 2 and 1 MB/s (EMULATED)"
    tune
fi
echo "== a good start: the profile as it is now"
# drives have not changed, so what was measured of them the first time holds
ceiling=
for file in "$work"/results/tune/*/ceiling.json; do
    if [ -e "$file" ]; then ceiling=$file; fi
done
if [ -n "$ceiling" ]; then tune --ceiling "$ceiling"; else tune; fi
