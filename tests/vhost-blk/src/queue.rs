//! One virtqueue of a block device: request slots, the ring, and the two eventfds.
//!
//! Follows virtio 1.2 §5.2.6. The hot path is [`Queue::submit`], [`Queue::publish`] and
//! [`Queue::complete`]; it makes no system call unless the device asked for a kick.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;

use vhost_client::notifiers::Notifiers;

use crate::layout::Layout;
use crate::memory::Memory;
use crate::ring::{Ring, RingError, Segment, feature};

/// Bytes of a sector, the unit of addresses in requests.
pub const SECTOR: u32 = 512;
/// Bytes that GET_ID writes.
pub const ID_LEN: u32 = 20;

/// Types of requests, with their numbers in the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
#[expect(missing_docs, reason = "the specification's names, VIRTIO_BLK_T_*")]
pub enum Op {
    Read = 0,
    Write = 1,
    Flush = 4,
    GetId = 8,
    Discard = 11,
    WriteZeroes = 13,
}

impl Op {
    /// Returns whether it changes the content of blocks.
    pub const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }
}

/// Range of a request on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First sector.
    pub sector: u64,
    /// Length in bytes: at most a slot's buffer; for a discard or write-zeroes any multiple of a
    /// sector.
    pub bytes: u32,
}

/// Outcome of a request, by its status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// VIRTIO_BLK_S_OK.
    Ok,
    /// VIRTIO_BLK_S_IOERR.
    IoError,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported,
    /// Anything else, or the byte was not written at all (0xff).
    Other(u8),
}

/// A request that the device has completed.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// Its slot, which is free again after [`Queue::release`].
    pub slot: u16,
    /// Its type.
    pub op: Op,
    /// Its range on the disk.
    pub extent: Extent,
    /// Its outcome.
    pub status: Status,
    /// The time passed to [`Queue::submit`].
    pub since: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    op: Op,
    extent: Extent,
    since: u64,
}

/// One queue, as the driver uses it.
#[derive(Debug)]
pub struct Queue {
    index: u16,
    pub(crate) ring: Ring,
    is_indirect: bool,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Its kick and call eventfds.
    pub notifiers: Notifiers,
}

impl Queue {
    /// Creates a queue with an empty ring.
    ///
    /// # Errors
    /// No eventfds are left.
    pub fn new(index: u16, layout: &Layout, features: u64) -> Result<Self, rustix::io::Errno> {
        let idle = Slot {
            op: Op::Read,
            extent: Extent {
                sector: 0,
                bytes: 0,
            },
            since: 0,
        };
        Ok(Self {
            index,
            ring: Ring::new(layout.ring_size, layout.places(index), features),
            is_indirect: features & feature::INDIRECT != 0,
            slots: vec![idle; layout.depth.into()],
            free: (0..layout.depth).rev().collect(),
            notifiers: Notifiers::new()?,
        })
    }

