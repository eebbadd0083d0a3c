//! Asking for doorbells, and not asking for them.

use guest_mem::Dma;

use super::{DESC_F_AVAIL, DESC_FLAGS, EVENT_DESC, EVENT_DISABLE, EVENT_ENABLE, PackedQueue};
use crate::ring::chain::DESC_SIZE;
use crate::ring::lookahead::Lookahead;
use crate::ring::parked::RingStop;
use crate::ring::watch::WatchPlace;

impl PackedQueue {
    /// [`Ring::arm_ahead`](crate::ring::Ring::arm_ahead).
    pub(in crate::ring) fn arm<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
    ) -> Result<(), RingStop> {
        let event = self.next_avail.advanced(ahead.descs, self.size);
        if self.armed == Some(event) {
            return Ok(());
        }
        let word = if self.event_idx {
            u32::from(EVENT_DESC) << 16 | u32::from(event.off_wrap())
        } else {
            u32::from(EVENT_ENABLE) << 16
        };
        self.tell(dma, word)?;
        self.armed = Some(event);
        Ok(())
    }

    /// [`Ring::disarm`](crate::ring::Ring::disarm).
    #[inline]
    pub(in crate::ring) fn disarm<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        let word = u32::from(EVENT_DISABLE) << 16;
        if self.told == Some(word) || self.armed == Some(self.next_avail) {
            return Ok(());
        }
        self.tell(dma, word)?;
        self.armed = None;
        Ok(())
    }

    /// Stores the device's event suppression structure, in one store: its halves belong together.
    fn tell<D: Dma>(&mut self, dma: &mut D, word: u32) -> Result<(), RingStop> {
        if self.told == Some(word) {
            return Ok(());
        }
        let (window, at) = self.park_state.or_park(self.device.at(dma, 0))?;
        window.store_u32(at, word);
        self.told = Some(word);
        Ok(())
    }

    /// [`Ring::watch_in`](crate::ring::Ring::watch_in). AVAIL alone suffices: whatever this
    /// descriptor was before, the bit had the other value in the lap before (and is 0 in a new
    /// ring, which begins with a wrap counter of 1).
    #[inline]
    pub(in crate::ring) fn watch_place<D: Dma>(&mut self, dma: &mut D) -> Option<WatchPlace<'_>> {
        let next = self.next_avail;
        let at = DESC_SIZE * u32::from(next.idx()) + DESC_FLAGS;
        let (window, offset) = self.desc.at(dma, at).ok()?;
        Some(WatchPlace {
            window,
            offset,
            mask: DESC_F_AVAIL,
            quiet: if next.wrap() { 0 } else { DESC_F_AVAIL },
        })
    }
}
