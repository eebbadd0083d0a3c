//! What was found on a machine, before any judgement; and the parsers of the files it comes from.

use std::collections::BTreeSet;

use super::assignment::Assignment;
use crate::resident::Host;

/// The facts. The default is a machine with nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Processor flags that matter (see [`cpu_flags`]).
    pub cpu_flags: BTreeSet<String>,
    /// Processors online.
    pub cpus: usize,
    /// Release of the kernel.
    pub kernel: Release,
    /// /dev/kvm.
    pub kvm: Kvm,
    /// Text of `npt` or `ept` of the KVM module in use, if there is one.
    pub nested_paging: Option<bool>,
    /// AVIC or APICv switched on in the KVM module in use, if there is one.
    pub posted_interrupts: Option<bool>,
    /// IOMMU groups, and what assigning their devices takes.
    pub assignment: Assignment,
    /// userfaultfd.
    pub userfaultfd: Userfaultfd,
    /// What `run --resident` needs, if it was looked at.
    pub resident: Option<Host>,
    /// Huge pages and memory.
    pub memory: Memory,
    /// io_uring: the kinds of request it takes of those needed, or why it cannot be used.
    pub io_uring: Option<Result<(), String>>,
    /// /dev/net/tun: usable, or why not.
    pub tun: Option<Result<(), String>>,
    /// CAP_NET_ADMIN is held.
    pub net_admin: bool,
}

/// /dev/kvm.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Kvm {
    /// No such device.
    #[default]
    Absent,
    /// It exists and cannot be opened, for this reason.
    Refused(String),
    /// It can be opened; the capabilities asked for that it lacks.
    Usable {
        /// Names without `KVM_CAP_`.
        lacks: Vec<&'static str>,
    },
}

/// userfaultfd.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Userfaultfd {
    /// The kernel has it.
    pub present: bool,
    /// /dev/userfaultfd can be opened: kernel-mode faults without CAP_SYS_PTRACE.
    pub device: bool,
    /// The system call takes kernel-mode faults (root, CAP_SYS_PTRACE, or the sysctl).
    pub privileged: bool,
}

/// Memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    /// `MemAvailable`, MiB.
    pub available_mib: u64,
    /// Huge pages reserved (`HugePages_Total`).
    pub huge_pages: u64,
    /// Transparent huge pages for shared memory: the chosen word.
    pub shmem_thp: String,
}

/// A kernel's release, as far as it decides features.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release(pub u32, pub u32);

impl Release {
    /// `6.1.0-56-cloud-amd64` → 6.1.
    pub fn parse(text: &str) -> Self {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Self(major, minor),
            _ => Self::default(),
        }
    }
}

/// The flags of the first processor in /proc/cpuinfo.
pub fn cpu_flags(cpuinfo: &str) -> BTreeSet<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("flags"));
    let flags = line
        .and_then(|line| line.split_once(':'))
        .map_or("", |(_, flags)| flags);
    flags.split_whitespace().map(str::to_owned).collect()
}

/// Processors in /proc/cpuinfo.
pub fn cpu_count(cpuinfo: &str) -> usize {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count()
}

/// The number of a key in /proc/meminfo (kB for most).
pub fn meminfo(text: &str, key: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// A module's boolean parameter: `Y`, `N`, `1`, `0`; -1 (automatic) counts as off.
pub fn switch(text: &str) -> bool {
    matches!(text.trim(), "Y" | "y" | "1")
}

/// Whether /proc/self/status says that this capability is effective.
pub fn has_capability(status: &str, number: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .unwrap_or(0);
    bits >> number & 1 == 1
}

#[cfg(test)]
mod tests;
