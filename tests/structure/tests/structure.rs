//! The tree's arrows: between folders, between crates, between the modules of a crate.

use std::fs;

use structure::graph::Graph;
use structure::known::{Cycle, Listed, differences};
use structure::layers::{self, Tool};
use structure::modules;
use structure::workspace::{Workspace, built_from, root};

/// Crates that have to be there and know no KVM, their tests included. All of `libs/` and `virt/`
/// is looked at; these are named so that none gets away by moving.
const WITHOUT_KVM: &[&str] = &[
    "assign",
    "machine",
    "owner-tests",
    "guest-mem",
    "vtd",
    "vio",
    "sidecore",
    "uffd",
    "vhost-user",
];
const KVM: [&str; 2] = ["kvm-ioctls", "kvm-bindings"];

fn workspace() -> Workspace {
    Workspace::read().expect("cargo describes the workspace")
}

/// Crates that bring in one of `tests/` by a feature that is off.
const TOOLS: [Tool; 2] = [
    // `testing`, under `--cfg shuttle`.
    ("iova", "random-schedules"),
    // `probe`, for programs that count cache lines.
    ("lines", "line-probe"),
];

#[test]
fn no_arrow_points_up() {
    let up = layers::arrows_up(workspace().packages.values(), &TOOLS);
    assert!(up.is_empty(), "{}", up.join("\n"));
}

#[test]
fn architecture_lists_every_crate_in_its_folder() {
    let root = root().expect("the repository");
    let text = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("a page");
    let differ = layers::map_differences(&text, workspace().packages.values());
    assert!(differ.is_empty(), "ARCHITECTURE.md:\n{}", differ.join("\n"));
}

#[test]
fn no_cycle_between_crates() {
    let mut graph = Graph::default();
    for package in workspace().packages.values() {
        let tests = package.may_need.iter().chain(&package.tested_with);
        for other in package.needs.iter().chain(tests) {
            graph.add(&package.name, other);
        }
    }
    let cycles = graph.cycles().into_iter();
    let rounds: Vec<_> = cycles.map(|cycle| graph.round(&cycle)).collect();
    assert!(rounds.is_empty(), "{rounds:?}");
}

#[test]
fn no_kvm_below_bin() {
    let workspace = workspace();
    for &name in WITHOUT_KVM {
        assert!(workspace.packages.contains_key(name), "no crate {name}");
    }
    let packages = workspace.packages.values();
    for package in packages.filter(|p| {
        ["libs", "virt"].contains(&p.layer.as_str()) || WITHOUT_KVM.contains(&p.name.as_str())
    }) {
        for kvm in KVM {
            if let Some(way) = workspace.way(&package.name, kvm) {
                panic!("{}", way.join(" → "));
            }
        }
    }
    // It does find a way where there is one.
    assert!(workspace.way("exitless", KVM[0]).is_some());
}

/// Folders of the lab, of tests, of measurements and of guests' programs: the product is built from
/// none of their crates.
const NOT_IN_THE_PRODUCT: [&str; 4] = ["bench", "guest", "lab", "tests"];

#[test]
fn product_is_built_from_no_crate_of_lab_tests_bench_or_guest() {
    let workspace = workspace();
    let foreign = |program: &str| -> Vec<String> {
        let all = built_from(program).expect("cargo describes its tree");
        let is_foreign = |name: &&String| {
            let package = workspace.packages.get(*name);
            package.is_some_and(|package| NOT_IN_THE_PRODUCT.contains(&package.layer.as_str()))
        };
        all.iter().filter(is_foreign).cloned().collect()
    };
    assert_eq!(foreign("exitless"), [""; 0]);
    // It does find what the other program is built from.
    let lab = foreign("exitless-lab");
    for name in ["harness", "punch", "vio-faults", "workload"] {
        assert!(lab.iter().any(|other| other == name), "no {name}: {lab:?}");
    }
}

/// Modules of one parent that may still name each other: crate, parent, the modules, the reason.
/// Each as it is: one that is gone, or has become smaller, has to be changed here too.
const KNOWN_CYCLES: [Listed; 11] = [
    (
        "dma-map",
        "mapper",
        &["core_map", "core_reclaim", "core_return", "core_unmap"],
        METHODS,
    ),
    (
        "exitless-hv",
        "vm",
        &[
            "block",
            "end",
            "events",
            "local_apic",
            "messages",
            "others",
            "step",
            "tables",
        ],
        METHODS,
    ),
    ("machine", "owner", &["access", "poller"], METHODS),
    ("sidecore", "", &["migrate", "run", "serve"], METHODS),
    ("swap", "residency", &["discards", "page_out"], METHODS),
    (
        "swap",
        "residency",
        &["disks", "page_in", "read_ahead"],
        METHODS,
    ),
    ("vhost-export", "", &["events", "iotlb", "peer"], METHODS),
    (
        "vhost-user",
        "backend",
        &["ring_requests", "session"],
        METHODS,
    ),
    ("vio", "blk", &["finish", "parts", "stalled"], METHODS),
    (
        "vio",
        "blk::raw",
        &["ended", "misaligned", "start", "zeroes"],
        METHODS,
    ),
    (
        "vtd",
        "unit",
        &["commands", "leases", "queue", "registers"],
        METHODS,
    ),
];
const METHODS: &str = "methods of one type, in a file for each of its subjects, call each other";

#[test]
fn no_cycle_between_the_modules_of_a_crate() {
    let mut found = Vec::new();
    for package in workspace().packages.values() {
        for root in &package.roots {
            for (parent, graph) in modules::of_crate(root).expect("the sources are there") {
                for modules in graph.cycles() {
                    let round = graph.round(&modules);
                    let cycle = Cycle {
                        package: package.name.clone(),
                        parent: parent.clone(),
                        modules,
                    };
                    found.push((cycle, round));
                }
            }
        }
    }
    let differences = differences(&found, &KNOWN_CYCLES);
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn no_crate_compiles_the_files_of_another() {
    let packages = workspace().packages;
    let folders: Vec<_> = packages.values().map(|p| p.folder.clone()).collect();
    for package in packages.values() {
        let folder = &package.folder;
        let foreign = modules::foreign_paths(folder, &folders).expect("the sources are there");
        assert!(foreign.is_empty(), "{foreign:?}");
        for root in &package.targets {
            let is_own = modules::is_in(root, folder, &folders);
            assert!(is_own, "{}: {}", package.name, root.display());
        }
    }
}

/// A file that no module names is not compiled, and no compiler says so.
#[test]
fn every_source_is_some_module() {
    for package in workspace().packages.values() {
        let folder = package.folder.join("src");
        if folder.is_dir() {
            let strays = modules::strays(&folder, &package.roots).expect("the sources are there");
            assert!(strays.is_empty(), "{strays:?}");
        }
    }
}

/// `test = false` in a manifest saves building a binary without tests; the first test to come would
/// not run.
#[test]
fn untested_binaries_have_no_tests() {
    for package in workspace().packages.values() {
        for root in &package.untested {
            let has_tests = modules::has_tests(root).expect("the sources are there");
            assert!(!has_tests, "{} has tests and is not tested", root.display());
        }
    }
}
