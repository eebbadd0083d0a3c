//! A guest's memory and driver for tests.

use std::cell::RefCell;
use std::ops::Range;

use address::Iova;
use virtqueue::{Memory, OutOfReach, QueueConfig};

/// Memory from 0 up to its length; the guest does not have the part `hole`.
pub struct Ram {
    bytes: RefCell<Vec<u8>>,
    pub hole: Range<u64>,
}

impl Ram {
    pub fn new(len: usize, hole: Range<u64>) -> Self {
        Self {
            bytes: RefCell::new(vec![0; len]),
            hole,
        }
    }

    fn range(&self, at: Iova, len: usize) -> Result<Range<usize>, OutOfReach> {
        let end = at.raw().checked_add(len as u64).ok_or(OutOfReach(at))?;
        let is_there = end <= self.bytes.borrow().len() as u64;
        let is_whole = end <= self.hole.start || self.hole.end <= at.raw();
        let range = at.raw() as usize..end as usize;
        (is_there && is_whole)
            .then_some(range)
            .ok_or(OutOfReach(at))
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.bytes.borrow_mut()[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        self.bytes.borrow()[at as usize..][..len].to_vec()
    }
}

impl Memory for Ram {
    fn read(&self, at: Iova, buf: &mut [u8]) -> Result<(), OutOfReach> {
        buf.copy_from_slice(&self.bytes.borrow()[self.range(at, buf.len())?]);
        Ok(())
    }

    fn write(&self, at: Iova, buf: &[u8]) -> Result<(), OutOfReach> {
        let range = self.range(at, buf.len())?;
        self.bytes.borrow_mut()[range].copy_from_slice(buf);
        Ok(())
    }

    fn load_u16(&self, at: Iova) -> Result<u16, OutOfReach> {
        let mut bytes = [0; 2];
        self.read(at, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn store_u16(&self, at: Iova, value: u16) -> Result<(), OutOfReach> {
        self.write(at, &value.to_le_bytes())
    }
}

pub const DESC: u64 = 0x1000;
pub const AVAIL: u64 = 0x2000;
pub const USED: u64 = 0x3000;
/// Addresses of headers, and of statuses.
pub const HEADER: u64 = 0x4000;
pub const STATUS: u64 = 0x5000;
pub const DATA: u64 = 0x1_0000;
pub const SIZE: u16 = 8;

pub const WRITE: u16 = 2;
pub const NEXT: u16 = 1;

pub fn config() -> QueueConfig {
    QueueConfig {
        index: 0,
        size: SIZE,
        desc: Iova::new(DESC),
        avail: Iova::new(AVAIL),
        used: Iova::new(USED),
    }
}

/// A driver with one request at a time.
pub struct Driver {
    pub ram: Ram,
    idx: u16,
}

impl Driver {
    pub fn new() -> Self {
        Self {
            ram: Ram::new(0x2_0000, 0x1_8000..0x1_9000),
            idx: 0,
        }
    }

    pub fn desc(&self, index: u16, (addr, len, flags): (u64, u32, u16), next: u16) {
        let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        let at = DESC + 16 * u64::from(index);
        self.ram.put(at, &addr.to_le_bytes());
        self.ram.put(at + 8, &rest.to_le_bytes());
    }

    /// Makes a chain of these pieces available.
    pub fn chain(&mut self, pieces: &[(u64, u32, u16)]) {
        for (index, &(addr, len, flags)) in (0..).zip(pieces) {
            let next = if usize::from(index) + 1 < pieces.len() {
                NEXT
            } else {
                0
            };
            self.desc(index, (addr, len, flags | next), index + 1);
        }
        self.offer(0);
    }

    pub fn offer(&mut self, head: u16) {
        self.ram.put(
            AVAIL + 4 + 2 * u64::from(self.idx % SIZE),
            &head.to_le_bytes(),
        );
        self.idx = self.idx.wrapping_add(1);
        self.ram.put(AVAIL + 2, &self.idx.to_le_bytes());
    }

    /// A request in pieces of data.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32)]) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.ram.put(HEADER, &header);
        self.ram.put(STATUS, &[0xee]);
        let flags = if kind == 1 { 0 } else { WRITE };
        let mut pieces = vec![(HEADER, 16, 0)];
        pieces.extend(data.iter().map(|&(at, len)| (at, len, flags)));
        pieces.push((STATUS, 1, WRITE));
        self.chain(&pieces);
    }

    pub fn status(&self) -> u8 {
        self.ram.get(STATUS, 1)[0]
    }

    /// The used ring's index, and the length in its last element.
    pub fn used(&self) -> (u16, u32) {
        let bytes = self.ram.get(USED + 2, 2);
        let idx = u16::from_le_bytes([bytes[0], bytes[1]]);
        let last = u64::from(idx.wrapping_sub(1) % SIZE);
        let len = self.ram.get(USED + 8 + 8 * last, 4);
        (idx, u32::from_le_bytes(len.try_into().unwrap()))
    }
}
