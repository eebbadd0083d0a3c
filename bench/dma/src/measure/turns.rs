//! Figures that are compared take turns; two threads that were disturbed are run again.
//!
//! A processor that shares a core with another guest's runs faster or slower from second to second,
//! so cases are compared turn by turn, and a cache line's round trip is measured before each run of
//! two threads. A turn, and a run that is repeated, waits a little for CPUs that are not idle. A
//! run of two threads counts if both were running for 98.5 % of it (time that the hypervisor gave
//! to others is none of theirs); it has three attempts. A case that was disturbed in all of them is
//! counted, and left out where another turn was not. Runs so short that they are no measurement
//! have one attempt, and few measurements of the round trip: on a machine that is busy each of them
//! waits for a CPU.

use std::cell::Cell;
use std::time::Duration;

use anyhow::Result;
use report::{Measured, host};

use super::threads::{Run, Tasks, run};

/// The part of a two-thread run that both threads must have been running.
const UNDISTURBED: f64 = 0.985;
/// The part of the time before a turn that the CPUs must have been idle, each.
const IDLE: f64 = 0.9;
/// Looks at the CPUs before a turn begins all the same.
const LOOKS: usize = 3;
/// Half the length of a look: the kernel counts in steps of 10 ms. Shorter runs are no measurement;
/// they do not wait for idle CPUs and are not run again.
const SHORT: Duration = Duration::from_millis(50);

/// One thing to time. Its threads and what they work on are made anew for every run.
pub struct Case<'a> {
    /// Name in the table.
    pub name: String,
    /// Number of threads that [`make`](Self::make) returns.
    pub threads: usize,
    /// Whether threads sleep inside the loop, which looks the same as being disturbed.
    pub may_sleep: bool,
    /// Makes the threads.
    pub make: Box<dyn Fn() -> Result<Tasks> + 'a>,
}

impl<'a> Case<'a> {
    /// A case whose threads never sleep.
    pub fn new(
        name: impl Into<String>,
        threads: usize,
        make: impl Fn() -> Result<Tasks> + 'a,
    ) -> Self {
        Self {
            name: name.into(),
            threads,
            may_sleep: false,
            make: Box::new(make),
        }
    }

    /// The same with threads that may sleep.
    #[must_use]
    pub fn sleeping(self) -> Self {
        Self {
            may_sleep: true,
            ..self
        }
    }

    fn is_disturbed(&self, run: &Run) -> bool {
        self.threads > 1 && !self.may_sleep && run.on_cpu < UNDISTURBED
    }
}

/// One run, and what was measured right before it.
#[derive(Clone, Copy, Debug)]
pub struct TimedRun {
    /// Nanoseconds of a pair, per thread: of one thread its processor time, of two the time on the
    /// wall.
    pub ns: f64,
    /// Millions of pairs per second, all threads; of one thread by its processor time.
    pub mps: f64,
    /// Pairs of all threads together.
    pub pairs: u64,
    /// Before two threads: a cache line's round trip, nanoseconds.
    pub rtt_ns: Option<f64>,
    /// Two threads of which one was kept from running, in this attempt and in those that were
    /// worse.
    pub is_disturbed: bool,
}

/// Figures of one case. They are of the runs that nothing disturbed; of all, where all were.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Nanoseconds of a pair, per thread, as measured.
    pub ns: Measured,
    /// Millions of pairs per second, all threads; of one thread by its processor time.
    pub mps: Measured,
    /// A cache line's round trip, before the runs of two threads.
    pub rtt_ns: Option<Measured>,
    /// Runs in which a thread was not running all the time, because others use the machine.
    pub disturbed: usize,
    /// Runs of each turn, so that two cases can be compared turn by turn.
    pub runs: Vec<TimedRun>,
}

