//! Whole-system runs: a stock guest started by `run` of one of the [`programs`], here or in the
//! lab, and what came of it.
//!
//! `demo` and `selftest` say *what* to run; this module knows *where* ([`host`], [`native`]), *how*
//! ([`guest`]), what both run alike ([`workloads`]), a guest that takes one step after the other
//! ([`steps`]), and storage that does what a test says ([`storage`], [`file_system`]).

pub mod daemon;
pub mod file_system;
pub mod group;
pub mod guest;
pub mod host;
pub mod late;
pub mod native;
pub mod programs;
pub mod squeezed;
pub mod steps;
pub mod storage;
pub mod tools;
pub mod workloads;
