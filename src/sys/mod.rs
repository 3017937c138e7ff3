//! Everything that is asked of the operating system beyond plain files: durable writes, direct I/O, page-cache
//! residency, timer slack, counters of block devices. All FFI lives here; the words expert and layer do not.

pub mod affinity;
pub mod blockstat;
pub mod cache;
pub mod cachestat;
pub mod direct;
pub mod durable;
pub mod hole;
pub mod limits;
pub mod lock;
pub mod loop_device;
pub mod map;
pub mod space;
pub mod terminal;
pub mod timer;
