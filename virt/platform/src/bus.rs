//! Address decoding: which device answers a guest-physical address or an I/O port.
//!
//! A [`Bus`] is filled while the machine is built and never changes afterwards, so vCPU threads
//! look up without a lock. What moves at run time (PCI BARs) is decoded behind one fixed window by
//! the crate `pci`.
//!
//! Devices are called on vCPU threads, several at once; each guards itself. Nothing is locked here
//! while a device is called.

use std::sync::Arc;

/// What an access met: what the exit behind it is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessCause {
    /// A register of a remapping unit.
    IommuRegister,
    /// A virtio doorbell that was not caught inside the hypervisor.
    Doorbell,
    /// One of a function that is an IOMMU.
    IommuDoorbell,
    /// PCI configuration space.
    PciConfig,
    /// A device register other than those.
    Register,
    /// The marker port.
    Marker,
    /// Nobody decodes the address.
    Unclaimed,
}

/// What answers in one range of a [`Bus`].
pub trait BusDevice: Send + Sync {
    /// A read of `data.len()` bytes (1, 2, 4 or 8 for memory) at `offset` in the device's range.
    /// `data` arrives as all ones, the answer of a bus where nobody drives. Returns what it met.
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause;

    /// A write of `data.len()` bytes at `offset` in the device's range.
    fn write(&self, offset: u64, data: &[u8]) -> AccessCause;
}

struct Entry {
    first: u64,
    /// Inclusive, so that a range may end at the last address.
    last: u64,
    device: Arc<dyn BusDevice>,
}

/// Two devices were given overlapping ranges: an error of the builder, not of the user.
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
    /// Nothing answers yet.
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
        // An access that leaves its device is answered by nobody, as on a bus that decodes whole
        // accesses.
        (entry.first <= address && access_last <= entry.last)
            .then(|| (entry, address - entry.first))
    }

    /// A read; all ones where nobody answers.
    pub fn read(&self, address: u64, data: &mut [u8]) -> AccessCause {
        data.fill(0xff);
        match self.find(address, data.len()) {
            Some((entry, offset)) => entry.device.read(offset, data),
            None => AccessCause::Unclaimed,
        }
    }

    /// A write; dropped where nobody answers.
    pub fn write(&self, address: u64, data: &[u8]) -> AccessCause {
        match self.find(address, data.len()) {
            Some((entry, offset)) => entry.device.write(offset, data),
            None => AccessCause::Unclaimed,
        }
    }

    /// A port read: `data` may hold several elements of a string instruction, so only the port is
    /// decoded.
    pub fn read_port(&self, port: u16, data: &mut [u8]) -> AccessCause {
        data.fill(0xff);
        match self.find(u64::from(port), 1) {
            Some((entry, offset)) => entry.device.read(offset, data),
            None => AccessCause::Unclaimed,
        }
    }

    /// A port write; see [`read_port`](Self::read_port).
    pub fn write_port(&self, port: u16, data: &[u8]) -> AccessCause {
        match self.find(u64::from(port), 1) {
            Some((entry, offset)) => entry.device.write(offset, data),
            None => AccessCause::Unclaimed,
        }
    }
}

#[cfg(test)]
mod tests;
