//! The driver of the unit tests: `fake-driver`, which does not know this crate, in its types.

pub use ::fake_driver::Buffer;
use ::fake_driver::{Descriptor, Position};

use crate::ring::{RawDescriptor, RingStart};
use crate::{Interrupt, QueueConfig};

pub type FakeDriver<M> = ::fake_driver::FakeDriver<M, QueueConfig>;
pub type FakePacked<M> = ::fake_driver::FakePacked<M, QueueConfig>;
pub type AnyDriver<M> = ::fake_driver::AnyDriver<M, QueueConfig>;

/// The bytes of a descriptor in memory.
pub trait ToBytes {
    fn to_bytes(self) -> [u8; 16];
}

impl ToBytes for RawDescriptor {
    fn to_bytes(self) -> [u8; 16] {
        Descriptor::from(self).to_bytes()
    }
}

impl From<Position> for RingStart {
    fn from(position: Position) -> Self {
        match position {
            Position::Split(idx) => Self::Split {
                next_avail: idx,
                next_used: idx,
                replay: Vec::new(),
            },
            Position::Packed(idx, wrap) => Self::Packed {
                avail: (idx, wrap),
                used: (idx, wrap),
                replay: Vec::new(),
            },
        }
    }
}

/// Interrupts, counted per queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountIrq {
    /// Interrupts of queue 0, 1, ….
    pub queues: Vec<u64>,
    /// Configuration-change interrupts.
    pub config: u64,
}

impl Interrupt for CountIrq {
    fn queue(&mut self, queue: u16) {
        let queue = usize::from(queue);
        if self.queues.len() <= queue {
            self.queues.resize(queue + 1, 0);
        }
        self.queues[queue] += 1;
    }

    fn config(&mut self) {
        self.config += 1;
    }
}

impl CountIrq {
    /// Interrupts of all queues.
    pub fn total(&self) -> u64 {
        self.queues.iter().sum()
    }
}
