//! An allocator that counts while it is armed, for the whole process except its main thread, where the test harness keeps
//! its books. A test that uses it stands alone in its file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

struct Counting;

/// Whether allocations count.
pub static ARMED: AtomicBool = AtomicBool::new(false);
/// Those that were counted.
pub static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system allocator unchanged; the counter allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: neither call has preconditions.
        let main_thread = unsafe { libc::gettid() == libc::getpid() };
        if ARMED.load(Ordering::Relaxed) && !main_thread {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
