//! Rings written word by word, as no driver would.

use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};

use super::front::Front;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// A guest address that no region has.
pub const NOWHERE: u64 = 0x77_0000_0000;

/// A split descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Desc(pub u64, pub u32, pub u16, pub u16);

impl Front {
    /// Writes a split descriptor at an offset in the memory.
    pub fn put(&self, at: usize, Desc(addr, len, flags, next): Desc) {
        let high = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.memory.store_u64(at, addr, Relaxed);
        self.memory.store_u64(at + 8, high, Relaxed);
    }

    /// Descriptor `index` of queue 0.
    pub fn desc(&self, index: u16, desc: Desc) {
        let at = self.layout.places(0).desc + 16 * usize::from(index);
        self.put(at, desc);
    }

    /// The descriptors of queue 0, from the first.
    pub fn descs(&self, descs: &[Desc]) {
        for (index, &desc) in (0..).zip(descs) {
            self.desc(index, desc);
        }
    }

    /// Makes chains available behind those there are, and kicks.
    pub fn avail(&mut self, heads: &[u16]) {
        let at = self.layout.places(0).driver;
        let mut idx = self.memory.load_u16(at + 2, Relaxed);
        for &head in heads {
            let slot = usize::from(idx % self.layout.ring_size);
            self.memory.store_u16(at + 4 + 2 * slot, head, Relaxed);
            idx = idx.wrapping_add(1);
        }
        self.jump(idx);
    }

    /// Sets the available index, and kicks.
    pub fn jump(&mut self, idx: u16) {
        let at = self.layout.places(0).driver;
        self.memory.store_u16(at + 2, idx, Release);
        self.queues[0].kick();
    }

    pub fn used(&self) -> u16 {
        let at = self.layout.places(0).device;
        self.memory.load_u16(at + 2, SeqCst)
    }

    /// Writes the header of a request, and 0xff into its status, in slot 0; where they are: header,
    /// status, data.
    pub fn request(&self, kind: u32, sector: u64) -> (u64, u64, u64) {
        let header = self.layout.header(0, 0);
        self.memory.store_u64(header, kind.into(), Relaxed);
        self.memory.store_u64(header + 8, sector, Relaxed);
        let status = self.layout.status(0, 0);
        self.memory.store_u8(status, 0xff, Relaxed);
        let data = self.layout.data(0, 0);
        (
            self.layout.gpa(header),
            self.layout.gpa(status),
            self.layout.gpa(data),
        )
    }

    pub fn status(&self) -> u8 {
        self.memory.load_u8(self.layout.status(0, 0), SeqCst)
    }

    /// Writes a packed descriptor; `flags` complete.
    pub fn packed(&self, index: u16, addr: u64, len: u32, id: u16, flags: u16) {
        let at = self.layout.places(0).desc + 16 * usize::from(index);
        self.memory.store_u64(at, addr, Relaxed);
        let high = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
        self.memory.store_u64(at + 8, high, Release);
    }
}
