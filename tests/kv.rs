//! The KV tier: whatever memory latent caches get, a text has the very same bits; rows that left come back and are counted; what
//! cannot work is said before anything starts. And the window of the draft model, which changes proposals and no token.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;
mod prepared;

use argodrive::clock::Clock;
use argodrive::decode::{CacheShape, Decoder, GuessSource, KernelIsa, KvPlan, Logits, Session, SessionOptions};
use argodrive::drive::spec::Emulation;
use argodrive::ids::LayerId;
use argodrive::source::{BlockCounters, BlockSource, BlockStore, Phase, SourceError};
use argodrive::trace::events::{Outcome, Purpose};
use argodrive::trace::log::{read_barriers, read_header, read_reads};
use assert_cmd::Command;
use common::{TestSource, load};
use prepared::{Drives, argodrive, folder, has, ids, json_of, mini_store, outcome, refused, repo, tiny_store};
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

const PROMPT: &str = "The router names the experts, and the block comes back when the device has time.";
/// Begins a text that repeats itself, so that proposals are made, and some are right.
const REPEATED: &str = "the the the the the the";
/// The least that works for one text of the tiny model: three layers with a block of 16 rows of 192 bytes, and two buffers.
const LEAST: u64 = 3 * 16 * 192 + 2 * 4096;

/// Keeps blocks in memory, for the decoder alone.
#[derive(Default)]
struct Shelf {
    blocks: Vec<Vec<u8>>,
    given: BlockCounters,
    /// What was said to be asked for next.
    soon: Option<usize>,
}

impl BlockSource for Shelf {
    fn block(&mut self, block: usize, _: Option<usize>) -> Result<&[u8], SourceError> {
        self.given.blocks += 1;
        if let Some(soon) = self.soon.take() {
            assert_eq!(soon, block, "another was said to be next");
            self.given.ahead += 1;
        }
        Ok(&self.blocks[block])
    }
    fn counters(&self) -> BlockCounters {
        self.given
    }
    fn threads(&self) -> Vec<u32> {
        Vec::new()
    }
    fn settle(&mut self) {}
}

impl BlockStore for Shelf {
    fn put(&mut self, block: usize, bytes: &[u8]) -> Result<(), SourceError> {
        assert_eq!(self.soon, None, "none leaves before it");
        let blocks = self.blocks.len().max(block + 1);
        self.blocks.resize(blocks, Vec::new());
        self.blocks[block] = bytes.to_vec();
        Ok(())
    }
    fn copy(&self, block: usize, out: &mut [u8]) -> Result<(), SourceError> {
        out.copy_from_slice(&self.blocks[block][..out.len()]);
        Ok(())
    }
    fn reads_are_for(&mut self, _: u64, _: LayerId) {}
    fn soon(&mut self, block: usize) -> Result<(), SourceError> {
        assert_eq!(self.soon.replace(block), None, "what was next has come");
        Ok(())
    }
}

