//! The events of the simulation: when a core requests a resource, and when it is served.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use crate::{Constants, HANDOVER_LINES, Outcome};

/// Next step of a core. Only the model of combining uses more than the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// The core has finished its own work and requests the resource.
    Asks,
    /// The core re-checks whether the hardware is idle.
    Retries,
    /// The first core of the open batch finds the batch before complete.
    Stands,
    /// The core closes the batch of this number, unless another core has closed it.
    Closes(u64),
}

/// Step of a core at a time, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ask {
    pub(crate) at: f64,
    pub(crate) core: usize,
    pub(crate) step: Step,
}

impl Eq for Ask {}

impl Ord for Ask {
    fn cmp(&self, other: &Self) -> Ordering {
        // At equal times the lower core number comes first, so that a run is repeatable.
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

/// Cores that repeat an operation, until they have made `ops` each on average.
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
            // The starts are 1 ns apart, like those of threads behind a barrier.
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

    /// Returns the number of cores.
    pub(crate) fn count(&self) -> usize {
        self.cores
    }

    /// Schedules the next step of `core` at `at`.
    pub(crate) fn comes(&mut self, core: usize, at: f64, step: Step) {
        self.asks.push(Reverse(Ask { at, core, step }));
    }

    /// Counts a batch that was submitted to the hardware.
    pub(crate) fn flushed(&mut self) {
        self.flushes += 1;
    }

    /// Counts `count` operations of `core`, the last at `at`, and schedules its next request at
    /// `again`. Returns false when the run is over.
    pub(crate) fn made(&mut self, core: usize, count: u64, at: f64, again: f64) -> bool {
        self.total += count;
        self.end = self.end.max(at);
        self.comes(core, again, Step::Asks);
        self.total < self.ops
    }

    /// Returns the outcome, if `parts` of the counted operations make one operation of the
    /// caller's.
    pub(crate) fn outcome(&self, parts: f64) -> Outcome {
        let (ops, cores) = (self.total as f64 / parts, self.cores);
        Outcome {
            cores,
            mps: ops * 1000.0 / self.end,
            ns: self.end * cores as f64 / ops,
            ops_per_flush: ops / self.flushes as f64,
        }
    }

    /// Simulates own work, then `held` under the lock, and `moved` more if another core held it
    /// last.
    pub(crate) fn locked(&mut self, line: f64, own: f64, held: f64, moved: f64) {
        let (mut free_at, mut last) = (0.0, usize::MAX);
        while let Some(Ask { at, core, .. }) = self.next() {
            let begin = if last == core || last == usize::MAX {
                at.max(free_at)
            } else if at < free_at {
                free_at + HANDOVER_LINES * line + moved
            } else {
                // No core waits: only the line of the lock moves.
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

    /// Simulates own work until the core's queue is full. Then the entries that an earlier flush
    /// covers leave the queue; if there are none, the core flushes.
    pub(crate) fn deferred(&mut self, c: Constants, own: f64, entries: u32) {
        let entries = entries as usize;
        let mut queues = vec![VecDeque::with_capacity(entries); self.cores];
        let (mut began, mut free_at, mut last) = (f64::NEG_INFINITY, 0.0, usize::MAX);
        while let Some(Ask { at, core, .. }) = self.next() {
            // Other cores take no part until the queue is full, so these operations need no events.
            let queue = &mut queues[core];
            let mut now = at;
            let count = entries - queue.len();
            for _ in 0..count {
                now += own;
                queue.push_back(now);
            }
            // The flush that began last covers the entries queued before it, once it is complete.
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
                // The transfer of the epoch's line, which another core wrote.
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
