//! Where everything lies in the guest's memory: rings first, then the buffers of each queue.
//!
//! ```text
//! ring 0 (receive of pair 0), ring 1 (transmit of pair 0), ring 2 …   see `vhost_client::areas`
//! buffers of ring 0, of ring 1, …    one per entry
//! a buffer: 52 bytes free │ header, 12 bytes │ frame      on a cache line, as in DPDK's buffers
//! ```

use vhost_client::areas::{self, Areas, FIRST};
use vhost_user::wire::MemRegion;

use crate::frame::HEADER_LEN;

/// Offset of the frame in a buffer.
const FRAME: usize = 64;
const LINE: usize = 64;

/// Offsets in one front end's memory.
#[derive(Clone, Debug)]
pub struct Layout {
    areas: Areas,
    buffers: usize,
    /// Bytes from one buffer to the next, an odd number of cache lines, so that they do not all
    /// fall into the same sets.
    stride: usize,
    len: usize,
}

impl Layout {
    /// Lays out `queues` rings of `ring_size` buffers each, with room for `len` bytes of frame.
    pub fn new(queues: u16, ring_size: u16, len: u32, is_packed: bool) -> Self {
        let areas = Areas::new(ring_size, is_packed);
        let buffers = areas.len(queues);
        let lines = (FRAME + len as usize).div_ceil(LINE);
        let stride = (lines | 1) * LINE;
        let all = stride * usize::from(queues) * usize::from(ring_size);
        Self {
            areas,
            buffers,
            stride,
            len: (buffers + all).next_multiple_of(4096),
        }
    }

    /// The rings' areas.
    pub const fn areas(&self) -> &Areas {
        &self.areas
    }

    /// Bytes of the memory.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Never.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The frame in a queue's buffer.
    #[inline]
    pub const fn frame(&self, queue: u16, buffer: u16) -> usize {
        let index = queue as usize * self.areas.ring_size as usize + buffer as usize;
        self.buffers + self.stride * index + FRAME
    }

    /// The header before it.
    #[inline]
    pub const fn header(&self, queue: u16, buffer: u16) -> usize {
        self.frame(queue, buffer) - HEADER_LEN as usize
    }

    /// The guest-physical address of an offset.
    #[inline]
    pub const fn gpa(offset: usize) -> u64 {
        FIRST.0 + offset as u64
    }

    /// Returns the one region as the back end receives it.
    pub fn regions(&self) -> [MemRegion; 1] {
        [areas::region(FIRST, 0, self.len)]
    }
}
