//! Report of a measuring program: the machine, the figures, their spread, and plots of them.
//!
//! * [`host`]: which machine, kernel and commit; pinning; the round trip of a cache line between
//!   two CPUs.
//! * [`clock`]: nanoseconds for less than a system call.
//! * [`numbers`]: medians and spreads, and numbers as people read them.
//! * [`object`]: one flat JSON object per run; tables, plots and result pages are made from it.
//! * [`svg`]: plots drawn by hand.
//!
//! **Left out:** what is measured, and how: that is each program's own.
#![deny(unsafe_code)]

pub mod clock;
pub mod host;
pub mod numbers;
pub mod object;
pub mod svg;

pub use host::Host;
pub use numbers::{Measured, median, short};
pub use object::{Object, round};
