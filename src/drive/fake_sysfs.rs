//! Trees like `/sys` for tests: disks on every bus, RAID, mappings, loop devices.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// A tree and a mount table in a folder of its own.
pub(super) struct FakeSys {
    pub dir: tempfile::TempDir,
}

/// Disks of a tree: where they hang, device number, and files with their content.
pub(super) const NVME_A: &str = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/nvme/nvme0/nvme0n1";
pub(super) const NVME_B: &str = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/nvme/nvme1/nvme1n1";
pub(super) const SATA: &str = "pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda";
pub(super) const SATA_2: &str = "pci0000:00/0000:00:17.0/ata2/host1/target1:0:0/1:0:0:0/block/sdb";
pub(super) const USB: &str = "pci0000:00/0000:00:14.0/usb2/2-1/2-1.3/2-1.3:1.0/host4/target4:0:0/4:0:0:0/block/sdc";
pub(super) const USB_2: &str = "pci0000:00/0000:00:14.0/usb2/2-1/2-1.4/2-1.4:1.0/host5/target5:0:0/5:0:0:0/block/sdd";
pub(super) const VIRTIO: &str = "pci0000:00/0000:00:02.0/virtio1/block/vda";

impl FakeSys {
    /// Nothing but folders.
    pub fn empty() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["block", "class/block", "dev/block", "devices"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        fs::write(dir.path().join("mountinfo"), "").unwrap();
        Self { dir }
    }

    /// Two NVMe drives behind one switch, two SATA, two USB behind one hub, one virtio.
    pub fn full() -> Self {
        let sys = Self::empty();
        let disks =
            [(NVME_A, "259:0"), (NVME_B, "259:4"), (SATA, "8:0"), (SATA_2, "8:16"), (USB, "8:32"), (USB_2, "8:48")];
        for (at, number) in disks.into_iter().chain([(VIRTIO, "254:0")]) {
            sys.disk(at, number);
        }
        let pci = "devices/pci0000:00";
        sys.put(&format!("{pci}/0000:00:01.0/class"), "0x060400");
        for (function, speed, width, class) in [
            ("0000:00:01.0/0000:01:00.0", "8.0 GT/s PCIe", "4", "0x060400"),
            ("0000:00:01.0/0000:01:00.0/0000:02:00.0", "16.0 GT/s PCIe", "4", "0x060400"),
            ("0000:00:01.0/0000:01:00.0/0000:02:01.0", "16.0 GT/s PCIe", "4", "0x060400"),
            ("0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", "16.0 GT/s PCIe", "4", "0x010802"),
            ("0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", "16.0 GT/s PCIe", "2", "0x010802"),
        ] {
            sys.put(&format!("{pci}/{function}/current_link_speed"), speed);
            sys.put(&format!("{pci}/{function}/current_link_width"), width);
            sys.put(&format!("{pci}/{function}/max_link_speed"), "16.0 GT/s PCIe");
            sys.put(&format!("{pci}/{function}/max_link_width"), "4");
            sys.put(&format!("{pci}/{function}/class"), class);
        }
        sys.put(&format!("{pci}/0000:00:17.0/class"), "0x010601");
        sys.put(&format!("{pci}/0000:00:14.0/class"), "0x0c0330");
        for (at, model, serial) in [(NVME_A, "Fast 1TB", "S4EVNX0R"), (NVME_B, "Fast 1TB", "S4EVNX0S")] {
            sys.put(&format!("devices/{at}/device/model"), &format!("{model}      "));
            sys.put(&format!("devices/{at}/device/serial"), &format!("{serial}  \n"));
        }
        for (at, port) in [(SATA, "ata1"), (SATA_2, "ata2")] {
            sys.put(&format!("devices/{at}/device/vendor"), "ATA");
            sys.put(&format!("devices/{at}/device/model"), "Slow 2TB");
            sys.put(&format!("devices/{at}/device/vpd_pg80"), &format!("\0\u{1}\0\u{8}WD-{port}"));
            sys.put(&format!("{pci}/0000:00:17.0/{port}/link1/ata_link/link1/sata_spd"), "6.0 Gbps");
            sys.put(&format!("devices/{at}/queue/rotational"), "1");
        }
        let usb = format!("{pci}/0000:00:14.0/usb2");
        for (at, speed, class) in
            [("", "20000", "09"), ("/2-1", "10000", "09"), ("/2-1/2-1.3", "5000", "00"), ("/2-1/2-1.4", "480", "00")]
        {
            sys.put(&format!("{usb}{at}/speed"), speed);
            sys.put(&format!("{usb}{at}/devnum"), "1");
            sys.put(&format!("{usb}{at}/bDeviceClass"), class);
        }
        sys.put(&format!("{usb}/2-1/2-1.3/manufacturer"), "Brand");
        sys.put(&format!("{usb}/2-1/2-1.3/product"), "Portable");
        sys.put(&format!("{usb}/2-1/2-1.3/serial"), "USB123");
        sys.put(&format!("devices/{VIRTIO}/serial"), "vol-1");
        sys
    }

