//! A trace's tables as Parquet: the same rows and columns as the CSV files, typed, read column by column. Knows the
//! tables of a trace folder; knows nothing of what their rows say together.
//!
//! Both directions stand here, below `replay`, so that whatever reads a trace reads either form, and a writer cannot
//! drift from its reader. Pages are encoded (dictionary, delta) but not compressed: a damaged file can then not make
//! the reader take more memory than the file has bytes. Each column chunk has a digest in the footer, which is checked
//! before the chunk is decoded.

mod footer;
pub mod read;
pub mod schema;
pub mod write;

use super::log::TraceError;
use std::path::{Path, PathBuf};

/// Keys of the footer's key-value metadata.
pub mod keys {
    /// Version of the trace format.
    pub const VERSION: &str = "argodrive.trace.version";
    /// Which table it is: `reads`, `barriers`, `windows`, `routes`.
    pub const TABLE: &str = "argodrive.trace.table";
    /// What the columns ending in `_ns` count.
    pub const CLOCK: &str = "argodrive.trace.clock";
    /// The whole `trace.json`, with the meaning of every column and the drives.
    pub const HEADER: &str = "argodrive.trace.json";
    /// XXH3 of each column chunk, row group by row group, as 16 hexadecimal digits each.
    pub const DIGESTS: &str = "argodrive.trace.digests";
}

/// The file of `table` beside its CSV.
pub fn path_of(folder: &Path, table: &schema::TableSpec) -> PathBuf {
    folder.join(format!("{}.parquet", table.name))
}

/// The CSV file of `table`.
pub fn csv_of(folder: &Path, table: &schema::TableSpec) -> PathBuf {
    folder.join(format!("{}.csv", table.name))
}

/// Runs a call of the Parquet library; its errors, and its panics on damaged pages, become errors of the file.
fn guarded<T>(
    path: &Path,
    column: Option<&str>,
    call: impl FnOnce() -> ::parquet::errors::Result<T>,
) -> Result<T, TraceError> {
    let reason = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.to_string(),
        Err(_) => "the file is damaged in a way that its decoder does not survive".to_owned(),
    };
    Err(fault(path, column, reason))
}

fn fault(path: &Path, column: Option<&str>, reason: String) -> TraceError {
    let reason = match column {
        Some(column) => format!("column `{column}`: {reason}"),
        None => reason,
    };
    TraceError::Syntax { path: path.to_path_buf(), reason }
}
