//! Interfaces that both programs use, with the outcome for each without them.

use denied::Denied;

use crate::{Host, Outcome, host};
use Outcome::{Refuses, Works};

/// A host, and what each program does there.
pub struct Both {
    pub serve: Host,
    pub run: Host,
}

fn both(name: &'static str, denied: fn(i32) -> Denied, serve: Outcome, run: Outcome) -> Both {
    Both {
        serve: host(name, denied, serve),
        run: host(name, denied, run),
    }
}

/// A host where both do the same.
fn alike(name: &'static str, denied: fn(i32) -> Denied, outcome: Outcome) -> Both {
    both(name, denied, outcome, outcome)
}

fn call(number: i64, errno: i32) -> Denied {
    Denied::default().call(number, errno)
}

#[rustfmt::skip]
pub fn hosts() -> Vec<Both> {
    const THREADS: Outcome = Works(Some("raw disks are served by threads"));
    const PLAIN: Outcome = Works(None);
    vec![
        alike("everything", |_| Denied::default(), PLAIN),
        alike("no io_uring", |errno| {
            call(libc::SYS_io_uring_setup, errno)
                .call(libc::SYS_io_uring_enter, errno)
                .call(libc::SYS_io_uring_register, errno)
        }, THREADS),
        alike("no io_uring_setup", |errno| call(libc::SYS_io_uring_setup, errno), THREADS),
        alike("no io_uring_enter", |errno| call(libc::SYS_io_uring_enter, errno), THREADS),
        alike("no io_uring_register", |errno| call(libc::SYS_io_uring_register, errno), THREADS),
        alike("no fallocate", |errno| call(libc::SYS_fallocate, errno), PLAIN),
        alike("no statx", |errno| call(libc::SYS_statx, errno), PLAIN),
        alike("no faccessat2", |errno| call(libc::SYS_faccessat2, errno), PLAIN),
        alike("no epoll_pwait2", |errno| call(libc::SYS_epoll_pwait2, errno), PLAIN),
        alike("no prlimit64", |errno| call(libc::SYS_prlimit64, errno), PLAIN),
        alike("no madvise", |errno| call(libc::SYS_madvise, errno), PLAIN),
        alike("no sched_setaffinity", |errno| call(libc::SYS_sched_setaffinity, errno), PLAIN),
        // Only a daemon's calls of its front ends are watched.
        both("no membarrier", |errno| call(libc::SYS_membarrier, errno),
            Works(Some("writes cannot be watched")), PLAIN),
        alike("no clone3", |_| call(libc::SYS_clone3, libc::ENOSYS), PLAIN),
        alike("no /sys", |_| Denied::default().empty("/sys"), PLAIN),
        // Only calls between a daemon and its front ends are checked in that way.
        both("no preadv2", |errno| call(libc::SYS_preadv2, errno), Works(Some("no preadv2")), PLAIN),
        both("no memfd_create", |errno| call(libc::SYS_memfd_create, errno),
            Works(Some("no inflight regions")),
            Refuses(&["refuses memfd_create", "seccomp profile"], None)),
        alike("no OFD locks", |errno| {
            Denied::default()
                .call_with(libc::SYS_fcntl, 1, libc::F_OFD_SETLK as u32, errno)
                .call_with(libc::SYS_fcntl, 1, libc::F_OFD_GETLK as u32, errno)
        }, Refuses(&["refuses locks", "locking=off"], Some(&["locking=off"]))),
        alike("no fstatfs", |errno| call(libc::SYS_fstatfs, errno),
            Refuses(&["refuses fstatfs", "seccomp profile"], None)),
        alike("no eventfd", |errno| call(libc::SYS_eventfd2, errno),
            Refuses(&["refuses eventfd", "seccomp profile"], None)),
        alike("no epoll", |errno| call(libc::SYS_epoll_create1, errno),
            Refuses(&["refuses epoll", "seccomp profile"], None)),
        alike("no epoll_ctl", |errno| call(libc::SYS_epoll_ctl, errno),
            Refuses(&["refuses epoll_ctl", "seccomp profile"], None)),
        alike("no epoll_wait", |errno| call(libc::SYS_epoll_wait, errno),
            Refuses(&["refuses epoll_wait", "seccomp profile"], None)),
        alike("no signalfd", |errno| call(libc::SYS_signalfd4, errno),
            Refuses(&["refuses signalfd", "seccomp profile"], None)),
    ]
}
