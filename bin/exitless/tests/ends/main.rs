//! Ends of a machine and of a daemon: each ends in any state. Its console is neither read nor fed;
//! the kernel holds its storage; it has load; front ends are in any state; a swap store fails;
//! guests react to their power button or do not, or reset. Its messages are bounded. Whole
//! processes, signals, exit statuses.
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
