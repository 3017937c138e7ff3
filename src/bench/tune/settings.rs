//! Reader settings that candidates try, and what they change in a profile. Pure.
//!
//! Only what can be simulated and proved is tried: engines, direct reads, hedges and guesses of the decoder are not.

use crate::bench::config::OF_PREFETCH;
use crate::reader::{CachePolicy, DispatchPolicy, PrefetchPolicy, ReaderOptions};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Depths that are tried.
const DEPTHS: [u32; 5] = [1, 2, 4, 8, 16];
/// The cache is tried at these parts of the most that it may take.
const CACHE_PARTS: [u64; 3] = [1, 2, 4];
/// Part of the buffer that the cache leaves to reads, in quarters.
const BUFFER_QUARTERS: u64 = 3;
/// A cache of fewer experts is none.
const LEAST_EXPERTS: u64 = 4;
/// Sizes of caches are multiples of this.
const CACHE_STEP_BYTES: u64 = 4096;
/// What tuning may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tunable {
    /// Which drives hold which expert.
    Layout,
    /// Which copy is read.
    Dispatch,
    /// Reads at once on each drive.
    QueueDepth,
    /// Experts that stay in memory, within the profile's buffer.
    Cache,
    /// Who guesses what is needed next.
    Prefetch,
}

impl Tunable {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Layout, Self::Dispatch, Self::QueueDepth, Self::Cache, Self::Prefetch];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Layout => "layout",
            Self::Dispatch => "dispatch",
            Self::QueueDepth => "queue-depth",
            Self::Cache => "cache",
            Self::Prefetch => "prefetch",
        }
    }

    /// The settings of a run whose proof a campaign asks of both arms when this differs.
    pub fn knobs(self) -> &'static [&'static str] {
        match self {
            Self::Layout => &["layout"],
            Self::Dispatch => &["dispatch", "split"],
            Self::QueueDepth => &["queue_depth"],
            Self::Cache => &["cache_bytes", "cache_policy"],
            Self::Prefetch => &["prefetch"],
        }
    }
}

/// A setting that differs from the current profile's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// The setting, as in a run configuration.
    pub setting: String,
    /// Its value in the current profile.
    pub from: String,
    /// And in the candidate.
    pub to: String,
}

fn table(options: &ReaderOptions) -> toml::Table {
    toml::Table::try_from(options).unwrap_or_default()
}

fn text(value: Option<&toml::Value>) -> String {
    match value {
        None => "none".into(),
        Some(toml::Value::String(s)) => s.clone(),
        Some(other) => other.to_string(),
    }
}

/// Settings in which `new` differs from `current`, by name.
pub fn changes(current: &ReaderOptions, new: &ReaderOptions) -> Vec<Change> {
    let (a, b) = (table(current), table(new));
    let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let differs = keys.into_iter().filter(|k| a.get(*k) != b.get(*k));
    differs.map(|k| Change { setting: format!("reader.{k}"), from: text(a.get(k)), to: text(b.get(k)) }).collect()
}

/// `profile` with the reader's settings changed from `current` to `new`; what it says besides stays as it is.
pub fn apply(profile: &toml::Table, current: &ReaderOptions, new: &ReaderOptions) -> toml::Table {
    let (a, b) = (table(current), table(new));
    let mut out = profile.clone();
    let mut reader = match out.remove("reader") {
        Some(toml::Value::Table(reader)) => reader,
        _ => toml::Table::new(),
    };
    for (key, value) in &b {
        if a.get(key) != Some(value) {
            reader.insert(key.clone(), value.clone());
        }
    }
    for key in a.keys().filter(|k| !b.contains_key(*k)) {
        reader.remove(key);
    }
    if new.prefetch == PrefetchPolicy::None {
        OF_PREFETCH.iter().for_each(|k| drop(reader.remove(k.name())));
    }
    if !reader.is_empty() {
        out.insert("reader".into(), reader.into());
    }
    out
}

/// `base` with every dispatch policy, its own first.
pub fn dispatches(base: &ReaderOptions) -> Vec<ReaderOptions> {
    let others = DispatchPolicy::ALL.into_iter().filter(|d| *d != base.dispatch);
    let with = |dispatch| ReaderOptions { dispatch, ..base.clone() };
    std::iter::once(base.dispatch).chain(others).map(with).collect()
}

/// What caches are tried with.
#[derive(Clone, Copy, Debug)]
pub struct CacheRoom {
    /// Bytes of one expert.
    pub expert_bytes: u64,
    /// Bytes of all experts once.
    pub bank_bytes: u64,
    /// Bytes of the different experts that the trace asks for: a larger cache is never full, and so never proved.
    pub asked_bytes: u64,
}

