//! Well-behaved front ends: every ring, starts and stops, replaced descriptors and memory,
//! reconnects.

use std::time::Duration;

use crate::common::front::{Front, copy, event, fd, spare_memory};
use crate::common::{
    Disk, Guest, Io, PATIENCE, Server, feature, open_soon, options, tracked, until,
};
use disk_image::{ImageDisk, ImageOptions};
use rustix::io::write;
use sidecore::IdlePolicy;
use vhost_blk::Options;
use vhost_blk::queue::{Extent, Op, Status};
use vhost_user::wire::Request;
use vio::blk::{MemDisk, RawDisk};

/// Ring features that make a difference.
const RINGS: [u64; 8] = [
    0,
    feature::EVENT_IDX,
    feature::INDIRECT | feature::EVENT_IDX,
    feature::IN_ORDER | feature::EVENT_IDX,
    feature::PACKED,
    feature::PACKED | feature::EVENT_IDX,
    feature::PACKED | feature::INDIRECT | feature::EVENT_IDX,
    feature::PACKED | feature::IN_ORDER | feature::EVENT_IDX,
];

/// Those of a disk that does not complete in order.
fn unordered() -> impl Iterator<Item = u64> {
    RINGS
        .into_iter()
        .filter(|features| features & feature::IN_ORDER == 0)
}

fn every_ring(mut server: Server, disks: usize, tracks: bool) {
    for disk in 0..disks {
        for features in RINGS {
            for queues in [1, 4] {
                let options = match tracks {
                    true => tracked(features, queues, 8),
                    false => options(features, queues, 8),
                };
                let mut guest = server.guest(disk, options);
                guest.verify(64);
                guest.stop();
            }
        }
    }
    server.stop();
}

#[test]
fn every_ring_is_served_by_a_polling_core() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = Disk::file("file", &dir.path().join("disk"));
    let server = Server::start(IdlePolicy::Spin(50_000), vec![Disk::ram("ram"), file]);
    every_ring(server, 2, false);
}

#[test]
fn every_ring_is_served_by_a_core_that_sleeps_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = Disk::file("file", &dir.path().join("disk"));
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram"), file]);
    every_ring(server, 2, true);
}

/// Whether the core sleeps now; it is not woken by asking.
fn rest(server: &Server) {
    until("the core goes to sleep", || {
        let before = server.core().stats().core;
        std::thread::sleep(Duration::from_millis(2));
        let after = server.core().stats().core;
        before.sweeps_idle == after.sweeps_idle && before.sweeps_busy == after.sweeps_busy
    });
}

#[test]
fn a_reset_device_starts_anew() {
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    for features in RINGS {
        for options in [options(features, 4, 8), tracked(features, 4, 8)] {
            let mut guest = server.guest(0, options);
            guest.verify(32);
            guest.client.reset_device().expect("the device is reset");
            guest.verify(32);
            guest.stop();
        }
    }
}

/// A firmware's driver and a kernel's after it negotiate other features, over the same connection.
#[test]
fn features_change_between_drivers() {
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    let mut front = Front::sharing(&server.path(0), RINGS[0], 2, 8);
    for features in RINGS.into_iter().chain(RINGS.into_iter().rev()) {
        front.set_features(features);
        for queue in 0..2 {
            front.serve(queue);
        }
        front.io().verify(16);
        for queue in 0..2 {
            let base = front.stop(queue);
            assert_eq!(base, front.own_base(queue));
        }
    }
}

#[test]
fn a_stopped_ring_goes_on_where_it_stood() {
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    for features in RINGS {
        let mut front = Front::running(&server.path(0), features, 1, 8);
        for _ in 0..5 {
            front.io().verify(60);
            let base = front.stop(0);
            assert_eq!(base, front.own_base(0));
            front.serve(0);
        }
    }
}

