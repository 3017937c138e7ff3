//! Traces as Parquet: the same rows, the same report, and an error with file and column for whatever is wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::ids::{DriveId, ExpertId, LayerId};
use argodrive::source::Phase;
use argodrive::trace::events::{BarrierRecord, Cause, Outcome, Purpose, ReadEvent, ReadResult};
use argodrive::trace::log::{self, TRACE_VERSION, TraceBuffer, TraceCapacity, TraceDrive, TraceError, TraceHeader};
use argodrive::trace::parquet::write::convert;
use argodrive::trace::parquet::{keys, schema};
use argodrive::trace::stream;
use parquet::basic::Compression;
use parquet::data_type::Int64Type;
use parquet::file::metadata::{KeyValue, ParquetMetaDataBuilder, ParquetMetaDataWriter};
use parquet::file::properties::WriterProperties;
use parquet::file::reader::FileReader;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;
use proptest::prelude::*;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

fn header() -> TraceHeader {
    let drive = |id: u8| TraceDrive {
        id: DriveId(id),
        name: format!("d{id}"),
        path: "/x".into(),
        emulated: true,
        device_number: 0,
    };
    TraceHeader::new((0..3).map(drive).collect())
}

fn read(n: u64) -> ReadEvent {
    ReadEvent {
        step: n / 40,
        layer: LayerId((n % 7) as u16),
        expert: ExpertId((n % 400) as u16),
        drive: DriveId((n % 3) as u8),
        replica: (n % 2) as u8,
        part: 0,
        parts: 1,
        offset: n.wrapping_mul(0x9E37_79B9_7F4A_7C15),
        bytes: 26_624,
        purpose: if n.is_multiple_of(5) { Purpose::Prefetch } else { Purpose::Demand },
        issued_in: n / 8,
        barrier: (n % 11 != 3).then_some(n / 8),
        queued_ns: n * 100,
        submitted_ns: n * 100 + 7,
        completed_ns: n * 100 + 90,
        result: ReadResult::Ok,
        outcome: Outcome::Demand,
    }
}

fn barrier(n: u64) -> BarrierRecord {
    BarrierRecord {
        barrier: n,
        step: n / 5,
        phase: Phase::Decode,
        pos: n / 5,
        rows: 1,
        layer: LayerId((n % 7) as u16),
        width: 8,
        hits: 0,
        prefetch_hits: 0,
        bytes: 8 * 26_624,
        open_ns: n * 800,
        first_ns: n * 800 + 90,
        last_ns: n * 800 + 790,
        close_ns: n * 800 + 795,
        stall_ns: 790,
        straggler: (!n.is_multiple_of(4)).then_some(DriveId((n % 3) as u8)),
        gap_drive_ns: 100,
        gap_read_ns: 100,
        bound_layout_ns: n.is_multiple_of(2).then_some(500),
        bound_drives_ns: None,
        cause: Cause::BigShare,
    }
}

/// Folders with the same trace as CSV and as Parquet.
fn both(root: &Path, reads: &[ReadEvent], barriers: &[BarrierRecord]) -> (std::path::PathBuf, std::path::PathBuf) {
    let capacity = TraceCapacity { reads: reads.len(), barriers: barriers.len() };
    let mut buffer = TraceBuffer::with_capacity(capacity);
    reads.iter().for_each(|r| buffer.push_read(*r));
    barriers.iter().for_each(|b| buffer.push_barrier(*b));
    let (csv, parquet) = (root.join("csv"), root.join("parquet"));
    log::write(&csv, &header(), &buffer).unwrap();
    fs::create_dir_all(&parquet).unwrap();
    for table in [schema::reads(), schema::barriers()] {
        convert(&csv, &parquet, &header(), &table, false).unwrap();
    }
    log::write_header(&parquet, &header()).unwrap();
    (csv, parquet)
}

fn small(root: &Path) -> std::path::PathBuf {
    let reads: Vec<ReadEvent> = (0..200).map(read).collect();
    let barriers: Vec<BarrierRecord> = (0..25).map(barrier).collect();
    both(root, &reads, &barriers).1
}

fn all_reads(folder: &Path) -> Result<Vec<ReadEvent>, TraceError> {
    let mut stream = stream::reads(folder, 3, false)?;
    let mut all = Vec::new();
    while let Some(read) = stream.next_value()? {
        all.push(read);
    }
    Ok(all)
}

fn all_barriers(folder: &Path) -> Result<Vec<BarrierRecord>, TraceError> {
    let mut stream = stream::barriers(folder, 3, false)?;
    let mut all = Vec::new();
    while let Some(barrier) = stream.next_value()? {
        all.push(barrier);
    }
    Ok(all)
}

fn refusal(folder: &Path) -> String {
    all_reads(folder).expect_err("such a file must be refused").to_string()
}

