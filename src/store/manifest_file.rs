//! Reading and writing `store.json` and `drive.json`: version first, then shape, then whether the content can be true.

use super::journal::JOURNAL_FILE;
use super::manifest::{
    Container, DRIVE_FILE, DRIVE_VERSION, DriveManifest, ManifestError, SLOT_ALIGN, STORE_FILE, STORE_VERSION,
    StoreManifest, StripeSet, TRUNK_ALIGN, store_version,
};
use super::seal::{explain, seal, unseal};
use super::stripe::{Stripe, UNIT_ALIGN};
use super::trunk::byte_len;
use crate::model::tensors::DType;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Largest manifest accepted (K3's drive.json has about 6 MB).
const MAX_MANIFEST_BYTES: u64 = 256 << 20;

impl StoreManifest {
    /// Reads and checks the `store.json` of the store in `folder`.
    pub fn open(folder: &Path) -> Result<Self, ManifestError> {
        let path = folder.join(STORE_FILE);
        if !path.exists() {
            let reason = if folder.join(JOURNAL_FILE).exists() {
                let store = folder.display();
                format!(
                    "import was not finished; run `argodrive import <checkpoint> --store {store}` again, it goes on where it stopped"
                )
            } else if folder.is_file() {
                "this is a file; give the folder of a store, which holds store.json".into()
            } else {
                "no such file: this folder is not a store; make one with `argodrive import <checkpoint> --store <folder>`".into()
            };
            let path = if folder.is_file() { folder.to_path_buf() } else { path };
            return Err(ManifestError::Inconsistent { path, reason });
        }
        let manifest: Self = read(&path, STORE_VERSION)?;
        manifest.check().map_err(|reason| ManifestError::Inconsistent { path, reason })?;
        Ok(manifest)
    }

    /// Writes `store.json` into `folder`, whole or not at all.
    pub fn save(&self, folder: &Path) -> Result<(), ManifestError> {
        write(&folder.join(STORE_FILE), self, self.check())
    }

    fn check(&self) -> Result<(), String> {
        check_id(&self.model_id)?;
        let exact = self.trunk_format.is_exact();
        if self.version < store_version(self.trunk_format) {
            return Err(format!(
                "version {} has no {} trunk; import the checkpoint again",
                self.version, self.trunk_format
            ));
        }
        if self.trunk_error.is_some_and(|e| exact || !e.is_plausible()) {
            return Err("trunk_error cannot be true; import the checkpoint again".into());
        }
        if let Some(t) = self.trunk.iter().find(|t| exact && t.dtype == DType::Int8Rows) {
            return Err(format!(
                "tensor {} is {}, but the trunk format is {}",
                t.name,
                t.dtype.name(),
                self.trunk_format
            ));
        }
        if self.moe_layers.windows(2).any(|w| w[0] >= w[1]) {
            return Err("moe_layers is not ascending".into());
        }
        if !self.moe_layers.is_empty() && (self.experts == 0 || self.expert_bytes == 0) {
            return Err("moe_layers is given, but experts or expert_bytes is 0".into());
        }
        if self.experts > u32::from(u16::MAX) || self.expert_bytes > u64::from(u32::MAX) {
            return Err("experts or expert_bytes is too large".into());
        }
        let mut free_from = 0u64;
        for tensor in &self.trunk {
            let end = byte_len(&tensor.shape, tensor.dtype).and_then(|len| len.checked_add(tensor.offset));
            let Some(end) = end else {
                return Err(format!("tensor {} does not fit in 64 bits, or its type has no such shape", tensor.name));
            };
            if tensor.offset < free_from || !tensor.offset.is_multiple_of(TRUNK_ALIGN) {
                return Err(format!("tensor {} overlaps the one before it or is not aligned", tensor.name));
            }
            free_from = end;
        }
        Ok(())
    }
}

impl DriveManifest {
    /// Reads and checks the `drive.json` in the drive folder `folder` (`<mount>/argodrive/<model-id>`).
    pub fn open(folder: &Path) -> Result<Self, ManifestError> {
        let path = folder.join(DRIVE_FILE);
        let manifest: Self = read(&path, DRIVE_VERSION)?;
        manifest.check().map_err(|reason| ManifestError::Inconsistent { path, reason })?;
        Ok(manifest)
    }

    /// Writes `drive.json` into `folder`, whole or not at all.
    pub fn save(&self, folder: &Path) -> Result<(), ManifestError> {
        write(&folder.join(DRIVE_FILE), self, self.check())
    }

    fn check(&self) -> Result<(), String> {
        check_id(&self.model_id)?;
        if self.expert_bytes > u64::from(u32::MAX) {
            return Err("expert_bytes is too large".into());
        }
        let pack = self.container == Container::Pack;
        if pack && (self.slot_bytes < self.expert_bytes || !self.slot_bytes.is_multiple_of(SLOT_ALIGN)) {
            return Err(format!(
                "slot_bytes is {}; it must be a multiple of {SLOT_ALIGN} and hold an expert of {} bytes",
                self.slot_bytes, self.expert_bytes
            ));
        }
        for (layer, row) in &self.layers {
            if let Some(w) = row.windows(2).find(|w| w[0].expert >= w[1].expert) {
                return Err(format!(
                    "layer {}: expert {} does not come after {}",
                    layer.0, w[1].expert.0, w[0].expert.0
                ));
            }
            if !pack {
                continue;
            }
            let mut slots: Vec<u32> = row.iter().map(|e| e.slot).collect();
            check_slots(layer.0, &mut slots, self.slot_bytes)?;
        }
        if self.version < self.least_version() {
            return Err(format!("version {} has no stripes; stage the plan again", self.version));
        }
        if !pack && !self.stripes.is_empty() {
            return Err("a folder of one file per expert cannot hold stripes".into());
        }
        if self.stripes.windows(2).any(|w| (w[0].unit_bytes, w[0].columns) >= (w[1].unit_bytes, w[1].columns)) {
            return Err("stripes are not ascending by unit_bytes and columns".into());
        }
        self.stripes.iter().try_for_each(|set| check_stripes(set, self.expert_bytes))
    }
}

fn check_stripes(set: &StripeSet, expert_bytes: u64) -> Result<(), String> {
    let (unit_bytes, columns) = (set.unit_bytes, set.columns);
    if unit_bytes == 0 || !unit_bytes.is_multiple_of(UNIT_ALIGN) || unit_bytes > u64::from(u32::MAX) || columns < 2 {
        return Err(format!(
            "stripes of {unit_bytes} bytes over {columns} drives: a block is a multiple of {UNIT_ALIGN}, and it takes two drives"
        ));
    }
    let stripe = Stripe { expert_bytes, unit_bytes, columns };
    for (layer, row) in &set.layers {
        if let Some(w) = row.windows(2).find(|w| (w[0].expert, w[0].column) >= (w[1].expert, w[1].column)) {
            return Err(format!(
                "layer {}: column {} of expert {} is out of order",
                layer.0, w[1].column, w[1].expert.0
            ));
        }
        if let Some(p) = row.iter().find(|p| p.column >= columns || stripe.column_bytes(p.column) == 0) {
            return Err(format!("layer {}: expert {} has no column {}", layer.0, p.expert.0, p.column));
        }
        let mut slots: Vec<u32> = row.iter().map(|p| p.slot).collect();
        check_slots(layer.0, &mut slots, stripe.slot_bytes())?;
    }
    Ok(())
}

fn check_slots(layer: u16, slots: &mut [u32], slot_bytes: u64) -> Result<(), String> {
    slots.sort_unstable();
    if let Some(w) = slots.windows(2).find(|w| w[0] == w[1]) {
        return Err(format!("layer {layer}: slot {} is given to two experts", w[0]));
    }
    let last = slots.last().copied().unwrap_or(0);
    match (u64::from(last) + 1).checked_mul(slot_bytes) {
        Some(_) => Ok(()),
        None => Err(format!("layer {layer}: slot {last} lies beyond any file")),
    }
}

fn check_id(id: &str) -> Result<(), String> {
    // the id becomes a folder name
    if id.len() == 32 && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        Ok(())
    } else {
        Err(format!("model id `{}` is not 32 lower-case hex digits", id.escape_default()))
    }
}

