//! Devices that guests can be given: the IOMMU, VFIO, and each device with what it lacks.
//!
//! [`Assignment::probe`] reads sysfs, /dev/vfio and this process's limits below a root folder; the
//! rest judges without access to the machine. Nothing is bound or opened for a device.

mod class;
mod sysfs;

use std::fmt::Write;

use serde_json::json;
use vfio::{Binding, HostDevice};

use super::finding::{Finding, State};
use crate::locked_memory::{LockedMemory, MEMLOCK_REMEDY, amount};
use crate::values::counted;

/// Mappings of a container by the default of dma_entry_limit.
const DMA_ENTRY_LIMIT: u64 = 65_535;
/// Class of bridges.
const BRIDGE: u32 = 0x06;

/// Facts about device assignment. The default is a machine without an IOMMU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Assignment {
    /// IOMMU groups, by number.
    pub groups: Vec<Group>,
    /// The firmware's table of IOMMUs: `DMAR` or `IVRS`.
    pub firmware_table: Option<&'static str>,
    /// /dev/vfio/vfio: usable, or the reason why not; nothing if it does not exist.
    pub container: Option<Result<(), String>>,
    /// The driver vfio-pci is loaded.
    pub has_vfio_pci: bool,
    /// Interrupts are remapped.
    pub remaps_interrupts: bool,
    /// allow_unsafe_interrupts of vfio_iommu_type1, if that is loaded.
    pub allows_unsafe_interrupts: bool,
    /// dma_entry_limit of vfio_iommu_type1, if that is loaded.
    pub dma_entry_limit: Option<u64>,
    /// Memory that this process may lock.
    pub locked: LockedMemory,
    /// User of this process.
    pub user: u32,
}

/// Devices that the IOMMU cannot distinguish.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// Its number.
    pub id: u32,
    /// /dev/vfio/N: usable, or the reason why not; nothing if it does not exist.
    pub file: Option<Result<(), String>>,
    /// Its devices, by address.
    pub devices: Vec<Device>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// As the kernel shows it.
    pub host: HostDevice,
    /// The kernel can reset it.
    pub can_reset: bool,
}

impl Device {
    /// Returns the reason why no driver of VFIO's takes it.
    fn unfit(&self) -> Option<&'static str> {
        match (self.host.vendor, self.host.class >> 16) {
            (0, _) => Some("no PCI device, which stays with the host"),
            (_, BRIDGE) => Some("a bridge, which stays with the host"),
            _ => None,
        }
    }

    /// Commands of root that bind it to vfio-pci.
    fn binding(&self) -> Vec<String> {
        let address = &self.host.address;
        let folder = format!("/sys/bus/pci/devices/{address}");
        let mut commands = vec![format!("echo vfio-pci > {folder}/driver_override")];
        if self.host.driver.is_some() {
            commands.push(format!("echo {address} > {folder}/driver/unbind"));
        }
        commands.push(format!("echo {address} > /sys/bus/pci/drivers_probe"));
        commands
    }

    /// Commands of root that take it away from a driver of the host's, so that others of its group
    /// can be assigned. A bridge, which VFIO refuses, is left without a driver. A device that is
    /// not PCI is on a bus that is not known here.
    fn clearing(&self) -> Vec<String> {
        let address = &self.host.address;
        match (self.host.vendor, self.unfit()) {
            (0, _) => Vec::new(),
            (_, Some(_)) => vec![format!(
                "echo {address} > /sys/bus/pci/devices/{address}/driver/unbind"
            )],
            (_, None) => self.binding(),
        }
    }
}

/// An IOMMU group as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupReport {
    id: u32,
    devices: Vec<DeviceReport>,
}

/// A device as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DeviceReport {
    device: Device,
    /// Reason why it cannot be assigned now.
    obstacle: Option<String>,
    /// Commands that root gives to have it assignable; none if no command helps.
    commands: Vec<String>,
}

impl Assignment {
    /// Returns the devices of each group, judged.
    pub fn reports(&self) -> Vec<GroupReport> {
        let report = |group: &Group| GroupReport {
            id: group.id,
            devices: group
                .devices
                .iter()
                .map(|it| self.device(group, it))
                .collect(),
        };
        self.groups.iter().map(report).collect()
    }

    fn device(&self, group: &Group, device: &Device) -> DeviceReport {
        let (obstacle, commands) = match self.obstacle(group, device) {
            Some((obstacle, commands)) => (Some(obstacle), commands),
            None => (None, Vec::new()),
        };
        DeviceReport {
            device: device.clone(),
            obstacle,
            commands,
        }
    }

