//! Four guests that start one after another on one host, which has less memory than they use
//! together.
//!
//! Each boots, reads 48 MiB of a disk through its page cache, has a process write 64 MiB and read
//! them again, and ends: four phases. In each round all running guests execute a phase, and one
//! more starts, so that in the middle each is in another phase. The host counts between two rounds,
//! while all wait.
//!
//! The host's own swap and balloons get one control group with a limit for all; the host's kernel
//! divides it, and each balloon follows it by its manager (`target=auto`). Pagers do not share
//! memory: each gets an equal part for the running guests, anew before each round.
//!
//! Left out: guests that have used all of their memory before, since below a limit an emulated
//! pager takes minutes for that; a manager that is too slow. It works by the second, and in an
//! emulated host phases take tens of them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use workload::marker;

use crate::swap_lab::STORE;
use crate::swap_lab::experiment;
use crate::swap_lab::memory_config::{MEMORY, MemoryConfig};
use crate::swap_lab::plan::Plan;
use crate::swap_lab::watch::Disks;
use crate::system::group::{Group, Most};
use crate::system::guest::{Guest, Mode, RunningGuest};
use crate::system::host::Host;
use crate::system::squeezed;

/// Number of guests.
pub const GUESTS: usize = 4;
/// Rounds: the last guest's first phase is in the fourth of them.
pub const ROUNDS: usize = GUESTS + MARKS.len() - 1;
/// MiB for all guests together; each has more configured.
pub const TOTAL: u64 = 320;
/// MiB that a VMM takes for itself; the group has them beyond [`TOTAL`] for each guest.
const OWN: u64 = 10;
/// A guest's disks for swap areas and stores, by number; the image is `vdb`.
const STORES: [&str; GUESTS] = ["vda", "vdc", "vdd", "vde"];
/// Markers at which a guest waits: the ends of its phases.
const MARKS: [u8; 4] = [
    marker::ITERATION,
    marker::ALLOC,
    marker::CHECK,
    marker::ALLOC_END,
];

/// Returns the sizes of the host's disks, bytes.
pub fn disks() -> [u64; GUESTS + 1] {
    [STORE, experiment::IMAGE, STORE, STORE, STORE]
}

/// Result of a run of all four guests.
pub struct Phased {
    /// Counts of the disks, by round.
    pub rounds: Vec<Disks>,
    /// Largest memory use of the group.
    pub most: Most,
    /// Number of guests that had a process killed.
    pub killed: usize,
    /// Pages that their balloons received, all together.
    pub ballooned: u64,
}

/// Executes one run.
///
/// # Errors
/// A guest did not end, or found a wrong byte.
pub fn run(host: &Host, way: MemoryConfig) -> Result<Phased> {
    let swap = |act: &str| {
        let each = STORES.map(|store| act.replace("DISK", &format!("/dev/{store}")));
        host.script(&each.join(" && "))
    };
    if !way.has_pager() {
        swap("mkswap DISK && swapon DISK")?;
    }
    let group = Group::new(host)?;
    let outcome = in_group(host, way, &group);
    if !way.has_pager() {
        swap("swapoff DISK")?;
    }
    outcome
}

fn in_group(host: &Host, way: MemoryConfig, group: &Group<'_>) -> Result<Phased> {
    if !way.has_pager() {
        let bytes = (TOTAL + GUESTS as u64 * OWN) << 20;
        group.set("memory.max", &bytes.to_string())?;
    }
    group.look()?;
    let mut phased = Phased {
        rounds: Vec::new(),
        most: Most::default(),
        killed: 0,
        ballooned: 0,
    };
    let mut guests: Vec<Staged<'_>> = Vec::new();
    let mut before = Disks::with_stores(host, &STORES)?;
    for round in 0..ROUNDS {
        let started = guests.len();
        if started < GUESTS {
            let there = guests.iter().filter(|guest| guest.running.is_some());
            let numbers: Vec<usize> = there.map(|it| it.number).chain([started]).collect();
            share(host, way, &numbers)?;
            guests.push(Staged::start(host, way, group, started)?);
        } else {
            let there = guests.iter().filter(|guest| guest.running.is_some());
            let numbers: Vec<usize> = there.map(|it| it.number).collect();
            share(host, way, &numbers)?;
        }
        for guest in guests.iter_mut().take(started) {
            guest.go_on()?;
        }
        for guest in &mut guests {
            guest.arrive(&mut phased)?;
        }
        let now = Disks::with_stores(host, &STORES)?;
        let Disks { store, image } = now - before;
        eprintln!(
            "  round {}: {} pages out, {} in, {} of the image",
            round + 1,
            store.pages_written,
            store.pages_read,
            image.pages()
        );
        phased.rounds.push(now - before);
        before = now;
    }
    phased.most = group.most()?;
    Ok(phased)
}

