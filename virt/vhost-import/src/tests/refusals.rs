//! Back ends that lack something, and drivers and back ends that misbehave.

use super::*;
use std::os::fd::AsFd;
use vhost_user::wire::ProtocolFeatures;
use vio::ActivateError;

#[track_caller]
fn refused(plan: Plan, queues: u16, expected: &str) {
    let back_end = BackEnd::new(plan);
    let error = Guest::try_connect(config(back_end.path(), queues))
        .map(drop)
        .unwrap_err();
    let text = vhost_user::chain(&error);
    assert!(text.contains(expected), "{text}");
}

#[test]
fn missing_required_feature_is_named() {
    refused(
        Plan {
            features: 1 << 6,
            ..plan()
        },
        1,
        "VERSION_1",
    );
    let without_config = Plan {
        protocol: ProtocolFeatures::REPLY_ACK,
        ..plan()
    };
    refused(without_config, 1, "how large its disk is");
    refused(
        Plan {
            queues: 2,
            ..plan()
        },
        4,
        "2 queues, 4 are asked for",
    );
    let small = Plan {
        max_ring_size: 128,
        ..plan()
    };
    refused(small, 1, "rings of 256 entries");
    refused(
        Plan {
            sectors: 0,
            ..plan()
        },
        1,
        "a disk of no sectors",
    );
}

#[test]
fn connecting_without_a_listener_fails_and_names_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    let error = Guest::try_connect(config(&dir.path().join("absent"), 1));
    let text = vhost_user::chain(&error.map(drop).unwrap_err());
    assert!(text.contains("absent"), "{text}");
}

#[test]
fn a_mute_back_end_costs_no_more_than_the_limit() {
    let back_end = BackEnd::new(Plan {
        is_mute: true,
        ..plan()
    });
    let config = ImportConfig {
        reply_limit: Duration::from_millis(50),
        ..config(back_end.path(), 1)
    };
    let text = vhost_user::chain(&Guest::try_connect(config).map(drop).unwrap_err());
    assert!(text.contains("no reply within 50ms"), "{text}");
}

#[test]
fn rings_outside_memory_are_the_drivers_error() {
    let back_end = BackEnd::new(plan());
    let mut guest = Guest::connect(&back_end, 1);
    let features = guest.import.features();
    let good = ring(0);
    let mut start = |config: QueueConfig| guest.import.start(features, &[config]);
    let memory = Err(ActivateError::QueueMemory { index: 0 });
    for at in [RAM, RAM - 0x100, HIGH - 16, u64::MAX - 15] {
        let desc = Iova::new(at & !15);
        assert_eq!(start(QueueConfig { desc, ..good }), memory);
    }
    let used = Iova::new(RAM - 8);
    assert_eq!(start(QueueConfig { used, ..good }), memory);
    let avail = Iova::new(0x1001);
    let misaligned = Err(ActivateError::QueueAddress { index: 0 });
    assert_eq!(start(QueueConfig { avail, ..good }), misaligned);
    for size in [0, 3, 512] {
        let refused = start(QueueConfig { size, ..good });
        assert!(matches!(refused, Err(ActivateError::QueueSize { .. })));
    }
    let absent = Err(ActivateError::QueueIndex { index: 5 });
    assert_eq!(start(QueueConfig { index: 5, ..good }), absent);
    assert!(matches!(
        guest.import.start(features | 1 << 33, &[good]),
        Err(ActivateError::Features { .. })
    ));
    assert!(back_end.seen().started.is_empty());
}

#[test]
fn a_back_end_that_refuses_rings_leaves_a_device_that_needs_a_reset() {
    let back_end = BackEnd::new(Plan {
        refuses_rings: true,
        ..plan()
    });
    let mut guest = Guest::connect(&back_end, 1);
    guest.start();
    eventually("news", || guest.import.has_events());
    assert!(guest.import.take_events(), "the driver is told");
    assert!(!guest.import.take_events(), "once");
    assert!(guest.import.needs_reset());
    guest.stop();
    guest.import.reset();
    assert!(!guest.import.needs_reset());
}

#[test]
fn a_ring_that_the_back_end_reports_broken_needs_a_reset() {
    let back_end = BackEnd::new(plan());
    let mut guest = Guest::connect(&back_end, 1);
    guest.start();
    eventually("started", || back_end.seen().is_serving(0));
    let err = back_end.seen().started[0].err.clone().unwrap();
    sidecore::signal_eventfd(err.as_fd()).unwrap();
    eventually("news", || guest.import.has_events());
    assert!(guest.import.take_events());
    assert!(guest.import.needs_reset());
    guest.stop();
    guest.import.reset();
    guest.start();
    eventually("started again", || back_end.seen().started.len() == 2);
    assert!(!guest.import.needs_reset());
}

