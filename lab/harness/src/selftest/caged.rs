//! Guests of disks whose device models are processes of their own.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::machine::{Machine, check_pattern, mixed_summary, with_disk};
use crate::system::guest::{Driver, Guest, Mode, Outcome};
use crate::system::host::Host;
use crate::system::workloads;

/// Time for which a worker is stopped.
const STOPPED: Duration = Duration::from_secs(10);

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

/// Sends the worker of this host's first disk a signal. Other workers, as a machine with KVM may
/// have, are left alone: they have other owners.
fn signal_worker(host: &Host, signal: &str) -> Result<()> {
    let disk = host.path("disk0.img");
    // The pattern does not match the shell that has it.
    let sent = host.script(&format!(
        "for process in /proc/[0-9]*; do if grep -q 'device[-]worker' $process/cmdline && \
         owner=$(sed -n 's/^PPid:[^0-9]*//p' $process/status) && \
         grep -q 'path={disk},' /proc/$owner/cmdline; \
         then kill -{signal} ${{process#/proc/}} && echo sent; fi; done 2>/dev/null"
    ))?;
    let count = sent.lines().count();
    ensure!(count == 1, "{count} workers for SIG{signal}");
    Ok(())
}

fn without_iommu(seconds: u32) -> Case {
    Case::new(name(seconds, "no IOMMU"), move |host| {
        let guest = Guest::new(Mode::None, script(Mode::None, seconds));
        let mut guest = with_disk(guest, host, ",queues=2,worker=on")?;
        guest.idle = "adaptive";
        verdict(&guest.run(host)?)
    })
}

/// The worker is stopped for [`STOPPED`] under I/O. Requests of another disk, each of which ends
/// with an unmap that is waited for, go on meanwhile; those of the caged disk wait, and end after
/// that.
fn behind_vtd(seconds: u32) -> Case {
    /// Says that the caged disk has I/O, and counts runs of I/O on the other one.
    const BESIDE: &str = "beside the caged disk:";
    let machine = Machine::new(Mode::Logged, 1, true);
    let name = name(seconds, &machine.name());
    let stopped = STOPPED.as_secs();
    let name = format!("{name}; its worker stopped for {stopped} s, beside another disk");
    Case::new(name, move |host| {
        let [caged, other] = [0, 1].map(|index| workloads::disk_node(Mode::Logged, index));
        let pattern = check_pattern(&caged);
        let seconds = u64::from(seconds) + stopped;
        let script = format!(
            "{pattern} && {{ workload mixed {caged} --seconds {seconds} --seed 7 --depth 8 >/log & \
             worker=$!; of=0; \
             while [ -d /proc/$worker ]; do \
             workload mixed {other} --seconds 1 --seed 8 --depth 4 >/other || break; \
             of=$((of + 1)); echo {BESIDE} $of; done; \
             wait $worker && cat /log; }}"
        );
        let guest = with_disk(machine.guest(&script), host, ",worker=on")?;
        let mut guest = with_disk(guest, host, "")?;
        guest.idle = "adaptive";
        guest.limit *= 2;
        let mut running = guest.spawn(host)?;
        running.wait_for(&format!("{BESIDE} 1"))?;
        signal_worker(host, "STOP")?;
        let ends = Instant::now() + STOPPED;
        // The first is the run under way.
        let mut beside = 0;
        while running.writes_within(
            ends.saturating_duration_since(Instant::now()),
            &format!("{BESIDE} {}", beside + 2),
        )? {
            beside += 1;
        }
        signal_worker(host, "CONT")?;
        let outcome = running.wait()?;
        machine.check(&outcome)?;
        // The run under way when it was stopped, and one whole.
        ensure!(
            beside >= 2,
            "{beside} runs on the other disk in {stopped} s beside a stopped worker\n{}",
            outcome.tail()
        );
        let overdue = "an unmap waits for a request that does not end";
        ensure!(!outcome.log.contains(overdue), "{}", outcome.tail());
        let summary = verdict(&outcome)?;
        Ok(format!(
            "{summary}; {beside} runs beside the stopped worker"
        ))
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
    .with_guests(None)
}
