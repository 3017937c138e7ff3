//! The configuration of a run: each layer's options in one TOML file (or the `config` of an earlier record), then flags
//! on top. No environment variables. A key that does not exist is an error that names it and the nearest one that does.

use super::experiment::merge;
use super::kv::{self, KvOptions};
pub use super::model_options::{ModelOptions, OF_DRAFTS};
use super::model_options::{check_draft, idle_draft};
pub use super::nearest::{nearest, with_nearest};
use super::profile::take_tuned;
use super::snapshots::{self, SnapshotOptions};
use crate::decode::SpeculateOptions;
use crate::decode::kernels::pool::MAX_THREADS;
use crate::decode::sampler::SamplerOptions;
use crate::files::{self, Kind};
use crate::knob::Knob;
use crate::reader::{PrefetchPolicy, PrefetchPool, ReaderOptions};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Largest configuration or record that is read.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// Knobs that do nothing where no drive is read.
pub(super) const READING: [Knob; 24] = [
    Knob::Dispatch,
    Knob::Split,
    Knob::Hedge,
    Knob::Engine,
    Knob::Sqpoll,
    Knob::Rates,
    Knob::QueueDepth,
    Knob::BufferBytes,
    Knob::Direct,
    Knob::VerifyDigests,
    Knob::ReadTimeout,
    Knob::Faults,
    Knob::Shed,
    Knob::MaxReadRate,
    Knob::Duty,
    Knob::Prefetch,
    Knob::PrefetchDepth,
    Knob::PrefetchExperts,
    Knob::PrefetchQueueDepth,
    Knob::PrefetchPool,
    Knob::PrefetchDispatch,
    Knob::PrefetchGovernor,
    Knob::CacheBytes,
    Knob::CachePolicy,
];

/// Knobs of prefetch that do nothing without a guesser.
pub const OF_PREFETCH: [Knob; 6] = [
    Knob::PrefetchDepth,
    Knob::PrefetchExperts,
    Knob::PrefetchQueueDepth,
    Knob::PrefetchPool,
    Knob::PrefetchDispatch,
    Knob::PrefetchGovernor,
];

/// A knob of prefetch that somebody gave although it does nothing with these options, and why.
pub fn idle_prefetch(reader: &ReaderOptions, given: &BTreeSet<Knob>) -> Option<(Knob, &'static str)> {
    if reader.prefetch == PrefetchPolicy::None {
        return OF_PREFETCH.into_iter().find(|k| given.contains(k)).map(|k| (k, "without prefetch; give --prefetch"));
    }
    let shared = reader.prefetch_pool == PrefetchPool::Shared && given.contains(&Knob::PrefetchQueueDepth);
    shared
        .then_some((Knob::PrefetchQueueDepth, "in demand's pool, whose depth is queue_depth; give --prefetch-pool own"))
}

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("--config {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It does not parse, or a key does not exist.
    #[error("--config {}: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Two settings cannot go together, or one is missing.
    #[error("{0}")]
    Contradiction(String),
}

/// Everything that decides what a run does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// The store.
    pub store: PathBuf,
    /// The plan; without one the store itself is the one drive.
    pub plan: Option<PathBuf>,
    /// The drives, if not where the plan says.
    pub drives: Option<PathBuf>,
    /// Hold every expert in memory.
    pub resident: bool,
    /// Where every read and barrier is written.
    pub trace: Option<PathBuf>,
    /// Run once more with every expert in memory, and compare.
    pub reference: bool,
    /// Sample the drives' devices beside a trace.
    pub monitor: bool,
    /// The prompt.
    pub prompt: Option<String>,
    /// A file with the prompt.
    pub prompt_file: Option<PathBuf>,
    /// A set of prompts: a JSON-lines file, or a folder of `.txt` files.
    pub prompts: Option<PathBuf>,
    /// Recognise special tokens in the prompt.
    pub special: bool,
    /// Most tokens to generate.
    pub max_new: usize,
    /// Settings that must be proved for the run to count; empty = those that were given.
    pub under_test: Vec<String>,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// How the model is run.
    pub model: ModelOptions,
    /// How text is drafted and checked.
    pub draft: SpeculateOptions,
    /// When the text is kept, and whether one goes on.
    pub snapshot: SnapshotOptions,
    /// How much memory latent caches may take.
    pub kv: KvOptions,
    /// How experts are read.
    pub reader: ReaderOptions,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            store: PathBuf::new(),
            plan: None,
            drives: None,
            resident: false,
            trace: None,
            reference: false,
            monitor: true,
            prompt: None,
            prompt_file: None,
            prompts: None,
            special: false,
            max_new: 256,
            under_test: Vec::new(),
            sampler: SamplerOptions::default(),
            model: ModelOptions::default(),
            draft: SpeculateOptions::default(),
            snapshot: SnapshotOptions::default(),
            kv: KvOptions::default(),
            reader: ReaderOptions::default(),
        }
    }
}

