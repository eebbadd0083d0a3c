//! The leases of one IOMMU: which guest pages asynchronous accesses are using right now.
//!
//! A device begins a lease for every piece of memory that outlives the call that translated it, and
//! ends it just before it publishes the completion. When the guest invalidates translations, the IOMMU
//! calls [`LeaseTable::recheck`], which marks the leases whose translation changed as *stale*; the
//! guest's wait completes when none of those is left ([`LeaseTable::stale`] is 0). Leases whose
//! translation is unchanged delay nothing: Linux's lazy flush invalidates whole domains.
//!
//! Shape: a slab of slots, and a permutation of the slot numbers whose first [`len`](LeaseTable::len)
//! entries are the live ones. Beginning takes the first free number; ending swaps the slot with the
//! last live one. So both are O(1) without allocation, and a recheck visits live leases only. A slot
//! number carries a 15-bit generation, so that ending a lease twice panics instead of ending another's.
//!
//! Thread: the VM's owner only; there is no lock and no atomic.

use crate::access::{Access, DmaFault, Perm, Stop};
use crate::addr::{Gpa, Iova, SourceId};

/// Most leases a table can be made for: slot numbers have 16 bits. 65536 × (32 + 2) bytes = 2.1 MiB.
pub const MAX_LEASES: usize = 1 << 16;

/// Names one lease in flight: the slot's number in bits 15:0, the slot's generation in 30:16, and bit 31
/// set. A free slot holds the name of its next lease without bit 31, so one comparison tells a live
/// name from an ended one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseId(pub(crate) u32);

impl LeaseId {
    const LIVE: u32 = 1 << 31;

    /// Of every lease that is only counted ([`DirectMap`](crate::DirectMap)).
    pub(crate) const COUNTED: Self = Self(Self::LIVE);

    /// What the never used slot `number` holds.
    fn unused(number: u16) -> Self {
        Self(u32::from(number))
    }

    #[inline]
    fn slot(self) -> u16 {
        self.0 as u16
    }

    #[inline]
    fn begun(self) -> Self {
        Self(self.0 | Self::LIVE)
    }

    /// The next generation's name, not live. The generation wraps at 2^15.
    #[inline]
    fn ended(self) -> Self {
        Self(self.0.wrapping_add(1 << 16) & !Self::LIVE)
    }
}

/// What one lease covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// First address, as the device named it.
    pub iova: Iova,
    /// Where that was translated to when the lease began.
    pub gpa: Gpa,
    /// Length in bytes.
    pub len: u32,
    /// The device.
    pub source: SourceId,
    /// What it does there.
    pub perm: Perm,
    stale: bool,
}

impl LeaseRecord {
    /// Whether a [`recheck`](LeaseTable::recheck) found the translation changed.
    pub fn is_stale(&self) -> bool {
        self.stale
    }
}

#[derive(Debug)]
struct Slot {
    /// Of the last lease that used the slot.
    record: LeaseRecord,
    /// Of the lease in flight, or not live: of the next one.
    id: LeaseId,
    /// Index of this slot's number in `order`.
    position: u16,
}

/// The leases of one IOMMU unit.
///
/// ```
/// use guest_mem::{Gpa, Iova, LeaseTable, Perm, SourceId};
/// let mut leases = LeaseTable::new(256);
/// let disk = SourceId::new(0, 1, 0);
/// let id = leases.begin(disk, Iova::new(0xf000), Gpa::new(0x5000), 512, Perm::Write)?;
///
/// // The guest unmaps the page and waits: the walk now finds nothing.
/// leases.recheck(|lease| lease.source == disk, |_| Ok(false)).expect("no table read pends");
/// assert_eq!(leases.stale(), 1); // the wait parks ...
/// leases.end(id);
/// assert_eq!(leases.stale(), 0); // ... and completes.
/// # Ok::<(), guest_mem::DmaFault>(())
/// ```
#[derive(Debug)]
pub struct LeaseTable {
    slots: Box<[Slot]>,
    /// A permutation of the slot numbers: `[..live]` in use, `[live..]` free.
    order: Box<[u16]>,
    live: usize,
    stale: usize,
}

