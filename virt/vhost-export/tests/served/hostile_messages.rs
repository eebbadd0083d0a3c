//! Front ends that lie, flood, fall silent or vanish. A guest beside them notices nothing, the core
//! can sleep, and the next front end of the same device finds it well.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::common::front::{Front, copy, event, fd};
use crate::common::raw::NOWHERE;
use crate::common::{Disk, Guest, PATIENCE, Server, feature, open_soon, options, until};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, ftruncate, memfd_create};
use seeded::Random;
use sidecore::IdlePolicy;
use vhost_blk::memory::Memory;
use vhost_blk::queue::Op;
use vhost_user::wire::{Inflight, MemRegion, Request};
use vio_faults::SlowControl;

struct Scene {
    server: Server,
    neighbour: Guest,
    control: SlowControl,
}

impl Scene {
    fn new() -> Self {
        let (disk, control) = Disk::slow("target");
        control.set_open(true);
        let server = Server::start(IdlePolicy::Sleep, vec![disk, Disk::ram("neighbour")]);
        let neighbour = server.guest(1, options(feature::EVENT_IDX, 2, 8));
        Self {
            server,
            neighbour,
            control,
        }
    }

    fn front(&self, queues: u16) -> Front {
        Front::running(&self.server.path(0), feature::EVENT_IDX, queues, 8)
    }

    /// Checks that the neighbour is served, and that the core sleeps when all guests are idle.
    #[track_caller]
    fn check(&mut self, what: &str) {
        self.neighbour.verify(8);
        self.check_rest(what);
    }

    #[track_caller]
    fn check_rest(&mut self, what: &str) {
        until(&format!("{what}: the core sleeps"), || {
            let before = self.server.cpu();
            std::thread::sleep(Duration::from_millis(10));
            self.server.cpu() - before < Duration::from_millis(1)
        });
    }

    /// The next front end of the device.
    #[track_caller]
    fn check_next(&mut self, what: &str) {
        self.check(what);
        let mut guest = self.server.guest(0, options(feature::EVENT_IDX, 2, 8));
        guest.verify(8);
        guest.stop();
    }
}

fn blocking(fd: &OwnedFd) {
    let flags = fcntl_getfl(fd).expect("it is open");
    fcntl_setfl(fd, flags & !OFlags::NONBLOCK).expect("it is open");
}

/// As full as an eventfd gets.
fn fill(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
}

/// Returns descriptors that are neither eventfds nor memory.
fn misfits() -> Vec<(&'static str, OwnedFd)> {
    let (socket, _) = UnixStream::pair().expect("sockets");
    let (pipe, _) = std::io::pipe().expect("a pipe");
    let open = |path| OwnedFd::from(std::fs::File::open(path).expect("it is there"));
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
    vec![
        ("a socket", socket.into()),
        ("a pipe", pipe.into()),
        ("/dev/null", open("/dev/null")),
        ("/dev/zero", open("/dev/zero")),
        ("a directory", open("/tmp")),
        ("/proc", open("/proc/self/maps")),
        ("an epoll", epoll.expect("an epoll")),
    ]
}

