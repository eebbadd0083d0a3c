//! `exitless run --check`: the resources that a start would use, and whether it could.

use std::fmt::Write;
use std::sync::Arc;

use anyhow::Result;
use platform::boot::KernelKind;

use super::assembly::MachineComposition;
use super::config::{Config, IommuMode, Remapping, RingMode};
use super::disk::Format;
use super::disks::Disk;
use super::machine;
use super::net::NetBackend;

/// Builds the machine as a start does, takes it down, and prints what was found.
///
/// # Errors
/// Fails as a start would, or prints what the machine is made of.
pub fn check(config: Config, composition: &Arc<dyn MachineComposition>) -> Result<()> {
    let found = found(&config);
    machine::check(config, composition)?;
    println!("{found}the machine can be started");
    Ok(())
}

/// Parts of the machine, a line each.
fn found(config: &Config) -> String {
    let mut lines = String::new();
    let mut line = |text: String| {
        // A string takes everything.
        let _ = writeln!(lines, "{text}");
    };
    let kernel = match config.kernel.1 {
        KernelKind::BzImage => "a 64-bit bzImage",
        KernelKind::Elf => "a 64-bit ELF file",
    };
    let initrd = match config.initrd {
        Some(_) => "an initrd",
        None => "no initrd",
    };
    line(format!("kernel: {kernel}, {initrd}"));
    line(format!(
        "machine: {} vCPUs, {} MiB of memory",
        config.cpus,
        config.ram.bytes >> 20
    ));
    line(match config.iommu {
        Remapping::None => "IOMMU: none".into(),
        Remapping::Vtd(IommuMode::Trap) => "IOMMU: VT-d, registers trapped".into(),
        Remapping::Vtd(IommuMode::Logged) => "IOMMU: VT-d, registers logged".into(),
        Remapping::Vtd(IommuMode::Shared) => "IOMMU: VT-d, registers shared".into(),
        Remapping::Virtio(RingMode::Polled) => "IOMMU: virtio-iommu, polled".into(),
        Remapping::Virtio(RingMode::Trap) => "IOMMU: virtio-iommu, kicks trapped".into(),
    });
    for disk in &config.disks {
        line(match disk {
            Disk::File(disk) => {
                let format = match disk.format {
                    Format::Raw => "raw",
                    Format::Qcow2 { .. } => "qcow2",
                };
                let access = match disk.read_only {
                    true => "read-only",
                    false => "read-write",
                };
                format!("disk {}: {format}, {access}", disk.path.display())
            }
            Disk::Remote(disk) => format!("disk socket={}: served", disk.socket.display()),
        });
    }
    for net in &config.nets {
        line(match &net.backend {
            NetBackend::Responder(ip) => format!("network: the responder at {ip}"),
            NetBackend::Tap { name, .. } => format!("network: TAP {name}"),
            NetBackend::Vhost { name, .. } => format!("network: TAP {name}, by the kernel's vhost"),
            NetBackend::Switch { name, .. } => format!("network: switch {name}"),
            NetBackend::Socket { socket, .. } => {
                format!("network socket={}: served", socket.display())
            }
        });
    }
    for device in &config.devices {
        line(device.summary(config.iommu.is_there()));
    }
    if config.rng {
        line("entropy: the host's".into());
    }
    if let Some(swap) = &config.swap {
        line(swap.extent());
    }
    lines
}
