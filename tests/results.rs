//! `argodrive results` with the real binary over records that it measured itself: what is listed, what is named and left out,
//! which verdicts have outlived their inputs, what leaves the machine in a bundle, and what is not taken in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::RowAccessor;
use prepared::{Drives, argodrive, has, json_of, outcome, policy, refused, tiny_store};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A folder with a plan, a policy, a prompt, and results of all kinds that were measured with them.
struct Lab {
    drives: Drives,
    plan: PathBuf,
}

impl Lab {
    fn new() -> Self {
        let drives = Drives::new(2, None);
        let plan = drives.staged(tiny_store(), "full-mirror");
        let lab = Self { drives, plan };
        fs::copy(policy("round-robin"), lab.at("policy.toml")).unwrap();
        fs::write(lab.at("prompt.txt"), "abc").unwrap();
        lab
    }

    fn at(&self, name: &str) -> PathBuf {
        self.drives.dir.path().join(name)
    }

    fn results(&self) -> PathBuf {
        self.at("results")
    }

    fn decode(&self) {
        let mut command = argodrive(["decode", "--assert", "--max-new", "3", "--store"]);
        command.arg(tiny_store()).arg("--plan").arg(&self.plan).arg("--drives").arg(&self.drives.toml);
        command.arg("--prompt-file").arg(self.at("prompt.txt")).arg("--out").arg(self.results());
        command.assert().success();
    }

    fn ladder(&self) {
        let mut command = argodrive(["ladder", "--max-new", "3", "--repetitions", "1", "--store"]);
        command.arg(tiny_store()).arg("--drives").arg(&self.drives.toml).arg("--policy").arg(self.at("policy.toml"));
        command.arg("--prompt-file").arg(self.at("prompt.txt")).arg("--out").arg(self.results());
        command.assert().success();
    }

    fn ab(&self) {
        let config = |name: &str, more: &str| {
            let path = self.at(name);
            let text = format!(
                "store = {:?}\nplan = {:?}\ndrives = {:?}\nprompt_file = {:?}\nmax_new = 3\n{more}\n",
                tiny_store(),
                self.plan,
                self.drives.toml,
                self.at("prompt.txt")
            );
            fs::write(&path, text).unwrap();
            path
        };
        let (a, b) = (config("a.toml", ""), config("b.toml", "[reader]\nqueue_depth = 2"));
        let mut command = argodrive(["ab", "--pairs", "2"]);
        command.args([a, b]).arg("--out").arg(self.results()).assert().success();
    }
}

/// One lab that no test changes.
fn lab() -> &'static Lab {
    static CELL: OnceLock<Lab> = OnceLock::new();
    CELL.get_or_init(|| {
        let lab = Lab::new();
        lab.decode();
        lab.ladder();
        lab.ab();
        lab
    })
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// The record files called `name` below a folder, in order.
fn files(folder: &Path, name: &str) -> Vec<PathBuf> {
    let all = prepared::snapshot(folder).into_keys();
    all.filter(|p| p.file_name().is_some_and(|n| n == name)).map(|p| folder.join(p)).collect()
}

fn rows(args: &[&str], folder: &Path) -> Vec<Value> {
    let value = json_of(argodrive(["results"]).args(args).arg("--json").arg(folder));
    value["rows"].as_array().unwrap().clone()
}

fn names(rows: &[Value]) -> Vec<String> {
    rows.iter().map(|r| format!("{} {}", r["kind"].as_str().unwrap(), r["name"].as_str().unwrap())).collect()
}