#[test]
fn regions_that_lie_are_refused() {
    let mut scene = Scene::new();
    let mut front = Front::connect(&scene.server.path(0), 1, 8);
    front.set_features(feature::EVENT_IDX);
    let file = |len: u64| {
        let file = memfd_create("lie", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&file, len).expect("it grows");
        file
    };
    let region = |guest_addr, size, user_addr, mmap_offset| MemRegion {
        guest_addr,
        size,
        user_addr,
        mmap_offset,
    };
    let mega = 1 << 20;
    for lie in [
        region(0, 2 * mega, 0, 0),
        region(0, mega, 0, 4096),
        region(0, mega, 0, 1 << 50),
        region(0, mega, 0, u64::MAX - 4095),
        region(0, 1 << 46, 0, 0),
        region(0, u64::MAX, 0, 0),
        region(0, 0, 0, 0),
        region(123, mega, 0, 0),
        region(0, mega - 4096, 0, 123),
        region(u64::MAX - 4095, mega, 0, 0),
        region(0, mega, u64::MAX - 4095, 0),
    ] {
        front.refused(Request::AddMemReg(lie, file(mega)));
        front.refused(Request::SetMemTable(vec![(lie, file(mega))]));
    }
    let good = region(0, mega, 0, 0);
    for (what, misfit) in misfits() {
        let called = front.connection.call(Request::AddMemReg(good, misfit));
        called.expect_err(what);
        scene.check(what);
        if front.connection.value(Request::GetFeatures).is_err() {
            front = Front::connect(&scene.server.path(0), 1, 8);
            front.set_features(feature::EVENT_IDX);
        }
    }
    front.refused(Request::AddMemReg(good, event()));
    let read_only = file(mega);
    let path = format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&read_only)
    );
    let read_only = std::fs::File::open(path).expect("it is there").into();
    front.refused(Request::AddMemReg(good, read_only));
    // A table that overlaps itself, and one with more than there may be.
    let twice = vec![
        (good, file(mega)),
        (region(4096, mega, mega, 0), file(mega)),
    ];
    front.refused(Request::SetMemTable(twice));
    let mut taken = 0;
    for at in 0..200 {
        let next = region(at * mega, 4096, at * mega, 0);
        match front.connection.call(Request::AddMemReg(next, file(4096))) {
            Ok(_) => taken += 1,
            Err(_) => break,
        }
    }
    assert!((32..=64).contains(&taken), "{taken}");
    front.share();
    front.serve(0);
    front.io().verify(8);
    drop(front);
    scene.check_next("lying regions");
}

/// Memory that can be taken away.
fn shrinkable(front: &mut Front) -> OwnedFd {
    let file = memfd_create("shrinks", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, front.layout.len() as u64).expect("it grows");
    front.memory = Memory::map(copy(&file), 0, front.layout.len()).expect("a mapping");
    file
}

#[test]
fn memory_cut_off_during_requests_ends_the_connection() {
    let mut scene = Scene::new();
    for round in 0..12 {
        let mut front = Front::connect(&scene.server.path(0), 2, 8);
        let file = shrinkable(&mut front);
        front.set_features(if round % 2 == 0 { 0 } else { feature::PACKED });
        front.share();
        for queue in 0..2 {
            front.serve(queue);
        }
        front.io().verify(8);
        scene.control.set_open(false);
        for block in 0..8 {
            let op = if block < 4 { Op::Read } else { Op::Write };
            assert!(front.io().submit((block % 2) as u16, op, block));
        }
        until("they are in flight", || scene.control.held() == 8);
        // Nothing here may touch the memory any more.
        let len = match round % 3 {
            0 => 0,
            1 => 4096,
            _ => front.layout.rings_len() as u64,
        };
        ftruncate(&file, len).expect("it shrinks");
        scene.control.set_open(true);
        front.queues[0].kick();
        if len == 0 {
            front.ended();
        }
        scene.neighbour.verify(8);
        drop(front);
        scene.check_next("truncated memory");
    }
}

#[test]
fn memory_that_shrinks_between_messages_ends_the_connection_or_is_refused() {
    let mut scene = Scene::new();
    for step in 0..4 {
        let mut front = Front::connect(&scene.server.path(0), 1, 8);
        let file = shrinkable(&mut front);
        front.set_features(feature::EVENT_IDX);
        front.share();
        front.describe(0);
        let shrink = || ftruncate(&file, 0).expect("it shrinks");
        if step == 0 {
            shrink();
        }
        // What fails here has been refused, or the connection has ended.
        let kick = front.kick_request(0);
        let started = front.connection.call(kick);
        if step == 1 {
            shrink();
        }
        if started.is_ok() {
            let enable = Request::SetVringEnable {
                index: 0,
                enable: true,
            };
            let _ = front.connection.call(enable);
        }
        if step == 2 {
            shrink();
        }
        front.queues[0].kick();
        if step == 3 {
            shrink();
            let _ = front.connection.call(Request::GetVringBase { index: 0 });
        }
        scene.neighbour.verify(8);
        drop(front);
        scene.check_next("shrinking memory");
    }
}

