//! Rows as CSV, Parquet and JSON: one column each for what a row has, settings as one JSON text.

use super::query::Key;
use super::rows::blank;
use super::stale::Judgement;
use super::{Kind, Row};
use ::parquet::basic::{ConvertedType, LogicalType, Repetition, Type as Physical};
use ::parquet::data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, Int64Type};
use ::parquet::errors::Result as ParquetResult;
use ::parquet::file::metadata::KeyValue;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::types::Type;
use std::path::Path;
use std::sync::Arc;

/// Version of the exported columns.
pub const EXPORT_VERSION: u32 = 1;
/// Key of it in a Parquet footer.
pub const VERSION_KEY: &str = "argodrive.results.version";

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Text; `None` = not known.
    Text(Option<String>),
    /// A number.
    Number(Option<f64>),
    /// A count.
    Count(u64),
    /// Yes or no.
    Flag(bool),
}

/// The columns of `row`, in order; `stale` adds what was found out about its inputs.
pub fn cells(row: &Row, stale: Option<&Judgement>) -> Vec<(&'static str, Cell)> {
    let text = |t: &str| Cell::Text(Some(t.to_string()).filter(|t| !t.is_empty()));
    let effect = row.effect;
    let mut out = vec![
        ("origin", Cell::Text(row.origin.clone())),
        ("path", text(&row.path.display().to_string())),
        ("when", text(&row.when)),
        ("kind", text(row.kind.name())),
        ("experiment", text(&row.experiment)),
        ("name", text(&row.name)),
        ("control", Cell::Text(row.control.clone())),
        ("inside", Cell::Flag(row.inside)),
        ("model", text(&row.model)),
        ("drives", text(&row.drives.join("+"))),
        ("drive_count", Cell::Count(row.drives.len() as u64)),
        ("emulated", Cell::Flag(row.emulated)),
        ("trunk", Cell::Text(row.trunk.clone())),
        ("tok_s", Cell::Number(row.tok_s)),
        ("tok_s_min", Cell::Number(row.tok_s_range.map(|r| r.0))),
        ("tok_s_max", Cell::Number(row.tok_s_range.map(|r| r.1))),
        ("bytes_per_s", Cell::Number(row.bytes_per_s)),
        ("effect", Cell::Number(effect.map(|e| e.ratio))),
        ("effect_low", Cell::Number(effect.and_then(|e| e.low))),
        ("effect_high", Cell::Number(effect.and_then(|e| e.high))),
        ("runs", Cell::Count(row.runs as u64)),
        ("verdict", text(row.verdict.name())),
        ("says", text(&row.says)),
        ("plan_hash", text(&row.plan)),
        ("token_hash", text(&row.tokens)),
        ("argodrive", text(&row.machine.argodrive)),
        ("kernel", text(&row.machine.kernel)),
        ("cpu", text(&row.machine.cpu)),
        ("settings", text(&serde_json::to_string(&row.settings).unwrap_or_default())),
    ];
    if let Some(j) = stale {
        out.push(("inputs", text(j.state.name())));
        out.push(("changed", text(&j.changed_names().join("+"))));
        out.push(("unknown", text(&j.unknown_names().join("+"))));
        out.push(("again", text(&j.again)));
    }
    out
}

/// The columns, which are there without a row too.
fn columns(stale: bool) -> Vec<(&'static str, Cell)> {
    let none = Judgement::default();
    cells(&blank(Path::new(""), Kind::Run, 1), stale.then_some(&none))
}

/// Rows as CSV with a header.
pub fn csv(rows: &[&Row], stale: Option<&[Judgement]>) -> Result<Vec<u8>, csv::Error> {
    let mut out = csv::Writer::from_writer(Vec::new());
    out.write_record(columns(stale.is_some()).iter().map(|c| c.0))?;
    for (index, row) in rows.iter().enumerate() {
        let cells = cells(row, stale.and_then(|s| s.get(index)));
        out.write_record(cells.iter().map(|(_, cell)| plain(cell)))?;
    }
    out.into_inner().map_err(|e| e.into_error().into())
}

fn plain(cell: &Cell) -> String {
    match cell {
        Cell::Text(text) => text.clone().unwrap_or_default(),
        Cell::Number(number) => number.map(|n| n.to_string()).unwrap_or_default(),
        Cell::Count(count) => count.to_string(),
        Cell::Flag(flag) => flag.to_string(),
    }
}

/// Rows as JSON objects.
pub fn json(rows: &[&Row], stale: Option<&[Judgement]>) -> serde_json::Result<Vec<serde_json::Value>> {
    let one = |(index, row): (usize, &&Row)| {
        let mut value = serde_json::to_value(row)?;
        if let (Some(object), Some(j)) = (value.as_object_mut(), stale.and_then(|s| s.get(index))) {
            object.insert("inputs".into(), serde_json::to_value(j)?);
        }
        Ok(value)
    };
    rows.iter().enumerate().map(one).collect()
}

