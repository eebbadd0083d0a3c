//! The client against a simple server: every kind of ring, and every way in which that server
//! misbehaves.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod naive;

use std::sync::atomic::Ordering;
use std::time::Duration;

use naive::{Fault, Naive, SECTORS};
use tempfile::TempDir;
use vhost_blk::client::{ClientError, Options, feature as blk};
use vhost_blk::load::{Mix, Mode, VmSpec};
use vhost_blk::loopback::Loopback;
use vhost_blk::queue::{Extent, Op, Status};
use vhost_blk::ring::{RingError, feature};
use vhost_blk::stats::Report;
use vhost_blk::verify::{Verdict, Verify, VerifyError, verify};
use vhost_blk::{Client, Run, RunError, drive};
use vhost_user::backend::Config;
use vhost_user::wire::ProtocolFeatures;

const RINGS: [(&str, u64); 2] = [("split", 0), ("packed", feature::PACKED)];

struct Server {
    directory: TempDir,
    _loopback: Loopback,
}

impl Server {
    fn start(server: Naive) -> Self {
        let directory = TempDir::new().unwrap();
        let config = Config {
            features: feature::VERSION_1
                | feature::EVENT_IDX
                | feature::INDIRECT
                | feature::PACKED
                | feature::IN_ORDER
                | blk::FLUSH
                | blk::MQ
                | blk::DISCARD
                | blk::WRITE_ZEROES,
            protocol: ProtocolFeatures::MQ
                | ProtocolFeatures::REPLY_ACK
                | ProtocolFeatures::CONFIG
                | ProtocolFeatures::CONFIGURE_MEM_SLOTS
                | ProtocolFeatures::RESET_DEVICE
                | ProtocolFeatures::INFLIGHT_SHMFD,
            queues: 4,
            rings_per_queue: 1,
            max_ring_size: 256,
            max_regions: 4,
        };
        let path = directory.path().join("s");
        let loopback = Loopback::start(&path, config, server, || {}).unwrap();
        Self {
            directory,
            _loopback: loopback,
        }
    }

    fn verify(&self, options: Options, millis: u64) -> Result<Verdict, VerifyError> {
        verify(&self.verification(options, millis), None)
    }

    fn verification(&self, options: Options, millis: u64) -> Verify {
        Verify {
            sockets: vec![self.directory.path().join("s")],
            options,
            first_client: 1,
            blocks: 64,
            duration: Duration::from_millis(millis),
            sleeps: true,
            zeroes: true,
            journal: Some(self.directory.path().join("journal")),
            only_check: false,
            seed: 3,
        }
    }

    fn drive(&self, options: Options, mode: Mode, millis: u64) -> Result<Report, RunError> {
        drive(&self.run(options, mode, millis))
    }

    fn run(&self, options: Options, mode: Mode, millis: u64) -> Run {
        Run {
            vms: vec![VmSpec::closed(
                self.directory.path().join("s"),
                options.depth,
                options.block,
            )],
            options,
            mix: Mix {
                read: 70,
                flush: 5,
                is_sequential: false,
            },
            sectors: None,
            mode,
            warm_up: Duration::ZERO,
            measure: Duration::from_millis(millis),
            seed: 3,
            server: None,
        }
    }
}

fn options(features: u64) -> Options {
    let mut options = Options::new(8, 4096);
    options.require(features);
    // Small, so that everything wraps around often.
    options.ring_size = Some(32);
    options
}

