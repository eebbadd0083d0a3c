//! Guest RAM that another process, the VMM, owns: memory files it sent us, behind a table of
//! guest-physical regions.
//!
//! The session makes a new table whenever the front end changes it ([`ForeignRam::with_regions`]);
//! regions that stay keep their mapping, so windows on them refresh to the same pointer. The old
//! handle, a [`KeepAlive`] or a [`Window`](crate::Window) keeps mapped the memory that its holder
//! may still use.
//!
//! **The other process is not trusted.** Every field of the table is checked before anything is
//! mapped (module `file`). If it truncates a file later, only its own guest is lost, not this
//! process (module `sigbus`): poll [`ForeignRam::is_lost`]. Its bytes change under us like those of
//! any guest.
//!
//! **Cost.** A handle remembers the region of the last access: a hit is a subtraction and two
//! comparisons on fields of the handle itself. A miss is a binary search. The table is shared by
//! clones and never written; the memory of the last hit belongs to the handle, which is why it is
//! not `Sync`.
//!
//! UNSAFETY: dereferences the pointers of the table. Going through [`Mapping`] at each access would
//! repeat the bounds check and add a dependent load.
//!
//! **Left out:** which pages are resident, dirty tracking, files of devices (DAX, dma-buf),
//! post-copy.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::access::{Access, DmaFault, Intent, Stop};
use crate::addr::{Gpa, Hva, PAGE_SIZE};
use crate::file::{self, Facts, FileError};
use crate::keep::MappingSet;
use crate::mapping::Mapping;
use crate::phys::{KeepAlive, LastingPiece, PhysMem};
use crate::sigbus;
use crate::word::{self, Word};

/// Most guest memory of one table in bytes, 16 TiB: a sparse file costs its maker nothing, and
/// address space, of which a process has 128 TiB, is shared by all guests.
pub const MAX_FOREIGN_BYTES: u64 = 1 << 44;

/// One entry of a memory table, as another process claims it to be.
#[derive(Clone, Debug)]
pub struct ForeignRegion {
    /// First guest-physical address, a multiple of 4096.
    pub gpa: Gpa,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// The memory file, open for reading and writing.
    pub file: Arc<OwnedFd>,
    /// Start of the region in the file, in bytes, a multiple of 4096.
    pub offset: u64,
}

/// Refusal of a memory table; nothing has changed.
#[derive(Debug, thiserror::Error)]
#[error("memory region {region}")]
pub struct ForeignError {
    /// Index of the refused region in the list.
    pub region: usize,
    /// Defect of that region.
    #[source]
    pub kind: ForeignErrorKind,
}

