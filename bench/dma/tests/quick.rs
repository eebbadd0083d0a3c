//! The program as `make bench-dma` runs it, in its quick mode: every key is there, plots and page are written.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use report::Object;

fn run(directory: &Path, more: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_dma-bench"))
        .env_remove("EXITLESS_LINUX_IOVA")
        .args(["--quick", "--report"])
        .arg(directory.join("dma.json"))
        .args(more)
        .output()
        .expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    text
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
