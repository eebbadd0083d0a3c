//! Interfaces that this host forbids or lacks and that are replaced by slower ones: each is
//! reported once for the whole process, with its remedy.
//!
//! Interfaces without a replacement are refused where they are needed. The list of all of them is
//! docs/host-interfaces.md.
//!
//! UNSAFETY: system calls without a descriptor, which do nothing.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Once;

use anyhow::{Context, Result, bail};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{Access, AtFlags, CWD, MemfdFlags, accessat, fstatfs, memfd_create};
use rustix::io::Errno;
use vio::blk::RawDisk;

use crate::ending::signals;
use crate::messages::say;

/// Remedy on a host where raw disks are not served by io_uring.
pub const IO_URING_REMEDY: &str = "sysctl kernel.io_uring_disabled=0, and a seccomp profile that \
     allows io_uring_setup, io_uring_enter and \
     io_uring_register, give it back";

/// Reports that threads serve `disk`, if it is the first that they have to serve.
pub fn say_how_served(disk: &RawDisk) {
    static SAID: Once = Once::new();
    if let Some(why) = disk.uring_refusal() {
        SAID.call_once(|| {
            say!(
                "no io_uring here ({why}): raw disks are served by threads, which takes more \
                 processor time and longer for each request; \
                 {IO_URING_REMEDY}"
            );
        });
    }
}

/// Reports that front ends cannot keep the state from which a killed daemon's successor resumes, if
/// it is so.
pub fn say_if_nothing_is_kept() {
    if !vhost_export::has_inflight_regions() {
        say!(
            "no memory files here: front ends of a daemon that is killed cannot go on with its \
             successor (no inflight regions); a seccomp \
             profile that allows memfd_create gives them back"
        );
    }
}

/// Reports that KVM rings no eventfds, if it is so.
pub fn say_if_doorbells_exit(vm: &kvm::Vm) {
    if let Err(error) = kvm::doorbells::try_listening(vm) {
        say!(
            "no ioeventfd here ({error}): each doorbell of the guest is an exit to user space; a \
             seccomp profile that allows all requests of \
             KVM gives them back"
        );
    }
}

/// Remedy for a refused call that has no replacement.
const REMEDY: &str = "nothing stands in for it: allow it in the seccomp profile";

/// Names the call that the host refuses, and what to do.
pub fn given<T>(call: &str, done: impl Context<T, io::Error>) -> Result<T> {
    done.with_context(|| format!("this host refuses {call} ({REMEDY})"))
}

/// Does as [`given`], of a call that was made without a descriptor: its answer is EBADF where the
/// host has it.
fn given_in_trial(call: &str, answer: impl Into<i64>) -> Result<()> {
    let error = io::Error::last_os_error();
    match answer.into() {
        -1 if is_forbidden(&error) => given(call, Err(error)),
        _ => Ok(()),
    }
}

/// Looks for what it takes that front ends connect and hand over descriptors.
///
/// # Errors
/// Names the first that is refused.
pub fn look_for_front_ends() -> Result<()> {
    let socket = given("Unix sockets", UnixDatagram::unbound())?;
    given("FIONBIO", socket.set_nonblocking(true))?;
    // SAFETY: none of these has a descriptor, and none a pointer that is not null.
    unsafe {
        given_in_trial("bind", libc::bind(-1, null(), 0))?;
        given_in_trial("listen", libc::listen(-1, 0))?;
        given_in_trial("accept4", libc::accept4(-1, null_mut(), null_mut(), 0))?;
        given_in_trial("sendmsg", libc::sendmsg(-1, null(), 0) as i64)?;
        given_in_trial("recvmsg", libc::recvmsg(-1, null_mut(), 0) as i64)?;
    }
    // What a descriptor is that a front end sent.
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd()));
    kind.context(
        "no descriptor can be looked at by /proc/self/fd (mount -t proc proc /proc, also \
         in a changed root)",
    )?;
    Ok(())
}

/// Looks for calls without which nothing is served, and whose absence would show late, or by
/// another name.
///
/// # Errors
/// Names the first that is refused.
pub fn look_for_given() -> Result<()> {
    let refused = |errno: Errno| io::Error::from(errno);
    let event = given(
        "eventfd",
        eventfd(0, EventfdFlags::CLOEXEC).map_err(refused),
    )?;
    given(
        "epoll",
        epoll::create(epoll::CreateFlags::CLOEXEC).map_err(refused),
    )?;
    // SAFETY: neither has a descriptor, nor a pointer that is not null.
    unsafe {
        let delete = libc::EPOLL_CTL_DEL;
        given_in_trial("epoll_ctl", libc::epoll_ctl(-1, delete, -1, null_mut()))?;
        given_in_trial("epoll_wait", libc::epoll_wait(-1, null_mut(), 1, 0))?;
    }
    given("signalfd", signals::try_signalfd())?;
    // It distinguishes the files of front ends on which a read could wait without end.
    given("fstatfs", fstatfs(&event).map_err(refused))?;
    Ok(())
}

/// Checks that this process, by its effective user, may do this to a file.
///
/// # Errors
/// It may not.
pub fn may_access(path: &Path, permission: Access) -> io::Result<()> {
    let asked = match accessat(CWD, path, permission, AtFlags::EACCESS) {
        // What old seccomp profiles say to faccessat2 instead of ENOSYS; its predecessor goes by
        // the real user.
        Err(Errno::PERM) => accessat(CWD, path, permission, AtFlags::empty()),
        asked => asked,
    };
    Ok(asked?)
}

/// Looks for memory files, of which a machine's memory and registers are made.
///
/// # Errors
/// Names the call.
pub fn look_for_memory_files() -> Result<()> {
    let made = memfd_create("trial", MemfdFlags::CLOEXEC);
    given("memfd_create", made.map_err(io::Error::from)).map(drop)
}

/// Returns the same error, with `advice` in brackets where the host forbids or lacks what was asked
/// for.
pub fn advise<T>(done: Result<T>, advice: &str) -> Result<T> {
    let Err(error) = done else { return done };
    let mut causes = error.chain();
    let is_wanting = causes.any(|cause| cause.downcast_ref().is_some_and(is_forbidden));
    match is_wanting {
        true => bail!("{error:#} ({advice})"),
        false => Err(error),
    }
}

/// Returns whether the host forbids or lacks what failed with this.
fn is_forbidden(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    matches!(errno, Some(libc::EPERM | libc::EACCES | libc::ENOSYS))
}
