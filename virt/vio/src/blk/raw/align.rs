//! Alignment of operations past the page cache.
//!
//! | | offsets, lengths of transfers and of their pieces | addresses in memory |
//! |---|---|---|
//! | block device | its logical block | as statx says; else as its offsets |
//! | file, Linux 6.1 and a file system that says | as statx says | as statx says |
//! | other | a sector | a sector |
//!
//! Kernels differ in what they refuse of a piece's length; none refuses whole blocks.

use std::fs::File;
use std::io;

use rustix::fs::{AtFlags, StatxFlags, ioctl_blksszget, statx};

use super::super::SECTOR;
use super::super::backend::Piece;

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
        let about = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
        let told = about.filter(|about| about.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
        let block = match (is_block_device, &told) {
            (true, _) => ioctl_blksszget(file)?,
            (false, Some(told)) => told.stx_dio_offset_align,
            (false, None) => 0,
        };
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
