//! The file under an image, as the library's storage, with five additions.
//!
//! *Reads within the file.* The file had a length when it was opened, and has grown since by
//! writes. A read of a part that is there no longer is an error, and so is one beyond the cluster
//! that the file ends in. The rest of that cluster reads as zeroes: the check of the tables has
//! ensured that the guest does not read it. Of an image that is only read the library gets a header
//! that was checked, and L2 tables that are checked as they are read ([`crate::vet`]).
//!
//! *Counting first* ([`count_first`]). The library keeps reference counts in memory until it is
//! flushed, but writes an entry of the L1 table or the refcount table at once. A process killed
//! between the two would leave a table in use that is counted free, and the next writer would
//! allocate its cluster again. So before such an entry goes to the file, the count of the cluster
//! it refers to is made at least one *in the file*. The library has counted the cluster in memory
//! by then and writes the same value later. What a kill can leave behind is a leak.
//!
//! *Barriers.* Writes that a power cut must not reorder are kept apart by syncs ([`crate::order`]).
//!
//! *Sync* (fdatasync) runs beside reads and writes. One that fails is the last (see
//! [`Shared::sync`]).
//!
//! *Death.* A library that has panicked must not write its state, which may be wrong: after
//! [`Storage::kill`](ImageFile::kill) every write fails.
//!
//! Locks: none here that is held across I/O, apart from the file's length. That metadata are
//! written by one thread at a time is the caller's duty ([`crate::image`]).
//!
//! UNSAFETY: the library's trait has `unsafe` methods, which may not be implemented otherwise.
//! Their contract restricts the caller (alignment, and ranges that others do not write); the bodies
//! are safe code, which asks for neither.

mod count_first;
mod zero;

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use vio::blk::Op;
use vio::blk::range::RangeSupport;

use crate::entry::{self, Target};
use crate::file_io::{FileIo, read_known, read_some};
use crate::header::{self, BARE_HEADER_BYTES, COMPRESSED, HEADER_BYTES, Layout, OFFSET_MASK, be64};
use crate::order::{Change, WriteOrder};
use crate::vet::{self, Tables};

/// File of an image, with the state that is shared with callers outside the library.
pub(crate) struct Shared {
    file: Box<dyn FileIo>,
    path: PathBuf,
    dead: AtomicBool,
    /// The error number of the sync that failed. Held while one runs.
    sync_error: Mutex<Option<i32>>,
    /// The length, which grows by writes past it.
    len: Mutex<u64>,
    /// Location of the tables, of a qcow2 image open for writing.
    layout: Mutex<Option<Layout>>,
    /// Calls that the file has for ranges; found out when the first is made.
    support: Mutex<Option<RangeSupport>>,
    /// Writes that no sync covers yet, of an image with barriers.
    order: Option<Mutex<WriteOrder>>,
    /// Bytes of a cluster; 1: a raw file, which ends where it ends.
    cluster: u64,
    /// It may have compressed data.
    has_packed: AtomicBool,
    /// Of a qcow2 image open for reading alone: the header that the library gets, and what its L2
    /// tables are checked by.
    read_only: Option<([u8; BARE_HEADER_BYTES], Tables)>,
}

/// Content of a file, as far as the storage must know it.
pub(crate) enum Content {
    /// The disk's bytes.
    Raw,
    /// A qcow2 image that is only read.
    Read(Layout, Tables),
    /// A qcow2 image that is written to, with its order if it has barriers.
    Written {
        layout: Layout,
        order: Option<WriteOrder>,
        has_packed: bool,
    },
}

/// One file of an image.
pub(crate) struct ImageFile {
    shared: Arc<Shared>,
    helper: CommonStorageHelper,
}

