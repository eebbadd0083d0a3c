//! Hook at the points where a thread takes a lock or waits (feature `hooks`). A test that runs its
//! cores as coroutines of one thread switches there, and none of them spins for a lock whose holder
//! does not run.
//!
//! Without a hook, and on every other thread, all is as without the feature, but for a load of a
//! thread-local variable.

use std::cell::Cell;

/// Next step of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Take a lock, or try to.
    Lock,
    /// Re-check something that another thread has not done yet.
    Wait,
}

std::thread_local! {
    static HOOK: Cell<Option<fn(Step)>> = const { Cell::new(None) };
}

/// Sets the function that is called at every step of this thread; `None` removes it.
pub fn set(hook: Option<fn(Step)>) {
    HOOK.set(hook);
}

/// Calls the hook. False where there is none.
#[inline]
pub(crate) fn at(step: Step) -> bool {
    let hook = HOOK.get();
    if let Some(hook) = hook {
        hook(step);
    }
    hook.is_some()
}

/// As `core::hint::spin_loop`.
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
