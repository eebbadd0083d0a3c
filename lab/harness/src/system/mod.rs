//! Whole-system runs: a stock guest started by `run` of one of the [`programs`], here or in the
//! lab, and its outcome.
//!
//! `demo` and `selftest` define the runs; this module has the hosts ([`host`], [`native`]), the
//! guests ([`guest`]), the workloads that both share ([`workloads`]), a guest that executes one
//! step after the other ([`steps`]), and storage with faults ([`storage`], [`file_system`]).

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
