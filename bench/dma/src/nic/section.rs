//! The load under every policy: shares, stale mappings, p50 and p99 of map and unmap.

use std::sync::Arc;

use anyhow::Result;
use report::numbers::percentile;

use super::load::{self, Packets, Stamps};
use super::sequence::{Sequence, Source};
use crate::map::loops::Sink;
use crate::map::policies::{Named, POLICIES};
use crate::map::rig::{Costs, Facts, Rig, table};
use crate::measure::{Case, Outcome, Tasks, Turns, run};
use crate::record::Record;

/// A load and the name of its keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// The name.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    packets: Packets,
    pages: u32,
    source: Source,
    /// Whether two threads run it too.
    pub has_two: bool,
}

const SMALL: Packets = Packets {
    size: 1500,
    pad_ns: 500,
};

const fn forced(name: &'static str, title: &'static str, rate: f64) -> Load {
    Load {
        name,
        title,
        packets: SMALL,
        pages: 1,
        source: Source::Forced(rate),
        has_two: false,
    }
}

/// The loads.
pub const LOADS: [Load; 7] = [
    Load {
        name: "1500",
        title: "1,500 B padded to 500 ns, pages as recorded",
        packets: SMALL,
        pages: 1,
        source: Source::Recorded,
        has_two: true,
    },
    forced(
        "1500_reuse0",
        "1,500 B padded to 500 ns, no page returns",
        0.0,
    ),
    forced(
        "1500_reuse50",
        "1,500 B padded to 500 ns, half of the pages return",
        0.5,
    ),
    forced(
        "1500_reuse92",
        "1,500 B padded to 500 ns, 92 % of the pages return",
        0.92,
    ),
    forced(
        "1500_reuse100",
        "1,500 B padded to 500 ns, all pages return",
        1.0,
    ),
    Load {
        name: "64k",
        title: "64 KiB, pages as recorded, 16 and more per buffer",
        packets: Packets {
            size: 64 << 10,
            pad_ns: 0,
        },
        pages: 16,
        source: Source::Recorded,
        has_two: true,
    },
    Load {
        name: "1052",
        title: "1,052 B, pages as recorded",
        packets: Packets {
            size: 1052,
            pad_ns: 0,
        },
        pages: 1,
        source: Source::Recorded,
        has_two: true,
    },
];

/// Runs the loads.
pub fn measure(turns: &Turns, record: &mut Record) {
    let mut worst = POLICIES.map(|_| Worst::default());
    for load in &LOADS {
        let sequence = match Sequence::new(load.source, load.pages) {
            Ok(sequence) => Arc::new(sequence),
            Err(error) => {
                println!("\n{}: not measured: {error:#}", load.title);
                continue;
            }
        };
        record.number(
            &format!("nic_{}_reuse_4096", load.name),
            sequence.reuse_4096(),
            4,
        );
        record.number(
            &format!("nic_{}_reuse_256", load.name),
            sequence.reuse_256(),
            4,
        );
        let live = sequence.reuse.live as f64 / sequence.reuse.maps.max(1) as f64;
        record.number(&format!("nic_{}_reuse_live", load.name), live, 4);
        for threads in 1..=1 + usize::from(load.has_two) {
            shares(turns, record, load, &sequence, threads, &mut worst);
        }
        if load.name == "1500" {
            percentiles(turns, record, load, &sequence);
        }
    }
    risks(record, &worst);
}

/// A mapper and its threads, made anew.
fn make(
    named: &Named,
    load: &Load,
    sequence: &Arc<Sequence>,
    threads: usize,
    sink: &Sink,
    stamps: Option<&Stamps>,
) -> Result<Tasks> {
    let rig = Rig::new(table()?, named.policy, Costs::USUAL.of(named.name), threads)?;
    load::tasks(&rig, sequence, load.packets, threads, sink, stamps)
}

