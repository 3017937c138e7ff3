//! Measuring: one run with its record, and ladders of them. Builds runs through `open`, prints nothing.

pub mod environment;
pub mod ladder;
pub mod record;
pub mod run;
