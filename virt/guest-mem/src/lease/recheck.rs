//! Recheck of the leases that an invalidation concerns, in pieces, as a caller's budget lasts.
//!
//! [`LeaseTable::begin_recheck`] sets the range, [`LeaseTable::recheck`] checks as much of it as
//! the budget allows and resumes next time where it stopped, in the middle of a lease if need be.
//! Leases may begin and end between: one that has begun since was translated by the new tables, so
//! it does not matter whether it is checked.
//!
//! Leases are found by lists, one for each bucket of (device, [`LEASE_SPAN`] of IOVA), so that the
//! invalidation of a page visits the leases of a device in 2 MiB only. A lease is put into the
//! index by the first recheck after its beginning, and most leases end before that: so the index
//! adds no cost to beginning and ending. A recheck that concerns as many buckets as there are
//! leases visits all leases instead.
//!
//! Two buckets may share a list (the heads are a hash table); a visit distinguishes them.

use super::{Holder, INDEXED, LEASE_SPAN, LeaseRecord, LeaseTable, NONE, STALE};
use crate::access::{Access, Stop};
use crate::addr::{Iova, SourceId};

/// Lists: as many as half the leases of the largest table.
const HEADS: usize = 1 << 15;

/// Work budget of a recheck, in units of the caller's choice: nanoseconds, in the VT-d unit. Every
/// recheck begins with a budget above zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    limit: u64,
    spent: u64,
}

impl Budget {
    /// Cost of a visit to one lease, or of its insertion into its list.
    pub const VISIT: u64 = 5;

    /// Creates a budget that is never spent.
    pub const fn unlimited() -> Self {
        Self::new(u64::MAX)
    }

    /// Creates a budget of `limit` units.
    pub const fn new(limit: u64) -> Self {
        Self { limit, spent: 0 }
    }

    /// Charges `cost`. Work that has begun is finished, so the last charge may exceed the rest.
    #[inline]
    pub fn charge(&mut self, cost: u64) {
        self.spent = self.spent.saturating_add(cost);
    }

    /// Whether nothing new may be begun.
    #[inline]
    pub fn is_spent(&self) -> bool {
        self.spent >= self.limit
    }

    /// Returns the units charged so far.
    pub fn spent(&self) -> u64 {
        self.spent
    }
}

/// The part of a lease that is asked about: its bytes from `at` to `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte whose translation is not yet known to be unchanged. The callback that checks the
    /// translation advances it.
    pub at: u32,
    /// Behind the last byte, at most the lease's length.
    pub end: u32,
}

/// The leases that a recheck has seen, and the recheck under way.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// Slots that may hold a lease that is not in the index.
    pub(super) young: Vec<u16>,
    /// Slots of those that are, in no order.
    all: Vec<u16>,
    /// By slot.
    links: Vec<Links>,
    /// The first slot of each list, plus one; 0 of an empty one. Not made before there is a lease
    /// to put there.
    heads: Vec<u16>,
    /// First and last address that is asked about.
    range: (u64, u64),
    cursor: Cursor,
    /// The lease that was not finished, and how far it holds.
    partial: Option<(u32, u32)>,
    /// Leases visited, put into the index, or passed over since the table was made.
    visits: u64,
}

/// Links of a slot in the index.
#[derive(Clone, Copy, Debug, Default)]
struct Links {
    next: u16,
    previous: u16,
    /// In [`Index::all`].
    position: u16,
}

#[derive(Clone, Copy, Debug, Default)]
enum Cursor {
    #[default]
    Done,
    /// First, the young ones are put into the index.
    Young,
    /// Those of [`Index::all`] below this position, from the last to the first. Whenever a lease
    /// ends, another moves to a lower position only, so none is passed over.
    All(usize),
    /// The list of this holder (an index) and bucket, from this slot on.
    List(usize, u64, u16),
}

