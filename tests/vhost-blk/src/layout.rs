//! Layout of the guest's memory: rings first, then the parts of each slot.
//!
//! ```text
//! queue 0: descriptors │ driver area │ device area   each on a page of its own, as Linux places them
//! queue 1: …
//! slots:   64 bytes each: header, status, discard range   a cache line (Linux' `virtblk_req`)
//! tables:  64 bytes each: an indirect table of up to four
//! data:    one block per slot                             the second region, if there are two
//! ```

use vhost_client::areas::{self, Areas, FIRST, SECOND};
use vhost_user::wire::MemRegion;

use crate::ring::{Places, Table};

const PAGE: usize = 4096;
/// Bytes of a slot and of an indirect table.
const SLOT: usize = 64;
/// Offset in a slot of the status byte.
const STATUS: usize = 16;
/// Offset in a slot of the range of a discard or write-zeroes request.
const RANGE: usize = 32;

/// Offsets in one front end's memory.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Rings.
    pub queues: u16,
    /// Entries of each.
    pub ring_size: u16,
    /// Slots of each queue.
    pub depth: u16,
    /// Bytes of a slot's data.
    pub block: u32,
    two_regions: bool,
    areas: Areas,
    slots: usize,
    tables: usize,
    data: usize,
    len: usize,
}

impl Layout {
    /// Lays out `queues` rings with `depth` slots of `block` bytes each.
    pub fn new(
        queues: u16,
        ring_size: u16,
        depth: u16,
        block: u32,
        is_packed: bool,
        two_regions: bool,
    ) -> Self {
        let areas = Areas::new(ring_size, is_packed);
        let slots = areas.len(queues);
        let all = usize::from(queues) * usize::from(depth);
        let tables = slots + SLOT * all;
        let data = (tables + SLOT * all).next_multiple_of(PAGE);
        let len = (data + block as usize * all).next_multiple_of(PAGE);
        Self {
            queues,
            ring_size,
            depth,
            block,
            two_regions,
            areas,
            slots,
            tables,
            data,
            len,
        }
    }

    /// Bytes of the memory.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Never.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of all rings, from offset 0.
    pub const fn rings_len(&self) -> usize {
        self.slots
    }

    /// The rings' areas.
    pub const fn areas(&self) -> &Areas {
        &self.areas
    }

    /// A queue's areas.
    pub fn places(&self, queue: u16) -> Places {
        self.areas.places(queue)
    }

    const fn index(&self, queue: u16, slot: u16) -> usize {
        queue as usize * self.depth as usize + slot as usize
    }

    /// A slot's header.
    #[inline]
    pub const fn header(&self, queue: u16, slot: u16) -> usize {
        self.slots + SLOT * self.index(queue, slot)
    }

    /// A slot's status byte.
    #[inline]
    pub const fn status(&self, queue: u16, slot: u16) -> usize {
        self.header(queue, slot) + STATUS
    }

    /// A slot's range of sectors.
    #[inline]
    pub const fn range(&self, queue: u16, slot: u16) -> usize {
        self.header(queue, slot) + RANGE
    }

    /// A slot's data.
    #[inline]
    pub const fn data(&self, queue: u16, slot: u16) -> usize {
        self.data + self.block as usize * self.index(queue, slot)
    }

    /// A slot's indirect table.
    #[inline]
    pub fn table(&self, queue: u16, slot: u16) -> Table {
        let offset = self.tables + SLOT * self.index(queue, slot);
        let addr = self.gpa(offset);
        Table { offset, addr }
    }

    /// The guest-physical address of an offset.
    #[inline]
    pub const fn gpa(&self, offset: usize) -> u64 {
        if self.two_regions && offset >= self.data {
            SECOND.0 + (offset - self.data) as u64
        } else {
            FIRST.0 + offset as u64
        }
    }

    /// The user address of an offset in the rings.
    pub const fn user(&self, offset: usize) -> u64 {
        areas::user(offset)
    }

    /// Returns the regions as the back end receives them.
    pub fn regions(&self) -> Vec<MemRegion> {
        match self.two_regions {
            true => vec![
                areas::region(FIRST, 0, self.data),
                areas::region(SECOND, self.data, self.len),
            ],
            false => vec![areas::region(FIRST, 0, self.len)],
        }
    }
}
