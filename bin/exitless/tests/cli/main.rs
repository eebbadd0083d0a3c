//! The command line as its users meet it: what is refused and how, what `--check` says, examples
//! and manual pages, the log. Whole processes; no guest.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod check;
mod front_ends;
mod moved;
mod pages;
mod program;
mod settings;
