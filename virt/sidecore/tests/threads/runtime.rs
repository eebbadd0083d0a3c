//! The runtime through its public API, with real threads and descriptors.

use std::{
    num::NonZeroU32,
    os::fd::RawFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use crate::common::eventually;
use sidecore::{
    Activity, AlwaysPoll, ArmError, CallError, IdlePolicy, Monitor, Nanos, PollContext, Poller,
    Reply, Sidecore, SidecoreBuilder, SpawnError, StallCause, StallReport, Wakes,
};

enum Ask {
    Echo(u64, Reply<u64>),
    Drop(Reply<u64>),
    Keep(Reply<u64>),
    Note(u64),
    Block(mpsc::Receiver<()>),
    Panic,
    DeadlineIn(u64),
}

/// Poller that carries out the commands in its messages and records what it saw.
#[derive(Default)]
struct RecordingPoller {
    notes: Vec<u64>,
    kept: Vec<Reply<u64>>,
    deadline: Option<Nanos>,
    met: Arc<AtomicUsize>,
    refuses_arm: Arc<AtomicBool>,
    armed: Arc<AtomicUsize>,
    wake_fds: Vec<RawFd>,
    cost: u64,
}

impl Poller for RecordingPoller {
    type Message = Ask;
    type Probe = AlwaysPoll;

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        match self.deadline {
            Some(at) if turn.now() >= at => {
                self.deadline = None;
                self.met.fetch_add(1, Ordering::Relaxed);
                Activity::Busy
            }
            _ => Activity::Idle,
        }
    }

    fn message(&mut self, message: Ask, _turn: &mut PollContext<'_>) {
        match message {
            Ask::Echo(x, reply) => reply.send(x),
            Ask::Drop(reply) => drop(reply),
            Ask::Keep(reply) => self.kept.push(reply),
            Ask::Note(x) => self.notes.push(x),
            Ask::Block(until) => until.recv().unwrap_or(()),
            Ask::Panic => panic!("told to (expected in this test's output)"),
            Ask::DeadlineIn(ns) => self.deadline = Some(Nanos::now().after(ns)),
        }
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        for &fd in &self.wake_fds {
            wakes.add(fd, 0).map_err(ArmError::new)?;
        }
        if self.refuses_arm.load(Ordering::Relaxed) {
            return Err(ArmError::new("page cannot be protected"));
        }
        self.armed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {
        self.armed.fetch_sub(1, Ordering::Relaxed);
    }

    fn deadline(&self) -> Option<Nanos> {
        self.deadline
    }

    fn arm_cost(&self) -> u64 {
        self.cost
    }

    fn name(&self) -> &str {
        "scribe"
    }
}

fn sleeper(pollers: Vec<RecordingPoller>) -> Sidecore<RecordingPoller> {
    SidecoreBuilder::new("sleeper")
        .idle(IdlePolicy::Sleep)
        .spawn(pollers)
        .expect("eventfds and threads are to be had")
}

#[test]
fn calls_are_answered_awake_and_asleep() {
    for policy in [
        IdlePolicy::Poll,
        IdlePolicy::adaptive(),
        IdlePolicy::Sleep,
        IdlePolicy::Spin(20_000),
        IdlePolicy::priced(1.0),
    ] {
        let core = SidecoreBuilder::new("t")
            .idle(policy)
            .spawn(vec![RecordingPoller::default()])
            .unwrap();
        let handle = core.handle(0);
        for x in 0..500 {
            assert_eq!(handle.call(|reply| Ask::Echo(x, reply)), Ok(x));
        }
        assert_eq!(core.stats().core.messages, 500);
        core.stop();
    }
}

#[test]
fn messages_of_one_sender_arrive_in_order_at_the_right_poller() {
    let core = sleeper(vec![RecordingPoller::default(), RecordingPoller::default()]);
    thread::scope(|scope| {
        for (poller, from) in [(0, 0), (0, 1_000_000), (1, 2_000_000)] {
            let handle = core.handle(poller);
            scope.spawn(move || {
                (from..from + 10_000).for_each(|x| handle.send(Ask::Note(x)).ok().unwrap());
            });
        }
    });
    let scribes = core.stop();
    assert_eq!(scribes[0].notes.len(), 20_000);
    let first: Vec<u64> = scribes[0]
        .notes
        .iter()
        .copied()
        .filter(|&x| x < 1_000_000)
        .collect();
    assert_eq!(first, (0..10_000).collect::<Vec<_>>());
    assert_eq!(scribes[1].notes, (2_000_000..2_010_000).collect::<Vec<_>>());
}

#[test]
fn a_dropped_question_fails_its_call() {
    let core = sleeper(vec![RecordingPoller::default()]);
    assert_eq!(core.handle(0).call(Ask::Drop), Err(CallError::Dropped));
}

#[test]
fn a_call_to_an_ended_sidecore_fails() {
    let core = sleeper(vec![RecordingPoller::default()]);
    let handle = core.handle(0);
    core.stop();
    assert_eq!(handle.call(Ask::Keep), Err(CallError::Ended));
    assert!(handle.send(Ask::Note(1)).is_err());
}

#[test]
fn a_parked_caller_learns_that_the_poller_is_gone() {
    let core = sleeper(vec![RecordingPoller::default()]);
    let handle = core.handle(0);
    let caller = thread::spawn(move || handle.call(Ask::Keep));
    eventually("the question arrives", || core.stats().core.messages == 1);
    // Long enough for the caller to leave its spin.
    thread::sleep(Duration::from_millis(5));
    drop(core.stop());
    assert_eq!(caller.join().unwrap(), Err(CallError::Dropped));
}

#[test]
fn callers_racing_with_a_stop_never_hang() {
    for _ in 0..200 {
        let core = sleeper(vec![RecordingPoller::default()]);
        let callers: Vec<_> = (0..3)
            .map(|_| {
                let handle = core.handle(0);
                thread::spawn(move || while handle.call(|r| Ask::Echo(1, r)).is_ok() {})
            })
            .collect();
        thread::yield_now();
        core.stop();
        callers
            .into_iter()
            .for_each(|caller| caller.join().unwrap());
    }
}

#[test]
fn a_sleeping_sidecore_uses_no_cpu_and_wakes_by_one_message() {
    let core = sleeper(vec![RecordingPoller::default()]);
    eventually("asleep", || core.watch().is_asleep());
    let (before, sweeps) = (
        core.thread_cpu_time().unwrap(),
        core.stats().core.sweeps_idle,
    );
    thread::sleep(Duration::from_millis(300));
    let used = core.thread_cpu_time().unwrap() - before;
    assert!(used < Duration::from_millis(3), "{used:?} of 300 ms");
    assert_eq!(core.stats().core.sweeps_idle, sweeps);
    core.handle(0).send(Ask::Note(7)).ok().unwrap();
    eventually("woken and asleep again", || {
        core.stats().core.wakes_mailbox == 1
    });
    assert_eq!(core.stop()[0].notes, [7]);
}

#[test]
fn an_adaptive_sidecore_goes_to_sleep() {
    let core = SidecoreBuilder::new("t")
        .spawn(vec![RecordingPoller::default()])
        .unwrap();
    eventually("asleep", || core.watch().is_asleep());
    let stats = core.stats();
    assert!(stats.core.spins > 0 && stats.core.sleeps > 0, "{stats:?}");
}

#[test]
fn a_deadline_ends_the_sleep() {
    let scribe = RecordingPoller::default();
    let met = Arc::clone(&scribe.met);
    let core = sleeper(vec![scribe]);
    core.handle(0)
        .send(Ask::DeadlineIn(20_000_000))
        .ok()
        .unwrap();
    eventually("met", || met.load(Ordering::Relaxed) == 1);
    assert!(core.stats().core.wakes_deadline >= 1, "{:?}", core.stats());
}

#[test]
fn poller_that_cannot_be_armed_keeps_the_sidecore_awake_and_others_disarmed() {
    let (first, second) = (RecordingPoller::default(), RecordingPoller::default());
    let (armed, refuses) = (Arc::clone(&first.armed), Arc::clone(&second.refuses_arm));
    refuses.store(true, Ordering::Relaxed);
    let core = sleeper(vec![first, second]);
    eventually("tried twice", || core.stats().core.arm_failures >= 2);
    let stats = core.stats();
    assert_eq!(stats.core.sleeps, 0);
    assert!(stats.core.pauses > 0);
    let reason = stats.last_arm_error.unwrap();
    assert!(reason.ends_with("page cannot be protected"), "{reason}");
    eventually("the first is disarmed", || {
        armed.load(Ordering::Relaxed) == 0
    });
    refuses.store(false, Ordering::Relaxed);
    eventually("asleep", || core.watch().is_asleep());
    assert_eq!(armed.load(Ordering::Relaxed), 1);
    core.stop();
    assert_eq!(armed.load(Ordering::Relaxed), 0);
}

#[test]
fn a_wake_descriptor_that_is_not_open_keeps_the_sidecore_awake() {
    for fd in [-1, 1 << 20] {
        let core = sleeper(vec![RecordingPoller {
            wake_fds: vec![fd],
            ..RecordingPoller::default()
        }]);
        eventually("noticed", || core.stats().core.arm_failures >= 1);
        let reason = core.stats().last_arm_error.unwrap();
        assert!(reason.contains("is not open"), "{reason}");
    }
}

#[test]
fn polling_can_be_forced_to_sleep() {
    let core = SidecoreBuilder::new("t")
        .idle(IdlePolicy::Poll)
        .force_sleep_every(NonZeroU32::new(3))
        .spawn(vec![RecordingPoller::default()])
        .unwrap();
    for x in 0..100 {
        assert_eq!(core.handle(0).call(|reply| Ask::Echo(x, reply)), Ok(x));
        eventually("asleep", || core.watch().is_asleep());
    }
    let stats = core.stats().core;
    assert!(
        stats.sleeps_forced >= 100 && stats.sleeps == stats.sleeps_forced,
        "{stats:?}"
    );
}

#[test]
fn a_sidecore_that_shares_its_cpu_yields() {
    let core = SidecoreBuilder::new("t")
        .idle(IdlePolicy::Poll)
        .shares_cpu(true)
        .cpu(Some(0))
        .spawn(vec![RecordingPoller::default()])
        .unwrap();
    eventually("yields", || core.stats().core.yields > 10);
    assert_eq!(core.stats().core.spins, 0);
}

#[test]
fn a_cpu_that_does_not_exist_is_refused() {
    for cpu in [1023, 1 << 40] {
        let refused = SidecoreBuilder::new("t")
            .cpu(Some(cpu))
            .spawn(vec![RecordingPoller::default()]);
        assert!(
            matches!(refused, Err(SpawnError::Pin { cpu: c, .. }) if c == cpu),
            "{cpu}"
        );
    }
}

#[test]
fn a_pollers_panic_reaches_the_owner_the_callers_and_the_monitor() {
    let (tx, reports) = mpsc::channel();
    let monitor = Monitor::spawn(Monitor::LIMIT, move |stuck: &StallReport| {
        tx.send(stuck.clone()).unwrap();
    })
    .unwrap();
    let core = sleeper(vec![RecordingPoller::default()]);
    monitor.watch(core.watch());
    let handle = core.handle(0);
    let asker = handle.clone();
    let caller = thread::spawn(move || asker.call(Ask::Keep));
    eventually("the question arrives", || core.stats().core.messages == 1);
    handle.send(Ask::Panic).ok().unwrap();
    assert_eq!(caller.join().unwrap(), Err(CallError::Dropped));
    let report = reports.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(report.cause, StallCause::Panicked);
    assert_eq!(report.in_poller.as_deref(), Some("scribe"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| core.stop())).is_err());
}

#[test]
fn the_monitor_reports_a_stuck_poller_by_name_and_not_a_sleeping_one() {
    let (tx, reports) = mpsc::channel();
    let monitor = Monitor::spawn(Duration::from_millis(160), move |stuck: &StallReport| {
        tx.send(stuck.clone()).unwrap();
    })
    .unwrap();
    let asleep = sleeper(vec![RecordingPoller::default()]);
    let stuck = SidecoreBuilder::new("stuck")
        .spawn(vec![RecordingPoller::default()])
        .unwrap();
    monitor.watch(asleep.watch());
    monitor.watch(stuck.watch());
    let (release, until) = mpsc::channel();
    stuck.handle(0).send(Ask::Block(until)).ok().unwrap();
    let report = reports.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(
        (report.name.as_str(), report.cause),
        ("stuck", StallCause::Silent)
    );
    assert_eq!(report.in_poller.as_deref(), Some("scribe"));
    assert_eq!(report.stats.core.messages, 1);
    // Once per stall, and nothing about the one asleep.
    assert!(reports.recv_timeout(Duration::from_millis(400)).is_err());
    release.send(()).unwrap();
    stuck.stop();
    assert!(reports.try_recv().is_err());
}
