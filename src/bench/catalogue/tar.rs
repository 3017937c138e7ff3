//! The part of the tar format that bundles use: plain files in a ustar archive, compressed with gzip. Any `tar` unpacks what this
//! writes; what this reads is bounded, and anything but plain files with plain names is refused by name.

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use std::io::{self, Read, Write};

/// Most bytes of all files together.
pub const MAX_TOTAL_BYTES: u64 = 256 << 20;
/// Most bytes of one file.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// Most files.
pub const MAX_FILES: usize = 50_000;
/// Most parts of a path.
const MAX_PARTS: usize = 12;
const BLOCK: usize = 512;

/// A file of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its path, parts joined by `/`.
    pub path: String,
    /// Its contents.
    pub bytes: Vec<u8>,
}

/// Whether a path is one that bundles hold: relative, plain characters, nothing hidden, no steps back.
pub fn check_path(path: &str) -> Result<(), String> {
    let shown: String = path.chars().take(120).flat_map(char::escape_default).collect();
    let parts: Vec<&str> = path.split('/').collect();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    if path.starts_with('/') || parts.contains(&"..") {
        return Err(format!("`{shown}` leads out of the bundle"));
    }
    if parts.len() > MAX_PARTS || parts.iter().any(|p| p.is_empty() || p.starts_with('.') || !p.chars().all(plain)) {
        return Err(format!("`{shown}` is no name that a bundle has"));
    }
    Ok(())
}

/// Name and prefix of a header, if the path fits.
fn name_and_prefix(path: &str) -> Option<(&str, &str)> {
    if path.len() <= 100 {
        return Some((path, ""));
    }
    let at = path.match_indices('/').map(|(at, _)| at).find(|at| path.len() - at - 1 <= 100)?;
    (at <= 155).then(|| (&path[at + 1..], &path[..at]))
}

/// Writes `entries` as `.tar.gz`; the same entries give the same bytes.
pub fn write(entries: &[Entry]) -> io::Result<Vec<u8>> {
    let mut out = GzEncoder::new(Vec::new(), Compression::default());
    for entry in entries {
        check_path(&entry.path).map_err(io::Error::other)?;
        let (name, prefix) = name_and_prefix(&entry.path)
            .ok_or_else(|| io::Error::other(format!("{}: the path is too long", entry.path)))?;
        let mut header = [0u8; BLOCK];
        let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(0, name);
        put(100, "0000644\0");
        put(108, "0000000\0");
        put(116, "0000000\0");
        put(124, &format!("{:011o}\0", entry.bytes.len()));
        put(136, "00000000000\0");
        put(148, "        ");
        put(156, "0");
        put(257, "ustar\0");
        put(263, "00");
        put(345, prefix);
        let sum = checksum(&header);
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.write_all(&header)?;
        out.write_all(&entry.bytes)?;
        out.write_all(&vec![0; entry.bytes.len().next_multiple_of(BLOCK) - entry.bytes.len()])?;
    }
    out.write_all(&[0; 2 * BLOCK])?;
    out.finish()
}

/// Sum of a header's bytes, its own field counted as spaces.
fn checksum(header: &[u8; BLOCK]) -> u32 {
    header.iter().enumerate().map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) }).sum()
}