fn read<T: DeserializeOwned>(path: &Path, newest: u32) -> Result<T, ManifestError> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    let io = |source| ManifestError::Io { path: path.to_path_buf(), source };
    let syntax = |e: serde_json::Error| ManifestError::Syntax { path: path.to_path_buf(), reason: e.to_string() };
    let mut bytes = Vec::new();
    File::open(path).and_then(|f| f.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut bytes)).map_err(io)?;
    if bytes.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(io(ErrorKind::FileTooLarge.into()));
    }
    let text = std::str::from_utf8(&bytes).map_err(|e| io(std::io::Error::new(ErrorKind::InvalidData, e)))?;
    // the version comes first: a newer file may not have this version's shape
    let seen = serde_json::from_str::<Versioned>(text).map_err(syntax)?.version;
    if seen > newest {
        return Err(ManifestError::Version { path: path.to_path_buf(), seen, newest });
    }
    if seen == 0 {
        let reason = "format version 0 has never existed".into();
        return Err(ManifestError::Inconsistent { path: path.to_path_buf(), reason });
    }
    let (text, intact) = unseal(text);
    let said = |e: serde_json::Error| explain(&e, &intact);
    let value =
        serde_json::from_str(&text).map_err(|e| ManifestError::Syntax { path: path.to_path_buf(), reason: said(e) })?;
    intact.map_err(|reason| ManifestError::Inconsistent { path: path.to_path_buf(), reason })?;
    Ok(value)
}

