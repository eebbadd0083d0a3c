//! Combining, as `dma_map::invalidate::Combiner` has it: cores that meet in generations.
//!
//! Shared are two lines: the **seat**, where posts come one after the other, each with the line's
//! transfer and a read-modify-write, and the **word of the hardware**, which a submitter fetches if
//! another wrote it last. A report reaches the others three transfers after the flush has begun
//! (the word is claimed, the report written, the report read), and matters only where a flush is
//! shorter.
//!
//! Expected result: all cores that return from one batch ask again at the same moment. The first
//! core's read of the seat queues behind the others' posts, and so nearly all join the next batch.
//! That is to the advantage of combining: `bench/dma-lines`, where cores take turns, finds that of
//! four cores two join at a time. With many cores the hardware idles while they post, and a core
//! that has flushed alone finds it idle and stays alone: a few cores make a good part of all
//! operations.
//!
//! Left out: ranges and their words (a batch is one domain command, as dear as a page), joining
//! others in the middle of a wait, cores that are stopped, failures.

use crate::Constants;
use crate::events::{Ask, Cores, Step};

/// Number of cores in a generation from which one flush for all is cheaper than a flush for each.
const ENOUGH: usize = 2;
/// Waits in a row that press, as in `dma-map`.
const CONTENDED: u32 = 4;
/// Bound of the back-off: a core whose batch no other core joined opens one again after at most so
/// many waits in a row.
const CONTENDED_MAX: u32 = 256;
/// Number of batches that a core joins before it tries once more without.
const JOINS: u32 = 256;
/// A wait is short below this part of a flush.
const SHORT: f64 = 4.0;
/// Transfers from the beginning of a flush until the other cores know of it.
const REPORT_LINES: f64 = 3.0;

/// A line, and the core that wrote it last.
#[derive(Default)]
struct Word {
    free_at: f64,
    last: Option<usize>,
}

impl Word {
    /// Nanoseconds until `core` has it.
    fn comes_to(&mut self, core: usize, line: f64) -> f64 {
        match self.last.replace(core) {
            Some(last) if last != core => line,
            _ => 0.0,
        }
    }
}

#[derive(Clone, Default)]
struct JoinPolicy {
    joins_left: u32,
    contended: u32,
    calls_at: u32,
    asked_at: f64,
}

impl JoinPolicy {
    fn joined(&mut self) {
        self.joins_left = self.joins_left.checked_sub(1).unwrap_or(JOINS);
        self.contended = CONTENDED - 1;
        self.calls_at = CONTENDED;
    }

    fn joined_alone(&mut self) {
        self.joins_left = 0;
        self.contended = 0;
        self.calls_at = (2 * self.calls_at.max(CONTENDED)).min(CONTENDED_MAX);
    }
}

struct Play<'a> {
    cores: &'a mut Cores,
    c: Constants,
    own: f64,
    gather: f64,
    seat: Word,
    hardware: Word,
    generation: u64,
    /// Cores that have posted in the open generation.
    members: Vec<usize>,
    is_awaited: bool,
    /// Time at which the batch of the generation before is known to be complete; `None` where it
    /// had none.
    complete_at: Option<f64>,
    policies: Vec<JoinPolicy>,
}

/// Plays until the run is over.
pub(crate) fn play(cores: &mut Cores, c: Constants, own: f64, gather: f64) {
    let policies = vec![JoinPolicy::default(); cores.count()];
    let mut play = Play {
        cores,
        c,
        own,
        gather,
        seat: Word::default(),
        hardware: Word::default(),
        generation: 0,
        members: Vec::new(),
        is_awaited: false,
        complete_at: None,
        policies,
    };
    while let Some(Ask { at, core, step }) = play.cores.next() {
        let goes_on = match step {
            Step::Asks if play.policies[core].joins_left > 0 => play.post(at, core),
            Step::Asks => {
                play.policies[core].asked_at = at;
                play.alone(at, core)
            }
            Step::Retries => play.alone(at, core),
            Step::Stands => play.stand(at, core),
            Step::Closes(generation) if generation == play.generation => play.close(at, core),
            Step::Closes(_) => true,
        };
        if !goes_on {
            break;
        }
    }
}

