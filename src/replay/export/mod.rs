//! Traces for other programs: Perfetto (or Chrome's trace viewer), and HDR interval logs. Both stream.

pub mod hdr;
pub mod perfetto;
