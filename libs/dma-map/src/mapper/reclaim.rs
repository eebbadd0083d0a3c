//! The calls of a [`PageTable`] that a mapper which gives table pages back makes.

use iova::{CHUNK_PAGES, CoreAllocator, IovaPfn, IovaRange, Pinned};

use crate::table::{PageTable, RetiredTable};

/// What a mapper that gives tables back calls of its [`PageTable`]: on cold paths only, so that all
/// others ask no more of a back end than an [`IoMap`].
pub(super) struct Reclaim<T> {
    has_table: fn(&T, IovaRange) -> bool,
    /// [`PageTable::retire_leaf`], with its conditions.
    pub(super) retire_leaf: unsafe fn(&T, IovaRange) -> Option<RetiredTable>,
    /// [`PageTable::release`], with its conditions.
    pub(super) release: unsafe fn(&T, RetiredTable),
}

impl<T> Reclaim<T> {
    /// Frees what no device reaches; adds for how many chunks it is worth to look.
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
