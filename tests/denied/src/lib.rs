//! Programs under a host that forbids or lacks some system calls: a seccomp filter, installed between fork and exec, answers an
//! error number to them, as the default profiles of container runtimes do (EPERM), or a kernel without them (ENOSYS).
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
//! What is passed by pointer a filter does not see: single operations of a ring, or features that an ioctl asks for.
//!
//! UNSAFETY: code between fork and exec, and the two system calls that install the filter.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Offsets in `struct seccomp_data`: the number of the call, and the lower half of its first argument.
const NUMBER: u32 = 0;
const ARGUMENTS: u32 = 16;

/// What is denied; the default is nothing.
#[derive(Clone, Debug, Default)]
pub struct Denied {
    program: Vec<libc::sock_filter>,
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

/// Goes on with the next instruction if the word is `value`, or skips `otherwise` instructions.
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
    /// The system call of this number answers `errno`.
    #[must_use]
    pub fn call(mut self, number: i64, errno: i32) -> Self {
        self.program
            .extend([load(NUMBER), is(number as u32, 1), refuse(errno)]);
        self
    }

    /// It does so where the lower half of its argument `index` is `value`.
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

    /// Has `command` run so.
    pub fn apply(self, command: &mut Command) {
        let mut program = self.program;
        program.push(answer(libc::SECCOMP_RET_ALLOW));
        let install = move || {
            let program = libc::sock_fprog {
                len: program.len() as u16,
                filter: program.as_ptr().cast_mut(),
            };
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
        // SAFETY: two system calls between fork and exec, and nothing that allocates.
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
}
