//! The events: who asks when, and when it is served.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use crate::{Constants, HANDOVER_LINES, Outcome};

/// A core asks at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ask {
    at: f64,
    core: usize,
}

impl Eq for Ask {}

impl Ord for Ask {
    fn cmp(&self, other: &Self) -> Ordering {
        // Two at the same time: the lower number first, so that a run repeats.
        self.at
            .total_cmp(&other.at)
            .then(self.core.cmp(&other.core))
    }
}

impl PartialOrd for Ask {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Cores that repeat an operation until the first has made `ops` of them: from then on there would be fewer.
pub(crate) struct Cores {
    asks: BinaryHeap<Reverse<Ask>>,
    made: Vec<u64>,
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
                    })
                })
                .collect(),
            made: vec![0; cores],
            ops,
            total: 0,
            flushes: 0,
            end: 0.0,
        }
    }

    fn next(&mut self) -> Option<Ask> {
        let Reverse(ask) = self.asks.pop()?;
        assert!(ask.at.is_finite() && ask.at >= 0.0, "time runs forward");
        Some(ask)
    }

    /// `core` made `count` operations, the last at `at`, and asks again at `again`. False when the run is over.
    fn made(&mut self, core: usize, count: u64, at: f64, again: f64) -> bool {
        self.made[core] += count;
        self.total += count;
        self.end = self.end.max(at);
        self.asks.push(Reverse(Ask { at: again, core }));
        self.made[core] < self.ops
    }

    /// `parts` of what was counted make one operation.
    pub(crate) fn outcome(&self, parts: f64) -> Outcome {
        let (ops, cores) = (self.total as f64 / parts, self.made.len());
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
        while let Some(Ask { at, core }) = self.next() {
            let begin = if last == core || last == usize::MAX {
                at.max(free_at)
            } else if at < free_at {
                free_at + HANDOVER_LINES * line + moved
            } else {
                // Nobody waits: the lock's line comes alone.
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

    /// Own work, then a request; whoever finds no leader leads, collects what waits, and flushes once.
    ///
    /// A leader leaves after its flush. One that waits is told (a line), and takes the seat (another), unless the one that
    /// left is back before: then it leads again, and they share the flush.
    pub(crate) fn combining(&mut self, line: f64, own: f64, flush: f64, gather: f64, collect: f64) {
        let (mut free_at, mut last) = (0.0, usize::MAX);
        let mut batch = Vec::new();
        while let Some(first) = self.next() {
            let is_known = last == first.core || last == usize::MAX;
            let is_back = !is_known && first.at < free_at && own <= 2.0 * line;
            let begin = if is_back {
                free_at + own
            } else if first.at < free_at {
                free_at + 2.0 * line
            } else if is_known {
                first.at
            } else {
                first.at + line
            };
            let leader = if is_back { last } else { first.core };
            let mut point = begin + gather;
            batch.clear();
            if is_back {
                point += line + collect;
                batch.push(first.core);
            }
            while let Some(Reverse(ask)) = self.asks.peek() {
                // A request can be seen one transfer after it was made, which is what the leader waits for.
                if ask.at > point {
                    break;
                }
                if ask.core != leader {
                    point += line + collect;
                    batch.push(ask.core);
                }
                self.next();
            }
            let end = point + flush;
            (free_at, last) = (end, leader);
            self.flushes += 1;
            let mut goes_on = self.made(leader, 1, end, end + own);
            for follower in &batch {
                let seen = end + line;
                goes_on &= self.made(*follower, 1, seen, seen + own);
            }
            if !goes_on {
                break;
            }
        }
    }

    /// Own work alone until the queue is full; then what an earlier flush covers leaves it, or there is a flush.
    pub(crate) fn deferred(&mut self, c: Constants, own: f64, entries: u32) {
        let entries = entries as usize;
        let mut queues = vec![VecDeque::with_capacity(entries); self.made.len()];
        let (mut began, mut free_at, mut last) = (f64::NEG_INFINITY, 0.0, usize::MAX);
        while let Some(Ask { at, core }) = self.next() {
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
