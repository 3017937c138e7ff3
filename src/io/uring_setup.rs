//! What the kernel must offer for [`super::uring`], and what to do when it does not; the ring as it comes
//! from the kernel, before anything is registered with it.

use super::uring::UringOptions;
use super::work::RingFacts;
use super::{EngineKind, IoSetupError};
use crate::knob::{self, Knob};
use io_uring::{IoUring, Parameters, Probe, opcode};
use std::io;

/// Bits of `io_uring_params.flags`, from the kernel's include/uapi/linux/io_uring.h.
pub(super) const SETUP_SQPOLL: u32 = 1 << 1;
/// `R_DISABLED`, `TASKRUN_FLAG`, `SINGLE_ISSUER` and `DEFER_TASKRUN`: what [`Completing::Deferred`] is made of.
pub(super) const SETUP_DEFERRED: u32 = 1 << 6 | 1 << 9 | 1 << 12 | 1 << 13;
/// A submission thread without work sleeps after this long; until then it keeps one core busy.
const SQPOLL_IDLE_MS: u32 = 50;
/// What every way out of a missing feature ends with.
const OTHERWISE: &str = "or use --engine psync";

/// When a ring finishes reads whose bytes have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Completing {
    /// At once, interrupting the thread that submitted them.
    AtOnce,
    /// Inside the next call of the one thread that the ring serves.
    Deferred,
}

/// An event counter that a ring adds to.
pub(super) fn bell() -> io::Result<std::os::fd::OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// A step of setting a ring up that the kernel can refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Ring { sqpoll: bool },
    Files { files: u64 },
    Buffers { bytes: u64 },
    Watch,
}

/// What the machine says about itself, for messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    /// `kernel.io_uring_disabled`; `None` where the kernel (before 6.6) has no such switch.
    pub disabled: Option<u32>,
    /// Soft limit of locked memory; `None` = unlimited.
    pub memlock_bytes: Option<u64>,
    /// Soft limit of open files; `None` = unlimited.
    pub open_files: Option<u64>,
}

impl Host {
    fn look() -> Self {
        use rustix::process::{Resource, getrlimit};
        let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
        Self {
            disabled: disabled.ok().and_then(|text| text.trim().parse().ok()),
            memlock_bytes: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
        }
    }
}

/// An error of this engine.
pub(super) fn refuse(reason: impl Into<String>) -> IoSetupError {
    IoSetupError::Engine { engine: EngineKind::Uring, reason: reason.into() }
}

/// Why the kernel refused `step`.
pub(super) fn explain(step: Step, error: &io::Error) -> IoSetupError {
    refuse(reason_of(step, error, &Host::look()))
}

