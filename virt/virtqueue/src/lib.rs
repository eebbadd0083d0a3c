//! Virtqueues (virtio 1.2 §2.7), device side, without std or a heap.
//!
//! **Scope.** The parts of a queue that depend on the specification and on nothing else, so that a
//! program on an operating system (`vio`) and one on none (`elvis`) walk a driver's rings by the
//! same code. Nothing in a ring is trusted: it is read once, checked, and used.
//!
//! * [`chain`]: descriptors, and the walk of a chain, over any list that takes its segments.
//! * [`split`]: offsets and lengths of the split layout, and the two decisions about its indices.
//! * [`config`]: a queue as its driver set it up; feature bits.
//! * [`polled`]: a whole split queue of a device that ends each request before it takes the next,
//!   over [`Memory`].
//!
//! **Bounds.** A walk reads at most as many descriptors as its table has; a longer chain is a
//! [`Violation`]. Nothing is read behind the lengths of [`split::Layout`], which the memory checks.
//!
//! **Left out.** The packed layout, indirect tables, journals and prefetching, which are `vio`'s.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod chain;
pub mod config;
pub mod polled;
pub mod split;

pub use chain::{RawDescriptor, Segment, SegmentList, Sum, Violation};
pub use config::{QueueConfig, feature};
pub use polled::{FixedChain, Memory, OutOfReach, PolledQueue, QueueStop};
