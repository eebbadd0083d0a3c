//! A child process that shares nothing with its parent but a pipe to it. Its pages are freed at its
//! end, may be taken by the guest's out-of-memory killer, or are copied on write.
//!
//! UNSAFETY: the standard library starts programs, but has no fork(2).

use std::io::{self, PipeReader, PipeWriter, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The status of a child that has panicked.
pub const PANICKED: u8 = 101;

/// A child that runs.
#[derive(Debug)]
pub struct Child {
    /// `None` once it has been waited for.
    pid: Option<libc::pid_t>,
    said: PipeReader,
}

/// End of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildExit {
    /// By itself, with this status.
    Status(u8),
    /// By this signal.
    Killed(i32),
}

impl Child {
    /// Starts a child that runs `work` and exits with the status that `work` returns. `work`
    /// receives the write end of a pipe to its parent, which buffers 64 KiB before the parent
    /// reads.
    ///
    /// If the process has other threads, `work` must not take a lock, allocate or print: another
    /// thread may have been in the middle of that at the fork, and `work` would wait for ever.
    ///
    /// # Errors
    /// The system's own.
    #[expect(unsafe_code, reason = "see the module's head")]
    pub fn start(work: impl FnOnce(&mut PipeWriter) -> u8) -> io::Result<Self> {
        let (said, mut say) = io::pipe()?;
        // SAFETY: fork takes nothing. The child has a copy of all memory and one thread, this one,
        // so that what it owns and borrows here stays its own; what other threads were in the
        // middle of is behind locks that stay taken, or theirs alone. It never leaves this block:
        // no destructor of the parent's callers runs twice.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let status = catch_unwind(AssertUnwindSafe(|| work(&mut say)));
                // SAFETY: ends the process at once; there is nothing of ours to be flushed.
                unsafe { libc::_exit(status.unwrap_or(PANICKED).into()) }
            }
            pid => Ok(Self {
                pid: Some(pid),
                said,
            }),
        }
    }

    /// Waits for one byte from the child; `None` if it has ended.
    ///
    /// # Errors
    /// The system's own.
    pub fn next_byte(&mut self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        match self.said.read_exact(&mut byte) {
            Ok(()) => Ok(Some(byte[0])),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits for the child's end. Returns how it ended, and all bytes that it wrote.
    ///
    /// # Errors
    /// The system's own.
    pub fn wait(mut self) -> io::Result<(ChildExit, Vec<u8>)> {
        let mut said = Vec::new();
        self.said.read_to_end(&mut said)?;
        Ok((self.reap()?, said))
    }

    #[expect(unsafe_code, reason = "see the module's head")]
    fn reap(&mut self) -> io::Result<ChildExit> {
        let pid = self.pid.take().expect("a child is waited for once");
        let mut status = 0;
        loop {
            // SAFETY: writes one `int`, which `status` is; the child is ours and has not been
            // waited for.
            if unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(if libc::WIFSIGNALED(status) {
            ChildExit::Killed(libc::WTERMSIG(status))
        } else {
            ChildExit::Status(u8::try_from(libc::WEXITSTATUS(status)).expect("eight bits"))
        })
    }
}

impl Drop for Child {
    #[expect(unsafe_code, reason = "see the module's head")]
    fn drop(&mut self) {
        if let Some(pid) = self.pid {
            // SAFETY: takes integers; the child has not been waited for, so the number is still its
            // own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            // An error of the drop has no recipient.
            let _ = self.reap();
        }
    }
}

/// Makes this process the first that the kernel ends where memory is short.
pub fn offer_to_oom_killer() {
    // Without this the kernel chooses by size, which is nearly as good.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn status_and_words_of_a_child_arrive() {
        let child = Child::start(|say| say.write_all(b"seen").map_or(1, |()| 7));
        let ended = child.unwrap().wait().unwrap();
        assert_eq!(ended, (ChildExit::Status(7), b"seen".to_vec()));
    }

    #[test]
    #[expect(unsafe_code, reason = "as the out-of-memory killer would")]
    fn a_killed_child_is_told_from_one_that_ended() {
        // SAFETY: a signal to itself.
        let child = Child::start(|_| unsafe { libc::raise(libc::SIGKILL) } as u8).unwrap();
        assert_eq!(child.wait().unwrap().0, ChildExit::Killed(libc::SIGKILL));
    }

    #[test]
    fn stores_of_a_child_are_not_visible_to_its_parent() {
        let mut value = 1;
        let child = Child::start(|_| {
            value += 1;
            value
        });
        assert_eq!(child.unwrap().wait().unwrap().0, ChildExit::Status(2));
        assert_eq!(value, 1);
    }

    #[test]
    fn a_child_that_nobody_waits_for_does_not_stay() {
        let (mut wait, say) = io::pipe().unwrap();
        let child = Child::start(|_| {
            let _ = wait.read(&mut [0]);
            0
        });
        let child = child.unwrap();
        let pid = child.pid.unwrap();
        drop(child);
        drop(say);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
