//! Sizes of an area, and division of a request into windows that fit a slot.

use crate::layout::{ANSWER, AT_FOOT_OF_SLOT, AT_RINGS, PAGE, SUBMISSION};

/// Largest number of slots: as many as a queue has entries.
pub const MAX_SLOTS: u32 = 1024;
/// Largest size of a slot's data, in bytes.
pub const MAX_DATA: u32 = 4 << 20;
/// Largest size of a request's head or foot, in bytes.
const MAX_ENDS: u32 = AT_FOOT_OF_SLOT as u32;
/// Alignment, in bytes, of the part of a window that the device writes.
const ALIGN: u32 = 64;

/// Sizes of an area, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    slots: u32,
    data: u32,
    head: u32,
    foot: u32,
}

/// Reason why an area of these sizes is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Number of slots.
    #[error("an area has 1 to {MAX_SLOTS} slots, a power of two, not {0}")]
    Slots(u32),
    /// Bytes of a slot.
    #[error("a slot has 4096 to {MAX_DATA} bytes of data, a multiple of 4096, not {0}")]
    Data(u32),
    /// Bytes of a head or foot.
    #[error("a head and a foot have 1 to {MAX_ENDS} bytes, not {0}")]
    Ends(u32),
}

/// Sizes of a request's data, between its head and its foot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes that the device reads.
    pub readable: u32,
    /// Bytes that the device writes; they follow those that it reads.
    pub writable: u32,
}

/// The part of a request's data that is in a slot. The data are one sequence: the bytes that the
/// device reads, then those that it writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Position of the window in the sequence.
    pub at: u64,
    /// Bytes that the device reads, from the start of the slot's data on.
    pub readable: u32,
    /// Bytes that it writes, from [`writable_at`](Self::writable_at) on.
    pub writable: u32,
    /// It is the request's last window.
    pub is_last: bool,
}

impl Window {
    /// Offset in the slot's data of the bytes that the device writes.
    pub fn writable_at(&self) -> u32 {
        writable_at(self.readable)
    }

    /// Whether it is the request's first.
    pub fn is_first(&self) -> bool {
        self.at == 0
    }

    /// Position of the next window.
    pub fn end(&self) -> u64 {
        self.at + u64::from(self.readable) + u64::from(self.writable)
    }
}

/// Offset of the written bytes after `readable` read ones, at most [`MAX_DATA`].
pub(crate) fn writable_at(readable: u32) -> u32 {
    readable.next_multiple_of(ALIGN)
}

impl Shape {
    /// Creates sizes for `slots` slots with `data` bytes each, for requests with heads of `head`
    /// bytes and feet of `foot`.
    ///
    /// # Errors
    /// A number is outside its range.
    pub fn new(slots: u32, data: u32, head: u32, foot: u32) -> Result<Self, ShapeError> {
        if !slots.is_power_of_two() || slots > MAX_SLOTS {
            return Err(ShapeError::Slots(slots));
        }
        if data == 0 || data > MAX_DATA || !data.is_multiple_of(PAGE as u32) {
            return Err(ShapeError::Data(data));
        }
        for ends in [head, foot] {
            if ends == 0 || ends > MAX_ENDS {
                return Err(ShapeError::Ends(ends));
            }
        }
        Ok(Self {
            slots,
            data,
            head,
            foot,
        })
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of a slot's data.
    pub fn data(&self) -> u32 {
        self.data
    }

    /// Bytes of a head.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// Bytes of a foot.
    pub fn foot(&self) -> u32 {
        self.foot
    }

    /// Bytes of the whole area: at most 4 GiB and a little more.
    pub fn area_len(&self) -> u64 {
        (self.at_slot(0) + self.slots as usize * self.slot_len()) as u64
    }

    /// Returns the window of a request at `at`. Written bytes are divided at multiples of a slot's
    /// data size, counted after the read bytes, so that blocks are not divided.
    pub fn window(&self, totals: Totals, at: u64) -> Window {
        let Totals { readable, writable } = totals;
        let (all_read, all) = (
            u64::from(readable),
            u64::from(readable) + u64::from(writable),
        );
        let data = u64::from(self.data);
        let (read, written) = if at < all_read || all == 0 {
            // Below 2^32: `data` has 32 bits.
            let read = data.min(all_read.saturating_sub(at)) as u32;
            let ends = at + u64::from(read) == all_read;
            let fits = u64::from(writable_at(read)) + u64::from(writable) <= data;
            (read, if ends && fits { writable } else { 0 })
        } else {
            (0, data.min(all.saturating_sub(at)) as u32)
        };
        Window {
            at,
            readable: read,
            writable: written,
            is_last: at + u64::from(read) + u64::from(written) >= all,
        }
    }

    fn slot_len(&self) -> usize {
        PAGE + self.data as usize
    }

    pub(crate) fn at_submission(&self, count: u32) -> usize {
        AT_RINGS + (count % self.slots) as usize * SUBMISSION
    }

    pub(crate) fn at_answer(&self, count: u32) -> usize {
        let ring = AT_RINGS + self.slots as usize * SUBMISSION;
        ring + (count % self.slots) as usize * ANSWER
    }

    /// Offset in the area of slot `slot`, which starts with the head.
    pub(crate) fn at_slot(&self, slot: u32) -> usize {
        let rings = AT_RINGS + self.slots as usize * (SUBMISSION + ANSWER);
        rings.next_multiple_of(PAGE) + slot as usize * self.slot_len()
    }

    pub(crate) fn at_foot(&self, slot: u32) -> usize {
        self.at_slot(slot) + AT_FOOT_OF_SLOT
    }

    pub(crate) fn at_data(&self, slot: u32) -> usize {
        self.at_slot(slot) + PAGE
    }
}
