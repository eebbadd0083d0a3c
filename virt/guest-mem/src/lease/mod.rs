//! The leases of one IOMMU: which guest memory asynchronous accesses are using right now.
//!
//! A device begins a lease for every contiguous run of memory that outlives the call that
//! translated it, and ends it just before it publishes the completion. When the guest invalidates
//! translations, the IOMMU rechecks the leases in question (module `recheck`) and marks those whose
//! translation changed as *stale*; the guest's wait completes when none of those is left
//! ([`LeaseTable::stale`] is 0). Leases whose translation is unchanged delay nothing: Linux's lazy
//! flush invalidates whole domains.
//!
//! Shape: a slab of slots and a list of the free ones. Beginning takes the first of that list and
//! fills it in; ending puts it back. Nothing else is kept in order for a lease that ends before a
//! recheck: a slot that has been used since the last one is *young*, and the next one puts those
//! that are in use into the index. A slot's number carries a 16-bit generation, so that ending a
//! lease twice panics instead of ending another's.
//!
//! **Shares.** No device can take all of the table. Each of the first [`SHARES`] devices that needs
//! it has a *reserve*, a 64th of the table ([`MAX_RESERVE`] at most), for itself; the rest is
//! common to all devices, first come, first served. If neither has room, [`Full`] is returned: the
//! lease can begin once others end, and this is never a fault. A table of [`MAX_LEASES`] keeps
//! 1,024 for each of 32 devices, as many as the largest request has (4 MiB in scattered pages), and
//! 32,767 for all: so every request fits its device's reserve, and no device waits for another.
//!
//! Cost: about 15 instructions to begin, as many to end, one cache line. Memory: 32 bytes for each
//! slot ever used.
//!
//! Thread: the VM's owner only; there is no lock and no atomic.

mod drain;
mod recheck;

use zerocopy::FromZeros;

use crate::access::Perm;
use crate::addr::{Gpa, Iova, SourceId};
use crate::pages::Pages;
pub use drain::{DRAIN_LIMIT_NS, DrainTimer};
use recheck::Index;
pub use recheck::{Budget, Part};

/// Most leases a table can be made for: a slot's number has 16 bits, of which one stands for none.
pub const MAX_LEASES: usize = (1 << 16) - 1;

/// Devices that can have a reserve.
pub const SHARES: usize = 32;

/// Largest reserve of a device, in leases.
pub const MAX_RESERVE: usize = 1024;

/// A lease lies inside one aligned piece of IOVA space of this length, 2 MiB: a longer run is
/// several leases.
pub const LEASE_SPAN: u64 = 2 << 20;

/// Refusal of a lease because the table is full. This is no fault: the lease can begin once others
/// have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Most leases that this device could hold if no other device held any: a request that needs
    /// more will never fit.
    pub most: usize,
}

/// An IOMMU's account of asynchronous accesses.
pub trait Leases {
    /// Begins one: an access of `source` uses `len` bytes at `iova`, which translate to `gpa`,
    /// until [`end`](Leases::end). They are not empty, and lie inside one [`LEASE_SPAN`].
    ///
    /// # Errors
    /// There is no room now.
    fn begin(
        &mut self,
        source: SourceId,
        iova: Iova,
        gpa: Gpa,
        len: u32,
        perm: Perm,
    ) -> Result<LeaseId, Full>;

    /// Ends one. Ending one twice, or one of another account, is a bug of the device model and
    /// panics.
    fn end(&mut self, id: LeaseId);

    /// Whether a recheck found the translation of a lease in flight changed: the guest waits for
    /// its end.
    fn is_stale(&self, id: LeaseId) -> bool;

    /// Returns whether `source` could begin `leases` leases now: the condition for which a device
    /// waits after [`Full`].
    fn has_room(&self, source: SourceId, leases: usize) -> bool;

    /// Returns those of `pages` in which a lease in flight lies: they cannot be evicted now. Called
    /// for a batch of pages at a time, so one visit of each lease is affordable.
    fn in_use(&self, pages: &Pages) -> u32;
}

