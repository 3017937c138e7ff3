//! Arguments of the KV tier, and what is said of it.

use super::run_args::set;
use crate::bench::config::Asked;
use crate::bench::kv::KvRecord;
use crate::drive::units::parse_bytes;
use crate::knob::Knob;
use crate::report::units;
use std::io::Write;
use std::path::PathBuf;

/// How much memory latent caches may take.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Latent cache")]
pub struct KvArgs {
    /// Hold the latent cache of all texts to so many bytes; older rows go to a file in blocks, and come back in each pass
    /// [default: all of it in memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    kv_ram: Option<u64>,
    /// Folder of that file, on any drive; it has no name there, and is gone when the run is [default: the store]
    #[arg(long, value_name = "DIR")]
    kv_dir: Option<PathBuf>,
}

impl KvArgs {
    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (kv, given) = (&mut asked.config.kv, &mut asked.given);
        set(given, Knob::KvRam, &mut kv.kv_ram_bytes, self.kv_ram);
        kv.kv_dir = self.kv_dir.clone().or(kv.kv_dir.take());
    }
}

/// What the tier took, for people.
pub fn say(out: &mut impl Write, kv: &KvRecord) {
    let limit = format!("{} of {} resident", units::bytes(kv.peak_bytes), units::bytes(kv.ram_bytes));
    let Some(folder) = &kv.folder else {
        let _ = writeln!(out, "latent cache: {limit}, all of it fits");
        return;
    };
    let _ = writeln!(
        out,
        "latent cache: {limit}; {} rows in {} blocks of {} to {} ({}{}), {} back in {} reads, {} blocks ahead of their layer; passes waited {} ({} a token)",
        kv.spilled_rows,
        kv.written_blocks,
        kv.block_rows,
        folder.display(),
        units::bytes(kv.written_bytes),
        if kv.emulated { ", EMULATED" } else { "" },
        units::bytes(kv.read_bytes),
        kv.reads,
        kv.ahead_used,
        units::duration(kv.wait_ns + kv.write_ns),
        units::duration(kv.wait_per_token_ns),
    );
}
