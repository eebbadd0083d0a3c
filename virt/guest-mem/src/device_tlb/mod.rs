//! Device IOTLB: translations that another process's IOMMU has handed out, and misses.
//!
//! A vhost-user back end behind a vIOMMU sees no page tables. It sends a *miss* for an address
//! without a translation, receives an *update*, and drops the translations that an *invalidation*
//! covers. [`DeviceTlb`] keeps the translations and is the [`Iommu`] of such a device; its owner
//! carries the messages:
//!
//! ```text
//! device ─ View ─▶ translate ─ no entry ─▶ Stop::Pending(ticket): the queue parks
//! owner:  next_miss ─▶ MISS ······ UPDATE ─▶ update ──┐
//!                       ···· answer ─▶ answered ──────┴▶ take_ended: tickets, the queue tries again
//! owner:  INVALIDATE ─▶ invalidate: entries go, generation moves, leases of the range are stale ─▶ answered when none is left
//! ```
//! **Rights.** An entry has the requested rights, not those that the update names: QEMU's updates
//! always name both, regardless of the guest's tables. Another access to the same page is another
//! miss. An update that was not requested is taken with its rights, and one with less than the
//! requested rights is a refusal.
//!
//! **A refusal is the fault** that the access gets when it is repeated. It is kept for that, and no
//! longer: a guest may map a page without a notice. See [`DeviceTlb::forget_refusals`].
//!
//! **Bounds**: entries (the least recently used are evicted, and requested again), unanswered
//! misses, refusals, leases. Eviction is no invalidation: addresses translated by the entry remain
//! valid.
//!
//! **Memory.** Entries name guest addresses. When some of them stop being memory,
//! [`DeviceTlb::forget_memory`].
//!
//! Cost of a hit: a subtraction and a comparison. Behind that, a search among the intervals.

mod intervals;
mod misses;

use crate::access::{Access, Perm, Ticket};
use crate::addr::{Gpa, Iova, SourceId};
use crate::iommu::{Iommu, Run};
use crate::lease::LeaseTable;
use crate::phys::PhysMem;
use intervals::{Entry, Intervals};
use misses::Misses;

/// Intervals that a TLB has room for: 128 MiB in scattered pages.
pub const MAX_ENTRIES: usize = 1 << 15;

/// Most misses that may wait for an answer. Front ends handle one after the other, so this hides
/// the round trip.
pub const MAX_MISSES: usize = 64;

/// Addresses from a first to a last one, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IovaRange {
    first: Iova,
    last: Iova,
}

impl IovaRange {
    /// From `first` to `last`; `None` if that is below.
    pub fn new(first: Iova, last: Iova) -> Option<Self> {
        (first <= last).then_some(Self { first, last })
    }

    /// First address.
    pub fn first(&self) -> Iova {
        self.first
    }

    /// Last address.
    pub fn last(&self) -> Iova {
        self.last
    }

    /// Bytes, less one: all of the space has 2^64.
    pub fn span(&self) -> u64 {
        self.last.raw() - self.first.raw()
    }

    /// Whether `iova` is one of them.
    pub fn contains(&self, iova: Iova) -> bool {
        self.first <= iova && iova <= self.last
    }
}

/// Accesses that an entry allows: a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights(u8);

impl Rights {
    /// None: a revocation.
    pub const NONE: Self = Self(0);
    /// Reads.
    pub const READ: Self = Self(1);
    /// Writes.
    pub const WRITE: Self = Self(2);
    /// Both.
    pub const ALL: Self = Self(3);

    /// Whether `perm` is among them.
    pub const fn allows(self, perm: Perm) -> bool {
        self.0 & Self::of(perm).0 != 0
    }

    /// This access alone.
    pub const fn of(perm: Perm) -> Self {
        match perm {
            Perm::Read => Self::READ,
            Perm::Write => Self::WRITE,
        }
    }

    const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Translation that is to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Address.
    pub iova: Iova,
    /// Access.
    pub perm: Perm,
}

/// The entry that was hit last by one kind of access.
#[derive(Clone, Copy, Debug)]
struct Hit {
    first: u64,
    /// Bytes, less one.
    span: u64,
    gpa: u64,
    is_valid: bool,
}

impl Hit {
    const NONE: Self = Self {
        first: 0,
        span: 0,
        gpa: 0,
        is_valid: false,
    };
}

