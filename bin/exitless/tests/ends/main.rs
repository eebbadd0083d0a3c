//! A machine, and a daemon, always end: with a console that nobody reads or feeds, with storage that the kernel holds, with
//! load, with front ends in any state, with a swap store that fails. It says no more than it should. Whole processes, signals, exit statuses.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod balloon;
mod console;
mod daemon;
mod guest;
mod ledger;
mod log;
mod panics;
mod paused;
mod program;
mod starts;
mod storage;
