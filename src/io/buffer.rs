//! The one buffer: an anonymous mapping cut into equal, page-aligned slots, all touched before the run. A [`Slot`]
//! is the only handle that can write, a lent slot can only be read, and a slot is free, owned or lent, never two of
//! them. `unsafe` lives here because many threads write into disjoint parts of one mapping.
//!
//! **Parts.** [`Slot::split_off`] cuts a handle in two that cover disjoint bytes of the same slot, so that several reads
//! may fill one slot at once. The slot counts its handles: the last one dropped frees it, and a handle that is the only
//! one left may [`Slot::widen`] to the whole slot, because then nobody else can touch any byte of it.
//!
//! **Kept slots.** [`Slot::keep`] turns a whole slot into a [`Kept`] one: nobody can write it, it may be on loan any number
//! of times, and the end of a loan does not free it. Only a kept slot without a loan can be reclaimed.

use super::{IoSetupError, Signal};
use crate::source::LeaseOwner;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError};
use memmap2::{MmapMut, MmapOptions, MmapRaw};
use std::fmt;

/// States of a slot: free, on loan once, kept (plus the number of its loans), or how many handles it has (below `KEPT`).
const FREE: u32 = 0;
const LENT: u32 = u32::MAX;
const KEPT: u32 = 1 << 31;

/// A slab of slots. Clones share it.
#[derive(Clone)]
pub struct Slab {
    shared: Arc<Shared>,
}

struct Shared {
    map: MmapRaw,
    slot_bytes: usize,
    /// The state of every slot; the authority on who may touch its bytes.
    states: Box<[AtomicU32]>,
    free: Mutex<Vec<u32>>,
    freed: Arc<Signal>,
}

/// A slot, or a part of one, that its holder alone may read and write. Dropping the last handle gives the slot back.
pub struct Slot {
    shared: Arc<Shared>,
    index: u32,
    /// The bytes of the slot that this handle covers; disjoint from those of every other handle of the slot.
    start: usize,
    len: usize,
}

/// A slot whose bytes stay until it is reclaimed. Dropping it without loans gives the slot back.
pub struct Kept {
    shared: Arc<Shared>,
    index: u32,
}

