//! Facts about device assignment, from files below a root folder.

use std::fs;
use std::path::Path;

use rustix::fs::Access;
use vfio::{HostDevice, HostGroup};

use super::{Assignment, Device, Group};
use crate::doctor::files::switch;
use crate::lacks;
use crate::locked_memory::LockedMemory;

impl Assignment {
    /// Reads those of the machine whose root folder this is; the limits are this process's.
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
            user: rustix::process::geteuid().as_raw(),
        }
    }
}

/// Returns whether a file can be opened for reading and writing; nothing if it does not exist.
fn access(file: &Path) -> Option<Result<(), String>> {
    let may = || lacks::may_access(file, Access::READ_OK | Access::WRITE_OK);
    file.exists()
        .then(|| may().map_err(|error| error.to_string()))
}

/// Returns whether /proc/interrupts names a chip behind interrupt remapping: `IR-PCI-MSI`,
/// `IR-IO-APIC`.
fn is_remapped(interrupts: &str) -> bool {
    let mut words = interrupts.split_whitespace();
    words.any(|word| word.starts_with("IR-"))
}

/// Returns the IOMMU groups and their devices, by number and address.
fn groups(sysfs: &Path, dev: &Path) -> Vec<Group> {
    let device = |host: HostDevice| Device {
        // The file is there where the kernel has a way.
        can_reset: sysfs
            .join("bus/pci/devices")
            .join(&host.address)
            .join("reset")
            .exists(),
        host,
    };
    let group = |group: HostGroup| Group {
        id: group.id,
        file: access(&dev.join(group.id.to_string())),
        devices: group.devices.into_iter().map(device).collect(),
    };
    vfio::groups(sysfs).into_iter().map(group).collect()
}
