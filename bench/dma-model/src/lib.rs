//! Throughput of many cores, predicted by a discrete-event **model**, never measured.
//!
//! **What.** Cores that repeat one operation, and what they queue for: a lock, a serial flush, a
//! line on which they meet. Time comes from [`Constants`] measured in the same run on one and two
//! cores; [`run`] plays the events for any number. [`validate`] compares the model with measured
//! values at the core counts that exist, and reports the deviation.
//!
//! **How work flows.** `bench/dma` measures, fills [`Constants`] and [`System`], prints
//! [`validate`], and only then [`sweep`] to 128 cores. Everything it prints from here carries the
//! word «model» ([`Outcome`]'s `Display` does).
//!
//! | [`System`] | one operation |
//! |---|---|
//! | `StrictLock` | own work; lock handed over by three line transfers; one flush under it |
//! | `StrictCombining` | own work; alone on idle hardware, until waits press; then a post in the open generation, which the first closes when the batch before is complete and another has come; one flush for all, for which each core waits |
//! | `Deferred` | own work; every `entries` operations one flush, unless another core's flush came meanwhile |
//! | `TreeLock` | twice: lock handed over, work under it, the lines under it that another core wrote last |
//! | `Private` | own work, and the remote lines that the line probe counts per operation |
//!
//! **Left out**, all to the advantage of the locks: crowds of spinners that slow the holder (queued
//! locks have none), sockets (one transfer costs the same everywhere), memory bandwidth,
//! interrupts. Waiting cores are served in order of arrival; a real test-and-set lock may favour
//! the core that released it.
#![forbid(unsafe_code)]

mod combining;
mod events;

use std::fmt;

use events::Cores;

/// Costs measured in the same run, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constants {
    /// One cache line from one core to another, one way: half of the round trip that the line probe
    /// measures.
    pub line_ns: f64,
    /// Taking and releasing a lock that is already in the own cache; combining's read-modify-writes
    /// are taken for as dear.
    pub lock_ns: f64,
    /// One page-selective or batched flush; flushes are serial.
    pub flush_ns: f64,
    /// One global flush, as deferred policies send.
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
    /// Strict protection, unmaps of many cores meet in one flush, which takes as long as that of
    /// one page.
    StrictCombining {
        /// The operation on one core without its flush.
        own_ns: f64,
        /// Time for which the first core, alone on idle hardware, waits for another; see
        /// [`GATHER_NS`].
        gather_ns: f64,
    },
    /// Unmaps queue per core; a full queue flushes globally.
    Deferred {
        /// The operation on one core, its share of the flush not included.
        own_ns: f64,
        /// Entries of the queue, at least 1.
        entries: u32,
    },
    /// An allocator under one lock, taken to allocate and to free.
    TreeLock {
        /// The pair on one core outside the lock.
        own_ns: f64,
        /// Work under the lock per pair, on one core, lock included.
        critical_ns: f64,
        /// Lines under the lock, per pair, that another core wrote last; [`TREE_LINES`] where they
        /// were not counted.
        lines: f64,
    },
    /// An allocator whose cores work on lines of their own.
    Private {
        /// The pair on one core.
        own_ns: f64,
        /// Remote lines per pair, as the line probe counts them for this number of cores.
        lines: f64,
    },
}

/// Line transfers when a contended lock changes hands: the release takes the line back from the
/// waiter, the waiter reads it, and takes it for itself.
pub const HANDOVER_LINES: f64 = 3.0;

/// Time for which `dma-map`'s combining waits for others: 256 polls without a pause.
pub const GATHER_NS: f64 = 500.0;

/// Remote lines under the lock of a tree of ranges: root and two nodes, at each of the two
/// operations.
pub const TREE_LINES: f64 = 6.0;

/// The numbers of cores that [`sweep`] plays.
pub const CORES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// Result of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Cores played.
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

/// Operations each core makes: enough that the start does not show.
const OPS: u64 = 4_000;

/// Plays `cores` cores (at least 1).
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
            // Many fillings of the queue, or the last one shows.
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

/// The model beside one measured value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Check {
    /// Cores of both.
    pub cores: usize,
    /// Measured, all cores together, millions of operations per second.
    pub measured_mps: f64,
    /// The model's.
    pub model_mps: f64,
}

/// Largest deviation that the model may have where it can be checked.
pub const TOLERANCE: f64 = 0.20;

impl Check {
    /// The model's deviation from the measurement: 0.1 for 10 % too fast.
    #[must_use]
    pub fn deviation(&self) -> f64 {
        self.model_mps / self.measured_mps - 1.0
    }

    /// Whether the deviation is within [`TOLERANCE`].
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

/// The model beside what was measured: pairs of cores and millions of operations per second, all
/// cores together.
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
