//! Repeating a measurement: several runs, the median and the spread.

use std::time::Instant;

use report::Measured;

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
pub fn of(runs: Vec<f64>) -> Measured {
    Measured::of(runs).expect("there are runs")
}
