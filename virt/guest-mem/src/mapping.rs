//! Ownership of one run of shared memory, and bounds-checked access to it.
//!
//! Every pointer of this crate points into a [`Mapping`]: guest RAM, ours or another process's, a
//! register page, or, in tests, plain heap memory. A [`KeepAlive`](crate::KeepAlive) must hold a
//! set of mappings for its addresses to be dereferenced (module `keep`). [`Mapping::pointer`]
//! checks a host address against the memory it owns, so the safety of [`Window`](crate::Window)
//! rests on these modules and not on the implementations of [`PhysMem`](crate::PhysMem).
//!
//! UNSAFETY: raw pointers into mapped memory. `memmap2` or `vm-memory` would bring the same
//! obligations with references (`&[u8]`) that guest memory must not have.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use crate::addr::{Hva, PAGE_SIZE};
use crate::file::{self, Facts, FileError};
use crate::map_error::MapError;
use crate::reserve::Reservation;
use crate::sigbus::{RegisterError, Registration};
use crate::word::{self, Word};

/// Mappings of at least this size start on such a boundary, so that the host can back them, and the
/// second-level tables of the guest, with 2 MiB pages.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Whether the host may back memory with pages of 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// The host may use them, where it has them for shared memory.
    Advise,
    /// Pages of 4 KiB only: for memory whose pages come and go one by one.
    Never,
}

impl HugePages {
    /// Advises the kernel about a mapping of the caller's own. A host without huge pages in shared
    /// memory refuses the advice, which is harmless.
    pub(crate) fn advise(self, start: NonNull<u8>, len: usize) {
        let advice = match self {
            Self::Advise if len >= HUGE_PAGE => libc::MADV_HUGEPAGE,
            Self::Advise => return,
            Self::Never => libc::MADV_NOHUGEPAGE,
        };
        // SAFETY: this advice changes the size of pages, not their content.
        unsafe { libc::madvise(start.as_ptr().cast(), len, advice) };
    }
}

/// One contiguous run of memory that the guest or another process may change at any time.
///
/// Owners: the holders of an `Arc`. Every access is atomic or opaque to the compiler (see `word`),
/// so any thread may make it; which thread *should* is up to the device model.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    owner: Owner,
}

#[derive(Debug)]
enum Owner {
    /// A memory file of ours.
    Memfd {
        fd: OwnedFd,
        _reservation: Reservation,
    },
    /// Memory of this process alone.
    Anonymous { _reservation: Reservation },
    /// A file of another process. Fields are dropped in this order: the `SIGBUS` handler stops
    /// covering the memory before the memory is unmapped.
    Foreign {
        registration: Registration,
        _reservation: Reservation,
    },
    /// Zeroed heap memory that starts here, less than a page before `base`.
    Heap { start: NonNull<u8>, layout: Layout },
}