impl ImageFile {
    /// Wraps an open file of `len` bytes.
    pub(crate) fn new(file: Box<dyn FileIo>, path: PathBuf, len: u64, content: Content) -> Self {
        let cluster = match &content {
            Content::Raw => 1,
            Content::Read(layout, _) | Content::Written { layout, .. } => layout.cluster_bytes(),
        };
        let mut any_packed = false;
        let (layout, order, read_only) = match content {
            Content::Raw => (None, None, None),
            // Its L2 tables say so when they are read.
            Content::Read(layout, tables) => (None, None, Some((layout.bare_header(), tables))),
            Content::Written {
                layout,
                order,
                has_packed,
            } => {
                any_packed = has_packed;
                (Some(layout), order, None)
            }
        };
        Self {
            shared: Arc::new(Shared {
                file,
                path,
                dead: AtomicBool::new(false),
                sync_error: Mutex::new(None),
                len: Mutex::new(len),
                layout: Mutex::new(layout),
                support: Mutex::new(None),
                order: order.map(Mutex::new),
                cluster,
                has_packed: AtomicBool::new(any_packed),
                read_only,
            }),
            helper: CommonStorageHelper::default(),
        }
    }

    /// The same file, for a library that is to read it anew.
    pub(crate) fn of(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            helper: CommonStorageHelper::default(),
        }
    }

    /// The part that others may use.
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds these, and each guards one value.
    mutex.lock().unwrap_or_else(|poison| poison.into_inner())
}

