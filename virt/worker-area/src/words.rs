//! Access to the words of an area, for both sides: in a shared file, or in a model for tests.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use guest_mem::SharedFile;

/// Memory of little-endian words that another process uses too. Offsets are bytes, multiples of the
/// word's size.
pub trait Words {
    /// Length in bytes.
    fn byte_len(&self) -> u64;

    /// One load, with acquire ordering.
    fn load_u32(&self, at: usize) -> u32;

    /// One store, with release ordering.
    fn store_u32(&self, at: usize, value: u32);

    /// One load, with acquire ordering.
    fn load_u64(&self, at: usize) -> u64;

    /// One store, with release ordering.
    fn store_u64(&self, at: usize, value: u64);

    /// Full fence (SeqCst): orders earlier stores before later loads. Pairs with the fence of the
    /// other side.
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

impl Words for SharedFile {
    fn byte_len(&self) -> u64 {
        SharedFile::len(self) as u64
    }

    fn load_u32(&self, at: usize) -> u32 {
        SharedFile::load_u32(self, at)
    }

    fn store_u32(&self, at: usize, value: u32) {
        SharedFile::store_u32(self, at, value);
    }

    fn load_u64(&self, at: usize) -> u64 {
        SharedFile::load_u64(self, at)
    }

    fn store_u64(&self, at: usize, value: u64) {
        SharedFile::store_u64(self, at, value);
    }
}

impl<W: Words> Words for Arc<W> {
    fn byte_len(&self) -> u64 {
        W::byte_len(self)
    }

    fn load_u32(&self, at: usize) -> u32 {
        W::load_u32(self, at)
    }

    fn store_u32(&self, at: usize, value: u32) {
        W::store_u32(self, at, value);
    }

    fn load_u64(&self, at: usize) -> u64 {
        W::load_u64(self, at)
    }

    fn store_u64(&self, at: usize, value: u64) {
        W::store_u64(self, at, value);
    }

    fn fence(&self) {
        W::fence(self);
    }
}