/// Defect of a region.
#[derive(Debug, thiserror::Error)]
pub enum ForeignErrorKind {
    /// It does not start on a page of the guest.
    #[error("guest address {gpa:#x} is not a multiple of {PAGE_SIZE}")]
    Misaligned {
        /// Its start.
        gpa: Gpa,
    },
    /// It runs past the end of the guest's address space.
    #[error("{len:#x} bytes at guest address {gpa:#x} wrap around")]
    Wraps {
        /// Its start.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// It shares guest addresses with another.
    #[error("guest address {gpa:#x} is also in region {other}")]
    Overlap {
        /// Its start.
        gpa: Gpa,
        /// Index of a region that holds that address.
        other: usize,
    },
    /// With it the guest has more than [`MAX_FOREIGN_BYTES`].
    #[error("len {len:#x} brings the guest above {MAX_FOREIGN_BYTES:#x} bytes")]
    TooMuch {
        /// Its length in bytes.
        len: u64,
    },
    /// Its file, or the place in it, cannot be used.
    #[error("unusable file")]
    File(#[from] FileError),
}

/// Guest addresses and where they are in this process.
#[derive(Clone, Copy, Debug)]
struct Piece {
    gpa: Gpa,
    /// 0 only for the piece that a handle has before its first hit.
    len: u64,
    base: NonNull<u8>,
}

impl Piece {
    const NONE: Self = Self {
        gpa: Gpa::new(0),
        len: 0,
        base: NonNull::dangling(),
    };

    /// Bytes from `gpa` to the end; `None` outside.
    #[inline]
    fn left(&self, gpa: Gpa) -> Option<u64> {
        // A `gpa` below the region wraps to an offset beyond its length: `self.gpa + self.len` does
        // not wrap (checked before it was mapped).
        let inside = gpa.raw().wrapping_sub(self.gpa.raw());
        (inside < self.len).then(|| self.len - inside)
    }

    /// The pointer to `[gpa, gpa + len)`, if all of it lies here.
    #[inline]
    fn pointer(&self, gpa: Gpa, len: u64) -> Option<NonNull<u8>> {
        let left = self.left(gpa)?;
        // SAFETY: `self.len` bytes behind `base` are one mapping, and the offset is less.
        (len <= left).then(|| unsafe { self.base.add((self.len - left) as usize) })
    }
}

/// Identity of a table entry, by which an entry of a new table is recognized as one of the old.
#[derive(Debug)]
struct Source {
    identity: (u64, u64),
    offset: u64,
    len: u64,
    mapping: Arc<Mapping>,
}

/// Immutable once made.
#[derive(Debug)]
struct Table {
    /// Sorted by guest address, disjoint. Each points to the whole of one mapping in `keep`.
    pieces: Box<[Piece]>,
    /// In no particular order.
    sources: Box<[Source]>,
    keep: Arc<MappingSet>,
}

// SAFETY: the pointers of `pieces` point into memory that `keep` owns and any thread may access
// (`Mapping` is `Sync`).
unsafe impl Send for Table {}
// SAFETY: as for `Send`; a table does not change.
unsafe impl Sync for Table {}

/// The RAM of a guest whose VMM is another process. A clone is another handle to the same table.
///
/// Threads: each handle is one thread's at a time; give another a clone.
///
/// ```
/// use std::sync::Arc;
/// use guest_mem::{ForeignRam, ForeignRegion, Gpa, GuestRam, PhysMem};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // The VMM: has RAM, and sends its memory file.
/// let theirs = GuestRam::new(&[(Gpa::new(0), 1 << 20)])?;
/// let file = Arc::new(theirs.memfd().expect("a file").try_clone_to_owned()?);
///
/// // We: see the same bytes.
/// let region = ForeignRegion { gpa: Gpa::new(0x10_0000), len: 1 << 20, file, offset: 0 };
/// let ram = ForeignRam::empty().with_regions(&[region])?;
/// ram.write(Gpa::new(0x10_0010), b"hello").expect("inside RAM");
/// let mut seen = [0; 5];
/// theirs.read(Gpa::new(0x10), &mut seen).expect("inside RAM");
/// assert_eq!(&seen, b"hello");
/// assert!(!ram.is_lost());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ForeignRam {
    /// A copy of one of `table.pieces`, or `Piece::NONE`.
    hit: Cell<Piece>,
    /// Value of `sigbus::losses` when this table was last checked, and the result of the check.
    looked: Cell<(u64, bool)>,
    table: Arc<Table>,
}

// SAFETY: `hit` points into memory that `table` keeps and any thread may access; `Cell` is `Send`.
// Not `Sync`: two threads would race on the cells.
unsafe impl Send for ForeignRam {}

impl ForeignRam {
    /// No memory at all: before the first table.
    pub fn empty() -> Self {
        Self::over(Vec::new(), Vec::new())
    }

    fn over(mut pieces: Vec<Piece>, sources: Vec<Source>) -> Self {
        pieces.sort_unstable_by_key(|piece| piece.gpa);
        let keep = MappingSet::new(sources.iter().map(|source| source.mapping.clone()));
        Self {
            hit: Cell::new(pieces.first().copied().unwrap_or(Piece::NONE)),
            looked: Cell::new((0, false)),
            table: Arc::new(Table {
                pieces: pieces.into(),
                sources: sources.into(),
                keep: Arc::new(keep),
            }),
        }
    }

    /// The memory of this table of regions, in any order. A region whose piece of the same file is
    /// in the present table keeps its mapping, unless that was lost, wherever it is in guest memory
    /// now.
    ///
    /// The list comes from another process: every field is checked here. How many regions it may
    /// have is the protocol's bound; the process has room for 16384 mappings of all guests.
    pub fn with_regions(&self, regions: &[ForeignRegion]) -> Result<ForeignRam, ForeignError> {
        check_guest_side(regions)?;
        let mut pieces = Vec::with_capacity(regions.len());
        let mut sources = Vec::with_capacity(regions.len());
        for (index, region) in regions.iter().enumerate() {
            let source = self.source(region).map_err(|error| ForeignError {
                region: index,
                kind: error.into(),
            })?;
            let base = source.mapping.pointer(source.mapping.hva(0), region.len);
            pieces.push(Piece {
                gpa: region.gpa,
                len: region.len,
                base: base.expect("the mapping has the region's length"),
            });
            sources.push(source);
        }
        Ok(Self::over(pieces, sources))
    }