#[test]
fn kicks_and_calls_must_be_eventfds() {
    let mut scene = Scene::new();
    for which in 0..3 {
        // User-mode Linux is called by a socket.
        for (what, misfit) in misfits().into_iter().skip(usize::from(which != 0)) {
            let mut front = Front::sharing(&scene.server.path(0), feature::EVENT_IDX, 1, 8);
            front.describe(0);
            let kick = front.kick_request(0);
            let _ = match which {
                0 => front
                    .connection
                    .call(Request::SetVringKick(fd(0, Some(misfit)))),
                1 => {
                    let call = Request::SetVringCall(fd(0, Some(misfit)));
                    front
                        .connection
                        .call(call)
                        .and_then(|_| front.connection.call(kick))
                }
                _ => {
                    let err = Request::SetVringErr(fd(0, Some(misfit)));
                    front
                        .connection
                        .call(err)
                        .and_then(|_| front.connection.call(kick))
                }
            }
            .expect_err(what);
            scene.check(what);
        }
    }
    // And under a running ring.
    for (what, misfit) in misfits().into_iter().skip(1) {
        let mut front = scene.front(1);
        let again = copy(&misfit);
        let replaced = front
            .connection
            .call(Request::SetVringKick(fd(0, Some(misfit))));
        replaced.expect_err(what);
        let replaced = front
            .connection
            .call(Request::SetVringCall(fd(0, Some(again))));
        replaced.expect_err(what);
        if front.connection.value(Request::GetFeatures).is_ok() {
            front.io().verify(8);
        }
    }
    scene.check_next("odd descriptors");
}

#[test]
fn a_kick_that_is_always_readable_does_not_keep_the_core_awake() {
    let mut scene = Scene::new();
    for flags in [EventfdFlags::empty(), EventfdFlags::SEMAPHORE] {
        let mut front = scene.front(1);
        front.io().verify(4);
        let kick = eventfd(0, flags).expect("an eventfd");
        fill(&kick);
        front.call(Request::SetVringKick(fd(0, Some(copy(&kick)))));
        blocking(&kick);
        // One that is read to 0 is quiet; a semaphore of 2^64 is not, and is muted.
        let start = (Instant::now(), scene.server.cpu());
        std::thread::sleep(Duration::from_millis(200));
        let used = scene.server.cpu() - start.1;
        assert!(used < start.0.elapsed() / 4, "{flags:?}: {used:?}");
        scene.neighbour.verify(64);
        front.call(front.kick_request(0));
        front.io().verify(8);
    }
    scene.check_next("full kicks");
}

#[test]
fn a_storm_of_kicks_leaves_the_core_its_sleep() {
    let mut scene = Scene::new();
    let mut front = scene.front(1);
    front.io().verify(4);
    // The kick is also the call: each call is a kick again.
    front.call(Request::SetVringCall(fd(
        0,
        Some(copy(front.queues[0].kick_fd())),
    )));
    front.io().verify(64);
    let kick = copy(front.queues[0].kick_fd());
    let until = Instant::now() + Duration::from_millis(400);
    let cpu = scene.server.cpu();
    let stormer = std::thread::spawn(move || {
        while Instant::now() < until {
            let _ = rustix::io::write(&kick, &1_u64.to_ne_bytes());
        }
    });
    std::thread::sleep(Duration::from_millis(100));
    scene.neighbour.verify(64);
    stormer.join().expect("no panic");
    let used = scene.server.cpu() - cpu;
    assert!(used < Duration::from_millis(200), "{used:?} of 400 ms");
    let core = scene.server.core().stats().core;
    assert!(core.mutes > 0, "{core:?}");
    front.io().verify(8);
    drop(front);
    scene.check_next("a storm of kicks");
}

