//! The mutants of this tree, without building any: each can be read, fits the sources as they are,
//! and names a test that there is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use mutants::mutant::{Cfg, Expect, Mutant, Target, names};
use mutants::tree;
use structure::modules;
use structure::workspace::{Package, Workspace};

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).expect("a crate of the tree");
    root.canonicalize().expect("the tree")
}

fn all() -> Vec<Mutant> {
    let names = names(&root()).expect("the folder is there");
    let read =
        |name: &String| Mutant::read(&root(), name).unwrap_or_else(|error| panic!("{error:#}"));
    names.iter().map(read).collect()
}

#[test]
fn every_mutant_fits_the_sources() {
    for mutant in all() {
        let name = &mutant.name;
        if let Err(error) = tree::check(&root(), &mutant.patch) {
            panic!("{name}: {error:#}\nto renew it: cargo run --release -p mutants -- --help");
        }
    }
}

/// The sources that a mutant may change, and the tests that it may name.
struct Tree {
    packages: BTreeMap<String, Package>,
    /// Files by package that are compiled for more than tests, and functions, tests among them.
    sources: BTreeMap<String, BTreeSet<PathBuf>>,
    functions: BTreeMap<String, BTreeSet<String>>,
}

impl Tree {
    fn read() -> Self {
        let packages = Workspace::read()
            .expect("cargo describes the workspace")
            .packages;
        let (mut sources, mut functions) = (BTreeMap::new(), BTreeMap::new());
        for (name, package) in &packages {
            let files = |root: &PathBuf| modules::files(root).expect("the sources are there");
            sources.insert(name.clone(), package.roots.iter().flat_map(files).collect());
            let all = modules::functions(&package.folder).expect("the sources are there");
            functions.insert(name.clone(), all);
        }
        Self {
            packages,
            sources,
            functions,
        }
    }

    /// This package, and those of ours that it is built from. A package of tests alone is built
    /// from nothing, and tests the products that it is tested with.
    fn built_from(&self, package: &Package) -> BTreeSet<String> {
        let (mut open, mut found) = (vec![package], BTreeSet::new());
        if package.needs.is_empty() {
            let tested = package.tested_with.iter();
            let tested = tested.filter_map(|name| self.packages.get(name));
            let tests = root().join("tests");
            open.extend(tested.filter(|package| !package.folder.starts_with(&tests)));
        }
        while let Some(package) = open.pop() {
            if found.insert(package.name.clone()) {
                let needs = package.needs.iter().chain(&package.may_need);
                open.extend(needs.filter_map(|name| self.packages.get(name)));
            }
        }
        found
    }

    /// Differences between what a mutant names and what is there, in words: a mistake is made in
    /// what is tested, not in what tests it, and in the package of its test or one that this is
    /// built from ([`built_from`](Self::built_from)); and there is such a test.
    fn faults(&self, mutant: &Mutant) -> Vec<String> {
        let head = &mutant.head;
        let Some(package) = self.packages.get(&head.package) else {
            return vec![format!("there is no package {}", head.package)];
        };
        let mut found = Vec::new();
        let is_there = match &head.target {
            Target::Lib => package
                .roots
                .iter()
                .any(|root| root.ends_with("src/lib.rs")),
            Target::Test(name) => package.tests.contains(name),
        };
        if !is_there {
            found.push(format!("{} has no target {:?}", head.package, head.target));
        }
        for test in &head.tests {
            let name = test.rsplit("::").next().expect("one at least");
            if !self.functions[&head.package].contains(name) {
                found.push(format!("{} has no function {name}", head.package));
            }
        }
        let built_from = self.built_from(package);
        for file in &mutant.patch.files {
            let path = root().join(&file.path);
            let is_of_it = built_from
                .iter()
                .any(|name| self.sources[name].contains(&path));
            if !is_of_it || !file.path.contains("/src/") {
                found.push(format!("{} is not built from {}", head.package, file.path));
                continue;
            }
            let sound = fs::read_to_string(&path).expect("a source");
            match file.apply(&sound) {
                Ok(mutated) if modules::differ(&sound, &mutated) => {}
                Ok(_) => found.push(format!("{} differs in comments or tests alone", file.path)),
                Err(misfit) => found.push(misfit.to_string()),
            }
        }
        found
    }
}

