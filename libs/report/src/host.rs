//! The machine under the measurement: its CPUs, kernel and load, and the cost of a cache line
//! between two CPUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, fs, io, thread};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use crate::Measured;

/// Conditions of a measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// The processor's name.
    pub model: String,
    /// Number of processors that this program may use.
    pub cpus: usize,
    /// Release of the kernel.
    pub kernel: String,
    /// Commit of the sources, from the variable `EXITLESS_COMMIT`, which the makefile exports.
    pub commit: String,
    /// Load average of the last minute. Above 1, other programs use this machine.
    pub load_average: f64,
}

impl Host {
    /// Reads the conditions from the kernel and the environment. An unknown model or commit is
    /// "unknown"; other missing values are empty or 0.
    pub fn read() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let model = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name"));
        Self {
            model: model
                .map_or("unknown", |line| line.trim_start_matches(['\t', ' ', ':']))
                .to_owned(),
            cpus: thread::available_parallelism().map_or(0, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            commit: std::env::var("EXITLESS_COMMIT").unwrap_or_else(|_| "unknown".to_owned()),
            load_average: read("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|word| word.parse().ok())
                .unwrap_or(0.0),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} CPUs", self.model, self.cpus)
    }
}

/// Restricts the calling thread, and threads that it starts later, to one CPU.
///
/// # Errors
/// There is no such CPU, or this process may not use it.
pub fn pin(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::from_raw_os_error(
            rustix::io::Errno::INVAL.raw_os_error(),
        ));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Returns the CPUs on which this thread may run, in order.
///
/// # Errors
/// The kernel refuses to report them.
pub fn cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect())
}

/// Round trips per run, and number of runs. Runs are short, so that most are undisturbed by other
/// load on the machine.
const TRIPS: u64 = 100;
const RUNS: usize = 2001;

/// A value aligned to two cache lines, so that no other data share its line or the adjacent one.
#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

/// Measures the round trip of a cache line between two CPUs, in nanoseconds, over many short runs.
///
/// # Errors
/// The CPUs cannot be used.
pub fn round_trip(here: usize, there: usize) -> io::Result<Measured> {
    round_trip_of(here, there, RUNS)
}

/// Measures the same between the first two CPUs that this program may use.
///
/// # Errors
/// There is only one CPU, or they cannot be used.
pub fn first_round_trip() -> io::Result<Measured> {
    match cpus()?[..] {
        [here, there, ..] => round_trip(here, there),
        _ => Err(io::Error::other("one CPU: there is nobody to answer")),
    }
}

/// Measures the same in `count` runs, at least one, of 100 trips each.
///
/// # Errors
/// The CPUs cannot be used.
pub fn round_trip_of(here: usize, there: usize, count: usize) -> io::Result<Measured> {
    let count = count.max(1);
    let lines = Arc::new((Line::default(), Line::default()));
    let trips = TRIPS * (count as u64 + 1);
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
    for run in 0..=count {
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
    Measured::of(runs).ok_or_else(|| io::Error::other("no run"))
}

/// Interruptions of a thread that spins: times in which its CPU ran a timer interrupt of the
/// kernel, another thread, or the hypervisor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interruptions {
    /// Number of interruptions longer than [`Interruptions::FROM`], per second.
    pub per_s: f64,
    /// Fraction of the time that they took, 0 to 1.
    pub share: f64,
}

impl Interruptions {
    /// Length from which an interruption counts. Shorter ones are part of a request's latency;
    /// longer ones dominate it.
    pub const FROM: Duration = Duration::from_micros(5);

    /// Spins on `cpu` for `time`, and measures each interruption between two readings of the clock.
    ///
    /// # Errors
    /// The CPU cannot be used.
    pub fn of(cpu: usize, time: Duration) -> io::Result<Self> {
        let before = sched_getaffinity(None)?;
        pin(cpu)?;
        let start = Instant::now();
        let (mut last, mut count, mut away) = (start, 0_u32, Duration::ZERO);
        while last - start < time {
            let now = Instant::now();
            if now - last > Self::FROM {
                count += 1;
                away += now - last;
            }
            last = now;
        }
        sched_setaffinity(None, &before)?;
        let all = (last - start).as_secs_f64();
        Ok(Self {
            per_s: f64::from(count) / all,
            share: away.as_secs_f64() / all,
        })
    }
}

