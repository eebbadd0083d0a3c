//! A device: its regions, its interrupts, its reset, and its registers.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use zerocopy::IntoBytes;

use crate::chain::whole_answer;
use crate::error::{Errno, VfioError, failed};
use crate::irq::{self, Irq, IrqIndex};
use crate::region::Region;
use crate::sys;
use crate::sys::Registers;
use crate::uapi::{self, Sized32};

/// PCI configuration space, offset 4, 16 bits: the command register.
const COMMAND: u64 = 4;
/// Its bits: memory space, bus master.
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;

/// Facts about a device, as `struct vfio_device_info` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// [`Device::reset`] resets it.
    pub can_reset: bool,
    /// It is a PCI function.
    pub is_pci: bool,
    /// Number of regions.
    pub regions: u32,
    /// Number of kinds of interrupts.
    pub irqs: u32,
}

impl From<uapi::DeviceInfo> for DeviceInfo {
    fn from(info: uapi::DeviceInfo) -> Self {
        Self {
            can_reset: info.flags & uapi::DEVICE_CAN_RESET != 0,
            is_pci: info.flags & uapi::DEVICE_IS_PCI != 0,
            regions: info.num_regions,
            irqs: info.num_irqs,
        }
    }
}

/// A PCI device. When its last file is closed the kernel takes its bus mastering away and resets
/// it.
#[derive(Debug)]
pub struct Device {
    file: File,
    address: String,
    info: DeviceInfo,
}

impl Device {
    pub(crate) fn new(file: File, address: String) -> Result<Self, VfioError> {
        let mut info = uapi::DeviceInfo::zeroed();
        let call = &uapi::DEVICE_GET_INFO;
        sys::with_struct(&file, call, &mut info).map_err(failed(call, || address.clone()))?;
        Ok(Self {
            file,
            address,
            info: info.into(),
        })
    }

    /// Address, for example `0000:01:00.0`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// File of the device, which its regions are mapped from.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Facts that the kernel stated when the device was opened.
    pub fn info(&self) -> DeviceInfo {
        self.info
    }

    /// Resets the function, if it can be reset alone: false where it cannot, and nothing was done.
    ///
    /// # Errors
    /// [`VfioError::Call`].
    pub fn reset(&self) -> Result<bool, VfioError> {
        if self.info.can_reset {
            let call = &uapi::DEVICE_RESET;
            sys::without_argument(&self.file, call).map_err(self.failed(call))?;
        }
        Ok(self.info.can_reset)
    }

    /// Lets it answer at its registers, and use DMA (Memory Space and Bus Master of the command
    /// register).
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn enable_dma(&self) -> Result<(), VfioError> {
        let config = self.region(uapi::CONFIG_REGION)?;
        let mut bytes = [0; 2];
        self.read(&config, COMMAND, &mut bytes)?;
        let command = u16::from_le_bytes(bytes) | COMMAND_MEMORY | COMMAND_MASTER;
        self.write(&config, COMMAND, &command.to_le_bytes())
    }

    /// Maps one of its BARs, 0 to 5.
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn bar(&self, index: u32) -> Result<Bar, VfioError> {
        let region = self.region(index)?;
        let problem = |problem| self.problem(index, problem);
        if index >= 6 {
            return Err(problem("is no BAR"));
        }
        if region.size == 0 {
            return Err(problem("is not there"));
        }
        if !region.can_mmap {
            return Err(problem("cannot be mapped"));
        }
        let len = usize::try_from(region.size).map_err(|_| problem("is too large"))?;
        Registers::new(&self.file, region.offset, len)
            .map(Bar)
            .map_err(|errno| VfioError::Call {
                call: "mmap",
                subject: format!("BAR {index} of {}", self.address),
                errno,
            })
    }

    /// Region of this index, with a size of 0 where the function has none: BARs are 0 to 5, the ROM
    /// is 6, the configuration space 7.
    ///
    /// # Errors
    /// [`VfioError`]: the index is none of the device's, or the kernel's answer cannot be used.
    pub fn region(&self, index: u32) -> Result<Region, VfioError> {
        let head = uapi::RegionInfo {
            index,
            ..uapi::RegionInfo::zeroed()
        };
        let call = &uapi::DEVICE_GET_REGION_INFO;
        let ask = |bytes: &mut [u8]| sys::with_buffer(&self.file, call, bytes);
        let bytes = whole_answer(head.as_bytes(), ask).map_err(self.failed(call))?;
        let region = Region::parse(&bytes).map_err(|source| VfioError::RegionInfo {
            address: self.address.clone(),
            index,
            source,
        })?;
        match region.index == index {
            true => Ok(region),
            false => Err(self.problem(index, "was answered for with another one")),
        }
    }

