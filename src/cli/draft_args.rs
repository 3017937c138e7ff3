//! Arguments of speculative decoding, shared by the commands that decode, and what is printed of it.

use super::run_args::set;
use crate::bench::config::Asked;
use crate::bench::speculation::SpeculationRecord;
use crate::decode::speculate::{AcceptRule, DepthPolicy, DrafterKind};
use crate::knob::Knob;
use crate::report::table::{Align, Table};
use crate::report::units;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Whose proposals are checked, and how many.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Speculative decoding")]
pub struct DraftArgs {
    /// Who proposes tokens, several of which are then checked in one pass [default: off]
    #[arg(long, value_enum, value_name = "DRAFTER")]
    speculate: Option<Drafter>,
    /// The draft model of `--speculate model`: a small dense model with the same vocabulary, as store or checkpoint
    #[arg(long, value_name = "DIR")]
    draft_model: Option<PathBuf>,
    /// Most proposals in a pass, 1 to 16 [default: 4]
    #[arg(long, value_name = "N")]
    draft_depth: Option<usize>,
    /// Whether every pass gets that many, or as many as pay by measured times and acceptance [default: fixed]
    #[arg(long, value_enum, value_name = "POLICY")]
    draft_policy: Option<Policy>,
    /// At a temperature above 0, when a proposal is kept [default: standard]
    #[arg(long, value_enum, value_name = "RULE")]
    draft_accept: Option<Accept>,
    /// Attention of the draft model looks at the last N positions alone, and drops its cache of older ones; proposals may
    /// differ, the text never does [default: 0, all]
    #[arg(long, value_name = "N")]
    draft_window: Option<usize>,
}

/// Drafters by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Drafter {
    /// Nobody: one token a pass
    Off,
    /// The text: what followed when its end stood there before
    Ngram,
    /// A small model (--draft-model)
    Model,
}

impl From<Drafter> for DrafterKind {
    fn from(drafter: Drafter) -> Self {
        match drafter {
            Drafter::Off => Self::Off,
            Drafter::Ngram => Self::Ngram,
            Drafter::Model => Self::Model,
        }
    }
}

/// Policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Policy {
    /// Always --draft-depth
    Fixed,
    /// At most --draft-depth, none while it does not pay
    Adaptive,
}

impl From<Policy> for DepthPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Fixed => Self::Fixed,
            Policy::Adaptive => Self::Adaptive,
        }
    }
}

/// Rules by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Accept {
    /// With probability min(1, p / q): the most are kept, the text is another one of the same distribution
    Standard,
    /// If it is the token that is drawn: the text is the one of the same seed without proposals
    ExactMatch,
}

impl From<Accept> for AcceptRule {
    fn from(accept: Accept) -> Self {
        match accept {
            Accept::Standard => Self::Standard,
            Accept::ExactMatch => Self::ExactMatch,
        }
    }
}

impl DraftArgs {
    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (d, given) = (&mut asked.config.draft, &mut asked.given);
        set(given, Knob::Speculate, &mut d.speculate, self.speculate.map(DrafterKind::from));
        set(given, Knob::DraftDepth, &mut d.draft_depth, self.draft_depth);
        set(given, Knob::DraftPolicy, &mut d.draft_policy, self.draft_policy.map(DepthPolicy::from));
        set(given, Knob::DraftAccept, &mut d.draft_accept, self.draft_accept.map(AcceptRule::from));
        set(given, Knob::DraftWindow, &mut d.draft_window, self.draft_window);
        // What comes of the model is judged with the drafter.
        d.draft_model = self.draft_model.clone().or(d.draft_model.take());
    }
}

/// Acceptance by position, for people.
pub fn table(record: &SpeculationRecord, width: usize) -> String {
    let mut out = String::new();
    let Some(tokens) = record.tokens_per_verify_pass else {
        let _ = writeln!(out, "{} proposed nothing that was checked", record.drafter);
        return out;
    };
    let _ = writeln!(
        out,
        "{} proposed: {} passes checked {} rows, {tokens:.2} tokens and {:.1} experts each{}; drafting took {}",
        record.drafter,
        record.verify_passes,
        record.verify_rows,
        record.experts_per_verify_pass.unwrap_or(0.0),
        record.experts_per_plain_pass.map_or_else(String::new, |e| format!(" (a plain pass {e:.1})")),
        units::duration(record.draft_ns),
    );
    if record.draft_rows_dropped > 0 {
        let _ = writeln!(
            out,
            "the draft model's latent cache held {} at most and dropped {} rows",
            units::bytes(record.draft_cache_bytes),
            record.draft_rows_dropped
        );
    }
    let mut table = Table::new([
        ("proposal", Align::Right),
        ("checked", Align::Right),
        ("accepted", Align::Right),
        ("share", Align::Right),
    ]);
    for p in &record.positions {
        let cells = [p.position.to_string(), p.proposed.to_string(), p.accepted.to_string(), units::percent(p.share)];
        table.row(cells);
    }
    let _ = writeln!(out, "{}", table.render(width));
    out
}
