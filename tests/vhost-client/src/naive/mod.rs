//! The device's side of rings, simple and obviously correct, with an inflight region or without
//! one: tests of the clients serve rings with it, as an oracle.
//!
//! A ring that makes no sense panics: the driver is a test's own.
#![expect(
    clippy::unwrap_used,
    reason = "only in tests, whose failure a panic is"
)]

mod packed;
mod split;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost_user::backend::{RingBase, RingConfig, RingLayout};
use vhost_user::inflight;

use crate::loopback::Guest;
use crate::memory::Memory;

use packed::Packed;
use split::Split;

/// The ring that `config` describes.
pub fn device(
    guest: &Guest,
    config: &RingConfig,
    features: u64,
    part: Option<Part>,
) -> Box<dyn Device> {
    match config.layout {
        RingLayout::Split => Box::new(Split::new(guest, config, features, part)),
        RingLayout::Packed => Box::new(Packed::new(guest, config, features, part)),
    }
}

/// A chain as the driver described it.
pub struct Chain {
    /// Head (split) or buffer identifier (packed).
    pub id: u16,
    /// Descriptors it takes in the ring.
    pub descs: u16,
    /// Slot of an inflight region.
    pub slot: Option<inflight::Slot>,
    /// Address, bytes, and whether the device writes.
    pub segments: Vec<(u64, u32, bool)>,
}

/// Operations of both kinds of ring.
pub trait Device: Send {
    /// The next chain that the driver made available.
    fn take(&mut self, guest: &Guest) -> Option<Chain>;
    /// Returns one, or with IN_ORDER a batch by its last.
    fn give(&mut self, guest: &Guest, chain: &Chain, descs: u16, count: u16, len: u32);
    /// Asks for a kick; whether there is still nothing.
    fn arm(&mut self, guest: &Guest) -> bool;
    /// Asks for no more kicks.
    fn disarm(&mut self, guest: &Guest);
    /// Whether the driver wants a call for what was given since it was asked last.
    fn wants_call(&mut self, guest: &Guest) -> bool;
    /// Returns the position of the ring.
    fn base(&self) -> RingBase;
    /// Requests that a predecessor left.
    fn replay(&mut self) -> Vec<Chain>;
}

/// An inflight region's part for one queue.
#[derive(Clone)]
pub struct Part {
    /// The region.
    pub memory: Arc<Memory>,
    /// Address of the part.
    pub at: usize,
    /// Its bytes.
    pub len: usize,
}

impl inflight::Region for Part {
    fn size(&self) -> usize {
        self.len
    }
    fn load_u8(&self, at: usize) -> u8 {
        self.memory.load_u8(self.at + at, Ordering::Acquire)
    }
    fn load_u16(&self, at: usize) -> u16 {
        self.memory.load_u16(self.at + at, Ordering::Acquire)
    }
    fn load_u64(&self, at: usize) -> u64 {
        self.memory.load_u64(self.at + at, Ordering::Acquire)
    }
    fn store_u8(&mut self, at: usize, value: u8) {
        self.memory.store_u8(self.at + at, value, Ordering::Release);
    }
    fn store_u16(&mut self, at: usize, value: u16) {
        self.memory
            .store_u16(self.at + at, value, Ordering::Release);
    }
    fn store_u64(&mut self, at: usize, value: u64) {
        self.memory
            .store_u64(self.at + at, value, Ordering::Release);
    }
}

/// Reads a split-style descriptor: address, length, flags, next.
pub fn read_desc(memory: &Memory, at: usize) -> (u64, u32, u16, u16) {
    let high = memory.load_u32(at + 12, Ordering::Relaxed);
    let addr = memory.load_u64(at, Ordering::Relaxed);
    (
        addr,
        memory.load_u32(at + 8, Ordering::Relaxed),
        high as u16,
        (high >> 16) as u16,
    )
}
