//! A trace as a page and as Parquet, as a user gets them from the command line.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::replay::windows::WINDOW_COLUMNS;
use argodrive::trace::parquet::schema;
use assert_cmd::Command;
use predicates::str::contains;
use std::fs;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn argodrive(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("argodrive").unwrap();
    command.current_dir(folder).args(arguments);
    command
}

fn stdout(folder: &Path, arguments: &[&str]) -> String {
    String::from_utf8(argodrive(folder, arguments).assert().success().get_output().stdout.clone()).unwrap()
}

/// The hand-made trace of `toy-exact.csv` in `toy`.
fn toy(folder: &Path) {
    let file = format!("{ROOT}/tests/fixtures/traces/toy-exact.csv");
    argodrive(folder, &["trace", "import", &file, "--format", "per-read", "--out", "toy"]).assert().success();
}

#[test]
fn a_page_holds_every_table_and_figure_and_fetches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    toy(dir.path());
    let json = dir.path().join("toy/trace.json");
    let mut header: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let evil = "<script>alert('x')</script>";
    header["drives"][0]["name"] = evil.into();
    header["drives"][1]["emulated"] = true.into();
    fs::write(&json, header.to_string()).unwrap();
    let environment = r#"{"environment": {"cpu": "A <b>CPU</b>", "memory_bytes": 1000000000, "virtualised": null}}"#;
    fs::write(dir.path().join("toy/record.json"), environment).unwrap();
    let says = stdout(dir.path(), &["trace", "report", "toy", "--html", "toy.html"]);
    assert!(says.ends_with("report  toy.html\n"), "{says}");
    let page = fs::read_to_string(dir.path().join("toy.html")).unwrap();

    for table in [
        "Where the time of decoding went",
        "Reads by drive and purpose",
        "Who landed last",
        "Drive map of the run",
        "By cause",
        "By phase",
        "By width",
        "By layer",
        "Barriers with the largest gap",
    ] {
        assert!(page.contains(&format!("<caption>{table}")), "{table}");
    }
    let tables = page.matches("<table>").count();
    assert_eq!((tables, page.matches("</table>").count()), (9, 9));
    assert_eq!(page.matches("<span class=\"emulated\">emulated</span>").count(), tables, "a label beside each");
    assert!(page.contains("EMULATED drives") && page.contains("emulated drives ·"));
    for figure in [
        "What each drive delivered",
        "How many reads each drive had at once",
        "How long reads took",
        "Who landed last",
        "How far the last drive was behind the next-to-last",
        "One step, barrier by barrier",
    ] {
        assert!(page.contains(&format!("<title>{figure}</title>")), "{figure}");
    }
    assert_eq!(page.matches("<figure><svg").count(), 6);
    for fetch in ["http://", "https://", "src=", "href=", "@import", "url(", "fetch(", "XMLHttp"] {
        assert!(!page.contains(fetch), "{fetch}");
    }
    assert!(page.contains("default-src 'none'"));
    assert!(!page.contains(evil) && page.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;"));
    assert_eq!(page.matches("<script").count(), 1, "the page's own");
    assert!(page.contains("A &lt;b&gt;CPU&lt;/b&gt;") && page.contains("<dd>1.00 GB</dd>"));
    assert!(page.contains("prefers-color-scheme:dark") && page.contains("@media print"));
    assert!(page.contains("width=device-width"));
    assert_eq!(page.matches('<').count(), page.matches('>').count() - script_arrows(&page));

    // the pictures' numbers are those of the tables
    let report: serde_json::Value =
        serde_json::from_str(&stdout(dir.path(), &["trace", "report", "toy", "--json"])).unwrap();
    let rows = report["drives"].as_array().unwrap();
    let longest = rows.iter().filter_map(|r| r["service"]["max_ns"].as_u64()).max().unwrap();
    let gap = report["all"]["gap_drive"]["max_ns"].as_u64().unwrap();
    for ns in [longest, gap] {
        let max = format!("max {}", argodrive::report::units::duration(ns));
        assert!(page.contains(&max), "{max}");
    }

    // the same numbers as the text
    let text = stdout(dir.path(), &["trace", "report", "toy"]);
    let verdict = text.lines().find(|l| l.contains("bound")).unwrap();
    assert!(page.contains(verdict.split(':').next().unwrap()), "{verdict}");
    assert!(page.contains("bound: layout"), "both bounds have a column");

    argodrive(dir.path(), &["trace", "report", "toy", "--html", "no/such/x.html"])
        .assert()
        .code(2)
        .stderr(contains("--html no/such/x.html"));
}

/// `>` of arrows in the script, which open no element.
fn script_arrows(page: &str) -> usize {
    let script = page.split("<script>").nth(1).unwrap();
    script.matches("=>").count()
}

