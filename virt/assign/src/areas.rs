//! Areas of the BARs of an assigned function: which bytes trap, and which may be a memory slot.
//!
//! A memory slot has whole pages. A page of which one byte is the MSI-X table's or the pending
//! bits' traps, registers that share it included: the table is ours, and the device's own must not
//! be seen or written. All other pages that the host lets this process map may be a slot. A trapped
//! access is answered piece by piece ([`Areas::pieces`]), since it may reach from registers into a
//! table.
//!
//! Ranges are half-open byte offsets in their BAR.

use std::ops::Range;

use pci::bars::BARS;
use pci::msix::MsixPlace;

/// Bytes of a page, the grain of memory slots.
const PAGE: u64 = 4096;

/// Destination of an access, or of a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The MSI-X table, at this offset in it.
    MsixTable(u64),
    /// The MSI-X pending-bit array, at this offset in it.
    MsixPending(u64),
    /// The device, at this offset of the BAR.
    Registers(u64),
    /// No byte of the BAR: reads as ones.
    Beyond,
}

/// Part of an access, all of it to one target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Destination of its first byte.
    pub target: Target,
    /// The bytes of the access that it is.
    pub bytes: Range<u64>,
}

#[derive(Clone, Debug, Default)]
struct Bar {
    size: u64,
    table: Option<Range<u64>>,
    pending: Option<Range<u64>>,
    slots: Vec<Range<u64>>,
}

/// Areas of one function's BARs. See the module's head.
#[derive(Clone, Debug)]
pub struct Areas {
    bars: [Bar; BARS],
}

impl Areas {
    /// The areas of the BARs that a guest sees, of these sizes (0: none), of which the host maps
    /// `mappable`, in any order and of any bounds.
    pub fn new(
        sizes: [u64; BARS],
        msix: Option<&MsixPlace>,
        mappable: &[Vec<Range<u64>>; BARS],
    ) -> Self {
        let bars = std::array::from_fn(|index| {
            let bytes = |bar: u8, range: Range<u64>| (usize::from(bar) == index).then_some(range);
            let table = msix.and_then(|at| bytes(at.table_bar, at.table_bytes()));
            let pending = msix.and_then(|at| bytes(at.pending_bar, at.pending_bytes()));
            let size = sizes[index];
            let mut slots = whole_pages(&mappable[index], size);
            for trapped in [&table, &pending].into_iter().flatten() {
                slots = without(slots, &outward(trapped));
            }
            Bar {
                size,
                table,
                pending,
                slots,
            }
        });
        Self { bars }
    }

    /// Ranges of BAR `bar` that may be memory slots: whole pages, ascending, apart. All other bytes
    /// trap.
    pub fn slots(&self, bar: u8) -> &[Range<u64>] {
        self.bars
            .get(usize::from(bar))
            .map_or(&[], |bar| &bar.slots)
    }

    /// The targets of an access of `len` bytes at `offset` of BAR `bar`, in order; at most six.
    pub fn pieces(&self, bar: u8, offset: u64, len: u64) -> impl Iterator<Item = Piece> + '_ {
        let bar = self.bars.get(usize::from(bar));
        let mut done = 0;
        std::iter::from_fn(move || {
            if done == len {
                return None;
            }
            let (target, most) = match (bar, offset.checked_add(done)) {
                (Some(bar), Some(at)) => bar.target(at),
                _ => (Target::Beyond, u64::MAX),
            };
            let bytes = done..done + most.min(len - done);
            done = bytes.end;
            Some(Piece { target, bytes })
        })
    }
}

impl Bar {
    /// Returns the target of the byte at `at`, and the number of bytes from there on, at least 1,
    /// that have the same target.
    fn target(&self, at: u64) -> (Target, u64) {
        if at >= self.size {
            return (Target::Beyond, u64::MAX);
        }
        let mut end = self.size;
        let table = self.table.as_ref().map(|range| (range, true));
        let pending = self.pending.as_ref().map(|range| (range, false));
        for (range, is_table) in [table, pending].into_iter().flatten() {
            if range.contains(&at) {
                let inside = at - range.start;
                let target = match is_table {
                    true => Target::MsixTable(inside),
                    false => Target::MsixPending(inside),
                };
                return (target, range.end.min(self.size) - at);
            }
            if range.start > at {
                end = end.min(range.start);
            }
        }
        (Target::Registers(at), end - at)
    }
}

/// The smallest range of whole pages around `range`, up to the last page of the address space.
fn outward(range: &Range<u64>) -> Range<u64> {
    let end = range.end.checked_next_multiple_of(PAGE);
    range.start & !(PAGE - 1)..end.unwrap_or(u64::MAX)
}

/// The whole pages of `ranges` below `size`, ascending, apart, those that touch joined.
fn whole_pages(ranges: &[Range<u64>], size: u64) -> Vec<Range<u64>> {
    let inward = |range: &Range<u64>| {
        let start = range.start.checked_next_multiple_of(PAGE)?;
        let end = range.end.min(size) & !(PAGE - 1);
        (start < end).then_some(start..end)
    };
    let mut pages: Vec<_> = ranges.iter().filter_map(inward).collect();
    pages.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(pages.len());
    for range in pages {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// `ranges` without the bytes of `hole`.
fn without(ranges: Vec<Range<u64>>, hole: &Range<u64>) -> Vec<Range<u64>> {
    let cut = |range: Range<u64>| {
        let before = range.start..range.end.min(hole.start);
        let behind = range.start.max(hole.end)..range.end;
        [before, behind]
            .into_iter()
            .filter(|part| part.start < part.end)
    };
    ranges.into_iter().flat_map(cut).collect()
}

#[cfg(test)]
mod tests;
