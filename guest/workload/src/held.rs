//! Guest's part of a test in which the storage delays requests: a read, a write and a flush are in
//! flight and cannot complete, and the guest clears Bus Master, resets the device, or powers off.
//!
//! The host suspends and resumes the storage; both sides go in step. The guest prints each of these
//! words on a line of its own, `held N WORD` with the number of the run, and waits for a line on
//! standard input where the table says so:
//!
//! | word | meaning | then |
//! |---|---|---|
//! | `ready` | verified I/O has worked | waits: the host suspends the storage |
//! | `issued` | the requests are on their way | waits: the host sees that the storage has them |
//! | `acting` | the act follows at once | |
//! | `acted: …` | the act is over | |
//! | `ended: …` | a request has ended: not before the storage goes on | |
//! | `over: ok`, `over: REASON` | the verdict, after verified I/O again | |
//!
//! Blocks of run N are chosen by [`Blocks`], so the host can tell what must be on the disk.

use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::device::{self, Buffer};
use crate::driver::{Driver, Request, SLOTS};
use crate::function::Function;
use crate::{BLOCK, block, console, pattern};

/// Time limit of a request that nothing delays.
const LIMIT: Duration = Duration::from_secs(60);

/// Action of the guest while requests are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldAction {
    /// Nothing.
    Wait,
    /// Clear Bus Master and set it again.
    BusMaster,
    /// Reset the device.
    Reset,
    /// Power the machine off.
    PowerOff,
}

impl HeldAction {
    /// Returns its name in options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::BusMaster => "bus-master",
            Self::Reset => "reset",
            Self::PowerOff => "power-off",
        }
    }
}

/// Kind of a request that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A read of one block.
    Read,
    /// A write of one block.
    Write,
    /// A flush.
    Flush,
}

impl Kind {
    /// All three.
    pub const ALL: [Kind; 3] = [Kind::Read, Kind::Write, Kind::Flush];

    /// Returns its name in options and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        }
    }
}

/// The blocks of one run.
#[derive(Debug, Clone, Copy)]
pub struct Blocks {
    /// Number of the run, from 1: the generation of what it writes.
    pub run: u64,
}

impl Blocks {
    /// Returns the number of blocks that `runs` runs use.
    #[must_use]
    pub fn needed(runs: u64) -> u64 {
        Self { run: runs + 1 }.first()
    }

    fn first(self) -> u64 {
        self.run * 4
    }

    /// Block that is only read: has the pattern.
    #[must_use]
    pub fn read(self) -> u64 {
        self.first()
    }

    /// Block written by the held write; had the pattern.
    #[must_use]
    pub fn held(self) -> u64 {
        self.first() + 1
    }

    /// Block written and flushed before the run.
    #[must_use]
    pub fn before(self) -> u64 {
        self.first() + 2
    }

    /// Block written and flushed after the run.
    #[must_use]
    pub fn after(self) -> u64 {
        self.first() + 3
    }
}

/// Configuration of a run.
#[derive(Debug, Clone)]
pub struct HeldConfig {
    /// The disk.
    pub disk: PathBuf,
    /// Blocks of the run.
    pub blocks: Blocks,
    /// Seed of the disk's pattern and of what is written.
    pub seed: u64,
    /// Kinds of the requests that are held.
    pub kinds: Vec<Kind>,
    /// Action while they are held.
    pub act: HeldAction,
}

/// Executes a run in step with the host. Does not return from an [`HeldAction::PowerOff`] that
/// works.
///
/// # Errors
/// A description of the first error.
pub fn run(config: &HeldConfig) -> Result<(), String> {
    let verdict = match config.act {
        HeldAction::Reset => reset(config),
        _ => through_kernel(config),
    };
    let text = verdict.as_ref().err().map_or("ok", String::as_str);
    config.say(&format!("over: {text}"));
    verdict
}

impl HeldConfig {
    /// Prints a word for the host.
    fn say(&self, word: &str) {
        console::say(&format!("held {} {word}", self.blocks.run));
    }

    /// Prints a word, and waits for a line.
    fn ask(&self, word: &str) -> Result<(), String> {
        self.say(word);
        console::hear().map(drop)
    }

    fn sealed(&self, number: u64) -> Vec<u8> {
        let mut data = vec![0; BLOCK];
        block::seal(&mut data, number, self.blocks.run, self.seed);
        data
    }

