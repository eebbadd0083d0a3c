//! L2 tables of images that are only read, checked each time one is read from the file.
//!
//! An image that is opened for writing is checked whole beforehand (see [`crate::check`]). For one
//! that is only read this would take too long: a chain may have many large files of which a guest
//! reads little. So at opening only the L1 table is checked: it lies in the file, and so does each
//! L2 table that it refers to, without an overlap with other metadata. An L2 table is checked when
//! the library reads it from the file.
//!
//! A faulty entry is replaced, in the library's copy of the table, by one that the library accepts
//! and that leads past the end of every file: to [`TRAP`] plus a multiple of `TRAP_STEP` that
//! encodes the fault. So only reads of that cluster fail, wherever in a chain the image is. Neither
//! the file nor its table is written.
//!
//! Not checked, since reading does not depend on them: reference counts, the flag that a count is
//! one, the cluster that is allocated for one that reads as zeroes, and whether two clusters of the
//! disk share one of the file.
//!
//! Cost, for a table of 64 KiB: about as much as reading it from the page cache. Memory: 16 bytes
//! for each L2 table and refcount block.

use std::io;
use std::ops::Range;

use crate::check;
use crate::entry::{self, COPIED, EntryFault, Target, ZERO};
use crate::file_io::{FileIo, read_known};
use crate::header::{COMPRESSED, Layout, OFFSET_MASK, be64};
use crate::options::ImageErrorKind;

/// Offset with which faulty entries are replaced (almost 64 PiB): no file is as long, and every
/// cluster size divides it.
pub(crate) const TRAP: u64 = 0x00ff_0000_0000_0000;
/// Distance between the offsets of two kinds of fault: the largest cluster size.
const TRAP_STEP: u64 = 2 << 20;

/// Returns the fault that `offset` encodes, if it is one of [`trap`].
pub(crate) fn trapped(offset: u64) -> Option<EntryFault> {
    let step = offset.checked_sub(TRAP)? / TRAP_STEP;
    EntryFault::ALL.get(usize::try_from(step).ok()?).copied()
}

/// Returns the offset that encodes `fault`.
fn trap(fault: EntryFault) -> u64 {
    let step = EntryFault::ALL.iter().position(|kind| *kind == fault);
    TRAP + step.unwrap_or(0) as u64 * TRAP_STEP
}

/// Use of a cluster that holds no data of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    /// The L2 table of this entry of the L1 table.
    L2(u32),
    /// Header, L1 table, refcounts, snapshots.
    Other,
}

/// Clusters of a file that hold metadata, for an image that is only read.
pub(crate) struct Tables {
    layout: Layout,
    /// Length of the file.
    len: u64,
    /// Sorted by cluster number; each cluster occurs once.
    owners: Vec<(u64, Owner)>,
}

impl Tables {
    /// Reads the L1 table of the image in `file`, which has `len` bytes.
    pub(crate) fn read(
        file: &dyn FileIo,
        layout: &Layout,
        len: u64,
    ) -> Result<Self, ImageErrorKind> {
        let bits = layout.cluster_bits;
        let mut owners = vec![(0, Owner::Other)];
        let mut ranges = vec![(layout.l1_offset, layout.l1_entries * 8)];
        if layout.has_reftable(len) {
            ranges.push((layout.reftable_offset, layout.reftable_bytes));
            // At most 8 MiB.
            let mut bytes = vec![0; layout.reftable_bytes as usize];
            read_known(file, &mut bytes, layout.reftable_offset, len)
                .map_err(ImageErrorKind::Io)?;
            let blocks = (0..bytes.len())
                .step_by(8)
                .map(|at| be64(&bytes, at) & OFFSET_MASK);
            let is_block =
                |block: &u64| *block != 0 && block.is_multiple_of(layout.cluster_bytes());
            owners.extend(
                blocks
                    .filter(is_block)
                    .map(|block| (block >> bits, Owner::Other)),
            );
        }
        // Errors in snapshots are ignored: a reader of the disk does not need them.
        ranges.extend(check::snapshots(file, layout, len).unwrap_or_default());
        for (offset, bytes) in ranges {
            let clusters = offset >> bits..=(offset + (bytes - 1)) >> bits;
            owners.extend(clusters.map(|cluster| (cluster, Owner::Other)));
        }
        // At most 32 MiB.
        let mut bytes = vec![0; (layout.l1_entries * 8) as usize];
        read_known(file, &mut bytes, layout.l1_offset, len).map_err(ImageErrorKind::Io)?;
        for (index, at) in (0..bytes.len()).step_by(8).enumerate() {
            let table = check::l2_table(layout, be64(&bytes, at), index as u64, len)?;
            if table != 0 {
                owners.push((table >> bits, Owner::L2(index as u32)));
            }
        }
        owners.sort_unstable();
        for pair in owners.windows(2) {
            if pair[0].0 == pair[1].0
                && matches!((pair[0].1, pair[1].1), (Owner::L2(_), Owner::Other))
            {
                let at = pair[0].0 << bits;
                return Err(ImageErrorKind::Corrupt(format!(
                    "an L2 table at {at:#x} is where something else is, too"
                )));
            }
        }
        owners.dedup_by_key(|(cluster, _)| *cluster);
        Ok(Self {
            layout: *layout,
            len,
            owners,
        })
    }

