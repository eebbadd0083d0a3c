//! L2 tables of images that are only read, checked each time one is read from the file.
//!
//! An image that is written to is checked whole before (see [`crate::check`]). Here that would be
//! too much, for a chain may have many large files of which a guest reads little. So when the image
//! is opened only the L1 table is checked: it is in the file, and the L2 tables it refers to are
//! there too, whole, and nowhere else's. An L2 table is checked on its way from the file to the
//! library.
//!
//! An entry at fault is replaced there by one that the library takes for good and that leads
//! outside of every file: to [`TRAP`], and from there as many steps as say what is wrong. So what
//! fails is a read of that cluster and of no other, wherever in a chain the image is. The file is
//! not written, nor is the table: the library has it for reading.
//!
//! Of no meaning to a reader, and not looked at: reference counts, the flag that a count is one,
//! the cluster that is kept for one that reads as zeroes, and whether two clusters of the disk
//! share one of the file.
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

/// Offset that entries at fault are replaced with: no file is as long (64 PiB), and every size of
/// clusters divides it.
pub(crate) const TRAP: u64 = 0x00ff_0000_0000_0000;
/// A step behind it for each kind of fault: the largest cluster.
const TRAP_STEP: u64 = 2 << 20;

/// The fault of the mapping that leads to this offset, if it is one of ours.
pub(crate) fn trapped(offset: u64) -> Option<EntryFault> {
    let step = offset.checked_sub(TRAP)? / TRAP_STEP;
    EntryFault::ALL.get(usize::try_from(step).ok()?).copied()
}

fn trap(fault: EntryFault) -> u64 {
    let step = EntryFault::ALL.iter().position(|kind| *kind == fault);
    TRAP + step.unwrap_or(0) as u64 * TRAP_STEP
}

/// Owner of a cluster that is no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    /// The L2 table of this entry of the L1 table.
    L2(u32),
    /// Header, L1 table, refcounts, snapshots.
    Other,
}

/// The clusters of an image's file that have no data, of an image that is only read.
pub(crate) struct Tables {
    layout: Layout,
    /// Length of the file.
    len: u64,
    /// By number of the cluster, each once.
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
        // What only snapshots need does not hinder a reader of the disk.
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

    /// The entry of the L1 table that refers to the L2 table that lies in this range exactly.
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

    /// Replaces wrong entries of an L2 table. Returns whether it refers to compressed data.
    pub(crate) fn vet(&self, file: &dyn FileIo, index: u32, table: &mut [u8]) -> io::Result<bool> {
        let mut guest = u64::from(index) * self.layout.l2_span();
        // Clusters around the last one looked up, all of data.
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

    /// The entry as a reader needs it.
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
                // The library takes the flag of a standard cluster for a fault of a compressed one.
                Ok(if entry & COMPRESSED == 0 {
                    entry
                } else {
                    entry & !COPIED
                })
            }
            Ok(()) => Err(EntryFault::OnTables),
        })
    }

    /// The clusters around this one up to the next that have no data; empty: it has none itself.
    fn data_around(&self, cluster: u64) -> Range<u64> {
        let at = self.owners.partition_point(|(owned, _)| *owned < cluster);
        // The header is before every other.
        let after = at.checked_sub(1).map_or(0, |at| self.owners[at].0 + 1);
        match self.owners.get(at) {
            Some((owned, _)) if *owned == cluster => 0..0,
            Some((owned, _)) => after..*owned,
            None => after..u64::MAX,
        }
    }
}
