//! Cases in which a guest returns memory by its balloon (`run --balloon`).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::packages::Version;
use serde_json::Value;

use super::case::Case;
use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::host::Host;

/// Oldest packaged kernel with asynchronous write-protection in userfaultfd (6.7), by which the
/// pager tracks stores to shared memory.
const KERNEL: Version = Version::new(6, 12);
/// Pages in a MiB.
const MIB: u64 = 256;

/// Returns the cases of `make soak`.
pub fn soak() -> Vec<Case> {
    vec![
        live(Mode::None, Memory::Plain),
        live(Mode::Shared, Memory::Plain),
        live(Mode::Logged, Memory::Swapped),
        grows(),
    ]
}

/// Location of the guest's memory.
#[derive(Clone, Copy, Debug)]
enum Memory {
    /// All of it resident.
    Plain,
    /// 128 MiB of it resident, and the rest with the pager.
    Swapped,
}

/// Returns a shell loop that ends when /proc/vmstat's `key` is at least `pages`.
fn until(key: &str, pages: u64) -> String {
    format!(
        "n=0; until grep {key} /proc/vmstat | (read k v; [ $v -ge {pages} ]); do n=$((n+1)); [ $n \
         -lt 400 ] || exit 9; sleep 0.2; done"
    )
}

/// Case in which a stock guest of 256 MiB gives up 32 or 120 MiB while it boots, and takes most of
/// them back when the target falls.
fn live(mode: Mode, memory: Memory) -> Case {
    // If a page is paged out and the guest clears it before it gives it up, that is a fault.
    let (big, small) = match memory {
        Memory::Plain => (120, 20),
        Memory::Swapped => (32, 8),
    };
    let name = format!(
        "a balloon of {big} of 256 MiB, then of {small}: {}, {memory:?}",
        mode.name()
    );
    let run = move |host: &Host| {
        host.put("target", format!("{big}M").as_bytes())?;
        // Lasts longer than a second, so that the statistics are sent once more before the end.
        let script = format!(
            "{} && grep -E ^Mem /proc/meminfo && echo it is full && {} && sleep 5 && grep -E ^Mem \
             /proc/meminfo && \
             dmesg | grep -iE 'balloo[n]|DMA[R]: .DMA' | head -5; grep balloon /proc/vmstat",
            until("balloon_inflate", big * MIB),
            until("balloon_deflate", (big - small) * MIB)
        );
        let mut guest = Guest::new(mode, script);
        guest.idle = "adaptive";
        // Without this option Linux counts the balloon's pages as part of MemTotal.
        let balloon = format!("file={},deflate-on-oom=off", host.path("target"));
        guest.flags.extend(["--balloon".into(), balloon]);
        if let Memory::Swapped = memory {
            let swap = format!("path={},size=256M", host.path("swap.img"));
            guest.idle = "sleep";
            guest.limit = Duration::from_secs(600);
            let flags = ["--resident", "128M", "--swap", &swap];
            guest.flags.extend(flags.map(String::from));
        }
        let mut guest = guest.spawn(host)?;
        let full = guest.wait_for_line("it is full");
        if full.is_ok() {
            host.put("target", format!("{small}M").as_bytes())?;
        }
        let outcome = guest.wait()?;
        outcome.check()?;
        let seen = check(&outcome, small * MIB, big * MIB)?;
        let Memory::Swapped = memory else {
            return Ok(seen);
        };
        let swap = &outcome.ledger["whole"]["swap"];
        let discarded = swap["discarded"].as_u64();
        // Linux also gives up pages that were never written, which the pager does not hold.
        ensure!(discarded > Some(0), "no page was given up: {swap}");
        Ok(format!("{seen}; {swap}"))
    };
    let case = Case::new(name, run);
    match memory {
        Memory::Plain => case,
        Memory::Swapped => case.needing(KERNEL),
    }
}

/// Case with `target=auto`: a guest that has used much memory and needs little of it receives a
/// target that grows in steps while its pager is at its limit.
fn grows() -> Case {
    /// Two steps of the target, each of 5 % of 256 MiB, in pages.
    const STEPS: u64 = 2 * 256 * MIB / 20;
    let run = |host: &Host| {
        let script = format!(
            "dd if=/dev/urandom of=/big bs=1M count=110 && rm /big && {}",
            until("balloon_inflate", STEPS)
        );
        let mut guest = Guest::new(Mode::None, script);
        guest.idle = "sleep";
        guest.limit = Duration::from_secs(600);
        let swap = format!("path={},size=256M", host.path("swap.img"));
        let balloon = "target=auto,reporting=off";
        let flags = ["--resident", "100M", "--swap", &swap, "--balloon", balloon];
        guest.flags.extend(flags.map(String::from));
        let outcome = guest.run(host)?;
        let balloon = &outcome.ledger["whole"]["balloon"];
        let inflated = balloon["inflated"].as_u64();
        ensure!(inflated >= Some(STEPS), "{balloon}");
        Ok(format!("{balloon}; {}", outcome.ledger["whole"]["swap"]))
    };
    let name = "a balloon that grows by itself while 100 of 256 MiB are all in use: none";
    Case::new(name, run).needing(KERNEL)
}

/// Checks that the guest had `most` pages in the balloon, and has `last` pages there at the end.
fn check(outcome: &Outcome, last: u64, most: u64) -> Result<String> {
    let totals: Vec<u64> = outcome
        .console
        .lines()
        .filter_map(|line| line.strip_prefix("MemTotal:"))
        .filter_map(|rest| rest.split_whitespace().next()?.parse().ok())
        .collect();
    let [full, small] = totals[..] else {
        anyhow::bail!("{} figures of MemTotal\n{}", totals.len(), outcome.tail());
    };
    ensure!(
        small - full == (most - last) * 4,
        "MemTotal was {full} KiB, then {small}"
    );
    let balloon = &outcome.ledger["whole"]["balloon"];
    let count = |key: &str| {
        let count = balloon.get(key).and_then(Value::as_u64);
        count.with_context(|| format!("the ledger has no {key}: {balloon}"))
    };
    ensure!(
        count("target")? == last && count("actual")? == last,
        "{balloon}"
    );
    ensure!(
        count("inflated")? >= most && count("deflated")? >= most - last,
        "{balloon}"
    );
    ensure!(count("outside")? == 0, "{balloon}");
    ensure!(
        count("free")? > 0 && count("available")? > 0,
        "the guest says nothing of its memory: {balloon}"
    );
    Ok(format!("MemTotal {full} KiB, then {small}; {balloon}"))
}
