//! [`Ring`]: one type for both layouts, with tokens, replay and a journal.

use std::sync::atomic::{Ordering, fence};

use guest_mem::{Dma, Pages, Ticket};

use super::chain::{Chain, Violation};
use super::journal::{Journal, RingPosition, RingStart, StartError};
use super::lookahead::Lookahead;
use super::order::{CompletedChain, UsedOrder};
use super::packed::PackedQueue;
use super::parked::{Parked, RingStats, RingStop};
use super::single::{self, Single};
use super::split::SplitQueue;
use super::token::Token;
use super::watch::Watch;
use crate::queue_config::{ActivateError, QueueConfig, feature};
use crate::saved::SavedQueue;

/// The device's side of a virtqueue of either layout.
///
/// [`peek`](Ring::peek) reads the next chain, [`advance`](Ring::advance) consumes it; when the
/// request has ended, [`stage`](Ring::stage) gives its token back, and [`publish`](Ring::publish)
/// publishes everything staged to the driver. A method that returns a [`RingStop`] has parked the
/// ring accordingly; while it is parked, call none of those that take a [`Dma`].
pub enum Ring {
    /// The split layout, §2.7.
    Split(SplitQueue),
    /// The packed layout, §2.8.
    Packed(PackedQueue),
}

macro_rules! each {
    ($self:ident, $ring:ident => $then:expr) => {
        match $self {
            Ring::Split($ring) => $then,
            Ring::Packed($ring) => $then,
        }
    };
}

impl Ring {
    /// Makes a queue as the driver set it up, packed if it accepted RING_PACKED, otherwise split.
    /// `max` is the device's maximum size, `features` the accepted ones.
    pub fn new(config: &QueueConfig, max: u16, features: u64) -> Result<Self, ActivateError> {
        if features & feature::RING_PACKED == 0 {
            SplitQueue::new(config, max, features).map(Self::Split)
        } else {
            PackedQueue::new(config, max, features).map(Self::Packed)
        }
    }

    /// Returns the configuration of the queue as the driver set it up.
    pub fn config(&self) -> QueueConfig {
        each!(self, ring => ring.config())
    }

    /// Begins at `at` instead of [`RingStart::Fresh`]. Before the first use.
    pub fn start(&mut self, at: RingStart) -> Result<(), StartError> {
        each!(self, ring => ring.start(at))
    }

    /// Records chains in flight in `journal` from now on. Before the first use; chains to replay
    /// are in the journal already.
    pub fn set_journal(&mut self, journal: Box<dyn Journal>) {
        each!(self, ring => ring.set_journal(journal));
    }

    /// Returns the position of the ring, as GET_VRING_BASE reports it. Nothing should be in flight:
    /// chains taken count as passed.
    pub fn position(&self) -> RingPosition {
        each!(self, ring => ring.position())
    }

    /// Queue number.
    #[inline]
    pub fn index(&self) -> u16 {
        each!(self, ring => ring.index)
    }

    /// Entries.
    #[inline]
    pub fn size(&self) -> u16 {
        each!(self, ring => ring.size)
    }