/// A configuration and the knobs that somebody set in it.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// The values.
    pub config: RunConfig,
    /// Knobs that a file or a flag gave, as opposed to defaults.
    pub given: BTreeSet<Knob>,
    /// Tokens and plan of the record that this repeats, if it repeats one.
    pub repeats: Option<Repeated>,
}

/// What a repeated run must give again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeated {
    /// Hash of the tokens.
    pub token_hash: String,
    /// Hash of the plan.
    pub plan_hash: String,
}

impl Asked {
    /// Reads a TOML file, or the configuration inside a record (a file ending in `.json`).
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let io = |source| ConfigError::Io { path: path.to_path_buf(), source };
        let syntax = |reason: String| ConfigError::Syntax { path: path.to_path_buf(), reason };
        let len = std::fs::metadata(path).map_err(io)?.len();
        if len > MAX_CONFIG_BYTES {
            return Err(syntax(format!("{len} bytes; a configuration has at most {MAX_CONFIG_BYTES}")));
        }
        let text = files::read_text(path).map_err(io)?;
        let syntax = |reason: String| syntax(files::instead(&text, Kind::Settings).unwrap_or(reason));
        if path.extension().is_some_and(|e| e == "json") {
            return Self::from_record(&text).map_err(syntax);
        }
        let mut table: toml::Table = toml::from_str(&text).map_err(|e| syntax(e.to_string()))?;
        if take_tuned(&mut table).map_err(syntax)?.is_some() {
            return Self::of_table(table).map_err(syntax);
        }
        // from the text, so that an error names a line
        let config = toml::from_str(&text).map_err(|e| syntax(with_nearest(&e.to_string())))?;
        let mut given = BTreeSet::new();
        collect_given(&table, &mut given);
        Ok(Self { config, given, repeats: None })
    }

    /// Settings of a table, all of them given.
    pub fn of_table(table: toml::Table) -> Result<Self, String> {
        let mut given = BTreeSet::new();
        collect_given(&table, &mut given);
        let config = table.try_into().map_err(|e: toml::de::Error| with_nearest(e.message()))?;
        Ok(Self { config, given, repeats: None })
    }

    /// A profile (`--profile`), and over it a configuration (`--config`), setting by setting.
    pub fn load_over(profile: &Path, config: Option<&Path>) -> Result<Self, ConfigError> {
        let named = |reason: String| ConfigError::Contradiction(format!("--profile {}: {reason}", profile.display()));
        let mut whole = read_profile(profile).map_err(named)?;
        if let Some(path) = config {
            let path_text = path.display();
            if path.extension().is_some_and(|e| e == "json") {
                return Err(ConfigError::Contradiction(format!(
                    "--config {path_text} is a record, which holds every setting already; leave --profile out"
                )));
            }
            Self::load(path)?; // whatever is wrong with it is its own fault, not the profile's
            merge(&mut whole, &read_table(path).map_err(ConfigError::Contradiction)?);
        }
        Self::of_table(whole).map_err(named)
    }

    fn from_record(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let Head { version } = serde_json::from_str(text).map_err(|e| format!("not a run record: {e}"))?;
        if version > super::record::RECORD_VERSION {
            return Err(format!("record version {version} was written by a newer argodrive; use that one"));
        }
        let record: super::record::RunRecord =
            serde_json::from_str(text).map_err(|e| with_nearest(&format!("not a run record: {e}")))?;
        let given = record.given.iter().filter_map(|n| Knob::named(n)).collect();
        let repeats = Repeated { token_hash: record.token_hash, plan_hash: record.plan_hash };
        Ok(Self { config: record.config, given, repeats: Some(repeats) })
    }

    /// Settings that cannot go together, or that could do nothing, found before anything is opened.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.config.check()?;
        if self.given.contains(&Knob::Monitor) && self.config.trace.is_none() {
            return Err(ConfigError::Contradiction(
                "monitor decides what is written beside a trace; give --trace, or leave it out".into(),
            ));
        }
        let idle = idle_prefetch(&self.config.reader, &self.given).or_else(|| idle_draft(&self.config, &self.given));
        if self.repeats.is_none()
            && let Some((knob, why)) = idle
        {
            return Err(ConfigError::Contradiction(format!("{} does nothing {why}, or leave it out", knob.name())));
        }
        match READING.iter().find(|k| self.config.resident && self.given.contains(k)) {
            Some(knob) => Err(ConfigError::Contradiction(format!(
                "resident reads no drive, so {} would do nothing; leave one of them out",
                knob.name()
            ))),
            None => Ok(()),
        }
    }

    /// Knobs that must be proved: those of `under_test`, else the given ones.
    pub fn under_test(&self) -> Result<BTreeSet<Knob>, ConfigError> {
        if self.config.under_test.is_empty() {
            return Ok(self.given.clone());
        }
        let find = |name: &String| {
            Knob::named(name).ok_or_else(|| {
                let names: Vec<&str> = Knob::ALL.iter().map(|k| k.name()).collect();
                let hint = nearest(name, &names).map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
                ConfigError::Contradiction(format!("under_test names `{name}`, which is no setting{hint}"))
            })
        };
        self.config.under_test.iter().map(find).collect()
    }
}