#[test]
fn logits_have_the_bits_of_a_whole_cache() {
    let checkpoint = load("models/argo-mini");
    let text: Vec<u32> = (0..90u32).map(|i| 7 + i * i * 31 % 4000).collect();
    let options = SessionOptions { max_context: 120, max_rows: 128, clock: Clock::start(), guess: GuessSource::None };
    for (isa, counts) in [(KernelIsa::Scalar, &[1][..]), (KernelIsa::detect(), &[1, 2])] {
        let decoder = Decoder::load_with(checkpoint.config.clone(), checkpoint.trunk.clone(), isa).unwrap();
        for &threads in counts {
            decoder.use_threads(threads);
            let source = || TestSource::new(&checkpoint.experts);
            // a prompt in two pieces, rows one by one, proposals of which some are taken back, and on
            let run = |s: &mut Session| {
                let mut all = Vec::new();
                for piece in [&text[..50], &text[50..64]] {
                    all.extend_from_slice(s.forward(piece, Phase::Prefill, &mut source(), Logits::All, None).unwrap());
                }
                s.reserve_verify(5);
                for (at, kept) in [(64, 1), (65, 5), (70, 3)] {
                    all.extend_from_slice(s.verify(&text[at..at + 5], &mut source(), None).unwrap());
                    s.keep(kept, None).unwrap();
                }
                for row in text[73..].chunks(1) {
                    all.extend_from_slice(s.forward(row, Phase::Decode, &mut source(), Logits::Last, None).unwrap());
                }
                all
            };
            let whole = run(&mut Session::new(decoder.clone(), options).unwrap());
            let needs = |ram| KvPlan::of(&checkpoint.config, 1, options.max_context, 5, ram);
            let least = needs(1).unwrap_err().least;
            assert!(needs(least - 1).is_err() && needs(1 << 30).unwrap().is_none());
            for (ram, texts) in [(least, 2), (least * 2, 1)] {
                let plan = needs(ram).unwrap().unwrap();
                assert!(plan.resident_bytes() <= ram);
                let mut s = Session::shaped(decoder.clone(), options, CacheShape::Spilled(plan)).unwrap();
                s.kv_mut().keep_in(Box::new(Shelf::default()));
                for round in 0..texts {
                    assert!(run(&mut s) == whole, "{isa}, {threads} threads, {ram} bytes, text {round}");
                    let (counted, given) = (s.kv().counters(), s.kv().blocks().unwrap());
                    assert!(counted.peak_bytes <= ram && counted.spilled_rows > 0, "{counted:?}");
                    assert_eq!(counted.asked_blocks, given.blocks);
                    assert!(given.ahead > 10, "{given:?}");
                    assert_eq!(counted.widest_seen, text.len() as u64);
                    s.reset();
                }
            }
            let plan = needs(least).unwrap().unwrap();
            let mut s = Session::shaped(decoder.clone(), options, CacheShape::Spilled(plan)).unwrap();
            let e = s.forward(&text[..80], Phase::Prefill, &mut source(), Logits::Last, None).unwrap_err().to_string();
            assert!(e.contains("--kv-ram"), "{e}");
        }
    }
}

/// `decode` of the tiny model.
fn decode(args: &[&str]) -> Command {
    let mut command = argodrive(["decode", "--json", "--store"]);
    command.arg(tiny_store()).args(args);
    command
}

fn setting<'a>(run: &'a Value, name: &str) -> &'a Value {
    run["settings"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap()
}

fn count(run: &Value, what: &str) -> u64 {
    run["kv"][what].as_u64().unwrap_or_else(|| panic!("{what} in {run}"))
}

/// What the tier says of itself holds together, and nothing is left in its folder.
fn check_kv(run: &Value, ram: u64, dir: &Path) {
    let of = |what| count(run, what);
    assert_eq!((of("ram_bytes"), setting(run, "kv_ram_bytes")["verdict"].as_str()), (ram, Some("proved")), "{run}");
    assert!(of("peak_bytes") <= ram && of("spilled_rows") > 0);
    assert_eq!(of("spilled_rows"), of("written_blocks") * of("block_rows"));
    // of the blocks that were asked for, one a layer and pass is at hand
    let block = of("written_bytes") / of("written_blocks");
    assert_eq!(of("read_bytes") % block, 0);
    assert!(of("asked_blocks") * block > of("read_bytes") && of("read_bytes") * 2 >= of("asked_blocks") * block);
    assert_eq!((of("unused_bytes"), of("copied_bytes")), (0, 0));
    assert!(of("ahead_blocks") > 0 && of("ahead_blocks") == of("ahead_used"), "{run}");
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0, "the file has no name");
}

