//! Word of guest memory that an idle core polls without the device's view.
//!
//! UNSAFETY: dereferences the cached pointer, as [`Window`](crate::Window) does, and for the same
//! reason.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::mapping::Mapping;
use crate::word::Word;

/// A 16-bit little-endian word of guest memory, kept mapped (see
/// [`Window::watch_u16`](crate::Window::watch_u16)).
///
/// A poll is one plain load; its value may be old and it orders nothing. A core that finds a change
/// then reads the ring, whose loads acquire. After the guest has moved its ring, or taken the page
/// from the device, the watch still reads the old place: its value is a hint, never to be acted
/// upon.
#[derive(Clone, Debug)]
pub struct WatchWord {
    /// Inside `_memory`, 2-aligned, with 2 bytes behind it.
    pointer: NonNull<u8>,
    _memory: Arc<Mapping>,
}

// SAFETY: the pointer points into memory that `_memory` owns and that any thread may access.
unsafe impl Send for WatchWord {}
// SAFETY: the only access is an atomic load.
unsafe impl Sync for WatchWord {}

impl WatchWord {
    /// `pointer` is a checked word of a window on `memory`.
    pub(crate) fn new(pointer: NonNull<u8>, memory: Arc<Mapping>) -> Self {
        // Regardless of the caller's checks: the safety of the load rests on this.
        let hva = crate::Hva::new(pointer.addr().get() as u64);
        let pointer = memory.pointer(hva, 2).expect("the window's memory");
        assert!(pointer.addr().get().is_multiple_of(2), "a word is aligned");
        Self {
            pointer,
            _memory: memory,
        }
    }

    /// The word now.
    #[inline]
    pub fn load_relaxed(&self) -> u16 {
        // SAFETY: in bounds and aligned as `new` checked, kept mapped by `_memory`, no references.
        unsafe { Word::load(self.pointer.as_ptr(), Ordering::Relaxed) }
    }

    /// Whether both are the same word.
    #[inline]
    pub fn is_same(&self, other: &Self) -> bool {
        self.pointer == other.pointer
    }

    #[inline]
    pub(crate) fn is_at(&self, pointer: NonNull<u8>) -> bool {
        self.pointer == pointer
    }
}
