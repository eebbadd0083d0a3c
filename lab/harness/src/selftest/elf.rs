//! Cases that boot the guest's stock kernel as the ELF inside its bzImage, by its PVH entry.

use anyhow::{Context, Result};

use super::case::Case;
use super::machine::{Machine, check_pattern, with_disk};
use crate::system::guest::Mode;
use crate::system::host::Host;

/// Name of the unpacked kernel.
const KERNEL: &str = "vmlinux";

/// Type of boot loader that Linux reports if it was entered so
/// (`arch/x86/platform/pvh/enlighten.c`): 0xb0.
const PVH: &str = "176";

/// Returns the cases of `make soak`: one vCPU and four.
pub fn soak() -> Vec<Case> {
    [(Mode::Trap, 1), (Mode::Shared, 4)]
        .map(|(mode, cpus)| case(Machine::new(mode, cpus, true)))
        .into()
}

fn case(machine: Machine) -> Case {
    let name = format!("boot of an ELF kernel (PVH): {}", machine.name());
    Case::new(name, move |host| {
        let bytes = put_kernel(host)?;
        let script = format!(
            "test $(cat /proc/sys/kernel/bootloader_type) = {PVH} && {}",
            check_pattern("/dev/vda")
        );
        let mut guest = with_disk(machine.guest(&script), host, ",queues=2")?;
        guest.kernel = Some(host.path(KERNEL));
        guest.idle = "adaptive";
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        Ok(format!("{} MiB of ELF", bytes >> 20))
    })
}

/// Unpacks the guest's kernel to a file that `run` can read. Returns its size.
fn put_kernel(host: &Host) -> Result<usize> {
    let elf = lab::kernel::extract_vmlinux(&host.kernel_image()?)
        .context("unpacking the guest's kernel")?;
    host.put(KERNEL, &elf)?;
    Ok(elf.len())
}
