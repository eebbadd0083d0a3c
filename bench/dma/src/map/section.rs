//! The loops d, their keys, and p50 and p99 of map and unmap.

use anyhow::Result;
use dma_map::Policy;
use dma_map::table::IoMap;
use report::Measured;

use super::loops::{self, Sink};
use super::no_table::NoTable;
use super::policies::{COMBINING_AT_ONCE, DEFERRED_256, STRICT_LOCK};
use super::rig::{Costs, Facts, Rig, table};
use crate::alloc::subject::Ours;
use crate::alloc::{Best, space};
use crate::measure::{Case, Outcome, Scale, Tasks, Turn, Turns};
use crate::record::Record;

/// The policies of the loops d: those that keep no mappings, for here no page comes back.
const D_POLICIES: [(&str, Policy); 6] = [
    (STRICT_LOCK, Policy::STRICT),
    ("strict", Policy::STRICT),
    ("strict_combining", Policy::STRICT_COMBINING),
    ("combining_no_gather", COMBINING_AT_ONCE),
    ("async", Policy::ASYNC),
    ("deferred", DEFERRED_256),
];

/// What a command takes, nanoseconds.
pub const FLUSHES: [u64; 3] = [0, 500, 1000];

/// Linux's deferred and strict frees on the reference machine: threads, flush, deferred, strict.
const QUOTED: [(usize, u64, &str, &str); 6] = [
    (1, 0, "38.8", "28.3"),
    (1, 500, "", "568"),
    (1, 1000, "47.4", "1067"),
    (2, 0, "46.7", "290"),
    (2, 500, "", "1353"),
    (2, 1000, "49.9", "2375"),
];

/// One row: a policy, over a table or over none.
struct Row<'a> {
    key: String,
    case: Case<'a>,
    sink: Sink,
    policy: &'a str,
}

/// Runs the loops d.
pub fn measure(turns: &Turns, record: &mut Record) {
    for flush_ns in FLUSHES {
        for threads in [1, 2] {
            let mut rows = Vec::new();
            for (name, policy) in D_POLICIES {
                rows.push(row("d", name, policy, threads, flush_ns, || Ok(NoTable)));
                rows.push(row("dt", name, policy, threads, flush_ns, table));
            }
            rows.push(bare(threads, flush_ns));
            let found = run(turns, record, rows, threads, flush_ns);
            if (threads, flush_ns) == (2, 500) {
                derive_together(record, &found);
            }
        }
    }
    derive(record);
}

fn row<'a, T: IoMap + 'static>(
    prefix: &str,
    name: &'a str,
    policy: Policy,
    threads: usize,
    flush_ns: u64,
    table: impl Fn() -> Result<T> + 'a,
) -> Row<'a> {
    let sink = Sink::default();
    let facts = sink.clone();
    let title = match prefix {
        "d" => format!("d {name}"),
        _ => format!("d {name} with tables"),
    };
    let case = Case::new(title, threads, move || -> Result<Tasks> {
        let rig = Rig::new(table()?, policy, Costs::all(flush_ns).of(name), threads)?;
        loops::windows(&rig, threads, &sink)
    });
    Row {
        key: format!("{prefix}_{name}_f{flush_ns}"),
        case: if flush_ns > 0 { case.fixed() } else { case },
        sink: facts,
        policy: name,
    }
}

fn bare<'a>(threads: usize, flush_ns: u64) -> Row<'a> {
    let case = Case::new("d lock around a wait, nothing else", threads, move || {
        let subject = Ours(Best::new(space()?, threads)?);
        loops::bare(&subject, threads, flush_ns)
    });
    Row {
        key: format!("d_bare_f{flush_ns}"),
        case: if flush_ns > 0 { case.fixed() } else { case },
        sink: Sink::default(),
        policy: "",
    }
}

/// Measures the rows, and gives what was found about each key.
fn run(
    turns: &Turns,
    record: &mut Record,
    rows: Vec<Row<'_>>,
    threads: usize,
    flush_ns: u64,
) -> Vec<(String, Result<Outcome>)> {
    let s = if threads == 1 { "" } else { "s" };
    record.section(&format!(
        "d: unmap the oldest of 256, map another; {threads} thread{s}, a command takes {flush_ns} ns"
    ));
    let (cases, others): (Vec<_>, Vec<_>) = rows
        .into_iter()
        .map(|row| (row.case, (row.key, row.sink, row.policy)))
        .unzip();
    let found = turns.measure(&cases);
    let mut keyed = Vec::new();
    for ((case, (key, sink, policy)), outcome) in cases.iter().zip(others).zip(found) {
        record.row(&key, case, &outcome, quoted(policy, threads, flush_ns));
        let facts = sink.take();
        let of = |value: &dyn Fn(&Facts) -> f64| {
            Measured::of(facts.iter().map(|of| value(of) / of.pairs.max(1) as f64))
        };
        for (name, found, digits) in [
            ("flushed_ns", of(&|of| of.flushed_ns), 1),
            ("commands_per_pair", of(&|of| of.commands as f64), 4),
        ] {
            if let Some(found) = found {
                record.number(&format!("{key}_{threads}thr_{name}"), found.median, digits);
            }
        }
        keyed.push((key, outcome));
    }
    keyed
}

