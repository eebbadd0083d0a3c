//! DMA that the host's IOMMU has refused to assigned devices, as its kernel's log has it.
//!
//! The guest is not notified of them: its unit never saw the access. The host's faults are counted
//! instead, for the user of the machine. The log has ten lines in five seconds at most (one more
//! fault leaves `callbacks suppressed`), so the count shows whether there were any, not their
//! number. A process that may not read the log (`kernel.dmesg_restrict`) has no count.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Mutex, PoisonError};

/// Records that are read at a time; a kernel writes fewer between two looks.
const MOST: usize = 65_536;

/// Faults since it was opened, by address of the device.
pub struct HostFaults {
    log: Mutex<(File, BTreeMap<String, u64>)>,
}

impl HostFaults {
    /// Opens the log, from now on; `None` for a process that may not read the log.
    pub fn open() -> Option<Self> {
        let opened = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open("/dev/kmsg");
        let log = opened.and_then(|mut log| {
            log.seek(SeekFrom::End(0))?;
            Ok(Mutex::new((log, BTreeMap::new())))
        });
        Some(Self { log: log.ok()? })
    }

    /// Returns the faults of the device of this address, such as `0000:00:04.0`.
    pub fn of(&self, address: &str) -> u64 {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, faults) = &mut *log;
        let mut record = [0; 8192];
        for _ in 0..MOST {
            match file.read(&mut record) {
                Ok(0) => break,
                Ok(len) => {
                    let text = String::from_utf8_lossy(&record[..len]);
                    if let Some(device) = device_of(&text) {
                        *faults.entry(device.to_owned()).or_default() += 1;
                    }
                }
                // Records were overwritten before they were read: what follows is there.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(_) => break,
            }
        }
        // The log leaves domain 0 out.
        let short = address.strip_prefix("0000:").unwrap_or(address);
        let count = |name| faults.get(name).copied().unwrap_or(0);
        if short == address {
            count(address)
        } else {
            count(address) + count(short)
        }
    }
}

/// Returns the device whose fault a record reports.
fn device_of(record: &str) -> Option<&str> {
    let behind = if let Some((_, behind)) = record.split_once("DMAR: [DMA ") {
        behind.split_once("Request device [")?.1
    } else {
        let (before, behind) = record.split_once("IO_PAGE_FAULT")?;
        match behind.split_once("device=") {
            Some((_, behind)) => behind,
            // A device that the kernel knows has its name before the line.
            None => before.split_once(';')?.1.split_once(' ')?.1,
        }
    };
    let end = behind.find(|c: char| c != ':' && c != '.' && !c.is_ascii_hexdigit())?;
    Some(behind[..end].trim_end_matches(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_of_a_fault_is_found_in_what_intels_and_amds_drivers_write() {
        let intel = "3,812,4301,-;DMAR: [DMA Write NO_PASID] Request device [00:02.0] fault addr \
             0x400000 [fault reason 0x05] x";
        assert_eq!(device_of(intel), Some("00:02.0"));
        let amd = "1,2,3,-;vfio-pci 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0 \
             address=0x1 flags=0x0]";
        assert_eq!(device_of(amd), Some("0000:01:00.0"));
        let amd = "1,2,3,-;AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:01:00.0 domain=0x1 \
             address=0x1 flags=0x0]";
        assert_eq!(device_of(amd), Some("0000:01:00.0"));
        for other in [
            "",
            "6,1,1,-;DMAR: dmar0: Using Queued invalidation",
            "3,1,1,-;DMAR: [DMA Write] Request device [",
            "3,1,1,-;DMAR: [INTR-REMAP] Request device [00:02.0] fault index 0x1",
        ] {
            assert_eq!(device_of(other), None, "{other}");
        }
    }
}
