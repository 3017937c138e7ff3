//! Where a trunk is must not change a bit, and must be what was asked for; and so must the CPUs that threads run on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::clock::Clock;
use argodrive::decode::{Decoder, GuessSource, Logits, Session, SessionOptions};
use argodrive::model::config::ModelConfig;
use argodrive::open::Model;
use argodrive::reader::ReaderOptions;
use argodrive::source::Phase;
use argodrive::store::import::{ImportOptions, import};
use argodrive::store::trunk::TrunkResidency;
use argodrive::store::trunk_format::TrunkFormat;
use prepared::{argodrive, has, json_of, mini_store, outcome, refused, repo};
use serde_json::Value;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tests take turns: one that fills the page cache would be found in the evidence of another.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator with a count per thread.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the count lives in a thread-local cell that needs no
// allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: `p` came from `alloc` above, hence from the system's allocator, with this layout.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Logits of a short text in passes of several widths, and what the decoding passes allocated.
fn logits(model: &Model) -> (Vec<f32>, u64, Session) {
    let options = SessionOptions { max_context: 64, max_rows: 32, clock: Clock::start(), guess: GuessSource::Router };
    let mut s = Session::new(model.decoder.clone(), options).unwrap();
    model.stream_trunk(s.trunk_mut(), &ReaderOptions::default(), Clock::start(), None).unwrap();
    let mut memory = model.resident().unwrap();
    let prompt: Vec<u32> = (0..20u32).map(|i| 7 + i * i * 31 % 4000).collect();
    s.forward(&prompt[..7], Phase::Prefill, &mut memory, Logits::None, None).unwrap();
    let mut all = s.forward(&prompt[7..], Phase::Prefill, &mut memory, Logits::All, None).unwrap().to_vec();
    let before = ALLOCATIONS.with(Cell::get);
    for token in [30, 31, 32] {
        s.forward(&[token], Phase::Decode, &mut memory, Logits::Last, None).unwrap();
    }
    let allocated = ALLOCATIONS.with(Cell::get) - before;
    all.extend(s.forward(&[33], Phase::Decode, &mut memory, Logits::Last, None).unwrap());
    (all, allocated, s)
}

#[test]
fn no_bit_depends_on_where_the_trunk_is() {
    let _turn = turn();
    let int8 = prepared::folder();
    let options = ImportOptions { trunk: TrunkFormat::Int8, ..ImportOptions::default() };
    import(&repo("models/argo-mini"), int8.path(), &options, &mut |_| {}).unwrap();
    for store in [mini_store(), int8.path()] {
        let model = |place| Model::load_as(store, None, place).unwrap();
        let (want, mapped_allocations, _) = logits(&model(TrunkResidency::Mapped));
        let loaded = model(TrunkResidency::Loaded);
        let facts = loaded.decoder.trunk_facts();
        assert!(facts.loaded_bytes >= facts.payload_bytes && facts.mapped_bytes == 0 && facts.locked_bytes == 0);
        assert!(logits(&loaded).0 == want, "loaded");
        let streamed = model(TrunkResidency::Streamed);
        let (got, allocations, session) = logits(&streamed);
        assert!(got == want, "streamed");
        assert_eq!(allocations, mapped_allocations, "reading blocks allocates nothing");
        let (read, blocks) = (session.trunk().counters().unwrap(), streamed.decoder.blocks().unwrap());
        // five passes want logits, the first does not
        assert_eq!(read.bytes, blocks.pass_bytes(false) + 5 * blocks.pass_bytes(true));
        assert_eq!(read.blocks, blocks.pass_blocks(false) + 5 * blocks.pass_blocks(true));
        assert_eq!((read.ahead, read.unused_bytes), (read.blocks - 1, 0), "only the very first block was not foreseen");
        assert!(blocks.pass_bytes(true) > facts.payload_bytes / 2, "most of the trunk");
        assert!(blocks.parts().iter().all(|p| p.len() <= 2), "a layer lies together, its router apart");
    }
}

#[test]
fn a_streamed_trunk_without_a_source_is_refused() {
    let _turn = turn();
    let model = Model::load_as(mini_store(), None, TrunkResidency::Streamed).unwrap();
    let options = SessionOptions { max_context: 8, max_rows: 8, clock: Clock::start(), guess: GuessSource::None };
    let mut s = Session::new(model.decoder.clone(), options).unwrap();
    let mut memory = model.resident().unwrap();
    let e = s.forward(&[5], Phase::Prefill, &mut memory, Logits::Last, None).unwrap_err().to_string();
    assert!(e.contains("no source for it"), "{e}");
    let config = ModelConfig::parse(&std::fs::read_to_string(mini_store().join("config.json")).unwrap()).unwrap();
    let trunk = argodrive::store::memory::trunk_of_checkpoint(
        &argodrive::model::checkpoint::Checkpoint::open(&repo("models/argo-mini")).unwrap(),
    );
    assert!(Decoder::load(config, trunk.unwrap().into()).unwrap().blocks().is_none());
}

