use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, FromRawFd, OwnedFd},
    sync::mpsc,
    thread,
    time::Duration,
};

use super::*;

/// Returns a blocking eventfd.
fn blocking() -> File {
    // SAFETY: no pointers; a new descriptor, which no other value owns.
    File::from(unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) })
}

#[test]
fn each_signal_counts() {
    let mut fd = blocking();
    for _ in 0..1000 {
        signal_eventfd(fd.as_fd()).unwrap();
    }
    let mut count = [0; 8];
    fd.read_exact(&mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1000);
}

/// Simulates a host that refuses `preadv2`.
#[test]
fn an_eventfd_is_emptied_without_nowait() {
    let fd = blocking();
    assert!(!read_if_readable(fd.as_fd()), "it was not signalled");
    for _ in 0..3 {
        signal_eventfd(fd.as_fd()).unwrap();
    }
    assert!(read_if_readable(fd.as_fd()));
    assert!(!drain_eventfd(fd.as_fd()), "one read takes all signals");
}

#[test]
fn threads_that_follow_each_other_share_a_context() {
    if !never_waits() {
        eprintln!("skipped: no AIO here");
        return;
    }
    let context = || {
        let of_thread =
            || SIGNALLER.with(|own| own.get_or_init(Own::get).0.as_ref().map(|own| own.context));
        thread::spawn(of_thread).join().unwrap().unwrap()
    };
    // Other tests' threads may take the one or the other meanwhile: not as many as there are
    // rounds.
    let contexts: std::collections::HashSet<_> = (0..100).map(|_| context()).collect();
    assert!(contexts.len() < 50, "{}", contexts.len());
}

/// Runs `body` on a thread of its own, which must end.
fn in_time<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    thread::spawn(move || done.send(body()));
    wait.recv_timeout(Duration::from_secs(20))
        .expect("it does not wait for a reader")
}

#[test]
fn each_signal_of_a_peer_counts_in_each_way() {
    let mut fd = blocking();
    let peer = PeerEventFd::new(fd.try_clone().unwrap(), WritePermit::default());
    // Enough signals for the watchdog to be woken meanwhile.
    for _ in 0..3000 {
        peer.signal().unwrap();
    }
    let mut count = [0; 8];
    fd.read_exact(&mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 3000);
}

#[test]
fn a_peer_holds_one_write_and_loses_its_permit_for_all_its_eventfds() {
    if !never_waits() || !writes_are_watched() {
        eprintln!("skipped: no AIO here, or no watchdog");
        return;
    }
    let permit = WritePermit::default();
    let own = permit.clone();
    let times = in_time(move || {
        // As if it connected again each time.
        let times = (0..4).map(|_| {
            let mut fd = blocking();
            let peer = PeerEventFd::new(fd.try_clone().unwrap(), own.clone());
            for _ in 0..200 {
                peer.signal().unwrap();
            }
            fd.read_exact(&mut [0; 8]).unwrap();
            fd.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
            let start = std::time::Instant::now();
            for _ in 0..200 {
                peer.signal().unwrap();
            }
            let took = start.elapsed();
            assert!(own.is_withdrawn());
            // Once it drains its counter it is signalled as before.
            fd.read_exact(&mut [0; 8]).unwrap();
            peer.signal().unwrap();
            let mut count = [0; 8];
            fd.read_exact(&mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), 1);
            took
        });
        times.collect::<Vec<_>>()
    });
    println!("200 signals of a full counter: {times:?}");
    assert!(permit.is_withdrawn());
}

#[test]
fn a_peer_whose_descriptor_takes_no_writes_is_refused() {
    let file = File::open("/dev/null").unwrap();
    let peer = PeerEventFd::new(file, WritePermit::default());
    for _ in 0..3000 {
        assert!(peer.signal().is_err());
    }
}

#[test]
fn a_full_blocking_counter_does_not_hold_the_signaller() {
    if !never_waits() {
        eprintln!("skipped: no AIO here");
        return;
    }
    let mut fd = blocking();
    fd.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
    let (done, wait) = mpsc::channel();
    let other = fd.try_clone().unwrap();
    thread::spawn(move || {
        for _ in 0..1000 {
            let _ = signal_eventfd(other.as_fd());
        }
        done.send(()).unwrap();
    });
    wait.recv_timeout(Duration::from_secs(20))
        .expect("it does not wait for a reader");
}

#[test]
fn emptying_a_blocking_eventfd_does_not_wait() {
    let fd = blocking();
    assert!(!drain_eventfd(fd.as_fd()));
    signal_eventfd(fd.as_fd()).unwrap();
    signal_eventfd(fd.as_fd()).unwrap();
    assert!(drain_eventfd(fd.as_fd()));
    assert!(!drain_eventfd(fd.as_fd()));
}

#[test]
fn signal_to_a_file_that_is_no_eventfd_is_refused() {
    let file = File::open("/dev/null").unwrap();
    assert!(signal_eventfd(file.as_fd()).is_err());
    // And the next one works.
    let fd = blocking();
    signal_eventfd(fd.as_fd()).unwrap();
}