/// A write to a call's eventfd whose counter is full would block the writer. O_NONBLOCK alone
/// prevents that, and the front end can clear it at any moment.
#[test]
fn a_full_blocking_call_does_not_hold_the_core() {
    let mut scene = Scene::new();
    for features in [0, feature::PACKED] {
        let mut front = Front::running(&scene.server.path(0), features, 1, 8);
        let call = event();
        front.call(Request::SetVringCall(fd(0, Some(copy(&call)))));
        fill(&call);
        blocking(&call);
        for block in 0..8 {
            assert!(front.io().submit(0, Op::Read, 900 + block));
        }
        scene.check("a full call");
        // Also the error descriptor.
        let err = event();
        front.call(Request::SetVringErr(fd(0, Some(copy(&err)))));
        fill(&err);
        blocking(&err);
        front.jump(40_000);
        scene.check("a full error descriptor");
        drop(front);
        scene.check_next("full calls");
    }
}

#[test]
fn a_front_end_that_does_not_read_is_not_read_from() {
    let mut scene = Scene::new();
    let mut socket = UnixStream::connect(scene.server.path(0)).expect("it listens");
    socket.set_nonblocking(true).expect("a socket");
    let request = Request::GetFeatures.encode(false).to_bytes();
    let mut sent = 0;
    let mut stuck_since = None;
    // Until both directions are full, and stay so.
    loop {
        match socket.write(&request) {
            Ok(len) => {
                assert_eq!(len, request.len(), "a short message is sent whole or not");
                (sent, stuck_since) = (sent + 1, None);
            }
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                let since = *stuck_since.get_or_insert_with(Instant::now);
                if since.elapsed() > Duration::from_millis(100) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(sent < 1_000_000, "somebody keeps it all");
    }
    // Tried again each millisecond: no more than that.
    let cpu = scene.server.cpu();
    std::thread::sleep(Duration::from_millis(200));
    let used = scene.server.cpu() - cpu;
    assert!(used < Duration::from_millis(50), "{used:?} of 200 ms");
    scene.neighbour.verify(16);
    // Every request has its reply once the front end reads.
    socket.set_nonblocking(false).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut replies = vec![0; sent * (request.len() + 8)];
    socket.read_exact(&mut replies).expect("the replies");
    drop(socket);
    scene.check_next("a front end that does not read");
}

#[test]
fn the_last_reply_comes_though_nothing_more_is_asked() {
    let mut scene = Scene::new();
    // After a driver's requests the core is no longer woken by the disk.
    scene.check_next("before");
    let mut socket = UnixStream::connect(scene.server.path(0)).expect("it listens");
    let request = Request::GetFeatures.encode(false).to_bytes();
    let reply = request.len() as u64 + 8;
    let waiting = |socket: &UnixStream| rustix::io::ioctl_fionread(socket).expect("a socket");
    let mut sent = 0;
    // One at a time, until a reply finds no room; a core that sleeps has left no request in the
    // socket.
    loop {
        socket.write_all(&request).expect("there is room");
        sent += 1;
        let since = Instant::now();
        while waiting(&socket) < sent * reply && since.elapsed() < Duration::from_millis(20) {
            std::thread::yield_now();
        }
        if waiting(&socket) < sent * reply {
            scene.check_rest("one that does not read");
            if waiting(&socket) < sent * reply {
                break;
            }
        }
        assert!(sent < 100_000, "every reply finds room");
    }
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut replies = vec![0; (sent * reply) as usize];
    socket.read_exact(&mut replies).expect("the last reply too");
    drop(socket);
    scene.check_next("a front end that reads late");
}

#[test]
fn garbage_ends_the_connection() {
    let mut scene = Scene::new();
    let mut random = Random::new(7);
    for round in 0..300 {
        let mut socket = UnixStream::connect(scene.server.path(0)).expect("it listens");
        let mut bytes: Vec<u8> = (0..256).map(|_| random.below(256) as u8).collect();
        match round % 3 {
            // A known request with a length that is not its own, of version 1.
            0 => {
                bytes[..4].copy_from_slice(&(1 + random.below(45) as u32).to_ne_bytes());
                bytes[4..8].copy_from_slice(&9_u32.to_ne_bytes());
                bytes[8..12].copy_from_slice(&(random.below(60) as u32).to_ne_bytes());
            }
            // One that announces 4 GiB.
            1 => {
                bytes[4..8].copy_from_slice(&1_u32.to_ne_bytes());
                bytes[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
            }
            _ => {}
        }
        let _ = socket.write_all(&bytes);
        if round % 50 == 0 {
            scene.check("garbage");
        }
    }
    scene.check_next("garbage");
}

#[test]
fn half_a_message_and_silence_cost_nothing() {
    let mut scene = Scene::new();
    let request = Request::GetFeatures.encode(false).to_bytes();
    let mut socket = UnixStream::connect(scene.server.path(0)).expect("it listens");
    for half in [0, 5] {
        socket.write_all(&request[half..half + 5]).expect("a part");
        scene.check("half a message");
    }
    socket.write_all(&request[10..]).expect("the rest");
    let mut reply = [0; 20];
    socket.read_exact(&mut reply).expect("a reply");
    socket.write_all(&request[..11]).expect("a part");
    drop(socket);
    scene.check_next("half a message");
}

#[test]
fn a_flood_of_requests_gets_no_more_than_its_share() {
    let mut scene = Scene::new();
    let mut front = Front::connect(&scene.server.path(0), 1, 8);
    let until = Instant::now() + Duration::from_millis(300);
    let flood = std::thread::spawn(move || {
        let mut count = 0;
        while Instant::now() < until {
            front
                .connection
                .value(Request::GetFeatures)
                .expect("a reply");
            count += 1;
        }
        count
    });
    scene.neighbour.verify(200);
    assert!(flood.join().expect("no panic") > 10);
    scene.check_next("a flood of requests");
}

#[test]
fn requests_that_never_end_are_cancelled_when_their_front_end_goes() {
    let mut scene = Scene::new();
    for _ in 0..3 {
        let mut front = scene.front(2);
        scene.control.set_open(false);
        front.put_in_flight(&scene.control, 2, Op::Read, 0..8);
        drop(front);
        let start = Instant::now();
        // Connects at once, and is served when the last connection's requests are over.
        let cpu = scene.server.cpu();
        let mut next = Front::connect(&scene.server.path(0), 1, 8);
        assert!(
            start.elapsed() >= Duration::from_millis(150),
            "it did not wait"
        );
        let used = scene.server.cpu() - cpu;
        assert!(used < Duration::from_millis(100), "{used:?} of waiting");
        next.set_features(0);
        drop(next);
        assert_eq!(scene.control.held(), 0);
        scene.control.set_open(true);
        scene.check_next("a disk that never answers");
    }
}

#[test]
fn requests_that_cannot_be_cancelled_keep_only_their_own_device() {
    let mut scene = Scene::new();
    let mut front = scene.front(1);
    scene.control.set_open(false);
    scene.control.set_uncancellable(true);
    assert!(front.io().submit(0, Op::Read, 1));
    until("it is in flight", || scene.control.held() == 1);
    drop(front);
    until("the next is turned away", || {
        scene.server.stats(0).cancelled != 0
            || Front::try_connect(&scene.server.path(0), 1, 8).is_err()
    });
    // The memory may still be written: every front end that connects is turned away at once.
    for _ in 0..10 {
        assert!(Front::try_connect(&scene.server.path(0), 1, 8).is_err());
    }
    scene.check("a request that cannot be cancelled");
    scene.control.set_uncancellable(false);
    scene.control.set_open(true);
    until("the device is free", || {
        Front::try_connect(&scene.server.path(0), 1, 8).is_ok()
    });
    scene.check_next("a request that cannot be cancelled");
}

/// Stopping a ring waits for its requests, however long they take, and for no others; meanwhile the
/// core sleeps.
#[test]
fn a_stop_waits_for_its_own_ring_and_cancels_nothing() {
    let mut scene = Scene::new();
    let mut front = scene.front(2);
    front.io().verify(8);
    scene.control.set_open(false);
    scene.control.set_uncancellable(true);
    front.put_in_flight(&scene.control, 2, Op::Read, 0..8);
    let control = scene.control.clone();
    // Three times the limit after which the end of a connection would cancel.
    let (start, cpu) = (Instant::now(), scene.server.cpu());
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(600));
        control.set_open(true);
    });
    front.stop(0);
    assert!(start.elapsed() >= Duration::from_millis(600), "too early");
    let used = scene.server.cpu() - cpu;
    assert!(used < Duration::from_millis(200), "{used:?} of waiting");
    opener.join().expect("no panic");
    assert_eq!(front.io().drain(), (8, 0));
    assert_eq!(scene.server.stats(0).cancelled, 0);
    scene.check("a stopped ring");
    front.serve(0);
    front.io().verify(8);
}