fn reason_of(step: Step, error: &io::Error, host: &Host) -> String {
    let limit = |l: Option<u64>| l.map_or_else(|| "unlimited".to_string(), |l| l.to_string());
    let (memlock, open_files) = (limit(host.memlock_bytes), limit(host.open_files));
    match (step, error.raw_os_error().unwrap_or(0), host.disabled) {
        (Step::Ring { .. }, libc::ENOSYS, _) => {
            format!(
                "this kernel has no io_uring (Linux 5.11 or later is needed), or a seccomp filter hides it; {OTHERWISE}"
            )
        }
        (Step::Ring { .. }, libc::EPERM, Some(2)) => format!(
            "kernel.io_uring_disabled is 2, which forbids io_uring to everybody; `sysctl -w kernel.io_uring_disabled=0`, \
             {OTHERWISE}"
        ),
        (Step::Ring { .. }, libc::EPERM, Some(1)) => format!(
            "kernel.io_uring_disabled is 1, which forbids io_uring to whoever is not in kernel.io_uring_group; join that \
             group, `sysctl -w kernel.io_uring_disabled=0`, {OTHERWISE}"
        ),
        (Step::Ring { .. }, libc::EPERM | libc::EACCES, _) => format!(
            "the kernel forbids io_uring to this process ({error}), as containers' seccomp filters and security modules \
             do; allow io_uring_setup, io_uring_enter and io_uring_register (docker: --security-opt seccomp=FILE), \
             {OTHERWISE}"
        ),
        (Step::Ring { sqpoll: true }, libc::EINVAL, _) => {
            format!("this kernel refuses a submission thread ({error}); leave --sqpoll away, {OTHERWISE}")
        }
        (Step::Ring { .. }, libc::ENOMEM, _) => format!(
            "no memory for a ring: RLIMIT_MEMLOCK is {memlock} bytes, and kernels before 5.12 count rings against it; \
             raise it (`ulimit -l`), {OTHERWISE}"
        ),
        (Step::Buffers { bytes }, libc::ENOMEM | libc::EPERM, _) => format!(
            "the buffer of {bytes} bytes cannot be registered: it must be locked in memory, and RLIMIT_MEMLOCK is \
             {memlock} bytes; raise it (`ulimit -l {}`, or memlock in limits.conf), lower --buffer-bytes, {OTHERWISE}",
            bytes.div_ceil(1024)
        ),
        (Step::Files { files }, libc::EMFILE, _) => format!(
            "{files} files cannot be registered: RLIMIT_NOFILE is {open_files}; raise it (`ulimit -n {}`), {OTHERWISE}",
            files + 256
        ),
        (_, libc::EMFILE | libc::ENFILE, _) => {
            format!("no descriptor is left: RLIMIT_NOFILE is {open_files}; raise it (`ulimit -n`), {OTHERWISE}")
        }
        (step, _, _) => {
            let what = match step {
                Step::Ring { .. } => "a ring cannot be made",
                Step::Files { .. } => "files cannot be registered",
                Step::Buffers { .. } => "the buffer cannot be registered",
                Step::Watch => "the ring cannot be watched",
            };
            format!("{what}: {error}; {OTHERWISE}")
        }
    }
}

/// Refuses a ring without what the engine uses.
pub(super) fn check(ring: &IoUring) -> Result<(), IoSetupError> {
    let missing = |what: &str| refuse(format!("this kernel's io_uring lacks {what}; {OTHERWISE}"));
    if !ring.params().is_feature_nodrop() {
        return Err(missing("completions that are never dropped (IORING_FEAT_NODROP, Linux 5.5)"));
    }
    if !ring.params().is_feature_ext_arg() {
        return Err(missing("waiting with a timeout (IORING_FEAT_EXT_ARG, Linux 5.11)"));
    }
    let mut probe = Probe::new();
    let probed = ring.submitter().register_probe(&mut probe);
    probed.map_err(|e| missing(&format!("the probe of its operations (Linux 5.6: {e})")))?;
    let needed = [
        (opcode::Read::CODE, "IORING_OP_READ"),
        (opcode::ReadFixed::CODE, "IORING_OP_READ_FIXED"),
        (opcode::AsyncCancel::CODE, "IORING_OP_ASYNC_CANCEL"),
    ];
    match needed.iter().find(|(code, _)| !probe.is_supported(*code)) {
        Some((_, name)) => Err(missing(&format!("the operation {name}"))),
        None => Ok(()),
    }
}

/// What a ring is, read back from the kernel. `completing` says which set-up the kernel took.
pub(super) fn facts(params: &Parameters, ring_fd: i32, completing: Completing, buffers: u32, files: u32) -> RingFacts {
    let mut setup_flags = 0;
    if params.is_setup_sqpoll() {
        setup_flags |= SETUP_SQPOLL;
    }
    if completing == Completing::Deferred {
        setup_flags |= SETUP_DEFERRED;
    }
    // In the order of the kernel's IORING_FEAT_ bits.
    let features = [
        params.is_feature_single_mmap(),
        params.is_feature_nodrop(),
        params.is_feature_submit_stable(),
        params.is_feature_rw_cur_pos(),
        params.is_feature_cur_personality(),
        params.is_feature_fast_poll(),
        params.is_feature_poll_32bits(),
        params.is_feature_sqpoll_nonfixed(),
        params.is_feature_ext_arg(),
        params.is_feature_native_workers(),
        params.is_feature_resource_tagging(),
        params.is_feature_skip_cqe_on_success(),
        params.is_feature_linked_file(),
    ];
    let features = features.iter().enumerate().fold(0, |bits, (at, &on)| bits | u32::from(on) << at);
    let sq_thread = sq_thread(ring_fd);
    RingFacts { setup_flags, features, registered_buffers: buffers, registered_files: files, sq_thread }
}

