//! Slots of the slab: whose bytes they are, and that they come back once. `tests/schedules` tries their ends in many orders.

use super::{Signal, Slab, Slot};
use std::sync::Arc;

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
fn pieces_hold_whole_slots_and_cover_the_slab() {
    let slab = Slab::new(7, 8192, Arc::default()).unwrap();
    let mut slots: Vec<Slot> = std::iter::from_fn(|| slab.take()).collect();
    let pieces = slab.pieces(3 * 8192 + 8191).unwrap();
    assert_eq!((pieces.slots_each, pieces.parts.len()), (3, 3));
    assert_eq!(pieces.parts.iter().map(|p| p.1).collect::<Vec<_>>(), [3 * 8192, 3 * 8192, 8192]);
    for slot in &mut slots {
        let (start, bytes) = pieces.parts[(slot.index() / pieces.slots_each) as usize];
        let at = slot.bytes_mut().as_mut_ptr() as usize - start as usize;
        assert!(at + 8192 <= bytes, "slot {} lies within its piece", slot.index());
        assert!(slab.owns(slot));
    }
    assert!(slab.pieces(8191).is_none());
    assert_eq!(slab.pieces(1 << 30).unwrap().parts.len(), 1);
    assert!(!slab.owns(&Slab::new(1, 8192, Arc::default()).unwrap().take().unwrap()));
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

#[test]
fn parts_are_disjoint_and_the_last_one_becomes_the_whole_slot() {
    let slab = Slab::new(1, 8192, Arc::default()).unwrap();
    let mut first = slab.take().unwrap();
    assert!(first.split_off(0).is_none() && first.split_off(8192).is_none());
    let mut middle = first.split_off(4096).unwrap();
    let mut end = middle.split_off(1024).unwrap();
    assert_eq!([first.start(), middle.start(), end.start()], [0, 4096, 5120]);
    assert_eq!([first.bytes().len(), middle.bytes().len(), end.bytes().len()], [4096, 1024, 3072]);
    std::thread::scope(|scope| {
        for (slot, mark) in [(&mut first, 1), (&mut middle, 2), (&mut end, 3)] {
            scope.spawn(move || slot.bytes_mut().fill(mark));
        }
    });
    let middle = middle.widen().unwrap_err();
    drop(first);
    drop(end);
    assert_eq!(slab.free_slots(), 0, "one part is left");
    let whole = middle.widen().unwrap();
    let marks = |range: std::ops::Range<usize>, mark| whole.bytes()[range].iter().all(|&b| b == mark);
    assert!(marks(0..4096, 1) && marks(4096..5120, 2) && marks(5120..8192, 3));
    let (owner, index) = whole.lend();
    assert_eq!(owner.bytes(index, 8192)[5120], 3);
    owner.release(index);
    assert_eq!(slab.free_slots(), 1);
    let mut again = slab.take().unwrap();
    assert_eq!(again.bytes().len(), 8192, "the next holder gets the whole slot");
    drop(again.split_off(100));
    drop(again);
    assert_eq!(slab.free_slots(), 1, "freed once, by the last part");
}

#[test]
#[should_panic(expected = "while parts of it are out")]
fn a_slot_with_parts_out_is_not_lent() {
    let slab = Slab::new(1, 4096, Arc::default()).unwrap();
    let mut slot = slab.take().unwrap();
    let _part = slot.split_off(512);
    let _ = slot.lend();
}

#[test]
fn a_kept_slot_outlives_its_loans_and_is_reclaimed_only_without_them() {
    let slab = Slab::new(2, 8, Arc::default()).unwrap();
    let mut slot = slab.take().unwrap();
    slot.bytes_mut()[0] = 7;
    let kept = slot.keep().unwrap();
    assert_eq!(slab.free_slots(), 1);
    let loans = [kept.lend(), kept.lend()];
    assert_eq!((kept.loans(), loans[0].0.bytes(kept.index(), 1)[0]), (2, 7));
    let kept = kept.reclaim().unwrap_err();
    loans.iter().for_each(|(owner, slot)| owner.release(*slot));
    assert_eq!((kept.loans(), slab.free_slots()), (0, 1));
    loans[0].0.release(kept.index());
    assert_eq!(kept.loans(), 0, "a loan that does not exist cannot end");
    let slot = kept.reclaim().unwrap();
    assert_eq!(slot.bytes()[0], 7);
    let mut slot = slot;
    let part = slot.split_off(4).unwrap();
    let slot = slot.keep().unwrap_err();
    drop((slot, part));
    assert_eq!(slab.free_slots(), 2);
    drop(slab.take().unwrap().keep().unwrap());
    assert_eq!(slab.free_slots(), 2);
}