impl RunConfig {
    /// Settings that cannot go together, found before anything is opened.
    pub fn check(&self) -> Result<(), ConfigError> {
        let no = |what: &str| Err(ConfigError::Contradiction(what.into()));
        let s = &self.sampler;
        if self.store.as_os_str().is_empty() {
            return no("no store: give --store or `store` in the configuration");
        }
        if self.resident && (self.plan.is_some() || self.drives.is_some() || self.trace.is_some()) {
            return no("resident holds every expert in memory; it goes with no plan, drives or trace");
        }
        if self.resident && self.reference {
            return no("--reference compares a run from drives with one in memory; --resident is in memory already");
        }
        if self.plan.is_none() && self.drives.is_some() {
            return no("--drives goes with --plan; make one with `argodrive plan`");
        }
        if self.prompt.as_deref() == Some("") {
            return no("the prompt is empty; give --prompt or --prompt-file some text");
        }
        match (&self.prompt, &self.prompt_file, &self.prompts) {
            // the snapshot has the prompt
            (None, None, None) if self.snapshot.resume.is_some() => {}
            (None, None, None) => return no("no prompt: give --prompt, --prompt-file, or --prompts for a set"),
            (Some(_), Some(_), _) => return no("--prompt and --prompt-file are both given; one is enough"),
            (Some(_), _, Some(_)) | (_, Some(_), Some(_)) => {
                return no("--prompts is a set of prompts, and one prompt is given too; leave one of them out");
            }
            _ => {}
        }
        self.check_lanes()?;
        if s.temperature == 0.0 && (s.top_p != 1.0 || s.top_k != 0 || s.seed != 0) {
            return no(
                "--top-p, --top-k and --seed do nothing at --temperature 0 (the most likely token); give a temperature above 0",
            );
        }
        if self.model.threads > MAX_THREADS {
            return no("--threads: at most 64");
        }
        if self.model.prefill_rows == 0 {
            return no("--prefill-rows must be at least 1");
        }
        if self.max_new == 0 {
            return no("--max-new must be at least 1");
        }
        s.validate().map_err(|e| ConfigError::Contradiction(e.to_string()))?;
        self.model.isa()?;
        check_draft(self)?;
        snapshots::check(self)?;
        kv::check(self)?;
        self.reader.check().map_err(|e| ConfigError::Contradiction(e.to_string()))
    }

