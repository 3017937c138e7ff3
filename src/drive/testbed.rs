//! Drives to break: file systems of their own on loop devices with direct I/O, all on one disk. They fill up, fail and come
//! back like drives, and share the speed of the disk below. Needs root, alone in this program. Runs `losetup`, `mkfs.ext4`, `mount` and
//! `umount`; knows nothing of experts.

use super::spec::{DriveSpec, SpecError, render};
use crate::sys::durable::write_atomic;
use crate::sys::loop_device::set_unplugged;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Version of `testbed.json`.
const VERSION: u32 = 1;
/// What a bed remembers of itself, in its folder.
pub const STATE_FILE: &str = "testbed.json";
/// Its drives, for every command that takes `--drives`.
pub const DRIVES_FILE: &str = "drives.toml";
/// Most drives of a bed.
pub const MAX_DRIVES: usize = 16;
/// A file system smaller than this has no room for anything.
pub const LEAST_BYTES: u64 = 16 << 20;
/// Largest state file that is read.
const MAX_STATE_BYTES: u64 = 1 << 20;

/// Why a bed could not be made, changed or taken down.
#[derive(Debug, thiserror::Error)]
pub enum TestbedError {
    /// Not root, or the machine lets nobody have loop devices.
    #[error("{0}")]
    Cannot(String),
    /// A command failed.
    #[error("`{command}` failed: {reason}")]
    Command {
        /// With its arguments.
        command: String,
        /// What it said.
        reason: String,
    },
    /// A file or folder.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// drives.toml.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// A drive of a bed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BedDrive {
    /// Its name in drives.toml.
    pub name: String,
    /// The file that holds its bytes.
    pub image: PathBuf,
    /// The loop device, once there is one.
    pub device: Option<PathBuf>,
    /// Where it is mounted.
    pub mount: PathBuf,
    /// Whether it is cut off now.
    pub unplugged: bool,
}

/// A bed: written before each step, so that a half-made one can be taken down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Testbed {
    /// [`VERSION`].
    version: u32,
    /// Bytes of each drive.
    pub drive_bytes: u64,
    /// The drives.
    pub drives: Vec<BedDrive>,
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> TestbedError {
    |source| TestbedError::Io { path: path.to_path_buf(), source }
}

/// Runs a command; its standard output without blanks around it.
fn run(program: &str, arguments: &[&Path]) -> Result<String, TestbedError> {
    let spelled = || {
        let words = arguments.iter().map(|a| a.display().to_string());
        std::iter::once(program.to_string()).chain(words).collect::<Vec<_>>().join(" ")
    };
    let output = Command::new(program).args(arguments).output().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            TestbedError::Cannot(format!("`{program}` is not installed; a test bed needs util-linux and e2fsprogs"))
        }
        _ => TestbedError::Command { command: spelled(), reason: e.to_string() },
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_string());
    }
    let reason = String::from_utf8_lossy(&output.stderr).trim().to_string();
    Err(TestbedError::Command { command: spelled(), reason })
}

/// Says why this process may not make a bed, if so.
fn check_allowed() -> Result<(), TestbedError> {
    let cannot = |text: &str| Err(TestbedError::Cannot(text.into()));
    if !cfg!(target_os = "linux") {
        return cannot("test beds are made of Linux's loop devices, and this is no Linux");
    }
    if !rustix::process::geteuid().is_root() {
        return cannot("loop devices and mounts need root: run `sudo argodrive testbed ...`; nothing else does");
    }
    match File::options().read(true).write(true).open("/dev/loop-control") {
        Ok(_) => Ok(()),
        Err(e) => Err(TestbedError::Cannot(format!(
            "/dev/loop-control: {e}; this machine (a container, perhaps) lends no loop devices"
        ))),
    }
}

