//! `edu`, QEMU's device for teaching, driven through VFIO: its DMA engine copies at most 4 KiB
//! between its buffer and memory.
//!
//! Specification: `docs/specs/edu.rst` of QEMU. Registers are in BAR 0, those of DMA have 64 bits;
//! the buffer is accessed by DMA alone. A copy begins a tenth of a second after it was requested. A
//! refused access ends like any other.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use dma_map::IoMap;
use dma_map::address::PhysAddr;
use dma_map::invalidate::{Command, Invalidator};
use dma_map::iova::{Access, IovaPfn, IovaRange};
use vfio::{Bar, Container, DmaBuffer, Group, VfioMap};

use super::{COPY, CopyDevice, MEMORY, PAGE};

/// Identification (0x00, 32-bit, RO): 0xRRrr00ed.
const ID: usize = 0x00;
/// Liveness check (0x04, 32-bit, RW): reads as the inverse of what was written.
const LIVENESS: usize = 0x04;
/// DMA source address (0x80, 64-bit, RW).
const SOURCE: usize = 0x80;
/// DMA destination address (0x88, 64-bit, RW).
const DESTINATION: usize = 0x88;
/// DMA transfer count (0x90, 64-bit, RW).
const COUNT: usize = 0x90;
/// DMA command (0x98, 64-bit, RW): run, and from the device to memory.
const COMMAND: usize = 0x98;
const COMMAND_RUN: u64 = 1 << 0;
const COMMAND_TO_MEMORY: u64 = 1 << 1;
/// Address of its buffer, as the device sees it.
const BUFFER: u64 = 0x4_0000;

/// Time limit of a copy, which takes a tenth of a second of the emulated clock.
const COPY_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(2);

/// Bytes of a large page.
const LARGE: u64 = 2 << 20;

/// An `edu` device.
#[derive(Debug)]
pub struct Edu {
    bar: Bar,
    map: VfioMap,
    memory: DmaBuffer,
    last_address: u64,
    // Open for as long as the device is used.
    _device: vfio::Device,
    _group: Group,
}

impl Edu {
    /// Opens the device at a PCI address, which is bound to vfio-pci. It supports addresses of
    /// `mask_bits` bits: 28, unless QEMU's `dma_mask` sets another number.
    ///
    /// # Errors
    /// A description: the missing prerequisite, or that it is no `edu`.
    pub fn open(address: &str, mask_bits: u32) -> Result<Self, String> {
        let words = |error: vfio::VfioError| error.to_string();
        let last_address = 1_u64.checked_shl(mask_bits).map_or(u64::MAX, |end| end - 1);
        let group = Group::of_device(address).map_err(words)?;
        let container = Container::open().map_err(words)?;
        container.attach(&group).map_err(words)?;
        let device = group.device(address).map_err(words)?;
        device.enable_dma().map_err(words)?;
        let bar = device.bar(0).map_err(words)?;
        if bar.len() < COMMAND + 8 || bar.read32(ID) & 0xff != 0xed {
            return Err(format!("{address} is no edu device"));
        }
        bar.write32(LIVENESS, 0x1234_5678);
        if bar.read32(LIVENESS) != !0x1234_5678 {
            return Err(format!("{address} does not answer at its registers"));
        }
        let map = VfioMap::new(container).map_err(words)?;
        let memory = map.allocate(MEMORY).map_err(words)?;
        Ok(Self {
            bar,
            map,
            memory,
            last_address,
            _device: device,
            _group: group,
        })
    }

    fn address_of(&self, at: usize) -> u64 {
        self.memory.segment(at, 0).phys.raw()
    }

    fn copy(&mut self, from: u64, to: u64, command: u64) -> Result<(), String> {
        let bar = &self.bar;
        bar.write64(SOURCE, from);
        bar.write64(DESTINATION, to);
        bar.write64(COUNT, COPY as u64);
        bar.write64(COMMAND, command | COMMAND_RUN);
        let start = Instant::now();
        while bar.read64(COMMAND) & COMMAND_RUN != 0 {
            if start.elapsed() > COPY_LIMIT {
                return Err(format!(
                    "a copy from {from:#x} to {to:#x} has no end after {} s",
                    COPY_LIMIT.as_secs()
                ));
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

fn range(iova: u64, len: usize) -> Result<IovaRange, String> {
    let no_range = || format!("{len} bytes at {iova:#x} are no pages");
    IovaRange::new(IovaPfn::new(iova / PAGE as u64), (len / PAGE) as u64).ok_or_else(no_range)
}

impl CopyDevice for Edu {
    fn large_at(&self) -> usize {
        let reserved = super::CANDIDATES.end * PAGE;
        let address = self.address_of(reserved);
        let skipped = address.next_multiple_of(LARGE) - address;
        reserved + usize::try_from(skipped).expect("less than a large page")
    }

    fn read(&self, at: usize, data: &mut [u8]) {
        self.memory.read(at, data);
    }

    fn write(&mut self, at: usize, data: &[u8]) {
        self.memory.write(at, data);
    }

    /// Looks the address up in `/proc/self/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`),
    /// which shows frames to root alone.
    fn physical(&self, at: usize) -> Result<u64, String> {
        const PRESENT: u64 = 1 << 63;
        const FRAME: u64 = (1 << 55) - 1;
        let page = self.address_of(at) / PAGE as u64;
        let mut entry = [0; 8];
        let file = File::open("/proc/self/pagemap");
        let read = file.and_then(|file| file.read_exact_at(&mut entry, page * 8));
        read.map_err(|error| format!("/proc/self/pagemap: {error}"))?;
        let entry = u64::from_le_bytes(entry);
        match (entry & PRESENT != 0, entry & FRAME) {
            (true, frame @ 1..) => Ok(frame * PAGE as u64),
            _ => Err("/proc/self/pagemap shows no frame: run this as root".into()),
        }
    }

    fn last_address(&self) -> u64 {
        self.last_address
    }

    fn map(&mut self, iova: u64, at: usize, len: usize, access: Access) -> Result<(), String> {
        let memory = PhysAddr::new(self.address_of(at));
        let mapped = self.map.map(range(iova, len)?, memory, access);
        mapped.map_err(|error| format!("mapping {len} bytes at {iova:#x}: {error:?}"))
    }

    fn unmap(&mut self, iova: u64, len: usize) -> Result<(), String> {
        let range = range(iova, len)?;
        let unmapped = self.map.unmap(range);
        unmapped.map_err(|error| format!("unmapping {len} bytes at {iova:#x}: {error:?}"))?;
        // The call that ends the mapping in the kernel.
        let ended = self.map.submit(&[Command::Pages(range)]);
        ended.map_err(|error| format!("unmapping {len} bytes at {iova:#x}: {error:?}"))?;
        Ok(())
    }

    fn load(&mut self, iova: u64) -> Result<(), String> {
        self.copy(iova, BUFFER, 0)
    }

    fn store(&mut self, iova: u64) -> Result<(), String> {
        self.copy(BUFFER, iova, COMMAND_TO_MEMORY)
    }

    fn pause(&mut self, time: Duration) {
        thread::sleep(time);
    }
}
