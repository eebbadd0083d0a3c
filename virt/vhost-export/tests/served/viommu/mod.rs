//! Devices behind another program's IOMMU: translations that come, are late, wrong, taken away.

mod front;
mod hostile;

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use crate::common::front::Front;
use crate::common::{BLOCK, DISK, Disk, PATIENCE, Server, options, until};
use front::{PACKED, PAGE, PLATFORM, SPLIT, Viommu};
use sidecore::IdlePolicy;
use vhost_blk::queue::Op;
use vhost_blk::ring::feature;
use vhost_user::wire::{IotlbAccess, Request};
use vio::blk::RawDisk;
use vio_faults::{SlowControl, SlowDisk};

/// A disk that moves data straight to and from guest memory, when the test says so.
fn slow_file() -> (Disk, SlowControl, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().set_len(DISK as u64).expect("its length");
    let below = RawDisk::open(file.path(), Default::default()).expect("a disk");
    let (disk, control) = SlowDisk::new(Box::new(below)).expect("a socket pair");
    let mut disk = Disk::new("slow", Box::new(disk));
    disk.config.drain_limit_ns = 300_000_000;
    (disk, control, file)
}

/// Writes blocks through all queues and reads them again, with invalidations of everything between.
#[track_caller]
fn verify(viommu: &mut Viommu, blocks: u64, storm: bool) {
    let queues = u64::from(viommu.front.layout.queues);
    for op in [Op::Write, Op::Read] {
        let mut good = 0;
        for block in 0..blocks {
            while !viommu.io().submit((block % queues) as u16, op, block) {
                let (more, bad) = viommu.drain();
                assert_eq!(bad, 0, "a request failed");
                good += more;
            }
            if storm && block % 5 == 0 {
                viommu.pump();
                // Once per queue pair, as QEMU sends them.
                for _ in 0..3 {
                    viommu.invalidate(0, 0xfedf_ffff);
                    viommu.invalidate(0xfef0_0000, u64::MAX);
                }
            }
        }
        let (more, bad) = viommu.drain();
        assert_eq!((good + more, bad), (blocks as usize, 0));
    }
}

#[test]
fn rings_tables_and_buffers_are_reached_through_translations() {
    for features in [
        SPLIT,
        feature::EVENT_IDX,
        0,
        PACKED,
        PACKED | feature::IN_ORDER,
    ] {
        for tracks in [false, true] {
            let file = tempfile::NamedTempFile::new().expect("a file");
            let disk = match tracks {
                true => Disk::file("file", file.path()),
                false => Disk::ram("ram"),
            };
            let features = if tracks {
                features & !feature::IN_ORDER
            } else {
                features
            };
            let server = Server::start(IdlePolicy::default(), vec![disk]);
            let mut viommu = Viommu::connect(&server.path(0), features, 2, 16);
            let _region = tracks.then(|| viommu.track());
            viommu.serve_all();
            verify(&mut viommu, 64, false);
            verify(&mut viommu, 64, true);
            assert!(!viommu.asked.is_empty());
            for queue in 0..2 {
                let stands = viommu.stop(queue);
                assert_eq!(
                    stands,
                    viommu.front.own_base(queue),
                    "a ring stands elsewhere"
                );
            }
        }
    }
}

#[test]
fn a_ring_starts_before_its_translations_come_and_stops_before_too() {
    let server = Server::start(IdlePolicy::default(), vec![Disk::ram("ram")]);
    for features in [SPLIT, PACKED] {
        // Each call here is answered while no miss is: QEMU would hang otherwise.
        let mut viommu = Viommu::running(&server.path(0), features, 2, 8);
        let base = viommu.front.own_base(1);
        assert_eq!(viommu.stop(1), base);
        viommu.front.enable(0, false);
        viommu.until("the ring runs", |own| own.asked.len() > 3);
        assert!(viommu.io().submit(0, Op::Write, 1));
        viommu.pump();
        std::thread::sleep(Duration::from_millis(20));
        viommu.pump();
        assert_eq!(viommu.io().outstanding(), 1, "served though disabled");
        viommu.front.enable(0, true);
        assert_eq!(viommu.drain(), (1, 0));
        viommu.start(1, base);
        verify(&mut viommu, 32, true);
    }
}

