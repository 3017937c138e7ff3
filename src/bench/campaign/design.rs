//! From arms and prompts to a campaign that can be measured: defaults, checks, and what every arm must prove.

use super::CampaignError;
use super::arms::{Arm, ReadyArm, check, differences, make_ready};
use super::file::{ArmFile, CAMPAIGN_VERSION, CampaignFile, Expect, State, find_arm};
use super::order::{DEFAULT_PAIRS, Protocol, rows_for};
use super::prompts::Prompt;
use crate::bench::record::utc_now;
use crate::stats::DEFAULT_RESAMPLES;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What is to be compared.
#[derive(Clone, Debug, Default)]
pub struct Design {
    /// Name of the experiment: a folder of results.
    pub experiment: String,
    /// What it is to find out.
    pub hypothesis: Option<String>,
    /// The file that describes it.
    pub source: Option<PathBuf>,
    /// The arms; the first is the control.
    pub arms: Vec<Arm>,
    /// The prompts; every arm gets all of them.
    pub prompts: Vec<Prompt>,
    /// Rows in which every arm runs once; `None` = eight, or as many more as prompts need.
    pub pairs: Option<usize>,
    /// Rows of the control against itself; `None` = the same.
    pub floor_pairs: Option<usize>,
    /// Look while measuring, and stop at an effect.
    pub stop: bool,
    /// Seed of the order and of the bootstrap.
    pub seed: u64,
    /// What must come out.
    pub expect: Expect,
}

impl Design {
    /// The protocol, with defaults filled in.
    pub fn protocol(&self) -> Protocol {
        let pairs = self.pairs.unwrap_or_else(|| rows_for(self.prompts.len(), DEFAULT_PAIRS));
        Protocol {
            pairs,
            floor_pairs: self.floor_pairs.unwrap_or(pairs),
            stop: self.stop,
            seed: self.seed,
            resamples: DEFAULT_RESAMPLES,
        }
    }

    /// Everything that can be checked without opening a store. Gives every arm the first prompt, so that its configuration
    /// is whole.
    pub fn check(&mut self) -> Result<(), CampaignError> {
        let Some(first) = self.prompts.first().cloned() else {
            let arm = self.arms.first().map(|a| a.name.clone()).unwrap_or_default();
            return Err(CampaignError::Option(format!("arm `{arm}` has no prompt: give prompts")));
        };
        let mut names: Vec<&str> = self.prompts.iter().map(|p| p.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(CampaignError::Option(format!("two prompts are called `{}`; rename a file", twice[0])));
        }
        for arm in &mut self.arms {
            arm.asked.repeats = None;
            first.put(&mut arm.asked.config);
        }
        check(&self.arms)?;
        self.protocol().check(self.prompts.len())?;
        let names: Vec<&str> = self.arms.iter().map(|a| a.name.as_str()).collect();
        for (arm, key) in self
            .expect
            .verdict
            .keys()
            .map(|a| (a, "verdict"))
            .chain(self.expect.ratio_at_least.keys().map(|a| (a, "ratio_at_least")))
            .chain(self.expect.refused.keys().map(|a| (a, "refused")))
        {
            if find_arm(&names, arm, key)? == 0 {
                return Err(CampaignError::Option(format!(
                    "{key}: `{arm}` is the control, which is compared with nothing; name a candidate"
                )));
            }
        }
        if let Some((arm, ratio)) = self.expect.ratio_at_least.iter().find(|(_, r)| !(r.is_finite() && **r > 0.0)) {
            return Err(CampaignError::Option(format!("ratio_at_least: {arm} is {ratio}; expected a number above 0")));
        }
        Ok(())
    }

    /// Opens everything, and writes down what is to be measured.
    pub fn prepare(mut self) -> Result<(CampaignFile, Vec<ReadyArm>), CampaignError> {
        self.check()?;
        let differences = differences(&self.arms)?;
        let ready = make_ready(&self.arms, &differences)?;
        let protocol = self.protocol();
        let names = |knobs: &std::collections::BTreeSet<crate::knob::Knob>| {
            knobs.iter().map(|k| k.name().to_string()).collect::<Vec<_>>()
        };
        let arms = self.arms.iter().zip(&ready).map(|(arm, ready)| ArmFile {
            name: arm.name.clone(),
            given: names(&arm.asked.given),
            fired: names(&arm.fired),
            under_test: names(&ready.under_test),
            inputs: ready.inputs.clone(),
            config: arm.asked.config.clone(),
        });
        let file = CampaignFile {
            version: CAMPAIGN_VERSION,
            experiment: self.experiment,
            hypothesis: self.hypothesis,
            source: self.source,
            started: utc_now(),
            state: State::Running,
            protocol,
            prompts: self.prompts,
            arms: arms.collect(),
            differences,
            expect: self.expect,
            rejected: BTreeMap::new(),
            results: None,
        };
        Ok((file, ready))
    }

    /// The design of a campaign that is on disk already.
    pub fn of(file: &CampaignFile) -> Self {
        Self {
            experiment: file.experiment.clone(),
            hypothesis: file.hypothesis.clone(),
            source: file.source.clone(),
            arms: file.to_arms(),
            prompts: file.prompts.clone(),
            pairs: Some(file.protocol.pairs),
            floor_pairs: Some(file.protocol.floor_pairs),
            stop: file.protocol.stop,
            seed: file.protocol.seed,
            expect: file.expect.clone(),
        }
    }

    /// Reads the prompts' files again, so that a digest is that of the text as it is now.
    pub fn refresh_prompts(&mut self) -> Result<(), CampaignError> {
        for prompt in &mut self.prompts {
            prompt.digest = crate::bench::inputs::digest(prompt.read()?.as_bytes());
        }
        Ok(())
    }
}
