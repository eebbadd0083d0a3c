//! The operations of an open image, each carried out to its end by the thread that calls it.
//!
//! *The gate.* What changes the image's metadata has the image to itself; everything else shares
//! it. A read, and a write to clusters that are all there already, share. A write that needs
//! clusters, a discard and a write-zeroes are alone, and **write the changed metadata to the file
//! before they release it** and before they are reported done. Three things follow:
//!
//! - An operation that was reported done survives the death of the process, flushed or not: all of
//!   it is in the kernel. (Only a power cut makes [`Image::flush`] matter.)
//! - The library's order of writing, reference counts before what needs them and after what no
//!   longer does, holds in the file. It would not if tables changed while they are flushed.
//! - A cluster that is freed is not allocated again before the file records that it was freed.
//!   For this a range is also cut where one L2 table ends and the next begins, with a flush
//!   between.
//!
//! The storage sees to what a power cut needs beyond that ([`crate::order`]): it syncs the file
//! under the gate. The order of the writes to the file that a flush makes is the one that is
//! needed; the disk keeps to it.
//!
//! *Failures.* An operation that releases the image with metadata that could not be written leaves
//! the library with tables in memory that the file does not have, and that it would take for
//! written: an L1 entry whose write failed is not written again, and everything under it would be
//! reported done, flushed, and gone. So the library's memory is thrown away and the file read anew.
//! Operations reported done are in the file, as when the process dies.
//!
//! *Groups.* [`Group`] lets several writes that only add clusters share one flush; they are all
//! reported after it.
//!
//! *Panics.* The thread that holds the gate while the library panics forbids writing to the file
//! before it releases it.
//!
//! The gate is fair: under a stream of allocating writes a read has its turn after the group in
//! progress.

mod packed;

use std::io::{self, ErrorKind};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use imago::{FormatAccess, Mapping, ShallowMapping};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use vio::LogRateLimit;

use crate::chain::{Files, Opened};
use crate::storage::{ImageFile, Shared};
use packed::{check_copied, read_packed};

/// Bytes of zeroes written at a time where the format has no zero clusters.
const ZERO_STEP: u64 = 1 << 20;

/// An image open for reading, and perhaps writing.
pub(crate) struct Image {
    access: RwLock<FormatAccess<ImageFile>>,
    files: Files,
    /// Bytes that one L2 table describes, and bytes of a cluster; a raw image has neither.
    l2_span: u64,
    cluster: u64,
    /// Zero clusters exist.
    has_zeroes: bool,
    /// The library remembers something that the file does not have, and the file could not be read
    /// anew. Written under the write lock.
    is_torn: AtomicBool,
    /// Budget of log lines about faults of the image.
    lines: Mutex<LogRateLimit>,
    opened: Instant,
    pub size: u64,
}

/// Check, when the gate is released, whether the library has panicked.
struct PoisonOnPanic<'a>(&'a Shared);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.kill();
        }
    }
}

/// A share in the image. The fields are dropped in this order.
struct ReadGuard<'a> {
    _alarm: PoisonOnPanic<'a>,
    access: RwLockReadGuard<'a, FormatAccess<ImageFile>>,
}

impl Deref for ReadGuard<'_> {
    type Target = FormatAccess<ImageFile>;

    fn deref(&self) -> &Self::Target {
        &self.access
    }
}

/// The image to oneself. The fields are dropped in this order.
struct WriteGuard<'a> {
    _alarm: PoisonOnPanic<'a>,
    access: RwLockWriteGuard<'a, FormatAccess<ImageFile>>,
    image: &'a Image,
    /// The library may remember something that the file does not have.
    is_dirty: bool,
}

impl Deref for WriteGuard<'_> {
    type Target = FormatAccess<ImageFile>;

    fn deref(&self) -> &Self::Target {
        &self.access
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.is_dirty = true;
        &mut self.access
    }
}

impl WriteGuard<'_> {
    /// The library is about to change tables.
    fn soil(&mut self) {
        self.is_dirty = true;
    }

    /// Writes the metadata that changed.
    fn flush(&mut self) -> io::Result<()> {
        if self.is_dirty {
            self.access.flush()?;
            self.is_dirty = false;
        }
        Ok(())
    }

    /// Discards the library's state.
    fn load(&mut self) -> io::Result<()> {
        *self.access = self.image.files.load()?;
        self.is_dirty = false;
        // Relaxed, here and below: the gate orders it.
        self.image.is_torn.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        // The metadata could not be written. (After a panic nothing is written any more, and
        // nothing read anew.)
        if self.is_dirty && !std::thread::panicking() {
            self.image.is_torn.store(true, Ordering::Relaxed);
            // The next operation tries again, and has the error then.
            let _ = self.load();
        }
    }
}

/// Allocation that a write needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllocationNeed {
    /// All its clusters are there and may be written.
    Nothing,
    /// New clusters, and no old ones become free.
    Clusters,
    /// New clusters in the place of others.
    Replacement,
}

