//! Storage that misbehaves, at random: `exitless serve`, a checked front end, and a file that the
//! kernel holds, delays, fails or has no room for (`held-fs`), while the front end stops, resets or
//! goes, and the daemon receives a signal to end, or two, or is killed.
//!
//! An episode holds if every acknowledged write is read afterwards, once and in order; if only
//! those requests failed that the storage failed; and if each requested end came within
//! [`episode::BOUND`] of the moment at which the storage allowed it. While the kernel holds the I/O
//! there is no other bound: the daemon cannot take a write back from it.
//!
//! `EPISODES` (200) of them run, from `EPISODE_SEED` (1) on; a failure names its seed, and
//! `EPISODES=1 EPISODE_SEED=n` repeats it. Skipped where no FUSE file system is to be had.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod episode;
mod plan;
#[path = "../ends/program.rs"]
#[allow(dead_code, reason = "shared with the tests of ends")]
mod program;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use held_fs::HeldFs;

use plan::Plan;

/// At a time: they wait more than they work.
const BESIDE: usize = 8;

fn number(name: &str, otherwise: u64) -> u64 {
    let Ok(text) = std::env::var(name) else {
        return otherwise;
    };
    text.parse()
        .unwrap_or_else(|_| panic!("{name} is a number, not {text:?}"))
}

#[test]
fn storage_that_misbehaves_loses_and_doubles_nothing_and_hangs_nobody() {
    if HeldFs::mount_or_skip().is_none() {
        return;
    }
    let (count, first) = (number("EPISODES", 200), number("EPISODE_SEED", 1));
    let next = AtomicU64::new(first);
    let failures = Mutex::new(Vec::new());
    let met = Mutex::new(BTreeMap::<String, u32>::new());
    std::thread::scope(|scope| {
        for _ in 0..BESIDE.min(count as usize) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    let plan = Plan::new(seed);
                    match catch_unwind(AssertUnwindSafe(|| episode::run(&plan))) {
                        Ok(()) => {
                            let mut met = met.lock().unwrap();
                            for part in plan.parts() {
                                *met.entry(part).or_default() += 1;
                            }
                        }
                        Err(_) => failures.lock().unwrap().push(seed),
                    }
                }
            });
        }
    });
    println!("{count} episodes: {:?}", met.into_inner().unwrap());
    let failures = failures.into_inner().unwrap();
    let plans: Vec<_> = failures.iter().map(|&seed| Plan::new(seed)).collect();
    assert!(failures.is_empty(), "EPISODE_SEED={failures:?}: {plans:#?}");
}
