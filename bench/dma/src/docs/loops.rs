//! The tables of the loops: allocation, two threads against one, page tables, deferred and strict
//! policies.

use report::Object;

use super::{Page, ns, strings};
use crate::alloc::section::{ALLOCATORS, WORKLOADS};
use crate::doubled::LOOPS;
use crate::map::linux::{POLICIES, ROWS};
use crate::map::section::FLUSHES;
use crate::record::or_dash;
use crate::table::section::{PAGES, TABLES};

/// A ratio and half its spread; void where there is none.
pub fn ratio(figures: &Object, key: &str) -> String {
    let Some(ratio) = figures.get(key) else {
        return "void".to_owned();
    };
    let spread = figures.get(&format!("{key}_spread"));
    let digits = if ratio < 0.1 { 3 } else { 2 };
    let spread = spread.map_or_else(String::new, |of| format!(" ± {:.digits$}", of / 2.0));
    format!("{ratio:.digits$}{spread}")
}

/// Ours beside Linux's.
pub fn beside_linux(page: &mut Page, figures: &Object) {
    page.line("\n## Beside Linux in one run");
    page.line(&format!(
        "Linux {}'s own `iova.c`, `rbtree.c` and `generic_pt`, unmodified, in user space, in turns \
         with ours; the shim disables no",
        match figures.text("linux_version") {
            "" => "(void: not built)",
            version => version,
        }
    ));
    page.line(
        "interrupts, frees no magazine by a timer and has no queue lock: all of it in \
         Linux's favour. Nanoseconds of an allocation and a free, per",
    );
    page.line(
        "thread; «÷» below 1 is ours faster. Ours is behind one call that is not inlined, \
         sizes unknown to the compiler; «inlined» beside it;",
    );
    page.line(
        "«least» is a private stack behind the same calls, which checks nothing, knows no \
         limit, and loses what another core frees.",
    );
    let head = [
        "ranges", "threads", "Linux", "ours", "÷ Linux", "inlined", "÷ Linux", "least",
    ];
    let rows = WORKLOADS.iter().map(|workload| {
        let (name, threads) = (workload.name, workload.threads);
        let ns = |of: &str| ns(figures, &format!("{name}_{of}_{threads}thr_ns"));
        let row = format!("{name}_{threads}thr");
        vec![
            workload.title.to_owned(),
            threads.to_string(),
            ns("linux"),
            ns("chunk"),
            ratio(figures, &format!("{row}_ratio")),
            ns("chunk_inlined"),
            ratio(figures, &format!("{row}_inlined_ratio")),
            ns("stack"),
        ]
    });
    page.table(&strings(&head), rows);
    page.line(
        "\nA map and an unmap without hardware: Linux strict, without its queue's lock; ours \
         under each policy, with tables kept or",
    );
    page.line(
        "given back. Linux's deferred frees (a queue of 256 in `dma-iommu.c`) are not built: \
         its strict is what ours deferred is compared with too.",
    );
    let mut head = strings(&["mappings", "threads", "Linux"]);
    for (policy, ..) in POLICIES {
        head.extend([policy.replace('_', ", "), "÷ Linux".to_owned()]);
    }
    let rows = ROWS.iter().map(|(name, title, threads, ..)| {
        let ns = |of: &str| ns(figures, &format!("{name}_{of}_{threads}thr_ns"));
        let mut row = vec![(*title).to_owned(), threads.to_string(), ns("linux")];
        for (policy, ..) in POLICIES {
            let key = format!("{name}_{policy}_{threads}thr_ratio");
            row.extend([ns(policy), ratio(figures, &key)]);
        }
        row
    });
    page.table(&head, rows);
    page.line("");
    let get = |key: &str, digits| or_dash(figures.get(key), digits);
    for (title, ours, linux, digits) in [
        (
            "An allocation below 4 GiB where nothing is free, ns (Linux empties its caches first)",
            "failing_alloc_ns",
            "failing_linux_1thr_ns",
            0,
        ),
        (
            "a-1 beside a core whose 32-bit device gets nothing, against beside a quiet one, times",
            "exhaustion_neighbour_ratio",
            "exhaustion_neighbour_linux_ratio",
            2,
        ),
        (
            "Pages of 2,048 that a core gets which another one has freed before it idles",
            "idle_core_pages",
            "idle_core_linux_pages",
            0,
        ),
        (
            "A free of one of 1,048,576 live pages, in random order, ns",
            "free_1m_chunk_ns",
            "free_1m_linux_ns",
            1,
        ),
        (
            "The same by lists of 32 (`free_many`)",
            "free_1m_many32_ns",
            "free_1m_linux_ns",
            1,
        ),
        (
            "By lists of 512",
            "free_1m_many512_ns",
            "free_1m_linux_ns",
            1,
        ),
        (
            "A new space and its first page, µs",
            "cold_space_chunk_us",
            "cold_space_linux_us",
            1,
        ),
        (
            "Each of the next 4,095 pages, ns",
            "cold_page_chunk_ns",
            "cold_page_linux_ns",
            1,
        ),
        (
            "Bytes of a space with one range",
            "bytes_domain_chunk",
            "bytes_domain_linux",
            0,
        ),
        (
            "Bytes per live range of a page, 65,536 of them",
            "bytes_65536_chunk",
            "bytes_65536_linux",
            1,
        ),
        (
            "Bytes per live range of a page, 1,048,576 of them",
            "bytes_1m_chunk",
            "bytes_1m_linux",
            1,
        ),
    ] {
        page.line(&format!(
            "- {title}: **{}**, Linux {}",
            get(ours, digits),
            get(linux, digits)
        ));
    }
}