#[test]
fn a_second_front_end_is_turned_away() {
    let mut scene = Scene::new();
    let mut front = scene.front(1);
    for _ in 0..100 {
        assert!(Front::try_connect(&scene.server.path(0), 1, 8).is_err());
    }
    front.io().verify(8);
    scene
        .server
        .until(0, "they are counted", |stats| stats.turned_away == 100);
    drop(front);
    scene.check_next("a second front end");
}

fn inflight(queues: u16, queue_size: u16, mmap_size: u64) -> Inflight {
    Inflight {
        mmap_size,
        mmap_offset: 0,
        queues,
        queue_size,
    }
}

#[test]
fn inflight_regions_that_are_wrong_harm_nobody_else() {
    let mut scene = Scene::new();
    let mut random = Random::new(3);
    for round in 0..60 {
        let features = [0, feature::EVENT_IDX, feature::PACKED][round % 3];
        let mut front = Front::sharing(&scene.server.path(0), features, 2, 8);
        let region = front.connection.new_inflight(2, 256);
        let (wanted, file) = region.expect("a region");
        let file = match (round / 3) % 4 {
            // Noise, sealed or not.
            0 | 1 => {
                let noisy = memfd_create("noise", MemfdFlags::CLOEXEC).expect("a file");
                let bytes: Vec<u8> = (0..wanted.mmap_size)
                    .map(|_| random.below(256) as u8)
                    .collect();
                let mut noisy = std::fs::File::from(noisy);
                if round % 2 == 0 {
                    // The head says that it is one of ours.
                    let mut bytes = bytes;
                    bytes[8..12].copy_from_slice(&[1, 0, 0, 1]);
                    noisy.write_all(&bytes).expect("memory");
                } else {
                    noisy.write_all(&bytes).expect("memory");
                }
                OwnedFd::from(noisy)
            }
            // The other layout's.
            2 => {
                let other = features ^ feature::PACKED;
                front.set_features(other);
                file
            }
            // Shared with the front end, which writes into it all the time.
            _ => file,
        };
        let given = Request::SetInflightFd(wanted, copy(&file));
        let again = Request::SetInflightFd(wanted, copy(&file));
        let taken = front.connection.call(given).is_ok() && front.connection.call(again).is_ok();
        if taken {
            for queue in 0..2 {
                front.describe(queue);
                let kick = front.kick_request(queue);
                if front.connection.call(kick).is_ok() {
                    front.enable(queue, true);
                    front.queues[usize::from(queue)].kick();
                }
            }
        }
        scene.neighbour.verify(4);
        drop(front);
    }
    scene.check_next("odd inflight regions");
}