#[test]
fn every_kind_of_ring_returns_what_was_written() {
    for (name, ring) in RINGS {
        let server = Server::start(Naive::new(Fault::None));
        for (more, queues) in [
            (0, 1),
            (feature::INDIRECT, 2),
            (feature::IN_ORDER, 1),
            (feature::IN_ORDER | feature::INDIRECT, 4),
        ] {
            for with_event_idx in [true, false] {
                let mut options = options(ring | more);
                options.queues = queues;
                options.two_regions = with_event_idx;
                if !with_event_idx {
                    options.features &= !feature::EVENT_IDX;
                    options.protocol = options
                        .protocol
                        .without(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
                }
                if ring != 0 && more == 0 {
                    // Packed rings need no power of two.
                    options.ring_size = Some(29);
                }
                // The next one reads what this one left, by the journal.
                let verdict = server.verify(options, 60).unwrap();
                let case = format!("{name} {more:#x} event_idx {with_event_idx}: {verdict}");
                assert!(verdict.is_good(), "{case}");
                assert!(verdict.checked > 50 && verdict.requests[1] > 20, "{case}");
            }
        }
    }
}

#[test]
fn polling_and_sleeping_clients_count_their_events() {
    for (name, ring) in RINGS {
        let server = Server::start(Naive::new(Fault::None));
        let mut polling = options(ring);
        polling.depth = 4;
        let polled = server.drive(polling.clone(), Mode::Poll, 100).unwrap();
        assert_eq!(polled.calls, 0, "{name}: calls are off");
        polling.depth = 1;
        let slept = server.drive(polling.clone(), Mode::Event, 100).unwrap();
        assert!(slept.requests > 20, "{name}");
        // One at a time, both sides asleep in between: one kick and one call for each.
        let per_request = slept.calls_per_1000() / 1000.0;
        assert!(
            (0.3..=1.1).contains(&per_request),
            "{name}: {per_request} calls"
        );
        polling.depth = 4;
        let spin = Mode::Spin(Duration::from_micros(20));
        let spun = server.drive(polling, spin, 100).unwrap();
        assert!(spun.requests > 20, "{name}");
        for report in [polled, slept, spun] {
            assert_eq!(
                report.lost_wakeups + report.unanswered + report.wrong_bases,
                0,
                "{name}"
            );
            assert_eq!(report.errors.total(), 0, "{name}");
        }
    }
}

#[test]
fn wrong_data_is_found() {
    for fault in [Fault::FlipBit(40), Fault::DropWrite(9), Fault::Misplace(9)] {
        let server = Server::start(Naive::new(fault));
        let verdict = server.verify(options(0), 100).unwrap();
        assert!(verdict.damaged > 0, "{fault:?}: {verdict}");
        assert!(!verdict.is_good());
    }
}

#[test]
fn a_check_without_a_journal_fails() {
    let server = Server::start(Naive::new(Fault::None));
    let mut what = server.verification(options(0), 0);
    what.only_check = true;
    let missing = verify(&what, None);
    assert!(
        matches!(missing, Err(VerifyError::Journal(_))),
        "{missing:?}"
    );
    assert!(server.verify(options(0), 60).unwrap().is_good());
    let verdict = verify(&what, None).unwrap();
    assert!(verdict.is_good() && verdict.checked > 10, "{verdict}");
}

#[test]
fn a_failed_request_is_counted() {
    let server = Server::start(Naive::new(Fault::Fail(5)));
    let verdict = server.verify(options(0), 30).unwrap();
    assert_eq!((verdict.errors, verdict.damaged), (1, 0), "{verdict}");
    let server = Server::start(Naive::new(Fault::Fail(5)));
    let report = server.drive(options(0), Mode::Poll, 30).unwrap();
    assert_eq!((report.errors.io, report.errors.total()), (1, 1));
}

#[test]
fn lost_wake_ups_are_counted_on_either_side_and_the_run_goes_on() {
    for (name, ring) in RINGS {
        for (fault, calls) in [(Fault::IgnoreKick(5), 0), (Fault::OmitCall(5), 1)] {
            let server = Server::start(Naive::new(fault));
            let mut one = options(ring);
            one.depth = 1;
            let report = server.drive(one, Mode::Event, 800).unwrap();
            assert_eq!(
                (report.lost_wakeups, report.lost_calls),
                (1, calls),
                "{name} {fault:?}"
            );
            assert_eq!(report.unanswered, 0);
            assert!(
                report.requests > 20,
                "{name} {fault:?}: {} after it",
                report.requests
            );
        }
    }
}

#[test]
fn a_wake_up_lost_outside_the_measured_time_is_counted_too() {
    let run = |warm_up| {
        let server = Server::start(Naive::new(Fault::IgnoreKick(5)));
        let mut one = options(0);
        one.depth = 1;
        let mut run = server.run(one, Mode::Event, 100);
        run.warm_up = Duration::from_millis(warm_up);
        drive(&run).unwrap()
    };
    let in_warm_up = run(800);
    assert_eq!((in_warm_up.lost_wakeups, in_warm_up.unanswered), (1, 0));
    // Not even a tenth of a second passes before the end: the client does not kick again.
    let at_the_end = run(0);
    assert_eq!((at_the_end.lost_wakeups, at_the_end.unanswered), (1, 1));
}

#[test]
fn a_request_returned_twice_breaks_the_ring() {
    // Split only: the second time hits a descriptor of a packed ring that may be the driver's
    // again.
    let server = Server::start(Naive::new(Fault::ReturnTwice(7)));
    let mut two = options(0);
    two.depth = 2;
    let broken = server.verify(two, 100);
    let is_it = matches!(
        broken,
        Err(VerifyError::Client {
            source: ClientError::Ring {
                queue: 0,
                source: RingError::NotOutstanding { .. } | RingError::TooManyUsed { .. },
            },
            ..
        })
    );
    assert!(is_it, "{broken:?}");
}

#[test]
fn a_server_that_dies_loses_nothing_acknowledged() {
    for (name, ring) in RINGS {
        for tracks in [true, false] {
            let naive = Naive::new(Fault::DieEvery(97));
            let deaths = naive.deaths();
            let server = Server::start(naive);
            let mut options = options(ring);
            if tracks {
                options.require_protocol(ProtocolFeatures::INFLIGHT_SHMFD);
            }
            let verdict = server.verify(options, 300).unwrap();
            let deaths = deaths.load(Ordering::Relaxed);
            let case = format!("{name} inflight {tracks}, {deaths} deaths: {verdict}");
            assert!(deaths > 2, "{case}");
            assert!(verdict.is_good(), "{case}");
        }
    }
}

#[test]
fn single_requests_reset_and_reconnection() {
    let server = Server::start(Naive::new(Fault::None));
    let path = server.directory.path().join("s");
    for (_, ring) in RINGS {
        let mut client = Client::connect(&path, options(ring)).unwrap();
        assert_eq!(client.config().capacity, SECTORS);
        assert_eq!(client.config().queues, 4);
        let place = Extent {
            sector: 8,
            bytes: 512,
        };
        let mut data = [7; 512];
        assert_eq!(
            client.request(Op::Write, place, &mut data).unwrap(),
            Some(Status::Ok)
        );
        client.reset_device().unwrap();
        let mut id = [0; 20];
        let none = Extent {
            sector: 0,
            bytes: 0,
        };
        assert_eq!(
            client.request(Op::GetId, none, &mut id).unwrap(),
            Some(Status::Ok)
        );
        assert_eq!(&id[..6], b"naive\0");
        let bases = client.stop().unwrap();
        assert!(
            bases.iter().all(|(theirs, ours)| theirs == ours),
            "{bases:?}"
        );
        drop(client);
        let mut client = Client::connect(&path, options(ring)).unwrap();
        let mut back = [0; 512];
        client.request(Op::Read, place, &mut back).unwrap();
        assert_eq!(back, data);
    }
}
