//! Mapping and unmapping: what the calls of [`IoMap`] do to the tree.
//!
//! A call for one page walks to its leaf table, looks at the entry and stores it: that is the whole
//! of [`map`](IoMap::map) and [`unmap`](IoMap::unmap) where nothing is wrong, and it is inlined.
//! Everything else, errors among it, goes out of line and begins again from the arguments:
//! 1. look at every entry of the range, change nothing, count the tables that are missing;
//! 2. allocate those;
//! 3. install them and store the leaves.
//!
//! So an error finds nothing changed, and what one call takes is bounded ([`MAX_TABLES`]). Steps 1
//! and 3 go from [`Part`] to part: they walk once to each leaf table of 512 pages, from the lowest
//! table that leads to all of the range, and not at all below an entry that is empty (1) or becomes
//! a large leaf.

use core::convert::Infallible;

use address::{Iova, PAGE_SHIFT, PAGE_SIZE, PhysAddr};
use iova::{Access, IovaPfn, IovaRange};

use super::format::{Format, INDEX_BITS, Leaf, PHYS_BITS, entry_pages};
use super::memory::TableMemory;
use super::tree::{IoPageTable, Node};
use super::{IoMap, MapError, Translation, UnmapError};

/// Most table pages that one call adds: 64 MiB, which map 32 GiB in pages of 4 KiB.
const MAX_TABLES: u64 = 1 << 14;

/// Pages that lie in one leaf table, or behind one entry above that leads to no table: to a leaf,
/// which is given, or nowhere. That table, that leaf, the first page and the last.
type Part<'t, F, M> = (Node<'t, F, M>, Option<Leaf>, u64, u64);

/// The parts of pages `first` to `last`, to all of which `top` leads, each as it is when it is
/// asked for.
fn parts<F: Format, M: TableMemory>(
    top: Node<'_, F, M>,
    first: u64,
    last: u64,
) -> impl Iterator<Item = Part<'_, F, M>> {
    let mut next = first;
    core::iter::from_fn(move || {
        let first = next;
        if first > last {
            return None;
        }
        let (node, leaf) = top.walk(first);
        // A leaf table is all that one entry of the level above stands for.
        let pages = entry_pages(node.level.max(2));
        let last = last.min(first | (pages - 1));
        next = last + 1;
        Some((node, leaf, first, last))
    })
}

/// Tables needed below an empty entry of a table at `level` for its pages `first` to `last`, where
/// whole entries of tables up to level `leaf_level` become leaves.
fn missing(level: u32, leaf_level: u32, first: u64, last: u64) -> u64 {
    let at = |below: u32| {
        let shift = INDEX_BITS * below;
        let (tables, last) = ((last >> shift) + 1 - (first >> shift), last + 1);
        let whole = (last >> shift).saturating_sub((first + (1 << shift) - 1) >> shift);
        // The entry above a table that is needed whole becomes a leaf instead.
        tables - if below < leaf_level { whole } else { 0 }
    };
    (1..level).map(at).sum()
}

#[cold]
fn already_mapped(page: u64, level: u32) -> MapError {
    MapError::AlreadyMapped {
        iova: IovaPfn::new(page).start(),
        leaf_pages: entry_pages(level),
    }
}

#[cold]
fn not_mapped(page: u64) -> UnmapError {
    let iova = IovaPfn::new(page).start();
    UnmapError::NotMapped { iova }
}

/// Whether an address is that of a page, and an entry can hold it.
#[inline]
fn is_page(phys: PhysAddr) -> bool {
    phys.raw() & ((PAGE_SIZE - 1) | !(u64::MAX >> (64 - PHYS_BITS))) == 0
}

impl<F: Format, M: TableMemory> IoPageTable<F, M> {
    /// Maps pages of one leaf table, if that is there and they are not mapped.
    #[inline]
    fn map_in_leaf_table(&self, range: IovaRange, phys: PhysAddr, access: Access) -> bool {
        let (first, last) = (range.first().raw(), range.last().raw());
        let leaf = self.leaf_table(first, last);
        let leaf = leaf.filter(|leaf| leaf.find(first, last, true).is_none());
        leaf.inspect(|leaf| leaf.store(first, last, phys, access))
            .is_some()
    }

    /// Unmaps pages of one leaf table, if that is there and they are mapped.
    #[inline]
    fn unmap_in_leaf_table(&self, range: IovaRange) -> bool {
        let (first, last) = (range.first().raw(), range.last().raw());
        let leaf = self.leaf_table(first, last);
        let leaf = leaf.filter(|leaf| leaf.find(first, last, false).is_none());
        leaf.inspect(|leaf| leaf.clear(first, last)).is_some()
    }

