//! A guest with less memory than it uses, whose swap store is full: it is paused with the reason,
//! goes on when the store has grown, finds all that it stored, and ends.

use std::fs;
use std::time::Instant;

use spawned::paused::Machine;

use crate::program::EXITLESS;

#[test]
fn a_guest_whose_store_is_full_goes_on_when_it_has_grown() {
    let Some(Machine { dir, program }) = Machine::paused(EXITLESS, "size=2M", &[]) else {
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
