//! Two caches, one behind the other: sharing what is live in front of keeping what is idle.
//!
//! vIOMMU combines its shared and asynchronous strategies with optimistic teardown in this way: a map looks for a
//! live mapping of its page, then for an idle one; the last user's unmap leaves the mapping idle.

use alloc::sync::Arc;

use iova::IovaRange;

use super::{Batch, Counts, Expire, Key, Progress, Released, ReuseCache, RiskContract};

/// `F` for mappings in use, `B` for what `F` gives up. Only `B` has stale mappings and fills batches.
pub struct Stacked<F, B> {
    front: F,
    back: B,
}

impl<F: ReuseCache, B: ReuseCache> Stacked<F, B> {
    /// Stacks them.
    ///
    /// # Panics
    /// `front` may hold stale mappings: a batch could not say whose they are.
    pub fn new(front: F, back: B) -> Self {
        assert!(
            front.contract().max_stale == Some(0),
            "the cache in front keeps nothing that is not in use"
        );
        Self { front, back }
    }

    /// The one in front, and the one behind it.
    pub(crate) fn parts(&mut self) -> (&mut F, &mut B) {
        (&mut self.front, &mut self.back)
    }
}

impl<F: ReuseCache, B: ReuseCache> ReuseCache for Stacked<F, B> {
    #[inline]
    fn acquire(&mut self, key: Key, now_ns: u64) -> Option<IovaRange> {
        if let Some(range) = self.front.acquire(key, now_ns) {
            return Some(range);
        }
        let range = self.back.acquire(key, now_ns)?;
        self.front.adopt(key, range, now_ns);
        Some(range)
    }

    #[inline]
    fn adopt(&mut self, key: Key, range: IovaRange, now_ns: u64) {
        self.front.adopt(key, range, now_ns);
        self.back.adopt(key, range, now_ns);
    }

    #[inline]
    fn release(&mut self, key: Key, range: IovaRange, now_ns: u64, batch: &mut Batch) -> Released {
        match self.front.release(key, range, now_ns, batch) {
            Released::TearDown => self.back.release(key, range, now_ns, batch),
            other => other,
        }
    }

    fn expire(&mut self, now_ns: u64, batch: &mut Batch) -> Progress {
        self.back.expire(now_ns, batch)
    }

    fn drain(&mut self, batch: &mut Batch) -> Progress {
        self.back.drain(batch)
    }

    fn torn_down(&mut self, batch: &mut Batch, now_ns: u64) {
        self.back.torn_down(batch, now_ns);
    }

    fn expirer(&self) -> Option<Arc<dyn Expire>> {
        self.back.expirer()
    }

    fn contract(&self) -> RiskContract {
        self.front.contract().and(self.back.contract())
    }

    /// Hits of either; a miss is one of both.
    fn counts(&self) -> Counts {
        let front = self.front.counts();
        let back = self.back.counts();
        Counts {
            hits: front.hits + back.hits,
            entries: front.entries + back.entries,
            bytes: front.bytes + back.bytes,
            ..back
        }
    }
}