    #[inline(never)]
    fn map_range(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError> {
        let (start, end) = (range.first().raw(), range.last().raw());
        if !self.translates(end) {
            let width = self.width();
            return Err(MapError::IovaTooWide { range, width });
        }
        if !phys.is_aligned(PAGE_SIZE) {
            return Err(MapError::PhysMisaligned { phys });
        }
        let last = range.len().and_then(|len| phys.checked_add(len - 1));
        if last.is_none_or(|last| last.raw() >> PHYS_BITS != 0) {
            return Err(MapError::PhysTooWide {
                phys,
                pages: range.pages(),
                width: PHYS_BITS,
            });
        }
        // Nothing overflows from here on.
        if self.map_in_leaf_table(range, phys, access) {
            return Ok(());
        }
        let phys_of = |page: u64| PhysAddr::new(phys.raw() + ((page - start) << PAGE_SHIFT));
        let is_aligned =
            |level: &u32| (start ^ phys.raw() >> PAGE_SHIFT).is_multiple_of(entry_pages(*level));
        let leaf_level = (1..=1 + self.leaves.0).rev().find(is_aligned).unwrap_or(1);

        let top = self.top().lowest(start, end, 1);
        let mut tables = 0;
        for (node, leaf, first, last) in parts(top, start, end) {
            let level = node.level;
            let mapped = match leaf {
                _ if level == 1 => node.find(first, last, true),
                Some(_) => Some(first),
                None => {
                    tables += missing(level, leaf_level, first, last);
                    None
                }
            };
            if let Some(page) = mapped {
                return Err(already_mapped(page, level));
            }
        }
        if tables > MAX_TABLES {
            let max = MAX_TABLES;
            return Err(MapError::TooManyTables { tables, max });
        }
        let reserve = self.reserve(tables);
        let mut reserve = reserve.ok_or(MapError::OutOfTables { tables })?;
        let mut next = start;
        // Errors from here on only where others map what they do not own.
        while let Some((node, leaf, first, last)) = parts(top, next, end).next() {
            let (level, phys) = (node.level, phys_of(first));
            let is_leaf = level <= leaf_level && last - first == entry_pages(level) - 1;
            next = last + 1;
            match leaf {
                _ if level == 1 => node.store(first, last, phys, access),
                None if is_leaf && node.swap(first, None, Some(Leaf { phys, access })) => {}
                None if !is_leaf && node.install(first, &mut reserve) => next = first,
                None if !is_leaf => return Err(MapError::OutOfTables { tables: 1 }),
                _ => return Err(already_mapped(first, level)),
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn unmap_range(&self, range: IovaRange) -> Result<(), UnmapError> {
        let (start, end) = (range.first().raw(), range.last().raw());
        if !self.translates(end) {
            let width = self.width();
            return Err(UnmapError::IovaTooWide { range, width });
        }
        if self.unmap_in_leaf_table(range) {
            return Ok(());
        }
        let top = self.top().lowest(start, end, 1);
        for (node, leaf, first, last) in parts(top, start, end) {
            let leaf_pages = entry_pages(node.level);
            let unmapped = match leaf {
                _ if node.level == 1 => node.find(first, last, false),
                None => Some(first),
                Some(_) if last - first == leaf_pages - 1 => None,
                Some(_) => {
                    let iova = IovaPfn::new(first).start();
                    return Err(UnmapError::InsideHugeLeaf { iova, leaf_pages });
                }
            };
            if let Some(page) = unmapped {
                return Err(not_mapped(page));
            }
        }
        let mut cleared = Ok(());
        for (node, leaf, first, last) in parts(top, start, end) {
            if node.level == 1 {
                node.clear(first, last);
            } else if leaf.is_none() || !node.swap(first, leaf, None) {
                // Others have unmapped what they do not own: a large leaf is not there any more.
                cleared = cleared.and(Err(not_mapped(first)));
            }
        }
        cleared
    }
}

impl<F: Format, M: TableMemory> IoMap for IoPageTable<F, M> {
    type Error = Infallible;

    #[inline]
    fn map(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError> {
        if range.pages() == 1 && is_page(phys) && self.map_in_leaf_table(range, phys, access) {
            return Ok(());
        }
        self.map_range(range, phys, access)
    }

    #[inline]
    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError> {
        if range.pages() == 1 && self.unmap_in_leaf_table(range) {
            return Ok(());
        }
        self.unmap_range(range)
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let page = IovaPfn::of(iova).raw();
        let top = self.translates(page).then(|| self.top())?;
        let (node, leaf) = top.walk(page);
        let (Leaf { phys, access }, leaf_pages) = (leaf?, entry_pages(node.level));
        Some(Translation {
            phys: phys.checked_add(iova.offset_in(leaf_pages << PAGE_SHIFT))?,
            access,
            leaf_pages,
        })
    }
}
