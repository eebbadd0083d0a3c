//! The client against a server that is simple and obviously correct, and against one that is not.

#![expect(
    clippy::unwrap_used,
    reason = "a test's helpers: their panic is how it fails"
)]

mod naive;

use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;
use vhost_client::loopback::Loopback;
use vhost_net::client::{ClientError, feature as net};
use vhost_net::drive::{DriveError, Load, Patience, Report, Wrong};
use vhost_net::ring::{RingError, feature};
use vhost_net::{Driver, Options, PortSpec};
use vhost_user::backend::Config;
use vhost_user::wire::ProtocolFeatures;

use naive::{Fault, Naive};

const TIME: Duration = Duration::from_millis(60);

fn serve(path: &Path, fault: Fault) -> Loopback {
    let config = Config {
        features: feature::VERSION_1
            | feature::PACKED
            | feature::IN_ORDER
            | feature::EVENT_IDX
            | net::MRG_RXBUF
            | net::MQ
            | net::CTRL_VQ,
        protocol: ProtocolFeatures::MQ | ProtocolFeatures::REPLY_ACK,
        queues: 4,
        rings_per_queue: 2,
        max_ring_size: 1024,
        max_regions: 8,
    };
    Loopback::start(path, config, Naive::new(fault), || {}).unwrap()
}

fn run(fault: Fault, options: Options, load: Load, frame_len: u32) -> Result<Report, DriveError> {
    let directory = TempDir::new().unwrap();
    let socket = directory.path().join("s");
    let _server = serve(&socket, fault);
    let spec = PortSpec::looped(&socket, options, load, frame_len);
    let mut driver = Driver::connect(&[spec])?;
    measure(&mut driver, fault == Fault::None)
}

/// A window in which the server's thread has its turns, on any number of CPUs.
fn measure(driver: &mut Driver, loses_nothing: bool) -> Result<Report, DriveError> {
    let wait = |millis| Duration::from_millis(millis);
    driver.set_patience(match loses_nothing {
        true => Patience {
            silence: wait(10_000),
            drain: wait(10_000),
        },
        false => Patience {
            silence: wait(50),
            drain: wait(100),
        },
    });
    driver.measure_beside(Duration::ZERO, TIME, None, |_, _| {
        // Not a yield: the scheduler may take that as well as not.
        std::thread::sleep(Duration::from_micros(20));
        Ok(())
    })
}

fn ring_features() -> impl Iterator<Item = u64> {
    let one = |bit| [0, bit];
    let packed = one(feature::PACKED).into_iter();
    packed
        .flat_map(move |packed| one(feature::IN_ORDER).map(|in_order| packed | in_order))
        .flat_map(move |bits| one(feature::EVENT_IDX).map(|event| bits | event))
}

#[test]
fn every_frame_arrives_once_and_whole_over_every_kind_of_ring() {
    for features in ring_features() {
        for frame_len in [64, 65, 1518] {
            for load in [Load::Window(1), Load::Window(100), Load::Rate(20_000.0)] {
                let options = Options::new().require(features);
                let report = run(Fault::None, options, load, frame_len).unwrap();
                let case = format!("{features:#x} {frame_len} {load:?}");
                let port = &report.ports[0];
                assert_eq!((report.lost(), report.wrong()), (0, 0), "{case}");
                assert!(port.counts.arrived > 0, "{case}: {:?}", port.counts);
                assert_eq!(port.counts.sent, port.taken, "{case}");
                assert_eq!(port.checked, port.counts.sent.div_ceil(256), "{case}");
                assert_eq!((port.foreign, port.calls), (0, 0), "{case}");
                let bytes = port.received_per_s * f64::from(frame_len);
                assert!((port.bytes_per_s - bytes).abs() < 1.0, "{case}");
            }
        }
    }
}

#[test]
fn frames_longer_than_a_buffer_arrive_whole_and_those_behind_them_too() {
    for features in [0, feature::PACKED] {
        for buffer_len in [76, 100, 300, 1529, 1530] {
            let mut options = Options::new().require(features | net::MRG_RXBUF);
            options.buffer_len = buffer_len;
            // Twenty buffers a frame, and 256 in the ring.
            let report = run(Fault::None, options, Load::Window(8), 1518).unwrap();
            let port = &report.ports[0];
            assert_eq!((report.lost(), report.wrong()), (0, 0), "{buffer_len}");
            assert!(port.counts.arrived > 0 && port.checked > 0, "{buffer_len}");
        }
    }
}

