//! int8 activations of a run: whether the model has weights that take them, what a record says about them, and how far they
//! move the logits of the prompt. That is measured apart from the run, with both kinds of activations over the same tokens;
//! it is bounded as the measure of an int8 trunk is, and experts stream. Computes no product itself.

use super::config::{ConfigError, RunConfig};
use super::seen::Seen;
use super::trunk_error::{most_tokens, reader_options};
use crate::clock::Clock;
use crate::decode::{Activations, LogitError, Logits, WeightForm};
use crate::drive::spec::DriveSpec;
use crate::layout::plan::Plan;
use crate::open::{Model, NoExperts, OpenError};
use crate::reader::{PrefetchPolicy, ReaderOptions};
use crate::source::{ExpertSource, Phase};
use crate::store::trunk_format::TrunkFormat;
use serde::{Deserialize, Serialize};

/// Products with weights of one form, by what their activations were. A thread's part of a product counts as one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormProducts {
    /// How the weights are stored.
    pub weights: String,
    /// With int8 activations.
    pub int8: u64,
    /// With f32 activations.
    pub f32: u64,
}

/// The activations of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActivationsRecord {
    /// What was asked for.
    pub kind: Activations,
    /// What must be said beside every figure of the run; `None` for exact ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// How far logits of the prompt's first tokens are from those with f32 activations, where that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<LogitError>,
    /// What was computed.
    pub products: Vec<FormProducts>,
}

impl ActivationsRecord {
    /// Of a run with this configuration and these facts.
    pub fn of(config: &RunConfig, seen: &Seen) -> Self {
        let kind = config.model.activations;
        let count = |form: WeightForm| FormProducts {
            weights: form.name().into(),
            int8: seen.activations.of(form, Activations::Int8),
            f32: seen.activations.of(form, Activations::F32),
        };
        let products = WeightForm::ALL.into_iter().map(count).collect();
        Self { kind, label: kind.label().map(str::to_string), error: None, products }
    }
}

/// What must be said beside every figure of a model with such a trunk and such activations; `None` if it is the released model's
/// arithmetic.
pub fn label(trunk: TrunkFormat, activations: Activations) -> Option<String> {
    let all: Vec<&str> = [trunk.label(), activations.label()].into_iter().flatten().collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Refuses int8 activations where no product would have them.
pub fn check(model: &Model, config: &RunConfig) -> Result<(), ConfigError> {
    let (_, int8_matrices) = model.decoder.matrix_counts();
    match config.model.activations {
        Activations::Int8 if !model.has_experts() && int8_matrices == 0 => Err(ConfigError::Contradiction(format!(
            "--activations int8: the model in {} has no experts and a bfloat16 trunk, and only products of MXFP4 and int8 weights \
             can have int8 activations; import it with --trunk int8, or leave the flag out",
            model.folder.display()
        ))),
        _ => Ok(()),
    }
}

/// Has the model's products see their activations as the configuration says, until another run says otherwise. A draft model
/// keeps f32.
pub fn use_activations(model: &Model, config: &RunConfig) -> Result<(), ConfigError> {
    check(model, config)?;
    model.decoder.use_activations(config.model.activations);
    Ok(())
}

/// How far logits of the first tokens of `prompt` with int8 activations lie from those with f32 ones. Experts come from the drives
/// of `streamed`, not slowed down where they are emulated and without injected faults, or from the store; no faster than the run may
/// ask drives. Reads them twice; `None` if `keep_going` says no in between.
pub fn measure(
    model: &Model,
    config: &RunConfig,
    streamed: Option<(&Plan, &[DriveSpec])>,
    prompt: &[u32],
    keep_going: &dyn Fn() -> bool,
) -> Result<Option<LogitError>, OpenError> {
    let own = match streamed {
        None if model.has_experts() => Some(model.store_plan()?),
        _ => None,
    };
    let experts = streamed.or_else(|| own.as_ref().map(|(plan, mounts)| (plan, mounts.as_slice())));
    let experts = experts.map(|(plan, mounts)| {
        let sound = |m: &DriveSpec| DriveSpec { emulate: None, faults: Vec::new(), ..m.clone() };
        (plan, mounts.iter().map(sound).collect::<Vec<_>>())
    });
    let tokens = &prompt[..prompt.len().min(most_tokens(model.decoder.config()))];
    let logits = |activations: Activations| -> Result<Vec<f32>, OpenError> {
        model.decoder.use_activations(activations);
        let clock = Clock::start();
        let mut session = model.session(tokens.len(), tokens.len(), PrefetchPolicy::None, clock)?;
        let mut source: Box<dyn ExpertSource> = match &experts {
            Some((plan, mounts)) => {
                let own = &config.reader;
                let options = ReaderOptions {
                    max_read_bytes_per_s: own.max_read_bytes_per_s,
                    duty_permille: own.duty_permille,
                    read_timeout_ms: own.read_timeout_ms,
                    ..reader_options(model.decoder.config(), mounts)
                };
                Box::new(model.reader(plan, mounts, &options, clock)?)
            }
            None => Box::new(NoExperts),
        };
        model.stream_trunk(session.trunk_mut(), &config.reader, clock, None)?;
        Ok(session.forward(tokens, Phase::Prefill, source.as_mut(), Logits::All, None)?.to_vec())
    };
    let both = logits(Activations::F32).and_then(|exact| {
        let int8 = keep_going().then(|| logits(Activations::Int8)).transpose()?;
        Ok((exact, int8))
    });
    model.decoder.use_activations(config.model.activations);
    let (exact, int8) = both?;
    Ok(int8.map(|int8| LogitError::between(&exact, &int8, model.decoder.config().vocab_size)))
}