#[test]
fn inflight_regions_that_are_too_small_or_shrink() {
    let mut scene = Scene::new();
    for packed in [0, feature::PACKED] {
        let mut front = Front::sharing(&scene.server.path(0), packed, 2, 8);
        let file = |len| {
            let file = memfd_create("inflight", MemfdFlags::CLOEXEC).expect("a file");
            ftruncate(&file, len).expect("it grows");
            file
        };
        // Larger than its file; of no queue, or too many; for rings of other sizes.
        for (shape, len) in [
            (inflight(2, 256, 1 << 20), 4096),
            (inflight(0, 256, 4096), 4096),
            (inflight(300, 256, 4096), 4096),
            (inflight(2, 0, 4096), 4096),
            (inflight(2, u16::MAX, 4096), 4096),
            (inflight(2, 256, 0), 4096),
            (inflight(2, 256, u64::MAX), 4096),
        ] {
            front.refused(Request::SetInflightFd(shape, file(len)));
        }
        for (what, misfit) in misfits() {
            let shape = inflight(2, 256, 1 << 16);
            let given = front.connection.call(Request::SetInflightFd(shape, misfit));
            given.expect_err(what);
            if front.connection.value(Request::GetFeatures).is_err() {
                front = Front::sharing(&scene.server.path(0), packed, 2, 8);
            }
        }
        // Too small for the rings: refused when they start.
        front.call(Request::SetInflightFd(inflight(1, 16, 4096), file(4096)));
        front.describe(0);
        let kick = front.kick_request(0);
        front.refused(kick);
        front.call(Request::SetInflightFd(
            inflight(1, 256, 1 << 16),
            file(1 << 16),
        ));
        front.describe(1);
        let kick = front.kick_request(1);
        front.refused(kick);
        // Taken away under requests.
        let region = file(1 << 16);
        front.call(Request::SetInflightFd(
            inflight(2, 256, 1 << 16),
            copy(&region),
        ));
        front.serve(0);
        scene.control.set_open(false);
        front.put_in_flight(&scene.control, 1, Op::Write, 0..4);
        ftruncate(&region, 0).expect("it shrinks");
        scene.control.set_open(true);
        // Whether the guest is served on or not is its front end's affair; the rest of the world is
        // not.
        scene.check("a truncated inflight region");
        drop(front);
        scene.check_next("a truncated inflight region");
    }
}

