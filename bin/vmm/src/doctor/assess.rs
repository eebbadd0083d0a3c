//! Findings and a verdict from facts. Pure: it does not read the machine.

use uffd::probe::PagemapScan;

use super::assignment::GroupReport;
use super::facts::{Facts, Kvm};
use super::files::Release;
use super::finding::{Finding, State};
use crate::lacks::IO_URING_REMEDY;
use crate::resident::{Host, NO_HOST_SWAP, SwapSpace};

/// Verdict: the host on which guests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Here.
    Native,
    /// On the other host.
    Other,
    /// Neither here nor there.
    Neither,
}

/// Another host that this machine can have, for guests that do not run on this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherHost {
    /// Whether it can be had: if its state is good.
    pub finding: Finding,
    /// Name of this machine in the summary, if it is that host.
    pub is_this: Option<&'static str>,
    /// Advice where it can be had.
    pub remedy: &'static str,
    /// Advice where it cannot.
    pub no_remedy: &'static str,
}

/// Advice of a program that has no other host.
const ELSEWHERE: &str = "`exitless-lab lab -- run …` runs guests on an emulated host, which needs \
     nothing of this one \
                         (`exitless-lab doctor` says whether it can be started).";

/// The findings and what follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// In order of importance.
    pub findings: Vec<Finding>,
    /// IOMMU groups with devices, and whether these can be assigned.
    pub groups: Vec<GroupReport>,
    /// Where guests run.
    pub verdict: Verdict,
    /// The verdict and the next step, in words.
    pub summary: String,
}

/// Judges the facts, of a machine that can have this other host.
pub fn assess(facts: &Facts, other: Option<&OtherHost>) -> Report {
    let mut findings = vec![
        virtualization(facts),
        kvm(facts),
        nested_paging(facts),
        posted_interrupts(facts),
        exitless_interrupts(facts),
        processors(facts),
        idle_instructions(facts),
        userfaultfd(facts),
        resident(facts),
        host_swap(facts),
        io_uring(facts),
        tun(facts),
        huge_pages(facts),
    ];
    findings.extend(facts.assignment.findings());
    findings.extend(other.map(|other| other.finding.clone()));
    let (verdict, summary) = verdict(facts, other);
    Report {
        findings,
        groups: facts.assignment.reports(),
        verdict,
        summary,
    }
}

fn has_vmx_or_svm(facts: &Facts) -> bool {
    ["vmx", "svm"]
        .iter()
        .any(|flag| facts.cpu_flags.contains(*flag))
}

/// Returns whether /dev/kvm is not the processor's own virtualization.
fn is_software_kvm(facts: &Facts) -> bool {
    matches!(facts.kvm, Kvm::Usable { .. }) && !has_vmx_or_svm(facts)
}

fn verdict(facts: &Facts, other: Option<&OtherHost>) -> (Verdict, String) {
    let (verdict, instead) = match other {
        None => (Verdict::Neither, ELSEWHERE),
        Some(other) if other.finding.state == State::Good => (Verdict::Other, other.remedy),
        Some(other) => (Verdict::Neither, other.no_remedy),
    };
    match &facts.kvm {
        Kvm::Usable { .. } if is_software_kvm(facts) => (
            verdict,
            format!(
                "This /dev/kvm is a software KVM: it runs ring-3 payloads at full speed, but \
                 cannot \
                 boot a stock kernel. {instead}"
            ),
        ),
        Kvm::Usable { lacks } if lacks.is_empty() => {
            let place = other.and_then(|other| other.is_this);
            let place = place.unwrap_or("This host is complete");
            (
                Verdict::Native,
                format!("{place}: `exitless run` works here."),
            )
        }
        Kvm::Usable { lacks } => (
            verdict,
            format!("This host's KVM lacks {}. {instead}", lacks.join(", ")),
        ),
        Kvm::Refused(reason) => (
            verdict,
            format!("/dev/kvm is there but cannot be opened ({reason}). {instead}"),
        ),
        Kvm::Absent => (verdict, format!("This host has no KVM. {instead}")),
    }
}

fn virtualization(facts: &Facts) -> Finding {
    let found = ["vmx", "svm"]
        .into_iter()
        .find(|flag| facts.cpu_flags.contains(*flag));
    let (state, value) = match found {
        Some("vmx") => (State::Good, "vmx (Intel VT-x)".into()),
        Some(_) => (State::Good, "svm (AMD-V)".into()),
        None if facts.cpu_flags.contains("hypervisor") => (
            State::Missing,
            "neither vmx nor svm; this is a virtual machine itself".into(),
        ),
        None => (State::Missing, "neither vmx nor svm".into()),
    };
    Finding {
        key: "virtualization",
        name: "CPU virtualization",
        state,
        value,
        why: "a stock kernel boots only on virtualization by the processor",
        next: "switch it on in the firmware, or nested virtualization in the outer hypervisor; or \
               use an emulated host (exitless-lab)",
    }
}