/// Returns the number of a bucket's list.
fn head_of(source: SourceId, bucket: u64) -> usize {
    // A multiplicative hash (2^64 divided by the golden ratio): its high bits depend on all of the
    // key's.
    let hash = (bucket << 16 | u64::from(source.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash >> 32) as usize % HEADS
}

impl LeaseTable {
    /// Begins a recheck of all leases, or of their parts between two addresses (the first and the
    /// last). A former recheck is abandoned. [`recheck`](Self::recheck) does the work.
    pub fn begin_recheck(&mut self, range: Option<(Iova, Iova)>) {
        let index = &mut self.index;
        index.partial = None;
        index.range = range.map_or((0, u64::MAX), |(first, last)| (first.raw(), last.raw()));
        index.cursor = Cursor::Young;
    }

    /// Whether a recheck could find anything: false means that no lease is in flight.
    #[inline]
    pub fn has_any(&self) -> bool {
        !self.index.young.is_empty() || !self.index.all.is_empty()
    }

    /// Continues the recheck that was begun, if one was, for the devices that `select` picks,
    /// while `budget` lasts; true when it is done. A lease whose translation no longer holds is
    /// marked as stale. Once stale, always stale: a page that was unmapped and mapped again to the
    /// same place has still been through a revocation.
    ///
    /// `holds` checks a part of a lease: it advances [`Part::at`] as far as the translation is
    /// unchanged, and returns false where it differs. It charges the budget for its work, and may
    /// stop when that is spent. A [`Stop::Fault`] of `holds` means that the translation is gone:
    /// stale. A [`Stop::Pending`] is returned at once; when the ticket completes, the recheck
    /// continues with the same lease.
    pub fn recheck(
        &mut self,
        budget: &mut Budget,
        select: impl Fn(SourceId) -> bool,
        mut holds: impl FnMut(&LeaseRecord, &mut Part, &mut Budget) -> Access<bool>,
    ) -> Access<bool> {
        loop {
            if matches!(self.index.cursor, Cursor::Done) {
                return Ok(true);
            }
            if budget.is_spent() {
                return Ok(false);
            }
            budget.charge(Budget::VISIT);
            self.index.visits += 1;
            let (first, last) = self.index.range;
            let (first, last) = (first / LEASE_SPAN, last / LEASE_SPAN);
            self.index.cursor = match self.index.cursor {
                Cursor::Done => Cursor::Done,
                Cursor::Young => match self.index.young.pop() {
                    Some(number) => {
                        self.insert(number);
                        Cursor::Young
                    }
                    None => {
                        let lists = (last - first + 1).saturating_mul(self.holders.len() as u64);
                        match lists < self.index.all.len() as u64 {
                            true => self.first_list(0, &select),
                            false => Cursor::All(self.index.all.len()),
                        }
                    }
                },
                Cursor::All(left) => match left.min(self.index.all.len()).checked_sub(1) {
                    Some(at) => {
                        let number = self.index.all[at];
                        let source = SourceId(self.slots[usize::from(number)].source);
                        let is_done = !select(source) || self.visit(number, budget, &mut holds)?;
                        Cursor::All(if is_done { at } else { at + 1 })
                    }
                    None => Cursor::Done,
                },
                Cursor::List(holder, bucket, NONE) if bucket < last => {
                    self.list(holder, bucket + 1)
                }
                Cursor::List(holder, _, NONE) => self.first_list(holder + 1, &select),
                Cursor::List(holder, bucket, number) => {
                    let slot = &self.slots[usize::from(number)];
                    let is_meant = SourceId(slot.source) == self.holders[holder].source
                        && slot.iova / LEASE_SPAN == bucket;
                    let is_done = !is_meant || self.visit(number, budget, &mut holds)?;
                    match is_done {
                        true => {
                            let next = self.index.links[usize::from(number)].next;
                            Cursor::List(holder, bucket, next)
                        }
                        false => self.index.cursor,
                    }
                }
            };
        }
    }

    /// A whole recheck, of all devices, at once: for tables that neither wait nor are long.
    pub fn recheck_now(
        &mut self,
        range: Option<(Iova, Iova)>,
        holds: impl Fn(&LeaseRecord) -> bool,
    ) {
        self.begin_recheck(range);
        let answer = self.recheck(
            &mut Budget::unlimited(),
            |_| true,
            |lease, part, _| {
                part.at = part.end;
                Ok(holds(lease))
            },
        );
        assert_eq!(answer, Ok(true), "never waits, and has no bound");
    }

    /// Returns the number of leases that rechecks have visited or passed over, and of slots that
    /// they have put into the index, since the table was made.
    pub fn visits(&self) -> u64 {
        self.index.visits
    }

    /// Visits one lease; returns true when it is done.
    fn visit(
        &mut self,
        number: u16,
        budget: &mut Budget,
        holds: &mut impl FnMut(&LeaseRecord, &mut Part, &mut Budget) -> Access<bool>,
    ) -> Access<bool> {
        let slot = &mut self.slots[usize::from(number)];
        let index = &mut self.index;
        let last = slot.iova + u64::from(slot.len - 1);
        let (first_asked, last_asked) = index.range;
        if slot.notes & STALE != 0 || slot.iova > last_asked || first_asked > last {
            return Ok(true);
        }
        // Both inside the lease, whose length has 32 bits.
        let mut part = Part {
            at: first_asked.saturating_sub(slot.iova) as u32,
            end: (last_asked.min(last) - slot.iova) as u32 + 1,
        };
        if let Some((id, at)) = index.partial.take()
            && id == slot.id
        {
            part.at = at;
        }
        let answer = holds(&slot.record(), &mut part, budget);
        match answer {
            Ok(true) if part.at >= part.end => return Ok(true),
            Ok(true) => {
                index.partial = Some((slot.id, part.at));
                return Ok(false);
            }
            Err(pending @ Stop::Pending(_)) => {
                index.partial = Some((slot.id, part.at));
                return Err(pending);
            }
            Ok(false) | Err(Stop::Fault(_)) => {}
        }
        slot.notes |= STALE;
        self.stale += 1;
        Ok(true)
    }

    /// The first list of the first holder from this one on that is to be asked about.
    fn first_list(&self, from: usize, select: &impl Fn(SourceId) -> bool) -> Cursor {
        let mut holders = (from..).zip(self.holders.iter().skip(from));
        let is_asked = |holder: &Holder| holder.indexed != 0 && select(holder.source);
        match holders.find(|(_, holder)| is_asked(holder)) {
            Some((holder, _)) => self.list(holder, self.index.range.0 / LEASE_SPAN),
            None => Cursor::Done,
        }
    }

    fn list(&self, holder: usize, bucket: u64) -> Cursor {
        let head = head_of(self.holders[holder].source, bucket);
        Cursor::List(holder, bucket, self.index.heads[head].wrapping_sub(1))
    }

    /// Puts the lease in a young slot into the index, if there is one.
    fn insert(&mut self, number: u16) {
        let slot = &mut self.slots[usize::from(number)];
        slot.is_young = false;
        if !slot.is_live() {
            return;
        }
        slot.notes |= INDEXED;
        let (source, bucket) = (SourceId(slot.source), slot.iova / LEASE_SPAN);
        let holder = self.holder(source);
        self.holders[holder].indexed += 1;
        let index = &mut self.index;
        if index.heads.is_empty() {
            index.heads = vec![0; HEADS];
        }
        if index.links.len() <= usize::from(number) {
            index.links.resize(self.made, Links::default());
        }
        let head = head_of(source, bucket);
        let next = index.heads[head].wrapping_sub(1);
        // Below 65,535, the number of none.
        index.heads[head] = number + 1;
        index.links[usize::from(number)] = Links {
            next,
            previous: NONE,
            position: index.all.len() as u16,
        };
        if next != NONE {
            index.links[usize::from(next)].previous = number;
        }
        index.all.push(number);
    }

    /// Takes a lease out of the index.
    pub(super) fn remove(&mut self, number: u16) {
        let slot = &self.slots[usize::from(number)];
        let (source, bucket) = (SourceId(slot.source), slot.iova / LEASE_SPAN);
        let holder = self.holder(source);
        self.holders[holder].indexed -= 1;
        let index = &mut self.index;
        let own = index.links[usize::from(number)];
        if own.next != NONE {
            index.links[usize::from(own.next)].previous = own.previous;
        }
        match own.previous {
            NONE => index.heads[head_of(source, bucket)] = own.next.wrapping_add(1),
            previous => index.links[usize::from(previous)].next = own.next,
        }
        if let Cursor::List(_, _, at) = &mut index.cursor
            && *at == number
        {
            *at = own.next;
        }
        index.all.swap_remove(usize::from(own.position));
        if let Some(&moved) = index.all.get(usize::from(own.position)) {
            index.links[usize::from(moved)].position = own.position;
        }
    }
}
