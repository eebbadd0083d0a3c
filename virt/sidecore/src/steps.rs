//! The steps of falling asleep that a wake-up, or the watch over a write, depends on. The runtime
//! takes them all; loom's model takes them away one at a time, to see that it notices.

/// A step of the protocol in `gate.rs` and `park.rs`, or of that in `signal/handshake.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The sender's fence between publishing and reading the state.
    SenderFence,
    /// The sidecore's fence between arming and the last look.
    Fence,
    /// The last look comes after arming, not before it.
    LookAfterArming,
    /// The last look includes the mailbox.
    LookAtMailbox,
    /// The last look includes the last poller.
    LookAtLastPoller,
    /// The last poller is armed (again), if it is not.
    ArmLastPoller,
    /// What was armed when another could not be is looked at by the next park.
    KeepUnlooked,
    /// The fence that membarrier(2) makes between a writer's store and its load.
    WritersFence,
}

/// Whether this step is taken.
#[cfg(not(all(test, loom)))]
#[inline(always)]
pub(crate) const fn takes(_: Step) -> bool {
    true
}

#[cfg(all(test, loom))]
pub(crate) use mutants::{takes, without};

#[cfg(all(test, loom))]
mod mutants {
    use std::cell::Cell;

    use super::Step;

    // Loom runs all threads of a model on the thread that explores it.
    std::thread_local! {
        static LEFT_OUT: Cell<Option<Step>> = const { Cell::new(None) };
    }

    pub(crate) fn takes(step: Step) -> bool {
        LEFT_OUT.get() != Some(step)
    }

    /// Runs `model` on a protocol without `step`.
    pub(crate) fn without(step: Step, model: impl FnOnce()) {
        /// Also after a panic, which is what is expected.
        struct Restored;
        impl Drop for Restored {
            fn drop(&mut self) {
                LEFT_OUT.set(None);
            }
        }
        LEFT_OUT.set(Some(step));
        let _restored = Restored;
        model();
    }
}
