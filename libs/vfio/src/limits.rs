//! Limits of the host that a mapping can hit, and what of them is used.

use std::fmt;
use std::fs;

use crate::error::Errno;

/// `dma_entry_limit` where the parameter cannot be read.
const ENTRIES: u64 = 65_535;
/// Capability whose process locks memory without a limit.
const CAP_IPC_LOCK: u32 = 14;

/// Limits of locked memory and mappings when a mapping was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostLimits {
    /// `RLIMIT_MEMLOCK` in bytes; `None`: no limit, or not known.
    pub lockable: Option<u64>,
    /// `VmLck` in bytes: locked memory, mappings of VFIO among it, each page as often as it is
    /// mapped.
    pub locked: u64,
    /// The process has CAP_IPC_LOCK, so that the kernel does not look at `lockable`.
    pub is_exempt: bool,
    /// `dma_entry_limit` of `vfio_iommu_type1`: mappings that a container may have.
    pub entries: u64,
}

impl HostLimits {
    /// Of this process, now.
    pub fn read() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let entries = read("/sys/module/vfio_iommu_type1/parameters/dma_entry_limit");
        let of_process = (read("/proc/self/limits"), read("/proc/self/status"));
        Self::parse(&of_process.0, &of_process.1, &entries)
    }

    /// From `/proc/self/limits`, `/proc/self/status` and the module's parameter. Lines that are
    /// missing count as no limit.
    fn parse(limits: &str, status: &str, entries: &str) -> Self {
        let lockable = text_of(limits, "Max locked memory");
        let locked = text_of(status, "VmLck:");
        let capabilities = text_of(status, "CapEff:");
        let capabilities = capabilities.and_then(|mask| u64::from_str_radix(mask, 16).ok());
        Self {
            lockable: lockable.and_then(|bytes| bytes.parse().ok()),
            locked: locked
                .and_then(|kib| kib.parse::<u64>().ok())
                .map_or(0, |kib| kib << 10),
            is_exempt: capabilities.is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1),
            entries: entries.trim().parse().unwrap_or(ENTRIES),
        }
    }
}

/// The first word behind `key` at the start of a line.
fn text_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()
}

/// Advice on a mapping of so many bytes that was refused.
pub struct Advice {
    pub errno: Errno,
    pub bytes: u64,
    pub limits: Option<HostLimits>,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.errno.0, self.limits) {
            (libc::ENOMEM, Some(limits)) => self.locked_memory(f, &limits),
            (libc::ENOSPC, Some(limits)) => write!(
                f,
                ": a container has at most {} mappings (dma_entry_limit): map larger pieces, or, \
                 as root, \
                 `echo {} > /sys/module/vfio_iommu_type1/parameters/dma_entry_limit` and start \
                 again",
                limits.entries,
                limits.entries.saturating_mul(2).saturating_add(1),
            ),
            (libc::EINVAL, _) => f.write_str(
                ": the IOMMU does not allow all of these IOVAs (`IommuInfo::allowed`: they lie \
                 past its width, or in what it \
                 reserves, as the interrupt window at 0xfee00000), or its pages are larger",
            ),
            (libc::EEXIST, _) => f.write_str(
                ": a mapping that is not this map's is there: each container wants one map, made \
                 when nothing is mapped",
            ),
            (libc::EFAULT, _) => f.write_str(
                ": the memory is not mapped in this process, or read-only there while the device \
                 is to write",
            ),
            _ => Ok(()),
        }
    }
}

