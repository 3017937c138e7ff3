//! What `argodrive monitor` shows: the live screen, the lines of the plain mode, and the sentence about the sampler itself.
//! Takes numbers, gives text of at most the width asked for; knows no terminal and no clock.

use super::table::Paint;
use super::units;
use crate::trace::windows::SamplerFigures;
use std::fmt::Write;

/// Cells of a sparkline.
pub const SPARK_CELLS: usize = 50;
const SPARKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const NAME_WIDTH: usize = 16;
/// Lines of the screen's head.
const HEAD_LINES: usize = 3;
/// Lines of a device that is shown in full.
const FULL_LINES: usize = 3;

/// One device on the screen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceView {
    /// Its name.
    pub name: String,
    /// Rate of the last second.
    pub now_bytes_per_s: f64,
    /// Largest rate over 100 ms since the start.
    pub peak_bytes_per_s: f64,
    /// Reads and writes under way; `None` = not known.
    pub in_flight: Option<u32>,
    /// Rates of the last ten seconds, oldest first; `None` = not watched yet.
    pub spark: Vec<Option<f64>>,
    /// Its counters can no longer be read.
    pub gone: bool,
}

/// The screen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MonitorView {
    /// Since the start.
    pub elapsed_ns: u64,
    /// Length of a window.
    pub interval_ns: u64,
    /// What is watched.
    pub devices: Vec<DeviceView>,
}

impl MonitorView {
    /// The screen in at most `rows` lines of `width` characters, none of them with an end.
    pub fn lines(&self, width: usize, rows: usize, paint: Paint) -> Vec<String> {
        let width = width.max(20);
        let top = self.devices.iter().flat_map(|d| [d.now_bytes_per_s, d.peak_bytes_per_s]).fold(0.0, f64::max);
        let head = format!(
            "argodrive monitor   windows of {}   {:.1} s   Ctrl-C ends",
            units::duration(self.interval_ns),
            self.elapsed_ns as f64 / 1e9
        );
        let scale = match top > 0.0 {
            true => format!("full bar {} (highest 100 ms so far)   sparkline: last 10 s", units::rate(top)),
            false => "nothing was read yet".to_owned(),
        };
        let mut out = vec![cut(&head, width), cut(&scale, width), String::new()];
        let room = rows.saturating_sub(HEAD_LINES).max(1);
        let full = self.devices.len() * FULL_LINES <= room;
        let shown = if full || self.devices.len() <= room { self.devices.len() } else { room - 1 };
        for device in &self.devices[..shown] {
            if full {
                out.extend(device.full(top, width, paint));
            } else {
                out.push(device.compact(top, width, paint));
            }
        }
        if shown < self.devices.len() {
            out.push(cut(&format!("and {} more", self.devices.len() - shown), width));
        }
        out
    }
}

impl DeviceView {
    fn under_way(&self) -> String {
        match (self.gone, self.in_flight) {
            (true, _) => "gone".to_owned(),
            (false, Some(count)) => format!("in flight {count}"),
            (false, None) => String::new(),
        }
    }

    fn full(&self, top: f64, width: usize, paint: Paint) -> Vec<String> {
        let (now, peak) = (units::rate(self.now_bytes_per_s), units::rate(self.peak_bytes_per_s));
        let name = cut(&self.name, NAME_WIDTH);
        let text = format!("{name:NAME_WIDTH$} {now:>11}   peak {peak:>11}   {}", self.under_way());
        let cells = (width - 2).min(SPARK_CELLS);
        let from = self.spark.len().saturating_sub(cells);
        let spark: String = self.spark[from..].iter().map(|rate| spark_of(*rate, top)).collect();
        vec![
            cut(text.trim_end(), width),
            format!("  {}", bar(self.now_bytes_per_s, top, cells, paint)),
            format!("  {}", tinted(&spark, paint)),
        ]
    }