    /// The mapping of a region: of the present table, or new.
    fn source(&self, region: &ForeignRegion) -> Result<Source, FileError> {
        let (offset, len) = (region.offset, region.len);
        let file = region.file.as_fd();
        let facts: Facts = file::inspect(file)?;
        file::check_piece(offset, len, facts.size)?;
        let identity = facts.identity;
        let same = |old: &&Source| {
            // The old mapping keeps the file, so its device and inode name no other.
            (old.identity, old.offset, old.len) == (identity, offset, len) && !old.mapping.is_lost()
        };
        let mapping = match self.table.sources.iter().find(same) {
            Some(old) => old.mapping.clone(),
            None => Arc::new(Mapping::foreign(file, &facts, offset, len)?),
        };
        Ok(Source {
            identity,
            offset,
            len,
            mapping,
        })
    }

    /// Length of all regions together, in bytes.
    pub fn bytes(&self) -> u64 {
        self.table.pieces.iter().map(|piece| piece.len).sum()
    }

    /// Returns whether an access has found memory of the table gone: its owner truncated the file,
    /// or the host had no page for it. The guest can only be stopped. Accesses still succeed; they
    /// read zeroes, and later writes. One load while nothing in the process was lost.
    #[inline]
    pub fn is_lost(&self) -> bool {
        let losses = sigbus::losses();
        let (looked, lost) = self.looked.get();
        if losses == looked {
            lost
        } else {
            self.look(losses)
        }
    }

    #[cold]
    fn look(&self, losses: u64) -> bool {
        let mut sources = self.table.sources.iter();
        let lost = sources.any(|source| source.mapping.is_lost());
        self.looked.set((losses, lost));
        lost
    }

    /// The pointer to `[gpa, gpa + len)`, `len` at least 1, if one region has all of it.
    #[inline]
    fn pointer(&self, gpa: Gpa, len: u64) -> Option<NonNull<u8>> {
        match self.hit.get().pointer(gpa, len) {
            Some(pointer) => Some(pointer),
            None => self.search_pointer(gpa, len),
        }
    }

    #[inline(never)]
    fn search_pointer(&self, gpa: Gpa, len: u64) -> Option<NonNull<u8>> {
        self.search(gpa)?.pointer(gpa, len)
    }

    #[inline(never)]
    fn search_run(&self, gpa: Gpa) -> Option<u64> {
        self.search(gpa)?.left(gpa)
    }

    /// The region of `gpa`, remembered.
    fn search(&self, gpa: Gpa) -> Option<Piece> {
        let pieces = &self.table.pieces;
        let above = pieces.partition_point(|piece| piece.gpa <= gpa);
        let piece = pieces[above.checked_sub(1)?];
        piece.left(gpa)?;
        self.hit.set(piece);
        Some(piece)
    }

    /// Gives `each` the contiguous pieces of `[gpa, gpa + len)` in turn, once all of it is known to
    /// be RAM.
    #[cold]
    fn for_each_piece(
        &self,
        gpa: Gpa,
        len: u64,
        mut each: impl FnMut(NonNull<u8>, std::ops::Range<usize>),
    ) -> Access<()> {
        self.check(gpa, len)?;
        let mut done = 0;
        while done < len {
            let at = Gpa::new(gpa.raw() + done);
            let piece = self.run(at)?.min(len - done);
            let pointer = self.pointer(at, piece).ok_or(DmaFault::BadRange)?;
            each(pointer, done as usize..(done + piece) as usize);
            done += piece;
        }
        Ok(())
    }

    /// Whether all of `[gpa, gpa + len)` is RAM, in however many regions. Bounded by their number.
    fn check(&self, gpa: Gpa, len: u64) -> Access<()> {
        if len == 0 || gpa.checked_add(len - 1).is_none() {
            return Err(DmaFault::BadRange.into());
        }
        let mut done = 0;
        while done < len {
            done += self.run(Gpa::new(gpa.raw() + done))?.min(len - done);
        }
        Ok(())
    }

    /// Returns the reason why no region has all of a range.
    #[cold]
    fn refuse(&self, gpa: Gpa, len: u64) -> Stop {
        match self.check(gpa, len) {
            // RAM, but of several regions.
            Ok(()) => DmaFault::BadRange.into(),
            Err(stop) => stop,
        }
    }