impl Image {
    pub(crate) fn new(opened: Opened) -> Self {
        let Opened {
            access,
            files,
            layout,
        } = opened;
        let size = access.size();
        Self {
            access: RwLock::new(access),
            files,
            l2_span: layout.map_or(u64::MAX, |layout| layout.l2_span()),
            cluster: layout.map_or(1, |layout| layout.cluster_bytes()),
            has_zeroes: layout.is_some_and(|layout| layout.version >= 3),
            is_torn: AtomicBool::new(false),
            lines: Mutex::default(),
            opened: Instant::now(),
            size,
        }
    }

    /// After a panic of the library: nothing reaches the file any more.
    pub(crate) fn kill(&self) {
        self.files.own().kill();
    }

    /// Logs the library's or the storage's description of an error that the guest receives as
    /// `errno`; the device itself logs that there was one. Errors that the image causes become EIO,
    /// and are logged as far as there is a budget of lines.
    pub(crate) fn explain(&self, error: &io::Error, errno: i32) {
        let path = self.files.own().path().display();
        if errno != libc::EIO {
            tracing::debug!("an operation on {path} failed: {error}");
            return;
        }
        let now_ns = u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // One worker at a time, as the budget has it.
        let Some(suppressed) = self.lines.lock().admits_at(now_ns) else {
            return;
        };
        let more = LogRateLimit::left_out(suppressed);
        tracing::warn!(image = %path, "an operation failed: {error}{more}");
    }

    pub(crate) fn path(&self) -> &Path {
        self.files.own().path()
    }

    fn read_lock(&self) -> io::Result<ReadGuard<'_>> {
        loop {
            let access = self.access.read();
            if !self.is_torn.load(Ordering::Relaxed) {
                return Ok(ReadGuard {
                    _alarm: PoisonOnPanic(self.files.own()),
                    access,
                });
            }
            drop(access);
            self.write_lock()?;
        }
    }

    fn write_lock(&self) -> io::Result<WriteGuard<'_>> {
        let access = self.access.write();
        let mut alone = WriteGuard {
            _alarm: PoisonOnPanic(self.files.own()),
            access,
            image: self,
            is_dirty: false,
        };
        if self.is_torn.load(Ordering::Relaxed) {
            alone.load()?;
        }
        Ok(alone)
    }

    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let access = self.read_lock()?;
        panic_in_tests(offset);
        if !self.files.has_packed() {
            access.read(&mut *data, offset)?;
            // Still so, unless the tables for it have just been read.
            if !self.files.has_packed() {
                return Ok(());
            }
        }
        read_packed(&self.files, &access, offset, data)
    }

    /// Writes what needs no new clusters; false: it does need some, and nothing has been written.
    pub(crate) fn overwrite(&self, offset: u64, data: &[u8]) -> io::Result<bool> {
        let access = self.read_lock()?;
        if need(&access, None, offset, data.len() as u64)? != AllocationNeed::Nothing {
            return Ok(false);
        }
        access.write(data, offset)?;
        Ok(true)
    }

    /// Begins a series of writes that have the image to themselves.
    pub(crate) fn group(&self) -> io::Result<Group<'_>> {
        Ok(Group {
            access: self.write_lock()?,
            files: &self.files,
            cluster: self.cluster,
            file: self.files.own(),
            l2_span: self.l2_span,
        })
    }

    /// Makes everything that was done stable.
    pub(crate) fn flush(&self) -> io::Result<()> {
        // Every operation that was reported done has written its metadata.
        self.files.own().sync()
    }

    /// The range's contents are no longer needed.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        for (offset, len) in pieces(offset, len, self.l2_span) {
            self.discard_piece(offset, len)?;
        }
        Ok(())
    }

    fn discard_piece(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut access = self.write_lock()?;
        let mut freed = Vec::new();
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (kind, run) = run_at(&access, at, end - at)?;
            if kind != Run::Zero {
                self.discard_run(&mut access, at, run, kind, &mut freed)?;
            }
            at += run;
        }
        access.flush()?;
        // Nothing refers to these any more, and no operation can have been given them.
        for (offset, len) in freed {
            self.files.own().punch(offset, len)?;
        }
        Ok(())
    }

    /// Frees the clusters that lie in a run entirely.
    fn discard_run(
        &self,
        access: &mut FormatAccess<ImageFile>,
        at: u64,
        run: u64,
        kind: Run,
        freed: &mut Vec<(u64, u64)>,
    ) -> io::Result<()> {
        if self.cluster == 1 {
            if let Run::Own(host) = kind {
                freed.push((host, run));
            }
            return Ok(());
        }
        if !self.has_zeroes {
            // In version 2 "no cluster" is the only way to say zero, and only with nothing behind.
            return if self.files.has_backing() {
                Ok(())
            } else {
                access.discard_to_backing(at, run)
            };
        }
        access.discard_to_any(at, run)?;
        if let Run::Own(host) = kind {
            let first = at.next_multiple_of(self.cluster);
            let last = if at + run == self.size {
                at + run
            } else {
                (at + run) / self.cluster * self.cluster
            };
            if first < last {
                freed.push((host + (first - at), last - first));
            }
        }
        Ok(())
    }

    /// The range becomes zero; `unmap`: and need not keep its clusters.
    pub(crate) fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        for (offset, len) in pieces(offset, len, self.l2_span) {
            let mut access = self.write_lock()?;
            check_copied(&self.files, &access, self.cluster, offset, len)?;
            let done = if is_zero(&access, offset, len)? {
                Ok(())
            } else if unmap && self.cluster != 1 {
                access.soil();
                access.discard_to_zero(offset, len)
            } else {
                access.soil();
                access.write_zeroes(offset, len)
            };
            match done {
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    access.soil();
                    let zeroes = vec![0; len.min(ZERO_STEP) as usize];
                    for (offset, len) in pieces(offset, len, ZERO_STEP) {
                        access.write(&zeroes[..len as usize], offset)?;
                    }
                }
                done => done?,
            }
            access.flush()?;
        }
        Ok(())
    }
}