#[test]
fn an_update_that_comes_unasked_is_used_and_one_over_an_entry_replaces_it() {
    let server = Server::start(IdlePolicy::default(), vec![Disk::ram("ram")]);
    let mut viommu = Viommu::connect(&server.path(0), feature::EVENT_IDX, 1, 8);
    for region in viommu.front.regions() {
        viommu.update(
            region.guest_addr,
            region.size,
            region.user_addr,
            IotlbAccess::ReadWrite,
        );
    }
    viommu.serve_all();
    verify(&mut viommu, 16, false);
    assert_eq!(viommu.asked, [], "what is known is asked for");

    // The block of slot 0 is elsewhere from now on: another update says so, and no invalidation.
    let (data, other) = (
        viommu.front.layout.data(0, 0),
        viommu.front.layout.data(0, 1),
    );
    viommu.front.memory.zero(other, BLOCK as usize);
    viommu.front.memory.zero(data, BLOCK as usize);
    let at = viommu.iova(data);
    let user = viommu.user(other as u64);
    viommu.update(at, PAGE, user, IotlbAccess::ReadWrite);
    read_into_slot_0(&mut viommu, 3);
    assert_eq!(holds(&viommu, other), crate::common::pattern(3));
    assert_eq!(holds(&viommu, data), vec![0; BLOCK as usize]);
}

/// Reads a block into what the driver believes to be slot 0's buffer.
#[track_caller]
fn read_into_slot_0(viommu: &mut Viommu, block: u64) {
    let request = begin_read(viommu, block);
    viommu.until("the read ends", |own| own.front.used() != request);
    let _ = viommu.front.take_done();
}

/// The used index before it.
fn begin_read(viommu: &mut Viommu, block: u64) -> u16 {
    let used = viommu.front.used();
    let own = &mut viommu.front.queues[0];
    // The slot is the one that was released last.
    let slots: Vec<u16> = std::iter::from_fn(|| own.take_slot()).collect();
    slots
        .iter()
        .filter(|&&slot| slot != 0)
        .for_each(|&slot| own.release(slot));
    assert!(slots.contains(&0), "slot 0 is free");
    let extent = vhost_blk::queue::Extent {
        sector: block * u64::from(BLOCK / vhost_blk::queue::SECTOR),
        bytes: BLOCK,
    };
    let (memory, layout) = (&viommu.front.memory, &viommu.front.layout);
    assert!(own.submit(memory, layout, 0, Op::Read, extent, 0));
    own.publish(memory);
    used
}

fn holds(viommu: &Viommu, offset: usize) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    viommu.front.memory.read(offset, &mut bytes);
    bytes
}

#[test]
fn after_an_invalidation_nothing_goes_through_what_it_covered() {
    let server = Server::start(IdlePolicy::default(), vec![Disk::ram("ram")]);
    let mut viommu = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    verify(&mut viommu, 16, false);
    let (data, other) = (
        viommu.front.layout.data(0, 0),
        viommu.front.layout.data(0, 1),
    );
    let at = viommu.iova(data);
    for round in 0..20 {
        let (old, new) = if round % 2 == 0 {
            (data, other)
        } else {
            (other, data)
        };
        viommu.front.memory.zero(old, BLOCK as usize);
        viommu.front.memory.zero(new, BLOCK as usize);
        viommu.map(at, new, IotlbAccess::ReadWrite);
        viommu.invalidate(at, at + PAGE - 1);
        read_into_slot_0(&mut viommu, round % 16);
        assert_eq!(holds(&viommu, new), crate::common::pattern(round % 16));
        assert_eq!(
            holds(&viommu, old),
            vec![0; BLOCK as usize],
            "the old page is written to"
        );
    }

    // The used ring moves under the device: its index goes on at the new place, and nowhere else.
    let used = viommu.front.layout.places(0).device;
    let spare = viommu.front.layout.data(0, 7);
    let mut ring = vec![0; PAGE as usize];
    viommu.front.memory.read(used, &mut ring);
    viommu.front.memory.write(spare, &ring);
    let before = viommu.front.memory.load_u16(used + 2, SeqCst);
    viommu.map(viommu.iova(used), spare, IotlbAccess::ReadWrite);
    viommu.invalidate(0, u64::MAX);
    begin_read(&mut viommu, 1);
    viommu.until("it is answered at the new place", |own| {
        own.front.memory.load_u16(spare + 2, SeqCst) == before.wrapping_add(1)
    });
    assert_eq!(viommu.front.memory.load_u16(used + 2, SeqCst), before);
}

