//! Atomics, channels and parking of the sleeping protocol: all of them come from here, so that loom
//! can replace them (`RUSTFLAGS="--cfg loom"`).
//!
//! Used by [`gate`](crate::gate), [`mailbox`](crate::mailbox), [`park`](crate::park) and
//! [`reply`](crate::reply). Statistics and heartbeats take `std`'s atomics directly: they order
//! nothing, and modelling them would only multiply the states.

#[cfg(loom)]
pub(crate) use loom::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
        mpsc,
    },
    thread,
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
        mpsc,
    },
    thread,
};

/// A value alone on its pair of cache lines (128 bytes: the adjacent-line prefetcher fetches two).
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);
