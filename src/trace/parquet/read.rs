//! Rows of a Parquet table, a few thousand at a time and only the columns that are asked for. Whatever the file says of
//! itself is checked before anything is allocated for it. Knows nothing of what the columns mean.

use super::super::fields::Fields;
use super::super::log::{TRACE_VERSION, TraceError};
use super::super::passed;
use super::super::rows::shown;
use super::super::stream::Source;
use super::schema::{ColumnSpec, TableSpec};
use super::write::digest;
use super::{fault, footer, guarded, keys, path_of};
use ::parquet::basic::Compression;
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::column::reader::{ColumnReader, get_column_reader};
use ::parquet::data_type::ByteArray;
use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::file::metadata::ParquetMetaData;
use ::parquet::file::reader::FileReader;
use ::parquet::file::serialized_reader::SerializedFileReader;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Rows decoded at a time.
const BATCH_ROWS: usize = 8192;
/// Largest footer that is read: enough for about 400 million reads.
const MAX_FOOTER_BYTES: u64 = 4 << 20;
/// Largest chunk (one column of one row group).
const MAX_CHUNK_BYTES: u64 = 64 << 20;
/// Distinct words of a column whose meaning is remembered.
const MAX_WORDS: usize = 64;

/// The rows of one table.
pub struct ParquetRows {
    path: PathBuf,
    file: SerializedFileReader<File>,
    bytes: File,
    columns: Vec<Column>,
    digests: Vec<u64>,
    group: usize,
    left_in_group: u64,
    batch: usize,
    at: usize,
    number: u64,
}

/// One column of the current batch.
struct Column {
    spec: ColumnSpec,
    wanted: bool,
    reader: Option<ColumnReader>,
    /// Whole numbers, the bits of decimal ones, or places in `words`.
    values: Vec<u64>,
    /// Of optional columns: 0 = empty.
    levels: Vec<i16>,
    words: Vec<ByteArray>,
    small: Vec<i32>,
    large: Vec<i64>,
    decimals: Vec<f64>,
    texts: Vec<ByteArray>,
}

/// One row.
#[derive(Clone, Copy)]
pub struct ParquetRow<'a> {
    rows: &'a ParquetRows,
    at: usize,
}

impl ParquetRows {
    /// Opens `<table>.parquet` of `folder` for the columns with the numbers `wanted`.
    pub fn open(folder: &Path, table: &TableSpec, wanted: &[usize]) -> Result<Self, TraceError> {
        let path = path_of(folder, table);
        let io = |source| TraceError::Io { path: path.clone(), source };
        let mut bytes = File::open(&path).map_err(io)?;
        check_footer(&path, &mut bytes)?;
        passed::opened(bytes.metadata().map_err(io)?.len());
        let file = bytes.try_clone().map_err(io)?;
        let file = guarded(&path, None, || SerializedFileReader::new(file))?;
        let digests = check_metadata(&path, table, file.metadata())?;
        check_groups(&path, table, file.metadata(), bytes.metadata().map_err(io)?.len())?;
        let columns = table.columns.iter().enumerate();
        let columns = columns.map(|(index, spec)| Column::new(*spec, wanted.contains(&index))).collect();
        Ok(Self { path, file, bytes, columns, digests, group: 0, left_in_group: 0, batch: 0, at: 0, number: 0 })
    }

    /// Decodes the next batch; `false` at the end.
    fn load(&mut self) -> Result<bool, TraceError> {
        (self.batch, self.at) = (0, 0);
        while self.left_in_group == 0 {
            if self.group == self.file.num_row_groups() {
                return Ok(false);
            }
            self.open_group()?;
        }
        let rows = BATCH_ROWS.min(usize::try_from(self.left_in_group).unwrap_or(BATCH_ROWS));
        for column in self.columns.iter_mut().filter(|c| c.wanted) {
            let name = column.spec.name;
            let read = guarded(&self.path, Some(name), || column.fill(rows));
            let read = read.inspect_err(|_| self.group = self.file.num_row_groups())?;
            if read != rows {
                let reason = format!("ends before the {} rows that its group should have", self.left_in_group);
                return Err(fault(&self.path, Some(name), reason));
            }
        }
        self.left_in_group -= rows as u64;
        self.batch = rows;
        Ok(true)
    }

