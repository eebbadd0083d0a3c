//! Cost of a connected guest that is idle: heap, log lines, and the core's time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};
use std::time::Duration;

use crate::common::front::{Front, event, fd};
use crate::common::{Disk, LOGGED, Server, feature, options};
use sidecore::IdlePolicy;
use vhost_user::wire::{Request, VringState};

/// Bytes on the heap that threads other than the tests' own have allocated and not freed.
static HELD: AtomicIsize = AtomicIsize::new(0);

thread_local! {
    /// This thread is the guests', not the server's.
    static IS_GUEST: Cell<bool> = const { Cell::new(false) };
}

struct Count;

impl Count {
    fn add(bytes: isize) {
        if !IS_GUEST.try_with(Cell::get).unwrap_or(true) {
            HELD.fetch_add(bytes, Relaxed);
        }
    }
}

// SAFETY: everything is the system allocator's; counting allocates nothing.
unsafe impl GlobalAlloc for Count {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        Self::add(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNT: Count = Count;

fn held(server: &Server, exports: usize) -> isize {
    // Answered by the core: what was under way is done.
    for disk in 0..exports {
        server.stats(disk);
    }
    HELD.load(Relaxed)
}

/// One test: the counters are the process's.
#[test]
fn a_connected_guest_that_is_idle_costs_little() {
    let _turn = crate::alone();
    const EXPORTS: usize = 32;
    IS_GUEST.set(true);
    for (features, queues) in [
        (feature::EVENT_IDX, 1),
        (feature::EVENT_IDX | feature::INDIRECT, 4),
        (feature::PACKED | feature::EVENT_IDX | feature::INDIRECT, 1),
        (feature::PACKED | feature::EVENT_IDX, 4),
    ] {
        let disks = (0..EXPORTS).map(|_| Disk::null("null")).collect();
        let server = Server::start(IdlePolicy::Sleep, disks);
        let before = held(&server, EXPORTS);
        let connect = |disk| server.guest(disk, options(features, queues, 8));
        let mut guests: Vec<_> = (0..EXPORTS).map(connect).collect();
        let connected = held(&server, EXPORTS) - before;
        // Having worked, it keeps what it needed once.
        for guest in &mut guests {
            let io = &mut guest.io();
            for block in 0..64 {
                while !io.submit(block as u16 % queues, vhost_blk::queue::Op::Write, block) {
                    io.drain();
                }
            }
            io.drain();
        }
        let worked = held(&server, EXPORTS) - before;
        let per = |bytes: isize| bytes / EXPORTS as isize / queues as isize;
        eprintln!(
            "{features:#x}, {queues} queues of 256: {} bytes of heap per queue connected, {} after \
             work",
            per(connected),
            per(worked)
        );
        assert!(per(connected) < 4096, "{}", per(connected));
        assert!(per(worked) < 4096, "{}", per(worked));
        // And leaves nothing.
        drop(guests);
        let mut left = 0;
        crate::common::until("the connections end", || {
            left = held(&server, EXPORTS) - before;
            left < (EXPORTS * 256) as isize
        });
        eprintln!("left: {left} bytes");
    }
    lines_are_bounded();
    sweeps();
}

/// Refused requests, connections and violations without end: the log is not.
fn lines_are_bounded() {
    let server = Server::start(IdlePolicy::Sleep, vec![Disk::ram("noisy")]);
    let before = LOGGED.load(Relaxed);
    let mut front = Front::connect(&server.path(0), 1, 8);
    front.set_features(0);
    for num in 0..2_000 {
        front.refused(Request::SetVringNum(VringState { index: 900, num }));
    }
    let kick = Request::SetVringKick(fd(0, Some(event())));
    front.refused(kick);
    drop(front);
    for _ in 0..200 {
        let mut front = Front::running(&server.path(0), 0, 1, 8);
        front.jump(1_000);
        front.stop(0);
    }
    let lines = LOGGED.load(Relaxed) - before;
    eprintln!("{lines} lines of log");
    assert!(lines < 60, "{lines} lines");
    assert!(lines > 2, "something is said");
}

/// Printed, not judged: the machine is shared.
fn sweeps() {
    const EXPORTS: usize = 256;
    let disks = (0..EXPORTS).map(|_| Disk::null("null")).collect();
    let server = Server::start(IdlePolicy::Poll, disks);
    let guests: Vec<_> = (0..EXPORTS)
        .map(|disk| server.guest(disk, options(feature::EVENT_IDX, 1, 1)))
        .collect();
    let before = server.core().stats().core;
    std::thread::sleep(Duration::from_millis(200));
    let after = server.core().stats().core;
    let sweeps = after.sweeps_idle - before.sweeps_idle;
    let ns = (after.idle_ns - before.idle_ns) / sweeps.max(1);
    eprintln!("256 connected guests: {ns} ns per idle sweep ({sweeps} sweeps)");
    drop(guests);
}
