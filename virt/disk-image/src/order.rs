//! Write ordering of metadata, so that a power cut loses nothing that was flushed.
//!
//! A disk may write what the page cache holds in any order between two syncs. Four orders matter to
//! the format; they are those that QEMU keeps by the dependencies between its metadata caches. A
//! sync (fdatasync) is made only where one of them would be broken:
//!
//! 1. *A new cluster is there before it is referred to.* A table's entry that begins to refer to a
//!    cluster (of data, of a table; the header's, to a table) is written after a sync of what the
//!    cluster holds, of the copies of old data that were made in it, of the count that says it is
//!    in use, of the refcount block with that count, and of the file's length. Otherwise the disk
//!    could have the entry and, in the place of older, flushed data that the cluster took over from
//!    a backing file, a snapshot or a compressed cluster, whatever the blocks held before.
//! 2. *A reference is gone before its target is overwritten.* A cluster to which a table
//!    referred, until an entry was written since the last sync, is written to (or punched) after a
//!    sync.
//! 3. *And before it is counted less.* Counts are lowered after a sync of entries that were
//!    dropped.
//! 4. *A moved table is a cluster like others.* The header refers to the L1 table and the refcount
//!    table.
//!
//! So a group of writes that need new clusters costs one sync, between what it wrote to them and to
//! the counts, and its L2 tables; one more where an L2 table or a refcount block is new. A discard
//! costs one, before its clusters' counts are lowered and their space is given back. Writes to
//! clusters that are there cost none. No sync is made *after* metadata are written: clusters that
//! they no longer refer to are recorded in `dropped`, and a sync for another reason has often come
//! before one of them is used again.
//!
//! A whole table is compared with what the file has to know what changes; that costs a read from
//! the page cache. A sector (512 bytes) is taken to be written whole or not at all. Nothing is
//! assumed of larger writes.
//!
//! Memory: an entry for each L2 table and refcount block, about 24 bytes for 512 MiB of a disk of
//! 64 KiB clusters; and for each cluster dropped since the last sync.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;

use crate::file_io::{FileIo, read_known};
use crate::header::{COMPRESSED, HEADER_BYTES, Layout, OFFSET_MASK, be64};

/// An L2 entry whose cluster reads as zeroes, if it has one (§ "Standard Cluster Descriptor";
/// version 3).
const ZERO: u64 = 1;

/// Kind of a metadata cluster: one that the tables refer to and that is not data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    L1,
    Reftable,
    L2,
    Refblock,
}

/// Effect of a write, as far as ordering depends on it.
#[derive(Debug, Default)]
pub(crate) struct Change {
    /// It refers to something new.
    adds: bool,
    /// It lowers counts.
    lowers: bool,
    /// It has to be on the disk before anything new is referred to.
    is_fresh: bool,
    /// Clusters it refers to no more.
    drops: Vec<u64>,
    /// It writes to a cluster, or refers to one newly, to which a table on the disk may still
    /// refer.
    reuses: bool,
    /// L2 tables and refcount blocks that come and go.
    tables: Vec<(u64, Option<Kind>)>,
}

/// Record of the writes since the last sync, of an image open for writing.
pub(crate) struct WriteOrder {
    /// L2 tables and refcount blocks, by number of their cluster.
    tables: HashMap<u64, Kind>,
    /// Something was written that has to be on the disk before anything refers to it.
    fresh: bool,
    /// Clusters to which a table on the disk may refer, and the file's do not.
    dropped: HashSet<u64>,
    /// Counts what is written, to see whether a sync has covered it all.
    writes: u64,
}

/// The clusters of which a range has bytes.
fn clusters(bits: u32, offset: u64, len: u64) -> Range<u64> {
    if len == 0 {
        return 0..0;
    }
    offset >> bits..((offset + len - 1) >> bits) + 1
}

/// The clusters to which an L2 entry refers.
fn referred(layout: &Layout, entry: u64) -> Range<u64> {
    if entry & COMPRESSED != 0 {
        let (offset, len) = layout.compressed(entry);
        return clusters(layout.cluster_bits, offset, len);
    }
    match entry & OFFSET_MASK {
        0 => 0..0,
        offset => clusters(layout.cluster_bits, offset, 1),
    }
}

