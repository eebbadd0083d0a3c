//! The tree's arrows: between folders, between crates, between the modules of a crate.

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
            // A feature for tests and measuring programs may bring in a test's tool.
            for need in &package.may_need {
                let may = shelf_of(need).is_none_or(|s| s == "tests" || below.contains(&s));
                assert!(may, "{} (in {shelf}) may need {need}", package.name);
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

/// Cargo lets the tests of a crate need what needs the crate: two that cannot be read one after the other. Such tests are a
/// crate of their own.
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
    let mut rounds = Vec::new();
    for package in workspace().packages.values() {
        for root in &package.roots {
            let graph = modules::of_crate(root).expect("the sources are there");
            for cycle in graph.cycles() {
                rounds.push(format!("{}: {}", package.name, graph.round(&cycle)));
            }
        }
    }
    assert!(rounds.is_empty(), "{}", rounds.join("\n"));
}

/// A file that no module names is compiled by nobody, and nobody misses it.
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

/// `test = false` in a manifest saves building a binary without tests; the first test to come would not run.
#[test]
fn what_is_not_tested_has_no_tests() {
    for package in workspace().packages.values() {
        for root in &package.untested {
            let has_tests = modules::has_tests(root).expect("the sources are there");
            assert!(!has_tests, "{} has tests and is not tested", root.display());
        }
    }
}
