//! The tables of what goes through mappers: a network card's load, reuse, memory of page tables,
//! and the model.

use report::Object;

use super::{Page, ns, strings};
use crate::map::policies::POLICIES;
use crate::model;
use crate::nic::section::LOADS;
use crate::paper;
use crate::record::or_dash;
use crate::reuse::STRUCTURES;

/// Adds the lines on cases where a simpler policy is faster than one that keeps mappings, before
/// all others.
pub fn first(page: &mut Page, figures: &Object) {
    let mut lines = Vec::new();
    for load in &LOADS {
        let share = |policy: &str| figures.get(&format!("nic_{}_{policy}_1thr_share", load.name));
        let (Some(deferred), Some(optimistic)) = (share("deferred"), share("optimistic4096"))
        else {
            continue;
        };
        if deferred > optimistic {
            lines.push(format!(
                "- {}: `deferred` {:.1} % of `off`, `optimistic(4096)` {:.1} %",
                load.title,
                deferred * 100.0,
                optimistic * 100.0
            ));
        }
    }
    if lines.is_empty() {
        return;
    }
    let stale = |policy: &str| or_dash(figures.get(&format!("{policy}_stale_max")), 0);
    page.line(
        "\n**Where a simpler policy wins.** Under these loads of a network card `deferred` \
         is faster in this run than `optimistic(4096)`, which",
    );
    page.line(&format!(
        "leaves more reachable after its unmap (most seen: {} mappings against {}); take \
         `deferred` there:",
        stale("optimistic4096"),
        stale("deferred")
    ));
    lines.iter().for_each(|line| page.line(line));
}

pub fn card(page: &mut Page, figures: &Object) {
    page.line(
        "\n## A network card's load (as vIOMMU Table 1 and Figure 3, ATC'15 Figures 2-5)\n\
         Share of the throughput of `off`, as measured, in percent; page commands take 500 ns, \
         global ones 1 µs, one at a time.",
    );
    let mut head = strings(&["load", "reuse ≤ 4,096", "threads"]);
    head.extend(POLICIES.iter().map(|named| named.name.to_owned()));
    let mut rows = Vec::new();
    for load in &LOADS {
        for threads in 1..=1 + usize::from(load.has_two) {
            let reuse = figures.get(&format!("nic_{}_reuse_4096", load.name));
            let mut row = vec![
                load.title.to_owned(),
                or_dash(reuse.map(|reuse| reuse * 100.0), 1) + " %",
                threads.to_string(),
            ];
            row.extend(POLICIES.iter().map(|named| {
                let key = format!("nic_{}_{}_{threads}thr_share", load.name, named.name);
                or_dash(figures.get(&key).map(|share| share * 100.0), 1)
            }));
            rows.push(row);
        }
    }
    page.table(&head, rows);
    page.line(
        "\nWhat the papers report, on their hardware, for comparison (a blank: not quoted here):",
    );
    page.table(
        &strings(&["figure", "the paper's", "ours, nearest"]),
        paper::VALUES.iter().map(|value| {
            let ours = value.ours.and_then(|key| figures.get(key));
            vec![
                value.what.to_owned(),
                value.theirs.to_owned(),
                or_dash(ours, 3),
            ]
        }),
    );
    page.line(
        "\n### Stale mappings and latency\n\
         Over all loads; the age's bound holds up to the time between two ticks, which the threads \
         of the load make every millisecond when they run. Latency of a map and the unmap of the",
    );
    page.line("same buffer together, load of 1,500 B, each reading of the counter included.");
    let rows = POLICIES.iter().map(|named| {
        let key = |suffix: &str| figures.get(&format!("{}_{suffix}", named.name));
        let stale = |suffix: &str, digits| match named.policy.is_off {
            true => "unbounded".to_owned(),
            false => or_dash(key(suffix), digits),
        };
        vec![
            named.name.to_owned(),
            stale("stale_max", 0),
            stale("stale_bound", 0),
            stale("stale_max_us", 0),
            stale("stale_bound_us", 0),
            or_dash(key("tick_max_us"), 0),
            or_dash(key("outside_bound"), 0),
            or_dash(key("map_unmap_p50_ns"), 0),
            or_dash(key("map_unmap_p99_ns"), 0),
            or_dash(key("map_unmap_p50_ns_2thr"), 0),
            or_dash(key("map_unmap_p99_ns_2thr"), 0),
        ]
    });
    page.table(
        &strings(&[
            "policy",
            "stale, most",
            "bound",
            "longest, µs",
            "bound, µs",
            "longest between ticks, µs",
            "runs outside the bound",
            "p50, ns",
            "p99",
            "p50, two threads",
            "p99",
        ]),
        rows,
    );
}