/// Requests in an order that makes no sense.
#[test]
fn messages_out_of_order() {
    let mut scene = Scene::new();
    let path = scene.server.path(0);
    let mut front = Front::connect(&path, 2, 8);
    // No features, no memory, no ring.
    let kick = Request::SetVringKick(fd(0, Some(event())));
    front.refused(kick);
    front.stop(0);
    front.stop(1);
    front.set_features(feature::EVENT_IDX);
    front.describe(0);
    let kick = front.kick_request(0);
    front.refused(kick);
    front.share();
    front.start(0);
    // Under a running ring.
    front.refused(Request::SetFeatures(front.features ^ feature::EVENT_IDX));
    front.refused(Request::SetVringNum(vhost_user::wire::VringState {
        index: 0,
        num: 128,
    }));
    front.refused(Request::SetInflightFd(inflight(2, 256, 4096), event()));
    front.enable(0, true);
    front.io().verify(0);
    // No memory under a running ring, and a reset in the middle of requests.
    scene.control.set_open(false);
    front.put_in_flight(&scene.control, 1, Op::Write, 0..4);
    let opener = open_soon(&scene.control);
    front.call(Request::SetMemTable(Vec::new()));
    opener.join().expect("no panic");
    front.queues[0].kick();
    scene.check("no memory");
    front.call(Request::ResetDevice);
    front.call(Request::ResetDevice);
    front.stop(0);
    // Without SET_FEATURES after the reset, with addresses of no memory.
    front.set_features(feature::PACKED);
    front.describe(0);
    let kick = front.kick_request(0);
    front.refused(kick);
    front.share();
    front.serve(0);
    let mut only_first = front.io();
    assert!(only_first.submit(0, Op::Write, 0));
    assert_eq!(only_first.drain(), (1, 0));
    front.refused(Request::RemMemReg(MemRegion {
        guest_addr: NOWHERE,
        size: 4096,
        user_addr: 0,
        mmap_offset: 0,
    }));
    // A front end that goes in the middle of a stop.
    scene.control.set_open(false);
    assert!(front.io().submit(0, Op::Read, 0));
    until("it is in flight", || scene.control.held() == 1);
    let socket = copy(front.connection.socket());
    let stop = Request::GetVringBase { index: 0 }.encode(false).to_bytes();
    rustix::io::write(&socket, &stop).expect("a message");
    std::thread::sleep(Duration::from_millis(5));
    drop(socket);
    drop(front);
    let next = Front::connect(&path, 1, 8);
    scene.control.set_open(true);
    drop(next);
    scene.check_next("messages out of order");
    assert_eq!(scene.server.stop().len(), 2);
}