impl Slab {
    /// `slots` slots of `slot_bytes` rounded up to whole pages. `freed` is raised whenever a slot comes back.
    pub fn new(slots: u32, slot_bytes: u64, freed: Arc<Signal>) -> Result<Self, IoSetupError> {
        let slot_bytes = Self::slot_size(slot_bytes);
        let bytes = slot_bytes.and_then(|b| b.checked_mul(u64::from(slots))).filter(|&b| b > 0);
        let bytes = bytes.ok_or_else(|| IoSetupError::Option("a buffer needs slots of at least one byte".into()))?;
        let slot_bytes = bytes / u64::from(slots);
        let fail = |source| IoSetupError::Buffer { bytes, source };
        let whole =
            usize::try_from(bytes).map_err(|_| fail(std::io::Error::other("does not fit the address space")))?;
        let mut map: MmapMut = MmapOptions::new().len(whole).map_anon().map_err(fail)?;
        touch(&mut map);
        let shared = Shared {
            map: MmapRaw::from(map),
            slot_bytes: slot_bytes as usize,
            states: (0..slots).map(|_| AtomicU32::new(FREE)).collect(),
            free: Mutex::new((0..slots).rev().collect()),
            freed,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Bytes of a slot for `payload` bytes: whole pages. `None` when it overflows.
    pub fn slot_size(payload: u64) -> Option<u64> {
        payload.checked_next_multiple_of(crate::sys::limits::page_bytes())
    }

    /// A free slot, if there is one.
    pub fn take(&self) -> Option<Slot> {
        let index = self.shared.free().pop()?;
        self.shared.states[index as usize].store(1, Ordering::Release);
        Some(Slot { shared: Arc::clone(&self.shared), index, start: 0, len: self.shared.slot_bytes })
    }

    /// Slots in all.
    pub fn slots(&self) -> u32 {
        self.shared.states.len() as u32
    }

    /// Slots that are free now.
    pub fn free_slots(&self) -> u32 {
        self.shared.free().len() as u32
    }

    /// Bytes of each slot.
    pub fn slot_bytes(&self) -> u64 {
        self.shared.slot_bytes as u64
    }

    /// Whether `slot` is one of this slab.
    pub fn owns(&self, slot: &Slot) -> bool {
        Arc::ptr_eq(&self.shared, &slot.shared)
    }

    /// The whole memory as runs of at most `max_bytes` that hold whole slots, for registering it with a kernel. `None`
    /// when one slot is larger than that. The addresses stay valid while a clone of the slab lives.
    pub fn pieces(&self, max_bytes: u64) -> Option<Pieces> {
        let slots = self.slots();
        let each = u32::try_from(max_bytes / self.slot_bytes()).unwrap_or(u32::MAX).min(slots);
        if each == 0 {
            return None;
        }
        let piece = |first: u32| (self.shared.start(first), self.shared.slot_bytes * each.min(slots - first) as usize);
        Some(Pieces { slots_each: each, parts: (0..slots).step_by(each as usize).map(piece).collect() })
    }
}

/// See [`Slab::pieces`].
#[derive(Debug)]
pub struct Pieces {
    /// Slots in every piece but the last: slot i lies in piece i / `slots_each`.
    pub slots_each: u32,
    /// First byte and bytes of every piece.
    pub parts: Vec<(*mut u8, usize)>,
}

/// Makes every page of `map` exist before the run, in huge pages where the system gives them: a read of 1 MiB into
/// scattered small pages has more pieces than many drives take at once, and is cut in two.
fn touch(map: &mut MmapMut) {
    // Without huge pages everything works, only slower.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    let page = crate::sys::limits::page_bytes() as usize;
    map.iter_mut().step_by(page).for_each(|first| *first = 0);
}

impl Slot {
    /// Its number, below [`Slab::slots`]; the same slot always has the same.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// First byte of the slot that this handle covers: 0 unless it was split off.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The bytes that this handle covers: all of the slot's, unless it was split.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: this part of the slot belongs to this handle alone, lies within the mapping and is initialised
        // (anonymous maps are zeroed), and nobody writes it without `&mut self`.
        unsafe { std::slice::from_raw_parts(self.shared.at(self.index, self.start), self.len) }
    }

    /// The bytes that this handle covers, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` on the only handle of these bytes makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.shared.at(self.index, self.start), self.len) }
    }

    /// Keeps the first `at` bytes and returns a handle of the rest; `None`, and nothing changes, when one of the two
    /// would be empty.
    pub fn split_off(&mut self, at: usize) -> Option<Slot> {
        if at == 0 || at >= self.len {
            return None;
        }
        // This handle exists, so the count is at least 1 and the slot is neither free nor lent; a slot has fewer bytes
        // than there are counts below LENT.
        self.shared.states[self.index as usize].fetch_add(1, Ordering::Relaxed);
        let (start, len) = (self.start + at, self.len - at);
        self.len = at;
        Some(Slot { shared: Arc::clone(&self.shared), index: self.index, start, len })
    }

    /// The whole slot, if this is its only handle: all others have been dropped, whatever bytes they covered. Otherwise
    /// the handle comes back unchanged.
    pub fn widen(mut self) -> Result<Slot, Slot> {
        // Acquire pairs with the release of dropped handles: what was written through them is visible.
        if self.shared.states[self.index as usize].load(Ordering::Acquire) != 1 {
            return Err(self);
        }
        (self.start, self.len) = (0, self.shared.slot_bytes);
        Ok(self)
    }

    /// Turns the handle into a read-only loan: the owner to hand to exactly one [`crate::source::Lease`], and the
    /// slot's number. The slot is given back by the lease. To be called on a slot's only handle.
    pub fn lend(self) -> (Arc<dyn LeaseOwner>, u32) {
        let index = self.index;
        let owner: Arc<dyn LeaseOwner> = Arc::<Shared>::clone(&self.shared);
        let state = &self.shared.states[index as usize];
        let alone = state.compare_exchange(1, LENT, Ordering::AcqRel, Ordering::Acquire).is_ok();
        assert!(alone, "slot {index} cannot be lent while parts of it are out");
        drop(self); // finds it LENT and leaves it so
        (owner, index)
    }

