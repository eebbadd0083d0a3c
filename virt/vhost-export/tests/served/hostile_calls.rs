//! Front ends whose call eventfd makes a write wait, under load: then calls are written (see
//! `sidecore::PeerEventFd`). Each may hold the core once, for milliseconds, however often it
//! connects; a guest beside it goes on, and once it drains its eventfd it is called as before.

use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use denied::Denied;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use sidecore::IdlePolicy;
use vhost_blk::queue::Op;
use vhost_user::wire::Request;

use crate::common::front::{Front, copy, event, fd};
use crate::common::{Disk, Guest, PATIENCE, Server, feature, options, until};

/// Requests after which calls are written.
const MANY: usize = 300;

/// A call eventfd; dropped, it holds no write, so that a test that fails ends.
struct Call(OwnedFd);

impl Call {
    fn new() -> Self {
        Self(event())
    }

    fn set_blocking(&self, is_blocking: bool) {
        let flags = fcntl_getfl(&self.0).expect("it is open");
        let flags = match is_blocking {
            true => flags & !OFlags::NONBLOCK,
            false => flags | OFlags::NONBLOCK,
        };
        fcntl_setfl(&self.0, flags).expect("it is open");
    }

    /// As full as an eventfd gets, or by `room` less. Without waiting, and a blocking one
    /// afterwards.
    fn fill(&self, room: u64) {
        self.set_blocking(false);
        self.drain();
        let _ = rustix::io::write(&self.0, &(u64::MAX - 1 - room).to_ne_bytes());
        self.set_blocking(true);
    }

    /// Takes what is there, and leaves it non-blocking.
    fn drain(&self) -> u64 {
        self.set_blocking(false);
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.drain();
    }
}

/// The hostile one's disk and its neighbour's on one core.
fn scene(idle: IdlePolicy) -> (Server, Guest) {
    let server = Server::start(idle, vec![Disk::ram("target"), Disk::ram("neighbour")]);
    let neighbour = server.guest(1, options(feature::EVENT_IDX, 2, 8));
    (server, neighbour)
}

/// A front end of the first disk that is called by `call`.
fn front(server: &Server, features: u64, call: &Call) -> Front {
    let mut front = Front::running(&server.path(0), features, 1, 8);
    front.call(Request::SetVringCall(fd(0, Some(copy(&call.0)))));
    front
}

/// Requests one by one; the longest.
fn one_by_one(front: &mut Front, requests: usize) -> Duration {
    let times = (0..requests).map(|_| {
        let start = Instant::now();
        let mut io = front.io();
        assert!(io.submit(0, Op::Write, 900));
        assert_eq!(io.drain(), (1, 0));
        start.elapsed()
    });
    times.max().unwrap_or_default()
}

#[test]
fn a_call_that_fills_under_load_holds_the_core_once_however_often_its_front_end_connects() {
    for idle in [IdlePolicy::Sleep, IdlePolicy::Poll] {
        let (server, mut neighbour) = scene(idle);
        for features in [0, feature::PACKED, 0, feature::PACKED] {
            let call = Call::new();
            let mut front = front(&server, features, &call);
            one_by_one(&mut front, MANY);
            call.fill(0);
            let longest = one_by_one(&mut front, MANY);
            println!("the longest of {MANY} requests: {longest:?}");
            neighbour.verify(8);
            server.until(0, "it is said", |stats| stats.violations == 1);
            // Without AIO there is no way left that never waits, and it is not called any more.
            if sidecore::never_waits() {
                call.drain();
                one_by_one(&mut front, 1);
                until("it is called again", || call.drain() != 0);
            }
        }
        assert_eq!(server.stats(0).violations, 1);
    }
}

#[test]
fn a_call_that_is_full_for_short_times_again_and_again_is_found() {
    let (server, mut neighbour) = scene(IdlePolicy::Poll);
    let call = Arc::new(Call::new());
    let mut front = front(&server, 0, &call);
    one_by_one(&mut front, MANY);
    let is_over = Arc::new(AtomicBool::new(false));
    let (own, ended) = (Arc::clone(&call), Arc::clone(&is_over));
    let filler = std::thread::spawn(move || {
        while !ended.load(Relaxed) {
            own.fill(0);
            // Less than what passes between two looks.
            std::thread::sleep(Duration::from_micros(500));
        }
    });
    let start = Instant::now();
    while server.stats(0).violations == 0 {
        one_by_one(&mut front, 1);
        assert!(start.elapsed() < PATIENCE, "it is not found");
    }
    println!("found after {:?}", start.elapsed());
    neighbour.verify(8);
    one_by_one(&mut front, MANY);
    is_over.store(true, Relaxed);
    filler.join().expect("no panic");
    assert_eq!(server.stats(0).violations, 1);
}

/// The tests above where the host forbids a part of what they rest on.
#[test]
fn a_host_that_forbids_a_way_of_calling_is_no_way_to_hold_the_core() {
    let hosts = [
        ("no AIO", libc::SYS_io_setup),
        ("no membarrier", libc::SYS_membarrier),
        ("no tgkill", libc::SYS_tgkill),
    ];
    for (what, number) in hosts {
        let mut tests = Command::new(std::env::current_exe().expect("it runs"));
        tests.args([
            "--exact",
            "hostile_messages::a_full_blocking_call_does_not_hold_the_core",
        ]);
        // Where calls are never written there is nothing to find.
        if what == "no AIO" {
            tests.args([
                "hostile_calls::a_call_that_fills_under_load_holds_the_core_once_however_often_its_front_end_connects",
                "hostile_calls::a_call_that_is_full_for_short_times_again_and_again_is_found",
            ]);
        }
        Denied::default()
            .call(number, libc::EPERM)
            .apply(&mut tests);
        let output = tests.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{what}: {said}");
        assert!(!said.contains("running 0 tests"), "{what}: {said}");
    }
}
