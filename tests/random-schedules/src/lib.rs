//! Models with more cores and longer histories than loom can explore: the threads of a test run
//! under randomly chosen schedules.
//!
//! This crate is empty without `--cfg shuttle`. The module `explore` describes how it works and
//! what it cannot detect.
#![forbid(unsafe_code)]

#[cfg(shuttle)]
mod explore;
#[cfg(shuttle)]
pub use explore::{any, fail, finds, has_failed, holds, point, thread};
