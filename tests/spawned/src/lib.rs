//! Programs as children of a test, and the parts that such tests share.
//!
//! - [`program`]: one that goes on until the test ends it, with signals and limits. [`short`]: one
//!   that ends by itself.
//! - [`guest`]: kernels of twenty instructions, for machines of any KVM.
//! - [`daemon`]: where a daemon's sockets and images are. [`paused`]: a
//!   machine up to its pause. [`files`]: images, and files that pass for
//!   kernels.
//!
//! The test names the program to start: `env!("CARGO_BIN_EXE_…")`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod daemon;
pub mod files;
pub mod guest;
pub mod paused;
pub mod program;
pub mod short;
