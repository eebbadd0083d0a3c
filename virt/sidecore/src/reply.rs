//! Asking a poller and waiting for its answer, as a vCPU does at a trapped register access.
//!
//! The asker spins for a while, since an awake sidecore answers within microseconds, then parks. It
//! is notified whatever happens to the question (answered, dropped by the poller, dropped with the
//! mailbox of a sidecore that ends or panics): the [`Reply`] is a value, and dropping it without an
//! answer reports that there will be none.

use std::time::Duration;

use crate::{
    clock::Nanos,
    sync::{Arc, AtomicU32, Mutex, Ordering, thread},
};

const WAITING: u32 = 0;
const PARKED: u32 = 1;
const DONE: u32 = 2;

/// Time that an asker spins before it parks: about the cost of parking and being woken.
const SPIN: Duration = Duration::from_micros(50);

/// `state` goes `WAITING → [PARKED →] DONE`; the answer is written before `DONE`, read after it.
#[derive(Debug)]
struct Exchange<R> {
    state: AtomicU32,
    answer: Mutex<Option<R>>,
    asker: thread::Thread,
}

/// The right, and the duty, to answer one [`call`](crate::Handle::call).
#[derive(Debug)]
#[must_use = "dropping it fails the call"]
pub struct Reply<R>(Arc<Exchange<R>>);

/// The asker's end.
#[derive(Debug)]
pub struct Answer<R>(Arc<Exchange<R>>);

/// Returns a pair for one question of the current thread.
pub(crate) fn reply<R>() -> (Reply<R>, Answer<R>) {
    let slot = Arc::new(Exchange {
        state: AtomicU32::new(WAITING),
        answer: Mutex::new(None),
        asker: thread::current(),
    });
    (Reply(Arc::clone(&slot)), Answer(slot))
}

impl<R> Reply<R> {
    /// Returns a pair for a question of the current thread without a sidecore in between: for
    /// calling a poller's `message` directly, as its tests do. The answer must be awaited on the
    /// thread that made the pair.
    ///
    /// ```
    /// let (reply, answer) = sidecore::Reply::pair();
    /// assert_eq!(answer.try_take(), None);
    /// reply.send(7);
    /// assert_eq!(answer.try_take(), Some(7));
    /// ```
    pub fn pair() -> (Reply<R>, Answer<R>) {
        reply()
    }

    /// Sends the answer; a system call only if the asker has parked.
    pub fn send(self, answer: R) {
        // No other thread holds the lock for longer than a move: the asker reads the slot after
        // `DONE` only. The slot is not poisoned: no code that can panic runs under the lock.
        if let Ok(mut slot) = self.0.answer.lock() {
            *slot = Some(answer);
        }
        // `drop` then publishes the answer.
    }
}

impl<R> Drop for Reply<R> {
    fn drop(&mut self) {
        // Release: the answer, if any, is visible to a thread that reads DONE. Acquire is not
        // needed.
        if self.0.state.swap(DONE, Ordering::AcqRel) == PARKED {
            self.0.asker.unpark();
        }
    }
}

impl<R> Answer<R> {
    /// Returns the answer, if it is there and has not been taken.
    pub fn try_take(&self) -> Option<R> {
        // Acquire: as in `wait`.
        match self.0.state.load(Ordering::Acquire) {
            DONE => self.0.answer.lock().ok()?.take(),
            _ => None,
        }
    }

    /// Waits for the answer; `None` if the question was dropped.
    pub fn wait(self) -> Option<R> {
        self.spin();
        let state = &self.0.state;
        // Acquire on both paths: pairs with the Release of `drop`.
        if state.load(Ordering::Acquire) != DONE
            && state
                .compare_exchange(WAITING, PARKED, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
        {
            // Parking may end spuriously, or by an unpark for another purpose.
            while state.load(Ordering::Acquire) != DONE {
                thread::park();
            }
        }
        self.0.answer.lock().ok()?.take()
    }

    #[cfg(not(loom))]
    fn spin(&self) {
        let start = Nanos::now();
        while self.0.state.load(Ordering::Relaxed) != DONE {
            std::hint::spin_loop();
            if Nanos::now().since(start) >= SPIN.as_nanos() as u64 {
                break;
            }
        }
    }

    /// Does not spin: the model explores every interleaving anyway.
    #[cfg(loom)]
    fn spin(&self) {
        let _ = (SPIN, Nanos::now);
    }
}

#[cfg(all(test, loom))]
#[path = "reply/tests/model.rs"]
mod model;
