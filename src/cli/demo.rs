//! `argodrive demo`: the whole tour on a small real model, with four emulated drives in one folder. Needs no root, no
//! download and no second disk.

use super::ladder::{climb_and_draw, command_words, show};
use super::run_args::{device_inputs, interrupt_flag};
use super::{ByteBar, REJECTED, print, remark};
use crate::bench::config::{Asked, RunConfig};
use crate::bench::ladder::{LadderSpec, Layout, RungKind, rungs};
use crate::bench::record;
use crate::bench::run::{RunSpec, run as run_once};
use crate::drive::spec::{self, DriveSpec, Emulation, RateSchedule};
use crate::layout::planner;
use crate::layout::policy::{Policy, PolicyFile};
use crate::model::chat::{ChatOptions, Message, Role};
use crate::model::text_stream::TextStream;
use crate::open::Model;
use crate::report::units;
use crate::stage::{StageOptions, stage};
use crate::store::import::{ImportOptions, import};
use crate::store::manifest::STORE_FILE;
use crate::sys::direct::is_memory_file_system;
use crate::sys::durable::write_atomic;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Drives of the demo.
const DRIVES: usize = 4;
/// Pace of each: decoding waits for it, and the first read of a barrier has 4 ms, so that a shared virtual machine (whose
/// disk took longer than 2.3 ms for one read in fifty) seldom misses a deadline.
const PACE: Emulation = Emulation {
    rate_bytes_per_s: 10_000_000,
    latency_ns: 1_500_000,
    per_read_ns: 0,
    jitter: 0.0,
    seed: 0,
    schedule: RateSchedule::NONE,
    link: None,
};
/// What the model is asked.
const QUESTION: &str = "Tell me a short story about a fox.";
/// Tokens of a ladder run: enough for steady decode, short enough for two minutes in all.
const LADDER_TOKENS: usize = 24;
/// Most tokens of the story.
const STORY_TOKENS: usize = 200;
/// Counted runs per rung.
const LADDER_RUNS: usize = 4;

/// See it work: a small real model, four emulated drives, a story and a ladder
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder to work in
    #[arg(long, value_name = "DIR", default_value = "argodrive-demo")]
    folder: PathBuf,
    /// A checkpoint to use instead of the model in the binary
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let folder = &args.folder;
    std::fs::create_dir_all(folder).with_context(|| format!("--folder {}", folder.display()))?;
    if is_memory_file_system(folder)? {
        bail!(
            "{} is in a memory file system: reads from it are no reads from a drive; give --folder on a disk",
            folder.display()
        );
    }
    let store = folder.join("store");
    if !store.join(STORE_FILE).exists() {
        import_model(args.checkpoint.as_deref(), folder, &store)?;
    }
    let model = Model::load(&store, None)?;
    let drives = make_drives(folder)?;
    print(&format!(
        "model   {}: {} experts of {} in {} layers, {} routed to per token and layer",
        model.manifest.name,
        model.manifest.experts as usize * model.manifest.moe_layers.len(),
        units::bytes(model.manifest.expert_bytes),
        model.manifest.moe_layers.len(),
        model.decoder.config().moe.as_ref().map_or(0, |m| m.top_k),
    ))?;
    print(&format!(
        "drives  {DRIVES} EMULATED drives of {} and {} latency each, in {}",
        units::rate(PACE.rate_bytes_per_s as f64),
        units::duration(PACE.latency_ns),
        folder.display()
    ))?;
    let policy = Policy::FullMirror {};
    let plan_drives = super::plan::plan_drives(&drives);
    let plan = planner::plan(&model.catalog(), &plan_drives, &policy, 0, device_inputs(&drives).collect())?;
    let policy = PolicyFile::from(policy);
    let plan_path = folder.join("full-mirror.plan.json");
    write_atomic(&plan_path, plan.to_json()?.as_bytes()).with_context(|| plan_path.display().to_string())?;
    let mounts: Vec<PathBuf> = drives.iter().map(|d| d.path.clone()).collect();
    let bar = ByteBar::new("staging");
    let staged = stage(&plan, &store, &mounts, StageOptions::default(), &mut |at| bar.show(at))?;
    bar.finish();
    let copied: u64 = staged.iter().map(|d| d.copied_bytes).sum();
    print(&format!("plan    {}: every expert on every drive; {} copied\n", plan_path.display(), units::bytes(copied)))?;
    let prompt = story_prompt(&model)?;
    let interrupted = interrupt_flag()?;
    let trace = folder.join("story-trace");
    tell_story(&model, &plan, &drives, &prompt, &trace, &|| interrupted.load(Ordering::SeqCst))?;
    if interrupted.load(Ordering::SeqCst) {
        bail!("interrupted");
    }
    let page = folder.join("story.html");
    super::trace::write_page_of(&trace, &page)?;
    print(&format!("who was waited for, and why: {}", page.display()))?;
    print("\nThe same prompt on 1, 2, 3 and 4 of these drives:\n")?;
    let results = record::new_folder(&folder.join("results"), "ladder")?;
    let asked = demo_config(&store, LADDER_TOKENS);
    let spec = LadderSpec {
        drives: &drives,
        sets: &rungs::sets(drives.len(), &[RungKind::Ladder].into(), &[]),
        layout: Layout::Planned { policy: &policy, heat: None },
        profile: None,
        inputs: &BTreeMap::new(),
        asked: &asked,
        prompt: &prompt,
        repetitions: LADDER_RUNS,
        folder: &results,
        command: &command_words(),
    };
    let ladder = climb_and_draw(&model, &spec, &|| interrupted.load(Ordering::SeqCst), &model.manifest.name)?;
    show(&ladder, &results)?;
    Ok(if ladder.rejected.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REJECTED) })
}