    /// Returns the index of the L1 entry whose L2 table lies exactly in this range.
    pub(crate) fn l2_table(&self, offset: u64, len: u64) -> Option<u32> {
        if len != self.layout.cluster_bytes() || !offset.is_multiple_of(len) {
            return None;
        }
        let cluster = offset >> self.layout.cluster_bits;
        let at = self
            .owners
            .binary_search_by_key(&cluster, |(cluster, _)| *cluster);
        match self.owners[at.ok()?].1 {
            Owner::L2(index) => Some(index),
            Owner::Other => None,
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Replaces faulty entries of the L2 table of L1 entry `index`. Returns whether the table
    /// refers to compressed data.
    pub(crate) fn vet(&self, file: &dyn FileIo, index: u32, table: &mut [u8]) -> io::Result<bool> {
        let mut guest = u64::from(index) * self.layout.l2_span();
        // Range of clusters around the last one checked that hold no metadata.
        let mut data = 0..0;
        let mut any_packed = false;
        for word in table.as_chunks_mut::<8>().0 {
            let entry = u64::from_be_bytes(*word);
            if entry != 0 {
                any_packed |= entry & COMPRESSED != 0;
                let vetted = match self.judge(file, entry, guest, &mut data)? {
                    Ok(entry) => entry,
                    Err(fault) => trap(fault),
                };
                if vetted != entry {
                    *word = vetted.to_be_bytes();
                }
            }
            guest += self.layout.cluster_bytes();
        }
        Ok(any_packed)
    }

    /// Returns the entry to give to the library, or the fault in it.
    fn judge(
        &self,
        file: &dyn FileIo,
        entry: u64,
        guest: u64,
        data: &mut Range<u64>,
    ) -> io::Result<Result<u64, EntryFault>> {
        let layout = &self.layout;
        let (range, sound) = match entry::target(layout, entry) {
            Err(fault) => return Ok(Err(fault)),
            Ok(Target::Nothing) => return Ok(Ok(entry)),
            // Where it is does not matter: nothing is read from there.
            Ok(Target::Zeroes(_)) => return Ok(Ok(ZERO)),
            Ok(Target::Data(offset)) => (
                (offset, layout.cluster_bytes()),
                entry::has_data(layout, self.len, offset, guest),
            ),
            Ok(Target::Compressed { offset, len, skip }) => (
                (offset, len),
                entry::has_compressed(file, layout, self.len, (offset, len, skip))?,
            ),
        };
        let (offset, len) = range;
        let first = offset >> layout.cluster_bits;
        let last = (offset + (len - 1)) >> layout.cluster_bits;
        if !(data.contains(&first) && data.contains(&last)) {
            *data = self.data_around(first);
        }
        Ok(match sound {
            Err(fault) => Err(fault),
            Ok(()) if data.contains(&first) && data.contains(&last) => {
                // The library rejects this flag in the entry of a compressed cluster.
                Ok(if entry & COMPRESSED == 0 {
                    entry
                } else {
                    entry & !COPIED
                })
            }
            Ok(()) => Err(EntryFault::OnTables),
        })
    }

    /// Returns the range of clusters without metadata around this one; it is empty if this one
    /// holds metadata.
    fn data_around(&self, cluster: u64) -> Range<u64> {
        let at = self.owners.partition_point(|(owned, _)| *owned < cluster);
        // Cluster 0, the header, precedes every other.
        let after = at.checked_sub(1).map_or(0, |at| self.owners[at].0 + 1);
        match self.owners.get(at) {
            Some((owned, _)) if *owned == cluster => 0..0,
            Some((owned, _)) => after..*owned,
            None => after..u64::MAX,
        }
    }
}
