//! What the server did, counted where it happens, and the page that Prometheus reads.

use super::connections::Late;
use super::histogram::{Buckets, Page, REPLY_BUCKETS_NS, WAIT_BUCKETS_NS};
use super::{Shared, live::BarrierFigures};
use crate::bench::turns::KeptTexts;
use crate::reader::ReaderCounters;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Counters of requests and tokens.
pub struct Metrics {
    /// By route and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    first_token: Mutex<Buckets>,
    prompt: AtomicU64,
    cached: AtomicU64,
    completion: AtomicU64,
    cancelled: AtomicU64,
    failed: AtomicU64,
    kept: Mutex<KeptTexts>,
}

fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Mutex::default(),
            first_token: Mutex::new(Buckets::new(&REPLY_BUCKETS_NS)),
            prompt: AtomicU64::new(0),
            cached: AtomicU64::new(0),
            completion: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            kept: Mutex::default(),
        }
    }
}

impl Metrics {
    /// A request was answered.
    pub fn request(&self, route: &'static str, status: u16) {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry((route, status)).or_default() += 1;
    }

    /// A text has its first token, so long after it was asked for.
    pub fn first_token(&self, after: Duration) {
        let ns = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
        self.first_token.lock().unwrap_or_else(PoisonError::into_inner).add(ns);
    }

    /// A token was generated.
    pub fn token(&self) {
        add(&self.completion, 1);
    }

    /// A prompt was read, `cached` tokens of it not again.
    pub fn prompt(&self, tokens: usize, cached: usize) {
        add(&self.prompt, tokens);
        add(&self.cached, cached);
    }

    /// A client went away before its text had ended.
    pub fn cancelled(&self) {
        add(&self.cancelled, 1);
    }

    /// A text could not be generated.
    pub fn failed(&self) {
        add(&self.failed, 1);
    }

    /// These texts are kept now.
    pub fn kept(&self, texts: KeptTexts) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = texts;
    }

    /// Tokens generated so far.
    pub fn tokens(&self) -> u64 {
        self.completion.load(Ordering::Relaxed)
    }

    fn counters(&self, page: &mut Page) {
        page.metric("argodrive_http_requests_total", "counter", "Requests answered, by route and status.");
        for ((route, status), count) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let status = status.to_string();
            page.sample("argodrive_http_requests_total", &[("route", route), ("code", &status)], *count);
        }
        for (name, help, counter) in [
            ("argodrive_prompt_tokens_total", "Tokens of prompts.", &self.prompt),
            ("argodrive_prompt_tokens_cached_total", "Of these, not read again: the session held them.", &self.cached),
            ("argodrive_completion_tokens_total", "Tokens generated.", &self.completion),
            (
                "argodrive_cancelled_total",
                "Requests whose client went away before the text had ended.",
                &self.cancelled,
            ),
            ("argodrive_generations_failed_total", "Texts that failed.", &self.failed),
        ] {
            page.metric(name, "counter", help);
            page.sample(name, &[], counter.load(Ordering::Relaxed));
        }
        let name = "argodrive_time_to_first_token_seconds";
        page.metric(name, "histogram", "From a request to its first token, waiting in the queue included.");
        page.histogram(name, &[], &self.first_token.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The whole page.
pub fn page(shared: &Shared) -> String {
    let mut page = Page::default();
    page.metric("argodrive_info", "gauge", "The program and its model.");
    let (version, id) = (env!("CARGO_PKG_VERSION"), shared.model.manifest.model_id.as_str());
    page.sample("argodrive_info", &[("version", version), ("model", &shared.name), ("model_id", id)], 1);
    shared.metrics.counters(&mut page);
    let (waiting, running) = shared.queue.depth();
    let kept = *shared.metrics.kept.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, help, value) in [
        ("argodrive_queue_waiting", "Requests that wait.", waiting as u64),
        ("argodrive_queue_capacity", "Requests that may wait.", shared.queue.capacity() as u64),
        ("argodrive_generating", "1 while a text is generated.", u64::from(running)),
        ("argodrive_sessions_kept", "Texts that can be gone on with.", kept.texts as u64),
        ("argodrive_sessions_limit", "Texts that may be kept.", shared.sessions as u64),
        ("argodrive_sessions_bytes", "Memory of the texts that are kept.", kept.bytes),
        ("argodrive_connections_open", "Connections that are open.", shared.connections.open() as u64),
        ("argodrive_connections_limit", "Connections that may be.", shared.connections.limits().most as u64),
    ] {
        page.metric(name, "gauge", help);
        page.sample(name, &[], value);
    }
    for (name, help, value) in [
        ("argodrive_sessions_evicted_total", "Texts given up for others.", kept.evicted),
        (
            "argodrive_connections_refused_total",
            "Connections turned away because as many were open as may be.",
            shared.connections.refused(),
        ),
    ] {
        page.metric(name, "counter", help);
        page.sample(name, &[], value);
    }
    let name = "argodrive_clients_too_slow_total";
    page.metric(name, "counter", "Clients cut off, by what they were too slow with.");
    for late in Late::ALL {
        page.sample(name, &[("with", late.name())], shared.connections.late(late));
    }
    if let Some(counters) = shared.live.counters() {
        barriers(&mut page, &shared.live.barriers(), &counters);
        drives(&mut page, shared, &counters);
    }
    page.finish()
}

