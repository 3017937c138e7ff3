"""Mean decode barrier by dispatch policy against bound_drives (measuring.md section 2), on EMULATED drives.

usage: measure.py ROUNDS DRIVES.toml TOKENS    in a folder with `argodrive`, `store` and `plan.json`
"""
import csv, json, statistics, subprocess, sys, tomllib

POLICIES = ["first-hit", "round-robin", "least-inflight", "expected-completion", "split"]
UNITS = {"MB/s": 1e6, "kB/s": 1e3}
rounds, drives, tokens = int(sys.argv[1]), sys.argv[2], sys.argv[3]
table = tomllib.load(open(drives, "rb"))["drive"]
text = [d["emulate"]["rate"] for d in table]
rates = [float(t[:-4]) * UNITS[t[-4:]] for t in text]
LATENCY_S = 200e-6  # of every drive in these files


def bound_ns(size):
    """All drives start after the same fixed cost, so the water level is one division."""
    return (size / sum(rates) + LATENCY_S) * 1e9


seen = {p: [] for p in POLICIES}
for r in range(rounds):
    order = POLICIES[r % 5:] + POLICIES[:r % 5]
    for policy in order if r % 2 == 0 else order[::-1]:
        subprocess.run(["rm", "-rf", "trace"], check=True)
        run = subprocess.run(
            ["./argodrive", "decode", "--store", "store", "--plan", "plan.json", "--drives", drives, "--prompt",
             "The quick brown fox", "--max-new", tokens, "--dispatch", policy, "--trace", "trace", "--json"],
            capture_output=True, text=True)
        out = json.loads(run.stdout)
        rows = [b for b in csv.DictReader(open("trace/barriers.csv")) if b["phase"] == "decode" and int(b["step"]) >= 5]
        wait = [int(b["last_ns"]) - int(b["open_ns"]) for b in rows]
        bound = [bound_ns(int(b["bytes"])) for b in rows]
        reads = list(csv.DictReader(open("trace/reads.csv")))
        parts = sum(int(x["parts"]) > 1 for x in reads)
        late = [x.split(":")[0].split()[-1] + x.split(":")[1].split(" of")[0] for x in out["rejected"]]
        print(f"{r} {policy}: {len(rows)} barriers, mean {statistics.mean(wait) / 1e6:.2f} ms, mean/bound "
              f"{sum(wait) / sum(bound):.3f}, parts {parts}, overruns above 1 %: {late}", flush=True)
        seen[policy].append((statistics.mean(wait) / 1e6, sum(wait) / sum(bound), out["token_ids"]))
for policy, runs in seen.items():
    ms = [m for m, _, _ in runs]
    print(f"{policy:20} median of {len(runs)} means {statistics.median(ms):.2f} ms ({min(ms):.2f}-{max(ms):.2f}), "
          f"mean/bound {statistics.median(b for _, b, _ in runs):.3f}")
assert all(t == seen["split"][0][2] for runs in seen.values() for _, _, t in runs), "tokens differ between policies"
