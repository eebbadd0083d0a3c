//! Groups with real threads and descriptors.

use std::{num::NonZeroU32, sync::atomic::Ordering, thread, time::Duration};

use crate::common::{Device, Ring, Style, wait_for};
use sidecore::{FleetBuilder, Group, IdlePolicy, SidecoreBuilder, ToChild};

fn rings(count: usize) -> Vec<std::sync::Arc<Ring>> {
    let style = |at: usize| [Style::EventIdx, Style::Flag][at % 2];
    (0..count).map(|at| Ring::new(style(at))).collect()
}

fn group(rings: &[std::sync::Arc<Ring>], has_probe: bool) -> Group<Device> {
    let children = rings.iter().map(|ring| Device::new(ring, has_probe));
    Group::new("group", children.collect())
}

/// All children register their kicks with the same token, and each receives its own.
#[test]
fn no_wake_up_of_a_child_is_lost_whenever_it_comes() {
    for (count, has_probe) in [(1, true), (2, true), (7, false), (64, true)] {
        let rings = rings(count);
        let core = SidecoreBuilder::new("sleepy")
            .idle(IdlePolicy::Poll)
            .force_sleep_every(NonZeroU32::new(1))
            .spawn(vec![group(&rings, has_probe)])
            .unwrap();
        let handle = core.handle(0);
        let mut kicks = 0u64;
        for round in 0..5_000u64 {
            let at = (round * 13 % count as u64) as usize;
            let ring = &rings[at];
            kicks += u64::from(ring.publish());
            (0..round * 37 % 2048).for_each(|_| std::hint::spin_loop());
            if round % 5 == 0 {
                let before = ring.messages.load(Ordering::Relaxed);
                handle
                    .send(ToChild {
                        child: at,
                        message: (),
                    })
                    .unwrap();
                wait_for("message", || {
                    ring.messages.load(Ordering::Acquire) == before + 1
                });
            }
            kicks += u64::from(ring.publish());
            let avail = ring.avail.load(Ordering::Relaxed);
            wait_for("kick", || ring.used.load(Ordering::Acquire) == avail);
        }
        let stats = core.stats().core;
        assert!(
            stats.sleeps > 1_000 && kicks > 500,
            "{kicks} kicks, {stats:?}"
        );
        assert_eq!(stats.rebuilds, 0, "{stats:?}");
    }
}

#[test]
fn a_group_moves_whole_while_its_children_work() {
    let rings = rings(7);
    let fleet = FleetBuilder::new("movers")
        .idle(IdlePolicy::Spin(20_000))
        .spawn()
        .unwrap();
    let second = fleet.add_core().unwrap();
    let handle = fleet.add(group(&rings, true)).unwrap();
    let first = fleet.core_of(&handle).unwrap();
    thread::scope(|scope| {
        let mover = scope.spawn(|| {
            for round in 0..60 {
                let to = [second, first][round % 2];
                fleet.move_to(&handle, to).unwrap();
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut round = 0;
        while !mover.is_finished() {
            for ring in &rings {
                ring.publish();
            }
            for (at, ring) in rings.iter().enumerate() {
                let avail = ring.avail.load(Ordering::Relaxed);
                wait_for("kick", || ring.used.load(Ordering::Acquire) == avail);
                if round % 7 == at {
                    let before = ring.messages.load(Ordering::Relaxed);
                    handle
                        .send(ToChild {
                            child: at,
                            message: (),
                        })
                        .unwrap();
                    wait_for("message", || {
                        ring.messages.load(Ordering::Acquire) == before + 1
                    });
                }
            }
            round += 1;
        }
        assert!(round > 60, "{round} rounds");
    });
    assert_eq!(fleet.counts().moves, 60);
    let groups = fleet.stop();
    assert_eq!(groups[0].len(), 7);
}

/// A child that is kicked without work is muted, and its neighbours are not.
#[test]
fn a_storm_of_kicks_mutes_the_child_that_it_is_for() {
    let rings = rings(2);
    let core = SidecoreBuilder::new("stormy")
        .idle(IdlePolicy::Sleep)
        .spawn(vec![group(&rings, true)])
        .unwrap();
    thread::scope(|scope| {
        let storm = scope.spawn(|| {
            while core.stats().core.mutes < 3 {
                let _ = std::io::Write::write(&mut &rings[0].kick, &1u64.to_ne_bytes());
            }
        });
        let mut round = 0u64;
        while !storm.is_finished() || round < 1_000 {
            rings[1].publish();
            let avail = rings[1].avail.load(Ordering::Relaxed);
            let start = std::time::Instant::now();
            wait_for("kick", || rings[1].used.load(Ordering::Acquire) == avail);
            // As long as a muted one waits at first.
            let is_late = start.elapsed() > Duration::from_millis(100);
            assert!(!is_late, "a neighbour waited {:?}", start.elapsed());
            round += 1;
        }
    });
    assert!(core.stats().core.mutes >= 3);
}