// SAFETY: `base` is owned, not borrowed from a thread, and every access through a shared reference
// is atomic or opaque to the compiler; freeing happens in `drop`, which has the only reference.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` bytes, a multiple of the page size and not 0, of a new memory file, mapped shared. Its
    /// size is sealed: no other holder of the descriptor can truncate it and turn our accesses into
    /// `SIGBUS`.
    pub(crate) fn memfd(name: &CStr, len: usize, huge_pages: HugePages) -> Result<Self, MapError> {
        assert!(len != 0 && len.is_multiple_of(PAGE_SIZE as usize));
        // SAFETY: `name` is a terminated string; the call touches nothing else of ours.
        let fd = unsafe {
            libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        };
        if fd < 0 {
            return Err(MapError::Create(io::Error::last_os_error()));
        }
        // SAFETY: the call just made `fd`, and no other code has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let resize_error = |source| MapError::Resize { bytes: len, source };
        let file_len = libc::off_t::try_from(len)
            .map_err(|_| resize_error(io::Error::from_raw_os_error(libc::EFBIG)))?;
        // SAFETY: plain system call on a descriptor we own.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), file_len) } < 0 {
            return Err(resize_error(io::Error::last_os_error()));
        }
        // F_SEAL_SEAL: a later F_SEAL_WRITE by another holder would make our own remapping fail.
        // Punching holes stays possible, which is how memory is given back to the host.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: plain system call on a descriptor we own.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
            return Err(MapError::Seal(io::Error::last_os_error()));
        }
        Self::map_reserved(fd, len, huge_pages)
    }

    fn map_reserved(fd: OwnedFd, len: usize, huge_pages: HugePages) -> Result<Self, MapError> {
        let (reservation, base) = Reservation::map(fd.as_fd(), 0, len, align_of_len(len))
            .map_err(|source| MapError::Map { bytes: len, source })?;
        huge_pages.advise(base, len);
        Ok(Self {
            base,
            len,
            owner: Owner::Memfd {
                fd,
                _reservation: reservation,
            },
        })
    }

    /// `len` bytes, a multiple of the page size and not 0, that no other process can map.
    pub(crate) fn anonymous(len: usize, huge_pages: HugePages) -> Result<Self, MapError> {
        assert!(len != 0 && len.is_multiple_of(PAGE_SIZE as usize));
        let (reservation, base) = Reservation::anonymous(len, align_of_len(len))
            .map_err(|source| MapError::Map { bytes: len, source })?;
        huge_pages.advise(base, len);
        Ok(Self {
            base,
            len,
            owner: Owner::Anonymous {
                _reservation: reservation,
            },
        })
    }

    /// Gives the memory of `[offset, offset + len)` back, whole pages inside the mapping: it holds
    /// zeroes from then on. Heap memory keeps its pages.
    pub(crate) fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        loop {
            match self.discard_once(offset, len) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn discard_once(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.at(offset, len);
        let result = match &self.owner {
            Owner::Memfd { fd, .. } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                // Inside a file, whose size has 63 bits.
                let (offset, len) = (offset as libc::off_t, len as libc::off_t);
                // SAFETY: plain system call on a descriptor we own; mappings of the file stay, and
                // read as zeroes.
                unsafe { libc::fallocate(fd.as_raw_fd(), mode, offset, len) }
            }
            // SAFETY: `at` checked that the range is of this mapping, to which there are no
            // references.
            Owner::Anonymous { .. } => unsafe {
                libc::madvise(start.cast(), len, libc::MADV_DONTNEED)
            },
            Owner::Heap { .. } => {
                self.fill_zeroes(offset, len);
                0
            }
            Owner::Foreign { .. } => return Err(io::ErrorKind::Unsupported.into()),
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Populates the pages of `[offset, offset + len)`, whole pages inside the mapping, and maps
    /// them here writable: an access to one of them raises no page fault until it is discarded.
    /// Their content stays.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.at(offset, len);
        match &self.owner {
            Owner::Memfd { .. } | Owner::Anonymous { .. } => {}
            Owner::Heap { .. } => return Ok(()),
            Owner::Foreign { .. } => return Err(io::ErrorKind::Unsupported.into()),
        }
        loop {
            // SAFETY: `at` checked that the range is of this mapping; this advice changes nothing
            // that is in it.
            let result = unsafe { libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE) };
            match result {
                0 => return Ok(()),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }

    fn fill_zeroes(&self, offset: usize, len: usize) {
        const ZEROES: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];
        for done in (0..len).step_by(ZEROES.len()) {
            self.write(offset + done, &ZEROES[..ZEROES.len().min(len - done)]);
        }
    }

    /// Bytes `[offset, offset + len)` of `file`, which another process may truncate at any time:
    /// see [`is_lost`](Self::is_lost). `facts` are of this file.
    pub(crate) fn foreign(
        file: BorrowedFd<'_>,
        facts: &Facts,
        offset: u64,
        len: u64,
    ) -> Result<Self, FileError> {
        file::check_piece(offset, len, facts.size)?;
        let map_error = |source| FileError::Map {
            offset,
            len,
            source,
        };
        let too_long = || map_error(io::Error::from_raw_os_error(libc::ENOMEM));
        // Whole pages of the file around the piece. The sums cannot wrap: the end is inside the
        // file, whose size has 63 bits, and so has that rounded up to a page.
        let head = offset % facts.block;
        let whole = (head + len).next_multiple_of(facts.block);
        let whole = usize::try_from(whole).map_err(|_| too_long())?;
        let block = usize::try_from(facts.block).map_err(|_| too_long())?;
        let align = match whole >= HUGE_PAGE {
            true => block.max(HUGE_PAGE),
            false => block,
        };
        let (reservation, start) =
            Reservation::map(file, offset - head, whole, align).map_err(map_error)?;
        // Another guest's memory has no place in our core dumps. Advice, as above.
        // SAFETY: the range is the mapping just made.
        unsafe { libc::madvise(start.as_ptr().cast(), whole, libc::MADV_DONTDUMP) };
        // SAFETY: `whole` bytes, whole pages, were just mapped at `start`, inside `reservation`,
        // which `Owner::Foreign` drops after the registration. A `Mapping` is reached by atomic or
        // opaque accesses only.
        let registration = unsafe { Registration::new(start.as_ptr(), whole, block) };
        let registration = registration.map_err(|error| match error {
            RegisterError::Full => FileError::TooManyMappings,
            RegisterError::Handler(source) => FileError::Handler(source),
        })?;
        Ok(Self {
            // SAFETY: `head < whole`, inside the mapping.
            base: unsafe { start.add(head as usize) },
            // At most `whole`, a `usize`.
            len: len as usize,
            owner: Owner::Foreign {
                registration,
                _reservation: reservation,
            },
        })
    }

    /// Returns whether an access found that the file's owner had truncated the memory. From then on
    /// it reads as zeroes and later writes.
    pub(crate) fn is_lost(&self) -> bool {
        match &self.owner {
            Owner::Foreign { registration, .. } => registration.is_lost(),
            Owner::Memfd { .. } | Owner::Anonymous { .. } | Owner::Heap { .. } => false,
        }
    }

    /// `len` zeroed bytes of heap memory, at least 1, page-aligned: for tests and model checkers.
    pub(crate) fn heap(len: usize) -> Self {
        assert!(len != 0);
        // An alignment asked of the allocator would make it write the zeroes; without, they are
        // fresh pages of the system's.
        const PAGE: usize = PAGE_SIZE as usize;
        let layout = Layout::array::<u8>(len + PAGE - 1).expect("a test's memory is small");
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else {
            handle_alloc_error(layout)
        };
        let head = start.as_ptr().addr().next_multiple_of(PAGE) - start.as_ptr().addr();
        // SAFETY: `head` is less than a page, and the allocation that much longer than `len`.
        let base = unsafe { start.add(head) };
        // The numeric address leaves through `hva`.
        let _ = base.as_ptr().expose_provenance();
        Self {
            base,
            len,
            owner: Owner::Heap { start, layout },
        }
    }

    /// The host address of byte `offset`, at most the length.
    #[inline]
    pub(crate) fn hva(&self, offset: usize) -> Hva {
        debug_assert!(offset <= self.len);
        Hva::new((self.base.as_ptr().addr() + offset) as u64)
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The memory file, if there is one of ours.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.owner {
            Owner::Memfd { fd, .. } => Some(fd.as_fd()),
            Owner::Anonymous { .. } | Owner::Foreign { .. } | Owner::Heap { .. } => None,
        }
    }

    /// The pointer behind a host address, if all of `[hva, hva + len)` lies in this mapping.
    #[inline]
    pub(crate) fn pointer(&self, hva: Hva, len: u64) -> Option<NonNull<u8>> {
        let offset = usize::try_from(hva.offset_from(self.hva(0))?).ok()?;
        let len = usize::try_from(len).ok()?;
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: `offset` is at most the length of the allocation that `base` starts.
        Some(unsafe { self.base.add(offset) })
    }

    /// The pointer to `[offset, offset + len)`, which the caller has already found to lie inside.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "offset outside the mapping"
        );
        // SAFETY: checked just above to stay inside the allocation.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// [`at`](Self::at), for an access of `size` bytes that must be one instruction.
    #[inline]
    fn word_at(&self, offset: usize, size: usize) -> *mut u8 {
        let pointer = self.at(offset, size);
        assert!(pointer.addr().is_multiple_of(size), "misaligned word");
        pointer
    }

    /// Loads a word at an aligned offset inside the mapping.
    #[inline]
    pub(crate) fn load<T: Word>(&self, offset: usize, ordering: Ordering) -> T {
        let pointer = self.word_at(offset, size_of::<T>());
        // SAFETY: `word_at` checked bounds and alignment; `self` keeps the memory mapped; nothing
        // in the process makes references into a `Mapping`.
        unsafe { T::load(pointer, ordering) }
    }

    /// Stores a word at an aligned offset inside the mapping.
    #[inline]
    pub(crate) fn store<T: Word>(&self, offset: usize, value: T, ordering: Ordering) {
        let pointer = self.word_at(offset, size_of::<T>());
        // SAFETY: as in `load`; mappings are writable.
        unsafe { T::store(pointer, value, ordering) }
    }

    /// Compare-and-exchange of a word; acquire-release when it succeeds, acquire when it does not.
    #[inline]
    pub(crate) fn compare_exchange<T: Word>(
        &self,
        offset: usize,
        current: T,
        new: T,
    ) -> Result<T, T> {
        let pointer = self.word_at(offset, size_of::<T>());
        // SAFETY: as in `store`.
        unsafe { T::compare_exchange(pointer, current, new) }
    }

    /// Copies bytes out; they may tear.
    #[inline]
    pub(crate) fn read(&self, offset: usize, buf: &mut [u8]) {
        let pointer = self.at(offset, buf.len());
        // SAFETY: `at` checked the bounds; `self` keeps the memory mapped; no references into it
        // exist.
        unsafe { word::copy_out(pointer, buf) }
    }

    /// Copies bytes in; they may tear.
    #[inline]
    pub(crate) fn write(&self, offset: usize, buf: &[u8]) {
        let pointer = self.at(offset, buf.len());
        // SAFETY: as in `read`; mappings are writable.
        unsafe { word::copy_in(buf, pointer) }
    }
}

/// Returns the alignment in bytes of the start of a mapping of `len` bytes.
pub(crate) fn align_of_len(len: usize) -> usize {
    match len >= HUGE_PAGE {
        true => HUGE_PAGE,
        false => PAGE_SIZE as usize,
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Memory files and anonymous memory are unmapped by the fields of `owner`. `drop` has the
        // last reference, and pointers handed out live no longer than a reference (KeepAlive).
        if let Owner::Heap { start, layout } = &self.owner {
            // SAFETY: allocated in `heap` with this layout; last reference, as above.
            unsafe { dealloc(start.as_ptr(), *layout) }
        }
    }
}
