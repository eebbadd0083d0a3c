//! Facts about a machine, before any judgement.

use std::collections::BTreeSet;

use super::assignment::Assignment;
use super::files::Release;
use crate::resident::Host;

/// The facts. The default is a machine with nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Processor flags that matter (see [`cpu_flags`](super::files::cpu_flags)).
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
    /// Facts that `run --resident` needs, if they were collected.
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