fn shares(
    turns: &Turns,
    record: &mut Record,
    load: &Load,
    sequence: &Arc<Sequence>,
    threads: usize,
    worst: &mut [Worst],
) {
    let sinks = POLICIES.map(|_| Sink::default());
    let cases: Vec<_> = POLICIES
        .iter()
        .zip(&sinks)
        .map(|(named, sink)| {
            Case::new(named.name, threads, move || {
                make(named, load, sequence, threads, sink, None)
            })
        })
        .collect();
    record.section(&format!(
        "network card, {}; reuse {:.1} % within 4,096 idle pages, {:.1} % within 256; {threads} \
         thread{}; a pair is a packet",
        load.title,
        sequence.reuse_4096() * 100.0,
        sequence.reuse_256() * 100.0,
        if threads == 1 { "" } else { "s" }
    ));
    let found = turns.measure(&cases);
    for ((named, case), outcome) in POLICIES.iter().zip(&cases).zip(&found) {
        let key = format!("nic_{}_{}", load.name, named.name);
        record.row(&key, case, outcome);
    }
    let off = found.last().and_then(|outcome| outcome.as_ref().ok());
    let mut last = Vec::new();
    println!("share of `off`:");
    for (index, (named, outcome)) in POLICIES.iter().zip(&found).enumerate() {
        let facts = sinks[index].take();
        facts.iter().for_each(|facts| worst[index].add(facts));
        last.push(facts.last().cloned());
        let (Ok(outcome), Some(off)) = (outcome, off) else {
            continue;
        };
        let key = format!("nic_{}_{}_{threads}thr_share", load.name, named.name);
        let share = outcome.turn_by_turn(off, |this, off| Some(off.ns / this.ns));
        if let Some(share) = share {
            record.measured(&key, &share, 4);
            println!("  {:24} {:.3} to {:.3}", named.name, share.min, share.max);
        }
    }
    if (load.name, threads) == ("1500", 1) {
        budget(record, &found, &last);
        for (key, policy) in [
            ("opt4096_share", "optimistic4096"),
            ("deferred_share", "deferred"),
            ("strict_share", "strict"),
        ] {
            let of = format!("nic_1500_{policy}_1thr_share");
            record.copy(key, &of);
        }
    }
}

/// Prints the cost of a packet beyond one without protection, as measured: a map and an unmap each,
/// the number of these that find a mapping, the time of the hardware for commands, and the rest,
/// which is the processor's. All are of the last run, but for the first column, a median.
fn budget(record: &mut Record, found: &[Result<Outcome>], last: &[Option<Facts>]) {
    println!(
        "\na packet's budget (one map and one unmap each)\n\
         {:24} {:>14} {:>12} {:>12} {:>14} {:>12} {:>14}",
        "", "beyond off, ns", "maps found", "torn down", "commands", "theirs, ns", "all else, ns"
    );
    let Some(off) = found.last().and_then(|outcome| outcome.as_ref().ok()) else {
        return;
    };
    for ((named, outcome), facts) in POLICIES.iter().zip(found).zip(last) {
        let (Ok(outcome), Some(facts)) = (outcome, facts) else {
            continue;
        };
        let pairs = outcome.runs.last().map_or(1, |run| run.pairs.max(1)) as f64;
        let beyond = outcome.ns.median - off.ns.median;
        let commands = facts.flushed_ns / pairs;
        let found = facts.reuse.hit_rate();
        let has_reuse = facts.reuse.hits + facts.reuse.misses > 0;
        let gone = facts.reuse.evicted + facts.reuse.expired;
        for (key, value) in [
            ("beyond_off_ns", beyond),
            ("commands_ns", commands),
            ("hit_rate", found),
        ] {
            record.number(&format!("nic_1500_{}_{key}", named.name), value, 4);
        }
        let part = |part: f64| match has_reuse {
            true => format!("{part:.4}"),
            false => "-".to_owned(),
        };
        println!(
            "{:24} {beyond:>14.1} {:>12} {:>12} {:>14.4} {commands:>12.1} {:>14.1}",
            named.name,
            part(found),
            part(gone as f64 / pairs),
            facts.commands as f64 / pairs,
            beyond - commands
        );
    }
}

