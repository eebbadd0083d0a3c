//! Consistency check of the tables of a qcow2 image, before it is written to.
//!
//! The library believes the reference counts: a cluster counted free is given away, be it the
//! header. So before the first write all tables of the disk are walked, as `qemu-img check` does:
//! everything referred to lies in the file and has one owner (compressed data may share a cluster
//! with other compressed data).
//!
//! If so, counts that are too low, as a power cut can leave them, are raised to what was found.
//! Clusters that are counted and not referred to are a leak, and harmless; a killed writer leaves
//! some.
//!
//! Not checked: what only snapshots refer to beyond their L1 tables, persistent bitmaps, counts
//! that are too high, and data.
//!
//! An image that is only read is not walked: see [`crate::vet`].
//!
//! Cost: every L2 table and refcount block is read once, at 64 KiB clusters 160 MiB per TiB of
//! data. Memory: a bit per cluster of the file, 2 MiB per TiB at 64 KiB clusters, and with
//! compressed data 16 more; at most 544 MiB ([`MAX_CLUSTERS`]).

use crate::entry::{self, COPIED, EntryFault, Target};
use crate::file_io::{FileIo, read_known};
use crate::header::{Layout, OFFSET_MASK, be32, be64};
use crate::options::ImageErrorKind;

/// Most clusters in a file: 16 TiB of 64 KiB clusters.
const MAX_CLUSTERS: u64 = 1 << 28;

/// Bytes of an entry of the snapshot table without what varies (§ "Snapshots"), and most entries
/// (QEMU's limit).
const SNAPSHOT_BYTES: u64 = 40;
const MAX_SNAPSHOTS: u32 = 65536;

/// One bit per cluster of the file.
struct Bits(Vec<u64>);

impl Bits {
    fn new(len: u64) -> Self {
        Self(vec![0; len.div_ceil(64) as usize])
    }

    /// Sets a bit. Returns whether it was set before.
    fn set(&mut self, at: u64) -> bool {
        let word = &mut self.0[(at / 64) as usize];
        let bit = 1 << (at % 64);
        let before = *word & bit != 0;
        *word |= bit;
        before
    }

    fn get(&self, at: u64) -> bool {
        self.0[(at / 64) as usize] & 1 << (at % 64) != 0
    }
}

/// Findings about an image that may be written to.
pub(crate) struct Checked {
    /// Counts that were too low.
    pub low: u64,
    /// Some data are compressed.
    pub has_packed: bool,
}

/// Walks the tables of the image in `file`, which has `len` bytes.
pub(crate) fn check(
    file: &dyn FileIo,
    layout: &Layout,
    len: u64,
) -> Result<Checked, ImageErrorKind> {
    let clusters = len.div_ceil(layout.cluster_bytes());
    if clusters > MAX_CLUSTERS {
        return Err(ImageErrorKind::Unsupported(format!(
            "writing to a file of {clusters} clusters is"
        )));
    }
    let mut walk = Walk {
        file,
        layout,
        len,
        clusters,
        owned: Bits::new(clusters),
        compressed: Vec::new(),
    };
    walk.claim("the header", 0, 1)?;
    walk.claim("the L1 table", layout.l1_offset, layout.l1_entries * 8)?;
    walk.claim(
        "the refcount table",
        layout.reftable_offset,
        layout.reftable_bytes,
    )?;
    for (offset, bytes) in snapshots(file, layout, len)? {
        walk.claim("a table of the snapshots", offset, bytes)?;
    }
    let blocks = walk.table(layout.reftable_offset, layout.reftable_bytes)?;
    for &block in &blocks {
        walk.claim_cluster("a refcount block", block)?;
    }
    let tables = walk.table(layout.l1_offset, layout.l1_entries * 8)?;
    let mut table_bytes = vec![0; layout.cluster_bytes() as usize];
    for (index, &entry) in tables.iter().enumerate() {
        let table = l2_table(layout, entry, index as u64, len)?;
        if table != 0 {
            // Owned by one, so no table is walked twice, and the walk is bounded by the file's
            // length.
            walk.claim("an L2 table", table, 1)?;
            read_known(file, &mut table_bytes, table, len).map_err(ImageErrorKind::Io)?;
            walk.l2_table(&table_bytes, index as u64 * layout.l2_span())?;
        }
    }
    Ok(Checked {
        low: walk.counts(&blocks)?,
        has_packed: !walk.compressed.is_empty(),
    })
}

