//! Cores that combine their invalidations, on hardware that acts as late and as early as it may.

use std::sync::{Arc, Mutex, MutexGuard};

use dma_map::invalidate::{Combiner, Command, InvalidateError, Invalidator, Ticket};
use iova::{IovaPfn, IovaRange};
use random_schedules::{any, fail, has_failed, holds, point, thread};

const ROUNDS: usize = 3;

/// The hardware's state of the pages, one for each core. One thread runs at a time, and accesses it
/// between two points, so each access is one step.
#[derive(Default)]
struct State {
    /// The entries that are set.
    mapped: u64,
    /// The translations that are cached.
    cached: u64,
    /// By ticket: the pages to forget, and the number of polls that still return `false`.
    pending: Vec<(u64, u64)>,
    /// A core that submits is stopped, or was.
    has_stopped: bool,
    /// Cores that have unmapped all they have.
    ended: usize,
}

struct Hardware {
    state: Mutex<State>,
    whole_domain_from: usize,
    /// Some batches fail.
    fails: bool,
    /// Number of cores that end while one is stopped in the middle of a submission; 0: none is
    /// stopped.
    outlive: usize,
}

impl Hardware {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with it")
    }
}

impl State {
    /// Forgets pages that the next walk does not find again at once.
    fn forget(&mut self, pages: u64) {
        self.cached &= !pages | self.mapped;
    }
}

impl Invalidator for Hardware {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        point();
        if self.outlive > 0
            && any(4) == 0
            && !core::mem::replace(&mut self.state().has_stopped, true)
        {
            while self.state().ended < self.outlive {
                thread::yield_now();
            }
        }
        let mut pages = 0;
        for command in commands {
            match command {
                Command::Pages(range) => {
                    let (first, last) = (range.first().raw(), range.last().raw());
                    (first..=last).for_each(|page| pages |= 1 << page);
                }
                Command::Domain | Command::Global => pages = !0,
            }
        }
        let mut state = self.state();
        // The entries are walked now or when it answers: what is cleared in between may stay.
        if any(2) == 0 {
            state.forget(pages);
            pages = 0;
        }
        let ticket = state.pending.len() as u64;
        state.pending.push((pages, any(4)));
        Ok(Ticket(ticket))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        point();
        let fails = self.fails && any(8) == 0;
        let mut state = self.state();
        let (pages, left) = &mut state.pending[ticket.0 as usize];
        if *left > 0 {
            *left -= 1;
            return Ok(false);
        }
        let pages = *pages;
        if fails {
            return Err(InvalidateError::Stopped { status: 1 });
        }
        state.forget(pages);
        Ok(true)
    }

    fn whole_domain_from(&self) -> usize {
        self.whole_domain_from
    }

    /// Cores meet where it is busy.
    fn is_idle(&self) -> bool {
        point();
        any(3) == 0
    }
}

/// One core maps a page, lets the device find it, clears the entry, and has it forgotten.
fn unmaps(combiner: &Combiner, hardware: &Hardware, core: usize) {
    let page = 1 << core;
    let range = IovaRange::new(IovaPfn::new(core as u64), 1).expect("a page");
    for _ in 0..ROUNDS {
        point();
        let mut state = hardware.state();
        state.mapped |= page;
        state.cached |= page;
        drop(state);
        point();
        hardware.state().mapped &= !page;
        while combiner.flush(hardware, core, range).is_err() {}
        if hardware.state().cached & page != 0 {
            fail("an unmap returned before its own invalidation");
        }
        if has_failed() {
            break;
        }
    }
    hardware.state().ended += 1;
}

fn model(fails: bool) -> impl Fn() + Send + Sync + 'static {
    model_stopped(fails, false)
}

fn model_stopped(fails: bool, stops: bool) -> impl Fn() + Send + Sync + 'static {
    move || {
        let cores = 4 + any(5) as usize;
        let gather_spins = any(2) as u32 * 3;
        let shared = Arc::new((
            Combiner::new(cores, gather_spins),
            Hardware {
                state: Mutex::default(),
                whole_domain_from: 2 + any(8) as usize,
                fails,
                outlive: if stops { cores - 1 } else { 0 },
            },
        ));
        let threads: Vec<_> = (0..cores)
            .map(|core| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || unmaps(&shared.0, &shared.1, core))
            })
            .collect();
        threads
            .into_iter()
            .for_each(|thread| thread.join().expect("a model ends at a panic"));
    }
}

#[test]
fn no_core_returns_before_its_own_invalidation() {
    holds(10_000, model(false));
}

#[test]
fn stopped_core_stops_no_other_core() {
    holds(10_000, model_stopped(false, true));
}

#[test]
fn after_an_error_each_core_retries_and_succeeds() {
    holds(5_000, model(true));
}
