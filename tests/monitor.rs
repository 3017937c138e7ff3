//! The monitor as a user runs it: beside a traced decode, and alone over a device, a path or a process. Asserts counts and
//! identities; how fast or how punctual a machine is proves nothing about the code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;

use argodrive::drive::blockmap::BlockMap;
use argodrive::replay::windows::{self, Scope, WINDOWS_FILE};
use argodrive::sys::direct::open_direct;
use argodrive::trace::log::read_header;
use prepared::{Drives, argodrive, folder, has, mini_store, outcome, refused, tiny_store};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The one device under `path`, or `None` (with a word about it) where tests run on a file system without one.
fn device_under(path: &Path) -> Option<String> {
    let found = BlockMap::system().of_path(path);
    let name = found.as_ref().ok().filter(|m| m.devices.len() == 1).map(|m| m.devices[0].name.clone());
    if name.is_none() {
        assert!(std::env::var_os("CI").is_none(), "no single block device under the tests: {found:?}");
        eprintln!("SKIPPED: {} lies on no single block device", path.display());
    }
    name
}

/// Sums of a file of windows by name: bytes, reads, windows.
fn sums(folder: &Path, scope: Scope) -> Vec<(String, u64, u64, u64)> {
    let (rows, _) = windows::summarize(folder, &[], false).unwrap();
    rows.into_iter().filter(|r| r.scope == scope).map(|r| (r.name, r.bytes, r.reads, r.windows)).collect()
}

/// Reads all of `path` past the page cache.
fn read_direct(path: &Path, bytes: usize) {
    let file = open_direct(path).unwrap().file;
    let mut room = vec![0u8; (1 << 20) + 4096];
    let start = room.as_ptr().align_offset(4096);
    let mut done = 0;
    while done < bytes {
        done += file.read_at(&mut room[start..start + (1 << 20)], done as u64).unwrap();
    }
}

#[test]
fn windows_of_a_traced_decode_sum_to_the_readers_bytes_and_the_shared_device_has_one_row() {
    let drives = Drives::new(3, Some(prepared::easy_pace()));
    let plan = drives.staged(mini_store(), "round-robin");
    let (trace, out) = (drives.dir.path().join("tr"), drives.dir.path().join("results"));
    let decode = |more: &[&str]| {
        let mut command = argodrive(["decode", "--prompt", "Once upon a time", "--max-new", "6", "--json", "--assert"]);
        command.arg("--store").arg(mini_store()).arg("--plan").arg(&plan).arg("--drives").arg(&drives.toml);
        command.arg("--trace").arg(&trace).arg("--out").arg(&out).args(more);
        // a busy machine may reject the run for its pace; what was written stands all the same
        let (code, stdout, stderr) = outcome(&mut command);
        assert!(code < 2, "{stderr}");
        serde_json::from_str::<Value>(&stdout).unwrap()
    };
    let setting = |run: &Value| {
        let settings = run["settings"].as_array().unwrap();
        settings.iter().find(|s| s["name"] == "monitor").unwrap().clone()
    };
    let run = decode(&[]);
    let header = read_header(&trace).unwrap();
    let said = header.windows.as_ref().unwrap();
    let by_drive = sums(&trace, Scope::Drive);
    assert_eq!(by_drive.len(), 3);
    for drive in run["drives"].as_array().unwrap() {
        let (_, bytes, reads, windows) = by_drive.iter().find(|d| *d.0 == *drive["name"].as_str().unwrap()).unwrap();
        assert_eq!((Some(*bytes), Some(*reads)), (drive["read_bytes"].as_u64(), drive["reads"].as_u64()));
        assert!(*windows > 1);
    }
    let text = fs::read_to_string(trace.join(WINDOWS_FILE)).unwrap();
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let filled: Vec<bool> = fields[3..9].iter().map(|f| !f.is_empty()).collect();
        let drive = fields[1] == "drive";
        assert_eq!(filled, [drive, drive, drive, !drive, !drive, !drive], "{line}");
    }
    if let Some(device) = device_under(drives.dir.path()) {
        let by_device = sums(&trace, Scope::Device);
        assert_eq!(by_device.len(), 1, "three drives share it: {by_device:?}");
        let read: u64 = by_drive.iter().map(|d| d.1).sum();
        assert!(by_device[0].0 == device && by_device[0].1 >= read, "{by_device:?}, {read} bytes read");
        assert_eq!((said.devices.len(), said.devices[0].drives.len()), (1, 3));
        assert_eq!(setting(&run)["verdict"], "proved", "{}", setting(&run));
        let record = find_record(&out);
        assert_eq!(record["sampler"]["interval_ns"], 10_000_000);
        assert!(record["sampler"]["ticks"].as_u64().unwrap() > 0);
        assert!(record["sampler"]["cpu_ns"].as_u64().unwrap() > 0);
        // the report has both sides, and the timeline a row for the device
        let report = outcome(argodrive(["trace", "report"]).arg(&trace)).1;
        has(&report, &["device of amber", "emulated drive", "sampler: ", "% of one core"]);
        assert!(report.lines().all(|l| l.chars().count() <= 80), "{report}");
        let figures = drives.dir.path().join("figures");
        assert_eq!(outcome(argodrive(["trace", "replay"]).arg(&trace).arg("--plot-dir").arg(&figures)).0, 0);
        let svg = fs::read_to_string(figures.join("timeline-10ms.svg")).unwrap();
        has(&svg, &["amber", &format!("{device} (device of amber")]);
    }
    // off: nothing is sampled, and windows of the run before do not stay beside other reads
    let run = decode(&["--no-monitor"]);
    assert_eq!((setting(&run)["verdict"].as_str(), setting(&run)["asked"].as_str()), (Some("proved"), Some("off")));
    assert!(!trace.join(WINDOWS_FILE).exists());
    assert_eq!(read_header(&trace).unwrap().windows, None);
}

