//! The tables of the loops: allocation, two threads against one, page tables, deferred and strict policies.

use report::Object;

use super::{Page, ns, strings};
use crate::alloc::quoted;
use crate::alloc::section::{ALLOCATORS, PEERS, WORKLOADS};
use crate::doubled::LOOPS;
use crate::map::section::FLUSHES;
use crate::record::or_dash;
use crate::table::section::{PAGES, TABLES};

pub fn allocation(page: &mut Page, figures: &Object) {
    page.line("\n## IOVA allocation\nNanoseconds of an allocation and a free, per thread, as measured. Linux and LLFree are **quoted** from");
    page.line("other programs on a reference machine (floor 1.67 ns, round trip 115-128 ns), Linux 7.3.4 code in a");
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

/// Two threads against one, in turns.
pub fn doubled(page: &mut Page, figures: &Object) {
    page.line("\n## Two threads against one\nIn turns: the loop on one thread, on two of one space, on two with a space each, and random numbers on one and two.");
    page.line("Nanoseconds per thread as measured; ratios are medians of the turns'.");
    let head = strings(&[
        "loop",
        "round trip",
        "one",
        "two of one space",
        "two, a space each",
        "random numbers, two / one",
        "one space / one",
        "a space each / one",
        "**one space / a space each**",
    ]);
    let rows = LOOPS.iter().map(|of| {
        let get = |suffix: &str| figures.get(&format!("{}_{suffix}", of.name));
        let ns = |row: &str| ns(figures, &format!("{}_{row}_ns_raw", of.name));
        vec![
            of.title.to_owned(),
            or_dash(get("shared_2thr_rtt_ns"), 0),
            ns("one_1thr"),
            ns("shared_2thr"),
            ns("separate_2thr"),
            or_dash(get("2thr_random_times"), 3),
            or_dash(get("2thr_times"), 3),
            or_dash(get("2thr_control_times"), 3),
            or_dash(get("2thr_vs_separate_times"), 3),
        ]
    });
    page.table(&head, rows);
}

pub fn tables(page: &mut Page, figures: &Object) {
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
}

pub fn deferred(page: &mut Page, figures: &Object) {
    page.line("\n## Deferred and strict (d)\nNanoseconds of an unmap and a map, per thread, as measured, on hardware that takes a fixed time per command, one");
    page.line("at a time. «d» has no tables behind it, as in the quoted figures; «dt» has. `bare` is an allocator and a lock around the wait.");
    let policies = [
        "strict_lock",
        "strict",
        "strict_combining",
        "combining_no_gather",
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