/// Writes under one hold of the gate. To be [`flush`](Group::flush)ed before any of them is
/// reported done.
pub(crate) struct Group<'a> {
    access: WriteGuard<'a>,
    files: &'a Files,
    cluster: u64,
    file: &'a Shared,
    l2_span: u64,
}

impl Group<'_> {
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut data = data;
        panic_in_tests(offset);
        for (offset, len) in pieces(offset, data.len() as u64, self.l2_span) {
            let (piece, rest) = data.split_at(len as usize);
            data = rest;
            let need = need(&self.access, Some(self.file), offset, len)?;
            if need != AllocationNeed::Nothing {
                check_copied(self.files, &self.access, self.cluster, offset, len)?;
            }
            match need {
                AllocationNeed::Nothing => self.access.write(piece, offset)?,
                AllocationNeed::Clusters => {
                    self.access.soil();
                    self.access.write(piece, offset)?;
                }
                AllocationNeed::Replacement => {
                    self.access.soil();
                    self.access.write(piece, offset)?;
                    self.flush()?;
                }
            }
        }
        Ok(())
    }

    /// Writes the metadata that changed.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.access.flush()
    }
}

/// An offset at which a unit test wants the library to panic, for no image is known that makes it.
#[cfg(test)]
pub(crate) const PANIC: u64 = 1 << 62;

fn panic_in_tests(_offset: u64) {
    #[cfg(test)]
    assert_ne!(_offset, PANIC, "a panic on request");
}

/// Cuts a range where multiples of `span` lie.
fn pieces(offset: u64, len: u64, span: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        let rest = end - at;
        if rest == 0 {
            return None;
        }
        let piece = (at, rest.min(span - at % span));
        at += piece.1;
        Some(piece)
    })
}

/// Something the library promises: a mapping that is not at the end of the disk has bytes.
fn some(run: u64) -> io::Result<u64> {
    if run == 0 {
        return Err(io::Error::other("the disk ends before its size"));
    }
    Ok(run)
}

/// Needs of a write of this range. `file`: one whose explicit zeroes are those of the image; the
/// range lies in one L2 table then.
fn need(
    access: &FormatAccess<ImageFile>,
    file: Option<&Shared>,
    offset: u64,
    len: u64,
) -> io::Result<AllocationNeed> {
    let (mut at, end) = (offset, offset + len);
    let mut need = AllocationNeed::Nothing;
    while at < end {
        let (mapping, run) = access.get_shallow_mapping(at, end - at)?;
        match mapping {
            ShallowMapping::Raw { writable: true, .. } => {}
            ShallowMapping::Indirect { .. }
            | ShallowMapping::Zero {
                explicit: false, ..
            } => {
                need = AllocationNeed::Clusters;
            }
            // It may have a cluster in waiting that turns out to be in the wrong place. The file
            // knows: entries become explicit zeroes only by operations that write their metadata at
            // once, not in a group of writes.
            ShallowMapping::Zero { explicit: true, .. } => match file {
                Some(file) if !file.has_clusters(at, some(run)?)? => {
                    need = AllocationNeed::Clusters
                }
                _ => return Ok(AllocationNeed::Replacement),
            },
            _ => return Ok(AllocationNeed::Replacement),
        }
        at += some(run)?;
    }
    Ok(need)
}

/// Content of a range, as far as a discard distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// It reads as zero already.
    Zero,
    /// Data of this image alone, from here on in its file.
    Own(u64),
    /// Other data.
    Data,
}

fn run_at(access: &FormatAccess<ImageFile>, at: u64, len: u64) -> io::Result<(Run, u64)> {
    let (mapping, run) = access.get_mapping(at, len)?;
    let kind = match mapping {
        Mapping::Zero { .. } => Run::Zero,
        Mapping::Raw {
            offset,
            writable: true,
            ..
        } => Run::Own(offset),
        _ => Run::Data,
    };
    Ok((kind, some(run)?))
}

/// Whether a range reads as zero without a look at data.
fn is_zero(access: &FormatAccess<ImageFile>, offset: u64, len: u64) -> io::Result<bool> {
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let (kind, run) = run_at(access, at, end - at)?;
        if kind != Run::Zero {
            return Ok(false);
        }
        at += run;
    }
    Ok(true)
}
