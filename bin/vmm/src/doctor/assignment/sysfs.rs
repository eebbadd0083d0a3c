//! Facts about device assignment, from files below a root folder.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

use super::{Assignment, Device, Group};
use crate::doctor::facts::switch;
use crate::lacks;
use crate::locked_memory::LockedMemory;

impl Assignment {
    /// Those of the machine whose root folder this is; the limits are this process's.
    pub fn probe(root: &Path) -> Self {
        let dev = root.join("dev/vfio");
        let tables = root.join("sys/firmware/acpi/tables");
        let parameter = |name| {
            let folder = root.join("sys/module/vfio_iommu_type1/parameters");
            fs::read_to_string(folder.join(name)).ok()
        };
        let interrupts = fs::read_to_string(root.join("proc/interrupts"));
        let unsafe_interrupts = parameter("allow_unsafe_interrupts");
        Self {
            groups: groups(&root.join("sys"), &dev),
            firmware_table: ["DMAR", "IVRS"]
                .into_iter()
                .find(|name| tables.join(name).exists()),
            container: access(&dev.join("vfio")),
            has_vfio_pci: root.join("sys/bus/pci/drivers/vfio-pci").exists(),
            remaps_interrupts: interrupts.is_ok_and(|text| is_remapped(&text)),
            allows_unsafe_interrupts: unsafe_interrupts.is_some_and(|text| switch(&text)),
            dma_entry_limit: parameter("dma_entry_limit").and_then(|it| it.trim().parse().ok()),
            locked: LockedMemory::probe(),
            is_root: rustix::process::geteuid().is_root(),
        }
    }
}

/// Whether a file can be opened for reading and writing; nothing if it does not exist.
fn access(file: &Path) -> Option<Result<(), String>> {
    let may = || lacks::may_access(file, Access::READ_OK | Access::WRITE_OK);
    file.exists()
        .then(|| may().map_err(|error| error.to_string()))
}

/// Whether /proc/interrupts names a chip behind interrupt remapping: `IR-PCI-MSI`, `IR-IO-APIC`.
fn is_remapped(interrupts: &str) -> bool {
    let mut words = interrupts.split_whitespace();
    words.any(|word| word.starts_with("IR-"))
}

/// IOMMU groups and their PCI devices, by number and address.
fn groups(sysfs: &Path, dev: &Path) -> Vec<Group> {
    let folder = sysfs.join("kernel/iommu_groups");
    let number = |path: &PathBuf| -> Option<u32> { path.file_name()?.to_str()?.parse().ok() };
    let group = |path: PathBuf| {
        let id = number(&path)?;
        let devices = entries(&path.join("devices"));
        let mut devices: Vec<Device> = devices.iter().filter_map(|it| device(it)).collect();
        devices.sort_by(|one, other| one.address.cmp(&other.address));
        let file = access(&dev.join(id.to_string()));
        Some(Group { id, file, devices })
    };
    let mut groups: Vec<Group> = entries(&folder).into_iter().filter_map(group).collect();
    groups.sort_by_key(|group| group.id);
    groups
}

/// A device by its folder; nothing if it is none of PCI.
fn device(folder: &Path) -> Option<Device> {
    let number = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
    };
    let driver = fs::read_link(folder.join("driver")).ok();
    let driver = driver.and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
    Some(Device {
        address: folder.file_name()?.to_str()?.to_owned(),
        driver,
        class: number("class")?,
        vendor: number("vendor")? as u16,
        device: number("device")? as u16,
        // The file is there where the kernel has a way.
        can_reset: folder.join("reset").exists(),
    })
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}
