//! What makes the binary pleasant: completions, manual pages, tables of 80 columns, silence where there is no terminal, and errors
//! that say what to do next.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::cli::command;
use assert_cmd::Command;
use prepared::{Drives, argodrive, folder, has, outcome, policy, refused, repo, tiny_store};
use std::fs;
use std::process::Command as Program;

const WIDTH: usize = 80;

#[test]
fn completions_name_every_command_and_bash_can_read_them() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, script, stderr) = outcome(&mut argodrive(["completions", shell]));
        assert_eq!((code, stderr.as_str()), (0, ""));
        for sub in command().get_subcommands() {
            assert!(script.contains(sub.get_name()), "{shell}: {}", sub.get_name());
        }
        assert!(script.contains("queue-depth"), "{shell}: flags too");
        if shell == "bash" {
            let dir = folder();
            let file = dir.path().join("argodrive.bash");
            fs::write(&file, &script).unwrap();
            // sourced, and asked what may follow `argodrive dec`
            let ask = "source \"$1\"; COMP_WORDS=(argodrive dec); COMP_CWORD=1; _argodrive argodrive dec argodrive; \
                       echo \"${COMPREPLY[@]}\"";
            match Program::new("bash").args(["-c", ask, "bash"]).arg(&file).output() {
                Ok(out) => {
                    let said = String::from_utf8_lossy(&out.stdout);
                    assert_eq!(said.trim(), "decode", "{}", String::from_utf8_lossy(&out.stderr));
                }
                Err(_) => assert!(std::env::var_os("CI").is_none(), "a shell to try the completions in is missing"),
            }
        }
    }
}

#[test]
fn there_is_a_manual_page_for_every_command() {
    let (code, page, _) = outcome(&mut argodrive(["man"]));
    assert!(code == 0 && page.contains(".TH argodrive 1"));
    let dir = folder();
    let out = dir.path().join("man1");
    argodrive(["man", "--out"]).arg(&out).assert().success();
    for sub in command().get_subcommands() {
        let page = fs::read_to_string(out.join(format!("argodrive-{}.1", sub.get_name()))).unwrap();
        assert!(page.contains("Examples:"), "{}", sub.get_name());
    }
    assert!(out.join("argodrive-trace-report.1").exists() && out.join("argodrive.1").exists());
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    refused(argodrive(["man", "--out"]).arg(file.join("x")), &["--out"]);
}

#[test]
fn the_version_names_the_source() {
    let (_, long, _) = outcome(&mut argodrive(["--version"]));
    let rest = long.strip_prefix(concat!("argodrive ", env!("CARGO_PKG_VERSION"), " (")).unwrap();
    let revision = rest.trim_end().strip_suffix(')').unwrap();
    let commit = revision.strip_suffix("-dirty").unwrap_or(revision);
    let is_commit = commit.len() == 12 && commit.bytes().all(|b| b.is_ascii_hexdigit());
    assert!(is_commit || commit == "unknown", "{long}");
}

/// What a command prints, whatever it ends with.
fn printed(mut run: Command, code: i32) -> (String, String) {
    let (seen, stdout, stderr) = outcome(&mut run);
    assert_eq!(seen, code, "{run:?}\n{stdout}{stderr}");
    (stdout, stderr)
}

#[test]
fn tables_fit_eighty_columns_and_nothing_is_drawn_where_there_is_no_terminal() {
    let drives = Drives::new(2, None);
    let plan = drives.plan(tiny_store(), "full-mirror");
    let at = |name: &str| drives.dir.path().join(name);
    let with = |args: &[&str]| {
        let mut run = argodrive([]);
        run.args(args).current_dir(drives.dir.path()).env("NO_COLOR", "");
        run
    };
    let (store, toml, plan_arg) =
        (tiny_store().to_str().unwrap(), drives.toml.to_str().unwrap(), plan.to_str().unwrap());
    let mirror = policy("full-mirror");
    let prompt = at("prompt.txt");
    fs::write(&prompt, "a b c").unwrap();
    let tiny = repo("tests/fixtures/oracle/tiny");
    let checkpoint = tiny.to_str().unwrap();
    let campaign = repo("results/samples/dispatch");
    let runs: [(&[&str], i32); 19] = [
        (&["import", checkpoint, "--store", "again"], 0),
        (&["drives", "--drives", toml], 0),
        (&["plan", "--store", store, "--drives", toml, "--policy", mirror.to_str().unwrap(), "--out", "p.json"], 0),
        (&["stage", plan_arg, "--dry-run"], 0),
        (&["stage", plan_arg], 0),
        (&["verify", plan_arg], 0),
        (&["prune", "--keep", plan_arg, "--dry-run"], 0),
        (&["decode", "--store", store, "--plan", plan_arg, "--prompt", "abc", "--max-new", "6", "--trace", "trace"], 0),
        (
            &[
                "decode",
                "--store",
                store,
                "--plan",
                plan_arg,
                "--prompt",
                "abc",
                "--max-new",
                "6",
                "--assert",
                "--out",
                "r",
            ],
            0,
        ),
        (&["heat", "--store", store, "--prompt-file", "prompt.txt", "--max-new", "4", "--out", "heat.json"], 0),
        (&["trace", "report", "trace"], 0),
        (&["trace", "reissue", "trace", "--plan", plan_arg, "--gaps", "none"], 0),
        (&["simulate", "trace", "--plan", plan_arg, "--add-drive", "rate=1GB/s,latency=80us"], 0),
        (&["results", "parquet", "trace"], 0),
        (&["estimate", checkpoint, "--drives", toml, "--ram", "8GB", "--rates", "1GB/s,1GB/s"], 0),
        (&["synth", "--as-checkpoint", "random", "--skew", "1", "--check", "64"], 0),
        (&["results", "r"], 0),
        (&["results", "list", campaign.to_str().unwrap()], 0),
        (&["experiment", "run", "experiment.toml", "--dry-run"], 0),
    ];
    let text = fs::read_to_string(repo("experiments/dispatch.toml")).unwrap();
    fs::write(at("experiment.toml"), text.replace("../", &format!("{}/", repo("").display()))).unwrap();
    for (args, code) in runs {
        let (stdout, stderr) = printed(with(args), code);
        assert!(!stdout.contains('\u{1b}') && !stderr.contains(['\u{1b}', '\r']), "{args:?}: {stderr:?}");
        // a path is never cut, and remarks are sentences that a terminal wraps
        for line in stdout.lines().chain(stderr.lines()) {
            let wide = line.chars().count() > WIDTH;
            assert!(
                !wide || line.contains('/') || line.starts_with("argodrive: "),
                "{args:?}: {} columns: {line}",
                line.chars().count()
            );
        }
    }
}

