//! The program as `make bench-dma` runs it, in its quick mode: every key is there, plots and page
//! are written.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use report::Object;

/// Whether the program accepts the arguments, and what it says.
fn outcome(directory: &Path, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_dma-bench"))
        .env_remove("EXITLESS_LINUX_IOVA")
        .args(["--quick", "--report"])
        .arg(directory.join("dma.json"))
        .args(arguments)
        .output()
        .expect("the program starts");
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

fn run(directory: &Path, more: &[&str]) -> String {
    let (is_ok, said) = outcome(directory, more);
    assert!(is_ok, "{said}");
    said
}

#[test]
fn a_loop_is_run_and_nothing_else() {
    let directory = tempfile::tempdir().expect("a directory");
    for arguments in [
        &["--loop", "stray_w256"][..],
        &["--loop", "stray_w256", "--only", "alloc"],
    ] {
        let (is_ok, said) = outcome(directory.path(), arguments);
        assert!(is_ok, "{arguments:?}: {said}");
        let figures = Object::read(&directory.path().join("dma.json")).expect("an object");
        assert!(figures.get("stray_w256_chunk_1thr_ns").is_some(), "{said}");
        for of_others in [
            "a1_chunk_1thr_ns",
            "p256_alone_lock_free_1thr_ns",
            "leaf_tables_c1",
        ] {
            let figure = figures.get(of_others);
            assert_eq!(figure, None, "{arguments:?}: {of_others}");
        }
    }
}

#[test]
fn a_selection_that_leaves_nothing_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    for (arguments, word) in [
        (&["--loop", "stray"][..], "stray_w256"),
        (&["--only", "allocs"], "alloc, table"),
        (
            &["--only", "table", "--loop", "a1"],
            "the section \"alloc\"",
        ),
    ] {
        let (is_ok, said) = outcome(directory.path(), arguments);
        assert!(!is_ok && said.contains(word), "{arguments:?}: {said}");
    }
}

#[test]
fn a_quick_run_writes_figures_plots_and_a_page() {
    let directory = env::temp_dir().join(format!("dma-bench-{}", std::process::id()));
    let sections = ["table", "two", "map", "memory", "model"];
    let only: Vec<_> = sections.iter().flat_map(|name| ["--only", name]).collect();
    let text = run(&directory, &only);
    assert!(text.contains("floor"), "{text}");

    let figures = Object::read(&directory.join("dma.json")).expect("an object");
    for key in ["machine", "kernel", "mode", "commit"] {
        assert!(!figures.text(key).is_empty(), "{key}");
    }
    for key in [
        "p256_alone_lock_free_1thr_ns",
        "map_unmap_2thr_vs_separate",
        "combining_true_costs_vs_strict",
        "mu2m_deferred_reclaiming_1thr_ns",
        "leaf_tables_c1",
        "tables_after_park_512k",
    ] {
        assert!(figures.get(key).is_some_and(|value| value > 0.0), "{key}");
    }
    // Not measured, and says so; void without Linux's code, which the test runs without.
    for key in ["linux_a1_ratio", "map_unmap_linux_ratio"] {
        assert!(
            figures.keys().contains_key(key) && figures.get(key).is_none(),
            "{key}"
        );
    }
    assert!(directory.join("dma/tables.svg").exists());

    let page = directory.join("page.md");
    let again = ["--again", "--docs", page.to_str().expect("a path in UTF-8")];
    run(&directory, &again);
    let page = fs::read_to_string(&page).expect("the page");
    assert!(page.contains("not measured") && page.contains("## Page tables"));
    assert!(page.contains("| void |") && page.contains("## Beside Linux"));
    fs::remove_dir_all(&directory).expect("removed");
}
