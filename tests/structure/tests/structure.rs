//! The tree's arrows: between folders, between crates, between the modules of a crate.

use std::collections::BTreeSet;

use structure::graph::Graph;
use structure::modules;
use structure::workspace::Workspace;

/// Folders, and those that their crates may be built from.
const SHELVES: [(&str, &[&str]); 3] = [
    ("libs", &["libs"]),
    ("virt", &["libs", "virt"]),
    ("host", &["libs", "virt", "host"]),
];

/// What nothing below `bin/` may need, not even for its tests.
const NOT_BELOW: [&str; 3] = ["bin", "host", "lab"];

/// Crates that have to be there and know no KVM, their tests included. All of `libs/` and `virt/` is looked at; these are named
/// so that none gets away by moving.
const WITHOUT_KVM: &[&str] = &[
    "machine",
    "guest-mem",
    "vtd",
    "vio",
    "sidecore",
    "uffd",
    "vhost-user",
];
const KVM: [&str; 2] = ["kvm-ioctls", "kvm-bindings"];

/// Crates whose tests need what needs them. Likewise.
const TESTS_ABOVE: &[&[&str]] = &[&["machine", "virtio-pci", "vtd-port"]];

/// Modules among which there still are cycles, by crate. To be mended and struck off, not added to.
const CYCLES: &[(&str, &[&str])] = &[
    ("guest-mem", &["dma", "watch", "window"]),
    ("guest-mem", &["file", "mapping"]),
    ("vhost-export", &["export", "peer"]),
    ("vio", &["device", "ring"]),
    ("vtd", &["saved_state", "unit"]),
];

fn workspace() -> Workspace {
    Workspace::read().expect("cargo describes the workspace")
}

#[test]
fn no_arrow_points_up() {
    let workspace = workspace();
    for (shelf, below) in SHELVES {
        for package in workspace.packages.values().filter(|p| p.shelf == shelf) {
            // Others are on no shelf.
            let shelf_of = |name: &String| Some(workspace.packages.get(name)?.shelf.as_str());
            for need in &package.needs {
                let may = shelf_of(need).is_none_or(|shelf| below.contains(&shelf));
                assert!(may, "{} (in {shelf}) needs {need}", package.name);
            }
            for other in package.tested_with.iter().filter(|_| shelf != "host") {
                let may = shelf_of(other).is_none_or(|shelf| !NOT_BELOW.contains(&shelf));
                assert!(
                    may,
                    "the tests of {} (in {shelf}) need {other}",
                    package.name
                );
            }
        }
    }
}

/// Cargo lets the tests of a crate need what needs the crate: two that cannot be read one after the other.
#[test]
fn no_cycle_between_crates() {
    let mut graph = Graph::default();
    for package in workspace().packages.values() {
        for other in package.needs.iter().chain(&package.tested_with) {
            graph.add(&package.name, other);
        }
    }
    let cycles = graph.cycles();
    for cycle in &cycles {
        let names: Vec<_> = cycle.iter().map(String::as_str).collect();
        let is_known = TESTS_ABOVE.contains(&names.as_slice());
        assert!(
            is_known,
            "{cycle:?} need each other: {}",
            graph.round(cycle)
        );
    }
    assert_eq!(cycles.len(), TESTS_ABOVE.len(), "mended, to be struck off");
}

#[test]
fn no_kvm_below_bin() {
    let workspace = workspace();
    for &name in WITHOUT_KVM {
        assert!(workspace.packages.contains_key(name), "no crate {name}");
    }
    let packages = workspace.packages.values();
    for package in packages.filter(|p| {
        ["libs", "virt"].contains(&p.shelf.as_str()) || WITHOUT_KVM.contains(&p.name.as_str())
    }) {
        for kvm in KVM {
            if let Some(way) = workspace.way(&package.name, kvm) {
                panic!("{}", way.join(" → "));
            }
        }
    }
    // Whoever does use it is seen to.
    assert!(workspace.way("exitless", KVM[0]).is_some());
}

#[test]
fn no_cycle_between_the_modules_of_a_crate() {
    let mut found = BTreeSet::new();
    let mut rounds = Vec::new();
    for package in workspace().packages.values() {
        for root in &package.roots {
            let graph = modules::of_crate(root).expect("the sources are there");
            for cycle in graph.cycles() {
                rounds.push(format!("{}: {}", package.name, graph.round(&cycle)));
                found.insert((package.name.clone(), cycle));
            }
        }
    }
    let is_part = |(package, cycle): &(String, BTreeSet<String>),
                   (name, modules): &(&str, &[&str])| {
        package == name
            && cycle
                .iter()
                .all(|module| modules.contains(&module.as_str()))
    };
    for cycle in &found {
        let is_known = CYCLES.iter().any(|known| is_part(cycle, known));
        assert!(
            is_known,
            "{cycle:?} is a cycle; all of them:\n{}",
            rounds.join("\n")
        );
    }
    for known in CYCLES {
        let is_there = found.iter().any(|cycle| is_part(cycle, known));
        assert!(
            is_there,
            "{known:?} is mended and to be struck off the list"
        );
    }
}
