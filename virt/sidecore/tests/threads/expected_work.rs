//! A poller that knows that work is about to come keeps its sidecore awake by a deadline that has
//! passed, whatever the policy: for instance one whose write-protected page has just been opened to
//! a waiting store.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecore::{
    Activity, AlwaysPoll, ArmError, IdlePolicy, Nanos, PollContext, Poller, SidecoreBuilder, Wakes,
};

struct Expectant(Arc<AtomicBool>);

impl Poller for Expectant {
    type Message = ();
    type Probe = AlwaysPoll;

    fn poll(&mut self, _turn: &mut PollContext<'_>) -> Activity {
        Activity::Idle
    }

    fn message(&mut self, (): (), _turn: &mut PollContext<'_>) {}

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn deadline(&self) -> Option<Nanos> {
        self.0.load(Ordering::Relaxed).then_some(Nanos(1))
    }
}

fn awake_until_it_came(policy: IdlePolicy, forced: Option<NonZeroU32>) {
    let expects = Arc::new(AtomicBool::new(true));
    let core = SidecoreBuilder::new("t")
        .idle(policy)
        .force_sleep_every(forced)
        .spawn(vec![Expectant(Arc::clone(&expects))])
        .expect("a sidecore starts");
    let limit = Instant::now() + Duration::from_secs(10);
    while core.stats().core.sweeps_idle < 1000 {
        assert!(Instant::now() < limit, "{:?}", core.stats());
        std::thread::yield_now();
    }
    let stats = core.stats().core;
    assert_eq!((stats.sleeps, stats.arming_ns), (0, 0), "{stats:?}");
    expects.store(false, Ordering::Relaxed);
    while !core.watch().is_asleep() {
        assert!(Instant::now() < limit, "{:?}", core.stats());
        std::thread::yield_now();
    }
}

#[test]
fn the_sleep_policy_waits_for_work_that_is_due() {
    awake_until_it_came(IdlePolicy::Sleep, None);
}

#[test]
fn a_forced_sleep_waits_for_work_that_is_due() {
    awake_until_it_came(IdlePolicy::Poll, NonZeroU32::new(1));
}
