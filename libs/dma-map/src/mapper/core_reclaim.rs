//! Giving table pages back: chunks that the allocator retires lose their leaf table.
//!
//! ```text
//! allocator: retire() ─▶ chunk, nothing allocated in it  table: retire_leaf ─▶ page out of tree
//!    ▲                                                           │ quarantine: devices may walk it
//!    └─ recycle ◀─ release(page) ◀─ a domain-wide invalidation that began after it is complete
//! ```
//! The chunk stays out of circulation until its page is released, so that no core maps there
//! meanwhile. One invalidation, begun after the last was taken out, is enough for any number of
//! chunks: the one that the queue of unmapped mappings waits for anyway; strict policies, which
//! have none, pay one for [`CHUNKS`] chunks. Done on cold paths, each time for a bounded number of
//! chunks: after a queue was emptied, after every 512 unmaps that wait for no queue, after an unmap
//! of whole chunks for as many. (Whole chunks that were mapped by large leaves have no table, and
//! are freed at once.) When a core parks, when the space or the table memory is exhausted, without
//! a bound: nothing remains.
//!
//! A [`walk`](MapperCore::walk) under addresses that are not the core's is noted on the core's
//! line, and no page is released while one that began before may still be there (`walks.rs`).
//!
//! Left out: tables above the leaf tables, of which there is at most one for each GiB that was ever
//! used. Only an allocator that has all of a GiB out of circulation could promise that no core
//! walks there.
#![expect(
    unsafe_code,
    reason = "calls the table's retire_leaf and release, whose conditions are argued below"
)]

use alloc::vec::Vec;

use address::{Iova, PhysAddr};
use iova::{Access, CoreAllocator, IovaAllocator, Pinned, RetiredChunk};
use lines::Ordering;

use super::MapperCore;
use super::reclaim::Reclaim;
use super::shared::{AbandonedWork, Shared};
use crate::clock::Clock;
use crate::invalidate::Invalidator;
use crate::table::{IoMap, RetiredTable, Translation};

