//! Sleeping precisely: timer slack and CPU time of the calling thread, and sleeps that end at an absolute time, so that a late
//! wake-up is never added to the next one.

use std::io;
use std::time::{Duration, Instant};

/// Sets the calling thread's timer slack to 1 ns (Linux gives ordinary threads 50 us). Elsewhere timers have no such
/// setting and this does nothing.
pub fn use_smallest_timer_slack() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    Ok(())
}

/// The calling thread's timer slack in nanoseconds, where there is one.
pub fn timer_slack_ns() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return rustix::thread::current_timer_slack().ok();
    #[cfg(not(target_os = "linux"))]
    return None;
}

/// CPU time that the calling thread has used, in nanoseconds; `None` where the system does not tell.
pub fn thread_cpu_ns() -> Option<u64> {
    let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live timespec, which the call fills.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut used) } != 0 {
        return None;
    }
    let seconds = u64::try_from(used.tv_sec).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(u64::try_from(used.tv_nsec).ok()?)
}

/// Sleeps until `deadline`; returns at once when it has passed. Never returns early.
pub fn sleep_until(deadline: Instant) {
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        if left.is_zero() {
            break;
        }
        sleep_to_monotonic(left);
    }
}

/// `Instant` hides its time stamp, so the remaining time is added to the clock that it is taken from; the sleep itself
/// is absolute, so an interrupted sleep goes on to the same end.
#[cfg(target_os = "linux")]
fn sleep_to_monotonic(left: Duration) {
    use rustix::thread::{ClockId, clock_nanosleep_absolute};
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live timespec, which the call fills.
    if unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) } != 0 {
        return std::thread::sleep(left);
    }
    let nanos = i64::from(left.subsec_nanos()) + now.tv_nsec;
    let whole = i64::try_from(left.as_secs()).unwrap_or(i64::MAX / 4);
    let end = rustix::fs::Timespec {
        tv_sec: now.tv_sec.saturating_add(whole + nanos / 1_000_000_000),
        tv_nsec: nanos % 1_000_000_000,
    };
    if let Err(rustix::io::Errno::INTR) = clock_nanosleep_absolute(ClockId::Monotonic, &end) {
        let _ = clock_nanosleep_absolute(ClockId::Monotonic, &end);
    }
}

#[cfg(not(target_os = "linux"))]
fn sleep_to_monotonic(left: Duration) {
    std::thread::sleep(left);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_never_end_early() {
        for us in [0, 50, 2000] {
            let deadline = Instant::now() + Duration::from_micros(us);
            sleep_until(deadline);
            assert!(Instant::now() >= deadline);
        }
        sleep_until(Instant::now() - Duration::from_millis(1));
    }

    #[test]
    fn work_uses_the_time_of_its_own_thread() {
        let before = thread_cpu_ns().unwrap();
        let mut sum = 0u64;
        while thread_cpu_ns().unwrap() == before {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(thread_cpu_ns().unwrap() > before);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_slack_of_this_thread_becomes_one_nanosecond() {
        use_smallest_timer_slack().unwrap();
        assert_eq!(timer_slack_ns(), Some(1));
    }
}
