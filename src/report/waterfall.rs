//! The reads of a few barriers, one bar each: who arrived when, and on whom the barrier waited.
//!
//! One step's barriers in their order, every read in the colour of its drive. The read that ended last is marked; the
//! mark is computed from the ends, not taken on trust. Times are nanoseconds of one clock.

use super::plot::Figure;
use super::scene::{Anchor, Scene, Type};
use super::theme::{self, MARGIN_PX, WIDTH_PX};
use super::timeline::time_axis;
use super::{ReportError, font, units};
use crate::trace::events::{BarrierRecord, ReadEvent, ReadResult};

/// Reads that one picture can hold.
pub const MAX_READS: usize = 400;
/// Barriers that one picture can hold.
pub const MAX_BARRIERS: usize = 64;

/// One read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaterfallRead {
    /// Index into the figure's drives.
    pub drive: usize,
    /// When the reader decided to read; the wait until `submitted_ns` is drawn pale.
    pub queued_ns: u64,
    /// When it went to the drive.
    pub submitted_ns: u64,
    /// When its last byte was there.
    pub completed_ns: u64,
}

/// One barrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaterfallBarrier {
    /// Short name, such as `L12`.
    pub label: String,
    /// When it opened.
    pub open_ns: u64,
    /// When compute let go of it.
    pub close_ns: u64,
    /// Its reads; may be empty when everything was resident.
    pub reads: Vec<WaterfallRead>,
}

/// The waterfall figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaterfallFigure {
    /// What is shown.
    pub title: String,
    /// Which step of which run.
    pub subtitle: String,
    /// Whether any drive was emulated.
    pub emulated: bool,
    /// Names, in the order of the drive indices.
    pub drives: Vec<String>,
    /// In the order of time.
    pub barriers: Vec<WaterfallBarrier>,
    /// Written under the picture.
    pub note: String,
}

impl WaterfallFigure {
    /// Joins barrier records with the reads that they needed. Reads that did not deliver are left out, and so are reads
    /// of other barriers. Title and the other texts are left to the caller.
    pub fn from_events(drives: &[String], records: &[BarrierRecord], events: &[ReadEvent]) -> Self {
        let barrier = |record: &BarrierRecord| WaterfallBarrier {
            label: record.layer.to_string(),
            open_ns: record.open_ns,
            close_ns: record.close_ns,
            reads: events
                .iter()
                .filter(|e| e.barrier == Some(record.barrier) && e.result == ReadResult::Ok)
                .map(|e| WaterfallRead {
                    drive: e.drive.index(),
                    queued_ns: e.queued_ns,
                    submitted_ns: e.submitted_ns,
                    completed_ns: e.completed_ns,
                })
                .collect(),
        };
        Self {
            title: String::new(),
            subtitle: String::new(),
            emulated: false,
            drives: drives.to_vec(),
            barriers: records.iter().map(barrier).collect(),
            note: String::new(),
        }
    }

    /// First and last nanosecond of the picture.
    fn check(&self) -> Result<(u64, u64), ReportError> {
        let bad = |why: String| Err(ReportError::data(&self.title, why));
        let reads: usize = self.barriers.iter().map(|b| b.reads.len()).sum();
        if self.barriers.is_empty() || reads == 0 {
            return bad("there is no read to show; choose a step that read from drives".into());
        }
        if self.barriers.len() > MAX_BARRIERS || reads > MAX_READS {
            return bad(format!(
                "{} barriers with {reads} reads do not fit; show at most {MAX_BARRIERS} with {MAX_READS}",
                self.barriers.len()
            ));
        }
        let (mut first, mut last) = (u64::MAX, 0);
        for barrier in &self.barriers {
            if barrier.close_ns < barrier.open_ns {
                return bad(format!("barrier {} closes before it opens", barrier.label));
            }
            (first, last) = (first.min(barrier.open_ns), last.max(barrier.close_ns));
            for (index, read) in barrier.reads.iter().enumerate() {
                if read.drive >= self.drives.len() {
                    let have = self.drives.len();
                    return bad(format!(
                        "barrier {}, read {index}: drive {} of {have} drives",
                        barrier.label, read.drive
                    ));
                }
                if read.submitted_ns < read.queued_ns || read.completed_ns < read.submitted_ns {
                    return bad(format!("barrier {}, read {index}: ends before it begins", barrier.label));
                }
                (first, last) = (first.min(read.queued_ns), last.max(read.completed_ns));
            }
        }
        Ok((first, last))
    }
}

