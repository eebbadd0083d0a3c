//! Handshake of writers and the watchdog, so that no write begins while the watchdog sleeps.
//!
//! It is Dekker's algorithm: a writer stores that it is in a write, and then loads whether the
//! watchdog is awake; the watchdog stores that it is not, and then loads whether a writer is in a
//! write. At least one of the two sees the other: the write is not done, or the watchdog does not
//! sleep. The writer is the common side, so its fence is the light one of a pair ([`Fences`]), and
//! the watchdog's the heavy one: the kernel makes a full fence in each thread of the process that
//! runs (membarrier(2)).
//!
//! Modelled with loom, with each side's fence removed in turn: the watchdog's by the model, the
//! writers' by `tests/mutants/sidecore/no-writers-fence`.
//! `RUSTFLAGS="--cfg loom" cargo test -p sidecore --lib --release model`.

use lines::Fences;

use crate::sync::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

/// Writes of one thread, shared with the watchdog.
#[derive(Debug)]
pub(super) struct Record {
    /// Number of beginnings and ends of writes: odd during a write. Stored by the thread alone.
    count: AtomicU64,
    /// The `count` of the last write that the watchdog has found asleep. Stored by the watchdog
    /// alone.
    held: AtomicU64,
}

impl Record {
    pub(super) fn new() -> Self {
        Self {
            count: AtomicU64::new(0),
            held: AtomicU64::new(0),
        }
    }

    /// Announces a write; returns whether the watchdog is awake. It then stays awake until the
    /// [end](Self::end).
    #[inline]
    pub(super) fn begin(&self, state: &State) -> bool {
        let count = self.count.load(Relaxed).wrapping_add(1);
        self.count.store(count, Relaxed);
        // Pairs with the fence in `State::sleep`.
        state.fences.light();
        state.is_awake.load(Relaxed)
    }

    /// Ends the write that was announced; returns whether the watchdog has found it asleep.
    #[inline]
    pub(super) fn end(&self) -> bool {
        let count = self.count.load(Relaxed);
        // Release: pairs with `State::sleep`, which must not miss a write that has not ended.
        self.count.store(count.wrapping_add(1), Release);
        // A mark that comes later has no effect: that write has ended by itself.
        self.held.load(Relaxed) == count
    }

    /// Returns the number of beginnings and ends of writes; odd during a write.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Acquire)
    }

    /// Marks write `count` as held. The thread checks the mark when the write has ended.
    pub(super) fn mark_held(&self, count: u64) {
        self.held.store(count, Relaxed);
    }
}

/// Shared state of the handshake: whether the watchdog is awake.
#[derive(Debug)]
pub(super) struct State {
    is_awake: AtomicBool,
    fences: Fences,
}

impl State {
    /// Creates the state of a sleeping watchdog; writers and the watchdog use `fences`.
    pub(super) fn asleep(fences: Fences) -> Self {
        Self {
            is_awake: AtomicBool::new(false),
            fences,
        }
    }

    pub(super) fn fences(&self) -> Fences {
        self.fences
    }

    pub(super) fn is_awake(&self) -> bool {
        self.is_awake.load(SeqCst)
    }

    /// Wakes the watchdog; returns whether it slept.
    pub(super) fn wake(&self) -> bool {
        !self.is_awake.swap(true, SeqCst)
    }

    /// Puts the watchdog to sleep unless a thread is in a write; returns whether it sleeps. Called
    /// by the watchdog only. `fence_all` makes a full fence in all threads, and returns whether it
    /// did.
    pub(super) fn sleep<'a>(
        &self,
        records: impl IntoIterator<Item = &'a Record>,
        fence_all: impl FnOnce() -> bool,
    ) -> bool {
        self.is_awake.store(false, SeqCst);
        // Pairs with the fence in `Record::begin`: a thread whose store to `count` comes before
        // this fence is seen below, and one whose load of `is_awake` comes after it does not write.
        let is_fenced = fence_all();
        let is_writing = |record: &Record| record.count() % 2 == 1;
        let sleeps = is_fenced && !records.into_iter().any(is_writing);
        if !sleeps {
            self.is_awake.store(true, SeqCst);
        }
        sleeps
    }
}

#[cfg(all(test, loom))]
mod model;