    /// Keeps the slot's bytes; to be called on its only handle, else it comes back unchanged.
    pub fn keep(self) -> Result<Kept, Slot> {
        let state = &self.shared.states[self.index as usize];
        if state.compare_exchange(1, KEPT, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(self);
        }
        // Dropping the handle finds the slot kept and leaves it so.
        Ok(Kept { shared: Arc::clone(&self.shared), index: self.index })
    }
}

impl Kept {
    /// Its number, below [`Slab::slots`].
    pub fn index(&self) -> u32 {
        self.index
    }

    /// One more read-only loan, as [`Slot::lend`]; when its lease ends the slot stays kept.
    pub fn lend(&self) -> (Arc<dyn LeaseOwner>, u32) {
        // Relaxed: the bytes were published by `keep`, through the same thread or whatever handed `self` over. There are
        // far fewer leases than 2^31.
        self.shared.states[self.index as usize].fetch_add(1, Ordering::Relaxed);
        let owner: Arc<dyn LeaseOwner> = Arc::<Shared>::clone(&self.shared);
        (owner, self.index)
    }

    /// Loans that have not ended.
    pub fn loans(&self) -> u32 {
        self.shared.states[self.index as usize].load(Ordering::Acquire).saturating_sub(KEPT)
    }

    /// The slot again, to be written or freed, if nobody has it on loan.
    pub fn reclaim(self) -> Result<Slot, Kept> {
        // Acquire pairs with the release at the end of loans: whoever read the bytes has finished.
        let state = &self.shared.states[self.index as usize];
        if state.compare_exchange(KEPT, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(self);
        }
        let (shared, index) = (Arc::clone(&self.shared), self.index);
        drop(self); // finds the slot owned and leaves it so
        let len = shared.slot_bytes;
        Ok(Slot { shared, index, start: 0, len })
    }
}

impl Drop for Kept {
    /// A slot with loans stays out of the slab: its owner has gone, and nobody will ask for it again.
    fn drop(&mut self) {
        let state = &self.shared.states[self.index as usize];
        if state.compare_exchange(KEPT, FREE, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.shared.recycle(self.index);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let state = &self.shared.states[self.index as usize];
        // LENT or kept only when this handle made it so: it was the only one, and no lease exists yet.
        if state.load(Ordering::Relaxed) >= KEPT {
            return;
        }
        if state.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.recycle(self.index);
        }
    }
}

impl Shared {
    fn start(&self, index: u32) -> *mut u8 {
        // In bounds: indices come from `free` only, which holds 0..slots.
        self.map.as_mut_ptr().wrapping_add(index as usize * self.slot_bytes)
    }

    /// In bounds for the `start` of every handle, which is below `slot_bytes`.
    fn at(&self, index: u32, start: usize) -> *mut u8 {
        self.start(index).wrapping_add(start)
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a slot that has just become FREE back.
    fn recycle(&self, index: u32) {
        self.free().push(index); // never beyond the capacity it was made with
        self.freed.raise();
    }
}

impl LeaseOwner for Shared {
    fn bytes(&self, slot: u32, len: usize) -> &[u8] {
        let lent = self.states.get(slot as usize).is_some_and(|s| s.load(Ordering::Acquire) > KEPT);
        assert!(lent && len <= self.slot_bytes, "slot {slot} is not on loan, or shorter than {len} bytes");
        // SAFETY: in bounds; a slot that is LENT, or kept with loans, has no `Slot` handle and gets none, so nobody writes
        // it until its lease, which is borrowed for as long as the slice lives, has been dropped.
        unsafe { std::slice::from_raw_parts(self.start(slot), len) }
    }

    fn release(&self, slot: u32) {
        let state = &self.states[slot as usize];
        if state.compare_exchange(LENT, FREE, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.recycle(slot);
            return;
        }
        let loaned = |s: u32| (KEPT + 1..LENT).contains(&s).then(|| s - 1);
        let _ = state.fetch_update(Ordering::AcqRel, Ordering::Acquire, loaned);
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab({} of {} slots free)", self.free_slots(), self.slots())
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kept({}, {} loans)", self.index, self.loans())
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({}: {} bytes from {})", self.index, self.len, self.start)
    }
}
