//! Code shared by guest and host of a test: test patterns, checksums, self-describing blocks,
//! markers.
//!
//! The program `workload` (this crate's binary) runs inside guests; the host's side of a demo or
//! test links this library, so both sides compute the same data with the same code. No dependency
//! beyond `libc` and, for [`rogue`], the workspace's own `vfio` and `dma-map`; the binary is linked
//! statically, so it runs in any initramfs.
//!
//! Left out: any conclusion from measured time.
#![deny(unsafe_code)]

pub mod acked;
pub mod age;
mod area;
pub mod block;
pub mod button;
mod child;
pub mod collect;
pub mod compile;
pub mod compress;
mod console;
pub mod deep;
pub mod device;
pub mod driver;
pub mod echo;
mod end_event;
pub mod episodes;
pub mod function;
pub mod held;
pub mod marker;
mod memory;
pub mod mixed;
pub mod nic;
pub mod pattern;
pub mod peer;
pub mod phases;
pub mod rogue;
pub mod rr;
pub mod sequential;
pub mod stall;
pub mod stream;
pub mod verify;
pub mod web;

/// Size of a block in all block-device workloads, bytes.
pub const BLOCK: usize = 4096;
