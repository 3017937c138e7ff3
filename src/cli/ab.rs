//! `argodrive ab`: two configurations against each other, with real decode.

use super::campaign::run_and_show;
use crate::bench::campaign::arms::Arm;
use crate::bench::campaign::design::Design;
use crate::bench::campaign::prompts::{Prompt, check_apart, load};
use crate::bench::config::Asked;
use crate::bench::record;
use anyhow::{Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Compare two configurations: the control against itself first, then both in balanced order
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The control: settings as for `decode --config`, or a record
    a: PathBuf,
    /// The candidate
    b: PathBuf,
    /// Pairs of runs; fewer than 6 say nothing [default: 8, or as many more as prompts need]
    #[arg(long, value_name = "N")]
    pairs: Option<usize>,
    /// Pairs of the control against itself [default: as many as --pairs]
    #[arg(long, value_name = "N")]
    floor_pairs: Option<usize>,
    /// Look after 6, 8, ... pairs and stop at an effect; --pairs is then the most, and looking is paid for
    #[arg(long)]
    stop: bool,
    /// Seed of the bootstrap
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Prompts for both, instead of that of the configurations: files, and folders of .txt files
    #[arg(long, value_name = "PATH", num_args = 1..)]
    prompts: Vec<PathBuf>,
    /// Prompts that the layouts were made from: refused if they overlap the others
    #[arg(long, value_name = "PATH", num_args = 1..)]
    heat_prompts: Vec<PathBuf>,
    /// Heat files that the layouts were made from: refused if a prompt is their source
    #[arg(long, value_name = "FILE", num_args = 1..)]
    heat: Vec<PathBuf>,
    /// Folder that gets the records
    #[arg(long, value_name = "DIR", default_value = "results")]
    out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut arms = Vec::with_capacity(2);
    for (path, name) in [&args.a, &args.b].into_iter().zip(names(&args.a, &args.b)) {
        if !path.exists() {
            bail!("{}: no such file; give two files with settings, as for `decode --config`", path.display());
        }
        arms.push(Arm { name, asked: Asked::load(path)?, fired: BTreeSet::new() });
    }
    let prompts = if args.prompts.is_empty() { own_prompts(&arms)? } else { load(&args.prompts)? };
    let heats = args.heat.iter().map(|p| Ok((p.clone(), super::heat::read_heat(p)?))).collect::<Result<Vec<_>>>()?;
    check_apart(&prompts, &load(&args.heat_prompts)?, &heats)?;
    let design = Design {
        experiment: "ab".into(),
        arms,
        prompts,
        pairs: args.pairs,
        floor_pairs: args.floor_pairs,
        stop: args.stop,
        seed: args.seed,
        ..Design::default()
    };
    let (file, ready) = design.prepare()?;
    let folder = record::new_folder(&args.out, &file.experiment)?;
    run_and_show(&folder, file, &ready, args.json)
}

/// Names of the arms: the files' own, where they tell them apart.
fn names(a: &Path, b: &Path) -> [String; 2] {
    let stem = |path: &Path| {
        let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
        stem.trim_start_matches('.').chars().take(40).map(plain).collect::<String>()
    };
    let (a, b) = (stem(a), stem(b));
    if a == b || a.is_empty() || b.is_empty() { ["A".into(), "B".into()] } else { [a, b] }
}

/// The prompt that both configurations hold.
fn own_prompts(arms: &[Arm]) -> Result<Vec<Prompt>> {
    let mut out: Vec<Prompt> = Vec::new();
    for arm in arms {
        let config = &arm.asked.config;
        let set = config.prompts.as_ref();
        let prompt = match (&config.prompt, config.prompt_file.as_ref().or(set)) {
            (Some(_), Some(_)) => bail!("arm `{}`: prompt and prompt_file are both given; one is enough", arm.name),
            (Some(text), None) if text.is_empty() => bail!("arm `{}`: the prompt is empty", arm.name),
            (Some(text), None) => Prompt::inline(text),
            (None, Some(file)) => load(std::slice::from_ref(file))?.remove(0),
            (None, None) => bail!("arm `{}` has no prompt: give prompt or prompt_file in it, or --prompts", arm.name),
        };
        match out.first() {
            None => out.push(prompt),
            Some(first) if first.digest == prompt.digest => {}
            Some(_) => bail!(
                "the arms have different prompts, and speeds on different texts cannot be compared; give both the same, or \
                 --prompts"
            ),
        }
    }
    Ok(out)
}
