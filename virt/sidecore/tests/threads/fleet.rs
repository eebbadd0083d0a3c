//! Several cores: pollers that move while they work, cores that are added and retired.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::common::{Device, Ring, Style, eventually, wait_for};
use seeded::Random;
use sidecore::{
    Activity, AddError, AlwaysPoll, ArmError, ControlConfig, DetachReason, Fleet, FleetBuilder,
    IdlePolicy, MoveError, PollContext, Poller, PollerState, SidecoreBuilder, Wakes,
};

const LIMIT: Duration = Duration::from_secs(10);

/// Poller that records its messages, and always has work while `works` is set.
#[derive(Default)]
struct RecordingPoller {
    got: Vec<(u64, u64)>,
    works: Arc<AtomicBool>,
    stays: Arc<AtomicBool>,
    /// Number of times it was asked whether it may leave.
    asked: Arc<AtomicU64>,
    is_refused: bool,
    attached: Arc<AtomicU64>,
}

impl Poller for RecordingPoller {
    type Message = (u64, u64);
    type Probe = AlwaysPoll;

    fn attached(&mut self, _wakes: &mut Wakes) -> std::io::Result<()> {
        if self.is_refused {
            return Err(std::io::Error::other("refused"));
        }
        self.attached.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn detaching(&mut self, _wakes: &mut Wakes) {
        self.attached.fetch_sub(1, Ordering::Relaxed);
    }

    fn may_detach(&mut self, _departure: DetachReason) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        !self.stays.load(Ordering::Relaxed)
    }

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        if !self.works.load(Ordering::Relaxed) {
            return Activity::Idle;
        }
        while !turn.is_spent() {
            (0..20).for_each(|_| std::hint::spin_loop());
            turn.charge(300);
        }
        Activity::Busy
    }

    fn message(&mut self, message: (u64, u64), _turn: &mut PollContext<'_>) {
        self.got.push(message);
    }

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        self.works.load(Ordering::Relaxed)
    }

    fn disarm(&mut self) {}
}

fn cores(count: usize) -> FleetBuilder {
    FleetBuilder::new("core")
        .idle(IdlePolicy::Sleep)
        .control(ControlConfig {
            min_cores: count,
            max_cores: count,
            ..ControlConfig::default()
        })
}

#[test]
fn messages_follow_a_moving_poller_in_order_and_none_is_lost() {
    const SENDERS: u64 = 3;
    let fleet: Fleet<RecordingPoller> = cores(3).spawn().unwrap();
    let handles: Vec<_> = (0..4)
        .map(|_| fleet.add(RecordingPoller::default()).unwrap())
        .collect();
    let ids: Vec<u64> = handles.iter().map(|handle| handle.id()).collect();
    let is_over = AtomicBool::new(false);
    let sent = thread::scope(|scope| {
        let senders: Vec<_> = (0..SENDERS)
            .map(|from| {
                let (handles, is_over) = (&handles, &is_over);
                scope.spawn(move || {
                    let mut n = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        for handle in handles {
                            handle.send((from, n)).unwrap();
                        }
                        n += 1;
                        if n % 16 == 0 {
                            thread::sleep(Duration::from_micros(20));
                        }
                    }
                    n
                })
            })
            .collect();
        let (mut random, mut moves) = (Random::new(99), 0);
        while moves < 500 {
            let handle = &handles[random.below(handles.len() as u64) as usize];
            let to = random.below(3) as usize;
            fleet.move_to(handle, to).unwrap();
            assert_eq!(fleet.core_of(handle), Some(to));
            moves += 1;
        }
        is_over.store(true, Ordering::Relaxed);
        senders
            .into_iter()
            .map(|sender| sender.join().unwrap())
            .collect::<Vec<u64>>()
    });
    assert!(fleet.counts().moves > 250, "{:?}", fleet.counts());
    for (handle, id) in handles.iter().zip(ids) {
        assert_eq!(handle.id(), id);
        let clerk = fleet.remove(handle, LIMIT).unwrap();
        for from in 0..SENDERS {
            let got: Vec<u64> = clerk
                .got
                .iter()
                .filter(|m| m.0 == from)
                .map(|m| m.1)
                .collect();
            assert!(
                got.iter().copied().eq(0..sent[from as usize]),
                "sender {from}"
            );
        }
        assert_eq!(clerk.attached.load(Ordering::Relaxed), 0);
        assert!(handle.send((0, 0)).is_err(), "it is gone");
    }
}

