//! The block device driven as a guest would, on memory and files of the test's own.

mod basic;
mod faults;
mod flight;
mod held;
mod parts;
mod rounds;
mod slow;
mod stalled;
pub(crate) mod support;
mod waits;
