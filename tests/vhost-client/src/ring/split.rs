//! The split virtqueue, driver's side (virtio 1.2 §2.7).

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use super::{
    INDIRECT, NEXT, Outstanding, Places, RingError, Segment, Table, feature, need_event,
    segment_flags, write_desc,
};
use crate::memory::Memory;

/// VIRTQ_AVAIL_F_NO_INTERRUPT and VIRTQ_USED_F_NO_NOTIFY.
const NO_EVENTS: u16 = 1;
/// Distance behind the device at which a polling driver parks its event index, and number of
/// completions after which it does so anew.
const PARK_STEP: u16 = 1 << 14;

/// A split ring. Everything here is the driver's own; the device's words are loaded when needed.
#[derive(Debug)]
pub struct Split {
    size: u16,
    desc: usize,
    avail: usize,
    used: usize,
    has_event_idx: bool,
    pub(super) outstanding: Outstanding,
    /// Chain links, as last written to the table: never read back from it.
    next: Vec<u16>,
    free_head: u16,
    free: u16,
    /// Next entry of the available ring to fill.
    avail_idx: u16,
    /// Index up to which the available ring is published to the device.
    published: u16,
    last_used: u16,
    /// The used index as last loaded.
    seen_used: u16,
    is_armed: bool,
    /// Position at which the event index was parked when calls went off.
    parked_at: u16,
}

impl Split {
    /// Calls are on, as zeroed memory says.
    pub(super) fn new(size: u16, places: Places, features: u64) -> Self {
        assert!(size.is_power_of_two(), "split rings have such sizes");
        Self {
            size,
            desc: places.desc,
            avail: places.driver,
            used: places.device,
            has_event_idx: features & feature::EVENT_IDX != 0,
            outstanding: Outstanding::new(size, features & feature::IN_ORDER != 0),
            next: (1..=size).map(|next| next % size).collect(),
            free_head: 0,
            free: size,
            avail_idx: 0,
            published: 0,
            last_used: 0,
            seen_used: 0,
            is_armed: true,
            parked_at: 0,
        }
    }

    const fn slot(&self, index: u16) -> usize {
        (index & (self.size - 1)) as usize
    }

    const fn desc_at(&self, index: u16) -> usize {
        self.desc + 16 * index as usize
    }

    const fn used_event(&self) -> usize {
        self.avail + 4 + 2 * self.size as usize
    }

    const fn avail_event(&self) -> usize {
        self.used + 4 + 8 * self.size as usize
    }

    #[inline]
    pub(super) fn add(
        &mut self,
        memory: &Memory,
        token: u16,
        segments: &[Segment],
        table: Option<Table>,
    ) -> bool {
        let len = table.map_or(segments.len() as u16, |_| 1);
        if len == 0 || len > self.free {
            return false;
        }
        let head = self.free_head;
        if let Some(table) = table {
            for (at, &segment) in segments.iter().enumerate() {
                let (flags, next) = link(segment, at, segments.len(), at as u16 + 1);
                let high = u32::from(flags) | u32::from(next) << 16;
                write_desc(
                    memory,
                    table.offset + 16 * at,
                    segment.addr,
                    segment.len,
                    high,
                );
            }
            let bytes = 16 * segments.len() as u32;
            write_desc(
                memory,
                self.desc_at(head),
                table.addr,
                bytes,
                INDIRECT.into(),
            );
            self.free_head = self.next[usize::from(head)];
        } else {
            let mut index = head;
            for (at, &segment) in segments.iter().enumerate() {
                let next = self.next[usize::from(index)];
                let (flags, link) = link(segment, at, segments.len(), next);
                let high = u32::from(flags) | u32::from(link) << 16;
                write_desc(memory, self.desc_at(index), segment.addr, segment.len, high);
                index = next;
            }
            self.free_head = index;
        }
        self.free -= len;
        self.outstanding.begin(head, len, token);
        let entry = self.avail + 4 + 2 * self.slot(self.avail_idx);
        memory.store_u16(entry, head, Relaxed);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        true
    }

