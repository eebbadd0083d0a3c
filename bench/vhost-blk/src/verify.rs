//! Reads, writes, discards and zeroes whose every result is checked, while the server may be killed.
//!
//! Each disk keeps a [`Journal`] of what was acknowledged. One request at a time touches a block, so each
//! read has one right answer; at the end all blocks are read once more. A killed server is waited for and
//! connected to again: with an inflight region the requests in flight come back by themselves, and each
//! exactly once; without one they are submitted again.
//!
//! **Who kills.** A [`Killer`], if there is one.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use report::clock::Clock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use crate::client::{Client, ClientError, Options, feature};
use crate::drive::{LOST_AFTER, REAP};
use crate::journal::{Content, Journal};
use crate::killer::Killer;
use crate::queue::{Extent, Op, Queue, SECTOR, Status};
use seeded::Random;

/// Messages kept about damage; the rest is counted.
const MAX_MESSAGES: usize = 20;
/// How long the end waits for what is outstanding.
const DRAIN: Duration = Duration::from_secs(20);
/// How long a sleeping client sleeps at most: it looks for lost wake-ups and for dead servers then.
const NAP_NS: i64 = 50_000_000;

/// One verification.
#[derive(Clone, Debug)]
pub struct Verify {
    /// Where the disks' servers listen. Disk `n` is written by client `first_client + n`.
    pub sockets: Vec<PathBuf>,
    /// What connections want; also depth and block.
    pub options: Options,
    /// Number of the first disk's client, in its stamps.
    pub first_client: u32,
    /// Blocks of each disk used, from its start; at most those there are.
    pub blocks: usize,
    /// How long requests are made before the final reading.
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

/// What was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verdict {
    /// Requests acknowledged, by kind: read, write, flush, discard, write-zeroes.
    pub requests: [u64; 5],
    /// Blocks compared.
    pub checked: u64,
    /// Blocks that were not what was acknowledged.
    pub damaged: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Wake-ups lost.
    pub lost_wakeups: u64,
    /// Requests that never came back.
    pub unanswered: u64,
    /// Rings that stood elsewhere at the end than they should.
    pub wrong_bases: u64,
    /// Kills.
    pub kills: u32,
    /// Milliseconds from each kill to the first completion after it, on each disk.
    pub stalls_ms: Vec<f64>,
    /// The first messages about damage and errors.
    pub messages: Vec<String>,
}

impl Verdict {
    /// Whether nothing was wrong.
    pub const fn is_good(&self) -> bool {
        self.damaged == 0
            && self.errors == 0
            && self.lost_wakeups == 0
            && self.unanswered == 0
            && self.wrong_bases == 0
    }

    fn say(&mut self, message: impl FnOnce() -> String) {
        if self.messages.len() < MAX_MESSAGES {
            self.messages.push(message());
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [reads, writes, flushes, discards, zeroes] = self.requests;
        writeln!(
            f,
            "requests   {reads} reads, {writes} writes, {flushes} flushes, {discards} discards, {zeroes} write-zeroes"
        )?;
        writeln!(
            f,
            "compared   {} blocks, {} damaged",
            self.checked, self.damaged
        )?;
        if self.kills > 0 {
            let mut stalls = self.stalls_ms.clone();
            stalls.sort_by(f64::total_cmp);
            let median = stalls.get(stalls.len() / 2).copied().unwrap_or(f64::NAN);
            let longest = stalls.last().copied().unwrap_or(f64::NAN);
            writeln!(
                f,
                "kills      {}, stalls of {median:.0} ms in the median, {longest:.0} ms at most",
                self.kills
            )?;
        }
        for message in &self.messages {
            writeln!(f, "           {message}")?;
        }
        write!(
            f,
            "errors     {} failed, {} lost wake-ups, {} never answered, {} rings elsewhere at the end",
            self.errors, self.lost_wakeups, self.unanswered, self.wrong_bases
        )
    }
}

/// Why a verification could not be made.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum VerifyError {
    #[error("{socket}")]
    Client {
        socket: PathBuf,
        #[source]
        source: ClientError,
    },
    #[error("the journal")]
    Journal(#[source] io::Error),
    #[error("the server")]
    Server(#[source] io::Error),
    #[error("{0}: there is no room for a single block")]
    TooSmall(PathBuf),
}

struct Disk {
    client: Client,
    journal: Journal,
    journal_path: Option<PathBuf>,
    /// The final reading: the next block.
    sweep: usize,
    progress: u64,
    /// When its server was killed, until the first completion after that.
    killed_at: Option<u64>,
    /// It was killed, and connected to again.
    is_back: bool,
    /// One block.
    buffer: Vec<u8>,
    ops: Vec<Op>,
}

/// Makes requests and checks them.
///
/// # Errors
/// A server is not there, breaks the protocol, or cannot be connected to again; damage is no error but
/// in the verdict.
pub fn verify(what: &Verify, mut killer: Option<Killer>) -> Result<Verdict, VerifyError> {
    let clock = Clock::new();
    let mut random = Random::new(what.seed);
    let mut verdict = Verdict::default();
    let mut disks = Vec::new();
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
        let mut is_idle = true;
        let mut outstanding = 0;
        for disk in &mut disks {
            is_idle &= !disk.turn(&clock, is_sweeping, &mut random, &mut verdict)?;
            outstanding += disk.outstanding();
        }
        if is_sweeping {
            let done = disks.iter().all(|disk| disk.sweep == disk.journal.len());
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
                (disk.killed_at, disk.is_back) = (Some(now), false);
            }
            killer.plan(now, &mut random);
        }
        if is_idle {
            rest(&mut disks, what.sleeps, &mut verdict)?;
        }
    }
    for disk in &mut disks {
        disk.close(&mut verdict)?;
    }
    Ok(verdict)
}

