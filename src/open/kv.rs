//! Assembly of the KV tier: how latent caches of a model are cut for a budget, and the file that blocks go to.

use super::{Model, OpenError};
use crate::clock::Clock;
use crate::decode::kv::KvTooSmall;
use crate::decode::{Batch, CacheShape, KvPlan, KvTier, Session};
use crate::drive::spec::DriveSpec;
use crate::ids::DriveId;
use crate::io::paced::PacedDrive;
use crate::knob::{self, Knob};
use crate::reader::kv_file::{KvFile, KvHandle, KvSpec};
use crate::reader::{PrefetchPolicy, ReaderOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How much memory latent caches may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvLimit {
    /// Bytes; 0 = as much as they need.
    pub ram_bytes: u64,
    /// Rows of a pass that may be taken back; 0 = none.
    pub trial_rows: usize,
}

/// Where blocks go, and who is told.
pub struct KvPlace<'a> {
    /// The folder.
    pub folder: &'a Path,
    /// Tokens of the longest text.
    pub longest: usize,
    /// The pace of the drive that the folder is on, if it is emulated.
    pub pace: Option<Arc<PacedDrive>>,
    /// The drive's number in a trace, and how many reads the trace has room for; 0 = no trace.
    pub traced: (DriveId, usize),
}

/// Which of `mounts` the folder is on: the one in whose folder it lies.
pub fn drive_of(folder: &Path, mounts: &[DriveSpec]) -> Option<usize> {
    let real = |path: &Path| path.canonicalize().ok();
    let folder: PathBuf = real(folder)?;
    mounts.iter().position(|m| real(&m.path).is_some_and(|path| folder.starts_with(path)))
}

impl Model {
    /// How latent caches of `lanes` texts of at most `max_context` tokens are held.
    pub fn kv_shape(&self, limit: KvLimit, lanes: usize, max_context: usize) -> Result<CacheShape, KvTooSmall> {
        let plan = |ram_bytes| {
            let plan = KvPlan::of(self.decoder.config(), lanes, max_context, limit.trial_rows, ram_bytes);
            plan.map(|plan| plan.map_or(CacheShape::Whole, CacheShape::Spilled))
        };
        match limit.ram_bytes {
            0 if knob::forced(Knob::KvRam) => plan(1).or_else(|least| plan(least.least)),
            0 => Ok(CacheShape::Whole),
            _ if knob::skipped(Knob::KvRam) => Ok(CacheShape::Whole),
            ram_bytes => plan(ram_bytes),
        }
    }

    /// A [session](Model::session) whose latent cache is held to `limit`. Where rows have to leave memory, it needs
    /// [`Model::open_kv`] before it is fed.
    pub fn bounded_session(
        &self,
        max_context: usize,
        max_rows: usize,
        prefetch: PrefetchPolicy,
        clock: Clock,
        limit: KvLimit,
    ) -> Result<Session, OpenError> {
        self.session_of_texts(1, (max_context, max_rows), (prefetch, clock), limit)
    }

    /// The same for `texts` texts that take turns and whose caches are together held to `limit`: those of
    /// [`Session::another_text`] have the lanes below that number.
    pub fn session_of_texts(
        &self,
        texts: usize,
        (max_context, max_rows): (usize, usize),
        (prefetch, clock): (PrefetchPolicy, Clock),
        limit: KvLimit,
    ) -> Result<Session, OpenError> {
        let options = self.session_options(max_context, max_rows, prefetch, clock);
        let shape = self.kv_shape(limit, texts, options.max_context)?;
        Ok(Session::shaped(Arc::clone(&self.decoder), options, shape)?)
    }

    /// A [batch](Model::batch) whose latent caches are together held to `limit`, as [`Model::bounded_session`].
    pub fn bounded_batch(
        &self,
        (max_context, longest): (usize, usize),
        max_rows: usize,
        lanes: usize,
        (prefetch, clock): (PrefetchPolicy, Clock),
        limit: KvLimit,
    ) -> Result<Batch, OpenError> {
        // A pass over prompts is held to their rows by the request; one over lanes has a row of each.
        let mut options = self.session_options(max_context, max_rows.max(lanes.saturating_add(1)), prefetch, clock);
        options.max_context = options.max_context.min(longest);
        let shape = self.kv_shape(limit, lanes, options.max_context)?;
        Ok(Batch::shaped(Arc::clone(&self.decoder), options, lanes, shape)?)
    }

    /// Gives `to` a file for its blocks; nothing where no row has to leave memory. Reads are carried out as `options` say.
    pub fn open_kv(
        &self,
        to: &mut KvTier,
        place: &KvPlace<'_>,
        options: &ReaderOptions,
        clock: Clock,
    ) -> Result<Option<KvHandle>, OpenError> {
        let Some(plan) = to.plan() else { return Ok(None) };
        let spec = KvSpec {
            folder: place.folder,
            block_bytes: plan.stored_bytes,
            needed_bytes: plan.spilled_bytes(place.longest),
            pace: place.pace.clone(),
            traced: place.traced,
        };
        let (file, handle) = KvFile::open(&spec, options, clock)?;
        to.keep_in(Box::new(file));
        Ok(Some(handle))
    }
}
