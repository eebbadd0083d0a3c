//! The adaptive idle policy compared with fixed ones.
//!
//! The cost of a policy under a load is mean latency × w + processor time of the server per
//! request, both in microseconds, for the weights w = 0.1, 1 and 10. The adaptive policy receives w
//! as its parameter. The figure of a policy is its worst ratio to the best fixed policy, over all
//! loads and weights.
//!
//! If a hypervisor takes a CPU away for milliseconds a few times per second, that dominates the
//! mean latency of all policies alike: one stall of 5 ms weighs as much as 2,000 wake-ups. So a
//! second figure is reported beside the first, in which requests that took longer than [`STALL_NS`]
//! are left out. The share of these requests is printed.

use anyhow::Result;

use super::open::{LOADS, load};
use super::{Bench, Disk, Kind, Peer, Summary};
use vhost_blk::stats::STALL_NS;

const FIXED: [&str; 6] = [
    "poll",
    "sleep",
    "spin:20",
    "spin:50",
    "spin:200",
    "spin:1000",
];
/// Greatest number of repetitions: there are six loads for nine policies.
const REPETITIONS: usize = 3;
const PRICES: [f64; 3] = [0.1, 1.0, 10.0];

/// Requests whose latencies are counted.
#[derive(Clone, Copy)]
enum Count {
    All,
    Prompt,
}

impl Count {
    /// Returns the suffix of its keys.
    const fn suffix(self) -> &'static str {
        match self {
            Self::All => "",
            Self::Prompt => "_without_stalls",
        }
    }

    fn cost(self, summary: &Summary, price: f64) -> f64 {
        let latency_ns = match self {
            Self::All => summary.mean_ns,
            Self::Prompt => summary.prompt_mean_ns,
        };
        latency_ns / 1e3 * price + summary.server_cpu * 1e6 / summary.iops
    }
}

/// Worst ratios so far.
#[derive(Default)]
struct Worst {
    fixed: [f64; FIXED.len()],
    adaptive: f64,
}

/// Measures this section.
pub fn policies(bench: &mut Bench) -> Result<()> {
    bench
        .record
        .section("Idle policies: one null disk under each load (rows: load and policy)");
    let ours = Peer::Ours;
    if let Some(missing) = ours.missing(&bench.settings) {
        bench
            .record
            .failed_row("policies", &ours, &anyhow::anyhow!(missing));
        return Ok(());
    }
    let adaptive = PRICES.map(|price| format!("adaptive:{price}"));
    let names = FIXED.iter().map(|name| (*name).to_owned()).chain(adaptive);
    let peers: Vec<_> = names.map(Peer::OursIdle).collect();
    let mut figures = [
        (Count::All, Worst::default()),
        (Count::Prompt, Worst::default()),
    ];
    let mut complete = true;
    for (name, pacing) in LOADS {
        // One call for all policies of a load, so that they are measured in turns.
        let row = format!("policy_{name}");
        let results = policy_rows(bench, &row, &peers, name, pacing)?;
        let Some(results) = results.into_iter().collect::<Option<Vec<_>>>() else {
            complete = false;
            continue;
        };
        let stalled = results.iter().map(|summary| summary.stalled * 100.0);
        bench.record.line(&format!(
            "    load {name}: {:.2} to {:.2} % of the requests took more than {} µs",
            stalled.clone().fold(f64::INFINITY, f64::min),
            stalled.fold(0.0, f64::max),
            STALL_NS / 1000
        ));
        for (count, worst) in &mut figures {
            compare(bench, name, *count, &results, worst);
        }
    }
    if complete {
        for (count, worst) in figures {
            conclude(bench, count, &worst);
        }
    }
    Ok(())
}

/// Compares the policies under one load. `results` has the fixed policies, then the adaptive one
/// for each weight.
fn compare(bench: &mut Bench, load: &str, count: Count, results: &[Summary], worst: &mut Worst) {
    let (fixed, adaptive) = results.split_at(FIXED.len());
    for (price, adaptive) in PRICES.into_iter().zip(adaptive) {
        let costs: Vec<_> = fixed
            .iter()
            .map(|summary| count.cost(summary, price))
            .collect();
        let best = costs.iter().copied().fold(f64::INFINITY, f64::min);
        for (worst, cost) in worst.fixed.iter_mut().zip(&costs) {
            *worst = worst.max(cost / best);
        }
        let ratio = count.cost(adaptive, price) / best;
        worst.adaptive = worst.adaptive.max(ratio);
        let cheapest = FIXED.iter().zip(&costs).find(|(_, cost)| **cost <= best);
        let suffix = count.suffix();
        bench.record.line(&format!(
            "    load {load}, latency × {price}{}: adaptive costs {ratio:.2} of the best, {}",
            suffix.replace('_', " "),
            cheapest.map_or("none", |(name, _)| name)
        ));
        let key = format!("policy_{load}_w{price}_adaptive_vs_best{suffix}");
        bench.record.number(&key, ratio);
    }
}

fn conclude(bench: &mut Bench, count: Count, worst: &Worst) {
    let suffix = count.suffix();
    let best = worst.fixed.iter().copied().fold(f64::INFINITY, f64::min);
    for (name, worst) in FIXED.iter().zip(worst.fixed) {
        bench.record.line(&format!(
            "    {name:10} is {worst:.2} times the best at worst{}",
            suffix.replace('_', " ")
        ));
        let key = format!(
            "fixed_{}_worst_vs_best_fixed{suffix}",
            name.replace(':', "_")
        );
        bench.record.number(&key, worst);
    }
    let key = format!("adaptive_worst_vs_best_fixed{suffix}");
    bench.record.number(&key, worst.adaptive);
    let key = format!("fixed_worst_vs_best_fixed{suffix}");
    bench.record.number(&key, best);
}

fn policy_rows(
    bench: &mut Bench,
    row: &str,
    peers: &[Peer],
    name: &str,
    pacing: vhost_blk::load::Pacing,
) -> Result<Vec<Option<Summary>>> {
    let names: Vec<_> = peers
        .iter()
        .map(|peer| match peer {
            Peer::OursIdle(idle) => format!("{row}_{}", idle.replace([':', '.'], "_")),
            _ => row.to_owned(),
        })
        .collect();
    let repetitions = bench.settings.repetitions.min(REPETITIONS);
    bench.rows(
        &names,
        peers,
        &Disk::many(Kind::Null, 1),
        repetitions,
        |bench, server| load(bench, server, name, pacing),
    )
}
