//! The expert store on disk: what a checkpoint becomes when it is imported. A store is a folder with `store.json`
//! (geometry, trunk table, model id), `trunk.bin` and, as an ordinary drive folder, every expert; so the store
//! can be drive 1 of a run with no second copy.

pub mod adopt;
mod confirm;
pub(crate) mod copy;
pub mod identity;
pub mod import;
mod import_error;
pub(crate) mod journal;
pub mod manifest;
mod manifest_file;
pub mod memory;
pub mod piece;
pub mod seal;
pub mod snapshot_file;
pub mod stripe;
pub mod synth;
mod synth_config;
pub mod synth_routing;
mod synth_values;
pub(crate) mod target;
pub mod trunk;
pub mod trunk_format;
mod trunk_memory;
pub mod verify;
