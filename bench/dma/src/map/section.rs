//! The loops d, their keys, and p50 and p99 of map and unmap.

use anyhow::Result;
use dma_map::Policy;
use dma_map::table::IoMap;
use report::Measured;

use super::linux;
use super::loops::{self, Sink};
use super::no_table::NoTable;
use super::policies::{COMBINING_AT_ONCE, DEFERRED_256, STRICT_LOCK};
use super::rig::{Costs, Facts, Rig, table};
use crate::alloc::subject::{Called, Ours};
use crate::alloc::{Best, space};
use crate::measure::{Case, Outcome, Tasks, Turns};
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

/// Duration of a command, nanoseconds.
pub const FLUSHES: [u64; 2] = [0, 500];

/// One row: a policy, over a table or over none.
struct Row<'a> {
    key: String,
    case: Case<'a>,
    sink: Sink,
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
                against_lock(record, &found);
            }
        }
    }
    true_costs(turns, record);
    linux::measure(turns, record);
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
        case,
        sink: facts,
    }
}

fn bare<'a>(threads: usize, flush_ns: u64) -> Row<'a> {
    let case = Case::new("d lock around a wait, nothing else", threads, move || {
        let subject = Called(Ours(Best::new(space()?, threads)?));
        loops::bare(&subject, threads, flush_ns)
    });
    Row {
        key: format!("d_bare_f{flush_ns}"),
        case,
        sink: Sink::default(),
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
        "d: unmap the oldest of 256, map another; {threads} thread{s}, a command takes {flush_ns} \
         ns"
    ));
    let (cases, others): (Vec<_>, Vec<_>) = rows
        .into_iter()
        .map(|row| (row.case, (row.key, row.sink)))
        .unzip();
    let found = turns.measure(&cases);
    let mut keyed = Vec::new();
    for ((case, (key, sink)), outcome) in cases.iter().zip(others).zip(found) {
        record.row(&key, case, &outcome);
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

/// Records the throughput of two threads through a policy where a command takes 500 ns, against
/// strict behind a lock. Ratios of throughput: above 1 is faster.
fn against_lock(record: &mut Record, found: &[(String, Result<Outcome>)]) {
    let of = |policy: &str| {
        let key = format!("d_{policy}_f500");
        let (_, outcome) = found.iter().find(|(of, _)| *of == key)?;
        outcome.as_ref().ok()
    };
    for (key, policy) in [
        ("strict_2thr_500ns_vs_lock", "strict"),
        ("combining_2thr_500ns_vs_lock", "strict_combining"),
        (
            "combining_no_gather_2thr_500ns_vs_lock",
            "combining_no_gather",
        ),
    ] {
        record.ratio(key, of("strict_lock"), of(policy));
    }
}

/// Combining where commands cost what they may: 500 ns for pages and 1 µs for a domain. Where a
/// domain cost no more than a page, a leader that takes two cores' pages together would save a
/// whole command.
fn true_costs(turns: &Turns, record: &mut Record) {
    record.section("d: two threads; 500 ns a command for pages, 1 us for a domain");
    let cases = D_POLICIES.map(|(name, policy)| {
        Case::new(format!("d {name}"), 2, move || {
            let rig = Rig::new(NoTable, policy, Costs::USUAL, 2)?;
            loops::windows(&rig, 2, &Sink::default())
        })
    });
    let found = turns.measure(&cases);
    for ((name, _), (case, outcome)) in D_POLICIES.iter().zip(cases.iter().zip(&found)) {
        record.row(&format!("d_{name}_true_costs"), case, outcome);
    }
    let of = |at: usize| found[at].as_ref().ok();
    record.ratio("combining_true_costs_vs_strict", of(1), of(2));
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
