//! Cases in which a guest has less memory than it believes it has (`run --resident`) while it writes and verifies.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::packages::Version;
use serde_json::Value;

use super::cases::{self, Case};
use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::host::Host;
use crate::system::workloads::{self, DISK_BYTES};

const SEED: u64 = 51;
/// A kernel that traces stores to shared memory (6.7), of those that there are packages of.
const KERNEL: Version = Version::new(6, 12);
/// What they show.
const WHAT: &str = "verified I/O with a quarter of the memory";

/// What `make test` runs.
pub fn quick() -> Vec<Case> {
    vec![case(Mode::Shared, 1, 5)]
}

fn case(mode: Mode, cpus: u32, seconds: u32) -> Case {
    let name = format!("{seconds} s of {WHAT}: {}, {cpus} vCPU", mode.name());
    Case::new(name, move |host| run(host, mode, cpus, seconds)).needing(KERNEL)
}

fn run(host: &Host, mode: Mode, cpus: u32, seconds: u32) -> Result<String> {
    let script = format!(
        "workload check-pattern /dev/vda --bytes {DISK_BYTES} --seed {SEED} && \
         workload mixed /dev/vda --seconds {seconds} --seed 9 --depth 8"
    );
    let mut guest = Guest::new(mode, script);
    workloads::add_disk(&mut guest, host, SEED, ",queues=2")?;
    guest.cpus = cpus;
    guest.idle = "sleep";
    let swap = format!("path={},size=256M", host.path("swap.img"));
    let flags = ["--resident", "64M", "--swap", &swap];
    guest.flags.extend(flags.map(String::from));
    guest.limit = Duration::from_secs(240 + 4 * u64::from(seconds));
    let outcome = guest.run(host)?;
    let mixed = cases::mixed_summary(&outcome)?;
    Ok(format!("{}; {mixed}", counts(&outcome)?))
}

/// What the ledger says of its pages, if it is as it should be.
fn counts(outcome: &Outcome) -> Result<String> {
    let swap = &outcome.ledger["whole"]["swap"];
    let count = |key: &str| {
        let count = swap.get(key).and_then(Value::as_u64);
        count.with_context(|| format!("the ledger has no {key}\n{}", outcome.tail()))
    };
    let out = count("dropped_to_disk")? + count("dropped_as_zeroes")? + count("swapped_out")?;
    ensure!(out > 1000, "only {out} pages left memory: {swap}");
    ensure!(count("pauses")? == 0, "the guest was paused: {swap}");
    let said = outcome
        .log
        .lines()
        .find(|l| l.contains("swap: "))
        .unwrap_or("");
    Ok(format!("{swap} {said}"))
}