impl Advice {
    fn locked_memory(&self, f: &mut fmt::Formatter<'_>, limits: &HostLimits) -> fmt::Result {
        let kib = |bytes: u64| bytes.div_ceil(1 << 10);
        let wanted = limits.locked.saturating_add(self.bytes);
        match limits.lockable {
            Some(lockable) if !limits.is_exempt && wanted > lockable => write!(
                f,
                ": memory that a device reaches is locked, and no more may be: RLIMIT_MEMLOCK is \
                 {} KiB, {} KiB are locked (VmLck), \
                 this takes {} KiB more: raise the limit to {} KiB at least (`ulimit -l`, or \
                 LimitMEMLOCK= of a systemd unit; \
                 a guest can have all of its memory mapped), or give the process CAP_IPC_LOCK",
                kib(lockable),
                kib(limits.locked),
                kib(self.bytes),
                kib(wanted),
            ),
            _ => write!(
                f,
                ": the host has no memory left for {} KiB to be brought in and locked, or for the \
                 IOMMU's tables \
                 (RLIMIT_MEMLOCK is not the reason: {} KiB are locked)",
                kib(self.bytes),
                kib(limits.locked),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     \n\
Max open files            1024                 524288               files     \n\
Max locked memory         1048576              1048576              bytes     \n";
    const STATUS: &str =
        "Name:\texitless\nVmLck:\t     512 kB\nVmPin:\t       0 kB\nCapEff:\t0000000000000000\n";

    #[test]
    fn limits_are_read_as_the_kernel_prints_them() {
        let user = HostLimits::parse(LIMITS, STATUS, "65535\n");
        let expected = HostLimits {
            lockable: Some(1 << 20),
            locked: 512 << 10,
            is_exempt: false,
            entries: 65_535,
        };
        assert_eq!(user, expected);
        let root = STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t000001ffffffffff");
        let unlimited = LIMITS.replace("1048576", "unlimited");
        let root = HostLimits::parse(&unlimited, &root, "100000\n");
        assert_eq!((root.lockable, root.is_exempt), (None, true));
        assert_eq!(root.entries, 100_000);
        let only_that = STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t0000000000004000");
        assert!(HostLimits::parse("", &only_that, "").is_exempt);
        let nothing = HostLimits::parse("", "", "");
        assert_eq!((nothing.lockable, nothing.locked), (None, 0));
        assert_eq!(nothing.entries, ENTRIES);
        // This machine's own are in that form.
        assert!(text_of(&fs::read_to_string("/proc/self/status").unwrap(), "VmLck:").is_some());
        let limits = fs::read_to_string("/proc/self/limits").unwrap();
        assert!(text_of(&limits, "Max locked memory").is_some());
    }

    #[test]
    fn each_refusal_says_the_limit_what_is_used_and_what_would_do() {
        let limits = Some(HostLimits::parse(LIMITS, STATUS, "65535\n"));
        let bytes = 2 << 20;
        let text = |errno, limits| {
            let errno = Errno(errno);
            Advice {
                errno,
                bytes,
                limits,
            }
            .to_string()
        };
        let locked = text(libc::ENOMEM, limits);
        for part in [
            "RLIMIT_MEMLOCK is 1024 KiB",
            "512 KiB are locked (VmLck)",
            "2048 KiB more",
            "to 2560 KiB at least",
            "CAP_IPC_LOCK",
        ] {
            assert!(locked.contains(part), "{part}: {locked}");
        }
        // With the capability, or below the limit, it is not that limit.
        let exempt = limits.map(|limits| HostLimits {
            is_exempt: true,
            ..limits
        });
        let roomy = limits.map(|limits| HostLimits {
            lockable: Some(1 << 30),
            ..limits
        });
        for limits in [exempt, roomy] {
            let text = text(libc::ENOMEM, limits);
            assert!(text.contains("RLIMIT_MEMLOCK is not the reason"), "{text}");
        }
        let full = text(libc::ENOSPC, limits);
        assert!(full.contains("at most 65535 mappings (dma_entry_limit)"));
        assert!(full.contains("echo 131071 > /sys/module/vfio_iommu_type1/parameters"));
        for (errno, part) in [
            (libc::EINVAL, "0xfee00000"),
            (libc::EEXIST, "not this map's"),
            (libc::EFAULT, "read-only"),
        ] {
            let text = text(errno, None);
            assert!(text.contains(part), "{text}");
        }
    }
}
