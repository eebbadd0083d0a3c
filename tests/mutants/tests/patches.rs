//! The mutants of this tree, without building any: each can be read, and fits the sources as they
//! are.

use std::path::{Path, PathBuf};

use mutants::mutant::{Cfg, Expect, Mutant, Target, names};
use mutants::tree;

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).expect("a crate of the tree");
    root.to_path_buf()
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

/// A mistake in what is tested, not in what tests it; and in sources of the package's own or of
/// those that it is built from.
#[test]
fn every_mistake_is_made_in_a_product_source() {
    for mutant in all() {
        for file in &mutant.patch.files {
            let is_source = file.path.contains("/src/") && !file.path.contains("/tests");
            assert!(is_source, "{}: {}", mutant.name, file.path);
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
