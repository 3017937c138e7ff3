//! Every parser of bytes from outside, each as a function of the bytes alone: the fuzz targets call one each, and
//! `tests/hostile.rs` calls all of them with damaged copies of the corpus. A parser may refuse what it is given; it may not
//! panic, hang, or take memory out of proportion.

use argodrive::bench::against;
use argodrive::bench::campaign::file::CampaignFile;
use argodrive::bench::catalogue::unpack;
use argodrive::bench::config::Asked;
use argodrive::bench::experiment::Experiment;
use argodrive::bench::ladder::record::LadderRecord;
use argodrive::bench::prompt_set;
use argodrive::decode::sampler::SamplerOptions;
use argodrive::decode::snapshot;
use argodrive::drive::fault_rule::DriveFault;
use argodrive::drive::profile::Profile;
use argodrive::drive::snapshot::Snapshot;
use argodrive::drive::spec;
use argodrive::drive::testbed::{STATE_FILE, Testbed};
use argodrive::layout::heat::{Heat, Part};
use argodrive::layout::plan::Plan;
use argodrive::layout::policy::PolicyFile;
use argodrive::layout::routes::{self, RouteOptions};
use argodrive::model::chat::{ChatOptions, ChatTemplate, Message, Role};
use argodrive::model::checkpoint::Checkpoint;
use argodrive::model::config::ModelConfig;
use argodrive::model::safetensors;
use argodrive::model::tokenizer::Tokenizer;
use argodrive::reader::heat_file;
use argodrive::reader::predict::table_file;
use argodrive::replay::import::{blkparse, fio, per_read, sampler};
use argodrive::serve::request::{Ask, Defaults};
use argodrive::store::manifest::{DriveManifest, StoreManifest};
use argodrive::store::snapshot_file::SnapshotFile;
use argodrive::trace::{log, stream};
use std::cell::OnceCell;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// A parser: its name, which is that of its corpus, and what it does with the bytes; whether it took them.
pub type Entry = (&'static str, fn(&[u8]) -> bool);

/// All of them.
pub const ENTRIES: &[Entry] = &[
    ("safetensors_header", safetensors_header),
    ("shard_index", shard_index),
    ("model_config", model_config),
    ("tokenizer_json", tokenizer_json),
    ("tokenizer_config", tokenizer_config),
    ("tiktoken_ranks", tiktoken_ranks),
    ("chat_template", chat_template),
    ("store_manifest", store_manifest),
    ("drive_manifest", drive_manifest),
    ("plan", plan),
    ("heat", heat),
    ("route_rows", route_rows),
    ("policy", policy),
    ("drives", drives),
    ("rate_profile", rate_profile),
    ("drive_snapshot", drive_snapshot),
    ("trace_header", trace_header),
    ("trace_reads", trace_reads),
    ("trace_barriers", trace_barriers),
    ("trace_windows", trace_windows),
    ("trace_routes", trace_routes),
    ("trace_parquet", trace_parquet),
    ("prefetch_table", prefetch_table),
    ("cache_heat", cache_heat),
    ("published_ladders", published_ladders),
    ("snapshot_file", snapshot_file),
    ("snapshot_header", snapshot_header),
    ("fault_rules", fault_rules),
    ("testbed_state", testbed_state),
    ("foreign_per_read", foreign_per_read),
    ("foreign_fio", foreign_fio),
    ("foreign_blkparse", foreign_blkparse),
    ("foreign_sampler", foreign_sampler),
    ("run_config", run_config),
    ("run_record", run_record),
    ("experiment", experiment),
    ("campaign", campaign),
    ("ladder", ladder),
    ("prompt_set", prompts),
    ("bundle", bundle),
    ("api_request", api_request),
];

/// Calls the parser of this name; for fuzz targets.
pub fn call(name: &str, bytes: &[u8]) {
    let found = ENTRIES.iter().find(|(known, _)| *known == name);
    let (_, entry) = found.unwrap_or_else(|| panic!("no parser is called {name}"));
    entry(bytes);
}

/// Where the corpora are.
pub fn corpus() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // the test of the main crate compiles this file too
    if root.ends_with("fuzz") { root.join("corpus") } else { root.join("fuzz/corpus") }
}

