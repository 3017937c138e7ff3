//! One flipped bit anywhere in an expert, a trunk tensor, a manifest or a plan is found, and where it lies is said.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod prepared;

use argodrive::layout::plan::Plan;
use argodrive::store::manifest::{DRIVE_FILE, DriveManifest, STORE_FILE, StoreManifest};
use argodrive::store::trunk::byte_len;
use argodrive::store::verify::{verify_pieces, verify_trunk};
use prepared::{Drives, tiny_store};
use proptest::prelude::*;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

struct Bed {
    drives: Drives,
    plan: PathBuf,
    store: StoreManifest,
}

fn bed() -> &'static Bed {
    static CELL: OnceLock<Bed> = OnceLock::new();
    CELL.get_or_init(|| {
        let drives = Drives::new(2, None);
        let plan = drives.staged(tiny_store(), "round-robin");
        Bed { drives, plan, store: StoreManifest::open(tiny_store()).unwrap() }
    })
}

/// Flips bit `bit` of the byte at `offset`; a second time flips it back.
fn flip(path: &Path, offset: u64, bit: u8) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0u8];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ (1 << bit)], offset).unwrap();
    file.sync_all().unwrap();
}

/// Flips a bit of a whole file, looks, flips it back.
fn text_with_flip<T>(path: &Path, place: u64, bit: u8, look: impl FnOnce() -> T) -> T {
    let offset = place % fs::metadata(path).unwrap().len();
    flip(path, offset, bit);
    let seen = look();
    flip(path, offset, bit);
    seen
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_flipped_bit_is_found_and_named(kind in 0..5u8, which: prop::sample::Index, place: u64, bit in 0..8u8) {
        let Bed { drives, plan, store } = bed();
        let folder = drives.model_folder(usize::from(place % 2 == 1));
        match kind {
            0 => {
                let manifest = DriveManifest::open(&folder).unwrap();
                let pieces: Vec<_> = manifest.pieces().collect();
                let piece = *which.get(&pieces);
                let (name, extent) = manifest.locate_piece(&piece);
                let path = folder.join(&name);
                let offset = extent.offset + place % extent.len;
                flip(&path, offset, bit);
                let report = verify_pieces(&folder, &manifest, vec![piece], &mut |_| {}).unwrap();
                flip(&path, offset, bit);
                prop_assert_eq!(report.faults.len(), 1);
                let said = report.faults[0].to_string();
                for word in [path.display().to_string(), format!("slot {}", piece.slot), format!("offset {}", extent.offset)] {
                    prop_assert!(said.contains(&word), "`{}` is not in: {}", word, said);
                }
                let report = verify_pieces(&folder, &manifest, vec![piece], &mut |_| {}).unwrap();
                prop_assert!(report.faults.is_empty());
            }
            1 => {
                let mut one = store.clone();
                one.trunk = vec![which.get(&store.trunk).clone()];
                let tensor = &one.trunk[0];
                let len = byte_len(&tensor.shape, tensor.dtype).unwrap();
                let path = tiny_store().join("trunk.bin");
                let offset = tensor.offset + place % len;
                flip(&path, offset, bit);
                let report = verify_trunk(tiny_store(), &one, &mut |_| {}).unwrap();
                flip(&path, offset, bit);
                prop_assert_eq!(report.faults.len(), 1);
                prop_assert!(report.faults[0].to_string().contains(&tensor.name));
            }
            2 => {
                let path = folder.join(DRIVE_FILE);
                let said = text_with_flip(&path, place, bit, || DriveManifest::open(&folder)).unwrap_err().to_string();
                prop_assert!(said.contains(path.to_str().unwrap()), "{}", said);
            }
            3 => {
                let path = tiny_store().join(STORE_FILE);
                let said = text_with_flip(&path, place, bit, || StoreManifest::open(tiny_store())).unwrap_err().to_string();
                prop_assert!(said.contains(path.to_str().unwrap()), "{}", said);
            }
            _ => {
                let text = text_with_flip(plan, place, bit, || fs::read(plan).unwrap());
                prop_assert!(std::str::from_utf8(&text).map_or(true, |text| Plan::parse(text).is_err()));
            }
        }
    }
}
