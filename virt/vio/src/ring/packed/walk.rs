//! Taking chains from the ring.

use guest_mem::{Access, Dma};

use super::position::Position;
use super::{PackedQueue, load_rest};
use crate::ring::chain::{
    Chain, DESC_F_INDIRECT, DESC_F_NEXT, DESC_SIZE, RawDescriptor, Violation,
};
use crate::ring::lookahead::Lookahead;
use crate::ring::order::UsedOrder;
use crate::ring::parked::RingStop;
use crate::ring::token::Token;

impl PackedQueue {
    #[inline]
    pub(in crate::ring) fn is_seen_empty(&self) -> bool {
        self.head.is_none() && self.replay.is_empty()
    }

    #[inline]
    pub(in crate::ring) fn has_available<D: Dma>(&mut self, dma: &mut D) -> Result<bool, RingStop> {
        if !self.is_seen_empty() {
            return Ok(true);
        }
        let loaded = load_rest(&mut self.desc, dma, self.next_avail.idx());
        let rest = self.park_state.or_park(loaded)?;
        let is_available = self.next_avail.is_available((rest >> 48) as u16);
        self.head = is_available.then_some(rest);
        Ok(is_available)
    }

    /// [`Ring::peek`](crate::ring::Ring::peek). Not inlined: its loop wants the registers for
    /// itself.
    #[inline(never)]
    pub(in crate::ring) fn peek_next<D: Dma>(
        &mut self,
        dma: &mut D,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        if !self.replay.is_empty() {
            return self.peek_replay(dma, 0, chain);
        }
        if !self.has_available(dma)? {
            return Ok(false);
        }
        if self.staged.is_empty()
            && let Some(driver) = self.driver.whole(dma.generation())
        {
            // A driver that sleeps writes it once more after each request, so it is the other
            // processor's.
            driver.prefetch(0);
        }
        let next = self.next(Lookahead::default(), self.head.unwrap_or_default());
        let walked = match self.desc.whole(dma.generation()) {
            Some(desc) if self.journal.is_none() => {
                next.gather::<false>(chain, |at| Ok(desc.load_pair_relaxed(at)))
            }
            _ => next.gather::<true>(chain, |at| self.desc.load_pair(dma, at)),
        };
        self.peeked(dma, walked, chain)
    }

    /// Completes a walk: reads the indirect table if it ends in one, and parks on a stop.
    #[inline(always)]
    fn peeked<D: Dma>(
        &mut self,
        dma: &mut D,
        walked: Result<Option<RawDescriptor>, RingStop>,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        let walked = match walked {
            Ok(None) => return Ok(true),
            Ok(Some(table)) => self.table.walk_row(dma, table, chain),
            Err(stop) => Err(stop),
        };
        self.park_state.or_park(walked.map(|()| true))
    }

    #[inline(always)]
    fn next(&self, ahead: Lookahead, head: u64) -> Next {
        Next {
            at: self.next_avail.advanced(ahead.descs, self.size),
            size: self.size,
            // The driver may use only descriptors that were returned.
            room: self.size - self.outstanding.get() - ahead.descs,
            head,
            indirect: self.indirect,
        }
    }

