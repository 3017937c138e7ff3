//! Everything that is asked of the operating system beyond plain files: durable writes, direct I/O, page-cache
//! residency, timer slack. All FFI lives here; the words expert and layer do not.

pub mod durable;
pub mod map;
