//! A selection that selects nothing is refused, and what there is is named; so is a report that
//! cannot be written. Nothing is started.

use std::path::Path;

use spawned::short::{self, RunResult};

fn run(folder: &Path, args: &[&str]) -> RunResult {
    short::run(env!("CARGO_BIN_EXE_exitless-lab"), folder, args)
}

#[test]
fn an_empty_selection_fails_and_lists_the_choices() {
    let folder = tempfile::tempdir().unwrap();
    for (args, says) in [
        (
            &["selftest", "--only", "nosuchcase"] as &[&str],
            "client: qemu.sh split-1",
        ),
        (&["selftest", "--only", "nosuchcase", "--list"], "there are"),
        (
            &["selftest", "--soak", "--only", "nosuchcase"],
            "forced sleeps natively",
        ),
        (
            &["selftest", "--debian", "--only", "nosuchcase"],
            "there are",
        ),
        (
            &["selftest", "--episodes", "3", "--only", "nosuchcase"],
            "there are",
        ),
        (&["selftest", "--episodes", "0"], "0"),
        (&["eli", "--mode", "nosuchmode"], "baseline"),
        (
            &["eli", "--attacks", "--attack", "nosuchattack"],
            "e2shadow",
        ),
        (&["eli", "--attack", "e3"], "--attacks"),
        (&["eli", "--mode", "eli", "--soak"], "--soak"),
        (&["assign-lab", "--only", "nosuchpart"], "matrix"),
        (&["swap-lab", "--only", "nosuchway"], "baseline"),
        (&["swap-figures", "--only", "nosuchsection"], "sweep"),
        (
            &["swap-figures", "--only", "tracked", "--ways", "baseline"],
            "select nothing",
        ),
        (
            &["swap-figures", "--only", "phased", "--ways", "stale"],
            "select nothing",
        ),
        (&["serve-lab", "--guests", "0"], "1..=7"),
        (&["serve-net-lab", "--guests", "8"], "1..=7"),
        (&["serve-net-lab", "--again"], "--docs"),
        (&["payload", "--mode", "nosuchmode"], "trap"),
        (
            &["man", "nosuchcommand"],
            "there is no subcommand \"nosuchcommand\"",
        ),
        (&["completions", "nosuchshell"], "bash"),
    ] {
        let ended = run(folder.path(), args);
        assert_eq!(ended.status, Some(2), "{args:?}: {ended:?}");
        assert!(ended.error.contains(says), "{args:?}: {ended:?}");
    }
    // What selects something lists it.
    let ended = run(folder.path(), &["selftest", "--only", "shared", "--list"]);
    assert_eq!(ended.status, Some(0), "{ended:?}");
    assert!(
        ended.output.lines().count() > 0
            && ended.output.lines().all(|line| line.contains("shared"))
    );
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    for command in [
        "assign-lab",
        "demo",
        "eli",
        "serve-lab",
        "serve-net-lab",
        "swap-lab",
        "swap-figures",
    ] {
        let ended = run(folder.path(), &[command, "--report", "/dev/null/x"]);
        assert_eq!(ended.status, Some(2), "{command}: {ended:?}");
        assert!(ended.error.contains("--report /dev/null/x"), "{ended:?}");
        assert_eq!(ended.error.lines().count(), 1, "{ended:?}");
    }
}
