//! Which expert may be read from which drive. Pure: no clock, no files; seeds are arguments.

pub mod plan;
pub mod planner;
pub mod policy;