    /// Reads bytes of a region from its byte `at` on, as the kernel does: for registers in accesses
    /// of 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// [`VfioError`]: the bytes do not lie in the region, or the kernel refuses, as for a BAR while
    /// Memory Space is off.
    pub fn read(&self, region: &Region, at: u64, data: &mut [u8]) -> Result<(), VfioError> {
        let offset = self.place(region, region.can_read, at, data.len())?;
        let read = self.file.read_exact_at(data, offset);
        read.map_err(|error| self.access_failed("pread", region, at, error))
    }

    /// Writes bytes of a region.
    ///
    /// # Errors
    /// As [`read`](Self::read). Some of the bytes may have been written.
    pub fn write(&self, region: &Region, at: u64, data: &[u8]) -> Result<(), VfioError> {
        let offset = self.place(region, region.can_write, at, data.len())?;
        let written = self.file.write_all_at(data, offset);
        written.map_err(|error| self.access_failed("pwrite", region, at, error))
    }

    /// Number and abilities of the interrupts of an index.
    ///
    /// # Errors
    /// [`VfioError::Call`].
    pub fn irq(&self, index: IrqIndex) -> Result<Irq, VfioError> {
        let mut info = uapi::IrqInfo {
            index: index as u32,
            ..uapi::IrqInfo::zeroed()
        };
        let call = &uapi::DEVICE_GET_IRQ_INFO;
        sys::with_struct(&self.file, call, &mut info).map_err(self.irq_failed(call, index))?;
        Ok(info.into())
    }

    /// Has vector *n* of the index signal the eventfd `fds[n]`, or nothing where that is `None`,
    /// all in one call. An empty slice turns the index off.
    ///
    /// A kernel that says [`no_resize`](Irq::no_resize) refuses more vectors than it was given
    /// first, until the index has been turned off: hand over those of all vectors.
    ///
    /// # Errors
    /// [`VfioError::Vectors`]: the host has fewer vectors left; or [`VfioError::Call`].
    pub fn set_irqs(
        &self,
        index: IrqIndex,
        fds: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), VfioError> {
        self.call_irqs(index, irq::argument(index, fds), fds.len())
    }

    /// Unmasks the first vector of an index that the kernel masks when it has signalled: INTx.
    ///
    /// # Errors
    /// [`VfioError::Call`].
    pub fn unmask(&self, index: IrqIndex) -> Result<(), VfioError> {
        self.call_irqs(index, irq::unmask(index), 1)
    }

    fn call_irqs(
        &self,
        index: IrqIndex,
        mut argument: Vec<u8>,
        wanted: usize,
    ) -> Result<(), VfioError> {
        let call = &uapi::DEVICE_SET_IRQS;
        let answer = sys::with_descriptors(&self.file, call, &mut argument);
        match answer.map_err(self.irq_failed(call, index))? {
            0 => Ok(()),
            available => Err(VfioError::Vectors {
                address: self.address.clone(),
                index,
                wanted,
                available: available.unsigned_abs(),
            }),
        }
    }

    /// Place in the device's file of `len` bytes of a region.
    fn place(
        &self,
        region: &Region,
        is_allowed: bool,
        at: u64,
        len: usize,
    ) -> Result<u64, VfioError> {
        let end = at.checked_add(len as u64);
        if end.is_none_or(|end| end > region.size) {
            return Err(VfioError::Outside {
                address: self.address.clone(),
                index: region.index,
                size: region.size,
                at,
                len,
            });
        }
        if !is_allowed {
            return Err(self.problem(region.index, "does not allow that access"));
        }
        // A region whose fields a caller has set may lie anywhere.
        let place = region.offset.checked_add(at);
        place.ok_or_else(|| self.problem(region.index, "ends past the device's file"))
    }

    fn access_failed(
        &self,
        call: &'static str,
        region: &Region,
        at: u64,
        error: std::io::Error,
    ) -> VfioError {
        VfioError::Call {
            call,
            subject: format!("{at:#x} of region {} of {}", region.index, self.address),
            errno: error.into(),
        }
    }

    fn problem(&self, index: u32, problem: &'static str) -> VfioError {
        VfioError::Region {
            address: self.address.clone(),
            index,
            problem,
        }
    }

    fn irq_failed<T>(
        &self,
        call: &uapi::Call<T>,
        index: IrqIndex,
    ) -> impl FnOnce(Errno) -> VfioError {
        failed(call, move || format!("{index} of {}", self.address))
    }

    fn failed<T>(&self, call: &uapi::Call<T>) -> impl FnOnce(Errno) -> VfioError {
        failed(call, || self.address.clone())
    }
}

