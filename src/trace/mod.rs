//! What the reader did, as data: one event per read, one record per barrier (DESIGN.md section 5), and their CSV
//! form. Knows nothing of plans or models.

pub mod events;
pub mod log;
pub mod rows;
pub mod stream;