#[test]
fn kicks_reach_a_moving_device_that_sleeps_at_every_idle_sweep() {
    let fleet: Fleet<Device> = cores(2)
        .force_sleep_every(NonZeroU32::new(1))
        .spawn()
        .unwrap();
    let rings: Vec<_> = [Style::EventIdx, Style::Flag].map(Ring::new).into();
    let handles: Vec<_> = rings
        .iter()
        .map(|ring| fleet.add(Device::new(ring, true)).unwrap())
        .collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for ring in &rings {
            let is_over = &is_over;
            scope.spawn(move || {
                let mut round = 0u64;
                while !is_over.load(Ordering::Relaxed) {
                    ring.publish();
                    let avail = ring.avail.load(Ordering::Relaxed);
                    wait_for("kick", || ring.used.load(Ordering::Acquire) == avail);
                    (0..round * 37 % 2048).for_each(|_| std::hint::spin_loop());
                    round += 1;
                }
            });
        }
        let mut random = Random::new(7);
        for _ in 0..300 {
            let handle = &handles[random.below(2) as usize];
            fleet.move_to(handle, random.below(2) as usize).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert!(fleet.counts().moves > 100);
    fleet.stop();
}

#[test]
fn a_poller_that_may_not_detach_stays_and_is_polled_on() {
    let core = SidecoreBuilder::new("t")
        .idle(IdlePolicy::Sleep)
        .spawn(Vec::new())
        .unwrap();
    let clerk = RecordingPoller::default();
    let stays = Arc::clone(&clerk.stays);
    stays.store(true, Ordering::Relaxed);
    let handle = core.add(clerk).unwrap();
    assert!(core.remove(&handle, Duration::from_millis(20)).is_none());
    handle.send((0, 1)).unwrap();
    stays.store(false, Ordering::Relaxed);
    let clerk = core.remove(&handle, LIMIT).unwrap();
    assert_eq!(clerk.got, [(0, 1)]);
    assert!(core.remove(&handle, LIMIT).is_none(), "it is gone");
    assert_eq!(core.stop().len(), 0);
}

#[test]
fn all_pollers_are_asked_at_once_and_leave_as_they_may_detach() {
    let mut fleet: Fleet<RecordingPoller> = cores(2).spawn().unwrap();
    let clerks: Vec<_> = (0..5).map(|_| RecordingPoller::default()).collect();
    let stays: Vec<_> = clerks
        .iter()
        .map(|clerk| Arc::clone(&clerk.stays))
        .collect();
    stays[0].store(true, Ordering::Relaxed);
    let handles: Vec<_> = clerks
        .into_iter()
        .map(|clerk| fleet.add(clerk).unwrap())
        .collect();
    for (number, handle) in (0..).zip(&handles) {
        handle.send((number, 0)).unwrap();
    }
    let left = fleet.release();
    let mut numbers: Vec<_> = (0..4)
        .map(|_| left.recv_timeout(LIMIT).unwrap().got[0].0)
        .collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2, 3, 4], "one that stays holds up no other");
    assert!(handles[1].send((1, 1)).is_err(), "it has gone");
    handles[0].send((0, 1)).unwrap();
    stays[0].store(false, Ordering::Relaxed);
    // It is asked at each sweep, and the core must be woken for that.
    handles[0].wake();
    let last = left.recv_timeout(LIMIT);
    assert_eq!(last.unwrap().got, [(0, 0), (0, 1)]);
    assert!(
        left.recv_timeout(LIMIT).is_err(),
        "the channel ends with the last"
    );
    assert_eq!(fleet.stop().len(), 0);
}

#[test]
fn a_move_that_waits_blocks_no_other_call() {
    let fleet: Fleet<RecordingPoller> = cores(2).spawn().unwrap();
    let clerk = RecordingPoller::default();
    let (stays, asked) = (Arc::clone(&clerk.stays), Arc::clone(&clerk.asked));
    stays.store(true, Ordering::Relaxed);
    let handle = fleet.add(clerk).unwrap();
    assert_eq!(fleet.core_of(&handle), Some(0));
    thread::scope(|scope| {
        let mover = scope.spawn(|| fleet.move_to(&handle, 1));
        eventually("it is asked", || asked.load(Ordering::Relaxed) > 0);
        let other = fleet.add(RecordingPoller::default()).unwrap();
        assert_eq!(fleet.core_of(&other), Some(1));
        assert_eq!((fleet.counts().moves, fleet.stats().len()), (0, 2));
        fleet.add_core().unwrap();
        assert!(!mover.is_finished(), "they waited for the move");
        stays.store(false, Ordering::Relaxed);
        // It is asked at each sweep, and the core must be woken for that.
        handle.wake();
        mover.join().unwrap().unwrap();
    });
    assert_eq!(fleet.core_of(&handle), Some(1));
}

