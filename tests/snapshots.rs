//! Snapshots with the real binary: whatever moment it is killed at, the text goes on as if nothing had happened; what is damaged,
//! newer or of another run is refused or passed over.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::decode::snapshot::parse_header;
use argodrive::model::text_stream::TextStream;
use argodrive::model::tokenizer::Tokenizer;
use argodrive::store::snapshot_file::{KEPT, SnapshotFile, find, list};
use assert_cmd::Command;
use prepared::{argodrive, damage, has, ids, json_of, mini_store, outcome, refused, repo, tiny_store};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

const PROMPT: &str = "The block comes back when the device has time.";
/// Tokens that a kill may cost.
const EVERY: usize = 4;
/// Tokens of a text that is killed again and again.
const LONG: usize = 240;

/// `decode` of the tiny model.
fn decode(args: &[&str]) -> Command {
    let mut command = argodrive(["decode", "--json", "--store"]);
    command.arg(tiny_store()).args(args);
    command
}

fn verdict<'a>(run: &'a Value, setting: &str) -> &'a str {
    let settings = run["settings"].as_array().unwrap();
    settings.iter().find(|s| s["name"] == setting).unwrap()["verdict"].as_str().unwrap()
}

fn generated(file: &SnapshotFile) -> usize {
    parse_header(file.header(), file.payload_bytes()).unwrap().generated_tokens
}

/// A way to decode: what shapes the text, and what does not.
struct Way {
    shapes: &'static [&'static str],
    beside: &'static [&'static str],
}

const WAYS: [Way; 3] = [
    Way { shapes: &[], beside: &[] },
    Way { shapes: &["--temperature", "0.9", "--top-p", "0.95", "--seed", "12"], beside: &[] },
    Way { shapes: &[], beside: &["--speculate", "ngram", "--draft-depth", "3"] },
];

/// An uninterrupted text, and how many bytes of it are shown with each token.
struct Whole {
    ids: Vec<u32>,
    text: String,
    shown: Vec<usize>,
}

fn whole(way: &Way) -> Whole {
    let long = LONG.to_string();
    // special tokens are shown, so that nearly every token can be seen
    let args = ["--special", "--max-new", &long, "--prompt", PROMPT];
    let run = json_of(decode(&args).args(way.shapes).args(way.beside));
    let (ids, text) = (ids(&run["token_ids"]), run["text"].as_str().unwrap().to_string());
    let (tokenizer, mut stream, mut bytes) = (Tokenizer::open(tiny_store()).unwrap(), TextStream::new(), 0);
    let shown = ids.iter().map(|id| {
        bytes += stream.push(&tokenizer.decode_bytes(&[*id])).len();
        bytes
    });
    Whole { shown: shown.collect(), text, ids }
}

