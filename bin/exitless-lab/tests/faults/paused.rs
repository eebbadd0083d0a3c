//! A guest with less memory than it uses, whose swap store fails once: it is paused with the
//! reason, goes on when trying again has succeeded, finds all that it stored, and ends; or it is
//! ended while it is paused.

use std::fs;
use std::time::Instant;

use rustix::process::Signal;
use spawned::paused::Machine;

use crate::program::LAB;

#[test]
fn a_guest_whose_store_failed_goes_on_with_all_that_it_had() {
    for (fault, reason) in [
        // The first of all requests is a write: there is nothing to read yet. The second may be
        // either.
        ("eio@1", "cannot be written: Input/output error"),
        ("enospc@3", "cannot be written: No space left on device"),
        ("corrupt@4", "does not hold what was there"),
    ] {
        let option = format!("swap:{fault}");
        let paused = Machine::paused(LAB, "", &["--fault", &option]);
        let Some(Machine { dir, program }) = paused else {
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
fn sigterm_ends_a_machine_that_is_paused_since_its_store_failed() {
    let Some(Machine { dir, program }) = Machine::paused(LAB, "", &["--fault", "swap:eio@1"])
    else {
        return;
    };
    program.ends_by(Signal::TERM, 143);
    let swap = Machine::swap(&dir);
    let said = swap["pause_reason"].as_str().unwrap();
    assert!(said.contains("Input/output error"), "{said}");
}
