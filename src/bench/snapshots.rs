//! Snapshots of a run: the settings, what must be the same when a text goes on, and what a record says of it. Writes nothing itself.

use super::config::{Asked, ConfigError, RunConfig};
use crate::decode::KernelIsa;
use crate::decode::snapshot::SnapshotRun;
use crate::knob::Knob;
use crate::open::{Model, OtherText, Resumable, SnapshotCounters, SnapshotError};
use crate::store::snapshot_file::list;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Folder of a store that snapshots go to unless told otherwise.
pub const SNAPSHOT_FOLDER: &str = "snapshots";

/// When a text is kept, where, and whether one goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SnapshotOptions {
    /// Most tokens that are lost if the program is killed; 0 = no snapshots.
    pub snapshot_every: usize,
    /// Folder of the snapshots; without one, `snapshots` in the store.
    pub snapshot_dir: Option<PathBuf>,
    /// A snapshot, or a folder whose newest one it is, to go on from; empty = the folder that snapshots go to.
    pub resume: Option<PathBuf>,
}

impl SnapshotOptions {
    /// Where snapshots go.
    pub fn folder(&self, store: &Path) -> PathBuf {
        self.snapshot_dir.clone().unwrap_or_else(|| store.join(SNAPSHOT_FOLDER))
    }

    /// Where the snapshot to go on from is looked for.
    fn resume_from(&self, store: &Path) -> Option<PathBuf> {
        self.resume.as_ref().map(|at| if at.as_os_str().is_empty() { self.folder(store) } else { at.clone() })
    }
}

/// Settings that cannot go together.
pub(super) fn check(config: &RunConfig) -> Result<(), ConfigError> {
    let (s, draft) = (&config.snapshot, &config.draft);
    let no = |why: String| Err(ConfigError::Contradiction(why));
    let on = s.snapshot_every > 0 || s.resume.is_some();
    if s.snapshot_dir.is_some() && !on {
        return no("--snapshot-dir does nothing without --snapshot-every or --resume; leave it out".into());
    }
    if on && config.prompts.is_some() {
        let why = "--snapshot-every and --resume keep one text, and --prompts gives several that share passes; run the texts \
                   one by one, or leave one of them out";
        return no(why.into());
    }
    if on && draft.draws(config.sampler.temperature) {
        let why = "--snapshot-every and --resume do not keep where the draft model's own draws stand, which --draft-accept \
                   standard needs; give --draft-accept exact-match";
        return no(why.into());
    }
    match draft.rows() {
        rows if s.snapshot_every > 0 && s.snapshot_every < rows => no(format!(
            "--snapshot-every {}: one pass with --draft-depth {} may add {rows} tokens; give --snapshot-every {rows} or more",
            s.snapshot_every, draft.draft_depth
        )),
        _ => Ok(()),
    }
}

/// What a text of this run has in common with whatever goes on with it.
pub fn run_of(model: &Model, config: &RunConfig) -> SnapshotRun {
    SnapshotRun {
        model_id: model.manifest.model_id.clone(),
        trunk: model.manifest.trunk_format.name().into(),
        kernels: model.decoder.isa().name().into(),
        activations: config.model.activations,
        sampler: config.sampler,
        stop: model.stop_ids.clone(),
        max_new: config.max_new,
        max_context: config.model.max_context,
        special: config.special,
        snapshot_every: config.snapshot.snapshot_every,
    }
}

/// The newest snapshot that a run with `prompt` would leave behind it by beginning anew.
pub fn left_behind(model: &Model, config: &RunConfig, prompt: &[u32]) -> Option<PathBuf> {
    let s = &config.snapshot;
    if s.snapshot_every == 0 || s.resume.is_some() {
        return None;
    }
    let name = run_of(model, config).text_name(prompt);
    list(&s.folder(&model.folder)).ok()?.into_iter().find(|n| n.text == name).map(|n| n.path)
}

/// The snapshot that a run is to go on from, if it is to. What the snapshot says of its run holds where nobody asked for anything
/// else; whoever asks for other tokens is refused.
pub fn find(asked: &mut Asked) -> Result<Option<Resumable>, SnapshotError> {
    let store = asked.config.store.clone();
    let Some(at) = asked.config.snapshot.resume_from(&store) else { return Ok(None) };
    let found = Resumable::find(&at)?;
    adopt(&found, asked).map_err(|reason| SnapshotError::Other { path: found.path().to_path_buf(), reason })?;
    Ok(Some(found))
}

