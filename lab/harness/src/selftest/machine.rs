//! The machine and the disk of several cases, and checks of their guests' output.

use anyhow::{Context, Result, ensure};

use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::host::Host;
use crate::system::workloads;

pub(super) const MIB: usize = 1 << 20;
/// Seed of the disk's content.
pub(super) const SEED: u64 = 21;

/// Machine of a guest with an IOMMU.
#[derive(Clone, Copy)]
pub(super) struct Machine {
    mode: Mode,
    pub(super) cpus: u32,
    is_strict: bool,
}

impl Machine {
    /// Last line of a guest's description of its machine.
    const SEEN: &str = "machine seen";

    pub(super) fn new(mode: Mode, cpus: u32, is_strict: bool) -> Self {
        Self {
            mode,
            cpus,
            is_strict,
        }
    }

    /// Returns machines with 1 and 4 vCPUs, strict and lazy, in each register mode.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        Mode::VTD.into_iter().flat_map(|mode| {
            [(1, true), (1, false), (4, true), (4, false)]
                .map(|(cpus, is_strict)| Self::new(mode, cpus, is_strict))
        })
    }

    pub(super) fn name(self) -> String {
        let policy = if self.is_strict { "strict" } else { "lazy" };
        format!("{}, {} vCPU, {policy}", self.mode.name(), self.cpus)
    }

    /// Returns a guest that first describes its machine, then runs `script`.
    pub(super) fn guest(self, script: &str) -> Guest {
        // The kernel's log has its command line, and so this script: the pattern must not match
        // itself.
        let script = format!(
            "nproc && dmesg | grep -E 'DMA[R]:|iomm[u]:' && echo {} && {script}",
            Self::SEEN
        );
        let mut guest = Guest::new(self.mode, script);
        guest.cpus = self.cpus;
        guest.is_strict = self.is_strict;
        guest
    }

    /// Checks that Linux found this machine, and reported no fault while it booted.
    pub(super) fn check(self, outcome: &Outcome) -> Result<()> {
        let (seen, _) = outcome
            .console
            .split_once(Self::SEEN)
            .with_context(|| format!("it did not boot\n{}", outcome.tail()))?;
        let has = |text: &str| seen.lines().any(|line| line.contains(text));
        ensure!(
            seen.lines()
                .any(|line| line.trim() == self.cpus.to_string()),
            "the guest does not see {} CPUs\n{seen}",
            self.cpus
        );
        ensure!(
            has("DMAR: Intel(R) Virtualization Technology for Directed I/O"),
            "Linux did not turn the IOMMU on\n{seen}"
        );
        let policy = Guest::policy(self.is_strict);
        ensure!(has(policy), "Linux does not say {policy:?}\n{seen}");
        ensure!(
            !has("DMAR: [DMA") && !has("malfunction"),
            "Linux complains of DMA faults\n{seen}"
        );
        Ok(())
    }
}

/// Returns `guest` with the disk of [`check_pattern`], and these options for it.
pub(super) fn with_disk(mut guest: Guest, host: &Host, options: &str) -> Result<Guest> {
    workloads::add_disk(&mut guest, host, SEED, options)?;
    Ok(guest)
}

/// Returns the summary of the guest's mixed I/O, which must be free of errors.
pub(super) fn mixed_summary(outcome: &Outcome) -> Result<String> {
    let line = outcome
        .line("mixed ok")
        .with_context(|| format!("no summary of the mixed I/O\n{}", outcome.tail()))?;
    ensure!(line.contains("errors=0"), "{line}");
    Ok(line.trim().to_owned())
}

/// Returns a command that reads the whole disk, and fails if its content is not the initial one.
pub(super) fn check_pattern(disk: &str) -> String {
    format!("workload check-pattern {disk} --bytes {MIB} --seed {SEED}")
}
