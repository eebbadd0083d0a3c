//! What depends on what: between the workspace's crates by Cargo's metadata, between a crate's modules by its sources.
//!
//! * [`mod@workspace`]: crates and their dependencies.
//! * [`mod@modules`]: the top-level modules of a crate and which of them names which.
//! * [`mod@graph`]: which of them reach themselves.
//! * `tokens`: Rust sources without comments, literals and tests. It knows no grammar, only what the others look for.
#![forbid(unsafe_code)]

pub mod graph;
pub mod modules;
mod tokens;
pub mod workspace;
