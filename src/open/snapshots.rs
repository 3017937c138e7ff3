//! Snapshots of a running text: a thread of its own writes what the decoding thread copied, so that the next pass runs meanwhile.
//! One copy exists at a time; its memory is used again. And the way back: a file becomes a session that goes on.

use super::{Model, OpenError};
use crate::clock::Clock;
use crate::decode::generate::GenerateError;
use crate::decode::sampler::Sampler;
use crate::decode::snapshot::{
    self, Keeper, SnapshotFault, SnapshotHeader, SnapshotRun, SnapshotTokens, TextState, parse_header, snapshot_bytes,
};
use crate::decode::{DecodeError, Session};
pub use crate::store::snapshot_file::OtherText;
pub use crate::store::snapshot_file::SnapshotError;
use crate::store::snapshot_file::{Found, KEPT, SnapshotFile, SnapshotFolder, file_bytes, find};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// What was done about snapshots, counted by the code that copies and the thread that writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotCounters {
    /// Written, in place and durable.
    pub written: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the last one.
    pub last_bytes: u64,
    /// Tokens generated in the last one.
    pub last_tokens: u64,
    /// The last one's file.
    pub last: PathBuf,
    /// Other texts whose snapshots are in the folder too.
    pub other_texts: Vec<OtherText>,
    /// Time in which the decoding thread copied the text's state.
    pub copy_ns: u64,
    /// Time in which it waited for the writer.
    pub wait_ns: u64,
    /// Time in which files were written, made durable and old ones removed, beside decoding.
    pub write_ns: u64,
}

/// What the thread gives back: the buffer, and what came of it.
type Answer = (Vec<u8>, Result<(PathBuf, u64), SnapshotError>);

/// Writes snapshots of one text.
pub struct SnapshotWriter {
    run: SnapshotRun,
    clock: Clock,
    to: Option<SyncSender<Vec<u8>>>,
    from: Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
    /// Not there while the thread has it.
    buffer: Option<Vec<u8>>,
    /// Tokens of the one that is being written.
    tokens: u64,
    counters: SnapshotCounters,
}

