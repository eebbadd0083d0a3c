//! Virtqueues (virtio 1.2 §2.7, §2.8), device side.
//!
//! [`Ring`]: the interface of devices, over both layouts. [`chain`]: descriptors, checked once.
//! [`split`], [`packed`]: the two layouts. [`Journal`]: the record that a successor of a killed
//! process needs.

mod any;
mod area;
pub mod chain;
mod counter;
mod journal;
mod lookahead;
mod order;
pub mod packed;
mod parked;
pub(crate) mod prefetch;
mod single;
pub mod split;
mod table;
mod token;
mod watch;

pub use any::Ring;
pub use chain::{Buffers, Chain, RawDescriptor, Segment, Violation, write_row};
pub(crate) use chain::{read_row, slice};
#[cfg(test)]
pub(crate) use journal::FullJournal;
pub use journal::{Journal, JournalError, RingPosition, RingStart, StartError};
pub use lookahead::Lookahead;
pub use packed::PackedQueue;
pub(crate) use parked::wait_for_all;
pub use parked::{Parked, RETRY_NS, RingStats, RingStop};
pub use single::Single;
pub use split::SplitQueue;
pub use token::Token;
pub use watch::Watch;

#[cfg(test)]
mod tests;
