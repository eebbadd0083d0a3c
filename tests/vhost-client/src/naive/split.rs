//! The device's side of a split ring.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use crate::loopback::Guest;
use crate::ring::feature;
use vhost_user::backend::{RingBase, RingConfig};
use vhost_user::inflight;

use super::{Chain, Device, Part, read_desc};

pub struct Split {
    size: u16,
    areas: [u64; 3],
    has_event_idx: bool,
    next_avail: u16,
    next_used: u16,
    called_at: u16,
    tracker: Option<inflight::Split<Part>>,
    replay: Vec<u16>,
}

impl Split {
    pub fn new(guest: &Guest, config: &RingConfig, features: u64, part: Option<Part>) -> Self {
        let RingBase::Split(base) = config.base else {
            panic!("a split ring has a split base");
        };
        let (memory, used) = guest.user(config.used, 4).unwrap();
        let used_idx = memory.load_u16(used + 2, Acquire);
        let mut next_avail = base;
        let mut replay = Vec::new();
        let tracker = part.map(|part| {
            let (tracker, recovery) =
                inflight::Split::recover(part, config.size, used_idx).unwrap();
            next_avail = recovery.next_avail;
            replay = recovery.heads;
            tracker
        });
        if tracker.is_none() {
            assert_eq!(base, used_idx, "nothing is in flight without a region");
        }
        Self {
            size: config.size,
            areas: [config.desc, config.avail, config.used],
            has_event_idx: features & feature::EVENT_IDX != 0,
            next_avail,
            next_used: used_idx,
            called_at: used_idx,
            tracker,
            replay,
        }
    }

    fn chain(&self, guest: &Guest, head: u16) -> Chain {
        let (memory, table) = guest
            .user(self.areas[0], 16 * u64::from(self.size))
            .unwrap();
        let (mut segments, mut index, mut descs) = (Vec::new(), head, 0);
        loop {
            let (addr, len, flags, next) = read_desc(memory, table + 16 * usize::from(index));
            descs += 1;
            if flags & 4 != 0 {
                let (memory, table) = guest.gpa(addr, len.into()).unwrap();
                for at in 0..len as usize / 16 {
                    let (addr, len, flags, next) = read_desc(memory, table + 16 * at);
                    segments.push((addr, len, flags & 2 != 0));
                    assert!(flags & 1 == 0 || usize::from(next) == at + 1);
                }
                break;
            }
            segments.push((addr, len, flags & 2 != 0));
            if flags & 1 == 0 {
                break;
            }
            index = next;
            assert!(descs < self.size, "a loop");
        }
        Chain {
            id: head,
            descs,
            slot: None,
            segments,
        }
    }
}

impl Device for Split {
    fn take(&mut self, guest: &Guest) -> Option<Chain> {
        let (memory, avail) = guest
            .user(self.areas[1], 6 + 2 * u64::from(self.size))
            .unwrap();
        if let Some(head) = self.replay.pop() {
            return Some(self.chain(guest, head));
        }
        let idx = memory.load_u16(avail + 2, Acquire);
        assert!(
            idx.wrapping_sub(self.next_avail) <= self.size,
            "more than the ring holds"
        );
        if idx == self.next_avail {
            return None;
        }
        let slot = usize::from(self.next_avail % self.size);
        let head = memory.load_u16(avail + 4 + 2 * slot, Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        if let Some(tracker) = &mut self.tracker {
            tracker.begin(head).unwrap();
        }
        Some(self.chain(guest, head))
    }

    fn give(&mut self, guest: &Guest, chain: &Chain, _: u16, count: u16, len: u32) {
        let (memory, used) = guest
            .user(self.areas[2], 6 + 8 * u64::from(self.size))
            .unwrap();
        let slot = usize::from(self.next_used % self.size);
        memory.store_u32(used + 4 + 8 * slot, chain.id.into(), Relaxed);
        memory.store_u32(used + 8 + 8 * slot, len, Relaxed);
        if let Some(tracker) = &mut self.tracker {
            tracker.complete(chain.id).unwrap();
        }
        self.next_used = self.next_used.wrapping_add(count);
        memory.store_u16(used + 2, self.next_used, Release);
        if let Some(tracker) = &mut self.tracker {
            tracker.commit();
        }
    }

    fn arm(&mut self, guest: &Guest) -> bool {
        let (memory, used) = guest
            .user(self.areas[2], 6 + 8 * u64::from(self.size))
            .unwrap();
        memory.store_u16(used, 0, Relaxed);
        if self.has_event_idx {
            memory.store_u16(
                used + 4 + 8 * usize::from(self.size),
                self.next_avail,
                Relaxed,
            );
        }
        fence(SeqCst);
        let (memory, avail) = guest.user(self.areas[1], 4).unwrap();
        memory.load_u16(avail + 2, Acquire) == self.next_avail
    }

    fn disarm(&mut self, guest: &Guest) {
        let (memory, used) = guest.user(self.areas[2], 2).unwrap();
        memory.store_u16(used, 1, Relaxed);
    }

    fn wants_call(&mut self, guest: &Guest) -> bool {
        fence(SeqCst);
        let (memory, avail) = guest
            .user(self.areas[1], 6 + 2 * u64::from(self.size))
            .unwrap();
        let (new, old) = (self.next_used, self.called_at);
        self.called_at = new;
        if self.has_event_idx {
            let event = memory.load_u16(avail + 4 + 2 * usize::from(self.size), Relaxed);
            // `vring_need_event` of the specification.
            return new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
        }
        memory.load_u16(avail, Relaxed) & 1 == 0
    }

    fn base(&self) -> RingBase {
        RingBase::Split(self.next_avail)
    }

    fn replay(&mut self) -> Vec<Chain> {
        // `take` returns the requests to be replayed, one by one.
        self.replay.reverse();
        Vec::new()
    }
}
