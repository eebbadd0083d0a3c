//! Devices of the emulated host that are assigned to a program in it, or to a guest: attached,
//! found, bound to VFIO; and the accesses that the host's IOMMU refused them ([`FaultLog`]).
//!
//! The host then has an Intel IOMMU (`intel-iommu` of QEMU) with interrupt remapping, without which
//! VFIO assigns no device. Its unmaps take effect at once (`iommu.strict=1`): under Debian's
//! default, which is lazy, the log of faults would not show all accesses to unmapped memory.
//! Caching mode is off: the unit caches translations until an invalidation.
//!
//! ```no_run
//! use lab::assigned::{self, Device};
//! use lab::{Lab, LabConfig};
//!
//! let config = assigned::with_edu(assigned::with_unit(LabConfig::default()));
//! let lab = Lab::start(&config)?;
//! let edu = Device::Edu.find(&lab)?;
//! assigned::bind_to_vfio(&lab, &edu)?;
//! # Ok::<(), lab::LabError>(())
//! ```

use std::path::Path;

use crate::{Lab, LabConfig, LabError, in_option};

mod faults;

pub use faults::{DmaAccess, DmaFault, FaultLog};

/// Adds an IOMMU, which devices that are added afterwards are behind.
#[must_use]
pub fn with_unit(mut config: LabConfig) -> LabConfig {
    let args = ["-device", "intel-iommu,intremap=on"].map(str::to_owned);
    config.qemu_args.extend(args);
    let own = "intel_iommu=on iommu.strict=1";
    config.kernel_options = format!("{own} {}", config.kernel_options);
    config
}

/// Adds an NVMe controller; its namespace is the file `namespace`, raw, which need not survive a
/// crash of this machine.
///
/// # Errors
/// The file's name is not UTF-8.
pub fn with_nvme(mut config: LabConfig, namespace: &Path) -> Result<LabConfig, LabError> {
    let no_text = |_| LabError::Config(format!("{} is no text", namespace.display()));
    let file = in_option(namespace).into_string().map_err(no_text)?;
    let drive = format!("if=none,id=namespace,format=raw,cache=unsafe,file={file}");
    let args = [
        "-drive",
        &drive,
        "-device",
        "nvme,drive=namespace,serial=lab",
    ];
    config.qemu_args.extend(args.map(str::to_owned));
    Ok(config)
}

/// Adds a virtio network card that obeys the IOMMU. Behind it is QEMU's own network: its gateway,
/// 10.0.2.2, answers ARP, and passes datagrams on to this machine's 127.0.0.1.
#[must_use]
pub fn with_net(mut config: LabConfig) -> LabConfig {
    let device = "virtio-net-pci,netdev=assigned,iommu_platform=on,disable-legacy=on,romfile=";
    let args = ["-netdev", "user,id=assigned", "-device", device];
    config.qemu_args.extend(args.map(str::to_owned));
    config
}

/// Adds `edu`, whose DMA engine copies on request, from and to addresses of 32 bits.
#[must_use]
pub fn with_edu(mut config: LabConfig) -> LabConfig {
    let args = ["-device", "edu,dma_mask=0xffffffff"].map(str::to_owned);
    config.qemu_args.extend(args);
    config
}

/// A device that can be distinguished from the emulated host's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The controller of [`with_nvme`].
    Nvme,
    /// The card of [`with_net`].
    Net,
    /// The device of [`with_edu`].
    Edu,
}

impl Device {
    /// Returns its PCI address, for example `0000:00:04.0`.
    ///
    /// # Errors
    /// There is none, or more than one; otherwise as [`Lab::exec`].
    pub fn find(self, lab: &Lab) -> Result<String, LabError> {
        let script = self.search();
        let found = shell(lab, &script)?;
        let mut addresses = found.split_whitespace();
        match (addresses.next(), addresses.next()) {
            (Some(address), None) => Ok(address.to_owned()),
            _ => Err(LabError::Inside(format!(
                "{self:?} is not one device: {found:?}"
            ))),
        }
    }

    /// Returns a shell script that prints the addresses of such devices, in the emulated host or in
    /// a guest.
    #[must_use]
    pub fn search(self) -> String {
        let ids = match self {
            Self::Nvme => "0x010802 class",
            // The card's id as a device without legacy: 0x1040 + 1.
            Self::Net => "0x1041 device",
            Self::Edu => "0x11e8 device",
        };
        let (id, file) = ids.split_once(' ').expect("two words");
        format!(
            "for d in /sys/bus/pci/devices/*; do grep -q {id} $d/{file} && echo ${{d##*/}}; done; \
             true"
        )
    }
}

/// Returns a shell script that unbinds the device at `address` from its driver, if it has one, and
/// binds it to VFIO: in the emulated host, or in a guest after `lab-load vfio`.
#[must_use]
pub fn bind_script(address: &str) -> String {
    let device = format!("/sys/bus/pci/devices/{address}");
    format!(
        "echo vfio-pci > {device}/driver_override && \
         if [ -e {device}/driver ]; then echo {address} > {device}/driver/unbind; fi && \
         echo {address} > /sys/bus/pci/drivers_probe && \
         [ \"$(basename \"$(readlink {device}/driver)\")\" = vfio-pci ]"
    )
}

/// Binds the device at `address` to VFIO, by the same commands as a user.
///
/// # Errors
/// [`LabError::Inside`] if it is not bound afterwards; otherwise as [`Lab::exec`].
pub fn bind_to_vfio(lab: &Lab, address: &str) -> Result<(), LabError> {
    shell(lab, &bind_script(address)).map(drop)
}

/// Parses the kernel's log of DMA that the host's IOMMU refused, and clears the log, so that the
/// next call returns later faults only.
///
/// # Errors
/// As [`Lab::exec`].
pub fn take_faults(lab: &Lab) -> Result<FaultLog, LabError> {
    shell(lab, "dmesg -c").map(|log| FaultLog::parse(&log))
}

/// Runs a script, which must succeed. Returns its output.
fn shell(lab: &Lab, script: &str) -> Result<String, LabError> {
    let out = lab.exec("/bin/sh", ["-c", script])?;
    if out.success() {
        return Ok(out.stdout_text());
    }
    let (status, said) = (out.status, out.stderr_text());
    Err(LabError::Inside(format!(
        "{script}: status {status}: {said}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_of_any_name_and_the_hosts_options_arrive() {
        let config = LabConfig {
            kernel_options: "iommu.passthrough=0".into(),
            ..LabConfig::default()
        };
        let config = with_nvme(with_unit(config), Path::new("/tmp/a,b")).expect("text");
        let options = "intel_iommu=on iommu.strict=1 iommu.passthrough=0";
        assert_eq!(config.kernel_options, options);
        let drive = config
            .qemu_args
            .iter()
            .find(|arg| arg.contains("id=namespace"));
        assert!(drive.is_some_and(|drive| drive.ends_with("file=/tmp/a,,b")));
        // Devices behind a unit must come after it.
        let at = |text: &str| config.qemu_args.iter().position(|arg| arg.contains(text));
        assert!(at("intel-iommu") < at("nvme,"));
    }
}