/// The registers of one BAR.
///
/// Each access is one access of that width. What this thread has stored before a write is seen by
/// the device that obeys it, and what it loads after a read was not loaded before: on x86, where a
/// processor keeps that order itself.
///
/// # Panics
/// All panic where a register is not aligned or reaches past the BAR: what comes from the device (a
/// stride, a size) has to be held against [`len`](Self::len) before.
#[derive(Debug)]
pub struct Bar(Registers);

#[expect(clippy::len_without_is_empty, reason = "no BAR is empty")]
impl Bar {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The 32-bit register at this byte.
    pub fn read32(&self, offset: usize) -> u32 {
        self.0.read32(offset)
    }

    /// Sets the 32-bit register at this byte.
    pub fn write32(&self, offset: usize, value: u32) {
        self.0.write32(offset, value);
    }

    /// The 64-bit register at this byte.
    pub fn read64(&self, offset: usize) -> u64 {
        self.0.read64(offset)
    }

    /// Sets the 64-bit register at this byte.
    pub fn write64(&self, offset: usize, value: u64) {
        self.0.write64(offset, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(info: DeviceInfo) -> Device {
        Device {
            file: tempfile::tempfile().expect("a file"),
            address: "0000:01:00.0".into(),
            info,
        }
    }

    const INFO: DeviceInfo = DeviceInfo {
        can_reset: false,
        is_pci: true,
        regions: 9,
        irqs: 5,
    };

    fn region(offset: u64, size: u64) -> Region {
        Region {
            index: 2,
            offset,
            size,
            can_read: true,
            can_write: true,
            can_mmap: false,
            msix_mappable: false,
            sparse: None,
        }
    }

    #[test]
    fn accesses_reach_their_region_and_nothing_beside_it() {
        let device = device(INFO);
        device.file.set_len(0x4000).expect("a length");
        let (before, here) = (region(0x1000, 0x1000), region(0x2000, 0x1000));
        device.write(&here, 0xffc, &[1, 2, 3, 4]).expect("the end");
        let mut data = [0; 4];
        device.read(&here, 0xffc, &mut data).expect("the end");
        assert_eq!(data, [1, 2, 3, 4]);
        device.read(&region(0, 0x4000), 0x2ffc, &mut data).unwrap();
        assert_eq!(data, [1, 2, 3, 4], "its place in the file");
        for (at, len) in [(0xffd, 4), (0x1000, 1), (u64::MAX, 4), (0, 0x1001)] {
            let mut data = vec![0xaa; len];
            let read = device.read(&before, at, &mut data);
            let written = device.write(&before, at, &data);
            for error in [read.unwrap_err(), written.unwrap_err()] {
                assert!(matches!(error, VfioError::Outside { .. }), "{error}");
                let text = error.to_string();
                assert!(text.contains("region 2 of 0000:01:00.0"), "{text}");
            }
        }
        let bytes = &mut [0; 0x1000];
        device.read(&here, 0, &mut bytes[..0xffc]).unwrap();
        assert_eq!(*bytes, [0; 0x1000], "the rest is as it was");
    }

    #[test]
    fn region_that_is_read_only_or_made_up_is_refused() {
        let device = device(INFO);
        device.file.set_len(0x1000).expect("a length");
        let config = Region {
            can_write: false,
            ..region(0, 0x100)
        };
        device.read(&config, 0, &mut [0]).expect("readable");
        let refused = device.write(&config, 0, &[0]).unwrap_err();
        assert!(matches!(refused, VfioError::Region { .. }), "{refused}");
        let made_up = region(u64::MAX, 8);
        assert!(device.read(&made_up, 4, &mut [0]).is_err());
        // The file ends before the region does: an error, not zeroes.
        let short = device.read(&region(0, 0x2000), 0x1000, &mut [0]);
        assert!(matches!(short, Err(VfioError::Call { .. })));
    }

    /// A file that is no device answers each call with ENOTTY, which names the call and the device.
    #[test]
    fn calls_that_fail_name_the_device_and_what_was_asked() {
        let resettable = device(DeviceInfo {
            can_reset: true,
            ..INFO
        });
        assert!(!device(INFO).reset().expect("nothing is asked"));
        for (error, parts) in [
            (resettable.reset().unwrap_err(), ["VFIO_DEVICE_RESET", ""]),
            (
                resettable.region(3).unwrap_err(),
                ["VFIO_DEVICE_GET_REGION_INFO", ""],
            ),
            (
                resettable.irq(IrqIndex::Msix).unwrap_err(),
                ["VFIO_DEVICE_GET_IRQ_INFO", "MSI-X of"],
            ),
            (
                resettable
                    .set_irqs(IrqIndex::Msi, &[None, Some(resettable.as_fd())])
                    .unwrap_err(),
                ["VFIO_DEVICE_SET_IRQS", "MSI of"],
            ),
        ] {
            let text = error.to_string();
            assert!(text.contains("0000:01:00.0"), "{text}");
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}