#[test]
fn everything_that_was_measured_is_listed_filtered_grouped_and_compared() {
    let folder = lab().results();
    let mut listed = names(&rows(&[], &folder));
    listed.sort();
    assert_eq!(listed, ["comparison b", "run decode", "rung rung1", "rung rung2"]);
    // a ladder of two rungs, a warm-up and a run each; an A/A floor of two pairs and two pairs, and one run of decode
    // besides those that a busy machine rejected, which were repeated
    let runs = rows(&["--kind", "run"], &folder);
    let rejected = runs.iter().filter(|r| r["path"].as_str().unwrap().contains("/rejected/")).count();
    assert_eq!(runs.len() - rejected, 4 + 8 + 1);
    let unlisted = format!("{} runs of these are not listed", runs.len());
    let (code, table, stderr) = outcome(argodrive(["results"]).arg(&folder));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(table.lines().all(|l| l.chars().count() <= 80), "{table}");
    has(&table, &["4 rows: 1 too-few, 3 measured", unlisted.as_str(), "ab: b vs a", "rung2"]);
    let (_, same, _) = outcome(argodrive(["results", "list"]).arg(&folder));
    assert_eq!(table, same);

    assert_eq!(names(&rows(&["--where", "queue_depth=2"], &folder)), ["comparison b"]);
    assert_eq!(rows(&["--where", "drive_count=1", "--verdict", "measured"], &folder).len(), 1);
    assert!(rows(&["--emulated"], &folder).is_empty() && rows(&["--since", "2999-01-01"], &folder).is_empty());
    assert_eq!(rows(&["--real", "--since", "1d"], &folder).len(), 4);
    assert_eq!(rows(&["--best", "1", "--kind", "rung"], &folder).len(), 1);
    assert_eq!(names(&rows(&["--sort", "tok_s", "--kind", "comparison"], &folder)), ["comparison b"]);
    for (args, words) in [
        (&["--where", "queue_dept=2"][..], &["did you mean `queue_depth`"][..]),
        (&["--verdict", "beter"], &["better"]),
        (&["--kind", "rungs"], &["did you mean `rung`"]),
        (&["--stale=paln"], &["did you mean `plan`"]),
        (&["--group-by", "modell"], &["did you mean `model`"]),
        (&["--format", "parquet"], &["--out"]),
    ] {
        let (code, stdout, stderr) = outcome(argodrive(["results"]).args(args).arg(&folder));
        assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
        has(&stderr, words);
    }
    refused(&mut argodrive(["results", "comprae"]), &["did you mean `argodrive results compare`?"]);

    let groups = json_of(argodrive(["results", "--group-by", "kind,queue_depth", "--json"]).arg(&folder));
    let groups = groups["groups"].as_array().unwrap();
    let rungs = groups.iter().find(|g| g["key"][0] == "rung").unwrap();
    assert_eq!((&rungs["rows"], &rungs["key"][1]), (&Value::from(2), &Value::from("4")));

    let runs = files(&folder.join("ladder"), "record.json");
    let both = json_of(argodrive(["results", "compare", "--json"]).args([&runs[0], &runs[1]]));
    assert_eq!(both["pairs"].as_array().unwrap().len(), 1);
    has(both["no_winner"].as_str().unwrap(), &["no winner", "argodrive ab"]);
    let campaign = files(&folder, "experiment.json");
    refused(argodrive(["results", "compare"]).args([&runs[0], &campaign[0]]), &["run", "comparison"]);
}

#[test]
fn damaged_records_are_named_and_left_out_and_other_versions_stop_everything() {
    let dir = prepared::folder();
    let folder = dir.path().join("results");
    copy(&lab().results(), &folder);
    let broken = files(&folder.join("decode"), "record.json").remove(0);
    let good = fs::read_to_string(&broken).unwrap();
    fs::write(&broken, &good[..good.len() / 2]).unwrap();
    let (code, stdout, stderr) = outcome(argodrive(["results"]).arg(&folder));
    assert_eq!(code, 0);
    has(&stderr, &["left out", broken.to_str().unwrap()]);
    has(&stdout, &["3 rows"]);
    assert_eq!(outcome(argodrive(["results", "--strict"]).arg(&folder)).0, 1);

    let (found, theirs) = ("\"version\": 1", "\"version\": 2");
    assert!(good.contains(found));
    fs::write(&broken, good.replacen(found, theirs, 1)).unwrap();
    let (out, bundle) = (dir.path().join("out.csv"), dir.path().join("b.tar.gz"));
    let words = [broken.to_str().unwrap(), "has version 2", "--lenient"];
    refused(argodrive(["results", "--out"]).args([&out, &folder]), &words);
    refused(argodrive(["results", "bundle", "--out"]).args([&bundle, &folder]), &words[..2]);
    assert!(!out.exists() && !bundle.exists());
    let (code, _, stderr) = outcome(argodrive(["results", "--lenient"]).arg(&folder));
    assert_eq!(code, 0);
    has(&stderr, &["has version 2"]);
}

