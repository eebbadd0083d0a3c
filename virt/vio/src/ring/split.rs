//! A split virtqueue as a polling device uses it (virtio 1.2 §2.7).
//!
//! Work flows: [`available`](SplitQueue::available) reads the available index once; for each of that
//! many, [`peek`](SplitQueue::peek) reads a chain into a local, the device does what it must, and
//! [`advance`](SplitQueue::advance) consumes it; [`stage`](SplitQueue::stage) writes used elements that the
//! driver cannot see yet, and [`publish`](SplitQueue::publish) shows all of them by one store of the used
//! index, one fence and one look at the driver's event field.
//!
//! Pending: every step that touches memory changes nothing of ours before its last access, so repeating it
//! is harmless: `peek` does not consume, `stage` rewrites the same unpublished slot, `publish` needs its
//! pointer before it stores.
//!
//! Stops: a ring whose own addresses fault is parked until a doorbell or a reset, so that a poller does not
//! record the same fault a million times a second; one that pends, until its ticket; one that breaks the
//! protocol, until a reset. While parked, nothing here touches guest memory.
//!
//! Notifications: while polling, `avail_event` is left behind (at most one spurious doorbell per 65,536
//! chains; writing it would dirty a line the driver reads), and without EVENT_IDX the NO_NOTIFY flag is set.
//! [`arm`](SplitQueue::arm) asks for the next doorbell.
//!
//! Cost when idle: one comparison and one acquire load per poll.

use std::sync::atomic::{Ordering, fence};

use guest_mem::{Access, Dma, DmaFault, Perm, Stop, Ticket};

use super::area::Area;
use super::chain::{
    Chain, DESC_F_INDIRECT, DESC_F_NEXT, DESC_SIZE, MAX_INDIRECT, RawDescriptor, Violation,
};
use crate::device::{ActivateError, QueueConfig, feature};
use crate::saved::SavedQueue;

/// VIRTQ_AVAIL_F_NO_INTERRUPT (§2.7.6), in `avail.flags`.
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// VIRTQ_USED_F_NO_NOTIFY (§2.7.8), in `used.flags`.
pub const USED_F_NO_NOTIFY: u16 = 1;

/// Offset of `flags` in both rings.
const FLAGS: u32 = 0;
/// Offset of `idx` in both rings.
const IDX: u32 = 2;
/// Offset of the first entry in both rings.
const RING: u32 = 4;

/// Why a step did not happen. The queue has parked itself accordingly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingStop {
    /// Memory said not now, or not at all.
    Access(Stop),
    /// The driver broke the protocol.
    Violation(Violation),
}

impl From<Stop> for RingStop {
    fn from(stop: Stop) -> Self {
        Self::Access(stop)
    }
}

impl From<DmaFault> for RingStop {
    fn from(fault: DmaFault) -> Self {
        Self::Access(Stop::Fault(fault))
    }
}

impl From<Violation> for RingStop {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

/// Why a queue rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parked {
    /// Until this ticket completes.
    Ticket(Ticket),
    /// One of the ring's own addresses faulted: until a doorbell or a reset.
    Fault,
    /// The driver broke the protocol: until a reset.
    Violation,
}

/// What a queue counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingStats {
    /// Stores of the used index.
    pub publishes: u64,
    /// Times the queue parked because of a fault.
    pub faults: u64,
    /// Times the queue parked on a ticket.
    pub pends: u64,
    /// Protocol violations: at most one per activation.
    pub violations: u64,
}

impl RingStats {
    /// Adds `other`.
    pub fn add(&mut self, other: &Self) {
        let Self {
            publishes,
            faults,
            pends,
            violations,
        } = other;
        self.publishes += publishes;
        self.faults += faults;
        self.pends += pends;
        self.violations += violations;
    }
}

/// The device's side of one split virtqueue.
pub struct SplitQueue {
    index: u16,
    size: u16,
    event_idx: bool,
    indirect: bool,
    desc: Area,
    avail: Area,
    used: Area,
    /// The available entry to take next, counted modulo 2^16.
    next_avail: u16,
    /// The used entry to publish next, counted modulo 2^16.
    next_used: u16,
    /// Used entries written behind `next_used` and not published.
    staged: u16,
    /// Whether NO_NOTIFY is known to stand in `used.flags` (only without EVENT_IDX).
    no_notify: bool,
    parked: Option<Parked>,
    /// An indirect table, read once: at most 16 KiB.
    table: Vec<u8>,
    stats: RingStats,
}

