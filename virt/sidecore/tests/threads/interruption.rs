//! A poller that gets work in the middle of another one's turn.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::common::eventually;
use sidecore::{Activity, ArmError, IdlePolicy, Poller, Probe, SidecoreBuilder, Turn, Wakes};

/// What the pollers share, on one core: plain loads and stores in turns.
#[derive(Default)]
struct Shared {
    /// Requests of the quiet one: made by the busy one, in the middle of its turns.
    made: AtomicU64,
    done: AtomicU64,
    /// Pieces of work that the busy one did while a request was under way.
    late: AtomicU64,
    /// Turns of the busy one that began while a request was under way.
    before: AtomicU64,
}

enum Role {
    /// Always has work, and asks after each piece.
    Busy,
    Quiet,
}

struct Party {
    role: Role,
    shared: Arc<Shared>,
}

/// Fires while a request is under way; never, for the busy one.
#[derive(Clone)]
struct Made(Option<Arc<Shared>>);

impl Shared {
    fn is_waiting(&self) -> bool {
        self.made.load(Ordering::Relaxed) != self.done.load(Ordering::Relaxed)
    }
}

impl Probe for Made {
    fn fires(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| shared.is_waiting())
    }
}

/// Pieces of a turn of the busy one, which its budget would allow.
const PIECES: u32 = 10;

impl Poller for Party {
    type Message = ();
    type Probe = Made;

    fn poll(&mut self, turn: &mut Turn<'_>) -> Activity {
        let shared = &self.shared;
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
                let is_waiting = shared.is_waiting();
                shared
                    .before
                    .fetch_add(is_waiting.into(), Ordering::Relaxed);
                for piece in 0..PIECES {
                    turn.charge(100);
                    if turn.others_wait() || turn.is_spent() {
                        break;
                    }
                    let is_late = piece > 0 && shared.is_waiting();
                    shared.late.fetch_add(is_late.into(), Ordering::Relaxed);
                    if piece == 3 {
                        shared.made.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        Activity::Busy
    }

    fn message(&mut self, (): (), _turn: &mut Turn<'_>) {}

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
fn who_gets_work_in_anothers_turn_is_served_before_that_goes_on() {
    let shared = Arc::new(Shared::default());
    let party = |role| Party {
        role,
        shared: Arc::clone(&shared),
    };
    let core = SidecoreBuilder::new("t")
        .idle(IdlePolicy::Poll)
        .spawn(vec![party(Role::Busy), party(Role::Quiet)])
        .unwrap();
    eventually("requests", || shared.done.load(Ordering::Relaxed) > 1_000);
    core.stop();
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    // The piece in which it is made, after which the turn asks.
    let (made, late, before) = (of(&shared.made), of(&shared.late), of(&shared.before));
    // Where the thread is off its CPU in a short turn, that is charged by the clock, and its poller owes.
    assert!(20 * (late + before) < made, "{late} and {before} of {made}");
}