fn adopt(found: &Resumable, asked: &mut Asked) -> Result<(), String> {
    let (run, c, given) = (&found.header.run, &mut asked.config, &asked.given);
    let (then, now) = (&run.sampler, &c.sampler);
    let kernels = c.model.kernels != "auto" && c.model.kernels != run.kernels;
    let context = |n: usize| if n == 0 { "the model's own".into() } else { n.to_string() };
    let settings: [(Knob, &str, bool, String, String); 8] = [
        (
            Knob::Temperature,
            "temperature",
            then.temperature != now.temperature,
            then.temperature.to_string(),
            now.temperature.to_string(),
        ),
        (Knob::TopP, "top-p", then.top_p != now.top_p, then.top_p.to_string(), now.top_p.to_string()),
        (Knob::TopK, "top-k", then.top_k != now.top_k, then.top_k.to_string(), now.top_k.to_string()),
        (Knob::Seed, "seed", then.seed != now.seed, then.seed.to_string(), now.seed.to_string()),
        (Knob::Kernels, "kernels", kernels, run.kernels.clone(), c.model.kernels.clone()),
        (
            Knob::Activations,
            "activations",
            run.activations != c.model.activations,
            run.activations.to_string(),
            c.model.activations.to_string(),
        ),
        (
            Knob::MaxContext,
            "max-context",
            run.max_context != c.model.max_context,
            context(run.max_context),
            context(c.model.max_context),
        ),
        (Knob::Special, "special", run.special != c.special, run.special.to_string(), c.special.to_string()),
    ];
    if let Some((_, flag, _, then, now)) =
        settings.iter().find(|(knob, _, differs, ..)| *differs && given.contains(knob))
    {
        return Err(format!(
            "the text was decoded with --{flag} {then}, --{flag} {now} would give other tokens; leave the flag out, or decode \
             the prompt again without --resume"
        ));
    }
    let lacks = !run.kernels.parse::<KernelIsa>().is_ok_and(KernelIsa::is_available);
    if lacks && !given.contains(&Knob::Kernels) {
        return Err(format!(
            "the text was decoded with {} kernels, which this processor does not run; those of others differ in their last bits, \
             so the text can only go on where it has them",
            run.kernels
        ));
    }
    let generated = found.header.generated_tokens;
    if !given.contains(&Knob::MaxNew) {
        c.max_new = run.max_new;
    }
    if c.max_new <= generated {
        return Err(format!(
            "the text has {generated} tokens already, and --max-new is {}; give a larger --max-new to go on",
            c.max_new
        ));
    }
    c.sampler = run.sampler;
    (c.model.max_context, c.special) = (run.max_context, run.special);
    c.model.activations = run.activations;
    if !given.contains(&Knob::Kernels) {
        c.model.kernels.clone_from(&run.kernels);
    }
    if !given.contains(&Knob::SnapshotEvery) {
        c.snapshot.snapshot_every = run.snapshot_every;
    }
    if c.snapshot.snapshot_every > 0 && c.snapshot.snapshot_dir.is_none() {
        c.snapshot.snapshot_dir = found.path().parent().map(|folder| {
            // of a bare file name the parent is empty
            if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder.to_path_buf() }
        });
    }
    c.snapshot.resume = Some(found.path().to_path_buf());
    Ok(())
}

/// Why a run with these settings and prompt cannot go on with that text.
pub(super) fn differs(found: &Resumable, own: &SnapshotRun, same_prompt: bool) -> Option<String> {
    let then = &found.header.run;
    let why = if !same_prompt {
        "the text has another prompt; leave the prompt out, or give the snapshot of this one"
    } else if then.stop != own.stop {
        "the text was decoded with other stop tokens; give the store that it was decoded from"
    } else if (then.sampler, then.max_context, then.special, then.activations)
        != (own.sampler, own.max_context, own.special, own.activations)
    {
        "the text was decoded with other settings of sampling, context, special tokens or activations, which would give other tokens"
    } else if own.max_new <= found.header.generated_tokens {
        "the text has all tokens of --max-new already; give a larger one"
    } else {
        return None;
    };
    Some(why.into())
}

/// What going on with a text took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResumeRecord {
    /// The snapshot.
    pub from: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// Tokens that had been generated.
    pub tokens: usize,
    /// Tokens that the states had seen.
    pub position: usize,
    /// Time to check and read it.
    pub restore_ns: u64,
}

/// What snapshots of a run took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRecord {
    /// Where they went.
    pub folder: PathBuf,
    /// Snapshots written.
    pub written: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the last one.
    pub last_bytes: u64,
    /// Tokens generated in the last one.
    pub last_tokens: u64,
    /// Time in which decoding stood still to copy states.
    pub copy_ns: u64,
    /// Time in which it waited for the writer.
    pub wait_ns: u64,
    /// Time in which files were written, beside decoding.
    pub write_ns: u64,
    /// `(copy_ns + wait_ns)` / wall time of decoding.
    pub blocked_share: f64,
    /// Other texts whose snapshots are in the folder too; nothing removes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_texts: Vec<OtherText>,
}

impl SnapshotRecord {
    /// From what was counted in a run that decoded for `decode_ns`.
    pub(super) fn of(folder: PathBuf, c: &SnapshotCounters, decode_ns: u64) -> Self {
        let blocked_ns = c.copy_ns + c.wait_ns;
        Self {
            folder,
            written: c.written,
            bytes: c.bytes,
            last_bytes: c.last_bytes,
            last_tokens: c.last_tokens,
            copy_ns: c.copy_ns,
            wait_ns: c.wait_ns,
            write_ns: c.write_ns,
            blocked_share: if decode_ns == 0 { 0.0 } else { blocked_ns as f64 / decode_ns as f64 },
            other_texts: c.other_texts.clone(),
        }
    }
}