impl Testbed {
    /// Makes `count` drives of `drive_bytes` each in `folder`, which must not hold a bed, and writes drives.toml there. Mount points
    /// belong to whom `folder`'s parent belongs to, so that no other command needs root. Whatever fails, nothing stays mounted.
    pub fn up(folder: &Path, count: usize, drive_bytes: u64) -> Result<Self, TestbedError> {
        check_allowed()?;
        if count == 0 || count > MAX_DRIVES {
            return Err(TestbedError::Cannot(format!("--drives {count}: a bed has 1 to {MAX_DRIVES} drives")));
        }
        if drive_bytes < LEAST_BYTES {
            return Err(TestbedError::Cannot(format!("--size {drive_bytes} B: a drive has at least {LEAST_BYTES} B")));
        }
        fs::create_dir_all(folder).map_err(at(folder))?;
        let folder = &folder.canonicalize().map_err(at(folder))?;
        let state = folder.join(STATE_FILE);
        if state.exists() {
            let text = format!("{} holds a test bed already: `argodrive testbed down` first", folder.display());
            return Err(TestbedError::Cannot(text));
        }
        let drives = (1..=count).map(|n| {
            let name = format!("bed{n}");
            let (image, mount) = (folder.join(format!("{name}.img")), folder.join(&name));
            BedDrive { name, image, device: None, mount, unplugged: false }
        });
        let mut bed = Self { version: VERSION, drive_bytes, drives: drives.collect() };
        bed.save(folder)?;
        if let Err(e) = bed.build(folder) {
            // the first error is the one to tell
            let _ = bed.down(folder);
            return Err(e);
        }
        Ok(bed)
    }

    fn build(&mut self, folder: &Path) -> Result<(), TestbedError> {
        let parent = folder.parent().unwrap_or(folder);
        let owner = fs::metadata(parent).map_err(at(parent))?;
        let give = |path: &Path| chown(path, Some(owner.uid()), Some(owner.gid())).map_err(at(path));
        give(folder)?;
        for index in 0..self.drives.len() {
            let BedDrive { image, mount, .. } = self.drives[index].clone();
            // all of it now: a bed that runs out of disk later would look like a broken drive
            let file = File::options().write(true).create_new(true).open(&image).map_err(at(&image))?;
            let room = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, self.drive_bytes);
            room.map_err(|e| {
                // what it took before the disk was full
                let _ = file.set_len(0);
                at(&image)(e.into())
            })?;
            file.sync_all().map_err(at(&image))?;
            run("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), "-m".as_ref(), "0".as_ref(), &image])?;
            let arguments = ["--find", "--show", "--direct-io=on"].map(Path::new);
            let device = PathBuf::from(run("losetup", &[&arguments[..], &[&image]].concat())?);
            self.drives[index].device = Some(device.clone());
            self.save(folder)?;
            fs::create_dir_all(&mount).map_err(at(&mount))?;
            run("mount", &["-t".as_ref(), "ext4".as_ref(), &device, &mount])?;
            give(&mount)?;
        }
        let file = folder.join(DRIVES_FILE);
        let specs: Vec<DriveSpec> = self.drives.iter().map(|d| DriveSpec::new(&d.name, &d.mount)).collect();
        write_atomic(&file, render(&specs).as_bytes()).map_err(at(&file))?;
        give(&file)?;
        give(&folder.join(STATE_FILE))
    }

    /// The bed of `folder`.
    pub fn open(folder: &Path) -> Result<Self, TestbedError> {
        let path = folder.join(STATE_FILE);
        let cannot = |reason: String| TestbedError::Cannot(format!("{}: {reason}", path.display()));
        let len = fs::metadata(&path).map_err(at(&path))?.len();
        if len > MAX_STATE_BYTES {
            return Err(cannot(format!("{len} bytes are too many for the state of a test bed")));
        }
        let text = fs::read_to_string(&path).map_err(at(&path))?;
        let bed: Self = serde_json::from_str(&text).map_err(|e| cannot(e.to_string()))?;
        if bed.version != VERSION {
            return Err(cannot(format!("version {}; this program reads version {VERSION}", bed.version)));
        }
        // root unmounts and removes what stands here, so it is taken for nothing but what `up` made in this folder
        let folder = folder.canonicalize().map_err(at(folder))?;
        let own = |d: &BedDrive| {
            let number =
                d.name.strip_prefix("bed").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
            number && d.image == folder.join(format!("{}.img", d.name)) && d.mount == folder.join(&d.name)
        };
        match bed.drives.iter().find(|d| !own(d)) {
            None => Ok(bed),
            Some(d) => Err(cannot(format!(
                "drive `{}` is not one that was made in {}: the bed was moved, or the file changed",
                d.name,
                folder.display()
            ))),
        }
    }

