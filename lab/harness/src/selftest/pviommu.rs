//! Guests behind the paravirtual IOMMU, with Linux's own driver: kernels from 6.12 on.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::packages::Version;

use super::case::Case;
use super::machine::{mixed_summary, with_disk};
use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::workloads::{self, Rogue};

/// The first of Debian's kernels with the driver.
const KERNEL: Version = Version::new(6, 12);

/// What a guest says of its machine ends here.
const SEEN: &str = "machine seen";

/// Cases of `make test`.
pub(super) fn quick() -> Vec<Case> {
    vec![io(2, true, 3)]
}

/// And those of the soak.
pub(super) fn soak() -> Vec<Case> {
    vec![io(1, true, 60), io(2, true, 60), io(2, false, 60)]
}

/// A guest that first says what it sees of its IOMMU, then runs `script`.
fn guest(cpus: u32, is_strict: bool, script: &str) -> Guest {
    // The pattern does not match itself on the command line, which the log has.
    let script = format!(
        "dmesg | grep -E 'virtio_iommu virti[o]|iomm[u]:|iommu grou[p]'; echo {SEEN}; {script}"
    );
    let mut guest = Guest::new(Mode::Virtio, script);
    (guest.cpus, guest.is_strict, guest.idle) = (cpus, is_strict, "adaptive");
    guest
}

/// Linux's driver has the IOMMU, `endpoints` devices are behind it, and there was no fault while it booted.
fn check(outcome: &Outcome, endpoints: usize) -> Result<()> {
    let (seen, _) = outcome
        .console
        .split_once(SEEN)
        .with_context(|| format!("it did not boot\n{}", outcome.tail()))?;
    ensure!(
        seen.contains("virtio_iommu virtio0: input address: 48 bits"),
        "Linux's driver did not take the IOMMU\n{seen}"
    );
    let groups = seen.matches("Adding to iommu group").count();
    ensure!(
        groups == endpoints,
        "{groups} devices behind it, not {endpoints}\n{seen}"
    );
    ensure!(!seen.contains(" fault from EP"), "faults\n{seen}");
    let invalidations = outcome.ledger["whole"]["owner"]["invalidations"].as_u64();
    ensure!(
        invalidations > Some(0),
        "nothing was unmapped: {invalidations:?}"
    );
    Ok(())
}

/// Disk and network under it; then two disks attack.
fn io(cpus: u32, is_strict: bool, seconds: u32) -> Case {
    let policy = if is_strict { "strict" } else { "lazy" };
    let name = format!(
        "verified I/O for {seconds} s, ping and UDP echo; then rogue DMA, unmapped and read-only, is \
         blocked and the event queue says so: virtio, {cpus} vCPU, {policy}"
    );
    Case::new(name, move |host| {
        let script = format!(
            "workload mixed {} --seconds {seconds} --seed 5 --depth 8 && {} && dmesg -n 1",
            workloads::disk_node(Mode::Virtio, 0),
            workloads::network_script(3, 50)
        );
        let mut guest = with_disk(guest(cpus, is_strict, &script), host, ",queues=2")?;
        workloads::add_network(&mut guest);
        for rogue in Rogue::ALL {
            rogue.add(&mut guest, host)?;
        }
        guest.limit += Duration::from_secs(u64::from(seconds) * 2);
        let outcome = guest.run(host)?;
        // The disks and the card.
        check(&outcome, 2 + Rogue::ALL.len())?;
        workloads::check_network(&outcome)?;
        for disk in 0..Rogue::ALL.len() {
            workloads::check_told(&outcome, 1 + disk)?;
        }
        mixed_summary(&outcome)
    })
    .needing(KERNEL)
}