fn write<T: serde::Serialize>(path: &Path, value: &T, check: Result<(), String>) -> Result<(), ManifestError> {
    let path = path.to_path_buf();
    check.map_err(|reason| ManifestError::Inconsistent { path: path.clone(), reason })?;
    let text = serde_json::to_string(value)
        .map_err(|e| ManifestError::Syntax { path: path.clone(), reason: e.to_string() })?;
    crate::sys::durable::write_atomic(&path, seal(&text).as_bytes())
        .map_err(|source| ManifestError::Io { path, source })
}

#[cfg(test)]
mod tests {
    use super::super::manifest::{Digest, DriveExpert, StripePart, TrunkTensor};
    use super::super::trunk_format::{TrunkError, TrunkFormat};
    use super::*;
    use crate::ids::{ExpertId, LayerId};

    const ID: &str = "0123456789abcdef0123456789abcdef";

    fn drive() -> DriveManifest {
        let mut drive = DriveManifest::empty(ID, 26_112);
        let entry = |expert, slot| DriveExpert { expert: ExpertId(expert), slot, digest: Digest(5) };
        drive.layers.insert(LayerId(3), vec![entry(0, 2), entry(4, 0)]);
        drive
    }

    fn store() -> StoreManifest {
        let tensor = |name: &str, offset| TrunkTensor {
            name: name.into(),
            dtype: DType::BF16,
            shape: vec![3000],
            offset,
            digest: Digest(1),
        };
        StoreManifest {
            version: 1,
            model_id: ID.into(),
            name: "x".into(),
            trunk_format: TrunkFormat::Bf16,
            trunk_error: None,
            config_digest: Digest(2),
            moe_layers: vec![LayerId(1)],
            experts: 8,
            expert_bytes: 26_112,
            trunk: vec![tensor("a", 0), tensor("b", 8192)],
        }
    }

