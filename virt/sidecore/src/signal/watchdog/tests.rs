use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, FromRawFd, OwnedFd},
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
};

use super::*;

/// Longer than anything here takes, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns a blocking eventfd.
fn blocking() -> File {
    // SAFETY: no pointers; a new descriptor, which nothing else owns.
    File::from(unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) })
}

/// Returns a blocking eventfd that is full.
fn full() -> File {
    let mut fd = blocking();
    fd.write_all(&(u64::MAX - 1).to_ne_bytes())
        .expect("an empty counter takes it");
    fd
}

fn set_blocking(fd: &File, is_blocking: bool) {
    let flags = if is_blocking { 0 } else { libc::O_NONBLOCK };
    // SAFETY: numbers only.
    let set = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) };
    assert_eq!(set, 0);
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_micros(200));
    }
}

/// Runs `body` on a thread of its own, which must end.
fn in_time<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    thread::spawn(move || done.send(body()));
    wait.recv_timeout(PATIENCE).expect("a write is held")
}

/// Creates a watchdog without a thread, awake, and a thread that it finds held in a write, whose
/// outcome is sent.
fn held() -> (
    Arc<Watchdog>,
    File,
    mpsc::Receiver<Written>,
    thread::JoinHandle<()>,
) {
    install_handler().expect("SIGURG is free");
    let watchdog = Arc::new(Watchdog::new(
        Fences::by_kernel().expect("the kernel has membarrier"),
    ));
    watchdog.wake();
    let fd = full();
    let (done, outcome) = mpsc::channel();
    let (own, peer) = (Arc::clone(&watchdog), fd.try_clone().expect("a descriptor"));
    let thread = thread::spawn(move || {
        let writer = Writer::register(own).expect("a signal mask");
        let written = writer
            .write(peer.as_fd(), Wake::IfFrequent)
            .expect("an eventfd");
        done.send(written).expect("the test waits");
    });
    until("the thread is in its write", || {
        let watched = watchdog.watched();
        let is_in_write = |watched: &WatchedThread| {
            watched.record.0.count() == 1 && is_asleep(watched.tid) == Some(true)
        };
        watched.first().is_some_and(is_in_write)
    });
    (watchdog, fd, outcome, thread)
}

#[test]
fn a_look_ends_a_held_write() {
    let (watchdog, _fd, outcome, thread) = held();
    watchdog.look(false);
    assert_eq!(outcome.recv_timeout(PATIENCE), Ok(Written::Held));
    thread.join().unwrap();
    assert!(watchdog.watched().is_empty());
}

#[test]
fn a_late_look_is_not_believed() {
    let (watchdog, mut fd, outcome, thread) = held();
    watchdog.look(true);
    assert!(outcome.recv_timeout(Duration::from_millis(20)).is_err());
    // Once the peer drains it, the write ends normally.
    fd.read_exact(&mut [0; 8]).unwrap();
    assert_eq!(outcome.recv_timeout(PATIENCE), Ok(Written::Done));
    thread.join().unwrap();
}

#[test]
fn a_watchdog_does_not_sleep_while_a_write_is_held() {
    let (watchdog, mut fd, _outcome, thread) = held();
    assert!(!watchdog.sleep());
    fd.read_exact(&mut [0; 8]).unwrap();
    thread.join().unwrap();
    assert!(Fences::by_kernel().is_some());
    assert!(watchdog.sleep());
}

#[test]
fn every_held_write_ends() {
    let watchdog = Watchdog::start().unwrap();
    let longest = in_time(move || {
        let writer = Writer::register(watchdog).unwrap();
        let held = (0..50).map(|_| {
            let (fd, start) = (full(), Instant::now());
            let written = writer.write(fd.as_fd(), Wake::Now).unwrap();
            assert_eq!(written, Written::Held);
            start.elapsed()
        });
        held.max()
    });
    println!("the longest of 50: {longest:?}");
}

#[test]
fn a_peer_that_drains_before_the_look_is_found() {
    let watchdog = Watchdog::start().unwrap();
    let fd = full();
    let is_over = Arc::new(AtomicBool::new(false));
    let (mut peer, ended) = (fd.try_clone().unwrap(), Arc::clone(&is_over));
    let peer = thread::spawn(move || {
        while !ended.load(Relaxed) {
            // Filled again, without waiting itself; then for less than the least time between two
            // checks.
            set_blocking(&peer, false);
            let _ = peer.read(&mut [0; 8]);
            let _ = peer.write(&(u64::MAX - 2).to_ne_bytes());
            set_blocking(&peer, true);
            thread::sleep(Duration::from_micros(300));
        }
        set_blocking(&peer, false);
        let _ = peer.read(&mut [0; 8]);
    });
    let held = in_time(move || {
        let writer = Writer::register(watchdog).unwrap();
        let start = Instant::now();
        while writer.write(fd.as_fd(), Wake::Now).unwrap() != Written::Held {}
        start.elapsed()
    });
    println!("found after {held:?}");
    is_over.store(true, Relaxed);
    peer.join().unwrap();
}

#[test]
fn writers_that_are_preempted_are_not_held() {
    let watchdog = Watchdog::start().unwrap();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let writers = (0..4 * processors).map(|_| {
        let watchdog = Arc::clone(&watchdog);
        thread::spawn(move || {
            let writer = Writer::register(watchdog).unwrap();
            let (mut fd, start) = (blocking(), Instant::now());
            let mut writes = 0_u64;
            while start.elapsed() < Duration::from_millis(500) {
                let written = writer.write(fd.as_fd(), Wake::Now).unwrap();
                assert_eq!(written, Written::Done);
                writes += 1;
            }
            let mut count = [0; 8];
            fd.read_exact(&mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), writes);
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.join().unwrap();
    }
}

#[test]
fn few_writes_let_the_watchdog_sleep_and_frequent_ones_wake_it() {
    let watchdog = Watchdog::start().unwrap();
    let writer = Writer::register(Arc::clone(&watchdog)).unwrap();
    let mut fd = blocking();
    let write = || writer.write(fd.as_fd(), Wake::IfFrequent).unwrap();
    for _ in 0..3 {
        for _ in 0..WAKE_AFTER {
            assert_eq!(write(), Written::Unwatched);
        }
        assert_eq!(write(), Written::Done);
        until("it sleeps", || !watchdog.state.0.is_awake());
    }
    let mut count = [0; 8];
    fd.read_exact(&mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 3);
}

#[test]
fn a_descriptor_that_takes_no_writes_is_refused() {
    let watchdog = Watchdog::start().unwrap();
    let writer = Writer::register(watchdog).unwrap();
    let file = File::open("/dev/null").unwrap();
    assert!(writer.write(file.as_fd(), Wake::Now).is_err());
}
