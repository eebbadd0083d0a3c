//! The results page, from the figures of one run and nothing else: what was not measured stays a dash, what missed its target
//! says so.

use std::fmt::Write as _;

use report::Object;

use crate::alloc::quoted;
use crate::alloc::section::{ALLOCATORS, PEERS, WORKLOADS};
use crate::map::policies::POLICIES;
use crate::map::section::FLUSHES;
use crate::model;
use crate::nic::section::LOADS;
use crate::paper;
use crate::record::{ns_text, or_dash};
use crate::reuse::STRUCTURES;
use crate::table::section::{PAGES, TABLES};

/// What a key should be.
enum Goal {
    /// At most.
    Most(f64),
    /// At least.
    Least(f64),
}

/// Keys, what they are, goals.
const GOALS: [(&str, &str, Goal); 20] = [
    ("a1_ns", "a-1, one thread, ns", Goal::Most(6.0)),
    ("c1_ns", "c-1, one thread, ns", Goal::Most(6.0)),
    ("a1_2thr_ratio", "a-1, two threads / one", Goal::Most(1.05)),
    ("c1_2thr_ratio", "c-1, two threads / one", Goal::Most(1.05)),
    ("b32_ns", "b-32 net of its control, ns", Goal::Most(8.0)),
    (
        "slow_65536_ns",
        "a-1 with 65,536 ranges, ns",
        Goal::Most(100.0),
    ),
    (
        "slow_2thr_ratio",
        "the same, throughput of two threads / one",
        Goal::Least(1.8),
    ),
    ("map_unmap_ns", "p-256, ns", Goal::Most(16.0)),
    (
        "map_unmap_2thr_ratio",
        "p-256 with allocated pages, two threads / one",
        Goal::Most(1.1),
    ),
    ("deferred_ns", "d-def, no flush cost, ns", Goal::Most(12.0)),
    (
        "strict_2thr_500ns_vs_lock",
        "strict / spin-lock strict, 500 ns, two threads",
        Goal::Least(0.95),
    ),
    (
        "combining_2thr_500ns_vs_lock",
        "combining / spin-lock strict, 500 ns, two threads",
        Goal::Least(1.25),
    ),
    (
        "combining_2thr_500ns_mps",
        "combining, 500 ns, two threads, M/s",
        Goal::Least(1.8),
    ),
    (
        "leaf_tables_c1",
        "leaf tables after c-1, one core",
        Goal::Most(16.0),
    ),
    (
        "leaf_tables_c1_2thr",
        "leaf tables after c-1, two cores",
        Goal::Most(32.0),
    ),
    (
        "leaf_tables_after_epoch",
        "leaf tables after everything is freed and an epoch, one core, six classes",
        Goal::Most(6.0),
    ),
    (
        "opt4096_share",
        "optimistic(4096), share of `off`, recorded reuse",
        Goal::Least(0.95),
    ),
    (
        "deferred_share",
        "deferred, share of `off`",
        Goal::Least(0.9),
    ),
    (
        "strict_stale_max",
        "stale mappings of strict",
        Goal::Most(0.0),
    ),
    (
        "strict_combining_stale_max",
        "stale mappings of strict-combining",
        Goal::Most(0.0),
    ),
];

/// The page; `plots` are the names of the plots that were drawn.
pub fn page(figures: &Object, plots: &[&str]) -> String {
    let mut page = Page(String::new());
    head(&mut page, figures);
    goals(&mut page, figures);
    allocation(&mut page, figures);
    tables(&mut page, figures);
    deferred(&mut page, figures);
    card(&mut page, figures);
    reuse(&mut page, figures);
    memory(&mut page, figures);
    cores(&mut page, figures);
    page.line("\n## Plots\nDrawn by the same run, under `target/report/dma/` (not kept with the sources):");
    for plot in plots {
        page.line(&format!("- `{plot}`"));
    }
    page.0
}

struct Page(String);

impl Page {
    fn line(&mut self, text: &str) {
        let _ = writeln!(self.0, "{text}");
    }

