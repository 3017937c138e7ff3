//! int8 activations as a user asks for them: what is said about them, that they can be refused, and that they are off unless
//! asked for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use assert_cmd::Command;
use prepared::{dense_store, folder, mini_store};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

const LABEL: &str = "activations int8 (not exact)";
const PROMPT: &str = "The router names the experts, and the block comes back when the device has time.";

fn decode(store: &Path, more: &[&str]) -> Output {
    let mut command = Command::cargo_bin("argodrive").unwrap();
    command.args(["decode", "--prompt", PROMPT, "--max-new", "12", "--allow-fallback", "--store"]).arg(store);
    command.args(more).output().unwrap()
}

/// What a run says. One that a guard rejects, because others use the machine too, has said it all the same.
fn json(out: &Output) -> Value {
    let why = String::from_utf8_lossy(&out.stderr);
    assert!(matches!(out.status.code(), Some(0 | 1)) && !why.contains("activations:"), "{why}");
    serde_json::from_slice(&out.stdout).unwrap()
}

fn setting(of: &Value) -> Value {
    let all = of["settings"].as_array().unwrap();
    all.iter().find(|s| s["name"] == "activations").unwrap().clone()
}

/// Products with MXFP4 weights: with int8 activations, and with f32 ones.
fn mxfp4(of: &Value) -> (u64, u64) {
    let all = of["activations"]["products"].as_array().unwrap();
    let mxfp4 = all.iter().find(|p| p["weights"] == "MXFP4").unwrap();
    (mxfp4["int8"].as_u64().unwrap(), mxfp4["f32"].as_u64().unwrap())
}

#[test]
fn int8_activations_are_proved_labelled_and_measured() {
    let out = folder();
    let results = out.path().join("results");
    let asked = ["--activations", "int8", "--reference", "--threads", "2", "--json", "--assert", "--out"];
    let said = json(&decode(mini_store(), &[&asked[..], &[results.to_str().unwrap()]].concat()));
    assert_eq!((said["activations_label"].as_str(), setting(&said)["verdict"].as_str()), (Some(LABEL), Some("proved")));
    assert!(matches!(mxfp4(&said), (1.., 0)), "{}", setting(&said));
    let error = &said["activations"]["error"];
    let (apart, largest) = (error["largest_difference"].as_f64().unwrap(), error["largest_exact"].as_f64().unwrap());
    assert!(apart > 0.0 && apart < 0.2 * largest && error["rows"].as_u64() == Some(16), "not exact, but near: {error}");
    assert_eq!(said["reference"]["same_tokens"], true);
    let record = walk(&results).into_iter().find(|p| p.ends_with("record.json")).unwrap();
    let kept: Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    assert_eq!(kept["config"]["model"]["activations"], "int8");
    for field in ["label", "products"] {
        assert_eq!(kept["activations"][field], said["activations"][field]);
    }
    assert_eq!(kept["activations"]["error"]["same_argmax"], error["same_argmax"]);
    // the same bits with one thread and every expert in memory, and again from the record
    let alone = json(&decode(mini_store(), &["--activations", "int8", "--resident", "--threads", "1", "--json"]));
    assert_eq!(alone["token_ids"], said["token_ids"]);
    assert_eq!(alone["activations"]["error"], *error);
    let text = decode(mini_store(), &["--config", record.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&text.stderr).replace('\n', " ");
    assert!(text.contains(LABEL) && text.contains("logits of 16 tokens differ"), "{text}");
}

#[test]
fn off_is_proved_too_and_products_are_exact() {
    let said = json(&decode(mini_store(), &["--activations", "f32", "--json"]));
    assert_eq!((&said["activations_label"], &said["activations"]["error"]), (&Value::Null, &Value::Null));
    assert_eq!(
        (setting(&said)["verdict"].as_str(), setting(&said)["under_test"].as_bool()),
        (Some("proved"), Some(true))
    );
    assert!(matches!(mxfp4(&said), (0, 1..)), "{}", setting(&said));
}

#[test]
fn a_model_without_such_weights_refuses_them() {
    let out = decode(dense_store(), &["--activations", "int8"]);
    let why = String::from_utf8_lossy(&out.stderr).replace('\n', " ");
    assert_eq!(out.status.code(), Some(2), "{why}");
    assert!(
        why.contains("--activations int8") && why.contains("bfloat16 trunk") && why.contains("--trunk int8"),
        "{why}"
    );
    let unknown = decode(dense_store(), &["--activations", "int4"]);
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("use f32 or int8"));
    // with an int8 trunk it has such weights; both labels are said
    let folder = folder();
    let again = folder.path().join("int8");
    let mut import = Command::cargo_bin("argodrive").unwrap();
    import.arg("import").arg(prepared::repo("models/argo-mini-draft")).arg("--store").arg(&again);
    assert!(import.args(["--trunk", "int8"]).output().unwrap().status.success());
    let said = json(&decode(&again, &["--activations", "int8", "--json"]));
    assert_eq!(setting(&said)["verdict"], "proved", "{}", setting(&said));
    assert_eq!(said["trunk_label"], "trunk int8 (not weight-exact)");
    assert!(said["activations"]["error"]["largest_difference"].as_f64().unwrap() > 0.0);
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    entries.flat_map(|p| if p.is_dir() { walk(&p) } else { vec![p] }).collect()
}