/// Band height, and height of one read inside it.
struct Rows {
    read_px: f64,
    band_min_px: f64,
}

impl Figure for WaterfallFigure {
    fn scene(&self) -> Result<Scene, ReportError> {
        let (first, last) = self.check()?;
        let (mut scene, y) = theme::begin(&self.title, &self.subtitle, self.emulated)?;
        let y = theme::drive_legend(&mut scene, &self.drives, y + 2.0)?;
        let caption = "one bar per read: pale = waiting in the queue · vertical lines: barrier opens and closes · ◀ the read it waited for";
        scene.text((MARGIN_PX, y + 12.0), Anchor::Start, caption, theme::muted(11.0))?;

        let reads: usize = self.barriers.iter().map(|b| b.reads.len()).sum();
        let rows = Rows { read_px: (560.0 / reads as f64).clamp(3.0, 13.0).floor(), band_min_px: 18.0 };
        let (left, right) = (MARGIN_PX + 118.0, WIDTH_PX - MARGIN_PX - 10.0);
        // A picture of one instant still needs a width.
        let span_ns = (last - first).max(1) as f64;
        let x_of = |ns: u64| left + (ns - first) as f64 / span_ns * (right - left);

        let top = y + 24.0;
        let mut band_top = top;
        for (index, barrier) in self.barriers.iter().enumerate() {
            let band_px = (barrier.reads.len() as f64 * rows.read_px + 6.0).max(rows.band_min_px);
            if index % 2 == 0 {
                scene.rect((MARGIN_PX, band_top), (right - MARGIN_PX, band_px), theme::TRACK.faded(0.45));
            }
            band(&mut scene, barrier, &self.drives, &rows, (band_top, band_px), (left, right), &x_of)?;
            band_top += band_px;
        }
        let y = time_axis(&mut scene, (left, right), &[(top, band_top)], span_ns / 1e9)?;
        theme::finish(scene, y, &self.note)
    }
}