    fn table(&mut self, head: &[String], rows: impl IntoIterator<Item = Vec<String>>) {
        self.line(&format!("\n| {} |", head.join(" | ")));
        self.line(&format!("|{}", "---|".repeat(head.len())));
        for row in rows {
            self.line(&format!("| {} |", row.join(" | ")));
        }
    }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn ns(figures: &Object, key: &str) -> String {
    let Some(median) = figures.get(key) else {
        return "–".to_owned();
    };
    let spread = figures.get(&format!("{key}_spread"));
    spread.map_or_else(
        || ns_text(median),
        |spread| format!("{} ± {}", ns_text(median), ns_text(spread / 2.0)),
    )
}

fn head(page: &mut Page, figures: &Object) {
    page.line("# IOVA allocation and DMA mapping: results\n");
    page.line("Made by `make bench-dma-docs` from the figures of one run of `make bench-dma`; do not edit. What the loops are: `bench/dma`.");
    page.line("Raw nanoseconds are medians ± half the distance of the extremes. **Scaled** figures are what targets are");
    page.line("compared with: one thread × 1.67 / floor; what crosses cores × 120 / round trip; ratios of two threads divided by");
    page.line("that of loops that share nothing; with flushes of fixed length only what lies beyond them scales.\n");
    for (key, name) in [
        ("machine", "machine"),
        ("kernel", "kernel"),
        ("mode", "mode"),
        ("commit", "commit"),
    ] {
        page.line(&format!("- {name}: {}", figures.text(key)));
    }
    for (key, name, digits) in [
        ("load_average", "load of others at the start", 2),
        ("floor_ns", "floor (owner-only pop and push), ns", 2),
        ("lock_ns", "lock and unlock, ns", 2),
        ("rtt_ns", "cache line there and back, ns", 0),
    ] {
        page.line(&format!("- {name}: {}", or_dash(figures.get(key), digits)));
    }
    let disturbed: f64 = figures
        .keys()
        .iter()
        .filter(|(key, _)| key.ends_with("_disturbed"))
        .filter_map(|(_, value)| value.as_f64())
        .sum();
    page.line(&format!(
        "- two-thread runs in which a thread was kept from running, after two more attempts: {disturbed:.0}"
    ));
}

fn goals(page: &mut Page, figures: &Object) {
    page.line("\n## Targets");
    let rows = GOALS.iter().map(|(key, name, goal)| {
        let value = figures.get(key);
        let (goal, is_met) = match goal {
            Goal::Most(most) => (format!("≤ {most}"), value.map(|value| value <= *most)),
            Goal::Least(least) => (format!("≥ {least}"), value.map(|value| value >= *least)),
        };
        let verdict = match is_met {
            None => "not measured",
            Some(true) => "met",
            Some(false) => "**missed**",
        };
        vec![
            (*name).to_owned(),
            or_dash(value, 2),
            or_dash(figures.get(&format!("{key}_raw")), 2),
            goal,
            verdict.to_owned(),
        ]
    });
    page.table(&strings(&["", "scaled", "raw", "goal", ""]), rows);
}

fn allocation(page: &mut Page, figures: &Object) {
    page.line("\n## IOVA allocation\nNanoseconds of an allocation and a free, per thread, as measured. Linux and LLFree are **quoted** from");
    page.line("the notes: another program, another machine (floor 1.67 ns, round trip 115-128 ns), Linux 7.3.4 code in a");
    page.line("user-space shim that disables no interrupts.");
    let mut head = strings(&["loop", "threads", "round trip"]);
    let names: Vec<_> = ALLOCATORS.iter().chain(&PEERS).collect();
    head.extend(names.iter().map(|name| name.replace('_', "-")));
    head.extend(strings(&["Linux (quoted)", "LLFree (quoted)"]));
    let rows = WORKLOADS.iter().map(|workload| {
        let (name, threads) = (workload.name, workload.threads);
        let key = |of: &str| format!("{name}_{of}_{threads}thr");
        let mut row = vec![
            name.to_owned(),
            threads.to_string(),
            or_dash(figures.get(&format!("{}_rtt_ns", key("chunk"))), 0),
        ];
        row.extend(
            names
                .iter()
                .map(|of| ns(figures, &format!("{}_ns_raw", key(of)))),
        );
        row.push(quoted::linux(name, threads));
        row.push(quoted::peer("llfree", name, threads).to_owned());
        row
    });
    page.table(&head, rows);
    for control in ["b32", "b1"] {
        page.line(&format!(
            "\nControl of {control} (the ring without an allocator): {} ns.",
            ns(figures, &format!("{control}_x_2thr_ns_raw"))
        ));
    }
}

fn tables(page: &mut Page, figures: &Object) {
    page.line("\n## Page tables (as ATC'15 Table 1: what locks cost)\nNanoseconds of a map and an unmap of a page, per thread, as measured; loop included.");
    let mut head = strings(&["S", "threads"]);
    head.extend(TABLES.iter().map(|name| name.replace('_', " ")));
    head.push("generic_pt of Linux (quoted)".to_owned());
    let ways = [
        ("alone", 1, "one"),
        ("shared", 2, "two, every leaf table shared"),
        ("disjoint", 2, "two, halves"),
        ("own_leaves", 2, "two, leaf tables of their own"),
    ];
    let mut rows = Vec::new();
    for (pages, quoted) in PAGES.iter().zip(crate::table::section::QUOTED) {
        for (index, (way, threads, title)) in ways.iter().enumerate() {
            let mut row = vec![pages.to_string(), (*title).to_owned()];
            row.extend(TABLES.iter().map(|table| {
                ns(
                    figures,
                    &format!("p{pages}_{way}_{table}_{threads}thr_ns_raw"),
                )
            }));
            row.push(quoted.get(index).copied().unwrap_or("").to_owned());
            rows.push(row);
        }
    }
    page.table(&head, rows);
    page.line(&format!(
        "\nWith pages from the allocator, S = 256: one thread {} ns, two {} ns.",
        ns(figures, "p256_allocated_1thr_ns_raw"),
        ns(figures, "p256_allocated_2thr_ns_raw")
    ));
}

fn deferred(page: &mut Page, figures: &Object) {
    page.line("\n## Deferred and strict (d)\nNanoseconds of an unmap and a map, per thread, as measured, on hardware that takes a fixed time per command, one");
    page.line("at a time. «d» has no tables behind it, as in the notes; «dt» has. `bare` is an allocator and a lock around the wait.");
    let policies = [
        "strict_lock",
        "strict",
        "strict_combining",
        "async",
        "deferred",
    ];
    let mut head = strings(&["", "threads", "command, ns"]);
    head.extend(strings(&policies));
    head.push("bare".to_owned());
    let mut rows = Vec::new();
    for prefix in ["d", "dt"] {
        for threads in [1, 2] {
            for flush in FLUSHES {
                let mut row = vec![prefix.to_owned(), threads.to_string(), flush.to_string()];
                row.extend(policies.iter().chain(&["bare"]).map(|policy| {
                    ns(
                        figures,
                        &format!("{prefix}_{policy}_f{flush}_{threads}thr_ns_raw"),
                    )
                }));
                rows.push(row);
            }
        }
    }
    page.table(&head, rows);
    page.line("\nQuoted: Linux 7.3.4, deferred 38.8 ns (one thread), 46.7 (two); strict 28.3 / 568 / 1067 ns for 0, 500 and 1,000 ns");
    page.line("a command on one thread, 290 / 1353 / 2375 on two.");
}

fn card(page: &mut Page, figures: &Object) {
    page.line("\n## A network card's load (as vIOMMU Table 1 and Figure 3, ATC'15 Figures 2-5)\nShare of the throughput of `off`, as measured, in percent; page commands take 500 ns, global ones 1 µs, one at a time.");
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
                let key = format!("nic_{}_{}_{threads}thr_share_raw", load.name, named.name);
                or_dash(figures.get(&key).map(|share| share * 100.0), 1)
            }));
            rows.push(row);
        }
    }
    page.table(&head, rows);
    page.line("\nWhat the papers report, on their hardware, for comparison (a blank: our notes do not have the value):");
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
    page.line("\n### Stale mappings and latency\nOver all loads; the age's bound holds up to the time between two ticks, which the threads of the load make every millisecond when they run. Latency of a map and the unmap of the");
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

