//! The machine under the measurement: priority, and processors kept awake.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

pub use report::host::{Interruptions, cpus, pin, round_trip};

/// The priority of this thread and of what it starts, until dropped.
///
/// Where the kernel groups processes by session (sched_autogroup), a nice value counts within the
/// group only, so the group's own is set too.
#[derive(Debug)]
pub struct Priority {
    before: Option<String>,
}

const AUTOGROUP: &str = "/proc/self/autogroup";

impl Priority {
    /// From -20 to 19.
    ///
    /// # Errors
    /// It is not allowed.
    pub fn set(nice: i32) -> io::Result<Self> {
        rustix::process::setpriority_process(None, nice)?;
        let line = std::fs::read_to_string(AUTOGROUP).unwrap_or_default();
        let before = line
            .trim()
            .rsplit_once(' ')
            .map(|(_, nice)| nice.to_owned());
        if before.is_some() {
            std::fs::write(AUTOGROUP, nice.to_string())?;
        }
        Ok(Self { before })
    }
}

impl Drop for Priority {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // The session goes on with the other priority then, which harms nothing.
            let _ = std::fs::write(AUTOGROUP, before);
        }
    }
}

/// Threads of the lowest class, one per CPU, that keep it from halting: a processor that has to be
/// woken from HLT answers tens of microseconds late, and in a virtual machine with an exit. End
/// when dropped.
#[derive(Debug)]
pub struct Spinners {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Spinners {
    /// Starts one on each of `cpus`.
    ///
    /// # Errors
    /// Threads cannot be made.
    pub fn start(cpus: &[usize]) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let spinner = |&cpu: &usize| {
            let stop = Arc::clone(&stop);
            thread::Builder::new()
                .name(format!("spin{cpu}"))
                .spawn(move || {
                    // Without its class or its CPU it would be in the way: better none.
                    if pin(cpu)
                        .and_then(|()| crate::memory::run_only_when_idle())
                        .is_ok()
                    {
                        while !stop.load(Ordering::Relaxed) {
                            std::hint::spin_loop();
                        }
                    }
                })
        };
        let threads = cpus.iter().map(spinner).collect::<io::Result<_>>()?;
        Ok(Self { stop, threads })
    }
}

impl Drop for Spinners {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // They cannot panic.
            let _ = thread.join();
        }
    }
}