    fn check_pattern(&self, data: &[u8]) -> Result<(), String> {
        pattern::check(self.seed, self.blocks.read() * BLOCK as u64, data)
    }

    /// Writes, flushes and reads through the kernel's driver, and verifies the content.
    fn verified_io(&self, written: u64) -> Result<(), String> {
        let io = || -> io::Result<Result<(), String>> {
            let file = device::open(&self.disk, true)?;
            let mut buffer = Buffer::new(BLOCK);
            buffer.bytes_mut().copy_from_slice(&self.sealed(written));
            device::write(&file, written, &buffer)?;
            file.sync_all()?;
            device::read(&file, written, &mut buffer)?;
            if let Err(damage) = block::check(buffer.bytes(), written, self.blocks.run, self.seed) {
                return Ok(Err(damage.to_string()));
            }
            device::read(&file, self.blocks.read(), &mut buffer)?;
            Ok(self.check_pattern(buffer.bytes()))
        };
        io().map_err(|error| error.to_string())?
    }

    /// Makes one request through the kernel's driver.
    fn request(&self, kind: Kind) -> Result<(), String> {
        let failed = |error: io::Error| error.to_string();
        let file = device::open(&self.disk, true).map_err(failed)?;
        let mut buffer = Buffer::new(BLOCK);
        match kind {
            Kind::Read => {
                device::read(&file, self.blocks.read(), &mut buffer).map_err(failed)?;
                self.check_pattern(buffer.bytes())
            }
            Kind::Write => {
                let number = self.blocks.held();
                buffer.bytes_mut().copy_from_slice(&self.sealed(number));
                device::write(&file, number, &buffer).map_err(failed)
            }
            Kind::Flush => file.sync_all().map_err(failed),
        }
    }
}

type RequestResult = (Kind, Result<(), String>);

/// Executes every action but a reset: the requests are those of the kernel's driver.
fn through_kernel(config: &HeldConfig) -> Result<(), String> {
    let blocks = config.blocks;
    config.verified_io(blocks.before())?;
    let function = Function::of_disk(&config.disk).map_err(|e| e.to_string())?;
    config.ask("ready")?;
    let (send, ended) = channel::<RequestResult>();
    for kind in config.kinds.iter().copied() {
        let (config, send) = (config.clone(), send.clone());
        // Not joined: a request that never ends must not delay the verdict.
        thread::spawn(move || {
            let outcome = config.request(kind);
            // The receiver is there unless another request took too long.
            let _ = send.send((kind, outcome));
        });
    }
    drop(send);
    config.ask("issued")?;
    let start = Instant::now();
    config.say("acting");
    match config.act {
        HeldAction::Wait | HeldAction::Reset => {}
        HeldAction::BusMaster => {
            for on in [false, true] {
                function.set_bus_master(on).map_err(|e| e.to_string())?;
                let ms = start.elapsed().as_millis();
                config.say(&format!("acted: bus-master={} ms={ms}", u8::from(on)));
            }
        }
        HeldAction::PowerOff => return power_off(),
    }
    // A request that never ended holds the file, so no block is read back before all have ended.
    collect(config, &ended, start)?;
    if config.kinds.contains(&Kind::Write) {
        let file = device::open(&config.disk, false).map_err(|e| e.to_string())?;
        let mut buffer = Buffer::new(BLOCK);
        device::read(&file, blocks.held(), &mut buffer).map_err(|e| e.to_string())?;
        block::check(buffer.bytes(), blocks.held(), blocks.run, config.seed)
            .map_err(|damage| damage.to_string())?;
    }
    config.verified_io(blocks.after())
}

/// Waits for every request, and prints how each ended.
fn collect(
    config: &HeldConfig,
    ended: &Receiver<RequestResult>,
    start: Instant,
) -> Result<(), String> {
    let mut missing = config.kinds.clone();
    let mut wrong = Vec::new();
    while !missing.is_empty() {
        let Ok((kind, outcome)) = ended.recv_timeout(LIMIT) else {
            wrong.extend(
                missing
                    .iter()
                    .map(|kind| format!("{}: no end", kind.name())),
            );
            break;
        };
        missing.retain(|other| *other != kind);
        let ms = start.elapsed().as_millis();
        let text = outcome.as_ref().err().map_or("ok", String::as_str);
        config.say(&format!("ended: {} {text} ms={ms}", kind.name()));
        wrong.extend(outcome.err().map(|e| format!("{}: {e}", kind.name())));
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(wrong.join("; "))
    }
}

