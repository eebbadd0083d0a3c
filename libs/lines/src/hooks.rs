//! Hook at the points where a thread takes a lock or waits (feature `hooks`). A test that runs its
//! simulated cores as coroutines of one thread switches between them there, so that none spins for
//! a lock whose holder does not run.
//!
//! On a thread without a hook everything behaves as without the feature, except for a load of a
//! thread-local variable.

use std::cell::Cell;

/// Step that the thread is about to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Taking a lock, or trying to.
    Lock,
    /// Re-checking a condition that another thread has not established yet.
    Wait,
}

std::thread_local! {
    static HOOK: Cell<Option<fn(Step)>> = const { Cell::new(None) };
}

/// Sets the function that is called at every step of this thread; `None` removes it.
pub fn set(hook: Option<fn(Step)>) {
    HOOK.set(hook);
}

/// Calls the hook. Returns false if none is set.
#[inline]
pub(crate) fn at(step: Step) -> bool {
    let hook = HOOK.get();
    if let Some(hook) = hook {
        hook(step);
    }
    hook.is_some()
}

/// Calls the hook, or `core::hint::spin_loop` if none is set.
#[inline]
pub fn spin_loop() {
    if !at(Step::Wait) {
        core::hint::spin_loop();
    }
}

/// Pause of a lock between two attempts.
pub struct Relax;

impl spin::RelaxStrategy for Relax {
    #[inline]
    fn relax() {
        spin_loop();
    }
}
