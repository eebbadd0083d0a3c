//! `exitless run --balloon` and a guest that gives it pages: they leave the host's memory, and the
//! ledger counts them.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use tempfile::{NamedTempFile, TempDir};

use crate::program::{Program, exitless, has_kvm};
use spawned::guest::Steps;

/// The ledger's whole run.
fn whole(dir: &TempDir, args: &[&str], iommu: &str, file: Option<&str>) -> serde_json::Value {
    let mut kernel = NamedTempFile::new().unwrap();
    let steps = match iommu {
        "none" => Steps::default(),
        _ => Steps::default().confine_all(),
    };
    let steps = steps.inflate(0x1100).power_off();
    kernel.write_all(&steps.kernel()).unwrap();
    let ledger = dir.path().join("ledger.json");
    let mut command = exitless(&["run", "--any-kvm", "--memory", "128M", "--iommu", iommu]);
    command
        .arg("--kernel")
        .arg(kernel.path())
        .args(["--balloon-period", "1"])
        .args(args)
        .args(["--ledger", ledger.to_str().unwrap()])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let program = Program::start(command, true);
    if let Some(text) = file {
        // Until then the guest waits.
        fs::write(dir.path().join("target"), text).unwrap();
    }
    let ended = program.end(std::time::Instant::now());
    assert_eq!(ended.status, Some(0), "{}", ended.said);
    assert!(
        ended.said.contains("balloon's target, pages"),
        "{}",
        ended.said
    );
    let ledger: serde_json::Value = serde_json::from_slice(&fs::read(ledger).unwrap()).unwrap();
    ledger["whole"].clone()
}

fn check(whole: &serde_json::Value) {
    let found = &whole["balloon"];
    let figures = [
        ("target", 0x1100),
        ("actual", 2),
        ("inflated", 2),
        ("deflated", 0),
        ("outside", 1),
    ];
    for (key, value) in figures {
        assert_eq!(found[key], value, "{key}: {found}");
    }
    // This guest says nothing of its memory.
    assert_eq!(found["free"], serde_json::Value::Null);
}

#[test]
fn pages_of_the_balloon_leave_memory_with_and_without_an_iommu() {
    if !has_kvm() {
        return;
    }
    // The balloon's addresses are guest-physical, whatever the machine's unit says.
    for iommu in ["none", "vtd"] {
        let dir = TempDir::new().unwrap();
        let args = ["--balloon", "target=17M,reporting=off"];
        check(&whole(&dir, &args, iommu, None));
    }
}

#[test]
fn a_target_comes_from_a_file() {
    if !has_kvm() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("target");
    let spec = format!("file={}", file.display());
    check(&whole(&dir, &["--balloon", &spec], "none", Some("17M")));
}

/// Returns the finding of `exitless doctor` about `--resident`, unless paging works here.
fn lacks_for_paging() -> Option<String> {
    let output = exitless(&["doctor", "--json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = &report["findings"]["resident"];
    (finding["state"] != "good").then(|| finding["value"].to_string())
}

#[test]
fn pages_of_the_balloon_leave_the_pager() {
    if let Some(what) = lacks_for_paging() {
        return println!("skipped: {what}");
    }
    if !has_kvm() {
        return;
    }
    for iommu in ["none", "vtd"] {
        let dir = TempDir::new().unwrap();
        let swap = format!("path={},size=64M", dir.path().join("swap").display());
        let args = [
            "--resident",
            "32M",
            "--swap",
            &swap,
            "--balloon",
            "target=17M",
        ];
        let whole = whole(&dir, &args, iommu, None);
        check(&whole);
        assert_eq!(whole["swap"]["discarded"], 2, "{whole}");
        assert_eq!(whole["swap"]["swapped_out"], 0, "{whole}");
    }
}
