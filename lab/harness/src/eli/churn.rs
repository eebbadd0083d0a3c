//! Operations that change vectors, in every mode: the driver is unbound and bound, the controller
//! is reset under load, page-table isolation is on, and the interrupt moves from one processor to
//! the other, under load.

use anyhow::{Result, ensure};

use super::machine::Machine;
use super::modes::{self, Boot, Mode, WARMUP};

/// A script that must end with status 0 in the guest, and its proof.
#[derive(Clone, Copy)]
pub struct Churn {
    /// Name for reports.
    pub name: &'static str,
    /// Additional options of the kernel's command line.
    pub kernel: &'static str,
    /// Number of the guest's processors.
    pub cpus: u32,
    script: &'static str,
    /// Text on the console if all is well.
    proof: &'static str,
}

/// The driver is unbound and bound eight times, with 200 reads each.
const REBIND: Churn = Churn {
    name: "driver unbound and bound 8 times",
    kernel: "",
    cpus: 1,
    script: "f=$(basename $(readlink -f /sys/class/nvme/nvme0/device)); ok=0; for i in 1 2 3 4 5 6 \
         7 8; do \
             echo $f > /sys/bus/pci/drivers/nvme/unbind; echo $f > /sys/bus/pci/drivers/nvme/bind; \
             n=0; until [ -b /dev/nvme0n1 ] || [ $n = 100 ]; do sleep 0.1; n=$((n+1)); done; \
             workload check-pattern /dev/nvme0n1 --bytes 819200 && ok=$((ok+1)); done; echo \
             rebound=$ok; [ $ok = 8 ]",
    proof: "rebound=8",
};

/// The controller is reset twenty times under verified reads and writes.
const RESET: Churn = Churn {
    name: "controller reset 20 times under load",
    kernel: "",
    cpus: 1,
    script: "workload mixed /dev/nvme0n1 --seconds 20 --depth 4 > /tmp/mixed & sleep 1; \
             n=0; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do \
             echo 1 > /sys/class/nvme/nvme0/reset_controller && n=$((n+1)); sleep 0.3; done; \
             wait $! && cat /tmp/mixed && echo resets=$n; [ $n = 20 ]",
    proof: "resets=20",
};

/// Page-table isolation: the table is mapped where user mode sees it.
const PTI_ON: Churn = Churn {
    name: "page-table isolation on",
    kernel: "pti=on",
    cpus: 1,
    script: "workload check-pattern /dev/nvme0n1 --bytes 4194304 && echo isolated=1",
    proof: "isolated=1",
};
const PTI_OFF: Churn = Churn {
    name: "page-table isolation off",
    kernel: "pti=off",
    cpus: 1,
    script: "workload check-pattern /dev/nvme0n1 --bytes 4194304 && echo isolated=0",
    proof: "isolated=0",
};

/// The second processor is taken off line and started again, with reads on either meanwhile.
const REPLUG: Churn = Churn {
    name: "second processor off line and on 3 times",
    kernel: "",
    cpus: 2,
    script: "f=/sys/devices/system/cpu/cpu1/online; ok=0; for i in 1 2 3; do \
             echo 0 > $f; [ $(nproc) = 1 ] && workload check-pattern /dev/nvme0n1 --bytes 819200 \
             && \
             echo 1 > $f && [ $(nproc) = 2 ] && taskset 2 workload check-pattern /dev/nvme0n1 \
             --bytes 819200 && ok=$((ok+1)); done; \
             echo replugged=$ok; [ $ok = 3 ]",
    proof: "replugged=3",
};

/// Returns all operations, with their modes.
pub fn all() -> Vec<(Churn, Mode)> {
    let mut all = Vec::new();
    for mode in Mode::ALL {
        all.push((REBIND, mode));
    }
    for mode in [Mode::Eli, Mode::EliTimer] {
        all.extend([(RESET, mode), (PTI_ON, mode), (PTI_OFF, mode)]);
        all.push((REPLUG, mode));
    }
    all
}

/// Runs one.
pub fn run(machine: &Machine, churn: &Churn, mode: Mode) -> Result<()> {
    let boot = Boot {
        kernel: churn.kernel,
        iommu: false,
        cpus: churn.cpus,
        one_message: false,
    };
    let ran = modes::run(machine, mode, &boot, churn.script, 20_000)?;
    ensure!(
        ran.console.contains(churn.proof),
        "no {:?}\n{}",
        churn.proof,
        ran.tail()
    );
    Ok(())
}

/// Least number of times that the device's interrupt is moved from one processor to the other.
pub const MOVES: u64 = 20;

/// Reads during the moves.
pub const MOVED_READS: u64 = 6000;

/// Result of the moves.
pub struct Moved {
    /// Number of moves while it was used.
    pub moves: u64,
    /// Interrupts lost, or taken twice.
    pub lost_or_double: u64,
    /// Interrupts by processor.
    pub by_cpu: Vec<u64>,
}

/// Moves the device's one interrupt under verified reads, as an administrator would
/// (`/proc/irq/N/smp_affinity_list`): no read is lost, and each takes one interrupt, on one
/// processor or the other.
pub fn moved(machine: &Machine, mode: Mode, iommu: bool) -> Result<Moved> {
    const READS: u64 = MOVED_READS;
    // Linux permits the move of a message that serves all queues; the message of a single queue
    // stays with its processor.
    let script = format!(
        "n=$(grep nvme0q /proc/interrupts | cut -d: -f1 | tr -d ' '); grep nvme0q \
         /proc/interrupts; \
         (workload reads /dev/nvme0n1 --count {READS} --warmup {WARMUP} --in-place --pause-us 300; \
         echo $? > /tmp/read) & \
         i=0; m=0; sleep 0.2; while [ ! -e /tmp/read ]; do i=$((i+1)); c=$((i%2)); \
         echo $c > /proc/irq/$n/smp_affinity_list; sleep 0.1; \
         [ $(cat /proc/irq/$n/effective_affinity_list) = $c ] && [ ! -e /tmp/read ] && m=$((m+1)); \
         done; \
         wait; grep nvme0q /proc/interrupts; echo moved=$m; [ $(cat /tmp/read) = 0 ]"
    );
    let boot = Boot {
        kernel: "",
        iommu,
        cpus: 2,
        one_message: true,
    };
    let ran = modes::run(machine, mode, &boot, &script, 20_000)?;
    let lines = ran.console.lines();
    let mut said = lines.filter_map(|line| line.split("moved=").nth(1)?.trim().parse().ok());
    let moves: u64 = said.next_back().unwrap_or(0);
    ensure!(
        moves >= MOVES,
        "moved {moves} times while it reads\n{}",
        ran.tail()
    );
    modes::verify(&ran, READS, 1)?;
    let by_cpu = modes::interrupts(&ran, 2)?;
    ensure!(
        by_cpu.iter().all(|count| *count > READS / 20),
        "interrupts by processor: {by_cpu:?}\n{}",
        ran.tail()
    );
    let foreign = ran.report("end")?.count("core1_foreign");
    ensure!(
        foreign == 0,
        "{foreign} interrupts at the core that watches"
    );
    let taken: u64 = by_cpu.iter().sum();
    Ok(Moved {
        moves,
        lost_or_double: taken.abs_diff(READS + WARMUP),
        by_cpu,
    })
}
