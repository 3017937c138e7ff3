//! The one buffer: an anonymous mapping cut into equal, page-aligned slots, all touched before the run. A [`Slot`]
//! is the only handle that can write, a lent slot can only be read, and a slot is free, owned or lent, never two of
//! them. `unsafe` lives here because many threads write into disjoint parts of one mapping.

use super::{IoSetupError, Signal};
use crate::source::LeaseOwner;
use memmap2::{MmapMut, MmapOptions, MmapRaw};
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const FREE: u8 = 0;
const OWNED: u8 = 1;
const LENT: u8 = 2;

/// A slab of slots. Clones share it.
#[derive(Clone)]
pub struct Slab {
    shared: Arc<Shared>,
}

struct Shared {
    map: MmapRaw,
    slot_bytes: usize,
    /// The state of every slot; the authority on who may touch its bytes.
    states: Box<[AtomicU8]>,
    free: Mutex<Vec<u32>>,
    freed: Arc<Signal>,
}

/// A slot that its holder alone may read and write. Dropping it gives it back.
pub struct Slot {
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
        let map: MmapMut = MmapOptions::new().len(whole).populate().map_anon().map_err(fail)?;
        let shared = Shared {
            map: MmapRaw::from(map),
            slot_bytes: slot_bytes as usize,
            states: (0..slots).map(|_| AtomicU8::new(FREE)).collect(),
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
        self.shared.states[index as usize].store(OWNED, Ordering::Release);
        Some(Slot { shared: Arc::clone(&self.shared), index })
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
}

impl Slot {
    /// Its number, below [`Slab::slots`]; the same slot always has the same.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The slot's bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the slot is OWNED by this handle alone, the part of the mapping is in bounds and initialised
        // (anonymous maps are zeroed), and nobody writes it without `&mut self`.
        unsafe { std::slice::from_raw_parts(self.shared.start(self.index), self.shared.slot_bytes) }
    }

    /// The slot's bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` on the only handle makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.shared.start(self.index), self.shared.slot_bytes) }
    }

    /// Turns the handle into a read-only loan: the owner to hand to exactly one [`crate::source::Lease`], and the
    /// slot's number. The slot is given back by the lease.
    pub fn lend(self) -> (Arc<dyn LeaseOwner>, u32) {
        let index = self.index;
        let owner: Arc<dyn LeaseOwner> = Arc::<Shared>::clone(&self.shared);
        self.shared.states[index as usize].store(LENT, Ordering::Release);
        drop(self); // finds it LENT and leaves it so
        (owner, index)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.give_back(self.index, OWNED);
    }
}

impl Shared {
    fn start(&self, index: u32) -> *mut u8 {
        // In bounds: indices come from `free` only, which holds 0..slots.
        self.map.as_mut_ptr().wrapping_add(index as usize * self.slot_bytes)
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees a slot that is in state `from`; a slot in another state is left alone.
    fn give_back(&self, index: u32, from: u8) {
        let state = &self.states[index as usize];
        if state.compare_exchange(from, FREE, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.free().push(index); // never beyond the capacity it was made with
            self.freed.raise();
        }
    }
}

impl LeaseOwner for Shared {
    fn bytes(&self, slot: u32, len: usize) -> &[u8] {
        let lent = self.states.get(slot as usize).is_some_and(|s| s.load(Ordering::Acquire) == LENT);
        assert!(lent && len <= self.slot_bytes, "slot {slot} is not on loan, or shorter than {len} bytes");
        // SAFETY: in bounds; a LENT slot has no `Slot` handle, so nobody writes it until its one lease, which is
        // borrowed for as long as the slice lives, has been dropped.
        unsafe { std::slice::from_raw_parts(self.start(slot), len) }
    }

    fn release(&self, slot: u32) {
        self.give_back(slot, LENT);
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab({} of {} slots free)", self.free_slots(), self.slots())
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({})", self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_disjoint_and_come_back() {
        let signal = Arc::new(Signal::default());
        let slab = Slab::new(3, 5000, Arc::clone(&signal)).unwrap();
        let page = crate::sys::limits::page_bytes() as usize;
        assert_eq!(slab.slot_bytes() as usize, 5000usize.next_multiple_of(page));
        let mut slots: Vec<Slot> = std::iter::from_fn(|| slab.take()).collect();
        assert_eq!((slots.len(), slab.free_slots()), (3, 0));
        for slot in &mut slots {
            let mark = slot.index() as u8 + 1;
            assert_eq!(slot.bytes_mut().as_ptr() as usize % page, 0);
            slot.bytes_mut().fill(mark);
        }
        assert!(slots.iter().all(|s| s.bytes().iter().all(|&b| b == s.index() as u8 + 1)));
        let before = signal.epoch();
        drop(slots.pop());
        assert_eq!((slab.free_slots(), signal.epoch()), (1, before + 1));
    }

    #[test]
    fn a_loan_keeps_its_slot_until_released_and_outlives_the_slab() {
        let slab = Slab::new(1, 4096, Arc::default()).unwrap();
        let mut slot = slab.take().unwrap();
        slot.bytes_mut()[..4].copy_from_slice(b"data");
        let (owner, index) = slot.lend();
        assert!(slab.take().is_none(), "on loan");
        assert_eq!(owner.bytes(index, 4), b"data");
        owner.release(index);
        let (owner, index) = slab.take().unwrap().lend();
        drop(slab);
        assert_eq!(owner.bytes(index, 4), b"data");
        owner.release(index);
    }

    #[test]
    fn a_slot_is_freed_once() {
        let slab = Slab::new(2, 4096, Arc::default()).unwrap();
        let (owner, index) = slab.take().unwrap().lend();
        owner.release(index);
        owner.release(index);
        assert_eq!(slab.free_slots(), 2);
        assert!(Slab::new(0, 4096, Arc::default()).is_err());
        assert!(Slab::new(1, u64::MAX, Arc::default()).is_err());
    }
}
