//! `RUSTFLAGS="--cfg loom" cargo test -p dma-map --lib --release model`

use alloc::{sync::Arc, vec::Vec};

use iova::IovaPfn;
use lines::{AtomicBool, AtomicU32};

use super::super::Ticket;
use super::*;

/// Hardware that remembers page *i* until it is told to forget it while the entry is clear.
struct Hardware {
    entry: Vec<AtomicBool>,
    cached: Vec<AtomicBool>,
    polls: AtomicU32,
}

impl Invalidator for Hardware {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        let mut pages = 0;
        for command in commands {
            let Command::Pages(range) = command else {
                // A mutant may not know the range.
                pages = !0;
                continue;
            };
            for page in range.first().raw()..=range.last().raw() {
                pages |= 1 << page;
            }
        }
        Ok(Ticket(pages))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        // With three cores the first answer is yes: each no lets two waiters look in every order.
        if self.entry.len() == 2 && self.polls.fetch_add(1, Ordering::Relaxed) % 2 == 0 {
            return Ok(false);
        }
        for page in 0..self.entry.len() {
            // A page whose entry the walk still finds is remembered again at once.
            if ticket.0 >> page & 1 == 1 && !self.entry[page].load(Ordering::Relaxed) {
                self.cached[page].store(false, Ordering::Relaxed);
            }
        }
        Ok(true)
    }
}

fn explore(threads: usize, mutant: Mutant) {
    let mut builder = loom::model::Builder::new();
    // Waiters spin, which costs branches; more preemptions of three cost minutes.
    builder.preemption_bound = Some(if threads > 2 { 2 } else { 4 });
    builder.max_branches = 100_000;
    // Three cores are explored as far as this goes; two are explored in full.
    builder.max_duration = (threads > 2).then(|| core::time::Duration::from_secs(20));
    builder.check(move || {
        let mut combiner = Combiner::new(threads);
        combiner.mutant = mutant;
        let shared = Arc::new((
            combiner,
            Hardware {
                entry: (0..threads).map(|_| AtomicBool::new(true)).collect(),
                cached: (0..threads).map(|_| AtomicBool::new(true)).collect(),
                polls: AtomicU32::new(0),
            },
        ));
        let unmap = |shared: &(Combiner, Hardware), core: usize| {
            let (combiner, hardware) = shared;
            hardware.entry[core].store(false, Ordering::Relaxed);
            let range = IovaRange::new(IovaPfn::new(core as u64), 1).unwrap();
            combiner.flush(hardware, core, range).unwrap();
            assert!(
                !hardware.cached[core].load(Ordering::Relaxed),
                "an unmap returned before its own invalidation"
            );
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
    explore(2, Mutant::None);
}

#[test]
fn model_three_cores() {
    explore(3, Mutant::None);
}

#[test]
#[should_panic(expected = "before its own invalidation")]
fn model_catches_an_answer_before_the_hardware_is_done() {
    explore(2, Mutant::EarlyAnswer);
}

#[test]
#[should_panic(expected = "before its own invalidation")]
fn model_catches_a_post_that_orders_nothing() {
    explore(2, Mutant::RelaxedPost);
}

#[test]
#[should_panic(expected = "before its own invalidation")]
fn model_catches_a_post_answered_by_a_batch_that_ran_already() {
    explore(2, Mutant::LateJoin);
}
