//! Several argodrives at once, as real processes: runs share drives, whoever would get in their way is told who holds what, and a lock
//! ends with its owner, however that ended.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::store::synth::{Shards, SynthOptions, synth};
use prepared::{Drives, argodrive, has, ids, json_of, outcome, policy, refused, tiny_store};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A command that runs until it ends or the test does.
struct Running(Child);

impl Running {
    fn new(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits until it holds a lock on `path`.
    fn locks(&mut self, path: &Path) {
        let begun = Instant::now();
        loop {
            assert!(self.0.try_wait().unwrap().is_none(), "it has ended: {}", self.said());
            let inode = fs::metadata(path).map_or(0, |m| m.ino()).to_string();
            let held = fs::read_to_string("/proc/locks").unwrap();
            let own = |line: &str| {
                let words: Vec<&str> = line.split_whitespace().collect();
                words[1] == "FLOCK" && words[4] == self.pid().to_string() && words[5].rsplit(':').next() == Some(&inode)
            };
            if held.lines().any(own) {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "no lock on {}", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn said(&mut self) -> String {
        std::io::read_to_string(self.0.stderr.take().unwrap()).unwrap()
    }

    /// As nobody can put off. Returns when it is gone.
    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn json(mut self) -> Value {
        let out = std::io::read_to_string(self.0.stdout.take().unwrap()).unwrap();
        assert!(self.0.wait().unwrap().success(), "{}", self.said());
        serde_json::from_str(&out).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program<const N: usize>(args: [&str; N]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_argodrive"));
    command.args(args);
    command
}

fn decode(plan: &Path) -> Command {
    let mut command = program(["decode", "--prompt", "Two at a time", "--max-new", "12", "--json", "--store"]);
    command.arg(tiny_store()).arg("--plan").arg(plan);
    command
}

#[test]
fn two_runs_and_a_staging_share_drives_and_the_tokens_are_those_of_one_alone() {
    let drives = Drives::new(2, None);
    let dealt = drives.staged(tiny_store(), "round-robin");
    let mirror = drives.plan(tiny_store(), "full-mirror");
    let alone = Running::new(&mut decode(&dealt)).json();
    // Slow enough that they are still at it when the drives have been staged anew.
    let slowly = || {
        let mut command = decode(&dealt);
        Running::new(command.args(["--max-read-rate", "400kB/s"]))
    };
    let mut both = [slowly(), slowly()];
    both.iter_mut().for_each(|run| (0..2).for_each(|drive| run.locks(&drives.model_folder(drive))));
    argodrive(["stage"]).arg(&mirror).assert().success();
    both.iter_mut().for_each(|run| assert!(run.0.try_wait().unwrap().is_none(), "{}", run.said()));
    argodrive(["verify"]).arg(&mirror).assert().success();
    for run in both {
        assert_eq!(ids(&run.json()["token_ids"]), ids(&alone["token_ids"]));
    }
    assert_eq!(ids(&Running::new(&mut decode(&mirror)).json()["token_ids"]), ids(&alone["token_ids"]));
}

#[test]
fn a_lock_says_who_holds_it_and_dies_with_its_owner() {
    let drives = Drives::new(2, None);
    let mirror = drives.staged(tiny_store(), "full-mirror");
    let dealt = drives.plan(tiny_store(), "round-robin");
    let prune = || {
        let mut command = argodrive(["prune", "--keep"]);
        command.arg(&dealt);
        command
    };
    // A run that has been waiting for a read ever since.
    let mut run = Running::new(decode(&mirror).args(["--faults", "blue: stall", "--read-timeout", "600000"]));
    run.locks(&drives.model_folder(1));
    let words = [&format!("pid {}, `argodrive decode", run.pid()), "is reading from it", "wait for it to end"];
    refused(&mut prune(), &words);
    refused(argodrive(["stage", "--rollback"]).arg(&mirror), &words);
    argodrive(["stage"]).arg(&dealt).assert().success(); // what adds disturbs nobody
    run.kill();
    json_of(prune().arg("--json"));

    // A staging that takes its time.
    let mut staging = Running::new(program(["stage", "--rate", "50kB/s"]).arg(&mirror));
    staging.locks(&drives.specs[1].path);
    let who = format!("pid {}, `argodrive stage --rate 50kB/s", staging.pid());
    let words = ["drive amber", &who, "is writing to it", "wait for it to end"];
    refused(argodrive(["stage"]).arg(&mirror), &words);
    refused(&mut prune(), &words);
    let tokens = Running::new(&mut decode(&dealt)).json(); // reading is welcome
    staging.kill();
    argodrive(["stage"]).arg(&mirror).assert().success();
    argodrive(["verify"]).arg(&mirror).assert().success();
    assert_eq!(ids(&Running::new(&mut decode(&mirror)).json()["token_ids"]), ids(&tokens["token_ids"]));
}

#[test]
fn an_import_that_is_killed_leaves_its_store_and_drives_to_the_next() {
    let drives = Drives::new(2, None);
    let at = |name: &str| drives.dir.path().join(name);
    let (checkpoint, store, plan) = (at("checkpoint"), at("store"), at("plan.json"));
    synth(&checkpoint, &SynthOptions { shards: Shards::Count(3), ..SynthOptions::small() }, &mut |_| {}).unwrap();
    let mut command = argodrive(["plan", "--checkpoint"]);
    command.arg(&checkpoint).arg("--drives").arg(&drives.toml).arg("--policy").arg(policy("round-robin"));
    command.arg("--out").arg(&plan).assert().success();
    // It waits for a shard that does not come.
    let shards = fs::read_dir(&checkpoint).unwrap().map(|e| e.unwrap().path());
    let last = shards.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).max().unwrap();
    fs::rename(&last, at("away")).unwrap();
    let import = || {
        let mut command = program(["import", "--follow"]);
        command.arg(&checkpoint).arg("--store").arg(&store).arg("--plan").arg(&plan);
        command
    };
    let mut waits = Running::new(&mut import());
    waits.locks(&store.join("import.journal"));
    let who = format!("pid {}, `argodrive import --follow", waits.pid());
    let (code, _, said) = outcome(&mut assert_cmd::Command::from_std(import()));
    assert_eq!(code, 2, "{said}");
    has(&said, &["drive amber", &who, "wait for it to end"]);
    let mut other = argodrive(["import"]);
    other.arg(prepared::repo("tests/fixtures/oracle/tiny")).arg("--store").arg(&store);
    refused(&mut other, &["another import into this store", &who, "what it has done is kept"]);
    waits.kill();
    fs::rename(at("away"), &last).unwrap();
    assert_cmd::Command::from_std(import()).assert().success();
    argodrive(["verify"]).arg(&plan).assert().success();
}
