//! Errors on the way to a device: the request, the kernel's answer, and the remedy.

use std::fmt;
use std::path::PathBuf;

use dma_map::iova::ApertureError;
use thiserror::Error;

use crate::irq::IrqIndex;
use crate::uapi::Call;

/// Error number of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// Of the last call.
    pub(crate) fn last() -> Self {
        std::io::Error::last_os_error().into()
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl std::error::Error for Errno {}

/// Reason why a device cannot be used.
#[derive(Debug, Error)]
pub enum VfioError {
    /// There is no such device, or that is no address of one.
    #[error(
        "no PCI device {address}: an address is like 0000:01:00.0 (`lspci -D`, or \
         /sys/bus/pci/devices)"
    )]
    NoDevice {
        /// The address given.
        address: String,
    },
    /// It is behind no IOMMU.
    #[error(
        "{address} is in no IOMMU group: boot with intel_iommu=on or amd_iommu=on, with the IOMMU \
         enabled in the firmware"
    )]
    NoGroup {
        /// The device.
        address: String,
    },
    /// Another driver has it, or none.
    #[error(
        "{address} is bound to {}, not to vfio-pci: as root, `modprobe vfio-pci`, \
         `echo vfio-pci > /sys/bus/pci/devices/{address}/driver_override`, {}\
         `echo {address} > /sys/bus/pci/drivers_probe`",
        driver.as_deref().unwrap_or("no driver"),
        if driver.is_some() { format!("`echo {address} > \
             /sys/bus/pci/devices/{address}/driver/unbind`, ") } else { String::new() }
    )]
    NotBound {
        /// The device.
        address: String,
        /// Its driver.
        driver: Option<String>,
    },
    /// A file of `/dev/vfio` was not opened.
    #[error("opening {}: {errno}{}", path.display(), advice_on_open(*errno))]
    Open {
        /// The file.
        path: PathBuf,
        /// The error of the call.
        errno: Errno,
    },
    /// Other devices of the group have drivers that are not VFIO's.
    #[error(
        "group {group} is not viable: devices that share it have to be bound to vfio-pci, or to no \
         driver, as well: {}",
        list(others)
    )]
    NotViable {
        /// Number of the group.
        group: u32,
        /// Their addresses and drivers.
        others: Vec<(String, String)>,
    },
    /// This kernel has no second version of type 1.
    #[error("this kernel has no VFIO type 1, version 2: `modprobe vfio_iommu_type1`")]
    NoType1,
    /// A call failed.
    #[error("{call} on {subject}: {errno}{}", advice_on_call(call, *errno))]
    Call {
        /// Its name.
        call: &'static str,
        /// Its subject: a file or a device.
        subject: String,
        /// The error of the call.
        errno: Errno,
    },
    /// The kernel's information about the IOMMU cannot be used.
    #[error("VFIO_IOMMU_GET_INFO")]
    Info(#[from] InfoError),
    /// The kernel's answer about a region cannot be used.
    #[error("VFIO_DEVICE_GET_REGION_INFO of region {index} of {address}")]
    RegionInfo {
        /// The device.
        address: String,
        /// Index of the region.
        index: u32,
        /// Reason.
        source: InfoError,
    },
    /// An access reaches past its region.
    #[error(
        "{len} bytes at {at:#x} do not lie in region {index} of {address}, which has {size:#x} \
         bytes"
    )]
    Outside {
        /// The device.
        address: String,
        /// Index of the region.
        index: u32,
        /// Its bytes.
        size: u64,
        /// First byte of the access.
        at: u64,
        /// Bytes of the access.
        len: usize,
    },
    /// The host has fewer interrupt vectors left than were asked for. None is set.
    #[error(
        "{wanted} vectors for {index} of {address}: the host has {available} left for it; \
         have other devices of the host use fewer, or ask for fewer"
    )]
    Vectors {
        /// The device.
        address: String,
        /// Kind of interrupt.
        index: IrqIndex,
        /// Vectors asked for.
        wanted: usize,
        /// Vectors that could be had.
        available: u32,
    },
    /// A region of the device is not there, or cannot be used that way.
    #[error("region {index} of {address} {problem}")]
    Region {
        /// The device.
        address: String,
        /// Its index: BARs are 0 to 5.
        index: u32,
        /// The missing property.
        problem: &'static str,
    },
}

