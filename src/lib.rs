//! argodrive: where the experts of a mixture-of-experts model lie on your drives, what the drives really did, and
//! whether the setting you think you are testing really fired.
//!
//! # Open a store and decode
//!
//! ```
//! use argodrive::clock::Clock;
//! use argodrive::decode::generate::{Request, generate};
//! use argodrive::decode::sampler::{Sampler, SamplerOptions};
//! use argodrive::open::Model;
//! use argodrive::reader::{PrefetchPolicy, ReaderOptions};
//! use argodrive::store::import::{ImportOptions, import};
//! use std::ops::ControlFlow;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = tempfile::tempdir()?;
//! import("tests/fixtures/oracle/tiny".as_ref(), store.path(), &ImportOptions::default(), &mut |_| {})?;
//! let model = Model::load(store.path(), None)?;
//! let clock = Clock::start();
//! // the store is its own one drive; another plan and other drives go the same way
//! let (plan, mounts) = model.store_plan()?;
//! let options = ReaderOptions { direct: false, ..ReaderOptions::default() };
//! let mut experts = model.reader(&plan, &mounts, &options, clock)?;
//! let mut session = model.session(0, 512, PrefetchPolicy::None, clock)?;
//! let mut sampler = Sampler::new(SamplerOptions::default())?;
//! let prompt = model.encode_prompt("abc", false)?;
//! let request = Request { prompt: &prompt, max_new: 3, stop: &model.stop_ids, piece_rows: 512 };
//! let text = generate(&mut session, &mut experts, &mut sampler, request, &mut |_token| ControlFlow::Continue(()))?;
//! assert!((1..=3).contains(&text.token_ids.len()));
//! assert!(experts.handle().counters().drives[0].reads > 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Write an expert source
//!
//! The decoder asks for a layer's experts and takes them in the order in which they arrive; it never learns where they were.
//! This one hands on what another source gives, and counts.
//!
//! ```
//! use argodrive::ids::{ExpertId, LayerId};
//! use argodrive::source::{Barrier, ExpertSource, Lease, Phase, SourceError, StepInfo};
//! # use argodrive::open::Model;
//! # use argodrive::store::import::{ImportOptions, import};
//!
//! struct Counting<S> {
//!     inner: S,
//!     barriers: usize,
//!     bytes: usize,
//! }
//!
//! impl<S: ExpertSource> ExpertSource for Counting<S> {
//!     fn open_barrier(&mut self, step: &StepInfo, layer: LayerId, experts: &[ExpertId]) -> Result<(), SourceError> {
//!         self.barriers += 1;
//!         self.inner.open_barrier(step, layer, experts)
//!     }
//!
//!     fn next_arrival(&mut self) -> Result<Option<Lease>, SourceError> {
//!         let lease = self.inner.next_arrival()?;
//!         self.bytes += lease.as_ref().map_or(0, |l| l.bytes().len());
//!         Ok(lease)
//!     }
//!
//!     fn close_barrier(&mut self) {
//!         self.inner.close_barrier();
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let store = tempfile::tempdir()?;
//! # import("tests/fixtures/oracle/tiny".as_ref(), store.path(), &ImportOptions::default(), &mut |_| {})?;
//! # let model = Model::load(store.path(), None)?;
//! let mut source = Counting { inner: model.resident()?, barriers: 0, bytes: 0 };
//! let step = StepInfo { step: 0, phase: Phase::Decode, pos: 0, rows: 1 };
//! let layer = model.manifest.moe_layers[0];
//! let mut barrier = Barrier::open(&mut source, &step, layer, &[ExpertId(2), ExpertId(5)])?;
//! let mut arrived = Vec::new();
//! while let Some(lease) = barrier.next_arrival()? {
//!     arrived.push(lease.expert());
//! }
//! drop(barrier);
//! arrived.sort();
//! assert_eq!(arrived, [ExpertId(2), ExpertId(5)]);
//! assert_eq!((source.barriers, source.bytes as u64), (1, 2 * model.manifest.expert_bytes));
//! # Ok(())
//! # }
//! ```
//!
//! # Replay a trace
//!
//! ```
//! use argodrive::replay::join::Joiner;
//! use argodrive::replay::summary::{Summarizer, summarize};
//! use argodrive::trace::{log, stream};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let trace = std::path::Path::new("tests/fixtures/traces/version-1");
//! let header = log::read_header(trace)?;
//! let drives = header.drives.len();
//! let joiner = Joiner::new(stream::reads(trace, drives, false)?, stream::barriers(trace, drives, false)?, false);
//! let summarizer = Summarizer::new(&header.drives, None, 10);
//! let mut widest = 0;
//! let summary = summarize(joiner, summarizer, None, &mut |row| {
//!     widest = widest.max(row.width);
//!     Ok(())
//! })?;
//! assert_eq!((summary.all.barriers, widest), (6, 2));
//! # Ok(())
//! # }
//! ```
//!
//! See `ARCHITECTURE.md` for the map. Modules are listed bottom up; each may use only those above it in this list.

pub mod sync;

pub mod ids;

pub mod knob;

pub mod clock;

pub mod bound;

pub mod stats;

pub mod sys;

pub mod files;

pub mod source;

pub mod model;

pub mod store;

pub mod drive;

pub mod io;

pub mod layout;

pub mod stage;

pub mod trace;

pub mod reader;

pub mod replay;

pub mod decode;

pub mod open;

pub mod bench;

pub mod report;

pub mod serve;

pub mod cli;