#[test]
fn parquet_tells_the_same_as_csv_in_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    toy(at);
    let said = stdout(at, &["results", "parquet", "toy", "--out", "both/toy"]);
    assert!(said.contains("both/toy/reads.parquet") && said.contains("both/toy/barriers.parquet"), "{said}");
    let rates = "d0=1GB/s:10us,d1=1GB/s:10us,d2=1GB/s:10us";
    let header: serde_json::Value = serde_json::from_slice(&fs::read(at.join("toy/trace.json")).unwrap()).unwrap();
    let names: Vec<&str> = header["drives"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    let rates: Vec<String> =
        names.iter().map(|n| format!("{n}={}", rates.split_once('=').unwrap().1.split(',').next().unwrap())).collect();
    let rates = rates.join(",");
    for more in [&[][..], &["--json"], &["--rates", &rates], &["--top", "3", "--barriers", "b.csv"]] {
        let one = stdout(at, &[&["trace", "report", "toy"], more].concat());
        let rows = fs::read(at.join("b.csv")).ok();
        assert_eq!(stdout(at, &[&["trace", "report", "both/toy"], more].concat()), one);
        assert_eq!(fs::read(at.join("b.csv")).ok(), rows);
    }
    for format in ["perfetto", "hdr"] {
        let export = |trace: &str, out: &str| {
            stdout(at, &["trace", "export", trace, "--format", format, "--out", out]);
            fs::read(at.join(out)).unwrap()
        };
        assert_eq!(export("toy", "a"), export("both/toy", "b"), "{format}");
    }
    let figures = |trace: &str, out: &str| {
        stdout(at, &["trace", "replay", trace, "--plot-dir", out]);
        let mut files: Vec<_> = fs::read_dir(at.join(out)).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        files.iter().map(|f| (f.file_name().unwrap().to_owned(), fs::read(f).unwrap())).collect::<Vec<_>>()
    };
    let (csv, parquet) = (figures("toy", "f1"), figures("both/toy", "f2"));
    assert_eq!(csv.len(), 12, "six figures, SVG and PNG");
    assert!(csv == parquet, "the same pictures, byte for byte");
    // beside the CSV, which then is what is read
    stdout(at, &["results", "parquet", "toy", "--json"]);
    fs::write(at.join("toy/reads.parquet"), b"PAR1").unwrap();
    stdout(at, &["trace", "report", "toy"]);
    fs::remove_file(at.join("toy/reads.csv")).unwrap();
    argodrive(at, &["trace", "report", "toy"]).assert().code(2).stderr(contains("reads.parquet: is cut off"));
}

#[test]
fn windows_without_a_read_are_drawn_with_the_drives_that_a_map_names_in_either_form() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let mut log = "t_s,dev,v1,v2,v3\n".to_owned();
    for tick in 0..40u64 {
        log +=
            &format!("{}.{},disk0,{},{},{}\n", tick / 5, tick % 5 * 2, tick * 1_000_000, tick * 10, tick * 7_000_000);
        log += &format!("{}.{},disk4,{},{},{}\n", tick / 5, tick % 5 * 2, tick * 500_000, tick * 5, tick * 9_000_000);
    }
    fs::write(at.join("s.csv"), log).unwrap();
    fs::write(at.join("s.map"), "internal=disk0\n").unwrap();
    stdout(at, &["trace", "import", "--format", "sampler", "--map", "s.map", "--out", "t", "s.csv"]);
    stdout(at, &["results", "parquet", "t", "--out", "both/t"]);
    let said = stdout(at, &["trace", "report", "t"]);
    assert_eq!(stdout(at, &["trace", "report", "both/t"]), said);
    let drawn = |trace: &str, out: &str| {
        stdout(at, &["trace", "replay", trace, "--plot-dir", out]);
        fs::read_to_string(at.join(out).join("timeline-1s.svg")).unwrap()
    };
    let svg = drawn("t", "f1");
    assert_eq!(drawn("both/t", "f2"), svg);
    assert!(svg.contains("disk0 (device of internal)") && svg.contains("disk4 (device)"), "{svg}");
    assert!(svg.contains("5.00 MB/s") && svg.contains("2.50 MB/s"), "1 MB in each 0.2 s, and half of it: {svg}");
}

#[test]
fn windows_and_routes_keep_their_types() {
    use parquet::file::serialized_reader::SerializedFileReader;
    let dir = tempfile::tempdir().unwrap();
    toy(dir.path());
    let trace = dir.path().join("toy");
    let windows = schema::windows();
    assert!(windows.columns.iter().map(|c| c.name).eq(WINDOW_COLUMNS.map(|c| c.0)));
    let header = WINDOW_COLUMNS.map(|c| c.0).join(",");
    fs::write(trace.join("windows.csv"), format!("{header}\n10,drive,d0,5,1,0,,,,0\n20.5,device,sda,,,,7,2,0.25,1\n"))
        .unwrap();
    let routes = "step,phase,pos,layer,expert,weight,kept\n0,prefill,0,3,250,0.125,1\n1,verify,9,3,7,0.5,0\n";
    fs::write(trace.join("routes.csv"), routes).unwrap();
    let said = stdout(dir.path(), &["results", "parquet", "toy"]);
    assert!(said.contains("toy/windows.parquet") && said.contains("toy/routes.parquet"), "{said}");
    let rows = |name: &str| {
        let file = SerializedFileReader::new(fs::File::open(trace.join(name)).unwrap()).unwrap();
        file.into_iter().map(|row| row.unwrap().to_string()).collect::<Vec<_>>()
    };
    let seen = rows("windows.parquet");
    assert!(seen[0].contains("t_ms: 10.0") && seen[0].contains("device_bytes: null"), "{seen:?}");
    assert!(seen[1].contains("name: \"sda\"") && seen[1].contains("device_io_ms: 0.25"), "{seen:?}");
    let seen = rows("routes.parquet");
    assert!(seen[0].contains("weight: 0.125") && seen[1].contains("phase: \"verify\""), "{seen:?}");

    fs::write(trace.join("routes.csv"), routes.replace("0.125", "NaN")).unwrap();
    argodrive(dir.path(), &["results", "parquet", "toy"])
        .assert()
        .code(2)
        .stderr(contains("routes.csv:2: column 6 `weight`: `NaN` is not a finite number"));
    argodrive(dir.path(), &["results", "parquet", "toy", "--lenient"])
        .assert()
        .success()
        .stdout(contains("left out: 1 rows"));
    let empty = tempfile::tempdir().unwrap();
    fs::copy(trace.join("trace.json"), empty.path().join("trace.json")).unwrap();
    argodrive(empty.path(), &["results", "parquet", "."]).assert().code(2).stderr(contains("has none of reads.csv"));
}
