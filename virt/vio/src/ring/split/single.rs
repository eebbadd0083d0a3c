//! Chains of one descriptor, many at a time: see [`Single`].

use guest_mem::{Dma, ReadDescriptors, ReadU16s, WriteUsed};

use super::{RING, SplitQueue};
use crate::ring::parked::RingStop;
use crate::ring::single::Single;

/// Used elements on a cache line.
const PER_LINE: usize = 8;

impl SplitQueue {
    /// [`Ring::peek_singles`](crate::ring::Ring::peek_singles). One load of the index, and that
    /// only where fewer were seen before than there is room for.
    #[inline]
    pub(in crate::ring) fn peek_singles<D: Dma>(
        &mut self,
        dma: &mut D,
        row: &mut [Single],
    ) -> Result<usize, RingStop> {
        let mut ahead = self.seen.get().wrapping_sub(self.next_avail.get());
        if usize::from(ahead) < row.len() {
            ahead = self.available(dma)?;
        }
        let generation = dma.generation();
        let size = u32::from(self.size);
        let heads = self.avail.whole(generation);
        let heads = heads.and_then(|window| ReadU16s::new(window, RING, size));
        let table = self.desc.whole(generation);
        let table = table.and_then(|window| ReadDescriptors::new(window, size));
        let (Some(heads), Some(table)) = (heads, table) else {
            return Ok(0);
        };
        let most = usize::from(ahead).min(row.len());
        let mask = self.size - 1;
        let mut at = self.next_avail.get();
        let mut found = 0;
        for place in &mut row[..most] {
            // Behind the acquire load of the index.
            let Some(head) = heads.load_relaxed(at & mask) else {
                break;
            };
            // One outside the table is `peek`'s to refuse.
            let Some((addr, rest)) = table.load_relaxed(head) else {
                break;
            };
            let flags = (rest >> 32) as u16;
            let Some(single) = Single::new(addr, rest as u32, flags, head) else {
                break;
            };
            *place = single;
            at = at.wrapping_add(1);
            found += 1;
        }
        self.prefetch_used(generation, found);
        Ok(found)
    }

    /// The used ring's elements, if it is one window.
    #[inline(always)]
    fn elements(&self, generation: u64) -> Option<WriteUsed<'_>> {
        WriteUsed::new(self.used.whole(generation)?, RING, u32::from(self.size))
    }

    /// Hints the processor at the elements that give so many chains back, all lines at once: the
    /// driver's processor has read them, and stores would fetch them one behind the other.
    #[inline(always)]
    fn prefetch_used(&self, generation: u64, chains: usize) {
        if let Some(used) = self.elements(generation) {
            let first = self.next_used.get().wrapping_add(self.staged.get());
            for line in (0..chains).step_by(PER_LINE) {
                used.prefetch(first.wrapping_add(line as u16) & (self.size - 1));
            }
        }
    }

    #[inline(always)]
    pub(in crate::ring) fn take_singles(&mut self, chains: u16) {
        self.next_avail.add(chains);
        self.outstanding.add(chains);
    }

    /// Stages chains that were taken, of a ring without IN_ORDER, each with so many bytes
    /// `written`; false: nothing was done.
    #[inline]
    pub(in crate::ring) fn give_back_singles<D: Dma>(
        &mut self,
        dma: &mut D,
        singles: &[Single],
        written: impl Iterator<Item = u32>,
    ) -> bool {
        let ended = singles.iter().zip(written);
        let Some(used) = self.elements(dma.generation()) else {
            return false;
        };
        let (staged, chains) = (self.staged.get(), singles.len() as u16);
        assert!(
            u32::from(staged) + u32::from(chains) <= u32::from(self.size),
            "more used elements staged than the ring holds"
        );
        let mask = self.size - 1;
        let mut at = self.next_used.get().wrapping_add(staged);
        for (single, len) in ended {
            used.store_relaxed(at & mask, u32::from(single.id()), len);
            at = at.wrapping_add(1);
        }
        self.staged.add(chains);
        true
    }
}
