//! A device: its configuration space, and its registers.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::error::{Errno, VfioError, failed};
use crate::sys;
use crate::sys::Registers;
use crate::uapi::{self, Sized32};

/// PCI configuration space, offset 4, 16 bits: the command register.
const COMMAND: u64 = 4;
/// Its bits: memory space, bus master.
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;

/// A PCI device. When its last file is closed the kernel takes its bus mastering away and resets it.
#[derive(Debug)]
pub struct Device {
    file: File,
    address: String,
}

impl Device {
    pub(crate) fn new(file: File, address: String) -> Self {
        Self { file, address }
    }

    /// Resets its function, if that can be reset alone.
    ///
    /// # Errors
    /// [`VfioError::Call`].
    pub fn reset(&self) -> Result<(), VfioError> {
        let mut info = uapi::DeviceInfo::zeroed();
        let call = &uapi::DEVICE_GET_INFO;
        sys::with_struct(&self.file, call, &mut info).map_err(self.failed(call))?;
        if info.flags & uapi::DEVICE_CAN_RESET == 0 {
            return Ok(());
        }
        let call = &uapi::DEVICE_RESET;
        sys::with_value(&self.file, call, 0).map_err(self.failed(call))?;
        Ok(())
    }

    /// Lets it answer at its registers, and use DMA (Memory Space and Bus Master of the command register).
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn enable_dma(&self) -> Result<(), VfioError> {
        let config = self.region(uapi::CONFIG_REGION)?;
        let at = config.offset.saturating_add(COMMAND);
        let mut bytes = [0; 2];
        let io_failed = |call| {
            move |error: std::io::Error| VfioError::Call {
                call,
                subject: format!("the command register of {}", self.address),
                errno: error.into(),
            }
        };
        self.file
            .read_exact_at(&mut bytes, at)
            .map_err(io_failed("pread"))?;
        let command = u16::from_le_bytes(bytes) | COMMAND_MEMORY | COMMAND_MASTER;
        self.file
            .write_all_at(&command.to_le_bytes(), at)
            .map_err(io_failed("pwrite"))
    }

    /// Maps one of its BARs, 0 to 5.
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn bar(&self, index: u32) -> Result<Bar, VfioError> {
        let region = self.region(index)?;
        let problem = |problem| VfioError::Region { index, problem };
        if index >= 6 {
            return Err(problem("is no BAR"));
        }
        if region.size == 0 {
            return Err(problem("is not there"));
        }
        if region.flags & uapi::REGION_CAN_MMAP == 0 {
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

    fn region(&self, index: u32) -> Result<uapi::RegionInfo, VfioError> {
        let mut info = uapi::RegionInfo {
            index,
            ..uapi::RegionInfo::zeroed()
        };
        let call = &uapi::DEVICE_GET_REGION_INFO;
        sys::with_struct(&self.file, call, &mut info).map_err(self.failed(call))?;
        Ok(info)
    }

    fn failed<T>(&self, call: &uapi::Call<T>) -> impl FnOnce(Errno) -> VfioError {
        failed(call, || self.address.clone())
    }
}

/// The registers of one BAR.
///
/// Each access is one access of that width. What this thread has stored before a write is seen by the device that obeys it, and what it
/// loads after a read was not loaded before: on x86, where a processor keeps that order itself.
///
/// # Panics
/// All panic where a register is not aligned or reaches past the BAR: what comes from the device (a stride, a
/// size) has to be held against [`len`](Self::len) before.
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