thread_local! {
    static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

/// Calls `f` with an empty folder of this thread.
fn in_folder(f: impl FnOnce(&Path) -> bool) -> bool {
    FOLDER.with(|cell| {
        let folder = cell.get_or_init(|| tempfile::tempdir().expect("a temporary folder"));
        let taken = f(folder.path());
        for entry in fs::read_dir(folder.path()).expect("the folder").flatten() {
            let path = entry.path();
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("it can be removed");
        }
        taken
    })
}

fn put(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes).expect("the folder can be written");
    path
}

fn as_text(bytes: &[u8], f: impl FnOnce(&str) -> bool) -> bool {
    std::str::from_utf8(bytes).is_ok_and(f)
}

const PLAN: &str = include_str!("../corpus/plan/dealt.json");
const CONFIG: &[u8] = include_bytes!("../../tests/fixtures/oracle/tiny/config.json");
const RANKS: &[u8] = include_bytes!("../../tests/fixtures/oracle/tiny/tiktoken.model");
const RANKS_CONFIG: &[u8] = include_bytes!("../../tests/fixtures/oracle/tiny/tokenizer_config.json");
const TOKENIZER: &[u8] = include_bytes!("../../models/argo-mini/tokenizer.json");
const TRACE: &[u8] = include_bytes!("../../tests/fixtures/traces/version-1/trace.json");

fn safetensors_header(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        let path = put(folder, "model.safetensors", bytes);
        put(folder, "config.json", CONFIG);
        let _ = Checkpoint::open(folder);
        safetensors::read_header(&File::open(&path).expect("it is there"), &path).is_ok()
    })
}

fn shard_index(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, "config.json", CONFIG);
        put(folder, "model.safetensors.index.json", bytes);
        // the shards that it names are not there
        Checkpoint::open(folder).is_err_and(|e| e.to_string().contains("00002.safetensors"))
    })
}

fn model_config(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, "config.json", bytes);
        put(folder, "model.safetensors", &[2, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']);
        let _ = Checkpoint::open(folder);
        as_text(bytes, |text| ModelConfig::parse(text).is_ok())
    })
}

fn tokenise(folder: &Path) -> bool {
    let Ok(tokenizer) = Tokenizer::open(folder) else { return false };
    let text = "The fox <|end|> ran, \u{1f98a} 12345\n\n\t über den Hügel.";
    for special in [false, true] {
        if let Ok(ids) = tokenizer.encode(text, special) {
            tokenizer.decode_bytes(&ids);
        }
    }
    true
}

fn tokenizer_json(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, "tokenizer.json", bytes);
        tokenise(folder)
    })
}

fn tokenizer_config(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, "tiktoken.model", RANKS);
        put(folder, "tokenizer_config.json", bytes);
        tokenise(folder)
    })
}

fn tiktoken_ranks(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, "tiktoken.model", bytes);
        put(folder, "tokenizer_config.json", RANKS_CONFIG);
        tokenise(folder)
    })
}

fn chat_template(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, "tokenizer.json", TOKENIZER);
        put(folder, "chat_template.jinja", bytes);
        let said = [Message::new(Role::System, "Be brief."), Message::new(Role::User, "Who runs? {{ 1 }}")];
        ChatTemplate::open(folder).is_ok_and(|t| t.render(&said, &ChatOptions::default()).is_ok())
    })
}

/// A request over the network, as either of the two kinds.
fn api_request(bytes: &[u8]) -> bool {
    let defaults = Defaults { model: "model", sampler: SamplerOptions::default(), seed: Some(1), max_new: 8 };
    let completion = Ask::completion(bytes, &defaults).is_ok();
    let chat = in_folder(|folder| {
        put(folder, "tokenizer.json", TOKENIZER);
        put(folder, "chat_template.jinja", include_bytes!("../corpus/chat_template/argo-mini.jinja"));
        let template = ChatTemplate::open(folder).expect("it is sound");
        Ask::chat(bytes, &defaults, &template).is_ok()
    });
    completion || chat
}

