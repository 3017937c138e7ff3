//! argodrive: where the experts of a mixture-of-experts model lie on your drives, what the drives really did, and
//! whether the setting you think you are testing really fired.
//!
//! See `ARCHITECTURE.md` for the map. Modules are listed bottom up; each may use only those above it in this list.

pub mod ids;

pub mod knob;

pub mod clock;

pub mod bound;

pub mod stats;

pub mod sys;

pub mod source;

pub mod model;

pub mod store;

pub mod drive;

pub mod io;

pub mod layout;

pub mod stage;

pub mod trace;

pub mod reader;

pub mod replay;

pub mod decode;

pub mod open;

pub mod bench;

pub mod report;

pub mod cli;