fn open(what: &Verify, number: usize, socket: &Path) -> Result<Disk, VerifyError> {
    let client = Client::connect(socket, what.options.clone()).map_err(|source| {
        let socket = socket.to_owned();
        VerifyError::Client { socket, source }
    })?;
    let per_block = u64::from(what.options.block / SECTOR);
    let blocks = usize::try_from(client.config().capacity / per_block).unwrap_or(usize::MAX);
    let blocks = blocks.min(what.blocks);
    if blocks == 0 {
        return Err(VerifyError::TooSmall(socket.to_owned()));
    }
    let mut journal = Journal::new(what.first_client + number as u32, per_block, blocks);
    let journal_path = what.journal.as_ref().map(|path| {
        let mut path = path.clone().into_os_string();
        path.push(format!(".{number}"));
        PathBuf::from(path)
    });
    let is_read = |path: &&PathBuf| what.only_check || path.exists();
    if let Some(path) = journal_path.as_ref().filter(is_read) {
        journal.load(path).map_err(VerifyError::Journal)?;
    }
    let mut ops = vec![
        Op::Read,
        Op::Read,
        Op::Read,
        Op::Read,
        Op::Write,
        Op::Write,
        Op::Write,
        Op::Write,
    ];
    if client.features() & feature::FLUSH != 0 {
        ops.push(Op::Flush);
    }
    if what.zeroes && client.features() & feature::DISCARD != 0 {
        ops.push(Op::Discard);
    }
    if what.zeroes && client.features() & feature::WRITE_ZEROES != 0 {
        ops.push(Op::WriteZeroes);
    }
    Ok(Disk {
        client,
        journal,
        journal_path,
        sweep: 0,
        progress: 0,
        killed_at: None,
        is_back: false,
        buffer: vec![0; what.options.block as usize],
        ops,
    })
}