    /// Returns the reason why this device of `group` cannot be assigned now, and the commands
    /// against it.
    fn obstacle(&self, group: &Group, device: &Device) -> Option<(String, Vec<String>)> {
        if let Some(unfit) = device.unfit() {
            return Some((unfit.into(), Vec::new()));
        }
        let id = group.id;
        let blocks = |it: &&Device| it.host.binding() == Binding::Other && *it != device;
        let others: Vec<&Device> = group.devices.iter().filter(blocks).collect();
        let mut reasons = Vec::new();
        let mut commands = Vec::new();
        if device.host.binding() != Binding::Vfio {
            reasons.push(match &device.host.driver {
                Some(driver) => format!("bound to {driver}, not to vfio-pci"),
                None => "bound to no driver".into(),
            });
            commands.extend(device.binding());
        }
        if !others.is_empty() {
            let names = others.iter().map(|it| {
                let driver = it.host.driver.as_deref().unwrap_or_default();
                format!("{} ({driver})", it.host.address)
            });
            let names: Vec<String> = names.collect();
            reasons.push(format!(
                "group {id} goes as a whole, and others of it have drivers: {}",
                names.join(", ")
            ));
            commands.extend(others.iter().flat_map(|it| it.clearing()));
        }
        if !reasons.is_empty() {
            if !self.has_vfio_pci && !commands.is_empty() {
                commands.insert(0, "modprobe vfio-pci".into());
            }
            if self.user != 0 {
                commands.push(format!("chown {} /dev/vfio/{id}", self.user));
            }
            return Some((reasons.join("; "), commands));
        }
        match &group.file {
            None => Some((
                format!("no /dev/vfio/{id} here: a container has to be given it"),
                Vec::new(),
            )),
            Some(Err(reason)) => Some((
                format!("/dev/vfio/{id}: {reason}"),
                vec![format!("chown {} /dev/vfio/{id}", self.user)],
            )),
            Some(Ok(())) if self.container != Some(Ok(())) => Some((
                "/dev/vfio/vfio cannot be used (see device assignment)".into(),
                Vec::new(),
            )),
            Some(Ok(())) if !self.is_remapping_settled() => Some((
                "interrupts are not remapped (see interrupt remapping)".into(),
                Vec::new(),
            )),
            Some(Ok(())) => None,
        }
    }

    fn is_remapping_settled(&self) -> bool {
        self.remaps_interrupts || self.allows_unsafe_interrupts
    }

    /// Judges what device assignment takes.
    pub fn findings(&self) -> [Finding; 4] {
        [
            self.iommu(),
            self.interrupt_remapping(),
            self.dma_mappings(),
            self.locked_memory(),
        ]
    }

    fn iommu(&self) -> Finding {
        let count = self.groups.len();
        let (state, value, next) = match (&self.container, self.firmware_table) {
            _ if count > 0 => self.vfio(count),
            (_, Some("DMAR")) => (
                State::Missing,
                "no IOMMU groups, though the firmware describes a VT-d unit (DMAR)".to_owned(),
                "boot the host with intel_iommu=on",
            ),
            (_, Some(_)) => (
                State::Missing,
                "no IOMMU groups, though the firmware describes an AMD IOMMU (IVRS)".into(),
                "boot the host without amd_iommu=off and iommu=off",
            ),
            (_, None) => (
                State::Missing,
                "no IOMMU groups; the firmware describes no IOMMU".into(),
                "the firmware's switch (VT-d, AMD-Vi, IOMMU), then intel_iommu=on; of a virtual \
                 machine the outer \
                 hypervisor's: QEMU's `-machine q35,kernel-irqchip=split -device \
                 intel-iommu,intremap=on,caching-mode=on`",
            ),
        };
        Finding {
            key: "iommu",
            name: "device assignment",
            state,
            value,
            why: "a physical device can be given to a guest (run --device); emulated devices need \
                 none of it",
            next,
        }
    }

    /// Returns the finding of a host with so many groups.
    fn vfio(&self, count: usize) -> (State, String, &'static str) {
        let reports = self.reports();
        let devices = reports.iter().flat_map(|group| &group.devices);
        let ready = devices.filter(|it| it.obstacle.is_none()).count();
        match &self.container {
            None => (
                State::Limited,
                format!("{}, but no /dev/vfio/vfio", counted(count, "group")),
                "modprobe vfio-pci; a container has to be given /dev/vfio",
            ),
            Some(Err(reason)) => (
                State::Limited,
                format!("{}, but /dev/vfio/vfio: {reason}", counted(count, "group")),
                "chmod 666 /dev/vfio/vfio, as it is by default: it gives access to no device; a \
                 container has to be given it",
            ),
            Some(Ok(())) => (
                State::Good,
                format!(
                    "{}, VFIO loaded, {} can be assigned now",
                    counted(count, "group"),
                    counted(ready, "device")
                ),
                "",
            ),
        }
    }

