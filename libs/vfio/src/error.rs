//! What can go wrong on the way to a device: what was asked, what the kernel said, and what to do about it.

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;

use crate::InfoError;
use crate::uapi::Call;

/// What a system call failed with.
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

/// Why a device cannot be had.
#[derive(Debug, Error)]
pub enum VfioError {
    /// There is no such device, or that is no address of one.
    #[error(
        "no PCI device {address}: an address is like 0000:01:00.0 (`lspci -D`, or /sys/bus/pci/devices)"
    )]
    NoDevice {
        /// The address given.
        address: String,
    },
    /// It is behind no IOMMU.
    #[error(
        "{address} is in no IOMMU group: boot with intel_iommu=on or amd_iommu=on, with the IOMMU enabled in the firmware"
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
        if driver.is_some() { format!("`echo {address} > /sys/bus/pci/devices/{address}/driver/unbind`, ") } else { String::new() }
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
        /// Why.
        errno: Errno,
    },
    /// Other devices of the group have drivers that are not VFIO's.
    #[error(
        "group {group} is not viable: devices that share it have to be bound to vfio-pci, or to no driver, as well: {}",
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
        /// What it concerned.
        subject: String,
        /// Why.
        errno: Errno,
    },
    /// What the kernel says of the IOMMU cannot be used.
    #[error("VFIO_IOMMU_GET_INFO")]
    Info(#[from] InfoError),
    /// A region of the device is not there, or cannot be mapped.
    #[error("region {index} of the device {problem}")]
    Region {
        /// Its index: BARs are 0 to 5.
        index: u32,
        /// What it lacks.
        problem: &'static str,
    },
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
            ": for users other than root, `chown` it to who is to use the device"
        }
        libc::EBUSY => ": another process uses a device of this group",
        _ => "",
    }
}

fn advice_on_call(call: &str, errno: Errno) -> &'static str {
    match (call, errno.0) {
        ("VFIO_SET_IOMMU" | "VFIO_GROUP_SET_CONTAINER", libc::EPERM) => {
            ": the IOMMU does not remap interrupts, so that a device could forge them (parameter allow_unsafe_interrupts of \
             vfio_iommu_type1 has it accepted)"
        }
        ("VFIO_GROUP_SET_CONTAINER", libc::EBUSY) => ": the group has a container already",
        ("VFIO_GROUP_GET_DEVICE_FD", libc::ENODEV) => ": no device of the group has this address",
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
    }
}