/// Adds the table of the papers' allocators and other projects' crates, each behind a call.
pub fn allocation(page: &mut Page, figures: &Object) {
    page.line(
        "\n## IOVA allocation, every allocator\n\
         Nanoseconds of an allocation and a free, per thread, as measured; two crates of other \
         people behind a mutex.",
    );
    let mut head = strings(&["loop", "threads", "round trip"]);
    head.extend(ALLOCATORS.iter().map(|name| name.replace('_', "-")));
    let rows = WORKLOADS.iter().filter(|workload| workload.is_for_all());
    let rows = rows.map(|workload| {
        let (name, threads) = (workload.name, workload.threads);
        let key = |of: &str| format!("{name}_{of}_{threads}thr");
        let mut row = vec![
            name.to_owned(),
            threads.to_string(),
            or_dash(figures.get(&format!("{}_rtt_ns", key("chunk"))), 0),
        ];
        row.extend(
            ALLOCATORS
                .iter()
                .map(|of| ns(figures, &format!("{}_ns", key(of)))),
        );
        row
    });
    page.table(&head, rows);
    for control in ["xcore32", "xcore1"] {
        page.line(&format!(
            "\nThe ring of {control} without an allocator: {} ns.",
            ns(figures, &format!("{control}_loop_2thr_ns"))
        ));
    }
}

/// Two threads against one, in turns.
pub fn doubled(page: &mut Page, figures: &Object) {
    page.line(
        "\n## Two threads against one\n\
         In turns: the loop on one thread, on two of one space, on two with a space each. \
         Nanoseconds per thread; ratios are medians of the turns'.",
    );
    page.line(
        "What sharing costs is the last column: two threads that share nothing slow each \
         other down where processors are halves of one core.",
    );
    let head = strings(&[
        "loop",
        "round trip",
        "one",
        "two of one space",
        "two, a space each",
        "one space / one",
        "a space each / one",
        "**one space / a space each**",
    ]);
    let rows = LOOPS.iter().map(|of| {
        let ns = |row: &str| ns(figures, &format!("{}_{row}_ns", of.name));
        let ratio = |suffix: &str| ratio(figures, &format!("{}_2thr_{suffix}", of.name));
        let rtt = figures.get(&format!("{}_shared_2thr_rtt_ns", of.name));
        vec![
            of.title.to_owned(),
            or_dash(rtt, 0),
            ns("one_1thr"),
            ns("shared_2thr"),
            ns("separate_2thr"),
            ratio("times"),
            ratio("control_times"),
            ratio("vs_separate"),
        ]
    });
    page.table(&head, rows);
}

pub fn tables(page: &mut Page, figures: &Object) {
    page.line(
        "\n## Page tables (as ATC'15 Table 1: what locks cost)\n\
         Nanoseconds of a map and an unmap of a page, a call each, per thread; loop included. «÷»: \
         the lock-free table / Linux's `generic_pt`.",
    );
    let mut head = strings(&["S", "threads"]);
    head.extend(TABLES.iter().map(|name| name.replace('_', " ")));
    head.push("÷ Linux".to_owned());
    let ways = [
        ("alone", 1, "one"),
        ("shared", 2, "two, every leaf table shared"),
        ("disjoint", 2, "two, halves"),
        ("own_leaves", 2, "two, leaf tables of their own"),
    ];
    let mut rows = Vec::new();
    for pages in &PAGES {
        for (way, threads, title) in &ways {
            let mut row = vec![pages.to_string(), (*title).to_owned()];
            row.extend(
                TABLES
                    .iter()
                    .map(|table| ns(figures, &format!("p{pages}_{way}_{table}_{threads}thr_ns"))),
            );
            row.push(ratio(
                figures,
                &format!("p{pages}_{way}_{threads}thr_ratio"),
            ));
            rows.push(row);
        }
    }
    page.table(&head, rows);
}

pub fn deferred(page: &mut Page, figures: &Object) {
    page.line(
        "\n## Deferred and strict (d)\n\
         Nanoseconds of an unmap and a map, per thread, on hardware that takes a fixed time per \
         command, one",
    );
    page.line(
        "at a time. «d» has no tables behind it; «dt» has. `bare` is an allocator and a lock \
         around the wait.",
    );
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
                        &format!("{prefix}_{policy}_f{flush}_{threads}thr_ns"),
                    )
                }));
                rows.push(row);
            }
        }
    }
    page.table(&head, rows);
    let rows = policies.iter().map(|policy| {
        let key = format!("d_{policy}_true_costs_2thr_ns");
        vec![(*policy).to_owned(), ns(figures, &key)]
    });
    page.line("\nTwo threads, 500 ns a command for pages and 1 µs for a domain, no tables:");
    page.table(&strings(&["policy", "ns"]), rows);
}
