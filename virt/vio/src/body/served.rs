//! A queue of a device that has begun, seen from two sides: a class takes chains and gives tokens
//! back by the public methods; the body publishes, arms and ends waits.

use std::collections::VecDeque;

use guest_mem::{Dma, Stop, Wanted};

use crate::ring::prefetch::ChainPrefetch;
use crate::ring::{Chain, Lookahead, Ring, RingStop, Single, Token, Violation, wait_for_all};

/// One queue of a device that has begun: its ring, and the state that its class keeps of it.
pub struct ServedQueue<Q> {
    /// State of the class.
    pub own: Q,
    pub(super) ring: Ring,
    /// Chains are taken from it.
    pub(super) is_enabled: bool,
    /// Whether its ring was not parked when the last visit came to it.
    pub(super) runs: bool,
    /// Tokens answered and not staged yet, with the bytes written: several, where they are
    /// published together or not at all.
    ended: VecDeque<(Token, u32)>,
    /// Chains behind one that waits.
    pub(super) prefetch: ChainPrefetch,
}

impl<Q> ServedQueue<Q> {
    pub(super) fn new(ring: Ring, own: Q, lookahead: usize) -> Self {
        Self {
            own,
            ring,
            is_enabled: true,
            runs: false,
            ended: VecDeque::new(),
            prefetch: ChainPrefetch::new(lookahead),
        }
    }

    /// Queue number.
    #[inline]
    pub fn index(&self) -> u16 {
        self.ring.index()
    }

    /// Chains taken and not published.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    /// As [`Ring::has_available`].
    #[inline]
    pub fn has_available<D: Dma>(&mut self, dma: &mut D) -> Result<bool, RingStop> {
        self.ring.has_available(dma)
    }

    /// As [`Ring::has_available_ahead`].
    #[inline]
    pub fn has_available_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: Lookahead,
    ) -> Result<bool, RingStop> {
        self.ring.has_available_ahead(dma, ahead)
    }

    /// As [`Ring::is_exhausted`].
    pub fn is_exhausted(&self, ahead: Lookahead) -> bool {
        self.ring.is_exhausted(ahead)
    }

    /// As [`Ring::peek`].
    #[inline]
    pub fn peek<D: Dma>(&mut self, dma: &mut D, chain: &mut Chain) -> Result<bool, RingStop> {
        self.ring.peek(dma, chain)
    }

    /// As [`Ring::peek_ahead`].
    #[inline]
    pub fn peek_ahead<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: &mut Lookahead,
        chain: &mut Chain,
    ) -> Result<bool, RingStop> {
        self.ring.peek_ahead(dma, ahead, chain)
    }

    /// Consumes `chain`, the first not consumed: its request runs from now on. When it has ended,
    /// the token is given back by [`stage`](Self::stage).
    ///
    /// # Errors
    /// The journal refuses it: its request must not run, or is not answered if it has. The ring
    /// never goes on.
    #[inline]
    pub fn take(&mut self, chain: &Chain) -> Result<Token, RingStop> {
        self.prefetch.advance();
        let token = self.ring.advance(chain);
        match self.ring.is_faulted() {
            false => Ok(token),
            true => Err(Violation::Journal.into()),
        }
    }

    /// Consumes `chain`, into which `len` bytes were written: it is over, and staged by
    /// [`stage_answers`](Self::stage_answers) or by the body before it publishes.
    ///
    /// # Errors
    /// As of [`take`](Self::take).
    pub fn answer(&mut self, chain: &Chain, len: u32) -> Result<(), RingStop> {
        let token = self.take(chain)?;
        self.ended.push_back((token, len));
        Ok(())
    }

    /// As [`Ring::peek_singles`]. The used elements of a row are stored by
    /// [`answer_singles`](Self::answer_singles), so what has been answered before is staged first.
    #[inline]
    pub fn peek_singles<D: Dma>(
        &mut self,
        dma: &mut D,
        row: &mut [Single],
    ) -> Result<usize, RingStop> {
        self.stage_answers(dma)?;
        self.ring.peek_singles(dma, row)
    }

    /// Consumes `singles`, the first of those that [`peek_singles`](Self::peek_singles) has read,
    /// with so many bytes `written` into each: they are over, and staged now or as those of
    /// [`answer`](Self::answer) are.
    #[inline]
    pub fn answer_singles<D: Dma>(
        &mut self,
        dma: &mut D,
        singles: &[Single],
        written: impl Iterator<Item = u32> + Clone,
    ) {
        self.prefetch.advance_by(singles.len());
        let Self { ring, ended, .. } = self;
        ring.answer_singles(dma, singles, written, |token, len| {
            ended.push_back((token, len));
        });
    }

    /// The request of `token` is over, with `len` bytes written: it is staged by
    /// [`stage_answers`](Self::stage_answers) or by the body before it publishes.
    #[inline]
    pub fn end(&mut self, token: Token, len: u32) {
        self.ended.push_back((token, len));
    }

    /// The request of `token` is over, with `len` bytes written. After an error it was not staged:
    /// give the token again.
    ///
    /// More bytes than its chain has room for are a mistake of the class: an assertion in debug
    /// builds, a device that needs a reset in others.
    #[inline]
    pub fn stage<D: Dma>(&mut self, dma: &mut D, token: Token, len: u32) -> Result<(), RingStop> {
        self.ring.stage(dma, token, len)
    }

    /// Parks the queue for `stop`, met on its behalf. Returns the stop.
    pub fn park(&mut self, stop: impl Into<RingStop>) -> RingStop {
        self.ring.park(stop.into())
    }

    /// Parks the queue for `stop`, met by an access to one of the buffers in `ranges`, which are
    /// all asked for if that one is absent. Returns the stop.
    #[cold]
    pub fn wait_for<D: Dma>(
        &mut self,
        dma: &mut D,
        stop: Stop,
        ranges: impl Iterator<Item = Wanted>,
    ) -> RingStop {
        self.park(wait_for_all(dma, stop, ranges))
    }

    /// Stages the chains that were [answered](Self::answer).
    #[inline]
    pub fn stage_answers<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        while let Some(&(token, len)) = self.ended.front() {
            self.stage(dma, token, len)?;
            self.ended.pop_front();
        }
        Ok(())
    }

    /// Whether what is staged may be published: not while a part of an answer is missing, nor while
    /// the ring itself faults, which would only be recorded again.
    pub(super) fn may_publish(&self) -> bool {
        self.ring.staged() != 0 && self.ended.is_empty() && !self.ring.is_faulted()
    }

    /// Whether something has ended that is not published.
    pub(super) fn has_unpublished(&self) -> bool {
        self.ring.staged() != 0 || !self.ended.is_empty()
    }

    /// Whether chains may be taken, as far as the queue itself goes.
    pub(super) fn is_open(&self) -> bool {
        self.is_enabled && self.ring.parked().is_none()
    }
}