pub fn reuse(page: &mut Page, figures: &Object) {
    page.line(
        "\n## Structures for reuse\n\
         Recorded pages; nanoseconds of an acquire and a release, the loop's own time taken off.",
    );
    let rows = STRUCTURES.iter().map(|(name, title)| {
        let get = |suffix: &str| figures.get(&format!("reuse_{name}_{suffix}"));
        vec![
            (*title).to_owned(),
            ns(figures, &format!("reuse_{name}_ns")),
            or_dash(get("hit_rate").map(|rate| rate * 100.0), 1),
            or_dash(get("bytes_per_mapping"), 0),
            or_dash(get("stale_max"), 0),
        ]
    });
    page.table(
        &strings(&[
            "structure",
            "ns",
            "hits, %",
            "bytes per mapping",
            "stale, most",
        ]),
        rows,
    );
}

pub fn memory(page: &mut Page, figures: &Object) {
    page.line("\n## Memory of page tables (as ATC'15 Figure 7)");
    let rows = [
        (
            "leaf_tables_c1",
            "after c-1, by the allocator (ideal 9 and 17)",
        ),
        (
            "leaf_tables_c1_strict_mapper",
            "after c-1, tables behind a strict mapper",
        ),
        (
            "leaf_tables_c1_deferred_mapper",
            "after c-1, tables behind a deferred mapper",
        ),
        (
            "leaf_tables_after_epoch",
            "after everything is unmapped and an epoch, deferred (Linux: never freed)",
        ),
        (
            "leaf_tables_after_epoch_strict",
            "the same, strict, whose cores look for empty tables every 512 unmaps",
        ),
        (
            "leaf_tables_after_look_strict",
            "strict, after 512 unmaps more of each core",
        ),
        (
            "leaf_tables_parked",
            "after the cores have parked, deferred",
        ),
    ]
    .map(|(key, title)| {
        let get = |suffix: &str| or_dash(figures.get(&format!("{key}{suffix}")), 0);
        vec![title.to_owned(), get(""), get("_2thr")]
    });
    page.table(&strings(&["leaf tables", "one core", "two cores"]), rows);
    let after = [1, 2, 5, 10, 20, 50, 100];
    let mut head = strings(&["table pages after iterations"]);
    head.extend(after.iter().map(ToString::to_string));
    let rows = [
        ("reclaimed", "with reclamation"),
        ("kept", "without"),
        ("identity", "identity, without"),
    ]
    .map(|(name, title)| {
        let mut row = vec![title.to_owned()];
        row.extend(
            after
                .iter()
                .map(|at| or_dash(figures.get(&format!("table_pages_{name}_after_{at}")), 0)),
        );
        row
    });
    page.table(&head, rows);
}

pub fn cores(page: &mut Page, figures: &Object) {
    page.line(
        "\n## More cores: **model**, not measured\n\
         Millions of operations per second, all cores; a discrete-event model fed with this run's \
         constants, its deviation at one and",
    );
    page.line("two cores beside it. What is off by more than 20 % at either is left out.");
    let mut head = strings(&["", "1 measured", "2 measured", "deviation at 1", "at 2"]);
    head.extend(model::CORES.iter().map(|cores| format!("{cores} (model)")));
    let is_shown = |name: &str| figures.get(&format!("model_{name}_4cores_mps")).is_some();
    let rows = model::SYSTEMS.iter().filter(|(name, ..)| is_shown(name));
    let rows = rows.map(|(name, title, row)| {
        let measured = |cores| or_dash(figures.get(&format!("{row}_{cores}thr_mps")), 2);
        let off = |cores| {
            let off = figures.get(&format!("model_{name}_{cores}cores_off"));
            off.map_or_else(|| "–".to_owned(), |off| format!("{:+.0} %", off * 100.0))
        };
        let mut row = vec![
            (*title).to_owned(),
            measured(1),
            measured(2),
            off(1),
            off(2),
        ];
        row.extend(
            model::CORES
                .iter()
                .map(|cores| or_dash(figures.get(&format!("model_{name}_{cores}cores_mps")), 2)),
        );
        row
    });
    page.table(&head, rows);
}