/// Translations of one device that another process has handed out.
///
/// Thread: its owner's only.
///
/// ```
/// use guest_mem::{Access, DeviceTlb, Gpa, GuestRam, Iommu, Iova, IovaRange, Perm, Rights};
/// use guest_mem::{SourceId, Stop};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let ram = GuestRam::new(&[(Gpa::new(0), 1 << 20)])?;
/// let (mut tlb, disk, at) = (DeviceTlb::new(256), SourceId(0), Iova::new(0xf010));
///
/// // Nothing is known: the device parks, and its owner asks.
/// let Err(Stop::Pending(ticket)) = tlb.translate(&ram, disk, at, Perm::Read) else { panic!() };
/// assert_eq!(tlb.next_miss(0).map(|miss| miss.iova), Some(at));
///
/// // The front end answers, and the device tries again.
/// let page = IovaRange::new(Iova::new(0xf000), Iova::new(0xffff)).expect("in order");
/// tlb.update(page, Gpa::new(0x3000), Rights::ALL);
/// assert_eq!(tlb.take_ended(), [ticket]);
/// assert_eq!(tlb.translate(&ram, disk, at, Perm::Read).map(|run| run.gpa), Ok(Gpa::new(0x3010)));
///
/// // It was asked for reading only.
/// assert!(tlb.translate(&ram, disk, at, Perm::Write).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DeviceTlb {
    /// By kind of access: reads, writes.
    hits: [Hit; 2],
    entries: Intervals,
    generation: u64,
    misses: Misses,
    leases: LeaseTable,
}

impl DeviceTlb {
    /// Creates an empty TLB, with at most `max_leases` leases.
    pub fn new(max_leases: usize) -> Self {
        Self::with_entries(MAX_ENTRIES, max_leases)
    }

    /// As [`new`](Self::new), with room for `max` entries, at least 2.
    pub fn with_entries(max: usize, max_leases: usize) -> Self {
        Self {
            hits: [Hit::NONE; 2],
            entries: Intervals::new(max),
            generation: 0,
            misses: Misses::default(),
            leases: LeaseTable::new(max_leases),
        }
    }

    /// Intervals known.
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Returns the translation of `iova` for `perm`, if there is one. Silent: there is no miss, and
    /// no effect on eviction.
    pub fn known(&self, iova: Iova, perm: Perm) -> Option<Gpa> {
        let Entry { range, gpa, rights } = self.entries.peek(iova)?;
        let inside = iova.raw() - range.first().raw();
        rights.allows(perm).then(|| gpa.checked_add(inside))?
    }

    /// Maps `range` to the memory from `gpa` on, which does not overflow. Replaces earlier
    /// translations of the range. Ends the misses of its addresses: their tickets are returned by
    /// the next [`take_ended`](Self::take_ended).
    pub fn update(&mut self, range: IovaRange, gpa: Gpa, rights: Rights) {
        assert!(
            gpa.checked_add(range.span()).is_some(),
            "an update runs past the end of guest memory"
        );
        let asked = self.misses.asked_in(range);
        let granted = asked.map_or(rights, |perm| rights.and(Rights::of(perm)));
        self.misses.updated(range, rights);
        let whole = Entry {
            range,
            gpa,
            rights: granted,
        };
        let mut is_changed = false;
        let mut next = Some(range.first());
        let add = |entries: &mut Intervals, first, last, rights| {
            let Some(range) = IovaRange::new(first, last) else {
                return;
            };
            let inside = first.raw() - whole.range.first().raw();
            let gpa = whole.gpa.checked_add(inside).expect("checked above");
            entries.insert(Entry { range, gpa, rights });
        };
        // Pieces that were mapped to the same place keep the rights granted before, as far as
        // the update has them.
        for old in self.entries.cut(range) {
            let inside = old.range.first().raw() - range.first().raw();
            let is_same = gpa.checked_add(inside) == Some(old.gpa);
            let kept = match is_same {
                true => old.rights.and(rights),
                false => Rights::NONE,
            };
            is_changed |= kept != old.rights;
            if let (Some(first), Some(last)) = (next, before(old.range.first())) {
                add(&mut self.entries, first, last, granted);
            }
            add(
                &mut self.entries,
                old.range.first(),
                old.range.last(),
                kept.or(granted),
            );
            next = old.range.last().checked_add(1);
        }
        if let Some(first) = next {
            add(&mut self.entries, first, range.last(), granted);
        }
        self.hits = [Hit::NONE; 2];
        if is_changed {
            self.generation += 1;
        }
    }

    /// Drops the translations of `range`, which are not valid any more. Its leases in flight are
    /// stale: the invalidation may be answered when [none is left](LeaseTable::stale).
    pub fn invalidate(&mut self, range: IovaRange) {
        // Also where there is no entry: it may have been evicted, and windows and leases outlive
        // that.
        self.generation += 1;
        self.hits = [Hit::NONE; 2];
        self.entries.cut(range);
        self.misses.invalidated(range);
        self.leases
            .recheck_now(Some((range.first(), range.last())), |_| false);
    }

