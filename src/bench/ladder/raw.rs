//! The I/O of a rung alone: the barriers of one traced run of the prompt, read back to back on the rung's drives, and the same
//! barriers simulated on its plan. Drives of the simulation are what was measured of them; an `emulate` table is not looked at.

use super::rungs::{Layout, Planned};
use super::value::OneMore;
use super::{LadderError, LadderSpec};
use crate::bench::campaign::evaluate::Effect;
use crate::bench::config::Asked;
use crate::bench::reissue::{self, ReissueRecord, ReissueSpec};
use crate::bench::simulate::{Loaded, SimulateSpec, load, runs, setup};
use crate::bench::simulate_drives::{Known, NewDrive};
use crate::bench::what_if::what_if;
use crate::drive::profile::Profile;
use crate::layout::policy::{Policy, PolicyFile};
use crate::reader::{KnownRate, ReaderOptions};
use crate::replay::reissue::{Gaps, ReissueError};
use crate::replay::schedule::Schedule;
use crate::replay::simulate::summary::predict;
use crate::trace::log;
use std::path::{Path, PathBuf};

/// Simulations of a rung, each with a seed of its own.
const REPEATS: u32 = 4;
const SEED: u64 = 0;
/// Rows of a reissued trace that are the barriers of decoding.
const DECODE: &str = "decode";

/// The barriers that every rung reads.
pub(super) struct Barriers {
    trace: PathBuf,
    schedule: Schedule,
    asked: Asked,
    known: Known,
    /// The runs keep or guess experts, which readings and simulations leave out.
    more_than_demand: bool,
}

/// Mean barrier and decode rate of a rung, simulated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Predicted {
    pub(super) barrier_mean_ns: f64,
    pub(super) decode_tok_s: Option<f64>,
}

impl Barriers {
    /// Those of the run traced into `trace`, decoding only; or why there are none.
    pub(super) fn load(trace: &Path, spec: &LadderSpec<'_>) -> Result<Self, String> {
        let header = log::read_header(trace).map_err(|e| e.to_string())?;
        let schedule = Schedule::load(trace, &header, false).map_err(|e| e.to_string())?.extending();
        if schedule.barriers.is_empty() {
            return Err("the text ended with its first token, so no pass has barriers to read".into());
        }
        let mut asked = spec.asked.clone();
        // A limit that so few barriers never reach must not reject the reading.
        asked.given.clear();
        let usual = ReaderOptions::default();
        let reader = &asked.config.reader;
        let more_than_demand = reader.cache_bytes > 0 || reader.prefetch != usual.prefetch;
        let widest = schedule.barriers.iter().map(|b| b.experts.len()).max().unwrap_or(0);
        asked.config.reader = ReaderOptions {
            prefetch: usual.prefetch,
            prefetch_depth: usual.prefetch_depth,
            prefetch_experts: usual.prefetch_experts,
            prefetch_table: None,
            cache_bytes: 0,
            cache_policy: usual.cache_policy,
            cache_heat: None,
            demand_reserve: widest as u32,
            ..asked.config.reader
        };
        let known = spec.profile.map_or(Known::Trace, |p| Known::Profile(Box::new(p.clone())));
        Ok(Self { trace: trace.to_path_buf(), schedule, asked, known, more_than_demand })
    }