    #[inline]
    pub(super) fn publish(&mut self, memory: &Memory) -> bool {
        let (old, new) = (self.published, self.avail_idx);
        if old == new {
            return false;
        }
        self.published = new;
        // Pairs with the device's acquire load of the index: it sees entries and descriptors.
        memory.store_u16(self.avail + 2, new, Release);
        // Pairs with the fence of a device that arms and then looks at the index again: one of the
        // two sees the other's store, or both do.
        fence(SeqCst);
        match self.has_event_idx {
            true => need_event(memory.load_u16(self.avail_event(), Relaxed), new, old),
            false => memory.load_u16(self.used, Relaxed) & NO_EVENTS == 0,
        }
    }

    /// Returns the next used element, where there is one: head and bytes.
    #[inline]
    pub(super) fn used_element(&self, memory: &Memory) -> Result<(u32, u32), RingError> {
        let used = self.seen_used.wrapping_sub(self.last_used);
        let outstanding = self.outstanding.count;
        if used > outstanding {
            return Err(RingError::TooManyUsed { used, outstanding });
        }
        let element = self.used + 4 + 8 * self.slot(self.last_used);
        // The elements are aligned to four bytes only.
        let id = memory.load_u32(element, Relaxed);
        let len = memory.load_u32(element + 4, Relaxed);
        Ok((id, len))
    }

    /// Ends an outstanding request: its token.
    #[inline]
    pub(super) fn end(&mut self, id: u16) -> u16 {
        self.last_used = self.last_used.wrapping_add(1);
        let (token, descs) = self.outstanding.end(id);
        if self.outstanding.order.is_none() {
            let mut tail = id;
            for _ in 1..descs {
                tail = self.next[usize::from(tail)];
            }
            self.next[usize::from(tail)] = self.free_head;
            self.free_head = id;
        }
        // With IN_ORDER descriptors are used in ring order: `next` stays as it was, and so does the
        // cursor.
        self.free += descs;
        token
    }

    #[inline]
    pub(super) fn has_used(&mut self, memory: &Memory) -> bool {
        if self.outstanding.batch_end.is_some() || self.seen_used != self.last_used {
            return true;
        }
        if !self.is_armed && self.last_used.wrapping_sub(self.parked_at) >= PARK_STEP {
            self.park(memory);
        }
        // Pairs with the device's release store: elements and data written before it are visible.
        self.seen_used = self.used_idx(memory);
        self.seen_used != self.last_used
    }

    pub(super) fn arm(&mut self, memory: &Memory) -> bool {
        match self.has_event_idx {
            true => memory.store_u16(self.used_event(), self.last_used, Relaxed),
            false => memory.store_u16(self.avail, 0, Relaxed),
        }
        self.is_armed = true;
        // Pairs with the device's fence between its used index and its look at what was stored
        // here.
        fence(SeqCst);
        !self.has_used(memory)
    }

    pub(super) fn disarm(&mut self, memory: &Memory) {
        if !self.is_armed {
            return;
        }
        self.is_armed = false;
        memory.store_u16(self.avail, NO_EVENTS, Relaxed);
        self.park(memory);
    }

    /// Puts the event index a quarter of a lap behind the device. Directly behind it would be among
    /// the completions that the device has published and not yet decided about: they would be
    /// called for.
    fn park(&mut self, memory: &Memory) {
        self.parked_at = self.last_used;
        if self.has_event_idx {
            let behind = self.last_used.wrapping_sub(PARK_STEP);
            memory.store_u16(self.used_event(), behind, Relaxed);
        }
    }

    pub(super) fn used_idx(&self, memory: &Memory) -> u16 {
        memory.load_u16(self.used + 2, Acquire)
    }

    pub(super) const fn avail_idx(&self) -> u16 {
        self.avail_idx
    }
}

/// Flags and link of a descriptor of a chain.
#[inline]
fn link(segment: Segment, at: usize, len: usize, next: u16) -> (u16, u16) {
    let flags = segment_flags(segment);
    if at + 1 < len {
        (flags | NEXT, next)
    } else {
        (flags, 0)
    }
}