#[test]
fn requests_queued_while_a_ring_is_disabled_are_served_when_it_is_enabled() {
    for idle in [IdlePolicy::Sleep, IdlePolicy::Poll] {
        let mut server = Server::start(idle, vec![Disk::ram("ram"), Disk::ram("other")]);
        let mut other = server.guest(1, options(feature::EVENT_IDX, 1, 1));
        for features in RINGS {
            let mut front = Front::running(&server.path(0), features, 2, 8);
            front.io().verify(8);
            front.enable(1, false);
            for block in 0..4 {
                assert!(front.io().submit(1, Op::Read, 1 + 2 * block));
            }
            // The other queue works meanwhile, and nothing of this one comes back.
            assert!(front.io().submit(0, Op::Read, 2));
            until("queue 0 is served", || front.io().reap(0).is_some());
            other.verify(2);
            assert_eq!(front.queues[1].outstanding(), 4);
            front.enable(1, true);
            assert_eq!(front.io().drain(), (4, 0));
        }
        server.stop();
    }
}

#[test]
fn requests_queued_before_a_ring_starts_are_served() {
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    for features in RINGS {
        for kicks_first in [false, true] {
            let mut front = Front::sharing(&server.path(0), features, 1, 8);
            if !kicks_first {
                for block in 0..4 {
                    assert!(front.io().submit(0, Op::Write, block));
                }
            }
            // Where the driver began, not where it has got.
            front.place(0, 256, 0);
            front.call(front.kick_request(0));
            if kicks_first {
                // Started, not enabled: it may not be served yet, nor forgotten.
                for block in 0..4 {
                    assert!(front.io().submit(0, Op::Write, block));
                }
                front.queues[0].kick();
            }
            front.enable(0, true);
            assert_eq!(front.io().drain(), (4, 0), "{features:#x}, {kicks_first}");
        }
    }
}

#[test]
fn a_replaced_kick_kicks() {
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    let mut front = Front::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    front.io().verify(4);
    for _ in 0..20 {
        let new = event();
        // A request that was made available with the old one, without a kick.
        let request = Request::SetVringKick(fd(0, Some(copy(&new))));
        front.call(request);
        rest(&server);
        front.read_silently(0);
        write(&new, &1_u64.to_ne_bytes()).expect("a kick");
        until("the kick is heard", || front.take_done());
        // The old one again, for the client's next requests.
        let request = front.kick_request(0);
        front.call(request);
    }
}

#[test]
fn a_replaced_call_is_called() {
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    for features in [0, feature::PACKED] {
        let mut front = Front::running(&server.path(0), features, 1, 8);
        for _ in 0..10 {
            let new = event();
            let request = Request::SetVringCall(fd(0, Some(copy(&new))));
            front.call(request);
            let mut count = [0; 8];
            // A call for nothing, because one may have gone to the old one.
            let _ = rustix::io::read(&new, &mut count);
            // Without EVENT_IDX the driver is called unless it says no.
            assert!(front.queues[0].ring().arm(&front.memory));
            assert!(front.io().submit(0, Op::Read, 900));
            until("a call on the new one", || {
                rustix::io::read(&new, &mut count).is_ok()
            });
            until("it is there", || {
                front.queues[0].ring().has_used(&front.memory)
            });
            assert!(front.take_done());
        }
        // None at all: the driver polls.
        front.call(Request::SetVringCall(fd(0, None)));
        front.io().verify(8);
    }
}

#[test]
fn a_front_end_that_never_kicks_is_polled() {
    let mut server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    for features in RINGS {
        let mut front = Front::sharing(&server.path(0), features, 1, 8);
        front.describe(0);
        front.call(Request::SetVringKick(fd(0, None)));
        front.enable(0, true);
        for block in 0..50 {
            front.read_silently(block);
            until("it is seen without a kick", || front.take_done());
        }
        // A descriptor after all: the core may sleep again.
        let request = front.kick_request(0);
        front.call(request);
        front.io().verify(8);
        rest(&server);
        front.io().verify(8);
    }
    server.stop();
}

