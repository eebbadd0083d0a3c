//! Figures that are compared take turns; two threads that were disturbed are run again.

use std::time::Duration;

use anyhow::Result;
use report::{Measured, host};

use super::primitives;
use super::threads::{Run, Tasks, run};

/// The part of a two-thread run that both threads must have been running.
const UNDISTURBED: f64 = 0.985;

/// One thing to time. Its threads and what they work on are made anew for every run.
pub struct Case<'a> {
    /// What the table calls it.
    pub name: String,
    /// How many threads [`make`](Self::make) returns.
    pub threads: usize,
    /// Threads that sleep inside the loop cannot be told from disturbed ones.
    pub may_sleep: bool,
    /// Waits of fixed length are part of it, so that it does not scale with the machine.
    pub is_fixed: bool,
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
            is_fixed: false,
            make: Box::new(make),
        }
    }

    /// The same with waits of fixed length.
    #[must_use]
    pub fn fixed(self) -> Self {
        Self {
            is_fixed: true,
            ..self
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
}

/// What was found about one case.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Nanoseconds of a pair, per thread, as measured.
    pub ns: Measured,
    /// Millions of pairs per second, all threads; of one thread by its processor time.
    pub mps: Measured,
    /// A cache line's round trip, beside each run of two threads.
    pub rtt_ns: Option<Measured>,
    /// The floor beside the runs of one thread.
    pub floor_ns: Option<f64>,
    /// Runs of those above in which a thread was not running all the time, because others use the machine.
    pub disturbed: usize,
    /// Of each run in its turn, so that two cases can be compared turn by turn.
    pub runs: Vec<Run>,
}

/// How runs are made.
#[derive(Clone, Debug)]
pub struct Turns {
    /// How long one run takes.
    pub time: Duration,
    /// Runs of each case.
    pub runs: usize,
    /// The CPUs to use.
    pub cpus: Vec<usize>,
}

/// A run, and the round trip beside it.
type Attempt = (Run, Option<f64>);

impl Turns {
    /// Measures the cases; one that fails, or that needs more CPUs than there are, has its error.
    pub fn measure(&self, cases: &[Case<'_>]) -> Vec<Result<Outcome>> {
        let mut found: Vec<Result<Vec<Attempt>>> = cases.iter().map(|_| Ok(Vec::new())).collect();
        let mut floors = Vec::new();
        for _ in 0..self.runs {
            if cases.iter().any(|case| case.threads == 1) {
                floors.extend(primitives::floor(&self.cpus, self.time / 8));
            }
            for (case, found) in cases.iter().zip(&mut found) {
                if let Ok(so_far) = found {
                    match self.attempt(case) {
                        Ok(run) => so_far.push(run),
                        Err(error) => *found = Err(error),
                    }
                }
            }
        }
        let floor_ns = Measured::of(floors).map(|floor| floor.median);
        cases
            .iter()
            .zip(found)
            .map(|(case, found)| Ok(outcome(case, &found?, floor_ns)))
            .collect()
    }

    /// A cache line's round trip between the first two CPUs, nanoseconds; `None` where there is one CPU.
    pub fn round_trip(&self) -> Option<f64> {
        let [here, there, ..] = self.cpus[..] else {
            return None;
        };
        host::round_trip_of(here, there, 101)
            .ok()
            .map(|(median, _)| median)
    }

    /// One run, and up to two more if others disturbed it: the least disturbed of them.
    fn attempt(&self, case: &Case<'_>) -> Result<Attempt> {
        let mut best: Option<Attempt> = None;
        for _ in 0..3 {
            let before = (case.threads > 1).then(|| self.round_trip()).flatten();
            let found = run((case.make)()?, &self.cpus, self.time)?;
            let after = before.and_then(|_| self.round_trip());
            let rtt = before
                .zip(after)
                .map(|(before, after)| f64::midpoint(before, after));
            if best
                .as_ref()
                .is_none_or(|(run, _)| run.on_cpu < found.on_cpu)
            {
                best = Some((found, rtt));
            }
            if case.threads == 1 || case.may_sleep || found.on_cpu >= UNDISTURBED {
                break;
            }
        }
        Ok(best.expect("there was an attempt"))
    }
}

fn outcome(case: &Case<'_>, found: &[Attempt], floor_ns: Option<f64>) -> Outcome {
    let of = |value: &dyn Fn(&Run) -> f64| {
        Measured::of(found.iter().map(|(run, _)| value(run))).expect("there are runs")
    };
    let is_alone = case.threads == 1;
    let disturbed = found
        .iter()
        .filter(|(run, _)| !is_alone && !case.may_sleep && run.on_cpu < UNDISTURBED);
    Outcome {
        ns: of(&|run| if is_alone { run.cpu_ns } else { run.wall_ns }),
        mps: of(&|run| {
            if is_alone {
                1e3 / run.cpu_ns
            } else {
                run.per_second / 1e6
            }
        }),
        rtt_ns: Measured::of(found.iter().filter_map(|(_, rtt)| *rtt)),
        floor_ns: floor_ns.filter(|_| is_alone),
        disturbed: disturbed.count(),
        runs: found.iter().map(|(run, _)| *run).collect(),
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
}