    fn open_group(&mut self) -> Result<(), TraceError> {
        let Self { path, file, bytes, columns, group, .. } = self;
        let metadata = file.metadata().row_group(*group);
        for (index, column) in columns.iter_mut().enumerate().filter(|(_, c)| c.wanted) {
            let (from, len) = metadata.column(index).byte_range();
            let seen = digest(bytes, from, len).map_err(|source| TraceError::Io { path: path.clone(), source })?;
            if self.digests.get(*group * metadata.num_columns() + index) != Some(&seen) {
                let reason = format!("row group {group}: the bytes are not those that were written (wrong digest)");
                return Err(fault(path, Some(column.spec.name), reason));
            }
            column.reader = Some(guarded(path, Some(column.spec.name), || {
                let pages = file.get_row_group(*group)?.get_column_page_reader(index)?;
                Ok(get_column_reader(metadata.column(index).column_descr_ptr(), Box::new(Bounded(pages))))
            })?);
        }
        self.left_in_group = metadata.num_rows() as u64;
        self.group += 1;
        passed::read(u64::try_from(metadata.compressed_size()).unwrap_or_default());
        Ok(())
    }

    fn error(&self, index: usize, name: &str, reason: String) -> TraceError {
        let path = self.path.clone();
        TraceError::Row { path, line: self.number, column: index, name: name.to_owned(), reason }
    }
}

/// The last bytes of the file, before the library sees it: it would read as much as they ask for.
fn check_footer(path: &Path, file: &mut File) -> Result<(), TraceError> {
    let io = |source| TraceError::Io { path: path.to_path_buf(), source };
    let len = file.metadata().map_err(io)?.len();
    let mut end = [0; 8];
    if len >= 12 {
        file.seek(SeekFrom::Start(len - 8)).and_then(|_| file.read_exact(&mut end)).map_err(io)?;
    }
    if end[4..] != *b"PAR1" {
        let reason = "is cut off, or no Parquet file: it does not end with `PAR1`";
        return Err(fault(path, None, reason.into()));
    }
    let footer_bytes = u64::from(u32::from_le_bytes([end[0], end[1], end[2], end[3]]));
    if footer_bytes > MAX_FOOTER_BYTES || footer_bytes > len - 12 {
        let reason =
            format!("its footer should have {footer_bytes} bytes; the file has {len}, and {MAX_FOOTER_BYTES} is most");
        return Err(fault(path, None, reason));
    }
    let mut bytes = vec![0; usize::try_from(footer_bytes).unwrap_or_default()];
    file.seek(SeekFrom::Start(len - 8 - footer_bytes)).and_then(|_| file.read_exact(&mut bytes)).map_err(io)?;
    footer::check(&bytes).map_err(|reason| fault(path, None, reason))
}

/// Version, table and types; gives the digests.
fn check_metadata(path: &Path, table: &TableSpec, metadata: &ParquetMetaData) -> Result<Vec<u64>, TraceError> {
    let pairs = metadata.file_metadata().key_value_metadata();
    let value = |key: &str| pairs.and_then(|p| p.iter().find(|p| p.key == key)).and_then(|p| p.value.as_deref());
    let foreign = |what: &str| {
        let reason = format!("{what}: `argodrive results parquet` did not write it, or another program changed it");
        fault(path, None, reason)
    };
    let version = value(keys::VERSION).and_then(|v| v.parse::<u32>().ok());
    let version = version.ok_or_else(|| foreign(&format!("its metadata has no `{}`", keys::VERSION)))?;
    if version > TRACE_VERSION {
        return Err(TraceError::Version { path: path.to_path_buf(), seen: version });
    }
    if value(keys::TABLE) != Some(table.name) {
        let seen = value(keys::TABLE).map_or("none".into(), |t| format!("`{}`", shown(t.as_bytes())));
        return Err(fault(path, None, format!("holds the table {seen}, expected `{}`", table.name)));
    }
    let schema = metadata.file_metadata().schema_descr();
    let seen = schema.root_schema().get_fields();
    for (index, column) in table.columns.iter().enumerate() {
        let found = seen.get(index).filter(|field| field.name() == column.name);
        let found = found.ok_or_else(|| {
            let other = seen.get(index).map_or("nothing".into(), |f| format!("`{}`", shown(f.name().as_bytes())));
            fault(path, Some(column.name), format!("is missing; {other} stands in its place"))
        })?;
        if !column.fits(found) {
            return Err(fault(path, Some(column.name), format!("is not {}", column.expected())));
        }
    }
    if let Some(more) = seen.get(table.columns.len()) {
        let name = shown(more.name().as_bytes());
        return Err(fault(path, Some(&name), "is none of this table's columns".into()));
    }
    let digits = value(keys::DIGESTS).unwrap_or("").as_bytes();
    let digests: Option<Vec<u64>> =
        digits.chunks(16).map(|d| std::str::from_utf8(d).ok().and_then(|d| u64::from_str_radix(d, 16).ok())).collect();
    let chunks = table.columns.len() * metadata.num_row_groups();
    digests.filter(|d| d.len() == chunks).ok_or_else(|| foreign("its metadata has no digest for each column chunk"))
}

