//! Discrete-event **model** of the throughput of many cores. Its results are predictions, never
//! measurements.
//!
//! **What.** Cores that repeat one operation, and the resources for which they queue: a lock, a
//! serial flush, a shared cache line. [`Constants`] are measured in the same run on one and two
//! cores; [`run`] simulates any number of cores. [`validate`] compares the model with values
//! measured at the available core counts, and reports the deviation.
//!
//! **How work flows.** `bench/dma` measures, fills [`Constants`] and [`System`], prints
//! [`validate`], and only then [`sweep`] to 128 cores. Everything it prints from here carries the
//! word «model» ([`Outcome`]'s `Display` does).
//!
//! | [`System`] | one operation |
//! |---|---|
//! | `StrictLock` | own work; lock handed over by three line transfers; one flush while it is held |
//! | `StrictCombining` | own work; a flush alone while the hardware is idle, until cores have to wait. Then each core joins the open batch. Its first core closes it when the batch before is complete and another core has joined; one flush serves all, and each core waits for it |
//! | `Deferred` | own work; every `entries` operations one flush, unless another core has flushed since |
//! | `TreeLock` | twice: lock handed over, work while it is held, transfers of the lines that another core wrote last |
//! | `Private` | own work, and the remote lines that the line probe counts per operation |
//!
//! **Left out**, all to the advantage of the locks: many spinning cores that slow the holder down
//! (queued locks avoid that), sockets (one transfer costs the same everywhere), memory bandwidth,
//! interrupts. Waiting cores are served in order of arrival; a real test-and-set lock may favour
//! the core that released it.
#![forbid(unsafe_code)]

mod combining;
mod events;

use std::fmt;

use events::Cores;

/// Costs in nanoseconds, measured in the same run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constants {
    /// Transfer of one cache line from one core to another: half of the round trip that is measured
    /// between two threads.
    pub line_ns: f64,
    /// Taking and releasing a lock whose line is in the own cache. The read-modify-writes of
    /// combining are assumed to cost the same.
    pub lock_ns: f64,
    /// One page-selective or batched flush. Flushes are serial.
    pub flush_ns: f64,
    /// One global flush, as deferred policies submit it.
    pub global_flush_ns: f64,
}

impl Default for Constants {
    /// A two-processor guest on a Xeon of the Sapphire Rapids class: 58 ns per line, 9 ns per lock;
    /// flushes as the workloads define them, 500 ns and 1 µs.
    fn default() -> Self {
        Self {
            line_ns: 58.0,
            lock_ns: 9.0,
            flush_ns: 500.0,
            global_flush_ns: 1000.0,
        }
    }
}

/// Behaviour of the cores; times in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum System {
    /// Strict protection, each unmap flushes under one lock.
    StrictLock {
        /// The operation on one core without its flush, lock included.
        own_ns: f64,
    },
    /// Strict protection. Unmaps of many cores share one flush, which takes as long as that of one
    /// page.
    StrictCombining {
        /// The operation on one core without its flush.
        own_ns: f64,
        /// Time for which the first core, on otherwise idle hardware, waits for another; see
        /// [`GATHER_NS`].
        gather_ns: f64,
    },
    /// Unmaps queue per core; a full queue flushes globally.
    Deferred {
        /// The operation on one core, without its share of the flush.
        own_ns: f64,
        /// Entries of the queue, at least 1.
        entries: u32,
    },
    /// An allocator under one lock, taken to allocate and to free.
    TreeLock {
        /// The pair of operations on one core, outside the lock.
        own_ns: f64,
        /// Work under the lock per pair of operations, on one core, lock included.
        critical_ns: f64,
        /// Lines accessed under the lock, per pair, that another core wrote last; [`TREE_LINES`]
        /// where they were not counted.
        lines: f64,
    },
    /// An allocator whose cores mostly work on lines of their own.
    Private {
        /// The pair of operations on one core.
        own_ns: f64,
        /// Remote lines per pair, as the line probe counts them for this number of cores.
        lines: f64,
    },
}

/// Line transfers when a contended lock changes hands: the releasing core takes the line back from
/// the waiter, the waiter reads it, and takes it exclusively.
pub const HANDOVER_LINES: f64 = 3.0;

/// Time for which the combining of `dma-map` waits for other cores: 256 polls without a pause.
pub const GATHER_NS: f64 = 500.0;

