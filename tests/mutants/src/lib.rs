//! Mistakes made in a copy of the tree, each of which a named test must find.
//!
//! A test that cannot fail proves nothing. A *mutant* is a file `tests/mutants/CRATE/NAME.patch`: a
//! head that names the mistake and the test that finds it ([`mutant`]), and a unified diff
//! ([`patch`]). Product sources know nothing of it.
//!
//! ```text
//! tracked files ── by content ──▶ target/mutants/CFG/tree     a copy per cfg: none, loom, shuttle
//!                                   │ patch applied
//!                                   ├ cargo test --no-run ──▶ target/mutants/CFG/target, kept
//!                                   ├ each named test alone, with a time limit
//!                                   │ patch undone
//!                                   ▼
//!                                 verdict: red, or green where `expect: green`, or a failure
//! ```
//! *Red* is the named test, listed by libtest as FAILED, with the text of `says` in what it
//! printed. A patch that does not apply, code that does not compile, no such test, a time-out, a
//! signal, or a failure of another kind is a failure of the run.
//!
//! Files of the copy are written only where their content differs from the tree's, and always with
//! the time of writing: cargo rebuilds what was touched, and never takes a mutated build for a
//! sound one. An interrupted run leaves a patched copy, which the next one compares and mends.
//!
//! That each test passes without its mistake is checked by `make test` and `make check`. A test
//! that fails in the copy for other reasons does not print the text of `says`, and is no red.
//!
//! **Left out**: mutants made up by a program (`cargo-mutants`), which takes no edits of one's own
//! and knows no cfgs.
#![forbid(unsafe_code)]

pub mod cargo;
pub mod mutant;
pub mod patch;
pub mod record;
pub mod run;
pub mod sample;
pub mod tree;
