//! Drives as a user names them: a name, a path, the devices behind it and what is known of them, and, where the machine
//! has fewer disks than the question, an emulated pace. Knows nothing of experts.

pub mod blockmap;
pub mod device;
pub mod emulated_link;
pub mod facts;
#[cfg(test)]
mod fake_sysfs;
pub mod fault_rule;
pub mod mount;
pub mod profile;
pub mod snapshot;
pub mod spec;
pub mod testbed;
pub mod topology;
pub mod units;
