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
