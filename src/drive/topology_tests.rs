//! Facts and shared uplinks from fake trees of sysfs: NVMe behind a switch, SATA, USB behind a hub, virtio, loop.

use super::super::fake_sysfs::{FakeSys, NVME_A, NVME_B, SATA, SATA_2, USB, USB_2, VIRTIO, device};
use super::*;

fn facts(sys: &FakeSys, at: &str) -> DeviceFacts {
    DeviceFacts::of(&device(sys, at))
}

#[test]
fn every_bus_tells_its_model_link_and_sectors_and_no_serial_number() {
    let sys = FakeSys::full();
    let a = facts(&sys, NVME_A);
    assert_eq!((a.bus.as_str(), a.model.as_deref(), a.bytes), ("nvme", Some("Fast 1TB"), 1_024_000_000));
    assert_eq!((a.sector_bytes, a.rotational), (Some((512, 4096)), Some(false)));
    let link = a.link.clone().unwrap();
    assert_eq!((link.now.as_str(), link.most), ("PCIe 16.0 GT/s x4", None));
    assert!((link.bytes_per_s / 7.877e9 - 1.0).abs() < 0.001);
    let half = facts(&sys, NVME_B).link.unwrap();
    assert_eq!((half.now.as_str(), half.most.as_deref()), ("PCIe 16.0 GT/s x2", Some("PCIe 16.0 GT/s x4")));
    let sata = facts(&sys, SATA);
    assert_eq!((sata.bus.as_str(), sata.model.as_deref(), sata.rotational), ("sata", Some("Slow 2TB"), Some(true)));
    assert_eq!(sata.link.clone().unwrap(), Link { now: "SATA 6.0 Gbps".into(), most: None, bytes_per_s: 6e8 });
    assert_ne!(sata.serial_hash, facts(&sys, SATA_2).serial_hash);
    let usb = facts(&sys, USB);
    assert_eq!((usb.bus.as_str(), usb.model.as_deref()), ("usb", Some("Brand Portable")));
    assert_eq!(usb.link.clone().unwrap(), Link { now: "USB 5 Gb/s".into(), most: None, bytes_per_s: 5e8 });
    assert_eq!(facts(&sys, USB_2).link.unwrap().now, "USB 0.48 Gb/s");
    let virtio = facts(&sys, VIRTIO);
    assert_eq!((virtio.bus.as_str(), virtio.link.is_none(), virtio.model), ("virtio", true, None));
    let text = serde_json::to_string(&[a.clone(), sata, usb]).unwrap();
    for number in ["S4EVNX0R", "WD-ata1", "USB123"] {
        assert!(!text.contains(number), "{text}");
    }
    assert_eq!(a.serial_hash.as_deref(), Some(hash_serial("S4EVNX0R").as_str()));
    assert_eq!((hash_serial("x ").len(), hash_serial("x ")), (12, hash_serial("x")));
    assert_eq!(a.identity(), format!("#{}", a.serial_hash.as_deref().unwrap()));
}

#[test]
fn a_namespace_of_several_controllers_hangs_where_its_first_does() {
    let sys = FakeSys::full();
    let at = "virtual/nvme-subsystem/nvme-subsys9/nvme9n1";
    sys.disk(at, "259:9");
    let controller = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/nvme/nvme0";
    sys.link(controller, "devices/virtual/nvme-subsystem/nvme-subsys9/nvme0");
    let found = facts(&sys, at);
    assert_eq!(found.link.unwrap().now, "PCIe 16.0 GT/s x4");
    assert_eq!(found.stations[0].name, "storage controller 0000:03:00.0");
}

#[test]
fn loop_devices_name_their_file_and_have_no_way() {
    let sys = FakeSys::full();
    sys.disk("virtual/block/loop0", "7:0");
    sys.put("devices/virtual/block/loop0/loop/backing_file", "/images/a.img\n");
    let found = facts(&sys, "virtual/block/loop0");
    assert_eq!((found.bus.as_str(), found.backing_file.as_deref()), ("loop", Some("/images/a.img")));
    assert!(found.stations.is_empty() && found.link.is_none() && found.serial_hash.is_none());
    assert_eq!(found.identity(), "loop0:2000000");
}

#[test]
fn drives_behind_one_switch_hub_or_controller_share_it() {
    let sys = FakeSys::full();
    let of = |at: &str| vec![facts(&sys, at)];
    let drives = [of(NVME_A), of(SATA), of(NVME_B), of(USB), of(SATA_2), of(USB_2), of(VIRTIO)];
    let refs: Vec<&[DeviceFacts]> = drives.iter().map(Vec::as_slice).collect();
    let shared = shared_uplinks(&refs);
    let named: Vec<(&str, &[usize])> = shared.iter().map(|(s, m)| (s.name.as_str(), m.as_slice())).collect();
    let want: [(&str, &[usize]); 3] = [
        // the upstream port, which has a link, before the root port, which shows none
        ("PCI bridge 0000:01:00.0", &[0, 2]),
        ("storage controller 0000:00:17.0", &[1, 4]),
        // the hub's own 10 Gb/s, not the 20 of the root hub
        ("USB hub 2-1", &[3, 5]),
    ];
    assert_eq!(named, want);
    assert!((shared[0].0.bytes_per_s.unwrap() / 3.938e9 - 1.0).abs() < 0.001);
    // a RAID over both SATA drives shares its controller with nobody else
    let raid = [vec![facts(&sys, SATA), facts(&sys, SATA_2)], of(VIRTIO)];
    let refs: Vec<&[DeviceFacts]> = raid.iter().map(Vec::as_slice).collect();
    assert!(shared_uplinks(&refs).is_empty());
}

#[test]
fn names_on_the_way_are_told_apart() {
    for (name, pci) in [
        ("0000:00:17.0", true),
        ("10000:e1:00.0", true),
        ("pci0000:00", false),
        ("4:0:0:0", false),
        ("2-1.3:1.0", false),
    ] {
        assert_eq!(is_pci(name), pci, "{name}");
    }
    assert_eq!(
        (usb_rate("10000").map(|r| r.round()), usb_rate("480"), usb_rate("x")),
        (Some(1_212_121_212.0), Some(6e7), None)
    );
}