impl SplitQueue {
    /// A queue as the driver set it up. `max` is the device's maximum size, `features` the accepted ones.
    pub fn new(config: &QueueConfig, max: u16, features: u64) -> Result<Self, ActivateError> {
        let QueueConfig {
            index,
            size,
            desc,
            avail,
            used,
        } = *config;
        if !size.is_power_of_two() || size > max {
            return Err(ActivateError::QueueSize { index, size, max });
        }
        // At most 32,768 entries: 512 KiB, 64 KiB and 256 KiB; none overflows.
        let entries = u32::from(size);
        let bad = ActivateError::QueueAddress { index };
        if !desc.is_aligned(16) || !avail.is_aligned(2) || !used.is_aligned(4) {
            return Err(bad);
        }
        Ok(Self {
            index,
            size,
            event_idx: features & feature::EVENT_IDX != 0,
            indirect: features & feature::INDIRECT_DESC != 0,
            desc: Area::new(desc, entries * DESC_SIZE, Perm::Read).ok_or(bad)?,
            // flags, idx, ring, used_event
            avail: Area::new(avail, 6 + 2 * entries, Perm::Read).ok_or(bad)?,
            // flags, idx, ring of {id, len}, avail_event
            used: Area::new(used, 6 + 8 * entries, Perm::Write).ok_or(bad)?,
            next_avail: 0,
            next_used: 0,
            staged: 0,
            no_notify: false,
            parked: None,
            table: Vec::with_capacity((MAX_INDIRECT * DESC_SIZE) as usize),
            stats: RingStats::default(),
        })
    }

    /// Queue number.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Why the queue rests, if it does.
    pub fn parked(&self) -> Option<Parked> {
        self.parked
    }

    /// The queue's state; `None` while used elements are staged.
    pub fn save(&self) -> Option<SavedQueue> {
        let Self {
            index,
            size,
            event_idx: _,
            indirect: _,
            desc,
            avail,
            used,
            next_avail,
            next_used,
            staged,
            no_notify: _,
            parked: _,
            table: _,
            stats: _,
        } = self;
        (*staged == 0).then(|| SavedQueue {
            index: *index,
            size: *size,
            desc: desc.base().raw(),
            avail: avail.base().raw(),
            used: used.base().raw(),
            next_avail: *next_avail,
            next_used: *next_used,
        })
    }

    /// Whether the queue rests because a ring address faulted or the protocol was broken.
    pub fn is_faulted(&self) -> bool {
        matches!(self.parked, Some(Parked::Fault | Parked::Violation))
    }

    /// Counters.
    pub fn stats(&self) -> RingStats {
        self.stats
    }

    /// Used elements written and not yet published.
    pub fn staged(&self) -> u16 {
        self.staged
    }

    /// A doorbell: a faulted queue tries again.
    pub fn kick(&mut self) {
        if self.parked == Some(Parked::Fault) {
            self.parked = None;
        }
    }

    /// A ticket completed: a queue parked on it runs again.
    pub fn ticket_done(&mut self, ticket: Ticket) {
        if self.parked == Some(Parked::Ticket(ticket)) {
            self.parked = None;
        }
    }

    /// Parks the queue for a stop met on its behalf, by the ring itself or on a buffer that must be
    /// retried. Returns the stop.
    pub fn park(&mut self, stop: RingStop) -> RingStop {
        self.parked = Some(match stop {
            RingStop::Access(Stop::Pending(ticket)) => {
                self.stats.pends += 1;
                Parked::Ticket(ticket)
            }
            RingStop::Access(Stop::Fault(_)) => {
                self.stats.faults += 1;
                Parked::Fault
            }
            RingStop::Violation(_) => {
                self.stats.violations += 1;
                Parked::Violation
            }
        });
        stop
    }