/// `base` with one thing changed, by what it is: the depth, the cache, the guesser.
pub fn variants(base: &ReaderOptions, what: Tunable, room: CacheRoom) -> Vec<ReaderOptions> {
    match what {
        Tunable::Layout | Tunable::Dispatch => Vec::new(),
        Tunable::QueueDepth => {
            let others = DEPTHS.into_iter().filter(|d| *d != base.queue_depth);
            others.map(|queue_depth| ReaderOptions { queue_depth, ..base.clone() }).collect()
        }
        Tunable::Cache => caches(base, room),
        Tunable::Prefetch => {
            let mut policies = vec![PrefetchPolicy::None, PrefetchPolicy::SameAsLast];
            policies.retain(|p| *p != base.prefetch);
            let with = |prefetch| ReaderOptions { prefetch, prefetch_table: None, ..base.clone() };
            policies.into_iter().map(with).collect()
        }
    }
}

/// Caches within the buffer, half of the bank at most, and smaller than what is asked for.
fn caches(base: &ReaderOptions, room: CacheRoom) -> Vec<ReaderOptions> {
    let most = (base.buffer_bytes / 4 * BUFFER_QUARTERS).min(room.bank_bytes / 2).min(room.asked_bytes / 2);
    let mut sizes: Vec<u64> = CACHE_PARTS.iter().map(|p| most / p / CACHE_STEP_BYTES * CACHE_STEP_BYTES).collect();
    sizes.retain(|s| *s >= LEAST_EXPERTS * room.expert_bytes.max(1));
    if base.cache_bytes > 0 {
        sizes.push(base.cache_bytes);
    }
    let mut out: Vec<ReaderOptions> = Vec::new();
    for cache_bytes in sizes {
        for cache_policy in [CachePolicy::Lru, CachePolicy::LfuDecay] {
            let new = ReaderOptions { cache_bytes, cache_policy, cache_heat: None, ..base.clone() };
            if new != *base && !out.contains(&new) {
                out.push(new);
            }
        }
    }
    out
}

/// `base` with what a variant of it has changed.
pub fn combined(base: &ReaderOptions, variant: &ReaderOptions, what: Tunable) -> ReaderOptions {
    let mut out = base.clone();
    match what {
        Tunable::Layout => {}
        Tunable::Dispatch => out.dispatch = variant.dispatch,
        Tunable::QueueDepth => out.queue_depth = variant.queue_depth,
        Tunable::Cache => {
            (out.cache_bytes, out.cache_policy) = (variant.cache_bytes, variant.cache_policy);
            out.cache_heat.clone_from(&variant.cache_heat);
        }
        Tunable::Prefetch => {
            out.prefetch = variant.prefetch;
            out.prefetch_table.clone_from(&variant.prefetch_table);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(text: &str) -> (toml::Table, ReaderOptions) {
        let table: toml::Table = toml::from_str(text).unwrap();
        let options = table.get("reader").cloned().map_or_else(ReaderOptions::default, |r| r.try_into().unwrap());
        (table, options)
    }

    #[test]
    fn a_profile_keeps_what_is_not_tuned_and_loses_what_would_do_nothing() {
        let (table, current) = profile(
            "plan = \"p\"\nmax_new = 9\n[reader]\nengine = \"io-uring\"\nprefetch = \"same-as-last\"\nprefetch_depth = 2\n",
        );
        let new = ReaderOptions { prefetch: PrefetchPolicy::None, queue_depth: 8, ..current.clone() };
        let out = apply(&table, &current, &new);
        let text = toml::to_string(&out).unwrap();
        assert!(
            text.contains("io-uring") && text.contains("max_new = 9") && text.contains("queue_depth = 8"),
            "{text}"
        );
        assert!(!text.contains("prefetch_depth") && !text.contains("cache"), "{text}");
        let names: Vec<String> = changes(&current, &new).into_iter().map(|c| c.setting).collect();
        assert_eq!(names, ["reader.prefetch", "reader.queue_depth"]);
        assert_eq!(apply(&table, &current, &current), table);
        let (bare, options) = profile("plan = \"p\"\n");
        assert_eq!(apply(&bare, &options, &options), bare, "no empty table is left");
        let (pinned, current) =
            profile("[reader]\ncache_bytes = 4096\ncache_policy = \"pinned\"\ncache_heat = \"h.csv\"\n");
        let new = ReaderOptions { cache_policy: CachePolicy::Lru, cache_heat: None, ..current.clone() };
        assert!(!toml::to_string(&apply(&pinned, &current, &new)).unwrap().contains("cache_heat"));
    }

    #[test]
    fn variants_are_sound_and_stay_within_the_buffer() {
        let base = ReaderOptions { buffer_bytes: 1 << 20, ..ReaderOptions::default() };
        let room = CacheRoom { expert_bytes: 4096, bank_bytes: 1 << 30, asked_bytes: 1 << 30 };
        for what in [Tunable::QueueDepth, Tunable::Cache, Tunable::Prefetch] {
            let all = variants(&base, what, room);
            assert!(!all.is_empty(), "{}", what.name());
            for new in &all {
                new.check().unwrap();
                assert!(new != &base && new.cache_bytes < base.buffer_bytes);
                assert_eq!(&combined(&base, new, what), new);
            }
        }
        let small = CacheRoom { asked_bytes: 3 * 4096, ..room };
        assert!(variants(&base, Tunable::Cache, small).is_empty(), "a cache that is never full is never proved");
        assert_eq!(dispatches(&base).len(), 5);
        assert_eq!(dispatches(&base)[0], base);
    }
}