#[test]
fn the_text_is_the_same_and_rows_come_back() {
    let dir = folder();
    let at = dir.path().to_str().unwrap();
    let sampled = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "12"];
    let drafted = ["--speculate", "ngram", "--draft-depth", "3", "--threads", "2"];
    let ways: [(&[&str], &str, u64); 4] = [
        (&[], PROMPT, LEAST),
        (&["--prefill-rows", "7", "--engine", "psync"], PROMPT, 30_000),
        (&sampled, PROMPT, LEAST + 5000),
        (&drafted, REPEATED, LEAST + 3 * 16 * 192),
    ];
    for (way, prompt, ram) in ways {
        let whole = json_of(decode(&["--max-new", "120", "--prompt", prompt]).args(way));
        assert!(whole["kv"].is_null());
        assert_eq!(setting(&whole, "kv_ram_bytes")["verdict"], "proved", "off: nothing left");
        let bytes = ram.to_string();
        let run =
            json_of(decode(&["--max-new", "120", "--prompt", prompt, "--kv-ram", &bytes, "--kv-dir", at]).args(way));
        assert_eq!(run["token_ids"], whole["token_ids"], "{way:?}");
        check_kv(&run, ram, dir.path());
        if way.is_empty() {
            // in each pass over a row two of the three layers come after one, and begin with a block that left before
            let (prompt, new) = (ids(&run["prompt_token_ids"]).len(), ids(&run["token_ids"]).len());
            let leaves = |position: &usize| position.is_multiple_of(16);
            let passes = (prompt..prompt + new - 1).filter(|p| !leaves(p) && *p > 16).count();
            assert_eq!(count(&run, "ahead_blocks"), 2 * passes as u64, "{run}");
        }
        if way == drafted {
            let rejected = |p: &Value| p["accepted"].as_u64() < p["proposed"].as_u64();
            assert!(run["speculation"]["positions"].as_array().unwrap().iter().any(rejected), "{run}");
        }
    }
    let reference = json_of(&mut decode(&["--max-new", "60", "--prompt", PROMPT, "--kv-ram", "20000", "--reference"]));
    assert_eq!(reference["reference"]["same_tokens"], true);
    // enough for everything: the setting did nothing
    let idle = json_of(&mut decode(&["--max-new", "4", "--prompt", PROMPT, "--kv-ram", "64MiB"]));
    assert_eq!(setting(&idle, "kv_ram_bytes")["verdict"], "unverified");
    assert_eq!((count(&idle, "spilled_rows"), &idle["kv"]["folder"]), (0, &Value::Null));
    let people = ["--max-new", "60", "--prompt", PROMPT, "--kv-ram", "20000", "--kv-dir", at];
    let mut command = argodrive(["decode", "--store"]);
    let (code, _, notes) = outcome(command.arg(tiny_store()).args(people));
    assert_eq!(code, 0, "{notes}");
    has(&notes, &["latent cache: ", "resident; ", "a token"]);
}

#[test]
fn texts_that_share_passes_share_the_memory_too() {
    let dir = folder();
    let set = dir.path().join("set.jsonl");
    fs::write(&set, format!("\"The drive\"\n\"{PROMPT}\"\n\"and a router\"\n")).unwrap();
    let args = ["--parallel", "2", "--max-new", "50", "--prompts", set.to_str().unwrap()];
    let whole = json_of(&mut decode(&args));
    let least = LEAST + 3 * 16 * 192;
    let kv = folder();
    let bytes = least.to_string();
    let run = json_of(decode(&args).args(["--kv-ram", &bytes, "--kv-dir", kv.path().to_str().unwrap()]));
    let tokens =
        |run: &Value| run["texts"].as_array().unwrap().iter().map(|t| ids(&t["token_ids"])).collect::<Vec<_>>();
    assert_eq!(tokens(&run), tokens(&whole));
    check_kv(&run, least, kv.path());
    let bytes = (least - 1).to_string();
    refused(decode(&args).args(["--kv-ram", &bytes]), &["2 texts", &format!("--kv-ram {least} or more")]);
}

