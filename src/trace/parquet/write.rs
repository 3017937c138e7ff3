//! From CSV to Parquet: one row group in memory at a time, written under a temporary name. Checks every field for its
//! type, and every row for what the format promises of it.

use super::super::fields::{BarrierParser, Parser, ReadParser, RouteParser, WindowParser};
use super::super::log::{TRACE_VERSION, TraceError, TraceHeader};
use super::super::rows::{Row, Rows};
use super::super::stream::{Growing, Skipped};
use super::schema::{ColumnSpec, Kind, TableSpec};
use super::{csv_of, fault, guarded, keys, path_of};
use ::parquet::basic::{Compression, Encoding};
use ::parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int32Type, Int64Type};
use ::parquet::file::metadata::{KeyValue, RowGroupMetaData};
use ::parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesPtr};
use ::parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use ::parquet::schema::types::ColumnPath;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3Default;

/// Rows of one group: at most about 40 MB of columns in memory.
pub const GROUP_ROWS: usize = 1 << 18;
/// Distinct words of a column that share their bytes in memory.
const SHARED_WORDS: usize = 64;

/// One table that was turned.
#[derive(Clone, Debug)]
pub struct Written {
    /// The new file.
    pub path: PathBuf,
    /// Its rows.
    pub rows: u64,
    /// Bytes of the CSV file.
    pub csv_bytes: u64,
    /// Bytes of the new one.
    pub parquet_bytes: u64,
    /// Rows left out.
    pub skipped: Skipped,
}

/// Turns `<table>.csv` of `folder` into `<table>.parquet` of `out`.
pub fn convert(
    folder: &Path,
    out: &Path,
    header: &TraceHeader,
    table: &TableSpec,
    lenient: bool,
) -> Result<Written, TraceError> {
    let csv_path = csv_of(folder, table);
    let names: Vec<&str> = table.columns.iter().map(|c| c.name).collect();
    let mut rows = Rows::open(&csv_path, &names)?;
    let mut check = check_of(table, header.drives.len());
    let path = path_of(out, table);
    let growing = Growing::create(&path)?;
    let temporary = growing.temporary().to_path_buf();
    let mut writer = guarded(&path, None, || SerializedFileWriter::new(growing, table.schema()?, properties(table)))?;
    let mut buffers: Vec<Buffer> = table.columns.iter().map(|c| Buffer::new(*c)).collect();
    let mut skipped = Skipped::default();
    let (mut in_group, mut all) = (0, 0);
    loop {
        let row = match rows.next_row() {
            Ok(None) => break,
            Ok(Some(row)) => check(&row).and_then(|()| push(&mut buffers, &row)),
            Err(e) => Err(e),
        };
        if skipped.pass(row, lenient)?.is_some() {
            (in_group, all) = (in_group + 1, all + 1);
        } else {
            buffers.iter_mut().for_each(|b| b.truncate(in_group));
        }
        if in_group == GROUP_ROWS {
            write_group(&path, &mut writer, &mut buffers)?;
            in_group = 0;
        }
    }
    if in_group > 0 {
        write_group(&path, &mut writer, &mut buffers)?;
    }
    let io = |source| TraceError::Io { path: path.clone(), source };
    writer.flush().map_err(io)?;
    let digests = digests(&temporary, writer.flushed_row_groups()).map_err(io)?;
    let json = serde_json::to_string(header).map_err(|e| fault(&path, None, e.to_string()))?;
    let pairs = [
        (keys::VERSION, TRACE_VERSION.to_string()),
        (keys::TABLE, table.name.to_owned()),
        (keys::CLOCK, header.clock.clone()),
        (keys::HEADER, json),
        (keys::DIGESTS, digests),
    ];
    for (key, value) in pairs {
        writer.append_key_value_metadata(KeyValue::new(key.to_owned(), value));
    }
    guarded(&path, None, || writer.into_inner())?.finish()?;
    let size = |path: &Path| std::fs::metadata(path).map(|m| m.len()).map_err(io);
    Ok(Written { rows: all, csv_bytes: size(&csv_path)?, parquet_bytes: size(&path)?, skipped, path: path.clone() })
}