#[test]
fn every_format_holds_the_same_rows() {
    let (folder, dir) = (lab().results(), prepared::folder());
    let write = |name: &str| {
        let path = dir.path().join(name);
        argodrive(["results", "--runs", "--out"]).args([&path, &folder]).assert().success();
        path
    };
    let expected = rows(&["--runs"], &folder);
    let mut csv = csv::Reader::from_path(write("r.csv")).unwrap();
    let titles = csv.headers().unwrap().clone();
    let column = |name: &str| titles.iter().position(|t| t == name).unwrap();
    let lines: Vec<csv::StringRecord> = csv.records().map(Result::unwrap).collect();
    let parquet = SerializedFileReader::new(fs::File::open(write("r.parquet")).unwrap()).unwrap();
    let fields = parquet.metadata().file_metadata().schema().get_fields().len();
    assert_eq!(fields, titles.len());
    let stored: Vec<_> = parquet.get_row_iter(None).unwrap().map(Result::unwrap).collect();
    assert_eq!((lines.len(), stored.len()), (expected.len(), expected.len()));
    for ((line, row), want) in lines.iter().zip(&stored).zip(&expected) {
        assert_eq!(&line[column("name")], want["name"].as_str().unwrap());
        assert_eq!(row.get_string(column("path")).unwrap(), want["path"].as_str().unwrap());
        match want["tok_s"].as_f64() {
            // the last digit may differ between two ways to read a number
            Some(rate) => {
                let near = |seen: f64| (seen / rate - 1.0).abs() < 1e-12;
                assert!(near(row.get_double(column("tok_s")).unwrap()) && near(line[column("tok_s")].parse().unwrap()));
            }
            // a ladder's trace has no rate
            None => assert!(row.get_double(column("tok_s")).is_err() && line[column("tok_s")].is_empty()),
        }
        assert_eq!(row.get_long(column("runs")).unwrap(), want["runs"].as_i64().unwrap());
        assert_eq!(row.get_bool(column("emulated")).unwrap(), want["emulated"].as_bool().unwrap());
    }
    let markdown = fs::read_to_string(write("r.md")).unwrap();
    assert_eq!(markdown.lines().filter(|l| l.starts_with("| ")).count(), expected.len() + 1);
    let json: Value = serde_json::from_str(&fs::read_to_string(write("r.json")).unwrap()).unwrap();
    assert_eq!(json["rows"].as_array().unwrap(), &expected);
    // no rows are a file with its columns
    let none = dir.path().join("none.parquet");
    argodrive(["results", "--emulated", "--out"]).args([&none, &folder]).assert().success();
    let none = SerializedFileReader::new(fs::File::open(none).unwrap()).unwrap();
    assert_eq!(none.metadata().file_metadata().schema().get_fields().len(), fields);
}

/// Changed inputs by row, of the inputs that every machine can tell.
fn changed(lab: &Lab) -> Vec<(String, String, Vec<String>)> {
    let args = ["--stale=code,model,plan,drives,prompt,policy,heat,experiment,kernel"];
    let mut out = Vec::new();
    for row in rows(&args, &lab.results()) {
        let judged = &row["inputs"];
        let name = |v: &Value| v["input"].as_str().unwrap().to_string();
        let mut inputs: Vec<String> = judged["changed"].as_array().unwrap().iter().map(name).collect();
        inputs.sort();
        inputs.dedup();
        let state = judged["state"].as_str().unwrap().to_string();
        out.push((row["name"].as_str().unwrap().to_string(), state, inputs));
    }
    out.sort();
    out
}

