//! Models of more cores, and longer ones, than loom can explore: a test's threads under schedules
//! that are chosen at random.
//!
//! Everything here is there under `--cfg shuttle` only; `explore` says how it works and what it
//! cannot see.
#![forbid(unsafe_code)]

#[cfg(shuttle)]
mod explore;
#[cfg(shuttle)]
pub use explore::{any, fail, finds, has_failed, holds, point, thread};