/// Offset of the L2 table of an entry of the L1 table, which lies in a file of `len` bytes whole;
/// 0: none.
pub(crate) fn l2_table(
    layout: &Layout,
    entry: u64,
    index: u64,
    len: u64,
) -> Result<u64, ImageErrorKind> {
    let cluster = layout.cluster_bytes();
    let fault = match entry::l2_table(layout, entry) {
        Ok(0) => return Ok(0),
        Ok(table) if table >= len => EntryFault::Outside,
        Ok(table) if len - table < cluster => EntryFault::CutShort,
        Ok(table) => return Ok(table),
        Err(fault) => fault,
    };
    let (at, guest) = (entry & OFFSET_MASK, index * layout.l2_span());
    corrupt(format!(
        "an L2 table at {at:#x} is {fault} (it is for {guest:#x} of the disk and what follows)"
    ))
}

/// Returns the offset and length of the snapshot table and of the snapshots' L1 tables, in a file
/// of `len` bytes.
pub(crate) fn snapshots(
    file: &dyn FileIo,
    layout: &Layout,
    len: u64,
) -> Result<Vec<(u64, u64)>, ImageErrorKind> {
    let table = layout.snapshots_offset;
    let mut ranges = Vec::new();
    if layout.snapshots == 0 {
        return Ok(ranges);
    }
    if table > len {
        return corrupt(format!(
            "its snapshot table at {table:#x} is outside the file"
        ));
    }
    if layout.snapshots > MAX_SNAPSHOTS {
        return corrupt(format!("it has {} snapshots", layout.snapshots));
    }
    let is_one = |offset: u64, bytes: u64| {
        offset != 0
            && offset.is_multiple_of(layout.cluster_bytes())
            && bytes != 0
            && offset.checked_add(bytes).is_some_and(|end| end <= len)
    };
    // Entries begin at multiples of 8; the last one ends where it ends.
    let mut end = table;
    for number in 0..layout.snapshots {
        let mut fixed = [0; SNAPSHOT_BYTES as usize];
        let at = end.next_multiple_of(8);
        if !is_one(table, at - table + SNAPSHOT_BYTES) {
            return corrupt(format!(
                "its snapshot table at {table:#x} is outside the file, or not at the beginning of \
                 a cluster"
            ));
        }
        read_known(file, &mut fixed, at, len).map_err(ImageErrorKind::Io)?;
        let (l1, l1_bytes) = (be64(&fixed, 0), u64::from(be32(&fixed, 8)) * 8);
        if !is_one(l1, l1_bytes) {
            return corrupt(format!(
                "the L1 table of its snapshot {number} ({l1_bytes} bytes at {l1:#x}) is outside \
                 the file, or not at the \
                 beginning of a cluster"
            ));
        }
        ranges.push((l1, l1_bytes));
        // Lengths of the identifier and the name, 16 bits each, and of what later versions have
        // added.
        let names = u64::from(be32(&fixed, 12));
        let varies = (names >> 16) + (names & 0xffff) + u64::from(be32(&fixed, 36));
        end = at + SNAPSHOT_BYTES + varies;
    }
    let bytes = end - table;
    if !is_one(table, bytes) {
        return corrupt(format!(
            "its snapshot table ({bytes} bytes at {table:#x}) is outside the file"
        ));
    }
    ranges.push((table, bytes));
    Ok(ranges)
}

struct Walk<'a> {
    file: &'a dyn FileIo,
    layout: &'a Layout,
    /// Length of the file.
    len: u64,
    clusters: u64,
    /// Clusters with an owner that shares them with no other.
    owned: Bits,
    /// Compressed data that lie in each cluster, at least in part; empty without any. (A cluster of
    /// 2 MiB cannot hold 65,535 of them, whose compressed forms have 32 bytes each then; counting
    /// stops there.)
    compressed: Vec<u16>,
}

fn corrupt<T>(what: String) -> Result<T, ImageErrorKind> {
    Err(ImageErrorKind::Corrupt(what))
}