/// Reason why the kernel's information about an IOMMU or a region cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InfoError {
    /// It ends in the middle of something.
    #[error("{len} bytes end before {what} at {at:#x}")]
    Short {
        /// Bytes there are.
        len: usize,
        /// Name of the missing part.
        what: &'static str,
        /// Its offset in bytes.
        at: usize,
    },
    /// A capability leads to one that is not behind it.
    #[error("the capability at {from:#x} is followed by one at {to:#x}, which is not behind it")]
    NotBehind {
        /// Offset of the link; 0: in the structure itself.
        from: usize,
        /// Offset to which it leads.
        to: usize,
    },
    /// A range ends before it begins.
    #[error("the allowed range {start:#x} to {last:#x} ends before it begins")]
    Inverted {
        /// First byte.
        start: u64,
        /// Last byte.
        last: u64,
    },
    /// The kernel does not say which IOVAs it reserves, so that none is known to be free.
    #[error("the kernel does not say which IOVAs are allowed: Linux 5.4 or newer does")]
    NoRanges,
    /// The IOMMU cannot map single pages of 4 KiB.
    #[error("the IOMMU's page sizes, {page_sizes:#x}, do not have 4 KiB")]
    PageSize {
        /// A bit for each size.
        page_sizes: u64,
    },
    /// A region ends past what a file may have.
    #[error("the region's {size:#x} bytes at {offset:#x} end past the device's file")]
    PastFile {
        /// First byte in the file.
        offset: u64,
        /// Bytes.
        size: u64,
    },
    /// An area that can be mapped lies past the end of its region.
    #[error(
        "the mappable area of {size:#x} bytes at {offset:#x} ends past the region's {region:#x} \
         bytes"
    )]
    PastRegion {
        /// First byte in the region.
        offset: u64,
        /// Bytes.
        size: u64,
        /// Bytes of the region.
        region: u64,
    },
    /// Nothing is allowed.
    #[error("no IOVA is allowed")]
    Nothing(#[source] ApertureError),
}

/// The error of a call.
pub(crate) fn failed<T>(
    call: &Call<T>,
    subject: impl FnOnce() -> String,
) -> impl FnOnce(Errno) -> VfioError {
    let call = call.name;
    move |errno| VfioError::Call {
        call,
        subject: subject(),
        errno,
    }
}

fn list(devices: &[(String, String)]) -> String {
    let each = devices.iter();
    let each: Vec<String> = each
        .map(|(address, driver)| format!("{address} ({driver})"))
        .collect();
    each.join(", ")
}

fn advice_on_open(errno: Errno) -> &'static str {
    match errno.0 {
        libc::ENOENT | libc::ENODEV => ": VFIO is not loaded (`modprobe vfio-pci`)",
        libc::EACCES | libc::EPERM => {
            ": for users other than root, `chown` it to the user of the device"
        }
        libc::EBUSY => {
            ": another process uses a device of this group, or this one does already: `fuser -v` \
             of this file names it"
        }
        _ => "",
    }
}