/// Reads all of a `.tar.gz`. Everything is bounded before it is allocated for.
pub fn read(compressed: impl Read) -> Result<Vec<Entry>, String> {
    // the bound counts headers and padding too
    let limit = MAX_TOTAL_BYTES + (MAX_FILES as u64 + 4) * 2 * BLOCK as u64;
    let mut input = GzDecoder::new(compressed).take(limit);
    let mut out: Vec<Entry> = Vec::new();
    let mut total = 0u64;
    let broken = |e: io::Error| match e.kind() {
        io::ErrorKind::UnexpectedEof => "it ends in the middle of a file: fetch it again".to_string(),
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            format!("it is no gzip file, or a damaged one ({e})")
        }
        _ => e.to_string(),
    };
    loop {
        let mut header = [0u8; BLOCK];
        input.read_exact(&mut header).map_err(broken)?;
        if header.iter().all(|b| *b == 0) {
            break;
        }
        let field = |from: usize, len: usize| {
            let bytes = &header[from..from + len];
            let end = bytes.iter().position(|b| *b == 0).unwrap_or(len);
            std::str::from_utf8(&bytes[..end]).map(str::trim).map_err(|_| "a header is not text: damaged".to_string())
        };
        let octal = |from: usize, len: usize| {
            u64::from_str_radix(field(from, len)?, 8)
                .map_err(|_| "a header has no number where one must be: damaged".to_string())
        };
        if &header[257..262] != b"ustar" {
            return Err("it is no tar archive of a bundle".into());
        }
        if octal(148, 8)? != u64::from(checksum(&header)) {
            return Err("a header has another checksum than it says: damaged".into());
        }
        let (name, prefix) = (field(0, 100)?, field(345, 155)?);
        let path = if prefix.is_empty() { name.to_string() } else { format!("{prefix}/{name}") };
        check_path(&path)?;
        match header[156] {
            b'0' => {}
            b'1' | b'2' => return Err(format!("`{path}` is a link; a bundle has plain files only")),
            _ => return Err(format!("`{path}` is no plain file; a bundle has nothing else")),
        }
        let size = octal(124, 12)?;
        if size > MAX_FILE_BYTES {
            return Err(format!("`{path}` has {size} bytes; at most {MAX_FILE_BYTES} are read"));
        }
        total += size;
        if total > MAX_TOTAL_BYTES || out.len() >= MAX_FILES {
            return Err(format!("it unpacks to more than {MAX_TOTAL_BYTES} bytes or {MAX_FILES} files"));
        }
        if out.iter().any(|e| e.path == path) {
            return Err(format!("`{path}` is there twice"));
        }
        let mut bytes = Vec::new();
        let got = input.by_ref().take(size).read_to_end(&mut bytes).map_err(broken)?;
        if got as u64 != size {
            return Err(format!("`{path}` is cut off after {got} of {size} bytes"));
        }
        let padding = (size as usize).next_multiple_of(BLOCK) - size as usize;
        input.read_exact(&mut [0u8; BLOCK][..padding]).map_err(broken)?;
        out.push(Entry { path, bytes });
    }
    let mut rest = Vec::new();
    input.take(BLOCK as u64 + 1).read_to_end(&mut rest).map_err(broken)?;
    if rest.len() != BLOCK || rest.iter().any(|b| *b != 0) {
        return Err("something follows its end".into());
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, bytes: &[u8]) -> Entry {
        Entry { path: path.into(), bytes: bytes.to_vec() }
    }

    /// A header with one field changed, and its checksum made right again.
    fn doctored(change: &dyn Fn(&mut [u8])) -> Vec<u8> {
        let packed = write(&[entry("a/record.json", b"{}")]).unwrap();
        let mut plain = Vec::new();
        GzDecoder::new(&packed[..]).read_to_end(&mut plain).unwrap();
        change(&mut plain);
        let header: [u8; BLOCK] = plain[..BLOCK].try_into().unwrap();
        let sum = checksum(&header);
        plain[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let mut out = GzEncoder::new(Vec::new(), Compression::fast());
        out.write_all(&plain).unwrap();
        out.finish().unwrap()
    }

    #[test]
    fn what_is_written_is_read_and_the_same_each_time() {
        let long = format!("{}/{}/record.json", "d".repeat(90), "e".repeat(60));
        let all =
            [entry("bundle.json", b"{}"), entry(&long, &[7; 1000]), entry("x/empty.svg", b""), entry("y/f", &[1; 512])];
        let packed = write(&all).unwrap();
        assert_eq!(read(&packed[..]).unwrap(), all);
        assert_eq!(packed, write(&all).unwrap());
        assert!(write(&[entry(&"x".repeat(300), b"")]).is_err());
    }

    #[test]
    fn hostile_archives_are_refused_by_name() {
        let named = |path: &'static str| {
            doctored(&move |h| {
                h[..100].fill(0);
                h[..path.len()].copy_from_slice(path.as_bytes());
            })
        };
        for (bytes, word) in [
            (named("../../etc/passwd"), "../../etc/passwd` leads out"),
            (named("/etc/passwd"), "leads out"),
            (named("a/../../b"), "leads out"),
            (named("a/.ssh/record.json"), "no name"),
            (named("a//b"), "no name"),
            (named("a\\b"), "no name"),
            (doctored(&|h| h[156] = b'2'), "is a link"),
            (doctored(&|h| h[156] = b'1'), "is a link"),
            (doctored(&|h| h[156] = b'5'), "no plain file"),
            (doctored(&|h| h[156] = b'L'), "no plain file"),
            (doctored(&|h| h[124..136].copy_from_slice(b"77777777777\0")), "at most"),
            (doctored(&|h| h[124..136].copy_from_slice(b"00000010000\0")), "cut off"),
            (doctored(&|h| h[124..136].copy_from_slice(b"xxxxxxxxxxx\0")), "no number"),
            (doctored(&|h| h[257] = b'x'), "no tar archive"),
            (b"plain text".to_vec(), "no gzip"),
        ] {
            let e = read(&bytes[..]).unwrap_err();
            assert!(e.contains(word), "{word}: {e}");
        }
        let whole = write(&[entry("a/record.json", &[5; 3000])]).unwrap();
        for cut in [whole.len() / 2, whole.len() - 9] {
            assert!(read(&whole[..cut]).is_err(), "cut at {cut}");
        }
        let twice = write(&[entry("a/f", b"1"), entry("a/f", b"2")]).unwrap();
        assert!(read(&twice[..]).unwrap_err().contains("twice"));
        let trailing = doctored(&|h| *h.last_mut().unwrap() = 1);
        assert!(read(&trailing[..]).unwrap_err().contains("follows its end"));
    }

    #[test]
    fn a_small_file_that_unpacks_to_very_much_is_stopped() {
        let zeros = vec![0u8; 60 << 20];
        let all: Vec<Entry> = (0..5).map(|i| entry(&format!("f{i}"), &zeros)).collect();
        let packed = write(&all).unwrap();
        assert!(packed.len() < 1 << 20);
        assert!(read(&packed[..]).unwrap_err().contains("more than"));
    }
}
