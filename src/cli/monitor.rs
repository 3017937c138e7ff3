//! `argodrive monitor`: block devices or a process, sampled every 10 ms. A live view on a terminal, otherwise one line a
//! second and device; `--json` prints one object a second and a last one with the summary.

use super::run_args::interrupt_flag;
use super::verdict::wrapped;
use super::{WIDTH, print, remark};
use crate::clock::Clock;
use crate::drive::blockmap::{BlockMap, Mapped};
use crate::drive::device::BlockDevice;
use crate::drive::units::parse_duration_ns;
use crate::report::monitor_view::{DeviceView, MonitorView, PlainLine, SPARK_CELLS, plain_heading, sampler_line};
use crate::report::table::{Align, Paint, Table};
use crate::report::units;
use crate::sys::blockstat::CounterFile;
use crate::sys::{terminal, timer};
use crate::trace::meter::{Meter, Sums};
use crate::trace::monitor::{MAX_INTERVAL_NS, MIN_INTERVAL_NS, Sampler, Source};
use crate::trace::windows::{Cutter, DeviceWindow, Reading, SamplerFigures, WindowWriter};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// How often the screen is drawn and the buffer emptied.
const STEP_NS: u64 = 200_000_000;
/// How often the plain mode and JSON report.
const SECOND_NS: u64 = 1_000_000_000;

/// Watch devices or a process: rate, peak over 100 ms, reads under way
///
/// On a terminal a live view; elsewhere one line a second and device. A path stands for the device that holds it, a
/// partition for its disk, a volume for what it is made of. Ctrl-C ends with a summary, which also says what sampling
/// cost and how late the sampler woke.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Devices (vda, /dev/vda) or paths on them [default: every disk of the machine]
    #[arg(value_name = "DRIVE OR PATH")]
    targets: Vec<String>,
    /// Time between two readings, 1ms to 60s
    #[arg(long, value_name = "TIME", default_value = "10ms", value_parser = parse_interval)]
    interval: u64,
    /// End after so long, e.g. 5s [default: at Ctrl-C]
    #[arg(long, value_name = "TIME", value_parser = parse_length)]
    duration: Option<u64>,
    /// Watch what a process reads from storage (/proc/<pid>/io)
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Write every window to this CSV file, in the form of windows.csv
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object a second, and a last one with the summary, each on a line
    #[arg(long)]
    json: bool,
}

fn parse_interval(text: &str) -> Result<u64, String> {
    let ns = parse_duration_ns(text)?;
    if (MIN_INTERVAL_NS..=MAX_INTERVAL_NS).contains(&ns) {
        return Ok(ns);
    }
    Err(format!("`{text}` is not within 1ms to 60s"))
}

fn parse_length(text: &str) -> Result<u64, String> {
    match parse_duration_ns(text)? {
        0 => Err("give a time above 0, or leave --duration out to watch until Ctrl-C".into()),
        ns => Ok(ns),
    }
}

/// How it reports.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Live(Paint),
    Plain,
    Json,
}

/// One thing that is watched.
struct Feed {
    name: String,
    knows_reads: bool,
    unit_bytes: u64,
    cutter: Option<Cutter>,
    meter: Meter,
}

