//! Models of more cores, and longer ones, than loom can explore: under `--cfg shuttle` every access
//! to an atomic and every lock of `lines` is a point at which a test may let another thread run,
//! and which one does is chosen at random.
//!
//! **Work flow.** A test gives [`holds`] a closure that makes a world, starts [threads](thread),
//! joins them and looks whether all is well; it runs some thousands of times under two schedulers:
//! *random* (any thread that can run, at each point) and *PCT* (priorities that change at few
//! points: A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010). What
//! the closure itself chooses it takes from [`any`]. A model that cannot fail proves nothing:
//! `tests/mutants` makes the mistakes that it must find, in a copy of the code under test; what the
//! model's own threads do wrong on purpose [`finds`] sees come to light.
//!
//! **Seeds** are fixed, so that a run repeats. On a failure the scheduler's name, its seed and the
//! number of the execution are printed, and what shuttle prints itself: for *random*, a seed that
//! makes the failing execution the first one (`SHUTTLE_RANDOM_SEED=…`). `SHUTTLE_TIMES=n` runs each
//! model n times as often. With another `SHUTTLE_RANDOM_SEED` everything takes other ways.
//!
//! **A mistake is noted, not thrown** ([`fail`]): a thread that unwinds while others run takes
//! locks and stores to atomics in its destructors, and a second panic there ends the process. A
//! thread that finds [`has_failed`] ends; [`holds`] panics in the end. Assertions of the code under
//! test panic nevertheless.
//!
//! **What is not seen.** shuttle treats every access as sequentially consistent and knows no
//! fences: a mistake in an ordering (a relaxed swap that should be a release) cannot be found here.
//! That is loom's part, and comes first; this is for what takes more threads or a longer history
//! than loom's.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use shuttle::rand::RngCore;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

pub use shuttle::thread;

/// The seed of both schedulers.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
/// Points at which PCT changes priorities in an execution, plus one: most mistakes need one or two.
const DEPTH: usize = 4;
/// A page of a model is an array of atomics that shuttle makes large, on the stack.
const STACK_BYTES: usize = 1 << 20;
/// Steps of an execution: no model here comes near; one that does waits for something that never
/// comes.
const MAX_STEPS: usize = 200_000;

thread_local! {
    // All threads of an execution are coroutines of one real thread.
    static FAILED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Notes what is wrong. The first note of an execution counts.
pub fn fail(what: impl ToString) {
    FAILED.with_borrow_mut(|failed| {
        failed.get_or_insert_with(|| what.to_string());
    });
}

/// Whether something is wrong in this execution already.
#[must_use]
pub fn has_failed() -> bool {
    FAILED.with_borrow(Option::is_some)
}

/// A number from 0 to `below` - 1, the same when an execution is repeated.
#[must_use]
pub fn any(below: u64) -> u64 {
    shuttle::rand::thread_rng().next_u64() % below
}

/// A point at which another thread may run: for models whose own steps touch nothing that is
/// shuttle's, so that what lies between two points happens at once.
pub fn point() {
    let nothing = shuttle::sync::atomic::AtomicBool::new(false);
    let _ = nothing.load(std::sync::atomic::Ordering::SeqCst);
}

/// Runs `model` `times` times under each scheduler.
///
/// # Panics
/// Something was wrong in one execution.
pub fn holds(times: usize, model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    for kind in KINDS {
        if let Err(failure) = explore(kind, times, &model) {
            eprintln!("{}", failure.place);
            resume_unwind(failure.payload);
        }
    }
}

/// Whether one of the schedulers finds something wrong whose description contains `what`, in at
/// most `times` executions.
///
/// # Panics
/// Something else was wrong.
#[must_use]
pub fn finds(times: usize, what: &str, model: impl Fn() + Send + Sync + 'static) -> bool {
    let model = Arc::new(model);
    KINDS.into_iter().any(|kind| {
        let Err(failure) = explore(kind, times, &model) else {
            return false;
        };
        eprintln!("found: {}", failure.place);
        if !failure.what.contains(what) {
            resume_unwind(failure.payload);
        }
        true
    })
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Random,
    Pct,
}

const KINDS: [Kind; 2] = [Kind::Random, Kind::Pct];

struct Failure {
    place: String,
    what: String,
    payload: Box<dyn std::any::Any + Send>,
}

fn explore(
    kind: Kind,
    times: usize,
    model: &Arc<impl Fn() + Send + Sync + 'static>,
) -> Result<(), Failure> {
    let factor = std::env::var("SHUTTLE_TIMES").ok();
    let factor = factor.and_then(|factor| factor.parse().ok()).unwrap_or(1);
    let times = times.saturating_mul(factor);
    match kind {
        Kind::Random => run(RandomScheduler::new_from_seed(SEED, times), kind, model),
        Kind::Pct => run(PctScheduler::new_from_seed(SEED, DEPTH, times), kind, model),
    }
}

fn run(
    scheduler: impl Scheduler + 'static,
    kind: Kind,
    model: &Arc<impl Fn() + Send + Sync + 'static>,
) -> Result<(), Failure> {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    config.max_steps = MaxSteps::FailAfter(MAX_STEPS);
    config.silence_warnings = true;
    config.failure_persistence = match kind {
        // It prints its seed, which does.
        Kind::Random => FailurePersistence::None,
        Kind::Pct => FailurePersistence::Print,
    };
    config
        .ungraceful_shutdown_config
        .immediately_return_on_panic = true;
    let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (counted, model) = (Arc::clone(&count), Arc::clone(model));
    let execution = move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        FAILED.take();
        model();
        if let Some(what) = FAILED.take() {
            panic!("{what}");
        }
    };
    note_panics();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        Runner::new(scheduler, config).run(execution)
    }));
    outcome.map(|_| ()).map_err(|payload| Failure {
        place: format!(
            "{kind:?} schedule, seed {SEED:#x}, execution {}",
            count.load(std::sync::atomic::Ordering::Relaxed)
        ),
        what: FAILED.take().unwrap_or_default(),
        payload,
    })
}

/// Notes the messages of panics of the code under test as well: shuttle has a text of its own for
/// them.
fn note_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            fail(panic);
            next(panic);
        }));
    });
}