/// The submission thread that the kernel shows for a ring; 0 if none.
fn sq_thread(ring_fd: i32) -> u32 {
    // While the thread holds the ring's lock the kernel shows none, so look a few times.
    const LOOKS: u32 = 100;
    let path = format!("/proc/self/fdinfo/{ring_fd}");
    for _ in 0..LOOKS {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let Some(line) = text.lines().find_map(|l| l.strip_prefix("SqThread:")) else { return 0 };
        if let Some(id) = line.trim().parse::<i64>().ok().and_then(|id| u32::try_from(id).ok()).filter(|&id| id > 0) {
            return id;
        }
        std::thread::yield_now();
    }
    0
}

/// A ring, and how it finishes reads.
pub(super) fn make_ring(entries: u32, options: UringOptions) -> Result<(IoUring, Completing), IoSetupError> {
    let sqpoll = (options.sqpoll && !knob::skipped(Knob::Sqpoll)) || knob::forced(Knob::Sqpoll);
    let build = |completing: Completing| {
        let mut builder = IoUring::builder();
        builder.dontfork();
        if sqpoll {
            builder.setup_sqpoll(SQPOLL_IDLE_MS);
        }
        if completing == Completing::Deferred {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_r_disabled();
        }
        builder.build(entries)
    };
    let wanted = if sqpoll || options.shared { Completing::AtOnce } else { Completing::Deferred };
    let (made, completing) = match build(wanted) {
        // Linux before 6.1: completions interrupt the thread, and all else stays the same.
        Err(e) if wanted == Completing::Deferred && e.raw_os_error() == Some(libc::EINVAL) => {
            (build(Completing::AtOnce), Completing::AtOnce)
        }
        made => (made, wanted),
    };
    Ok((made.map_err(|e| explain(Step::Ring { sqpoll }, &e))?, completing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_names_its_cause_and_a_way_out() {
        let host = Host { disabled: Some(0), memlock_bytes: Some(8 << 20), open_files: Some(64) };
        let ring = Step::Ring { sqpoll: false };
        let cases: &[(Step, i32, Option<u32>, &[&str])] = &[
            (ring, libc::ENOSYS, None, &["5.11", "seccomp"]),
            (ring, libc::EPERM, Some(2), &["kernel.io_uring_disabled is 2", "sysctl -w"]),
            (ring, libc::EPERM, Some(1), &["kernel.io_uring_disabled is 1", "io_uring_group"]),
            (ring, libc::EPERM, Some(0), &["seccomp", "io_uring_setup"]),
            (ring, libc::EPERM, None, &["seccomp"]),
            (ring, libc::ENOMEM, Some(0), &["RLIMIT_MEMLOCK is 8388608"]),
            (ring, libc::EMFILE, Some(0), &["RLIMIT_NOFILE is 64", "ulimit -n"]),
            (Step::Ring { sqpoll: true }, libc::EINVAL, Some(0), &["--sqpoll"]),
            (
                Step::Buffers { bytes: 256 << 20 },
                libc::ENOMEM,
                Some(0),
                &["RLIMIT_MEMLOCK is 8388608", "ulimit -l 262144", "--buffer-bytes"],
            ),
            (
                Step::Files { files: 1000 },
                libc::EMFILE,
                Some(0),
                &["1000 files", "RLIMIT_NOFILE is 64", "ulimit -n 1256"],
            ),
            (Step::Watch, libc::EMFILE, Some(0), &["RLIMIT_NOFILE"]),
            (Step::Watch, libc::EIO, Some(0), &["cannot be watched"]),
        ];
        for &(step, errno, disabled, parts) in cases {
            let reason = reason_of(step, &io::Error::from_raw_os_error(errno), &Host { disabled, ..host });
            for part in parts.iter().chain(&["--engine psync"]) {
                assert!(reason.contains(part), "{step:?} {errno}: no `{part}` in: {reason}");
            }
        }
        let unlimited = Host { memlock_bytes: None, ..host };
        let reason = reason_of(Step::Buffers { bytes: 1 }, &io::Error::from_raw_os_error(libc::ENOMEM), &unlimited);
        assert!(reason.contains("unlimited"), "{reason}");
    }
}
