//! The least of a virtio block driver (virtio 1.2, §4.1, §5.2): one queue, one request at a time,
//! both messages on one vector. It polls, and its rings are pages that a payload may write as it
//! likes.

use core::sync::atomic::{Ordering::SeqCst, fence};

use bare::pci;

use crate::tables::Page;
use crate::time;

/// Mass storage, other.
const CLASS: u32 = 0x01_8000;
const COMMAND_ON: u32 = 6;
const MSIX_ENABLE: u32 = 1 << 31;
/// The capability's number of virtio's structures, and their types.
const VENDOR: u8 = 9;
const COMMON: u32 = 1;
const DOORBELL: u32 = 2;
/// Registers of the common structure.
const FEATURE_SELECT: u64 = 0x08;
const FEATURE: u64 = 0x0c;
const CONFIG_VECTOR: u64 = 0x10;
const STATUS: u64 = 0x14;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_VECTOR: u64 = 0x1a;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_DESC: u64 = 0x20;
/// Status: acknowledged, with a driver, features, ready; and the device's own.
const FEATURES_OK: u8 = 0xb;
const DRIVER_OK: u8 = 0xf;
const NEEDS_RESET: u8 = 0x40;
/// Entries of the ring.
pub const SIZE: u16 = 8;
/// Descriptor flags.
pub const NEXT: u16 = 1;
/// See [`NEXT`].
pub const WRITE: u16 = 2;
/// Bytes of a sector.
pub const SECTOR: u32 = 512;

static DESC: Page = Page::new();
static AVAIL: Page = Page::new();
static USED: Page = Page::new();
static HEADER: Page = Page::new();
static STATE: Page = Page::new();

/// Addresses of the three parts of a ring.
#[derive(Clone, Copy)]
pub struct Places {
    /// Descriptors.
    pub desc: u64,
    /// The available ring.
    pub avail: u64,
    /// The used ring.
    pub used: u64,
}

impl Places {
    /// Returns this program's own pages.
    pub fn own() -> Self {
        Self {
            desc: DESC.address(),
            avail: AVAIL.address(),
            used: USED.address(),
        }
    }
}

/// The function, and its ring.
pub struct Block {
    registers: u64,
    doorbell: u64,
    /// Chains that were made available.
    idx: u16,
}

