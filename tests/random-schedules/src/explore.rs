//! Models with more cores and longer histories than loom can explore. Under `--cfg shuttle` every
//! access to an atomic and every lock of `lines` is a point at which another thread may be
//! scheduled, chosen at random.
//!
//! **Work flow.** A test gives [`holds`] a closure that creates the objects, starts
//! [threads](thread), joins them and checks the result. It runs some thousands of times under two
//! schedulers: *random* (any runnable thread, at each point) and *PCT* (priorities that change at
//! few points: A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010).
//! The closure's own random choices come from [`any`]. A model that cannot fail proves nothing:
//! `tests/mutants` makes mistakes in a copy of the code under test, which the model must detect;
//! [`finds`] checks that mistakes of the model's own threads are detected.
//!
//! **Seeds** are fixed, so that a run is repeatable. On a failure, the scheduler's name, its seed
//! and the number of the execution are printed, beside shuttle's own message: for *random*, a seed
//! that makes the failing execution the first one (`SHUTTLE_RANDOM_SEED=…`). `SHUTTLE_TIMES=n` runs
//! each model n times as often. Another `SHUTTLE_RANDOM_SEED` selects other schedules.
//!
//! **A mistake is recorded, not thrown** ([`fail`]): a thread that unwinds while others run takes
//! locks and stores to atomics in its destructors, and a second panic there ends the process. A
//! thread that finds [`has_failed`] returns; [`holds`] panics at the end. Assertions of the code
//! under test panic nevertheless.
//!
//! **Not detected.** shuttle treats every access as sequentially consistent and ignores fences, so
//! a mistake in a memory ordering (a relaxed swap that should be a release) cannot be found here.
//! That is the task of loom's models, which come first; this crate is for models that need more
//! threads or a longer history.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use shuttle::rand::RngCore;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

pub use shuttle::thread;

/// Seed of both schedulers.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
/// PCT's depth: one more than the points at which it changes priorities in an execution. Most bugs
/// need one or two such points.
const DEPTH: usize = 4;
/// Stack of a thread. A page of a model is an array of atomics on the stack, which shuttle makes
/// large.
const STACK_BYTES: usize = 1 << 20;
/// Greatest number of steps of an execution. Models here need far fewer; one that reaches it waits
/// for an event that never occurs.
const MAX_STEPS: usize = 200_000;

thread_local! {
    // All threads of an execution are coroutines of one real thread.
    static FAILED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Records a failure. Only the first of an execution counts.
pub fn fail(what: impl ToString) {
    FAILED.with_borrow_mut(|failed| {
        failed.get_or_insert_with(|| what.to_string());
    });
}

/// Returns whether this execution has failed already.
#[must_use]
pub fn has_failed() -> bool {
    FAILED.with_borrow(Option::is_some)
}

/// Returns a number from 0 to `below` - 1, the same when an execution is repeated.
#[must_use]
pub fn any(below: u64) -> u64 {
    shuttle::rand::thread_rng().next_u64() % below
}

/// Adds a scheduling point: for models whose own steps use none of shuttle's types, so that the
/// steps between two points are atomic.
pub fn point() {
    let nothing = shuttle::sync::atomic::AtomicBool::new(false);
    let _ = nothing.load(std::sync::atomic::Ordering::SeqCst);
}

/// Runs `model` `times` times under each scheduler.
///
/// # Panics
/// If an execution fails.
pub fn holds(times: usize, model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    for kind in KINDS {
        if let Err(failure) = explore(kind, times, &model) {
            eprintln!("{}", failure.place);
            resume_unwind(failure.payload);
        }
    }
}

/// Returns whether one of the schedulers finds a failure whose description contains `what`, in at
/// most `times` executions.
///
/// # Panics
/// If another failure is found.
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
        // The random scheduler prints its seed, which suffices to repeat the failure.
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

/// Also records the messages of panics of the code under test, for which shuttle reports a text of
/// its own.
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