/// The newest record below `out`.
fn find_record(out: &Path) -> Value {
    let mut left = vec![out.to_path_buf()];
    while let Some(at) = left.pop() {
        for path in fs::read_dir(&at).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                left.push(path);
            } else if path.ends_with("record.json") {
                return serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
            }
        }
    }
    panic!("no record below {}", out.display());
}

#[test]
fn a_monitor_without_a_trace_is_a_contradiction() {
    let mut command = argodrive(["decode", "--prompt", "x", "--no-monitor"]);
    refused(command.arg("--store").arg(tiny_store()), &["monitor", "--trace"]);
}

#[test]
fn a_watched_device_moves_at_least_what_was_read_from_it() {
    let dir = folder();
    let Some(device) = device_under(dir.path()) else { return };
    const BYTES: usize = 16 << 20;
    let file = dir.path().join("data");
    fs::write(&file, vec![7u8; BYTES]).unwrap();
    fs::File::open(&file).unwrap().sync_all().unwrap();
    let csv = dir.path().join(WINDOWS_FILE);
    let mut command = argodrive(["monitor", "--json", "--duration", "120s", "--interval", "20ms"]);
    command.arg("--csv").arg(&csv).arg(dir.path());
    let mut child = Command::new(command.get_program())
        .args(command.get_args())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // its first object says that it is sampling
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    std::io::BufRead::read_line(&mut out, &mut first).unwrap();
    assert!(!csv.exists(), "a file that is not whole has not its name");
    read_direct(&file, BYTES);
    std::thread::sleep(Duration::from_millis(50));
    // Ctrl-C
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT).unwrap();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut out, &mut rest).unwrap();
    let (status, stderr) = (child.wait().unwrap(), std::io::read_to_string(child.stderr.take().unwrap()).unwrap());
    assert!(status.success(), "{stderr}");
    has(&stderr, &[&format!("watching {device}")]);
    let objects: Vec<Value> = first.lines().chain(rest.lines()).map(|l| serde_json::from_str(l).unwrap()).collect();
    let (summary, seconds) = objects.split_last().unwrap();
    let total = &summary["summary"]["devices"][0];
    let in_seconds: u64 = seconds.iter().map(|s| s["devices"][0]["bytes"].as_u64().unwrap()).sum();
    assert_eq!(total["name"], device.as_str());
    assert_eq!(total["bytes"], in_seconds, "the seconds sum to the summary");
    assert!(in_seconds >= BYTES as u64, "{in_seconds} bytes seen, {BYTES} read");
    assert!(summary["summary"]["sampler"]["ticks"].as_u64().unwrap() > 0);
    let rows = sums(dir.path(), Scope::Device);
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].1, in_seconds, "the file sums to the summary");
    let text = fs::read_to_string(&csv).unwrap();
    let fields: Vec<Vec<&str>> = text.lines().skip(1).map(|l| l.split(',').collect()).collect();
    assert!(fields[1..fields.len() - 1].iter().skip(1).all(|f| f[9] == "0"), "only the ends are partial");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary file stays behind");
}

