//! Cases in which a guest has less memory than it believes it has (`run --resident`).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::packages::Version;
use serde_json::Value;

use super::cases::Case;
use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::host::Host;

/// A kernel that traces stores to shared memory (6.7), of those that there are packages of.
const KERNEL: Version = Version::new(6, 12);
const SEED: u64 = 51;

/// What `make test` runs.
pub fn quick() -> Vec<Case> {
    vec![verify(Mode::Shared, 2, 5, 96)]
}

/// What `make soak` runs.
pub fn soak() -> Vec<Case> {
    let modes = [Mode::None, Mode::Shared].into_iter();
    let mut cases: Vec<Case> = modes
        .flat_map(|mode| [1, 4].map(|cpus| verify(mode, cpus, 480, 64)))
        .collect();
    cases.push(sequential());
    cases
}

/// A guest of 256 MiB of which `limit` may be in memory.
fn guest(host: &Host, mode: Mode, script: String, limit: &str) -> Result<Guest> {
    let mut guest = Guest::new(mode, script);
    guest.idle = "sleep";
    let swap = format!("path={},size=256M", host.path("swap.img"));
    // An emulated vCPU takes its time to say where it stands.
    let flags = [
        "--resident",
        limit,
        "--swap",
        &swap,
        "--preventer-limit",
        "100000",
    ];
    guest.flags.extend(flags.map(String::from));
    Ok(guest)
}

/// Memory and a disk of a guest, filled, fragmented and cleared, each page checked.
fn verify(mode: Mode, cpus: u32, seconds: u32, limit: u32) -> Case {
    let name = format!(
        "{seconds} s of verified pages, {limit} of 256 MiB in memory: {}, {cpus} vCPU",
        mode.name()
    );
    let run = move |host: &Host| {
        host.put_zeroes("verified.img", 64 << 20)?;
        let script = format!(
            "workload verify /dev/vda --seconds {seconds} --mib 100 --threads {cpus} --seed {SEED}"
        );
        let mut guest = guest(host, mode, script, &format!("{limit}M"))?;
        guest.cpus = cpus;
        let disk = host.path("verified.img");
        guest.disks.push(format!("path={disk},direct=on,queues=2"));
        guest.limit = Duration::from_secs(420 + 4 * u64::from(seconds));
        let outcome = guest.run(host)?;
        let line = outcome.line("verify ok");
        let line = line.with_context(|| format!("it did not verify\n{}", outcome.tail()))?;
        let swap = &outcome.ledger["whole"]["swap"];
        for key in [
            "dropped_to_disk",
            "dropped_as_zeroes",
            "swapped_out",
            "image_pages",
            "prevented",
        ] {
            ensure!(count(swap, key, &outcome)? > 0, "no page: {key}: {swap}");
        }
        ensure!(
            count(swap, "pauses", &outcome)? == 0,
            "it was paused: {swap}"
        );
        Ok(format!("{}; {}", line.trim(), summary(swap)))
    };
    Case::new(name, run).needing(KERNEL)
}

/// The guest that the paper measures, scaled: a file of 100 MiB read four times with 55 MiB of memory, and then 80 MiB written.
fn sequential() -> Case {
    let name = "100 MiB read four times and 80 MiB written, 55 of 256 MiB in memory";
    let run = |host: &Host| {
        host.put_zeroes("read.img", 104 << 20)?;
        let script = format!(
            "workload write-pattern /dev/vda --bytes {} --seed {SEED} && workload age --mib 150 && \
             workload sequential /dev/vda --mib 100 --iterations 4 --alloc-mib 80 --seed {SEED} --marker",
            100 << 20
        );
        let mut guest = guest(host, Mode::None, script, "55M")?;
        let disk = host.path("read.img");
        guest.disks.push(format!("path={disk},direct=on"));
        guest.limit = Duration::from_secs(900);
        let outcome = guest.run(host)?;
        let mut text = String::new();
        let windows = outcome.ledger["windows"].as_array();
        for window in windows.context("the ledger has no windows")? {
            text.push_str(&format!("\n  {}: {}", window["tag"], window["swap"]));
        }
        Ok(text)
    };
    Case::new(name, run).needing(KERNEL)
}

fn count(swap: &Value, key: &str, outcome: &Outcome) -> Result<u64> {
    let count = swap.get(key).and_then(Value::as_u64);
    count.with_context(|| format!("the ledger has no {key}\n{}", outcome.tail()))
}

/// What has moved, in a few words.
fn summary(swap: &Value) -> String {
    let keys = [
        "faults",
        "dropped_to_disk",
        "swapped_out",
        "swapped_in",
        "image_pages",
        "prevented",
        "undecided",
    ];
    let words = keys.map(|key| format!("{key}={}", swap[key]));
    words.join(" ")
}