    /// The prompt's text.
    pub fn prompt_text(&self) -> Result<String, ConfigError> {
        if let Some(text) = &self.prompt {
            return Ok(text.clone());
        }
        if let Some(set) = &self.prompts {
            let why =
                format!("prompts {}: this command takes one prompt; give --prompt or --prompt-file", set.display());
            return Err(ConfigError::Contradiction(why));
        }
        let Some(path) = &self.prompt_file else {
            return Err(ConfigError::Contradiction("no prompt: give --prompt or --prompt-file".into()));
        };
        let fault = |reason: String| ConfigError::Contradiction(format!("--prompt-file {}: {reason}", path.display()));
        let bytes = std::fs::read(path).map_err(|e| fault(e.to_string()))?;
        String::from_utf8(bytes).map_err(|e| fault(format!("not UTF-8 (byte {})", e.utf8_error().valid_up_to())))
    }
}

/// What a configuration may hold and a profile may not: it says how to run, not what.
const OF_A_RUN: [&str; 9] =
    ["prompt", "prompt_file", "prompts", "trace", "monitor", "reference", "under_test", "resident", "snapshot"];

/// The settings of a profile, checked, without the table that says where they come from.
pub fn read_profile(path: &Path) -> Result<toml::Table, String> {
    let table = read_table(path)?;
    if table.get("reader").is_some_and(|r| r.get("faults").is_some()) {
        return Err(
            "`reader.faults` belongs to a run, not to a profile: nothing that fails on purpose is promoted".into()
        );
    }
    match OF_A_RUN.iter().find(|k| table.contains_key(**k)) {
        Some(key) => {
            Err(format!("`{key}` belongs to a run, not to a profile; take it out, or give the file with --config"))
        }
        None => Ok(table),
    }
}

fn read_table(path: &Path) -> Result<toml::Table, String> {
    let len = std::fs::metadata(path).map_err(|e| e.to_string())?.len();
    if len > MAX_CONFIG_BYTES {
        return Err(format!("{len} bytes; a profile has at most {MAX_CONFIG_BYTES}"));
    }
    let text = files::read_text(path).map_err(|e| e.to_string())?;
    if text.trim_start().starts_with('{') {
        return Err("JSON: a run profile is TOML; what `ceiling` measured of drives is another thing".into());
    }
    let mut table: toml::Table = toml::from_str(&text).map_err(|e| e.to_string().trim_end().to_string())?;
    take_tuned(&mut table)?;
    Asked::of_table(table.clone())?;
    Ok(table)
}

