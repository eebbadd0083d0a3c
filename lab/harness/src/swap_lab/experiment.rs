//! One run: a guest is started, gets its limit, and executes the phases.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use workload::marker;

use super::memory_config::{LIMIT, MEMORY, MemoryConfig};
use super::plan::{Cache, Plan};
use super::watch::Disks;
use super::{count, pages};
use crate::system::group::{Group, Most};
use crate::system::guest::{Guest, Mode, Outcome, RunningGuest};
use crate::system::host::Host;
use crate::system::squeezed;

/// MiB that the guest uses and frees first.
const AGE: u64 = 150;
/// MiB of the disk, all of which is read.
const FILE: u64 = 100;
/// Number of times that it is read.
pub const ITERATIONS: usize = 4;
/// MiB that a process of the guest writes then.
const ALLOC: u64 = 80;
/// Script that waits until the balloon, whose size comes with a typed line, has not grown for five
/// seconds.
const GIVE: &str = "echo has $((1+3)) used && read go && w=0; b=0; until [ $w = 5 ]; do sleep 1; \
     a=$b; b=$(sed -n 's/^balloon_inflate //p' /proc/vmstat); \
                    w=$((b > a ? 0 : w + 1)); done; echo has $((1+2)) given $b";
/// Seed of the image's content.
pub const SEED: u32 = 51;
/// File with the balloon's size.
const BALLOON_FILE: &str = "balloon";

/// Bytes of the image.
pub const IMAGE: u64 = FILE << 20;
/// Number of phases: the iterations, and two of the process, which writes and then reads.
pub const PHASES: usize = ITERATIONS + 2;

/// Plan of the guest.
pub fn plan() -> Plan {
    Plan {
        command: "sequential",
        arguments: format!(
            "/dev/vda --mib {FILE} --iterations {ITERATIONS} --alloc-mib {ALLOC} --seed {SEED}"
        ),
        marks: (0..ITERATIONS as u8)
            .map(|index| marker::ITERATION + index)
            .chain([marker::ALLOC, marker::CHECK, marker::ALLOC_END])
            .collect(),
        done: format!("phase=alloc ok pages={}", pages(ALLOC)),
        killed: "sequential alloc killed",
        limit: LIMIT,
    }
}

/// Result of a run.
pub struct Run {
    way: MemoryConfig,
    /// MiB that may be resident.
    limit: u64,
    /// Counts of the disks, by phase.
    pub phases: Vec<Disks>,
    /// The guest's page cache before each phase and behind the last.
    pub caches: Vec<Cache>,
    /// The pager's counts, by phase, if there is a pager.
    pub windows: Option<Vec<Value>>,
    /// The pager's counts of the whole run.
    pub whole: Option<Value>,
    /// Largest memory use of the group while the phases ran.
    most: Most,
    /// Bytes that the VMM used for itself when the guest had started.
    own: u64,
    /// Whether the guest killed the process that wrote memory.
    pub is_killed: bool,
    /// The guest's line that reports success.
    pub done: Option<String>,
    /// The pager's CPU time, µs: of an emulated CPU.
    pub pager_us: Option<u64>,
}

impl Run {
    /// Returns the most pages resident beyond the limit.
    pub fn over_limit(&self) -> u64 {
        (self.most.shared / 4096).saturating_sub(pages(self.limit))
    }

    /// Returns a sum over iterations from the second one on: in the first no page is cached.
    pub fn later(&self, of: impl Fn(&Disks) -> u64) -> u64 {
        self.phases[1..ITERATIONS].iter().map(of).sum()
    }

    /// Returns a sum over phases of one of the pager's counts; 0 without a pager.
    pub fn counted(&self, key: &str) -> Result<u64> {
        let windows = self.windows.iter().flatten();
        windows.map(|window| count(window, key)).sum()
    }

