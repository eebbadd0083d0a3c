//! Address decoding: which device answers a guest-physical address or an I/O port.
//!
//! A [`Bus`] is filled while the machine is built and never changes afterwards, so vCPU threads
//! look up without a lock. PCI BARs, which move at run time, are decoded behind one fixed window by
//! the crate `pci`.
//!
//! Devices are called on vCPU threads, several at once; each does its own locking. No lock is held
//! here while a device is called.

use std::sync::Arc;

/// Target of an access, by which its exit is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessCause {
    /// A register of a remapping unit.
    IommuRegister,
    /// A virtio doorbell that was not handled inside the hypervisor.
    Doorbell,
    /// A doorbell of a function that is an IOMMU.
    IommuDoorbell,
    /// PCI configuration space.
    PciConfig,
    /// A device register other than those.
    Register,
    /// The marker port.
    Marker,
    /// No device decodes the address.
    Unclaimed,
}

/// Device that answers in one range of a [`Bus`].
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes (1, 2, 4 or 8 for memory) at `offset` in the device's range. `data`
    /// is all ones on entry, as read from a bus that no device drives. Returns the target of the
    /// access.
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause;

    /// Writes `data.len()` bytes at `offset` in the device's range. Returns the target of the
    /// access.
    fn write(&self, offset: u64, data: &[u8]) -> AccessCause;
}

struct Entry {
    first: u64,
    /// Inclusive, so that a range may end at the last address.
    last: u64,
    device: Arc<dyn BusDevice>,
}

/// Error of a builder that gave two devices overlapping ranges; no user can cause it.
#[derive(Debug, thiserror::Error)]
#[error("bus range {first:#x}..={last:#x} overlaps another device")]
pub struct Overlap {
    first: u64,
    last: u64,
}

/// Ranges and their devices, sorted by address.
#[derive(Default)]
pub struct Bus {
    entries: Vec<Entry>,
}

impl Bus {
    /// Creates a bus without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets `device` answer in `[base, base + len)`; `len` ≥ 1.
    pub fn add(&mut self, base: u64, len: u64, device: Arc<dyn BusDevice>) -> Result<(), Overlap> {
        let (first, last) = (base, base + (len - 1));
        let at = self.entries.partition_point(|entry| entry.last < first);
        if self.entries.get(at).is_some_and(|next| next.first <= last) {
            return Err(Overlap { first, last });
        }
        self.entries.insert(
            at,
            Entry {
                first,
                last,
                device,
            },
        );
        Ok(())
    }

    fn find(&self, address: u64, len: usize) -> Option<(&Entry, u64)> {
        let at = self.entries.partition_point(|entry| entry.last < address);
        let entry = self.entries.get(at)?;
        let access_last = address.checked_add(len.max(1) as u64 - 1)?;
        // No device answers an access that leaves its range, as on a bus that decodes whole
        // accesses.
        (entry.first <= address && access_last <= entry.last)
            .then(|| (entry, address - entry.first))
    }

    /// Reads at an address; all ones where no device answers.
    pub fn read(&self, address: u64, data: &mut [u8]) -> AccessCause {
        data.fill(0xff);
        match self.find(address, data.len()) {
            Some((entry, offset)) => entry.device.read(offset, data),
            None => AccessCause::Unclaimed,
        }
    }

    /// Writes at an address; dropped where no device answers.
    pub fn write(&self, address: u64, data: &[u8]) -> AccessCause {
        match self.find(address, data.len()) {
            Some((entry, offset)) => entry.device.write(offset, data),
            None => AccessCause::Unclaimed,
        }
    }

    /// Reads a port. `data` may hold several elements of a string instruction, so only the port is
    /// decoded.
    pub fn read_port(&self, port: u16, data: &mut [u8]) -> AccessCause {
        data.fill(0xff);
        match self.find(u64::from(port), 1) {
            Some((entry, offset)) => entry.device.read(offset, data),
            None => AccessCause::Unclaimed,
        }
    }

    /// Writes a port; see [`read_port`](Self::read_port).
    pub fn write_port(&self, port: u16, data: &[u8]) -> AccessCause {
        match self.find(u64::from(port), 1) {
            Some((entry, offset)) => entry.device.write(offset, data),
            None => AccessCause::Unclaimed,
        }
    }
}

#[cfg(test)]
mod tests;
