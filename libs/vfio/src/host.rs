//! The host's IOMMU groups and their devices, as sysfs shows them.

use std::fs;
use std::io;
use std::path::Path;

use crate::error::VfioError;

/// Directory in which the kernel shows devices and groups.
pub const SYSFS: &str = "/sys";
/// The drivers that a group may have beside VFIO's own, since they use no DMA.
const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];

/// IOMMU group of the host: its devices are assigned together or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostGroup {
    /// Number: the group's file is `/dev/vfio/<id>` once a device of it is bound to VFIO.
    pub id: u32,
    /// Devices, by address.
    pub devices: Vec<HostDevice>,
}

impl HostGroup {
    /// Devices whose drivers keep the group from being used.
    pub fn blocking(&self) -> impl Iterator<Item = &HostDevice> {
        let devices = self.devices.iter();
        devices.filter(|device| device.binding() == Binding::Other)
    }

    /// Whether the group can be opened: a device is bound to VFIO, and none to a driver of the host
    /// that uses DMA.
    pub fn is_ready(&self) -> bool {
        let mut devices = self.devices.iter();
        devices.any(|device| device.binding() == Binding::Vfio) && self.blocking().next().is_none()
    }
}

/// Device of the host behind an IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDevice {
    /// Address, for example `0000:01:00.0`; a name for a device that is not PCI.
    pub address: String,
    /// Driver it is bound to.
    pub driver: Option<String>,
    /// PCI class code: class, subclass, interface, a byte each; 0 where sysfs does not say.
    pub class: u32,
    /// PCI vendor; 0 where sysfs does not say.
    pub vendor: u16,
    /// PCI device; 0 where sysfs does not say.
    pub device: u16,
}

impl HostDevice {
    /// Kind of driver that has the device.
    pub fn binding(&self) -> Binding {
        match self.driver.as_deref() {
            None => Binding::Unbound,
            Some(driver) if is_vfios(driver) => Binding::Vfio,
            Some(driver) if HARMLESS.contains(&driver) => Binding::Harmless,
            Some(_) => Binding::Other,
        }
    }
}

/// Kind of driver that a device of a group is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binding {
    /// One of VFIO's.
    Vfio,
    /// One that uses no DMA: it keeps no group from being used.
    Harmless,
    /// None.
    Unbound,
    /// One of the host that may use DMA: the group cannot be used.
    Other,
}

/// All IOMMU groups under this root (`/sys`), by number; none where the kernel uses no IOMMU.
pub fn groups(sysfs: &Path) -> Vec<HostGroup> {
    let folders = names(&sysfs.join("kernel/iommu_groups"));
    let ids = folders.iter().filter_map(|name| name.parse().ok());
    let mut groups: Vec<HostGroup> = ids.map(|id| group(sysfs, id)).collect();
    groups.sort_by_key(|group| group.id);
    groups
}

/// The group of this number, without devices where there is none.
pub fn group(sysfs: &Path, id: u32) -> HostGroup {
    let folder = sysfs.join(format!("kernel/iommu_groups/{id}/devices"));
    let mut addresses = names(&folder);
    addresses.sort();
    let devices = addresses.into_iter().map(|address| {
        let device = folder.join(&address);
        let number = |name| hexadecimal(&device.join(name)).unwrap_or(0);
        HostDevice {
            driver: target(&device.join("driver")).ok(),
            class: number("class"),
            vendor: number("vendor") as u16,
            device: number("device") as u16,
            address,
        }
    });
    HostGroup {
        id,
        devices: devices.collect(),
    }
}

/// The number of the group of a device that is bound to VFIO.
pub fn group_of(sysfs: &Path, address: &str) -> Result<u32, VfioError> {
    let address = address.to_owned();
    let device = sysfs.join("bus/pci/devices").join(&address);
    // Nothing but an address: it becomes part of paths.
    let is_one = address.len() >= 12
        && address
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
        && !address.contains("..");
    if !is_one || !device.exists() {
        return Err(VfioError::NoDevice { address });
    }
    let Some(id) = target(&device.join("iommu_group"))
        .ok()
        .and_then(|id| id.parse().ok())
    else {
        return Err(VfioError::NoGroup { address });
    };
    let driver = target(&device.join("driver")).ok();
    match driver.as_deref() {
        Some(driver) if is_vfios(driver) => Ok(id),
        _ => Err(VfioError::NotBound { address, driver }),
    }
}

/// `vfio-pci`, or a driver of some vendor's that is the same and more (`mlx5_vfio_pci`).
fn is_vfios(driver: &str) -> bool {
    driver == "vfio-pci" || driver.ends_with("_vfio_pci")
}

/// Names in a folder; none where there is no such folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// The last part of a link's target.
fn target(link: &Path) -> io::Result<String> {
    let target = fs::read_link(link)?;
    let name = target.file_name().unwrap_or_default();
    Ok(name.to_string_lossy().into_owned())
}