    /// Returns the eventfd that the driver writes to kick the device.
    pub fn kick_fd(&self) -> BorrowedFd<'_> {
        self.notifiers.kick_fd()
    }

    /// Returns the eventfd on which calls arrive.
    pub fn call_fd(&self) -> BorrowedFd<'_> {
        self.notifiers.call_fd()
    }

    /// Returns the ring.
    pub const fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// Returns the number of free slots.
    pub const fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of requests that the device has.
    pub fn outstanding(&self) -> u16 {
        self.ring.outstanding()
    }

    /// Takes a free slot. Its data buffer may be filled before [`Queue::submit`].
    #[inline]
    pub fn take_slot(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Frees a slot.
    #[inline]
    pub fn release(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Adds a request to the ring, without making it available. Returns `false` if the ring has no
    /// room; the slot stays taken.
    #[inline]
    pub fn submit(
        &mut self,
        memory: &Memory,
        layout: &Layout,
        slot: u16,
        op: Op,
        extent: Extent,
        since: u64,
    ) -> bool {
        self.slots[usize::from(slot)] = Slot { op, extent, since };
        self.submit_again(memory, layout, slot)
    }

    /// Adds the slot's last request to the ring again, for a new ring after a restart.
    #[inline]
    pub fn submit_again(&mut self, memory: &Memory, layout: &Layout, slot: u16) -> bool {
        let Slot { op, extent, .. } = self.slots[usize::from(slot)];
        let header = layout.header(self.index, slot);
        let sector = match op {
            Op::Read | Op::Write => extent.sector,
            _ => 0,
        };
        memory.store_u64(header, u64::from(op as u32), Relaxed);
        memory.store_u64(header + 8, sector, Relaxed);
        let status = layout.status(self.index, slot);
        memory.store_u8(status, 0xff, Relaxed);
        let data = |addr, len, is_writable| Segment {
            addr,
            len,
            is_writable,
        };
        let buffer = layout.gpa(layout.data(self.index, slot));
        let middle = match op {
            Op::Read => Some(data(buffer, extent.bytes, true)),
            Op::Write => Some(data(buffer, extent.bytes, false)),
            Op::GetId => Some(data(buffer, ID_LEN, true)),
            Op::Flush => None,
            Op::Discard | Op::WriteZeroes => {
                let range = layout.range(self.index, slot);
                memory.store_u64(range, extent.sector, Relaxed);
                let sectors = u64::from(extent.bytes / SECTOR);
                memory.store_u64(range + 8, sectors, Relaxed);
                Some(data(layout.gpa(range), 16, false))
            }
        };
        let first = data(layout.gpa(header), 16, false);
        let last = data(layout.gpa(status), 1, true);
        let table = self.is_indirect.then(|| layout.table(self.index, slot));
        match middle {
            Some(middle) => self.ring.add(memory, slot, &[first, middle, last], table),
            None => self.ring.add(memory, slot, &[first, last], table),
        }
    }

    /// Makes added requests available, and kicks if the device wants it.
    #[inline]
    pub fn publish(&mut self, memory: &Memory) {
        if self.ring.publish(memory) {
            self.kick();
        }
    }

    /// Makes added requests available, but never kicks.
    #[inline]
    pub fn publish_silently(&mut self, memory: &Memory) {
        self.ring.publish(memory);
    }

    /// Kicks the device.
    pub fn kick(&mut self) {
        self.notifiers.kick();
    }

    /// Reads the calls that have arrived, and returns their number.
    pub fn take_calls(&mut self) -> u64 {
        self.notifiers.take_calls()
    }

    /// Returns the next completed request.
    ///
    /// # Errors
    /// The device has broken the ring's protocol.
    #[inline]
    pub fn complete(
        &mut self,
        memory: &Memory,
        layout: &Layout,
    ) -> Result<Option<Done>, RingError> {
        let Some(used) = self.ring.pop(memory)? else {
            return Ok(None);
        };
        let Slot { op, extent, since } = self.slots[usize::from(used.token)];
        let status = match memory.load_u8(layout.status(self.index, used.token), Relaxed) {
            0 => Status::Ok,
            1 => Status::IoError,
            2 => Status::Unsupported,
            other => Status::Other(other),
        };
        Ok(Some(Done {
            slot: used.token,
            op,
            extent,
            status,
            since,
        }))
    }

    /// Returns the requests that the device has.
    pub fn in_flight(&self) -> impl Iterator<Item = (Op, Extent)> {
        let taken = (0..)
            .zip(&self.slots)
            .filter(|(at, _)| !self.free.contains(at));
        taken.map(|(_, slot)| (slot.op, slot.extent))
    }

    /// Starts over with an empty ring; the memory is zeroed. Returns the slots of the requests that
    /// the device had.
    pub fn reset(&mut self, layout: &Layout, features: u64) -> Vec<u16> {
        self.ring = Ring::new(layout.ring_size, layout.places(self.index), features);
        let is_free = |slot: &u16| self.free.contains(slot);
        (0..layout.depth).filter(|slot| !is_free(slot)).collect()
    }
}
