//! The fuzz target: `parse --parser=NAME`, then libFuzzer's own arguments. One program for all parsers, because each would link the
//! whole library again.
#![no_main]

use std::sync::OnceLock;

static PARSER: OnceLock<String> = OnceLock::new();

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let name = PARSER.get_or_init(|| {
        let asked = std::env::args().find_map(|a| a.strip_prefix("--parser=").map(str::to_owned));
        asked.expect("--parser=NAME says which; names are those of the folders in corpus/")
    });
    argodrive_fuzz::call(name, bytes);
});
