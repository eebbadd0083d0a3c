//! The worker's process as the benchmark observes it: processor time, sleeps, kicks.

use std::fs;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use vio::caged::{WorkerEvent, WorkerProcess};

/// Returns the processor time of all threads of this process.
///
/// # Errors
/// The kernel's error.
pub fn own_time() -> Result<Duration> {
    time_of(ClockId::CLOCK_PROCESS_CPUTIME_ID)
}

fn time_of(clock: ClockId) -> Result<Duration> {
    let time = clock_gettime(clock).context("a processor clock")?;
    Ok(Duration::from(time))
}

/// Longest time until an idle worker sleeps.
const PATIENCE: Duration = Duration::from_secs(10);

/// Counts of a worker since it was started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Processor time of all its threads.
    pub time: Duration,
    /// Voluntary context switches of its threads.
    pub sleeps: u64,
    /// Times that the owner has signalled its eventfd.
    pub kicks: u64,
}

/// A worker's process, observed from outside.
pub struct Watched {
    pid: u32,
    clock: ClockId,
    kicks: Arc<AtomicU64>,
    /// The worker polls while there are requests.
    pub polls: bool,
}

impl Watched {
    /// Creates the observer of process `pid`, whose kicks are counted in `kicks`. `polls`: the
    /// worker polls while there are requests.
    ///
    /// # Errors
    /// There is no such process.
    pub fn new(pid: u32, kicks: Arc<AtomicU64>, polls: bool) -> Result<Self> {
        let number = i32::try_from(pid).context("the number of a process")?;
        let clock = clock_getcpuclockid(Pid::from_raw(number));
        Ok(Self {
            pid,
            clock: clock.context("the worker's processor clock")?,
            kicks,
            polls,
        })
    }

    /// Returns the worker's counts. Waits until it sleeps: the kernel updates the clock of a
    /// running thread of another process at its next tick only, which may be milliseconds away.
    ///
    /// # Errors
    /// The worker has ended, or does not sleep, or the host hides the process.
    pub fn counts(&self) -> Result<Counts> {
        let since = Instant::now();
        while !self.is_asleep()? {
            ensure!(since.elapsed() < PATIENCE, "the worker does not sleep");
            std::thread::yield_now();
        }
        Ok(Counts {
            time: time_of(self.clock)?,
            sleeps: self.sleeps()?,
            // Relaxed: this thread has written it.
            kicks: self.kicks.load(Ordering::Relaxed),
        })
    }

    /// Returns whether the worker's main thread sleeps. (Its disk's threads have nothing to do at
    /// that time.)
    fn is_asleep(&self) -> Result<bool> {
        let path = format!("/proc/{0}/task/{0}/stat", self.pid);
        let stat = fs::read_to_string(path).context("the worker's state")?;
        // The state follows the name, which may contain any characters.
        Ok(stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" S")))
    }

    /// Returns the number of voluntary context switches of its threads.
    fn sleeps(&self) -> Result<u64> {
        let mut sleeps = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.pid)).context("its threads")? {
            let status = fs::read_to_string(task?.path().join("status"))?;
            let line = |line: &str| line.strip_prefix("voluntary_ctxt_switches:").map(count);
            sleeps += status.lines().find_map(line).unwrap_or(0);
        }
        Ok(sleeps)
    }
}

fn count(text: &str) -> u64 {
    text.trim().parse().unwrap_or(0)
}

/// Handle of a worker's process that counts kicks.
pub struct Kicked {
    /// The handle that it wraps.
    pub below: Box<dyn WorkerProcess>,
    /// Number of kicks so far.
    pub kicks: Arc<AtomicU64>,
}

impl WorkerProcess for Kicked {
    fn kick(&mut self) {
        self.kicks.fetch_add(1, Ordering::Relaxed);
        self.below.kick();
    }

    fn wake_fd(&self) -> RawFd {
        self.below.wake_fd()
    }

    fn drain(&mut self) {
        self.below.drain();
    }

    fn has_events(&self) -> bool {
        self.below.has_events()
    }

    fn next_event(&mut self) -> Option<WorkerEvent> {
        self.below.next_event()
    }

    fn record_answer(&mut self) {
        self.below.record_answer();
    }

    fn end(&mut self, is_final: bool) {
        self.below.end(is_final);
    }
}
