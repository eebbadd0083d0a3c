//! Alignment of operations past the page cache.
//!
//! | | offsets, lengths of transfers and of their pieces | addresses in memory |
//! |---|---|---|
//! | block device | its logical block | as statx says; else as its offsets |
//! | file, Linux 6.1 and a file system that says | as statx says | as statx says |
//! | either, where the host does not say | the logical block that /sys has of the device, and what a read shows to be enough | as its offsets |
//!
//! The read is of the first data in the file, since file systems do not look at the alignment of
//! what they need not fetch. A file without data over a device that is not known (a file system of
//! several, or there is no /sys) is taken for one of sectors. So is one of a file system that is
//! answered by another program or machine (FUSE, NFS, SMB, 9p, Ceph): the kernel asks for no
//! alignment there, and the read would wait at the start for as long as the other side likes, where
//! no signal ends it.
//!
//! Kernels differ in what they refuse of a piece's length; none refuses whole blocks.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{AtFlags, SeekFrom, StatxFlags, ioctl_blksszget, seek, statx};
use rustix::io::{Errno, pread};

use super::super::SECTOR;
use super::super::backend::Piece;
use super::super::range::queue_limit;
use super::aligned_copy::Page;
use super::file_system;

/// In bytes, powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Of offsets and lengths: a sector at least.
    pub(super) block: u32,
    /// Of addresses in memory; `None`: whatever they are, also in pieces of any length.
    pub(super) memory: Option<u32>,
}

impl Alignment {
    /// Of a file in the page cache.
    pub(super) const CACHED: Self = Self {
        block: SECTOR as u32,
        memory: None,
    };

    /// Of `file`, opened with O_DIRECT.
    pub(super) fn direct(file: &File, is_block_device: bool) -> io::Result<Self> {
        let about = file.metadata()?;
        let told = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
        let told = told.filter(|told| told.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
        let (device, block) = match is_block_device {
            true => (about.rdev(), ioctl_blksszget(file).ok()),
            false => (about.dev(), told.map(|told| told.stx_dio_offset_align)),
        };
        let block = block.unwrap_or_else(|| match is_answered_elsewhere(file) {
            true => 0,
            false => logical_block(device).max(readable_block(file)),
        });
        let block = block.max(SECTOR as u32);
        let memory = told.map_or(block, |told| told.stx_dio_mem_align);
        Ok(Self {
            block,
            memory: Some(memory.max(1)),
        })
    }

    /// Whether a range of the file is whole blocks.
    #[inline]
    pub(super) fn fits(self, offset: u64, len: impl Into<u64>) -> bool {
        (offset | len.into()).is_multiple_of(u64::from(self.block))
    }

    /// Whether a transfer from `offset` on may have these pieces.
    #[inline]
    pub(super) fn takes(self, offset: u64, pieces: &[Piece]) -> bool {
        self.memory.is_none_or(|memory| {
            self.fits(offset, 0u32)
                && pieces.iter().all(|piece| {
                    piece.hva.raw().is_multiple_of(u64::from(memory))
                        && piece.len.is_multiple_of(self.block)
                })
        })
    }
}

/// Whether another program or machine answers reads of `file`.
fn is_answered_elsewhere(file: &File) -> bool {
    const FUSE: u32 = 0x6573_5546;
    const NFS: u32 = 0x6969;
    const SMB1: u32 = 0xff53_4d42;
    const SMB2: u32 = 0xfe53_4d42;
    const V9FS: u32 = 0x0102_1997;
    const CEPH: u32 = 0x00c3_6400;
    file_system(file).is_some_and(|magic| [FUSE, NFS, SMB1, SMB2, V9FS, CEPH].contains(&magic))
}

/// The logical block of a block device; 0 if that is not known.
fn logical_block(device: u64) -> u32 {
    let block = queue_limit(device, "logical_block_size");
    block.and_then(|block| block.try_into().ok()).unwrap_or(0)
}

/// The least block, up to a page, by which a file opened with O_DIRECT can be read where its first
/// data are; 0 if it has none, or fails in another way.
fn readable_block(file: &File) -> u32 {
    let offset = match seek(file, SeekFrom::Data(0)) {
        Ok(offset) => offset,
        // All of it is a hole.
        Err(Errno::NXIO) => return 0,
        Err(_) => 0,
    };
    let mut page = Page::ZERO;
    let sizes = std::iter::successors(Some(SECTOR as usize), |size| Some(size * 2));
    let mut sizes = sizes.take_while(|&size| size <= Page::LEN);
    let is_taken =
        |&size: &usize| pread(file, &mut page.bytes_mut()[..size], offset) != Err(Errno::INVAL);
    sizes.find(is_taken).unwrap_or(Page::LEN) as u32
}
