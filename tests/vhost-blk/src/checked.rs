//! A disk whose every answer is checked: reads return what was acknowledged, once and in order,
//! across restarts of its server.
//!
//! A turn takes what came back and asks for more. One request at a time touches a block, so each
//! read has one right answer ([`Journal`]). What happens to the server meanwhile is the caller's:
//! it may be killed, reset, stopped, or be slow.

use std::path::Path;
use std::time::Duration;

use report::clock::Clock;
use seeded::Random;

use crate::client::{Client, ClientError, Options, feature};
use crate::drive::{LOST_AFTER, REAP};
use crate::journal::{Content, Journal};
use crate::queue::{Extent, Op, SECTOR, Status};
use crate::verdict::{Verdict, VerifyError};

/// Kind of the requests of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Anything, at random.
    Load,
    /// Nothing: what is outstanding comes back.
    Drain,
    /// Every block is read once.
    Sweep,
}

/// One disk.
#[derive(Debug)]
pub struct CheckedDisk {
    pub(crate) client: Client,
    pub(crate) journal: Journal,
    /// The final reading: the next block.
    sweep: usize,
    progress: u64,
    /// Time at which its server was killed, until the first completion after that.
    killed_at: Option<u64>,
    /// Whether it was killed, and connected to again.
    is_back: bool,
    /// One block.
    buffer: Vec<u8>,
    ops: Vec<Op>,
    patience: Duration,
}

impl CheckedDisk {
    /// Connects. `client` is its number in the stamps of what it writes; at most `blocks` blocks
    /// are used.
    ///
    /// # Errors
    /// The server is not there or refuses, or the disk has not one block.
    pub fn connect(
        socket: &Path,
        options: Options,
        client: u32,
        blocks: usize,
    ) -> Result<Self, VerifyError> {
        let block = options.block;
        let failed = |source| VerifyError::Client {
            socket: socket.to_owned(),
            source,
        };
        let connection = Client::connect(socket, options).map_err(failed)?;
        let per_block = u64::from(block / SECTOR);
        let there = connection.config().capacity / per_block;
        let blocks = usize::try_from(there).unwrap_or(usize::MAX).min(blocks);
        if blocks == 0 {
            return Err(VerifyError::TooSmall(socket.to_owned()));
        }
        let mut ops = [[Op::Read; 4], [Op::Write; 4]].concat();
        if connection.features() & feature::FLUSH != 0 {
            ops.push(Op::Flush);
        }
        Ok(Self {
            client: connection,
            journal: Journal::new(client, per_block, blocks),
            sweep: 0,
            progress: 0,
            killed_at: None,
            is_back: false,
            buffer: vec![0; block as usize],
            ops,
            patience: LOST_AFTER,
        })
    }

    /// Discards and zeroes too from now on, where they are offered.
    pub fn makes_zeroes(&mut self) {
        for (bit, op) in [
            (feature::DISCARD, Op::Discard),
            (feature::WRITE_ZEROES, Op::WriteZeroes),
        ] {
            if self.client.features() & bit != 0 {
                self.ops.push(op);
            }
        }
    }

    /// Sets the time without any completion, with something outstanding, after which that counts as
    /// a lost wake-up.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Its connection.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Its server has been killed at `now`.
    pub(crate) fn killed(&mut self, now: u64) {
        (self.killed_at, self.is_back) = (Some(now), false);
    }

    /// The final reading has read every block, or asked for it.
    pub fn is_swept(&self) -> bool {
        self.sweep == self.journal.len()
    }

    /// Resets the device. What was outstanding may have happened or not, and nothing is outstanding
    /// any more.
    ///
    /// # Errors
    /// A reset is not offered, or the server broke off.
    pub fn reset(&mut self) -> Result<(), VerifyError> {
        for queue in &self.client.queues {
            for (op, extent) in queue.in_flight() {
                let block = self.journal.block(extent.sector);
                if op.changes() {
                    self.journal.set(block, Content::Unknown);
                }
                if op != Op::Flush {
                    self.journal.release(block);
                }
            }
        }
        self.client.reset_device().map_err(|e| self.failed(e))
    }

    /// Requests outstanding.
    pub fn outstanding(&self) -> u64 {
        self.client
            .queues
            .iter()
            .map(|queue| u64::from(queue.outstanding()))
            .sum()
    }

    /// Takes what came back and asks for more; connects again where the server is gone. Whether
    /// anything came.
    ///
    /// # Errors
    /// The server broke the protocol, or cannot be connected to again.
    pub fn turn(
        &mut self,
        clock: &Clock,
        phase: Phase,
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
            while phase != Phase::Drain && self.submit(queue, now, phase, random) {
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
        } else if is_silent && u128::from(now - self.progress) > self.patience.as_nanos() {
            self.progress = now;
            verdict.lost_wakeups += 1;
            verdict.say(|| {
                let path = self.client.path().display();
                format!("{path}: no answer for {:?}", self.patience)
            });
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
            if done.op.changes() {
                self.journal.set(block, Content::Unknown);
            }
        }
        if done.op != Op::Flush {
            self.journal.release(block);
        }
        client.queues[index].release(done.slot);
        Ok(true)
    }

    fn submit(&mut self, index: usize, now: u64, phase: Phase, random: &mut Random) -> bool {
        let is_sweeping = phase == Phase::Sweep;
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

    /// Stops the rings, if nothing is outstanding, and compares where they stand.
    ///
    /// # Errors
    /// The server broke off.
    pub fn close(&mut self, verdict: &mut Verdict) -> Result<(), VerifyError> {
        if self.outstanding() == 0 {
            let bases = self.client.stop().map_err(|source| self.failed(source))?;
            verdict.wrong_bases +=
                bases.iter().filter(|(theirs, ours)| theirs != ours).count() as u64;
        }
        Ok(())
    }
}
