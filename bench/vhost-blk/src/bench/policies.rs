//! The adaptive idle policy against fixed ones.
//!
//! The cost of a policy under a load is mean latency × w + the server's processor time per request, both in
//! microseconds, for w = 0.1, 1 and 10; the adaptive policy is told w. A policy's figure is its worst ratio to
//! the best fixed policy, over all loads and prices.

use anyhow::Result;

use super::open::{LOADS, load};
use super::{Bench, Disk, Kind, Peer, Summary};

const FIXED: [&str; 6] = [
    "poll",
    "sleep",
    "spin:20",
    "spin:50",
    "spin:200",
    "spin:1000",
];
const PRICES: [f64; 3] = [0.1, 1.0, 10.0];

fn cost(summary: &Summary, price: f64) -> f64 {
    let cpu_us = summary.server_cpu * 1e6 / summary.iops;
    summary.mean_ns / 1e3 * price + cpu_us
}

/// The section.
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
    let mut worst_fixed = [0.0_f64; FIXED.len()];
    let mut worst_adaptive = 0.0_f64;
    let mut complete = true;
    for (name, pacing) in LOADS {
        let mut results = Vec::new();
        // All policies of a load in one row call: they take turns.
        let row = format!("policy_{name}");
        for summary in policy_rows(bench, &row, &peers, name, pacing)? {
            results.push(summary);
        }
        let Some(results) = results.into_iter().collect::<Option<Vec<_>>>() else {
            complete = false;
            continue;
        };
        let (fixed, adaptive) = results.split_at(FIXED.len());
        for (price, adaptive) in PRICES.into_iter().zip(adaptive) {
            let costs: Vec<_> = fixed.iter().map(|summary| cost(summary, price)).collect();
            let best = costs.iter().copied().fold(f64::INFINITY, f64::min);
            for (worst, cost) in worst_fixed.iter_mut().zip(&costs) {
                *worst = worst.max(cost / best);
            }
            let ratio = cost(adaptive, price) / best;
            worst_adaptive = worst_adaptive.max(ratio);
            let cheapest = FIXED.iter().zip(&costs).find(|(_, cost)| **cost <= best);
            bench.record.line(&format!(
                "    load {name}, latency × {price}: adaptive costs {ratio:.2} of the best, {}",
                cheapest.map_or("none", |(name, _)| name)
            ));
            bench
                .record
                .number(&format!("policy_{name}_w{price}_adaptive_vs_best"), ratio);
        }
    }
    if complete {
        let best = worst_fixed.iter().copied().fold(f64::INFINITY, f64::min);
        for (name, worst) in FIXED.iter().zip(worst_fixed) {
            bench.record.line(&format!(
                "    {name:10} is {worst:.2} times the best at worst"
            ));
            let key = format!("fixed_{}_worst_vs_best_fixed", name.replace(':', "_"));
            bench.record.number(&key, worst);
        }
        bench
            .record
            .number("adaptive_worst_vs_best_fixed", worst_adaptive);
        bench.record.number("fixed_worst_vs_best_fixed", best);
    }
    Ok(())
}

fn policy_rows(
    bench: &mut Bench,
    row: &str,
    peers: &[Peer],
    name: &str,
    pacing: crate::load::Pacing,
) -> Result<Vec<Option<Summary>>> {
    let names: Vec<_> = peers
        .iter()
        .map(|peer| match peer {
            Peer::OursIdle(idle) => format!("{row}_{}", idle.replace([':', '.'], "_")),
            _ => row.to_owned(),
        })
        .collect();
    bench.rows(
        &names,
        peers,
        &Disk::many(Kind::Null, 1),
        |bench, server| load(bench, server, name, pacing),
    )
}
