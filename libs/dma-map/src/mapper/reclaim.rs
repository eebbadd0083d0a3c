//! Giving table pages back: chunks that the allocator retires lose their leaf table.
//!
//! ```text
//! allocator: retire() ─▶ chunk, nothing allocated in it      table: retire_leaf ─▶ page out of the tree
//!        ▲                                                              │ quarantine: devices may still walk it
//!        └── recycle ◀── release(page) ◀── a domain-wide invalidation that began after it is complete
//! ```
//! The chunk stays out of circulation until its page is released, so that nobody walks there meanwhile. The
//! invalidation is the one that the queue of unmapped mappings waits for anyway; strict policies, which have none,
//! pay one for up to [`CHUNKS`] chunks. Done on cold paths: after a queue was emptied, after every 512
//! strict unmaps, when a core parks, when the space or the table memory is exhausted.
#![expect(
    unsafe_code,
    reason = "calls the table's retire_leaf and release, whose conditions are argued below"
)]

use alloc::collections::VecDeque;

use iova::{CoreAllocator, IovaAllocator, IovaRange, RetiredChunk};
use lines::Ordering;

use super::MapperCore;
use super::shared::Orphan;
use crate::clock::Clock;
use crate::invalidate::Invalidator;
use crate::io_map::IoMap;
use crate::table::{PageTable, RetiredTable};

/// Most chunks of a core that are out of circulation.
const CHUNKS: usize = 16;
/// Strict unmaps between two looks for empty chunks.
const LOOK_EVERY: u32 = 512;

/// What a mapper that gives tables back calls of its [`PageTable`]: on cold paths only, so that all others ask no more of a
/// back end than an [`IoMap`].
pub(super) struct Reclaim<T> {
    retire_leaf: unsafe fn(&T, IovaRange) -> Option<RetiredTable>,
    release: unsafe fn(&T, RetiredTable),
}

impl<T: PageTable> Reclaim<T> {
    pub(super) const NEW: Self = Self {
        retire_leaf: T::retire_leaf,
        release: T::release,
    };
}

/// Chunks without a table that devices may still walk.
pub(super) struct Quarantine {
    chunks: VecDeque<(RetiredChunk, RetiredTable)>,
    /// Number of the first: how many were let go, ever.
    first: u64,
}

impl Quarantine {
    /// An empty one, whose first chunk is number `first`.
    pub(super) fn new(first: u64) -> Self {
        Self {
            chunks: VecDeque::new(),
            first,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = (RetiredChunk, RetiredTable)> + '_ {
        self.first += self.chunks.len() as u64;
        self.chunks.drain(..)
    }
}

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// One more mapping was freed by a strict unmap.
    #[inline]
    pub(super) fn count_freed(&mut self) {
        self.freed += 1;
        if self.freed >= LOOK_EVERY {
            self.retire_chunks();
            self.close_quarantine();
        }
    }

    /// Takes chunks out of circulation and their tables out of the tree.
    #[cold]
    pub(super) fn retire_chunks(&mut self) {
        self.freed = 0;
        let shared = &*self.shared;
        let Some(reclaim) = &shared.reclaim else {
            return;
        };
        // The allocator may give a chunk without a table again and again: so many looks, no more.
        for _ in 0..CHUNKS {
            if self.quarantine.chunks.len() >= CHUNKS {
                return;
            }
            let Some(chunk) = self.alloc.retire() else {
                return;
            };
            // SAFETY: nothing is allocated in a retired chunk, so no core maps, unmaps or looks up there (each does so
            // only with the range allocated or pinned), until `recycle`, which follows `release`. That the
            // allocator keeps to this, and that nobody else uses the table, `new_reclaiming` demands.
            let Some(table) = (unsafe { (reclaim.retire_leaf)(&shared.table, chunk.range()) })
            else {
                self.alloc.recycle(chunk);
                continue;
            };
            let line = &shared.lines[self.core].owner;
            if self.quarantine.chunks.is_empty() {
                line.retired_ns
                    .store(shared.clock.coarse(), Ordering::Relaxed);
            }
            self.quarantine.chunks.push_back((chunk, table));
            let retired = self.quarantine.first + self.quarantine.chunks.len() as u64;
            // Release: a flush that notes it comes after the table was taken out.
            line.retired.store(retired, Ordering::Release);
        }
    }

    /// Flushes for the quarantine. Where that fails, the next flush of anybody covers it.
    pub(super) fn close_quarantine(&mut self) {
        if self.quarantine.is_empty() {
            return;
        }
        let shared = &*self.shared;
        let line = &shared.lines[self.core];
        let target = line.owner.retired.load(Ordering::Relaxed);
        let is_open = || line.flusher.retired_covered.load(Ordering::Acquire) < target;
        if shared.flush_if(is_open).is_ok() {
            self.release_covered();
        }
    }

    /// Gives back the pages and chunks that a flush has covered.
    pub(super) fn release_covered(&mut self) {
        let line = &self.shared.lines[self.core].flusher;
        // Acquire: pairs with the flusher's Release store after the invalidation.
        let covered = line.retired_covered.load(Ordering::Acquire);
        while self.quarantine.first < covered {
            let Some((chunk, table)) = self.quarantine.chunks.pop_front() else {
                return;
            };
            self.quarantine.first += 1;
            self.release(chunk, table);
        }
    }

    fn release(&mut self, chunk: RetiredChunk, table: RetiredTable) {
        let reclaim = self.shared.reclaim.as_ref();
        let reclaim = reclaim.expect("a mapper that retired a table gives tables back");
        // SAFETY: a flush noted this chunk's number after `retire_leaf` had returned (Release and Acquire on
        // `retired`), then submitted a domain-wide invalidation, which drops page-walk caches too, and has
        // published its completion. Orphans come here after such a flush as well. No device holds the page.
        unsafe { (reclaim.release)(&self.shared.table, table) };
        self.alloc.recycle(chunk);
    }

    /// Takes over what other cores could not give back, where a flush has covered it since.
    pub(super) fn adopt_orphans(&mut self) {
        let mut orphans = self.shared.orphans.lock();
        self.shared.has_orphans.store(false, Ordering::Relaxed);
        let safe = core::mem::take(&mut orphans.safe);
        drop(orphans);
        for orphan in safe {
            match orphan {
                Orphan::Mapping(pinned, _) => self.alloc.free_pinned(pinned),
                Orphan::Chunk(chunk, table, _) => self.release(chunk, table),
            }
        }
    }
}