impl SnapshotWriter {
    /// Writes into `folder` what becomes of `prompt` in `run`, a text of at most `longest` tokens on `model`. Refuses a folder that
    /// has no room for it.
    pub fn open(
        folder: &Path,
        run: SnapshotRun,
        (model, prompt, longest): (&Model, &[u32], usize),
        clock: Clock,
    ) -> Result<Self, OpenError> {
        let most = snapshot_bytes(model.decoder.config(), longest);
        let mut files = SnapshotFolder::open(folder, &run.text_name(prompt))?;
        let other_texts = files.other_texts();
        // an old one goes only when the new one is there
        let needed = most.saturating_mul(KEPT as u64 + 1).saturating_sub(files.held_bytes());
        if let Some(free) = files.free_bytes().filter(|free| *free < needed) {
            let what = format!(
                "{needed} bytes may be written there ({most} for a snapshot of the whole text, {KEPT} are kept while the next is \
                 written), {free} are free{}; choose another drive with --snapshot-dir",
                match other_texts.iter().map(|o| o.bytes).sum::<u64>() {
                    0 => String::new(),
                    others => format!(", and {others} are taken by snapshots of {} other texts", other_texts.len()),
                }
            );
            let source = std::io::Error::new(std::io::ErrorKind::StorageFull, what);
            return Err(SnapshotError::Io { path: folder.to_path_buf(), source }.into());
        }
        let (to, work) = sync_channel::<Vec<u8>>(1);
        let (answers, from) = sync_channel::<Answer>(1);
        let write = move || {
            for mut bytes in work {
                let start_ns = clock.now_ns();
                let done = files.write(&mut bytes).map(|path| (path, clock.now_ns() - start_ns));
                if answers.send((bytes, done)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("snapshots".into()).spawn(write);
        let thread = thread.map_err(|source| SnapshotError::Io { path: folder.to_path_buf(), source })?;
        // Address space for the whole text; pages are taken as the snapshots grow.
        let buffer = Some(Vec::with_capacity(usize::try_from(most).unwrap_or(0)));
        let counters = SnapshotCounters { other_texts, ..SnapshotCounters::default() };
        Ok(Self { run, clock, to: Some(to), from, thread: Some(thread), buffer, tokens: 0, counters })
    }

    /// What was done so far.
    pub fn counters(&self) -> &SnapshotCounters {
        &self.counters
    }

    /// Waits for what is being written.
    fn wait(&mut self) -> Result<(), GenerateError> {
        if self.buffer.is_some() {
            return Ok(());
        }
        let start_ns = self.clock.now_ns();
        let answer = self.from.recv();
        self.counters.wait_ns += self.clock.now_ns() - start_ns;
        let gone = || GenerateError::Snapshot("the thread that writes snapshots has ended".into());
        let (buffer, done) = answer.map_err(|_| gone())?;
        let bytes = buffer.len() as u64;
        self.buffer = Some(buffer);
        let (path, write_ns) = done.map_err(|e| {
            GenerateError::Snapshot(format!("{e}; decoding ends here, and --resume goes on from the snapshot before"))
        })?;
        let c = &mut self.counters;
        (c.written, c.bytes, c.write_ns) = (c.written + 1, c.bytes + bytes, c.write_ns + write_ns);
        (c.last_bytes, c.last_tokens, c.last) = (bytes, self.tokens, path);
        Ok(())
    }
}

impl Keeper for SnapshotWriter {
    fn take(&mut self, text: &TextState<'_>) -> Result<(), GenerateError> {
        self.wait()?;
        let start_ns = self.clock.now_ns();
        let mut buffer = self.buffer.take().unwrap_or_default();
        snapshot::encode(&self.run, text, &mut buffer)?;
        self.tokens = text.generated.len() as u64;
        self.counters.copy_ns += self.clock.now_ns() - start_ns;
        // a thread that has ended is found out by the wait for it
        let _ = self.to.as_ref().map(|to| to.send(buffer));
        Ok(())
    }

    fn settle(&mut self) -> Result<(), GenerateError> {
        self.wait()
    }
}

impl Drop for SnapshotWriter {
    /// What is being written is finished.
    fn drop(&mut self) {
        self.to = None;
        let _ = self.from.try_recv();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A snapshot that a run can go on from.
#[derive(Debug)]
pub struct Resumable {
    file: SnapshotFile,
    /// What it says of its run and text.
    pub header: SnapshotHeader,
    /// What is wrong with newer ones.
    pub passed_over: Vec<String>,
}

impl Resumable {
    /// The file `at`, or the newest sound snapshot in the folder `at`.
    pub fn find(at: &Path) -> Result<Self, SnapshotError> {
        let Found { file, passed_over } = find(at)?;
        let header = parse_header(file.header(), file.payload_bytes()).map_err(|e| fault(file.path(), e))?;
        Ok(Self { file, header, passed_over })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        file_bytes(self.file.header().len() as u64, self.file.payload_bytes())
    }

    /// Its tokens, if it is of `model` on the kernels that the model has.
    pub fn tokens(&mut self, model: &Model) -> Result<SnapshotTokens, OpenError> {
        self.check(model)?;
        let (bytes, path) = (self.file.payload_bytes(), self.file.path().to_path_buf());
        let mut payload = self.file.payload()?;
        let tokens = snapshot::read_tokens(&self.header, model.decoder.config(), bytes, &mut payload);
        Ok(tokens.map_err(|e| fault(&path, e))?)
    }

    /// Fills `session` and `sampler`; returns the tokens.
    pub fn restore(
        &mut self,
        model: &Model,
        session: &mut Session,
        sampler: &mut Sampler,
    ) -> Result<SnapshotTokens, OpenError> {
        self.check(model)?;
        let (bytes, path) = (self.file.payload_bytes(), self.file.path().to_path_buf());
        let mut payload = self.file.payload()?;
        let tokens = snapshot::read_tokens(&self.header, model.decoder.config(), bytes, &mut payload)
            .and_then(|t| snapshot::restore(&self.header, &mut payload, session, sampler).map(|()| t));
        Ok(tokens.map_err(|e| fault(&path, e))?)
    }

    fn check(&self, model: &Model) -> Result<(), SnapshotError> {
        let (run, own) = (&self.header.run, &model.manifest);
        let isa = model.decoder.isa().name();
        let reason = if run.model_id != own.model_id {
            format!(
                "the text was decoded by model {} (trunk {}), the store {} holds {} (trunk {}); give the store of that model",
                run.model_id,
                run.trunk,
                model.folder.display(),
                own.model_id,
                own.trunk_format.name()
            )
        } else if run.kernels != isa {
            format!(
                "the text was decoded with {} kernels, here they are {isa}, whose results differ in their last bits; give \
                 --kernels {}, or go on where a processor has them",
                run.kernels, run.kernels
            )
        } else {
            return Ok(());
        };
        Err(SnapshotError::Other { path: self.path().to_path_buf(), reason })
    }
}

fn fault(path: &Path, fault: SnapshotFault) -> SnapshotError {
    let path = path.to_path_buf();
    match fault {
        SnapshotFault::Content(reason) => SnapshotError::Damaged { path, reason },
        SnapshotFault::Read(source) => SnapshotError::Io { path, source },
        SnapshotFault::Decode(e @ DecodeError::ContextFull { .. }) => {
            SnapshotError::Other { path, reason: e.to_string() }
        }
        SnapshotFault::Decode(e) => SnapshotError::Damaged { path, reason: e.to_string() },
    }
}
