//! Figures and tables made from plain numbers: what a person looks at after a run.
//!
//! Takes data and paths, never a live reader, decoder or drive. Every figure is a struct of plain values that lays
//! itself out as a [`scene::Scene`]; only `plot` and `font` know the drawing library, so that it can be replaced
//! there. A figure refuses data that it cannot show honestly (not a number, a whisker on the wrong side, no rows)
//! instead of drawing it.

pub mod axis;
mod bearing;
pub mod distribution;
pub mod font;
pub mod html;
pub mod ladder;
pub mod lands_last;
pub mod monitor_view;
pub mod paired;
pub mod plot;
pub mod queue_depth;
pub mod scaling;
pub mod scene;
pub mod sustain;
pub mod table;
pub mod theme;
pub mod timeline;
pub mod trace_figures;
pub mod units;
pub mod waterfall;
pub mod words;

pub use plot::Figure;

use std::path::PathBuf;

/// Why a figure could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The numbers cannot be shown honestly.
    #[error("figure \"{figure}\": {why}")]
    Data {
        /// Title of the figure.
        figure: String,
        /// What is wrong with which value, and what to do.
        why: String,
    },
    /// The font in the binary is damaged.
    #[error("the embedded font \"{0}\" cannot be read; this build is damaged, rebuild argodrive")]
    Font(&'static str),
    /// The drawing library failed.
    #[error("figure \"{figure}\" could not be drawn: {why}")]
    Draw {
        /// Title of the figure.
        figure: String,
        /// The library's words.
        why: String,
    },
    /// A file could not be written.
    #[error("cannot write the figure {}: {source}; check that its folder exists and has space", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl ReportError {
    /// Bad data in the figure called `figure`.
    pub fn data(figure: &str, why: impl Into<String>) -> Self {
        Self::Data { figure: figure.to_owned(), why: why.into() }
    }
}

/// Accepts a finite number that is not negative, and names the value in the error otherwise.
pub(crate) fn finite(figure: &str, what: &str, value: f64) -> Result<f64, ReportError> {
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(ReportError::data(figure, format!("{what} is {value}; expected a number of at least 0")))
    }
}