#[test]
fn every_mistake_is_made_in_a_product_source_and_has_a_test() {
    let tree = Tree::read();
    for mutant in all() {
        assert_eq!(tree.faults(&mutant), [""; 0], "{}", mutant.name);
    }
}

/// A mutant of `virtio-pci`, with one fault after the other in its text.
#[test]
fn each_fault_of_a_mutant_is_found() {
    let tree = Tree::read();
    let name = "virtio-pci/pauses-late";
    let file = mutants::mutant::path_of(&root(), name);
    let text = fs::read_to_string(file).expect("a mutant");
    let faults = |text: &str| tree.faults(&Mutant::parse(name, text).expect("a mutant"));
    assert_eq!(faults(&text), [""; 0]);
    let in_source = |path: &str| text.replace("virt/virtio-pci/src/lifecycle.rs", path);
    let (head, _) = mutants::mutant::split(&text);
    let diff = |path: &str, from: &str, to: &str| {
        format!("{head}--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{from}\n+{to}\n")
    };
    let lifecycle = "virt/virtio-pci/src/lifecycle.rs";
    let title =
        "//! The state of a function between its driver's start and its reset, and how it stops.";
    let model = "virt/sidecore/src/park/tests/model.rs";
    for (text, fault) in [
        (
            text.replace("package: virtio-pci", "package: virtio"),
            "there is no package virtio",
        ),
        (
            text.replace("target: lib", "target: schedules"),
            "virtio-pci has no target",
        ),
        (
            text.replace("of_the_table", "of_a_table"),
            "virtio-pci has no function each_event_has_in_each_state_the_outcome_of_a_table",
        ),
        // Another package's, a test's, a model's, none.
        (in_source("libs/iova/src/lib.rs"), "not built from"),
        (
            in_source("virt/virtio-pci/src/function/tests.rs"),
            "not built from",
        ),
        (
            in_source(model).replace("virtio-pci\n", "sidecore\n"),
            "not built from",
        ),
        (in_source("virt/virtio-pci/src/none.rs"), "not built from"),
        (
            diff(lifecycle, title, "//! Another title."),
            "comments or tests alone",
        ),
        (diff(lifecycle, "//! Another title.", title), "hunk 1"),
    ] {
        let found = faults(&text);
        let is_found = found.iter().any(|found| found.contains(fault));
        assert!(is_found, "«{fault}» is not among {found:?}");
    }
}

/// Words of panics that any mistake may cause.
const OF_ANY_PANIC: [&str; 8] = [
    "index out of bounds",
    "out of range",
    "overflow",
    "panicked",
    "unwrap",
    "assertion",
    "left:",
    "test result",
];

/// A mistake is found by an assertion about what it breaks: by that assertion's own words.
#[test]
fn every_mutant_says_more_than_that_something_panicked() {
    for mutant in all() {
        if let Expect::Red(says) = &mutant.head.expect {
            let is_of_any = OF_ANY_PANIC.iter().any(|words| says.contains(words));
            assert!(!is_of_any, "{}: {says}", mutant.name);
        }
    }
}

#[test]
fn every_cfg_and_an_edit_that_changes_nothing_are_among_them() {
    let all = all();
    for cfg in [Cfg::None, Cfg::Loom, Cfg::Shuttle] {
        assert!(all.iter().any(|mutant| mutant.head.cfg == cfg), "{cfg:?}");
    }
    assert!(all.iter().any(|mutant| mutant.head.expect == Expect::Green));
    assert!(all.iter().any(|mutant| mutant.head.target != Target::Lib));
}
