//! Memory that a device cannot address, through memory that it can.

use address::PhysAddr;

use super::{Direction, Segment};

/// A pool of low memory and the copies to and from it. Used where there is no translation (`Policy::OFF`) and the
/// memory lies above what the device addresses; with translation, the IOVA is what has to be low.
pub trait Bounce: Send + Sync {
    /// Memory at or below byte `last` that stands for `segment`, filled from it where the device will read.
    /// `None`: there is none.
    fn bounce(&self, segment: Segment, last: u64, direction: Direction) -> Option<PhysAddr>;

    /// Ends what [`bounce`](Self::bounce) began for `len` bytes at `at`: copied back where the device wrote.
    /// `false`: that was no bounced memory, or not so much of it.
    fn unbounce(&self, at: PhysAddr, len: u64) -> bool;
}
