//! What the reader did, as data: one event per read, one record per barrier (DESIGN.md section 5), and their CSV
//! and Parquet forms; and beside it what the kernel counted (`monitor`). Knows nothing of plans or models.

pub mod cause;
pub mod error;
pub mod events;
pub mod fields;
pub mod header;
pub mod log;
pub mod meter;
pub mod monitor;
pub mod parquet;
pub mod passed;
pub mod routes;
pub mod rows;
pub mod stream;
pub mod windows;

#[cfg(test)]
mod windows_tests;
