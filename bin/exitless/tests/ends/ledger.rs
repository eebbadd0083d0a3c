//! Effects of windows of the ledger that a guest marks.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;

use rustix::process::Signal;
use tempfile::{NamedTempFile, TempDir};

use crate::program::{Program, has_kvm, run};
use spawned::guest::Steps;

/// Runs a machine whose guest marks one window and waits. Returns the output at its end, and
/// whether tracepoints were set up meanwhile.
fn marked(ledger: Option<&Path>) -> (String, bool) {
    let mut kernel = NamedTempFile::new().unwrap();
    let steps = Steps::default().mark(1).mark(2).say(b'!');
    kernel.write_all(&steps.kernel()).unwrap();
    let mut command = run(kernel.path());
    command.args(["--stop-timeout", "0"]);
    if let Some(path) = ledger {
        command.arg("--ledger").arg(path);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut program = Program::start(command, true);
    let mut word = [0];
    File::from(program.output()).read_exact(&mut word).unwrap();
    let instance = format!("/sys/kernel/tracing/instances/exitless-{}", program.id());
    let is_traced = Path::new(&instance).exists();
    let ended = program.ends_by(Signal::TERM, 128 + Signal::TERM.as_raw());
    assert!(ended.said.contains("exit ledger: "), "{}", ended.said);
    (ended.said, is_traced)
}

#[test]
fn a_marker_without_a_ledger_sets_up_no_tracepoints() {
    if !has_kvm() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let ledger = dir.path().join("ledger.json");
    let (said, _) = marked(Some(&ledger));
    assert!(said.contains("window 1"), "{said}");
    // No ledger was asked for: the mark is ignored, and sets up nothing.
    let (said, is_traced) = marked(None);
    assert!(!said.contains("window 1") && !is_traced, "{said}");
}
