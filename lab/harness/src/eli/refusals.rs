//! Configurations that the hypervisor refuses: it reports the reason, and ends the machine.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::machine::{CPU, Guest, Machine, Run};

/// A configuration that is refused, and the reason that is reported.
pub struct Refusal {
    /// Name for reports.
    pub what: &'static str,
    cpu: &'static str,
    options: &'static str,
    /// Number of the machine's processors.
    cpus: u32,
    guest: Guest<'static>,
    said: &'static str,
}

/// All refusals.
pub const REFUSALS: [Refusal; 8] = [
    Refusal {
        what: "a processor without SVM",
        cpu: "EPYC,+x2apic,-svm",
        options: "",
        cpus: 1,
        guest: Guest::Attack("e1"),
        said: "no SVM",
    },
    Refusal {
        what: "a processor without nested paging",
        cpu: "EPYC,+x2apic,-npt",
        options: "",
        cpus: 1,
        guest: Guest::Attack("e1"),
        said: "no nested paging",
    },
    Refusal {
        what: "a processor without x2APIC",
        cpu: "EPYC,-x2apic",
        options: "",
        cpus: 1,
        guest: Guest::Attack("e1"),
        said: "no x2APIC",
    },
    Refusal {
        what: "a mode that there is not",
        cpu: CPU,
        options: "mode=fast",
        cpus: 1,
        guest: Guest::Attack("e1"),
        said: "\"mode=fast\" is not understood",
    },
    Refusal {
        what: "more processors than cores, less the one that watches",
        cpu: CPU,
        options: "cpus=2",
        cpus: 2,
        guest: Guest::Attack("e1"),
        said: "there are 2 processors in all, too few for a guest with 2",
    },
    Refusal {
        what: "a kernel that is none",
        cpu: CPU,
        options: "",
        cpus: 1,
        guest: Guest::NoKernel,
        said: "neither a bzImage",
    },
    Refusal {
        what: "a command line that the kernel does not take",
        cpu: CPU,
        options: "",
        cpus: 1,
        guest: Guest::LongLine,
        said: "command line is longer",
    },
    Refusal {
        what: "a core that polls where there is no disk",
        cpu: CPU,
        options: "mode=elvis",
        cpus: 2,
        guest: Guest::Attack("e1"),
        said: "no disk for the block function",
    },
];

/// Checks that it is refused, and that the machine ends.
pub fn check(machine: &Machine, refusal: &Refusal) -> Result<()> {
    let ran = machine.run(&Run {
        options: refusal.options.to_owned(),
        guest: refusal.guest,
        cpu: refusal.cpu,
        nvme: false,
        one_message: false,
        ram_disk: false,
        iommu: false,
        cpus: refusal.cpus,
        limit: Duration::from_secs(30),
    })?;
    ensure!(
        ran.log.contains(refusal.said),
        "no {:?}\n{}",
        refusal.said,
        ran.tail()
    );
    ensure!(ran.ended, "the machine did not end\n{}", ran.tail());
    Ok(())
}

/// Checks that without a controller, or with one whose table is not accessible, the guest runs by
/// injection and the log says why.
pub fn without_device(machine: &Machine) -> Result<()> {
    let ran = machine.run(&Run {
        options: "mode=eli".to_owned(),
        guest: Guest::Attack("e1"),
        cpu: CPU,
        nvme: false,
        one_message: false,
        ram_disk: false,
        iommu: false,
        cpus: 1,
        limit: Duration::from_secs(30),
    })?;
    ensure!(
        ran.log
            .contains("no device is assigned: there is no NVMe controller"),
        "{}",
        ran.tail()
    );
    ensure!(super::attacks::is_well(&ran, "e1"), "{}", ran.tail());
    Ok(())
}