/// Name of one lease in flight: the slot's number in bits 15:0, and how often the slot has changed
/// hands in 31:16. That is odd for a lease in flight; a free slot holds the even one that comes
/// before its next lease's. So one comparison distinguishes a live name from an ended one.
/// (Additions, and no bit to set: the compiler would make a store of one byte of it, and the load
/// of the whole that follows would wait for that.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseId(pub(crate) u32);

impl LeaseId {
    const TURN: u32 = 1 << 16;

    /// Name of every lease that is only counted ([`DirectMap`](crate::DirectMap)).
    pub(crate) const COUNTED: Self = Self(Self::TURN);

    /// Creates the initial value of slot `number`, which was never used.
    fn unused(number: u16) -> Self {
        Self(u32::from(number))
    }

    fn is_live(self) -> bool {
        self.0 & Self::TURN != 0
    }

    #[inline]
    fn slot(self) -> u16 {
        self.0 as u16
    }

    /// Returns the name of the lease that begins in this free slot, or the value of this lease's
    /// slot when it has ended. After 2^15 leases the names begin anew.
    #[inline]
    fn next(self) -> Self {
        Self(self.0.wrapping_add(Self::TURN))
    }
}

/// Record of one lease: the memory, the device and the access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// Its name.
    pub id: LeaseId,
    /// First address, as the device named it.
    pub iova: Iova,
    /// Address to which that translated when the lease began.
    pub gpa: Gpa,
    /// Length in bytes.
    pub len: u32,
    /// The device.
    pub source: SourceId,
    /// Access that the device makes.
    pub perm: Perm,
    is_stale: bool,
}

impl LeaseRecord {
    /// Whether a [`recheck`](LeaseTable::recheck) found the translation changed.
    pub fn is_stale(&self) -> bool {
        self.is_stale
    }
}

/// A lease in flight, or a place for one. All zeroes: never used.
#[derive(Clone, Copy, Debug, FromZeros)]
struct Slot {
    /// Address of the last lease that used the slot, as in [`LeaseRecord`]; likewise the next four.
    iova: u64,
    gpa: u64,
    len: u32,
    source: u16,
    is_write: bool,
    /// Flags of a lease in flight, such as [`STALE`]; zero for most leases.
    notes: u8,
    /// Name of the lease in flight, or of none: see [`LeaseId`].
    id: u32,
    /// Next slot in the list of free slots.
    next: u16,
    is_young: bool,
}

const _: () = assert!(size_of::<Slot>() == 32);

/// A recheck found its translation changed.
const STALE: u8 = 1;
/// It is in the index.
const INDEXED: u8 = 2;
/// It is from its device's reserve.
const RESERVED: u8 = 4;

/// No slot. The slot of this number is never used.
const NONE: u16 = u16::MAX;

impl Slot {
    fn is_live(&self) -> bool {
        LeaseId(self.id).is_live()
    }

    fn record(&self) -> LeaseRecord {
        LeaseRecord {
            id: LeaseId(self.id),
            iova: Iova::new(self.iova),
            gpa: Gpa::new(self.gpa),
            len: self.len,
            source: SourceId(self.source),
            perm: match self.is_write {
                true => Perm::Write,
                false => Perm::Read,
            },
            is_stale: self.notes & STALE != 0,
        }
    }
}

/// Counters of one device, made at the first lease that needs them.
#[derive(Debug)]
struct Holder {
    source: SourceId,
    /// Leases in the index.
    indexed: usize,
    /// Leases from its reserve.
    reserved: usize,
}