/// Begins a text in `folder`, or goes on with it.
fn spawn(way: &Way, folder: &Path) -> Child {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_argodrive"));
    command.args(["decode", "--threads", "1", "--store"]).arg(tiny_store()).args(way.beside);
    if list(folder).unwrap().is_empty() {
        let (long, every) = (LONG.to_string(), EVERY.to_string());
        command
            .args(["--special", "--prompt", PROMPT, "--max-new", &long, "--snapshot-every", &every])
            .args(way.shapes);
        command.arg("--snapshot-dir").arg(folder);
    } else {
        command.arg("--resume").arg(folder);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Kills `decode` so many times, each time at a random moment, and checks what is left.
fn kill_many(kills: usize) {
    let mut rng = fastrand::Rng::with_seed(41);
    let wholes: Vec<Whole> = WAYS.iter().map(whole).collect();
    let (mut killed, mut went_on, mut texts, mut unfinished, mut worst) = (0, 0, 0, 0, 0);
    while killed < kills {
        let (way, want) = (&WAYS[texts % WAYS.len()], &wholes[texts % WAYS.len()]);
        let dir = prepared::folder();
        let folder = dir.path().join("snapshots");
        // a machine too busy to reach the next snapshot in time gets more of it
        let (mut so_far, mut patience) = (0, 1);
        loop {
            let mut child = spawn(way, &folder);
            let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
            let reader = std::thread::spawn(move || {
                let mut text = Vec::new();
                out.read_to_end(&mut text).unwrap();
                text
            });
            let complaints = std::thread::spawn(move || {
                let mut said = String::new();
                err.read_to_string(&mut said).unwrap();
                said
            });
            if killed < kills {
                std::thread::sleep(Duration::from_millis(rng.u64(10..300) * patience));
                let _ = child.kill();
            }
            let status = child.wait().unwrap();
            let mut text = reader.join().unwrap();
            let said = complaints.join().unwrap();
            if status.success() {
                assert_eq!(text, format!("{}\n", want.text).into_bytes());
                break;
            }
            assert_eq!(status.signal(), Some(9), "{said}");
            killed += 1;
            let whole = want.text.as_bytes();
            if text.len() == whole.len() + 1 && text.last() == Some(&b'\n') {
                text.pop(); // the text was over, the program was not
            }
            let same = text.iter().zip(whole).take_while(|(a, b)| a == b).count();
            assert!(same == text.len(), "what was shown leaves the text at byte {same} of {}", text.len());
            // as many tokens as it takes to show so much
            let shown =
                want.shown.iter().take_while(|bytes| **bytes < text.len()).count() + usize::from(!text.is_empty());
            let newest = list(&folder).unwrap();
            assert!(newest.len() <= KEPT + 1, "{newest:?}");
            let kept = if newest.is_empty() {
                0
            } else {
                let found = find(&folder).unwrap();
                assert!(
                    found.passed_over.is_empty(),
                    "a snapshot is there wholly or not at all: {:?}",
                    found.passed_over
                );
                generated(&found.file)
            };
            let files = fs::read_dir(&folder).map_or(0, Iterator::count);
            unfinished += usize::from(files > newest.len());
            let lost = shown.saturating_sub(kept);
            worst = worst.max(lost);
            assert!(lost <= EVERY, "{shown} tokens were shown and {kept} kept");
            went_on += usize::from(kept > 0);
            patience = if kept > so_far { 1 } else { patience + 1 };
            so_far = kept;
        }
        texts += 1;
        let last = json_of(decode(&["--resume"]).arg(&folder).args(way.beside));
        assert_eq!((ids(&last["token_ids"]), &last["prefill_passes"]), (want.ids.clone(), &Value::from(0)));
    }
    println!(
        "{killed} kills, {unfinished} of them while a snapshot was written; {texts} texts whole; at most {worst} tokens lost"
    );
    assert!(killed == kills && went_on > kills / 4, "{went_on} of {killed} kills left something to go on from");
}

#[test]
fn killed_at_any_moment_it_loses_at_most_n_tokens_and_gives_the_same_text() {
    kill_many(120);
}

#[test]
#[ignore = "the same for a quarter of an hour"]
fn killed_for_a_long_time() {
    kill_many(4000);
}

#[test]
fn a_resumed_text_is_the_uninterrupted_one_and_no_prompt_is_read() {
    let draft = repo("models/argo-mini-draft");
    let model = ["--speculate", "model", "--draft-depth", "3", "--draft-accept", "exact-match", "--draft-model"];
    let model: Vec<&str> = model.into_iter().chain([draft.to_str().unwrap()]).collect();
    let sampled = ["--temperature", "0.8", "--top-k", "40", "--seed", "5"];
    let cases: [(&[&str], &[&str]); 4] = [
        (&[], &["--resident"]),
        (&sampled, &[]),
        (&[], &["--speculate", "ngram", "--draft-depth", "3"]),
        (&sampled, &model),
    ];
    for (shapes, beside) in cases {
        let dir = prepared::folder();
        let folder = dir.path().to_str().unwrap();
        let mini = |args: &[&str]| {
            let mut command = argodrive(["decode", "--json", "--store"]);
            json_of(command.arg(mini_store()).args(args))
        };
        let base = ["--max-new", "30", "--prompt", "The sun rose. The dog ran. The sun rose. The dog"];
        let plain = mini(&[&base[..], shapes].concat());
        let every = ["--snapshot-every", "7", "--snapshot-dir", folder];
        let kept = mini(&[&base[..], &every, shapes, beside].concat());
        assert_eq!(kept["token_ids"], plain["token_ids"], "{beside:?}");
        assert_eq!((verdict(&kept, "snapshot_every"), verdict(&kept, "resume")), ("proved", "proved"), "{kept}");
        assert_eq!(list(dir.path()).unwrap().len(), KEPT);
        // with everything that the snapshot does not hold, and without
        for beside in [beside, &[]] {
            let resumed = mini(&[&["--resume", folder], beside].concat());
            for key in ["token_ids", "text", "prompt_token_ids"] {
                assert_eq!(resumed[key], plain[key], "{key} of {beside:?}");
            }
            assert_eq!(resumed["prefill_passes"], 0);
            assert!(resumed["resumed"]["tokens"].as_u64().unwrap() >= 16 && resumed["prefill"].is_null());
            for setting in ["resume", "max_new", "temperature"] {
                assert_eq!(verdict(&resumed, setting), "proved", "{setting} of {beside:?}");
            }
            assert_ne!(verdict(&resumed, "seed"), "contradicted");
        }
        assert_eq!((plain["prefill_passes"].as_u64(), plain["snapshots"].is_null()), (Some(1), true));
    }
}

/// Twenty tokens with a snapshot every six, in `folder`.
fn twenty(folder: &str) -> Value {
    let text = ["--max-new", "20", "--prompt", PROMPT];
    json_of(decode(&text).args(["--snapshot-every", "6", "--snapshot-dir", folder]))
}

#[test]
fn a_text_may_become_longer_and_is_kept_on_the_way() {
    let dir = prepared::folder();
    let folder = dir.path().to_str().unwrap();
    let first = twenty(folder);
    assert_eq!(
        (first["snapshots"]["written"].as_u64(), first["snapshots"]["last_tokens"].as_u64()),
        (Some(3), Some(18))
    );
    let longer = json_of(&mut decode(&["--max-new", "40", "--resume", folder]));
    let plain = json_of(&mut decode(&["--max-new", "40", "--prompt", PROMPT]));
    assert_eq!(longer["token_ids"], plain["token_ids"]);
    // every 6 tokens from 18 on: 24, 30, 36
    let (snapshots, bytes) = (&longer["snapshots"], longer["snapshots"]["last_bytes"].as_u64());
    assert_eq!((snapshots["written"].as_u64(), snapshots["last_tokens"].as_u64()), (Some(3), Some(36)));
    assert_eq!(bytes, Some(fs::metadata(&list(dir.path()).unwrap()[0].path).unwrap().len()));
    // the record of a resumed run holds what the snapshot said, and the same text begun anew is remarked upon
    let (code, _, notes) = outcome(&mut {
        let mut again = argodrive(["decode", "--max-new", "2", "--snapshot-every", "6", "--prompt", PROMPT, "--store"]);
        again.arg(tiny_store()).args(["--snapshot-dir", folder]);
        again
    });
    assert_eq!(code, 0, "{notes}");
    has(&notes, &["of this very text", "--resume would have gone on"]);
}

#[test]
fn damage_is_passed_over_with_a_sentence_and_never_read() {
    let dir = prepared::folder();
    let folder = dir.path().to_str().unwrap();
    let plain = twenty(folder);
    let files: Vec<_> = list(dir.path()).unwrap().into_iter().map(|n| n.path).collect();
    damage(&files[0], fs::metadata(&files[0]).unwrap().len() / 2);
    refused(decode(&["--resume"]).arg(&files[0]), &["damaged", "not those that were written"]);
    let (code, stdout, notes) = outcome(&mut decode(&["--resume", folder]));
    assert_eq!(code, 0, "{notes}");
    has(&notes, &["damaged", "going on from the one before"]);
    let run: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&run["token_ids"], &run["resumed"]["tokens"]), (&plain["token_ids"], &Value::from(12)));
    // the resumed run has written a good one over it; both are cut now
    let files: Vec<_> = list(dir.path()).unwrap().into_iter().map(|n| n.path).collect();
    for file in &files {
        fs::File::options().write(true).open(file).unwrap().set_len(999).unwrap();
    }
    refused(
        &mut decode(&["--resume", folder]),
        &["every snapshot of the newest text is damaged", "from its prompt again"],
    );
}

