//! Confinement of the calling process, for good: file descriptors, namespaces, capabilities,
//! resource limits, system calls.
//!
//! The caller chooses the order of these functions, and it matters. It leaves namespaces and drops
//! capabilities while the process has one thread. It installs the filter of system calls last, when
//! every thread has made the calls of its start-up: the filter holds for all threads.
//!
//! Nothing here can be undone. If the host refuses a step, the caller receives the error and
//! decides whether to continue without that step. Linux only, on x86-64 and 64-bit Arm.
#![forbid(unsafe_code)]

mod calls;

use std::io;
use std::os::fd::RawFd;

use nix::sched::{CloneFlags, unshare};
use rustix::process::{
    DumpableBehavior, Pid, Resource, Rlimit, Signal, getppid, set_dumpable_behavior,
    set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

pub use calls::{Call, FilterError, When, allow_only};

/// Asks the kernel to kill this process when the thread that made it, one of process `parent`,
/// ends.
///
/// # Errors
/// The kernel's error; or `parent` is not the parent any more.
pub fn die_with_parent(parent: u32) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let is_parent = getppid().map(Pid::as_raw_pid) == i32::try_from(parent).ok();
    match is_parent {
        true => Ok(()),
        false => Err(io::Error::other(
            "the process that started this one is gone",
        )),
    }
}

/// Closes every descriptor but those in `keep`.
///
/// # Errors
/// The list of open descriptors (/proc/self/fd) cannot be read.
pub fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let list = std::fs::read_dir("/proc/self/fd")?;
    let names = list.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let open: Vec<RawFd> = names.filter_map(|name| name.parse().ok()).collect();
    for fd in open {
        if !keep.contains(&fd) {
            // The descriptor of the directory itself is closed already.
            let _ = nix::unistd::close(fd);
        }
    }
    Ok(())
}

/// Moves the process into new user, mount, network, IPC, UTS and control-group namespaces. The
/// network namespace has only a loopback interface that is down; the IPC namespace has no object.
/// The others begin as copies: the host's mounts stay visible, and `drop_privileges` takes away the
/// right to change them. To be called while the process has one thread. The PID namespace stays: a
/// new one would be for children only, and after `CLONE_NEWPID` a process cannot start threads.
///
/// # Errors
/// The host refuses all of it; nothing has changed.
pub fn leave_namespaces() -> io::Result<()> {
    let others = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    let with_user = unshare(CloneFlags::CLONE_NEWUSER | others);
    // Root needs no user namespace to create the others.
    let left = with_user.or_else(|error| unshare(others).map_err(|_| error));
    left.map_err(Into::into)
}

/// Drops every capability of the *calling thread* and sets `no_new_privs`, so that executing a file
/// gains none. Clears the dumpable flag, so that other processes of the same user cannot trace this
/// one. To be called while the process has one thread: threads that it starts later inherit the
/// empty sets.
///
/// # Errors
/// The kernel's error.
pub fn drop_privileges() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, none)?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Resource limits of a process (setrlimit(2)).
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Size of the address space, in bytes (`RLIMIT_AS`).
    pub address_space: u64,
    /// Greatest size of a file that it writes, in bytes (`RLIMIT_FSIZE`).
    pub file_size: u64,
    /// One more than the greatest number of a new file descriptor (`RLIMIT_NOFILE`).
    pub descriptors: u64,
}

/// Sets these limits, soft and hard. Also forbids new processes (`RLIMIT_NPROC`) and core files.
///
/// # Errors
/// The kernel's error.
pub fn set_limits(limits: Limits) -> io::Result<()> {
    for (resource, most) in [
        (Resource::As, limits.address_space),
        (Resource::Fsize, limits.file_size),
        (Resource::Nofile, limits.descriptors),
        (Resource::Nproc, 0),
        (Resource::Core, 0),
    ] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit)?;
    }
    Ok(())
}
