//! A virtio-blk driver in user space: one split ring, polled, with memory the device reaches by
//! physical address.
//!
//! Linux's own driver resets a disk only when nothing is in flight. This one resets whenever its
//! caller asks, as firmware, a crash kernel or a driver in user space may. Specification: Virtio
//! 1.2, §2.7 (split rings), §3.1.1, §5.2.6.
//!
//! All memory is one huge page, which Linux does not move:
//!
//! | bytes | content |
//! |---|---|
//! | 0x0000 | descriptors, three for each request |
//! | 0x0400 | avail ring |
//! | 0x0800 | used ring |
//! | 0x1000 | for each request 64 bytes: header at 0, status byte at 32 |
//! | 0x2000 | for each request one block of data |
//!
//! UNSAFETY: memory that a device writes is not Rust memory: it is mapped by mmap(2), which the
//! standard library does not have, and reached by volatile accesses at checked offsets.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use crate::function::Function;
use crate::{BLOCK, device};

/// Number of requests in flight at most; each has its slot.
pub const SLOTS: usize = 4;
/// Size of the ring.
const RING: u16 = 16;

const AVAIL: usize = 0x400;
const USED: usize = 0x800;
const HEADERS: usize = 0x1000;
const STATUS_AT: usize = 32;
const DATA: usize = 0x2000;

/// Size of the memory: one huge page.
const MEMORY: usize = 2 << 20;

/// Registers of the common configuration (§4.1.4.3).
const DEVICE_FEATURE_SELECT: u32 = 0x00;
const DEVICE_FEATURE: u32 = 0x04;
const DRIVER_FEATURE_SELECT: u32 = 0x08;
const DRIVER_FEATURE: u32 = 0x0c;
const DEVICE_STATUS: u32 = 0x14;
const QUEUE_SELECT: u32 = 0x16;
const QUEUE_SIZE: u32 = 0x18;
const QUEUE_ENABLE: u32 = 0x1c;
const QUEUE_NOTIFY_OFF: u32 = 0x1e;
const QUEUE_DESC: u32 = 0x20;
const QUEUE_DRIVER: u32 = 0x28;
const QUEUE_DEVICE: u32 = 0x30;

/// Device status (§2.1).
const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;

/// `VIRTIO_BLK_F_FLUSH`, `VIRTIO_F_VERSION_1`, `VIRTIO_F_ACCESS_PLATFORM`: the offered features
/// that this driver accepts.
const FEATURES: u64 = 1 << 9 | 1 << 32 | 1 << 33;

/// Descriptor flags (§2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Time limit of a reset, or of a request that nothing delays.
const LIMIT: Duration = Duration::from_secs(60);

/// Operation of a request, with its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Reads a block into the slot's data.
    Read(u64),
    /// Writes the slot's data to a block.
    Write(u64),
    /// Makes acknowledged writes durable.
    Flush,
}

/// A driver that owns a function.
#[derive(Debug)]
pub struct Driver {
    function: Function,
    memory: Memory,
    doorbell: u16,
    /// Number of heads made available, and of used ones consumed.
    avail: u16,
    used: u16,
}

impl Driver {
    /// Resets the device and starts it. The kernel's driver has released `function`.
    ///
    /// # Errors
    /// The system's own; no huge page; a device that refuses its features.
    pub fn start(function: Function) -> io::Result<Self> {
        let mut driver = Self {
            function,
            memory: Memory::new()?,
            doorbell: 0,
            avail: 0,
            used: 0,
        };
        driver.function.set_bus_master(true)?;
        driver.reset()?;
        driver.start_again()?;
        Ok(driver)
    }

    /// Resets the device, and returns when the device reports that the reset is complete. Requests
    /// in flight are abandoned.
    ///
    /// # Errors
    /// The system's own; a device that is not reset within a minute.
    pub fn reset(&mut self) -> io::Result<()> {
        self.function.write(DEVICE_STATUS, [0])?;
        device::wait_until(LIMIT, "the device is not reset", || Ok(self.status()? == 0))
    }

