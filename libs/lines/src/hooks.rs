//! Where a thread takes a lock or waits, told to a test (feature `hooks`): one that runs its cores
//! as coroutines of one thread switches there, and none of them spins for a lock whose holder does
//! not run.
//!
//! Without a hook, and on every other thread, all is as without the feature, but for a look at a
//! thread-local variable.

use std::cell::Cell;

/// What the thread is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// To take a lock, or try.
    Lock,
    /// To look again for what another thread has not done yet.
    Wait,
}

std::thread_local! {
    static HOOK: Cell<Option<fn(Step)>> = const { Cell::new(None) };
}

/// From here on `hook` is called at every step of this thread; nothing with `None`.
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

/// What a lock does between two looks.
pub struct Relax;

impl spin::RelaxStrategy for Relax {
    #[inline]
    fn relax() {
        spin_loop();
    }
}
