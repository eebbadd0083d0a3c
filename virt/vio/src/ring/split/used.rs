//! Giving chains back through the used ring.

use guest_mem::{Access, Dma};
use virtqueue::split;

use super::{AVAIL_F_NO_INTERRUPT, FLAGS, IDX, RING, SplitQueue, load_u16};
use crate::ring::area::Area;
use crate::ring::chain::Violation;
use crate::ring::order::CompletedChain;
use crate::ring::parked::RingStop;
use crate::ring::token::Token;

impl SplitQueue {
    /// [`Ring::stage`](crate::ring::Ring::stage).
    #[inline]
    pub(in crate::ring) fn give_back<D: Dma>(
        &mut self,
        dma: &mut D,
        token: Token,
        len: u32,
    ) -> Result<(), RingStop> {
        if let Some(order) = &mut self.order {
            order.end(CompletedChain { token, len });
            return Ok(());
        }
        self.stage(dma, token.id(), len)?;
        if let Some(own) = &mut self.journal {
            own.batch.push((token.id(), token.slot()));
        }
        Ok(())
    }

    /// Writes a used element that the driver sees at the next [`publish`](SplitQueue::publish);
    /// parks on a stop.
    #[inline]
    fn stage<D: Dma>(&mut self, dma: &mut D, head: u16, len: u32) -> Result<(), RingStop> {
        assert!(
            self.staged.get() < self.size,
            "more used elements staged than the ring holds"
        );
        let slot = self.slot(self.next_used.get().wrapping_add(self.staged.get()));
        let stored = store_element(&mut self.used, dma, slot, head, len);
        self.park_state.or_park(stored)?;
        self.staged.add(1);
        Ok(())
    }

    /// Publishes all staged elements to the driver. Returns the position at which they begin, if
    /// there are any. Parks on a stop, with nothing published.
    #[inline]
    pub(in crate::ring) fn publish<D: Dma>(
        &mut self,
        dma: &mut D,
    ) -> Result<Option<u16>, RingStop> {
        let staged = self.staged();
        if staged == 0 {
            return Ok(None);
        }
        if self.order.is_some() {
            self.write_in_order(dma)?;
        }
        let old = self.next_used.get();
        let new = old.wrapping_add(staged);
        let (window, at) = self.park_state.or_park(self.used.at(dma, IDX))?;
        match &mut self.journal {
            // Release: a driver that sees the index sees the elements and the buffers' bytes.
            None => window.store_u16(at, new),
            Some(own) => {
                if own.is_broken {
                    return Err(Violation::Journal.into());
                }
                for &(head, slot) in &own.batch {
                    own.journal.complete(head, slot);
                }
                own.journal.advance();
                window.store_u16(at, new);
                own.journal.commit();
                for (head, _) in own.batch.drain(..) {
                    own.taken[usize::from(head)] = false;
                }
            }
        }
        self.next_used.set(new);
        self.staged.set(0);
        let left = self.outstanding.get().saturating_sub(staged);
        self.outstanding.set(left);
        if let Some(order) = &mut self.order {
            order.published();
        }
        Ok(Some(old))
    }

    /// Writes the elements of chains that have ended in order; with a journal, one each.
    fn write_in_order<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        let Self {
            used,
            order: Some(order),
            journal,
            park_state,
            next_used,
            size,
            ..
        } = self
        else {
            return Ok(());
        };
        if let Some(own) = journal {
            own.batch.clear();
        }
        for (run, CompletedChain { token, len }) in order.entries(journal.is_some()) {
            if let Some(own) = journal {
                own.batch.push((token.id(), token.slot()));
            }
            let slot = u32::from(next_used.get().wrapping_add(run.start) & (*size - 1));
            park_state.or_park(store_element(used, dma, slot, token.id(), len))?;
        }
        Ok(())
    }

    /// Whether the driver wants an interrupt for what was published from `old` on (§2.7.10).
    #[inline]
    pub(in crate::ring) fn wants_interrupt<D: Dma>(
        &mut self,
        dma: &mut D,
        old: u16,
    ) -> Access<bool> {
        let new = self.next_used.get();
        if self.event_idx {
            let event = load_u16(&mut self.avail, dma, RING + 2 * u32::from(self.size))?;
            Ok(split::steps_over(event, old, new))
        } else {
            Ok(load_u16(&mut self.avail, dma, FLAGS)? & AVAIL_F_NO_INTERRUPT == 0)
        }
    }
}

/// Writes used element `slot`. The index behind it is stored with release, so these need no order.
#[inline(always)]
fn store_element<D: Dma>(
    used: &mut Area,
    dma: &mut D,
    slot: u32,
    head: u16,
    len: u32,
) -> Access<()> {
    let at = RING + 8 * slot;
    // Two stores: the elements are 4 bytes off an 8-byte boundary wherever the ring is on one.
    if let Some(window) = used.whole(dma.generation()) {
        window.store_u32_pair_relaxed(at, u32::from(head), len);
        return Ok(());
    }
    // And they may straddle a page where it is not.
    let (window, within) = used.at(dma, at)?;
    window.store_u32_relaxed(within, u32::from(head));
    let (window, within) = used.at(dma, at + 4)?;
    window.store_u32_relaxed(within, len);
    Ok(())
}
