//! The runtime with real threads and descriptors. One binary, since each would compile the runtime
//! anew.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod expected_work;
mod fleet;
mod forced_sleep;
mod group;
mod interruption;
mod runtime;
mod scheduling;
mod waiting;