#[test]
fn an_end_gives_up_the_move_that_the_controller_waits_for() {
    let mut fleet: Fleet<RecordingPoller> = FleetBuilder::new("core")
        .control(ControlConfig {
            max_cores: 2,
            ..ControlConfig::default()
        })
        .control_period(Duration::from_millis(10))
        .spawn()
        .unwrap();
    let (works, stays) = (Arc::new(AtomicBool::new(true)), Arc::default());
    let asked: Arc<AtomicU64> = Arc::default();
    for _ in 0..2 {
        let clerk = RecordingPoller {
            works: Arc::clone(&works),
            stays: Arc::clone(&stays),
            asked: Arc::clone(&asked),
            ..RecordingPoller::default()
        };
        stays.store(true, Ordering::Relaxed);
        fleet.add(clerk).unwrap();
    }
    eventually("one is to move", || asked.load(Ordering::Relaxed) > 0);
    let since = Instant::now();
    let left = fleet.release();
    // Half of the time that the controller would wait.
    assert!(
        since.elapsed() < Duration::from_secs(1),
        "{:?}",
        since.elapsed()
    );
    assert_eq!(fleet.counts().moves, 0);
    stays.store(false, Ordering::Relaxed);
    for _ in 0..2 {
        left.recv_timeout(LIMIT).unwrap();
    }
}

#[test]
fn no_poller_is_added_to_a_core_that_is_being_emptied() {
    let fleet: Fleet<RecordingPoller> = cores(2).spawn().unwrap();
    let clerk = RecordingPoller::default();
    let (stays, asked) = (Arc::clone(&clerk.stays), Arc::clone(&clerk.asked));
    let _first = fleet.add(RecordingPoller::default()).unwrap();
    stays.store(true, Ordering::Relaxed);
    let handle = fleet.add(clerk).unwrap();
    assert_eq!(fleet.core_of(&handle), Some(1));
    thread::scope(|scope| {
        let retires = scope.spawn(|| fleet.retire_core(1));
        eventually("it is asked", || asked.load(Ordering::Relaxed) > 0);
        for _ in 0..3 {
            let newcomer = fleet.add(RecordingPoller::default()).unwrap();
            assert_eq!(fleet.core_of(&newcomer), Some(0));
        }
        stays.store(false, Ordering::Relaxed);
        handle.wake();
        retires.join().unwrap().unwrap();
    });
    assert_eq!(fleet.stats().len(), 1);
    assert_eq!(fleet.stop().len(), 5);
}

#[test]
fn a_poller_that_cannot_be_attached_is_refused() {
    let fleet: Fleet<RecordingPoller> = cores(1).spawn().unwrap();
    let refused = RecordingPoller {
        is_refused: true,
        ..RecordingPoller::default()
    };
    assert!(matches!(fleet.add(refused), Err(AddError::Attach(_))));
    assert_eq!(fleet.stats()[0].1.pollers.len(), 0);
}

#[test]
fn a_retired_core_leaves_its_pollers_to_the_others() {
    let fleet: Fleet<RecordingPoller> = cores(2).spawn().unwrap();
    let handles: Vec<_> = (0..6)
        .map(|_| fleet.add(RecordingPoller::default()).unwrap())
        .collect();
    assert_eq!(
        handles
            .iter()
            .filter(|h| fleet.core_of(h) == Some(0))
            .count(),
        3
    );
    fleet.retire_core(0).unwrap();
    assert!(handles.iter().all(|h| fleet.core_of(h) == Some(1)));
    assert!(
        matches!(fleet.retire_core(1), Err(MoveError::NoCore(1))),
        "the last"
    );
    assert!(matches!(
        fleet.move_to(&handles[0], 0),
        Err(MoveError::NoCore(0))
    ));
    assert_eq!(fleet.add_core().unwrap(), 0);
    fleet.move_to(&handles[0], 0).unwrap();
    for (n, handle) in handles.iter().enumerate() {
        handle.send((n as u64, 0)).unwrap();
    }
    let clerks = fleet.stop();
    assert_eq!(clerks.len(), 6);
    assert!(clerks.iter().all(|clerk| clerk.got.len() == 1));
}

#[test]
fn load_adds_a_core_and_quiet_retires_it() {
    let fleet: Fleet<RecordingPoller> = FleetBuilder::new("core")
        .idle(IdlePolicy::Sleep)
        .control(ControlConfig {
            max_cores: 2,
            ..ControlConfig::default()
        })
        .control_period(Duration::from_millis(10))
        .spawn()
        .unwrap();
    let works = Arc::new(AtomicBool::new(true));
    let handles: Vec<_> = (0..2)
        .map(|_| {
            let works = Arc::clone(&works);
            fleet
                .add(RecordingPoller {
                    works,
                    ..RecordingPoller::default()
                })
                .unwrap()
        })
        .collect();
    eventually("each has a core", || {
        fleet.core_of(&handles[0]) != fleet.core_of(&handles[1])
    });
    // A poller that has just been moved to a core is not busy before its first visit there.
    eventually("each is busy, alone", || {
        fleet.stats().iter().all(|(_, stats)| {
            stats.pollers.len() == 1 && stats.pollers[0].state == PollerState::Busy
        })
    });
    works.store(false, Ordering::Relaxed);
    eventually("one core is enough", || fleet.counts().cores_retired == 1);
    assert_eq!(fleet.core_of(&handles[0]), fleet.core_of(&handles[1]));
    assert_eq!(fleet.stats().len(), 1);
}