    /// Guest addresses from `first` to `last` are another memory, or none: entries that lead there
    /// are gone. No lease may be in flight there.
    pub fn forget_memory(&mut self, first: Gpa, last: Gpa) {
        self.generation += 1;
        self.hits = [Hit::NONE; 2];
        self.entries.forget_memory(first, last);
    }

    /// The memory given to views from now on is another: makes every [`Window`](crate::Window)
    /// stale.
    pub fn memory_changed(&mut self) {
        self.generation += 1;
    }

    /// The next miss to be sent, at `now_ns`.
    pub fn next_miss(&mut self, now_ns: u64) -> Option<Miss> {
        self.misses.next(now_ns)
    }

    /// Whether there is one.
    pub fn has_unsent_miss(&self) -> bool {
        self.misses.has_unsent()
    }

    /// Returns the time at which the oldest unanswered miss was sent, in ns;
    /// [closing](Self::close) abandons all of them.
    pub fn oldest_miss_ns(&self) -> Option<u64> {
        self.misses.oldest_ns()
    }

    /// Records the answer to the oldest miss sent; returns false if all have been answered. A
    /// refusal ends the miss. A granted one is ended by its update, which may arrive by another
    /// channel: see [`settle`](Self::settle).
    pub fn answered(&mut self, is_granted: bool) -> bool {
        self.misses.answered(is_granted)
    }

    /// Whether [`settle`](Self::settle) has something to do.
    pub fn must_settle(&self) -> bool {
        self.misses.must_settle()
    }

    /// Refuses the misses that were granted and have no update. To be called when every update sent
    /// before the answers received so far has been taken.
    pub fn settle(&mut self) {
        self.misses.settle();
    }

    /// Drops all refusals, once the accesses that waited for them have received the fault: the same
    /// access is a miss again.
    pub fn forget_refusals(&mut self) {
        self.misses.forget_refusals();
    }

    /// Refuses all misses, those that wait and those that come.
    pub fn close(&mut self) {
        self.misses.close();
    }

    /// Whether that is so.
    pub fn is_closed(&self) -> bool {
        self.misses.is_closed()
    }

    /// Asks again from now on.
    pub fn open(&mut self) {
        self.misses.open();
    }

    /// Marks all unanswered misses as unsent, after their channel was replaced by another: they
    /// must be sent again.
    pub fn ask_again(&mut self) {
        self.misses.ask_again();
    }

    /// Tickets that have ended since this was last called.
    pub fn take_ended(&mut self) -> Vec<Ticket> {
        self.misses.take_ended()
    }

    /// Whether there are any.
    pub fn has_ended(&self) -> bool {
        self.misses.has_ended()
    }

    #[cold]
    #[inline(never)]
    fn search(&mut self, iova: Iova, perm: Perm) -> Access<Run> {
        let found = self.entries.find(iova);
        let Some(Entry { range, gpa, .. }) = found.filter(|entry| entry.rights.allows(perm)) else {
            return Err(self.misses.ask(iova, perm));
        };
        self.hits[perm as usize] = Hit {
            first: range.first().raw(),
            span: range.span(),
            gpa: gpa.raw(),
            is_valid: true,
        };
        let inside = iova.raw() - range.first().raw();
        Ok(Run {
            gpa: Gpa::new(gpa.raw() + inside),
            len: (range.span() - inside).saturating_add(1),
        })
    }
}

/// The address before, if there is one.
fn before(iova: Iova) -> Option<Iova> {
    iova.raw().checked_sub(1).map(Iova::new)
}

impl Iommu for DeviceTlb {
    #[inline]
    fn translate<M: PhysMem>(
        &mut self,
        _mem: &M,
        _source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Access<Run> {
        let hit = &self.hits[perm as usize];
        // An address below the entry wraps to an offset beyond its end.
        let inside = iova.raw().wrapping_sub(hit.first);
        if hit.is_valid && inside <= hit.span {
            return Ok(Run {
                gpa: Gpa::new(hit.gpa + inside),
                len: (hit.span - inside).saturating_add(1),
            });
        }
        self.search(iova, perm)
    }

    #[inline]
    fn generation(&self, _source: SourceId) -> u64 {
        self.generation
    }

    /// Misses are of pages.
    fn left_behind_pending(iova: Iova) -> u64 {
        iova.left_in_page()
    }

    type Leases = LeaseTable;

    #[inline(always)]
    fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    #[inline(always)]
    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }
}
