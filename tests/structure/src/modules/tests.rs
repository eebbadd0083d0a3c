use std::fs;

use super::*;

/// The cycles of a crate of these files, each as its way round behind the parent of the modules.
fn rounds(files: &[(&str, &str)]) -> Vec<String> {
    rounds_of(&tree(files).path().join("lib.rs"))
}

fn rounds_of(root: &Path) -> Vec<String> {
    let graphs = of_crate(root).expect("a crate");
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
            "//! mod c;\n\
             #[path = \"other/x.rs\"] pub(crate) mod x; mod a; pub mod b; pub use \
             a::{A, inner::C}; fn f() { b::f() }",
        ),
        (
            "a.rs",
            "pub mod inner; use self::inner::C; // crate::b::B\npub struct A;",
        ),
        (
            "a/inner.rs",
            "use super::A; use crate::a::A as B; const S: &str = \"crate::b\"; #[cfg(test)] mod \
             tests { use crate::b; }",
        ),
        ("b/mod.rs", "use crate::{A, a::inner::C};"),
        ("other/x.rs", "use crate::a;"),
    ];
    assert_eq!(rounds(&files), [""; 0]);
}

/// Ways in which the module `b` of `lib.rs` may lie in another file, and that file.
const ELSEWHERE: [(&str, &str); 7] = [
    ("#[path = \"x.rs\"] mod b;", "x.rs"),
    (
        "#[path = r\"deep/x.rs\"]\n#[cfg(x)]\npub(crate) mod b;",
        "deep/x.rs",
    ),
    ("#[cfg(x)] #[path = \"x.rs\"] mod b;", "x.rs"),
    ("#[cfg_attr(x, path = \"x.rs\")] mod b;", "x.rs"),
    (
        "#[cfg(any(test, feature = \"x\"))] #[path = \"../tests/x.rs\"] pub mod b;",
        "../tests/x.rs",
    ),
    ("#[cfg(any(test, x))] mod b;", "b.rs"),
    ("#[cfg(not(any(test, x)))] mod b;", "b/mod.rs"),
];

#[test]
fn a_cycle_is_found_through_a_module_wherever_its_file_lies() {
    for (declared, file) in ELSEWHERE {
        let lib = format!("mod a; {declared}");
        let file = format!("src/{file}");
        let files = [
            ("src/lib.rs", lib.as_str()),
            ("src/a.rs", "use crate::b;"),
            (file.as_str(), "mod inner { use crate::a; }"),
        ];
        let dir = tree(&files);
        let root = dir.path().join("src/lib.rs");
        assert_eq!(rounds_of(&root), [": a → b → a"], "{declared}");
    }
    // From an inline module, and with a file of its own below it.
    let files = [
        (
            "lib.rs",
            "mod m { mod a { use super::b; } #[path = \"x/y.rs\"] mod b; }",
        ),
        ("m/x/y.rs", "mod inner;"),
        ("m/x/inner.rs", "use super::super::a;"),
    ];
    assert_eq!(rounds(&files), ["m: a → b → a"]);
}

#[test]
fn a_cycle_through_methods_of_a_type_in_several_files_is_found() {
    let lib = "mod a; mod b; pub struct S<T>(T); pub use S as Renamed;";
    let a = "use super::S; impl<T> S<T> { pub fn f(&self) { self.g(1) } const A: u8 = 1; }";
    for b in [
        "use crate::S; impl<T: X> S<T> { pub fn g(&self) { self.f() } }",
        "impl<T> super::S<T> where T: Fn() -> u8 { pub fn g(&self) { self.f::<u8>() } }",
        "impl crate::Renamed<u8> { pub fn g(&self) { let f = Self::f; } }",
        "use super::*; impl S<u8> { fn g(&self) { if Self::A == 1 {} } }",
        "use super::S; impl S<u8> { fn g(&self) {} } impl Clone for S<u8> \
         { fn clone(&self) { self.f() } }",
    ] {
        let files = [("lib.rs", lib), ("a.rs", a), ("b.rs", b)];
        assert_eq!(rounds(&files), [": a → b → a"], "{b}");
    }
    for b in [
        // Another type, a method of its own, a value that is not `self`, a trait's method.
        "struct S; impl S { fn g(&self) { self.f() } }",
        "use super::S; impl S<u8> { fn g(&self) { self.f() } fn f(&self) {} }",
        "use super::S; impl S<u8> { fn g(&self) { other.f() } }",
        "use super::S; impl S<u8> { fn g(&self) { self.h() } }",
        "use super::S; impl S<u8> { fn g(&self) { self.f = 1; } }",
    ] {
        let files = [("lib.rs", lib), ("a.rs", a), ("b.rs", b)];
        assert_eq!(rounds(&files), [""; 0], "{b}");
    }
}

#[test]
fn texts_differ_in_what_is_compiled_for_more_than_tests() {
    let text = "fn f() { a } // b\n#[cfg(test)] mod tests { c }";
    for (from, to, is_different) in [
        ("{ a }", "{ d }", true),
        ("// b", "// d", false),
        ("{ c }", "{ d }", false),
        ("test)", "loom)", true),
    ] {
        assert_eq!(
            differ(text, &text.replace(from, to)),
            is_different,
            "{from}"
        );
    }
}