impl Play<'_> {
    /// Returns the time at which a read-modify-write of the seat is done that `core` begins at
    /// `at`. They come one after the other.
    fn seat(&mut self, at: f64, core: usize) -> f64 {
        let moved = self.seat.comes_to(core, self.c.line_ns);
        let done = at.max(self.seat.free_at) + moved + self.c.lock_ns;
        self.seat.free_at = done;
        done
    }

    /// Returns the time at which the flush begins that `core` submits at `at`.
    fn submit(&mut self, at: f64, core: usize) -> f64 {
        let moved = self.hardware.comes_to(core, self.c.line_ns);
        let begin = (at + moved).max(self.hardware.free_at);
        self.hardware.free_at = begin + self.c.flush_ns;
        self.cores.flushed();
        begin
    }

    /// `core` has not met others lately. False, as from all these, when the run is over.
    fn alone(&mut self, at: f64, core: usize) -> bool {
        let policy = &mut self.policies[core];
        if policy.contended >= CONTENDED && !self.members.is_empty() {
            return self.post(at, core);
        }
        if at < self.hardware.free_at {
            if policy.contended >= policy.calls_at.max(CONTENDED) {
                return self.post(at, core);
            }
            let idle_at = self.hardware.free_at;
            self.cores.comes(core, idle_at, Step::Retries);
            return true;
        }
        let waited = at - policy.asked_at;
        policy.contended = match waited > 0.0 && waited * SHORT >= self.c.flush_ns {
            true => policy.contended + 1,
            false => 0,
        };
        let end = self.submit(at, core) + self.c.flush_ns;
        self.cores.made(core, 1, end, end + self.own)
    }

    fn post(&mut self, at: f64, core: usize) -> bool {
        let posted = self.seat(at, core);
        self.members.push(core);
        match self.members.len() {
            1 => {
                let complete_at = self.complete_at.unwrap_or(0.0);
                self.cores
                    .comes(core, posted.max(complete_at), Step::Stands);
            }
            ENOUGH if self.is_awaited => {
                let closes = Step::Closes(self.generation);
                self.cores.comes(core, posted, closes);
            }
            // The core that closes the batch finds it.
            _ => {}
        }
        true
    }

    /// The first core of the generation counts the others that have come.
    fn stand(&mut self, at: f64, core: usize) -> bool {
        if self.complete_at.is_none() && at < self.hardware.free_at {
            let idle_at = self.hardware.free_at;
            self.cores.comes(core, idle_at, Step::Stands);
            return true;
        }
        let looked = self.seat(at, core);
        self.is_awaited = self.members.len() < ENOUGH;
        let closes_at = looked + if self.is_awaited { self.gather } else { 0.0 };
        let closes = Step::Closes(self.generation);
        self.cores.comes(core, closes_at, closes);
        true
    }

    fn close(&mut self, at: f64, core: usize) -> bool {
        let closed = self.seat(at, core);
        self.generation += 1;
        self.is_awaited = false;
        let members = std::mem::take(&mut self.members);
        let begin = self.submit(closed, core);
        let end = begin + self.c.flush_ns;
        let heard = end.max(begin + REPORT_LINES * self.c.line_ns);
        self.complete_at = (members.len() >= ENOUGH).then_some(heard);
        let mut goes_on = true;
        for member in &members {
            let policy = &mut self.policies[*member];
            match members.len() >= ENOUGH {
                true => policy.joined(),
                false => policy.joined_alone(),
            }
            let seen = if *member == core { end } else { heard };
            goes_on &= self.cores.made(*member, 1, seen, seen + self.own);
        }
        goes_on
    }
}
