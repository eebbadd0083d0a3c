//! A machine whose guest asks for a reset is started again: this program executes itself, with the
//! arguments it has, once the machine has been wound down as at any end.
//!
//! **Why not a loop around [`machine::run`](super::machine::run).** The remains of a machine in
//! this process are hard to be sure of: the thread that reads standard input may wait there and
//! would take what is typed for the next machine; the disks' closing may still be under way; memory
//! comes back in pieces. An `exec` leaves nothing of it. The kernel ends the threads, closes the
//! descriptors (all are CLOEXEC) and takes the memory, and the guest finds the machine that a first
//! start makes, by the same code. These stay: the process with its number, its place in the control
//! group, its credentials, limits and standard descriptors, and signals, which stay blocked and
//! pending ([`Listener::stop`](crate::ending::signals::Listener::stop)).
//!
//! These do not stay:
//! * Locks of images. They are released and taken again, as by a successor. The restart waits for a
//!   process that took one in between as for one that is about to end; if that one keeps it, the
//!   restart has failed.
//! * Input that was typed and the guest has not read, as on a serial line.
//! * Raw mode of a terminal, which leaves it and enters it again.
//!
//! Files are opened by their names again: a kernel, a size file or a server that has changed counts
//! from the next reset on. A program that was replaced on disk does not: the guest goes on under
//! the one that it was started with, which the kernel keeps. A sandbox has to let this program
//! execute itself (seccomp, AppArmor's `ix`, a file system without `noexec`), and show it `/proc`.
//!
//! The number of resets has no limit, as on any machine. Each is one line on standard error, with
//! its number.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::ending;
use crate::messages::{self, say};

/// Variable of the environment with the number of restarts of this process, for the next one; not
/// set in the first.
const COUNT: &str = "EXITLESS_RESTARTS";

/// Link to this program, also if its file has been replaced or removed.
const PROGRAM: &str = "/proc/self/exe";

/// Returns the number of restarts of the machine. A word that is no number counts as 0.
pub fn count() -> u64 {
    let text = std::env::var(COUNT).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Gives the process its own name back after a restart. The kernel named it after [`PROGRAM`]'s
/// link, `exe`. Users, and messages of processes that wait for an image, know it by its own name.
pub fn take_name_back() {
    let argument = std::env::args_os().next();
    if let Some(name) = argument
        .as_ref()
        .and_then(|path| Path::new(path).file_name())
    {
        // Without a name of its own it runs as well.
        let _ = fs::write("/proc/self/comm", name.as_bytes());
    }
}

/// Starts the machine again, for the time after the `count`th. Returns only if that cannot be done,
/// with the reason.
pub fn again(count: u64) -> anyhow::Error {
    match fs::read_link(PROGRAM) {
        Ok(file) if file.as_os_str().as_bytes().ends_with(b" (deleted)") => say!(
            "note: the program's file was replaced or removed ({}): the guest goes on under the \
             one it was started with",
            file.display()
        ),
        Ok(_) => {}
        Err(error) => {
            let what = format!("{PROGRAM} cannot be read (is /proc mounted?)");
            return anyhow::Error::new(error).context(what);
        }
    }
    messages::finish(ending::WRITE_LIMIT);
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_else(|| OsString::from("exitless"));
    let error = Command::new(PROGRAM)
        .arg0(name)
        .args(args)
        .env(COUNT, count.saturating_add(1).to_string())
        .exec();
    anyhow::Error::new(error).context(format!("{PROGRAM} cannot be executed"))
}