#[test]
fn memory_changes_under_requests_in_flight() {
    let (disk, control) = Disk::slow("slow");
    let server = Server::start(IdlePolicy::Sleep, vec![disk]);
    for features in unordered() {
        control.set_open(true);
        let mut front = Front::running(&server.path(0), features, 2, 8);
        front.io().verify(16);
        let (spare, extra) = spare_memory();
        for round in 0..6 {
            control.set_open(false);
            front.put_in_flight(&control, 2, Op::Read, 0..8);
            // The change waits for them; the answer says that it has happened.
            let opener = open_soon(&control);
            match round % 3 {
                0 => front.call(Request::AddMemReg(spare, copy(extra.file()))),
                1 => front.call(Request::RemMemReg(spare)),
                _ => front.share(),
            }
            opener.join().expect("no panic");
            assert_eq!(front.io().drain(), (8, 0));
            front.io().verify(8);
        }
    }
}

/// Hot-plugged memory moves regions for a moment: rings that had none must not be forgotten.
#[test]
fn a_ring_whose_memory_was_away_goes_on_when_it_is_back() {
    let server = Server::start(IdlePolicy::Poll, vec![Disk::ram("ram")]);
    for features in RINGS {
        let mut front = Front::running(&server.path(0), features, 1, 8);
        front.io().verify(8);
        let region = front.regions()[0];
        front.call(Request::RemMemReg(region));
        // A polling core looks at the ring now, and faults.
        let before = server.core().stats().core.sweeps_idle;
        until("the core has looked", || {
            server.core().stats().core.sweeps_idle > before + 10
        });
        front.call(Request::AddMemReg(region, copy(front.memory.file())));
        // The driver was notified that its kicks are not needed.
        front.read_silently(0);
        until("the ring is served again", || front.take_done());
        front.io().verify(8);
    }
}

#[test]
fn a_ring_stops_with_nothing_in_flight_while_others_are_busy() {
    let (disk, control) = Disk::slow("slow");
    let server = Server::start(IdlePolicy::Sleep, vec![disk]);
    for features in unordered() {
        control.set_open(false);
        let mut front = Front::running(&server.path(0), features, 2, 8);
        front.put_in_flight(&control, 2, Op::Write, 0..8);
        let opener = open_soon(&control);
        let base = front.stop(0);
        opener.join().expect("no panic");
        assert_eq!(base, front.own_base(0));
        assert_eq!(front.io().drain(), (8, 0));
        front.serve(0);
        front.io().verify(8);
    }
}

/// The connection ends in mid-request; the region says what was in flight, and the next connection
/// finishes it.
#[test]
fn requests_in_flight_outlive_their_connection() {
    let (disk, control) = Disk::slow("slow");
    let server = Server::start(IdlePolicy::Sleep, vec![disk]);
    for features in unordered() {
        control.set_open(true);
        let mut guest = server.guest(0, tracked(features, 2, 8));
        for round in 0..5 {
            guest.verify(16);
            control.set_open(false);
            for block in 0..8 {
                assert!(guest.submit((block % 2) as u16, Op::Write, block));
            }
            // Some are done, some are with the disk, perhaps some have not been looked at.
            control.release(round);
            until("they are in flight", || control.held() + round >= 8);
            let gone = rustix::net::shutdown(
                guest.client.connection().socket(),
                rustix::net::Shutdown::Both,
            );
            gone.expect("the socket is there");
            control.set_open(true);
            guest.client.reconnect().expect("the server is there");
            assert_eq!(guest.drain(), (8, 0), "{features:#x}, round {round}");
        }
        guest.stop();
    }
}

