//! Arguments of snapshots and of going on from one, and what is said of them.

use super::run_args::set;
use crate::bench::config::Asked;
use crate::bench::record::RunRecord;
use crate::bench::run::RunResult;
use crate::decode::generate::StopReason;
use crate::knob::Knob;
use crate::report::units;
use std::io::Write;
use std::path::PathBuf;

/// Other texts that are named.
const OTHERS_NAMED: usize = 4;

/// When the text is kept, and whether one goes on.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Long runs")]
pub struct SnapshotArgs {
    /// Keep the text's whole state on disk, so that at most N tokens are lost if the program is killed [default: 0, off]
    #[arg(long, value_name = "N")]
    snapshot_every: Option<usize>,
    /// Folder of the snapshots, on any drive; the newest two of a text are kept [default: snapshots in the store]
    #[arg(long, value_name = "DIR")]
    snapshot_dir: Option<PathBuf>,
    /// Go on with the text of a snapshot, or of the newest one in a folder, without reading the prompt again; settings that are
    /// not given are those of the snapshot [default: --snapshot-dir]
    #[arg(long, value_name = "DIR|FILE", num_args = 0..=1, default_missing_value = "")]
    resume: Option<String>,
}

impl SnapshotArgs {
    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (s, given) = (&mut asked.config.snapshot, &mut asked.given);
        set(given, Knob::SnapshotEvery, &mut s.snapshot_every, self.snapshot_every);
        set(given, Knob::Resume, &mut s.resume, self.resume.as_ref().map(|at| Some(at.into())));
        s.snapshot_dir = self.snapshot_dir.clone().or(s.snapshot_dir.take());
    }
}

/// What snapshots took, for people.
pub fn say(out: &mut impl Write, result: &RunResult) {
    let RunRecord { snapshots, resumed, .. } = &result.record;
    if let Some(r) = resumed {
        let _ = writeln!(
            out,
            "resumed from {} with {} tokens: {} read in {}, no pass over the prompt",
            r.from.display(),
            r.tokens,
            units::bytes(r.bytes),
            units::duration(r.restore_ns)
        );
    }
    let Some(s) = snapshots else { return };
    let _ = writeln!(
        out,
        "{} snapshots into {}: {}, the last {}; decoding stood still for {} ({}), files took {} beside it",
        s.written,
        s.folder.display(),
        units::bytes(s.bytes),
        units::bytes(s.last_bytes),
        units::duration(s.copy_ns + s.wait_ns),
        units::percent(s.blocked_share),
        units::duration(s.write_ns)
    );
    if !s.other_texts.is_empty() {
        let (files, bytes) = s.other_texts.iter().fold((0, 0), |(n, sum), o| (n + o.files, sum + o.bytes));
        let names: Vec<&str> = s.other_texts.iter().take(OTHERS_NAMED).map(|o| o.name.as_str()).collect();
        let more = if s.other_texts.len() > OTHERS_NAMED { ", ..." } else { "" };
        let _ = writeln!(
            out,
            "{files} snapshots of {} other texts ({}{more}) take {} there, and stay until somebody removes them: rm {}/*-NAME.snapshot",
            s.other_texts.len(),
            names.join(", "),
            units::bytes(bytes),
            s.folder.display()
        );
    }
    if result.generation.stopped == StopReason::Interrupted && s.written > 0 {
        let _ = writeln!(out, "interrupted with {} tokens kept; --resume goes on with them", s.last_tokens);
    }
}
