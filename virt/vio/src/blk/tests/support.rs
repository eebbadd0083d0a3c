//! A guest with one block device.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::OnceLock;

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Dma, Gpa, Iommu, PhysMem};

use crate::blk::{Blk, BlkClass, BlkConfig, MemDisk, RawDisk, RawDiskOptions, Transfer};
use crate::body::{Device, DeviceClass};
use crate::fake_driver::{CountIrq, FakeDriver};
use crate::{Activity, PollBudget, QueueDevice, Service};

pub use super::slow::{SlowControl, SlowDisk};

/// Address of the rings.
pub const RINGS: u64 = 0x1_0000;
/// Request headers and status bytes: 64 bytes each.
pub const HEADERS: u64 = 0x2_0000;
/// Data buffers.
pub const DATA: u64 = 0x10_0000;
/// Guest memory in bytes.
pub const MEMORY: u64 = 16 << 20;
/// Disk size in sectors.
pub const SECTORS: u64 = 8192;

/// Returns a disk image whose bytes depend on their position.
pub fn image() -> Vec<u8> {
    // Made once: in a debug build it takes a tenth of a second.
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    let byte = |at| (at / 512 * 7 + at % 509) as u8;
    IMAGE
        .get_or_init(|| (0..SECTORS * 512).map(byte).collect())
        .clone()
}