/// Imports `checkpoint`, or the model in the binary.
fn import_model(checkpoint: Option<&Path>, folder: &Path, store: &Path) -> Result<()> {
    let unpacked = folder.join("argo-mini");
    let source = match checkpoint {
        Some(path) => path,
        None => {
            embedded::unpack(&unpacked)?;
            &unpacked
        }
    };
    let bar = ByteBar::new("import");
    import(source, store, &ImportOptions::default(), &mut |at| bar.show(at))?;
    bar.finish();
    if checkpoint.is_none() {
        std::fs::remove_dir_all(&unpacked).with_context(|| unpacked.display().to_string())?;
    }
    Ok(())
}

/// Four folders and the drives.toml that describes them.
fn make_drives(folder: &Path) -> Result<Vec<DriveSpec>> {
    let folder = folder.canonicalize()?;
    let mut drives = Vec::with_capacity(DRIVES);
    for (number, name) in ["amber", "blue", "coral", "denim"].into_iter().enumerate() {
        let path = folder.join(name);
        std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        let emulate = Some(Emulation { seed: number as u64, ..PACE });
        drives.push(DriveSpec { name: name.into(), path, emulate, faults: Vec::new() });
    }
    let toml = folder.join("drives.toml");
    write_atomic(&toml, spec::render(&drives).as_bytes()).with_context(|| toml.display().to_string())?;
    Ok(drives)
}

fn demo_config(store: &Path, max_new: usize) -> Asked {
    // A chat prompt is made of special tokens and text.
    let (store, prompt) = (store.to_path_buf(), Some(QUESTION.into()));
    let config = RunConfig { store, prompt, special: true, max_new, ..RunConfig::default() };
    Asked { config, ..Asked::default() }
}

fn story_prompt(model: &Model) -> Result<Vec<u32>> {
    let messages = [Message::new(Role::User, QUESTION)];
    Ok(model.chat()?.encode(&model.tokenizer, &messages, &ChatOptions::default())?)
}

fn tell_story(
    model: &Model,
    plan: &crate::layout::plan::Plan,
    drives: &[DriveSpec],
    prompt: &[u32],
    trace: &Path,
    interrupted: &dyn Fn() -> bool,
) -> Result<()> {
    print(&format!("> {QUESTION}"))?;
    let mut asked = demo_config(&model.folder, STORY_TOKENS);
    std::fs::create_dir_all(trace).with_context(|| trace.display().to_string())?;
    asked.config.trace = Some(trace.to_path_buf());
    let mut stream = TextStream::new();
    let say = |piece: String| {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
    };
    let spec = RunSpec {
        arm: "story",
        asked: &asked,
        under_test: &BTreeSet::new(),
        streamed: Some((plan, drives)),
        prompts: &[prompt.to_vec()],
        control: None,
    };
    let result = run_once(model, &spec, &mut |token| {
        let bytes = model.tokenizer.decode_visible_bytes(&[token]);
        say(stream.push(&bytes));
        if interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    say(stream.finish());
    print("")?;
    let record = &result.record;
    print(&format!(
        "\n{} tokens at {} tok/s from {DRIVES} emulated drives; waited for experts {} of the time",
        record.generated_tokens,
        units::tokens_per_s(record.rates.decode_tok_s),
        units::percent(record.io_wait_share)
    ))?;
    for reason in &record.rejected {
        remark(&format!("this figure does not count: {reason}"));
    }
    Ok(())
}

#[cfg(feature = "embedded-model")]
mod embedded {
    //! argo-mini inside the binary.
    use anyhow::{Context, Result};
    use std::path::Path;

    macro_rules! files {
        ($($name:literal),+) => {
            &[$(($name, include_bytes!(concat!("../../models/argo-mini/", $name)).as_slice())),+]
        };
    }

    const FILES: &[(&str, &[u8])] =
        files!("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json");

    /// Writes the checkpoint to `folder`.
    pub fn unpack(folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        for (name, bytes) in FILES {
            let path = folder.join(name);
            std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

#[cfg(not(feature = "embedded-model"))]
mod embedded {
    //! A binary without the model says so.
    use anyhow::{Result, bail};
    use std::path::Path;

    pub fn unpack(_: &Path) -> Result<()> {
        bail!("this argodrive was built without the feature `embedded-model`; give --checkpoint <dir>");
    }
}