#[test]
fn many_rows_come_back_one_by_one_across_pages_and_groups() {
    let dir = tempfile::tempdir().unwrap();
    let reads: Vec<ReadEvent> = (0..300_000).map(read).collect();
    let barriers: Vec<BarrierRecord> = (0..37_500).map(barrier).collect();
    let (csv, parquet) = both(dir.path(), &reads, &barriers);
    assert_eq!(all_reads(&parquet).unwrap(), reads);
    assert_eq!(all_barriers(&parquet).unwrap(), barriers);
    let size = |folder: &Path, name: &str| fs::metadata(folder.join(name)).unwrap().len();
    assert!(size(&parquet, "reads.parquet") * 3 < size(&csv, "reads.csv"));
    let mut names: Vec<_> = fs::read_dir(&parquet).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["barriers.parquet", "reads.parquet", "trace.json"], "no temporary file stays behind");
    let file = SerializedFileReader::new(File::open(parquet.join("reads.parquet")).unwrap()).unwrap();
    let pairs = file.metadata().file_metadata().key_value_metadata().unwrap();
    let value = |key: &str| pairs.iter().find(|p| p.key == key).unwrap().value.clone().unwrap();
    assert_eq!(
        (value(keys::VERSION).as_str(), value(keys::TABLE).as_str()),
        (TRACE_VERSION.to_string().as_str(), "reads")
    );
    assert_eq!(value(keys::CLOCK), header().clock);
    assert_eq!(serde_json::from_str::<TraceHeader>(&value(keys::HEADER)).unwrap(), header());
    assert_eq!(file.metadata().num_row_groups(), 2);

    // the report's columns are the same values, the others are left out
    let mut some = stream::wanted_reads(&parquet, 3, false, stream::Wanted::Report).unwrap();
    for want in &reads[..20_000] {
        let want = ReadEvent { step: 0, replica: 0, offset: 0, ..*want };
        assert_eq!(some.next_value().unwrap(), Some(want));
    }
}

fn drained<T>(stream: Result<stream::Stream<T>, TraceError>) -> Result<Vec<T>, TraceError> {
    let mut stream = stream?;
    let mut all = Vec::new();
    while let Some(value) = stream.next_value()? {
        all.push(value);
    }
    Ok(all)
}

