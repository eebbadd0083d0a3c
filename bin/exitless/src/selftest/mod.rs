//! `exitless selftest`: whole guests and long checks of this build on this host.
//!
//! * [`cases`]: what is booted, and what must come of it.
//! * [`suite`]: runs cases, counts, and resumes a soak.
//! * [`payload`]: the native forced-sleep soak, which needs no guest kernel.

mod cases;
pub mod payload;
mod suite;

pub use suite::{SelftestArgs, main};
