//! Measuring: one run with its record, and ladders of them. Builds runs through `open`, prints nothing.

pub mod config;
pub mod environment;
pub mod evidence;
mod evidence_decode;
mod evidence_reader;
pub mod guards;
pub mod ladder;
pub mod record;
pub mod run;
pub mod seen;
