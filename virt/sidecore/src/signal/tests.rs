use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, FromRawFd, OwnedFd},
    sync::mpsc,
    thread,
    time::Duration,
};

use super::*;

/// An eventfd that waits.
fn blocking() -> File {
    // SAFETY: no pointers; a new descriptor, which nobody else owns.
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

/// As where a host refuses `preadv2`.
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
    // Other tests' threads may take the one or the other meanwhile: not as many as there are rounds.
    let contexts: std::collections::HashSet<_> = (0..100).map(|_| context()).collect();
    assert!(contexts.len() < 50, "{}", contexts.len());
}

/// A signal of an eventfd that waits, in each way, with the eventfd.
fn each_way() -> Vec<(&'static str, FrequentSignal<OwnedFd>, File)> {
    let each = FrequentSignal::each(|| OwnedFd::from(blocking())).into_iter();
    each.map(|(way, signal)| {
        let fd = signal
            .fd()
            .try_clone_to_owned()
            .expect("a descriptor is free");
        (way, signal, File::from(fd))
    })
    .collect()
}

#[test]
fn each_frequent_signal_counts_in_each_way() {
    for (way, mut signal, mut fd) in each_way() {
        for _ in 0..1000 {
            signal.signal().unwrap();
        }
        let mut count = [0; 8];
        fd.read_exact(&mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1000, "{way}");
    }
}

#[test]
fn a_full_blocking_counter_holds_no_way_of_a_frequent_signal() {
    if !never_waits() {
        eprintln!("skipped: no AIO here");
        return;
    }
    for (way, mut signal, mut fd) in each_way() {
        fd.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (done, wait) = mpsc::channel();
        thread::spawn(move || {
            for _ in 0..3000 {
                signal.signal().unwrap();
            }
            done.send(()).unwrap();
        });
        wait.recv_timeout(Duration::from_secs(20))
            .unwrap_or_else(|_| panic!("{way}: it waits for a reader"));
    }
}

#[test]
fn what_is_signalled_often_gets_a_ring_and_loses_no_signal_on_the_way() {
    let mut fd = blocking();
    let mut signal = FrequentSignal::new(OwnedFd::from(fd.try_clone().unwrap()));
    assert_eq!(signal.way(), "rare");
    for _ in 0..3000 {
        signal.signal().unwrap();
    }
    assert_ne!(signal.way(), "rare");
    let mut count = [0; 8];
    fd.read_exact(&mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 3000);
}

#[test]
fn what_is_no_eventfd_gets_no_ring() {
    let file = File::open("/dev/null").unwrap();
    let mut signal = FrequentSignal::new(file);
    for _ in 0..3000 {
        assert!(signal.signal().is_err());
    }
    assert_eq!(signal.way(), "always");
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
fn what_is_no_eventfd_is_refused() {
    let file = File::open("/dev/null").unwrap();
    assert!(signal_eventfd(file.as_fd()).is_err());
    // And the next one works.
    let fd = blocking();
    signal_eventfd(fd.as_fd()).unwrap();
}