    pub fn mountinfo(&self) -> PathBuf {
        self.dir.path().join("mountinfo")
    }

    pub fn put(&self, at: &str, text: &str) {
        let path = self.dir.path().join(at);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A block device at `at` below `devices`, with its links.
    pub fn disk(&self, at: &str, number: &str) {
        self.put(&format!("devices/{at}/size"), "2000000\n");
        self.put(&format!("devices/{at}/queue/logical_block_size"), "512\n");
        self.put(&format!("devices/{at}/queue/physical_block_size"), "4096\n");
        self.put(&format!("devices/{at}/queue/rotational"), "0\n");
        fs::create_dir_all(self.dir.path().join(format!("devices/{at}/device"))).unwrap();
        let name = at.rsplit('/').next().unwrap();
        self.link(at, &format!("class/block/{name}"));
        self.link(at, &format!("dev/block/{number}"));
        self.link(at, &format!("block/{name}"));
    }

    /// A partition of the disk at `disk`.
    pub fn partition(&self, disk: &str, name: &str, number: &str) {
        self.put(&format!("devices/{disk}/{name}/partition"), "1");
        self.link(&format!("{disk}/{name}"), &format!("class/block/{name}"));
        self.link(&format!("{disk}/{name}"), &format!("dev/block/{number}"));
    }

    /// Makes `whole` a device over `parts`.
    pub fn over(&self, whole: &str, number: &str, parts: &[&str]) {
        self.disk(&format!("virtual/block/{whole}"), number);
        for part in parts {
            let name = part.rsplit('/').next().unwrap();
            self.link(part, &format!("devices/virtual/block/{whole}/slaves/{name}"));
        }
    }

    pub fn link(&self, device: &str, at: &str) {
        let path = self.dir.path().join(at);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(self.dir.path().join("devices").join(device), path).unwrap();
    }

    /// Folders of this machine's temporary file system lie on `device` from now on.
    pub fn holds_files(&self, device: &str) {
        let number = fs::metadata(self.dir.path()).unwrap().dev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        self.link(device, &format!("dev/block/{major}:{minor}"));
        let point = self.dir.path().canonicalize().unwrap();
        let line = format!("9 1 {major}:{minor} / {} rw - ext4 /dev/x rw\n", point.display());
        fs::write(self.mountinfo(), line).unwrap();
    }

    /// A folder to mount at.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join("mnt").join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }
}

/// The device at `at`.
pub(super) fn device(sys: &FakeSys, at: &str) -> super::device::BlockDevice {
    let name = Path::new(at).file_name().unwrap().to_string_lossy().into_owned();
    super::device::BlockDevice { name, sysfs: sys.dir.path().canonicalize().unwrap().join("devices").join(at) }
}