fn store_manifest(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, "store.json", bytes);
        StoreManifest::open(folder).is_ok()
    })
}

fn drive_manifest(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, "drive.json", bytes);
        DriveManifest::open(folder).is_ok()
    })
}

fn plan(bytes: &[u8]) -> bool {
    as_text(bytes, |text| {
        Plan::parse(text).is_ok_and(|plan| {
            plan.replica_count();
            plan.hash().is_ok()
        })
    })
}

fn heat(bytes: &[u8]) -> bool {
    as_text(bytes, |text| Heat::parse(text).is_ok_and(|heat| heat.hash().is_ok()))
}

fn route_rows(bytes: &[u8]) -> bool {
    let options = RouteOptions {
        format: None,
        experts: None,
        top_k: Some(4),
        layer_base: 0,
        part: Part::Whole,
        rejected: true,
        label: String::new(),
        model_id: None,
    };
    as_text(bytes, |text| routes::import(text, "rows", &options).is_ok())
}

fn policy(bytes: &[u8]) -> bool {
    as_text(bytes, |text| PolicyFile::parse(text).is_ok())
}

fn drives(bytes: &[u8]) -> bool {
    as_text(bytes, |text| {
        spec::parse(text).is_ok_and(|drives| {
            assert_eq!(spec::parse(&spec::render(&drives)).expect("what was written can be read"), drives);
            true
        })
    })
}

fn rate_profile(bytes: &[u8]) -> bool {
    as_text(bytes, |text| Profile::parse(text).is_ok())
}

fn drive_snapshot(bytes: &[u8]) -> bool {
    in_folder(|folder| Snapshot::load(&put(folder, "drives.json", bytes)).is_ok())
}

fn trace_header(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, log::TRACE_FILE, bytes);
        log::read_header(folder).is_ok()
    })
}

/// Reads to the end or to the first fault; whether the end came.
fn drain<T>(rows: Result<stream::Stream<T>, argodrive::trace::error::TraceError>) -> bool {
    let Ok(mut rows) = rows else { return false };
    loop {
        match rows.next_value() {
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

fn trace_table(name: &str, bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, log::TRACE_FILE, TRACE);
        put(folder, name, bytes);
        let read = |lenient| match name.split('.').next() {
            Some("reads") => drain(stream::reads(folder, 4, lenient)),
            Some("barriers") => drain(stream::barriers(folder, 4, lenient)),
            Some("windows") => drain(stream::windows(folder, lenient)),
            _ => drain(stream::routes(folder, lenient)),
        };
        read(true);
        read(false)
    })
}

fn trace_reads(bytes: &[u8]) -> bool {
    trace_table("reads.csv", bytes)
}

fn trace_barriers(bytes: &[u8]) -> bool {
    trace_table("barriers.csv", bytes)
}

fn trace_windows(bytes: &[u8]) -> bool {
    trace_table("windows.csv", bytes)
}

fn trace_routes(bytes: &[u8]) -> bool {
    trace_table("routes.csv", bytes)
}

fn trace_parquet(bytes: &[u8]) -> bool {
    ["reads.parquet", "barriers.parquet", "windows.parquet", "routes.parquet"]
        .map(|name| trace_table(name, bytes))
        .contains(&true)
}

fn prefetch_table(bytes: &[u8]) -> bool {
    in_folder(|folder| table_file::read(&put(folder, "table.csv", bytes)).is_ok())
}

fn cache_heat(bytes: &[u8]) -> bool {
    let plan = Plan::parse(PLAN).expect("the corpus has a plan");
    in_folder(|folder| heat_file::load(&put(folder, "heat.csv", bytes), &plan).is_ok())
}

fn published_ladders(bytes: &[u8]) -> bool {
    in_folder(|folder| against::load(&put(folder, "ladders.csv", bytes)).is_ok())
}