/// The leases of one IOMMU unit.
///
/// ```
/// use guest_mem::{Budget, Full, Gpa, Iova, LeaseTable, Leases, Perm, SourceId};
/// let mut leases = LeaseTable::new(256);
/// let disk = SourceId::new(0, 1, 0);
/// let id = leases.begin(disk, Iova::new(0xf000), Gpa::new(0x5000), 512, Perm::Write)?;
///
/// // The guest unmaps the page and waits: the walk now finds nothing.
/// leases.begin_recheck(Some((Iova::new(0xf000), Iova::new(0xffff))));
/// let mut all = Budget::unlimited();
/// let is_done = leases.recheck(&mut all, |source| source == disk, |_, _, _| Ok(false));
/// assert_eq!(is_done, Ok(true));
/// assert_eq!(leases.stale(), 1); // the wait parks ...
/// assert!(leases.is_stale(id));
/// leases.end(id);
/// assert_eq!(leases.stale(), 0); // ... and completes.
/// # Ok::<(), Full>(())
/// ```
#[derive(Debug)]
pub struct LeaseTable {
    /// As many as a number can name, so that an index needs no check. Memory is allocated as slots
    /// are used.
    slots: Box<[Slot; 1 << 16]>,
    /// The first of the free slots that are common.
    free: u16,
    /// Slots that have ever been used: the first ones.
    made: usize,
    /// Of them, those that are common.
    common: usize,
    max: usize,
    stale: usize,
    /// Free slots that are not common.
    spare: Vec<u16>,
    holders: Vec<Holder>,
    index: Box<Index>,
}

impl LeaseTable {
    /// Room for `max` leases, at most [`MAX_LEASES`] (more panics: the configuration is checked
    /// before).
    pub fn new(max: usize) -> Self {
        assert!(
            max <= MAX_LEASES,
            "a lease table holds at most {MAX_LEASES}"
        );
        Self {
            slots: <[Slot; 1 << 16]>::new_box_zeroed().expect("memory is overcommitted or there"),
            free: NONE,
            made: 0,
            common: 0,
            max,
            stale: 0,
            spare: Vec::new(),
            holders: Vec::new(),
            index: Box::default(),
        }
    }

    /// Finds a slot for a lease of `source`; also returns the flags of the lease.
    #[cold]
    #[inline(never)]
    fn find_slot(&mut self, source: SourceId) -> Result<(u16, u8), Full> {
        let (number, notes) = if self.free != NONE {
            let number = self.free;
            self.free = self.slots[usize::from(number)].next;
            (number, 0)
        } else if self.common < self.common_max() {
            self.common += 1;
            (self.make(), 0)
        } else {
            let reserve = self.reserve();
            let full = Full {
                most: self.common_max() + reserve,
            };
            let holder = self.holder(source);
            if self.holders[holder].reserved >= reserve || holder >= SHARES {
                return Err(full);
            }
            self.holders[holder].reserved += 1;
            let spare = self.spare.pop();
            (spare.unwrap_or_else(|| self.make()), RESERVED)
        };
        if !self.slots[usize::from(number)].is_young {
            self.slots[usize::from(number)].is_young = true;
            self.index.young.push(number);
        }
        Ok((number, notes))
    }

    /// A slot that was never used. There is one: common ones and reserves add up to `max`, at most.
    fn make(&mut self) -> u16 {
        let number = u16::try_from(self.made).expect("fewer slots than numbers");
        self.made += 1;
        self.slots[usize::from(number)].id = LeaseId::unused(number).0;
        number
    }

    /// Returns the index of the counters of `source`.
    fn holder(&mut self, source: SourceId) -> usize {
        let mut holders = self.holders.iter();
        holders
            .position(|holder| holder.source == source)
            .unwrap_or_else(|| {
                self.holders.push(Holder {
                    source,
                    indexed: 0,
                    reserved: 0,
                });
                self.holders.len() - 1
            })
    }

    /// Leases that are kept for each device: a 64th of the table, so that half of it is common.
    fn reserve(&self) -> usize {
        ((self.max + 1) / (2 * SHARES)).min(MAX_RESERVE)
    }

    /// Leases that any device may have.
    fn common_max(&self) -> usize {
        self.max - self.reserve() * SHARES
    }

