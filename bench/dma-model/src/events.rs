//! The events: which core asks when, and when it is served.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use crate::{Constants, HANDOVER_LINES, Outcome};

/// Step of a core when its time comes. Only combining uses more than the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// Its own work is done.
    Asks,
    /// It re-checks whether the hardware is idle.
    Retries,
    /// The first of the open generation finds the batch before complete.
    Stands,
    /// It closes this generation, unless another core has closed it.
    Closes(u64),
}

/// A core's step at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ask {
    pub(crate) at: f64,
    pub(crate) core: usize,
    pub(crate) step: Step,
}

impl Eq for Ask {}

impl Ord for Ask {
    fn cmp(&self, other: &Self) -> Ordering {
        // Two at the same time: the lower number first, so that a run repeats.
        self.at
            .total_cmp(&other.at)
            .then(self.core.cmp(&other.core))
            .then(self.step.cmp(&other.step))
    }
}

impl PartialOrd for Ask {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Cores that repeat an operation until they have made `ops` of them each, on average.
pub(crate) struct Cores {
    asks: BinaryHeap<Reverse<Ask>>,
    cores: usize,
    ops: u64,
    total: u64,
    flushes: u64,
    end: f64,
}

impl Cores {
    pub(crate) fn new(cores: usize, ops: u64) -> Self {
        Self {
            // All begin a little apart, as threads do behind a barrier.
            asks: (0..cores)
                .map(|core| {
                    Reverse(Ask {
                        at: core as f64,
                        core,
                        step: Step::Asks,
                    })
                })
                .collect(),
            cores,
            ops: ops * cores as u64,
            total: 0,
            flushes: 0,
            end: 0.0,
        }
    }

    pub(crate) fn next(&mut self) -> Option<Ask> {
        let Reverse(ask) = self.asks.pop()?;
        assert!(ask.at.is_finite() && ask.at >= 0.0, "time runs forward");
        Some(ask)
    }

    /// Number of cores.
    pub(crate) fn count(&self) -> usize {
        self.cores
    }

    /// `core` comes again at `at`.
    pub(crate) fn comes(&mut self, core: usize, at: f64, step: Step) {
        self.asks.push(Reverse(Ask { at, core, step }));
    }

    /// The hardware was given a batch.
    pub(crate) fn flushed(&mut self) {
        self.flushes += 1;
    }

    /// `core` made `count` operations, the last at `at`, and asks again at `again`. False when the
    /// run is over.
    pub(crate) fn made(&mut self, core: usize, count: u64, at: f64, again: f64) -> bool {
        self.total += count;
        self.end = self.end.max(at);
        self.comes(core, again, Step::Asks);
        self.total < self.ops
    }

    /// `parts` of what was counted make one operation.
    pub(crate) fn outcome(&self, parts: f64) -> Outcome {
        let (ops, cores) = (self.total as f64 / parts, self.cores);
        Outcome {
            cores,
            mps: ops * 1000.0 / self.end,
            ns: self.end * cores as f64 / ops,
            ops_per_flush: ops / self.flushes as f64,
        }
    }

    /// Own work, then `held` under the lock, and `moved` more where another core held it last.
    pub(crate) fn locked(&mut self, line: f64, own: f64, held: f64, moved: f64) {
        let (mut free_at, mut last) = (0.0, usize::MAX);
        while let Some(Ask { at, core, .. }) = self.next() {
            let begin = if last == core || last == usize::MAX {
                at.max(free_at)
            } else if at < free_at {
                free_at + HANDOVER_LINES * line + moved
            } else {
                // No core waits: only the lock's line moves.
                at.max(free_at) + line + moved
            };
            let end = begin + held;
            (free_at, last) = (end, core);
            self.flushes += 1;
            if !self.made(core, 1, end, end + own) {
                break;
            }
        }
    }

    /// Own work alone until the queue is full; then what an earlier flush covers leaves it, or
    /// there is a flush.
    pub(crate) fn deferred(&mut self, c: Constants, own: f64, entries: u32) {
        let entries = entries as usize;
        let mut queues = vec![VecDeque::with_capacity(entries); self.cores];
        let (mut began, mut free_at, mut last) = (f64::NEG_INFINITY, 0.0, usize::MAX);
        while let Some(Ask { at, core, .. }) = self.next() {
            // No other core takes part until the queue is full: these operations need no events.
            let queue = &mut queues[core];
            let mut now = at;
            let count = entries - queue.len();
            for _ in 0..count {
                now += own;
                queue.push_back(now);
            }
            // The flush that began last covers what was queued before, once it is complete.
            let covers =
                |queue: &VecDeque<f64>, began: f64| queue.front().is_some_and(|t| *t <= began);
            if now < free_at && covers(queue, began) {
                now = free_at + c.line_ns;
            } else if !covers(queue, began) {
                let begin = if last == core || last == usize::MAX {
                    now.max(free_at) + c.lock_ns
                } else if now < free_at {
                    free_at + HANDOVER_LINES * c.line_ns
                } else {
                    now + c.line_ns
                };
                began = begin;
                now = begin + c.global_flush_ns;
                (free_at, last) = (now, core);
                self.flushes += 1;
            } else if last != core {
                // The epoch that another core wrote.
                now += c.line_ns;
            }
            while queue.front().is_some_and(|queued| *queued <= began) {
                queue.pop_front();
            }
            if !self.made(core, count as u64, now, now) {
                break;
            }
        }
    }
}
