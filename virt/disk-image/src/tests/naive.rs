//! A reader and checker of qcow2 images that shares no code with the library or the crate.

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// Location of a cluster of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterLocation {
    /// Nowhere: what is behind the image, or zeroes.
    Behind,
    Zero,
    At(usize),
    /// Compressed data: the entry, which says where.
    Compressed(u64),
}

/// The tables of an image.
pub struct Naive {
    pub cluster: usize,
    /// Of each cluster of the disk.
    pub places: Vec<ClusterLocation>,
}

impl Naive {
    /// The data of a compressed entry, as far as the file has them.
    pub fn compressed_data<'a>(&self, bytes: &'a [u8], entry: u64) -> &'a [u8] {
        let bits = self.cluster.trailing_zeros() as usize;
        let (host, len) = compressed(entry, bits);
        &bytes[host..bytes.len().min(host + len)]
    }
}

fn be(bytes: &[u8], at: usize, len: usize) -> Result<u64, String> {
    let word = bytes
        .get(at..at + len)
        .ok_or_else(|| format!("{at:#x} is outside the file of {:#x} bytes", bytes.len()))?;
    Ok(match word.first_chunk() {
        Some(word) => u64::from_be_bytes(*word),
        None => word
            .iter()
            .fold(0, |value, byte| value << 8 | u64::from(*byte)),
    })
}

struct Walk<'a> {
    bytes: &'a [u8],
    bits: usize,
    version: u64,
    /// References to each cluster of the file.
    found: Vec<u32>,
    reftable: usize,
    reftable_entries: usize,
    order: usize,
    /// Clusters of the disk.
    disk: usize,
}

impl Walk<'_> {
    fn refer(&mut self, what: &str, offset: u64, len: u64) -> Result<(), String> {
        let first = offset as usize >> self.bits;
        let last = (offset + len - 1) as usize >> self.bits;
        for cluster in first..=last {
            let count = self
                .found
                .get_mut(cluster)
                .ok_or_else(|| format!("{what} at {offset:#x} is outside the file"))?;
            *count += 1;
        }
        Ok(())
    }

    fn cluster(&self) -> usize {
        1 << self.bits
    }

    /// The count of a cluster of the file.
    fn count(&self, cluster: usize) -> Result<u64, String> {
        let per_block = (self.cluster() * 8) >> self.order;
        let index = cluster / per_block;
        if index >= self.reftable_entries {
            return Ok(0);
        }
        let block = (be(self.bytes, self.reftable + index * 8, 8)? & OFFSET) as usize;
        if block == 0 {
            return Ok(0);
        }
        let within = cluster % per_block;
        if self.order >= 3 {
            let len = 1 << (self.order - 3);
            return be(self.bytes, block + within * len, len);
        }
        let bit = within << self.order;
        let byte = be(self.bytes, block + bit / 8, 1)?;
        Ok(byte >> (bit % 8) & ((1 << (1 << self.order)) - 1))
    }

    /// COPIED says that the count is exactly one.
    fn copied(&self, what: &str, entry: u64) -> Result<(), String> {
        let count = self.count((entry & OFFSET) as usize >> self.bits)?;
        if (entry & COPIED != 0) != (count == 1) {
            return Err(format!(
                "{what} entry {entry:#x} is wrong about the count {count}"
            ));
        }
        Ok(())
    }

    /// One L1 table. `places`: those of the disk, or none of a snapshot.
    fn l1(
        &mut self,
        offset: u64,
        entries: usize,
        mut places: Option<&mut Vec<ClusterLocation>>,
    ) -> Result<(), String> {
        self.refer("an L1 table", offset, entries as u64 * 8)?;
        let per_table = self.cluster() / 8;
        for index in 0..entries {
            let entry = be(self.bytes, offset as usize + index * 8, 8)?;
            let table = (entry & OFFSET) as usize;
            if table == 0 {
                if let Some(places) = &mut places {
                    let len = self.disk.min(places.len() + per_table);
                    places.resize(len, ClusterLocation::Behind);
                }
                continue;
            }
            if !table.is_multiple_of(self.cluster()) {
                return Err(format!("an L2 table at {table:#x}"));
            }
            self.refer("an L2 table", table as u64, 1)?;
            if places.is_some() {
                self.copied("L1", entry)?;
            }
            let entries = self.bytes.get(table..table + self.cluster());
            let entries = entries.ok_or_else(|| format!("an L2 table at {table:#x}"))?;
            for entry in entries.chunks_exact(8) {
                let entry = be(entry, 0, 8)?;
                let place = self.l2_entry(entry, places.is_some())?;
                if let Some(places) = &mut places {
                    places.push(place);
                }
            }
        }
        Ok(())
    }

    fn l2_entry(&mut self, entry: u64, is_active: bool) -> Result<ClusterLocation, String> {
        if entry == 0 {
            return Ok(ClusterLocation::Behind);
        }
        if entry & COMPRESSED != 0 {
            let (offset, len) = compressed(entry, self.bits);
            self.refer("compressed data", offset as u64, len as u64)?;
            return Ok(ClusterLocation::Compressed(entry));
        }
        let offset = entry & OFFSET;
        if !(offset as usize).is_multiple_of(self.cluster()) {
            return Err(format!("data at {offset:#x}"));
        }
        if offset != 0 {
            self.refer("data", offset, 1)?;
            if is_active {
                self.copied("L2", entry)?;
            }
        }
        Ok(match offset {
            _ if self.version >= 3 && entry & 1 != 0 => ClusterLocation::Zero,
            0 => ClusterLocation::Behind,
            offset => ClusterLocation::At(offset as usize),
        })
    }
}