#[test]
fn an_invalidation_is_answered_when_leases_end_and_not_when_requests_do() {
    for features in [feature::EVENT_IDX, PACKED] {
        let (disk, control, _file) = slow_file();
        let server = Server::start(IdlePolicy::default(), vec![disk]);
        let mut viommu = Viommu::running(&server.path(0), features, 1, 8);
        assert!(viommu.io().submit(0, Op::Read, 0));
        viommu.until("it is in flight", |_| control.held() == 1);

        // What nothing uses is given back at once.
        let far = 0x7_0000_0000;
        viommu.invalidate(far, far + PAGE - 1);
        viommu.send(Viommu::invalidate_message(0, u64::MAX));
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(
            viommu.received(),
            None,
            "answered while the disk writes to the page"
        );
        control.release(1);
        // The request cannot be answered before misses are: as QEMU, we serve none before this
        // answer has come.
        assert_eq!(viommu.wait_received(), 0);
        assert_eq!(viommu.io().outstanding(), 1);
        assert_eq!(viommu.io().collect(), (0, 0));
        control.set_open(true);
        viommu.until("it is answered", |own| {
            own.io().outstanding() == 0 || own.front.take_done()
        });
        assert_eq!(server.stats(0).device.violations, 0);
    }
}

#[test]
fn an_invalidation_that_cannot_be_answered_in_time_is_not_answered_well() {
    let (disk, control, _file) = slow_file();
    let server = Server::start(IdlePolicy::default(), vec![disk, Disk::ram("neighbour")]);
    let mut viommu = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    let err = viommu.err(0);
    control.set_uncancellable(true);
    assert!(viommu.io().submit(0, Op::Read, 0));
    viommu.until("it is in flight", |_| control.held() == 1);
    let start = Instant::now();
    viommu.send(Viommu::invalidate_message(0, u64::MAX));
    assert_ne!(viommu.wait_received(), 0, "memory in use is given back");
    assert!(start.elapsed() >= Duration::from_millis(300));
    until("the driver is notified", || Viommu::is_signalled(&err));
    server.guest(1, options(0, 1, 8)).verify(16);
    control.set_open(true);
    viommu.front.stop(0);
    // Another driver finds a whole device.
    viommu.front.fresh_rings();
    viommu.serve_all();
    verify(&mut viommu, 16, false);
}

#[test]
fn an_unanswered_miss_needs_a_reset_within_a_second_and_a_neighbour_is_served() {
    let server = Server::start(
        IdlePolicy::default(),
        vec![Disk::ram("target"), Disk::ram("neighbour")],
    );
    let mut neighbour = server.guest(1, options(feature::EVENT_IDX, 1, 8));
    for updates in [false, true] {
        let mut viommu = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
        verify(&mut viommu, 8, false);
        let err = viommu.err(0);
        viommu.invalidate(0, u64::MAX);
        let start = Instant::now();
        assert!(viommu.io().submit(0, Op::Read, 0));
        let (iova, _) = viommu.next_miss();
        if updates {
            // An update alone is not an answer.
            let (page, _) = viommu.table[&(iova / PAGE)];
            let user = viommu.user(page * PAGE);
            viommu.update(iova / PAGE * PAGE, PAGE, user, IotlbAccess::ReadWrite);
        }
        while !Viommu::is_signalled(&err) {
            neighbour.verify(4);
            assert!(start.elapsed() < PATIENCE, "nothing comes of it");
        }
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(890), "too early: {took:?}");
        assert!(
            took < Duration::from_secs(1) || is_loaded(),
            "too late: {took:?}"
        );

        // The answers come after all, and change nothing; a driver that begins anew finds a whole
        // device.
        while viommu.miss().is_some() {}
        for _ in 0..viommu.asked.len() {
            viommu.answer(1);
        }
        drop(viommu);
        let mut again = Viommu::running(&server.path(0), SPLIT, 1, 8);
        verify(&mut again, 8, true);
    }
}