    /// Renders a few lines on the progress.
    pub fn lines(&self) -> String {
        let mut text = format!("  {:<18}", self.way.name());
        for phase in &self.phases {
            let (out, back) = (phase.store.pages_written, phase.store.pages_read);
            let _ = write!(text, "{:>16}", format!("{out}/{back}"));
        }
        // With a pager only the guest's memory is counted; otherwise all anonymous memory but the
        // VMM's own.
        let most = match self.way.has_pager() {
            true => self.most.shared,
            false => self.most.all.saturating_sub(self.own),
        };
        let _ = writeln!(
            text,
            "   {} MiB in memory at most ({} looks), the VMM's own {} MiB{}",
            most >> 20,
            self.most.looks,
            self.own >> 20,
            if self.is_killed { ", killed" } else { "" }
        );
        text
    }
}

/// Writes the image.
pub fn prepare(host: &Host) -> Result<()> {
    let script = format!("workload write-pattern /dev/vdb --bytes {IMAGE} --seed {SEED}");
    host.script(&script).map(drop)
}

/// Executes one run.
///
/// # Errors
/// The guest did not end, or found a wrong byte.
pub fn run(host: &Host, way: MemoryConfig, plan: &Plan) -> Result<Run> {
    if !way.has_pager() {
        host.script("mkswap /dev/vda && swapon /dev/vda")?;
    }
    let group = Group::new(host)?;
    let outcome = in_group(host, way, plan, &group);
    if !way.has_pager() {
        host.script("swapoff /dev/vda")?;
    }
    outcome
}

fn in_group(host: &Host, way: MemoryConfig, plan: &Plan, group: &Group<'_>) -> Result<Run> {
    let script = plan.script();
    // Used before the balloon is inflated: afterwards the guest has less memory than this.
    let age = format!("workload age --mib {AGE}");
    let script = match way.has_balloon() {
        true => format!("{age} && {GIVE} && {script}"),
        false => format!("{age} && {script}"),
    };
    let mut guest = match way.has_pager() {
        true => squeezed::guest(host, Mode::None, &script, "path=/dev/vda,size=1G"),
        false => Guest::new(Mode::None, squeezed::begun(&script)),
    };
    guest.memory = way.memory();
    guest.idle = "sleep";
    guest.disks.push("path=/dev/vdb,direct=on".into());
    host.put(BALLOON_FILE, b"")?;
    let balloon = format!("target=0,file={}", host.path(BALLOON_FILE));
    guest.flags.extend(way.flags(&balloon));
    guest.faults.extend(way.faults());
    guest.kernel_options = way.kernel_options().into();
    guest.group = Some(group.path());
    guest.limit = Duration::from_secs(900);
    let mut guest = squeezed::start(host, &guest)?;
    let own = squeeze(host, way, plan, group)?;
    squeezed::go_on(&mut guest)?;
    if way.has_balloon() {
        guest.wait_for("has 4 used")?;
        let size = format!("{}M\n", MEMORY - plan.left());
        host.put(BALLOON_FILE, size.as_bytes())?;
        squeezed::go_on(&mut guest)?;
        let given = guest.wait_for_line("has 3 given")?;
        eprintln!("  {given} pages");
    }
    let phases = phases(host, plan, group, &mut guest);
    // If it hangs, its output at the time limit shows the state of its vCPUs.
    let outcome = guest.wait()?;
    outcome.check()?;
    let (phases, caches, most) = phases.with_context(|| outcome.tail())?;
    let is_killed = outcome.line(plan.killed).is_some();
    let done = outcome.line(&plan.done).map(|line| line.trim().to_owned());
    ensure!(
        is_killed || done.is_some(),
        "no {:?}\n{}",
        plan.done,
        outcome.tail()
    );
    let windows = way.has_pager().then(|| windows(&outcome, plan.phases()));
    let windows = windows.transpose()?;
    Ok(Run {
        way,
        limit: plan.limit,
        phases,
        caches,
        windows,
        whole: way
            .has_pager()
            .then(|| outcome.ledger["whole"]["swap"].clone()),
        most,
        own,
        is_killed,
        done,
        pager_us: pager_us(&outcome.log),
    })
}

