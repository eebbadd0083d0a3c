//! How anything here is timed: pinned threads, runs that take turns, the machine's own primitives
//! beside them.
//!
//! One **run** starts its threads, each on a CPU of its own, lets them go at a barrier and tells
//! them to stop after a fixed time; they look at that flag every 1,024 pairs. A pair is one
//! allocation and one free, one map and one unmap: whatever the loop is about, both halves of it. A
//! **figure** is the median of several runs, with their extremes. Figures that are compared take
//! turns, so that a machine that becomes slower does so for all of them; a **ratio** is made in
//! each turn, and is their median, with its extremes.
//!
//! One thread is timed by the processor time it used; two by the clock on the wall, since what one
//! waits for the other belongs to the figure. A run of two threads in which one of them did not run
//! all the time is repeated.

pub mod primitives;
pub mod threads;
pub mod turns;

pub use primitives::Primitives;
pub use seeded::Random;
pub use threads::{BATCH, Task, Tasks, run};
pub use turns::{Case, Outcome, Turns};