    /// Starts a device that has been reset.
    ///
    /// # Errors
    /// The system's own; a device that refuses its features.
    pub fn start_again(&mut self) -> io::Result<()> {
        let mut status = 0;
        for bit in [ACKNOWLEDGE, DRIVER] {
            status |= bit;
            self.function.write(DEVICE_STATUS, [status])?;
        }
        for half in [0_u32, 1] {
            self.function
                .write(DEVICE_FEATURE_SELECT, half.to_le_bytes())?;
            let offered = u32::from_le_bytes(self.function.read(DEVICE_FEATURE)?);
            let wanted = (FEATURES >> (32 * half)) as u32;
            self.function
                .write(DRIVER_FEATURE_SELECT, half.to_le_bytes())?;
            self.function
                .write(DRIVER_FEATURE, (offered & wanted).to_le_bytes())?;
        }
        status |= FEATURES_OK;
        self.function.write(DEVICE_STATUS, [status])?;
        if self.status()? & FEATURES_OK == 0 {
            return Err(io::Error::other("the device refuses its features"));
        }
        self.memory.clear(0, HEADERS);
        (self.avail, self.used) = (0, 0);
        self.function.write(QUEUE_SELECT, 0_u16.to_le_bytes())?;
        self.function.write(QUEUE_SIZE, RING.to_le_bytes())?;
        for (register, at) in [(QUEUE_DESC, 0), (QUEUE_DRIVER, AVAIL), (QUEUE_DEVICE, USED)] {
            let address = self.memory.physical(at);
            self.function
                .write(register, (address as u32).to_le_bytes())?;
            self.function
                .write(register + 4, ((address >> 32) as u32).to_le_bytes())?;
        }
        self.doorbell = u16::from_le_bytes(self.function.read(QUEUE_NOTIFY_OFF)?);
        self.function.write(QUEUE_ENABLE, 1_u16.to_le_bytes())?;
        self.function.write(DEVICE_STATUS, [status | DRIVER_OK])
    }

    fn status(&self) -> io::Result<u8> {
        self.function.read(DEVICE_STATUS).map(|[status]| status)
    }

    /// Returns whether the device asks for a reset (DEVICE_NEEDS_RESET): it has met an
    /// unrecoverable error.
    ///
    /// # Errors
    /// The system's own.
    pub fn needs_reset(&self) -> io::Result<bool> {
        Ok(self.status()? & NEEDS_RESET != 0)
    }

    /// Returns the data of a slot, to be written or as read.
    #[must_use]
    pub fn data(&self, slot: usize) -> Vec<u8> {
        assert!(slot < SLOTS, "a slot");
        self.memory.bytes(DATA + slot * BLOCK, BLOCK)
    }

    /// Sets the data of a slot.
    pub fn set_data(&mut self, slot: usize, data: &[u8]) {
        assert!(slot < SLOTS && data.len() == BLOCK, "one block of a slot");
        self.memory.put(DATA + slot * BLOCK, data);
    }

    /// Makes a request available and rings the doorbell.
    ///
    /// # Errors
    /// The system's own.
    pub fn submit(&mut self, slot: usize, request: Request) -> io::Result<()> {
        assert!(slot < SLOTS, "a slot");
        let (kind, block, data) = match request {
            Request::Read(block) => (0_u32, block, Some(NEXT | WRITE)),
            Request::Write(block) => (1, block, Some(NEXT)),
            Request::Flush => (4, 0, None),
        };
        let header = HEADERS + slot * 64;
        self.memory.put(header, &kind.to_le_bytes());
        self.memory.put(header + 4, &0_u32.to_le_bytes());
        // Sectors of 512 bytes, whatever the size of a block.
        let sector = block * (BLOCK as u64 / 512);
        self.memory.put(header + 8, &sector.to_le_bytes());
        self.memory.put(header + STATUS_AT, &[0xff]);

        let head = (slot * 3) as u16;
        let mut chain = vec![(header, 16, NEXT)];
        chain.extend(data.map(|flags| (DATA + slot * BLOCK, BLOCK, flags)));
        chain.push((header + STATUS_AT, 1, WRITE));
        for (number, (at, len, flags)) in (head..).zip(chain) {
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&self.memory.physical(at).to_le_bytes());
            descriptor[8..12].copy_from_slice(&(len as u32).to_le_bytes());
            descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
            descriptor[14..].copy_from_slice(&(number + 1).to_le_bytes());
            self.memory.put(usize::from(number) * 16, &descriptor);
        }
        let entry = AVAIL + 4 + usize::from(self.avail % RING) * 2;
        self.memory.put(entry, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
        // Orders the stores of descriptors and ring before the store of the index: the device reads
        // the index first.
        fence(Ordering::Release);
        self.memory.put_u16(AVAIL + 2, self.avail);
        self.function.ring(self.doorbell)
    }

