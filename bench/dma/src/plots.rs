//! The plots, after the figures of the two papers: measured values end at two cores, the model
//! begins at four.

use std::path::Path;
use std::{fs, io};

use report::Object;
use report::svg::{Series, bars, lines};

use crate::alloc::section::ALLOCATORS;
use crate::map::policies::POLICIES;
use crate::model;
use crate::nic::section::LOADS;
use crate::table::section::TABLES;

/// Files and titles, in the order of the results page.
pub const PLOTS: [(&str, &str); 8] = [
    ("alloc-1.svg", "IOVA allocation, one thread"),
    ("alloc-2.svg", "IOVA allocation, two threads"),
    ("tables.svg", "Page tables: map and unmap a page, S = 256"),
    ("shares.svg", "Network card's load, 1,500 B: share of `off`"),
    ("reuse.svg", "Share of `off` by forced reuse, 1,500 B"),
    (
        "cores.svg",
        "Operations per second by cores (1-2 measured, 4-16 model)",
    ),
    ("memory.svg", "Pages of page tables over iterations"),
    ("latency.svg", "Map and unmap of a buffer, p50 and p99"),
];

/// Draws what was measured into `directory`; a plot without any value is not drawn. Gives the names
/// of those drawn.
///
/// # Errors
/// A file cannot be written.
pub fn draw(figures: &Object, directory: &Path) -> io::Result<Vec<&'static str>> {
    fs::create_dir_all(directory)?;
    let mut drawn = Vec::new();
    for ((file, title), draw) in PLOTS.iter().zip([
        alloc_one, alloc_two, tables, shares, reuse, cores, memory, latency,
    ]) {
        let (unit, is_lines, labels, series) = draw(figures);
        let labels: Vec<_> = labels.iter().map(String::as_str).collect();
        let is_empty = series
            .iter()
            .all(|series| series.points.iter().all(Option::is_none));
        if is_empty {
            continue;
        }
        let svg = if is_lines {
            lines(title, unit, &labels, &series)
        } else {
            bars(title, unit, &labels, &series)
        };
        fs::write(directory.join(file), svg)?;
        drawn.push(*file);
    }
    Ok(drawn)
}

/// Unit, whether lines, labels, series.
type Plot = (&'static str, bool, Vec<String>, Vec<Series>);

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn alloc(figures: &Object, threads: usize) -> Plot {
    let workloads = ["a1", "c1", "a1_w65536", "p512"];
    let series = ALLOCATORS
        .iter()
        .map(|allocator| {
            let point =
                |workload: &&str| figures.get(&format!("{workload}_{allocator}_{threads}thr_ns"));
            Series::new(
                allocator.replace('_', "-"),
                workloads.iter().map(point).collect(),
            )
        })
        .collect();
    ("ns", false, names(&workloads), series)
}

fn alloc_one(figures: &Object) -> Plot {
    alloc(figures, 1)
}

fn alloc_two(figures: &Object) -> Plot {
    alloc(figures, 2)
}

fn tables(figures: &Object) -> Plot {
    let ways = [
        ("alone", 1),
        ("shared", 2),
        ("disjoint", 2),
        ("own_leaves", 2),
    ];
    let series = TABLES
        .iter()
        .map(|table| {
            let point = |(way, threads): &(&str, usize)| {
                figures.get(&format!("p256_{way}_{table}_{threads}thr_ns"))
            };
            Series::new(table.replace('_', " "), ways.iter().map(point).collect())
        })
        .collect();
    ("ns", false, names(&ways.map(|(way, _)| way)), series)
}

fn share(figures: &Object, load: &str, policy: &str, threads: usize) -> Option<f64> {
    let key = format!("nic_{load}_{policy}_{threads}thr_share");
    figures.get(&key).map(|share| share * 100.0)
}

/// Names of policies that fit under bars.
fn short_names(policies: &[&str]) -> Vec<String> {
    let short = |name: &&str| {
        name.replace("optimistic", "opt")
            .replace("strict_", "s_")
            .replace("shared_", "sh_")
            .replace("async_", "as_")
    };
    policies.iter().map(short).collect()
}

fn shares(figures: &Object) -> Plot {
    let policies: Vec<_> = POLICIES.iter().map(|named| named.name).collect();
    let series = [(1, "1 thread"), (2, "2 threads")]
        .map(|(threads, name)| {
            let point = |policy: &&str| share(figures, "1500", policy, threads);
            Series::new(name, policies.iter().map(point).collect())
        })
        .to_vec();
    ("%", true, short_names(&policies), series)
}

fn reuse(figures: &Object) -> Plot {
    let loads: Vec<_> = LOADS
        .iter()
        .filter(|load| load.name.contains("reuse"))
        .collect();
    let series = POLICIES
        .iter()
        .map(|named| {
            let point =
                |load: &&crate::nic::section::Load| share(figures, load.name, named.name, 1);
            Series::new(named.name, loads.iter().map(point).collect())
        })
        .collect();
    let labels = loads
        .iter()
        .map(|load| format!("{} %", load.name.trim_start_matches("1500_reuse")))
        .collect();
    ("%", true, labels, series)
}

fn cores(figures: &Object) -> Plot {
    let series = model::SYSTEMS
        .iter()
        .filter(|(name, ..)| *name != "chunk" && *name != "deferred")
        .map(|(name, title, row)| {
            let point = |cores: &usize| match cores {
                1 | 2 => figures.get(&format!("{row}_{cores}thr_mps")),
                cores => figures.get(&format!("model_{name}_{cores}cores_mps")),
            };
            Series::new(*title, model::CORES.iter().map(point).collect())
        })
        .collect();
    let labels = model::CORES.map(|cores| match cores {
        1 | 2 => format!("{cores}"),
        cores => format!("{cores} (model)"),
    });
    ("M/s", true, labels.to_vec(), series)
}

fn memory(figures: &Object) -> Plot {
    let iterations = ["1", "2", "5", "10", "20", "50", "100"];
    let series = [
        ("reclaimed", "with reclamation"),
        ("kept", "without"),
        ("identity", "identity, without"),
    ]
    .map(|(name, title)| {
        let point = |at: &&str| figures.get(&format!("table_pages_{name}_after_{at}"));
        Series::new(title, iterations.iter().map(point).collect())
    })
    .to_vec();
    ("pages", false, names(&iterations), series)
}

fn latency(figures: &Object) -> Plot {
    let policies: Vec<_> = POLICIES.iter().map(|named| named.name).collect();
    let series = [
        ("p50_ns", "p50, 1 thread"),
        ("p99_ns", "p99, 1 thread"),
        ("p50_ns_2thr", "p50, 2 threads"),
        ("p99_ns_2thr", "p99, 2 threads"),
    ]
    .map(|(key, title)| {
        let point = |policy: &&str| figures.get(&format!("{policy}_map_unmap_{key}"));
        Series::new(title, policies.iter().map(point).collect())
    })
    .to_vec();
    ("ns", false, short_names(&policies), series)
}