/// A number that sysfs writes as `0x8086`.
fn hexadecimal(file: &Path) -> Option<u32> {
    let text = fs::read_to_string(file).ok()?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// As the kernel shows a device with this driver, in group 4.
    fn show(sysfs: &Path, address: &str, driver: Option<&str>) {
        let device = sysfs.join("bus/pci/devices").join(address);
        let group = sysfs.join("kernel/iommu_groups/4/devices");
        fs::create_dir_all(&device).expect("a directory");
        fs::create_dir_all(&group).expect("a directory");
        symlink("../../../kernel/iommu_groups/4", device.join("iommu_group")).expect("a link");
        symlink(&device, group.join(address)).expect("a link");
        for (name, text) in [
            ("vendor", "0x1b36\n"),
            ("device", "0x0010\n"),
            ("class", "0x010802\n"),
        ] {
            fs::write(device.join(name), text).expect("a file");
        }
        if let Some(driver) = driver {
            symlink(format!("../../drivers/{driver}"), device.join("driver")).expect("a link");
        }
    }

    #[test]
    fn a_device_is_found_by_its_address_alone_and_has_to_be_bound() {
        let dir = tempfile::tempdir().expect("a directory");
        let sysfs = dir.path();
        show(sysfs, "0000:01:00.0", Some("vfio-pci"));
        show(sysfs, "0000:01:00.1", Some("nvme"));
        show(sysfs, "0000:01:00.2", None);
        fs::create_dir_all(sysfs.join("bus/pci/devices/0000:02:00.0")).expect("a directory");
        show(sysfs, "0000:01:00.3", Some("mlx5_vfio_pci"));
        for bound in ["0000:01:00.0", "0000:01:00.3"] {
            assert_eq!(group_of(sysfs, bound).expect("bound"), 4);
        }
        let error = |address| group_of(sysfs, address).expect_err("not to be had");
        assert!(matches!(
            error("0000:01:00.1"),
            VfioError::NotBound { driver: Some(driver), .. } if driver == "nvme"
        ));
        assert!(matches!(
            error("0000:01:00.2"),
            VfioError::NotBound { driver: None, .. }
        ));
        assert!(matches!(error("0000:02:00.0"), VfioError::NoGroup { .. }));
        for no_address in ["", "0000:09:00.0", "../devices/0000:01:00.0", "01:00.0"] {
            assert!(
                matches!(error(no_address), VfioError::NoDevice { .. }),
                "{no_address}"
            );
        }
    }

    #[test]
    fn groups_are_listed_with_what_blocks_them() {
        let dir = tempfile::tempdir().expect("a directory");
        let sysfs = dir.path();
        show(sysfs, "0000:01:00.0", Some("vfio-pci"));
        show(sysfs, "0000:01:00.1", Some("snd_hda_intel"));
        show(sysfs, "0000:01:00.2", None);
        show(sysfs, "0000:00:01.0", Some("pcieport"));
        for empty in ["12", "3", "no number"] {
            let folder = sysfs.join(format!("kernel/iommu_groups/{empty}/devices"));
            fs::create_dir_all(folder).expect("a directory");
        }
        // A device that is not PCI: it has none of the files.
        let platform = sysfs.join("kernel/iommu_groups/12/devices/ahci.0");
        fs::create_dir_all(platform).expect("a directory");
        let all = groups(sysfs);
        assert_eq!(
            all.iter().map(|group| group.id).collect::<Vec<_>>(),
            [3, 4, 12]
        );
        let bindings = |group: &HostGroup| -> Vec<_> {
            let devices = group.devices.iter();
            devices
                .map(|device| (device.address.clone(), device.binding()))
                .collect()
        };
        let named = |list: &[(&str, Binding)]| -> Vec<_> {
            list.iter()
                .map(|(name, binding)| ((*name).to_owned(), *binding))
                .collect()
        };
        assert_eq!(
            bindings(&all[1]),
            named(&[
                ("0000:00:01.0", Binding::Harmless),
                ("0000:01:00.0", Binding::Vfio),
                ("0000:01:00.1", Binding::Other),
                ("0000:01:00.2", Binding::Unbound),
            ])
        );
        let nvme = &all[1].devices[1];
        assert_eq!((nvme.vendor, nvme.device), (0x1b36, 0x10));
        assert_eq!(nvme.class, 0x01_08_02);
        let blocking: Vec<_> = all[1].blocking().map(|device| &device.address).collect();
        assert_eq!(blocking, ["0000:01:00.1"]);
        assert_eq!(bindings(&all[2]), named(&[("ahci.0", Binding::Unbound)]));
        assert_eq!(all[2].devices[0].class, 0);
        assert_eq!(
            all.iter().map(HostGroup::is_ready).collect::<Vec<_>>(),
            [false; 3]
        );
        fs::remove_file(sysfs.join("bus/pci/devices/0000:01:00.1/driver")).expect("unbound");
        assert!(group(sysfs, 4).is_ready());
        assert_eq!(groups(&sysfs.join("nothing")), []);
    }
}