/// An unlinked file with these contents.
pub fn file_with(bytes: &[u8]) -> File {
    let path = std::env::temp_dir().join(format!(
        "vio-test-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let mut file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .expect("a temporary file");
    std::fs::remove_file(&path).expect("it was just made");
    file.write_all(bytes).expect("space for a temporary file");
    file
}

/// The contents of a file.
pub fn contents(file: &mut File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).expect("a file seeks");
    file.read_to_end(&mut bytes).expect("a file reads");
    bytes
}

/// A raw disk on a temporary file, and that file.
pub fn raw_disk(transfer: Transfer) -> (Box<RawDisk>, File) {
    raw_disk_with(transfer, &image())
}

/// A raw disk on a temporary file with these contents, and that file.
pub fn raw_disk_with(transfer: Transfer, bytes: &[u8]) -> (Box<RawDisk>, File) {
    let file = file_with(bytes);
    let again = file.try_clone().expect("a descriptor");
    let options = RawDiskOptions {
        transfer,
        depth: 32,
        ..Default::default()
    };
    (
        Box::new(RawDisk::from_file(file, options).expect("a disk")),
        again,
    )
}

/// A slow disk over a raw disk.
pub fn slow(transfer: Transfer) -> (Box<SlowDisk>, SlowControl, File) {
    let (below, file) = raw_disk(transfer);
    let (disk, control) = SlowDisk::new(below).expect("a socket pair");
    (Box::new(disk), control, file)
}

/// A RAM disk.
pub fn mem_disk() -> Box<MemDisk> {
    Box::new(MemDisk::new(image(), 64, false))
}

/// A guest: memory, one queue, and the device.
pub struct Guest<C: DeviceClass = BlkClass> {
    pub mem: ArrayMem,
    pub driver: FakeDriver<ArrayMem>,
    pub blk: Device<C>,
    pub irq: CountIrq,
}

impl Guest {
    /// A device over `io` with queue size 64 and all its features.
    pub fn new(io: Box<dyn crate::blk::BlockIo>) -> Self {
        Self::with(
            io,
            BlkConfig {
                queue_size: 64,
                ..Default::default()
            },
            !0,
        )
    }

    /// Makes a guest with this configuration and, of the offered features, those in `mask`.
    pub fn with(io: Box<dyn crate::blk::BlockIo>, config: BlkConfig, mask: u64) -> Self {
        Self::in_memory(ArrayMem::new(MEMORY), RINGS, io, config, mask)
    }

    fn in_memory(
        mem: ArrayMem,
        rings: u64,
        io: Box<dyn crate::blk::BlockIo>,
        config: BlkConfig,
        mask: u64,
    ) -> Self {
        let blk = Blk::new(config, io).expect("a valid configuration");
        Self::over(mem, rings, blk, config.queue_size, mask)
    }

    /// A device with queue size 64 and all its features in memory that others use too: its ring at
    /// `rings`.
    pub fn on(mem: ArrayMem, rings: u64, io: Box<dyn crate::blk::BlockIo>) -> Self {
        let config = BlkConfig {
            queue_size: 64,
            ..Default::default()
        };
        Self::in_memory(mem, rings, io, config, !0)
    }
}

impl<C: DeviceClass> Guest<C> {
    /// A driver of `blk`, whose queue has so many entries.
    pub fn over(mem: ArrayMem, rings: u64, mut blk: Device<C>, size: u16, mask: u64) -> Self {
        let driver = FakeDriver::new(mem.clone(), Gpa::new(rings), 0, size);
        let features = blk.features() & mask;
        blk.activate(features, &[driver.config()], mem.keep_alive())
            .expect("a valid activation");
        Self {
            mem,
            driver,
            blk,
            irq: CountIrq::default(),
        }
    }

    /// Returns a view of all the memory.
    pub fn dma(&self) -> FlatDma {
        FlatDma::new(self.mem.clone())
    }

    /// Address of header `slot`; its status byte is 48 bytes on.
    pub fn header(&self, slot: u64, kind: u32, sector: u64) -> u64 {
        let at = HEADERS + 64 * slot;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.put(at, &header);
        self.driver.put(at + 48, &[0xff]);
        at
    }

    /// Status byte of header `slot`.
    pub fn status(&self, slot: u64) -> u8 {
        self.mem.get::<1>(Gpa::new(HEADERS + 64 * slot + 48))[0]
    }

    /// Makes a request available: header `slot`, these data buffers.
    pub fn request(
        &mut self,
        slot: u64,
        kind: u32,
        sector: u64,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
    ) -> u16 {
        let header = self.header(slot, kind, sector);
        let mut read = vec![(header, 16)];
        read.extend(readable);
        let mut write = writable.to_vec();
        write.push((header + 48, 1));
        self.driver.add(&read, &write)
    }

    /// Polls until a used element comes; panics after two seconds.
    pub fn wait_used<D: Dma>(&mut self, dma: &mut D) -> (u16, u32) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(2);
        loop {
            let _ = self.blk.poll(dma, &mut self.irq, 0);
            if let Some(used) = self.driver.used() {
                return used;
            }
            assert!(
                std::time::Instant::now() < deadline,
                "no completion: {:?}",
                self.blk.stats()
            );
        }
    }

    /// Stops the device as Bus Master off does; requests in flight.
    pub fn stop<D: Dma>(&mut self, dma: &mut D) -> u32 {
        self.blk.set_service(Service::Stopped);
        let _ = self
            .blk
            .visit(dma, &mut self.irq, &mut PollBudget::alone(0));
        self.blk.in_flight()
    }

    /// Polls until idle.
    pub fn settle<D: Dma>(&mut self, dma: &mut D) {
        for _ in 0..10_000 {
            if self.blk.poll(dma, &mut self.irq, 0) == Activity::Idle {
                return;
            }
        }
        panic!("the device never becomes idle: {:?}", self.blk.stats());
    }

    /// Runs one request to its end; status and bytes written.
    pub fn run(
        &mut self,
        kind: u32,
        sector: u64,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
    ) -> (u8, u32) {
        let mut dma = self.dma();
        let head = self.request(0, kind, sector, readable, writable);
        let (used, len) = self.wait_used(&mut dma);
        assert_eq!(used, head);
        assert_eq!(dma.iommu.leases().len(), 0, "a lease outlived its request");
        (self.status(0), len)
    }
}

impl<C: DeviceClass> Guest<C> {
    /// Resets the device and sets up a fresh driver, as a guest's driver does on reload.
    pub fn reactivate(&mut self) {
        let mut dma = self.dma();
        assert_eq!(self.stop(&mut dma), 0);
        self.blk.reset();
        let size = self.driver.size();
        self.driver = FakeDriver::new(self.mem.clone(), Gpa::new(RINGS), 0, size);
        let features = self.blk.features();
        let config = [self.driver.config()];
        self.blk
            .activate(features, &config, self.mem.keep_alive())
            .expect("a valid activation");
    }
}

/// Whether one of the descriptors becomes readable in time.
#[expect(
    unsafe_code,
    reason = "poll(2), which the standard library does not offer"
)]
pub fn readable_within(fds: &[std::os::fd::RawFd], timeout_ms: i32) -> bool {
    let mut polls: Vec<libc::pollfd> = fds
        .iter()
        .map(|&fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    // SAFETY: as many `pollfd` as the vector has.
    unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout_ms) > 0 }
}