impl Walk<'_> {
    /// A table in consecutive clusters (of at most 32 MiB).
    fn table(&self, offset: u64, len: u64) -> Result<Vec<u64>, ImageErrorKind> {
        let mut bytes = vec![0; len as usize];
        read_known(self.file, &mut bytes, offset, self.len).map_err(ImageErrorKind::Io)?;
        Ok((0..bytes.len() / 8)
            .map(|at| be64(&bytes, at * 8))
            .collect())
    }

    /// The clusters of a range belong to `owner`.
    fn claim(&mut self, owner: &str, offset: u64, len: u64) -> Result<(), ImageErrorKind> {
        let bits = self.layout.cluster_bits;
        let first = offset >> bits;
        let last = (offset + (len - 1)) >> bits;
        for cluster in first..=last {
            let at = cluster << bits;
            if cluster >= self.clusters {
                return corrupt(format!("{owner} at {at:#x} is outside the file"));
            }
            if self.owned.set(cluster) || self.compressed_in(cluster) != 0 {
                return corrupt(format!(
                    "{owner} at {at:#x} is where something else is, too"
                ));
            }
        }
        Ok(())
    }

    /// The cluster that a table's entry refers to belongs to `owner`; false: it refers to none.
    fn claim_cluster(&mut self, owner: &str, entry: u64) -> Result<bool, ImageErrorKind> {
        let offset = entry & OFFSET_MASK;
        if offset == 0 {
            return Ok(false);
        }
        if !offset.is_multiple_of(self.layout.cluster_bytes()) {
            return corrupt(format!(
                "{owner} at {offset:#x} is not at the beginning of a cluster"
            ));
        }
        self.claim(owner, offset, 1)?;
        Ok(true)
    }

    fn compressed_in(&self, cluster: u64) -> u64 {
        self.compressed
            .get(cluster as usize)
            .map_or(0, |count| u64::from(*count))
    }

    /// An L2 table, which is for `guest` of the disk and what follows.
    fn l2_table(&mut self, bytes: &[u8], mut guest: u64) -> Result<(), ImageErrorKind> {
        let layout = self.layout;
        for at in (0..bytes.len()).step_by(8) {
            let entry = be64(bytes, at);
            let fault = match entry::target(layout, entry) {
                Err(fault) => Err(fault),
                Ok(Target::Nothing) => Ok(()),
                Ok(Target::Zeroes(offset)) => self
                    .claim_cluster("a cluster of zeroes", offset)
                    .map(|_| Ok(()))?,
                Ok(Target::Data(offset)) => {
                    self.claim_cluster("data", offset)?;
                    entry::has_data(layout, self.len, offset, guest)
                }
                // The library does not read a table with that.
                Ok(Target::Compressed { .. }) if entry & COPIED != 0 => Err(EntryFault::Reserved),
                Ok(Target::Compressed { offset, len, skip }) => {
                    self.claim_compressed(offset, len)?;
                    let place = (offset, len, skip);
                    entry::has_compressed(self.file, layout, self.len, place)
                        .map_err(ImageErrorKind::Io)?
                }
            };
            if let Err(fault) = fault {
                return corrupt(format!(
                    "data at {:#x} are {fault} (they are for {guest:#x} of the disk)",
                    entry & OFFSET_MASK
                ));
            }
            guest += layout.cluster_bytes();
        }
        Ok(())
    }

    /// Clusters that hold compressed data, this and perhaps other.
    fn claim_compressed(&mut self, offset: u64, len: u64) -> Result<(), ImageErrorKind> {
        let bits = self.layout.cluster_bits;
        for cluster in offset >> bits..=(offset + len - 1) >> bits {
            if cluster >= self.clusters {
                return corrupt(format!(
                    "compressed data at {offset:#x} are outside the file"
                ));
            }
            if self.owned.get(cluster) {
                return corrupt(format!(
                    "compressed data at {offset:#x} are where something else is, too"
                ));
            }
            if self.compressed.is_empty() {
                self.compressed = vec![0; self.clusters as usize];
            }
            let count = &mut self.compressed[cluster as usize];
            *count = count.saturating_add(1);
        }
        Ok(())
    }

    /// Raises each count that is lower than the uses of its cluster. Returns the number of those.
    fn counts(&self, blocks: &[u64]) -> Result<u64, ImageErrorKind> {
        let layout = self.layout;
        let per_block = 1_u64 << layout.refblock_bits();
        let mut bytes = vec![0; layout.cluster_bytes() as usize];
        let mut mended = 0_u64;
        for (index, first) in (0..self.clusters).step_by(per_block as usize).enumerate() {
            let block = blocks.get(index).map_or(0, |entry| entry & OFFSET_MASK);
            if block == 0 {
                bytes.fill(0);
            } else {
                read_known(self.file, &mut bytes, block, self.len).map_err(ImageErrorKind::Io)?;
            }
            let before = mended;
            for cluster in first..self.clusters.min(first + per_block) {
                let wanted = u64::from(self.owned.get(cluster)) + self.compressed_in(cluster);
                let mut count = Count::at(&mut bytes, cluster - first, layout.refcount_order);
                if count.get() >= wanted {
                    continue;
                }
                if block == 0 || !count.set(wanted) {
                    return corrupt(format!(
                        "the cluster at {:#x} is in use {wanted} times and cannot be counted",
                        cluster << layout.cluster_bits
                    ));
                }
                mended += 1;
            }
            if mended != before {
                self.file
                    .write_all_at(&bytes, block)
                    .map_err(ImageErrorKind::Io)?;
            }
        }
        if mended != 0 {
            self.file.sync_data().map_err(ImageErrorKind::Io)?;
        }
        Ok(mended)
    }
}

