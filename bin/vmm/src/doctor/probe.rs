//! Collects the facts of this machine. A fact that cannot be read counts as absent.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;

use super::assignment::Assignment;
use super::facts::{Facts, Kvm, Memory, Userfaultfd};
use super::files::{self, Release};
use crate::resident::{self, Host};

/// Capabilities of /dev/kvm that `run` uses: number (`linux/kvm.h`) and name.
const KVM_CAPS: &[(u64, &str)] = &[
    (3, "USER_MEMORY"),
    (15, "COALESCED_MMIO"),
    (32, "IRQFD"),
    (36, "IOEVENTFD"),
    (81, "READONLY_MEM"),
    (121, "SPLIT_IRQCHIP"),
    (129, "X2APIC_API"),
    (136, "IMMEDIATE_EXIT"),
    (203, "BINARY_STATS_FD"),
];

const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_PTRACE: u32 = 19;

/// Returns the facts of this machine.
pub fn facts() -> Facts {
    let cpuinfo = text("/proc/cpuinfo");
    let status = text("/proc/self/status");
    let (nested_paging, posted_interrupts) = kvm_module();
    Facts {
        cpu_flags: files::cpu_flags(&cpuinfo),
        cpus: files::cpu_count(&cpuinfo),
        kernel: Release::parse(&text("/proc/sys/kernel/osrelease")),
        kvm: kvm(),
        nested_paging,
        posted_interrupts,
        assignment: Assignment::probe(Path::new("/")),
        userfaultfd: userfaultfd(&status),
        resident: Some(Host::probe()),
        memory: memory(),
        io_uring: Some(io_uring()),
        tun: Some(open("/dev/net/tun")),
        net_admin: files::has_capability(&status, CAP_NET_ADMIN),
    }
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Opens for reading and writing, and closes again.
fn open(path: &str) -> Result<(), String> {
    let opened: io::Result<File> = OpenOptions::new().read(true).write(true).open(path);
    opened.map(drop).map_err(|error| error.to_string())
}

fn kvm() -> Kvm {
    if !Path::new("/dev/kvm").exists() {
        return Kvm::Absent;
    }
    if let Err(reason) = open("/dev/kvm") {
        return Kvm::Refused(reason);
    }
    let kvm = match kvm_ioctls::Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => return Kvm::Refused(error.to_string()),
    };
    let missing =
        |(cap, name): &(u64, &'static str)| (kvm.check_extension_raw(*cap) <= 0).then_some(*name);
    Kvm::Usable {
        lacks: KVM_CAPS.iter().filter_map(missing).collect(),
    }
}

/// Returns nested paging and posted interrupts of the KVM module in use.
fn kvm_module() -> (Option<bool>, Option<bool>) {
    for (paging, posted) in [
        ("kvm_amd/parameters/npt", "kvm_amd/parameters/avic"),
        (
            "kvm_intel/parameters/ept",
            "kvm_intel/parameters/enable_apicv",
        ),
    ] {
        let read = |name: &str| fs::read_to_string(Path::new("/sys/module").join(name)).ok();
        if let Some(paging) = read(paging) {
            return (
                Some(files::switch(&paging)),
                read(posted).map(|t| files::switch(&t)),
            );
        }
    }
    (None, None)
}

fn userfaultfd(status: &str) -> Userfaultfd {
    let sysctl = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    Userfaultfd {
        // The sysctl exists exactly where the system call does (CONFIG_USERFAULTFD).
        present: sysctl.is_ok(),
        device: open("/dev/userfaultfd").is_ok(),
        privileged: files::has_capability(status, CAP_SYS_PTRACE)
            || sysctl.is_ok_and(|value| files::switch(&value)),
    }
}

fn memory() -> Memory {
    let meminfo = text("/proc/meminfo");
    Memory {
        available_mib: files::meminfo(&meminfo, "MemAvailable") / 1024,
        huge_pages: files::meminfo(&meminfo, "HugePages_Total"),
        shmem_thp: resident::chosen(&text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
            .to_owned(),
    }
}

/// Tries what the block device asks of a ring.
fn io_uring() -> Result<(), String> {
    vio::blk::try_io_uring().map_err(|refusal| {
        match text("/proc/sys/kernel/io_uring_disabled").trim() {
            "" | "0" => refusal.to_string(),
            level => format!("{refusal} (kernel.io_uring_disabled = {level})"),
        }
    })
}