/// Rows as a Parquet file.
pub fn parquet(rows: &[&Row], stale: Option<&[Judgement]>) -> ParquetResult<Vec<u8>> {
    let table: Vec<_> = rows.iter().enumerate().map(|(i, r)| cells(r, stale.and_then(|s| s.get(i)))).collect();
    let columns = columns(stale.is_some());
    let fields =
        columns.iter().map(|(name, cell)| field(name, cell).map(Arc::new)).collect::<ParquetResult<Vec<_>>>()?;
    let schema = Arc::new(Type::group_type_builder("results").with_fields(fields).build()?);
    let properties =
        WriterProperties::builder().set_created_by(concat!("argodrive ", env!("CARGO_PKG_VERSION")).to_owned()).build();
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties))?;
    let mut group = writer.next_row_group()?;
    let mut index = 0;
    while let Some(mut column) = group.next_column()? {
        let of = || table.iter().map(|row| &row[index].1);
        match columns.get(index).map(|c| &c.1) {
            Some(Cell::Text(_)) => {
                let all: Vec<Option<ByteArray>> = of()
                    .map(|c| if let Cell::Text(t) = c { t.as_deref().map(ByteArray::from) } else { None })
                    .collect();
                let (values, levels) = split(all);
                column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None)?;
            }
            Some(Cell::Number(_)) => {
                let (values, levels) = split(of().map(|c| if let Cell::Number(n) = c { *n } else { None }).collect());
                column.typed::<DoubleType>().write_batch(&values, Some(&levels), None)?;
            }
            Some(Cell::Count(_)) => {
                let values: Vec<i64> = of().map(|c| if let Cell::Count(n) = c { *n as i64 } else { 0 }).collect();
                column.typed::<Int64Type>().write_batch(&values, None, None)?;
            }
            Some(Cell::Flag(_)) | None => {
                let values: Vec<bool> = of().map(|c| *c == Cell::Flag(true)).collect();
                column.typed::<BoolType>().write_batch(&values, None, None)?;
            }
        }
        column.close()?;
        index += 1;
    }
    group.close()?;
    writer.append_key_value_metadata(KeyValue::new(VERSION_KEY.to_owned(), EXPORT_VERSION.to_string()));
    writer.into_inner()
}

fn field(name: &str, cell: &Cell) -> ParquetResult<Type> {
    let of = |physical| Type::primitive_type_builder(name, physical);
    match cell {
        Cell::Text(_) => of(Physical::BYTE_ARRAY)
            .with_repetition(Repetition::OPTIONAL)
            .with_converted_type(ConvertedType::UTF8)
            .with_logical_type(Some(LogicalType::String))
            .build(),
        Cell::Number(_) => of(Physical::DOUBLE).with_repetition(Repetition::OPTIONAL).build(),
        Cell::Count(_) => of(Physical::INT64).with_repetition(Repetition::REQUIRED).build(),
        Cell::Flag(_) => of(Physical::BOOLEAN).with_repetition(Repetition::REQUIRED).build(),
    }
}

/// Values that are there, and for each row whether it has one.
fn split<T>(all: Vec<Option<T>>) -> (Vec<T>, Vec<i16>) {
    let levels = all.iter().map(|v| i16::from(v.is_some())).collect();
    (all.into_iter().flatten().collect(), levels)
}

/// Groups as CSV with a header; the keys come first.
pub fn groups_csv(groups: &[super::group::Group], keys: &[Key]) -> Result<Vec<u8>, csv::Error> {
    let mut out = csv::Writer::from_writer(Vec::new());
    let figures = [
        "emulated",
        "rows",
        "rejected",
        "better",
        "worse",
        "no_difference",
        "median_tok_s",
        "tok_s_min",
        "tok_s_max",
        "median_effect",
        "effect_min",
        "effect_max",
    ];
    out.write_record(keys.iter().map(Key::title).chain(figures))?;
    let number = |n: Option<f64>| n.map(|n| n.to_string()).unwrap_or_default();
    for g in groups {
        let counts = [g.rows, g.rejected, g.better, g.worse, g.no_difference].map(|n| n.to_string());
        let (speeds, effects) = (g.tok_s_range, g.effect_range);
        let figures = [
            g.median_tok_s,
            speeds.map(|r| r.0),
            speeds.map(|r| r.1),
            g.median_effect,
            effects.map(|r| r.0),
            effects.map(|r| r.1),
        ];
        let rest = std::iter::once(g.emulated.to_string()).chain(counts).chain(figures.map(number));
        out.write_record(g.key.iter().cloned().chain(rest))?;
    }
    out.into_inner().map_err(|e| e.into_error().into())
}
