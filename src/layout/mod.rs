//! Which expert may be read from which drive. Pure: no clock, no files; seeds are arguments.

pub mod barrier;
pub mod drives;
pub mod heat;
pub mod heat_build;
pub mod level;
pub mod plan;
pub mod planner;
pub mod policy;
pub mod predict;
pub mod routes;
mod routes_counts;
mod search;
mod simple;
pub mod training;
pub mod worked;
