//! A child process that the test starts and ends.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time limit for every expected event.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Time limit for the end of a program.
pub const END_LIMIT: Duration = Duration::from_secs(2);

/// Waits until `done` returns true; panics after the time limit.
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A running program; killed when dropped.
pub struct Program {
    child: Child,
    said: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

/// Result of a program.
#[derive(Debug)]
pub struct ProgramOutput {
    /// Exit status; `None`: killed by a signal.
    pub status: Option<i32>,
    /// Time since the last signal.
    pub took: Duration,
    /// Its standard error, if that was a pipe to the test.
    pub said: String,
}

/// Returns a command for `program` with these arguments.
pub fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// Returns a command for `program run` with this kernel, without an IOMMU.
pub fn run_of(program: &str, kernel: &Path) -> Command {
    let mut command = command(
        program,
        &["run", "--any-kvm", "--iommu", "none", "--memory", "64M"],
    );
    command.arg("--kernel").arg(kernel);
    command
}

impl Program {
    /// Starts the program. If `is_error_read`, its standard error is read in the background.
    pub fn start(mut command: Command, is_error_read: bool) -> Self {
        if is_error_read {
            command.stderr(Stdio::piped());
        }
        let mut child = command.spawn().unwrap();
        let said = Arc::default();
        let reader = child.stderr.take().map(|stderr| collect(stderr, &said));
        Self {
            child,
            said,
            reader,
        }
    }

    /// Takes its standard output, for the caller to read, or not to read.
    pub fn output(&mut self) -> OwnedFd {
        self.child.stdout.take().unwrap().into()
    }

    /// Takes its standard input.
    pub fn input(&mut self) -> File {
        File::from(OwnedFd::from(self.child.stdin.take().unwrap()))
    }

    /// Returns its standard error so far.
    pub fn said(&self) -> String {
        String::from_utf8_lossy(&self.said.lock().unwrap()).into_owned()
    }

    /// Waits until its standard error contains this text.
    #[track_caller]
    pub fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.said().contains(text) {
            let said = self.said();
            assert!(
                Instant::now() < deadline,
                "never said {text:?}, but: {said}"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap();
    }

    /// Returns whether it runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for its end; `since` is the time of the last signal.
    #[track_caller]
    pub fn end(mut self, since: Instant) -> ProgramOutput {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            let said = self.said();
            assert!(
                since.elapsed() < PATIENCE,
                "it does not end; it said: {said}"
            );
            std::thread::sleep(Duration::from_millis(1));
        };
        let took = since.elapsed();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        ProgramOutput {
            status: status.code(),
            took,
            said: self.said(),
        }
    }

    /// Sends a signal and waits for the end, which must occur in time and with this status.
    #[track_caller]
    pub fn ends_by(self, signal: Signal, status: i32) -> ProgramOutput {
        let since = Instant::now();
        self.signal(signal);
        let ended = self.end(since);
        ended.check(status);
        ended
    }
}

impl ProgramOutput {
    /// Checks that it ended in time, with this status.
    #[track_caller]
    pub fn check(&self, status: i32) {
        println!("ended with {:?} after {:?}", self.status, self.took);
        assert_eq!(self.status, Some(status), "{}", self.said);
        assert!(self.took < END_LIMIT, "{:?}: {}", self.took, self.said);
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        // Not without limit: its operations in the kernel may be released only when the test
        // continues to unwind.
        let deadline = Instant::now() + END_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn collect(mut from: ChildStderr, into: &Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    let into = Arc::clone(into);
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            into.lock().unwrap().extend(&buffer[..len]);
        }
    })
}

/// Waits until the pipe or terminal whose reading end is `fd` is full: until its fill has not
/// changed for a while.
pub fn wait_until_full(fd: impl AsFd) {
    let mut before = 0;
    let mut same_since = Instant::now();
    until("a full pipe", || {
        let now = rustix::io::ioctl_fionread(&fd).unwrap();
        if now != before {
            (before, same_since) = (now, Instant::now());
        }
        now > 0 && same_since.elapsed() > Duration::from_millis(300)
    });
}

/// Returns whether there is a KVM on which the guests of these tests can run; prints the reason if
/// not.
pub fn has_kvm() -> bool {
    let is_usable = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .inspect_err(|error| println!("skipped: no usable /dev/kvm: {error}"));
    is_usable.is_ok()
}