impl Outcome {
    /// Compares this case with another one of the same turns, turn by turn: of the turns in which
    /// neither was disturbed; of all, where there is none. A machine that becomes slower from turn
    /// to turn does so for both.
    pub fn turn_by_turn(
        &self,
        other: &Self,
        of: impl Fn(&TimedRun, &TimedRun) -> Option<f64>,
    ) -> Option<Measured> {
        let pairs = || self.runs.iter().zip(&other.runs);
        let is_quiet =
            |this: &TimedRun, other: &TimedRun| !this.is_disturbed && !other.is_disturbed;
        let any_quiet = pairs().any(|(this, other)| is_quiet(this, other));
        Measured::of(
            pairs()
                .filter(|(this, other)| is_quiet(this, other) || !any_quiet)
                .filter_map(|(this, other)| of(this, other)),
        )
    }
}

/// Settings of runs.
#[derive(Clone, Debug)]
pub struct Turns {
    /// Duration of one run.
    pub time: Duration,
    /// Runs of each case.
    pub runs: usize,
    /// The CPUs to use.
    pub cpus: Vec<usize>,
    /// Waits for idle CPUs that were given up.
    pub busy: Cell<usize>,
    /// Names of the allocation loops to run; all where there are none.
    pub loops: Vec<String>,
}

impl Turns {
    /// Whether a loop of this name is run.
    pub fn runs_loop(&self, name: &str) -> bool {
        self.loops.is_empty() || self.loops.iter().any(|wanted| wanted == name)
    }

    /// The same with so many runs of each case.
    #[must_use]
    pub fn with_runs(&self, runs: usize) -> Self {
        Self {
            runs,
            ..self.clone()
        }
    }

