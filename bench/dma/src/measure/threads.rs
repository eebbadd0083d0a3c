//! One run: threads on CPUs of their own, a barrier, a time, a flag.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use report::host;

/// Pairs between two looks at the flag.
pub const BATCH: u64 = 1024;

/// Work of one thread. It is made, and after the run cleaned up, by the thread that starts the run.
pub trait Task: Send {
    /// Does [`BATCH`] pairs and returns how many of them count; a thread that waits for another one
    /// looks at `stop` while it waits, and returns early.
    fn batch(&mut self, stop: &AtomicBool) -> u64;

    /// Gives back what it holds, after all threads have ended.
    fn finish(&mut self) {}
}

/// The threads of one run.
pub type Tasks = Vec<Box<dyn Task>>;

/// Result of one run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Nanoseconds of a pair, per thread: the longest thread's time on the wall × threads that
    /// count / pairs.
    pub wall_ns: f64,
    /// The same in processor time of the threads that count.
    pub cpu_ns: f64,
    /// Pairs per second, all threads together.
    pub per_second: f64,
    /// The least part of the run that any thread was running, 0 to 1.
    pub on_cpu: f64,
    /// Pairs of all threads together.
    pub pairs: u64,
}

struct Part {
    pairs: u64,
    wall: Duration,
    cpu: Duration,
}

/// Runs `tasks`, the first on the first of `cpus`, for `time`.
///
/// # Errors
/// More tasks than CPUs, a CPU that is not ours, or a task that panicked.
pub fn run(tasks: Tasks, cpus: &[usize], time: Duration) -> Result<Run> {
    if tasks.len() > cpus.len() {
        bail!("{} threads need as many CPUs", tasks.len());
    }
    let (start, stop) = (Barrier::new(tasks.len() + 1), AtomicBool::new(false));
    let ended = thread::scope(|scope| {
        let threads: Vec<_> = tasks
            .into_iter()
            .zip(cpus)
            .map(|(task, &cpu)| {
                let (start, stop) = (&start, &stop);
                scope.spawn(move || on_cpu(task, cpu, start, stop))
            })
            .collect();
        start.wait();
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    let mut parts = Vec::new();
    for (mut task, part) in ended {
        task.finish();
        parts.push(part);
    }
    Ok(total(&parts))
}

fn on_cpu(
    mut task: Box<dyn Task>,
    cpu: usize,
    start: &Barrier,
    stop: &AtomicBool,
) -> Result<(Box<dyn Task>, Part)> {
    let pinned = host::pin(cpu).with_context(|| format!("CPU {cpu}"));
    start.wait();
    pinned?;
    let (wall, cpu) = (Instant::now(), host::thread_time());
    let mut pairs = 0;
    loop {
        pairs += task.batch(stop);
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    let part = Part {
        pairs,
        wall: wall.elapsed(),
        cpu: host::thread_time() - cpu,
    };
    Ok((task, part))
}

fn total(parts: &[Part]) -> Run {
    let counting = || parts.iter().filter(|part| part.pairs > 0);
    let pairs: u64 = parts.iter().map(|part| part.pairs).sum();
    let wall = parts.iter().map(|part| part.wall).max().unwrap_or_default();
    let cpu: Duration = counting().map(|part| part.cpu).sum();
    let per_pair = |time: Duration| time.as_nanos() as f64 / pairs.max(1) as f64;
    Run {
        wall_ns: per_pair(wall) * counting().count() as f64,
        cpu_ns: per_pair(cpu),
        per_second: pairs as f64 / wall.as_secs_f64(),
        on_cpu: parts
            .iter()
            .map(|part| part.cpu.as_secs_f64() / part.wall.as_secs_f64())
            .fold(1.0, f64::min),
        pairs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(pairs: u64, wall: u64, cpu: u64) -> Part {
        Part {
            pairs,
            wall: Duration::from_nanos(wall),
            cpu: Duration::from_nanos(cpu),
        }
    }

    #[test]
    fn two_threads_are_timed_per_thread_and_counted_together() {
        let run = total(&[part(100, 1000, 900), part(300, 800, 800)]);
        assert_eq!((run.pairs, run.wall_ns), (400, 1000.0 * 2.0 / 400.0));
        assert_eq!((run.cpu_ns, run.per_second), (1700.0 / 400.0, 4e8));
        assert!((run.on_cpu - 0.9).abs() < 1e-9);
    }

    #[test]
    fn a_thread_whose_pairs_another_one_counts_is_no_second_thread() {
        let run = total(&[part(0, 1000, 1000), part(100, 1000, 1000)]);
        assert_eq!((run.wall_ns, run.cpu_ns), (10.0, 10.0));
    }

    struct Panics;

    impl Task for Panics {
        fn batch(&mut self, _: &AtomicBool) -> u64 {
            panic!("on purpose")
        }
    }

    #[test]
    fn a_thread_that_panics_and_a_missing_cpu_are_errors() {
        let cpus = host::cpus().expect("known");
        let time = Duration::from_millis(1);
        assert!(run(vec![Box::new(Panics)], &cpus, time).is_err());
        assert!(run(vec![Box::new(Panics)], &[], time).is_err());
    }
}
