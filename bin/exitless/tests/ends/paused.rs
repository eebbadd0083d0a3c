//! A guest with less memory than it uses, whose swap store fails once or is full: it is paused with the reason, goes on when the limit
//! is written or the store has grown, finds all that it stored, and ends; or it is ended while it is paused.

use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::program::{Program, has_kvm, run, until};
use spawned::guest::Steps;

/// 24 MiB of the guest's memory, of which 17 may be there.
const PAGES: std::ops::Range<u32> = 0x400..0x1c00;

/// What a page holds: no zeroes.
fn byte(page: u32) -> u8 {
    (page * 151 % 255) as u8 + 1
}

struct Machine {
    dir: TempDir,
    program: Program,
}

impl Machine {
    /// Up to its pause. `None`, said, where there is no such machine.
    fn paused(store: &str) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let mut steps = Steps::default();
        for page in PAGES {
            steps = steps.store(page << 12, byte(page).into());
        }
        for page in PAGES {
            steps = steps.wait_for_byte(page << 12, byte(page));
        }
        let dir = TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut kernel = fs::File::create(path("kernel")).unwrap();
        kernel.write_all(&steps.power_off().kernel()).unwrap();
        let mut command = run(&path("kernel"));
        let (swap, size) = (path("swap"), path("size"));
        let swap = format!("path={},file={},{store}", swap.display(), size.display());
        command.args(["--resident", "17M", "--swap", &swap]);
        command.arg("--resident-file").arg(path("limit"));
        command.arg("--ledger").arg(path("ledger"));
        // A guest that is paused answers no power button.
        command.args(["--stop-timeout", "0"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut program = Program::start(command, true);
        until("a pause", || {
            program.said().contains("paused: ") || !program.is_alive()
        });
        if !program.is_alive() {
            let ended = program.end(Instant::now());
            let is_refused = ended.said.contains("--resident: ");
            assert!(is_refused, "{:?}: {}", ended.status, ended.said);
            println!("skipped: {}", ended.said);
            return None;
        }
        Some(Self { dir, program })
    }

    /// Of the ledger, what the pager has done.
    fn swap(dir: &TempDir) -> Value {
        let ledger = fs::read(dir.path().join("ledger")).unwrap();
        let ledger: Value = serde_json::from_slice(&ledger).unwrap();
        ledger["whole"]["swap"].clone()
    }
}

#[test]
fn a_guest_whose_store_failed_goes_on_with_all_that_it_had() {
    for (fault, reason) in [
        // The first of all requests is a write: there is nothing to read yet. The second may be
        // either.
        ("eio@1", "cannot be written: Input/output error"),
        ("enospc@3", "cannot be written: No space left on device"),
        ("corrupt@4", "does not hold what was there"),
    ] {
        let store = format!("misbehave={fault}");
        let Some(Machine { dir, program }) = Machine::paused(&store) else {
            return;
        };
        fs::write(dir.path().join("limit"), "18M").unwrap();
        program.wait_for("goes on");
        let ended = program.end(Instant::now());
        assert_eq!(ended.status, Some(0), "{fault}: {}", ended.said);
        let swap = Machine::swap(&dir);
        assert_eq!(swap["pauses"], 1, "{fault}: {swap}");
        let said = swap["pause_reason"].as_str().unwrap();
        assert!(said.contains(reason), "{fault}: {said}");
        assert!(ended.said.contains(said), "{fault}: {}", ended.said);
    }
}

#[test]
fn a_guest_whose_store_is_full_goes_on_when_it_has_grown() {
    let Some(Machine { dir, program }) = Machine::paused("size=2M") else {
        return;
    };
    let size = dir.path().join("size");
    fs::write(&size, "1M").unwrap();
    program.wait_for("2097152 bytes and can only grow, not to 1048576; nothing changes");
    fs::write(&size, "16M").unwrap();
    program.wait_for("goes on");
    let ended = program.end(Instant::now());
    assert_eq!(ended.status, Some(0), "{}", ended.said);
    for word in [
        "2 of 2 MiB of the store used, ",
        "swap: store 16 MiB now (was 2): ",
        "goes on: 1",
        " of 17 MiB in memory, ",
    ] {
        assert!(ended.said.contains(word), "no {word:?} in: {}", ended.said);
    }
    let swap = Machine::swap(&dir);
    assert_eq!(swap["pauses"], 1, "{swap}");
    let said = swap["pause_reason"].as_str().unwrap();
    for word in [
        " is full: write a higher limit into ",
        ", or write a larger size into ",
    ] {
        assert!(said.contains(word), "no {word:?} in: {said}");
    }
}

#[test]
fn sigterm_ends_a_machine_that_is_paused_since_its_store_failed() {
    let Some(Machine { dir, program }) = Machine::paused("misbehave=eio@1") else {
        return;
    };
    program.ends_by(Signal::TERM, 143);
    let swap = Machine::swap(&dir);
    let said = swap["pause_reason"].as_str().unwrap();
    assert!(said.contains("Input/output error"), "{said}");
}
