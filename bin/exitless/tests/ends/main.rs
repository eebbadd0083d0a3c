//! A machine, and a daemon, always end: with a console that nobody reads or feeds, with storage
//! that the kernel holds, with load, with front ends in any state, with a swap store that fails,
//! with guests that hear their power button or do not, or reset. It says no more than it should.
//! Whole processes, signals, exit statuses.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod balloon;
mod button;
mod console;
mod daemon;
mod ledger;
mod log;
mod paused;
mod program;
mod reboot;
mod starts;
mod storage;
mod terminal;