    /// Waits for all requests made available since the start. Returns the status byte of each slot.
    ///
    /// # Errors
    /// `TimedOut` after a minute.
    pub fn wait(&mut self) -> io::Result<[u8; SLOTS]> {
        device::wait_until(LIMIT, "a request was not answered", || {
            self.used = self.memory.u16(USED + 2);
            Ok(self.used == self.avail)
        })?;
        // Orders the load of the used index before the loads of data: the device writes the index
        // last.
        fence(Ordering::Acquire);
        Ok(std::array::from_fn(|slot| {
            self.memory.bytes(HEADERS + slot * 64 + STATUS_AT, 1)[0]
        }))
    }

    /// Executes one request with slot 0 while no other is in flight.
    ///
    /// # Errors
    /// As [`Driver::wait`]; a status other than OK.
    pub fn do_now(&mut self, request: Request) -> io::Result<()> {
        self.submit(0, request)?;
        match self.wait()?[0] {
            0 => Ok(()),
            status => Err(io::Error::other(format!(
                "{request:?} ended with status {status}"
            ))),
        }
    }

    /// Resets the device and releases the function.
    ///
    /// # Errors
    /// As [`Driver::reset`].
    pub fn end(mut self) -> io::Result<Function> {
        self.reset()?;
        Ok(self.function)
    }
}

/// One huge page.
#[derive(Debug)]
struct Memory {
    start: *mut u8,
    physical: u64,
}

impl Memory {
    #[expect(unsafe_code, reason = "no safe wrapper of mmap; see the module's head")]
    fn new() -> io::Result<Self> {
        fs::write("/proc/sys/vm/nr_hugepages", "1")?;
        // Shared, so that a child process makes no copy of it.
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_POPULATE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, which no other code refers to.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), MEMORY, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start.cast::<u8>();
        // proc(5): a word of 64 bits for each page; bits 0 to 54 are the frame, and bit 63 is set
        // if it is in memory.
        let pagemap = fs::File::open("/proc/self/pagemap")?;
        let mut word = [0; 8];
        pagemap.read_exact_at(&mut word, start.addr() as u64 / 4096 * 8)?;
        let word = u64::from_le_bytes(word);
        let frame = word & ((1 << 55) - 1);
        if word >> 63 == 0 || frame == 0 {
            return Err(io::Error::other("the page's physical address is hidden"));
        }
        Ok(Self {
            start,
            physical: frame * 4096,
        })
    }

    /// Returns the physical address of the byte at `at`.
    fn physical(&self, at: usize) -> u64 {
        self.physical + at as u64
    }

    #[expect(unsafe_code, reason = "see the module's head")]
    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= MEMORY, "inside the memory");
        // SAFETY: the bytes are inside the mapping, which lives as long as the process; volatile,
        // since a device may write them at any time.
        (at..at + len)
            .map(|at| unsafe { self.start.add(at).read_volatile() })
            .collect()
    }

    #[expect(unsafe_code, reason = "see the module's head")]
    fn put(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= MEMORY, "inside the memory");
        for (at, byte) in (at..).zip(bytes) {
            // SAFETY: as in `bytes`.
            unsafe { self.start.add(at).write_volatile(*byte) };
        }
    }

    fn clear(&mut self, at: usize, len: usize) {
        self.put(at, &vec![0; len]);
    }

    /// Reads the two bytes at `at`, which is even, at once: a ring's index.
    #[expect(unsafe_code, reason = "see the module's head")]
    fn u16(&self, at: usize) -> u16 {
        assert!(at.is_multiple_of(2) && at + 2 <= MEMORY, "a whole index");
        // SAFETY: as in `bytes`; aligned, since the mapping starts at a page.
        u16::from_le(unsafe { self.start.add(at).cast::<u16>().read_volatile() })
    }

    /// Writes the two bytes at `at`, which is even, at once.
    #[expect(unsafe_code, reason = "see the module's head")]
    fn put_u16(&mut self, at: usize, value: u16) {
        assert!(at.is_multiple_of(2) && at + 2 <= MEMORY, "a whole index");
        // SAFETY: as in `u16`.
        unsafe {
            self.start
                .add(at)
                .cast::<u16>()
                .write_volatile(value.to_le());
        }
    }
}
