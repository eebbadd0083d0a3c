//! Programs as child processes of a test, and helpers that such tests share.
//!
//! - [`program`]: a program that runs until the test ends it, with signals and time limits.
//!   [`short`]: one that ends by itself.
//! - [`guest`]: guest kernels of twenty instructions, which run on any KVM.
//! - [`daemon`]: paths of a daemon's sockets and images. [`paused`]: starts a machine and waits
//!   until it is paused. [`files`]: disk images, and files that are accepted as kernels.
//!
//! The test names the program to start: `env!("CARGO_BIN_EXE_…")`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod daemon;
pub mod files;
pub mod guest;
pub mod paused;
pub mod program;
pub mod short;
