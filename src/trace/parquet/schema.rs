//! The tables of a trace folder with the type of every column, and the Parquet schema that follows from it. Plain
//! tables; reads no file.

use super::super::log::{BARRIER_COLUMNS, READ_COLUMNS};
use ::parquet::basic::{ConvertedType, LogicalType, Repetition, Type as Physical};
use ::parquet::errors::Result;
use ::parquet::schema::types::{Type, TypePtr};
use std::sync::Arc;

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number of this many bits.
    Whole(u8),
    /// A whole number of 64 bits that mostly ascends from row to row, such as a time: stored as differences.
    Ascending,
    /// Text, mostly one of a few words.
    Word,
    /// A decimal number.
    Decimal,
}

/// One column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnSpec {
    /// Its name, in both forms.
    pub name: &'static str,
    /// What it holds.
    pub kind: Kind,
    /// Whether it may be empty.
    pub optional: bool,
}

/// One table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Its name; the files are `<name>.csv` and `<name>.parquet`.
    pub name: &'static str,
    /// Its columns, in order.
    pub columns: Vec<ColumnSpec>,
}

const U8: Kind = Kind::Whole(8);
const U16: Kind = Kind::Whole(16);
const U32: Kind = Kind::Whole(32);
const U64: Kind = Kind::Whole(64);

const READ_KINDS: [Kind; READ_COLUMNS.len()] = [
    U64,
    U16,
    U16,
    U8,
    U8,
    U8,
    U8,
    U64,
    U64,
    Kind::Word,
    Kind::Ascending,
    Kind::Ascending,
    Kind::Ascending,
    Kind::Ascending,
    Kind::Ascending,
    Kind::Word,
    Kind::Word,
];

const BARRIER_KINDS: [Kind; BARRIER_COLUMNS.len()] = [
    Kind::Ascending,
    Kind::Ascending,
    Kind::Word,
    Kind::Ascending,
    U32,
    U16,
    U32,
    U32,
    U32,
    U64,
    Kind::Ascending,
    Kind::Ascending,
    Kind::Ascending,
    Kind::Ascending,
    U64,
    U8,
    U64,
    U64,
    U64,
    U64,
    Kind::Word,
];

/// Columns of `reads` that attribution, tables and verdict look at: all but `step`, `replica` and `offset`.
pub const READS_FOR_REPORT: [usize; 14] = [1, 2, 3, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16];

/// `reads`.
pub fn reads() -> TableSpec {
    let names = READ_COLUMNS.map(|c| c.0);
    table("reads", names.into_iter().zip(READ_KINDS).map(|(name, kind)| column(name, kind, name == "barrier")))
}

/// `barriers`.
pub fn barriers() -> TableSpec {
    let optional = ["straggler", "bound_layout_ns", "bound_drives_ns"];
    let names = BARRIER_COLUMNS.map(|c| c.0);
    let columns = names.into_iter().zip(BARRIER_KINDS);
    table("barriers", columns.map(|(name, kind)| column(name, kind, optional.contains(&name))))
}

/// `windows`.
pub fn windows() -> TableSpec {
    let columns = [
        column("t_ms", Kind::Decimal, false),
        column("scope", Kind::Word, false),
        column("name", Kind::Word, false),
        column("reader_bytes", U64, true),
        column("reader_reads", U64, true),
        column("inflight_bytes", U64, true),
        column("device_bytes", U64, true),
        column("device_reads", U64, true),
        column("device_io_ms", Kind::Decimal, true),
        column("partial", U8, false),
    ];
    table("windows", columns)
}

/// `routes`.
pub fn routes() -> TableSpec {
    let columns = [
        column("step", Kind::Ascending, false),
        column("phase", Kind::Word, false),
        column("pos", Kind::Ascending, false),
        column("layer", U16, false),
        column("expert", U16, false),
        column("weight", Kind::Decimal, false),
        column("kept", U8, false),
    ];
    table("routes", columns)
}

/// All of them.
pub fn tables() -> [TableSpec; 4] {
    [reads(), barriers(), windows(), routes()]
}

fn column(name: &'static str, kind: Kind, optional: bool) -> ColumnSpec {
    ColumnSpec { name, kind, optional }
}

fn table(name: &'static str, columns: impl IntoIterator<Item = ColumnSpec>) -> TableSpec {
    TableSpec { name, columns: columns.into_iter().collect() }
}

impl ColumnSpec {
    /// The largest whole number that it holds.
    pub fn max(&self) -> u64 {
        match self.kind {
            Kind::Whole(bits) if bits < 64 => (1 << bits) - 1,
            _ => u64::MAX,
        }
    }

    /// How Parquet stores it.
    pub fn physical(&self) -> Physical {
        match self.kind {
            Kind::Whole(bits) if bits <= 32 => Physical::INT32,
            Kind::Whole(_) | Kind::Ascending => Physical::INT64,
            Kind::Word => Physical::BYTE_ARRAY,
            Kind::Decimal => Physical::DOUBLE,
        }
    }

    /// What an error says it should be.
    pub fn expected(&self) -> String {
        let kind = match self.kind {
            Kind::Whole(bits) => format!("an unsigned whole number of {bits} bits"),
            Kind::Ascending => "an unsigned whole number of 64 bits".into(),
            Kind::Word => "text".into(),
            Kind::Decimal => "a decimal number".into(),
        };
        let empty = if self.optional { "that may be empty" } else { "that is never empty" };
        format!("{kind} ({}) {empty}", self.physical())
    }

    fn logical(&self) -> Option<LogicalType> {
        match self.kind {
            Kind::Whole(bits) => Some(LogicalType::integer(bits as i8, false)),
            Kind::Ascending => Some(LogicalType::integer(64, false)),
            Kind::Word => Some(LogicalType::String),
            Kind::Decimal => None,
        }
    }

    /// Whether a column of a file is of this type: the same storage, and the same way to read its bits.
    pub fn fits(&self, seen: &Type) -> bool {
        let info = seen.get_basic_info();
        let repetition = if self.optional { Repetition::OPTIONAL } else { Repetition::REQUIRED };
        let unsigned = match self.kind {
            Kind::Whole(8) => Some(ConvertedType::UINT_8),
            Kind::Whole(16) => Some(ConvertedType::UINT_16),
            Kind::Whole(32) => Some(ConvertedType::UINT_32),
            Kind::Whole(_) | Kind::Ascending => Some(ConvertedType::UINT_64),
            Kind::Word | Kind::Decimal => None,
        };
        seen.is_primitive()
            && seen.get_physical_type() == self.physical()
            && info.has_repetition()
            && info.repetition() == repetition
            && unsigned.is_none_or(|converted| info.converted_type() == converted)
    }
}

impl TableSpec {
    /// The schema of its Parquet form.
    pub fn schema(&self) -> Result<TypePtr> {
        let mut fields = Vec::with_capacity(self.columns.len());
        for column in &self.columns {
            let repetition = if column.optional { Repetition::OPTIONAL } else { Repetition::REQUIRED };
            let field = Type::primitive_type_builder(column.name, column.physical()).with_repetition(repetition);
            fields.push(Arc::new(field.with_logical_type(column.logical()).build()?));
        }
        Ok(Arc::new(Type::group_type_builder(self.name).with_fields(fields).build()?))
    }
}
