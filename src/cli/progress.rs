//! What people see of work that takes more than a moment: bars, lines with rate and time left. Everything goes to standard
//! error and only if that is a terminal; nothing here changes what a command does or prints.

use crate::layout::worked;
use crate::store::import::Progress;
use crate::trace::passed;
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Columns of a status line; a longer one would wrap, and only its last part be replaced.
const LINE: usize = 79;
/// Shortest time between two drawings of the same line.
const REDRAW: Duration = Duration::from_millis(100);
/// Work that is over by then shows nothing.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether there is a status line to clear.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// Replaces the status line on standard error, if that is a terminal; empty text clears it.
pub fn status(text: &str) {
    let mut err = std::io::stderr().lock();
    // what is in the last line now may be text of the command's own, on the same terminal
    if !SHOWN.swap(!text.is_empty(), Ordering::Relaxed) && text.is_empty() {
        return;
    }
    if err.is_terminal() {
        let _ = write!(err, "\r\x1b[2K{}", cut(text, LINE)).and_then(|()| err.flush());
    }
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{kept}…")
}

/// A bar on standard error for byte counts, with rate and time left; silent when standard error is no terminal.
pub struct ByteBar(Option<ProgressBar>);

impl ByteBar {
    /// A bar labelled `what`.
    pub fn new(what: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let template = "{prefix} [{bar:30}] {decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        Self(Some(bar))
    }