/// Replayed requests wait behind a disabled ring; a ring that is stopped before they ran leaves
/// them for the next.
#[test]
fn a_ring_with_requests_to_replay_can_be_stopped() {
    let (disk, control) = Disk::slow("slow");
    let server = Server::start(IdlePolicy::Sleep, vec![disk]);
    for features in unordered() {
        control.set_open(false);
        let mut front = Front::sharing(&server.path(0), features, 1, 8);
        let region = front.track();
        front.serve(0);
        front.put_in_flight(&control, 1, Op::Write, 0..4);
        let mut next = Front::connect_again(front, &server.path(0));
        control.set_open(true);
        next.track_in(&region);
        // Started and stopped, never enabled.
        next.start_at_used(0);
        next.stop(0);
        next.start_at_used(0);
        next.enable(0, true);
        assert_eq!(next.io().drain(), (4, 0), "{features:#x}");
        next.io().verify(8);
    }
}

#[test]
fn an_export_moves_between_cores_under_load() {
    let (disk, control) = Disk::slow("slow");
    control.set_open(true);
    let mut server = Server::start(IdlePolicy::Sleep, vec![disk]);
    let mut other = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    let mut guest = server.guest(0, options(feature::EVENT_IDX, 4, 8));
    let handle = server.handle(0);
    for round in 0..20 {
        for block in 0..16 {
            guest.submit((block % 4) as u16, Op::Write, block);
        }
        let (from, to) = match round % 2 {
            0 => (&server, &other),
            _ => (&other, &server),
        };
        assert!(from.core().move_to(&handle, to.core(), PATIENCE));
        assert_eq!(guest.drain().1, 0);
        guest.verify(16);
    }
    let mut second = Guest::connect(&other.path(0), options(0, 1, 1));
    second.verify(4);
    server.stop();
    other.stop();
}

/// As UEFI firmware asks, which does not look at SIZE_MAX.
#[test]
fn sixteen_mebibytes_in_one_descriptor_are_written_and_read() {
    const LEN: u32 = 16 << 20;
    let dir = tempfile::tempdir().expect("a directory");
    let raw = dir.path().join("raw");
    std::fs::write(&raw, vec![0; LEN as usize]).expect("a file");
    let raw = RawDisk::open(&raw, Default::default()).expect("a disk");
    let mut disks = vec![
        Disk::new(
            "ram",
            Box::new(MemDisk::new(vec![0; LEN as usize], 64, false)),
        ),
        Disk::new("raw", Box::new(raw)),
    ];
    let qcow2 = dir.path().join("qcow2");
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&qcow2)
        .arg(LEN.to_string())
        .status();
    match made {
        Ok(status) => {
            assert!(status.success());
            let image = ImageDisk::open(&qcow2, ImageOptions::default()).expect("an image");
            disks.push(Disk::new("qcow2", Box::new(image)));
        }
        Err(error) => println!("skipped for qcow2: no qemu-img (Debian: qemu-utils): {error}"),
    }
    let count = disks.len();
    let server = Server::start(IdlePolicy::Sleep, disks);
    let bytes: Vec<u8> = (0..LEN).map(|at| (at / 512 * 7 + at % 509) as u8).collect();
    for disk in 0..count {
        let mut guest = server.guest(
            disk,
            Options {
                block: LEN,
                ..options(feature::EVENT_IDX, 1, 1)
            },
        );
        let Io {
            memory,
            layout,
            queues,
        } = guest.io();
        let queue = &mut queues[0];
        for op in [Op::Write, Op::Read] {
            let slot = queue.take_slot().expect("it is idle");
            let at = layout.data(0, slot);
            match op {
                Op::Write => memory.write(at, &bytes),
                _ => memory.zero(at, LEN as usize),
            }
            let extent = Extent {
                sector: 0,
                bytes: LEN,
            };
            assert!(queue.submit(memory, layout, slot, op, extent, 0));
            queue.publish(memory);
            until("it is answered", || {
                let done = queue.complete(memory, layout).expect("a whole ring");
                done.is_some_and(|done| {
                    assert_eq!(done.status, Status::Ok, "disk {disk}, {op:?}");
                    queue.release(done.slot);
                    true
                })
            });
            let mut seen = vec![0; LEN as usize];
            memory.read(at, &mut seen);
            assert!(seen == bytes, "disk {disk}, {op:?}");
        }
        guest.stop();
    }
}
