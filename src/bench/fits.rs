//! Whether a run fits into memory, asked before anything is allocated or measured. Knows sizes only; the text is as long as the
//! prompt and what may be generated, however long a context the model allows.

use super::config::RunConfig;
use super::guards::available_bytes;
use crate::decode::Activations;
use crate::decode::kv::{KvPlan, KvTooSmall};
use crate::decode::memory::{SessionBytes, thread_bytes};
use crate::decode::snapshot::snapshot_bytes;
use crate::decode::speculate::DrafterKind;
use crate::model::config::ModelConfig;
use crate::open::{Model, measure_draft};

/// Memory of a run that cannot be given back while it lasts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunBytes {
    /// States, caches and working memory of the session, or of all lanes.
    pub session_bytes: u64,
    /// Working space of the threads that compute.
    pub thread_bytes: u64,
    /// Slots for experts on their way, or every expert.
    pub expert_bytes: u64,
    /// Weights and session of the draft model, and working space of its threads.
    pub draft_bytes: u64,
    /// Buffers of a streamed trunk. One that is loaded was asked for when the model was opened, one that is mapped can be given
    /// back.
    pub trunk_bytes: u64,
    /// The copy of a text's state that is being written as a snapshot.
    pub snapshot_bytes: u64,
    /// The copy of a text's states that another text may go on from.
    pub mark_bytes: u64,
}

/// What a run takes beside its session and experts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extra<'a> {
    /// The draft model.
    pub draft: Option<DraftSize<'a>>,
    /// Buffers of a streamed trunk.
    pub trunk_bytes: u64,
    /// A copy of the text's states is kept, for another text to go on from.
    pub marks: bool,
}

/// The draft model of a run: geometry, and bytes of its weights.
#[derive(Clone, Copy, Debug)]
pub struct DraftSize<'a> {
    /// Its geometry.
    pub config: &'a ModelConfig,
    /// Its weights.
    pub trunk_bytes: u64,
}

/// What decides how large a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Texts at once.
    pub lanes: usize,
    /// Tokens of the longest prompt.
    pub longest: usize,
    /// Most rows of one pass over prompts.
    pub rows: usize,
}

impl Load {
    /// Of a run over prompts of these lengths. At worst the longest ones are read together.
    pub fn of(config: &RunConfig, prompts: &[usize]) -> Self {
        let mut lens = prompts.to_vec();
        lens.sort_unstable_by(|a, b| b.cmp(a));
        let lanes = config.model.parallel.max(1);
        let together = lens.iter().take(lanes).fold(0usize, |sum, len| sum.saturating_add(*len));
        Self { lanes, longest: lens.first().copied().unwrap_or(0), rows: config.model.prefill_rows.min(together) }
    }
}