/// Remote lines accessed under the lock of a tree of ranges: the root and two nodes, in each of the
/// two operations.
pub const TREE_LINES: f64 = 6.0;

/// Numbers of cores that [`sweep`] simulates.
pub const CORES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// Result of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Number of cores simulated.
    pub cores: usize,
    /// Operations of all cores together, millions per second.
    pub mps: f64,
    /// One core's time for one operation, nanoseconds.
    pub ns: f64,
    /// Operations per flush; infinite where there is none.
    pub ops_per_flush: f64,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "model: {} cores {:.2} M/s, {:.1} ns",
            self.cores, self.mps, self.ns
        )
    }
}

/// Operations of each core: enough that the start has no effect on the result.
const OPS: u64 = 4_000;

/// Simulates `cores` cores (at least 1).
///
/// # Panics
/// `cores` is 0, or a time is negative or no number.
#[must_use]
pub fn run(system: System, constants: Constants, cores: usize) -> Outcome {
    assert!(cores > 0, "no cores");
    let c = constants;
    match system {
        System::StrictLock { own_ns } => {
            let mut run = Cores::new(cores, OPS);
            run.locked(c.line_ns, own_ns, c.flush_ns, 0.0);
            run.outcome(1.0)
        }
        System::TreeLock {
            own_ns,
            critical_ns,
            lines,
        } => {
            let mut run = Cores::new(cores, 2 * OPS);
            let (own, critical) = (own_ns / 2.0, critical_ns / 2.0);
            run.locked(c.line_ns, own, critical, lines / 2.0 * c.line_ns);
            Outcome {
                ops_per_flush: f64::INFINITY,
                ..run.outcome(2.0)
            }
        }
        System::StrictCombining { own_ns, gather_ns } => {
            let mut run = Cores::new(cores, OPS);
            combining::play(&mut run, c, own_ns, gather_ns);
            run.outcome(1.0)
        }
        System::Deferred { own_ns, entries } => {
            assert!(entries > 0, "a queue without entries");
            // Many fillings of the queue, so that the last, incomplete one has no effect.
            let mut run = Cores::new(cores, OPS.max(u64::from(entries) * 64));
            run.deferred(c, own_ns, entries);
            run.outcome(1.0)
        }
        System::Private { own_ns, lines } => {
            let lines = if cores == 1 { 0.0 } else { lines };
            let ns = own_ns + lines * c.line_ns;
            assert!(ns > 0.0, "an operation without time");
            Outcome {
                cores,
                mps: cores as f64 * 1000.0 / ns,
                ns,
                ops_per_flush: f64::INFINITY,
            }
        }
    }
}

/// [`run`] for each of [`CORES`].
#[must_use]
pub fn sweep(system: System, constants: Constants) -> [Outcome; CORES.len()] {
    CORES.map(|cores| run(system, constants, cores))
}

/// A prediction beside one measured value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Check {
    /// Number of cores of both.
    pub cores: usize,
    /// Measured value of all cores together, millions of operations per second.
    pub measured_mps: f64,
    /// Value that the model predicts.
    pub model_mps: f64,
}

/// Greatest deviation for which the model counts as valid.
pub const TOLERANCE: f64 = 0.20;

impl Check {
    /// Returns the model's deviation from the measurement: 0.1 if it is 10 % too fast.
    #[must_use]
    pub fn deviation(&self) -> f64 {
        self.model_mps / self.measured_mps - 1.0
    }

    /// Returns whether the deviation is within [`TOLERANCE`].
    #[must_use]
    pub fn holds(&self) -> bool {
        self.deviation().abs() <= TOLERANCE
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} cores: measured {:.2} M/s, model {:.2} M/s, {:+.0} %{}",
            self.cores,
            self.measured_mps,
            self.model_mps,
            self.deviation() * 100.0,
            if self.holds() {
                ""
            } else {
                ": the model does not hold here"
            }
        )
    }
}

/// Compares the model with `measured`: pairs of a number of cores, and of millions of operations
/// per second of all cores together.
#[must_use]
pub fn validate(system: System, constants: Constants, measured: &[(usize, f64)]) -> Vec<Check> {
    let check = |&(cores, measured_mps)| Check {
        cores,
        measured_mps,
        model_mps: run(system, constants, cores).mps,
    };
    measured.iter().map(check).collect()
}

#[cfg(test)]
mod tests;
