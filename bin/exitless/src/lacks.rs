//! Interfaces that this host forbids or lacks and that are replaced by slower ones: each is said
//! once for the whole process, with its remedy.
//!
//! Interfaces without a replacement are refused where they are needed. The list of all of them is
//! docs/host-interfaces.md.

use std::sync::Once;

use anyhow::{Context, Result, bail};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{MemfdFlags, fstatfs, memfd_create};
use vio::blk::RawDisk;

use crate::ending::signals;
use crate::messages::say;

/// Remedy on a host where raw disks are not served by io_uring.
pub const IO_URING_REMEDY: &str = "sysctl kernel.io_uring_disabled=0, and a seccomp profile that allows io_uring_setup, io_uring_enter and \
     io_uring_register, give it back";

/// Says so if `disk` is the first that threads have to serve.
pub fn say_how_served(disk: &RawDisk) {
    static SAID: Once = Once::new();
    if let Some(why) = disk.uring_refusal() {
        SAID.call_once(|| {
            say!(
                "no io_uring here ({why}): raw disks are served by threads, which takes more processor time and longer for each request; \
                 {IO_URING_REMEDY}"
            );
        });
    }
}

/// Says so if front ends cannot keep what a successor of a killed daemon resumes from.
pub fn say_if_nothing_is_kept() {
    if !vhost_export::has_inflight_regions() {
        say!(
            "no memory files here: front ends of a daemon that is killed cannot go on with its successor (no inflight regions); a seccomp \
             profile that allows memfd_create gives them back"
        );
    }
}

/// How a call is had for which nothing stands in.
const REMEDY: &str = "nothing stands in for it: allow it in the seccomp profile";

/// Names the call that the host refuses, and what to do.
pub fn given<T>(call: &str, done: impl Context<T, std::io::Error>) -> Result<T> {
    done.with_context(|| format!("this host refuses {call} ({REMEDY})"))
}

/// Looks for calls without which nothing is served, and whose absence would show late, or by
/// another name.
///
/// # Errors
/// Names the first that is refused.
pub fn look_for_given() -> Result<()> {
    let refused = |errno: rustix::io::Errno| std::io::Error::from(errno);
    let event = given(
        "eventfd",
        eventfd(0, EventfdFlags::CLOEXEC).map_err(refused),
    )?;
    given(
        "epoll",
        epoll::create(epoll::CreateFlags::CLOEXEC).map_err(refused),
    )?;
    given("signalfd", signals::try_signalfd())?;
    // It tells apart the files of front ends on which a read could wait without end.
    given("fstatfs", fstatfs(&event).map_err(refused))?;
    Ok(())
}

/// Looks for memory files, of which a machine's memory and registers are made.
///
/// # Errors
/// Names the call.
pub fn look_for_memory_files() -> Result<()> {
    let made = memfd_create("trial", MemfdFlags::CLOEXEC);
    given("memfd_create", made.map_err(std::io::Error::from)).map(drop)
}

/// The same error, with `advice` in brackets where the host forbids or lacks what was asked for.
pub fn advise<T>(done: Result<T>, advice: &str) -> Result<T> {
    let Err(error) = done else { return done };
    let mut causes = error.chain();
    let is_wanting = causes.any(|cause| cause.downcast_ref().is_some_and(is_forbidden));
    match is_wanting {
        true => bail!("{error:#} ({advice})"),
        false => Err(error),
    }
}

/// Whether the host forbids or lacks what failed with this.
fn is_forbidden(error: &std::io::Error) -> bool {
    let errno = error.raw_os_error();
    matches!(errno, Some(libc::EPERM | libc::EACCES | libc::ENOSYS))
}
