//! Loom model of combining: `RUSTFLAGS="--cfg loom" cargo test -p dma-map --lib --release model`

use alloc::{sync::Arc, vec::Vec};

use iova::IovaPfn;
use lines::{AtomicBool, AtomicU32};

use super::super::Ticket;
use super::*;

/// Hardware that caches page *i* until an invalidation while the entry is clear.
struct Hardware {
    entry: Vec<AtomicBool>,
    cached: Vec<AtomicBool>,
    polls: AtomicU32,
    looks: AtomicU32,
    /// If false at the start, the first core that submits is stopped until the other core has
    /// returned, which sets this.
    has_returned: AtomicBool,
    submissions: AtomicU32,
}

impl Invalidator for Hardware {
    /// The ticket: pages that are forgotten when it is complete. A page whose entry the walk still
    /// finds would be cached again at once.
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        if !self.has_returned.load(Ordering::Relaxed)
            && self.submissions.fetch_add(1, Ordering::Relaxed) == 0
        {
            while !self.has_returned.load(Ordering::Relaxed) {
                loom::thread::yield_now();
            }
        }
        let mut pages = 0;
        for command in commands {
            let named = match command {
                Command::Pages(range) => range.first().raw()..range.last().raw() + 1,
                _ => 0..self.entry.len() as u64,
            };
            for page in named {
                if !self.entry[page as usize].load(Ordering::Relaxed) {
                    pages |= 1 << page;
                }
            }
        }
        Ok(Ticket(pages))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        // With three cores the first answer is yes: each no lets two waiters poll in every order.
        if self.entry.len() == 2 && self.polls.fetch_add(1, Ordering::Relaxed) % 2 == 0 {
            return Ok(false);
        }
        for (page, cached) in self.cached.iter().enumerate() {
            if ticket.0 >> page & 1 == 1 {
                cached.store(false, Ordering::Relaxed);
            }
        }
        Ok(true)
    }

    fn is_idle(&self) -> bool {
        // Every second poll, by any core: some cores go past the others, some meet.
        self.looks.fetch_add(1, Ordering::Relaxed) % 2 == 1
    }
}

/// `unmaps` of each of `threads` cores.
fn explore(threads: usize, unmaps: usize) {
    explore_stopped(threads, unmaps, false);
}

/// With `stops`, the first core that submits is stopped until another core has unmapped all it has.
fn explore_stopped(threads: usize, unmaps: usize, stops: bool) {
    let mut builder = loom::model::Builder::new();
    // Waiters spin, which costs branches; more preemptions of many unmaps cost minutes.
    builder.preemption_bound = Some(if threads * unmaps > 2 { 2 } else { 4 });
    builder.max_branches = 100_000;
    // Three cores, and two that come back, are explored as far as this goes; two are explored in
    // full.
    builder.max_duration = (threads * unmaps > 2).then(|| core::time::Duration::from_secs(20));
    builder.check(move || {
        let combiner = Combiner::new(threads, 2);
        let pages = 0..threads * unmaps;
        let shared = Arc::new((
            combiner,
            Hardware {
                entry: pages.clone().map(|_| AtomicBool::new(true)).collect(),
                cached: pages.map(|_| AtomicBool::new(true)).collect(),
                polls: AtomicU32::new(0),
                looks: AtomicU32::new(0),
                has_returned: AtomicBool::new(!stops),
                submissions: AtomicU32::new(0),
            },
        ));
        let unmap = move |shared: &(Combiner, Hardware), core: usize| {
            let (combiner, hardware) = shared;
            for page in core * unmaps..(core + 1) * unmaps {
                hardware.entry[page].store(false, Ordering::Relaxed);
                let range = IovaRange::new(IovaPfn::new(page as u64), 1).unwrap();
                combiner.flush(hardware, core, range).unwrap();
                assert!(
                    !hardware.cached[page].load(Ordering::Relaxed),
                    "an unmap returned before its own invalidation"
                );
            }
            hardware.has_returned.store(true, Ordering::Relaxed);
        };
        let others: Vec<_> = (1..threads)
            .map(|core| {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || unmap(&shared, core))
            })
            .collect();
        unmap(&shared, 0);
        for other in others {
            other.join().unwrap();
        }
    });
}

#[test]
fn model_nobody_returns_before_his_own_invalidation() {
    explore(2, 1);
}

#[test]
fn model_two_cores_come_back() {
    explore(2, 2);
}

#[test]
fn model_three_cores() {
    explore(3, 1);
}

/// Between closing a generation and its report as well.
#[test]
fn model_a_core_that_is_stopped_stops_nobody() {
    explore_stopped(2, 1, true);
    explore_stopped(2, 2, true);
}

/// One core leaves its range while another closes that generation and the next.
fn explore_ranges() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let all = Arc::new(Generations::new());
        let range = |page: u64| IovaRange::new(IovaPfn::new(page), 1).unwrap();
        let other = Arc::clone(&all);
        let late = loom::thread::spawn(move || {
            let batch_ticket = other.join();
            other.put(batch_ticket, range(1));
            batch_ticket
        });
        let mut closed = Vec::new();
        for first in [10, 20] {
            let open_batch = [first, first + 1].map(|page| (all.join(), page));
            for (batch_ticket, page) in open_batch {
                all.put(batch_ticket, range(page));
            }
            let count = all.close(open_batch[1].0).expect("nobody else closes");
            let ranges = all.take(open_batch[1].0.generation, count);
            for (batch_ticket, page) in open_batch {
                let found = ranges[batch_ticket.place];
                assert!(
                    found.is_none_or(|found| found == range(page)),
                    "another's range"
                );
            }
            closed.push((open_batch[1].0.generation, count, ranges));
        }
        let batch_ticket = late.join().unwrap();
        if let Some((_, count, ranges)) = closed
            .iter()
            .find(|(at, ..)| *at == batch_ticket.generation)
        {
            assert!(batch_ticket.place < *count);
            let found = ranges[batch_ticket.place];
            assert!(
                found.is_none_or(|found| found == range(1)),
                "another's range"
            );
        }
    });
}

#[test]
fn model_a_range_is_its_posts() {
    explore_ranges();
}