/// Powers off at once, as a pulled plug or a panic would: file systems are not unmounted, nor disk
/// caches flushed.
pub(crate) fn power_off() -> Result<(), String> {
    let status = Command::new("poweroff").args(["-n", "-f"]).status();
    Err(format!("poweroff came back: {status:?}"))
}

/// Resets the disk with requests in flight, by a driver in user space; the kernel's driver has the
/// disk before and after.
fn reset(config: &HeldConfig) -> Result<(), String> {
    config.verified_io(config.blocks.before())?;
    let mut function = Function::of_disk(&config.disk).map_err(|e| e.to_string())?;
    function.take().map_err(|e| e.to_string())?;
    let mut driver = Driver::start(function).map_err(|e| e.to_string())?;
    let outcome = reset_held(config, &mut driver);
    driver
        .end()
        .and_then(|mut function| function.give_back(&config.disk))
        .map_err(|e| format!("the disk does not go back to the kernel's driver: {e}"))?;
    outcome?;
    config.verified_io(config.blocks.after())
}

fn reset_held(config: &HeldConfig, driver: &mut Driver) -> Result<(), String> {
    let failed = |error: io::Error| error.to_string();
    let blocks = config.blocks;
    driver
        .do_now(Request::Read(blocks.read()))
        .map_err(failed)?;
    config.check_pattern(&driver.data(0))?;
    config.ask("ready")?;
    driver.set_data(slot(Kind::Write), &config.sealed(blocks.held()));
    for kind in &config.kinds {
        let request = match kind {
            Kind::Read => Request::Read(blocks.read()),
            Kind::Write => Request::Write(blocks.held()),
            Kind::Flush => Request::Flush,
        };
        driver.submit(slot(*kind), request).map_err(failed)?;
    }
    config.ask("issued")?;
    let start = Instant::now();
    config.say("acting");
    driver.reset().map_err(failed)?;
    config.say(&format!("acted: reset ms={}", start.elapsed().as_millis()));
    // From here on the device must not write this memory: the data of the held read must not arrive
    // any more.
    let canary = vec![0xa5; BLOCK];
    driver.set_data(slot(Kind::Read), &canary);
    driver.start_again().map_err(failed)?;
    driver.set_data(0, &config.sealed(blocks.before()));
    for request in [
        Request::Write(blocks.before()),
        Request::Flush,
        Request::Read(blocks.held()),
    ] {
        driver.do_now(request).map_err(failed)?;
    }
    check_done_or_not(&driver.data(0), blocks, config.seed)
        .map_err(|damage| format!("the held write: {damage}"))?;
    driver
        .do_now(Request::Read(blocks.read()))
        .map_err(failed)?;
    config.check_pattern(&driver.data(0))?;
    if driver.data(slot(Kind::Read)) != canary {
        return Err("a read that was in flight at the reset arrived after it".into());
    }
    if driver.needs_reset().map_err(failed)? {
        return Err("the device asks for a reset".into());
    }
    Ok(())
}

/// Checks that a write that was in flight was done completely or not at all.
fn check_done_or_not(data: &[u8], blocks: Blocks, seed: u64) -> Result<(), String> {
    let number = blocks.held();
    block::check(data, number, blocks.run, seed).or_else(|damage| {
        match pattern::check(seed, number * BLOCK as u64, data) {
            Ok(()) => Ok(()),
            Err(_) => Err(damage.to_string()),
        }
    })
}

/// Returns the slot of a held request; slot 0 is for requests that are made alone.
fn slot(kind: Kind) -> usize {
    const { assert!(SLOTS > 3) };
    match kind {
        Kind::Read => 1,
        Kind::Write => 2,
        Kind::Flush => 3,
    }
}

