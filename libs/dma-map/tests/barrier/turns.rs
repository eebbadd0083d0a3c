//! Cores as coroutines of one thread: one runs, the others are stopped, each at a step of its own,
//! for as long as the test likes. The seed alone determines the run.
//!
//! Steps are the calls of [`point`] (inside the invalidator, the clock, the table), and every lock
//! taken and every poll of a wait in `lines`, `iova` and `dma-map` (`lines::hooks`). Between two
//! steps no other core runs: orders of single accesses are shuttle's and loom's part.

use std::cell::{Cell, RefCell};
use std::ptr;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use lines::hooks::{self, Step};

/// Step at which a core stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchPoint {
    /// About to hand the hardware a batch, or just after it.
    Submit,
    /// About to ask whether a batch is complete.
    Poll,
    /// At the clock.
    Clock,
    /// About to map, or having mapped.
    Map,
    /// About to clear entries.
    Unmap,
    /// Having cleared entries.
    Unmapped,
    /// About to take a lock.
    Lock,
    /// Waiting for another core.
    Wait,
}

/// xorshift64*.
#[derive(Clone, Copy)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 20) % bound
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

type Stop = Yielder<(), SwitchPoint>;

std::thread_local! {
    /// Of the core that runs; null where none does.
    static RUNNING: Cell<*const Stop> = const { Cell::new(ptr::null()) };
    static RANDOM: RefCell<Random> = RefCell::new(Random::new(0));
    /// Steps that the running core takes before it stops again.
    static LEFT: Cell<u64> = const { Cell::new(0) };
    /// A core stops at every so many steps, about; at every one where this is 1, only at waits
    /// where it is 0.
    static EVERY: Cell<u64> = const { Cell::new(1) };
}

/// A number below `bound`, by the seed.
pub fn any(bound: u64) -> u64 {
    RANDOM.with_borrow_mut(|random| random.below(bound))
}

/// A step of the core that runs.
pub fn point(place: SwitchPoint) {
    let left = LEFT.get();
    if left > 0 && place != SwitchPoint::Wait {
        LEFT.set(left - 1);
        return;
    }
    let running = RUNNING.get();
    if running.is_null() || EVERY.get() == 0 && place != SwitchPoint::Wait {
        return;
    }
    if EVERY.get() > 1 {
        LEFT.set(any(2 * EVERY.get()));
    }
    // SAFETY: not null, it is the pointer that the running coroutine gave to `Cores::resume`, and
    // this call is on that coroutine's stack: its yielder lives until its closure returns, and
    // `resume` takes the pointer away when the coroutine stops or ends.
    unsafe { (*running).suspend(place) };
}

/// Runs `act` without a stop, as long as it has to wait for no other core. `None` where it had to.
pub fn at_once<R>(act: impl FnOnce() -> R) -> Option<R> {
    let every = EVERY.replace(0);
    let left = LEFT.replace(0);
    WAITED.set(false);
    let result = act();
    EVERY.set(every);
    LEFT.set(left);
    (!WAITED.get()).then_some(result)
}

std::thread_local! {
    static WAITED: Cell<bool> = const { Cell::new(false) };
}

fn at_hook(step: Step) {
    match step {
        Step::Lock => point(SwitchPoint::Lock),
        Step::Wait => {
            WAITED.set(true);
            point(SwitchPoint::Wait);
        }
    }
}

struct Core {
    coroutine: Coroutine<(), SwitchPoint, (), DefaultStack>,
    /// Its yielder, while it has begun and not ended.
    stop: *const Stop,
    is_done: bool,
    /// Turns for which it is left where it stopped.
    stopped_for: u64,
}

/// The cores of a test.
#[derive(Default)]
pub struct Cores(Vec<Core>);

impl Cores {
    /// None yet. Those to come stop at every step if `every` is 1, else at about one of so many.
    pub fn new(seed: u64, every: u64) -> Self {
        hooks::set(Some(at_hook));
        RANDOM.set(Random::new(seed));
        LEFT.set(0);
        EVERY.set(every);
        Self::default()
    }

    /// Another, which does `act` when it has a turn.
    pub fn add(&mut self, act: impl FnOnce() + 'static) -> usize {
        // What goes to another stack has to be small.
        let act: Box<dyn FnOnce()> = Box::new(act);
        let coroutine = Coroutine::new(|stop: &Stop, ()| {
            RUNNING.set(ptr::from_ref(stop));
            act();
        });
        self.0.push(Core {
            coroutine,
            stop: ptr::null(),
            is_done: false,
            stopped_for: 0,
        });
        self.0.len() - 1
    }

    /// Lets a core go on to its next stop; `None` where it has ended.
    pub fn resume(&mut self, core: usize) -> Option<SwitchPoint> {
        let core = &mut self.0[core];
        if core.is_done {
            return None;
        }
        RUNNING.set(core.stop);
        let result = core.coroutine.resume(());
        // The first turn has set it.
        core.stop = RUNNING.replace(ptr::null());
        match result {
            CoroutineResult::Yield(place) => Some(place),
            CoroutineResult::Return(()) => {
                core.is_done = true;
                None
            }
        }
    }

    /// Lets a core go on until it stops at `place` for the `count`th time. False where it ends
    /// before.
    pub fn run_to(&mut self, core: usize, place: SwitchPoint, count: usize) -> bool {
        let mut seen = 0;
        while let Some(at) = self.resume(core) {
            seen += usize::from(at == place);
            if seen == count {
                return true;
            }
        }
        false
    }

    /// Runs a core until it ends, or waits without progress.
    pub fn run(&mut self, core: usize) -> bool {
        let mut waits = 0;
        while let Some(place) = self.resume(core) {
            waits += usize::from(place == SwitchPoint::Wait);
            if waits > 1_000 {
                return false;
            }
        }
        true
    }

    /// Lets all go on until they end, in an order that the seed gives; some stay stopped for a
    /// while. `progress` is how far they have come.
    ///
    /// # Panics
    /// They make none.
    pub fn run_all(&mut self, progress: impl Fn() -> u64) {
        const PATIENCE: u64 = 20_000_000;
        let (mut last, mut turns) = (progress(), 0_u64);
        let mut left = self.0.len();
        while left > 0 {
            let core = any(self.0.len() as u64) as usize;
            if self.0[core].is_done {
                continue;
            }
            turns += 1;
            if turns.is_multiple_of(1 << 16) && progress() != last {
                (last, turns) = (progress(), 0);
            }
            assert!(
                turns < PATIENCE,
                "no core makes progress: they wait for each other"
            );
            if self.0[core].stopped_for > 0 {
                self.0[core].stopped_for -= 1;
                continue;
            }
            match self.resume(core) {
                None => left -= 1,
                Some(_) if any(24) == 0 => {
                    // Long enough for many operations of others, now and then.
                    let most = if any(4) == 0 { 3_000 } else { 60 };
                    self.0[core].stopped_for = any(most);
                }
                Some(_) => {}
            }
        }
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        hooks::set(None);
        if std::thread::panicking() {
            // To unwind the others would run what they hold in the middle of something. The test is
            // over.
            std::mem::take(&mut self.0)
                .into_iter()
                .for_each(std::mem::forget);
        }
    }
}
