//! What moves vectors about, in every mode: the driver unbound and bound, the controller reset under load, page-table isolation.

use anyhow::{Result, ensure};

use super::machine::Machine;
use super::modes::{self, Mode};

/// A script that the guest must end with 0, and what it shows.
#[derive(Clone, Copy)]
pub struct Churn {
    /// For people.
    pub name: &'static str,
    /// More of the kernel's command line.
    pub kernel: &'static str,
    script: &'static str,
    /// Said on the console when all is well.
    proof: &'static str,
}

/// Unbound and bound eight times, 200 reads each.
const REBIND: Churn = Churn {
    name: "driver unbound and bound 8 times",
    kernel: "",
    script: "f=$(basename $(readlink -f /sys/class/nvme/nvme0/device)); ok=0; for i in 1 2 3 4 5 6 7 8; do \
             echo $f > /sys/bus/pci/drivers/nvme/unbind; echo $f > /sys/bus/pci/drivers/nvme/bind; \
             n=0; until [ -b /dev/nvme0n1 ] || [ $n = 100 ]; do sleep 0.1; n=$((n+1)); done; \
             workload check-pattern /dev/nvme0n1 --bytes 819200 && ok=$((ok+1)); done; echo rebound=$ok; [ $ok = 8 ]",
    proof: "rebound=8",
};

/// Reset twenty times under verified reads and writes.
const RESET: Churn = Churn {
    name: "controller reset 20 times under load",
    kernel: "",
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
    script: "workload check-pattern /dev/nvme0n1 --bytes 4194304 && echo isolated=1",
    proof: "isolated=1",
};
const PTI_OFF: Churn = Churn {
    name: "page-table isolation off",
    kernel: "pti=off",
    script: "workload check-pattern /dev/nvme0n1 --bytes 4194304 && echo isolated=0",
    proof: "isolated=0",
};

/// All, with their modes.
pub fn all() -> Vec<(Churn, Mode)> {
    let mut all = Vec::new();
    for mode in Mode::ALL {
        all.push((REBIND, mode));
    }
    for mode in [Mode::Eli, Mode::EliTimer] {
        all.extend([(RESET, mode), (PTI_ON, mode), (PTI_OFF, mode)]);
    }
    all
}

/// Runs it.
pub fn run(machine: &Machine, churn: &Churn, mode: Mode) -> Result<()> {
    let ran = modes::run(machine, mode, (churn.kernel, false), churn.script, 20_000)?;
    ensure!(
        ran.console.contains(churn.proof),
        "no {:?}\n{}",
        churn.proof,
        ran.tail()
    );
    Ok(())
}
