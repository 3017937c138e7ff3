//! The parts of a tune before its campaign: ceiling, traced run, heat, ranking. Each looks first whether it is there already
//! with the same inputs.

use super::layouts::layouts;
use super::promote::put;
use super::rank::{Field, Skipped, finalists, rank};
use super::settings::{Tunable, apply};
use super::state::{CeilingPart, Finalist, HeatPart, Ranking, TracePart, drives_digest};
use super::{Event, Session, TuneError, digest_of};
use crate::bench::ceiling::{CeilingSpec, measure};
use crate::bench::ceiling_files::Source as TestSource;
use crate::bench::ceiling_links::{links, serials};
use crate::bench::config::Asked;
use crate::bench::evidence::Verdict;
use crate::bench::planning::plan_and_mounts;
use crate::bench::record::{RecordError, RunRecord, write_json};
use crate::bench::run::{RunSpec, run_while};
use crate::bench::simulate::{SimulateSpec, load};
use crate::bench::simulate_drives::Known;
use crate::drive::facts::Tables;
use crate::drive::profile::Profile;
use crate::knob::Knob;
use crate::layout::heat::{Heat, Part, Source};
use crate::layout::heat_build::merge;
use crate::layout::routes::{RouteFormat, RouteOptions, import};
use crate::replay::schedule::ROUTES_FILE;
use crate::sys::durable::write_atomic;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

/// Smallest read of the ceiling: below it an alignment is most of a read.
const LEAST_READ_BYTES: u64 = 16 << 10;
/// Depths of the ceiling's sweep.
const DEPTHS: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// Test files have so many reads, within these limits.
const FILE_READS: u64 = 512;
/// See `FILE_READS`.
const FILE_BYTES: (u64, u64) = (16 << 20, 4 << 30);
/// Traced runs that are tried until one counts.
const MAX_TRIES: usize = 6;
/// Longest name of an arm that is made from a candidate's.
const ARM_CHARS: usize = 36;

/// Reasons why a part does not count.
type Reasons = Vec<String>;