fn quoted(policy: &str, threads: usize, flush_ns: u64) -> &'static str {
    let found = QUOTED
        .iter()
        .find(|(of, flush, ..)| (*of, *flush) == (threads, flush_ns));
    match (policy, found) {
        ("deferred", Some((.., deferred, _))) => deferred,
        ("strict_lock", Some((.., strict))) => strict,
        _ => "",
    }
}

/// What two threads reach together through a policy, turn by turn.
struct Together<'a> {
    outcome: &'a Outcome,
    scale: Scale,
    flushed_ns: f64,
}

impl<'a> Together<'a> {
    fn new(record: &Record, policy: &str, found: &'a [(String, Result<Outcome>)]) -> Option<Self> {
        let key = format!("d_{policy}_f500");
        let (_, outcome) = found.iter().find(|(of, _)| *of == key)?;
        Some(Self {
            outcome: outcome.as_ref().ok()?,
            scale: record.scale(),
            flushed_ns: record.get(&format!("{key}_2thr_flushed_ns"))?,
        })
    }

    /// Millions per second of a run, scaled beyond the flush.
    fn scaled(&self, run: &Turn) -> Option<f64> {
        let ns = 1000.0 / run.mps;
        let scaled = self.scale.beyond_flush(ns, self.flushed_ns, run.beside_ns?);
        Some(1000.0 / scaled)
    }
}

/// The targets of two threads and a flush of 500 ns.
fn derive_together(record: &mut Record, found: &[(String, Result<Outcome>)]) {
    let of = |record: &Record, policy| Together::new(record, policy, found);
    let lock = of(record, "strict_lock");
    let (combining, at_once) = (
        of(record, "strict_combining"),
        of(record, "combining_no_gather"),
    );
    let median = |measured: Option<Measured>| measured.map(|of| of.median);
    if let Some(lock) = lock {
        for (key, this) in [
            ("strict_2thr_500ns_vs_lock", &of(record, "strict")),
            ("combining_2thr_500ns_vs_lock", &combining),
            ("combining_no_gather_2thr_500ns_vs_lock", &at_once),
        ] {
            let Some(this) = this else { continue };
            let compare = |of: &dyn Fn(&Turn, &Turn) -> Option<f64>| {
                median(this.outcome.turn_by_turn(lock.outcome, of))
            };
            let raw = compare(&|this, lock| Some(this.mps / lock.mps));
            let scaled = compare(&|run, of_lock| Some(this.scaled(run)? / lock.scaled(of_lock)?));
            record.both(key, raw, scaled, 3);
        }
    }
    for (key, this) in [
        ("combining_2thr_500ns_mps", at_once),
        ("combining_gather_2thr_500ns_mps", combining),
    ] {
        let Some(this) = this else { continue };
        let of = this.outcome;
        let scaled = median(of.turn_by_turn(of, |run, _| this.scaled(run)));
        record.both(key, Some(of.mps.median), scaled, 3);
    }
}

fn derive(record: &mut Record) {
    let deferred = record.get("d_deferred_f0_1thr_ns_raw");
    let scaled = record.get("d_deferred_f0_1thr_ns");
    // Allocator and queue, as d-def is defined; beside it the same with a table behind.
    record.both("deferred_ns", deferred, scaled, 2);
    let deferred = record.get("dt_deferred_f0_1thr_ns_raw");
    let scaled = record.get("dt_deferred_f0_1thr_ns");
    record.both("deferred_table_ns", deferred, scaled, 2);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::measure::BATCH;

    #[test]
    fn a_window_over_every_policy_unmaps_what_it_maps() {
        for (name, policy) in D_POLICIES {
            let sink = Sink::default();
            let rig = Rig::new(table().expect("memory"), policy, Costs::all(0), 2).expect("fits");
            let mut tasks = loops::windows(&rig, 2, &sink).expect("cores");
            for task in &mut tasks {
                assert_eq!(task.batch(&AtomicBool::new(false)), BATCH, "{name}");
            }
            tasks.iter_mut().for_each(|task| task.finish());
            drop(tasks);
            assert_eq!(rig.mapper().allocator_stats().live_ranges, 0, "{name}");
            let facts = sink.take();
            assert_eq!((facts.len(), facts[0].pairs), (1, 2 * BATCH));
            if name.starts_with("strict") {
                assert_eq!(facts[0].risk.stale_max, 0, "{name}");
                assert!(facts[0].commands >= 2 * BATCH / 2, "{name}");
            }
        }
    }
}