#[test]
fn a_trace_has_the_reads_by_their_purpose() {
    let drives = Drives::new(2, None);
    let plan = drives.staged(tiny_store(), "round-robin");
    let kv = folder();
    let inside = drives.specs[1].path.clone();
    // on a drive of the run, whose pace it then has, and on one that has no experts
    let pace = Emulation {
        rate_bytes_per_s: 50_000_000,
        latency_ns: 200_000,
        per_read_ns: 0,
        jitter: 0.0,
        seed: 0,
        ..Emulation::default()
    };
    let emulated = drives.dir.path().join("emulated.toml");
    let mut specs = drives.specs.clone();
    specs.iter_mut().for_each(|s| s.emulate = Some(pace));
    fs::write(&emulated, argodrive::drive::spec::render(&specs)).unwrap();
    let trace_dir = folder();
    for (name, at, toml, drive) in [
        ("own", &inside, &drives.toml, 1),
        ("paced", &inside, &emulated, 1),
        ("other", &kv.path().to_path_buf(), &drives.toml, 2),
    ] {
        let trace = trace_dir.path().join(name);
        let mut command = decode(&["--max-new", "40", "--prompt", PROMPT, "--kv-ram", "20000"]);
        command.arg("--kv-dir").arg(at).arg("--plan").arg(&plan).arg("--drives").arg(toml).arg("--trace").arg(&trace);
        let run = json_of(&mut command);
        let (reads, header) = (read_reads(&trace).unwrap(), read_header(&trace).unwrap());
        let kv: Vec<_> = reads.iter().filter(|r| r.purpose == Purpose::Kv).collect();
        assert_eq!(kv.len() as u64, count(&run, "reads"), "{name}");
        assert_eq!(kv.iter().map(|r| r.bytes).sum::<u64>(), count(&run, "read_bytes"));
        assert!(kv.iter().all(|r| r.drive.index() == drive && r.barrier.is_none() && r.outcome == Outcome::Demand));
        assert!([3, 7, 8].iter().all(|l| kv.iter().any(|r| r.layer == LayerId(*l))), "the layers with a latent cache");
        // what is read ahead is asked for before the experts of the layer before are
        let barriers = read_barriers(&trace).unwrap();
        let ahead = barriers.iter().filter(|b| {
            let next = [(3, 7), (7, 8)].iter().find(|(before, _)| b.layer == LayerId(*before)).map(|n| LayerId(n.1));
            kv.iter().any(|r| Some(r.layer) == next && r.step == b.step && r.queued_ns <= b.open_ns)
        });
        assert_eq!(ahead.count() as u64, count(&run, "ahead_blocks"), "{name}");
        assert_eq!(header.drives.len(), drive.max(1) + 1);
        assert_eq!(run["kv"]["emulated"], name == "paced");
        // the drives' own figures know nothing of them
        let of_drives: u64 = run["drives"].as_array().unwrap().iter().map(|d| d["reads"].as_u64().unwrap()).sum();
        assert_eq!(of_drives, (reads.len() - kv.len()) as u64);
        let report = json_of(argodrive(["trace", "report", "--json"]).arg(&trace));
        let rows = report["drives"].as_array().unwrap();
        let of_kv: Vec<&Value> = rows.iter().filter(|r| r["purpose"] == "kv").collect();
        assert_eq!(of_kv.len(), 1, "{report}");
        assert_eq!(of_kv[0]["reads"].as_u64(), Some(kv.len() as u64), "{report}");
        // who reads experts again, or predicts their reads, is not misled
        json_of(argodrive(["simulate", "--json"]).arg(&trace).arg("--plan").arg(&plan));
    }
}