impl Session<'_> {
    /// What the drives can do: given, there, or measured now.
    pub(super) fn ceiling(
        &mut self,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Result<Profile, Reasons>, TuneError> {
        let (spec, inputs) = (self.spec, self.inputs);
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        if let (Some(profile), Some(path)) = (&inputs.ceiling, &spec.ceiling) {
            let digest = digest_of(&["given", &serde_json::to_string(profile).unwrap_or_default()]);
            self.file.ceiling = Some(CeilingPart { inputs: digest, file: absolute(path), given: true });
            self.file.save(self.folder)?;
            return Ok(Ok(profile.clone()));
        }
        let bytes = inputs.plan.expert_bytes.max(LEAST_READ_BYTES);
        let digest = digest_of(&[&drives_digest(inputs), &bytes.to_string(), &format!("{:?}", spec.point_time)]);
        if let Some(part) = self.file.ceiling.as_ref().filter(|p| p.inputs == digest)
            && let Ok(profile) = Profile::load(&part.file)
        {
            profile.models_of(&inputs.specs)?;
            on_event(Event::Reused("ceiling"));
            return Ok(Ok(profile));
        }
        let facts = Tables::system()
            .drives(&inputs.specs)
            .map_err(|e| TuneError::Option(format!("{}: {e}", spec.drives.display())))?;
        let width = self.inputs.model.decoder.config().moe.as_ref().map_or(8, |m| m.top_k as u32).max(1);
        let file_bytes = bytes.saturating_mul(FILE_READS).clamp(FILE_BYTES.0, FILE_BYTES.1).max(bytes * 64);
        let measured = measure(
            &CeilingSpec {
                drives: &inputs.specs,
                serials: facts.iter().map(serials).collect(),
                links: links(&facts, &inputs.specs),
                bytes,
                width,
                depths: DEPTHS.to_vec(),
                time: spec.point_time,
                engine: Default::default(),
                direct: true,
                source: TestSource::Written { bytes: file_bytes.next_multiple_of(4096), keep: false },
                sustain: None,
            },
            &|| self.limits.over(),
            &mut |stage| on_event(Event::Ceiling(stage)),
        )?;
        let path = self.folder.join("ceiling.json");
        if !measured.rejected.is_empty() {
            write_json(&self.folder.join("ceiling.rejected.json"), &measured.profile)?;
            return Ok(Err(measured.rejected));
        }
        measured.profile.save(&path)?;
        self.file.ceiling = Some(CeilingPart { inputs: digest, file: absolute(&path), given: false });
        self.file.save(self.folder)?;
        Ok(Ok(measured.profile))
    }

    /// The current profile on the first evaluation prompt, with every read on record.
    pub(super) fn trace(
        &mut self,
        current: &Asked,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Result<(), Reasons>, TuneError> {
        let inputs = self.inputs;
        let Some(prompt) = inputs.prompts.first() else { return Ok(Err(vec!["no prompt".into()])) };
        let digest = self.run_digest(current, &prompt.digest)?;
        let there = |p: &&TracePart| p.inputs == digest && p.folder.join("trace.json").exists();
        if self.file.trace.as_ref().filter(there).is_some() {
            on_event(Event::Reused("trace"));
            return Ok(Ok(()));
        }
        let folder = self.folder.join("trace");
        let mut reasons = Vec::new();
        for _ in 0..MAX_TRIES {
            on_event(Event::Tracing(&prompt.name));
            let began = Instant::now();
            let record = self.traced(current, &inputs.tokens, &folder)?;
            let wall_s = began.elapsed().as_secs_f64();
            if !record.rejected.is_empty() {
                on_event(Event::Rejected(&record));
                reasons.clone_from(&record.rejected);
                continue;
            }
            write_json(&self.folder.join("trace.record.json"), &record)?;
            let open = record.settings.iter().filter(|e| e.verdict != Verdict::Proved).map(|e| e.name.clone());
            self.file.trace = Some(TracePart {
                inputs: digest,
                folder,
                wall_s,
                decode_tok_s: record.rates.decode_tok_s,
                verdict: record.verdict.clone(),
                drives: record.drives.iter().map(|d| d.name.clone()).collect(),
                unproved: open.collect(),
            });
            self.file.save(self.folder)?;
            return Ok(Ok(()));
        }
        Ok(Err(reasons))
    }

    /// Digest of all that a run of the current profile depends on.
    fn run_digest(&self, current: &Asked, prompt: &str) -> Result<String, TuneError> {
        let inputs = self.inputs;
        let mut config = current.config.clone();
        (config.plan, config.prompt, config.prompt_file) = (None, None, None);
        let settings = serde_json::to_string(&config).map_err(|e| TuneError::Option(e.to_string()))?;
        let program = crate::bench::environment::version();
        let (model, plan) = (&inputs.model.manifest.model_id, inputs.plan.hash()?);
        let tables = format!("{:?}", crate::bench::inputs::of_tables(&current.config));
        Ok(digest_of(&[model, &plan, &drives_digest(inputs), &settings, prompt, &program, &tables]))
    }

    /// One run with a trace in `folder`, which is made anew.
    fn traced(&self, current: &Asked, tokens: &[u32], folder: &Path) -> Result<RunRecord, TuneError> {
        let io = |source| RecordError::Io { path: folder.to_path_buf(), source };
        if folder.exists() {
            std::fs::remove_dir_all(folder).map_err(io)?;
        }
        std::fs::create_dir_all(folder).map_err(io)?;
        let mut asked = current.clone();
        asked.config.trace = Some(folder.to_path_buf());
        asked.config.monitor = false;
        let streamed = plan_and_mounts(&self.inputs.model, &asked.config)?;
        let mut under_test = BTreeSet::from([Knob::Layout]);
        if streamed.iter().flat_map(|(_, m)| m).any(|m| m.emulate.is_some()) {
            under_test.insert(Knob::Pace);
        }
        let spec = RunSpec {
            arm: "current",
            asked: &asked,
            under_test: &under_test,
            streamed: streamed.as_ref().map(|(plan, mounts)| (plan, mounts.as_slice())),
            prompts: &[tokens.to_vec()],
            control: None,
        };
        let over = || self.limits.over();
        let mut go_on = |_| if over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let record = run_while(&self.inputs.model, &spec, &mut go_on, &|| !over())?.record;
        self.go_on()?;
        Ok(record)
    }

    /// An error once the user or the budget says stop.
    pub(super) fn go_on(&self) -> Result<(), TuneError> {
        if self.limits.over() { Err(TuneError::Interrupted(self.folder.to_path_buf())) } else { Ok(()) }
    }

    /// What is hot: given, or counted on the heat prompts.
    pub(super) fn heat(
        &mut self,
        current: &Asked,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Option<Heat>, TuneError> {
        let inputs = self.inputs;
        if inputs.heat_prompts.is_empty() {
            return Ok(inputs.heat.clone());
        }
        let digests: Vec<&str> = inputs.heat_prompts.iter().map(|(p, _)| p.digest.as_str()).collect();
        let digest = self.run_digest(current, &digests.join("\n"))?;
        if let Some(part) = self.file.heat.as_ref().filter(|p| p.inputs == digest)
            && let Ok(text) = std::fs::read_to_string(&part.file)
            && let Ok(heat) = Heat::parse(&text)
        {
            on_event(Event::Reused("heat"));
            return Ok(Some(heat));
        }
        let folder = self.folder.join("heat-trace");
        let mut heats = Vec::with_capacity(inputs.heat_prompts.len());
        for (prompt, tokens) in &inputs.heat_prompts {
            on_event(Event::Tracing(&prompt.name));
            // A missed pace changes no route, so whether the run would count does not matter here.
            self.traced(current, tokens, &folder)?;
            let path = folder.join(ROUTES_FILE);
            let fault = |e: &dyn std::fmt::Display| TuneError::Option(format!("{}: {e}", path.display()));
            let text = std::fs::read_to_string(&path).map_err(|e| fault(&e))?;
            let options = RouteOptions {
                format: Some(RouteFormat::Routes),
                experts: Some(inputs.model.manifest.experts),
                top_k: None,
                layer_base: 0,
                part: Part::Whole,
                rejected: false,
                label: "tune".into(),
                model_id: Some(inputs.model.manifest.model_id.clone()),
            };
            let mut heat = import(&text, &prompt.name, &options).map_err(|e| fault(&e))?;
            // the text, so that it can be told from prompts later
            heat.sources = vec![Source { name: prompt.name.clone(), digest: prompt.digest.clone(), part: Part::Whole }];
            heats.push(heat);
        }
        let heat = merge(&heats, 1.0)?;
        let path = self.folder.join("heat.json");
        write_atomic(&path, heat.to_json()?.as_bytes())
            .map_err(|source| RecordError::Io { path: path.clone(), source })?;
        // Large, and only its counts were wanted.
        let _ = std::fs::remove_dir_all(&folder);
        self.file.heat = Some(HeatPart { inputs: digest, file: path });
        self.file.save(self.folder)?;
        Ok(Some(heat))
    }

    /// Simulates candidates, and writes down the finalists' plans.
    pub(super) fn ranking(
        &mut self,
        current: &Asked,
        ceiling: &Profile,
        heat: Option<&Heat>,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), TuneError> {
        let (spec, inputs) = (self.spec, self.inputs);
        let Some(trace) = self.file.trace.clone() else { return Ok(()) };
        let digest = self.ranking_digest(&trace, heat)?;
        let there = |r: &&Ranking| r.inputs == digest && r.finalists.iter().all(|f| f.plan_file.exists());
        if self.file.ranking.as_ref().filter(there).is_some() {
            on_event(Event::Reused("ranking"));
            return Ok(());
        }
        let (layouts, mut skipped) = layouts(spec, inputs, ceiling, heat)?;
        let options = &current.config.reader;
        let copies = inputs.plan.replica_count() > 0;
        let (tunable, unprovable) = tunable(&spec.only, &trace.unproved, copies, options.cache_bytes > 0);
        skipped.extend(unprovable);
        let known = Known::Profile(Box::new(ceiling.clone()));
        let load_on = |plan| {
            let mounts = crate::reader::mounts_of(plan, Some(&inputs.specs))
                .map_err(crate::bench::simulate::SimulateError::from)?;
            let (seed, repeats) = (spec.seed, spec.repeats);
            let (trace, mounts) = (trace.folder.as_path(), Some(&mounts[..]));
            load(&SimulateSpec {
                trace,
                plan,
                known: &known,
                profile: None,
                mounts,
                options,
                seed,
                repeats,
                lenient: false,
            })
        };
        let loaded = load_on(&inputs.plan)?;
        let other = layouts.iter().find(|l| !l.current).map(|l| load_on(&l.plan)).transpose()?;
        let field = Field {
            layouts: &layouts,
            current: &loaded,
            full: other.as_ref().unwrap_or(&loaded),
            options,
            tunable: &tunable,
            seed: spec.seed,
            repeats: spec.repeats,
        };
        let ranked = rank(&field, &mut |count| {
            on_event(Event::Simulating(count));
            if self.limits.over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let Some(ranked) = ranked else { return self.go_on() };
        skipped.extend(ranked.skipped);
        let mut chosen: Vec<Finalist> = Vec::new();
        for scored in finalists(&ranked.all, spec.finalists) {
            let layout = &layouts[scored.layout];
            let plan_file = match (layout.current, &current.config.plan) {
                (true, Some(path)) => path.clone(),
                // by what it says: two policies may have one name, and `current` is the control's
                _ => self.write_plan(&format!("plan-{}", scored.line.plan_hash), &layout.plan)?,
            };
            let mut profile = apply(&inputs.table, options, &scored.options);
            put(&mut profile, "plan", &plan_file);
            let drives = spec.drives.canonicalize().unwrap_or_else(|_| spec.drives.clone());
            put(&mut profile, "drives", &drives);
            let copies = scored.line.replicas > 0 && scored.line.replica_share > 0.0;
            chosen.push(Finalist {
                arm: arm_name(&scored.line.layout, &chosen),
                plan_file,
                plan_hash: scored.line.plan_hash.clone(),
                gain: scored.line.gain.map_or(1.0, |g| g[0]),
                copy_bytes: scored.line.copy_bytes,
                changes: scored.line.changes.clone(),
                fired: if copies { vec![Knob::Replicas.name().to_string()] } else { Vec::new() },
                profile,
            });
        }
        let recorded = crate::replay::simulate::summary::measure(&loaded.work, spec.seed).tok_s.map(|s| s.0.estimate);
        let simulated = ranked.base.tok_s.map(|s| s.0.estimate);
        self.file.ranking = Some(Ranking {
            inputs: digest,
            repeats: spec.repeats,
            seed: spec.seed,
            recorded_tok_s: recorded,
            simulator_error: simulated.zip(recorded).filter(|(_, r)| *r > 0.0).map(|(s, r)| s / r - 1.0),
            candidates: ranked.all.into_iter().map(|s| s.line).collect(),
            skipped,
            assumptions: loaded.assumptions.clone(),
            finalists: chosen,
        });
        self.file.save(self.folder)?;
        Ok(())
    }

    fn ranking_digest(&self, trace: &TracePart, heat: Option<&Heat>) -> Result<String, TuneError> {
        let (spec, inputs) = (self.spec, self.inputs);
        let ceiling = self.file.ceiling.as_ref().map(|c| c.inputs.clone()).unwrap_or_default();
        let ran = std::fs::read_to_string(self.folder.join("trace.record.json")).unwrap_or_default();
        let heat = heat.map(Heat::hash).transpose()?.unwrap_or_default();
        let policies = format!("{:?}", inputs.policies);
        let only: Vec<&str> = spec.only.iter().map(|t| t.name()).collect();
        let numbers = format!("{} {} {} {}", spec.seed, spec.repeats, spec.finalists, spec.margin_bytes);
        let table = toml::to_string(&inputs.table).map_err(|e| TuneError::Option(e.to_string()))?;
        Ok(digest_of(&[&ceiling, &trace.inputs, &ran, &heat, &policies, &only.join(","), &numbers, &table]))
    }
}

/// What may be tried: what was asked for, less what the current profile could not prove beside a candidate.
fn tunable(only: &[Tunable], unproved: &[String], copies: bool, caches: bool) -> (Vec<Tunable>, Vec<Skipped>) {
    let (mut out, mut skipped) = (Vec::new(), Vec::new());
    for what in Tunable::ALL.into_iter().filter(|t| only.is_empty() || only.contains(t)) {
        // Where there are no copies, a campaign asks the control for no proof of its choice between them.
        let free = what == Tunable::Layout || what == Tunable::Dispatch && !copies;
        // A control without a cache owes no proof of who stays in it.
        let owed = |knob: &str| !free && (caches || knob != Knob::CachePolicy.name());
        match what.knobs().iter().find(|k| owed(k) && unproved.iter().any(|u| u == *k)) {
            None => out.push(what),
            Some(knob) => skipped.push(Skipped {
                name: what.name().into(),
                why: format!(
                    "{knob} of the current profile was not proved in its own run (not binding, or nothing to choose), so a \
                     comparison with another value would not count"
                ),
            }),
        }
    }
    (out, skipped)
}

/// A layout's name as that of an arm, unlike those before it.
fn arm_name(name: &str, before: &[Finalist]) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '.' };
    let short: String = name.chars().take(ARM_CHARS).map(plain).collect();
    let short = match short.trim_start_matches('.') {
        "" | "current" => "candidate".to_string(),
        short => short.to_string(),
    };
    let taken = |n: &String| before.iter().any(|f| f.arm == *n);
    let numbered = (2..).map(|n| format!("{short}-{n}"));
    std::iter::once(short.clone()).chain(numbered).find(|n| !taken(n)).unwrap_or(short)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn what_the_control_cannot_prove_is_not_tried() {
        let open = ["queue_depth".to_string(), "dispatch".into()];
        let (with, skipped) = tunable(&[], &open, true, true);
        assert_eq!(with, [Tunable::Layout, Tunable::Cache, Tunable::Prefetch]);
        assert_eq!(skipped.len(), 2);
        let (without, _) = tunable(&[], &open, false, true);
        assert!(without.contains(&Tunable::Dispatch), "one home each: the control owes no proof");
        assert_eq!(tunable(&[Tunable::Cache], &[], true, true).0, [Tunable::Cache]);
        // A campaign asks for `split` too where dispatch differs, and for the policy where caches do.
        assert!(!tunable(&[], &["split".into()], true, true).0.contains(&Tunable::Dispatch));
        assert!(!tunable(&[], &["cache_policy".into()], true, true).0.contains(&Tunable::Cache));
        assert!(tunable(&[], &["cache_policy".into()], true, false).0.contains(&Tunable::Cache));
    }

    #[test]
    fn arms_have_plain_names_of_their_own() {
        let first = arm_name("my layout", &[]);
        assert_eq!(first, "my.layout");
        let finalist = |arm: String| Finalist {
            arm,
            plan_file: PathBuf::new(),
            plan_hash: String::new(),
            gain: 1.0,
            copy_bytes: 0,
            changes: vec![],
            fired: vec![],
            profile: toml::Table::new(),
        };
        assert_eq!(arm_name("my layout", &[finalist(first)]), "my.layout-2");
        assert_eq!(arm_name("current", &[]), "candidate");
        assert_eq!((arm_name("\u{fc}ber", &[]), arm_name("\u{fc}", &[])), ("ber".into(), "candidate".into()));
        assert!(arm_name(&"x".repeat(100), &[]).len() <= 40);
    }
}
