//! Examples below the help of every command. A test parses each of them, so that none can name a flag that is gone.

use clap::Command;

/// By command (words of a subcommand separated by a space): lines to type.
const EXAMPLES: &[(&str, &[&str])] = &[
    ("demo", &["argodrive demo", "argodrive demo --folder /fast/demo"]),
    (
        "drives",
        &[
            "argodrive drives --drives drives.toml",
            "argodrive drives /mnt/usb",
            "argodrive drives --drives drives.toml --snapshot before.json",
        ],
    ),
    (
        "ceiling",
        &[
            "argodrive ceiling --drives drives.toml --bytes 17547264 --out profile.json",
            "argodrive ceiling --drives drives.toml --target 20GB/s",
            "argodrive ceiling --drives drives.toml --sustain 40m",
        ],
    ),
    (
        "testbed",
        &[
            "argodrive testbed up --dir /fast/testbed --drives 4 --size 1GB",
            "argodrive testbed unplug --dir /fast/testbed amber",
            "argodrive testbed down --dir /fast/testbed",
        ],
    ),
    ("testbed up", &["argodrive testbed up --dir /fast/testbed --drives 4 --size 1GB"]),
    ("testbed down", &["argodrive testbed down --dir /fast/testbed"]),
    ("testbed show", &["argodrive testbed show --dir /fast/testbed"]),
    ("testbed plug", &["argodrive testbed plug --dir /fast/testbed amber"]),
    ("testbed unplug", &["argodrive testbed unplug --dir /fast/testbed amber"]),
    (
        "estimate",
        &[
            "argodrive estimate config.json --drives drives.toml --ram 128GB",
            "argodrive estimate config.json --drives drives.toml --ram 128GB --rates 6GB/s,3GB/s --context 8k,128k",
        ],
    ),
    (
        "import",
        &[
            "argodrive import ~/checkpoint --store /fast/store",
            "argodrive import ~/checkpoint --store /fast/store --trunk int8",
            "argodrive import ~/checkpoint --store /fast/store --plan plan.json --follow --drop-shards",
        ],
    ),
    ("adopt", &["argodrive adopt /mnt/usb/experts --checkpoint ~/checkpoint --store /fast/store"]),
    (
        "synth",
        &[
            "argodrive synth --as-checkpoint /tmp/random",
            "argodrive synth --as-checkpoint /tmp/skewed --skew 0.8 --check 2000",
        ],
    ),
    (
        "heat",
        &[
            "argodrive heat --store /fast/store --prompt-file a.txt --out heat.json",
            "argodrive heat --routes trace/routes.csv --out heat.json",
            "argodrive heat --merge old.json new.json --decay 0.5 --out heat.json",
        ],
    ),
    (
        "plan",
        &[
            "argodrive plan --store /fast/store --drives drives.toml --policy layouts/full-mirror.toml --out plan.json",
            "argodrive plan --store /fast/store --drives drives.toml --policy layouts/barrier.toml --heat heat.json --out plan.json",
        ],
    ),
    (
        "stage",
        &["argodrive stage plan.json --dry-run", "argodrive stage plan.json", "argodrive stage plan.json --rollback"],
    ),
    ("prune", &["argodrive prune --keep plan.json"]),
    ("verify", &["argodrive verify plan.json", "argodrive verify /fast/store --sample 5%"]),
    (
        "decode",
        &[
            "argodrive decode --store /fast/store --prompt \"Once upon a time\" --max-new 64",
            "argodrive decode --store /fast/store --plan plan.json --prompt-file p.txt --trace trace --json",
            "argodrive decode --store /fast/store --plan plan.json --prompt hi --dispatch least-inflight --assert",
            "argodrive decode --config results/decode/20261130T101500Z-0123456789ab/arms/00-decode/record.json",
        ],
    ),
    (
        "chat",
        &["argodrive chat --store /fast/store", "argodrive chat --store /fast/store --message \"Tell me a story.\""],
    ),
    (
        "serve",
        &[
            "argodrive serve --store /fast/store",
            "argodrive serve --store /fast/store --plan plan.json --listen 0.0.0.0:8080 --api-key-file key.txt",
            "argodrive serve --store /fast/store --sessions 8 --max-connections 64",
        ],
    ),
    (
        "ladder",
        &[
            "argodrive ladder --store /fast/store --drives drives.toml --policy layouts/full-mirror.toml --prompt \"Once\"",
            "argodrive ladder --store /fast/store --drives drives.toml --policy layouts/barrier.toml --heat heat.json --prompt-file p.txt",
        ],
    ),
    (
        "ab",
        &["argodrive ab a.toml b.toml", "argodrive ab a.toml b.toml --pairs 12 --prompts models/prompts/evaluation"],
    ),
    (
        "tune",
        &[
            "argodrive tune --store /fast/store --drives drives.toml --prompt-file a.txt b.txt",
            "argodrive tune --rollback",
        ],
    ),
    (
        "experiment",
        &[
            "argodrive experiment run experiments/mirror.toml --dry-run",
            "argodrive experiment run experiments/mirror.toml",
            "argodrive experiment rerun results/mirror/20261130T101500Z-0123456789ab",
        ],
    ),
    ("experiment run", &["argodrive experiment run experiments/mirror.toml --dry-run"]),
    ("experiment resume", &["argodrive experiment resume results/mirror/20261130T101500Z-0123456789ab"]),
    ("experiment rerun", &["argodrive experiment rerun results/mirror/20261130T101500Z-0123456789ab"]),
    ("monitor", &["argodrive monitor", "argodrive monitor /mnt/usb --interval 10ms --duration 5s --csv usb.csv"]),
    (
        "trace",
        &[
            "argodrive trace report trace --html report.html",
            "argodrive trace replay trace --plot-dir figures",
            "argodrive trace reissue trace --plan other.json",
        ],
    ),
    ("trace report", &["argodrive trace report trace", "argodrive trace report trace --html report.html"]),
    ("trace import", &["argodrive trace import reads.csv --format per-read --out trace"]),
    ("trace reissue", &["argodrive trace reissue trace --plan other.json --gaps none"]),
    ("trace export", &["argodrive trace export trace --format perfetto --out trace.perfetto.json"]),
    ("trace learn", &["argodrive trace learn trace --out table.csv"]),
    ("trace replay", &["argodrive trace replay trace --plot-dir figures"]),
    (
        "simulate",
        &[
            "argodrive simulate trace --plan other.json --profile profile.json",
            "argodrive simulate trace --plan plan.json --add-drive rate=7.1GB/s,latency=80us",
            "argodrive simulate trace --plan other.json --compare measured-trace",
        ],
    ),
    (
        "results",
        &[
            "argodrive results",
            "argodrive results --kind comparison",
            "argodrive results --stale",
            "argodrive results compare results/a/arms/00-decode/record.json results/b/arms/00-decode/record.json",
        ],
    ),
    ("results list", &["argodrive results list results"]),
    ("results compare", &["argodrive results compare a/record.json b/record.json"]),
    ("results bundle", &["argodrive results bundle results --out mine.tar.gz"]),
    ("results import", &["argodrive results import theirs.tar.gz --label workshop"]),
    ("results parquet", &["argodrive results parquet trace"]),
    ("results plot", &["argodrive results plot results/ab/20261130T101500Z-0123456789ab"]),
    (
        "completions",
        &[
            "argodrive completions bash > ~/.local/share/bash-completion/completions/argodrive",
            "argodrive completions fish > ~/.config/fish/completions/argodrive.fish",
        ],
    ),
    ("man", &["argodrive man | man -l -", "argodrive man --out ~/.local/share/man/man1"]),
];

