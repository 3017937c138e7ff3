//! What can be wrong with a trace: one error for all of its files, which names file, line and column.

use super::log::TRACE_VERSION;
use std::io;
use std::path::PathBuf;

/// What is wrong with a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not what its name says.
    #[error("{}: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What and where.
        reason: String,
    },
    /// A row of a file is wrong.
    #[error("{}:{line}: {}{reason}", path.display(), column_of(*column, name))]
    Row {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Column, from 1; 0 = the whole line.
        column: usize,
        /// Name of the column, where it has one.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A newer program wrote it.
    #[error("{}: trace version {seen}, this program reads up to {TRACE_VERSION}; use a newer argodrive", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        seen: u32,
    },
    /// The buffers were too small for the run.
    #[error(
        "the trace lost {reads} reads and {barriers} barriers: its buffers hold {read_capacity} and \
         {barrier_capacity}; make them larger, or trace fewer tokens"
    )]
    Overflow {
        /// Reads that did not fit.
        reads: u64,
        /// Barriers that did not fit.
        barriers: u64,
        /// Reads that fit.
        read_capacity: usize,
        /// Barriers that fit.
        barrier_capacity: usize,
    },
    /// The buffer of routes was too small for the run.
    #[error("the trace lost {lost} routes: its buffer holds {capacity}; make it larger, or trace fewer tokens")]
    LostRoutes {
        /// Routes that did not fit.
        lost: u64,
        /// Routes that fit.
        capacity: usize,
    },
}

fn column_of(column: usize, name: &str) -> String {
    match (column, name) {
        (0, _) => String::new(),
        (column, "") => format!("column {column}: "),
        (column, name) => format!("column {column} `{name}`: "),
    }
}