fn decode(store: &Path, more: &[&str]) -> assert_cmd::Command {
    let mut command = argodrive(["decode", "--json", "--max-new", "6", "--prompt", "The router names", "--store"]);
    command.arg(store).args(more);
    command
}

fn setting<'a>(run: &'a Value, name: &str) -> &'a Value {
    run["settings"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap()
}

#[test]
fn a_run_proves_where_its_trunk_was() {
    let _turn = turn();
    let plain = json_of(&mut decode(mini_store(), &[]));
    assert_eq!(setting(&plain, "trunk")["verdict"], "proved");
    assert_eq!((&plain["trunk"]["streamed_bytes"], &plain["trunk_label"]), (&0.into(), &Value::Null));
    for (place, figure) in [("loaded", "loaded_bytes"), ("streamed", "streamed_bytes"), ("mapped", "mapped_bytes")] {
        let run = json_of(&mut decode(mini_store(), &["--trunk", place]));
        assert_eq!(run["token_ids"], plain["token_ids"], "{place}");
        let seen = setting(&run, "trunk");
        assert_eq!((seen["verdict"].as_str(), seen["asked"].as_str()), (Some("proved"), Some(place)), "{seen}");
        assert!(run["trunk"][figure].as_u64().unwrap() > 1_000_000, "{place}: {}", run["trunk"]);
    }
    let (code, _, text) = outcome(decode(mini_store(), &["--trunk", "nowhere"]).arg("--resident"));
    assert_eq!(code, 2);
    has(&text, &["nowhere", "mapped, loaded, locked or streamed"]);
}

#[test]
fn a_locked_trunk_is_locked_or_the_limit_is_named() {
    let _turn = turn();
    let store = mini_store().to_str().unwrap();
    let binary = assert_cmd::cargo::cargo_bin("argodrive");
    let line = |limit: &str| {
        let run = "decode --json --max-new 2 --prompt x --trunk locked --store";
        format!("ulimit -l {limit} && exec {} {run} {store}", binary.display())
    };
    let out = |limit: &str| std::process::Command::new("sh").args(["-c", &line(limit)]).output().unwrap();
    for limit in ["16", "unlimited"] {
        let out = out(limit);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        if !out.status.success() {
            // whoever may not lock so much, or not raise the limit, is told which one it is
            assert!(
                said.contains("RLIMIT_MEMLOCK is") && said.contains("--trunk loaded") || said.contains("ulimit"),
                "{said}"
            );
            continue;
        }
        let run: Value = serde_json::from_slice(&out.stdout).unwrap();
        let seen = setting(&run, "trunk");
        assert_eq!(seen["verdict"], "proved", "{seen}");
        assert!(seen["seen"].as_str().unwrap().contains("the kernel says that"), "{seen}");
        assert_eq!(run["trunk"]["locked_bytes"], run["trunk"]["loaded_bytes"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn threads_are_where_the_kernel_says() {
    let _turn = turn();
    let allowed = argodrive::sys::affinity::of_thread(0).unwrap();
    let (first, last) = (allowed.cpus()[0], *allowed.cpus().last().unwrap());
    let asked = format!("compute={first},readers={last}");
    let run = json_of(&mut decode(mini_store(), &["--affinity", &asked, "--threads", "2"]));
    let seen = setting(&run, "affinity");
    assert_eq!(seen["verdict"], "proved", "{seen}");
    has(
        seen["seen"].as_str().unwrap(),
        &[&format!("2 compute threads on CPU {first},"), &format!("reader threads on CPU {last};")],
    );
    // those for whom nothing was chosen are not drawn along
    let alone = json_of(&mut decode(mini_store(), &["--affinity", &format!("compute={first}"), "--threads", "2"]));
    let seen = setting(&alone, "affinity");
    assert_eq!(seen["verdict"], "proved", "{seen}");
    has(seen["seen"].as_str().unwrap(), &[&format!("reader threads on CPU {allowed};")]);
    let plain = json_of(&mut decode(mini_store(), &["--threads", "2"]));
    assert_eq!(run["token_ids"], plain["token_ids"]);
    let seen = setting(&plain, "affinity");
    assert_eq!((seen["verdict"].as_str(), seen["asked"].as_str()), (Some("proved"), Some("off")), "{seen}");
    let allowed = format!("allowed are {allowed}");
    refused(&mut decode(mini_store(), &["--affinity", "compute=1000"]), &["CPU 1000 does not exist", &allowed]);
    let (code, _, said) = outcome(&mut decode(mini_store(), &["--affinity", "gpu=1"]));
    assert_eq!(code, 2);
    has(&said, &["only compute and readers", "compute=0-1,readers=2-3"]);
}