/// `command` with examples below the help of each of its subcommands.
pub(super) fn with_examples(mut command: Command) -> Command {
    for (path, lines) in EXAMPLES {
        let text = format!("Examples:\n  {}", lines.join("\n  "));
        command = match path.split_once(' ') {
            None => command.mut_subcommand(path, |c| c.after_help(text)),
            Some((first, second)) => {
                command.mut_subcommand(first, |c| c.mut_subcommand(second, |c| c.after_help(text)))
            }
        };
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command;

    #[test]
    fn every_command_has_examples_that_parse() {
        let known: Vec<&str> = EXAMPLES.iter().map(|(path, _)| *path).collect();
        for sub in command().get_subcommands() {
            assert!(known.contains(&sub.get_name()), "{}: no example", sub.get_name());
            for inner in sub.get_subcommands() {
                let path = format!("{} {}", sub.get_name(), inner.get_name());
                assert!(known.contains(&path.as_str()), "{path}: no example");
            }
        }
        for (path, lines) in EXAMPLES {
            for line in *lines {
                let typed = line.split(['>', '|']).next().unwrap_or(line);
                let words: Vec<String> = quoted(typed);
                assert!(line.starts_with(&format!("argodrive {path}")), "{path}: {line}");
                if let Err(e) = command().try_get_matches_from(&words) {
                    panic!("{line}: {e}");
                }
            }
        }
    }

    /// Words of a line, double quotes respected.
    fn quoted(line: &str) -> Vec<String> {
        line.split('"')
            .enumerate()
            .flat_map(|(i, part)| match i % 2 {
                0 => part.split_whitespace().map(str::to_owned).collect::<Vec<_>>(),
                _ => vec![part.to_owned()],
            })
            .collect()
    }
}
