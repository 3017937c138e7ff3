//! The mount table: which file system holds a path, where it is mounted, from what. Parsing only.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Device number as the table has it; major 0 = none of a block device.
    pub major: u32,
    /// See `major`.
    pub minor: u32,
    /// The folder of the file system that is mounted: not `/` for bind mounts and subvolumes.
    pub root: String,
    /// Where.
    pub point: PathBuf,
    /// Mounted read-only.
    pub read_only: bool,
    /// Type of the file system.
    pub kind: String,
    /// What is mounted, e.g. `/dev/nvme0n1p2`.
    pub source: String,
}

/// All mounts, in the order of the table; later ones hide earlier ones.
pub fn table(mountinfo: &Path) -> io::Result<Vec<Mount>> {
    Ok(fs::read_to_string(mountinfo)?.lines().filter_map(parse).collect())
}

/// The mount that holds `path`, which must be absolute and free of links: the longest mount point wins, and of equal ones
/// the later.
pub fn holding<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts.iter().filter(|m| path.starts_with(&m.point)).max_by_key(|m| m.point.components().count())
}

/// `36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/sda1 rw` (proc_pid_mountinfo(5)).
fn parse(line: &str) -> Option<Mount> {
    let (front, back) = line.split_once(" - ")?;
    let front: Vec<&str> = front.split(' ').collect();
    let [_, _, number, root, point, options, ..] = front[..] else { return None };
    let (major, minor) = number.split_once(':')?;
    let mut back = back.split(' ');
    let (kind, source) = (back.next()?.to_string(), unescaped(back.next()?));
    let super_options = back.next().unwrap_or("");
    let read_only = [options, super_options].iter().any(|o| o.split(',').any(|w| w == "ro"));
    Some(Mount {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        root: unescaped(root),
        point: unescaped(point).into(),
        read_only,
        kind,
        source,
    })
}

/// Blanks and such are written as a backslash and three octal digits.
fn unescaped(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let code = bytes.get(at + 1..at + 4).and_then(|d| std::str::from_utf8(d).ok());
        match code.and_then(|d| u8::from_str_radix(d, 8).ok()).filter(|_| bytes[at] == b'\\') {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_latest_mount_holds_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mountinfo");
        let text = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                    40 27 259:2 / /data\\040one rw shared:1 - xfs /dev/nvme0n1p2 rw\n\
                    41 27 259:2 /sub /bind rw - xfs /dev/nvme0n1p2 ro\n\
                    42 27 0:50 / /data\\040one rw - tmpfs none ro\n\
                    nonsense\n";
        fs::write(&file, text).unwrap();
        let mounts = table(&file).unwrap();
        assert_eq!(mounts.len(), 4);
        let at = |p: &str| holding(&mounts, Path::new(p)).unwrap();
        assert_eq!((at("/database").kind.as_str(), at("/database").major), ("ext4", 254));
        assert_eq!((at("/data one/x").kind.as_str(), at("/data one/x").read_only), ("tmpfs", true));
        assert_eq!((at("/bind/a").root.as_str(), at("/bind").read_only, at("/bind").minor), ("/sub", true, 2));
        assert!(table(&dir.path().join("none")).is_err());
    }
}
