//! Sleeping on descriptors and on a call from another thread at once: an `epoll` with an event counter of its own.

use super::signal::Watching;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// Descriptors that a [`super::Signal`] watches.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
    call: OwnedFd,
}

impl Watch {
    pub(super) fn new() -> io::Result<Self> {
        let watch = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            call: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        epoll::add(&watch.epoll, &watch.call, EventData::new_u64(0), EventFlags::IN)?;
        Ok(watch)
    }

    pub(super) fn add(&self, source: BorrowedFd<'_>, watching: Watching) -> io::Result<()> {
        let flags = match watching {
            Watching::UntilRead => EventFlags::IN,
            Watching::Rings => EventFlags::IN | EventFlags::ET,
        };
        Ok(epoll::add(&self.epoll, source, EventData::new_u64(1), flags)?)
    }

    /// Sleeps until a descriptor is readable, the thread is called or interrupted, or `longest` has passed. `false` if
    /// the time is up. An interruption counts: the kernel interrupts the sleep to finish reads of a ring.
    pub(super) fn sleep(&self, longest: Duration) -> bool {
        let longest = Timespec {
            tv_sec: i64::try_from(longest.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: longest.subsec_nanos().into(),
        };
        let mut ready = [MaybeUninit::uninit(); 4];
        match epoll::wait(&self.epoll, &mut ready, Some(&longest)) {
            Ok((ready, _)) => !ready.is_empty(),
            Err(Errno::INTR) => true,
            // Nothing else can go wrong with descriptors that are ours; sleeping again would spin.
            Err(_) => {
                std::thread::yield_now();
                false
            }
        }
    }

    /// Ends every sleep that is going on. Cannot fail short of 2^64 calls.
    pub(super) fn call(&self) {
        let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
    }

    /// Takes a call back, so that the next sleep lasts.
    pub(super) fn answer(&self) {
        let _ = rustix::io::read(&self.call, &mut [0u8; 8]);
    }
}
