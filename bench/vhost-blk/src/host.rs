//! The machine under the measurement: CPUs, and what they cost each other.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Runs the calling thread, and what it starts, on one CPU.
///
/// # Errors
/// There is no such CPU, or it is not ours to use.
pub fn pin(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// The priority of this thread and of what it starts, until dropped.
///
/// Where the kernel groups processes by session (sched_autogroup), a nice value counts within the group only,
/// so the group's own is set too.
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

/// The CPUs this thread may run on, in order.
///
/// # Errors
/// The kernel does not say.
pub fn cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect())
}

/// Round trips per run, and runs: short ones, so that most of them are free of whoever else runs here.
const TRIPS: u64 = 100;
const RUNS: usize = 2001;

/// Two lines apart, so that nothing else moves with it.
#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

/// A cache line's round trip between two CPUs, nanoseconds: the median of many short runs and the fastest.
///
/// # Errors
/// The CPUs cannot be used.
pub fn round_trip(here: usize, there: usize) -> io::Result<(f64, f64)> {
    let lines = Arc::new((Line::default(), Line::default()));
    let trips = TRIPS * (RUNS as u64 + 1);
    let other = Arc::clone(&lines);
    let echo = thread::spawn(move || {
        let pinned = pin(there);
        for trip in 1..=trips {
            while other.0.0.load(Ordering::Acquire) != trip {
                std::hint::spin_loop();
            }
            other.1.0.store(trip, Ordering::Release);
        }
        pinned
    });
    let before = sched_getaffinity(None)?;
    let pinned = pin(here);
    let mut runs = Vec::new();
    let mut trip = 0;
    for run in 0..=RUNS {
        let start = Instant::now();
        for _ in 0..TRIPS {
            trip += 1;
            lines.0.0.store(trip, Ordering::Release);
            while lines.1.0.load(Ordering::Acquire) != trip {
                std::hint::spin_loop();
            }
        }
        // The first run warms up.
        if run > 0 {
            runs.push(start.elapsed().as_nanos() as f64 / TRIPS as f64);
        }
    }
    sched_setaffinity(None, &before)?;
    pinned?;
    echo.join()
        .map_err(|_| io::Error::other("the echo thread panicked"))??;
    runs.sort_by(f64::total_cmp);
    Ok((runs[RUNS / 2], runs[0]))
}

/// Threads of the lowest class, one per CPU, that keep it from halting: a processor that has to be woken
/// from HLT answers tens of microseconds late, and in a virtual machine with an exit. End when dropped.
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