/// One reference count in a refcount block: a part of one byte, the lowest bits first, or whole
/// bytes, big-endian.
pub(crate) struct Count<'a> {
    bytes: &'a mut [u8],
    shift: u64,
    /// Of a part of a byte, its largest value; otherwise 0.
    mask: u8,
}

impl<'a> Count<'a> {
    pub(crate) fn at(block: &'a mut [u8], index: u64, order: u32) -> Self {
        if order < 3 {
            let bit = index << order;
            let at = (bit >> 3) as usize;
            return Self {
                bytes: &mut block[at..=at],
                shift: bit & 7,
                mask: (1_u8 << (1 << order)) - 1,
            };
        }
        let len = 1 << (order - 3);
        let at = index as usize * len;
        Self {
            bytes: &mut block[at..at + len],
            shift: 0,
            mask: 0,
        }
    }

    pub(crate) fn get(&self) -> u64 {
        if self.mask != 0 {
            return u64::from(self.bytes[0] >> self.shift & self.mask);
        }
        self.bytes
            .iter()
            .fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    /// False: it does not fit.
    pub(crate) fn set(&mut self, value: u64) -> bool {
        if self.mask != 0 {
            if value > u64::from(self.mask) {
                return false;
            }
            self.bytes[0] &= !(self.mask << self.shift);
            self.bytes[0] |= (value as u8) << self.shift;
            return true;
        }
        let word = value.to_be_bytes();
        let (over, kept) = word.split_at(8 - self.bytes.len());
        self.bytes.copy_from_slice(kept);
        over.iter().all(|byte| *byte == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::Count;

    /// § "Refcount block entry": the first entries of a block, by width.
    #[test]
    fn counts_are_where_the_specification_has_them() {
        for (order, index, value, expected) in [
            (0, 3, 1, [0b0000_1000, 0, 0, 0, 0, 0, 0, 0]),
            (1, 5, 2, [0, 0b0000_1000, 0, 0, 0, 0, 0, 0]),
            (2, 1, 0xf, [0xf0, 0, 0, 0, 0, 0, 0, 0]),
            (3, 2, 0x12, [0, 0, 0x12, 0, 0, 0, 0, 0]),
            (4, 1, 0x1234, [0, 0, 0x12, 0x34, 0, 0, 0, 0]),
            (5, 1, 0x1234, [0, 0, 0, 0, 0, 0, 0x12, 0x34]),
            (6, 0, 0x1234, [0, 0, 0, 0, 0, 0, 0x12, 0x34]),
        ] {
            let mut block = [0; 8];
            assert!(Count::at(&mut block, index, order).set(value));
            assert_eq!(block, expected, "order {order}");
            assert_eq!(Count::at(&mut block, index, order).get(), value);
        }
        let mut block = [0; 8];
        assert!(!Count::at(&mut block, 0, 0).set(2));
        assert!(!Count::at(&mut block, 0, 4).set(1 << 16));
    }
}
