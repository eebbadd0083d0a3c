//! Devices of the emulated host that are assigned to guests: data, memory pinned for them, DMA that
//! no mapping allows, and the ends of a run.
//!
//! A start of the lab takes half a minute, and a guest's a third of that. `make test` has one of
//! each, with `EXITLESS_LAB=1`; all others are ignored there, and run by `make soak`. The programs
//! have to be built first (`make build`).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod ends;
mod modes;
mod native;
mod others;
mod overcommit;
mod policies;
mod refusals;