fn barriers(page: &mut Page, figures: &BarrierFigures, counters: &ReaderCounters) {
    for (name, help, value) in [
        ("argodrive_barriers_total", "Barriers closed: a layer's wait for all of its experts.", counters.barriers),
        ("argodrive_barriers_uncounted_total", "Of these, missing in the histograms.", figures.lost),
        ("argodrive_expert_cache_hits_total", "Demanded experts that were in memory.", counters.cache.hits),
        ("argodrive_expert_cache_misses_total", "Demanded experts that were not.", counters.cache.misses),
        ("argodrive_failovers_total", "Reads repeated on another drive.", counters.failovers),
    ] {
        page.metric(name, "counter", help);
        page.sample(name, &[], value);
    }
    for (name, help, buckets) in [
        ("argodrive_barrier_stall_seconds", "Time in a barrier in which compute had nothing to do.", &figures.stall),
        ("argodrive_barrier_seconds", "From a barrier's opening to its last expert.", &figures.open),
    ] {
        page.metric(name, "histogram", help);
        page.histogram(name, &[], buckets);
    }
}

fn drives(page: &mut Page, shared: &Shared, counters: &ReaderCounters) {
    // by drive, with its name and whether it is emulated
    let emulated = |e: bool| if e { "true" } else { "false" };
    let named =
        || shared.live.drives().iter().zip(&counters.drives).map(|(n, d)| (n.name.as_str(), emulated(n.emulated), d));
    let mut counter = |name: &str, kind: &str, help: &str, value: &dyn Fn(&crate::reader::DriveCounters) -> u64| {
        page.metric(name, kind, help);
        for (drive, emulated, counters) in named() {
            page.sample(name, &[("drive", drive), ("emulated", emulated)], value(counters));
        }
    };
    counter("argodrive_drive_reads_total", "counter", "Reads that delivered an expert, or a part of one.", &|d| {
        d.reads
    });
    counter("argodrive_drive_read_bytes_total", "counter", "Bytes of these reads.", &|d| d.read_bytes);
    counter("argodrive_drive_wasted_bytes_total", "counter", "Bytes read ahead for nothing.", &|d| {
        d.prefetch.wasted.bytes
    });
    counter("argodrive_drive_read_errors_total", "counter", "Reads that failed or timed out.", &|d| {
        d.errors + d.timeouts
    });
    counter("argodrive_drive_landed_last_total", "counter", "Barriers whose last expert came from here.", &|d| {
        d.landed_last
    });
    counter("argodrive_drive_degraded", "gauge", "1 while demand leaves the drive alone.", &|d| {
        u64::from(d.left_alone)
    });
    let name = "argodrive_drive_read_latency_seconds";
    page.metric(name, "histogram", "Completion latency of the reads that delivered.");
    for (drive, emulated, counters) in named() {
        let mut buckets = Buckets::new(&WAIT_BUCKETS_NS);
        for step in counters.clat_ns.iter_recorded() {
            buckets.add_many(step.value_iterated_to(), step.count_at_value());
        }
        page.histogram(name, &[("drive", drive), ("emulated", emulated)], &buckets);
    }
}
