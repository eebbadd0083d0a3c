//! A poller that gets work in the middle of another one's turn.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use crate::common::eventually;
use sidecore::{
    Activity, ArmError, IdlePolicy, PollContext, Poller, Probe, SidecoreBuilder, Wakes,
};

/// State that the pollers share, on one core: plain loads and stores in turns.
struct Shared {
    start: Instant,
    /// Time at which one of them was last called, or returned, in nanoseconds from `start`.
    seen: AtomicU64,
    /// The request from which on late ones are counted.
    calm_from: AtomicU64,
    /// Requests since then.
    calm: AtomicU64,
    /// Requests of the quiet poller: made by the busy one, in the middle of its turns.
    made: AtomicU64,
    done: AtomicU64,
    /// Pieces of work that the busy poller did while a request was under way, and turns that it
    /// began.
    late: AtomicU64,
}

/// Largest time between two readings of the clock, in nanoseconds, for which the thread has been on
/// its CPU. After a longer one, the poller whose turn it was is charged the time, and is in debt.
const OFF: u64 = 20_000;

/// Requests in the busy poller's turns that repay the largest charge by the clock, a millisecond,
/// at a microsecond each: more than twice as many.
const OWED: u64 = 2_500;

enum Role {
    /// Always has work, and asks after each piece whether others wait.
    Busy,
    Quiet,
}

struct Party {
    role: Role,
    shared: Arc<Shared>,
}

/// Fires while a request is under way; never for the busy poller.
#[derive(Clone)]
struct Made(Option<Arc<Shared>>);

impl Shared {
    fn is_waiting(&self) -> bool {
        self.made.load(Ordering::Relaxed) != self.done.load(Ordering::Relaxed)
    }

    /// Reads the clock.
    fn see(&self) {
        let now = self.start.elapsed().as_nanos() as u64;
        if now - self.seen.swap(now, Ordering::Relaxed) > OFF {
            let made = self.made.load(Ordering::Relaxed);
            self.calm_from.store(made + OWED, Ordering::Relaxed);
        }
    }

    /// Counts, if no poller is in debt.
    fn count(&self, counter: &AtomicU64, is_it: bool) {
        let is_calm = self.made.load(Ordering::Relaxed) > self.calm_from.load(Ordering::Relaxed);
        counter.fetch_add((is_calm && is_it).into(), Ordering::Relaxed);
    }
}

impl Probe for Made {
    fn fires(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| shared.is_waiting())
    }
}

/// Pieces in a turn of the busy poller, which its budget would allow.
const PIECES: u32 = 10;

impl Poller for Party {
    type Message = ();
    type Probe = Made;

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        let shared = &self.shared;
        shared.see();
        match self.role {
            Role::Quiet => {
                let made = shared.made.load(Ordering::Relaxed);
                if shared.done.swap(made, Ordering::Relaxed) == made {
                    return Activity::Idle;
                }
                turn.charge(200);
                turn.drained();
            }
            Role::Busy => {
                assert!(turn.has_others());
                shared.count(&shared.late, shared.is_waiting());
                for piece in 0..PIECES {
                    turn.charge(100);
                    if turn.others_wait() || turn.is_spent() {
                        break;
                    }
                    shared.count(&shared.late, piece > 0 && shared.is_waiting());
                    if piece == 3 {
                        shared.made.fetch_add(1, Ordering::Relaxed);
                        shared.count(&shared.calm, true);
                    }
                }
            }
        }
        shared.see();
        Activity::Busy
    }

    fn message(&mut self, (): (), _turn: &mut PollContext<'_>) {}

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        matches!(self.role, Role::Busy) || self.shared.is_waiting()
    }

    fn disarm(&mut self) {}

    fn probe(&self, slot: &mut Option<Made>) {
        let is_quiet = matches!(self.role, Role::Quiet);
        *slot = Some(Made(is_quiet.then(|| Arc::clone(&self.shared))));
    }
}

#[test]
fn a_poller_that_gets_work_in_anothers_turn_is_served_before_it_continues() {
    let zero = || AtomicU64::new(0);
    let shared = Arc::new(Shared {
        start: Instant::now(),
        seen: zero(),
        calm_from: zero(),
        calm: zero(),
        made: zero(),
        done: zero(),
        late: zero(),
    });
    let party = |role| Party {
        role,
        shared: Arc::clone(&shared),
    };
    let core = SidecoreBuilder::new("t")
        .idle(IdlePolicy::Poll)
        .spawn(vec![party(Role::Busy), party(Role::Quiet)])
        .unwrap();
    eventually("requests", || shared.calm.load(Ordering::Relaxed) > 10_000);
    core.stop();
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    // Short interruptions leave a small debt. If turns did not ask, six pieces would be late for
    // each request.
    let (calm, late) = (of(&shared.calm), of(&shared.late));
    assert!(
        10 * late < calm,
        "late: {late} of {calm}, {} in all",
        of(&shared.made)
    );
}