    /// Returns `len`, `id` and `flags` at `ahead`, which is behind the chains to replay, if these
    /// show that it is available.
    fn head_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
    ) -> Result<Option<u64>, RingStop> {
        // The driver may use only descriptors that were returned, and these chains take up the
        // rest.
        if self.outstanding.get() + ahead.descs >= self.size {
            return Ok(None);
        }
        let at = self.next_avail.advanced(ahead.descs, self.size);
        let rest = self
            .park_state
            .or_park(load_rest(&mut self.desc, dma, at.idx()))?;
        Ok(at.is_available((rest >> 48) as u16).then_some(rest))
    }

    /// [`Ring::has_available_ahead`](crate::ring::Ring::has_available_ahead).
    pub(in crate::ring) fn has_available_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
    ) -> Result<bool, RingStop> {
        Ok(usize::from(ahead.chains) < self.replay.len() || self.head_ahead(dma, ahead)?.is_some())
    }

    /// [`Ring::peek_ahead`](crate::ring::Ring::peek_ahead), behind the next chain.
    pub(in crate::ring) fn peek_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        if usize::from(ahead.chains) < self.replay.len() {
            return self.peek_replay(dma, ahead.chains, chain);
        }
        let Some(head) = self.head_ahead(dma, ahead)? else {
            return Ok(false);
        };
        let walked = self
            .next(ahead, head)
            .gather::<true>(chain, |at| self.desc.load_pair(dma, at));
        self.peeked(dma, walked, chain)
    }

    #[cold]
    fn peek_replay<D: Dma>(
        &mut self,
        dma: &mut D,
        nth: u16,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        let walked = self.walk_replay(dma, nth, chain);
        self.park_state.or_park(walked)
    }

    /// The chain that the journal kept: all its descriptors, whatever their NEXT flags say.
    fn walk_replay<D: Dma>(
        &mut self,
        dma: &mut D,
        nth: u16,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        let Some((_, descs)) = self.replay.get(usize::from(nth)) else {
            return Ok(false);
        };
        chain.begin(0);
        let mut sum = chain.sum();
        for (nth, &desc) in (1..).zip(descs) {
            if desc.flags & DESC_F_INDIRECT != 0 {
                if !self.indirect || descs.len() != 1 {
                    return Err(Violation::Indirect.into());
                }
                self.table.walk_row(dma, desc, chain)?;
                sum = chain.sum();
            } else {
                chain.push(&mut sum, desc)?;
            }
            chain.end(desc.next, nth);
        }
        chain.close(sum)?;
        Ok(true)
    }

    /// [`Ring::advance`](crate::ring::Ring::advance).
    #[inline]
    pub(in crate::ring) fn take(&mut self, chain: &Chain) -> Token {
        let mut slot = 0;
        if let Some((replayed, _)) = self.replay.pop_front() {
            slot = replayed;
        } else {
            self.head = None;
            self.next_avail = self.next_avail.advanced(chain.descs(), self.size);
            self.outstanding.add(chain.descs());
            if let Some(journal) = &mut self.journal {
                match journal.begin(chain.head(), chain.raw()) {
                    Ok(begun) => slot = begun,
                    // As in a split ring.
                    Err(_) => {
                        self.is_broken = true;
                        self.park_state.park(Violation::Journal.into());
                    }
                }
            }
        }
        self.taken.add(1);
        let seq = self.order.as_mut().map_or(0, UsedOrder::take);
        Token::new(chain.head(), chain.descs(), slot, seq, chain.writable_len())
    }
}

/// Beginning of the next chain, whose first descriptor is known to be available.
struct Next {
    at: Position,
    size: u16,
    /// Descriptors it can have.
    room: u16,
    /// `len`, `id` and `flags` of its first descriptor, as read when it was found available.
    head: u64,
    indirect: bool,
}

impl Next {
    /// Reads it into `chain`, with the descriptors as they are if `RAW`; answers the indirect
    /// descriptor that it is, if so. `fetch` takes an offset in the ring.
    #[inline(always)]
    fn gather<const RAW: bool>(
        self,
        chain: &mut Chain,
        mut fetch: impl FnMut(u32) -> Access<(u64, u64)>,
    ) -> Result<Option<RawDescriptor>, RingStop> {
        chain.begin(0);
        // How many, once that is known.
        chain.end(0, 0);
        let mut sum = chain.sum();
        let mut at = self.at;
        let mut rest = self.head;
        let (mut addr, _) = fetch(DESC_SIZE * u32::from(at.idx()))?;
        // The driver has made the first available, and with it the others: their own bits say
        // nothing (§2.8.6). More than there is room for is a loop, or an offer of what the driver
        // does not own.
        let mut left = u32::from(self.room);
        while left != 0 {
            left -= 1;
            let flags = (rest >> 48) as u16;
            if RAW {
                chain.keep_raw(RawDescriptor::from_packed_words(addr, rest));
            }
            let goes_on = flags & DESC_F_NEXT != 0;
            let id = (rest >> 32) as u16;
            if flags & DESC_F_INDIRECT != 0 {
                if !self.indirect || goes_on || at != self.at {
                    return Err(Violation::Indirect.into());
                }
                chain.end(id, 1);
                return Ok(Some(RawDescriptor::from_packed_words(addr, rest)));
            }
            chain.push_words(&mut sum, addr, rest as u32, flags)?;
            if !goes_on {
                chain.end(id, self.room - left as u16);
                chain.close(sum)?;
                return Ok(None);
            }
            at = at.advanced(1, self.size);
            (addr, rest) = fetch(DESC_SIZE * u32::from(at.idx()))?;
        }
        Err(Violation::TooLong.into())
    }
}
