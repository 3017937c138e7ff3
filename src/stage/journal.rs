//! What stagings added to a drive, so that it can be taken back: one file for each plan, `stage-<plan hash>.journal`, beside
//! `drive.json`. A line is written and synced before the copy that it names begins, with a check value, so a torn tail is
//! recognised. Naming more than was copied in the end is harmless: only what `drive.json` names is ever taken out.

use crate::ids::{ExpertId, LayerId};
use crate::store::journal::{checked_line, push_line};
use crate::store::piece::{PartOf, PieceKey};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Version of the lines.
const VERSION: u32 = 1;
/// Longest journal that is read.
const MAX_BYTES: u64 = 256 << 20;
/// Begins the first line.
const HEADER: &str = "argodrive-stage ";
const PREFIX: &str = "stage-";
const SUFFIX: &str = ".journal";

/// What a plan's stagings did on one drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Staged {
    /// The plan, by hash.
    pub plan_hash: String,
    /// Pieces that were not there before.
    pub added: BTreeSet<PieceKey>,
    /// Pieces that the plan needs and that were there already.
    pub used: BTreeSet<PieceKey>,
}

/// An open journal.
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    staged: Staged,
    pending: String,
}

/// Path of the journal of the plan with this hash.
pub(super) fn path_of(folder: &Path, plan_hash: &str) -> PathBuf {
    folder.join(format!("{PREFIX}{}{SUFFIX}", plan_hash.get(..16).unwrap_or(plan_hash)))
}

/// The journals of a drive folder.
pub(super) fn all(folder: &Path) -> io::Result<Vec<(PathBuf, Staged)>> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut out = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if name.starts_with(PREFIX)
            && name.ends_with(SUFFIX)
            && let Some(staged) = read(&path)?
        {
            out.push((path, staged));
        }
    }
    out.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(out)
}

/// Reads a journal; `None` when there is none, or it holds nothing that can be believed.
pub(super) fn read(path: &Path) -> io::Result<Option<Staged>> {
    match File::open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
        Ok(mut file) => Ok(parse(&read_all(&mut file)?)?.map(|(staged, _)| staged)),
    }
}

fn read_all(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES { Err(ErrorKind::FileTooLarge.into()) } else { Ok(bytes) }
}

/// What the lines say and how many bytes of them are whole; `None` without a whole first line. Stops at the first that is
/// not. Lines of a newer version are an error: they must be neither misread nor written over.
fn parse(bytes: &[u8]) -> io::Result<Option<(Staged, usize)>> {
    let mut lines = bytes.split_inclusive(|b| *b == b'\n');
    let head =
        lines.next().and_then(|first| Some((first, checked_line(first)?.strip_prefix(HEADER)?.split_once(' ')?)));
    let Some((first, (version, plan_hash))) = head else { return Ok(None) };
    if version != VERSION.to_string() {
        let text = format!("version {version} of a staging journal was written by a newer argodrive; use that one");
        return Err(io::Error::new(ErrorKind::Unsupported, text));
    }
    let mut staged = Staged { plan_hash: plan_hash.to_string(), ..Staged::default() };
    let mut valid = first.len();
    for line in lines {
        let Some((added, key)) = checked_line(line).and_then(parse_key) else { break };
        if added {
            staged.added.insert(key)
        } else {
            staged.used.insert(key)
        };
        valid += line.len();
    }
    Ok(Some((staged, valid)))
}

fn parse_key(text: &str) -> Option<(bool, PieceKey)> {
    let mut words = text.split(' ');
    let added = match words.next()? {
        "add" => true,
        "use" => false,
        _ => return None,
    };
    let (layer, expert) = (LayerId(words.next()?.parse().ok()?), ExpertId(words.next()?.parse().ok()?));
    let part = match words.next() {
        None => None,
        Some(unit) => Some(PartOf {
            unit_bytes: unit.parse().ok().filter(|u| *u > 0)?,
            columns: words.next()?.parse().ok()?,
            column: words.next()?.parse().ok()?,
        }),
    };
    words.next().is_none().then_some((added, PieceKey { layer, expert, part }))
}

impl Journal {
    /// Opens or begins the journal of a plan.
    pub fn open(folder: &Path, plan_hash: &str) -> io::Result<Self> {
        let path = path_of(folder, plan_hash);
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
        let before = parse(&read_all(&mut file)?)?.filter(|(staged, _)| staged.plan_hash == plan_hash);
        let (staged, valid) = before.unwrap_or_default();
        file.set_len(valid as u64)?;
        file.seek(SeekFrom::End(0))?;
        let mut journal = Self { file, path, staged, pending: String::new() };
        if valid == 0 {
            journal.staged.plan_hash = plan_hash.to_string();
            push_line(&mut journal.pending, &format!("{HEADER}{VERSION} {plan_hash}"));
            journal.commit()?;
            crate::sys::durable::sync_folder(folder)?;
        }
        Ok(journal)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes pieces that will be added, or (`added` false) that were found there.
    pub fn note<'a>(&mut self, added: bool, keys: impl IntoIterator<Item = &'a PieceKey>) {
        for key in keys {
            if self.staged.added.contains(key) || self.staged.used.contains(key) {
                continue;
            }
            let word = if added { "add" } else { "use" };
            let mut line = format!("{word} {} {}", key.layer.0, key.expert.0);
            if let Some(p) = key.part {
                line.push_str(&format!(" {} {} {}", p.unit_bytes, p.columns, p.column));
            }
            push_line(&mut self.pending, &line);
            if added {
                self.staged.added.insert(*key)
            } else {
                self.staged.used.insert(*key)
            };
        }
    }

    /// Writes and syncs what was noted.
    pub fn commit(&mut self) -> io::Result<()> {
        if !self.pending.is_empty() {
            self.file.write_all(self.pending.as_bytes())?;
            self.file.sync_data()?;
            self.pending.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(expert: u16, part: Option<PartOf>) -> PieceKey {
        PieceKey { layer: LayerId(3), expert: ExpertId(expert), part }
    }

    #[test]
    fn what_was_noted_comes_back_and_a_torn_line_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let part = Some(PartOf { unit_bytes: 4096, columns: 3, column: 2 });
        let mut journal = Journal::open(dir.path(), "0123456789abcdef0").unwrap();
        journal.note(true, &[key(1, None), key(2, part)]);
        journal.note(false, &[key(7, None), key(1, None)]);
        journal.commit().unwrap();
        let path = journal.path().to_path_buf();
        drop(journal);
        let staged = read(&path).unwrap().unwrap();
        assert_eq!(staged.added, [key(1, None), key(2, part)].into());
        assert_eq!(staged.used, [key(7, None)].into(), "what was added was not there before");
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        let mut journal = Journal::open(dir.path(), "0123456789abcdef0").unwrap();
        journal.note(true, &[key(9, None)]);
        journal.commit().unwrap();
        let (found, staged) = all(dir.path()).unwrap().remove(0);
        assert_eq!((found, staged.added.len(), staged.used.len()), (path.clone(), 3, 0), "the torn line is gone");
        std::fs::write(&path, "something else\n").unwrap();
        assert_eq!(read(&path).unwrap(), None);
        let mut newer = String::new();
        push_line(&mut newer, "argodrive-stage 2 0123456789abcdef0");
        std::fs::write(&path, &newer).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("newer argodrive"));
        assert!(Journal::open(dir.path(), "0123456789abcdef0").is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), newer, "it is left as it was");
        assert_eq!(read(&dir.path().join("no")).unwrap(), None);
    }
}
