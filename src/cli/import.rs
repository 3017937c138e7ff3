//! `argodrive import`: a checkpoint becomes a store.

use super::{ByteBar, print, remark};
use crate::report::units::bytes;
use crate::store::import::{ImportOptions, import};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `import`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json and the safetensors files
    pub checkpoint: PathBuf,
    /// Folder of the store; a new one, or one whose import was interrupted
    #[arg(long, value_name = "DIR")]
    pub store: PathBuf,
    /// Format that the trunk is kept in
    #[arg(long, value_enum, default_value_t = TrunkFormat::Bf16)]
    pub trunk: TrunkFormat,
    /// Most bytes written between two entries of the journal, i.e. lost by a kill (K, M, G and Ki, Mi, Gi are understood)
    #[arg(long, value_name = "SIZE", default_value = "64Mi", value_parser = parse_size)]
    pub batch: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Formats of the trunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TrunkFormat {
    /// The checkpoint's own bytes
    Bf16,
}

/// Runs the import and prints what was done.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let bar = ByteBar::new("import");
    let TrunkFormat::Bf16 = args.trunk; // the one that `import` writes
    let options = ImportOptions { batch_bytes: args.batch };
    let report = import(&args.checkpoint, &args.store, &options, &mut |at| bar.show(at));
    bar.finish();
    let report = report?;
    let m = &report.manifest;
    let experts = m.moe_layers.len() as u64 * u64::from(m.experts);
    if args.json {
        let object = serde_json::json!({
            "store": args.store, "model_id": m.model_id, "name": m.name, "was_complete": report.was_complete,
            "moe_layers": m.moe_layers.len(), "experts": experts, "expert_bytes": m.expert_bytes,
            "experts_written": report.experts_written, "experts_reused": report.experts_reused,
            "trunk_tensors": m.trunk.len(), "trunk_written": report.trunk_written, "trunk_reused": report.trunk_reused,
            "bytes_written": report.bytes_written, "vision_skipped": report.vision_skipped,
            "side_files": report.side_files,
        });
        print(&object.to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    if report.was_complete {
        print(&format!("{}: already complete and equal to this checkpoint; nothing written", args.store.display()))?;
    } else {
        let reused = report.experts_reused + report.trunk_reused;
        let rest = if reused > 0 { format!(", {reused} parts were there already") } else { String::new() };
        print(&format!("{}: {} written{rest}", args.store.display(), bytes(report.bytes_written)))?;
        if !report.side_files.iter().any(|f| f == "tokenizer.json" || f == "tiktoken.model") {
            remark(
                "the checkpoint has neither tokenizer.json nor tiktoken.model; text cannot be encoded for this store",
            );
        }
    }
    let vision = match report.vision_skipped {
        0 => String::new(),
        n => format!(", {n} vision tensors left out"),
    };
    print(&format!(
        "model {} ({}): {} trunk tensors, {experts} experts of {}{vision}",
        m.model_id,
        m.name,
        m.trunk.len(),
        bytes(m.expert_bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "K" | "KB" | "kB" => 1000,
        "M" | "MB" => 1_000_000,
        "G" | "GB" => 1_000_000_000,
        "Ki" | "KiB" => 1 << 10,
        "Mi" | "MiB" => 1 << 20,
        "Gi" | "GiB" => 1 << 30,
        unit => return Err(format!("`{unit}` is no unit; use K, M, G, Ki, Mi or Gi")),
    };
    let count: u64 = digits.parse().map_err(|_| format!("`{text}` is no size"))?;
    let bytes = count.checked_mul(factor).ok_or_else(|| format!("`{text}` is too large"))?;
    if bytes == 0 { Err("must be larger than zero".into()) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("64Mi"), Ok(64 << 20));
        assert_eq!(parse_size("5"), Ok(5));
        assert_eq!(parse_size("3MB"), Ok(3_000_000));
        for bad in ["", "x", "1X", "-1", "0", "99999999999999999999", "20000000000G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
