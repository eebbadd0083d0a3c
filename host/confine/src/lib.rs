//! A process that gives up what it does not need, for good: descriptors, namespaces, capabilities,
//! resources, system calls.
//!
//! The order in which a program calls these matters, and is its own: namespaces are left, and
//! capabilities dropped, while it has one thread; the filter of system calls comes last, when every
//! thread has made the calls of its start, and holds for all of them.
//!
//! Nothing here can be undone. What a host refuses is an error with its reason; whether to go on
//! without is the caller's to decide. Known to Linux only, on x86-64 and 64-bit Arm.
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

/// Dies when the thread that made this process dies, which is one of process `parent`.
///
/// # Errors
/// The kernel's; or that process is not its parent any more.
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
/// The list of them (/proc) cannot be read.
pub fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let list = std::fs::read_dir("/proc/self/fd")?;
    let names = list.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let open: Vec<RawFd> = names.filter_map(|name| name.parse().ok()).collect();
    for fd in open {
        if !keep.contains(&fd) {
            // That of the list is closed already.
            let _ = nix::unistd::close(fd);
        }
    }
    Ok(())
}

/// Leaves the host's namespaces of users, mounts, network, IPC, names and control groups for new
/// ones. That of the network has no device but a loopback that is down, that of IPC no object; the
/// others begin as copies (the host's mounts stay visible, and mounting is lost with the
/// capabilities). To be called while there is one thread. (Not that of processes: it would be for
/// children, and a process that has asked for it starts no thread.)
///
/// # Errors
/// The host allows none of it; nothing has changed.
pub fn leave_namespaces() -> io::Result<()> {
    let others = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    let with_user = unshare(CloneFlags::CLONE_NEWUSER | others);
    // Root needs no namespace of users to have the others.
    let left = with_user.or_else(|error| unshare(others).map_err(|_| error));
    left.map_err(Into::into)
}

/// Drops every capability of *this thread*, and gains none by executing a file; and other processes
/// of the same user cannot look into this one. To be called while there is one thread: those that
/// it starts have none either.
///
/// # Errors
/// The kernel's.
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

/// Bounds of what a process may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of its address space.
    pub address_space: u64,
    /// Size to which it may make files grow, in bytes.
    pub file_size: u64,
    /// Numbers of descriptors that it may make.
    pub descriptors: u64,
}

/// Sets the limits, for good, and allows no more processes and no core file.
///
/// # Errors
/// The kernel's.
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