#[test]
fn another_run_is_refused_by_what_differs() {
    let dir = prepared::folder();
    let folder = dir.path().to_str().unwrap();
    refused(&mut decode(&["--resume", folder]), &["no snapshot is there"]);
    let shapes = ["--temperature", "0.5", "--seed", "3"];
    json_of(
        decode(&["--max-new", "9", "--prompt", PROMPT, "--snapshot-every", "4", "--snapshot-dir", folder]).args(shapes),
    );
    let says = |args: &[&str], words: &[&str]| refused(decode(&["--resume", folder]).args(args), words);
    says(&["--seed", "4"], &["--seed 3", "--seed 4 would give other tokens"]);
    says(&["--temperature", "0.6"], &["--temperature 0.5"]);
    says(&["--kernels", "scalar"], &["kernels"]);
    says(&["--max-context", "99"], &["--max-context the model's own"]);
    says(&["--prompt", "Another one"], &["another prompt"]);
    says(&["--max-new", "8"], &["8 tokens already", "larger --max-new"]);
    refused(
        argodrive(["decode", "--resume", folder, "--store"]).arg(mini_store()),
        &["decoded by model", "give the store"],
    );
    let set = dir.path().join("set.jsonl");
    fs::write(&set, "\"one\"\n\"two\"\n").unwrap();
    for args in [["--resume", folder], ["--snapshot-every", "4"]] {
        refused(decode(&args).arg("--prompts").arg(&set), &["keep one text", "one by one"]);
    }
    refused(&mut decode(&["--prompt", "x", "--snapshot-dir", folder]), &["--snapshot-dir does nothing without"]);
    let drafts = ["--prompt", "x", "--snapshot-every", "4", "--speculate", "ngram"];
    refused(&mut decode(&drafts), &["may add 5 tokens"]);
    let draws = ["--temperature", "1", "--speculate", "model", "--draft-model", "nowhere", "--snapshot-every", "9"];
    refused(decode(&draws).args(["--prompt", "x"]), &["draft model's own draws", "exact-match"]);
}

