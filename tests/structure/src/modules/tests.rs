use super::*;

/// The cycles of a crate of these files, each as its way round behind the parent of the modules.
fn rounds(files: &[(&str, &str)]) -> Vec<String> {
    let dir = tree(files);
    let graphs = of_crate(&dir.path().join("lib.rs")).expect("a crate");
    let cycles = graphs.iter().flat_map(|(parent, graph)| {
        let rounds = graph.cycles().into_iter();
        rounds.map(move |cycle| format!("{parent}: {}", graph.round(&cycle)))
    });
    cycles.collect()
}

fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, source) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().expect("in the folder")).expect("a folder");
        fs::write(path, source).expect("a file");
    }
    dir
}

#[test]
fn a_tree_of_modules_has_no_cycle() {
    let files = [
        (
            "lib.rs",
            "//! mod c;\n#[path = \"../x.rs\"] pub(crate) mod x; mod a; pub mod b; pub use a::{A, inner::C}; fn f() { b::f() }",
        ),
        (
            "a.rs",
            "pub mod inner; use self::inner::C; // crate::b::B\npub struct A;",
        ),
        (
            "a/inner.rs",
            "use super::A; use crate::a::A as B; const S: &str = \"crate::b\"; #[cfg(test)] mod tests { use crate::b; }",
        ),
        ("b/mod.rs", "use crate::{A, a::inner::C};"),
    ];
    assert_eq!(rounds(&files), [""; 0]);
}

/// Ways in which `a` may name its sibling `b`, from the two's parent being `P`.
const WAYS: [&str; 17] = [
    "use P::b;",
    "use P::{A, b::{B, D}};",
    "use super::b::B;",
    "fn f() { P::b::f::<u8>() }",
    "mod inner { use super::super::b; }",
    "pub(in P::b) struct A;",
    "#[cfg(not(test))] use P::b;",
    // What the parent takes from it.
    "use P::B;",
    "use super::B;",
    "use P::{A, Renamed};",
    "fn f() { let x = super::Renamed::new(); }",
    // What the parent takes from it, or has, by globs.
    "use super::*; fn f(x: B) {}",
    "use super::*; fn f() { b::f() }",
    "use super::Globbed;",
    // Another name for the parent, or for one above.
    "use super as p; fn f() { p::b::f() }",
    "use super::{self as p}; fn f(x: p::B) {}",
    "use crate as root; mod inner { use super::super as p; fn f() { p::Renamed::new() } }",
];
const PARENT: &str = "mod a; mod b; pub use a::A; pub use b::{B, D as Renamed}; pub use b::*;";
const B: &str = "use super::a; pub struct B; pub struct D; pub fn Globbed() {}";

#[test]
fn a_cycle_is_found_however_it_is_written() {
    for way in WAYS {
        let way = way.replace("P::", "crate::");
        let files = [("lib.rs", PARENT), ("a.rs", &way), ("b.rs", B)];
        assert_eq!(rounds(&files), [": a → b → a"], "{way}");
    }
}

#[test]
fn a_cycle_is_found_at_every_depth() {
    for way in WAYS {
        let way = way.replace("P::", "crate::m::n::");
        let files = [
            ("lib.rs", "mod m;"),
            ("m.rs", "pub mod n;"),
            ("m/n/mod.rs", PARENT),
            ("m/n/a.rs", &way),
            ("m/n/b.rs", B),
        ];
        assert_eq!(rounds(&files), ["m::n: a → b → a"], "{way}");
    }
    let inline = "mod m { mod a { use super::b; } mod b { use super::a; } }";
    assert_eq!(rounds(&[("lib.rs", inline)]), ["m: a → b → a"]);
}

#[test]
fn names_of_ones_own_are_not_those_of_a_glob() {
    for own in [
        "use super::*; struct B; fn f(x: B) {}",
        "use super::*; use std::B; fn f(x: B) {}",
        "use super::*; fn f(x: Foreign) {}",
    ] {
        let parent = "mod a; mod b; use b::B; use std::Foreign;";
        let files = [("lib.rs", parent), ("a.rs", own), ("b.rs", B)];
        assert_eq!(rounds(&files), [""; 0], "{own}");
    }
}

#[test]
fn files_below_modules_count_as_theirs() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a/mod.rs", "mod deep { mod deeper; }"),
        ("a/deep/deeper.rs", "use super::super::super::b;"),
        ("b.rs", "use crate::a;"),
    ];
    assert_eq!(rounds(&files), [": a → b → a"]);
}

#[test]
fn names_that_lead_back_to_themselves_end() {
    let files = [
        ("lib.rs", "mod a; mod b; pub use a::*;"),
        (
            "a.rs",
            "pub use crate::b::*; pub use self::X as Y; pub use self::Y as X;",
        ),
        (
            "b.rs",
            "pub use crate::*; use crate::Nothing; use crate::a::X;",
        ),
    ];
    assert_eq!(rounds(&files), [": a → b → a"]);
}

#[test]
fn a_path_out_of_the_folder_is_found() {
    let dir = tree(&[
        (
            "a/src/lib.rs",
            "#[path = \"../tests/own.rs\"]\nmod own;\n#[path = \"x/../y.rs\"]\nmod y;",
        ),
        (
            "a/tests/t.rs",
            "// no\n    #[path = \"../../b/src/theirs.rs\"]\nmod theirs;",
        ),
    ]);
    let found = foreign_paths(&dir.path().join("a")).expect("the sources are there");
    let [(from, to)] = &found[..] else {
        panic!("{found:?}");
    };
    assert!(
        from.ends_with("a/tests/t.rs") && to.ends_with("b/src/theirs.rs"),
        "{found:?}"
    );
}