#[test]
fn a_ring_that_is_being_stopped_takes_the_update_that_its_last_request_needs() {
    let (mut disk, control, _file) = slow_file();
    disk.config.miss_limit_ns = 10_000_000_000;
    let server = Server::start(IdlePolicy::default(), vec![disk]);
    let mut viommu = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    assert!(viommu.io().submit(0, Op::Write, 0));
    viommu.until("it is in flight", |_| control.held() == 1);
    // What its answer needs is forgotten; what its data need is in use.
    let used = viommu.front.layout.places(0).device;
    let page = viommu.iova(used) / PAGE * PAGE;
    viommu.invalidate(page, page + PAGE - 1);
    viommu.send(Request::GetVringBase { index: 0 });
    control.set_open(true);
    let (iova, _) = viommu.next_miss();
    assert_eq!(iova / PAGE, page / PAGE, "all else is known");
    let (mapped, _) = viommu.table[&(iova / PAGE)];
    let user = viommu.user(mapped * PAGE);
    viommu.send(viommu.update_message(page, PAGE, user, IotlbAccess::ReadWrite));
    // Something else, which has its turn after both.
    viommu.send(Request::GetFeatures);
    // The replies come in the order of the requests: ring 0 at entry 1, done, features.
    assert_eq!(viommu.wait_received(), 1 << 32);
    assert_eq!(viommu.wait_received(), 0);
    assert_ne!(viommu.wait_received() & PLATFORM, 0);
    viommu.answer(0);
    assert_eq!(viommu.io().collect(), (1, 0), "it was answered");
}

/// Whether the machine has other work than this test.
fn is_loaded() -> bool {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load
        .split(' ')
        .next()
        .and_then(|load| load.parse::<f64>().ok());
    load.is_some_and(|load| load > 1.0)
}

#[test]
fn late_answers_of_an_earlier_driver_are_not_those_of_the_next() {
    let mut disk = Disk::ram("ram");
    disk.config.miss_limit_ns = 500_000_000;
    let server = Server::start(IdlePolicy::default(), vec![disk]);
    let mut viommu = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    verify(&mut viommu, 8, false);
    let err = viommu.err(0);
    viommu.asked.clear();
    viommu.invalidate(0, u64::MAX);
    assert!(viommu.io().submit(0, Op::Read, 0));
    viommu.next_miss();
    until("the driver is notified", || Viommu::is_signalled(&err));
    while viommu.miss().is_some() {}
    let owed = viommu.asked.len();
    viommu.asked.clear();
    // The same connection goes on, and still owes the answers.
    viommu.front.stop(0);
    viommu.front.fresh_rings();
    for _ in 0..owed {
        viommu.answer(1);
    }
    viommu.serve_all();
    verify(&mut viommu, 8, true);
}