    #[test]
    fn both_come_back_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        drive().save(dir.path()).unwrap();
        assert_eq!(DriveManifest::open(dir.path()).unwrap(), drive());
        store().save(dir.path()).unwrap();
        assert_eq!(StoreManifest::open(dir.path()).unwrap(), store());
    }

    /// Two parts of one expert, by column and slot.
    fn parts(unit_bytes: u64, columns: u8, rows: [(u8, u32); 2]) -> Vec<StripeSet> {
        let digest = Digest(5);
        let part = |(column, slot)| StripePart { expert: ExpertId(1), column, slot, digest, expert_digest: digest };
        vec![StripeSet { unit_bytes, columns, layers: [(LayerId(3), rows.map(part).to_vec())].into() }]
    }

    #[test]
    fn stripes_need_version_2_and_version_1_stays_readable() {
        let dir = tempfile::tempdir().unwrap();
        let v1 = serde_json::to_string(&drive()).unwrap();
        assert!(v1.contains("\"version\":1") && !v1.contains("stripes"), "nothing new where nothing is new");
        std::fs::write(dir.path().join(DRIVE_FILE), v1).unwrap();
        let mut striped = DriveManifest::open(dir.path()).unwrap();
        striped.stripes = parts(4096, 2, [(0, 0), (1, 1)]);
        assert!(striped.save(dir.path()).unwrap_err().to_string().contains("version 1 has no stripes"));
        striped.version = striped.least_version();
        striped.save(dir.path()).unwrap();
        assert_eq!(DriveManifest::open(dir.path()).unwrap(), striped);
    }

    #[test]
    fn a_drive_manifest_that_cannot_be_true_is_refused() {
        type Edit = fn(&mut DriveManifest);
        let row = |d: &mut DriveManifest| d.layers.values_mut().next().unwrap().clone();
        assert_eq!(row(&mut drive()).len(), 2);
        let edits: [(Edit, &str); 9] = [
            (|d| d.stripes = parts(4096, 2, [(0, 0), (1, 0)]), "slot 0 is given to two"),
            (|d| d.stripes = parts(4096, 2, [(1, 0), (0, 1)]), "out of order"),
            (|d| d.stripes = parts(5000, 2, [(0, 0), (1, 1)]), "multiple of 4096"),
            (|d| d.stripes = parts(4096, 9, [(0, 0), (7, 1)]), "has no column 7"),
            (|d| d.layers.values_mut().for_each(|r| r[1].slot = 2), "slot 2 is given to two experts"),
            (|d| d.layers.values_mut().for_each(|r| r[1].expert = ExpertId(0)), "does not come after"),
            (|d| d.slot_bytes = 1000, "slot_bytes"),
            (|d| d.model_id = "../../../../../../../../../../../".into(), "32 lower-case hex"),
            (|d| d.expert_bytes = 1 << 40, "expert_bytes"),
        ];
        for (edit, message) in edits {
            let dir = tempfile::tempdir().unwrap();
            let mut bad = drive();
            edit(&mut bad);
            bad.version = bad.least_version();
            std::fs::write(dir.path().join(DRIVE_FILE), serde_json::to_vec(&bad).unwrap()).unwrap();
            let error = DriveManifest::open(dir.path()).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains("drive.json"), "{error}");
            assert!(bad.save(dir.path()).is_err());
        }
    }

    #[test]
    fn a_store_manifest_that_cannot_be_true_is_refused() {
        type Edit = fn(&mut StoreManifest);
        const ERROR: TrunkError = TrunkError { rows: 2, same_argmax: 3, largest_difference: 0.1, largest_exact: 1.0 };
        let edits: [(Edit, &str); 7] = [
            (
                |s| (s.version, s.trunk_format, s.trunk[0].dtype) = (2, TrunkFormat::Int8, DType::Int8Rows),
                "its type has no such shape",
            ),
            (|s| (s.trunk[0].dtype, s.trunk[0].shape) = (DType::Int8Rows, vec![10, 300]), "tensor a is I8_ROWS, but"),
            (|s| s.trunk_format = TrunkFormat::Int8, "version 1 has no int8 trunk"),
            (
                |s| (s.version, s.trunk_format, s.trunk_error) = (2, TrunkFormat::Int8, Some(ERROR)),
                "trunk_error cannot",
            ),
            (|s| s.trunk[1].offset = 4096, "tensor b overlaps"),
            (|s| s.trunk[1].offset = 8200, "tensor b overlaps the one before it or is not aligned"),
            (|s| s.trunk[0].shape = vec![u64::MAX, 4], "tensor a does not fit"),
        ];
        for (edit, message) in edits {
            let dir = tempfile::tempdir().unwrap();
            let mut bad = store();
            edit(&mut bad);
            std::fs::write(dir.path().join(STORE_FILE), serde_json::to_vec(&bad).unwrap()).unwrap();
            let error = StoreManifest::open(dir.path()).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains("store.json"), "{error}");
        }
    }

    #[test]
    fn an_int8_trunk_needs_version_2_and_an_unknown_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let v1 = serde_json::to_string(&store()).unwrap();
        assert!(!v1.contains("trunk_error"), "nothing new where nothing is new");
        let error = TrunkError { rows: 2, same_argmax: 2, largest_difference: 0.1, largest_exact: 1.0 };
        let mut int8 =
            StoreManifest { version: 2, trunk_format: TrunkFormat::Int8, trunk_error: Some(error), ..store() };
        (int8.trunk[0].dtype, int8.trunk[0].shape) = (DType::Int8Rows, vec![10, 300]);
        int8.save(dir.path()).unwrap();
        assert_eq!(StoreManifest::open(dir.path()).unwrap(), int8);
        std::fs::write(dir.path().join(STORE_FILE), v1.replace("\"bf16\"", "\"int3\"")).unwrap();
        let e = StoreManifest::open(dir.path()).unwrap_err().to_string();
        assert!(e.contains("`int3` is unknown; this program reads bf16 and int8") && e.contains("store.json"), "{e}");
    }

    #[test]
    fn newer_unknown_and_unfinished_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let open = || StoreManifest::open(dir.path()).unwrap_err().to_string();
        assert!(open().contains("not a store"));
        std::fs::write(dir.path().join(JOURNAL_FILE), "").unwrap();
        assert!(open().contains("import was not finished; run `argodrive import"));
        std::fs::write(dir.path().join(STORE_FILE), r#"{"version":3,"whatever":1}"#).unwrap();
        assert!(open().contains("use a newer argodrive"));
        std::fs::write(dir.path().join(STORE_FILE), r#"{"version":1,"whatever":1}"#).unwrap();
        assert!(open().contains("unknown field"));
    }
}