/// Returns the advice about a module of KVM, of which none loads without virtualization by the
/// processor.
fn module_advice(facts: &Facts, next: &'static str) -> &'static str {
    match has_vmx_or_svm(facts) {
        true => next,
        false => "no module helps before the processor shows vmx or svm",
    }
}

fn kvm(facts: &Facts) -> Finding {
    let (state, value, next) = match &facts.kvm {
        Kvm::Absent => (
            State::Missing,
            "no /dev/kvm".into(),
            module_advice(facts, "modprobe kvm_intel or kvm_amd"),
        ),
        Kvm::Refused(reason) => (
            State::Missing,
            format!("/dev/kvm cannot be opened: {reason}"),
            "join its group (usually: usermod -aG kvm $USER, then log in again)",
        ),
        Kvm::Usable { .. } if is_software_kvm(facts) => (
            State::Limited,
            "software KVM: /dev/kvm without vmx or svm".into(),
            "ring-3 payloads and library benchmarks run here; guests with a kernel need an \
             emulated host (exitless-lab)",
        ),
        Kvm::Usable { lacks } if lacks.is_empty() => (
            State::Good,
            "usable, with every capability that `run` uses".into(),
            "",
        ),
        Kvm::Usable { lacks } => (
            State::Limited,
            format!("usable, without {}", lacks.join(", ")),
            "a newer kernel (6.1 has them all), or an emulated host (exitless-lab)",
        ),
    };
    Finding {
        key: "kvm",
        name: "KVM",
        state,
        value,
        why: "it runs the guest; SPLIT_IRQCHIP and X2APIC_API keep interrupt controllers in this \
              program, READONLY_MEM and COALESCED_MMIO make the `logged` register page, \
              BINARY_STATS_FD counts exits",
        next,
    }
}

fn nested_paging(facts: &Facts) -> Finding {
    let (state, value) = match facts.nested_paging {
        Some(true) => (State::Good, "on"),
        Some(false) => (State::Limited, "off in the KVM module"),
        None => (State::Missing, "no kvm_intel or kvm_amd module"),
    };
    Finding {
        key: "nested_paging",
        name: "nested paging",
        state,
        value: value.into(),
        why: "without EPT or NPT every page-table change of the guest exits, and drowns what is \
              measured",
        next: module_advice(facts, "load the module with ept=1 or npt=1"),
    }
}

fn posted_interrupts(facts: &Facts) -> Finding {
    let (state, value) = match facts.posted_interrupts {
        Some(true) => (State::Good, "on"),
        Some(false) => (State::Limited, "off, or not in this processor"),
        None => (State::Missing, "no kvm_intel or kvm_amd module"),
    };
    Finding {
        key: "posted_interrupts",
        name: "AVIC / APICv",
        state,
        value: value.into(),
        why: "completion interrupts reach a running guest without an exit; requests need none \
              either way, and reports keep the two apart",
        next: module_advice(
            facts,
            "load the module with avic=1 or enable_apicv=1, where the processor has it",
        ),
    }
}

/// Returns the finding about interrupts of an assigned device: the processor's own way, or
/// `exitless-hv`'s.
fn exitless_interrupts(facts: &Facts) -> Finding {
    let has_svm = facts.cpu_flags.contains("svm");
    let (state, value) = match facts.posted_interrupts {
        Some(true) => (State::Good, "AVIC / APICv delivers them: ELI is not needed"),
        _ if has_svm => (
            State::Limited,
            "not by the processor; ELI would save two exits each (AMD)",
        ),
        _ => (
            State::Limited,
            "not by the processor; exitless-hv runs on AMD only, and under QEMU anywhere",
        ),
    };
    Finding {
        key: "exitless_interrupts",
        name: "device interrupts",
        state,
        value: value.into(),
        why: "an interrupt of an assigned device exits twice where neither AVIC / APICv nor ELI \
             is: \
              for its delivery and for its completion",
        next: "`exitless-lab eli` counts it under QEMU; docs/eli.md has a stanza for GRUB",
    }
}

fn processors(facts: &Facts) -> Finding {
    let state = match facts.cpus {
        0..2 => State::Missing,
        2 => State::Limited,
        _ => State::Good,
    };
    Finding {
        key: "cpus",
        name: "processors",
        state,
        value: facts.cpus.to_string(),
        why: "a polling sidecore wants a core of its own beside the guest's",
        next: "use --idle adaptive; on one processor sidecore and guest take turns",
    }
}

fn idle_instructions(facts: &Facts) -> Finding {
    let found: Vec<_> = [("waitpkg", "umwait/tpause"), ("mwaitx", "mwaitx")]
        .into_iter()
        .filter(|(flag, _)| facts.cpu_flags.contains(*flag))
        .map(|(_, name)| name)
        .collect();
    let good = !found.is_empty();
    Finding {
        key: "idle_instructions",
        name: "waiting in ring 3",
        state: if good { State::Good } else { State::Limited },
        value: if good {
            found.join(", ")
        } else {
            "pause only".into()
        },
        why: "an idle sidecore waits for a store with less power and less harm to its sibling",
        next: "",
    }
}

fn userfaultfd(facts: &Facts) -> Finding {
    let uffd = &facts.userfaultfd;
    let write_protect = facts.kernel >= Release(5, 19);
    let (state, value) = if !uffd.present {
        (State::Missing, "not in this kernel".to_owned())
    } else if !write_protect {
        (
            State::Limited,
            "no write protection of shared memory (kernel below 5.19)".into(),
        )
    } else if uffd.device {
        (
            State::Good,
            "/dev/userfaultfd, write protection of shared memory".into(),
        )
    } else if uffd.privileged {
        (
            State::Good,
            "by system call with privilege, write protection of shared memory".into(),
        )
    } else {
        (
            State::Limited,
            "faults of the kernel are not delivered to this user".into(),
        )
    };
    Finding {
        key: "userfaultfd",
        name: "userfaultfd",
        state,
        value,
        why: "a sleeping sidecore is woken by a store to its shared register page; the swapper \
              serves absent pages; KVM's own accesses fault in kernel mode",
        next: "give access to /dev/userfaultfd (kernel 6.1 and later), or CAP_SYS_PTRACE, or \
               sysctl vm.unprivileged_userfaultfd=1; without it the idle policy `sleep` needs \
               --iommu-mode logged",
    }
}

fn resident(facts: &Facts) -> Finding {
    let lacks = facts.resident.as_ref().map(Host::lacks);
    let (state, value, next) = match lacks.as_deref() {
        None => (State::Missing, "not looked at".to_owned(), ""),
        Some([]) => (State::Good, paging_works(facts), ""),
        // The others may go with it.
        Some(all @ [first, ..]) => {
            let all: Vec<_> = all.iter().map(|lack| lack.what.as_str()).collect();
            (State::Missing, all.join("; "), first.remedy)
        }
    };
    Finding {
        key: "resident",
        name: "run --resident",
        state,
        value,
        why: "a guest has less memory than it believes; its pages come and go one by one, and \
             those that \
              nobody has stored to are dropped unwritten",
        next,
    }
}

fn paging_works(facts: &Facts) -> String {
    let kernel = facts.resident.as_ref().map(|host| &host.kernel);
    let otherwise = match kernel.and_then(|kernel| kernel.pagemap_scan) {
        Some(PagemapScan::Truthful) => "agrees",
        Some(PagemapScan::MissesUnmapped) => "misses what is not mapped any more",
        None => "does not answer",
    };
    format!(
        "works: PAGEMAP_SCAN lists what nobody has stored to (its list of what was, not relied \
         upon, {otherwise})"
    )
}

fn host_swap(facts: &Facts) -> Finding {
    let (state, value) = match facts.resident.as_ref().map(|host| host.swap_space) {
        None => (State::Limited, "not looked at".to_owned()),
        Some(SwapSpace::None) => (State::Good, "none".into()),
        Some(SwapSpace::Forbidden { mib }) => (
            State::Good,
            format!("{mib} MiB, not for this process (memory.swap.max is 0)"),
        ),
        Some(SwapSpace::Used { mib }) => {
            (State::Limited, format!("{mib} MiB, for guests' memory too"))
        }
    };
    Finding {
        key: "host_swap",
        name: "host's swap space",
        state,
        value,
        why: "the host may put pages there that --resident keeps in memory; nothing is lost, but a \
             page may \
              then be waited for twice",
        next: NO_HOST_SWAP,
    }
}

fn io_uring(facts: &Facts) -> Finding {
    let (state, value) = match &facts.io_uring {
        Some(Ok(())) => (State::Good, "usable".to_owned()),
        Some(Err(reason)) => (State::Limited, format!("{reason}; threads serve raw disks")),
        None => (State::Missing, "not looked at".into()),
    };
    Finding {
        key: "io_uring",
        name: "io_uring",
        state,
        value,
        why: "raw disks take less processor time and answer sooner than by threads",
        next: IO_URING_REMEDY,
    }
}

fn tun(facts: &Facts) -> Finding {
    let (state, value) = match &facts.tun {
        Some(Ok(())) if facts.net_admin => (State::Good, "usable".to_owned()),
        Some(Ok(())) => (
            State::Limited,
            "can be opened; only devices made for this user".into(),
        ),
        Some(Err(reason)) => (State::Missing, reason.clone()),
        None => (State::Missing, "not looked at".into()),
    };
    Finding {
        key: "tun",
        name: "TAP networking",
        state,
        value,
        why: "guests reach a real network",
        next: "ip tuntap add mode tap user $USER (as root), or --net with the built-in responder, \
               which needs nothing",
    }
}

fn huge_pages(facts: &Facts) -> Finding {
    let memory = &facts.memory;
    let transparent = matches!(
        memory.shmem_thp.as_str(),
        "always" | "within_size" | "advise" | "force"
    );
    let (state, value) = match (memory.huge_pages, transparent) {
        (0, false) => (
            State::Limited,
            "none reserved, none for shared memory".to_owned(),
        ),
        (0, true) => (
            State::Good,
            format!("transparent for shared memory: {}", memory.shmem_thp),
        ),
        (count, _) => (State::Good, format!("{count} reserved")),
    };
    Finding {
        key: "huge_pages",
        name: "huge pages",
        state,
        value,
        why: "guest memory takes fewer TLB entries",
        next: "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    }
}

#[cfg(test)]
mod tests;
