//! Completions in the order of taking, for VIRTIO_F_IN_ORDER (virtio 1.2 §2.7.9, §2.8.9).
//!
//! A driver that accepted the feature expects its buffers back in the order in which it made them
//! available. Requests that end early wait here for those before them; those that are in order can
//! be published.
//!
//! One used entry may stand for a batch: it names the last chain, and those it skips count as
//! written in full. So a batch ends with every chain that is not.

use std::mem;
use std::ops::Range;

use super::counter::Counter;
use super::token::Token;

/// A chain that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CompletedChain {
    pub(super) token: Token,
    /// Bytes written into it.
    pub(super) len: u32,
}

impl CompletedChain {
    /// Whether the chain was written in full, so that `len` need not be reported.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len == self.token.writable()
    }
}

/// Chains that were taken, in order, with their ends.
#[derive(Debug)]
pub(super) struct UsedOrder {
    /// `seq` of the first that was not published.
    first: Counter,
    /// `seq` of the next to be taken.
    next: Counter,
    /// Number of chains, from the first on, that have ended.
    ready: Counter,
    /// By `seq`; a power of two, and no fewer than the ring's entries: at most that many are taken
    /// and not published.
    places: Vec<Option<CompletedChain>>,
}

impl UsedOrder {
    /// Of a ring with `size` entries, at most 32768.
    pub(super) fn new(size: u16) -> Self {
        Self {
            first: Counter::default(),
            next: Counter::default(),
            ready: Counter::default(),
            places: vec![None; usize::from(size.next_power_of_two())],
        }
    }

    #[inline(always)]
    fn at(&self, seq: u16) -> usize {
        usize::from(seq) & (self.places.len() - 1)
    }

    /// A chain was taken; its `seq`.
    #[inline]
    pub(super) fn take(&mut self) -> u16 {
        let seq = self.next.get();
        let at = self.at(seq);
        self.places[at] = None;
        self.next.add(1);
        seq
    }

    /// A chain has ended.
    #[inline]
    pub(super) fn end(&mut self, ended: CompletedChain) {
        let (first, seq) = (self.first.get(), ended.token.seq());
        let taken = self.next.get().wrapping_sub(first);
        let at = self.at(seq);
        assert!(
            seq.wrapping_sub(first) < taken && self.places[at].is_none(),
            "a token is staged once, in the ring it is from"
        );
        self.places[at] = Some(ended);
        let mut ready = self.ready.get();
        while ready < taken && self.places[self.at(first.wrapping_add(ready))].is_some() {
            ready += 1;
        }
        self.ready.set(ready);
    }

    /// Returns the number of chains that can be published.
    #[inline]
    pub(super) fn ready(&self) -> u16 {
        self.ready.get()
    }

    /// Those, in order.
    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = CompletedChain> + '_ {
        let first = self.first.get();
        (0..self.ready.get()).filter_map(move |nth| self.places[self.at(first.wrapping_add(nth))])
    }

    /// The used entries that publish those: one for each run of chains written in full with the one
    /// behind them, or one for each chain. It stands where the first chain's would, and its range
    /// counts the ring descriptors that the chains take up (§2.7.9, §2.8.9).
    #[inline]
    pub(super) fn entries(
        &self,
        is_one_each: bool,
    ) -> impl Iterator<Item = (Range<u16>, CompletedChain)> + '_ {
        let (mut begin, mut end) = (0, 0);
        (1..).zip(self.iter()).filter_map(move |(nth, ended)| {
            end += ended.token.descs();
            let is_skipped = ended.is_full() && nth != self.ready() && !is_one_each;
            (!is_skipped).then(|| (mem::replace(&mut begin, end)..end, ended))
        })
    }

    /// They were published.
    #[inline]
    pub(super) fn published(&mut self) {
        self.first.add(self.ready.get());
        self.ready.set(0);
    }
}