/// A TCP socket whose last close waits: its peer reads nothing, and it is to linger.
fn lingering() -> (OwnedFd, std::net::TcpListener) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut socket =
        std::net::TcpStream::connect(listener.local_addr().expect("a port")).expect("a connection");
    socket.set_nonblocking(true).expect("a socket");
    let bytes = vec![0; 1 << 16];
    while socket.write(&bytes).is_ok() {}
    let linger = Some(Duration::from_secs(30));
    rustix::net::sockopt::set_socket_linger(&socket, linger).expect("a socket");
    (socket.into(), listener)
}

/// Sends descriptors, where the other side is still there, and closes them elsewhere: ours may be
/// the last.
fn send_with(socket: &UnixStream, bytes: &[u8], owned: Vec<OwnedFd>) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds: Vec<_> = owned.iter().map(AsFd::as_fd).collect();
    let mut space = vec![std::mem::MaybeUninit::uninit(); 4096];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let pieces = [std::io::IoSlice::new(bytes)];
    let _ = sendmsg(socket, &pieces, &mut control, SendFlags::NOSIGNAL);
    std::thread::spawn(move || drop(owned));
}

/// Descriptors that take half a minute to close, wherever a message may have them.
#[test]
fn descriptors_that_are_slow_to_close_hold_nobody_up() {
    let mut scene = Scene::new();
    let features = Request::GetFeatures.encode(false).to_bytes();
    let kick = Request::SetVringKick(fd(0, None)).encode(false).to_bytes();
    let mut listeners = Vec::new();
    let mut slow = || {
        let (socket, listener) = lingering();
        listeners.push(listener);
        socket
    };
    let start = Instant::now();
    for way in 0..5 {
        let socket = UnixStream::connect(scene.server.path(0)).expect("it listens");
        match way {
            // Where one belongs, and where none does.
            0 => send_with(&socket, &kick, vec![slow()]),
            1 => send_with(&socket, &features, vec![slow()]),
            // With half a message, behind one that ends the connection, and more than fit.
            2 => send_with(&socket, &features[..3], vec![slow()]),
            3 => {
                (&socket).write_all(&[0xff; 12]).expect("garbage");
                send_with(&socket, &features, vec![slow()]);
            }
            _ => {
                let many: Vec<_> = (0..40).map(|_| event()).chain([slow()]).collect();
                send_with(&socket, &features, many);
            }
        }
        scene.neighbour.verify(4);
        drop(socket);
        scene.neighbour.verify(4);
    }
    // To one that is turned away.
    let front = scene.front(1);
    let socket = UnixStream::connect(scene.server.path(0)).expect("it listens");
    send_with(&socket, &kick, vec![slow()]);
    drop(socket);
    scene.neighbour.verify(4);
    drop(front);
    scene.check_next("slow descriptors");
    assert!(start.elapsed() < Duration::from_secs(15), "somebody waited");
    // Enough of them, and the device accepts no connection until they are closed; the neighbour is
    // still not affected.
    for _ in 0..8 {
        if let Ok(socket) = UnixStream::connect(scene.server.path(0)) {
            send_with(&socket, &kick, vec![slow()]);
        }
    }
    scene.check("slow descriptors");
    drop(listeners);
    scene.check_next("slow descriptors that were closed");
}