/// Returns offset and length, in whole sectors, of the compressed data of an entry.
pub fn compressed(entry: u64, bits: usize) -> (usize, usize) {
    let width = 62 - (bits - 8);
    let offset = (entry & ((1 << width) - 1)) as usize & !511;
    let sectors = ((entry & (COMPRESSED - 1)) >> width) as usize;
    (offset, (sectors + 1) * 512)
}

/// Reads and checks the tables; an error says what is corrupt. Leaks are none.
pub fn walk(bytes: &[u8]) -> Result<Naive, String> {
    let field = |at, len| be(bytes, at, len);
    if field(0, 4)? != 0x5146_49fb {
        return Err("no magic number".into());
    }
    let version = field(4, 4)?;
    let bits = field(20, 4)? as usize;
    let cluster = 1_usize << bits;
    let reftable_clusters = field(56, 4)? as usize;
    let mut walk = Walk {
        bytes,
        bits,
        version,
        found: vec![0; bytes.len().div_ceil(cluster)],
        reftable: field(48, 8)? as usize,
        reftable_entries: reftable_clusters << bits >> 3,
        disk: (field(24, 8)? as usize).div_ceil(cluster),
        order: if version >= 3 {
            field(96, 4)? as usize
        } else {
            4
        },
    };
    walk.refer("the header", 0, 1)?;
    let table_bytes = (reftable_clusters << bits) as u64;
    walk.refer("the refcount table", walk.reftable as u64, table_bytes)?;
    for index in 0..walk.reftable_entries {
        let block = be(bytes, walk.reftable + index * 8, 8)? & OFFSET;
        if block != 0 {
            walk.refer("a refcount block", block, cluster as u64)?;
        }
    }
    let mut places = Vec::new();
    walk.l1(field(40, 8)?, field(36, 4)? as usize, Some(&mut places))?;
    let mut at = field(64, 8)? as usize;
    for _ in 0..field(60, 4)? {
        let (offset, entries) = (field(at, 8)?, field(at + 8, 4)? as usize);
        let names = field(at + 12, 2)? + field(at + 14, 2)?;
        let extra = field(at + 36, 4)?;
        at = (at + 40 + (extra + names) as usize).next_multiple_of(8);
        walk.l1(offset, entries, None)?;
    }
    let start = field(64, 8)?;
    if start != 0 {
        walk.refer("the snapshot table", start, at as u64 - start)?;
    }
    places.truncate(walk.disk);
    for (index, &found) in walk.found.iter().enumerate() {
        let count = walk.count(index)?;
        if count < u64::from(found) {
            return Err(format!(
                "the cluster at {:#x} is in use {found} times and counted {count}",
                index << bits
            ));
        }
    }
    Ok(Naive { cluster, places })
}
