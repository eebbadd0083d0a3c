//! Whole-system runs: a stock guest started by `exitless run`, here or in the lab, and what came of it.
//!
//! `demo` and `selftest` say *what* to run; this module knows *where* ([`host`], [`native`]), *how* ([`guest`]),
//! and what both run alike ([`workloads`]).

pub mod daemon;
pub mod guest;
pub mod host;
mod native;
pub mod workloads;
