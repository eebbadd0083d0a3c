//! Calls of a [`PageTable`] by a mapper that gives table pages back.

use iova::{CHUNK_PAGES, CoreAllocator, IovaPfn, IovaRange, Pinned};

use crate::table::{PageTable, RetiredTable};

/// Functions of a [`PageTable`] that a mapper that gives tables back calls. They are called on cold
/// paths only, so that all others require no more of a back end than [`IoMap`].
pub(super) struct Reclaim<T> {
    has_table: fn(&T, IovaRange) -> bool,
    /// [`PageTable::retire_leaf`], with its conditions.
    pub(super) retire_leaf: unsafe fn(&T, IovaRange) -> Option<RetiredTable>,
    /// [`PageTable::release`], with its conditions.
    pub(super) release: unsafe fn(&T, RetiredTable),
}

impl<T> Reclaim<T> {
    /// Frees pages that no device reaches. Adds the number of chunks to consider for retirement.
    #[inline(always)]
    pub(super) fn free<A: CoreAllocator>(
        reclaim: Option<&Self>,
        table: &T,
        alloc: &mut A,
        pinned: Pinned,
        looks: &mut usize,
    ) {
        match reclaim {
            Some(reclaim) if pinned.range().pages() >= CHUNK_PAGES => {
                *looks += reclaim.free_chunks(table, alloc, pinned);
            }
            _ => alloc.free_pinned(pinned),
        }
    }

    #[cold]
    fn free_chunks<A: CoreAllocator>(&self, table: &T, alloc: &mut A, pinned: Pinned) -> usize {
        let range = pinned.range();
        // The pin is ours, so no table comes or goes here.
        let starts = (range.first().raw()..=range.last().raw()).step_by(CHUNK_PAGES as usize);
        let chunks = starts.filter_map(|at| IovaRange::new(IovaPfn::new(at), CHUNK_PAGES));
        let looks = chunks
            .filter(|chunk| (self.has_table)(table, *chunk))
            .count();
        match looks {
            0 => alloc.free_without_table(pinned),
            _ => alloc.free_pinned(pinned),
        }
        looks
    }
}

impl<T: PageTable> Reclaim<T> {
    pub(super) const NEW: Self = Self {
        has_table: T::has_table,
        retire_leaf: T::retire_leaf,
        release: T::release,
    };
}
