//! The texts of a run on a model: one session, or lanes that share passes. Both are driven in the same way, and what they did
//! is told in the same facts.

use super::config::RunConfig;
use super::kv;
use super::record::token_hash;
use super::run::RunError;
use super::seen::{Seen, TextSeen};
use super::snapshots::{self, ResumeRecord};
use crate::clock::Clock;
use crate::decode::batch::{BatchGeneration, BatchRequest, Sequence};
use crate::decode::generate::{Beside, GenerateError, Generation, Request, StopReason, generate_with};
use crate::decode::sampler::{Sampler, SamplerCounters};
use crate::decode::snapshot::Snapshots;
use crate::decode::{Batch, KvTier, Observer, Session, SessionCounters, Speculator, TrunkBlocks};
use crate::drive::spec::DriveSpec;
use crate::io::paced::PacedDrive;
use crate::knob::{self, Knob};
use crate::open::{DraftModel, Model, OpenError, Resumable, SnapshotError, SnapshotWriter};
use crate::reader::kv_file::KvHandle;
use crate::reader::{PrefetchPolicy, ReaderHandle};
use crate::source::ExpertSource;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Lies between the texts of a set when their tokens are hashed together; no token has this id.
const BETWEEN_TEXTS: u32 = u32::MAX;

/// One text of a set in a record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextRecord {
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Why it ended.
    pub stopped: StopReason,
    /// Hash of its ids: that of a run alone.
    pub token_hash: String,
    /// Seconds until a lane took it.
    pub waited_s: f64,
    /// Seconds from then to its first token.
    pub ttft_s: f64,
    /// (generated - 1) / (last token time - first token time).
    pub tok_s: f64,
}

/// What texts of a set shared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRecord {
    /// Most texts of one decode pass.
    pub widest_pass: u64,
    /// Decode passes that more than one text shared.
    pub shared_passes: u64,
    /// Experts that decode passes asked for, each once in its layer and pass.
    pub experts: u64,
    /// The same counted for every text: what runs alone would have asked for.
    pub text_experts: u64,
    /// `experts` / tokens of decode passes.
    pub experts_per_token: f64,
    /// `text_experts / experts`: texts that one expert served, on average.
    pub served_per_expert: f64,
    /// Generated tokens of all texts / wall time.
    pub total_tok_s: f64,
    /// By prompt.
    pub texts: Vec<TextRecord>,
}

/// What a run's texts became.
pub(super) struct Generated {
    /// All of them as one.
    pub(super) generation: Generation,
    /// Each, and what they shared, if the run has a set.
    pub(super) set: Option<BatchGeneration>,
}

impl Generated {
    /// Hash of all tokens.
    pub(super) fn token_hash(&self) -> String {
        match &self.set {
            None => token_hash(&self.generation.token_ids),
            Some(set) => {
                let texts: Vec<&[u32]> = set.sequences.iter().map(|s| s.token_ids.as_slice()).collect();
                token_hash(&texts.join(&BETWEEN_TEXTS))
            }
        }
    }
}

/// One text: where it lies, how it chooses, and who proposes tokens.
pub(super) struct OneText {
    session: Session,
    sampler: Sampler,
    speculator: Option<Speculator>,
    writer: Option<SnapshotWriter>,
    resumed: Option<ResumeRecord>,
    /// What was generated before it went on.
    before: Vec<u32>,
}

/// One text, or lanes.
pub(super) enum Texts {
    One(Box<OneText>),
    Many(Box<Batch>),
}