    /// Where the drives of the simulation come from.
    pub(super) fn simulated_from(&self) -> &'static str {
        self.known.words()
    }

    /// Where the rates come from that bounds follow from.
    pub(super) fn bounds_from(&self) -> &'static str {
        match &self.known {
            Known::Profile(_) => self.known.words(),
            _ if !self.asked.config.reader.rates.is_empty() => "rates that the reader was given",
            _ => "fit to each rung's own barriers",
        }
    }

    /// Reads them on a rung; `None` when somebody stopped it.
    pub(super) fn read(
        &self,
        rung: &Planned,
        profile: Option<&Profile>,
        keep_going: &dyn Fn() -> bool,
    ) -> Result<Option<ReissueRecord>, LadderError> {
        let rates = profile.map(|p| rates_of(p, &rung.names())).unwrap_or_default();
        let spec = ReissueSpec {
            from: &self.trace,
            schedule: &self.schedule,
            plan: &rung.plan,
            mounts: &rung.mounts,
            asked: &self.asked,
            gaps: Gaps::None,
            rates: &rates,
            out: None,
        };
        match reissue::run(&spec, keep_going) {
            Err(reissue::RunError::Reissue(ReissueError::Interrupted { .. })) => Ok(None),
            other => Ok(other.map(Some)?),
        }
    }

    /// Simulates them on the plan of a rung; or says why that cannot be done.
    pub(super) fn simulate(&self, rung: &Planned) -> Result<Predicted, String> {
        self.with_loaded(rung, |spec, loaded| {
            let fail = |e: crate::bench::simulate::SimulateError| e.to_string();
            let setup = setup(spec.plan, &loaded.drives, loaded.alignment_bytes, spec.options).map_err(fail)?;
            let all = runs(&loaded.work, &setup, SEED, REPEATS).map_err(fail)?;
            let figures = predict(&loaded.work, &setup, &all, SEED).ok_or("there is nothing to simulate")?;
            let decode = figures.phases.iter().find(|p| p.phase == DECODE).ok_or("no pass was decoded")?;
            let decode_tok_s = figures.tok_s.map(|t| t.0.estimate).filter(|_| !self.more_than_demand);
            Ok(Predicted { barrier_mean_ns: decode.mean_ns.0.estimate, decode_tok_s })
        })
    }

    /// One more drive like the one called `like`, simulated beside those of `top`.
    pub(super) fn one_more(&self, top: &Planned, like: &str, layout: Layout<'_>) -> OneMore {
        let (policy, heat) = match layout {
            Layout::Planned { policy, heat } => (policy.over(&names(top)), heat.cloned()),
            Layout::Fixed(_) => {
                return OneMore::Cannot("a plan that is kept says nothing of a drive that it lacks".into());
            }
        };
        if !takes_more(&policy) {
            return OneMore::Cannot(format!("the policy {} names what each drive holds", policy.policy.name()));
        }
        if self.more_than_demand {
            return OneMore::Cannot("runs kept experts or read them ahead, which the simulation leaves out".into());
        }
        let found = self.with_loaded(top, |spec, loaded| {
            let device = loaded.drives.devices.iter().find(|d| d.name == like);
            let device = device.ok_or_else(|| format!("nothing is known of drive `{like}`"))?;
            let mut rate = device.bound;
            // Behind no uplink that others share.
            rate.bytes_per_s = device.bytes_per_s;
            let (fixed_ns, latency_ns) = (device.fixed_ns, device.latency_ns);
            let new = NewDrive { name: None, rate, fixed_ns, latency_ns, capacity_bytes: None };
            let found = what_if(spec, loaded, &[new], Some(policy), heat).map_err(|e| e.to_string())?;
            let step = found.steps.last().ok_or("there is nothing to simulate")?;
            let gain = step.gain.ok_or("the traced run has too few passes")?.0;
            Ok((Effect { ratio: gain.estimate, low: Some(gain.low), high: Some(gain.high) }, step.verdict))
        });
        match found {
            Ok((effect, verdict)) => OneMore::Gain { like: like.into(), effect, verdict },
            Err(why) => OneMore::Cannot(why),
        }
    }

    fn with_loaded<T>(
        &self,
        rung: &Planned,
        then: impl FnOnce(&SimulateSpec<'_>, &Loaded) -> Result<T, String>,
    ) -> Result<T, String> {
        // A simulation has no reads that are slow for reasons a trace does not show.
        let options = ReaderOptions { hedge_after_permille: None, ..self.asked.config.reader.clone() };
        let spec = SimulateSpec {
            trace: &self.trace,
            plan: &rung.plan,
            known: &self.known,
            profile: None,
            mounts: Some(&rung.mounts),
            options: &options,
            seed: SEED,
            repeats: REPEATS,
            lenient: false,
        };
        let loaded = load(&spec).map_err(|e| e.to_string())?;
        then(&spec, &loaded)
    }
}

fn names(rung: &Planned) -> Vec<&str> {
    rung.mounts.iter().map(|m| m.name.as_str()).collect()
}

/// Whether the policy would place anything on a drive that it does not name.
fn takes_more(policy: &PolicyFile) -> bool {
    !matches!(policy.policy, Policy::HotReplica { .. } | Policy::Single { .. }) && policy.drives.is_empty()
}

/// What a profile says of these drives: one alone has its rate alone, several have those with all at work.
fn rates_of(profile: &Profile, names: &[String]) -> Vec<KnownRate> {
    let mut rates = KnownRate::of_profile(profile);
    rates.retain(|r| names.contains(&r.drive));
    if let [only] = rates.as_mut_slice()
        && let Some(model) = profile.drive(&only.drive)
    {
        only.bytes_per_s = model.solo_rate_bytes_per_s.max(1.0) as u64;
    }
    rates
}

/// Means of one reading over the barriers of decoding, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Means {
    pub(super) barrier: f64,
    pub(super) bound_layout: Option<f64>,
    pub(super) bound_drives: Option<f64>,
}

impl Means {
    /// Those of `reading`; `None` where it has no such barrier.
    pub(super) fn of(reading: &ReissueRecord) -> Option<Self> {
        let row = reading.phases.iter().find(|p| p.phase == DECODE)?;
        let (bound_layout, bound_drives) = (row.bound_layout_ns, row.bound_drives_ns);
        Some(Self { barrier: row.reissued.mean_ns, bound_layout, bound_drives })
    }
}