    /// Ends one of which something is known besides.
    #[cold]
    #[inline(never)]
    fn end_noted(&mut self, number: u16) {
        let slot = &mut self.slots[usize::from(number)];
        let (source, notes) = (SourceId(slot.source), slot.notes);
        slot.next = self.free;
        if notes & STALE != 0 {
            self.stale -= 1;
        }
        if notes & INDEXED != 0 {
            self.remove(number);
        }
        if notes & RESERVED != 0 {
            let holder = self.holder(source);
            self.holders[holder].reserved -= 1;
            self.spare.push(number);
        } else {
            self.free = number;
        }
    }

    /// Leases in flight. Counts them: for tests and rare questions.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether no lease is in flight.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Most leases at a time.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Leases that a recheck found changed and that have not ended.
    #[inline]
    pub fn stale(&self) -> usize {
        self.stale
    }

    /// The leases in flight, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = LeaseRecord> {
        let made = self.slots[..self.made].iter();
        made.filter(|slot| slot.is_live()).map(Slot::record)
    }

    /// The devices that hold stale leases, each once, in order of their address.
    pub fn stale_sources(&self) -> Vec<SourceId> {
        let stale = self.iter().filter(LeaseRecord::is_stale);
        let mut sources: Vec<SourceId> = stale.map(|record| record.source).collect();
        sources.sort_unstable();
        sources.dedup();
        sources
    }
}

impl Leases for LeaseTable {
    #[inline(always)]
    fn begin(
        &mut self,
        source: SourceId,
        iova: Iova,
        gpa: Gpa,
        len: u32,
        perm: Perm,
    ) -> Result<LeaseId, Full> {
        let mut number = self.free;
        let mut notes = 0;
        if self.slots[usize::from(number)].is_young {
            self.free = self.slots[usize::from(number)].next;
        } else {
            (number, notes) = self.find_slot(source)?;
        }
        debug_assert!(
            len != 0 && iova.offset_in(LEASE_SPAN) + u64::from(len) <= LEASE_SPAN,
            "a lease lies inside one span"
        );
        let slot = &mut self.slots[usize::from(number)];
        slot.iova = iova.raw();
        slot.gpa = gpa.raw();
        slot.len = len;
        slot.source = source.0;
        slot.is_write = perm == Perm::Write;
        slot.notes = notes;
        let id = LeaseId(slot.id).next();
        slot.id = id.0;
        Ok(id)
    }

    #[inline(always)]
    fn end(&mut self, id: LeaseId) {
        let number = id.slot();
        let slot = &mut self.slots[usize::from(number)];
        if slot.id != id.0 {
            not_live(id);
        }
        slot.id = id.next().0;
        if slot.notes != 0 {
            return self.end_noted(number);
        }
        slot.next = self.free;
        self.free = number;
    }

    fn is_stale(&self, id: LeaseId) -> bool {
        let slot = &self.slots[usize::from(id.slot())];
        slot.id == id.0 && slot.notes & STALE != 0
    }

    /// Counts no further than that.
    fn has_room(&self, source: SourceId, leases: usize) -> bool {
        let mut holders = self.holders.iter().zip(0..);
        let reserved = match holders.find(|(holder, _)| holder.source == source) {
            Some((holder, at)) if at < SHARES => self.reserve() - holder.reserved,
            None if self.holders.len() < SHARES => self.reserve(),
            _ => 0,
        };
        let mut room = reserved + (self.common_max() - self.common);
        let mut free = self.free;
        while room < leases && free != NONE {
            room += 1;
            free = self.slots[usize::from(free)].next;
        }
        room >= leases
    }

    /// One pass over the slots in use, and a search among the pages for each.
    fn in_use(&self, pages: &Pages) -> u32 {
        let touched = |lease: LeaseRecord| pages.touched(lease.gpa, lease.len.into());
        self.iter().fold(0, |mask, lease| mask | touched(lease))
    }
}

#[cold]
fn not_live(id: LeaseId) -> ! {
    panic!("{id:?} is not in flight: ended twice, or begun in another table");
}
