//! The kernel's log of DMA that the host's IOMMU refused.
//!
//! Format: `drivers/iommu/intel/dmar.c` of Linux 6.1 and 6.12, `dmar_fault_do_one` (the first line
//! is broken here):
//!
//! ```text
//! DMAR: [DMA Write NO_PASID] Request device [00:02.0] fault addr 0x400000
//!       [fault reason 0x05] PTE Write access is not set
//! dmar_fault: 12 callbacks suppressed
//! ```
//!
//! The kernel logs at most ten lines in five seconds, and uses three of them for one fault: a line
//! that announces faults, one for the fault, and one for the search for another. Some of several
//! faults in quick succession are therefore missing ([`FaultLog::suppressed`]): faults that must be
//! in the log have to be two seconds apart.

use std::fmt;

/// Direction of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaAccess {
    /// A read of memory by the device.
    Read,
    /// A write to memory by the device.
    Write,
}

/// An access that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DmaFault {
    /// Bus, device and function, for example `00:02.0`.
    pub device: String,
    /// Direction.
    pub access: DmaAccess,
    /// Its IOVA; the kernel logs that of the page.
    pub address: u64,
    /// The architecture's reason, for example 5: a write without the right to write.
    pub reason: u8,
}

/// Faults in a kernel's log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultLog {
    /// Faults logged, in their order.
    pub faults: Vec<DmaFault>,
    /// Lines that the kernel has suppressed. The number of further ones is logged with a later
    /// fault only.
    pub suppressed: u64,
    /// Lines of the IOMMU about faults of a kind that is not known here, refused interrupts for
    /// instance.
    pub others: Vec<String>,
}

impl FaultLog {
    /// Parses the output of `dmesg`.
    #[must_use]
    pub fn parse(log: &str) -> Self {
        let mut found = Self::default();
        for line in log.lines() {
            if let Some(fault) = DmaFault::parse(line) {
                found.faults.push(fault);
            } else if let Some(count) = suppressed(line) {
                found.suppressed = found.suppressed.saturating_add(count);
            } else if line.contains("DMAR") && line.contains("[fault reason") {
                found.others.push(line.to_owned());
            }
        }
        found
    }

    /// Returns whether the device at `address` was refused this access to the page of `iova`. The
    /// address may have a domain (`0000:00:02.0`), as everywhere but in this log.
    #[must_use]
    pub fn has(&self, address: &str, access: DmaAccess, iova: u64) -> bool {
        let page = |address: u64| address >> 12;
        self.of(address)
            .any(|fault| fault.access == access && page(fault.address) == page(iova))
    }

    /// Returns the faults of the device at `address`.
    pub fn of<'a>(&'a self, address: &'a str) -> impl Iterator<Item = &'a DmaFault> {
        let device = address.strip_prefix("0000:").unwrap_or(address);
        self.faults
            .iter()
            .filter(move |fault| fault.device == device)
    }

    /// Returns whether there was no fault at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for FaultLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for fault in &self.faults {
            let DmaFault {
                device,
                access,
                address,
                reason,
            } = fault;
            writeln!(
                f,
                "{device}: {access:?} of {address:#x}, reason {reason:#x}"
            )?;
        }
        for other in &self.others {
            writeln!(f, "{other}")?;
        }
        write!(f, "{} lines suppressed", self.suppressed)
    }
}

impl DmaFault {
    fn parse(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once("DMAR: [DMA ")?;
        let access = match rest.split([' ', ']']).next()? {
            "Read" => DmaAccess::Read,
            "Write" => DmaAccess::Write,
            _ => return None,
        };
        let device = between(rest, "Request device [", "]")?;
        let address = between(rest, "fault addr ", " ")?;
        let reason = between(rest, "[fault reason ", "]")?;
        Some(Self {
            device: device.to_owned(),
            access,
            address: hexadecimal(address)?,
            reason: hexadecimal(reason)?.try_into().ok()?,
        })
    }
}

/// Parses the number in `dmar_fault: N callbacks suppressed`.
fn suppressed(line: &str) -> Option<u64> {
    between(line, "dmar_fault: ", " callbacks suppressed")?
        .parse()
        .ok()
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once(after).map(|(found, _)| found)
}

/// Parses a number with `0x` or, as in older kernels, without.
fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the lab, Linux 6.1; the last line but one is from the kernel's source.
    const LOG: &str = "\
[    0.5] DMAR: Intel(R) Virtualization Technology for Directed I/O
[   20.1] DMAR: DRHD: handling fault status reg 2
[   20.1] DMAR: [DMA Write NO_PASID] Request device [00:02.0] fault addr 0x400000 [fault reason 0x05] PTE Write access is not set
[   25.3] dmar_fault: 12 callbacks suppressed
[   25.3] DMAR: [DMA Read NO_PASID] Request device [00:02.0] fault addr 0xfffff000 [fault reason 0x06] PTE Read access is not set
[   26.0] DMAR: [DMA Write PASID 0x1] Request device [3a:1f.7] fault addr 0x1000 [fault reason 0x71] SM: Present bit in first-level paging entry is clear
[   27.0] dmar_fault: 3 callbacks suppressed
[   28.0] DMAR: DRHD: handling fault status reg 2
[   28.0] DMAR-IR: [INTR-REMAP NO_PASID] Request device [00:04.0] fault index 0x1 [fault reason 0x22] Present field in the IRTE entry is clear
[   29.0] DMAR: [DMA Write] Request device [00:02.0] PASID ffffffff fault addr 5000 [fault reason 05] PTE Write access is not set
";

    #[test]
    fn each_fault_has_its_device_access_and_address() {
        let log = FaultLog::parse(LOG);
        let fault = |device: &str, access, address, reason| DmaFault {
            device: device.to_owned(),
            access,
            address,
            reason,
        };
        let expected = [
            fault("00:02.0", DmaAccess::Write, 0x40_0000, 5),
            fault("00:02.0", DmaAccess::Read, 0xffff_f000, 6),
            fault("3a:1f.7", DmaAccess::Write, 0x1000, 0x71),
            fault("00:02.0", DmaAccess::Write, 0x5000, 5),
        ];
        assert_eq!(log.faults, expected);
        assert_eq!(log.suppressed, 15);
        assert_eq!(log.others.len(), 1, "{:?}", log.others);
        assert!(log.others[0].contains("INTR-REMAP"));
    }

    #[test]
    fn fault_is_found_by_device_access_and_page() {
        let log = FaultLog::parse(LOG);
        assert!(log.has("0000:00:02.0", DmaAccess::Write, 0x40_0123));
        assert!(log.has("00:02.0", DmaAccess::Read, 0xffff_f000));
        for (device, access, iova) in [
            ("0000:00:02.1", DmaAccess::Write, 0x40_0000),
            ("0000:00:02.0", DmaAccess::Read, 0x40_0000),
            ("0000:00:02.0", DmaAccess::Write, 0x40_1000),
            ("0000:00:02.0", DmaAccess::Write, 0x3f_ffff),
        ] {
            assert!(
                !log.has(device, access, iova),
                "{device} {access:?} {iova:#x}"
            );
        }
        assert!(!log.is_empty());
    }

    #[test]
    fn log_without_faults_is_empty_and_cut_lines_are_no_faults() {
        let cut = LOG
            .lines()
            .nth(2)
            .expect("a fault")
            .replace("0x400000", "0xzz");
        let log = FaultLog::parse(&cut);
        assert!(log.faults.is_empty() && !log.is_empty(), "kept: {log}");
        assert!(FaultLog::parse(LOG.lines().next().expect("a line")).is_empty());
        assert!(FaultLog::parse("").is_empty());
    }
}
