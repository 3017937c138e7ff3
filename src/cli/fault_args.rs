//! Flags about drives that misbehave, on purpose or not, and what is printed about those that did.

use super::run_args::set;
use crate::bench::config::Asked;
use crate::bench::trouble::TroubleRecord;
use crate::drive::fault_rule::DriveFault;
use crate::drive::units::parse_rate;
use crate::knob::Knob;
use crate::reader::{Happened, ReaderOptions, Shedding};
use crate::report::table::{Align, Table};
use crate::report::units;
use std::fmt::Write as _;
use std::path::Path;

/// Largest file of faults that is read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What is done about drives that misbehave.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Reading")]
pub struct FaultArgs {
    /// Ask another home for a barrier's last read after this percentile of its drive's latencies, e.g. 99 [default: off]
    #[arg(long, value_name = "PERCENTILE", value_parser = HedgeAfter::parse)]
    hedge_after: Option<HedgeAfter>,
    /// Give up outstanding reads when nothing arrived for so long, in milliseconds [default: 30000]
    #[arg(long, value_name = "MS")]
    read_timeout: Option<u64>,
    /// Leave a drive alone that has become too slow to be worth waiting for, until it is as it was; auto = where dispatch goes by
    /// rates [default: auto]
    #[arg(long, value_enum, value_name = "AUTO|ON|OFF")]
    shed: Option<ShedArg>,
    /// Ask each drive for at most so many bytes per second, e.g. 800MB/s [default: off]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    max_read_rate: Option<u64>,
    /// Ask drives for reads in this share of the time only, e.g. 0.8 [default: 1]
    #[arg(long, value_name = "SHARE", value_parser = ReaderOptions::parse_duty)]
    duty: Option<u16>,
    /// Faults that reads meet on purpose: a file with one on each line, or the faults themselves, separated by `;`, as
    /// "blue: eio 1%; coral: vanish @300..600" (docs/reliability.md lists them) [default: none]
    #[arg(long, value_name = "FILE|FAULTS", value_parser = Faults::load)]
    faults: Option<Faults>,
}

impl FaultArgs {
    /// Overrides the configuration.
    pub fn apply(&self, asked: &mut Asked) {
        let (r, given) = (&mut asked.config.reader, &mut asked.given);
        set(given, Knob::Hedge, &mut r.hedge_after_permille, self.hedge_after.map(|h| h.0));
        set(given, Knob::ReadTimeout, &mut r.read_timeout_ms, self.read_timeout);
        set(given, Knob::Shed, &mut r.shed, self.shed.map(ShedArg::value));
        set(given, Knob::MaxReadRate, &mut r.max_read_bytes_per_s, self.max_read_rate);
        set(given, Knob::Duty, &mut r.duty_permille, self.duty);
        set(given, Knob::Faults, &mut r.faults, self.faults.clone().map(|f| f.0));
    }
}

/// `--shed`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum ShedArg {
    Auto,
    On,
    Off,
}

impl ShedArg {
    fn value(self) -> Shedding {
        match self {
            Self::Auto => Shedding::Auto,
            Self::On => Shedding::On,
            Self::Off => Shedding::Off,
        }
    }
}

fn rate(text: &str) -> Result<u64, String> {
    match parse_rate(text)? {
        0 => Err("a rate of 0 reads nothing".into()),
        rate => Ok(rate),
    }
}

/// `--hedge-after`, in tenths of a per cent; `None` = off.
#[derive(Clone, Copy, Debug)]
struct HedgeAfter(Option<u16>);

impl HedgeAfter {
    fn parse(text: &str) -> Result<Self, String> {
        ReaderOptions::parse_hedge_after(text).map(Self)
    }
}

/// `--faults`.
#[derive(Clone, Debug)]
struct Faults(Vec<DriveFault>);

impl Faults {
    fn load(text: &str) -> Result<Self, String> {
        let path = Path::new(text);
        let faults = match std::fs::metadata(path) {
            Ok(file) if file.len() > MAX_FILE_BYTES => {
                return Err(format!("{} bytes; a file of faults has at most {MAX_FILE_BYTES}", file.len()));
            }
            Ok(_) => std::fs::read_to_string(path).map_err(|e| e.to_string())?,
            Err(_) if !text.contains(':') => return Err("is neither a file nor faults such as \"blue: eio 1%\"".into()),
            Err(_) => text.to_string(),
        };
        match DriveFault::parse_all(&faults)? {
            all if all.is_empty() => Err("names no fault".into()),
            all => Ok(Self(all)),
        }
    }
}

fn says(happened: Happened) -> String {
    match happened {
        Happened::Degraded(trouble) => format!("left alone: it {}", trouble.says()),
        Happened::Restored => "used again".into(),
        Happened::Throttled { hundredths } => {
            format!("slowed: an expert takes {:.1} times as long", f64::from(hundredths) / 100.0)
        }
        Happened::Recovered => "as fast as before".into(),
    }
}

/// What went wrong, for people.
pub fn table(record: &TroubleRecord, width: usize) -> String {
    let mut out = String::new();
    if record.is_injected() {
        let one = |f: &crate::bench::trouble::InjectedRecord| format!("{}: {} ({} reads)", f.drive, f.fault, f.reads);
        let all: Vec<String> = record.injected.iter().map(one).collect();
        let _ = writeln!(out, "INJECTED FAULTS, not a normal result: {}", all.join("; "));
    }
    if record.reads_failed + record.experts_steered > 0 {
        let _ = writeln!(
            out,
            "{} reads failed, {} were moved to another drive, {} experts passed over a drive left alone; failures cost {} at most",
            record.reads_failed,
            record.reads_moved,
            record.experts_steered,
            units::duration(record.failing_wait_ns),
        );
    }
    if record.events.is_empty() {
        return out;
    }
    let mut table = Table::new([
        ("drive", Align::Left),
        ("pass", Align::Right),
        ("barrier", Align::Right),
        ("after", Align::Right),
        ("what happened", Align::Left),
    ]);
    for e in &record.events {
        let (step, barrier) = (e.step.to_string(), e.barrier.to_string());
        table.row([e.drive.clone(), step, barrier, units::duration(e.after_ns), says(e.happened)]);
    }
    let _ = writeln!(out, "{}", table.render(width));
    if record.events_lost > 0 {
        let _ = writeln!(out, "and {} events more", record.events_lost);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_come_from_a_file_or_from_the_flag_and_what_is_neither_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("faults.txt");
        std::fs::write(&path, "# a drive goes\nblue: vanish @3..\ncoral: eio 1%\n").unwrap();
        let of_file = Faults::load(path.to_str().unwrap()).unwrap().0;
        assert_eq!(of_file, Faults::load("blue: vanish @3.. ; coral: eio 1%").unwrap().0);
        assert!(Faults::load("no-such-file").unwrap_err().contains("neither"));
        assert!(Faults::load(" : ").unwrap_err().contains("empty"));
        assert!(Faults::load("blue: melt").unwrap_err().contains("`melt`"));
    }
}