    fn save(&self, folder: &Path) -> Result<(), TestbedError> {
        let path = folder.join(STATE_FILE);
        let text = serde_json::to_string_pretty(self).map_err(|e| at(&path)(e.into()))?;
        write_atomic(&path, text.as_bytes()).map_err(at(&path))
    }

    /// Cuts drive `name` off while it is mounted (reads of it fail with EIO, nothing is lost), or brings it back.
    pub fn set_unplugged(&mut self, folder: &Path, name: &str, unplugged: bool) -> Result<(), TestbedError> {
        check_allowed()?;
        let names = || self.drives.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
        let Some(index) = self.drives.iter().position(|d| d.name == name) else {
            return Err(TestbedError::Cannot(format!("no drive is called `{name}`; there are {}", names())));
        };
        let Some(device) = self.drives[index].device.clone() else {
            return Err(TestbedError::Cannot(format!("`{name}` has no device; take the bed down and make it again")));
        };
        if !devices_of(&self.drives[index].image)?.contains(&device) {
            return Err(TestbedError::Cannot(format!(
                "{} is no longer the device of `{name}`: the machine was started anew; take the bed down and make it again",
                device.display()
            )));
        }
        set_unplugged(&device, unplugged).map_err(at(&device))?;
        self.drives[index].unplugged = unplugged;
        self.save(folder)
    }

    /// Takes everything down and removes what [`Testbed::up`] made, images and drives.toml included. A drive that is in use stays, is
    /// named, and the next call goes on with it.
    pub fn down(&mut self, folder: &Path) -> Result<(), TestbedError> {
        check_allowed()?;
        let mut first = None;
        while let Some(drive) = self.drives.last() {
            if let Err(e) = take_down(drive) {
                first = Some(e);
                break;
            }
            self.drives.pop();
            // a full disk must not keep what is left up; taking a drive down twice does no harm
            let _ = self.save(folder);
        }
        if let Some(e) = first {
            return Err(e);
        }
        for name in [DRIVES_FILE, STATE_FILE] {
            remove(&folder.join(name))?;
        }
        // only if nothing else lies in it
        let _ = fs::remove_dir(folder);
        Ok(())
    }
}

fn take_down(drive: &BedDrive) -> Result<(), TestbedError> {
    // asked of the image, because the machine may have been started anew: a number then belongs to nobody, or to somebody else
    let mut devices = devices_of(&drive.image)?;
    if let Some(device) = drive.device.as_ref().filter(|_| !drive.image.exists()) {
        // somebody has deleted the image under its device
        let back = run("losetup", &["--noheadings".as_ref(), "--output".as_ref(), "BACK-FILE".as_ref(), device]);
        if back.is_ok_and(|file| file == format!("{} (deleted)", drive.image.display())) {
            devices.push(device.clone());
        }
    }
    for device in &devices {
        // a file system without its end cannot be unmounted cleanly
        set_unplugged(device, false).map_err(at(device))?;
    }
    if is_mounted(&drive.mount)? {
        run("umount", &[&drive.mount])?;
    }
    for device in &devices {
        run("losetup", &["--detach".as_ref(), device])?;
    }
    if drive.mount.exists() {
        fs::remove_dir(&drive.mount).map_err(at(&drive.mount))?;
    }
    remove(&drive.image)
}

/// The loop devices of an image.
fn devices_of(image: &Path) -> Result<Vec<PathBuf>, TestbedError> {
    if !image.exists() {
        return Ok(Vec::new());
    }
    let arguments = ["--noheadings", "--output", "NAME", "--associated"].map(Path::new);
    Ok(run("losetup", &[&arguments[..], &[image]].concat())?.lines().map(|l| PathBuf::from(l.trim())).collect())
}

fn is_mounted(point: &Path) -> Result<bool, TestbedError> {
    let table = Path::new("/proc/self/mountinfo");
    Ok(super::mount::table(table).map_err(at(table))?.iter().any(|m| m.point == point))
}

fn remove(path: &Path) -> Result<(), TestbedError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(at(path)(e)),
        _ => Ok(()),
    }
}