    /// Shows how far the work is.
    pub fn show(&self, at: Progress) {
        if let Some(bar) = &self.0 {
            if bar.length() != Some(at.total_bytes) {
                bar.set_length(at.total_bytes);
                // what was done before this run must not count as this run's rate
                bar.set_position(at.done_bytes);
                bar.reset_eta();
            }
            bar.set_position(at.done_bytes);
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// A status line for work in steps of about the same length: which step, the rate and the time left, as far as known.
#[derive(Debug, Default)]
pub struct Steps {
    first: Option<(usize, Instant)>,
    shown: Option<Instant>,
}

impl Steps {
    /// Shows that `done` of `total` steps are done and that `text` is under way.
    pub fn show(&mut self, done: usize, total: usize, text: &str) {
        self.show_at(Instant::now(), done, total, text, status);
    }

    fn show_at(&mut self, now: Instant, done: usize, total: usize, text: &str, draw: impl FnOnce(&str)) {
        let (first, began) = *self.first.get_or_insert((done, now));
        // steps may follow each other faster than a terminal is worth
        if self.shown.is_some_and(|at| now.duration_since(at) < REDRAW) {
            return;
        }
        self.shown = Some(now);
        let took = now.duration_since(began).as_secs_f64();
        let known = done.saturating_sub(first);
        let tail = if known == 0 || took <= 0.0 {
            String::new()
        } else {
            let rate = known as f64 / took;
            format!("  {}, {} left", pace(rate), time(total.saturating_sub(done) as f64 / rate))
        };
        let room = LINE.saturating_sub(tail.chars().count());
        draw(&format!("{}{tail}", cut(text, room)));
    }

    /// Clears the line.
    pub fn finish(&mut self) {
        status("");
        *self = Self::default();
    }
}

/// A status line that counts generated tokens.
pub struct Tokens {
    shown: bool,
    steps: Steps,
    done: usize,
    most: usize,
}

impl Tokens {
    /// Says that so many tokens of prompt are being read, if `shown`; at most `most` will follow.
    pub fn start(shown: bool, prompt: usize, most: usize) -> Self {
        if shown {
            status(&format!("reading {prompt} tokens of prompt"));
        }
        Self { shown, steps: Steps::default(), done: 0, most }
    }

    /// One more token.
    pub fn next(&mut self) {
        if self.shown {
            self.done += 1;
            self.steps.show(self.done, self.most, &format!("token {} of {} at most", self.done, self.most));
        }
    }

    /// Clears the line.
    pub fn finish(&mut self) {
        if self.shown {
            self.steps.finish();
        }
    }
}

/// `3.1/s`, or for slow steps `12 s each`.
fn pace(per_s: f64) -> String {
    if per_s >= 1.0 { format!("{per_s:.1}/s") } else { format!("{} each", time(1.0 / per_s)) }
}

/// `0 s`, `48 s`, `3 min 20 s`, `2 h 5 min`.
fn time(seconds: f64) -> String {
    let s = seconds.round().clamp(0.0, 1e9) as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

/// Shows from a thread of its own how far some work is, until it is dropped. For work that measures nothing: a thread beside a
/// measurement would be part of it.
pub struct Reading(Option<(Sender<()>, JoinHandle<()>)>);

impl Reading {
    /// Begins to show how much of the traces that are opened from now on has been read.
    pub fn start(what: &'static str) -> Self {
        let before = passed::so_far();
        Self::show(move |took| {
            let (read, opened) = passed::so_far();
            how_far(what, read - before.0, opened.saturating_sub(before.1), took)
        })
    }

    /// Begins to show how much of the planning that is known to come has been done.
    pub fn planning(what: &'static str) -> Self {
        let before = worked::so_far();
        Self::show(move |took| {
            let (done, expected) = worked::so_far();
            steps_far(what, done - before.0, expected.saturating_sub(before.1), took)
        })
    }

    fn show(line: impl Fn(Duration) -> String + Send + 'static) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let (stop, stopped) = mpsc::channel();
        let began = Instant::now();
        let show = move || {
            let mut wait = PATIENCE;
            while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                wait = 2 * REDRAW;
                status(&line(began.elapsed()));
            }
            status("");
        };
        Self(std::thread::Builder::new().name("progress".into()).spawn(show).ok().map(|thread| (stop, thread)))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// `reading the trace: 20 MiB of 80 MiB  10 MiB/s, 6 s left`; without a rest only how long it has taken.
fn how_far(what: &str, read: u64, opened: u64, took: Duration) -> String {
    let s = took.as_secs_f64();
    if read == 0 || read >= opened {
        return format!("{what}: {} read, {}", HumanBytes(read), time(s));
    }
    let rate = read as f64 / s.max(1e-3);
    let left = time((opened - read) as f64 / rate);
    format!("{what}: {} of {}  {}/s, {left} left", HumanBytes(read), HumanBytes(opened), HumanBytes(rate as u64))
}

/// `planning: 40 of 120 steps  10/s, 8 s left`; without a rest only how long it has taken.
fn steps_far(what: &str, done: u64, expected: u64, took: Duration) -> String {
    let s = took.as_secs_f64();
    if done == 0 || done >= expected {
        return format!("{what}: {}", time(s));
    }
    let rate = done as f64 / s.max(1e-3);
    let left = time((expected - done) as f64 / rate);
    format!("{what}: {done} of {expected} steps  {}, {left} left", pace(rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_say_rate_and_rest_and_fit_a_line() {
        let (mut steps, start) = (Steps::default(), Instant::now());
        let mut lines = Vec::new();
        let long = "x".repeat(200);
        for (second, done, text) in [(0, 4, "run 5"), (20, 5, "run 6"), (40, 6, long.as_str())] {
            let now = start + Duration::from_secs(second);
            steps.show_at(now, done, 10, text, |line| lines.push(line.to_owned()));
        }
        assert_eq!(lines[0], "run 5", "nothing is known yet");
        assert_eq!(lines[1], "run 6  20 s each, 1 min 40 s left", "steps done before the first do not count");
        assert!(lines[2].ends_with("…  20 s each, 1 min 20 s left") && lines[2].chars().count() == LINE);
        steps.show_at(start + Duration::from_millis(40_050), 7, 10, "too soon", |line| lines.push(line.to_owned()));
        assert_eq!(lines.len(), 3);
    }

    #[test]
    fn times_and_rates_are_short() {
        let times = [0.2, 59.4, 200.0, 7500.0].map(time);
        assert_eq!(times, ["0 s", "59 s", "3 min 20 s", "2 h 5 min"]);
        assert_eq!([pace(3.12), pace(0.1)], ["3.1/s", "10 s each"]);
        let line = how_far("reading", 1 << 20, 4 << 20, Duration::from_secs(1));
        assert_eq!(line, "reading: 1.00 MiB of 4.00 MiB  1.00 MiB/s, 3 s left");
        assert_eq!(how_far("reading", 5, 5, Duration::from_secs(2)), "reading: 5 B read, 2 s");
        let line = |done, expected| steps_far("planning", done, expected, Duration::from_secs(4));
        assert_eq!(line(40, 120), "planning: 40 of 120 steps  10.0/s, 8 s left");
        assert_eq!([line(0, 120), line(120, 120)], ["planning: 4 s", "planning: 4 s"]);
    }
}