/// Row counts and places of the chunks.
fn check_groups(path: &Path, table: &TableSpec, metadata: &ParquetMetaData, len: u64) -> Result<(), TraceError> {
    let mut all: i64 = 0;
    for (number, group) in metadata.row_groups().iter().enumerate() {
        let rows = group.num_rows();
        let sum = all.checked_add(rows).filter(|_| rows >= 0);
        all = sum.ok_or_else(|| fault(path, None, format!("row group {number} should have {rows} rows")))?;
        for (column, chunk) in table.columns.iter().zip(group.columns()) {
            let wrong = |reason: String| Err(fault(path, Some(column.name), format!("row group {number}: {reason}")));
            if chunk.num_values() != rows {
                return wrong(format!("{} values for {rows} rows", chunk.num_values()));
            }
            if chunk.compression() != Compression::UNCOMPRESSED {
                return wrong(format!(
                    "is compressed ({}); this program reads uncompressed pages",
                    chunk.compression()
                ));
            }
            if chunk.file_path().is_some() {
                return wrong("lies in another file".into());
            }
            let from = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
            let (from, size) = (u64::try_from(from), u64::try_from(chunk.compressed_size()));
            let inside = from.ok().zip(size.ok()).filter(|(from, size)| {
                *size <= MAX_CHUNK_BYTES && from.checked_add(*size).is_some_and(|end| end <= len)
            });
            if inside.is_none() {
                return wrong(format!(
                    "does not lie within the file's {len} bytes, or has more than {MAX_CHUNK_BYTES}"
                ));
            }
        }
        if group.num_columns() != table.columns.len() {
            return Err(fault(path, None, format!("row group {number} has {} columns", group.num_columns())));
        }
    }
    let said = metadata.file_metadata().num_rows();
    if all != said {
        return Err(fault(path, None, format!("should have {said} rows, but its row groups have {all}")));
    }
    Ok(())
}

/// Pages whose dictionaries hold as many values as they have bytes for: the decoder allocates for the count.
struct Bounded(Box<dyn PageReader>);

impl PageReader for Bounded {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        let page = self.0.get_next_page()?;
        if let Some(Page::DictionaryPage { buf, num_values, .. }) = &page {
            // no value of these tables takes less than four bytes there
            if *num_values as usize > buf.len() / 4 {
                let reason = format!("a dictionary of {} bytes should hold {num_values} values", buf.len());
                return Err(ParquetError::General(reason));
            }
        }
        Ok(page)
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        self.0.peek_next_page()
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        self.0.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> ParquetResult<bool> {
        self.0.at_record_boundary()
    }
}

impl Iterator for Bounded {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl Column {
    fn new(spec: ColumnSpec, wanted: bool) -> Self {
        Self {
            spec,
            wanted,
            reader: None,
            values: Vec::new(),
            levels: Vec::new(),
            words: Vec::new(),
            small: Vec::new(),
            large: Vec::new(),
            decimals: Vec::new(),
            texts: Vec::new(),
        }
    }

