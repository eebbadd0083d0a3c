//! The packed ring, device's side.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use crate::loopback::Guest;
use crate::memory::Memory;
use crate::ring::feature;
use vhost_user::backend::{RingBase, RingConfig};
use vhost_user::inflight::{self, PackedDesc, PackedPosition, PackedRing, PackedSizes};

use super::{Chain, Device, Part, read_desc};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

pub struct Packed {
    size: u16,
    areas: [u64; 3],
    has_event_idx: bool,
    avail: (u16, bool),
    used: (u16, bool),
    /// Descriptors returned since the driver was last asked.
    given: u16,
    tracker: Option<inflight::Packed<Part>>,
    replay: Vec<Chain>,
}

fn advance((at, wrap): (u16, bool), by: u16, size: u16) -> (u16, bool) {
    let next = at + by;
    if next >= size {
        (next - size, !wrap)
    } else {
        (next, wrap)
    }
}

struct Flags<'a>(&'a Memory, usize);

impl PackedRing for Flags<'_> {
    fn flags(&self, at: u16) -> u16 {
        self.0.load_u16(self.1 + 16 * usize::from(at) + 14, Acquire)
    }
    fn set_flags(&mut self, at: u16, flags: u16) {
        self.0
            .store_u16(self.1 + 16 * usize::from(at) + 14, flags, Release);
    }
}

impl Packed {
    pub fn new(guest: &Guest, config: &RingConfig, features: u64, part: Option<Part>) -> Self {
        let RingBase::Packed {
            avail,
            avail_wrap,
            used,
            used_wrap,
            ..
        } = config.base
        else {
            panic!("a packed ring has a packed base");
        };
        let mut ring = Self {
            size: config.size,
            areas: [config.desc, config.avail, config.used],
            has_event_idx: features & feature::EVENT_IDX != 0,
            avail: (avail, avail_wrap),
            used: (used, used_wrap),
            given: 0,
            tracker: None,
            replay: Vec::new(),
        };
        if let Some(part) = part {
            let (memory, desc) = guest
                .user(config.desc, 16 * u64::from(config.size))
                .unwrap();
            let sizes = PackedSizes {
                desc_num: config.size,
                ring_size: config.size,
            };
            let base = PackedPosition {
                idx: used,
                wrap: used_wrap,
            };
            let (tracker, recovery) =
                inflight::Packed::recover(part, sizes, base, &mut Flags(memory, desc)).unwrap();
            ring.avail = (recovery.avail.idx, recovery.avail.wrap);
            ring.used = (recovery.used.idx, recovery.used.wrap);
            ring.tracker = Some(tracker);
            for request in recovery.requests {
                let mut chain = ring.chain(guest, &request.descs);
                chain.slot = Some(request.slot);
                ring.replay.push(chain);
            }
        }
        ring
    }

    fn chain(&self, guest: &Guest, descs: &[PackedDesc]) -> Chain {
        let mut segments = Vec::new();
        for desc in descs {
            if desc.flags & 4 == 0 {
                segments.push((desc.addr, desc.len, desc.flags & 2 != 0));
                continue;
            }
            let (memory, table) = guest.gpa(desc.addr, desc.len.into()).unwrap();
            for at in 0..desc.len as usize / 16 {
                // Address and length as in a split ring; identifier and flags behind them.
                let (addr, len, _, flags) = read_desc(memory, table + 16 * at);
                segments.push((addr, len, flags & 2 != 0));
            }
        }
        Chain {
            id: descs.last().unwrap().id,
            descs: descs.len() as u16,
            slot: None,
            segments,
        }
    }

    fn desc(&self, guest: &Guest, at: u16) -> PackedDesc {
        let (memory, desc) = guest.user(self.areas[0] + 16 * u64::from(at), 16).unwrap();
        let (addr, len, id, flags) = read_desc(memory, desc);
        PackedDesc {
            addr,
            len,
            id,
            flags,
        }
    }

    fn has_available(&self, guest: &Guest) -> bool {
        let (memory, desc) = guest
            .user(self.areas[0] + 16 * u64::from(self.avail.0), 16)
            .unwrap();
        let flags = memory.load_u16(desc + 14, Acquire);
        (flags & AVAIL != 0) == self.avail.1 && (flags & USED != 0) != self.avail.1
    }
}

impl Device for Packed {
    fn take(&mut self, guest: &Guest) -> Option<Chain> {
        if !self.has_available(guest) {
            return None;
        }
        let (mut descs, mut at) = (Vec::new(), self.avail);
        loop {
            let desc = self.desc(guest, at.0);
            descs.push(desc);
            at = advance(at, 1, self.size);
            if desc.flags & 1 == 0 {
                break;
            }
        }
        self.avail = at;
        let mut chain = self.chain(guest, &descs);
        chain.slot = self
            .tracker
            .as_mut()
            .map(|tracker| tracker.begin(&descs).unwrap());
        Some(chain)
    }

    fn give(&mut self, guest: &Guest, chain: &Chain, descs: u16, _: u16, len: u32) {
        if let (Some(tracker), Some(slot)) = (&mut self.tracker, chain.slot) {
            tracker.complete(slot).unwrap();
            tracker.advance();
        }
        let (memory, desc) = guest
            .user(self.areas[0] + 16 * u64::from(self.used.0), 16)
            .unwrap();
        memory.store_u16(desc + 12, chain.id, Relaxed);
        memory.store_u32(desc + 8, len, Relaxed);
        let flags = if self.used.1 { AVAIL | USED } else { 0 };
        memory.store_u16(desc + 14, flags, Release);
        self.used = advance(self.used, descs, self.size);
        self.given += descs;
        if let Some(tracker) = &mut self.tracker {
            tracker.commit();
        }
    }

    fn arm(&mut self, guest: &Guest) -> bool {
        let (memory, event) = guest.user(self.areas[2], 4).unwrap();
        if self.has_event_idx {
            let wrap = if self.avail.1 { 1 << 15 } else { 0 };
            memory.store_u16(event, self.avail.0 | wrap, Relaxed);
            memory.store_u16(event + 2, 2, Release);
        } else {
            memory.store_u16(event + 2, 0, Relaxed);
        }
        fence(SeqCst);
        !self.has_available(guest)
    }

    fn disarm(&mut self, guest: &Guest) {
        let (memory, event) = guest.user(self.areas[2], 4).unwrap();
        memory.store_u16(event + 2, 1, Relaxed);
    }

    fn wants_call(&mut self, guest: &Guest) -> bool {
        fence(SeqCst);
        let (memory, event) = guest.user(self.areas[1], 4).unwrap();
        let given = std::mem::take(&mut self.given);
        let (position, flags) = (
            memory.load_u16(event, Relaxed),
            memory.load_u16(event + 2, Relaxed),
        );
        match flags {
            1 => false,
            2 if self.has_event_idx => {
                // Positions since the last asking, one by one: obviously the same as the formula.
                let back = advance(self.used, self.size - given % self.size, self.size);
                let mut at = (back.0, if given < self.size { !back.1 } else { back.1 });
                (0..given).any(|_| {
                    let here = at.0 | if at.1 { 1 << 15 } else { 0 };
                    at = advance(at, 1, self.size);
                    here == position
                })
            }
            _ => true,
        }
    }

    fn base(&self) -> RingBase {
        RingBase::Packed {
            avail: self.avail.0,
            avail_wrap: self.avail.1,
            used: self.used.0,
            used_wrap: self.used.1,
            is_fresh: false,
        }
    }

    fn replay(&mut self) -> Vec<Chain> {
        std::mem::take(&mut self.replay)
    }
}
