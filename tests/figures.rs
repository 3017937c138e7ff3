//! Figures as a user gets them: two files per figure, whatever the numbers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::report::Figure;
use argodrive::report::ladder::{IoPoint, LadderFigure, RungPoint};
use argodrive::report::lands_last::{LandsLastFigure, LayerCounts};
use argodrive::report::timeline::{DriveSeries, TimelineFigure};
use argodrive::report::waterfall::{WaterfallBarrier, WaterfallFigure, WaterfallRead};
use proptest::prelude::*;
use std::fs;

fn ladder(rungs: Vec<RungPoint>) -> LadderFigure {
    LadderFigure {
        title: "Ladder".into(),
        subtitle: "argo-mini".into(),
        emulated: true,
        whiskers: "slowest and fastest run".into(),
        rungs,
        note: "median".into(),
    }
}

fn rung(drives: u32, tok_s: f64, wait: f64) -> RungPoint {
    RungPoint {
        label: format!("drive{drives}"),
        drives,
        tok_s_median: tok_s,
        tok_s_low: tok_s * 0.98,
        tok_s_high: tok_s * 1.01,
        io_wait_share: wait,
        ideal_tok_s: Some(12.5 * f64::from(drives)),
        io: Some(IoPoint { gain: f64::from(drives), simulated: None }),
    }
}

fn timeline() -> TimelineFigure {
    let drive = |name: &str| DriveSeries {
        name: name.into(),
        window_bytes: vec![500_000, 0, 250_000],
        rated_bytes_per_s: Some(50e6),
    };
    TimelineFigure {
        title: "Timeline".into(),
        subtitle: String::new(),
        emulated: true,
        window_ms: 10.0,
        drives: vec![drive("nvme0"), drive("nvme1")],
        note: String::new(),
    }
}

fn waterfall() -> WaterfallFigure {
    let read = |drive, completed_ns| WaterfallRead { drive, queued_ns: 10, submitted_ns: 1000, completed_ns };
    WaterfallFigure {
        title: "Waterfall".into(),
        subtitle: String::new(),
        emulated: true,
        drives: vec!["nvme0".into(), "nvme1".into()],
        barriers: vec![WaterfallBarrier {
            label: "L3".into(),
            open_ns: 0,
            close_ns: 900_000,
            reads: vec![read(0, 500_000), read(1, 880_000)],
        }],
        note: String::new(),
    }
}

fn lands_last() -> LandsLastFigure {
    LandsLastFigure {
        title: "Lands last".into(),
        subtitle: String::new(),
        emulated: true,
        drives: vec!["nvme0".into(), "nvme1".into()],
        layers: vec![LayerCounts { layer: 0, last: vec![3, 1] }, LayerCounts { layer: 1, last: vec![0, 0] }],
        note: String::new(),
    }
}

#[test]
fn every_figure_is_an_svg_and_a_png_of_equal_bytes_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let ladder = ladder(vec![rung(1, 12.5, 0.88), rung(2, 19.8, 0.8), rung(3, 24.1, 0.72), rung(4, 29.7, 0.66)]);
    let figures: [(&str, &dyn Figure, &[&str]); 4] = [
        ("ladder", &ladder, &["29.7", "66 %", "linear from rung 1", "4 drives"]),
        ("timeline", &timeline(), &["nvme1", "mean 25.0 MB/s"]),
        ("waterfall", &waterfall(), &["L3", "nvme1", "900 µs"]),
        ("last", &lands_last(), &["75.0 %", "even share 50 %"]),
    ];
    for (name, figure, wanted) in figures {
        let [svg, png] = figure.write(&dir.path().join(name)).unwrap();
        let (text, pixels) = (fs::read_to_string(&svg).unwrap(), fs::read(&png).unwrap());
        for words in wanted.iter().chain(&["emulated drives"]) {
            assert!(text.contains(words), "{name}: {words}");
        }
        let word = |at: usize| u32::from_be_bytes(pixels[at..at + 4].try_into().unwrap());
        assert_eq!((&pixels[1..4], &pixels[12..16]), (&b"PNG"[..], &b"IHDR"[..]));
        let height = figure.scene().unwrap().height;
        assert_eq!((word(16), word(20)), (1600, height as u32 * 2), "{name}");
        assert_eq!(&pixels[pixels.len() - 8..pixels.len() - 4], b"IEND", "{name}: the file is whole");

        figure.write(&dir.path().join(name)).unwrap();
        assert_eq!(fs::read_to_string(&svg).unwrap(), text, "{name}");
        assert_eq!(fs::read(&png).unwrap(), pixels, "{name}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 8, "nothing else is left behind");
}

#[test]
fn no_crate_that_asks_for_system_fonts_is_in_the_tree() {
    let lock = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock")).unwrap();
    assert!(lock.contains("name = \"ab_glyph\""));
    for name in ["font-kit", "yeslogic-fontconfig-sys", "fontconfig", "freetype-sys", "dwrote"] {
        assert!(!lock.contains(&format!("name = \"{name}\"")), "{name} would make figures depend on the machine");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any number at all: a picture or an error, never a panic.
    #[test]
    fn a_ladder_of_any_numbers_is_a_picture_or_an_error(
        values in proptest::collection::vec((any::<f64>(), any::<f64>(), any::<f64>(), 0.0..1.2f64, any::<Option<f64>>()), 0..14),
        ordered in any::<bool>(),
        title in ".{0,200}",
    ) {
        let rungs = values.into_iter().enumerate().map(|(index, (a, b, c, wait, ideal))| {
            let mut tok_s = [a, b, c];
            if ordered {
                tok_s = tok_s.map(f64::abs);
                tok_s.sort_by(f64::total_cmp);
            }
            RungPoint {
                label: title.clone(),
                drives: index as u32,
                tok_s_median: tok_s[1],
                tok_s_low: tok_s[0],
                tok_s_high: tok_s[2],
                io_wait_share: if ordered { wait / 1.2 } else { wait },
                ideal_tok_s: if ordered { ideal.map(f64::abs) } else { ideal },
                io: ideal.map(|gain| IoPoint { gain: if ordered { gain.abs() } else { gain }, simulated: Some(a) }),
            }
        });
        let mut figure = ladder(rungs.collect());
        figure.title = title;
        if let Ok(svg) = figure.svg() {
            prop_assert!(svg.trim_end().ends_with("</svg>") && !svg.contains("NaN"));
        }
    }

    #[test]
    fn a_waterfall_of_any_times_is_a_picture_or_an_error(
        times in proptest::collection::vec((0usize..4, any::<u64>(), any::<u64>(), any::<u64>()), 0..40),
        open_ns in any::<u64>(),
        close_ns in any::<u64>(),
    ) {
        let reads = times.into_iter().map(|(drive, a, b, c)| {
            let mut at = [a, b, c];
            at.sort_unstable();
            WaterfallRead { drive: drive % 2, queued_ns: at[0], submitted_ns: at[1], completed_ns: at[2] }
        });
        let mut figure = waterfall();
        figure.barriers[0].reads = reads.collect();
        figure.barriers[0].open_ns = open_ns.min(close_ns);
        figure.barriers[0].close_ns = open_ns.max(close_ns);
        if let Ok(svg) = figure.svg() {
            prop_assert!(svg.trim_end().ends_with("</svg>") && !svg.contains("NaN"));
        }
    }
}