/// Sets the limit of a guest that has started. Returns the bytes that the VMM uses for itself.
fn squeeze(host: &Host, way: MemoryConfig, plan: &Plan, group: &Group<'_>) -> Result<u64> {
    let all = host.script(&format!("cat {}/memory.current", group.path()))?;
    let all: u64 = all.trim().parse().context("memory.current is a number")?;
    let own = all.saturating_sub(present(host, way, group)?);
    match way.has_pager() {
        true => squeezed::set_limit(host, plan.limit)?,
        false => {
            let most = (own + (plan.limit << 20)).to_string();
            // `memory.high` first: a hard limit that cannot be met at once makes the kernel kill a
            // process.
            group.set("memory.high", &most)?;
            group.set("memory.max", &most)?;
            group.set("memory.high", "max")?;
        }
    }
    settle(host, way, group)?;
    Ok(own)
}

/// Returns the bytes of the guest's memory that are resident on the host.
fn present(host: &Host, way: MemoryConfig, group: &Group<'_>) -> Result<u64> {
    if way.has_pager() {
        return group.stat("shmem");
    }
    // Of the one mapping that has the size of the guest's memory.
    let script = format!(
        "for process in $(cat {}/cgroup.procs); do sed -n '/^Size: *{} kB/,/^Rss:/s/^Rss: \
         *\\([0-9]*\\) kB/\\1/p' \
         /proc/$process/smaps; done",
        group.path(),
        MEMORY << 10
    );
    let text = host.script(&script)?;
    let kib = text.lines().map(|line| line.trim().parse::<u64>());
    let kib = kib.sum::<Result<u64, _>>();
    let kib = kib.ok().filter(|kib| *kib > 0);
    let kib = kib.with_context(|| format!("no mapping of {MEMORY} MiB: {text:?}"))?;
    Ok(kib << 10)
}

/// Waits until the guest's resident memory does not shrink any more.
fn settle(host: &Host, way: MemoryConfig, group: &Group<'_>) -> Result<()> {
    /// Time between two samples.
    const LOOK: Duration = Duration::from_secs(2);
    let mut before = present(host, way, group)?;
    loop {
        std::thread::sleep(LOOK);
        let now = present(host, way, group)?;
        if now + (1 << 20) > before {
            return Ok(());
        }
        before = now;
    }
}

/// Takes the guest through the phases, and counts at each boundary while it waits.
fn phases(
    host: &Host,
    plan: &Plan,
    group: &Group<'_>,
    guest: &mut RunningGuest<'_>,
) -> Result<(Vec<Disks>, Vec<Cache>, Most)> {
    let mut before = None;
    let mut phases = Vec::new();
    let mut caches = Vec::new();
    let begun = Instant::now();
    for mark in &plan.marks {
        let line = guest.wait_for_line(&plan.step(*mark))?;
        caches.push(Cache::parse(&line).with_context(|| format!("no page cache in {line:?}"))?);
        let now = Disks::now(host)?;
        match before.replace(now) {
            None => group.look()?,
            Some(before) => {
                let moved = (now - before).store;
                eprintln!(
                    "  {} pages out, {} in, {} s",
                    moved.pages_written,
                    moved.pages_read,
                    begun.elapsed().as_secs()
                );
                phases.push(now - before);
            }
        }
        squeezed::go_on(guest)?;
    }
    Ok((phases, caches, group.most()?))
}

fn windows(outcome: &Outcome, phases: usize) -> Result<Vec<Value>> {
    let windows = outcome.windows().iter();
    let windows: Vec<Value> = windows.map(|it| it["swap"].clone()).collect();
    let many = windows.len();
    ensure!(
        many == phases,
        "{many} windows in the ledger, {phases} phases"
    );
    Ok(windows)
}

/// Parses the pager's CPU time in the last lines of `run`.
fn pager_us(log: &str) -> Option<u64> {
    let (_, rest) = log.split_once("pager's CPU ")?;
    let (ms, _) = rest.split_once(" ms")?;
    Some(ms.parse::<u64>().ok()? * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pagers_time_is_found_in_what_run_says() {
        let log = "swap: 9 of 9 pages in memory; 1 faults, 0 pauses; pager's CPU 1234 ms\n left";
        assert_eq!(pager_us(log), Some(1_234_000));
        assert_eq!(pager_us("swap: the pager did not run"), None);
    }
}
