//! Keys and table: what is made of the samples of one load.

use anyhow::{Context, Result};
use report::{Measured, Object, short};

use crate::cases::{BackEnd, CASES, Case};
use crate::guest::{LONGEST, Load, Sample};

/// Least share of a window that each thread had a CPU for, in one that counts as undisturbed.
const UNDISTURBED: f64 = 0.9;

/// A load over one back end.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// Its requests.
    pub load: Load,
    /// Their back end.
    pub back_end: BackEnd,
}

impl Cell {
    /// `4k_d32`.
    fn shape(&self) -> String {
        let size = if self.load.len == LONGEST {
            "64k"
        } else {
            "4k"
        };
        format!("{size}_d{}", self.load.depth)
    }

    /// `null_read`.
    fn kind(&self) -> String {
        let kind = if self.load.is_write { "write" } else { "read" };
        format!("{}_{kind}", self.back_end.name())
    }
}

/// Samples of one load, round by round, in the order of [`CASES`].
pub struct Samples(pub Vec<Vec<Sample>>);

impl Samples {
    fn of(&self, case: Case, pick: impl Fn(&Sample) -> f64) -> Result<Measured> {
        let samples = self.0[case as usize].iter();
        Measured::of(samples.map(pick)).context("there are rounds")
    }

    /// Requests a second of `case` for one of `bounce`, round by round.
    fn ratio(&self, case: Case) -> Result<Measured> {
        let bounce = &self.0[Case::Bounce as usize];
        let pairs = self.0[case as usize].iter().zip(bounce);
        let ratios = pairs.map(|(one, bounce)| one.iops / bounce.iops);
        Measured::of(ratios).context("there are rounds")
    }

    /// The same of the rounds in which the threads of neither waited for a CPU: number of rounds,
    /// and the ratio if there are any.
    fn undisturbed_ratio(&self, case: Case) -> (usize, Option<Measured>) {
        let bounce = &self.0[Case::Bounce as usize];
        let pairs = self.0[case as usize].iter().zip(bounce);
        let has_cpus = |sample: &Sample| sample.share >= UNDISTURBED;
        let undisturbed = pairs.filter(|(one, bounce)| has_cpus(one) && has_cpus(bounce));
        let ratios: Vec<f64> = undisturbed
            .map(|(one, bounce)| one.iops / bounce.iops)
            .collect();
        (ratios.len(), Measured::of(ratios))
    }
}

/// The first two lines of the table.
pub fn heading() -> String {
    let groups = format!(
        "{:<22}{:>36}{:>40}{:>10}{:>46}{:>18}",
        "medians",
        "requests a second",
        "worker ÷ bounce",
        "pingpong",
        "CPU ns a request, owner+worker",
        "sleeps of 1000"
    );
    let [direct, bounce, worker, asleep] = CASES.map(Case::name);
    let names = format!(
        "{:<22}{direct:>9}{bounce:>9}{worker:>9}{asleep:>9}{:>26}{:>14}{:>10}\
         {direct:>9}{bounce:>9}{worker:>14}{asleep:>14}{worker:>9}{asleep:>9}",
        "", "(least to greatest)", "undisturbed", "ns"
    );
    format!("{groups}\n{names}")
}

/// Sets the keys of `cell`; returns its line of the table. `trip`: a cache line's way from the
/// owner's CPU to the workers' and back, in ns.
///
/// # Errors
/// There is no sample.
pub fn set(
    report: &mut Object,
    cell: &Cell,
    samples: &Samples,
    trip: Option<Measured>,
) -> Result<String> {
    let (shape, kind) = (cell.shape(), cell.kind());
    let key = format!("{shape}_{kind}");
    let ratio_key = match kind.as_str() {
        "null_read" => shape,
        _ => key.clone(),
    };
    let (mut rates, mut times, mut sleeps) = (String::new(), String::new(), String::new());
    for case in CASES {
        let name = case.name();
        let iops = samples.of(case, |sample| sample.iops)?;
        report.measured(&format!("iops_{name}_{key}"), &iops, 0);
        rates += &format!("{:>9}", short(iops.median));
        let owner = samples.of(case, |sample| sample.owner_ns)?;
        report.measured(&format!("cpu_ns_owner_{name}_{key}"), &owner, 0);
        if !case.has_worker() {
            times += &format!("{:>9.0}", owner.median);
            continue;
        }
        let worker = samples.of(case, |sample| sample.worker_ns)?;
        report.measured(&format!("cpu_ns_worker_{name}_{key}"), &worker, 0);
        let both = format!("{:.0}+{:.0}", owner.median, worker.median);
        times += &format!("{both:>14}");
        let slept = samples.of(case, |sample| sample.sleeps)?;
        report.measured(&format!("wakeups_per_1000_{name}_{key}"), &slept, 1);
        sleeps += &format!("{:>9.1}", slept.median);
        let kicks = samples.of(case, |sample| sample.kicks)?;
        report.measured(&format!("kicks_per_1000_{name}_{key}"), &kicks, 1);
    }
    let asleep = samples.ratio(Case::Asleep)?;
    report.measured(&format!("iops_ratio_asleep_{ratio_key}"), &asleep, 3);
    let worker = samples.ratio(Case::Worker)?;
    report.measured(&format!("iops_ratio_{ratio_key}"), &worker, 3);
    let (rounds, undisturbed) = samples.undisturbed_ratio(Case::Worker);
    let undisturbed_key = format!("iops_ratio_undisturbed_{ratio_key}");
    report.value(&format!("{undisturbed_key}_rounds"), rounds);
    let undisturbed = match undisturbed {
        Some(ratio) => {
            report.measured(&undisturbed_key, &ratio, 3);
            format!("{:.2} of {rounds}", ratio.median)
        }
        None => {
            report.missing(&undisturbed_key);
            "none".to_owned()
        }
    };
    let Measured { median, min, max } = worker;
    let ratio = format!("{median:.2} ({min:.2} to {max:.2})");
    let trip_key = format!("pingpong_ns_{key}");
    let pingpong = match trip {
        Some(trip) => {
            report.measured(&trip_key, &trip, 1);
            format!("{:.0}", trip.median)
        }
        None => {
            report.missing(&trip_key);
            "none".to_owned()
        }
    };
    Ok(format!(
        "{key:<22}{rates}{ratio:>26}{undisturbed:>14}{pingpong:>10}{times}{sleeps}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(iops: f64, share: f64) -> Sample {
        Sample {
            iops,
            owner_ns: 0.0,
            worker_ns: 0.0,
            share,
            sleeps: 0.0,
            kicks: 0.0,
        }
    }

    #[test]
    fn ratios_are_of_one_round_and_undisturbed_ones_of_two_whole_windows() {
        let bounce = [(100.0, 1.0), (200.0, 0.5), (300.0, 1.0), (400.0, 1.0)];
        let worker = [(50.0, 0.95), (20.0, 1.0), (30.0, 0.4), (300.0, 1.0)];
        let of = |row: [(f64, f64); 4]| row.map(|(iops, share)| sample(iops, share)).to_vec();
        let samples = Samples(vec![of(bounce), of(bounce), of(worker), of(worker)]);
        let all = samples.ratio(Case::Worker).expect("four rounds");
        assert_eq!((all.median, all.min, all.max), (0.3, 0.1, 0.75));
        let (rounds, undisturbed) = samples.undisturbed_ratio(Case::Worker);
        assert_eq!(rounds, 2);
        assert_eq!(undisturbed.expect("two rounds").median, 0.625);
    }
}