/// Checks that the writes acknowledged in a run are on a disk whose content is `disk`. `act` is the
/// action taken while the requests were held.
///
/// # Errors
/// A description of the first difference.
pub fn check_disk(
    disk: &[u8],
    blocks: Blocks,
    seed: u64,
    act: HeldAction,
    kinds: &[Kind],
) -> Result<(), String> {
    let content = |number: u64| {
        let at = usize::try_from(number).unwrap_or(usize::MAX) * BLOCK;
        disk.get(at..at + BLOCK)
            .ok_or_else(|| format!("the disk has no block {number}"))
    };
    let has = |number: u64| {
        block::check(content(number)?, number, blocks.run, seed)
            .map_err(|damage| damage.to_string())
    };
    has(blocks.before())?;
    match act {
        HeldAction::Wait | HeldAction::BusMaster => {
            has(blocks.after())?;
            if kinds.contains(&Kind::Write) {
                has(blocks.held())?;
            }
        }
        // The held write was not acknowledged: it may be done or not.
        HeldAction::Reset | HeldAction::PowerOff => {
            if act == HeldAction::Reset {
                has(blocks.after())?;
            }
            check_done_or_not(content(blocks.held())?, blocks, seed)?;
        }
    }
    let number = blocks.read();
    pattern::check(seed, number * BLOCK as u64, content(number)?)
        .map_err(|_| format!("block {number} was never written"))
}

/// Returns the kinds that `names` lists; all kinds if it is empty.
#[must_use]
pub fn kinds(mut is_asked: impl FnMut(&str) -> bool) -> Vec<Kind> {
    let asked: Vec<Kind> = Kind::ALL
        .into_iter()
        .filter(|kind| is_asked(kind.name()))
        .collect();
    if asked.is_empty() {
        Kind::ALL.to_vec()
    } else {
        asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 21;
    const RUN: Blocks = Blocks { run: 2 };

    /// A disk with the pattern, and these blocks of [`RUN`] written.
    fn disk(written: &[u64]) -> Vec<u8> {
        let mut disk = vec![0; Blocks::needed(2) as usize * BLOCK];
        pattern::fill(SEED, 0, &mut disk);
        for number in written {
            let at = *number as usize * BLOCK;
            block::seal(&mut disk[at..at + BLOCK], *number, RUN.run, SEED);
        }
        disk
    }

    fn check(disk: &[u8], act: HeldAction) -> Result<(), String> {
        check_disk(disk, RUN, SEED, act, &Kind::ALL)
    }

    #[test]
    fn runs_share_no_block() {
        let blocks = |run| {
            let of = Blocks { run };
            [of.read(), of.held(), of.before(), of.after()]
        };
        let mut all: Vec<u64> = (1..=3).flat_map(blocks).collect();
        all.sort_unstable();
        assert_eq!(all, (4..16).collect::<Vec<_>>());
        assert_eq!(Blocks::needed(3), 16);
    }

    #[test]
    fn an_acknowledged_write_that_is_lost_is_found() {
        let whole = disk(&[RUN.held(), RUN.before(), RUN.after()]);
        assert_eq!(check(&whole, HeldAction::BusMaster), Ok(()));
        for lost in [RUN.held(), RUN.before(), RUN.after()] {
            let rest: Vec<u64> = [RUN.held(), RUN.before(), RUN.after()]
                .into_iter()
                .filter(|number| *number != lost)
                .collect();
            assert!(
                check(&disk(&rest), HeldAction::BusMaster).is_err(),
                "block {lost}"
            );
        }
    }

    #[test]
    fn a_held_write_may_be_lost_at_power_off_but_not_torn() {
        let lost = disk(&[RUN.before()]);
        assert_eq!(check(&lost, HeldAction::PowerOff), Ok(()));
        assert_eq!(
            check(&disk(&[RUN.before(), RUN.held()]), HeldAction::PowerOff),
            Ok(())
        );
        let mut torn = lost;
        torn[RUN.held() as usize * BLOCK + 100] ^= 1;
        assert!(check(&torn, HeldAction::PowerOff).is_err());
    }

    #[test]
    fn a_stray_write_is_found() {
        let mut disk = disk(&[RUN.held(), RUN.before(), RUN.after()]);
        disk[RUN.read() as usize * BLOCK] ^= 1;
        assert!(check(&disk, HeldAction::Wait).is_err());
    }

    #[test]
    fn kinds_are_all_unless_some_are_asked_for() {
        assert_eq!(kinds(|_| false), Kind::ALL);
        assert_eq!(kinds(|name| name == "flush"), [Kind::Flush]);
    }
}