/// Nothing came back anywhere: sleeps or not, until something may have.
fn rest(disks: &mut [Disk], sleeps: bool, verdict: &mut Verdict) -> Result<(), VerifyError> {
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

impl Disk {
    fn outstanding(&self) -> u64 {
        self.client
            .queues
            .iter()
            .map(|queue| u64::from(queue.outstanding()))
            .sum()
    }

    /// Takes what came back and asks for more; connects again where the server is gone. Whether anything
    /// came.
    fn turn(
        &mut self,
        clock: &Clock,
        is_sweeping: bool,
        random: &mut Random,
        verdict: &mut Verdict,
    ) -> Result<bool, VerifyError> {
        let now = clock.now();
        let mut any = false;
        for queue in 0..self.client.queues.len() {
            let mut popped = 0;
            while popped < REAP && self.complete(queue, now, verdict)? {
                popped += 1;
            }
            any |= popped > 0;
            while self.submit(queue, now, is_sweeping, random) {
                any = true;
            }
            let client = &mut self.client;
            client.queues[queue].publish(&client.memory);
        }
        if any {
            return Ok(true);
        }
        let is_silent = self.outstanding() > 0 && now.saturating_sub(self.progress) > 20_000_000;
        if is_silent && self.client.is_hung_up() {
            // What it returned before it died is popped first.
            if self.has_used() {
                return Ok(true);
            }
            self.client
                .reconnect()
                .map_err(|source| self.failed(source))?;
            self.progress = clock.now();
            self.is_back = true;
        } else if is_silent && u128::from(now - self.progress) > LOST_AFTER.as_nanos() {
            self.progress = now;
            verdict.lost_wakeups += 1;
            verdict.say(|| format!("{}: no answer for 500 ms", self.client.path().display()));
            for queue in &mut self.client.queues {
                queue.kick();
            }
        }
        Ok(false)
    }

    fn has_used(&mut self) -> bool {
        let client = &mut self.client;
        let mut queues = client.queues.iter_mut();
        queues.any(|queue| queue.ring.has_used(&client.memory))
    }

    fn failed(&self, source: ClientError) -> VerifyError {
        VerifyError::Client {
            socket: self.client.path().to_owned(),
            source,
        }
    }

    fn complete(
        &mut self,
        index: usize,
        now: u64,
        verdict: &mut Verdict,
    ) -> Result<bool, VerifyError> {
        let client = &mut self.client;
        let queue = &mut client.queues[index];
        let done = match queue.complete(&client.memory, &client.layout) {
            Ok(Some(done)) => done,
            Ok(None) => return Ok(false),
            Err(source) => {
                let queue = index as u16;
                return Err(self.failed(ClientError::Ring { queue, source }));
            }
        };
        self.progress = now;
        if self.is_back
            && let Some(killed_at) = self.killed_at.take()
        {
            verdict.stalls_ms.push((now - killed_at) as f64 / 1e6);
        }
        let block = self.journal.block(done.extent.sector);
        if done.status == Status::Ok {
            let kind = match done.op {
                Op::Read => {
                    let data = client.layout.data(index as u16, done.slot);
                    client.memory.read(data, &mut self.buffer);
                    if self.journal.content(block) != Content::Unknown {
                        verdict.checked += 1;
                    }
                    if let Err(damage) = self.journal.check(block, &self.buffer) {
                        verdict.damaged += 1;
                        verdict.say(|| format!("{}: {damage}", client.path().display()));
                    }
                    0
                }
                Op::Write => {
                    self.journal.written(block);
                    1
                }
                Op::Discard => {
                    // What a discarded block reads as is the device's choice.
                    self.journal.set(block, Content::Unknown);
                    3
                }
                Op::WriteZeroes => {
                    self.journal.set(block, Content::Zero);
                    4
                }
                Op::Flush | Op::GetId => 2,
            };
            verdict.requests[kind] += 1;
        } else {
            verdict.errors += 1;
            verdict.say(|| {
                format!(
                    "{}: {:?} at {:?}: {:?}",
                    client.path().display(),
                    done.op,
                    done.extent,
                    done.status
                )
            });
            if matches!(done.op, Op::Write | Op::Discard | Op::WriteZeroes) {
                self.journal.set(block, Content::Unknown);
            }
        }
        if done.op != Op::Flush {
            self.journal.release(block);
        }
        client.queues[index].release(done.slot);
        Ok(true)
    }

    fn submit(&mut self, index: usize, now: u64, is_sweeping: bool, random: &mut Random) -> bool {
        let (op, block) = if is_sweeping {
            if self.sweep == self.journal.len() || !self.journal.take(self.sweep) {
                return false;
            }
            self.sweep += 1;
            (Op::Read, self.sweep - 1)
        } else {
            let op = self.ops[random.below(self.ops.len() as u64) as usize];
            let block = random.below(self.journal.len() as u64) as usize;
            if op != Op::Flush && !self.journal.take(block) {
                // Another request has it. With few blocks that may be all there are: no loop here.
                return false;
            }
            (op, block)
        };
        let client = &mut self.client;
        let queue = &mut client.queues[index];
        let extent = Extent {
            sector: self.journal.sector(block),
            bytes: client.layout.block,
        };
        let was_idle = queue.outstanding() == 0;
        let is_submitted = match queue.take_slot() {
            None => false,
            Some(slot) => {
                if op == Op::Write {
                    self.journal.next_stamp(block).fill(&mut self.buffer);
                    client
                        .memory
                        .write(client.layout.data(index as u16, slot), &self.buffer);
                }
                let fits = queue.submit(&client.memory, &client.layout, slot, op, extent, now);
                if !fits {
                    queue.release(slot);
                } else if was_idle {
                    self.progress = now;
                }
                fits
            }
        };
        if !is_submitted {
            if op != Op::Flush {
                self.journal.release(block);
            }
            if is_sweeping {
                self.sweep -= 1;
            }
        }
        is_submitted
    }

    fn close(&mut self, verdict: &mut Verdict) -> Result<(), VerifyError> {
        if self.outstanding() == 0 {
            let bases = self.client.stop().map_err(|source| self.failed(source))?;
            verdict.wrong_bases +=
                bases.iter().filter(|(theirs, ours)| theirs != ours).count() as u64;
        }
        match &self.journal_path {
            Some(path) => self.journal.save(path).map_err(VerifyError::Journal),
            None => Ok(()),
        }
    }
}