#[test]
fn the_mistakes_of_a_server_are_counted_by_their_kind() {
    let expected = |fault| {
        let mut wrong = Wrong::default();
        let mut losses = false;
        match fault {
            Fault::FlipBit(_) => (wrong.corrupt, losses) = (1, false),
            Fault::Twice(_) => wrong.duplicate = 1,
            Fault::Truncate(..) => wrong.length = 1,
            Fault::Forge(_) | Fault::ForgeQueue(_) => (wrong.forged, losses) = (1, true),
            Fault::Length(..) | Fault::Buffers(..) => (wrong.malformed, losses) = (1, true),
            Fault::Drop(_) | Fault::Silence => losses = true,
            _ => {}
        }
        (wrong, losses)
    };
    for features in [0, feature::PACKED] {
        for fault in [
            Fault::Drop(5),
            // Sums are in the first of each 256 frames.
            Fault::FlipBit(1),
            Fault::Twice(5),
            Fault::Swap(5),
            Fault::Truncate(5, 1),
            Fault::Forge(5),
            Fault::ForgeQueue(5),
            Fault::Length(5, 0),
            Fault::Length(5, 11),
            Fault::Length(5, 1531),
            Fault::Length(5, u32::MAX),
            Fault::Buffers(5, 0),
            Fault::Buffers(5, 257),
            Fault::Buffers(5, u16::MAX),
            Fault::Foreign(5),
            Fault::Silence,
        ] {
            let options = Options::new().require(features);
            let report = run(fault, options, Load::Window(16), 100).unwrap();
            let port = &report.ports[0];
            let (wrong, losses) = expected(fault);
            let kinds = |wrong: Wrong| {
                [
                    wrong.malformed,
                    wrong.length,
                    wrong.corrupt,
                    wrong.forged,
                    wrong.duplicate,
                ]
                .map(|count| count > 0)
            };
            assert_eq!(
                kinds(port.wrong),
                kinds(wrong),
                "{fault:?}: {:?} {:?}",
                port.counts,
                port.wrong
            );
            // One may still be held at the end.
            if !matches!(fault, Fault::Swap(_)) {
                assert_eq!(
                    report.lost() > 0,
                    losses,
                    "{fault:?}: {:?} {:?}",
                    port.counts,
                    port.wrong
                );
            }
            assert_eq!(
                port.counts.late > 0,
                matches!(fault, Fault::Swap(_)),
                "{fault:?}"
            );
            assert_eq!(
                port.foreign > 0,
                matches!(fault, Fault::Foreign(_)),
                "{fault:?}"
            );
            // What is good arrives beside it, and the rate has nothing else in it.
            let good = !matches!(fault, Fault::Silence);
            assert_eq!(port.received_per_s > 0.0, good, "{fault:?}");
        }
    }
}

#[test]
fn a_header_that_announces_buffers_of_other_frames_does_not_hide_them_for_ever() {
    // Two announced, one given: the next frame is taken for the rest of this one.
    let fault = Fault::Buffers(5, 2);
    let report = run(fault, Options::new(), Load::Window(16), 100).unwrap();
    let port = &report.ports[0];
    assert!(
        report.lost() > 0 && port.wrong.length > 0,
        "{:?}",
        port.wrong
    );
    assert!(port.received_per_s > 0.0);
}

#[test]
fn a_buffer_returned_twice_is_noticed() {
    for features in [0, feature::PACKED] {
        let options = Options::new().require(features);
        match run(Fault::ReturnTwice(7), options, Load::Window(16), 100) {
            // Before the buffer was posted again.
            Err(DriveError::Ring { source, .. }) => {
                let is_told = matches!(source, RingError::NotOutstanding { .. });
                assert!(is_told, "{source:?}");
            }
            // After that: the frame of before is in it.
            Ok(report) => assert!(report.wrong() > 0, "{:?}", report.ports[0].wrong),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn pairs_have_accounts_of_their_own() {
    let report = run(Fault::None, Options::new().pairs(2), Load::Window(4), 64).unwrap();
    assert_eq!((report.lost(), report.wrong()), (0, 0));
    assert!(report.ports[0].counts.arrived > 0);
    let more = run(Fault::None, Options::new().pairs(5), Load::Silent, 64);
    let Err(DriveError::Client { source, .. }) = more else {
        panic!("{more:?}");
    };
    assert!(
        matches!(
            source,
            ClientError::Pairs {
                there: 2,
                wanted: 5
            }
        ),
        "{source:?}"
    );
}

#[test]
fn windows_begin_with_nothing_under_way_and_loads_change_between_them() {
    let directory = TempDir::new().unwrap();
    let socket = directory.path().join("s");
    let _server = serve(&socket, Fault::None);
    let spec = PortSpec::looped(&socket, Options::new(), Load::Window(64), 64);
    let mut driver = Driver::connect(&[spec]).unwrap();
    for load in [Load::Window(64), Load::Silent, Load::Window(1), Load::Flood] {
        driver.set_load(0, load);
        let report = measure(&mut driver, load != Load::Flood).unwrap();
        let port = &report.ports[0];
        assert_eq!(port.received_per_s > 0.0, load != Load::Silent, "{load:?}");
        assert_eq!(port.counts.sent, port.counts.arrived + report.lost());
        if load != Load::Flood {
            assert_eq!(report.lost(), 0, "{load:?}");
        }
    }
}