impl WriteOrder {
    /// Reads the tables of the image in `file`, which has `len` bytes.
    pub(crate) fn new(file: &dyn FileIo, layout: &Layout, len: u64) -> io::Result<Self> {
        let mut order = Self {
            tables: HashMap::new(),
            fresh: false,
            dropped: HashSet::new(),
            writes: 0,
        };
        order.read_tables(file, layout, len)?;
        Ok(order)
    }

    /// Learns where the L2 tables and refcount blocks are.
    fn read_tables(&mut self, file: &dyn FileIo, layout: &Layout, len: u64) -> io::Result<()> {
        for (offset, table_bytes, kind) in [
            (layout.l1_offset, layout.l1_entries * 8, Kind::L2),
            (
                layout.reftable_offset,
                layout.reftable_bytes,
                Kind::Refblock,
            ),
        ] {
            // At most 32 MiB.
            let mut bytes = vec![0; table_bytes as usize];
            read_known(file, &mut bytes, offset, len)?;
            for at in (0..bytes.len()).step_by(8) {
                let target = be64(&bytes, at) & OFFSET_MASK;
                if target != 0 {
                    self.tables.insert(target >> layout.cluster_bits, kind);
                }
            }
        }
        Ok(())
    }

    fn kind(&self, layout: &Layout, cluster: u64) -> Option<Kind> {
        let is_in = |offset, len| clusters(layout.cluster_bits, offset, len).contains(&cluster);
        if is_in(layout.l1_offset, layout.l1_entries * 8) {
            return Some(Kind::L1);
        }
        if is_in(layout.reftable_offset, layout.reftable_bytes) {
            return Some(Kind::Reftable);
        }
        self.tables.get(&cluster).copied()
    }

    /// The change that a write of `bytes` at `offset` would make. The file is as it was before, and
    /// has `len` bytes.
    pub(crate) fn change(
        &self,
        file: &dyn FileIo,
        layout: &Layout,
        len: u64,
        offset: u64,
        bytes: &[u8],
    ) -> io::Result<Change> {
        let mut change = Change::default();
        let bits = layout.cluster_bits;
        if offset < HEADER_BYTES as u64 {
            // It may refer to a moved table, and whatever that counts has to wait for it.
            change.adds = true;
            change.is_fresh = true;
        }
        for cluster in clusters(bits, offset, bytes.len() as u64) {
            change.reuses |= self.touches_dropped(cluster..cluster + 1);
            let Some(kind) = self.kind(layout, cluster) else {
                change.is_fresh = true;
                continue;
            };
            // The part of the write that lies in this cluster, in whole entries: the library writes
            // no others.
            let first = offset.max(cluster << bits);
            let last = (offset + bytes.len() as u64).min((cluster + 1) << bits);
            let new = &bytes[(first - offset) as usize..(last - offset) as usize];
            let mut old = vec![0; new.len()];
            read_known(file, &mut old, first, len)?;
            if kind == Kind::Refblock {
                count_change(&mut change, layout, &old, new);
                continue;
            }
            for (old, new) in old.chunks_exact(8).zip(new.chunks_exact(8)) {
                let (old, new) = (be64(old, 0), be64(new, 0));
                if old == new {
                    continue;
                }
                if kind == Kind::L2 {
                    self.entry_change(&mut change, layout, old, new);
                } else {
                    self.table_change(
                        &mut change,
                        bits,
                        kind,
                        old & OFFSET_MASK,
                        new & OFFSET_MASK,
                    );
                }
            }
        }
        Ok(change)
    }

    /// Of an entry of the L1 table or the refcount table: offsets of what it refers to, or 0.
    fn table_change(&self, change: &mut Change, bits: u32, table: Kind, old: u64, new: u64) {
        if old == new {
            return;
        }
        let kind = match table {
            Kind::L1 => Kind::L2,
            _ => Kind::Refblock,
        };
        // Counts are in a refcount block, which has to be found before what it counts is referred
        // to.
        change.is_fresh |= kind == Kind::Refblock;
        if old != 0 {
            change.drops.push(old >> bits);
            change.tables.push((old >> bits, None));
        }
        if new != 0 {
            change.adds = true;
            change.reuses |= self.dropped.contains(&(new >> bits));
            change.tables.push((new >> bits, Some(kind)));
        }
    }