#[test]
fn verdicts_whose_inputs_have_changed_are_stale_with_the_command_that_measures_again() {
    let lab = Lab::new();
    lab.decode();
    lab.ladder();
    lab.ab();
    let say = |state: &str, b: &[&str], decode: &[&str], rung: &[&str]| {
        let row = |name: &str, inputs: &[&str]| {
            let state = if inputs.is_empty() { "fresh" } else { state };
            (name.to_string(), state.to_string(), inputs.iter().map(|i| i.to_string()).collect::<Vec<_>>())
        };
        assert_eq!(changed(&lab), [row("b", b), row("decode", decode), row("rung1", rung), row("rung2", rung)]);
    };
    say("stale", &[], &[], &[]);

    let (prompt, drives) = (lab.at("prompt.txt"), &lab.drives.toml);
    fs::write(&prompt, "abd").unwrap();
    say("stale", &["prompt"], &["prompt"], &["prompt"]);
    fs::write(&prompt, "abc").unwrap();
    let was = fs::read_to_string(drives).unwrap();
    fs::write(drives, was.replacen("[[drive]]", "[[drive]]\nemulate = { rate = \"1GB/s\" }", 1)).unwrap();
    say("stale", &["drives"], &["drives"], &["drives"]);
    fs::write(drives, was).unwrap();
    let policy_was = fs::read(lab.at("policy.toml")).unwrap();
    fs::copy(policy("full-mirror"), lab.at("policy.toml")).unwrap();
    say("stale", &[], &[], &["policy"]);
    fs::write(lab.at("policy.toml"), policy_was).unwrap();
    let (plan, kept) = (fs::read(&lab.plan).unwrap(), lab.at("kept.json"));
    fs::copy(lab.drives.plan(tiny_store(), "round-robin"), &lab.plan).unwrap();
    say("stale", &["plan"], &["plan"], &[]);
    fs::write(&lab.plan, &plan).unwrap();

    // a file that is gone is not taken for unchanged
    fs::rename(&prompt, &kept).unwrap();
    assert!(changed(&lab).iter().all(|(_, state, inputs)| state == "unknown" && inputs.is_empty()));
    fs::rename(&kept, &prompt).unwrap();

    // the code of another revision, and a record that does not hold its code
    let record = files(&lab.results().join("decode"), "record.json").remove(0);
    let good: Value = serde_json::from_str(&fs::read_to_string(&record).unwrap()).unwrap();
    let with = |argodrive: &str| {
        let mut value = good.clone();
        value["environment"]["argodrive"] = argodrive.into();
        fs::write(&record, value.to_string()).unwrap();
    };
    with("0.0.9 (abcdef)");
    say("stale", &[], &["code"], &[]);
    let (code, table, _) = outcome(argodrive(["results", "--stale", "--strict"]).arg(lab.results()));
    assert_eq!(code, 1);
    assert!(table.lines().filter(|l| !l.contains('/')).all(|l| l.chars().count() <= 80), "{table}");
    has(&table, &["STALE", "code: 0.0.9 (abcdef) then", "again: argodrive experiment rerun"]);
    with("0.1.0 (unknown)");
    assert!(changed(&lab).contains(&("decode".into(), "unknown".into(), vec![])));
    fs::write(&record, good.to_string()).unwrap();

    // the commands do what they say
    for row in rows(&["--stale"], &lab.results()) {
        let again = row["inputs"]["again"].as_str().unwrap().to_string();
        let words: Vec<&str> = again.split(' ').collect();
        assert_eq!(words[0], "argodrive", "{again}");
        if row["kind"] == "rung" {
            has(&again, &["ladder", "--policy", "policy.toml", "--prompt-file"]);
        } else {
            has(&again, &["experiment rerun", lab.results().to_str().unwrap()]);
        }
        if row["name"] != "rung2" {
            let mut command = argodrive([]);
            command.args(&words[1..]).current_dir(lab.drives.dir.path());
            command.assert().success();
        }
    }
}

