//! Search of a range for mappings, for a component that repeats them for an assigned device.
//!
//! As a walk (module `walk`), a search reads the tables as they are now, keeps nothing and changes
//! nothing; each entry is read once into a local, checked, then used. The result of a search for an
//! address follows from the values that the entries over that address had when it read them.
//!
//! A search goes down from the top to the entry over the address where it stands, then along the
//! table of that entry, which costs one read each, and down again only behind the end of the table.
//! An entry that is not present ends all that it covers: a hole costs one read for each entry that
//! it takes, at the highest level that shows it.
//!
//! Tables are the guest's: they may be cyclic, shared, or outside RAM. Bound: the address only
//! grows, by at least 4 KiB for every `levels` entries read; the budget is checked each time it has
//! grown. A search thus reads at most 2 + `levels` entries past its budget.

use guest_mem::{Access, Attachment, Budget, Found, Gpa, Iova, Next, PhysMem, SourceId, Stop};

use super::walk::{
    Context, ContextKind, Entry, INTERRUPT_RANGE, WalkStop, Walker, level_shift, pte_address,
};

/// Position of a search in the tables.
#[derive(Clone, Copy, Debug)]
struct WalkPosition {
    table: Gpa,
    level: u32,
    /// R in bit 0 and W in bit 1, ANDed over the entries above this table.
    permissions: u64,
}

impl Walker {
    /// Returns the attachment of `source` while translation is on.
    pub(super) fn attachment<M: PhysMem>(&self, mem: &M, source: SourceId) -> Access<Attachment> {
        let context = self.context_silently(mem, source)?;
        Ok(match context.map(|context| (context.kind, context.did)) {
            None => Attachment::Absent,
            Some((ContextKind::PassThrough, _)) => Attachment::PassThrough,
            Some((ContextKind::Table { .. }, did)) => Attachment::Domain(u32::from(did)),
        })
    }

    /// Finds the first mapping of `source` from the first to the last address, both included.
    pub(super) fn next_mapping<M: PhysMem>(
        &self,
        mem: &M,
        source: SourceId,
        (from, last): (Iova, Iova),
        budget: &mut Budget,
    ) -> Access<Next> {
        if budget.is_spent() {
            return Ok(Next::Budget(from));
        }
        // The root entry and the context entry.
        budget.charge(2 * Budget::ENTRY);
        let Some(context) = self.context_silently(mem, source)? else {
            return Ok(Next::None);
        };
        let ContextKind::Table { root, levels } = context.kind else {
            return Ok(Next::None);
        };
        let last = last.raw().min(!context.beyond);
        if from.raw() > last {
            return Ok(Next::None);
        }
        let top = WalkPosition {
            table: root,
            level: levels,
            permissions: 3,
        };
        self.search(mem, top, (from.raw(), last), budget)
    }

    /// Searches from `from` to `last`, which lies inside the width of the tables: no address wraps.
    fn search<M: PhysMem>(
        &self,
        mem: &M,
        top: WalkPosition,
        (from, last): (u64, u64),
        budget: &mut Budget,
    ) -> Access<Next> {
        let mut at = from;
        let mut place = top;
        loop {
            let WalkPosition { table, level, .. } = place;
            budget.charge(Budget::ENTRY);
            // Log2 of the size of the hole that `at` lies in.
            let hole_shift = match mem.read_u64(pte_address(table, at, level)) {
                Ok(pte) => {
                    let permissions = place.permissions & pte;
                    match self.check(pte, level) {
                        Entry::Table(table) if permissions != 0 => {
                            place = WalkPosition {
                                table,
                                level: level - 1,
                                permissions,
                            };
                            continue;
                        }
                        Entry::Leaf(page, size) if permissions != 0 => {
                            let gpa = page.raw() | at & (size.bytes() - 1);
                            let end = last.min(at | (size.bytes() - 1));
                            if let Some((skip, len)) = usable(at, gpa, end - at + 1) {
                                return Ok(Next::Found(Found {
                                    iova: Iova::new(at + skip),
                                    gpa: Gpa::new(gpa + skip),
                                    len,
                                    can_read: permissions & 1 != 0,
                                    can_write: permissions & 2 != 0,
                                }));
                            }
                        }
                        _ => {}
                    }
                    level_shift(level)
                }
                // The hole is a result; the search that continues from `at` reads the absent table
                // first.
                Err(Stop::Pending(_)) if at > from => return Ok(Next::Budget(Iova::new(at))),
                Err(stop @ Stop::Pending(_)) => return Err(stop),
                // RAM begins and ends on a page, so the whole table is outside.
                Err(Stop::Fault(_)) => level_shift(level + 1),
            };
            let end = at | ((1 << hole_shift) - 1);
            if end >= last {
                return Ok(Next::None);
            }
            at = end + 1;
            if budget.is_spent() {
                return Ok(Next::Budget(Iova::new(at)));
            }
            let is_in_table = hole_shift == level_shift(level) && at >> hole_shift & 0x1ff != 0;
            if !is_in_table {
                place = top;
            }
        }
    }

    /// The context of `source`; `None` if each access faults.
    fn context_silently<M: PhysMem>(&self, mem: &M, source: SourceId) -> Access<Option<Context>> {
        match self.context(mem, source) {
            Ok(context) => Ok(Some(context)),
            Err(WalkStop::Pending(ticket)) => Err(Stop::Pending(ticket)),
            Err(WalkStop::Fault(_)) => Ok(None),
        }
    }
}

/// The first part of `len` bytes at `iova`, which go to `gpa`, that an access may have: bytes to
/// skip, and its length. Accesses to the interrupt range fault on either side. Leaves are aligned
/// on both sides, so a leaf that has the range on both has it at the same place.
fn usable(iova: u64, gpa: u64, len: u64) -> Option<(u64, u64)> {
    let (first, last) = INTERRUPT_RANGE;
    let touches = |start: &u64| *start <= last && *start + (len - 1) >= first;
    let Some(start) = [iova, gpa].into_iter().find(touches) else {
        return Some((0, len));
    };
    if start < first {
        return Some((0, first - start));
    }
    let skip = last + 1 - start;
    (skip < len).then(|| (skip, len - skip))
}
