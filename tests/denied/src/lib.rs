//! Runs programs as if the host forbade or lacked some system calls. A seccomp filter, installed
//! between fork and exec, makes these calls fail: with EPERM, as the default profiles of container
//! runtimes do, or with ENOSYS, as a kernel without them does.
//!
//! ```no_run
//! use std::process::Command;
//!
//! use denied::Denied;
//!
//! let mut command = Command::new("exitless");
//! // No io_uring, and no OFD locks.
//! Denied::default()
//!     .call(libc::SYS_io_uring_setup, libc::EPERM)
//!     .call_with(libc::SYS_fcntl, 1, libc::F_OFD_SETLK as u32, libc::EINVAL)
//!     .apply(&mut command);
//! ```
//!
//! A filter cannot check data behind pointers: single operations of an io_uring, or features that
//! an ioctl requests. Nor can it check paths: files are hidden or forbidden by mounts in a mount
//! namespace of the program's own, which needs root ([`Denied::is_possible`]).
//!
//! UNSAFETY: code between fork and exec, and the system calls that create the namespace and install
//! the filter.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Offsets in `struct seccomp_data`: the number of the call, and its first argument, whose lower
/// half comes first.
const NUMBER: u32 = 0;
const ARGUMENTS: u32 = 16;

/// System calls and files that a program is denied; by default none.
#[derive(Clone, Debug, Default)]
pub struct Denied {
    program: Vec<libc::sock_filter>,
    mounts: Vec<Mount>,
}

/// Arguments of a call of mount(2).
#[derive(Clone, Debug)]
struct Mount {
    source: CString,
    target: CString,
    kind: &'static CStr,
    flags: libc::c_ulong,
}

impl Mount {
    fn new(source: &str, target: &str, kind: &'static CStr, flags: libc::c_ulong) -> Self {
        let path = |path: &str| CString::new(path).expect("no zero byte");
        Self {
            source: path(source),
            target: path(target),
            kind,
            flags,
        }
    }

    fn make(&self) -> bool {
        let (source, target) = (self.source.as_ptr(), self.target.as_ptr());
        let (kind, data) = (self.kind.as_ptr(), std::ptr::null());
        // SAFETY: terminated strings that outlive the call, and no data.
        unsafe { libc::mount(source, target, kind, self.flags, data) == 0 }
    }
}

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

fn load(offset: u32) -> libc::sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

/// Returns a jump: to the next instruction if the loaded word is `value`, else `otherwise`
/// instructions further.
fn is(value: u32, otherwise: u8) -> libc::sock_filter {
    instruction(
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        0,
        otherwise,
        value,
    )
}

fn answer(verdict: u32) -> libc::sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, verdict)
}

fn refuse(errno: i32) -> libc::sock_filter {
    answer(libc::SECCOMP_RET_ERRNO | errno as u32)
}

impl Denied {
    /// Makes the system call of this number fail with `errno`.
    #[must_use]
    pub fn call(mut self, number: i64, errno: i32) -> Self {
        self.program
            .extend([load(NUMBER), is(number as u32, 1), refuse(errno)]);
        self
    }

    /// Makes it fail with `errno` if the lower half of its argument `index` is `value`.
    #[must_use]
    pub fn call_with(mut self, number: i64, index: u32, value: u32, errno: i32) -> Self {
        self.program.extend([
            load(NUMBER),
            is(number as u32, 3),
            load(ARGUMENTS + 8 * index),
            is(value, 1),
            refuse(errno),
        ]);
        self
    }

    /// Hides the content of this folder.
    #[must_use]
    pub fn empty(self, folder: &str) -> Self {
        self.mounted("none", folder, c"tmpfs", 0)
    }

    /// Shows the folder `by` in the place of `folder`.
    #[must_use]
    pub fn replaced(self, folder: &str, by: &str) -> Self {
        self.mounted(by, folder, c"none", libc::MS_BIND)
    }

    /// Makes the device file of this name impossible to open: EACCES, as in a container without
    /// that device.
    #[must_use]
    pub fn no_device(self, name: &str) -> Self {
        self.device(name).mounted(
            "none",
            name,
            c"none",
            libc::MS_BIND | libc::MS_REMOUNT | libc::MS_NODEV,
        )
    }