#[test]
fn a_region_that_goes_takes_its_translations_along() {
    let server = Server::start(IdlePolicy::default(), vec![Disk::ram("ram")]);
    let mut viommu = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    verify(&mut viommu, 16, false);
    viommu.asked.clear();
    verify(&mut viommu, 16, false);
    assert_eq!(viommu.asked, [], "all is known");

    // The region of the data goes and comes back at another guest address.
    let data = viommu.regions()[1];
    let file = || crate::common::front::copy(viommu.front.memory.file());
    let moved = vhost_user::wire::MemRegion {
        guest_addr: data.guest_addr + (1 << 30),
        ..data
    };
    let file = file();
    viommu.front.call(Request::RemMemReg(data));
    viommu.front.call(Request::AddMemReg(moved, file));
    verify(&mut viommu, 16, false);
    let first = viommu.front.regions()[1].guest_addr / PAGE;
    assert!(!viommu.asked.is_empty());
    assert!(
        viommu.asked.iter().all(|&(page, _)| page >= first),
        "what has stayed is asked for again: {:x?}",
        viommu.asked
    );
}

#[test]
fn a_killed_server_leaves_what_its_successor_runs_behind_the_iommu() {
    for features in [feature::EVENT_IDX, SPLIT | feature::PACKED] {
        let (disk, control) = Disk::slow("slow");
        let mut server = Server::start(IdlePolicy::default(), vec![disk]);
        let mut viommu = Viommu::connect(&server.path(0), features, 1, 8);
        let region = viommu.track();
        viommu.serve_all();
        for block in 0..6 {
            assert!(viommu.io().submit(0, Op::Write, block));
        }
        viommu.until("they are in flight", |_| control.held() == 6);
        drop(server.stop());

        let server = Server::start(IdlePolicy::default(), vec![Disk::ram("again")]);
        let Viommu { front, .. } = viommu;
        let Front {
            memory,
            layout,
            queues,
            features,
            ..
        } = front;
        let mut front = Front::connect(&server.path(0), 1, 8);
        (front.memory, front.layout, front.queues) = (memory, layout, queues);
        front.features = features;
        let mut viommu = Viommu::over(front, 0, false);
        viommu.front.track_in(&region);
        let base = {
            let Front { queues, memory, .. } = &mut viommu.front;
            queues[0].ring().base(memory)
        };
        viommu.start(0, base);
        assert_eq!(viommu.drain(), (6, 0));
        for block in 0..6 {
            assert!(viommu.io().submit(0, Op::Read, block));
        }
        assert_eq!(viommu.drain(), (6, 0));
    }
}

#[test]
fn a_sleeping_core_wakes_for_updates_and_for_limits() {
    // Everything that happens must wake it.
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("ram")]);
    let mut viommu = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    for _ in 0..20 {
        verify(&mut viommu, 8, true);
    }
}

#[test]
fn a_front_end_that_goes_with_misses_open_lets_the_core_sleep() {
    let (mut disk, control, _file) = slow_file();
    disk.config.drain_limit_ns = 30_000_000_000;
    let server = Server::start(IdlePolicy::Sleep, vec![disk]);
    let mut viommu = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    // One is in flight, and the next one has asked for its buffer.
    assert!(viommu.io().submit(0, Op::Read, 0));
    viommu.until("it is in flight", |_| control.held() == 1);
    assert!(viommu.io().submit(0, Op::Read, 1));
    viommu.next_miss();
    drop(viommu);
    // Longer than the limit of what it has asked for.
    std::thread::sleep(Duration::from_millis(1_000));
    let before = server.cpu();
    std::thread::sleep(Duration::from_millis(400));
    let spent = server.cpu() - before;
    assert!(spent < Duration::from_millis(100), "{spent:?} of 400 ms");
    control.set_open(true);
    let mut next = Viommu::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    verify(&mut next, 8, false);
}

#[test]
fn without_the_platform_feature_the_same_socket_serves_guest_addresses() {
    let server = Server::start(IdlePolicy::default(), vec![Disk::ram("ram")]);
    {
        let mut viommu = Viommu::running(&server.path(0), SPLIT, 1, 8);
        verify(&mut viommu, 8, true);
    }
    let mut front = Front::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    assert_eq!(front.features & PLATFORM, 0);
    front.io().verify(16);
    front.refused(Viommu::invalidate_message(0, u64::MAX));
}
