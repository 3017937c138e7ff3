//! Drives as a user names them: a name, a path and, where the machine has fewer disks than the question, an emulated
//! pace. Knows nothing of experts.

pub mod device;
pub mod spec;
pub mod units;