impl Texts {
    /// For the `prompts` of a run.
    pub(super) fn new(
        model: &Model,
        config: &RunConfig,
        prompts: &[Vec<u32>],
        prefetch: PrefetchPolicy,
        clock: Clock,
    ) -> Result<Self, RunError> {
        let sampler = Sampler::new(config.sampler)?;
        let m = &config.model;
        if config.prompts.is_none() {
            let session =
                model.bounded_session(m.max_context, m.prefill_rows, prefetch, clock, kv::limit_of(config))?;
            let (speculator, writer, resumed, before) = (None, None, None, Vec::new());
            return Ok(Self::One(Box::new(OneText { session, sampler, speculator, writer, resumed, before })));
        }
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0).saturating_add(config.max_new);
        let contexts = (m.max_context, longest);
        let limit = kv::limit_of(config);
        let batch = model.bounded_batch(contexts, m.prefill_rows, m.parallel, (prefetch, clock), limit)?;
        Ok(Self::Many(Box::new(batch)))
    }

    /// Gives passes a source for the blocks of a streamed trunk; returns the kernel's numbers of the threads that read them.
    pub(super) fn stream_trunk(
        &mut self,
        model: &Model,
        config: &RunConfig,
        pace: Option<Arc<PacedDrive>>,
    ) -> Result<Vec<u32>, OpenError> {
        let clock = self.clock();
        let blocks = self.trunk_mut();
        model.stream_trunk(blocks, &config.reader, clock, pace)?;
        Ok(blocks.threads())
    }

    /// Gives latent rows that have to leave memory a file, as the configuration says; `reader` has the drives of the run. With
    /// `traced`, its reads are kept.
    pub(super) fn open_kv(
        &mut self,
        model: &Model,
        config: &RunConfig,
        prompts: &[Vec<u32>],
        traced: bool,
        reader: Option<(&ReaderHandle, &[DriveSpec])>,
    ) -> Result<Option<KvHandle>, OpenError> {
        let clock = self.clock();
        let longest = kv::longest(config, prompts.iter().map(Vec::len));
        let tier = match self {
            Self::One(one) => one.session.kv_mut(),
            Self::Many(batch) => batch.kv_mut(),
        };
        kv::open(model, config, tier, (longest, clock, traced), reader)
    }

    /// The tier of latent caches.
    pub(super) fn kv(&self) -> &KvTier {
        match self {
            Self::One(one) => one.session.kv(),
            Self::Many(batch) => batch.kv(),
        }
    }

    /// Waits for blocks that are on their way.
    pub(super) fn settle(&mut self) {
        self.trunk_mut().settle();
        match self {
            Self::One(one) => one.session.kv_mut().settle(),
            Self::Many(batch) => batch.kv_mut().settle(),
        }
    }

    /// The blocks of a streamed trunk.
    pub(super) fn trunk(&self) -> &TrunkBlocks {
        match self {
            Self::One(one) => one.session.trunk(),
            Self::Many(batch) => batch.trunk(),
        }
    }

    fn trunk_mut(&mut self) -> &mut TrunkBlocks {
        match self {
            Self::One(one) => one.session.trunk_mut(),
            Self::Many(batch) => batch.trunk_mut(),
        }
    }

    /// Has tokens proposed as the configuration says; a set's texts take no proposals.
    pub(super) fn speculate(
        &mut self,
        model: &Model,
        config: &RunConfig,
        draft: Option<&DraftModel>,
    ) -> Result<(), RunError> {
        if let Self::One(one) = self {
            let piece_rows = config.model.prefill_rows;
            one.speculator = model.speculator(&config.draft, draft, &config.sampler, piece_rows, &one.session)?;
        }
        Ok(())
    }

    /// Goes on from the snapshot that the configuration names, if it names one.
    pub(super) fn resume(&mut self, model: &Model, config: &RunConfig, prompts: &[Vec<u32>]) -> Result<(), OpenError> {
        let (Self::One(one), Some(at)) = (self, config.snapshot.resume.as_ref()) else { return Ok(()) };
        if knob::skipped(Knob::Resume) {
            return Ok(());
        }
        let (clock, OneText { session, sampler, .. }) = (one.session.clock(), &mut **one);
        let start_ns = clock.now_ns();
        let mut found = Resumable::find(at)?;
        let tokens = found.restore(model, session, sampler)?;
        let same_prompt = prompts.first() == Some(&tokens.prompt);
        if let Some(reason) = snapshots::differs(&found, &snapshots::run_of(model, config), same_prompt) {
            return Err(SnapshotError::Other { path: found.path().to_path_buf(), reason }.into());
        }
        one.resumed = Some(ResumeRecord {
            from: found.path().to_path_buf(),
            bytes: found.bytes(),
            tokens: tokens.generated.len(),
            position: one.session.position(),
            restore_ns: clock.now_ns() - start_ns,
        });
        one.before = tokens.generated;
        Ok(())
    }

    /// Whether a prompt is read: a text that goes on has had it.
    pub(super) fn reads_prompt(&self) -> bool {
        !matches!(self, Self::One(one) if one.resumed.is_some())
    }

    /// Has the text kept as the configuration says.
    pub(super) fn keep(&mut self, model: &Model, config: &RunConfig, prompts: &[Vec<u32>]) -> Result<(), OpenError> {
        let Self::One(one) = self else { return Ok(()) };
        if config.snapshot.snapshot_every > 0 || knob::forced(Knob::SnapshotEvery) {
            let prompt = prompts.first().map_or(&[][..], Vec::as_slice);
            let longest = prompt.len().saturating_add(config.max_new).min(one.session.max_context());
            let (folder, run) = (config.snapshot.folder(&model.folder), snapshots::run_of(model, config));
            let of = (model, prompt, longest);
            one.writer = Some(SnapshotWriter::open(&folder, run, of, one.session.clock())?);
        }
        Ok(())
    }

    /// Reads the prompts and extends them. `on_token` sees the tokens of all texts, each with its text's place.
    pub(super) fn generate(
        &mut self,
        (model, config, prompts): (&Model, &RunConfig, &[Vec<u32>]),
        source: &mut dyn ExpertSource,
        on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
        observer: Option<&mut dyn Observer>,
    ) -> Result<Generated, GenerateError> {
        let (max_new, stop, piece_rows) = (config.max_new, model.stop_ids.as_slice(), config.model.prefill_rows);
        match self {
            Self::One(one) => {
                let OneText { session, sampler, speculator, writer, before, .. } = &mut **one;
                let prompt = prompts.first().map_or(&[][..], Vec::as_slice);
                let request = Request { prompt, max_new, stop, piece_rows };
                let mut see = |token| on_token(0, token);
                let observer = observer.map(|o| o as &mut dyn Observer);
                let every = config.snapshot.snapshot_every;
                let snapshots = writer.as_mut().map(|keeper| Snapshots { every, keeper });
                let beside = Beside {
                    observer,
                    speculator: speculator.as_mut(),
                    snapshots,
                    resumed: before,
                    ..Beside::default()
                };
                let generation = generate_with(session, source, sampler, request, &mut see, beside)?;
                Ok(Generated { generation, set: None })
            }
            Self::Many(batch) => {
                let request = BatchRequest { prompts, max_new, stop, piece_rows, sampler: config.sampler };
                let set = batch.generate(source, request, on_token, observer)?;
                Ok(Generated { generation: set.total.clone(), set: Some(set) })
            }
        }
    }

    pub(super) fn clock(&self) -> Clock {
        match self {
            Self::One(one) => one.session.clock(),
            Self::Many(batch) => batch.clock(),
        }
    }

    /// The time account.
    pub(super) fn counters(&self) -> &SessionCounters {
        match self {
            Self::One(one) => one.session.counters(),
            Self::Many(batch) => batch.counters(),
        }
    }

    /// Adds what was counted to the facts of the run.
    pub(super) fn tell(&self, generated: &Generated, seen: &mut Seen) {
        let counters = self.counters();
        (seen.widest_rows, seen.prefill_passes) = (counters.widest_rows, counters.prefill_passes);
        if let Self::One(one) = self {
            seen.snapshots = one.writer.as_ref().map(|w| w.counters().clone());
            seen.resumed.clone_from(&one.resumed);
        }
        (seen.widest_lanes, seen.shared_passes) = (counters.widest_lanes, counters.shared_passes);
        (seen.guesses, seen.guesses_made) = (counters.guesses, counters.guesses_made);
        seen.speculation = match self {
            Self::One(one) => one.speculator.as_ref().map(|s| s.counters().clone()),
            Self::Many(_) => None,
        };
        let g = &generated.generation;
        seen.texts = match (self, &generated.set) {
            (Self::One(one), _) => vec![TextSeen {
                generated: g.token_ids.len(),
                resumed: g.resumed,
                stopped: g.stopped,
                context_used: one.session.position() as u64,
                sampler: one.sampler.counters(),
            }],
            (Self::Many(_), set) => set.iter().flat_map(|s| &s.sequences).map(text_seen).collect(),
        };
        seen.sampler = seen.texts.iter().fold(SamplerCounters::default(), |sum, t| sum.plus(t.sampler));
    }

    /// What the texts shared, for a record.
    pub(super) fn record(&self, generated: &Generated) -> Option<SetRecord> {
        let (set, counters) = (generated.set.as_ref()?, self.counters());
        let per = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        Some(SetRecord {
            widest_pass: counters.widest_lanes,
            shared_passes: counters.shared_passes,
            experts: set.decode.experts,
            text_experts: set.decode.expert_rows,
            experts_per_token: per(set.decode.experts, set.decode.rows),
            served_per_expert: per(set.decode.expert_rows, set.decode.experts),
            total_tok_s: set.total.rates().inclusive_tok_s,
            texts: set.sequences.iter().map(text_record).collect(),
        })
    }
}

fn text_seen(s: &Sequence) -> TextSeen {
    let (generated, context_used) = (s.token_ids.len(), s.context_used as u64);
    TextSeen { generated, resumed: 0, stopped: s.stopped, context_used, sampler: s.sampler }
}

fn text_record(s: &Sequence) -> TextRecord {
    TextRecord {
        prompt_tokens: s.prompt_tokens,
        generated_tokens: s.token_ids.len(),
        stopped: s.stopped,
        token_hash: token_hash(&s.token_ids),
        waited_s: s.began_ns as f64 / 1e9,
        ttft_s: s.ttft_s(),
        tok_s: s.tok_s(),
    }
}
