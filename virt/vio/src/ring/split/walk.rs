//! Taking chains from the available ring.

use guest_mem::{Access, Dma};
use virtqueue::split;

use super::{IDX, RING, SplitQueue, load_u16};
use crate::ring::chain::{Chain, DESC_SIZE, RawDescriptor, Violation};
use crate::ring::lookahead::Lookahead;
use crate::ring::order::UsedOrder;
use crate::ring::parked::RingStop;
use crate::ring::token::Token;

/// Number of chains ahead of which descriptors are prefetched: a line from another core takes about
/// as long as serving three requests.
const AHEAD: u16 = 4;

impl SplitQueue {
    /// Returns the number of chains that the driver has made available and the device has not
    /// consumed; parks on a stop.
    ///
    /// The acquire load of `avail.idx` orders it before the loads of the entries and descriptors
    /// before the index. It pairs with the driver's write barrier between filling the ring and
    /// storing `avail.idx`.
    #[inline]
    pub(in crate::ring) fn available<D: Dma>(&mut self, dma: &mut D) -> Result<u16, RingStop> {
        let loaded = load_u16(&mut self.avail, dma, IDX);
        let idx = self.park_state.or_park(loaded)?;
        let next_avail = self.next_avail.get();
        // Those not returned yet take up entries too.
        let count = split::available(idx, next_avail, self.size, self.outstanding.get());
        let count = self.park_state.or_park(count)?;
        self.seen.set(idx);
        Ok(count)
    }

    #[inline]
    pub(in crate::ring) fn is_seen_empty(&self) -> bool {
        self.seen == self.next_avail && self.replay.is_empty()
    }

    #[inline]
    pub(in crate::ring) fn has_available<D: Dma>(&mut self, dma: &mut D) -> Result<bool, RingStop> {
        // The driver's line is loaded only when all that was seen of it has been consumed.
        Ok(!self.is_seen_empty() || self.available(dma)? != 0)
    }

    /// [`Ring::peek`](crate::ring::Ring::peek). Not inlined: its loop wants the registers for
    /// itself.
    #[inline(never)]
    pub(in crate::ring) fn peek_next<D: Dma>(
        &mut self,
        dma: &mut D,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        if let Some(&head) = self.replay.front() {
            return self.peek_replay(dma, head, chain);
        }
        let generation = dma.generation();
        let mut ahead = self.seen.get().wrapping_sub(self.next_avail.get());
        if ahead == 0 {
            ahead = self.available(dma)?;
            if ahead == 0 {
                return Ok(false);
            }
            self.prefetch(generation, 1..ahead.min(AHEAD));
            self.prefetch_event(generation);
        }
        if ahead > AHEAD {
            self.prefetch(generation, AHEAD..AHEAD + 1);
        }
        let slot = self.slot(self.next_avail.get());
        let walked = match (self.avail.whole(generation), self.desc.whole(generation)) {
            (Some(avail), Some(desc)) => {
                // Behind the acquire load of the index.
                let head = avail.load_u16_relaxed(RING + 2 * slot);
                let walked = gather(self.size, self.indirect, head, chain, |index| {
                    Ok(desc.load_pair_relaxed(DESC_SIZE * u32::from(index)))
                });
                match walked {
                    Ok(None) => Ok(()),
                    Ok(Some(table)) => self.table.walk_linked(dma, table, chain),
                    Err(stop) => Err(stop),
                }
            }
            _ => self.walk_entry(dma, 0, chain),
        };
        self.park_state.or_park(walked)?;
        self.check_taken(chain)
    }

    /// Hints the processor at what is looked at when these have been done: a driver that sleeps
    /// writes it once more after each request, so it is the other processor's.
    #[inline(always)]
    fn prefetch_event(&self, generation: u64) {
        if self.event_idx
            && let Some(avail) = self.avail.whole(generation)
        {
            avail.prefetch(RING + 2 * u32::from(self.size));
        }
    }

    /// Hints the processor at the first descriptors of the chains so many entries behind the next
    /// one, which have been seen.
    #[inline(always)]
    fn prefetch(&self, generation: u64, ahead: std::ops::Range<u16>) {
        let (avail, desc) = (self.avail.whole(generation), self.desc.whole(generation));
        let (Some(avail), Some(desc)) = (avail, desc) else {
            return;
        };
        for ahead in ahead {
            let slot = self.slot(self.next_avail.get().wrapping_add(ahead));
            let head = avail.load_u16_relaxed(RING + 2 * slot);
            desc.prefetch(DESC_SIZE * u32::from(head));
        }
    }

