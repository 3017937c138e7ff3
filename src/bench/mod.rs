//! Measuring: one run with its record, and ladders of them. Builds runs through `open`, prints nothing.

pub mod ceiling;
pub mod ceiling_files;
pub mod ceiling_fit;
pub mod ceiling_load;
pub mod ceiling_sustain;
pub mod config;
pub mod environment;
pub mod evidence;
mod evidence_ahead;
mod evidence_decode;
mod evidence_reader;
pub mod guards;
pub mod ladder;
pub mod planning;
pub mod record;
pub mod reference;
pub mod reissue;
mod route_tap;
pub mod run;
pub mod sampled;
pub mod seen;
