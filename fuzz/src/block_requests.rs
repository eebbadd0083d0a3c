//! Block requests: arbitrary chains, headers and data in a small guest memory.
//!
//! The first byte of the input chooses between two ways to look.
//!
//! **Step by step** (`steps`): a disk in memory, a split ring, one chain per visit, and a model
//! (`model`) that reads the same memory by the specification and says what every byte of memory and
//! disk must be afterwards.
//!
//! **In flight** (`flight`): a disk whose operations end when and how the input says, either ring
//! layout, and a driver that stores between the device's accesses. Every operation must lie inside
//! the disk and match the protocol of [`BlockIo`](vio::blk::BlockIo); no lease may be left; as much
//! is returned as was taken.

mod flight;
mod irq;
mod model;
mod seeds;
mod steps;

pub use seeds::seeds;

use crate::Input;

/// Guest memory in bytes, from address 0: four pages.
const MEMORY: usize = 0x4000;

/// The body.
///
/// # Panics
/// If the device does anything that the model does not.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    if input.u8() & 1 == 0 {
        steps::run(input);
    } else {
        flight::run(input);
    }
}