#[test]
fn mistakes_of_a_new_user_are_answered_with_what_to_do() {
    let dir = folder();
    let at = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let store = tiny_store();
    let toml = at("drives.toml", "[[drive]]\nname = \"amber\"\npath = \"/nowhere/amber\"\n");
    let plan = |policy: &str| {
        let mut run = argodrive(["plan", "--out", "p.json", "--store"]);
        run.arg(store).arg("--drives").arg(&toml).args(["--policy", policy]).current_dir(dir.path());
        run
    };
    // the name of a policy is not a file
    refused(&mut plan("full-mirror"), &["--policy full-mirror", "layouts/full-mirror.toml"]);
    at("typo.toml", "policy = \"full-miror\"\n");
    refused(&mut plan("typo.toml"), &["typo.toml", "not a valid policy", "did you mean `full-mirror`?"]);
    refused(argodrive(["stage"]).arg(&toml), &["not a valid plan", "argodrive plan --out"]);
    refused(argodrive(["stage", "nope.json"]).current_dir(&dir), &["plan nope.json", "argodrive plan --out"]);
    refused(argodrive(["trace", "report"]).arg(dir.path()), &["trace.json", "decode --trace"]);
    refused(argodrive(["ab", "a.toml", "b.toml"]).current_dir(&dir), &["a.toml: no such file", "decode --config"]);
    // a file of another kind is called by its name
    refused(&mut plan("drives.toml"), &["--policy drives.toml: this is a drives file", "give a layout policy"]);
    refused(argodrive(["drives", "--drives"]).arg(policy("full-mirror")), &["this is a layout policy", "[[drive]]"]);
    refused(argodrive(["drives", "--drives"]).arg(dir.path()), &["this is a folder; give a file"]);
    let empty = at("empty", "");
    refused(argodrive(["drives", "--drives"]).arg(&empty), &["empty: the file is empty", "[[drive]]"]);
    refused(argodrive(["drives", "--drives", "none.toml"]).current_dir(&dir), &["drives file none.toml", "[[drive]]"]);
    let manifest = store.join("store.json");
    refused(argodrive(["heat", "--out", "h.json", "--merge"]).arg(&manifest), &["this is the manifest of a store"]);
    refused(
        argodrive(["decode", "--prompt", "a", "--store"]).arg(&manifest),
        &["store.json: this is a file", "folder"],
    );
    refused(argodrive(["trace", "report"]).arg(&empty), &["decode --trace"]);
    refused(argodrive(["results"]).arg(&empty), &["no record", "give a results folder"]);
    refused(argodrive(["results", "plot"]).arg(dir.path()), &["experiment.json", "ladder.json", "one ladder"]);
    refused(argodrive(["adopt", "none", "--checkpoint", "x"]).current_dir(&dir), &["none: no such folder", ".bin"]);
    refused(
        argodrive(["estimate", "none", "--drives"]).arg(&toml).args(["--ram", "8GB"]).current_dir(&dir),
        &["none: no such file", "config.json"],
    );
    let config = at("run.toml", "[reader]\ndispatch = \"splt\"\n");
    refused(argodrive(["decode", "--config"]).arg(&config), &["run.toml", "did you mean `split`?"]);
    for (args, words) in [
        (["estimate", ".", "--drives", "x", "--ram", "lots"].as_slice(), ["`lots` is not a size such as", "number"]),
        (&["decode", "--sotre", "x"], ["similar argument", "--store"]),
        (&["decod"], ["similar subcommand", "decode"]),
        (&["decode", "--dispatch", "splt"], ["similar value", "split"]),
    ] {
        let (code, stdout, stderr) = outcome(argodrive([]).args(args));
        assert_eq!((code, stdout.as_str()), (2, ""));
        has(&stderr, &words);
    }
    let (code, _, stderr) = outcome(argodrive(["experiment"]).arg(repo("experiments/aa.toml")));
    assert_eq!(code, 2);
    has(&stderr, &["argodrive experiment run", "aa.toml"]);
}