/// Most attempts to retire an empty chunk that an unmap makes beyond those for chunks it has
/// emptied itself, and most chunks that wait for an invalidation before one is carried out for
/// them. A core that parks has no such bound.
pub(super) const CHUNKS: usize = 16;
/// Unmaps that wait for no queue between two searches for empty chunks.
const LOOK_EVERY: u32 = 512;

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Frees a mapping that did not wait for a flush of the queue.
    #[inline]
    pub(super) fn free(&mut self, pinned: Pinned) {
        let Shared { reclaim, table, .. } = &*self.shared;
        let mut looks = 0;
        Reclaim::free(reclaim.as_ref(), table, &mut self.alloc, pinned, &mut looks);
        self.freed += 1;
        if self.freed >= LOOK_EVERY {
            self.freed = 0;
            self.retire_chunks(CHUNKS);
            self.close_quarantine();
        }
        if looks > 0 {
            self.retire_chunks(looks);
            if self.quarantine.len() >= CHUNKS {
                self.close_quarantine();
            }
        }
    }

    /// Takes chunks out of circulation and their tables out of the tree, after at most `looks` for
    /// them.
    #[inline(never)]
    pub(super) fn retire_chunks(&mut self, looks: usize) {
        let shared = &*self.shared;
        let Some(reclaim) = &shared.reclaim else {
            return;
        };
        let (line, chunks) = (&self.line.owner, &mut self.quarantine);
        for _ in 0..looks {
            // Without memory for it the chunk is left for the next time.
            if chunks.len() >= looks.max(CHUNKS) || chunks.try_reserve(1).is_err() {
                return;
            }
            let Some(chunk) = self.alloc.retire() else {
                return;
            };
            // SAFETY: nothing is allocated in a retired chunk, so no core maps or unmaps there
            // (each does so only with the range allocated or pinned), until `recycle`, which
            // follows `release`. That the allocator keeps to this, and that the table has no other
            // user, `new_reclaiming` demands. A `translate` may walk there: `release` waits for it.
            let Some(table) = (unsafe { (reclaim.retire_leaf)(&shared.table, chunk.range()) })
            else {
                self.alloc.recycle(chunk);
                continue;
            };
            if chunks.is_empty() {
                line.retired_ns
                    .store(shared.clock.coarse(), Ordering::Relaxed);
            }
            chunks.push_back((chunk, table));
            // Release: a flush that notes it comes after the table was taken out.
            let retired = line.retired.load(Ordering::Relaxed) + 1;
            line.retired.store(retired, Ordering::Release);
        }
    }

    /// Flushes for the quarantine. Where that fails, the next flush of any core covers it.
    pub(super) fn close_quarantine(&mut self) {
        if self.quarantine.is_empty() {
            return;
        }
        let (shared, line) = (&self.shared, &self.line);
        let target = line.owner.retired.load(Ordering::Relaxed);
        let is_open = || line.flusher.retired_covered.load(Ordering::Acquire) < target;
        if shared.flush_if(is_open).is_ok() {
            self.release_covered();
        }
    }

    /// Gives back the pages and chunks that a flush has covered, unless a core is in the middle of
    /// a walk.
    pub(super) fn release_covered(&mut self) {
        let retired = self.line.owner.retired.load(Ordering::Relaxed);
        // Acquire: pairs with the flusher's Release store after the invalidation.
        let covered = self.line.flusher.retired_covered.load(Ordering::Acquire);
        // Their numbers are those up to `retired`.
        let open = retired.saturating_sub(covered) as usize;
        if self.quarantine.len() <= open || !self.shared.are_walks_over() {
            return;
        }
        while self.quarantine.len() > open
            && let Some((chunk, table)) = self.quarantine.pop_front()
        {
            self.release(chunk, table);
        }
    }

    fn release(&mut self, chunk: RetiredChunk, table: RetiredTable) {
        let reclaim = self.shared.reclaim.as_ref();
        let reclaim = reclaim.expect("a mapper that retired a table gives tables back");
        // SAFETY: a flush noted this chunk's number after `retire_leaf` had returned (Release and
        // Acquire on `retired`), then submitted a domain-wide invalidation, which drops page-walk
        // caches too, and has published its completion. What dropped cores have left comes here
        // after such a flush as well. No device holds the page. No core walks it: the caller has
        // seen, after that, that all walks which could find it are over.
        unsafe { (reclaim.release)(&self.shared.table, table) };
        self.alloc.recycle(chunk);
    }

    /// Frees what dropped cores could not give back, where a flush has covered it since.
    pub(super) fn free_abandoned(&mut self) {
        let mut abandoned = self.shared.abandoned.lock();
        self.shared.has_orphans.store(false, Ordering::Relaxed);
        let safe = core::mem::take(&mut abandoned.safe);
        drop(abandoned);
        let (mut are_walks_over, mut left) = (None, Vec::new());
        for deferred in safe {
            match deferred {
                AbandonedWork::Mapping(pinned, _) => self.alloc.free_pinned(pinned),
                // Asked after they were taken: a walk that began before one of the tables was taken
                // out is seen.
                AbandonedWork::Chunk(chunk, table, _)
                    if *are_walks_over.get_or_insert_with(|| self.shared.are_walks_over()) =>
                {
                    self.release(chunk, table);
                }
                chunk @ AbandonedWork::Chunk(..) => left.push(chunk),
            }
        }
        if !left.is_empty() {
            // The next core that comes here tries again.
            self.shared.abandoned.lock().safe.append(&mut left);
            self.shared.has_orphans.store(true, Ordering::Relaxed);
        }
    }
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Returns where a device's access to `iova` goes now, whichever core has mapped it; `None`
    /// where nothing is mapped. Without translation every address goes to itself.
    ///
    /// Mappings that the policy keeps after their unmap, idle, are found as by a device. So an
    /// emulated device takes its translations from a mapper that tears down at once
    /// ([`Policy::STRICT`](super::Policy::STRICT), `STRICT_COMBINING`, `SHARED`; what `DEFERRED`
    /// and `ASYNC` clear is not found either): under an optimistic policy it would reach memory
    /// that was unmapped.
    ///
    /// The address need not be this core's: others may map and unmap there, and give tables back,
    /// at the same time. Then the answer is what was true at some moment of the call, and the user
    /// of the memory must know that it is still mapped. Costs a fence and the walk, pins nothing
    /// and waits for no other core; tables are not given back while it lasts.
    pub fn translate(&mut self, iova: Iova) -> Option<Translation> {
        if self.shared.policy.is_off {
            return Some(Translation {
                phys: PhysAddr::new(iova.raw()),
                access: Access::ReadWrite,
                leaf_pages: 1,
            });
        }
        self.walk(|table| table.lookup(iova))
    }

    /// Looks up addresses that this core neither has allocated nor pinned.
    pub(super) fn walk<R>(&mut self, walk: impl FnOnce(&T) -> R) -> R {
        self.line.walks.during(|| walk(&self.shared.table))
    }
}