fn snapshot_file(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        SnapshotFile::open(&put(folder, "x.snapshot", bytes)).is_ok_and(|mut file| {
            let mut all = Vec::new();
            snapshot::parse_header(file.header(), file.payload_bytes()).is_ok()
                && file.payload().is_ok_and(|mut payload| payload.read_to_end(&mut all).is_ok())
        })
    })
}

/// The header and what follows it, of the tiny model, without the digest that keeps damage away from it: header, a line
/// end, tokens and states.
fn snapshot_header(bytes: &[u8]) -> bool {
    let at = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
    let (header, mut payload) = (&bytes[..at], bytes.get(at + 1..).unwrap_or_default());
    let payload_bytes = payload.len() as u64;
    let Ok(header) = snapshot::parse_header(header, payload_bytes) else { return false };
    let config = ModelConfig::parse(std::str::from_utf8(CONFIG).expect("it is text")).expect("it is sound");
    let _ = snapshot::read_tokens(&header, &config, payload_bytes, &mut payload);
    true
}

fn fault_rules(bytes: &[u8]) -> bool {
    as_text(bytes, |text| {
        DriveFault::parse_all(text).is_ok_and(|faults| {
            let again: Vec<String> = faults.iter().map(ToString::to_string).collect();
            assert_eq!(DriveFault::parse_all(&again.join("\n")).expect("what was written can be read"), faults);
            true
        })
    })
}

fn testbed_state(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        put(folder, STATE_FILE, bytes);
        Testbed::open(folder).is_ok()
    })
}

fn foreign_per_read(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        let path = put(folder, "reads.csv", bytes);
        [true, false]
            .map(|lenient| {
                let options = per_read::PerReadOptions { lenient, ..per_read::PerReadOptions::default() };
                per_read::import(&path, &folder.join(format!("out-{lenient}")), options).is_ok()
            })
            .contains(&true)
    })
}

fn foreign_fio(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        [("x_clat.1.log", "a"), ("x_bw.1.log", "b")]
            .map(|(name, out)| fio::import(&[put(folder, name, bytes)], &folder.join(out), None, true).is_ok())
            .contains(&true)
    })
}

fn foreign_blkparse(bytes: &[u8]) -> bool {
    in_folder(|folder| blkparse::import(&put(folder, "blk.txt", bytes), &folder.join("out"), true).is_ok())
}

fn foreign_sampler(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        let path = put(folder, "windows.csv", bytes);
        let _ = sampler::import(&path, Some(&path), &folder.join("b"), false);
        sampler::import(&path, None, &folder.join("a"), true).is_ok()
    })
}

fn run_config(bytes: &[u8]) -> bool {
    in_folder(|folder| Asked::load(&put(folder, "run.toml", bytes)).is_ok())
}

fn run_record(bytes: &[u8]) -> bool {
    in_folder(|folder| Asked::load(&put(folder, "record.json", bytes)).is_ok())
}

fn experiment(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        // what the file in the corpus names
        fs::create_dir(folder.join("model")).expect("the folder can be written");
        put(folder, "model/config.json", CONFIG);
        put(folder, "policy.toml", b"policy = \"full-mirror\"\n");
        put(folder, "p.txt", b"one");
        put(folder, "q.txt", b"two");
        Experiment::load(&put(folder, "experiment.toml", bytes)).is_ok()
    })
}

fn campaign(bytes: &[u8]) -> bool {
    as_text(bytes, |text| CampaignFile::parse(text, PathBuf::from("experiment.json")).is_ok())
}

fn ladder(bytes: &[u8]) -> bool {
    as_text(bytes, |text| LadderRecord::parse(text).is_ok())
}

fn prompts(bytes: &[u8]) -> bool {
    prompt_set::parse(bytes).is_ok()
}

fn bundle(bytes: &[u8]) -> bool {
    in_folder(|folder| {
        unpack::open(&put(folder, "results.tar.gz", bytes))
            .is_ok_and(|bundle| bundle.place(&folder.join("into"), "fuzz").is_ok())
    })
}
