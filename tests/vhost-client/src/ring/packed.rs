//! The packed virtqueue, driver's side (virtio 1.2 §2.8).

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use super::{
    INDIRECT, NEXT, Outstanding, Places, RingError, Segment, Table, feature, need_event,
    segment_flags, write_desc,
};
use crate::memory::Memory;

/// VIRTQ_DESC_F_AVAIL and VIRTQ_DESC_F_USED.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// RING_EVENT_FLAGS of the event suppression structures.
const EVENTS_ON: u16 = 0;
const EVENTS_OFF: u16 = 1;
const EVENTS_AT_DESC: u16 = 2;
/// The wrap counter in a position.
const WRAP: u16 = 1 << 15;

/// A packed ring. Everything here is the driver's own; the device's words are loaded when needed.
#[derive(Debug)]
pub struct Packed {
    size: u16,
    desc: usize,
    driver: usize,
    device: usize,
    has_event_idx: bool,
    pub(super) outstanding: Outstanding,
    /// Buffer identifiers to give out.
    ids: Vec<u16>,
    free: u16,
    next_avail: u16,
    avail_wrap: bool,
    /// Descriptors added since the last look at the device's event suppression.
    added: u16,
    next_used: u16,
    used_wrap: bool,
    is_armed: bool,
}

impl Packed {
    /// Calls are on, as zeroed memory says.
    pub(super) fn new(size: u16, places: Places, features: u64) -> Self {
        Self {
            size,
            desc: places.desc,
            driver: places.driver,
            device: places.device,
            has_event_idx: features & feature::EVENT_IDX != 0,
            outstanding: Outstanding::new(size, features & feature::IN_ORDER != 0),
            ids: (0..size).rev().collect(),
            free: size,
            next_avail: 0,
            avail_wrap: true,
            added: 0,
            next_used: 0,
            used_wrap: true,
            is_armed: true,
        }
    }

    const fn desc_at(&self, index: u16) -> usize {
        self.desc + 16 * index as usize
    }

    /// The flags that make a descriptor available in this lap.
    const fn avail_flags(wrap: bool) -> u16 {
        if wrap { AVAIL } else { USED }
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
        // As many identifiers as descriptors, so there is one.
        let Some(id) = self.ids.pop() else {
            return false;
        };
        let (head, head_wrap) = (self.next_avail, self.avail_wrap);
        let head_flags = match table {
            Some(table) => {
                for (at, &segment) in segments.iter().enumerate() {
                    let offset = table.offset + 16 * at;
                    let high = u32::from(segment_flags(segment)) << 16;
                    write_desc(memory, offset, segment.addr, segment.len, high);
                }
                let bytes = 16 * segments.len() as u32;
                self.write(memory, head, table.addr, bytes, id);
                self.step();
                INDIRECT
            }
            None => {
                let mut head_flags = 0;
                for (at, &segment) in segments.iter().enumerate() {
                    let more = if at + 1 < segments.len() { NEXT } else { 0 };
                    let flags = segment_flags(segment) | more;
                    let (index, wrap) = (self.next_avail, self.avail_wrap);
                    self.write(memory, index, segment.addr, segment.len, id);
                    match at {
                        0 => head_flags = flags,
                        _ => {
                            let flags = flags | Self::avail_flags(wrap);
                            memory.store_u16(self.desc_at(index) + 14, flags, Relaxed);
                        }
                    }
                    self.step();
                }
                head_flags
            }
        };
        self.free -= len;
        self.added += len;
        self.outstanding.begin(id, len, token);
        // Pairs with the device's acquire load of these flags: it sees the whole chain.
        let flags = head_flags | Self::avail_flags(head_wrap);
        memory.store_u16(self.desc_at(head) + 14, flags, Release);
        true
    }

    /// Everything of a descriptor but its flags.
    #[inline]
    fn write(&self, memory: &Memory, index: u16, addr: u64, len: u32, id: u16) {
        let at = self.desc_at(index);
        memory.store_u64(at, addr, Relaxed);
        memory.store_u32(at + 8, len, Relaxed);
        memory.store_u16(at + 12, id, Relaxed);
    }

    #[inline]
    const fn step(&mut self) {
        self.next_avail += 1;
        if self.next_avail == self.size {
            self.next_avail = 0;
            self.avail_wrap = !self.avail_wrap;
        }
    }

    #[inline]
    pub(super) fn publish(&mut self, memory: &Memory) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        // Pairs with the fence of a device that arms and then looks at the ring again.
        fence(SeqCst);
        let word = memory.load_u32(self.device, Relaxed);
        let (position, flags) = (word as u16, (word >> 16) as u16);
        match flags & 3 {
            EVENTS_AT_DESC if self.has_event_idx => {
                let mut event = position & !WRAP;
                if (position & WRAP != 0) != self.avail_wrap {
                    // A position of the last lap: seen from this one, before its start.
                    event = event.wrapping_sub(self.size);
                }
                let new = self.next_avail;
                need_event(event, new, new.wrapping_sub(added))
            }
            flags => flags != EVENTS_OFF,
        }
    }

    /// Returns the next used descriptor, where there is one: identifier and bytes.
    #[inline]
    pub(super) fn used_element(&self, memory: &Memory) -> Result<(u32, u32), RingError> {
        let at = self.desc_at(self.next_used);
        let id = memory.load_u16(at + 12, Relaxed);
        let len = memory.load_u32(at + 8, Relaxed);
        Ok((id.into(), len))
    }

    /// Ends an outstanding request: its token.
    #[inline]
    pub(super) fn end(&mut self, id: u16) -> u16 {
        let (token, descs) = self.outstanding.end(id);
        self.ids.push(id);
        self.free += descs;
        self.next_used += descs;
        if self.next_used >= self.size {
            self.next_used -= self.size;
            self.used_wrap = !self.used_wrap;
        }
        token
    }

    #[inline]
    pub(super) fn has_used(&mut self, memory: &Memory) -> bool {
        if self.outstanding.batch_end.is_some() {
            return true;
        }
        if self.outstanding.count == 0 {
            return false;
        }
        // Pairs with the device's release store of these flags.
        let flags = memory.load_u16(self.desc_at(self.next_used) + 14, Acquire);
        (flags & AVAIL != 0) == self.used_wrap && (flags & USED != 0) == self.used_wrap
    }

    pub(super) fn arm(&mut self, memory: &Memory) -> bool {
        if self.has_event_idx {
            let wrap = if self.used_wrap { WRAP } else { 0 };
            memory.store_u16(self.driver, self.next_used | wrap, Relaxed);
            // The position before the flags that make it count.
            memory.store_u16(self.driver + 2, EVENTS_AT_DESC, Release);
        } else {
            memory.store_u16(self.driver + 2, EVENTS_ON, Relaxed);
        }
        self.is_armed = true;
        // Pairs with the device's fence between a used descriptor and its look at what was stored
        // here.
        fence(SeqCst);
        !self.has_used(memory)
    }

    pub(super) fn disarm(&mut self, memory: &Memory) {
        if self.is_armed {
            self.is_armed = false;
            memory.store_u16(self.driver + 2, EVENTS_OFF, Relaxed);
        }
    }

    /// The used position, in both halves.
    pub(super) fn base(&self) -> u32 {
        both(self.next_used, self.used_wrap)
    }

    pub(super) fn available_base(&self) -> u32 {
        both(self.next_avail, self.avail_wrap)
    }
}

fn both(position: u16, wrap: bool) -> u32 {
    let half = u32::from(position | if wrap { WRAP } else { 0 });
    half | half << 16
}