#[test]
fn the_first_version_of_the_format_is_read() {
    let file = repo("tests/fixtures/snapshots/v1-tiny-scalar.snapshot");
    // nothing is written beside it
    let args = ["--snapshot-every", "0", "--resume"];
    let run = json_of(decode(&args).arg(&file));
    let settings = ["--prompt", "The block comes back", "--max-new", "12", "--temperature", "0.7", "--seed", "9"];
    let plain = json_of(decode(&settings).args(["--kernels", "scalar"]));
    assert_eq!((&run["token_ids"], &run["resumed"]["tokens"]), (&plain["token_ids"], &Value::from(6)));
}

#[test]
fn snapshots_of_other_texts_stay_and_are_told_with_how_to_remove_them() {
    let dir = prepared::folder();
    let folder = dir.path().to_str().unwrap();
    let text = |prompt: &'static str| ["--prompt", prompt, "--max-new", "5", "--snapshot-every", "2", "--snapshot-dir"];
    let first = json_of(decode(&text("one")).arg(folder));
    assert!(first["snapshots"].get("other_texts").is_none(), "{}", first["snapshots"]);
    let before: Vec<_> = list(dir.path()).unwrap();
    assert_eq!(before.len(), KEPT);
    let second = json_of(decode(&text("two")).arg(folder));
    let bytes: u64 = before.iter().map(|n| fs::metadata(&n.path).unwrap().len()).sum();
    let other = serde_json::json!([{"name": before[0].text, "files": KEPT, "bytes": bytes}]);
    assert_eq!(second["snapshots"]["other_texts"], other);
    let (code, _, said) = outcome(argodrive(["decode", "--store"]).arg(tiny_store()).args(text("three")).arg(folder));
    assert_eq!(code, 0, "{said}");
    has(&said, &["4 snapshots of 2 other texts (", &before[0].text, "-NAME.snapshot"]);
    assert!(before.iter().all(|n| n.path.exists()), "nobody has removed them");
}
