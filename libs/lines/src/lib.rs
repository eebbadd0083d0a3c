//! The cache lines that cores share: atomics, a spinning lock, and padding.
//!
//! `iova` and `dma-map` take every atomic and every lock from here, so that one switch replaces
//! them all:
//! * `--cfg loom`: loom's, which try the orders in which threads may see each other;
//! * `--cfg shuttle`: shuttle's, under which a test chooses at random who runs next (the crate
//!   `random-schedules`);
//! * the feature `probe`: ones that count which accesses need another core's cache line (the crate
//!   `line-probe`);
//! * the feature `hooks`: the usual ones, which call a test's hook where a thread takes a lock or
//!   waits (the module `hooks`);
//! * otherwise those of `core`, and the lock of the crate `spin`.
//!
//! With them go [fences](Fences) of which one side pays for both.
//!
//! Memory that one core owns takes part in none of them: it is plain, or a relaxed load and store
//! of its owner.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(all(feature = "hooks", not(any(feature = "probe", loom, shuttle))))]
extern crate std;

mod fences;
#[cfg(all(feature = "hooks", not(any(feature = "probe", loom, shuttle))))]
pub mod hooks;
#[cfg(any(loom, shuttle, not(feature = "probe")))]
mod lock;
mod padded;
mod spin;

#[cfg(not(any(feature = "probe", feature = "hooks", loom, shuttle)))]
pub use core::hint::spin_loop;
#[cfg(not(any(feature = "probe", loom, shuttle)))]
pub use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize,
};
#[cfg(not(any(loom, shuttle)))]
pub use core::sync::atomic::{Ordering, fence};
#[cfg(loom)]
pub use loom::{
    hint::spin_loop,
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        fence,
    },
};
#[cfg(shuttle)]
pub use shuttle::{
    hint::spin_loop,
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        fence,
    },
};

pub use fences::{Fences, NotFenced};
#[cfg(all(feature = "hooks", not(any(feature = "probe", loom, shuttle))))]
pub use hooks::spin_loop;
#[cfg(all(feature = "probe", not(any(loom, shuttle))))]
pub use line_probe::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Guard, Lock,
    spin_loop,
};
#[cfg(any(loom, shuttle, not(feature = "probe")))]
pub use lock::{Guard, Lock};
pub use padded::CachePadded;
pub use spin::Spin;
