//! Striped experts: every drive has blocks of its own, so there is nothing to choose and no other copy. Each block is one read
//! into its place in the slot. The part of [`ExpertReader`] for plans with stripes.

use super::expert_reader::ExpertReader;
use super::issue::Order;
use super::jobs::Part;
use super::tally::Opened;
use crate::ids::{ExpertId, LayerId};
use crate::io::Slot;
use crate::layout::plan::Shape;
use crate::source::SourceError;
use crate::store::stripe::Stripe;
use crate::trace::events::ReadEvent;

impl ExpertReader {
    /// The plan stripes its experts.
    pub(super) fn is_striped(&self) -> bool {
        matches!(self.plan.shape, Shape::Stripe { .. })
    }

    /// How an expert is cut, if it is.
    pub(super) fn stripe_of(&self, layer: LayerId, expert: ExpertId) -> Option<Stripe> {
        self.plan.stripe(self.plan.homes(layer, expert)?.len())
    }

    /// Issues the reads of as many fresh wants as there are slots in `taken`.
    pub(super) fn place_striped(&mut self, opened: &Opened) -> Result<(), SourceError> {
        let mut placed = Ok(());
        while let (Some(slot), Ok(())) = (self.taken.pop(), &placed) {
            placed = self.place_blocks(opened, self.fresh as u32, slot);
            self.fresh += 1;
        }
        let used = self.slab.slots() - self.slab.free_slots();
        let mut ledger = self.handle.lock();
        ledger.counters.waves += 1;
        ledger.counters.max_slots_used = ledger.counters.max_slots_used.max(used);
        placed
    }

    fn place_blocks(&mut self, opened: &Opened, want: u32, slot: Slot) -> Result<(), SourceError> {
        let Some(stripe) = self.stripe_of(opened.layer, self.wants[want as usize].expert) else {
            let order = Order { want, part: self.whole(), home: 0, tried: 0, rival: None };
            return self.place(opened, order, slot);
        };
        let parts = stripe.units() as u8;
        self.wants[want as usize].parts = parts;
        let mut rest = Some(slot);
        for number in 0..parts {
            let Some(mut slot) = rest.take() else { break };
            let unit = stripe.unit(u64::from(number));
            if number + 1 < parts {
                rest = slot.split_off(unit.len as usize);
            }
            let part = Part { part: number, parts, from: unit.from as u32, len: unit.len as u32 };
            self.place(opened, Order { want, part, home: usize::from(unit.column), tried: 0, rival: None }, slot)?;
        }
        Ok(())
    }

    /// Counts an expert that is complete: what its drives must have delivered for it, by the plan.
    pub(super) fn count_striped(&mut self, layer: LayerId, expert: ExpertId, parts: u64) {
        let homes = self.plan.homes(layer, expert).unwrap_or(&[]);
        let stripe = self.plan.stripe(homes.len());
        let mut ledger = self.handle.lock();
        let counters = &mut ledger.counters;
        counters.experts_striped += 1;
        counters.stripe_reads += parts;
        for (column, home) in homes.iter().enumerate() {
            let bytes = stripe.map_or(self.plan.expert_bytes, |s| s.column_bytes(column as u8));
            counters.drives[home.index()].stripe_bytes += bytes;
        }
    }

    /// Which drives' parts of the expert in `slot` are not what their `drive.json` says.
    pub(super) fn wrong_parts(&self, event: &ReadEvent, stripe: Stripe, slot: &Slot) -> SourceError {
        let homes = self.plan.homes(event.layer, event.expert).unwrap_or(&[]);
        let mut wrong = Vec::new();
        for (column, home) in homes.iter().enumerate() {
            let opened = &self.lanes[home.index()].opened;
            let Some(located) = opened.locate(event.layer, event.expert) else { continue };
            if stripe.column_digest(slot.bytes(), column as u8) != located.own_digest {
                let name = opened.names.get(located.file as usize).map_or("?", String::as_str);
                wrong.push(format!(
                    "column {column} on drive `{}`, {}, slot {}, offset {}",
                    opened.name,
                    opened.folder.join(name).display(),
                    located.slot,
                    located.offset
                ));
            }
        }
        if wrong.is_empty() {
            wrong.push("its parts are what their drives say, together they are not".into());
        }
        let (layer, expert) = (event.layer.0, event.expert.0);
        SourceError::Read(format!(
            "expert {expert} of layer {layer} is striped and does not have its digest: {}; no other copy is left, run \
             `argodrive stage --repair` for the plan",
            wrong.join("; ")
        ))
    }
}