    /// Denies nothing, but requires that this device file exists.
    #[must_use]
    pub fn device(self, name: &str) -> Self {
        self.mounted(name, name, c"none", libc::MS_BIND)
    }

    /// Denies nothing, and mounts tracefs at its usual place.
    #[must_use]
    pub fn tracefs(self) -> Self {
        self.mounted("none", "/sys/kernel/tracing", c"tracefs", 0)
    }

    fn mounted(
        mut self,
        source: &str,
        target: &str,
        kind: &'static CStr,
        flags: libc::c_ulong,
    ) -> Self {
        self.mounts.push(Mount::new(source, target, kind, flags));
        self
    }

    /// Returns whether these denials are possible: mounts need root, and a target that exists.
    pub fn is_possible(&self) -> bool {
        let is_there = |mount: &Mount| {
            mount
                .target
                .to_str()
                .is_ok_and(|path| Path::new(path).exists())
        };
        // SAFETY: a plain system call.
        let is_root = unsafe { libc::geteuid() } == 0;
        self.mounts.is_empty() || is_root && self.mounts.iter().all(is_there)
    }

    /// Makes `command` run under these denials.
    pub fn apply(self, command: &mut Command) {
        let Self {
            mut program,
            mounts,
        } = self;
        program.push(answer(libc::SECCOMP_RET_ALLOW));
        // Mounts in the new namespace do not propagate to the host's.
        let own = Mount::new("none", "/", c"none", libc::MS_REC | libc::MS_PRIVATE);
        let install = move || {
            let program = libc::sock_fprog {
                len: program.len() as u16,
                filter: program.as_ptr().cast_mut(),
            };
            if !mounts.is_empty() {
                // SAFETY: a plain system call with a number.
                let is_apart = unsafe { libc::unshare(libc::CLONE_NEWNS) } == 0;
                if !is_apart || !own.make() || !mounts.iter().all(Mount::make) {
                    return Err(io::Error::last_os_error());
                }
            }
            // SAFETY: plain system calls with numbers, and a program that outlives its call.
            let failed = unsafe {
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                    || libc::prctl(
                        libc::PR_SET_SECCOMP,
                        libc::SECCOMP_MODE_FILTER,
                        &raw const program,
                    ) != 0
            };
            match failed {
                true => Err(io::Error::last_os_error()),
                false => Ok(()),
            }
        };
        // SAFETY: a few system calls between fork and exec, and nothing that allocates.
        unsafe { command.pre_exec(install) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_denied_by_its_number_or_by_an_argument_of_it() {
        let said = |denied: Denied, script: &str| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            denied.apply(&mut command);
            let output = command.output().expect("a shell");
            String::from_utf8(output.stdout).expect("text")
        };
        let kill = |value| Denied::default().call_with(libc::SYS_kill, 1, value, libc::EPERM);
        let script = "kill -0 $$ && echo one; kill -CONT $$ && echo two";
        assert_eq!(said(Denied::default(), script), "one\ntwo\n");
        assert_eq!(said(kill(0), script), "two\n");
        assert_eq!(said(kill(libc::SIGCONT as u32), script), "one\n");
        let both = kill(0).call(libc::SYS_getppid, libc::EPERM);
        let both = both.call_with(libc::SYS_kill, 1, libc::SIGCONT as u32, libc::EPERM);
        assert_eq!(said(both, script), "");
        let all = Denied::default().call(libc::SYS_kill, libc::EPERM);
        assert_eq!(said(all, script), "");
    }

    #[test]
    fn files_are_missing_or_forbidden_to_the_program_alone() {
        let denied = Denied::default().empty("/sys").no_device("/dev/null");
        if !denied.is_possible() {
            println!("skipped: mounts take root");
            return;
        }
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "ls /sys; test -c /dev/null && ! (: </dev/null) 2>&1"]);
        // Not /dev/null, which the program may not open.
        command.stdin(std::process::Stdio::piped());
        denied.apply(&mut command);
        let output = command.output().expect("a shell");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert!(
            said.contains("Permission denied") && said.lines().count() == 1,
            "{said}"
        );
        std::fs::File::open("/dev/null").expect("here it is as ever");
        assert!(Path::new("/sys/dev").exists());
    }
}