#[test]
fn a_snapshot_holds_the_rows_that_left() {
    let dir = folder();
    let (with, without) = (dir.path().join("with"), dir.path().join("without"));
    let kv = ["--kv-ram", "20000"];
    let whole = json_of(&mut decode(&["--max-new", "70", "--prompt", PROMPT]));
    for (folder, limited) in [(&with, true), (&without, false)] {
        let mut begin = decode(&["--max-new", "40", "--prompt", PROMPT, "--snapshot-every", "8", "--snapshot-dir"]);
        let begun = json_of(begin.arg(folder).args(if limited { &kv[..] } else { &[] }));
        assert_eq!(begun["kv"].is_null(), !limited);
        if limited {
            assert!(count(&begun, "copied_bytes") > 0);
        }
        for go_on in [&kv[..], &[]] {
            let went_on = json_of(decode(&["--max-new", "70", "--resume"]).arg(folder).args(go_on));
            assert_eq!(went_on["token_ids"], whole["token_ids"], "{limited} {go_on:?}");
            assert_eq!(went_on["kv"].is_null(), go_on.is_empty());
            fs::read_dir(folder).unwrap().for_each(|f| assert!(f.unwrap().file_name() != "kv"));
        }
    }
}

/// What a run said that a full drive ended, and that the text goes on from the snapshots before.
fn check_full((code, said): (Option<i32>, &str), why: &str, kept: &Path, whole: &Value) {
    assert_eq!(code, Some(2), "{said}");
    has(said, &["argodrive: error: ", "argodrive-kv-", "at offset ", why, "--kv-dir on another drive", "--resume"]);
    assert!(!said.contains("panicked"), "{said}");
    let went_on = json_of(decode(&["--kv-ram", "20000", "--resume"]).arg(kept));
    assert_eq!(went_on["token_ids"], whole["token_ids"], "{said}");
    assert!(count(&went_on, "spilled_rows") > 0);
}

/// Takes a file system away however the test ends.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0).output();
    }
}

#[test]
fn a_drive_that_fills_up_ends_the_run_and_the_text_goes_on_from_the_snapshot() {
    let dir = folder();
    let args = ["--max-new", "160", "--prompt", PROMPT];
    let whole = json_of(&mut decode(&args));
    let begun = [&args[..], &["--kv-ram", "20000", "--snapshot-every", "8"]].concat();
    // The third layer's blocks are the last in the file, 256 for each: it may hold so many that rows leave when some 30 tokens are there.
    let (mut limited, kept) = (Command::new("bash"), dir.path().join("limited"));
    let fit = (ids(&whole["prompt_token_ids"]).len() + 30) / 16;
    limited.args(["-c", "trap '' XFSZ; ulimit -f $1; shift; exec \"$@\"", "bash", &(2048 + 4 * fit).to_string()]);
    limited.arg(env!("CARGO_BIN_EXE_argodrive")).args(["decode", "--json", "--store"]).arg(tiny_store()).args(&begun);
    let (code, out, said) = outcome(limited.arg("--snapshot-dir").arg(&kept).arg("--kv-dir").arg(dir.path()));
    assert_eq!(out, "", "{said}");
    check_full((Some(code), &said), "File too large", &kept, &whole);
    has(&said, &[&format!("at offset {} ", (2 << 20) + 4096 * fit)]);

    let (full, kept) = (dir.path().join("full"), dir.path().join("kept"));
    fs::create_dir(&full).unwrap();
    let mut mount = std::process::Command::new("mount");
    if !mount.args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(&full).output().is_ok_and(|o| o.status.success()) {
        eprintln!("SKIPPED: a drive that is really full, which needs root and leave to mount a small one");
        return;
    }
    let mounted = Mounted(&full);
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_argodrive"));
    child.args(["decode", "--json", "--allow-fallback", "--store"]).arg(tiny_store()).args(&begun);
    child.arg("--snapshot-dir").arg(&kept).arg("--kv-dir").arg(&full);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let there = || {
        fs::read_dir(&kept).is_ok_and(|d| d.flatten().any(|f| f.path().extension().is_some_and(|e| e == "snapshot")))
    };
    while !there() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let filled = fs::write(full.join("more"), vec![1; 2 << 20]);
    let ended = child.wait_with_output().unwrap();
    drop(mounted);
    assert_eq!(filled.unwrap_err().kind(), ErrorKind::StorageFull);
    let said = String::from_utf8(ended.stderr).unwrap();
    check_full((ended.status.code(), &said), "No space left", &kept, &whole);
}