/// Sleeps for `time`, and returns the idle fraction, 0 to 1, of the busiest of these CPUs; 1 if the
/// kernel does not report it. The kernel counts in steps of 10 ms: `time` should be 100 ms or more.
pub fn idle(cpus: &[usize], time: Duration) -> f64 {
    let before = idle_times();
    let start = Instant::now();
    thread::sleep(time);
    let (after, wall) = (idle_times(), start.elapsed());
    let part = |cpu: &usize| {
        let of = |times: &[(usize, Duration)]| {
            let found = times.iter().find(|(of, _)| of == cpu);
            found.map(|(_, idle)| *idle)
        };
        let idle = of(&after)?.saturating_sub(of(&before)?);
        Some(idle.as_secs_f64() / wall.as_secs_f64())
    };
    cpus.iter().filter_map(part).fold(1.0, f64::min)
}

/// Returns the time for which each CPU was idle since the machine was booted.
fn idle_times() -> Vec<(usize, Duration)> {
    parse_idle(&fs::read_to_string("/proc/stat").unwrap_or_default())
}

/// Parses lines `cpuN user nice system idle iowait …`, in hundredths of a second (proc_stat(5)).
fn parse_idle(stat: &str) -> Vec<(usize, Duration)> {
    let line = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split_ascii_whitespace();
        let cpu = words.next()?.parse().ok()?;
        let mut times = words.skip(3).map(|word| word.parse::<u64>().ok());
        let idle = times.next()?? + times.next()??;
        Some((cpu, Duration::from_millis(idle * 10)))
    };
    // "cpu " without a number is the sum of all CPUs.
    stat.lines()
        .filter(|line| !line.starts_with("cpu "))
        .filter_map(line)
        .collect()
}

/// Returns the CPU time of the calling thread since it started.
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // Neither is negative: the thread has run since it started.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_that_is_shared_is_taken_away() {
        let before = cpus().unwrap();
        let cpu = before[0];
        let is_over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                pin(cpu).unwrap();
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let seen = Interruptions::of(cpu, Duration::from_millis(200));
            is_over.store(true, Ordering::Relaxed);
            let seen = seen.unwrap();
            // Two threads that spin share the CPU equally, or nearly.
            assert!(seen.per_s >= 1.0 && seen.share > 0.2, "{seen:?}");
        });
        assert_eq!(cpus().unwrap(), before);
    }

    #[test]
    fn a_thread_that_works_uses_its_time() {
        // In this order, so that time between the two readings counts as elapsed.
        let (start, before) = (Instant::now(), thread_time());
        while thread_time() - before < Duration::from_millis(2) {}
        assert!(start.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn idle_time_is_read_from_the_lines_of_single_cpus() {
        let stat = "cpu  9 9 9 9 9 9\ncpu0 1 2 3 40 5 6\ncpu1 1 1 1 70 0 1\nintr 12 3\ncpu2 1 x\n";
        let of = |cpu, ms| (cpu, Duration::from_millis(ms));
        assert_eq!(parse_idle(stat), [of(0, 450), of(1, 700)]);
    }

    #[test]
    fn a_cpu_that_works_is_not_idle() {
        let time = Duration::from_millis(200);
        let cpus = cpus().expect("known");
        let stop = AtomicU64::new(0);
        let idle = thread::scope(|scope| {
            scope.spawn(|| {
                pin(cpus[0]).expect("ours");
                while stop.load(Ordering::Relaxed) == 0 {}
            });
            let found = idle(&cpus[..1], time);
            stop.store(1, Ordering::Relaxed);
            found
        });
        assert!(idle < 0.9, "{idle}");
    }

    #[test]
    fn there_is_no_such_cpu() {
        assert!(pin(CpuSet::MAX_CPU).is_err());
    }
}
