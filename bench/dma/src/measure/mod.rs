//! Timing: pinned threads, runs that take turns, the machine's own primitives beside them.
//!
//! One **run** starts its threads, each on a CPU of its own, releases them together at a barrier
//! and sets a flag after a fixed time, at which they stop; they read that flag every 1,024 pairs. A
//! pair is one allocation and one free, or one map and one unmap: both halves of the loop's
//! subject. A **figure** is the median of several runs, with their extremes. Figures that are
//! compared take turns, so that a machine that becomes slower does so for all of them; a **ratio**
//! is made in each turn, and is their median, with its extremes.
//!
//! One thread is timed by the processor time it used; two by the clock on the wall, since the time
//! that one waits for the other belongs to the figure. A run of two threads in which one of them
//! did not run all the time is repeated.

pub mod primitives;
pub mod threads;
pub mod turns;

pub use primitives::Primitives;
pub use seeded::Random;
pub use threads::{BATCH, Task, Tasks, run};
pub use turns::{Case, Outcome, Turns};