    /// The journal can record a head once.
    #[inline]
    fn check_taken(&mut self, chain: &Chain) -> Result<bool, RingStop> {
        match &self.journal {
            Some(own) if own.taken[usize::from(chain.head())] => Err(self
                .park_state
                .park(Violation::InFlight(chain.head()).into())),
            _ => Ok(true),
        }
    }

    #[cold]
    fn peek_replay<D: Dma>(
        &mut self,
        dma: &mut D,
        head: u16,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        let walked = self.walk(dma, head, chain);
        self.park_state.or_park(walked.map(|()| true))
    }

    /// [`Ring::advance`](crate::ring::Ring::advance).
    #[inline]
    pub(in crate::ring) fn take(&mut self, chain: &Chain) -> Token {
        let mut slot = 0;
        if self.replay.is_empty() {
            self.next_avail.add(1);
            self.outstanding.add(1);
            if self.journal.is_some() {
                slot = self.record(chain);
            }
        } else {
            self.replay.pop_front();
        }
        let seq = self.order.as_mut().map_or(0, UsedOrder::take);
        Token::new(chain.head(), 1, slot, seq, chain.writable_len())
    }

    /// Records a chain in the journal. If that refuses, the ring is parked for ever and publishes
    /// nothing more: its successor would not know what was published.
    fn record(&mut self, chain: &Chain) -> u16 {
        let Some(own) = &mut self.journal else {
            return 0;
        };
        match own.journal.begin(chain.head(), &[]) {
            Ok(slot) => {
                own.taken[usize::from(chain.head())] = true;
                slot
            }
            Err(_) => {
                own.is_broken = true;
                self.park_state.park(Violation::Journal.into());
                0
            }
        }
    }

    /// [`Ring::has_available_ahead`](crate::ring::Ring::has_available_ahead).
    pub(in crate::ring) fn has_available_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
    ) -> Result<bool, RingStop> {
        let seen = self.seen.get().wrapping_sub(self.next_avail.get());
        Ok(usize::from(ahead.chains) < self.replay.len()
            || ahead.descs < seen
            || ahead.descs < self.available(dma)?)
    }

    /// [`Ring::peek_ahead`](crate::ring::Ring::peek_ahead), behind the next chain.
    pub(in crate::ring) fn peek_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        if !self.has_available_ahead(dma, ahead)? {
            return Ok(false);
        }
        let walked = match self.replay.get(usize::from(ahead.chains)) {
            Some(&head) => return self.peek_replay(dma, head, chain),
            None => self.walk_entry(dma, ahead.descs, chain),
        };
        self.park_state.or_park(walked)?;
        self.check_taken(chain)
    }

    fn walk_entry<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: u16,
        chain: &mut Chain,
    ) -> Result<(), RingStop> {
        let slot = self.slot(self.next_avail.get().wrapping_add(ahead));
        let (window, at) = self.avail.at(dma, RING + 2 * slot)?;
        let head = window.load_u16_relaxed(at);
        self.walk(dma, head, chain)
    }

    fn walk<D: Dma>(&mut self, dma: &mut D, head: u16, chain: &mut Chain) -> Result<(), RingStop> {
        let size = self.size;
        let (indirect, desc) = (self.indirect, &mut self.desc);
        let walked = gather(size, indirect, head, chain, |index| {
            desc.load_pair(dma, DESC_SIZE * u32::from(index))
        })?;
        match walked {
            None => Ok(()),
            Some(table) => self.table.walk_linked(dma, table, chain),
        }
    }
}

/// Reads the chain that starts at `head` into `chain`; answers the indirect descriptor that it ends
/// in, if it does.
#[inline(always)]
fn gather(
    size: u16,
    indirect: bool,
    head: u16,
    chain: &mut Chain,
    mut fetch: impl FnMut(u16) -> Access<(u64, u64)>,
) -> Result<Option<RawDescriptor>, RingStop> {
    chain.begin(head);
    let mut sum = chain.sum();
    let table = chain.follow(&mut sum, size, head, indirect, |index| {
        fetch(index).map_err(RingStop::from)
    })?;
    chain.close(sum)?;
    Ok(table)
}