fn reuse(page: &mut Page, figures: &Object) {
    page.line("\n## Structures for reuse\nRecorded pages; nanoseconds of an acquire and a release, the loop's own time taken off.");
    let rows = STRUCTURES.iter().map(|(name, title)| {
        let get = |suffix: &str| figures.get(&format!("reuse_{name}_{suffix}"));
        vec![
            (*title).to_owned(),
            ns(figures, &format!("reuse_{name}_ns_raw")),
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

fn memory(page: &mut Page, figures: &Object) {
    page.line("\n## Memory of page tables (as ATC'15 Figure 7)");
    let rows = [
        (
            "leaf_tables_c1",
            "after c-1, by the allocator (Linux, quoted: 19 and 37; ideal 9 and 17)",
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
        ("leaf_tables_after_epoch_strict", "the same, strict"),
        ("leaf_tables_parked", "after the cores have parked"),
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

fn cores(page: &mut Page, figures: &Object) {
    page.line("\n## More cores: **model**, not measured\nMillions of operations per second, all cores; a discrete-event model fed with this run's constants. Its deviation at one and");
    page.line("two cores is beside it: where that is large, the model does not hold.");
    let mut head = strings(&["", "1 measured", "2 measured", "deviation at 1", "at 2"]);
    head.extend(model::CORES.iter().map(|cores| format!("{cores} (model)")));
    let rows = model::SYSTEMS.iter().map(|(name, title, row)| {
        let measured = |cores| or_dash(figures.get(&format!("{row}_{cores}thr_mps_raw")), 2);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_nothing_says_that_nothing_was_measured() {
        let page = page(&Object::default(), &[]);
        assert_eq!(page.matches("not measured |").count(), GOALS.len());
        assert!(!page.contains("NaN") && !page.contains("**missed**"));
    }

    #[test]
    fn a_missed_target_is_said_to_be() {
        let mut figures = Object::default();
        figures.number("a1_ns", 7.0);
        figures.number("c1_ns", 5.0);
        let page = page(&figures, &[]);
        assert_eq!(page.matches("**missed**").count(), 1);
        assert_eq!(page.matches("| met |").count(), 1);
    }
}
