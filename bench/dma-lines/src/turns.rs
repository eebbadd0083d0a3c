//! Simulated cores that wait for each other. Each is a thread, of which one runs at a time.
//!
//! A core runs until it spins (at any `lines::spin_loop`, or on any lock that is held). Then the
//! next core in order continues where it last spun. When every core has had its turn, a round is
//! over; [`Rounds`] counts them, and simulated hardware uses that as its clock. The machine of the
//! line probe moves from thread to thread with the turn. So the result does not depend on the
//! host's scheduler.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Result, anyhow};
use line_probe::{self as probe, Machine};

use crate::PerOp;

/// Operations of each core that [`count`] counts while few cores wait: enough for one change of the
/// combining policy, which happens every 256 operations.
const OPS: usize = 260;
/// Smallest number of such operations.
const OPS_MIN: usize = 8;
/// Number of cores above which fewer operations are counted: behind a lock the number of turns
/// grows with the square of the cores. For combining with 32, 64 and 128 cores the counts of 16 and
/// of 1,040 operations agreed to 2 %; behind a lock 8 operations gave 4 % less than 16.
const OPS_CORES: usize = 24;
/// Operations of each core before counting, until combining has noticed the other cores.
const WARM_UP: usize = 8;

/// Returns the operations that [`count`] counts of each of `cores` cores.
fn ops(cores: usize) -> usize {
    (OPS * OPS_CORES.pow(2) / cores.pow(2)).clamp(OPS_MIN, OPS)
}

/// Number of rounds that have passed: the clock of simulated hardware.
#[derive(Debug, Clone, Default)]
pub struct Rounds(Arc<AtomicU64>);

impl Rounds {
    /// Returns the present round.
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct State {
    machine: Option<Machine>,
    turn: usize,
    is_done: Vec<bool>,
}

struct Turns {
    state: Mutex<State>,
    wake: Vec<Condvar>,
    rounds: Rounds,
}

impl Turns {
    fn state(&self) -> MutexGuard<'_, State> {
        // A core that panicked marks itself as done, so the state stays valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of `core`.
    fn wait(&self, core: usize, mut state: MutexGuard<'_, State>) {
        while state.turn != core {
            let waited = self.wake[core].wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(mut machine) = state.machine.take() {
            machine.set_core(core);
            probe::resume(machine);
        }
    }

    /// Gives the turn, and the machine, to the next core that is not done.
    fn pass<'a>(&'a self, core: usize, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.machine = probe::take().or(state.machine.take());
        let cores = state.is_done.len();
        for step in 1..=cores {
            let next = (core + step) % cores;
            if next == 0 {
                self.rounds.0.fetch_add(1, Ordering::Relaxed);
            }
            if !state.is_done[next] {
                state.turn = next;
                if next != core {
                    self.wake[next].notify_one();
                }
                break;
            }
        }
        state
    }
}

/// Guard that marks its core as done, also when the core panics.
struct Ends<'a>(&'a Turns, usize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        probe::on_spin(None);
        let Self(turns, core) = *self;
        let mut state = turns.state();
        state.is_done[core] = true;
        drop(turns.pass(core, state));
    }
}

/// Runs `work` for each of the cores on one machine, and returns the machine. `tasks` holds one
/// task for each core. `work` receives the core's number, its task, and a function by which the
/// core yields to the next one.
///
/// # Errors
/// The first error of a core, or that one has panicked.
pub fn run<T: Send>(
    machine: Machine,
    rounds: &Rounds,
    tasks: &mut [T],
    work: impl Fn(usize, &mut T, &dyn Fn()) -> Result<()> + Sync,
) -> Result<Machine> {
    let cores = tasks.len();
    let turns = Arc::new(Turns {
        state: Mutex::new(State {
            machine: Some(machine),
            turn: 0,
            is_done: vec![false; cores],
        }),
        wake: (0..cores).map(|_| Condvar::new()).collect(),
        rounds: rounds.clone(),
    });
    let outcomes: Vec<Result<()>> = thread::scope(|scope| {
        let (turns, work) = (&turns, &work);
        let start = |(core, task)| {
            scope.spawn(move || {
                let ends = Ends(turns, core);
                turns.wait(core, turns.state());
                let yielding = Arc::clone(turns);
                let yields = Cell::new(0_u64);
                let hand_over: Rc<dyn Fn()> = Rc::new(move || {
                    yields.set(yields.get() + 1);
                    assert!(yields.get() < 1 << 24, "core {core} waits for ever");
                    let state = yielding.pass(core, yielding.state());
                    yielding.wait(core, state);
                });
                probe::on_spin(Some(Rc::clone(&hand_over)));
                let outcome = work(core, task, &*hand_over);
                drop(ends);
                outcome
            })
        };
        let threads: Vec<_> = tasks.iter_mut().enumerate().map(start).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<()>>| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("a simulated core panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    outcomes.into_iter().collect::<Result<()>>()?;
    let machine = turns.state().machine.take();
    machine.ok_or_else(|| anyhow!("the machine was lost"))
}

/// Counts the transfers of all cores at once. `play` makes the given number of operations of each
/// core on a machine; it is first called with a few, as a warm-up.
///
/// # Errors
/// Those of `play`.
pub fn count(
    cores: usize,
    mut play: impl FnMut(Machine, usize) -> Result<Machine>,
) -> Result<PerOp> {
    let mut machine = play(Machine::new(), WARM_UP)?;
    machine.clear();
    let ops = ops(cores);
    probe::resume(play(machine, ops)?);
    let counts = probe::stop().unwrap_or_default();
    Ok(PerOp::of(counts, (ops * cores) as u64))
}

#[cfg(test)]
mod tests {
    use lines::{AtomicU64 as Word, CachePadded, Lock, Ordering};

    use super::*;

    #[test]
    fn cores_take_turns_and_the_machine_goes_with_them() {
        let line = CachePadded::new(Word::new(0));
        let rounds = Rounds::default();
        let mut order = [const { Vec::new() }; 3];
        let machine = run(Machine::new(), &rounds, &mut order, |_, seen, hand_over| {
            for _ in 0..4 {
                seen.push(line.fetch_add(1, Ordering::Relaxed));
                hand_over();
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(order, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]);
        assert_eq!(machine.counts().transfers(), 11);
        assert!((4..=5).contains(&rounds.now()), "{rounds:?}");
    }

    #[test]
    fn core_that_finds_a_lock_held_waits_for_its_turn() {
        let lock = CachePadded::new(Lock::new(0));
        let machine = run(
            Machine::new(),
            &Rounds::default(),
            &mut [(); 8],
            |_, (), hand_over| {
                for _ in 0..3 {
                    let mut value = lock.lock();
                    hand_over();
                    *value += 1;
                }
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(machine.counts().locks, 24);
        assert!(machine.counts().transfers() > 24 * 2, "{machine:?}");
    }

    #[test]
    fn a_core_that_panics_or_fails_does_not_stop_the_others() {
        let fails = |bad: bool| {
            run(
                Machine::new(),
                &Rounds::default(),
                &mut [(); 3],
                move |core, (), hand_over| {
                    hand_over();
                    assert!(!bad || core != 1, "on purpose");
                    (core != 2).then_some(()).ok_or_else(|| anyhow!("core 2"))
                },
            )
        };
        assert_eq!(fails(false).unwrap_err().to_string(), "core 2");
        assert_eq!(
            fails(true).unwrap_err().to_string(),
            "a simulated core panicked"
        );
    }
}