#[test]
fn windows_and_routes_come_back_from_parquet_as_from_csv() {
    let dir = tempfile::tempdir().unwrap();
    let (csv, parquet) = (dir.path().join("csv"), dir.path().join("parquet"));
    fs::create_dir_all(&csv).unwrap();
    fs::create_dir_all(&parquet).unwrap();
    let mut windows = "t_ms,scope,name,reader_bytes,reader_reads,inflight_bytes,device_bytes,device_reads,\
        device_io_ms,partial\n"
        .to_owned();
    let mut routes = "step,phase,pos,layer,expert,weight,kept\n".to_owned();
    for n in 0..20_000u64 {
        let ms = n as f64 * 10.0 + (n % 7) as f64 * 0.000_001;
        windows += &match n % 2 {
            0 => format!("{ms},drive,d{},{},{},{},,,,{}\n", n % 3, n * 4096, n, n % 5, u8::from(n == 0)),
            _ => format!("{ms},device,sd{},,,,{},,{},0\n", n % 3, u64::MAX - n, (n % 9) as f64 * 0.125),
        };
        let weight = f32::from_bits(0x3400_0000 + n as u32 * 7919);
        routes += &format!("{},decode,{n},{},{},{weight},{}\n", n / 9, n % 7, n % 896, n % 2);
    }
    fs::write(csv.join("windows.csv"), &windows).unwrap();
    fs::write(csv.join("routes.csv"), &routes).unwrap();
    for table in [schema::windows(), schema::routes()] {
        convert(&csv, &parquet, &header(), &table, false).unwrap();
    }
    assert!(stream::has_windows(&parquet) && !parquet.join("windows.csv").exists());
    let want = drained(stream::windows(&csv, false)).unwrap();
    assert_eq!((want.len(), want[6].1, want[6].0.t_ms), (20_000, 0.0, 60.000_006), "with the end of the one before");
    assert_eq!(drained(stream::windows(&parquet, false)).unwrap(), want);
    let want = drained(stream::routes(&csv, false)).unwrap();
    assert_eq!(want.len(), 20_000);
    assert_eq!(drained(stream::routes(&parquet, false)).unwrap(), want);

    // what a CSV may not say, a conversion refuses too
    for (name, text, from, to, word) in [
        ("windows", &windows, "\n60.000006,", "\n0,", "d0` has a window at"),
        ("windows", &windows, ",d2,", ",,", "needs a name"),
        ("routes", &routes, "\n5,decode", "\n3,decode", "comes after pass"),
    ] {
        fs::write(csv.join(format!("{name}.csv")), text.replacen(from, to, 1)).unwrap();
        let table = schema::tables().into_iter().find(|t| t.name == name).unwrap();
        let message = convert(&csv, &parquet, &header(), &table, false).unwrap_err().to_string();
        assert!(message.contains(word) && message.contains(name), "{message}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_numbers_survive(
        rows in proptest::collection::vec((any::<u64>(), any::<u32>(), any::<Option<u64>>(), 0u8..3, 0u8..255), 0..40),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let reads: Vec<ReadEvent> = rows.iter().map(|&(big, mid, barrier, drive, part)| ReadEvent {
            step: big,
            layer: LayerId(mid as u16),
            expert: ExpertId((mid >> 16) as u16),
            drive: DriveId(drive),
            replica: part,
            part,
            parts: 255,
            offset: big,
            bytes: big ^ u64::from(mid),
            barrier,
            issued_in: u64::MAX - big,
            queued_ns: big,
            submitted_ns: u64::from(mid),
            completed_ns: u64::MAX,
            result: ReadResult::Timeout,
            outcome: Outcome::Wasted,
            purpose: Purpose::Kv,
        }).collect();
        let (csv, parquet) = both(dir.path(), &reads, &[]);
        prop_assert_eq!(all_reads(&parquet).unwrap(), all_reads(&csv).unwrap());
        prop_assert_eq!(all_barriers(&parquet).unwrap(), vec![]);
    }
}

#[test]
fn whatever_byte_is_damaged_the_file_is_named_and_nothing_panics() {
    let dir = tempfile::tempdir().unwrap();
    let folder = small(dir.path());
    let path = folder.join("reads.parquet");
    let (good, want) = (fs::read(&path).unwrap(), all_reads(&folder).unwrap());
    let mut refused = 0;
    for at in (0..good.len()).step_by(3) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&path, &bad).unwrap();
        match all_reads(&folder) {
            // statistics, sizes that nobody needs, words of the metadata
            Ok(rows) => assert_eq!(rows, want, "byte {at}"),
            Err(e) => {
                refused += 1;
                assert!(e.to_string().contains("reads.parquet"), "{e}");
            }
        }
    }
    assert!(refused * 9 > good.len(), "{refused} of {}", good.len());
    for cut in (0..good.len()).step_by(7) {
        fs::write(&path, &good[..cut]).unwrap();
        assert!(refusal(&folder).contains("does not end with `PAR1`"), "cut at {cut}");
    }
}

#[test]
fn damaged_values_name_their_column() {
    let dir = tempfile::tempdir().unwrap();
    let folder = small(dir.path());
    let path = folder.join("reads.parquet");
    let file = SerializedFileReader::new(File::open(&path).unwrap()).unwrap();
    let good = fs::read(&path).unwrap();
    for (index, column) in schema::reads().columns.iter().enumerate() {
        let (from, len) = file.metadata().row_group(0).column(index).byte_range();
        let mut bad = good.clone();
        bad[(from + len / 2) as usize] ^= 0x10;
        fs::write(&path, &bad).unwrap();
        let message = refusal(&folder);
        assert!(message.contains(&format!("column `{}`", column.name)) && message.contains("digest"), "{message}");
    }
}

