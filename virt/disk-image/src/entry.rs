//! Entries of the L1 table and of L2 tables, and the faults of one (§ "L1 table entry",
//! "L2 table entry").
//!
//! Whether the target of an entry belongs to something else is not known here: see
//! [`crate::check`] and [`crate::vet`].

use std::io;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use crate::file_io::{FileIo, read_known};
use crate::header::{COMPRESSED, Layout, OFFSET_MASK};

/// The cluster's reference count is one, so it may be written to. Of no meaning to a reader.
pub(crate) const COPIED: u64 = 1 << 63;
/// The cluster reads as zeroes (version 3).
pub(crate) const ZERO: u64 = 1;
/// Bits of an L1 entry that are reserved.
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Bits of an L2 entry of a standard cluster that are reserved.
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// Fault of a table's entry that makes the mapped data unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EntryFault {
    /// No byte of it is there, or (compressed) not all of its sectors are.
    #[error("outside the file")]
    Outside,
    /// It begins in the file, and the guest can see bytes of it that are beyond the end.
    #[error("cut short by the end of the file")]
    CutShort,
    /// It is where the header, a table or a refcount block is.
    #[error("where something else is, too")]
    OnTables,
    /// Clusters begin at multiples of their size.
    #[error("not at the beginning of a cluster")]
    Unaligned,
    /// Bits that no version of the format defines.
    #[error("described with reserved bits set")]
    Reserved,
    /// Version 2 has no zero clusters.
    #[error("marked as zeroes, which version 2 of the format does not have")]
    ZeroInVersion2,
    /// Offset 0 is the header, and says "none" only without flags.
    #[error("at the header's offset")]
    OnHeader,
    /// The last sector of compressed data is there in part, and the part is no whole cluster.
    #[error("compressed and end early")]
    EndsEarly,
}

impl EntryFault {
    /// All of them: what [`crate::vet`] numbers.
    pub(crate) const ALL: [Self; 8] = [
        Self::Outside,
        Self::CutShort,
        Self::OnTables,
        Self::Unaligned,
        Self::Reserved,
        Self::ZeroInVersion2,
        Self::OnHeader,
        Self::EndsEarly,
    ];
}

/// Meaning of an L2 entry for a guest cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Nothing: the backing file has it, or it reads as zeroes.
    Nothing,
    /// Zeroes; the offset of a cluster that is kept for it, or 0.
    Zeroes(u64),
    /// A cluster at this offset.
    Data(u64),
    /// Compressed data in these sectors: their offset and length, and where in the first one the
    /// data begin.
    Compressed { offset: u64, len: u64, skip: u64 },
}

/// Offset of the L2 table that an entry of the L1 table refers to; 0: none.
pub(crate) fn l2_table(layout: &Layout, entry: u64) -> Result<u64, EntryFault> {
    let offset = entry & OFFSET_MASK;
    if entry & L1_RESERVED != 0 {
        return Err(EntryFault::Reserved);
    }
    if !offset.is_multiple_of(layout.cluster_bytes()) {
        return Err(EntryFault::Unaligned);
    }
    if offset == 0 && entry & COPIED != 0 {
        return Err(EntryFault::OnHeader);
    }
    Ok(offset)
}

/// Decodes an L2 entry; its bits alone are checked.
pub(crate) fn target(layout: &Layout, entry: u64) -> Result<Target, EntryFault> {
    if entry & COMPRESSED != 0 {
        let (offset, len) = layout.compressed(entry);
        // The library takes the lower 56 bits of an offset that can have 61.
        if offset & !OFFSET_MASK != 0 {
            return Err(EntryFault::Outside);
        }
        let skip = entry & 511;
        return Ok(Target::Compressed { offset, len, skip });
    }
    let offset = entry & OFFSET_MASK;
    if entry & L2_RESERVED != 0 {
        return Err(EntryFault::Reserved);
    }
    if !offset.is_multiple_of(layout.cluster_bytes()) {
        return Err(EntryFault::Unaligned);
    }
    if entry & ZERO != 0 {
        return match layout.version {
            2 => Err(EntryFault::ZeroInVersion2),
            _ => Ok(Target::Zeroes(offset)),
        };
    }
    match (offset, entry & COPIED) {
        (0, 0) => Ok(Target::Nothing),
        (0, _) => Err(EntryFault::OnHeader),
        _ => Ok(Target::Data(offset)),
    }
}

/// Whether a file of `len` bytes has what the guest can see of the cluster at `offset`, which is
/// the disk's at `guest`.
///
/// Only what lies beyond the end of the *disk* may be missing: nothing reads it. (QEMU writes
/// clusters whole. It reads zeroes beyond the end of a file that was cut, which this crate does
/// not.)
pub(crate) fn has_data(
    layout: &Layout,
    len: u64,
    offset: u64,
    guest: u64,
) -> Result<(), EntryFault> {
    let cluster = layout.cluster_bytes();
    // What is mapped beyond the end of the disk is never read.
    let visible = layout.size.saturating_sub(guest).clamp(1, cluster);
    match len.checked_sub(offset) {
        None | Some(0) => Err(EntryFault::Outside),
        Some(rest) if rest < visible => Err(EntryFault::CutShort),
        Some(_) => Ok(()),
    }
}

/// Whether a file of `len` bytes has the compressed data in these sectors (§ "Compressed Clusters
/// Descriptor").
///
/// Of the last sector the file may have only what is used. That it is all that is used shows in
/// decompressing: a stream that was cut could go on with zeroes, and would then say something else.
pub(crate) fn has_compressed(
    file: &dyn FileIo,
    layout: &Layout,
    len: u64,
    (offset, sectors, skip): (u64, u64, u64),
) -> io::Result<Result<(), EntryFault>> {
    let end = offset + sectors;
    if end <= len {
        return Ok(Ok(()));
    }
    if end - len >= 512 || offset + skip >= len {
        return Ok(Err(EntryFault::Outside));
    }
    let mut cluster = vec![0; layout.cluster_bytes() as usize];
    Ok(
        match unpack(file, len, (offset, sectors, skip), &mut cluster)? {
            true => Ok(()),
            false => Err(EntryFault::EndsEarly),
        },
    )
}

/// Reads the compressed data in these sectors of a file of `len` bytes, and what they say, into a
/// cluster; false: they do not say it all, or nothing that can be understood.
///
/// The library lets data refer to what stands in the cluster's buffer from an earlier use; here
/// that is a fault.
pub(crate) fn unpack(
    file: &dyn FileIo,
    len: u64,
    (offset, sectors, skip): (u64, u64, u64),
    cluster: &mut [u8],
) -> io::Result<bool> {
    let start = offset + skip;
    let end = (offset + sectors).min(len);
    // At most two clusters, of 2 MiB.
    let mut packed = vec![0; end.saturating_sub(start) as usize];
    read_known(file, &mut packed, start, len)?;
    let mut state = DecompressorOxide::new();
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, written) = decompress(&mut state, &packed, cluster, 0, flags);
    // What follows a whole cluster is not of this one.
    let is_good = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    Ok(is_good && written == cluster.len())
}