/// Knobs that a table (and the tables in it) sets.
pub(super) fn collect_given(table: &toml::Table, given: &mut BTreeSet<Knob>) {
    for (key, value) in table {
        match (value, key.as_str()) {
            (toml::Value::Table(inner), _) => collect_given(inner, given),
            (_, "plan" | "drives") => {
                given.insert(Knob::Layout);
            }
            _ => given.extend(Knob::named(key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Asked, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        Asked::load(&path)
    }

    #[test]
    fn given_knobs_are_those_in_the_file() {
        let asked = load("store = \"s\"\nplan = \"p\"\nprompt = \"x\"\n[reader]\nqueue_depth = 2\n").unwrap();
        assert_eq!(asked.given, BTreeSet::from([Knob::Layout, Knob::QueueDepth]));
        assert_eq!(asked.config.reader.queue_depth, 2);
        assert_eq!(asked.config.max_new, RunConfig::default().max_new);
    }

    #[test]
    fn a_typo_names_the_knob_and_the_nearest_one() {
        let e = load("[reader]\nqueue_dpth = 2\n").unwrap_err().to_string();
        assert!(e.contains("queue_dpth") && e.contains("did you mean `queue_depth`?"), "{e}");
        let e = load("max_nwe = 2\n").unwrap_err().to_string();
        assert!(e.contains("did you mean `max_new`?"), "{e}");
        let asked = load("under_test = [\"dispach\"]").unwrap();
        assert!(asked.under_test().unwrap_err().to_string().contains("did you mean `dispatch`?"));
    }

    #[test]
    fn contradictions_are_found_before_anything_opens() {
        let check = |text: &str| load(text).unwrap().config.check().unwrap_err().to_string();
        let base = "store = \"s\"\nprompt = \"x\"\n";
        assert!(check("prompt = \"x\"").contains("--store"));
        assert!(check("store = \"s\"").contains("--prompt"));
        assert!(check(&format!("{base}resident = true\nplan = \"p\"")).contains("resident"));
        assert!(check(&format!("{base}[sampler]\ntop_p = 0.5")).contains("--temperature"));
        assert!(check(&format!("{base}[model]\nkernels = \"avx9\"")).contains("avx9"));
        assert!(check(&format!("{base}[reader]\nqueue_depth = 0")).contains("queue depth"));
        assert!(check(&format!("{base}max_new = 0")).contains("--max-new"));
        assert!(load(base).unwrap().config.check().is_ok());
    }

    #[test]
    fn a_configuration_goes_before_a_profile_setting_by_setting() {
        let dir = tempfile::tempdir().unwrap();
        let [profile, config] = ["profile.toml", "run.toml"].map(|n| dir.path().join(n));
        let write = |path: &Path, text: &str| std::fs::write(path, text).unwrap();
        write(&profile, "store = \"s\"\nplan = \"p\"\n[reader]\nqueue_depth = 2\ndispatch = \"first-hit\"\n");
        write(&config, "plan = \"other\"\n[reader]\nqueue_depth = 8\n");
        let alone = Asked::load_over(&profile, None).unwrap();
        assert_eq!((alone.config.reader.queue_depth, alone.config.plan), (2, Some("p".into())));
        let both = Asked::load_over(&profile, Some(&config)).unwrap();
        assert_eq!((both.config.reader.queue_depth, both.config.plan), (8, Some("other".into())));
        assert_eq!(both.config.reader.dispatch.name(), "first-hit", "what the configuration does not say stays");
        assert!(both.given.contains(&Knob::Dispatch) && both.given.contains(&Knob::Layout));
        let says = |config: Option<&Path>| Asked::load_over(&profile, config).unwrap_err().to_string();
        assert!(says(Some(Path::new("record.json"))).contains("leave --profile out"));
        write(&config, "[reader]\nqueue_dpth = 8\n");
        let e = says(Some(&config));
        assert!(e.contains("--config") && e.contains("did you mean `queue_depth`?"), "{e}");
        write(&profile, "[reader]\nqueue_dpth = 8\n");
        let e = says(None);
        assert!(e.contains("--profile") && e.contains("did you mean `queue_depth`?"), "{e}");
        write(&profile, "plan = \"p\"\nresident = true\n");
        assert!(says(None).contains("`resident` belongs to a run"));
        write(&profile, "{\"version\": 1}");
        assert!(says(None).contains("ceiling"));
        write(&profile, "plan = \"p\"\n[tuned]\nversion = 2\n");
        assert!(says(None).contains("use the one that wrote it"));
        assert!(Asked::load(&profile).unwrap_err().to_string().contains("use the one that wrote it"));
    }

    #[test]
    fn a_config_survives_toml_and_json() {
        let config = RunConfig { store: "s".into(), prompt: Some("p".into()), ..RunConfig::default() };
        let back: RunConfig = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
        assert_eq!(back, config);
        let back: RunConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
        assert_eq!(back, config);
    }
}
