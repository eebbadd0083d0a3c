//! Places of rings in the guest's memory: one after the other from offset 0, each area on a page of
//! its own, as Linux places them.

use vhost_user::frontend;
use vhost_user::wire::MemRegion;

use crate::notifiers::Notifiers;
use crate::ring::{Places, Ring};

const PAGE: usize = 4096;

/// Guest-physical and user address of the first region; far from 0 and from each other, so that a
/// back end that mistakes one for the other does not get away with it.
pub const FIRST: (u64, u64) = (0x4000_0000, 0x7e00_0000_0000);
/// Addresses of a second region, which does not touch the first in either space.
pub const SECOND: (u64, u64) = (0x1_8000_0000, 0x7f00_0000_0000);

/// Areas of equal rings.
#[derive(Clone, Copy, Debug)]
pub struct Areas {
    /// Entries of each ring.
    pub ring_size: u16,
    is_packed: bool,
    ring_len: usize,
}

impl Areas {
    /// Areas of rings with so many entries.
    pub fn new(ring_size: u16, is_packed: bool) -> Self {
        let lens = Ring::area_lens(ring_size, is_packed);
        let ring_len = lens.iter().map(|len| len.next_multiple_of(PAGE)).sum();
        Self {
            ring_size,
            is_packed,
            ring_len,
        }
    }

    /// Bytes of so many rings, whole pages.
    pub const fn len(&self, queues: u16) -> usize {
        self.ring_len * queues as usize
    }

    /// A ring's areas.
    pub fn places(&self, queue: u16) -> Places {
        let desc = self.len(queue);
        let [desc_len, driver_len, _] = Ring::area_lens(self.ring_size, self.is_packed);
        let driver = desc + desc_len.next_multiple_of(PAGE);
        Places {
            desc,
            driver,
            device: driver + driver_len.next_multiple_of(PAGE),
        }
    }

    /// Returns a ring in the form that the back end receives; the back end is to go on at `base`.
    pub fn described<'a>(
        &self,
        index: u8,
        base: u32,
        notifiers: &'a Notifiers,
    ) -> frontend::Ring<'a> {
        let places = self.places(index.into());
        frontend::Ring {
            index,
            size: self.ring_size,
            base,
            desc: user(places.desc),
            avail: user(places.driver),
            used: user(places.device),
            kick: notifiers.kick_fd(),
            call: notifiers.call_fd(),
            err: None,
        }
    }
}

/// The user address of an offset in the first region.
pub const fn user(offset: usize) -> u64 {
    FIRST.1 + offset as u64
}

/// Offsets `start` to `end` of the memory as one region at `(guest, user)`.
pub const fn region((guest_addr, user_addr): (u64, u64), start: usize, end: usize) -> MemRegion {
    MemRegion {
        guest_addr,
        size: (end - start) as u64,
        user_addr,
        mmap_offset: start as u64,
    }
}