    /// Decodes `rows` rows; gives how many there were.
    fn fill(&mut self, rows: usize) -> ParquetResult<usize> {
        let Self { spec, reader, values, levels, words, small, large, decimals, texts, .. } = self;
        values.clear();
        levels.clear();
        small.clear();
        large.clear();
        decimals.clear();
        texts.clear();
        let some = spec.optional.then_some(&mut *levels);
        let read = match reader {
            Some(ColumnReader::Int32ColumnReader(r)) => r.read_records(rows, some, None, small)?.0,
            Some(ColumnReader::Int64ColumnReader(r)) => r.read_records(rows, some, None, large)?.0,
            Some(ColumnReader::DoubleColumnReader(r)) => r.read_records(rows, some, None, decimals)?.0,
            Some(ColumnReader::ByteArrayColumnReader(r)) => r.read_records(rows, some, None, texts)?.0,
            _ => return Err(ParquetError::General("has a type that no table has".into())),
        };
        // the bits are those of an unsigned number
        values.extend(small.iter().map(|v| u64::from(*v as u32)));
        values.extend(large.iter().map(|v| *v as u64));
        values.extend(decimals.iter().map(|v| v.to_bits()));
        for text in texts.iter() {
            let known = words.iter().position(|w| w.data() == text.data());
            values.push(match known {
                Some(place) => place as u64,
                None if words.len() < MAX_WORDS => {
                    words.push(text.clone());
                    words.len() as u64 - 1
                }
                None => return Err(ParquetError::General(format!("has more than {MAX_WORDS} different words"))),
            });
        }
        if spec.optional {
            spread(values, levels)?;
        }
        if values.len() == read { Ok(read) } else { Err(ParquetError::General("values and rows do not match".into())) }
    }
}

/// Moves the values of an optional column to the rows that have one.
fn spread(values: &mut Vec<u64>, levels: &[i16]) -> ParquetResult<()> {
    let there = levels.iter().filter(|l| **l == 1).count();
    if there != values.len() {
        return Err(ParquetError::General("values and empty fields do not match".into()));
    }
    values.resize(levels.len(), 0);
    let mut from = there;
    for at in (0..levels.len()).rev() {
        if levels[at] == 1 {
            from -= 1;
            values[at] = values[from];
        }
    }
    Ok(())
}

impl Source for ParquetRows {
    type Row<'a> = ParquetRow<'a>;

    fn next(&mut self) -> Result<Option<ParquetRow<'_>>, TraceError> {
        if self.at == self.batch && !self.load()? {
            return Ok(None);
        }
        let at = self.at;
        self.at += 1;
        self.number += 1;
        Ok(Some(ParquetRow { rows: self, at }))
    }

    fn fault(&self, reason: String) -> TraceError {
        self.error(0, "", reason)
    }
}

impl ParquetRow<'_> {
    fn word_bytes(&self, index: usize) -> &[u8] {
        let column = &self.rows.columns[index];
        let word = column.values.get(self.at).and_then(|place| column.words.get(*place as usize));
        word.map_or(&[][..], |w| w.data())
    }

    fn decimal(&self, index: usize) -> f64 {
        f64::from_bits(self.rows.columns[index].values.get(self.at).copied().unwrap_or(0))
    }
}

impl Fields for ParquetRow<'_> {
    #[inline]
    fn whole(&self, index: usize, max: u64) -> Result<u64, TraceError> {
        let column = &self.rows.columns[index];
        let value = if column.wanted { column.values[self.at] } else { 0 };
        if value <= max {
            return Ok(value);
        }
        Err(Fields::error(self, index, format!("`{value}` is not a whole number from 0 to {max}")))
    }

    #[inline]
    fn is_empty(&self, index: usize) -> bool {
        let column = &self.rows.columns[index];
        column.spec.optional && column.levels.get(self.at).is_none_or(|l| *l != 1)
    }

    #[inline]
    fn word<T: Copy>(&self, index: usize, words: &[(&str, T)]) -> Result<T, TraceError> {
        let text = self.word_bytes(index);
        words.iter().find(|(word, _)| word.as_bytes() == text).map(|(_, value)| *value).ok_or_else(|| {
            let known: Vec<&str> = words.iter().map(|w| w.0).collect();
            Fields::error(self, index, format!("`{}` is none of {}", shown(text), known.join(", ")))
        })
    }

    fn scaled(&self, index: usize, digits: u32) -> Result<u64, TraceError> {
        let value = self.decimal(index);
        let scaled = (value * 10f64.powi(digits as i32)).round();
        // 2^64 as a decimal number: the largest that is too large
        if (0.0..18_446_744_073_709_551_616.0).contains(&scaled) {
            return Ok(scaled as u64);
        }
        let reason = format!("`{value}` is not a number of at least 0 that fits 64 bits of 10^-{digits}");
        Err(Fields::error(self, index, reason))
    }

    fn float(&self, index: usize) -> Result<f32, TraceError> {
        let value = self.decimal(index);
        let small = value as f32;
        if small.is_finite() {
            Ok(small)
        } else {
            Err(Fields::error(self, index, format!("`{value}` is not a finite number")))
        }
    }

    fn text(&self, index: usize) -> String {
        String::from_utf8_lossy(self.word_bytes(index)).into_owned()
    }

    fn error(&self, index: usize, reason: String) -> TraceError {
        self.rows.error(index + 1, self.rows.columns[index].spec.name, reason)
    }
}