/// Writes the data of the good file with a footer of which `change` was made.
fn with_footer(path: &Path, change: impl Fn(ParquetMetaDataBuilder) -> ParquetMetaDataBuilder) {
    let file = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    let metadata = change(file.metadata().clone().into_builder()).build();
    let good = fs::read(path).unwrap();
    let footer = u32::from_le_bytes(good[good.len() - 8..good.len() - 4].try_into().unwrap()) as usize;
    let mut bytes = good[..good.len() - 8 - footer].to_vec();
    ParquetMetaDataWriter::new(&mut bytes, &metadata).finish().unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn absurd_row_counts_are_refused_before_anything_is_allocated() {
    let dir = tempfile::tempdir().unwrap();
    for (rows, values, says) in [
        (1 << 50, 200, "column `step`: row group 0: 200 values for 1125899906842624 rows"),
        (1 << 50, 1 << 50, "column `step`: ends before the 1125899906842624 rows that its group should have"),
        (-5, -5, "row group 0 should have -5 rows"),
    ] {
        let folder = small(dir.path());
        with_footer(&folder.join("reads.parquet"), |mut builder| {
            let groups = builder.take_row_groups().into_iter().map(|group| {
                let columns =
                    group.columns().iter().map(|c| c.clone().into_builder().set_num_values(values).build().unwrap());
                let columns = columns.collect();
                group.into_builder().set_num_rows(rows).set_column_metadata(columns).build().unwrap()
            });
            builder.set_row_groups(groups.collect())
        });
        let message = refusal(&folder);
        assert!(message.contains(says), "{message}");
    }
    let folder = small(dir.path());
    let path = folder.join("reads.parquet");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.len() - 8;
    bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    assert!(refusal(&folder).contains("its footer should have 4294967295 bytes"));
}

/// A file with these columns, one `i64` each, and the metadata given.
fn foreign(path: &Path, fields: Vec<Type>, pairs: &[(&str, &str)], compression: Compression) {
    let schema = Type::group_type_builder("x").with_fields(fields.into_iter().map(Arc::new).collect()).build().unwrap();
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), Arc::new(schema), properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    while let Some(mut column) = group.next_column().unwrap() {
        column.typed::<Int64Type>().write_batch(&[1, 2], Some(&[1, 1]), None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    for (key, value) in pairs {
        writer.append_key_value_metadata(KeyValue::new((*key).to_owned(), (*value).to_owned()));
    }
    writer.close().unwrap();
}

#[test]
fn foreign_files_other_tables_types_and_newer_versions_say_so() {
    use parquet::basic::{Repetition, Type as Physical};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("reads.parquet");
    let field = |name: &str, repetition| {
        Type::primitive_type_builder(name, Physical::INT64).with_repetition(repetition).build().unwrap()
    };
    let own = [(keys::VERSION, "1"), (keys::TABLE, "reads")];
    type Case<'a> = (Vec<Type>, &'a [(&'a str, &'a str)], &'a str);
    let cases: [Case<'_>; 5] = [
        (vec![field("step", Repetition::REQUIRED)], &[], "its metadata has no `argodrive.trace.version`"),
        (
            vec![field("step", Repetition::REQUIRED)],
            &[(keys::VERSION, "99")],
            "trace version 99, this program reads up to 2",
        ),
        (
            vec![field("barrier", Repetition::REQUIRED)],
            &[own[0], (keys::TABLE, "barriers")],
            "the table `barriers`, expected",
        ),
        (vec![field("step", Repetition::OPTIONAL)], &own, "column `step`: is not an unsigned whole number of 64 bits"),
        (vec![field("stop", Repetition::REQUIRED)], &own, "column `step`: is missing; `stop` stands in its place"),
    ];
    for (fields, pairs, says) in cases {
        foreign(&path, fields, pairs, Compression::UNCOMPRESSED);
        let message = refusal(dir.path());
        assert!(message.contains("reads.parquet") && message.contains(says), "{message}");
    }
    for junk in [&b""[..], b"PAR1", b"PAR1PAR1PAR1", b"step,layer\n1,2\n", b"PAR1\0\0\0\0\x04\0\0\0PAR1"] {
        fs::write(&path, junk).unwrap();
        assert!(refusal(dir.path()).contains("reads.parquet"));
    }
    fs::remove_file(&path).unwrap();
    assert!(refusal(dir.path()).contains("reads.csv"), "nothing there: the file that runs write is named");
}

#[test]
fn rows_are_checked_on_the_way_in_and_out() {
    let dir = tempfile::tempdir().unwrap();
    let reads: Vec<ReadEvent> = (0..10).map(read).collect();
    let (csv, parquet) = both(dir.path(), &reads, &[]);
    // a trace that lost a drive: the rows are no longer what the trace says
    let mut few = stream::reads(&parquet, 2, false).unwrap();
    assert!(few.next_value().is_ok() && few.next_value().is_ok());
    let message = few.next_value().unwrap_err().to_string();
    assert!(
        message.ends_with("reads.parquet:3: column 4 `drive`: drive 2 is not among the 2 drives of trace.json"),
        "{message}"
    );
    let mut lenient = stream::reads(&parquet, 2, true).unwrap();
    let mut kept = 0;
    while lenient.next_value().unwrap().is_some() {
        kept += 1;
    }
    assert_eq!((kept, lenient.skipped().rows), (7, 3));

    let text = fs::read_to_string(csv.join("reads.csv")).unwrap();
    fs::write(csv.join("reads.csv"), text.replacen(",26624,", ",NaN,", 1)).unwrap();
    fs::remove_file(parquet.join("reads.parquet")).unwrap();
    let message = convert(&csv, &parquet, &header(), &schema::reads(), false).unwrap_err().to_string();
    assert!(message.contains("reads.csv:2: column 9 `bytes`: `NaN`"), "{message}");
    assert!(!parquet.join("reads.parquet").exists());
    let done = convert(&csv, &parquet, &header(), &schema::reads(), true).unwrap();
    assert_eq!((done.rows, done.skipped.rows), (9, 1));
    assert_eq!(all_reads(&parquet).unwrap(), reads[1..]);
}
