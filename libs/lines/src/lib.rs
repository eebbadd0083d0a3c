//! The cache lines that cores share: atomics, a spinning lock, and padding.
//!
//! `iova` and `dma-map` take every atomic and every lock from here, so that one switch replaces them all:
//! * `--cfg loom`: loom's, which try the orders in which threads may see each other;
//! * the feature `probe`: ones that count which accesses need another core's cache line (the module `probe`);
//! * otherwise those of `core`, and the lock of the crate `spin`.
//!
//! Memory that one core owns takes part in neither: it is plain, or a relaxed load and store of its owner.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(all(feature = "probe", not(loom)))]
extern crate std;

#[cfg(any(loom, not(feature = "probe")))]
mod lock;
mod padded;
#[cfg(all(feature = "probe", not(loom)))]
pub mod probe;
mod spin;

#[cfg(all(not(feature = "probe"), not(loom)))]
pub use core::hint::spin_loop;
#[cfg(all(not(feature = "probe"), not(loom)))]
pub use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize,
};
#[cfg(not(loom))]
pub use core::sync::atomic::{Ordering, fence};
#[cfg(loom)]
pub use loom::{
    hint::spin_loop,
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        fence,
    },
};

#[cfg(any(loom, not(feature = "probe")))]
pub use lock::{Guard, Lock};
pub use padded::CachePadded;
#[cfg(all(feature = "probe", not(loom)))]
pub use probe::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Guard, Lock,
    spin_loop,
};
pub use spin::Spin;
