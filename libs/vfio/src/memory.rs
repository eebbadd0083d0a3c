//! Memory that a device may be given.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dma_map::Segment;
use dma_map::address::{PAGE_SIZE, PhysAddr};

use crate::error::{Errno, VfioError};
use crate::sys::Pages;

/// Whole pages that a device may be given: [`VfioMap::allocate`](crate::VfioMap::allocate) makes
/// those that a mapper maps, and any are [`ExternalMemory`](crate::ExternalMemory).
///
/// A device may change them at any moment while they are mapped, and after that for as long as the
/// policy allows. So they are accessed as atomics, or copied; there is no slice of them. They are
/// locked in memory by the kernel while they are mapped (`ulimit -l`), and live until this and all
/// mappings of them are gone.
#[derive(Clone, Debug)]
pub struct DmaBuffer(pub(crate) Arc<Pages>);

#[expect(clippy::len_without_is_empty, reason = "none is empty")]
impl DmaBuffer {
    /// At least so many bytes of zeroes, rounded up to pages.
    ///
    /// # Errors
    /// [`VfioError::Call`] of `mmap`.
    pub fn new(bytes: usize) -> Result<Self, VfioError> {
        let len = bytes.max(1).checked_next_multiple_of(PAGE_SIZE as usize);
        let pages = len.ok_or(Errno(libc::ENOMEM)).and_then(Pages::new);
        let pages = pages.map_err(|errno| VfioError::Call {
            call: "mmap",
            subject: format!("{bytes} bytes of memory"),
            errno,
        })?;
        Ok(Self(Arc::new(pages)))
    }

    /// Bytes: a multiple of 4096.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The segment for a mapper to map.
    ///
    /// # Panics
    /// They do not lie in the buffer.
    pub fn segment(&self, offset: usize, len: usize) -> Segment {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len()),
            "{len} bytes at {offset} of {}",
            self.len()
        );
        Segment::new(PhysAddr::new(self.0.address() + offset as u64), len as u64)
    }

    /// All of it as words of 8 bytes, in the machine's order. A word that announces others is
    /// loaded with `Acquire`, before them.
    pub fn words(&self) -> &[AtomicU64] {
        self.0.words()
    }

    /// Copies out, a byte at a time: [`words`](Self::words) are faster.
    ///
    /// # Panics
    /// As [`segment`](Self::segment).
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        let places = &self.0.bytes()[offset..][..data.len()];
        for (byte, place) in data.iter_mut().zip(places) {
            *byte = place.load(Ordering::Relaxed);
        }
    }

    /// Copies in, a byte at a time.
    ///
    /// # Panics
    /// As [`segment`](Self::segment).
    pub fn write(&self, offset: usize, data: &[u8]) {
        let places = &self.0.bytes()[offset..][..data.len()];
        for (byte, place) in data.iter().zip(places) {
            place.store(*byte, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_words_are_the_same_memory() {
        let buffer = DmaBuffer::new(4097).expect("memory");
        assert_eq!(buffer.len(), 8192);
        buffer.write(8190, &[1, 2]);
        assert_eq!(buffer.words()[1023].load(Ordering::Relaxed), 0x0201 << 48);
        let mut read = [9; 3];
        buffer.read(8189, &mut read);
        assert_eq!(read, [0, 1, 2]);
        let segment = buffer.segment(4096, 4096);
        assert_eq!(segment.phys.raw(), buffer.segment(0, 1).phys.raw() + 4096);
    }

    #[test]
    #[should_panic(expected = "4096 bytes at 4097 of 8192")]
    fn a_segment_past_the_end_is_refused() {
        DmaBuffer::new(8192).expect("memory").segment(4097, 4096);
    }
}