impl RunBytes {
    /// For a run with this load.
    pub fn of(model: &ModelConfig, extra: Extra<'_>, config: &RunConfig, load: Load) -> Self {
        let longest = match config.model.max_context {
            0 => model.max_position_embeddings,
            context => context.min(model.max_position_embeddings),
        };
        let text = load.longest.saturating_add(config.max_new).min(longest).max(1);
        let verify_rows = config.draft.rows();
        let session = SessionBytes::of_lanes(model, text, load.rows.max(load.lanes).max(verify_rows), load.lanes)
            .with_verify(model, verify_rows)
            .with_kv(kv_plan(model, config, load.lanes, text).ok().flatten().as_ref());
        let threads = config.model.compute_threads();
        let thread_bytes_of = |model, activations| thread_bytes(model, threads, activations);
        // The draft model's state is put back from a copy, so it is there twice. Its activations stay exact.
        let draft_bytes = extra.draft.map_or(0, |d| {
            let own = SessionBytes::of(d.config, text.min(d.config.max_position_embeddings), load.rows.max(1))
                .with_window(d.config, config.draft.draft_window);
            let copy = own.kda_state_bytes.saturating_add(own.conv_history_bytes);
            let parts = [d.trunk_bytes, own.total_bytes(), copy, thread_bytes_of(d.config, Activations::F32)];
            parts.into_iter().fold(0, u64::saturating_add)
        });
        let bank = || {
            let moe = model.moe.as_ref()?;
            let experts = (model.moe_layers().count() as u64).saturating_mul(moe.experts as u64);
            Some(experts.saturating_mul(moe.expert_bytes()))
        };
        let expert_bytes = match (&model.moe, config.resident) {
            (None, _) => 0,
            (Some(_), true) => bank().unwrap_or(0),
            (Some(_), false) => config.reader.buffer_bytes,
        };
        let snapshot_bytes = if config.snapshot.snapshot_every > 0 { snapshot_bytes(model, text) } else { 0 };
        Self {
            session_bytes: session.total_bytes(),
            thread_bytes: thread_bytes_of(model, config.model.activations),
            expert_bytes,
            draft_bytes,
            trunk_bytes: extra.trunk_bytes,
            snapshot_bytes,
            mark_bytes: match extra.marks {
                true => session.kda_state_bytes.saturating_add(session.conv_history_bytes),
                false => 0,
            },
        }
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        let parts = [
            self.session_bytes,
            self.thread_bytes,
            self.expert_bytes,
            self.draft_bytes,
            self.trunk_bytes,
            self.snapshot_bytes,
            self.mark_bytes,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// How latent caches of texts of at most `tokens` tokens are cut by `--kv-ram`; `None` where they are whole.
fn kv_plan(model: &ModelConfig, config: &RunConfig, lanes: usize, tokens: usize) -> Result<Option<KvPlan>, KvTooSmall> {
    match config.kv.kv_ram_bytes {
        0 => Ok(None),
        bytes => KvPlan::of(model, lanes, tokens, config.draft.rows(), bytes),
    }
}

/// The same for a run on a loaded model: its draft model is measured too.
pub fn check_run(model: &Model, config: &RunConfig, prompts: &[usize]) -> Result<(), String> {
    check_loaded(model, config, prompts, false)
}

/// The same for a text that later ones may go on from, in a process that has begun: `held` is what it has taken already of what
/// a run takes, `kept` what stays taken beside the text.
pub fn check_turn(model: &Model, config: &RunConfig, prompt: usize, (held, kept): (u64, u64)) -> Result<(), String> {
    let available = available_bytes().map(|now| now.saturating_add(held).saturating_sub(kept));
    check_loaded_against(model, config, &[prompt], true, available)
}

fn check_loaded(model: &Model, config: &RunConfig, prompts: &[usize], marks: bool) -> Result<(), String> {
    check_loaded_against(model, config, prompts, marks, available_bytes())
}

fn check_loaded_against(
    model: &Model,
    config: &RunConfig,
    prompts: &[usize],
    marks: bool,
    available: Option<u64>,
) -> Result<(), String> {
    let cfg = model.decoder.config();
    let context = match (config.model.max_context, config.prompts.is_some()) {
        (_, true) => prompts.iter().max().unwrap_or(&0).saturating_add(config.max_new),
        (0, false) => cfg.max_position_embeddings,
        (context, false) => context,
    };
    kv_plan(cfg, config, config.model.parallel, context).map_err(|e| e.to_string())?;
    let draft = match (config.draft.speculate, &config.draft.draft_model) {
        (DrafterKind::Model, Some(folder)) => {
            Some(measure_draft(folder).map_err(|e| format!("--draft-model {}: {e}", folder.display()))?)
        }
        _ => None,
    };
    let draft = draft.as_ref().map(|(config, trunk_bytes)| DraftSize { config, trunk_bytes: *trunk_bytes });
    // two buffers, of which one is used while the other is filled
    let trunk_bytes = model.decoder.blocks().map_or(0, |b| b.largest_bytes().saturating_mul(2));
    let extra = Extra { draft, trunk_bytes, marks };
    let load = Load::of(config, prompts);
    available.map_or(Ok(()), |available| check_against(cfg, extra, config, load, available))
}

/// Says what is too large and what would fit, or nothing where the system does not tell how much memory there is. `prompts`
/// are the lengths of the run's prompts.
pub fn check(model: &ModelConfig, extra: Extra<'_>, config: &RunConfig, prompts: &[usize]) -> Result<(), String> {
    let load = Load::of(config, prompts);
    available_bytes().map_or(Ok(()), |available| check_against(model, extra, config, load, available))
}

fn check_against(
    model: &ModelConfig,
    extra: Extra<'_>,
    config: &RunConfig,
    load: Load,
    available: u64,
) -> Result<(), String> {
    let fits = |load: Load| RunBytes::of(model, extra, config, load).total_bytes() <= available;
    if fits(load) {
        return Ok(());
    }
    let needed = RunBytes::of(model, extra, config, load);
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let texts = match load.lanes {
        1 => format!("a prompt of {} tokens", load.longest),
        lanes => format!("{lanes} texts at once, the longest prompt of {} tokens,", load.longest),
    };
    let said = format!(
        "{texts} in passes of {} takes {} MiB, experts {} MiB and working space of threads {} MiB{}{}{}{}; {} MiB can be had",
        load.rows,
        mib(needed.session_bytes),
        mib(needed.expert_bytes),
        mib(needed.thread_bytes),
        if extra.draft.is_some() {
            format!(", the draft model {} MiB", mib(needed.draft_bytes))
        } else {
            String::new()
        },
        if extra.trunk_bytes > 0 {
            format!(", buffers of the trunk {} MiB", mib(extra.trunk_bytes))
        } else {
            String::new()
        },
        match needed.snapshot_bytes {
            0 => String::new(),
            bytes => format!(", a copy for snapshots {} MiB", mib(bytes)),
        },
        match needed.mark_bytes {
            0 => String::new(),
            bytes => format!(", a copy for the next text {} MiB", mib(bytes)),
        },
        mib(available)
    );
    let (slim, alone) = (Load { rows: 1, ..load }, Load { lanes: 1, rows: 1, ..load });
    let advice = if fits(slim) {
        let rows = largest(load.rows, |rows| fits(Load { rows, ..load }));
        format!("--prefill-rows {rows} fits")
    } else if load.lanes > 1 && fits(alone) {
        let lanes = largest(load.lanes, |lanes| fits(Load { lanes, ..slim }));
        format!("--parallel {lanes} with --prefill-rows 1 fits")
    } else if fits(Load { longest: 1, ..alone }) {
        let longest = largest(load.longest, |longest| fits(Load { longest, ..alone }));
        format!("with --prefill-rows 1 the longest prompt that fits has {longest} tokens")
    } else if config.resident {
        "without --resident experts stream".into()
    } else {
        "a smaller --buffer-bytes takes less".into()
    };
    Err(format!("{said}: {advice}"))
}

/// The largest number up to `most` for which `fits` holds; it holds for 1 and for every number below one that fits.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (1, most.max(1));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn what_would_fit_is_said_exactly() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/argo-mini/config.json");
        let model = ModelConfig::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut config = RunConfig { max_new: 16, ..RunConfig::default() };
        config.reader.buffer_bytes = 1 << 20;
        let need = |longest, rows| {
            RunBytes::of(&model, Extra::default(), &config, Load { lanes: 1, longest, rows }).total_bytes()
        };
        let check = |prompt, available| {
            check_against(&model, Extra::default(), &config, Load::of(&config, &[prompt]), available)
        };
        assert_eq!(check(1000, need(1000, 1000)), Ok(()));
        let says = check(1000, need(1000, 700)).unwrap_err();
        assert!(says.contains("1000 tokens in passes of 1000") && says.ends_with("--prefill-rows 700 fits"), "{says}");
        let says = check(1000, need(300, 1)).unwrap_err();
        assert!(says.ends_with("the longest prompt that fits has 300 tokens"), "{says}");
        assert!(check(1000, 1 << 20).unwrap_err().ends_with("a smaller --buffer-bytes takes less"));
        let resident = RunConfig { resident: true, ..config.clone() };
        assert!(
            check_against(&model, Extra::default(), &resident, Load::of(&resident, &[10]), 1 << 20)
                .unwrap_err()
                .ends_with("experts stream")
        );

        // Drafting takes what a pass of several rows keeps of each, and the draft model.
        let mut drafting = config.clone();
        (drafting.draft.speculate, drafting.draft.draft_depth) = (DrafterKind::Model, 8);
        let size = DraftSize { config: &model, trunk_bytes: 1 << 30 };
        let load = Load { lanes: 1, longest: 1000, rows: 1000 };
        let with = RunBytes::of(&model, Extra { draft: Some(size), ..Extra::default() }, &drafting, load);
        let without = RunBytes::of(&model, Extra::default(), &config, load);
        // 9 KDA layers; of 9 rows three vectors of the recurrence and of the convolutions, and a number for each head; logits
        let vocab = model.vocab_size as u64;
        assert_eq!(with.session_bytes - without.session_bytes, 4 * (9 * 9 * (6 * 256 + 4) + 64 * 64 + 64 + 9 * vocab));
        assert!(with.draft_bytes > (1 << 30) + without.session_bytes);
        let says = check_against(&model, Extra { draft: Some(size), ..Extra::default() }, &drafting, load, 1 << 29)
            .unwrap_err();
        assert!(says.contains("the draft model"), "{says}");
    }

    #[test]
    fn lanes_multiply_the_state_and_fewer_are_proposed() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/argo-mini/config.json");
        let model = ModelConfig::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut config = RunConfig { max_new: 16, ..RunConfig::default() };
        config.reader.buffer_bytes = 1 << 20;
        config.model.parallel = 8;
        let load = Load::of(&config, &[10, 300, 20, 30, 1, 1, 1, 1, 1]);
        assert_eq!(load, Load { lanes: 8, longest: 300, rows: 364 });
        let (one, eight) = (SessionBytes::of(&model, 316, 8), SessionBytes::of_lanes(&model, 316, 8, 8));
        assert_eq!(eight.kda_state_bytes, 8 * one.kda_state_bytes);
        assert_eq!(eight.latent_cache_bytes, 8 * one.latent_cache_bytes);
        assert_eq!(eight.working_bytes - one.working_bytes, 8 * 4 * model.vocab_size as u64, "logits");
        let need =
            |lanes| RunBytes::of(&model, Extra::default(), &config, Load { lanes, rows: 1, ..load }).total_bytes();
        let says = check_against(&model, Extra::default(), &config, load, need(5)).unwrap_err();
        assert!(
            says.contains("8 texts at once") && says.ends_with("--parallel 5 with --prefill-rows 1 fits"),
            "{says}"
        );
    }
}