    /// How many chains the driver has made available and we have not consumed; parks on a stop.
    ///
    /// Whoever sees the index sees the entries and descriptors before it: an acquire load, which pairs
    /// with the driver's write barrier between filling the ring and storing `avail.idx`.
    #[inline]
    pub fn available<D: Dma>(&mut self, dma: &mut D) -> Result<u16, RingStop> {
        let idx = match load_u16(&mut self.avail, dma, IDX) {
            Ok(idx) => idx,
            Err(stop) => return Err(self.park(stop.into())),
        };
        let count = idx.wrapping_sub(self.next_avail);
        if count > self.size {
            let next_avail = self.next_avail;
            return Err(self.park(Violation::AvailTooFar { idx, next_avail }.into()));
        }
        Ok(count)
    }

    /// Reads the chain `ahead` entries behind the next one into `chain`, without consuming it; parks on a stop.
    /// `ahead` is below what [`available`](SplitQueue::available) answered.
    pub fn peek<D: Dma>(
        &mut self,
        dma: &mut D,
        ahead: u16,
        chain: &mut Chain,
    ) -> Result<(), RingStop> {
        self.walk(dma, ahead, chain).map_err(|stop| self.park(stop))
    }

    fn walk<D: Dma>(&mut self, dma: &mut D, ahead: u16, chain: &mut Chain) -> Result<(), RingStop> {
        let slot = self.next_avail.wrapping_add(ahead) & (self.size - 1);
        let head = load_u16(&mut self.avail, dma, RING + 2 * u32::from(slot))?;
        chain.begin(head);
        let mut next = head;
        // A chain visits each descriptor of the table at most once: more hops are a loop.
        for _ in 0..self.size {
            if next >= self.size {
                return Err(Violation::Index(next).into());
            }
            let desc = self.descriptor(dma, next)?;
            if desc.flags & DESC_F_INDIRECT != 0 {
                if !self.indirect || desc.flags & DESC_F_NEXT != 0 {
                    return Err(Violation::Indirect.into());
                }
                return self.walk_indirect(dma, desc, chain);
            }
            chain.push(desc)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            next = desc.next;
        }
        Err(Violation::TooLong.into())
    }

    fn descriptor<D: Dma>(&mut self, dma: &mut D, index: u16) -> Access<RawDescriptor> {
        let (window, at) = self.desc.at(dma, DESC_SIZE * u32::from(index))?;
        Ok(RawDescriptor::from_words(
            window.load_u64(at),
            window.load_u64(at + 8),
        ))
    }

    /// The table behind an indirect descriptor: copied once, then walked here. Its own WRITE flag is
    /// ignored (§2.7.5.3.2).
    fn walk_indirect<D: Dma>(
        &mut self,
        dma: &mut D,
        desc: RawDescriptor,
        chain: &mut Chain,
    ) -> Result<(), RingStop> {
        let entries = desc.len / DESC_SIZE;
        if entries == 0 || !desc.len.is_multiple_of(DESC_SIZE) || entries > MAX_INDIRECT {
            return Err(Violation::IndirectLength(desc.len).into());
        }
        self.table.resize(desc.len as usize, 0);
        dma.read(guest_mem::Iova::new(desc.addr), &mut self.table)?;
        let mut next = 0;
        for _ in 0..entries {
            if u32::from(next) >= entries {
                return Err(Violation::Index(next).into());
            }
            let at = usize::from(next) * DESC_SIZE as usize;
            let bytes = self.table[at..at + 16]
                .try_into()
                .expect("a slice of 16 bytes");
            let desc = RawDescriptor::from_bytes(bytes);
            if desc.flags & DESC_F_INDIRECT != 0 {
                return Err(Violation::Indirect.into());
            }
            chain.push(desc)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            next = desc.next;
        }
        Err(Violation::TooLong.into())
    }

    /// Consumes the next `count` chains.
    pub fn advance(&mut self, count: u16) {
        self.next_avail = self.next_avail.wrapping_add(count);
    }