    fn compact(&self, top: f64, width: usize, paint: Paint) -> String {
        let now = units::rate(self.now_bytes_per_s);
        let name = cut(&self.name, NAME_WIDTH);
        let text = cut(format!("{name:NAME_WIDTH$} {now:>11} {:13}", self.under_way()).trim_end(), width);
        let cells = width.saturating_sub(NAME_WIDTH + 27).min(36);
        if cells < 5 {
            return text;
        }
        let padding = " ".repeat((NAME_WIDTH + 27 - 1).saturating_sub(text.chars().count()));
        format!("{text}{padding} {}", bar(self.now_bytes_per_s, top, cells, paint))
    }
}

/// One second of one device in the plain mode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlainLine<'a> {
    /// End of that second.
    pub t_s: f64,
    /// The device.
    pub name: &'a str,
    /// Its rate.
    pub bytes_per_s: f64,
    /// Its largest rate over 100 ms.
    pub peak_bytes_per_s: f64,
    /// Its reads per second; `None` = not known.
    pub reads_per_s: Option<f64>,
    /// Reads and writes under way; `None` = not known.
    pub in_flight: Option<u32>,
}

/// The heading of the plain mode's lines.
pub fn plain_heading() -> String {
    format!(
        "{:>8}  {:16}  {:>12}  {:>12}  {:>9}  {:>9}",
        "time", "device", "read", "peak 100 ms", "reads/s", "in flight"
    )
}

impl PlainLine<'_> {
    /// The line.
    pub fn text(&self) -> String {
        let unknown = || "–".to_owned();
        format!(
            "{:>8}  {:16}  {:>12}  {:>12}  {:>9}  {:>9}",
            format!("{:.1} s", self.t_s),
            self.name,
            units::rate(self.bytes_per_s),
            units::rate(self.peak_bytes_per_s),
            self.reads_per_s.map_or_else(unknown, |r| format!("{r:.0}")),
            self.in_flight.map_or_else(unknown, |n| n.to_string()),
        )
    }
}

/// What sampling did and cost, as a sentence.
pub fn sampler_line(figures: &SamplerFigures) -> String {
    let mut text = format!(
        "sampler: {} ticks every {}, {} missed; late by {} at the median, {} at p99, {} at most",
        figures.ticks,
        units::duration(figures.interval_ns),
        figures.missed_ticks,
        units::duration(figures.deadline_error_p50_ns),
        units::duration(figures.deadline_error_p99_ns),
        units::duration(figures.deadline_error_max_ns),
    );
    if let Some(share) = figures.cpu_share() {
        let _ = write!(text, "; {:.3} % of one core", share * 100.0);
    }
    if figures.thinned > 0 {
        let _ = write!(text, "; its buffer was full {} times and lost every second tick", figures.thinned);
    }
    for lost in &figures.lost {
        let _ = write!(text, "; no longer readable: {lost}");
    }
    text
}

fn bar(value: f64, top: f64, cells: usize, paint: Paint) -> String {
    let share = if top > 0.0 { (value / top).clamp(0.0, 1.0) } else { 0.0 };
    let mut full = (share * cells as f64).round() as usize;
    // what is not nothing is seen
    if value > 0.0 {
        full = full.clamp(1, cells);
    }
    format!("{}{}", tinted(&"█".repeat(full), paint), "░".repeat(cells - full))
}

fn spark_of(rate: Option<f64>, top: f64) -> char {
    match rate {
        None => ' ',
        Some(rate) if rate <= 0.0 || top <= 0.0 => '·',
        Some(rate) => {
            let step = (rate / top * SPARKS.len() as f64).ceil() as usize;
            SPARKS[step.clamp(1, SPARKS.len()) - 1]
        }
    }
}

fn tinted(text: &str, paint: Paint) -> String {
    match paint {
        Paint::Ansi if !text.trim().is_empty() => format!("\u{1b}[36m{text}\u{1b}[0m"),
        _ => text.to_owned(),
    }
}