#[test]
fn a_bundle_carries_no_place_and_comes_out_under_its_label() {
    let (folder, dir) = (lab().results(), prepared::folder());
    let file = dir.path().join("shared.tar.gz");
    let bundle = |more: &[&str]| {
        let mut command = argodrive(["results", "bundle", "--label", "tower", "--out"]);
        command.arg(&file).arg(&folder).args(more);
        command
    };
    let said = json_of(&mut bundle(&["--json"]));
    assert_eq!(said["records"], 1 + 1 + 4 + 1 + 8, "decode, ladder and its runs, campaign and its runs");
    refused(&mut bundle(&[]), &["--force"]);
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(&file).unwrap()).read_to_end(&mut text).unwrap();
    let text = String::from_utf8_lossy(&text);
    let secret = lab().drives.dir.path().to_str().unwrap();
    for part in [secret, env!("CARGO_TARGET_TMPDIR"), "/tmp", "\": \"/"] {
        assert!(!text.contains(part), "{part} is in the bundle");
    }
    has(&text, &["bundle.json", "record.json", "ladder.svg", "prompt.txt"]);

    let into = dir.path().join("mine");
    let import = |more: &[&str]| {
        let mut command = argodrive(["results", "import"]);
        command.arg(&file).arg("--into").arg(&into).args(more);
        command
    };
    let (code, stdout, stderr) = outcome(&mut import(&[]));
    assert_eq!(code, 0, "{stderr}");
    has(&stdout, &["records of tower", "tower: ladder", "no ladder of one's own", "ab: b vs a", "not measured"]);
    let listed = rows(&[], &into);
    assert_eq!(listed.len(), 4);
    assert!(listed.iter().all(|r| r["origin"] == "tower"));
    assert_eq!(rows(&["--where", "origin=here"], &into).len(), 0);
    refused(&mut import(&[]), &["there already", "--label"]);
    import(&["--label", "again"]).assert().success();
    assert_eq!(rows(&[], &into).len(), 8);
    // beside one's own
    copy(&folder, &into);
    let (_, stdout, _) = outcome(&mut import(&["--label", "third"]));
    has(&stdout, &["here: ladder", "Shapes only"]);
    assert!(!stdout.contains("not measured"), "{stdout}");

    let whole = fs::read(&file).unwrap();
    let empty = dir.path().join("empty");
    for damaged in [&whole[..whole.len() / 2], b"no bundle", b""] {
        let path = dir.path().join("damaged.tar.gz");
        fs::write(&path, damaged).unwrap();
        let mut command = argodrive(["results", "import"]);
        refused(command.arg(&path).arg("--into").arg(&empty), &["damaged.tar.gz"]);
        assert!(!empty.exists(), "nothing is made for a bundle that is not taken in");
    }
    refused(import(&["--label", "../x"]).arg("--json"), &["no label"]);
}

/// Writes `count` runs, every third one emulated, with rates 1, 2, ...
fn generate(folder: &Path, count: u32) {
    let text = fs::read_to_string(files(&lab().results().join("decode"), "record.json").remove(0)).unwrap();
    let mut record: Value = serde_json::from_str(&text).unwrap();
    for index in 0..count {
        record["arm"] = format!("arm{index}").into();
        record["rates"]["decode_tok_s"] = f64::from(index + 1).into();
        record["emulated"] = (index % 3 == 0).into();
        let folder = folder.join(format!("many/{:02}/{index:05}", index % 60));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("record.json"), record.to_string()).unwrap();
    }
}

#[test]
fn three_thousand_records_are_one_list() {
    let dir = prepared::folder();
    generate(dir.path(), 3000);
    let listed = rows(&["--sort", "tok_s"], dir.path());
    assert_eq!(listed.len(), 3000);
    assert_eq!(listed[0]["name"], "arm2999");
    let groups = json_of(argodrive(["results", "--group-by", "kind", "--json"]).arg(dir.path()));
    let counts: Vec<_> = groups["groups"].as_array().unwrap().iter().map(|g| g["rows"].as_u64().unwrap()).collect();
    assert_eq!(counts, [2000, 1000], "real and emulated ones stay apart");
}

#[test]
#[ignore = "a measurement, for a quiet machine: cargo test --release --test results -- --ignored --nocapture"]
fn how_long_ten_thousand_records_take() {
    let dir = prepared::folder();
    generate(dir.path(), 10_000);
    let started = std::time::Instant::now();
    argodrive(["results"]).arg(dir.path()).assert().success();
    println!("10,000 records: {:.2} s", started.elapsed().as_secs_f64());
}