impl LeaseTable {
    /// Room for `max` leases, at most [`MAX_LEASES`] (more panics: the configuration is checked before).
    pub fn new(max: usize) -> Self {
        assert!(
            max <= MAX_LEASES,
            "a lease table holds at most {MAX_LEASES}"
        );
        // `max` is at most 2^16, so the last number fits 16 bits.
        let order: Box<[u16]> = (0..max).map(|slot| slot as u16).collect();
        let empty = LeaseRecord {
            iova: Iova::new(0),
            gpa: Gpa::new(0),
            len: 0,
            source: SourceId(0),
            perm: Perm::Read,
            stale: false,
        };
        let slots = order
            .iter()
            .map(|&position| Slot {
                record: empty,
                id: LeaseId::unused(position),
                position,
            })
            .collect();
        Self {
            slots,
            order,
            live: 0,
            stale: 0,
        }
    }

    /// Begins one. [`DmaFault::TooManyLeases`] when the table is full.
    #[inline]
    pub fn begin(
        &mut self,
        source: SourceId,
        iova: Iova,
        gpa: Gpa,
        len: u32,
        perm: Perm,
    ) -> Result<LeaseId, DmaFault> {
        let Some(&number) = self.order.get(self.live) else {
            return Err(DmaFault::TooManyLeases);
        };
        let slot = &mut self.slots[usize::from(number)];
        slot.record = LeaseRecord {
            iova,
            gpa,
            len,
            source,
            perm,
            stale: false,
        };
        slot.id = slot.id.begun();
        self.live += 1;
        Ok(slot.id)
    }

    /// Ends one. Ending one twice, or one of another table, is a bug of the caller and panics.
    #[inline]
    pub fn end(&mut self, id: LeaseId) {
        let number = id.slot();
        let Some(slot) = self.slots.get_mut(usize::from(number)) else {
            not_live(id);
        };
        if slot.id != id {
            not_live(id);
        }
        slot.id = id.ended();
        // A branch, not a subtraction: stale leases are rare, and the count is off the common path.
        if slot.record.stale {
            self.stale -= 1;
        }
        self.live -= 1;
        let position = slot.position;
        // A lease that began last ends without touching the order: the common case of a shallow queue.
        if usize::from(position) != self.live {
            let last = std::mem::replace(&mut self.order[self.live], number);
            self.order[usize::from(position)] = last;
            slot.position = self.live as u16;
            self.slots[usize::from(last)].position = position;
        }
    }

    /// Leases in flight.
    #[inline]
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether no lease is in flight.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Most leases at a time.
    pub fn max(&self) -> usize {
        self.slots.len()
    }

    /// Leases that a recheck found changed and that have not ended.
    #[inline]
    pub fn stale(&self) -> usize {
        self.stale
    }

    /// The leases in flight, in no particular order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &LeaseRecord> {
        self.order[..self.live]
            .iter()
            .map(|&number| &self.slots[usize::from(number)].record)
    }

    /// The devices that hold stale leases, each once, in order of their address.
    pub fn stale_sources(&self) -> Vec<SourceId> {
        let stale = self.iter().filter(|record| record.stale);
        let mut sources: Vec<SourceId> = stale.map(|record| record.source).collect();
        sources.sort_unstable();
        sources.dedup();
        sources
    }

    /// Asks `valid` of every lease in flight that `select` picks and that is not stale already, and
    /// marks as stale those whose translation no longer holds. Once stale, always stale: a page that
    /// was unmapped and mapped again to the same place has still been through a revocation.
    ///
    /// A [`Stop::Fault`] of `valid` means that the translation is gone: stale. A [`Stop::Pending`] is
    /// handed out at once; what has been marked stays marked, and running the same recheck again when
    /// the ticket completes gives the same result as an uninterrupted one.
    ///
    /// Cost: one pass over the live leases, one `valid` (a table walk) per selected one.
    pub fn recheck(
        &mut self,
        select: impl Fn(&LeaseRecord) -> bool,
        mut valid: impl FnMut(&LeaseRecord) -> Access<bool>,
    ) -> Access<()> {
        for &number in &self.order[..self.live] {
            let record = &mut self.slots[usize::from(number)].record;
            if record.stale || !select(record) {
                continue;
            }
            let holds = match valid(record) {
                Ok(holds) => holds,
                Err(Stop::Fault(_)) => false,
                Err(pending @ Stop::Pending(_)) => return Err(pending),
            };
            if !holds {
                record.stale = true;
                self.stale += 1;
            }
        }
        Ok(())
    }
}

#[cold]
fn not_live(id: LeaseId) -> ! {
    panic!("{id:?} is not in flight: ended twice, or begun in another table");
}