/// At most `width` characters, without anything that moves a cursor.
fn cut(text: &str, width: usize) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    if text.chars().count() <= width {
        return clean.collect();
    }
    clean.take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(devices: usize) -> MonitorView {
        let device = |index: usize| DeviceView {
            name: format!("nvme{index}n1"),
            now_bytes_per_s: 1e9 * index as f64,
            peak_bytes_per_s: 4e9,
            in_flight: (index != 1).then_some(32),
            spark: (0..SPARK_CELLS).map(|c| (c >= 10).then_some(c as f64 * 8e7)).collect(),
            gone: index == 2,
        };
        let devices = (0..devices).map(device).collect();
        MonitorView { elapsed_ns: 12_340_000_000, interval_ns: 10_000_000, devices }
    }

    #[test]
    fn a_device_has_its_rate_bar_and_past() {
        let lines = view(3).lines(80, 24, Paint::Plain);
        assert_eq!(lines.len(), 3 + 9);
        assert_eq!(lines[0], "argodrive monitor   windows of 10.0 ms   12.3 s   Ctrl-C ends");
        assert!(lines[1].starts_with("full bar 4.00 GB/s"), "{}", lines[1]);
        assert_eq!(lines[3], "nvme0n1             0.00 B/s   peak   4.00 GB/s   in flight 32");
        assert_eq!(lines[4].trim(), "░".repeat(50));
        assert_eq!(lines[7].trim(), format!("{}{}", "█".repeat(13), "░".repeat(37)), "a quarter of the highest");
        assert!(lines[5].ends_with('█') && lines[5].starts_with(&" ".repeat(12)), "{}", lines[5]);
        assert!(lines[6].ends_with("peak   4.00 GB/s"), "{}", lines[6]);
        assert!(lines[9].ends_with("gone"), "{}", lines[9]);
    }

    #[test]
    fn nothing_is_wider_or_longer_than_the_terminal() {
        for (devices, width, rows) in [(0, 80, 24), (1, 80, 24), (7, 80, 24), (40, 80, 24), (3, 30, 9), (5, 20, 2)] {
            let lines = view(devices).lines(width, rows, Paint::Plain);
            assert!(lines.iter().all(|l| l.chars().count() <= width), "{devices} {width}: {lines:#?}");
            assert!(lines.len() <= rows.max(HEAD_LINES + 1), "{devices} {rows}: {}", lines.len());
        }
        let lines = view(40).lines(80, 24, Paint::Plain);
        assert_eq!(lines.last().unwrap(), "and 20 more");
    }

    #[test]
    fn colours_are_for_terminals_that_want_them_and_names_move_no_cursor() {
        let mut evil = view(1);
        evil.devices[0].name = "\u{1b}[2Jx".into();
        evil.devices[0].now_bytes_per_s = f64::NAN;
        assert!(!evil.lines(80, 24, Paint::Plain).join("\n").contains('\u{1b}'));
        assert!(view(2).lines(80, 24, Paint::Ansi).join("\n").contains("\u{1b}[36m"));
    }

    #[test]
    fn plain_lines_fit_eighty_columns_under_their_heading() {
        let line = PlainLine {
            t_s: 3599.9,
            name: "nvme0n1",
            bytes_per_s: 1.234e9,
            peak_bytes_per_s: 2e9,
            reads_per_s: Some(1234.4),
            in_flight: Some(9),
        };
        let text = line.text();
        assert_eq!(text, "3599.9 s  nvme0n1              1.23 GB/s     2.00 GB/s       1234          9");
        assert!(text.chars().count() <= 80);
        assert_eq!(text.chars().count(), plain_heading().chars().count());
        assert!(PlainLine { in_flight: None, reads_per_s: None, ..line }.text().ends_with("–          –"));
    }

    #[test]
    fn the_sampler_says_what_it_missed_and_cost() {
        let figures = SamplerFigures {
            interval_ns: 10_000_000,
            wall_ns: 1_000_000_000,
            ticks: 97,
            missed_ticks: 3,
            cpu_ns: Some(1_500_000),
            deadline_error_p50_ns: 60_000,
            deadline_error_p99_ns: 900_000,
            deadline_error_max_ns: 2_000_000,
            ..SamplerFigures::default()
        };
        let text = sampler_line(&figures);
        assert!(text.starts_with("sampler: 97 ticks every 10.0 ms, 3 missed; late by 60.0 µs"), "{text}");
        assert!(text.ends_with("0.150 % of one core"), "{text}");
        let lost = SamplerFigures { lost: vec!["sdb: No such device".into()], thinned: 1, cpu_ns: None, ..figures };
        assert!(sampler_line(&lost).ends_with("no longer readable: sdb: No such device"));
    }
}
