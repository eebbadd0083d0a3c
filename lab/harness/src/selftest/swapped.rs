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
    vec![sequential(Load {
        limit: 56,
        age: 1,
        file: 56,
        iterations: 2,
        alloc: 8,
    })]
}

/// What `make soak` runs.
pub fn soak() -> Vec<Case> {
    let modes = [Mode::None, Mode::Shared].into_iter();
    let mut cases: Vec<Case> = modes
        .flat_map(|mode| [1, 4].map(|cpus| verify(mode, cpus, 480, 64)))
        .collect();
    // As in the paper, half as large.
    cases.push(sequential(Load {
        limit: 55,
        age: 150,
        file: 100,
        iterations: 4,
        alloc: 80,
    }));
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
        check(&outcome)?;
        let swap = &outcome.ledger["whole"]["swap"];
        Ok(format!("{}; {}", line.trim(), summary(swap)))
    };
    Case::new(name, run).needing(KERNEL)
}

/// How much of what the guest does that the paper measures, in MiB: a file is read again and again with too little memory, and
/// then memory written.
#[derive(Clone, Copy)]
struct Load {
    limit: u32,
    age: u32,
    file: u32,
    iterations: u32,
    alloc: u32,
}

fn sequential(load: Load) -> Case {
    let Load {
        limit,
        age,
        file,
        iterations,
        alloc,
    } = load;
    let name = format!(
        "{file} MiB read {iterations} times and {alloc} MiB written, {limit} of 256 MiB in memory"
    );
    let run = move |host: &Host| {
        host.put_zeroes("read.img", u64::from(file) << 20)?;
        let script = format!(
            "workload write-pattern /dev/vda --bytes {} --seed {SEED} && workload age --mib {age} && \
             workload sequential /dev/vda --mib {file} --iterations {iterations} --alloc-mib {alloc} --seed {SEED} --marker",
            file << 20
        );
        let mut guest = guest(host, Mode::Shared, script, &format!("{limit}M"))?;
        let disk = host.path("read.img");
        guest.disks.push(format!("path={disk},direct=on"));
        guest.limit = Duration::from_secs(1200);
        let outcome = guest.run(host)?;
        let last = format!("phase=alloc ok pages={}", alloc * 256);
        let line = outcome.line(&last);
        line.with_context(|| format!("no {last:?}\n{}", outcome.tail()))?;
        check(&outcome)?;
        let mut text = summary(&outcome.ledger["whole"]["swap"]);
        let windows = outcome.ledger["windows"].as_array();
        for window in windows.context("the ledger has no windows")? {
            text.push_str(&format!(
                "\n    phase {}: {}",
                window["tag"], window["swap"]
            ));
        }
        Ok(text)
    };
    Case::new(name, run).needing(KERNEL)
}

/// Pages have left and come by every way, and the guest was never paused.
fn check(outcome: &Outcome) -> Result<()> {
    let swap = &outcome.ledger["whole"]["swap"];
    for key in [
        "dropped_to_disk",
        "dropped_as_zeroes",
        "swapped_out",
        "swapped_in",
        "image_pages",
        "prevented",
    ] {
        ensure!(count(swap, key, outcome)? > 0, "no page: {key}: {swap}");
    }
    ensure!(
        count(swap, "pauses", outcome)? == 0,
        "it was paused: {swap}"
    );
    Ok(())
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
