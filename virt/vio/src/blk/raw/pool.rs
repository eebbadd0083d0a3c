//! The private memory of bounced transfers, in chunks.
//!
//! UNSAFETY: the kernel and we write it through pointers, each chunk by the side that its slot's
//! state says; a vector would have to be borrowed for as long.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::blk::{MAX_PIECES, MAX_TRANSFER};

/// Size of a chunk of the private pool, in bytes: a request's buffer is made of chunks.
pub const CHUNK: u32 = 16 << 10;
/// Chunks of the private pool. 8 MiB: two requests of the largest size, or 512 small ones.
pub const POOL_CHUNKS: u32 = 512;
const _: () = assert!(CHUNK * POOL_CHUNKS >= MAX_TRANSFER);
const _: () = assert!((MAX_TRANSFER / CHUNK) as usize <= MAX_PIECES);

/// The private pool: aligned as its chunks are, never moved.
pub(super) struct Pool {
    base: NonNull<u8>,
    /// Chunks that belong to no slot.
    pub(super) free: Vec<u32>,
}

impl Pool {
    const LAYOUT: Layout =
        match Layout::from_size_align((CHUNK * POOL_CHUNKS) as usize, CHUNK as usize) {
            Ok(layout) => layout,
            Err(_) => panic!("a valid layout"),
        };

    pub(super) fn new() -> Self {
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(Self::LAYOUT) };
        let Some(base) = NonNull::new(base) else {
            handle_alloc_error(Self::LAYOUT)
        };
        Self {
            base,
            free: (0..POOL_CHUNKS).rev().collect(),
        }
    }

    /// First byte of a chunk.
    pub(super) fn chunk(&self, chunk: u32) -> *mut u8 {
        assert!(chunk < POOL_CHUNKS);
        // SAFETY: `chunk` is below the number of chunks in the allocation.
        unsafe { self.base.as_ptr().add((chunk * CHUNK) as usize) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`; `RawDisk::drop` forgets a pool that the
        // kernel may still use.
        unsafe { dealloc(self.base.as_ptr(), Self::LAYOUT) }
    }
}

// SAFETY: `base` is owned memory, tied to no thread.
unsafe impl Send for Pool {}