#[test]
fn what_cannot_work_is_said_before_anything_starts() {
    let short = ["--max-new", "40", "--prompt", PROMPT];
    let least = LEAST.to_string();
    refused(decode(&short).args(["--kv-ram", "1000"]), &["--kv-ram 1000", &format!("--kv-ram {least} or more")]);
    json_of(decode(&short).args(["--kv-ram", &least]));
    // proposals may be taken back, so their rows have to stay
    let drafted = ["--speculate", "ngram", "--draft-depth", "8", "--kv-ram", &least];
    refused(decode(&short).args(drafted), &["or more"]);
    refused(decode(&short).args(["--kv-dir", "/tmp"]), &["--kv-dir does nothing without --kv-ram"]);
    let dir = folder();
    let none = dir.path().join("none");
    refused(decode(&short).args(["--kv-ram", &least, "--kv-dir"]).arg(&none), &["none", "--kv-dir"]);
    fs::write(&none, "a file").unwrap();
    refused(decode(&short).args(["--kv-ram", &least, "--kv-dir"]).arg(&none), &["none", "--kv-dir"]);
    refused(
        decode(&short).args(["--speculate", "ngram", "--draft-window", "8"]),
        &["--draft-window", "--speculate model"],
    );
}

#[test]
fn a_conversation_is_held_to_the_memory_too() {
    let chat = |args: &[&str]| {
        let mut command = argodrive(["chat", "--max-new", "40", "--message", "What does the router do?", "--store"]);
        let (code, said, notes) = outcome(command.arg(mini_store()).args(args));
        assert_eq!(code, 0, "{notes}");
        said
    };
    assert_eq!(chat(&["--kv-ram", "60000"]), chat(&[]));
    refused(
        argodrive(["chat", "--message", "x", "--kv-ram", "1000", "--store"]).arg(mini_store()),
        &["--kv-ram 1000", "or more"],
    );
}

#[test]
fn the_window_of_the_draft_model_changes_no_token() {
    let draft = repo("models/argo-mini-draft");
    let model = ["--speculate", "model", "--draft-depth", "3", "--draft-model", draft.to_str().unwrap()];
    let prompt = "The sun rose. The dog ran. The sun rose. The dog";
    let run = |args: &[&str]| {
        let mut command = argodrive(["decode", "--json", "--max-new", "64", "--prompt", prompt, "--store"]);
        json_of(command.arg(mini_store()).args(args))
    };
    let (plain, whole) = (run(&[]), run(&model));
    let window = run(&[&model[..], &["--draft-window", "12"]].concat());
    for run in [&whole, &window] {
        assert_eq!(run["token_ids"], plain["token_ids"]);
    }
    let of = |run: &Value, what: &str| run["speculation"][what].as_u64().unwrap();
    assert_eq!(setting(&window, "draft_window")["verdict"], "proved", "{window}");
    assert_eq!(
        (of(&whole, "draft_rows_dropped"), setting(&whole, "draft_window")["verdict"].as_str()),
        (0, Some("proved"))
    );
    assert!(of(&window, "draft_rows_dropped") > 0);
    // 12 rows and up to 16 that may be taken back, of 48 values, in the layers that have a latent cache
    let rows = of(&window, "draft_cache_bytes") / (48 * 4);
    assert!(of(&window, "draft_cache_bytes") < of(&whole, "draft_cache_bytes"), "{window}");
    assert!(rows.is_multiple_of(28) && rows > 0, "{rows} rows");
    let idle = run(&[&model[..], &["--draft-window", "2000"]].concat());
    assert_eq!(setting(&idle, "draft_window")["verdict"], "unverified");
}
