//! Guests of disks whose device models are processes of their own.

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::machine::{Machine, check_pattern, mixed_summary, with_disk};
use crate::system::guest::{Driver, Guest, Mode, Outcome};
use crate::system::workloads;

/// Cases of `make test`.
pub(super) fn quick() -> Vec<Case> {
    vec![without_iommu(3), behind_vtd(3), behind_virtio(3)]
}

/// Returns a script that reads the disk's initial content, then mixes reads and writes and reads
/// back all blocks.
fn script(mode: Mode, seconds: u32) -> String {
    let disk = workloads::disk_node(mode, 0);
    let pattern = check_pattern(&disk);
    format!("{pattern} && workload mixed {disk} --seconds {seconds} --seed 7 --depth 8")
}

fn name(seconds: u32, behind: &str) -> String {
    format!("verified I/O for {seconds} s on a caged disk: {behind}")
}

/// Returns the guest's findings on its disk, whose worker was confined and did not end early.
fn verdict(outcome: &Outcome) -> Result<String> {
    for complaint in ["may make any system call", "its worker has ended"] {
        ensure!(!outcome.log.contains(complaint), "{}", outcome.tail());
    }
    mixed_summary(outcome)
}

fn without_iommu(seconds: u32) -> Case {
    Case::new(name(seconds, "no IOMMU"), move |host| {
        let guest = Guest::new(Mode::None, script(Mode::None, seconds));
        let mut guest = with_disk(guest, host, ",queues=2,worker=on")?;
        guest.idle = "adaptive";
        verdict(&guest.run(host)?)
    })
}

fn behind_vtd(seconds: u32) -> Case {
    let machine = Machine::new(Mode::Logged, 1, true);
    Case::new(name(seconds, &machine.name()), move |host| {
        let guest = machine.guest(&script(Mode::Logged, seconds));
        let mut guest = with_disk(guest, host, ",worker=on")?;
        guest.idle = "adaptive";
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        verdict(&outcome)
    })
}

fn behind_virtio(seconds: u32) -> Case {
    Case::new(name(seconds, "virtio, our driver"), move |host| {
        let guest = Guest::new(Mode::Virtio, script(Mode::Virtio, seconds));
        let mut guest = with_disk(guest, host, ",worker=on")?;
        guest.driver = Driver::Module(&[]);
        guest.idle = "adaptive";
        let outcome = guest.run(host)?;
        let maps = outcome.ledger["whole"]["paravirtual"]["maps"].as_u64();
        ensure!(
            maps.context("no ledger of the IOMMU")? > 0,
            "nothing was mapped"
        );
        verdict(&outcome)
    })
}
