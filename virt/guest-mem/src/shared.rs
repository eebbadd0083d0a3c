//! Piece of a memory file that two processes use word by word; its content outlives either process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::addr::{Hva, PAGE_SIZE};
use crate::file::{self, FileError};
use crate::keep::MappingSet;
use crate::mapping::{HugePages, Mapping};
use crate::phys::KeepAlive;
use crate::volatile::VolatileSlice;
use crate::word::Word;

/// A mapped piece of a memory file, of our making or received.
///
/// Words are little-endian. Loads acquire and stores release; they pair with those of other
/// processes that map the file, now or after the end of this one. Offsets are in bytes from the
/// start of the piece; one that is outside it or not a multiple of the word's size is a bug of the
/// caller and panics. A received file may be truncated under us: see
/// [`is_lost`](SharedFile::is_lost).
///
/// ```
/// use guest_mem::SharedFile;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let ours = SharedFile::create(100)?;
/// ours.store_u16(98, 7);
/// // The other process, having received the descriptor:
/// let theirs = SharedFile::open(ours.file().try_clone_to_owned()?, 0, 100)?;
/// assert_eq!(theirs.load_u16(98), 7);
/// # Ok(())
/// # }
/// ```
pub struct SharedFile {
    mapping: Arc<Mapping>,
    /// Of `mapping` alone.
    keep: KeepAlive,
    /// `None`: the mapping has it.
    received: Option<OwnedFd>,
    offset: u64,
    len: usize,
}

macro_rules! words {
    ($($int:ident $load:ident $store:ident)*) => {$(
        #[doc = concat!("One [`", stringify!($int), "`] load with acquire ordering.")]
        #[inline]
        pub fn $load(&self, at: usize) -> $int {
            self.load(at)
        }

        #[doc = concat!("One [`", stringify!($int), "`] store with release ordering.")]
        #[inline]
        pub fn $store(&self, at: usize, value: $int) {
            self.store(at, value)
        }
    )*};
}

impl SharedFile {
    /// `len` zeroed bytes, at least 1, in a new memory file of whole pages whose size is sealed.
    pub fn create(len: u64) -> Result<Self, FileError> {
        if len == 0 {
            return Err(FileError::Empty);
        }
        let past_end = FileError::PastEnd {
            offset: 0,
            len,
            size: isize::MAX as u64,
        };
        let bytes = len.checked_next_multiple_of(PAGE_SIZE);
        let Some(bytes) = bytes.and_then(|bytes| isize::try_from(bytes).ok()) else {
            return Err(past_end);
        };
        let mapping = Mapping::memfd(c"shared-file", bytes as usize, HugePages::Advise)?;
        // The length is less than `bytes`.
        Ok(Self::over(mapping, None, 0, len as usize))
    }

    /// `len` bytes, at least 1, at `offset`, a multiple of 4096, of a file that another process
    /// sent.
    pub fn open(file: OwnedFd, offset: u64, len: u64) -> Result<Self, FileError> {
        let facts = file::inspect(file.as_fd())?;
        let mapping = Mapping::foreign(file.as_fd(), &facts, offset, len)?;
        // A length that has been mapped.
        Ok(Self::over(mapping, Some(file), offset, len as usize))
    }

    fn over(mapping: Mapping, received: Option<OwnedFd>, offset: u64, len: usize) -> Self {
        let mapping = Arc::new(mapping);
        Self {
            keep: Arc::new(MappingSet::new([mapping.clone()])),
            mapping,
            received,
            offset,
            len,
        }
    }

    /// The file, for sending it on.
    pub fn file(&self) -> BorrowedFd<'_> {
        match &self.received {
            Some(file) => file.as_fd(),
            None => self.mapping.fd().expect("made as a memory file"),
        }
    }

    /// Returns the start of the piece in the file, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the piece in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a piece is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether an access has found the file truncated. From then on the piece is private
    /// memory: zeroes, and later writes, which no other process sees.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// The `len` bytes at `at`, which the other side may change at any time: for copies.
    pub fn slice(&self, at: usize, len: u32) -> VolatileSlice<'_> {
        self.check(at, len as usize);
        let slice = VolatileSlice::new(&self.keep, self.hva(at), len);
        slice.expect("inside the mapping, which is kept")
    }

    /// Returns the address of byte `at` in this process, for the kernel: an address that
    /// [`keep_alive`](Self::keep_alive) keeps mapped.
    pub fn hva(&self, at: usize) -> Hva {
        self.check(at, 0);
        self.mapping.hva(at)
    }

    /// Returns the object that keeps the piece mapped: hold a clone for as long as an address of it
    /// is in use.
    pub fn keep_alive(&self) -> KeepAlive {
        self.keep.clone()
    }

    words!(
        u8 load_u8 store_u8
        u16 load_u16 store_u16
        u32 load_u32 store_u32
        u64 load_u64 store_u64
    );

    #[inline]
    fn load<T: Word>(&self, at: usize) -> T {
        self.check(at, size_of::<T>());
        self.mapping.load(at, Ordering::Acquire)
    }

    #[inline]
    fn store<T: Word>(&self, at: usize, value: T) {
        self.check(at, size_of::<T>());
        self.mapping.store(at, value, Ordering::Release);
    }

    /// The mapping checks too, but may be longer by the rest of a page.
    #[inline]
    fn check(&self, at: usize, size: usize) {
        assert!(
            at <= self.len && size <= self.len - at,
            "{size} bytes at {at} of {} shared bytes",
            self.len
        );
    }
}

impl std::fmt::Debug for SharedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { offset, len, .. } = self;
        write!(f, "SharedFile {{ offset: {offset}, len: {len} }}")
    }
}

#[cfg(test)]
mod tests {
    use super::SharedFile;
    use crate::keeps_mapped;

    #[test]
    fn bytes_of_a_piece_are_copied_and_kept_mapped() {
        let ours = SharedFile::create(8192).expect("a file");
        let again = ours.file().try_clone_to_owned().expect("a descriptor");
        let theirs = SharedFile::open(again, 4096, 4096).expect("the same file");
        ours.slice(4096 + 10, 3).write(0, b"abc");
        let mut bytes = [0; 3];
        theirs.slice(10, 3).read(0, &mut bytes);
        assert_eq!(&bytes, b"abc");
        let (keep, at) = (theirs.keep_alive(), theirs.hva(10));
        drop(theirs);
        assert!(keeps_mapped(&keep, at, 3));
        assert!(!keeps_mapped(&keep, at, 4096));
    }

    #[test]
    #[should_panic(expected = "3 bytes at 8190 of 8192 shared bytes")]
    fn bytes_outside_a_piece_are_a_bug() {
        SharedFile::create(8192).expect("a file").slice(8190, 3);
    }
}