#[test]
fn names_of_functions_are_found_in_sources_and_tests() {
    let dir = tree(&[
        ("src/lib.rs", "// fn a() {}\npub(crate) fn b<T>() {}"),
        ("tests/t.rs", "#[test]\nfn c() {}"),
    ]);
    let found = functions(dir.path()).expect("the sources are there");
    assert_eq!(found, BTreeSet::from(["b", "c"].map(String::from)));
}

#[test]
fn files_of_a_crate_are_those_that_are_not_of_tests_alone() {
    let dir = tree(&[
        (
            "lib.rs",
            "mod a; #[cfg(test)] mod tests; #[cfg(all(test, loom))] #[path = \"m.rs\"] mod model;",
        ),
        ("a/mod.rs", "#[cfg(loom)] mod b;"),
        ("a/b.rs", ""),
        ("tests.rs", ""),
        ("m.rs", ""),
    ]);
    let found = files(&dir.path().join("lib.rs")).expect("a crate");
    let files = ["a/b.rs", "a/mod.rs", "lib.rs"].map(|file| dir.path().join(file));
    assert_eq!(found, BTreeSet::from(files));
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

/// Names of a file in a source: what is written in `a/tests/t.rs`, and the file.
const NAMED: [(&str, &str); 12] = [
    ("#[path = \"../own.rs\"]\nmod own;", "a/own.rs"),
    ("#[path = \"x/../y.rs\"]\nmod y;", "a/tests/y.rs"),
    (
        "const TEXT: &str = include_str!(\"../data.txt\");",
        "a/data.txt",
    ),
    (
        "// #[path = \"../../b/x.rs\"]\nconst X: &str = \"#[path = \\\"../../b/x.rs\\\"]\";",
        "",
    ),
    (
        "include!(concat!(env!(\"OUT_DIR\"), \"/../../b/x.rs\"));",
        "",
    ),
    (
        "    #[path = \"../../b/src/theirs.rs\"]\nmod theirs;",
        "b/src/theirs.rs",
    ),
    (
        "#[cfg(x)] #[path = \"../../b/x.rs\"] pub(crate) mod x;",
        "b/x.rs",
    ),
    (
        "#[cfg_attr(not(x), path = \"../../b/x.rs\")] mod x;",
        "b/x.rs",
    ),
    ("mod m { include!{\"../../b/x.rs\"} }", "b/x.rs"),
    (
        "global_asm!(include_str!(r\"../../b/x.s\"), options(raw));",
        "b/x.s",
    ),
    (
        "static X: &[u8] = include_bytes!(concat!(\"../../\", \"b/x\"));",
        "b/x",
    ),
    (
        "#![doc = include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/../b/x.md\"))]",
        "b/x.md",
    ),
];

#[test]
fn each_file_of_another_package_that_a_source_names_is_found() {
    for (source, to) in NAMED {
        let dir = tree(&[
            ("a/tests/t.rs", source),
            ("a/target/t.rs", "include!(\"/x\");"),
        ]);
        let folders = ["a", "b"].map(|folder| dir.path().join(folder));
        let found = foreign_paths(&folders[0], &folders).expect("the sources are there");
        match to.starts_with("b/") {
            true => assert_eq!(
                found,
                [(folders[0].join("tests/t.rs"), dir.path().join(to))],
                "{source}"
            ),
            false => assert_eq!(found, [], "{source}"),
        }
    }
}

#[test]
fn a_package_in_the_folder_of_another_is_not_that_one() {
    let dir = tree(&[
        (
            "lab/src/lib.rs",
            "include!(\"../harness/src/x.rs\"); include!(\"own.rs\");",
        ),
        (
            "lab/harness/src/lib.rs",
            "include!(\"own.rs\"); include!(\"../../src/y.rs\");",
        ),
    ]);
    let folders = ["lab", "lab/harness"].map(|folder| dir.path().join(folder));
    for (folder, [from, to]) in folders.iter().zip([
        ["lab/src/lib.rs", "lab/harness/src/x.rs"],
        ["lab/harness/src/lib.rs", "lab/src/y.rs"],
    ]) {
        let found = foreign_paths(folder, &folders).expect("the sources are there");
        assert_eq!(found, [(dir.path().join(from), dir.path().join(to))]);
    }
    assert!(is_in(&folders[1].join("x.rs"), &folders[1], &folders));
    assert!(!is_in(&folders[1].join("x.rs"), &folders[0], &folders));
    assert!(!is_in(&dir.path().join("x.rs"), &folders[0], &folders));
}

#[test]
fn a_source_is_no_stray_if_a_path_leads_to_it() {
    let dir = tree(&[
        ("lib.rs", "mod a; #[path = \"x.rs\"] mod b;"),
        ("a.rs", ""),
        ("x.rs", ""),
        ("b.rs", "mod lonely;"),
        ("left.rs", ""),
    ]);
    let found = strays(dir.path(), &[dir.path().join("lib.rs")]).expect("the sources are there");
    assert_eq!(found, [dir.path().join("left.rs")]);
}
