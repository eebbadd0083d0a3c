//! Reads, writes, discards and zeroes whose every result is checked, while the server may be
//! killed.
//!
//! Each disk keeps a [`Journal`](crate::journal::Journal) of what was acknowledged. One request at
//! a time touches a block, so each read has one right answer; at the end all blocks are read once
//! more. A killed server is waited for and connected to again: with an inflight region the requests
//! in flight come back by themselves, and each exactly once; without one they are submitted again.
//!
//! A [`Killer`] kills the server, if there is one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use report::clock::Clock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::checked::{CheckedDisk, Phase};
use crate::client::Options;
use crate::drive::LOST_AFTER;
use crate::killer::Killer;
use crate::queue::Queue;
pub use crate::verdict::{Verdict, VerifyError};
use seeded::Random;

/// Time for which the end waits for what is outstanding.
const DRAIN: Duration = Duration::from_secs(20);
/// Longest sleep of a sleeping client, nanoseconds: after it the client looks for lost wake-ups and
/// for dead servers.
const NAP_NS: i64 = 50_000_000;

/// One verification.
#[derive(Clone, Debug)]
pub struct Verify {
    /// Sockets of the disks' servers. Disk `n` is written by client `first_client + n`.
    pub sockets: Vec<PathBuf>,
    /// Options of connections; also depth and block.
    pub options: Options,
    /// Number of the first disk's client, in its stamps.
    pub first_client: u32,
    /// Blocks of each disk used, from its start; at most those there are.
    pub blocks: usize,
    /// Time for which requests are made before the final reading.
    pub duration: Duration,
    /// Whether the client sleeps when its rings are empty, or polls.
    pub sleeps: bool,
    /// Discards and zeroes too, where offered.
    pub zeroes: bool,
    /// Journals are read from here first, if they exist, and written at the end; one file per disk.
    pub journal: Option<PathBuf>,
    /// Only read and check what the journals know; they must exist.
    pub only_check: bool,
    /// For random numbers.
    pub seed: u64,
}

/// Makes requests and checks them.
///
/// # Errors
/// A server is not there, breaks the protocol, or cannot be connected to again; damage is no error
/// but in the verdict.
pub fn verify(what: &Verify, mut killer: Option<Killer>) -> Result<Verdict, VerifyError> {
    let clock = Clock::new();
    let mut random = Random::new(what.seed);
    let mut verdict = Verdict::default();
    let mut disks: Vec<CheckedDisk> = Vec::new();
    for (number, socket) in what.sockets.iter().enumerate() {
        disks.push(open(what, number, socket)?);
    }
    let mut end = clock.now() + what.duration.as_nanos() as u64;
    if what.only_check {
        end = clock.now();
    }
    if let Some(killer) = &mut killer {
        killer.plan(clock.now(), &mut random);
    }
    let mut sweeping_until = None;
    loop {
        let now = clock.now();
        let is_sweeping = now >= end;
        let phase = if is_sweeping {
            Phase::Sweep
        } else {
            Phase::Load
        };
        let mut is_idle = true;
        let mut outstanding = 0;
        for disk in &mut disks {
            is_idle &= !disk.turn(&clock, phase, &mut random, &mut verdict)?;
            outstanding += disk.outstanding();
        }
        if is_sweeping {
            let done = disks.iter().all(CheckedDisk::is_swept);
            if done && outstanding == 0 {
                break;
            }
            // The sweep makes progress or stalls; a stall ends it.
            let until = *sweeping_until.get_or_insert(now + DRAIN.as_nanos() as u64);
            if !is_idle {
                sweeping_until = None;
            } else if now > until {
                verdict.unanswered = outstanding;
                break;
            }
        }
        if let Some(killer) = &mut killer
            && !is_sweeping
            && killer.is_due(now)
        {
            killer.kill().map_err(VerifyError::Server)?;
            verdict.kills += 1;
            let now = clock.now();
            for disk in &mut disks {
                disk.killed(now);
            }
            killer.plan(now, &mut random);
        }
        if is_idle {
            rest(&mut disks, what.sleeps, &mut verdict)?;
        }
    }
    for (number, disk) in disks.iter_mut().enumerate() {
        disk.close(&mut verdict)?;
        if let Some(path) = journal_path(what, number) {
            disk.journal.save(&path).map_err(VerifyError::Journal)?;
        }
    }
    Ok(verdict)
}

fn open(what: &Verify, number: usize, socket: &Path) -> Result<CheckedDisk, VerifyError> {
    let client = what.first_client + number as u32;
    let mut disk = CheckedDisk::connect(socket, what.options.clone(), client, what.blocks)?;
    if what.zeroes {
        disk.makes_zeroes();
    }
    if let Some(path) = journal_path(what, number)
        && (what.only_check || path.exists())
    {
        disk.journal.load(&path).map_err(VerifyError::Journal)?;
    }
    Ok(disk)
}

fn journal_path(what: &Verify, number: usize) -> Option<PathBuf> {
    let mut path = what.journal.as_ref()?.clone().into_os_string();
    path.push(format!(".{number}"));
    Some(path.into())
}

/// Nothing came back anywhere: sleeps or not, until something may have.
fn rest(disks: &mut [CheckedDisk], sleeps: bool, verdict: &mut Verdict) -> Result<(), VerifyError> {
    if !sleeps {
        std::hint::spin_loop();
        return Ok(());
    }
    for disk in disks.iter_mut() {
        let client = &mut disk.client;
        for queue in &mut client.queues {
            if !queue.ring.arm(&client.memory) {
                return Ok(());
            }
        }
    }
    let mut fds = Vec::new();
    for disk in disks.iter() {
        fds.push(PollFd::new(
            disk.client.connection().socket(),
            PollFlags::RDHUP,
        ));
        for queue in &disk.client.queues {
            fds.push(PollFd::from_borrowed_fd(queue.call_fd(), PollFlags::IN));
        }
    }
    let nap = Timespec {
        tv_sec: 0,
        tv_nsec: NAP_NS,
    };
    // Interrupted or not, everything is looked at again.
    let woken = poll(&mut fds, Some(&nap)).unwrap_or(1);
    for disk in disks.iter_mut() {
        let client = &mut disk.client;
        let path = client.path().display().to_string();
        for queue in &mut client.queues {
            if woken == 0 && queue.ring.has_used(&client.memory) && !call_comes(queue) {
                verdict.lost_wakeups += 1;
                verdict.say(|| format!("{path}: no call within 500 ms"));
            }
            queue.take_calls();
            queue.ring.disarm(&client.memory);
        }
    }
    Ok(())
}

/// Whether the call for a completion that is there already comes within 500 ms.
fn call_comes(queue: &Queue) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(queue.call_fd(), PollFlags::IN)];
    let timeout = Timespec::try_from(LOST_AFTER).unwrap_or_default();
    poll(&mut fds, Some(&timeout)).unwrap_or(1) > 0
}