    /// Measures the cases; one that fails, or that needs more CPUs than there are, has its error.
    pub fn measure(&self, cases: &[Case<'_>]) -> Vec<Result<Outcome>> {
        let mut found: Vec<Result<Vec<TimedRun>>> = cases.iter().map(|_| Ok(Vec::new())).collect();
        for _ in 0..self.runs {
            self.wait_for_others();
            for (case, found) in cases.iter().zip(&mut found) {
                if let Ok(so_far) = found {
                    match self.attempt(case) {
                        Ok(run) => so_far.push(run),
                        Err(error) => *found = Err(error),
                    }
                }
            }
        }
        found.into_iter().map(|found| Ok(outcome(found?))).collect()
    }

    fn is_short(&self) -> bool {
        self.time < SHORT
    }

    /// Until the CPUs are idle, but not for long.
    fn wait_for_others(&self) {
        if self.is_short() {
            return;
        }
        let is_idle = |_| host::idle(&self.cpus, 2 * SHORT) >= IDLE;
        if !(0..LOOKS).any(is_idle) {
            self.busy.set(self.busy.get() + 1);
        }
    }

    /// A cache line's round trip between the first two CPUs, nanoseconds; `None` where there is one
    /// CPU.
    pub fn round_trip(&self) -> Option<f64> {
        let [here, there, ..] = self.cpus[..] else {
            return None;
        };
        let looks = if self.is_short() { 3 } else { 101 };
        host::round_trip_of(here, there, looks)
            .ok()
            .map(|rtt| rtt.median)
    }

    /// One run, and up to two more if others disturbed it: the least disturbed of them.
    fn attempt(&self, case: &Case<'_>) -> Result<TimedRun> {
        let mut best: Option<(Run, Option<f64>)> = None;
        for _ in 0..3 {
            let rtt = (case.threads > 1).then(|| self.round_trip()).flatten();
            let found = run((case.make)()?, &self.cpus, self.time)?;
            if best
                .as_ref()
                .is_none_or(|(run, _)| run.on_cpu < found.on_cpu)
            {
                best = Some((found, rtt));
            }
            if self.is_short() || !case.is_disturbed(&found) {
                break;
            }
            self.wait_for_others();
        }
        let (run, rtt_ns) = best.expect("there was an attempt");
        let is_alone = case.threads == 1;
        Ok(TimedRun {
            ns: if is_alone { run.cpu_ns } else { run.wall_ns },
            mps: if is_alone {
                1e3 / run.cpu_ns
            } else {
                run.per_second / 1e6
            },
            pairs: run.pairs,
            rtt_ns,
            is_disturbed: case.is_disturbed(&run),
        })
    }
}

fn outcome(runs: Vec<TimedRun>) -> Outcome {
    let disturbed = runs.iter().filter(|run| run.is_disturbed).count();
    let is_counted = |run: &&TimedRun| !run.is_disturbed || disturbed == runs.len();
    let of = |value: &dyn Fn(&TimedRun) -> Option<f64>| {
        Measured::of(runs.iter().filter(is_counted).filter_map(value))
    };
    let must =
        |value: &dyn Fn(&TimedRun) -> f64| of(&|run| Some(value(run))).expect("there are runs");
    Outcome {
        ns: must(&|run| run.ns),
        mps: must(&|run| run.mps),
        rtt_ns: of(&|run| run.rtt_ns),
        disturbed,
        runs,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use anyhow::bail;

    use super::super::threads::{BATCH, Task};
    use super::*;

    struct Idle;

    impl Task for Idle {
        fn batch(&mut self, _: &AtomicBool) -> u64 {
            BATCH
        }
    }

    #[test]
    fn a_case_that_fails_leaves_the_others_their_figures() {
        let turns = Turns {
            time: Duration::from_millis(2),
            runs: 3,
            cpus: host::cpus().expect("known"),
            busy: Cell::new(0),
            loops: Vec::new(),
        };
        let cases = [
            Case::new("fails", 1, || bail!("on purpose")),
            Case::new("works", 1, || Ok(vec![Box::new(Idle)])),
        ];
        let found = turns.measure(&cases);
        assert!(found[0].is_err());
        let works = found[1].as_ref().expect("measured");
        assert_eq!(
            (works.runs.len(), works.rtt_ns, works.disturbed),
            (3, None, 0)
        );
        assert!(works.ns.min > 0.0 && works.mps.median > 0.0);
    }

    fn turn(ns: f64, rtt: f64, is_disturbed: bool) -> TimedRun {
        TimedRun {
            ns,
            mps: 1e3 / ns,
            pairs: 1,
            rtt_ns: Some(rtt),
            is_disturbed,
        }
    }

    #[test]
    fn disturbed_runs_count_only_where_there_are_no_others() {
        let some = outcome(vec![turn(90.0, 100.0, true), turn(10.0, 200.0, false)]);
        assert_eq!((some.ns.max, some.disturbed, some.runs.len()), (10.0, 1, 2));
        assert_eq!(some.rtt_ns.map(|rtt| rtt.median), Some(200.0));
        let all = outcome(vec![turn(90.0, 1.0, true), turn(10.0, 1.0, true)]);
        assert_eq!((all.ns.max, all.disturbed), (90.0, 2));
    }

    #[test]
    fn cases_are_compared_turn_by_turn_and_in_quiet_turns() {
        let of = |runs: &[(f64, bool)]| {
            let turn = |&(ns, is_disturbed): &(f64, bool)| turn(ns, 200.0, is_disturbed);
            outcome(runs.iter().map(turn).collect())
        };
        let ratio = |this: &Outcome, other: &Outcome| {
            let found = this.turn_by_turn(other, |this, other| Some(this.ns / other.ns));
            found.map(|found| (found.min, found.max))
        };
        // A machine half as fast in the second turn: the ratio of the medians would not be 1.
        let this = of(&[(10.0, false), (20.0, false), (90.0, true)]);
        let other = of(&[(10.0, false), (20.0, false), (10.0, false)]);
        assert_eq!(ratio(&this, &other), Some((1.0, 1.0)));
        let disturbed = of(&[(30.0, true), (20.0, true), (10.0, true)]);
        assert_eq!(ratio(&disturbed, &other), Some((1.0, 3.0)));
        assert_eq!(this.turn_by_turn(&other, |_, _| None), None);
    }
}