fn advice_on_call(call: &str, errno: Errno) -> &'static str {
    match (call, errno.0) {
        ("VFIO_SET_IOMMU" | "VFIO_GROUP_SET_CONTAINER", libc::EPERM) => {
            ": the IOMMU does not remap interrupts, so that a device could forge them: enable \
             interrupt remapping in the \
             firmware (the kernel's log says why it is off), or, for devices that are trusted, as \
             root `echo 1 > \
             /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts`"
        }
        ("VFIO_GROUP_SET_CONTAINER", libc::EBUSY | libc::EINVAL) => {
            ": the group has a container already: it can be attached to one, once"
        }
        ("VFIO_GROUP_UNSET_CONTAINER", libc::EBUSY) => {
            ": a device of the group is still open, or one of its BARs still mapped: close it first"
        }
        ("VFIO_GROUP_GET_DEVICE_FD", libc::ENODEV) => ": no device of the group has this address",
        ("VFIO_GROUP_GET_DEVICE_FD", libc::EBUSY) => ": the device is open already",
        ("VFIO_DEVICE_SET_IRQS", libc::EINVAL) => {
            ": there are fewer vectors (`Device::irq`), one of the descriptors is no eventfd, \
             another kind of interrupt is on, or \
             vectors are on already and cannot become more: turn the index off first (no \
             descriptors)"
        }
        ("VFIO_DEVICE_SET_IRQS", libc::ENOSPC) => {
            ": the host has no interrupt vector left: have other devices of the host use fewer"
        }
        ("pread" | "pwrite", libc::EIO) => {
            ": the device does not decode the region (Memory Space of its command register is \
             off), or is gone"
        }
        ("mmap", libc::EINVAL) => ": a part of it must not be mapped (`Region::mappable`)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_says_what_to_do() {
        let bound = VfioError::NotBound {
            address: "0000:01:00.0".into(),
            driver: Some("nvme".into()),
        };
        let text = bound.to_string();
        assert!(text.contains("bound to nvme, not to vfio-pci"), "{text}");
        assert!(text.contains("0000:01:00.0/driver/unbind"), "{text}");
        let not_viable = VfioError::NotViable {
            group: 7,
            others: vec![("0000:01:00.1".into(), "snd_hda_intel".into())],
        };
        let text = not_viable.to_string();
        assert!(text.contains("group 7") && text.contains("0000:01:00.1 (snd_hda_intel)"));
        let refused = VfioError::Call {
            call: "VFIO_SET_IOMMU",
            subject: "the container".into(),
            errno: Errno(libc::EPERM),
        };
        let text = refused.to_string();
        assert!(text.contains("allow_unsafe_interrupts"), "{text}");
        let busy = VfioError::Open {
            path: "/dev/vfio/7".into(),
            errno: Errno(libc::EBUSY),
        };
        let text = busy.to_string();
        assert!(text.contains("opening /dev/vfio/7"), "{text}");
        assert!(text.contains("another process uses a device of this group"));
    }

    /// The call, what it concerned, and a part of the remedy.
    #[test]
    fn each_refused_call_has_its_remedy() {
        for (call, errno, remedy) in [
            (
                "VFIO_SET_IOMMU",
                libc::EPERM,
                "/sys/module/vfio_iommu_type1/parameters",
            ),
            (
                "VFIO_GROUP_SET_CONTAINER",
                libc::EBUSY,
                "a container already",
            ),
            ("VFIO_GROUP_UNSET_CONTAINER", libc::EBUSY, "close it first"),
            (
                "VFIO_GROUP_GET_DEVICE_FD",
                libc::ENODEV,
                "no device of the group",
            ),
            ("VFIO_GROUP_GET_DEVICE_FD", libc::EBUSY, "open already"),
            (
                "VFIO_DEVICE_SET_IRQS",
                libc::EINVAL,
                "turn the index off first",
            ),
            (
                "VFIO_DEVICE_SET_IRQS",
                libc::ENOSPC,
                "no interrupt vector left",
            ),
            ("pread", libc::EIO, "Memory Space"),
            ("mmap", libc::EINVAL, "Region::mappable"),
        ] {
            let subject = "group 7".to_owned();
            let errno = Errno(errno);
            let text = VfioError::Call {
                call,
                subject,
                errno,
            }
            .to_string();
            assert!(text.starts_with(&format!("{call} on group 7: ")), "{text}");
            assert!(text.contains(remedy), "{text}");
        }
        let few = VfioError::Vectors {
            address: "0000:01:00.0".into(),
            index: IrqIndex::Msix,
            wanted: 65,
            available: 12,
        };
        let text = few.to_string();
        assert!(text.contains("65 vectors for MSI-X of 0000:01:00.0: the host has 12"));
    }
}