    /// Whether the layout is packed.
    pub fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(_))
    }

    /// Reason why the queue is parked, if it is.
    #[inline]
    pub fn parked(&self) -> Option<Parked> {
        each!(self, ring => ring.park_state.parked)
    }

    /// Whether the queue is parked because a ring address faulted or the protocol was broken.
    pub fn is_faulted(&self) -> bool {
        each!(self, ring => ring.park_state.is_faulted())
    }

    /// Counters.
    pub fn stats(&self) -> RingStats {
        each!(self, ring => ring.park_state.stats)
    }

    /// A doorbell: a faulted queue tries again.
    pub fn kick(&mut self) {
        each!(self, ring => ring.park_state.kick());
    }

    /// A visit at `now_ns` begins: a queue whose ring faulted tries again
    /// [`RETRY_NS`](super::RETRY_NS) after the first visit that found it so.
    #[inline]
    pub fn retry(&mut self, now_ns: u64) {
        each!(self, ring => ring.park_state.retry(now_ns));
    }

    /// Returns the time at which a queue whose ring faulted is to be visited again, in nanoseconds:
    /// it tries again then, or sets the time of its next try (0: at once).
    pub fn retry_at_ns(&self) -> Option<u64> {
        each!(self, ring => ring.park_state.retry_at_ns())
    }

    /// A ticket completed: a queue parked on it runs again.
    pub fn ticket_done(&mut self, ticket: Ticket) {
        each!(self, ring => ring.park_state.ticket_done(ticket));
    }

    /// Parks the queue for a stop met on its behalf, by the ring itself or on a buffer that must be
    /// retried. Returns the stop.
    pub fn park(&mut self, stop: RingStop) -> RingStop {
        each!(self, ring => ring.park_state.park(stop))
    }

    /// Returns the queue's state: its configuration and its position. `None` while chains are in
    /// flight, staged or to be replayed.
    pub fn save(&self) -> Option<SavedQueue> {
        let config = self.config();
        let (next_avail, next_used) = self.position().words();
        (self.in_flight() == 0 && self.replaying() == 0).then(|| SavedQueue {
            index: config.index,
            size: config.size,
            is_packed: self.is_packed(),
            desc: config.desc.raw(),
            avail: config.avail.raw(),
            used: config.used.raw(),
            next_avail,
            next_used,
        })
    }

    /// Returns those of `pages` that it accesses under `generation`, the view's, without asking
    /// memory again: they cannot be evicted now.
    pub fn in_use(&self, generation: u64, pages: &Pages) -> u32 {
        each!(self, ring => ring.in_use(generation, pages))
    }

    /// Whether [`peek`](Ring::peek) would find a chain. Loads the driver's word only when all that
    /// was seen before has been consumed.
    #[inline]
    pub fn has_available<D: Dma>(&mut self, dma: &mut D) -> Result<bool, RingStop> {
        each!(self, ring => ring.has_available(dma))
    }

    /// Whether the ring was empty at the last check, and nothing is to be replayed: a
    /// [watch](Watch) fires for what has come since. Loads nothing.
    #[inline]
    pub fn is_seen_empty(&self) -> bool {
        each!(self, ring => ring.is_seen_empty())
    }

    /// Reads the next chain, those to replay first, without consuming it. Returns whether there was
    /// one.
    #[inline]
    pub fn peek<D: Dma>(&mut self, dma: &mut D, chain: &mut Chain) -> Result<bool, RingStop> {
        each!(self, ring => ring.peek_next(dma, chain))
    }

    /// Reads the chain at `ahead`, without consuming it, and moves `ahead` behind it. Returns
    /// false, with `ahead` unchanged, if there is none. For a device that needs several chains at
    /// once: it reads ahead until they suffice, then calls [`advance`](Ring::advance) for each in
    /// turn. If they do not suffice, the next attempt begins at the default again.
    pub fn peek_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: &mut Lookahead,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        let found = match *ahead {
            Lookahead { chains: 0, .. } => self.peek(dma, chain)?,
            at => each!(self, ring => ring.peek_ahead(dma, at, chain))?,
        };
        if found {
            self.skip(ahead, chain.descs());
        }
        Ok(found)
    }

    /// Moves `ahead` behind a chain that takes up so many descriptors.
    pub(super) fn skip(&self, ahead: &mut Lookahead, descs: u16) {
        if ahead.chains >= self.replaying() {
            ahead.descs += descs;
        }
        ahead.chains += 1;
    }

    /// [`peek_ahead`](Ring::peek_ahead) of a ring that is parked, and stays parked for its own
    /// reason. After a stop at the table of a chain, and no other, `chain` has the number of
    /// descriptors that it takes up, and `ahead` is behind it.
    pub(super) fn look_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: &mut Lookahead,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        let park_state = each!(self, ring => ring.park_state);
        chain.end(0, 0);
        let looked = self.peek_ahead(dma, ahead, chain);
        if looked.is_err() && chain.descs() != 0 {
            self.skip(ahead, chain.descs());
        }
        each!(self, ring => ring.park_state = park_state);
        looked
    }

    /// Whether [`peek_ahead`](Ring::peek_ahead) would find a chain at `ahead`.
    pub fn has_available_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
    ) -> Result<bool, RingStop> {
        if ahead.chains == 0 {
            return self.has_available(dma);
        }
        each!(self, ring => ring.has_available_ahead(dma, ahead))
    }

    /// Whether the driver has nothing left to make available behind `ahead` before something is
    /// returned to it. (A split ring's chains are counted as one descriptor each, so this may be
    /// false where it would be true.)
    pub fn is_exhausted(&self, ahead: Lookahead) -> bool {
        each!(self, ring => ring.outstanding.get()) + ahead.descs >= self.size()
    }

    /// Consumes `chain`, the first not consumed of those that [`peek`](Ring::peek) or
    /// [`peek_ahead`](Ring::peek_ahead) has read, and records it in the journal. Call it before the
    /// request can run. A journal that refuses parks the ring for ever
    /// ([`Violation::Journal`](super::Violation::Journal)).
    #[inline]
    pub fn advance(&mut self, chain: &Chain) -> Token {
        each!(self, ring => ring.take(chain))
    }

    /// Reads the next chains into `row` as long as each is [one descriptor](Single), without
    /// consuming them. Returns their number. 0 does not mean that there are no chains: ask
    /// [`peek`](Ring::peek).
    #[inline]
    pub fn peek_singles<D: Dma>(
        &mut self,
        dma: &mut D,
        row: &mut [Single],
    ) -> Result<usize, RingStop> {
        each!(self, ring => {
            // Chain by chain: a journal records each, and chains to replay come before those of the
            // ring.
            if ring.journal.is_some() || !ring.replay.is_empty() {
                return Ok(0);
            }
            ring.peek_singles(dma, row)
        })
    }

    /// Consumes the first of the chains that [`peek_singles`](Ring::peek_singles) has read, which
    /// end at once: with so many bytes `written` into each, they are published by the next
    /// [`publish`](Ring::publish). Where that needs more than storing it, as in a ring whose areas
    /// have moved, `end` receives the tokens instead, each to be [staged](Ring::stage).
    #[inline]
    pub fn answer_singles<D: Dma>(
        &mut self,
        dma: &mut D,
        singles: &[Single],
        written: impl Iterator<Item = u32> + Clone,
        mut end: impl FnMut(Token, u32),
    ) {
        let is_fit = single::fit(singles, written.clone());
        each!(self, ring => {
            ring.take_singles(singles.len() as u16);
            if is_fit
                && ring.order.is_none()
                && ring.give_back_singles(dma, singles, written.clone())
            {
                return;
            }
            for (single, len) in singles.iter().zip(written) {
                let seq = ring.order.as_mut().map_or(0, UsedOrder::take);
                let token = single.token(seq);
                match &mut ring.order {
                    Some(order) if is_fit => order.end(CompletedChain { token, len }),
                    _ => end(token, len),
                }
            }
        });
    }

    /// Stages a request that has ended, with `len` bytes written into its chain: its used element
    /// is written, or kept, and published by the next [`publish`](Ring::publish) (with IN_ORDER, by
    /// the first one before which no earlier chain is missing). After an error it was not staged:
    /// give the token again.
    ///
    /// More bytes than its chain has room for are a mistake of the device: an assertion in debug
    /// builds, a violation in others ([`Violation::Answer`](super::Violation::Answer)).
    #[inline]
    pub fn stage<D: Dma>(&mut self, dma: &mut D, token: Token, len: u32) -> Result<(), RingStop> {
        if len > token.writable() {
            return Err(self.refuse(token, len));
        }
        match self {
            Self::Split(ring) => ring.give_back(dma, token, len),
            Self::Packed(ring) => {
                ring.give_back(token, len);
                Ok(())
            }
        }
    }

    #[cold]
    fn refuse(&mut self, token: Token, len: u32) -> RingStop {
        let room = token.writable();
        debug_assert!(len <= room, "{len} bytes written into a chain of {room}");
        self.park(Violation::Answer { len, room }.into())
    }

    /// Requests that the next publish covers.
    #[inline]
    pub fn staged(&self) -> u16 {
        each!(self, ring => ring.staged())
    }

    /// Publishes everything staged to the driver. Returns whether the driver wants an interrupt:
    /// this takes at most one fence, and a read of its event field on either side of it. After an
    /// error nothing was published.
    #[inline]
    pub fn publish<D: Dma>(&mut self, dma: &mut D) -> Result<bool, RingStop> {
        each!(self, ring => {
            let Some(old) = ring.publish(dma)? else {
                return Ok(false);
            };
            ring.park_state.stats.publishes += 1;
            // First read of the event field, before the fence: an interrupt that the driver has
            // asked for by now is sent without the wait for the fence. A stale value costs a
            // spurious interrupt, and so does an event field that cannot be read.
            if ring.wants_interrupt(dma, old).unwrap_or(true) {
                return Ok(true);
            }
            // Orders the store that publishes before the load of the event field. Pairs with the
            // driver's full barrier between writing its event field (or flags) and re-reading the
            // used ring: one of the two sees the other's store. Without it the interrupt can be
            // lost.
            fence(Ordering::SeqCst);
            Ok(ring.wants_interrupt(dma, old).unwrap_or(true))
        })
    }

    /// Chains taken and not published.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        each!(self, ring => ring.in_flight())
    }

    /// Chains of a predecessor that [`peek`](Ring::peek) will return first.
    pub fn replaying(&self) -> u16 {
        each!(self, ring => ring.replay.len() as u16)
    }

    /// Asks for a doorbell at the next available chain. A SeqCst fence and
    /// [`has_available`](Ring::has_available) must follow. Costs nothing if no chain was consumed
    /// since the last call.
    pub fn arm<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        self.arm_ahead(dma, Lookahead::default())
    }

    /// [`arm`](Ring::arm) at the chain at `ahead`, for a device that needs more than the chains
    /// before it. [`has_available_ahead`](Ring::has_available_ahead) must follow.
    pub fn arm_ahead<D: Dma>(&mut self, dma: &mut D, ahead: Lookahead) -> Result<(), RingStop> {
        each!(self, ring => ring.arm(dma, ahead))
    }

    /// Asks for no doorbells while polling goes on, as far as that is worth a store. Costs nothing
    /// until a chain was consumed.
    #[inline]
    pub fn disarm<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        each!(self, ring => ring.disarm(dma))
    }

    /// Watches in `slot` the word that shows whether something new is available: when it
    /// [fires](Watch::fires), call [`has_available`](Ring::has_available). Holds until the next
    /// [`advance`](Ring::advance); it does not cover chains to replay or seen already. Keeps the
    /// word where that is the same one (in a split ring always, until memory changes). Leaves
    /// `None` if the ring cannot be reached now.
    #[inline]
    pub fn watch_in<D: Dma>(&mut self, dma: &mut D, slot: &mut Option<Watch>) {
        match each!(self, ring => ring.watch_place(dma)) {
            Some(place) => place.put(slot),
            None => *slot = None,
        }
    }
}