    /// Writes a used element that the driver sees at the next [`publish`](SplitQueue::publish); parks on a stop.
    /// `len` is the number of bytes written into the chain. At most the queue's size may be staged.
    pub fn stage<D: Dma>(&mut self, dma: &mut D, head: u16, len: u32) -> Result<(), RingStop> {
        assert!(
            self.staged < self.size,
            "more used elements staged than the ring holds"
        );
        let slot = self.next_used.wrapping_add(self.staged) & (self.size - 1);
        let at = RING + 8 * u32::from(slot);
        // Two stores, since an element may straddle a page where the ring is only 4-byte aligned.
        let written = store_u32(&mut self.used, dma, at, u32::from(head))
            .and_then(|()| store_u32(&mut self.used, dma, at + 4, len));
        match written {
            Ok(()) => {
                self.staged += 1;
                Ok(())
            }
            Err(stop) => Err(self.park(stop.into())),
        }
    }

    /// Takes back the last `count` staged elements.
    pub fn unstage(&mut self, count: u16) {
        self.staged -= count;
    }

    /// Shows the driver all staged elements; answers whether it wants an interrupt. Parks on a stop, with
    /// nothing shown.
    pub fn publish<D: Dma>(&mut self, dma: &mut D) -> Result<bool, RingStop> {
        if self.staged == 0 {
            return Ok(false);
        }
        let old = self.next_used;
        let new = old.wrapping_add(self.staged);
        match self.used.at(dma, IDX) {
            // Release: a driver that sees the index sees the elements and the buffers' bytes.
            Ok((window, at)) => window.store_u16(at, new),
            Err(stop) => return Err(self.park(stop.into())),
        }
        self.next_used = new;
        self.staged = 0;
        self.stats.publishes += 1;
        // Pairs with the driver's full barrier between writing used_event (or avail.flags) and looking at
        // used.idx again: one of the two sees the other's store. Without it the interrupt can be lost.
        fence(Ordering::SeqCst);
        // An event field that cannot be read now costs a spurious interrupt, never a lost one.
        Ok(self.wants_interrupt(dma, old, new).unwrap_or(true))
    }

    fn wants_interrupt<D: Dma>(&mut self, dma: &mut D, old: u16, new: u16) -> Access<bool> {
        if self.event_idx {
            let event = load_u16(&mut self.avail, dma, RING + 2 * u32::from(self.size))?;
            // vring_need_event (§2.7.10): did we step over the event?
            Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
        } else {
            Ok(load_u16(&mut self.avail, dma, FLAGS)? & AVAIL_F_NO_INTERRUPT == 0)
        }
    }

    /// Asks for a doorbell at the next available chain; parks on a stop. A SeqCst fence and another look at
    /// [`available`](SplitQueue::available) must follow.
    pub fn arm<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        let armed = if self.event_idx {
            let at = RING + 8 * u32::from(self.size);
            store_u16(&mut self.used, dma, at, self.next_avail)
        } else if self.no_notify {
            store_u16(&mut self.used, dma, FLAGS, 0)
        } else {
            Ok(())
        };
        match armed {
            Ok(()) => {
                self.no_notify = false;
                Ok(())
            }
            Err(stop) => Err(self.park(stop.into())),
        }
    }

    /// Polling goes on: without EVENT_IDX sets NO_NOTIFY, with it leaves `avail_event` to fall behind.
    pub fn disarm<D: Dma>(&mut self, dma: &mut D) -> Result<(), RingStop> {
        if self.event_idx || self.no_notify {
            return Ok(());
        }
        match store_u16(&mut self.used, dma, FLAGS, USED_F_NO_NOTIFY) {
            Ok(()) => {
                self.no_notify = true;
                Ok(())
            }
            Err(stop) => Err(self.park(stop.into())),
        }
    }
}

#[inline]
fn load_u16<D: Dma>(area: &mut Area, dma: &mut D, offset: u32) -> Access<u16> {
    let (window, at) = area.at(dma, offset)?;
    Ok(window.load_u16(at))
}

#[inline]
fn store_u16<D: Dma>(area: &mut Area, dma: &mut D, offset: u32, value: u16) -> Access<()> {
    let (window, at) = area.at(dma, offset)?;
    window.store_u16(at, value);
    Ok(())
}

#[inline]
fn store_u32<D: Dma>(area: &mut Area, dma: &mut D, offset: u32, value: u32) -> Access<()> {
    let (window, at) = area.at(dma, offset)?;
    window.store_u32(at, value);
    Ok(())
}