impl Shared {
    /// From now on every write fails.
    pub(crate) fn kill(&self) {
        // Relaxed: it may let a write pass that has begun, and orders nothing else.
        self.dead.store(true, Ordering::Relaxed);
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads for the library.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = checked_end(offset, buffer.len() as u64)?;
        let Some((header, tables)) = &self.read_only else {
            return self.read_file(buffer, offset, end);
        };
        if end <= header.len() as u64 {
            // No data are there: the header's cluster is a table's.
            buffer.copy_from_slice(&header[offset as usize..end as usize]);
            return Ok(());
        }
        self.read_file(buffer, offset, end)?;
        if let Some(index) = tables.l2_table(offset, buffer.len() as u64) {
            let any_packed = tables.vet(&*self.file, index, buffer)?;
            if any_packed {
                // Relaxed: it is read by the thread that had this table read, or after a lock of
                // the library that hands the table on.
                self.has_packed.store(true, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Bytes of a cluster; 1 in a raw file.
    pub(crate) fn cluster_bytes(&self) -> u64 {
        self.cluster
    }

    /// Whether compressed data have been seen in the tables that the library has read.
    pub(crate) fn has_packed(&self) -> bool {
        self.has_packed.load(Ordering::Relaxed)
    }

    /// Reads a part of a cluster that is compressed, which begins at `offset` of the disk.
    ///
    /// The library's own way would take what it finds in a buffer for what the data refer to (see
    /// [`entry::unpack`]). The tables are read from the file, which has what the library has: the
    /// image is shared by readers.
    pub(crate) fn unpack(&self, offset: u64, part: &mut [u8]) -> io::Result<()> {
        let layout = match &self.read_only {
            Some((_, tables)) => Some(*tables.layout()),
            None => *held(&self.layout),
        };
        let named = |what: &str| {
            let path = self.path.display();
            let text = format!("{path}: compressed data of {offset:#x} of the disk {what}");
            io::Error::new(ErrorKind::InvalidData, text)
        };
        let layout = layout.ok_or_else(|| named("in a raw file"))?;
        let len = self.known_len();
        let mut word = [0; 8];
        let l1_entry = layout.l1_offset + offset / layout.l2_span() * 8;
        read_known(&*self.file, &mut word, l1_entry, len)?;
        let table = u64::from_be_bytes(word) & OFFSET_MASK;
        let index = (offset % layout.l2_span()) >> layout.cluster_bits;
        // No table: an entry of nothing.
        word = [0; 8];
        if table != 0 {
            read_known(&*self.file, &mut word, table + index * 8, len)?;
        }
        let Ok(Target::Compressed {
            offset: at,
            len: sectors,
            skip,
        }) = entry::target(&layout, u64::from_be_bytes(word))
        else {
            return Err(named("are not where they were"));
        };
        let mut cluster = vec![0; layout.cluster_bytes() as usize];
        if !entry::unpack(&*self.file, len, (at, sectors, skip), &mut cluster)? {
            return Err(named("cannot be decompressed to a cluster"));
        }
        let within = (offset % layout.cluster_bytes()) as usize;
        part.copy_from_slice(&cluster[within..within + part.len()]);
        Ok(())
    }

    fn read_file(&self, buffer: &mut [u8], offset: u64, end: u64) -> io::Result<()> {
        let done = read_some(&*self.file, buffer, offset)?;
        if done == buffer.len() {
            return Ok(());
        }
        let named = |what: String| {
            io::Error::new(
                ErrorKind::UnexpectedEof,
                format!("{}: {what}", self.path.display()),
            )
        };
        if let Some(fault) = vet::trapped(offset) {
            return Err(named(format!("a cluster's data are {fault}")));
        }
        let len = self.known_len();
        // No overflow: `len` is a file's.
        if end > len.next_multiple_of(self.cluster) {
            return Err(named(format!(
                "a cluster's data at {offset:#x} are outside the file"
            )));
        }
        // Again, for another thread's write may have made the file longer since.
        let rest = &mut buffer[done..];
        read_known(&*self.file, rest, offset + done as u64, len)
            .map_err(|error| named(error.to_string()))
    }

    /// The length, as far as it is known to be there.
    fn known_len(&self) -> u64 {
        *held(&self.len)
    }

    /// Makes everything written stable.
    ///
    /// Once a sync has failed, every later one fails likewise, until the file is opened anew. The
    /// kernel reports an error of writing its cache to the disk once, and takes the pages for
    /// written afterwards: the next fdatasync would succeed although they are lost. (QEMU's
    /// file-posix does the same.) One runs at a time, so that the one to which the kernel reports
    /// is not overtaken by one that succeeds.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let mut failed = held(&self.sync_error);
        if let Some(errno) = *failed {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let writes = self.order.as_ref().map(|order| held(order).writes());
        if let Err(error) = self.file.sync_data() {
            *failed = Some(error.raw_os_error().unwrap_or(libc::EIO));
            tracing::error!(
                "syncing {} failed; what was written since the last sync may be lost, and every \
                 flush will fail \
                 until the image is opened again: {error}",
                self.path.display()
            );
            return Err(error);
        }
        if let Some(order) = &self.order {
            held(order).synced(writes.unwrap_or_default());
        }
        Ok(())
    }

    /// Syncs the writes that opening the image made: the header may say no longer that bitmaps are
    /// up to date, and data that they do not know of must not be on the disk before that.
    pub(crate) fn settle(&self) -> io::Result<()> {
        match &self.order {
            Some(order) if !held(order).is_settled() => self.sync(),
            _ => Ok(()),
        }
    }

    /// Whether an L2 entry in the file, of this range of the disk, refers to a cluster. True if
    /// that is not known. A range is looked at up to the end of the L2 table that has its
    /// beginning.
    pub(crate) fn has_clusters(&self, offset: u64, len: u64) -> io::Result<bool> {
        let Some(layout) = *held(&self.layout) else {
            return Ok(true);
        };
        let mut word = [0; 8];
        let index = offset / layout.l2_span();
        if index >= layout.l1_entries {
            return Ok(true);
        }
        let file_len = self.known_len();
        read_known(
            &*self.file,
            &mut word,
            layout.l1_offset + index * 8,
            file_len,
        )?;
        let table = u64::from_be_bytes(word) & OFFSET_MASK;
        if table == 0 {
            return Ok(false);
        }
        let within = offset % layout.l2_span();
        let end = (within + len).min(layout.l2_span());
        let first = within >> layout.cluster_bits;
        let count = end.div_ceil(layout.cluster_bytes()) - first;
        // At most a cluster, of 2 MiB.
        let mut entries = vec![0; count as usize * 8];
        read_known(&*self.file, &mut entries, table + first * 8, file_len)?;
        let is_there = |at| be64(&entries, at) & (OFFSET_MASK | COMPRESSED) != 0;
        Ok((0..entries.len()).step_by(8).any(is_there))
    }

    /// Gives the space of a range back that holds nothing any more; a file system that cannot keeps
    /// it.
    pub(crate) fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.alive()?;
        let change = self.before(|order, layout| Ok(order.emptying(layout, offset, len)))?;
        let _ = self.range(Op::Discard { offset, len });
        self.after(change);
        Ok(())
    }

    /// Returns the change that is about to be made, as `change` says, once whatever must precede it
    /// is on the disk.
    fn before(
        &self,
        change: impl FnOnce(&WriteOrder, &Layout) -> io::Result<Change>,
    ) -> io::Result<Option<Change>> {
        let (Some(order), Some(layout)) = (&self.order, *held(&self.layout)) else {
            return Ok(None);
        };
        let guard = held(order);
        let change = change(&guard, &layout)?;
        let must_sync = guard.must_sync(&change);
        drop(guard);
        if must_sync {
            self.sync()?;
        }
        Ok(Some(change))
    }

    /// The change is in the file, or failed under way.
    fn after(&self, change: Option<Change>) {
        if let (Some(order), Some(change)) = (&self.order, change) {
            held(order).changed(change);
        }
    }

    fn alive(&self) -> io::Result<()> {
        if self.dead.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.alive()?;
        let end = checked_end(offset, bytes.len() as u64)?;
        self.count_first(bytes, offset)?;
        let len = self.known_len();
        let change =
            self.before(|order, layout| order.change(&*self.file, layout, len, offset, bytes))?;
        let written = self.file.write_all_at(bytes, offset);
        self.after(change);
        written?;
        let mut len = held(&self.len);
        *len = (*len).max(end);
        drop(len);
        if offset < HEADER_BYTES as u64 {
            self.header_written()?;
        }
        Ok(())
    }

    /// The tables may have moved.
    fn header_written(&self) -> io::Result<()> {
        let mut layout = held(&self.layout);
        let Some(old) = *layout else { return Ok(()) };
        let len = self.known_len();
        // The library wrote it just now. If it makes no sense nevertheless, the old one is the
        // better guess.
        if let Ok(bytes) = header::read(&*self.file, len)
            && let Ok(new) = Layout::parse(&bytes, len)
            && new.check_counts(&bytes, len).is_ok()
            && new != old
        {
            *layout = Some(new);
            if let Some(order) = &self.order {
                held(order).moved(&*self.file, &old, &new, len)?;
            }
        }
        Ok(())
    }
}

fn checked_end(offset: u64, len: u64) -> io::Result<u64> {
    offset
        .checked_add(len)
        .filter(|end| i64::try_from(*end).is_ok())
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))
}

impl Storage for ImageFile {
    fn size(&self) -> io::Result<u64> {
        Ok(*held(&self.shared.len))
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, mut offset: u64) -> io::Result<()> {
        for mut slice in bufv.into_inner() {
            self.shared.read(&mut slice, offset)?;
            offset = checked_end(offset, slice.len() as u64)?;
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, mut offset: u64) -> io::Result<()> {
        for slice in bufv.into_inner() {
            self.shared.write(&slice, offset)?;
            offset = checked_end(offset, slice.len() as u64)?;
        }
        Ok(())
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.shared.zero(true, offset, length)
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.shared.zero(false, offset, length)
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.shared.punch(offset, length)
    }

    fn flush(&self) -> io::Result<()> {
        // Nothing is kept here.
        self.shared.alive()
    }

    fn sync(&self) -> io::Result<()> {
        self.shared.sync()
    }

    fn settle_writes(&self) -> io::Result<()> {
        // Every write has ended when its call returns.
        Ok(())
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}

impl fmt::Debug for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ImageFile").field(&self.shared.path).finish()
    }
}

impl fmt::Display for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.path.display().fmt(f)
    }
}