    /// The pointer to an aligned word.
    #[inline]
    fn word<T: Word>(&self, gpa: Gpa) -> Access<*mut u8> {
        let size = size_of::<T>() as u64;
        if !gpa.is_aligned(size) {
            return Err(DmaFault::BadRange.into());
        }
        // Regions and their mappings start on pages, so an aligned guest address is aligned here.
        match self.pointer(gpa, size) {
            Some(pointer) => Ok(pointer.as_ptr()),
            None => Err(self.refuse(gpa, size)),
        }
    }
}

/// Checks the guest's side, independent of files: alignment, wrapping, overlap, sum.
fn check_guest_side(regions: &[ForeignRegion]) -> Result<(), ForeignError> {
    let mut total = 0u64;
    let mut order: Vec<usize> = (0..regions.len()).collect();
    for (index, &ForeignRegion { gpa, len, .. }) in regions.iter().enumerate() {
        let error = |kind| ForeignError {
            region: index,
            kind,
        };
        if len == 0 {
            return Err(error(FileError::Empty.into()));
        }
        if !gpa.is_aligned(PAGE_SIZE) {
            return Err(error(ForeignErrorKind::Misaligned { gpa }));
        }
        if gpa.checked_add(len).is_none() {
            return Err(error(ForeignErrorKind::Wraps { gpa, len }));
        }
        total = match total.checked_add(len) {
            Some(total) if total <= MAX_FOREIGN_BYTES => total,
            _ => return Err(error(ForeignErrorKind::TooMuch { len })),
        };
    }
    order.sort_by_key(|&index| regions[index].gpa);
    for pair in order.windows(2) {
        let [other, region] = [pair[0], pair[1]];
        let gpa = regions[region].gpa;
        // Does not wrap: checked above.
        if gpa.raw() < regions[other].gpa.raw() + regions[other].len {
            let kind = ForeignErrorKind::Overlap { gpa, other };
            return Err(ForeignError { region, kind });
        }
    }
    Ok(())
}

// In the `unsafe` blocks: `pointer` and `word` return a range inside one mapping, aligned for a
// word, that `self.table` keeps mapped and writable, and nothing in the process makes references
// into a `Mapping`.
impl PhysMem for ForeignRam {
    #[inline]
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        let pointer = self.word::<u64>(gpa)?;
        // SAFETY: as said above. Acquire: as for `GuestRam`.
        Ok(unsafe { Word::load(pointer, Ordering::Acquire) })
    }

    #[inline]
    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        let pointer = self.word::<u32>(gpa)?;
        // SAFETY: as said above. Release: as for `GuestRam`.
        unsafe { Word::store(pointer, value, Ordering::Release) };
        Ok(())
    }

    #[inline]
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        if buf.is_empty() {
            return Ok(());
        }
        if let Some(pointer) = self.pointer(gpa, buf.len() as u64) {
            // SAFETY: as said above.
            unsafe { word::copy_out(pointer.as_ptr(), buf) };
            return Ok(());
        }
        self.for_each_piece(gpa, buf.len() as u64, |pointer, range| {
            // SAFETY: as said above.
            unsafe { word::copy_out(pointer.as_ptr(), &mut buf[range]) }
        })
    }

    #[inline]
    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        if buf.is_empty() {
            return Ok(());
        }
        if let Some(pointer) = self.pointer(gpa, buf.len() as u64) {
            // SAFETY: as said above.
            unsafe { word::copy_in(buf, pointer.as_ptr()) };
            return Ok(());
        }
        self.for_each_piece(gpa, buf.len() as u64, |pointer, range| {
            // SAFETY: as said above.
            unsafe { word::copy_in(&buf[range], pointer.as_ptr()) }
        })
    }

    #[inline]
    fn host(&self, gpa: Gpa, len: u64, _intent: Intent) -> Access<Hva> {
        match self.pointer(gpa, len.max(1)) {
            Some(pointer) if len != 0 => Ok(Hva::new(pointer.addr().get() as u64)),
            _ => Err(self.refuse(gpa, len)),
        }
    }

    #[inline]
    fn run(&self, gpa: Gpa) -> Access<u64> {
        let left = match self.hit.get().left(gpa) {
            Some(left) => Some(left),
            None => self.search_run(gpa),
        };
        Ok(left.ok_or(DmaFault::NotRam { gpa })?)
    }

    /// Returns the region. It is lasting: it goes away only if the other process truncates its
    /// file, and then zeroes take its place (module `sigbus`).
    #[inline]
    fn lasting_piece(&self, gpa: Gpa) -> Option<LastingPiece> {
        let hit = self.hit.get();
        let piece = match hit.left(gpa) {
            Some(_) => hit,
            None => self.search(gpa)?,
        };
        Some(LastingPiece {
            gpa: piece.gpa,
            len: piece.len,
            hva: Hva::new(piece.base.addr().get() as u64),
        })
    }

    fn keep_alive(&self) -> KeepAlive {
        self.table.keep.clone()
    }
}
