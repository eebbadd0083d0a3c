//! Dependencies, checked: between the workspace's crates by Cargo's metadata, between a crate's
//! modules by its sources.
//!
//! * [`mod@workspace`]: crates and their dependencies.
//! * [`mod@modules`]: the modules of a crate, at every depth, and which of them names which;
//!   `paths`: what such names are.
//! * [`mod@known`]: cycles between modules that are known.
//! * [`mod@layers`]: the order of the folders, and what goes against it.
//! * [`mod@graph`]: which of them reach themselves.
//! * `tokens`: Rust sources without comments, literals and tests. It knows no grammar, only what
//!   the others look for.
#![forbid(unsafe_code)]

pub mod graph;
pub mod known;
pub mod layers;
pub mod modules;
mod paths;
mod tokens;
pub mod workspace;
