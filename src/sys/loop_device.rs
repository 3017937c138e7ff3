//! The one thing about loop devices that no command does: narrowing one while it is mounted, so that reads behind the limit
//! fail with EIO as those of a disk that was pulled out, and widening it again with nothing lost. Needs root.

use std::fs::File;
use std::io;
use std::path::Path;

/// What is left of a device that is unplugged, in bytes: every file lies behind it.
const STUMP_BYTES: u64 = 4096;

/// `struct loop_info64` of `linux/loop.h`, as far as its fields are used here; loop(4).
#[cfg(target_os = "linux")]
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    rest: [u8; 192],
}

#[cfg(target_os = "linux")]
const _: () = assert!(size_of::<LoopInfo64>() == 232);

/// Cuts the device off behind its first blocks, or gives it its whole length back.
#[cfg(target_os = "linux")]
pub fn set_unplugged(device: &Path, unplugged: bool) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    const LOOP_SET_STATUS64: libc::c_ulong = 0x4C04;
    const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
    let file = File::open(device)?;
    let mut info = LoopInfo64 { device: 0, inode: 0, rdevice: 0, offset: 0, size_limit: 0, rest: [0; 192] };
    // SAFETY: the request fills exactly a `loop_info64`, which `info` has the size of, and keeps no pointer to it.
    if unsafe { libc::ioctl(file.as_raw_fd(), LOOP_GET_STATUS64 as _, &raw mut info) } != 0 {
        return Err(io::Error::last_os_error());
    }
    info.size_limit = if unplugged { STUMP_BYTES } else { 0 };
    // SAFETY: as above, and the request only reads it.
    if unsafe { libc::ioctl(file.as_raw_fd(), LOOP_SET_STATUS64 as _, &raw const info) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Cuts a device off (not available here).
#[cfg(not(target_os = "linux"))]
pub fn set_unplugged(device: &Path, _unplugged: bool) -> io::Result<()> {
    File::open(device)?;
    Err(io::ErrorKind::Unsupported.into())
}
