//! Rate limits hold and cost other guests nothing; calls are delayed no longer than allowed.

use std::time::{Duration, Instant};

use crate::common::front::Front;
use crate::common::{Disk, Guest, Io, PATIENCE, Server, feature, options, reads, until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore::IdlePolicy;
use vhost_blk::Options;
use vhost_blk::drive::{Run, drive};
use vhost_blk::queue::{Extent, Op, Status};
use vhost_blk::stats::Report;
use vio::{Rate, RateLimits};

fn run(server: &Server, disk: usize, depth: u16, block: u32, measure: Duration) -> Report {
    let options = Options {
        block,
        ..options(feature::EVENT_IDX, 1, depth)
    };
    let run = Run {
        warm_up: Duration::from_millis(100),
        ..reads(server.path(disk), options, measure)
    };
    let report = drive(&run).expect("the run works");
    assert_eq!(report.errors.total(), 0);
    report
}

fn limited(operations: Option<u64>, bytes: Option<u64>) -> Disk {
    let rate = |per_second| Rate {
        per_second,
        burst: 0,
    };
    let mut disk = Disk::ram("limited");
    disk.blk.limits = RateLimits {
        operations: operations.map(rate),
        bytes: bytes.map(rate),
    };
    disk
}

#[test]
fn a_limit_holds_at_depth_32_however_the_core_waits() {
    let _turn = crate::alone();
    for idle in [IdlePolicy::Poll, IdlePolicy::Sleep, IdlePolicy::adaptive()] {
        for (operations, bytes, block, expected) in [
            (Some(5_000), None, 4096, 5_000.0),
            (None, Some(64 << 20), 65_536, 1024.0),
            (Some(2_000), Some(1 << 40), 512, 2_000.0),
        ] {
            // A core that does not run for longer than the burst allows for cannot make up for it:
            // on a machine with other work that may happen. It may never do too much.
            let is_kept = (0..8).any(|_| {
                let (off, used) = off_by(idle, limited(operations, bytes), block, expected);
                eprintln!(
                    "{idle:?} {operations:?} {bytes:?}: {:+.1} %, core {:.0} %",
                    100.0 * off,
                    100.0 * used
                );
                assert!(off < 0.05, "more than allowed");
                // Asleep until the next request may begin, and not looking whether it may.
                off > -0.05 && (used < 0.5 || !matches!(idle, IdlePolicy::Sleep))
            });
            assert!(is_kept);
        }
    }
}

/// Measures the deviation from the expected rate, and the share of its time that the core ran.
fn off_by(idle: IdlePolicy, disk: Disk, block: u32, expected: f64) -> (f64, f64) {
    let mut server = Server::start(idle, vec![disk]);
    let cpu = server.cpu();
    let start = Instant::now();
    let report = run(&server, 0, 32, block, Duration::from_millis(300));
    let used = (server.cpu() - cpu).as_secs_f64() / start.elapsed().as_secs_f64();
    assert!(server.stats(0).device.throttled > 0);
    server.stop();
    (report.iops / expected - 1.0, used)
}

#[test]
fn a_throttled_guest_takes_nothing_from_its_neighbour() {
    let _turn = crate::alone();
    let disks = vec![limited(Some(1_000), None), Disk::ram("neighbour")];
    let server = Server::start(IdlePolicy::adaptive(), disks);
    let alone = run(&server, 1, 1, 4096, Duration::from_millis(400));
    let path = server.path(0);
    let throttled = std::thread::scope(|scope| {
        let limited = scope.spawn(|| run(&server, 0, 32, 4096, Duration::from_millis(1000)));
        until("the other has begun", || {
            server.stats(0).device.requests > 0
        });
        let beside = run(&server, 1, 1, 4096, Duration::from_millis(400));
        eprintln!(
            "neighbour's median alone {} ns, beside {} ns ({})",
            alone.latency.p50_ns,
            beside.latency.p50_ns,
            path.display()
        );
        // Two clients and the core share two processors here: only a stall would show.
        assert!(beside.iops > alone.iops / 10.0);
        limited.join().expect("no panic")
    });
    assert!(
        (950.0..1050.0).contains(&throttled.iops),
        "{}",
        throttled.iops
    );
}

#[test]
fn zeroes_count_against_the_limit_of_bytes() {
    let _turn = crate::alone();
    for op in [Op::WriteZeroes, Op::Discard] {
        // A second for each of two requests of 1 MiB, the longest; the third may not begin before
        // that.
        let server = Server::start(IdlePolicy::Sleep, vec![limited(None, Some(1 << 20))]);
        let start = Instant::now();
        let mut guest = server.guest(0, options(feature::EVENT_IDX, 1, 8));
        let Io {
            memory,
            layout,
            queues,
        } = guest.io();
        let queue = &mut queues[0];
        for _ in 0..3 {
            let slot = queue.take_slot().expect("there are eight");
            let extent = Extent {
                sector: 0,
                bytes: 1 << 20,
            };
            assert!(queue.submit(memory, layout, slot, op, extent, 0));
        }
        queue.publish(memory);
        assert_eq!(guest.drain(), (3, 0), "{op:?}");
        let took = start.elapsed();
        assert!(took > Duration::from_millis(1900), "{op:?}: {took:?}");
        assert!(server.stats(0).device.throttled > 0, "{op:?}");
    }
}

/// Makes requests of `bytes` available, as many as queue 0 holds.
fn fill(guest: &mut Guest, op: Op, bytes: u32) {
    let io = guest.io();
    let own = &mut io.queues[0];
    while let Some(slot) = own.take_slot() {
        let extent = Extent { sector: 0, bytes };
        assert!(own.submit(io.memory, io.layout, slot, op, extent, 0));
        own.publish(io.memory);
    }
}

/// Takes what has come back by now; how many.
fn take_back(guest: &mut Guest) -> usize {
    let io = guest.io();
    let own = &mut io.queues[0];
    let mut count = 0;
    while let Some(done) = own
        .complete(io.memory, io.layout)
        .expect("the device keeps to the protocol")
    {
        assert_eq!(done.status, Status::Ok);
        own.release(done.slot);
        count += 1;
    }
    count
}

#[test]
fn a_flood_of_discards_takes_no_more_than_its_share_of_time() {
    takes_no_more_than_its_share(Op::Discard);
}

#[test]
fn a_flood_of_zeroes_takes_no_more_than_its_share_of_time() {
    takes_no_more_than_its_share(Op::WriteZeroes);
}

/// A flood of these requests, a mebibyte each, on a memory disk, beside a guest that reads.
fn takes_no_more_than_its_share(op: Op) {
    let _turn = crate::alone();
    const DEPTH: u16 = 256;
    let disks = vec![Disk::ram("flood"), Disk::ram("reader")];
    let server = Server::start(IdlePolicy::Poll, disks);
    const BYTES: u32 = 65_536;
    let guest = |disk| {
        let options = options(feature::EVENT_IDX | feature::INDIRECT, 1, DEPTH);
        server.guest(
            disk,
            Options {
                block: BYTES,
                ..options
            },
        )
    };
    let (mut flood, mut reader) = (guest(0), guest(1));
    // Reads take the core a few microseconds each, the flood's requests several times that, which
    // no estimated cost covers. This thread, which fills the queues and reaps them, may be
    // preempted for longer than all of the requests take: then a round shows nothing and is
    // repeated.
    let is_shared = (0..16).any(|_| {
        fill(&mut flood, op, 1 << 20);
        fill(&mut reader, Op::Read, BYTES);
        let (mut floods, mut reads) = (0, 0);
        until("most of the flood", || {
            floods += take_back(&mut flood);
            floods >= usize::from(DEPTH) * 3 / 4
        });
        reads += take_back(&mut reader);
        eprintln!("{reads} reads of {DEPTH} after {floods} of the flood");
        let is_shared = reads == usize::from(DEPTH);
        until("the rest", || {
            floods += take_back(&mut flood);
            reads += take_back(&mut reader);
            floods + reads == 2 * usize::from(DEPTH)
        });
        is_shared
    });
    assert!(is_shared, "reads wait for the flood");
}

/// A limited guest that disconnects leaves the core asleep.
#[test]
fn a_limited_device_without_rings_lets_the_core_sleep() {
    let _turn = crate::alone();
    let server = Server::start(IdlePolicy::Sleep, vec![limited(Some(10), None)]);
    let mut front = Front::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    assert!(front.io().submit(0, Op::Write, 0));
    assert!(front.io().submit(0, Op::Write, 1));
    front.io().drain();
    front.stop(0);
    let rests = |what: &str| {
        until(what, || {
            let before = server.cpu();
            std::thread::sleep(Duration::from_millis(20));
            server.cpu() - before < Duration::from_millis(2)
        });
    };
    rests("the core sleeps with a stopped ring");
    front.serve(0);
    assert!(front.io().submit(0, Op::Write, 2));
    front.io().drain();
    drop(front);
    rests("the core sleeps without a front end");
    let _front = Front::connect(&server.path(0), 1, 8);
    rests("the core sleeps with one that has no ring");
}

/// Waits for a call; how long it took.
fn wait_for_call(front: &Front, limit: Duration) -> Option<Duration> {
    let start = Instant::now();
    let timeout = Timespec::try_from(limit).expect("it is short");
    let call = front.queues[0].call_fd();
    let mut fds = [PollFd::new(&call, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).expect("an eventfd");
    let mut count = [0; 8];
    rustix::io::read(call, &mut count).ok()?;
    Some(start.elapsed())
}

#[test]
fn a_call_waits_under_load_no_longer_than_it_may() {
    let _turn = crate::alone();
    let delay = Duration::from_millis(60);
    for features in [0, feature::EVENT_IDX, feature::PACKED | feature::EVENT_IDX] {
        let (mut disk, control) = Disk::slow("slow");
        disk.config.call_delay_ns = delay.as_nanos() as u64;
        let server = Server::start(IdlePolicy::Sleep, vec![disk]);
        let mut front = Front::running(&server.path(0), features, 1, 8);
        wait_for_call(&front, Duration::ZERO);
        front.put_in_flight(&control, 1, Op::Write, 0..8);
        assert!(front.queues[0].ring().arm(&front.memory));
        // Seven are left: more is about to come.
        control.release(1);
        until("it is done", || {
            front.queues[0].ring().has_used(&front.memory)
        });
        let took = wait_for_call(&front, PATIENCE).expect("a call in the end");
        assert!(took > delay / 2, "{took:?}: at once");
        assert!(took < delay + Duration::from_millis(500), "{took:?}");
        front.io().collect();
        // Few are left: nothing to wait for. The bound would be far later.
        assert!(front.queues[0].ring().arm(&front.memory));
        control.release(5);
        let took = wait_for_call(&front, PATIENCE).expect("a call");
        assert!(took < delay, "{took:?}: it waited");
        control.set_open(true);
        front.io().drain();
    }
}

#[test]
fn a_call_at_depth_one_never_waits() {
    let _turn = crate::alone();
    for block in [512, 4096, 1 << 20] {
        let mut disk = Disk::ram("ram");
        // So long that one that waits is seen.
        disk.config.call_delay_ns = 400_000_000;
        let server = Server::start(IdlePolicy::Sleep, vec![disk]);
        let report = run(&server, 0, 1, block, Duration::from_millis(300));
        assert!(
            report.latency.p999_ns < 200_000_000,
            "{block}: {:?}",
            report.latency
        );
        // Now and then the guest finds it before it sleeps.
        assert!(report.calls >= report.requests / 2, "{report:?}");
    }
}