impl Block {
    /// Finds it, with both of its messages sent as `vector`.
    pub fn find(vector: u8) -> Result<Self, &'static str> {
        let function = pci::find(0..256, CLASS).ok_or("no block function")?;
        let base = pci::memory(function, 0).ok_or("no memory at BAR 0")?;
        let capability = pci::capability(function, pci::MSIX).ok_or("no MSI-X capability")?;
        let place = |kind| structure(function, kind).map(|offset| base + u64::from(offset));
        let block = Self {
            registers: place(COMMON).ok_or("no common configuration")?,
            doorbell: place(DOORBELL).ok_or("no doorbell")?,
            idx: 0,
        };
        let table = base + u64::from(pci::read(function, capability + 4) & !7);
        let command = pci::read(function, pci::COMMAND) & 0xffff | COMMAND_ON;
        // SAFETY: memory and bus master: its ring is pages that nothing else uses, or such as a
        // payload attacks with.
        unsafe { pci::write(function, pci::COMMAND, command) }
        for entry in [table, table + 16] {
            for (at, word) in [(0, 0xfee0_0000), (4, 0), (8, u32::from(vector)), (12, 0)] {
                put(entry + at, word);
            }
        }
        let control = pci::read(function, capability) & 0xffff;
        // SAFETY: its messages are the guest's.
        unsafe { pci::write(function, capability, control | MSIX_ENABLE) }
        Ok(block)
    }

    /// Resets it, and sets the ring up. Whether the device takes the features.
    pub fn start(&mut self, places: Places) -> bool {
        put::<u8>(self.registers + STATUS, 0);
        self.idx = 0;
        for page in [&DESC, &AVAIL, &USED] {
            (0..512).for_each(|at| page.set(at, 0));
        }
        put::<u8>(self.registers + STATUS, 3);
        // No feature but version 1: no event indices, no tables of descriptors.
        for (half, features) in [(0, 0), (1, 1)] {
            put::<u32>(self.registers + FEATURE_SELECT, half);
            put::<u32>(self.registers + FEATURE, features);
        }
        put(self.registers + STATUS, FEATURES_OK);
        let is_taken = get::<u8>(self.registers + STATUS) == FEATURES_OK;
        put::<u16>(self.registers + CONFIG_VECTOR, 0);
        put::<u16>(self.registers + QUEUE_SELECT, 0);
        put(self.registers + QUEUE_SIZE, SIZE);
        put::<u16>(self.registers + QUEUE_VECTOR, 1);
        for (at, place) in (0..)
            .step_by(8)
            .zip([places.desc, places.avail, places.used])
        {
            put(self.registers + QUEUE_DESC + at, place as u32);
            put(self.registers + QUEUE_DESC + at + 4, (place >> 32) as u32);
        }
        put::<u16>(self.registers + QUEUE_ENABLE, 1);
        put(self.registers + STATUS, DRIVER_OK);
        is_taken
    }

    /// Writes descriptor `index`: address, length, flags, next.
    pub fn desc(&self, index: usize, (address, len, flags, next): (u64, u32, u16, u16)) {
        let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        DESC.set(2 * index, address);
        DESC.set(2 * index + 1, rest);
    }

    /// Makes the chain at `head` available.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.idx % SIZE);
        put(AVAIL.address() + 4 + 2 * slot, head);
        self.jump(self.idx.wrapping_add(1));
    }

    /// Makes the available index this, and rings.
    pub fn jump(&mut self, idx: u16) {
        self.idx = idx;
        fence(SeqCst);
        put(AVAIL.address() + 2, idx);
        put::<u16>(self.doorbell, 0);
    }

    /// Address of the request's header, with this in it.
    pub fn header(kind: u32, sector: u64) -> u64 {
        HEADER.set(0, kind.into());
        HEADER.set(1, sector);
        HEADER.address()
    }

    /// Address of the status, which is none.
    pub fn state() -> u64 {
        STATE.set(0, 0xff);
        STATE.address()
    }

    /// Makes a request of a sector at `address` available.
    pub fn request(&mut self, kind: u32, sector: u64, address: u64) {
        let flags = if kind == 0 { WRITE | NEXT } else { NEXT };
        self.desc(0, (Self::header(kind, sector), 16, NEXT, 1));
        self.desc(1, (address, SECTOR, flags, 2));
        self.desc(2, (Self::state(), 1, WRITE, 0));
        self.offer(0);
    }

    /// Waits for the answer to the last request. Whether it was good.
    pub fn is_answered(&self, milliseconds: u64) -> bool {
        let is_used = || get::<u16>(USED.address() + 2) == self.idx;
        time::until(milliseconds, is_used) && get::<u8>(STATE.address()) == 0
    }

    /// Waits until the device wants a reset. Whether it does.
    pub fn wants_reset(&self, milliseconds: u64) -> bool {
        time::until(milliseconds, || {
            get::<u8>(self.registers + STATUS) & NEEDS_RESET != 0
        })
    }
}

/// Returns the offset of a structure of virtio's behind BAR 0.
fn structure(function: u16, kind: u32) -> Option<u32> {
    let mut at = pci::capability(function, VENDOR)?;
    for _ in 0..48 {
        let word = pci::read(function, at);
        if word as u8 == VENDOR && word >> 24 == kind {
            return Some(pci::read(function, at + 8));
        }
        at = (word >> 8) as u8;
        if at == 0 {
            break;
        }
    }
    None
}

fn put<T>(address: u64, value: T) {
    // SAFETY: a register of the function's, or a page of its ring, mapped as they are.
    unsafe { (address as *mut T).write_volatile(value) }
}

fn get<T: Copy>(address: u64) -> T {
    // SAFETY: as above.
    unsafe { (address as *const T).read_volatile() }
}