/// Everything between the sampler and the outside.
struct Watching {
    interval_ns: u64,
    feeds: Vec<Feed>,
    csv: Option<WindowWriter>,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let sources = sources(&args)?;
    let csv = args.csv.as_deref().map(|path| WindowWriter::create(path).context("--csv")).transpose()?;
    let feed = |s: &Source| Feed {
        name: s.name.clone(),
        knows_reads: s.knows_reads(),
        unit_bytes: s.unit_bytes(),
        cutter: None,
        meter: Meter::default(),
    };
    let feeds = sources.iter().map(feed).collect();
    let mut watching = Watching { interval_ns: args.interval, feeds, csv };
    let interrupted = interrupt_flag()?;
    let clock = Clock::start();
    let sampler = Sampler::start(clock, args.interval, sources)?;
    let stdout = std::io::stdout();
    let dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
    let mode = match (args.json, stdout.is_terminal() && !dumb) {
        (true, _) => Mode::Json,
        (false, true) => Mode::Live(Paint::detect(&stdout)),
        (false, false) => Mode::Plain,
    };
    let end_ns = args.duration.unwrap_or(u64::MAX);
    let (mut step_ns, mut second_ns, mut drawn) = (0u64, SECOND_NS, 0);
    let mut readings = Vec::new();
    let mut shown = if mode == Mode::Plain { print(&plain_heading()) } else { Ok(()) };
    while shown.is_ok() {
        step_ns += STEP_NS;
        timer::sleep_until(clock.instant_at(step_ns.min(end_ns)));
        let now_ns = clock.now_ns();
        let lost = (0..watching.feeds.len()).all(|i| sampler.has_lost(i));
        if now_ns >= end_ns || lost || interrupted.load(Ordering::SeqCst) {
            break;
        }
        // a machine that slept draws once, not once for each step that it slept through
        step_ns = step_ns.max(now_ns / STEP_NS * STEP_NS);
        sampler.drain(&mut readings);
        watching.take(&mut readings)?;
        let gone: Vec<bool> = (0..watching.feeds.len()).map(|i| sampler.has_lost(i)).collect();
        match mode {
            Mode::Live(paint) => shown = watching.draw(now_ns, &gone, paint, &mut drawn),
            Mode::Plain | Mode::Json if now_ns >= second_ns => {
                second_ns = (now_ns / SECOND_NS + 1) * SECOND_NS;
                shown = watching.report(mode, now_ns);
            }
            _ => {}
        }
    }
    let mut sampled = sampler.finish();
    watching.take(&mut sampled.readings)?;
    let csv = watching.csv.is_some();
    watching.finish()?;
    // whoever looked may have gone away; the file is whole all the same
    shown?;
    let now_ns = clock.now_ns();
    if mode != Mode::Json || watching.feeds.iter().any(|f| f.meter.since().windows > 0) {
        watching.conclude(mode, now_ns, &sampled.figures, drawn)?;
    }
    if mode == Mode::Json {
        print(&watching.summary_json(&sampled.figures).to_string())?;
    }
    for lost in &sampled.figures.lost {
        remark(&format!("no longer readable: {lost}"));
    }
    if let Some(path) = args.csv.filter(|_| csv) {
        remark(&format!("windows: {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

impl Watching {
    /// Cuts readings (tick by tick, in each tick one per feed) into windows.
    fn take(&mut self, readings: &mut Vec<Reading>) -> Result<()> {
        let width = self.feeds.len().max(1);
        for (at, reading) in readings.drain(..).enumerate() {
            let Some(feed) = self.feeds.get_mut(at % width) else { continue };
            let Feed { name, knows_reads, unit_bytes, cutter, meter } = feed;
            match cutter {
                None => {
                    if let Some(csv) = &mut self.csv {
                        csv.begin_device(name, reading.t_ns, *knows_reads)?;
                    }
                    *cutter = Some(Cutter::new(self.interval_ns, *unit_bytes, reading));
                }
                Some(cutter) => {
                    let mut written = Ok(());
                    cutter.push(reading, &mut |window: DeviceWindow| {
                        meter.push(window);
                        if let (Ok(()), Some(csv)) = (&written, &mut self.csv) {
                            written = csv.device(name, &window, *knows_reads);
                        }
                    });
                    written?;
                }
            }
        }
        Ok(())
    }

    /// Closes the last windows and the file.
    fn finish(&mut self) -> Result<()> {
        for Feed { name, knows_reads, cutter, meter, .. } in &mut self.feeds {
            let Some(window) = cutter.take().and_then(Cutter::finish) else { continue };
            meter.push(window);
            if let Some(csv) = &mut self.csv {
                csv.device(name, &window, *knows_reads)?;
            }
        }
        Ok(self.csv.take().map_or(Ok(()), WindowWriter::finish)?)
    }

    /// Draws the screen over the one before, which had `drawn` lines.
    fn draw(&self, now_ns: u64, gone: &[bool], paint: Paint, drawn: &mut usize) -> Result<()> {
        let device = |(feed, gone): (&Feed, &bool)| DeviceView {
            name: feed.name.clone(),
            now_bytes_per_s: feed.meter.now_bytes_per_s(),
            peak_bytes_per_s: feed.meter.total().peak_bytes_per_s,
            in_flight: feed.knows_reads.then(|| feed.meter.in_flight()),
            spark: feed.meter.spark(SPARK_CELLS),
            gone: *gone,
        };
        let devices = self.feeds.iter().zip(gone).map(device).collect();
        let view = MonitorView { elapsed_ns: now_ns, interval_ns: self.interval_ns, devices };
        let stdout = std::io::stdout();
        let (columns, rows) = terminal::size(&stdout).unwrap_or((WIDTH, 24));
        // one row stays free, or the terminal would scroll
        let lines = view.lines(columns.min(WIDTH), rows.saturating_sub(1), paint);
        let mut text = if *drawn > 0 { format!("\r\u{1b}[{drawn}A") } else { String::new() };
        for line in &lines {
            text.push_str(line);
            text.push_str("\u{1b}[K\n");
        }
        text.push_str("\u{1b}[J");
        *drawn = lines.len();
        let mut out = stdout.lock();
        Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?)
    }

    /// The lines or the object of the time since the last report.
    fn report(&mut self, mode: Mode, now_ns: u64) -> Result<()> {
        let t_s = now_ns as f64 / 1e9;
        let mut objects = Vec::new();
        for Feed { name, knows_reads, meter, .. } in &mut self.feeds {
            let sums = meter.take_since();
            if sums.windows == 0 {
                continue;
            }
            if mode == Mode::Json {
                objects.push(device_json(name, &sums, *knows_reads, Some(meter.in_flight())));
                continue;
            }
            let reads_per_s = sums.reads as f64 * 1e9 / sums.span_ns.max(1) as f64;
            let line = PlainLine {
                t_s,
                name,
                bytes_per_s: sums.bytes_per_s(),
                peak_bytes_per_s: sums.peak_bytes_per_s,
                reads_per_s: knows_reads.then_some(reads_per_s),
                in_flight: knows_reads.then(|| meter.in_flight()),
            };
            print(&line.text())?;
        }
        if !objects.is_empty() {
            print(&json!({"t_s": t_s, "devices": objects}).to_string())?;
        }
        Ok(())
    }

    /// The last lines, and for people the summary.
    fn conclude(&mut self, mode: Mode, now_ns: u64, figures: &SamplerFigures, drawn: usize) -> Result<()> {
        if !matches!(mode, Mode::Live(_)) {
            self.report(mode, now_ns)?;
        }
        if mode == Mode::Json {
            return Ok(());
        }
        let right = |title| (title, Align::Right);
        let mut table = Table::new([
            ("device", Align::Left),
            right("windows"),
            right("bytes"),
            right("mean"),
            right("peak"),
            right("idle"),
            right("read time"),
        ]);
        for Feed { name, meter, .. } in &self.feeds {
            let sums = meter.total();
            table.row([
                name.clone(),
                sums.windows.to_string(),
                units::bytes(sums.bytes),
                units::rate(sums.bytes_per_s()),
                units::rate(sums.peak_bytes_per_s),
                sums.idle_windows.to_string(),
                sums.mean_read_ns().map_or_else(|| "–".to_owned(), units::duration),
            ]);
        }
        let gap = if drawn > 0 { "" } else { "\n" };
        print(&format!("{gap}{}\n{}", table.render(WIDTH), wrapped(&sampler_line(figures))))
    }

    fn summary_json(&self, figures: &SamplerFigures) -> Value {
        let devices: Vec<Value> =
            self.feeds.iter().map(|f| device_json(&f.name, f.meter.total(), f.knows_reads, None)).collect();
        json!({"summary": {"devices": devices, "sampler": figures, "cpu_share": figures.cpu_share()}})
    }
}

fn device_json(name: &str, sums: &Sums, knows_reads: bool, in_flight: Option<u32>) -> Value {
    let mut value = json!({
        "name": name, "span_s": sums.span_ns as f64 / 1e9, "windows": sums.windows, "idle_windows": sums.idle_windows,
        "bytes": sums.bytes, "bytes_per_s": sums.bytes_per_s(), "peak_bytes_per_s": sums.peak_bytes_per_s,
    });
    if knows_reads {
        value["reads"] = sums.reads.into();
        value["io_ms"] = (sums.io_ns as f64 / 1e6).into();
        if let Some(count) = in_flight {
            value["in_flight"] = count.into();
        }
    }
    value
}

/// What is to be watched, each thing once, in the order in which it was named.
fn sources(args: &Args) -> Result<Vec<Source>> {
    let map = BlockMap::system();
    let mut devices: Vec<BlockDevice> = Vec::new();
    for target in &args.targets {
        let mapped = map.of(target)?;
        if let Some(text) = explained(target, &mapped) {
            remark(&text);
        }
        devices.extend(mapped.devices);
    }
    if args.targets.is_empty() && args.pid.is_none() {
        devices = map.physical();
        if devices.is_empty() {
            let known = map.names().join(", ");
            let known = if known.is_empty() { "none".to_owned() } else { known };
            bail!("this machine shows no disk of its own; name a device or a path. Block devices here: {known}");
        }
    }
    let mut out: Vec<Source> = Vec::new();
    for device in devices {
        if out.iter().all(|s| s.name != device.name) {
            let file = CounterFile::device(&device.sysfs);
            let file = file.with_context(|| format!("{}: its counters cannot be opened", device.name))?;
            out.push(Source { name: device.name, file });
        }
    }
    out.extend(args.pid.map(process).transpose()?);
    Ok(out)
}

/// A process as something to watch, if it may be watched.
fn process(pid: u32) -> Result<Source> {
    let opened = CounterFile::process(Path::new("/proc"), pid).and_then(|file| file.read().map(|_| file));
    match opened {
        Ok(file) => Ok(Source { name: format!("pid {pid}"), file }),
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            bail!("--pid {pid}: not permitted; /proc/{pid}/io is for the process's own user and for root")
        }
        Err(e) if e.kind() == ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => {
            bail!("--pid {pid}: there is no such process")
        }
        Err(e) => Err(anyhow!("--pid {pid}: /proc/{pid}/io: {e}")),
    }
}

/// Says which devices are watched when that is not what was typed.
fn explained(target: &str, mapped: &Mapped) -> Option<String> {
    let names: Vec<&str> = mapped.devices.iter().map(|d| d.name.as_str()).collect();
    let same = names == [target] || names.first().is_some_and(|n| names.len() == 1 && target == format!("/dev/{n}"));
    let backing: Vec<&str> = mapped.backing.iter().map(|d| d.name.as_str()).collect();
    let under = match backing.is_empty() {
        true => String::new(),
        false => format!("; its file lies on {}, which moves the same bytes again", backing.join(", ")),
    };
    (!same || !backing.is_empty()).then(|| format!("{target}: watching {}{under}", names.join(", ")))
}