#[test]
fn without_a_terminal_each_second_is_a_line_and_the_end_a_summary() {
    let dir = folder();
    let Some(device) = device_under(dir.path()) else { return };
    let csv = dir.path().join(WINDOWS_FILE);
    let mut command = argodrive(["monitor", "--duration", "1s"]);
    let (code, stdout, stderr) = outcome(command.arg(&device).arg("--csv").arg(&csv));
    assert_eq!(code, 0, "{stderr}");
    let lines: Vec<&str> = stdout.lines().collect();
    has(lines[0], &["time", "device", "peak 100 ms", "in flight"]);
    has(lines[1], &[&device]);
    has(&stdout, &["sampler: ", " missed; late by ", "% of one core"]);
    assert!(!stdout.contains('\u{1b}'), "nothing moves a cursor");
    assert!(lines.iter().take_while(|l| !l.starts_with("sampler")).all(|l| l.chars().count() <= 80), "{stdout}");
    assert!(!stderr.contains("watching"), "what was typed is what is watched: {stderr}");
    let rows = sums(dir.path(), Scope::Device);
    assert_eq!((rows.len(), rows[0].0.as_str()), (1, device.as_str()));
    assert!(rows[0].3 >= 2, "{rows:?}");
    // twice the same device, by name and by path, is one
    let mut command = argodrive(["monitor", "--duration", "50ms", "--interval", "5ms", "--json"]);
    let (code, stdout, stderr) = outcome(command.arg(&device).arg(dir.path()));
    assert_eq!(code, 0, "{stderr}");
    let last: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!(last["summary"]["devices"].as_array().unwrap().len(), 1);
}

#[cfg(target_os = "linux")]
#[test]
fn a_process_is_watched_until_it_ends() {
    let mut sleeper = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = sleeper.id().to_string();
    let out = folder();
    let mut command = argodrive(["monitor", "--json", "--duration", "300s", "--pid", &pid]);
    command.arg("--csv").arg(out.path().join(WINDOWS_FILE));
    let watch = std::thread::spawn(move || outcome(&mut command));
    std::thread::sleep(Duration::from_millis(1500));
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    let (code, stdout, stderr) = watch.join().unwrap();
    assert_eq!(code, 0, "{stderr}");
    has(&stderr, &["no longer readable", &pid]);
    let last: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!(last["summary"]["devices"][0]["name"], format!("pid {pid}"));
    assert_eq!(last["summary"]["devices"][0]["reads"], Value::Null, "a process's reads are not known");
    let text = fs::read_to_string(out.path().join(WINDOWS_FILE)).unwrap();
    has(text.lines().nth(1).unwrap(), &[&format!(",device,pid {pid},,,,0,,,1")]);
    refused(&mut argodrive(["monitor", "--pid", &pid]), &["--pid", &pid, "no such process"]);
}

#[test]
fn what_cannot_be_watched_is_named_with_what_can() {
    let known = BlockMap::system().names();
    let message =
        refused(&mut argodrive(["monitor", "sdqq", "--duration", "1s"]), &["`sdqq`", "neither a block device"]);
    for name in known {
        has(&message, &[&name]);
    }
    refused(&mut argodrive(["monitor", "/no/such/path"]), &["/no/such/path"]);
    if Path::new("/proc/self").exists() {
        refused(&mut argodrive(["monitor", "/proc/self"]), &["/proc/self", "proc", "no block device"]);
    }
    let dir = folder();
    if device_under(dir.path()).is_some() {
        let mut command = argodrive(["monitor", "--duration", "1s", "--csv", "/no/such/folder/w.csv"]);
        refused(command.arg(dir.path()), &["--csv", "/no/such/folder/w.csv"]);
    }
    for (flag, value, word) in [
        ("--interval", "0", "1ms to 60s"),
        ("--interval", "999us", "1ms to 60s"),
        ("--interval", "2m", "1ms to 60s"),
        ("--interval", "10", "10"),
        ("--interval", "-5ms", "-5ms"),
        ("--duration", "0s", "above 0"),
        ("--duration", "soon", "soon"),
        ("--pid", "-1", "-1"),
    ] {
        let (code, stdout, stderr) = outcome(argodrive(["monitor"]).arg(format!("{flag}={value}")));
        assert_eq!((code, stdout.as_str()), (2, ""), "{flag} {value}");
        has(&stderr, &[flag, word]);
    }
}
