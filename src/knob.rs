//! Every knob that a run can be given, by name; and, in test builds only, switches that make a mechanism lie about one.
//!
//! `bench::evidence` says what proves each knob. In builds with debug assertions the code that carries a knob out asks
//! [`skipped`] (asked for, but not done) and [`forced`] (off, but done all the same) at its own call site; a test then
//! checks that a run with a lying mechanism is rejected by name. In all others both are constant `false`.

macro_rules! knobs {
    ($(#[doc = $about:literal] $variant:ident = $name:literal),* $(,)?) => {
        /// A setting of a run.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Knob {
            $(#[doc = $about] $variant),*
        }

        impl Knob {
            /// All of them, in the order of the evidence table.
            pub const ALL: &'static [Knob] = &[$(Knob::$variant),*];

            /// The name in run configurations, tables and records.
            pub fn name(self) -> &'static str {
                match self {
                    $(Knob::$variant => $name),*
                }
            }

            /// What it is, in one line.
            pub fn about(self) -> &'static str {
                match self {
                    $(Knob::$variant => $about),*
                }
                .trim()
            }

            /// The knob of this name.
            pub fn named(name: &str) -> Option<Knob> {
                Knob::ALL.iter().copied().find(|k| k.name() == name)
            }
        }
    };
}

knobs! {
    /// Drives of the plan that must serve reads, and bytes by drive that match its homes.
    Layout = "layout",
    /// Copies beyond the primary that may be read.
    Replicas = "replicas",
    /// Which copy of an expert is read.
    Dispatch = "dispatch",
    /// How reads are carried out.
    Engine = "engine",
    /// A kernel thread that takes reads from io_uring's ring.
    Sqpoll = "sqpoll",
    /// Reading an expert in parts from several homes at once.
    Split = "split",
    /// Asking a second home for the last read of a barrier when the first takes long.
    Hedge = "hedge_after_permille",
    /// What drives can do, known before the run.
    Rates = "rates",
    /// Reads at once on each drive.
    QueueDepth = "queue_depth",
    /// Memory for experts in flight.
    BufferBytes = "buffer_bytes",
    /// Reading past the page cache.
    Direct = "direct",
    /// Checking each expert's digest as it arrives.
    VerifyDigests = "verify_digests",
    /// Longest wait without an arrival.
    ReadTimeout = "read_timeout_ms",
    /// Faults that reads meet on purpose.
    Faults = "faults",
    /// Leaving a drive alone that has become too slow.
    Shed = "shed",
    /// Most bytes per second that a drive is asked for.
    MaxReadRate = "max_read_bytes_per_s",
    /// Part of the time in which drives are asked for reads.
    Duty = "duty_permille",
    /// Who guesses what later layers will need.
    Prefetch = "prefetch",
    /// Layers ahead that guesses may be for.
    PrefetchDepth = "prefetch_depth",
    /// Most guesses for one layer.
    PrefetchExperts = "prefetch_experts",
    /// Prefetch reads at once on each drive.
    PrefetchQueueDepth = "prefetch_queue_depth",
    /// Whether prefetch reads beside demand or in one queue with it.
    PrefetchPool = "prefetch_pool",
    /// Which copy of a guessed expert is read.
    PrefetchDispatch = "prefetch_dispatch",
    /// Turning prefetch down while it costs more than it brings.
    PrefetchGovernor = "prefetch_governor",
    /// Memory for experts that stay.
    CacheBytes = "cache_bytes",
    /// Which experts stay.
    CachePolicy = "cache_policy",
    /// Pace of emulated drives.
    Pace = "pace",
    /// Links that emulated drives share.
    Link = "link",
    /// Experts held in memory instead of streaming.
    Resident = "resident",
    /// Compute kernels.
    Kernels = "kernels",
    /// What activations are in products of MXFP4 and int8 weights.
    Activations = "activations",
    /// Threads that compute.
    Threads = "threads",
    /// Where the trunk is.
    Trunk = "trunk",
    /// CPUs of compute and of reading.
    Affinity = "affinity",
    /// Texts that share a decode pass.
    Parallel = "parallel",
    /// Prompt rows in one pass.
    PrefillRows = "prefill_rows",
    /// Who proposes tokens that are checked together.
    Speculate = "speculate",
    /// Most proposals in a pass.
    DraftDepth = "draft_depth",
    /// Who chooses how many.
    DraftPolicy = "draft_policy",
    /// When a proposal is kept.
    DraftAccept = "draft_accept",
    /// Positions that the draft model's attention looks back.
    DraftWindow = "draft_window",
    /// Most tokens of text.
    MaxContext = "max_context",
    /// Memory for latent caches, beyond which rows go to a drive.
    KvRam = "kv_ram_bytes",
    /// Most tokens to generate.
    MaxNew = "max_new",
    /// Randomness of the choice of tokens.
    Temperature = "temperature",
    /// Probability that the candidates reach together.
    TopP = "top_p",
    /// Number of candidates.
    TopK = "top_k",
    /// Seed of the choice.
    Seed = "seed",
    /// Special tokens in the prompt.
    Special = "special",
    /// Writing every read and barrier.
    Trace = "trace",
    /// The same run once more with every expert in memory.
    Reference = "reference",
    /// Sampling the drives' devices beside a trace.
    Monitor = "monitor",
    /// Tokens between snapshots of the text.
    SnapshotEvery = "snapshot_every",
    /// Going on with a text from a snapshot.
    Resume = "resume",
}

#[cfg(debug_assertions)]
mod switches {
    use super::Knob;
    use std::sync::atomic::{AtomicI64, Ordering};

    const NONE: i64 = -1;
    static SKIPPED: AtomicI64 = AtomicI64::new(NONE);
    static FORCED: AtomicI64 = AtomicI64::new(NONE);

    /// Makes the mechanism behind `knob` do nothing although it is asked for.
    pub fn skip(knob: Knob) {
        SKIPPED.store(knob as i64, Ordering::SeqCst);
    }

    /// Makes the mechanism behind `knob` act although it is off (or act otherwise than asked).
    pub fn force(knob: Knob) {
        FORCED.store(knob as i64, Ordering::SeqCst);
    }

    /// Ends every lie.
    pub fn tell_the_truth() {
        SKIPPED.store(NONE, Ordering::SeqCst);
        FORCED.store(NONE, Ordering::SeqCst);
    }

    pub(super) fn is_skipped(knob: Knob) -> bool {
        SKIPPED.load(Ordering::Relaxed) == knob as i64
    }

    pub(super) fn is_forced(knob: Knob) -> bool {
        FORCED.load(Ordering::Relaxed) == knob as i64
    }
}

#[cfg(debug_assertions)]
pub use switches::{force, skip, tell_the_truth};

/// Whether a test has told the mechanism behind `knob` to do nothing.
#[inline(always)]
pub fn skipped(knob: Knob) -> bool {
    #[cfg(debug_assertions)]
    return switches::is_skipped(knob);
    #[cfg(not(debug_assertions))]
    {
        let _ = knob;
        false
    }
}

/// Whether a test has told the mechanism behind `knob` to act although it is off.
#[inline(always)]
pub fn forced(knob: Knob) -> bool {
    #[cfg(debug_assertions)]
    return switches::is_forced(knob);
    #[cfg(not(debug_assertions))]
    {
        let _ = knob;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found_again() {
        for (i, knob) in Knob::ALL.iter().enumerate() {
            assert_eq!(Knob::named(knob.name()), Some(*knob));
            assert!(Knob::ALL[..i].iter().all(|k| k.name() != knob.name()));
        }
    }
}
