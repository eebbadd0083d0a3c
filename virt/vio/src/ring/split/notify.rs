//! Asking for doorbells, and not asking for them.

use guest_mem::Dma;

use super::{FLAGS, IDX, RING, SplitQueue, USED_F_NO_NOTIFY, store_u16};
use crate::ring::lookahead::Lookahead;
use crate::ring::parked::RingStop;
use crate::ring::watch::WatchPlace;

impl SplitQueue {
    /// [`Ring::arm_ahead`](crate::ring::Ring::arm_ahead).
    pub(in crate::ring) fn arm<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
    ) -> Result<(), RingStop> {
        let event = self.next_avail.get().wrapping_add(ahead.descs);
        if self.armed == Some(event) {
            return Ok(());
        }
        let armed = if self.event_idx {
            let at = RING + 8 * u32::from(self.size);
            store_u16(&mut self.used, dma, at, event)
        } else if self.no_notify != Some(false) {
            store_u16(&mut self.used, dma, FLAGS, 0)
        } else {
            Ok(())
        };
        self.park_state.or_park(armed)?;
        self.no_notify = Some(false);
        self.armed = Some(event);
        Ok(())
    }

    /// Polling goes on: without EVENT_IDX sets NO_NOTIFY, with it leaves `avail_event` to fall
    /// behind. Free until something was consumed.
    #[inline]
    pub(in crate::ring) fn disarm<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        if self.event_idx
            || self.no_notify == Some(true)
            || self.armed == Some(self.next_avail.get())
        {
            return Ok(());
        }
        let stored = store_u16(&mut self.used, dma, FLAGS, USED_F_NO_NOTIFY);
        self.park_state.or_park(stored)?;
        self.no_notify = Some(true);
        self.armed = None;
        Ok(())
    }

    /// [`Ring::watch_in`](crate::ring::Ring::watch_in).
    #[inline]
    pub(in crate::ring) fn watch_place<D: Dma>(&mut self, dma: &mut D) -> Option<WatchPlace<'_>> {
        let quiet = self.next_avail.get();
        let (window, offset) = self.avail.at(dma, IDX).ok()?;
        Some(WatchPlace {
            window,
            offset,
            mask: u16::MAX,
            quiet,
        })
    }
}