    /// Of an entry of an L2 table.
    fn entry_change(&self, change: &mut Change, layout: &Layout, old: u64, new: u64) {
        let (before, now) = (referred(layout, old), referred(layout, new));
        // That the cluster no longer shows can be on the disk at any time, for its contents stay.
        let hides = before == now && new & COMPRESSED == 0 && new & ZERO != 0;
        change.adds |= !now.is_empty() && !hides;
        change.reuses |= self.touches_dropped(now.clone());
        change
            .drops
            .extend(before.filter(|cluster| !now.contains(cluster)));
    }

    fn touches_dropped(&self, mut clusters: Range<u64>) -> bool {
        !self.dropped.is_empty() && clusters.any(|cluster| self.dropped.contains(&cluster))
    }

    /// Returns the effect of emptying a range, whether it holds data or nothing any more.
    pub(crate) fn emptying(&self, layout: &Layout, offset: u64, len: u64) -> Change {
        Change {
            is_fresh: true,
            reuses: self.touches_dropped(clusters(layout.cluster_bits, offset, len)),
            ..Change::default()
        }
    }

    /// Whether a sync has to come before the change.
    pub(crate) fn must_sync(&self, change: &Change) -> bool {
        change.reuses || (change.adds && self.fresh) || (change.lowers && !self.dropped.is_empty())
    }

    /// Something has to be on the disk before anything new is referred to.
    pub(crate) fn add_fresh(&mut self) {
        self.fresh = true;
        self.writes += 1;
    }

    /// The change is in the file, or some of it.
    pub(crate) fn changed(&mut self, change: Change) {
        self.fresh |= change.is_fresh;
        self.dropped.extend(change.drops);
        for (cluster, kind) in change.tables {
            match kind {
                Some(kind) => self.tables.insert(cluster, kind),
                None => self.tables.remove(&cluster),
            };
        }
        self.writes += 1;
    }

    /// The header has been written, and its tables are elsewhere.
    pub(crate) fn moved(
        &mut self,
        file: &dyn FileIo,
        old: &Layout,
        new: &Layout,
        len: u64,
    ) -> io::Result<()> {
        for (before, now) in [
            (
                (old.l1_offset, old.l1_entries * 8),
                (new.l1_offset, new.l1_entries * 8),
            ),
            (
                (old.reftable_offset, old.reftable_bytes),
                (new.reftable_offset, new.reftable_bytes),
            ),
        ] {
            if before != now {
                self.dropped
                    .extend(clusters(old.cluster_bits, before.0, before.1));
            }
        }
        self.read_tables(file, new, len)
    }

    /// A number to be given to [`synced`](Self::synced) when a sync that begins now has ended.
    pub(crate) fn writes(&self) -> u64 {
        self.writes
    }

    /// Notes the end of a sync. It may not cover what was written while it ran; if anything was, it
    /// is taken to have covered nothing.
    pub(crate) fn synced(&mut self, writes: u64) {
        if self.writes == writes {
            self.fresh = false;
            self.dropped.clear();
        }
    }

    /// Nothing waits for a sync.
    pub(crate) fn is_settled(&self) -> bool {
        !self.fresh && self.dropped.is_empty()
    }
}

/// Of a part of a refcount block.
fn count_change(change: &mut Change, layout: &Layout, old: &[u8], new: &[u8]) {
    let mut changed = |old: u64, new: u64| {
        change.lowers |= new < old;
        change.is_fresh |= new > old;
    };
    match layout.refcount_order {
        order @ 0..3 => {
            let width = 1 << order;
            let mask = (1_u8 << width) - 1;
            for (old, new) in old.iter().zip(new).filter(|(old, new)| old != new) {
                for shift in (0..8).step_by(width) {
                    changed(
                        u64::from(old >> shift & mask),
                        u64::from(new >> shift & mask),
                    );
                }
            }
        }
        order => {
            let len = 1 << (order - 3);
            let value = |bytes: &[u8]| {
                bytes
                    .iter()
                    .fold(0, |value, byte| value << 8 | u64::from(*byte))
            };
            for (old, new) in old.chunks(len).zip(new.chunks(len)) {
                if old != new {
                    changed(value(old), value(new));
                }
            }
        }
    }
}