type Check = Box<dyn FnMut(&Row<'_>) -> Result<(), TraceError>>;

fn check_of(table: &TableSpec, drives: usize) -> Check {
    match table.name {
        "reads" => with(ReadParser { drives }),
        "barriers" => with(BarrierParser::new(drives)),
        "windows" => with(WindowParser::default()),
        _ => with(RouteParser::default()),
    }
}

fn with(mut parser: impl Parser + 'static) -> Check {
    Box::new(move |row| parser.parse(row).map(|_| ()))
}

fn properties(table: &TableSpec) -> WriterPropertiesPtr {
    let mut builder = WriterProperties::builder()
        .set_created_by(concat!("argodrive ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_compression(Compression::UNCOMPRESSED)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_offset_index_disabled(true)
        .set_max_row_group_row_count(Some(GROUP_ROWS));
    for column in table.columns.iter().filter(|c| c.kind == Kind::Ascending) {
        let path = ColumnPath::from(column.name);
        builder = builder
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED);
    }
    Arc::new(builder.build())
}

fn push(buffers: &mut [Buffer], row: &Row<'_>) -> Result<(), TraceError> {
    buffers.iter_mut().enumerate().try_for_each(|(index, buffer)| buffer.push(row, index))
}

fn write_group(
    path: &Path,
    writer: &mut SerializedFileWriter<Growing>,
    buffers: &mut [Buffer],
) -> Result<(), TraceError> {
    guarded(path, None, || {
        let mut group = writer.next_row_group()?;
        for buffer in buffers.iter_mut() {
            if let Some(mut column) = group.next_column()? {
                buffer.write(&mut column)?;
                column.close()?;
            }
            buffer.truncate(0);
        }
        group.close().map(|_| ())
    })
}

/// Reads back what was written, chunk by chunk.
fn digests(path: &Path, groups: &[RowGroupMetaData]) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut text = String::with_capacity(groups.iter().map(|g| g.num_columns() * 16).sum());
    for column in groups.iter().flat_map(|g| g.columns()) {
        let (from, len) = column.byte_range();
        text.push_str(&format!("{:016x}", digest(&mut file, from, len)?));
    }
    Ok(text)
}

/// XXH3 of `len` bytes of `file` from `from` on.
pub fn digest(file: &mut File, from: u64, len: u64) -> io::Result<u64> {
    let mut hash = Xxh3Default::new();
    let mut bytes = vec![0; (256 << 10).min(len as usize)];
    file.seek(SeekFrom::Start(from))?;
    let mut left = len;
    while left > 0 {
        let part = &mut bytes[..(256 << 10).min(left as usize)];
        file.read_exact(part)?;
        hash.update(part);
        left -= part.len() as u64;
    }
    Ok(hash.digest())
}

/// Values of one column of one row group.
struct Buffer {
    spec: ColumnSpec,
    values: Values,
    /// 1 = there, 0 = empty; only of optional columns.
    levels: Vec<i16>,
    words: Vec<ByteArray>,
}

enum Values {
    Small(Vec<i32>),
    Large(Vec<i64>),
    Decimal(Vec<f64>),
    Words(Vec<ByteArray>),
}

impl Buffer {
    fn new(spec: ColumnSpec) -> Self {
        let values = match spec.kind {
            Kind::Whole(bits) if bits <= 32 => Values::Small(Vec::new()),
            Kind::Whole(_) | Kind::Ascending => Values::Large(Vec::new()),
            Kind::Word => Values::Words(Vec::new()),
            Kind::Decimal => Values::Decimal(Vec::new()),
        };
        Self { spec, values, levels: Vec::new(), words: Vec::new() }
    }

    fn push(&mut self, row: &Row<'_>, index: usize) -> Result<(), TraceError> {
        if self.spec.optional && row.bytes(index).is_empty() {
            self.levels.push(0);
            return Ok(());
        }
        let max = self.spec.max();
        match &mut self.values {
            // the bits stay: the column says that it is unsigned
            Values::Small(values) => values.push(row.whole(index, max)? as u32 as i32),
            Values::Large(values) => values.push(row.whole(index, max)? as i64),
            Values::Decimal(values) => values.push(decimal(row, index)?),
            Values::Words(values) => {
                let text = row.bytes(index);
                let known = self.words.iter().find(|w| w.data() == text).cloned();
                let word = match known {
                    Some(word) => word,
                    None => {
                        let text = std::str::from_utf8(text).map_err(|_| row.error(index, "is not UTF-8".into()))?;
                        let word = ByteArray::from(text);
                        if self.words.len() < SHARED_WORDS {
                            self.words.push(word.clone());
                        }
                        word
                    }
                };
                values.push(word);
            }
        }
        if self.spec.optional {
            self.levels.push(1);
        }
        Ok(())
    }

    /// Keeps the first `rows` rows: a row with a fault may have been pushed in part.
    fn truncate(&mut self, rows: usize) {
        fn cut<T>(values: &mut Vec<T>, keep: Result<usize, usize>) {
            let keep = keep.unwrap_or_else(|dropped| values.len().saturating_sub(dropped));
            values.truncate(keep);
        }
        // of an optional column only the rows that are there have a value
        let keep = if self.spec.optional {
            Err(self.levels.drain(rows.min(self.levels.len())..).filter(|l| *l == 1).count())
        } else {
            Ok(rows)
        };
        match &mut self.values {
            Values::Small(v) => cut(v, keep),
            Values::Large(v) => cut(v, keep),
            Values::Decimal(v) => cut(v, keep),
            Values::Words(v) => cut(v, keep),
        }
    }

    fn write(&self, column: &mut SerializedColumnWriter<'_>) -> ::parquet::errors::Result<()> {
        let levels = self.spec.optional.then_some(self.levels.as_slice());
        match &self.values {
            Values::Small(v) => column.typed::<Int32Type>().write_batch(v, levels, None),
            Values::Large(v) => column.typed::<Int64Type>().write_batch(v, levels, None),
            Values::Decimal(v) => column.typed::<DoubleType>().write_batch(v, levels, None),
            Values::Words(v) => column.typed::<ByteArrayType>().write_batch(v, levels, None),
        }
        .map(|_| ())
    }
}

fn decimal(row: &Row<'_>, index: usize) -> Result<f64, TraceError> {
    let text = row.text(index);
    let value = text.parse::<f64>().ok().filter(|v| v.is_finite());
    value.ok_or_else(|| {
        let shown = super::super::rows::shown(text.as_bytes());
        row.error(index, format!("`{shown}` is not a number"))
    })
}