/// Prints the duration of the map and the unmap of a buffer together.
fn percentiles(turns: &Turns, record: &mut Record, load: &Load, sequence: &Arc<Sequence>) {
    println!(
        "\nmap + unmap of a buffer, ns, same load, each stamped by the time-stamp counter (two \
         readings each are in it)"
    );
    println!(
        "{:24} {:>9} {:>9} {:>9} {:>9}",
        "", "p50", "p99", "p50 2thr", "p99 2thr"
    );
    for named in &POLICIES {
        let mut texts = Vec::new();
        for threads in 1..=turns.cpus.len().min(2) {
            let stamps = Stamps::default();
            let found = make(
                named,
                load,
                sequence,
                threads,
                &Sink::default(),
                Some(&stamps),
            )
            .and_then(|tasks| run(tasks, &turns.cpus, turns.time));
            let mut times = match found {
                Ok(_) => stamps.take(),
                Err(error) => {
                    println!("{:24} not measured: {error:#}", named.name);
                    continue;
                }
            };
            let suffix = if threads == 1 { "" } else { "_2thr" };
            for (part, name) in [(0.5, "p50"), (0.99, "p99")] {
                let ns = percentile(&mut times, part) as f64;
                record.number(
                    &format!("{}_map_unmap_{name}_ns{suffix}", named.name),
                    ns,
                    0,
                );
                texts.push(format!("{ns:>9}"));
            }
        }
        println!("{:24} {}", named.name, texts.join(" "));
    }
}

/// The worst that any run of a policy saw.
#[derive(Clone, Debug, Default)]
struct Worst {
    stale_max: u64,
    age_ns: u64,
    tick_max_ns: u64,
    last: Option<Facts>,
    broken: usize,
    runs: usize,
}

impl Worst {
    fn add(&mut self, facts: &Facts) {
        self.stale_max = self.stale_max.max(facts.risk.stale_max);
        self.age_ns = self.age_ns.max(facts.risk.stale_times.max_ns);
        self.tick_max_ns = self.tick_max_ns.max(facts.tick_max_ns);
        self.broken += usize::from(!facts.is_within_bound);
        self.runs += 1;
        self.last = Some(facts.clone());
    }
}

fn risks(record: &mut Record, worst: &[Worst]) {
    println!(
        "\nstale mappings over all loads\n\
         {:24} {:>9} {:>12} {:>9} {:>12}  runs outside the bound (the longest time between two \
         ticks is added to its age)",
        "", "most", "longest, us", "bound", "bound, us"
    );
    for (named, worst) in POLICIES.iter().zip(worst) {
        let (stale, age) = (
            format!("{}_stale_max", named.name),
            format!("{}_stale_max_us", named.name),
        );
        let Some(facts) = &worst.last else { continue };
        if facts.risk.is_unprotected {
            record.text(&stale, "unbounded");
            record.text(&age, "unbounded");
            println!("{:24} everything, always", named.name);
            continue;
        }
        let contract = &facts.risk.contract;
        record.number(&stale, worst.stale_max as f64, 0);
        record.number(&age, worst.age_ns as f64 / 1e3, 1);
        let between = format!("{}_tick_max_us", named.name);
        record.number(&between, worst.tick_max_ns as f64 / 1e3, 1);
        let bound = contract.max_stale.map(|most| most as f64);
        let bound_us = contract.max_age_ns.map(|ns| ns as f64 / 1e3);
        for (key, value) in [("bound", bound), ("bound_us", bound_us)] {
            if let Some(value) = value {
                record.number(&format!("{}_stale_{key}", named.name), value, 0);
            }
        }
        record.number(
            &format!("{}_outside_bound", named.name),
            worst.broken as f64,
            0,
        );
        println!(
            "{:24} {:>9} {:>12.1} {:>9} {:>12}  {} of {}",
            named.name,
            worst.stale_max,
            worst.age_ns as f64 / 1e3,
            crate::record::or_dash(bound, 0),
            crate::record::or_dash(bound_us, 0),
            worst.broken,
            worst.runs
        );
    }
}