fn band(
    scene: &mut Scene,
    barrier: &WaterfallBarrier,
    drives: &[String],
    rows: &Rows,
    (top, height): (f64, f64),
    (left, right): (f64, f64),
    x_of: &dyn Fn(u64) -> f64,
) -> Result<(), ReportError> {
    let middle = top + height / 2.0 + 4.0;
    scene.text_within((MARGIN_PX + 6.0, middle), Anchor::Start, &barrier.label, theme::strong(11.5), 46.0)?;
    let open_for = units::duration(barrier.close_ns - barrier.open_ns);
    scene.text((left - 8.0, middle), Anchor::End, &open_for, theme::muted(11.0))?;

    let (open, close) = (x_of(barrier.open_ns), x_of(barrier.close_ns));
    scene.rect((open, top), (close - open, height), theme::AXIS.faded(0.14));
    let mut order: Vec<&WaterfallRead> = barrier.reads.iter().collect();
    order.sort_by_key(|r| (r.completed_ns, r.submitted_ns, r.drive));
    let end_ns = order.last().map(|r| r.completed_ns);
    let mut y = top + 3.0;
    for (index, read) in order.iter().enumerate() {
        let color = theme::drive_color(read.drive);
        let (queued, from, to) = (x_of(read.queued_ns), x_of(read.submitted_ns), x_of(read.completed_ns));
        let bar_px = rows.read_px - 1.0;
        scene.rect((queued, y), (from - queued, bar_px), color.faded(0.35));
        scene.rect((from, y), ((to - from).max(1.0), bar_px), color);
        if Some(read.completed_ns) == end_ns && index + 1 == order.len() {
            let tied = order.iter().filter(|r| Some(r.completed_ns) == end_ns).count();
            let name = drives.get(read.drive).map_or("?", String::as_str);
            let name = font::elide_middle(name, 110.0, 11.0, true)?;
            let text = if tied > 1 { format!("◀ {tied} reads tie") } else { format!("◀ {name}") };
            let style = Type { em_px: 11.0, bold: true, ink: theme::INK };
            let width = font::text_width(&text, style.em_px, true)?;
            // Beside the end where there is room, else before the beginning, else on the bar.
            let baseline = (y + bar_px / 2.0 + 4.0).min(top + height - 3.0).max(top + 11.0);
            if to.max(close) + 6.0 + width <= right {
                scene.text((to.max(close) + 6.0, baseline), Anchor::Start, &text, style)?;
            } else if queued.min(open) - 6.0 - width >= left {
                let text = text.replace("◀ ", "") + " ▶";
                scene.text((queued.min(open) - 6.0, baseline), Anchor::End, &text, style)?;
            } else {
                let x = to.min(right) - 4.0;
                scene.rect((x - width - 3.0, baseline - 10.0), (width + 6.0, 13.0), theme::CARD.faded(0.85));
                scene.text((x, baseline), Anchor::End, &text, style)?;
            }
        }
        y += rows.read_px;
    }
    scene.vline(open, (top, top + height), 1.0, theme::INK);
    scene.vline(close, (top, top + height), 1.0, theme::INK);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::scene::{Shape, assert_legible, texts};
    use super::*;
    use crate::ids::{DriveId, ExpertId, LayerId};
    use crate::source::Phase;
    use crate::trace::events::{Cause, Outcome, Purpose};

    fn figure(barriers: usize, width: usize, drives: usize) -> WaterfallFigure {
        let barrier = |b: usize| {
            let open_ns = b as u64 * 2_000_000;
            let read = |r: usize| WaterfallRead {
                drive: r % drives,
                queued_ns: open_ns + 1000,
                submitted_ns: open_ns + 20_000 * (r as u64 % 16) + 1000,
                completed_ns: open_ns + 400_000 + 150_000 * ((r * 7 + b) % width) as u64,
            };
            WaterfallBarrier {
                label: format!("L{b}"),
                open_ns,
                close_ns: open_ns + 1_700_000,
                reads: (0..width).map(read).collect(),
            }
        };
        WaterfallFigure {
            title: "One step, barrier by barrier".into(),
            subtitle: "step 17".into(),
            emulated: false,
            drives: (0..drives).map(|d| format!("nvme{d}")).collect(),
            barriers: (0..barriers).map(barrier).collect(),
            note: String::new(),
        }
    }

    #[test]
    fn marks_the_read_that_ended_last() {
        let mut figure = figure(1, 4, 4);
        figure.barriers[0].reads[2].completed_ns = 1_650_000;
        let scene = figure.scene().unwrap();
        assert_legible(&scene);
        assert!(texts(&scene).iter().any(|t| t.contains("nvme2") && (t.contains('◀') || t.contains('▶'))));
        assert!(texts(&scene).contains(&"1.70 ms"));
        figure.barriers[0].reads[1].completed_ns = 1_650_000;
        assert!(texts(&figure.scene().unwrap()).iter().any(|t| t.contains("2 reads tie")));
    }

    #[test]
    fn events_are_joined_by_the_barrier_that_needed_them() {
        let record = BarrierRecord {
            barrier: 7,
            step: 1,
            phase: Phase::Decode,
            pos: 0,
            rows: 1,
            layer: LayerId(3),
            width: 2,
            hits: 0,
            prefetch_hits: 0,
            bytes: 2,
            open_ns: 100,
            first_ns: 200,
            last_ns: 300,
            close_ns: 310,
            stall_ns: 0,
            straggler: Some(DriveId(1)),
            gap_drive_ns: 0,
            gap_read_ns: 0,
            bound_layout_ns: None,
            bound_drives_ns: None,
            cause: Cause::DeviceSlow,
        };
        let event = |barrier, drive, completed_ns, result| ReadEvent {
            step: 1,
            layer: LayerId(3),
            expert: ExpertId(0),
            drive: DriveId(drive),
            replica: 0,
            part: 0,
            parts: 1,
            offset: 0,
            bytes: 1,
            purpose: Purpose::Demand,
            issued_in: 6,
            barrier,
            queued_ns: 100,
            submitted_ns: 110,
            completed_ns,
            result,
            outcome: Outcome::Demand,
        };
        let events = [
            event(Some(7), 0, 200, ReadResult::Ok),
            event(Some(7), 1, 300, ReadResult::Ok),
            event(Some(7), 0, 900, ReadResult::Error),
            event(Some(8), 0, 800, ReadResult::Ok),
            event(None, 0, 700, ReadResult::Ok),
        ];
        let figure = WaterfallFigure::from_events(&["a".into(), "b".into()], &[record], &events);
        let reads: Vec<_> = figure.barriers[0].reads.iter().map(|r| (r.drive, r.completed_ns)).collect();
        assert_eq!(reads, [(0, 200), (1, 300)]);
        assert_eq!((figure.barriers[0].label.as_str(), figure.barriers[0].close_ns), ("L3", 310));
        assert_legible(&figure.scene().unwrap());
    }

    #[test]
    fn every_read_has_one_bar_in_its_drives_colour() {
        let scene = figure(3, 6, 2).scene().unwrap();
        let bars = |drive| {
            let color = theme::drive_color(drive);
            let plot = |s: &&Shape| matches!(s, Shape::Rect { x, ink, .. } if *ink == color && *x > MARGIN_PX + 118.0);
            scene.shapes.iter().filter(plot).count()
        };
        assert_eq!((bars(0), bars(1)), (9, 9));
    }

    #[test]
    fn odd_but_legal_data_stays_legible() {
        for (barriers, width, drives) in [(1, 1, 1), (8, 5, 4), (40, 10, 8), (64, 1, 1), (1, 400, 8)] {
            let mut figure = figure(barriers, width, drives);
            assert_legible(&figure.scene().unwrap());
            figure.drives.fill("Samsung SSD 990 PRO with Heatsink 4TB behind a long adapter".into());
            figure.barriers[0].label = "a label that does not fit".into();
            assert_legible(&figure.scene().unwrap());
        }
        let instant = WaterfallRead { drive: 0, queued_ns: u64::MAX, submitted_ns: u64::MAX, completed_ns: u64::MAX };
        let mut figure = figure(2, 1, 1);
        figure.barriers[0].reads.clear();
        figure.barriers[0].open_ns = u64::MAX;
        figure.barriers[0].close_ns = u64::MAX;
        figure.barriers[1] = WaterfallBarrier { reads: vec![instant], ..figure.barriers[0].clone() };
        assert_legible(&figure.scene().unwrap());
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        let refuse = |change: &dyn Fn(&mut WaterfallFigure), says: &str| {
            let mut bad = figure(2, 4, 2);
            change(&mut bad);
            let message = bad.scene().unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        };
        refuse(&|f| f.barriers.clear(), "no read");
        refuse(&|f| f.barriers.iter_mut().for_each(|b| b.reads.clear()), "no read");
        refuse(&|f| f.barriers = vec![f.barriers[0].clone(); 65], "do not fit");
        refuse(&|f| f.barriers[0].reads[0].submitted_ns = 0, "ends before it begins");
        refuse(&|f| f.barriers[1].close_ns = 0, "closes before it opens");
        refuse(&|f| f.barriers[0].reads[3].drive = 2, "drive 2 of 2");
        refuse(&|f| f.barriers[0].reads[3].completed_ns = 0, "ends before it begins");
    }
}