/// Divides the memory between guests of these numbers, unless the host's kernel does.
fn share(host: &Host, way: MemoryConfig, numbers: &[usize]) -> Result<()> {
    if !way.has_pager() {
        return Ok(());
    }
    // Less than the whole memory, or the pager would ignore its watermark.
    let mib = (TOTAL / numbers.len().max(1) as u64).min(MEMORY - 6);
    numbers
        .iter()
        .try_for_each(|number| squeezed::set_limit_of(host, &name(*number), mib))
}

/// Returns the suffix of a guest's files.
fn name(number: usize) -> String {
    format!("-{}", number + 1)
}

/// Plan of a guest.
fn plan() -> Plan {
    let seed = experiment::SEED;
    Plan {
        command: "sequential",
        arguments: format!("/dev/vda --mib 48 --iterations 1 --alloc-mib 64 --seed {seed}"),
        marks: MARKS.to_vec(),
        done: "sequential phase=alloc ok".into(),
        killed: "sequential alloc killed",
        limit: TOTAL / GUESTS as u64,
    }
}

/// A guest that executes its phases.
struct Staged<'a> {
    number: usize,
    /// `None` once it has ended.
    running: Option<RunningGuest<'a>>,
    /// Number of phases that have begun.
    phase: usize,
}

impl<'a> Staged<'a> {
    /// Starts guest `number`, counted from 0.
    fn start(host: &'a Host, way: MemoryConfig, group: &Group<'_>, number: usize) -> Result<Self> {
        let mut guest = Guest::new(Mode::None, plan().script());
        guest.memory = way.memory();
        guest.idle = "sleep";
        guest.name = name(number);
        if way.has_pager() {
            let store = format!("path=/dev/{},size=256M", STORES[number]);
            let flags = squeezed::flags(host, &guest.name, &store);
            guest.flags.extend(flags);
        }
        guest.flags.extend(way.flags("target=auto"));
        guest.faults.extend(way.faults());
        guest
            .disks
            .push("path=/dev/vdb,readonly=on,direct=on".into());
        guest.kernel_options = way.kernel_options().into();
        guest.group = Some(group.path());
        guest.limit = Duration::from_secs(1800);
        Ok(Self {
            number,
            running: Some(guest.spawn(host)?),
            phase: 0,
        })
    }

    /// Begins the next phase.
    fn go_on(&mut self) -> Result<()> {
        self.running.as_mut().map_or(Ok(()), squeezed::go_on)
    }

    /// Waits for the end of the phase; after the last, for the end of the guest.
    fn arrive(&mut self, phased: &mut Phased) -> Result<()> {
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        let plan = plan();
        if let Err(error) = running.wait_for_line(&plan.step(MARKS[self.phase])) {
            let (number, phase) = (self.number + 1, self.phase + 1);
            // The reason is in its last output.
            let ended = self.running.take().map(RunningGuest::wait).transpose()?;
            let tail = ended.map(|outcome| outcome.tail()).unwrap_or_default();
            return Err(error.context(format!("guest {number} in phase {phase}\n{tail}\n")));
        }
        self.phase += 1;
        if self.phase < MARKS.len() {
            return Ok(());
        }
        self.go_on()?;
        let ended = self.running.take().map(RunningGuest::wait).transpose()?;
        let outcome = ended.context("it ran")?;
        outcome.check()?;
        let is_killed = outcome.line(plan.killed).is_some();
        ensure!(
            is_killed || outcome.line(&plan.done).is_some(),
            "no {:?}\n{}",
            plan.done,
            outcome.tail()
        );
        phased.killed += usize::from(is_killed);
        let balloon = &outcome.ledger["whole"]["balloon"];
        phased.ballooned += balloon["inflated"].as_u64().unwrap_or(0);
        Ok(())
    }
}
