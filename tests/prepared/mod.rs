//! Stores, drives and plans for tests, made the way a user makes them. Everything lies under `target/`, never on a memory
//! file system, so that direct reads are real.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use argodrive::drive::spec::{self, DriveSpec, Emulation};
use argodrive::store::import::{ImportOptions, import};
use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use tempfile::TempDir;

pub fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub fn policy(name: &str) -> PathBuf {
    repo("layouts").join(format!("{name}.toml"))
}

/// A folder of its own for one test.
pub fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A store of the checkpoint at `checkpoint`, made anew; one for each test file and name, so that nothing piles up.
pub fn store(checkpoint: &str, name: &str) -> PathBuf {
    let store = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", env!("CARGO_CRATE_NAME")));
    let _ = fs::remove_dir_all(&store);
    import(&repo(checkpoint), &store, &ImportOptions::default(), &mut |_| {}).unwrap();
    store
}

/// The store of the tiny checkpoint.
pub fn tiny_store() -> &'static Path {
    static CELL: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    CELL.get_or_init(|| store("tests/fixtures/oracle/tiny", "tiny"))
}

/// The store of argo-mini.
pub fn mini_store() -> &'static Path {
    static CELL: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    CELL.get_or_init(|| store("models/argo-mini", "mini"))
}

/// The store of the dense model.
pub fn dense_store() -> &'static Path {
    static CELL: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    CELL.get_or_init(|| store("models/argo-mini-draft", "dense"))
}

/// A pace that even a busy machine keeps.
pub fn easy_pace() -> Emulation {
    Emulation {
        rate_bytes_per_s: 50_000_000,
        latency_ns: 16_000_000,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 0,
        ..Emulation::default()
    }
}

/// Some drives in one folder, and the file that names them.
pub struct Drives {
    pub dir: TempDir,
    pub specs: Vec<DriveSpec>,
    pub toml: PathBuf,
}

pub const NAMES: [&str; 4] = ["amber", "blue", "coral", "denim"];

impl Drives {
    pub fn new(count: usize, emulate: Option<Emulation>) -> Self {
        let dir = folder();
        let spec = |name: &&str| DriveSpec {
            name: name.to_string(),
            path: dir.path().join(name),
            emulate,
            faults: Vec::new(),
        };
        let specs: Vec<DriveSpec> = NAMES[..count].iter().map(spec).collect();
        for spec in &specs {
            fs::create_dir(&spec.path).unwrap();
        }
        let toml = dir.path().join("drives.toml");
        fs::write(&toml, spec::render(&specs)).unwrap();
        Self { dir, specs, toml }
    }

    /// Plans `store` onto the drives with the real binary.
    pub fn plan(&self, store: &Path, policy_name: &str) -> PathBuf {
        let out = self.dir.path().join(format!("{policy_name}.plan.json"));
        let mut command = argodrive(["plan", "--store"]);
        command.arg(store).arg("--drives").arg(&self.toml).arg("--policy").arg(policy(policy_name));
        command.arg("--out").arg(&out).assert().success();
        out
    }

    /// Plans and stages with the real binary.
    pub fn staged(&self, store: &Path, policy_name: &str) -> PathBuf {
        let plan = self.plan(store, policy_name);
        argodrive(["stage"]).arg(&plan).assert().success();
        plan
    }

    /// The one drive folder (`<mount>/argodrive/<model-id>`) on drive `index`.
    pub fn model_folder(&self, index: usize) -> PathBuf {
        only_entry(&self.specs[index].path.join("argodrive"))
    }
}

/// The one entry of a folder.
pub fn only_entry(folder: &Path) -> PathBuf {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries.remove(0)
}

/// Every file under `folder` with its content, by relative path.
pub fn snapshot(folder: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let mut out = std::collections::BTreeMap::new();
    let mut left = vec![folder.to_path_buf()];
    while let Some(at) = left.pop() {
        for entry in fs::read_dir(&at).unwrap().map(|e| e.unwrap().path()) {
            if entry.is_dir() {
                left.push(entry);
            } else {
                out.insert(entry.strip_prefix(folder).unwrap().to_path_buf(), fs::read(&entry).unwrap());
            }
        }
    }
    out
}

/// Flips one byte of a file.
pub fn damage(file: &Path, offset: u64) {
    use std::os::unix::fs::FileExt;
    let file = fs::File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0u8];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x11], offset).unwrap();
    file.sync_all().unwrap();
}

pub fn argodrive<const N: usize>(args: [&str; N]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_argodrive"));
    command.args(args);
    command
}

/// Exit code, stdout, stderr.
pub fn outcome(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().expect("no signal"), text(stdout), text(stderr))
}

/// Runs a command that must succeed and print one JSON object.
pub fn json_of(command: &mut Command) -> Value {
    let (code, stdout, stderr) = outcome(command);
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

/// Runs a command that must be refused: exit code 2, nothing on stdout, one line on stderr that has `words`.
pub fn refused(command: &mut Command, words: &[&str]) -> String {
    let (code, stdout, stderr) = outcome(command);
    assert_eq!(code, 2, "{stdout}{stderr}");
    assert_eq!(stdout, "", "{stderr}");
    assert_eq!(stderr.lines().filter(|l| l.starts_with("argodrive: error: ")).count(), 1, "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    has(&stderr, words);
    stderr
}

pub fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

/// Ids in a JSON array.
pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// The text of a plan or manifest without the check at its end, so that it can be changed as by hand.
pub fn unchecked(text: &str) -> String {
    let (body, _) = text.rsplit_once(",\"check\"").unwrap();
    format!("{body}}}\n")
}
