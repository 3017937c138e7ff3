//! Flags of what answers one text after another: `chat` and `serve`. Knows how a configuration begins and is filled, not who asks.

use super::draft_args::DraftArgs;
use super::kv_args::KvArgs;
use super::run_args::{ModelArgs, ReaderArgs, SamplerArgs, start_over};
use crate::bench::config::Asked;
use crate::knob::Knob;
use anyhow::Result;
use std::path::PathBuf;

/// Tokens of an answer unless somebody says otherwise.
const DEFAULT_TOKENS: usize = 512;

/// Model, drives and settings.
#[derive(Debug, clap::Args)]
pub(super) struct TurnArgs {
    /// The store
    #[arg(long, value_name = "DIR", required_unless_present = "profile")]
    store: Option<PathBuf>,
    /// Begin with these settings (`argodrive tune` writes them); flags override them
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// The plan; without one the store itself is the one drive
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Where the plan's drives are now, and which of them are emulated
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// Hold every expert in memory instead of streaming
    #[arg(long)]
    resident: bool,
    /// Most tokens of an answer, where a request does not say [default: the profile's, or 512]
    #[arg(long, value_name = "N")]
    max_new: Option<usize>,
    #[command(flatten)]
    sampler: SamplerArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    reader: ReaderArgs,
}

impl TurnArgs {
    /// What is asked for, unchecked. Each text comes later; `prompt` stands for it.
    pub(super) fn asked(&self, prompt: &str) -> Result<Asked> {
        let mut asked = start_over(self.profile.as_ref(), None)?;
        let config = &mut asked.config;
        config.store = self.store.clone().unwrap_or(std::mem::take(&mut config.store));
        config.plan = self.plan.clone().or(config.plan.take());
        config.drives = self.drives.clone().or(config.drives.take());
        config.resident |= self.resident;
        (config.prompt, config.prompt_file, config.prompts) = (Some(prompt.into()), None, None);
        if self.max_new.is_some() || !asked.given.contains(&Knob::MaxNew) {
            asked.config.max_new = self.max_new.unwrap_or(DEFAULT_TOKENS);
        }
        self.sampler.apply(&mut asked);
        self.model.apply(&mut asked);
        self.draft.apply(&mut asked);
        self.kv.apply(&mut asked);
        self.reader.apply(&mut asked);
        Ok(asked)
    }
}
