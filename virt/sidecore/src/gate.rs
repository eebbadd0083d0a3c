//! The state word between a sidecore and the threads that send to it.
//!
//! | state | the sidecore | a sender that published a message |
//! |---|---|---|
//! | `AWAKE` | polls; will re-check `sent` | does nothing: no system call |
//! | `ARMING` | is arming its pollers, will re-check after its fence | makes it `AWAKE`, which calls the sleep off |
//! | `ASLEEP` | is in, or on its way into, epoll_wait | makes it `AWAKE`; the sender whose swap succeeds notifies it, once |
//!
//! No wake-up is lost, by the store-buffering argument, twice the same:
//! - sender: `sent += 1`, **fence**, read `state`;
//! - sidecore: `state = ARMING`, arm everything, **fence**, read `sent` (and every poller's rings).
//!
//! Both fences are SeqCst, so one comes first. If the sender's does, the sidecore's read sees the
//! message. If the sidecore's does, the sender's read sees `ARMING` (or what followed it), and its
//! swap either comes before the sidecore's `ARMING → ASLEEP`, which then fails, or after it, and
//! finds `ASLEEP`. Without either fence both may read the old value, and the message waits until
//! something else wakes the sidecore. `park/tests/model.rs` checks this with loom;
//! `tests/mutants/sidecore` takes each step away.

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, CachePadded, Ordering, fence};

const AWAKE: u32 = 0;
const ARMING: u32 = 1;
const ASLEEP: u32 = 2;

/// Wakes a sidecore that is in, or about to enter, its wait. A notification before the wait begins
/// must make it end at once.
pub(crate) trait Notifier {
    fn notify(&self);
}

/// Written by: the sidecore (`state`), senders (`state`, `sent`), the owner (`stop`). Two lines,
/// so that a sidecore that polls `sent` does not see the traffic on `state`.
#[derive(Debug)]
pub(crate) struct Gate<B> {
    state: CachePadded<AtomicU32>,
    send_state: CachePadded<SendState>,
    notifier: B,
}

#[derive(Debug)]
struct SendState {
    /// Messages put into the channel so far. Counted after the message is in.
    sent: AtomicU64,
    stop: AtomicBool,
}

impl<B: Notifier> Gate<B> {
    pub(crate) fn new(notifier: B) -> Self {
        Gate {
            state: CachePadded(AtomicU32::new(AWAKE)),
            send_state: CachePadded(SendState {
                sent: AtomicU64::new(0),
                stop: AtomicBool::new(false),
            }),
            notifier,
        }
    }

    // -- senders -------------------------------------------------------------------------------

    /// Counts a message that is in the channel, and wakes the sidecore if it sleeps.
    pub(crate) fn published(&self) {
        // Release: pairs with the Acquire in `sent`; a reader that sees the count finds the
        // message.
        self.send_state.0.sent.fetch_add(1, Ordering::Release);
        self.wake();
    }

    /// Makes the sidecore poll all its sources, including everything that the caller has published
    /// before.
    pub(crate) fn wake(&self) {
        // Pairs with the fence in `park`: see the head of this module.
        fence(Ordering::SeqCst);
        // Relaxed: the fence above orders it after what was published.
        if self.state.0.load(Ordering::Relaxed) != AWAKE {
            self.wake_sleeper();
        }
    }

    #[cold]
    fn wake_sleeper(&self) {
        // A swap: of several senders exactly one sees ASLEEP and pays for the system call.
        // Release: pairs with the Acquire of the sidecore's `awake` and of its failed
        // `try_sleep`, so that the sweep that follows sees what was published.
        if self.state.0.swap(AWAKE, Ordering::AcqRel) == ASLEEP {
            self.notifier.notify();
        }
    }

    /// Asks the sidecore to end, and wakes it.
    pub(crate) fn stop(&self) {
        self.send_state.0.stop.store(true, Ordering::Release);
        self.wake();
    }

    // -- the sidecore --------------------------------------------------------------------------

    /// Messages sent so far.
    pub(crate) fn sent(&self) -> u64 {
        // Acquire: pairs with the Release in `published`.
        self.send_state.0.sent.load(Ordering::Acquire)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        // Acquire: what the owner sent before it asked to stop is visible.
        self.send_state.0.stop.load(Ordering::Acquire)
    }

    /// Enters ARMING, before the pollers are armed; the caller's fence comes after that.
    pub(crate) fn begin_arming(&self) {
        // Relaxed: ordered before the re-check of all sources by the fence in `park`.
        self.state.0.store(ARMING, Ordering::Relaxed);
    }

    /// Enters the sleep, after the re-check found nothing. Returns false when a sender has called
    /// the sleep off.
    pub(crate) fn try_sleep(&self) -> bool {
        self.state
            .0
            .compare_exchange(ARMING, ASLEEP, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Returns to polling, from any state. True when a sender had it woken: the notifier has been
    /// used or will be.
    pub(crate) fn awake(&self) -> bool {
        self.state.0.swap(AWAKE, Ordering::AcqRel) == AWAKE
    }

    /// Returns a line that a sender writes, which a pausing CPU may watch.
    pub(crate) fn watched_line(&self) -> &impl Sized {
        &self.send_state
    }

    pub(crate) fn notifier(&self) -> &B {
        &self.notifier
    }
}
