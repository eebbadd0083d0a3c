//! The same tests for any allocator, of this crate or of another: each takes a list of
//! constructors.
//!
//! * [`phases`]: one thread, against a map of what is allocated.
//! * [`threads`]: threads that free each other's ranges, with a bitmap that shows overlaps.
//! * `schedules` (with `--cfg shuttle`): the same under random schedules, where each step may be
//!   the last of a thread.

pub mod phases;
#[cfg(shuttle)]
pub mod schedules;
pub mod threads;