#[test]
fn a_stop_waits_for_a_back_end_that_is_slow_and_ends_with_one_that_dies() {
    let back_end = BackEnd::new(Plan {
        ignores_stop: true,
        ..plan()
    });
    let config = ImportConfig {
        reply_limit: Duration::from_millis(50),
        ..config(back_end.path(), 1)
    };
    let mut guest = Guest::try_connect(config).unwrap();
    guest.start();
    assert!(!guest.import.stop());
    eventually("asked to stop", || !back_end.seen().stopped.is_empty());
    // Longer than any other reply may take: its requests may still write the guest's memory.
    std::thread::sleep(Duration::from_millis(300));
    assert!(!guest.import.stop());
    assert_eq!(back_end.seen().connections, 1);
    let back_end = back_end.restart(plan());
    guest.stop();
    assert!(!guest.import.needs_reset(), "nobody gave up");
    eventually("connected again", || back_end.seen().connections == 1);
}

#[test]
fn giving_up_makes_the_stop_done_at_once() {
    let back_end = BackEnd::new(Plan {
        ignores_stop: true,
        ..plan()
    });
    let mut guest = Guest::connect(&back_end, 1);
    guest.start();
    assert!(!guest.import.stop());
    eventually("asked to stop", || !back_end.seen().stopped.is_empty());
    assert!(!guest.import.stop());
    guest.import.abandon();
    assert!(guest.import.stop());
    assert!(guest.import.needs_reset());
    assert!(guest.import.take_events());
    guest.import.reset();
    assert!(!guest.import.needs_reset());
    eventually("connected again", || back_end.seen().connections == 2);
}

/// An eventfd that is full and has lost O_NONBLOCK blocks its writer; one that is empty, its
/// reader.
#[test]
fn descriptors_that_the_back_end_makes_blocking_block_no_thread() {
    use rustix::fs::{OFlags, fcntl_setfl};
    let back_end = BackEnd::new(plan());
    let mut guest = Guest::connect(&back_end, 1);
    guest.start();
    eventually("started", || back_end.seen().is_serving(0));
    let ring = back_end.seen().started[0].clone();
    let vhost_user::backend::Kick::Fd(kick) = ring.kick else {
        panic!("a descriptor")
    };
    let (call, err) = (ring.call.unwrap(), ring.err.unwrap());
    for fd in [&kick, &call, &err] {
        fcntl_setfl(fd, OFlags::empty()).unwrap();
    }
    if sidecore::never_waits() {
        for fd in [&kick, &call] {
            rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        }
    } else {
        eprintln!("no AIO here: without full ones");
    }
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        guest.import.kick(0);
        guest.stop();
        guest.import.reset();
        guest.start();
        let _ = done.send(guest);
    });
    let mut guest = wait
        .recv_timeout(PATIENCE)
        .expect("the owner does not wait");
    eventually("started again", || back_end.seen().started.len() == 2);
    // The connection's thread signals kicks and calls.
    let back_end = back_end.restart(plan());
    eventually("served again", || back_end.seen().is_serving(0));
    guest.stop();
    assert_eq!(back_end.seen().stopped, [0]);
}

#[test]
fn a_descriptor_that_is_slow_to_close_does_not_hold_the_end() {
    let back_end = BackEnd::new(plan());
    let guest = Guest::connect(&back_end, 1);
    let lingers = Plan {
        lingers: true,
        ..plan()
    };
    let back_end = back_end.restart(lingers);
    eventually("connected again", || back_end.seen().connections == 1);
    // The reply is on its way, or closing what came with it has begun.
    std::thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    drop(guest);
    assert!(begin.elapsed() < Duration::from_millis(2500));
}

#[test]
fn a_device_can_be_dropped_at_any_time() {
    for is_mute in [false, true] {
        let back_end = BackEnd::new(plan());
        let mut guest = Guest::connect(&back_end, 1);
        guest.start();
        let back_end = back_end.restart(Plan { is_mute, ..plan() });
        eventually("connected again", || back_end.seen().connections == 1);
        let begin = Instant::now();
        drop(guest);
        // Not the five seconds that a reply may take.
        assert!(begin.elapsed() < Duration::from_secs(3));
    }
}
