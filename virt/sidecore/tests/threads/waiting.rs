//! A core that polls for work of kernel threads (buffered writes are done by workers of the ring)
//! yields its CPU to them now and then: they may have been placed on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore::{
    Activity, AlwaysPoll, ArmError, IdlePolicy, PollContext, Poller, SidecoreBuilder, Wakes,
};

use crate::common::eventually;

/// A disk, and whether requests are in flight.
struct Disk(Arc<AtomicBool>);

impl Poller for Disk {
    type Message = ();
    type Probe = AlwaysPoll;

    fn poll(&mut self, _turn: &mut PollContext<'_>) -> Activity {
        match self.0.load(Ordering::Relaxed) {
            true => Activity::Waiting,
            false => Activity::Idle,
        }
    }

    fn message(&mut self, (): (), _turn: &mut PollContext<'_>) {}

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}
}

#[test]
fn a_core_that_polls_for_work_under_way_elsewhere_gives_way_now_and_then() {
    let in_flight = Arc::new(AtomicBool::new(false));
    let core = SidecoreBuilder::new("t")
        .idle(IdlePolicy::Poll)
        .spawn(vec![Disk(Arc::clone(&in_flight))])
        .unwrap();
    let stats = || core.stats().core;
    eventually("polls", || stats().spins > 1000);
    assert_eq!(stats().yields, 0, "nothing is under way");
    in_flight.store(true, Ordering::Relaxed);
    eventually("yields", || stats().yields > 10);
}