    fn interrupt_remapping(&self) -> Finding {
        let (state, value) = match (self.remaps_interrupts, self.allows_unsafe_interrupts) {
            (true, _) => (State::Good, "on"),
            (false, true) => (
                State::Limited,
                "off, which allow_unsafe_interrupts has accepted: a guest with a device can forge \
                 any interrupt of the host's",
            ),
            (false, false) if self.groups.is_empty() => (State::Missing, "no IOMMU"),
            (false, false) => (State::Missing, "off: VFIO refuses every device"),
        };
        Finding {
            key: "interrupt_remapping",
            name: "interrupt remapping",
            state,
            value: value.into(),
            why: "a device sends an interrupt by a write; without remapping it can send any",
            next: "in the firmware; QEMU's intel-iommu has it with intremap=on. For guests that \
                 you trust: \
                   echo Y > /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts",
        }
    }

    fn dma_mappings(&self) -> Finding {
        let (state, value) = match self.dma_entry_limit {
            None => (
                State::Limited,
                "not known before vfio_iommu_type1 is loaded".to_owned(),
            ),
            Some(limit) if limit < DMA_ENTRY_LIMIT => (
                State::Limited,
                format!("{limit} for a device (dma_entry_limit)"),
            ),
            Some(limit) => (State::Good, format!("{limit} for a device")),
        };
        Finding {
            key: "dma_mappings",
            name: "DMA mappings",
            state,
            value,
            why: "what the guest maps beyond this limit the device does not reach",
            next: "modprobe vfio-pci; a larger limit: echo 1000000 > \
                 /sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
        }
    }

    fn locked_memory(&self) -> Finding {
        let (state, value) = match self.locked.limit {
            None => (State::Good, "no limit".to_owned()),
            Some(limit) => (
                State::Limited,
                format!(
                    "{} (RLIMIT_MEMLOCK), {} KiB used",
                    amount(limit),
                    self.locked.used >> 10
                ),
            ),
        };
        Finding {
            key: "locked_memory",
            name: "locked memory",
            state,
            value,
            why: "pages that a guest maps for its devices count as locked, each mapping by itself; \
                 with --iommu none, or a \
                  guest with iommu=pt, all of its memory does, for each device",
            next: MEMLOCK_REMEDY,
        }
    }
}

/// Returns the devices by group, for people; nothing without a group.
pub fn table(groups: &[GroupReport]) -> String {
    let mut out = String::new();
    if groups.is_empty() {
        return out;
    }
    // A string takes everything.
    let _ = writeln!(
        out,
        "\ndevices by IOMMU group (exitless run --device vfio=ADDRESS); unbind none that this host \
         uses itself:"
    );
    for group in groups {
        let _ = writeln!(out, "  group {}", group.id);
        for DeviceReport {
            device,
            obstacle,
            commands,
        } in &group.devices
        {
            let host = &device.host;
            let driver = host.driver.as_deref().unwrap_or("no driver");
            let _ = writeln!(
                out,
                "    {}  {:04x}:{:04x}  {}, {driver}: {}",
                host.address,
                host.vendor,
                host.device,
                class::name(host.class),
                obstacle.as_deref().unwrap_or(match device.can_reset {
                    true => "can be assigned",
                    false => "can be assigned, and has no reset: its state outlives a guest",
                })
            );
            for command in commands {
                let _ = writeln!(out, "      # {command}");
            }
        }
    }
    out
}

/// Returns the devices by group, for programs.
pub fn json(groups: &[GroupReport]) -> serde_json::Value {
    let device = |report: &DeviceReport| {
        let host = &report.device.host;
        json!({
            "address": host.address,
            "vendor": format!("{:04x}", host.vendor),
            "device": format!("{:04x}", host.device),
            "class": format!("{:06x}", host.class),
            "name": class::name(host.class),
            "driver": host.driver,
            "can_reset": report.device.can_reset,
            "assignable": report.obstacle.is_none(),
            "obstacle": report.obstacle,
            "commands": report.commands,
        })
    };
    let group = |group: &GroupReport| {
        json!({
            "group": group.id,
            "devices": group.devices.iter().map(device).collect::<Vec<_>>(),
        })
    };
    groups.iter().map(group).collect()
}

#[cfg(test)]
mod tests;
