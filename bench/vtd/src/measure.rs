//! Repeating a measurement: several runs, the median and the spread.

use std::time::Instant;

/// Nanoseconds of one operation over several runs.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Middle run.
    pub median: f64,
    /// Fastest run.
    pub min: f64,
    /// Slowest run.
    pub max: f64,
}

/// Runs of each measurement.
const RUNS: usize = 15;

/// Times `operations` calls of `each` per run; it is given the number of the call.
pub fn measure(operations: u32, mut each: impl FnMut(u32)) -> Measured {
    for i in 0..operations {
        each(i);
    }
    of((0..RUNS)
        .map(|_| {
            let start = Instant::now();
            for i in 0..operations {
                each(i);
            }
            start.elapsed().as_nanos() as f64 / f64::from(operations)
        })
        .collect())
}

/// Median and spread of these.
pub fn of(mut runs: Vec<f64>) -> Measured {
    runs.sort_by(f64::total_cmp);
    Measured {
        median: runs[runs.len() / 2],
        min: runs[0],
        max: runs[runs.len() - 1],
    }
}
