//! Chains of one descriptor, many at a time: see [`Single`].

use guest_mem::{Dma, ReadDescriptors, WriteDescriptors};

use super::{PackedQueue, Used};
use crate::ring::parked::RingStop;
use crate::ring::single::Single;

/// Descriptors on a cache line.
const PER_LINE: usize = 4;

impl PackedQueue {
    /// [`Ring::peek_singles`](crate::ring::Ring::peek_singles).
    #[inline]
    pub(in crate::ring) fn peek_singles<D: Dma>(
        &mut self,
        dma: &mut D,
        row: &mut [Single],
    ) -> Result<usize, RingStop> {
        let generation = dma.generation();
        let table = self.desc.whole(generation);
        let table = table.and_then(|window| ReadDescriptors::new(window, self.size.into()));
        let Some(table) = table else {
            return Ok(0);
        };
        // The driver may use only descriptors that were returned.
        let room = usize::from(self.size - self.outstanding.get());
        let most = room.min(row.len());
        let mut at = self.next_avail;
        let mut found = 0;
        for place in &mut row[..most] {
            // Acquire: orders this load of the flags before the loads of the address and the
            // buffer, which the driver wrote before the flags.
            let Some(rest) = table.load_second(at.idx()) else {
                break;
            };
            let flags = (rest >> 48) as u16;
            if !at.is_available(flags) {
                break;
            }
            let Some(addr) = table.load_first_relaxed(at.idx()) else {
                break;
            };
            let Some(single) = Single::new(addr, rest as u32, flags, (rest >> 32) as u16) else {
                break;
            };
            *place = single;
            at = at.advanced(1, self.size);
            found += 1;
        }
        self.prefetch_used(generation, found);
        Ok(found)
    }

    /// Hints the processor at the descriptors that give so many chains back, all lines at once. No
    /// more than were available, so the driver does not write them now.
    #[inline(always)]
    fn prefetch_used(&self, generation: u64, chains: usize) {
        let used = self.desc_used.whole(generation);
        let used = used.and_then(|window| WriteDescriptors::new(window, self.size.into()));
        if let Some(used) = used {
            let first = self.next_used.advanced(self.staged_descs.get(), self.size);
            for line in (0..chains).step_by(PER_LINE) {
                let at = first.advanced(line as u16, self.size);
                used.prefetch(at.idx());
            }
        }
    }

    #[inline(always)]
    pub(in crate::ring) fn take_singles(&mut self, chains: u16) {
        if chains != 0 {
            self.head = None;
        }
        self.next_avail = self.next_avail.advanced(chains, self.size);
        self.outstanding.add(chains);
        self.taken.add(chains);
    }

    /// Stages chains that were taken, of a ring without IN_ORDER, each with so many bytes
    /// `written`; false: nothing was done.
    #[inline]
    pub(in crate::ring) fn give_back_singles<D: Dma>(
        &mut self,
        _dma: &mut D,
        singles: &[Single],
        written: impl Iterator<Item = u32>,
    ) -> bool {
        let ended = singles.iter().zip(written);
        let before = self.staged_descs.get();
        let descs = before + singles.len() as u16;
        assert!(
            descs <= self.outstanding.get(),
            "more chains staged than were taken"
        );
        let mut at = self.next_used.advanced(before, self.size);
        let size = self.size;
        self.staged.extend(ended.map(|(single, len)| {
            let used = Used {
                at,
                id: single.id(),
                slot: 0,
                len,
            };
            at = at.advanced(1, size);
            used
        }));
        self.staged_descs.set(descs);
        true
    }
}
