//! The cache lines that cores share: atomics, a spinning lock, and padding.
//!
//! `iova` and `dma-map` take every atomic and every lock from here, so that one switch replaces them all:
//! * `--cfg loom`: loom's, which try the orders in which threads may see each other;
//! * otherwise those of `core`, and the lock of the crate `spin`.
//!
//! Memory that one core owns takes part in neither: it is plain, or a relaxed load and store of its owner.
#![no_std]
#![forbid(unsafe_code)]

mod lock;
mod padded;

#[cfg(not(loom))]
pub use core::{
    hint::spin_loop,
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        fence,
    },
};
#[cfg(loom)]
pub use loom::{
    hint::spin_loop,
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        fence,
    },
};

pub use lock::{Guard, Lock};
pub use padded::CachePadded;
