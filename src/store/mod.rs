//! The expert store on disk: what a checkpoint becomes when it is imported. A store is a folder with `store.json`
//! (geometry, trunk table, model id), `trunk.bin` and, as an ordinary drive folder, every expert; so the store
//! can be drive 1 of a run with no second copy.

pub mod manifest;
pub mod trunk;
