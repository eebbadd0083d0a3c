//! Small qcow2 images written byte by byte, so that a test can say where everything is and damage
//! it.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use miniz_oxide::deflate::compress_to_vec;
use seeded::Random;

pub const BITS: u32 = 12;
pub const CLUSTER: usize = 1 << BITS;
/// Clusters that one L2 table describes.
pub const SPAN: u64 = (CLUSTER / 8) as u64;
pub const COPIED: u64 = 1 << 63;
pub const COMPRESSED: u64 = 1 << 62;
/// The last cluster of the disk, of which there is one sector.
pub const LAST: u64 = SPAN + 8;
/// Clusters of the disk.
pub const CLUSTERS: u64 = LAST + 1;
pub const SIZE: u64 = LAST * CLUSTER as u64 + 512;

/// Where the tables are.
pub const REFTABLE: usize = CLUSTER;
pub const REFBLOCK: usize = 2 * CLUSTER;
pub const L1: usize = 3 * CLUSTER;
pub const L2: [usize; 2] = [4 * CLUSTER, 5 * CLUSTER];
const FIRST_FREE: usize = 6 * CLUSTER;

/// Clusters of the disk by what they are.
pub const DATA: [u64; 11] = [0, 1, 2, 3, 4, 5, SPAN, SPAN + 1, SPAN + 2, SPAN + 3, LAST];
pub const PACKED: [u64; 4] = [8, 9, 10, 11];
/// Marked as zeroes (in version 3): without a cluster, and with one.
pub const ZEROES: [u64; 2] = [14, 15];

/// Last cluster of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// The disk's last cluster, as much of it as the disk has.
    Data,
    /// Compressed data, which end where they end.
    Compressed,
}

/// An image, and what its disk holds.
#[derive(Clone)]
pub struct Forged {
    pub bytes: Vec<u8>,
    pub disk: Vec<u8>,
    pub version: u32,
}

/// The reserved and defined fields of a header that describes these tables. `behind`: name and
/// format of a backing file.
fn header(version: u32, behind: Option<(&str, Option<&str>)>) -> Vec<u8> {
    let mut header = vec![0; CLUSTER];
    let put = |header: &mut [u8], at: usize, bytes: &[u8]| {
        header[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(&mut header, 0, b"QFI\xfb");
    put(&mut header, 4, &version.to_be_bytes());
    put(&mut header, 20, &BITS.to_be_bytes());
    put(&mut header, 24, &SIZE.to_be_bytes());
    put(&mut header, 36, &2_u32.to_be_bytes());
    put(&mut header, 40, &(L1 as u64).to_be_bytes());
    put(&mut header, 48, &(REFTABLE as u64).to_be_bytes());
    put(&mut header, 56, &1_u32.to_be_bytes());
    let mut at = 72;
    if version == 3 {
        put(&mut header, 96, &4_u32.to_be_bytes());
        put(&mut header, 100, &104_u32.to_be_bytes());
        at = 104;
    }
    if let Some((name, format)) = behind {
        if let Some(format) = format {
            put(&mut header, at, &extension(0xe279_2aca, format.as_bytes()));
            at += 8 + format.len().next_multiple_of(8);
        }
        // The end of the extensions: type and length 0.
        at += 8;
        put(&mut header, 8, &(at as u64).to_be_bytes());
        put(&mut header, 16, &(name.len() as u32).to_be_bytes());
        put(&mut header, at, name.as_bytes());
    }
    header
}

/// A header extension.
pub fn extension(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = kind.to_be_bytes().to_vec();
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

impl Forged {
    /// An image with data of every kind.
    pub fn new(version: u32, tail: Tail) -> Self {
        let mut this = Self::empty(version, None);
        let mut random = Random::new(33);
        for guest in DATA {
            if guest != LAST {
                this.add_data(guest, &mut random);
            }
        }
        if version == 3 {
            this.set_entry(ZEROES[0], 1);
            let kept = this.allocate();
            this.bytes[kept..kept + CLUSTER].fill(0xee);
            this.set_entry(ZEROES[1], COPIED | kept as u64 | 1);
        }
        match tail {
            Tail::Data => {
                this.add_packed();
                this.bytes
                    .resize(this.bytes.len().next_multiple_of(CLUSTER), 0);
                this.add_data(LAST, &mut random);
                // Nothing of it is beyond the end of the disk.
                let beyond = CLUSTER - (SIZE as usize % CLUSTER);
                this.bytes.truncate(this.bytes.len() - beyond);
            }
            Tail::Compressed => {
                this.add_data(LAST, &mut random);
                this.add_packed();
            }
        }
        this.count();
        this
    }

    /// An image without data. `behind`: name and format of its backing file, with which it has no
    /// L2 tables either.
    pub fn empty(version: u32, behind: Option<(&str, Option<&str>)>) -> Self {
        let mut bytes = header(version, behind);
        bytes.resize(FIRST_FREE, 0);
        let mut this = Self {
            bytes,
            disk: vec![0; SIZE as usize],
            version,
        };
        this.put64(REFTABLE, REFBLOCK as u64);
        if behind.is_none() {
            for (index, table) in L2.iter().enumerate() {
                this.put64(L1 + 8 * index, COPIED | *table as u64);
            }
        } else {
            this.bytes.truncate(L2[0]);
        }
        this.count();
        this
    }

    pub fn put64(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    pub fn put32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    pub fn get64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().expect("eight"))
    }

    /// Puts an extension behind the header, where no other is.
    pub fn extend(&mut self, kind: u32, data: &[u8]) {
        let at = if self.version == 3 { 104 } else { 72 };
        let extension = extension(kind, data);
        self.bytes[at..at + extension.len()].copy_from_slice(&extension);
    }

    /// Where the L2 entry of a cluster of the disk is.
    pub fn entry_at(guest: u64) -> usize {
        L2[(guest / SPAN) as usize] + 8 * (guest % SPAN) as usize
    }

    pub fn entry(&self, guest: u64) -> u64 {
        self.get64(Self::entry_at(guest))
    }

    pub fn set_entry(&mut self, guest: u64, entry: u64) {
        self.put64(Self::entry_at(guest), entry);
    }

    pub fn change_entry(&mut self, guest: u64, change: fn(u64) -> u64) {
        self.set_entry(guest, change(self.entry(guest)));
    }

    /// Where the data of a cluster of the disk are, which are not compressed.
    pub fn host(&self, guest: u64) -> usize {
        (self.entry(guest) & 0x00ff_ffff_ffff_fe00) as usize
    }

    /// Where the data of a compressed cluster begin.
    pub fn packed(&self, guest: u64) -> usize {
        (self.entry(guest) & ((1 << 58) - 1)) as usize
    }

    /// The bytes of the disk that a cluster has.
    pub fn range(guest: u64) -> std::ops::Range<usize> {
        let from = guest as usize * CLUSTER;
        from..(from + CLUSTER).min(SIZE as usize)
    }

    fn allocate(&mut self) -> usize {
        let at = self.bytes.len();
        self.bytes.resize(at + CLUSTER, 0);
        at
    }

    fn add_data(&mut self, guest: u64, random: &mut Random) {
        let at = self.allocate();
        for word in self.bytes[at..].chunks_exact_mut(8) {
            word.copy_from_slice(&random.bits().to_be_bytes());
        }
        let range = Self::range(guest);
        let data = &self.bytes[at..at + range.len()];
        self.disk[range].copy_from_slice(data);
        self.set_entry(guest, COPIED | at as u64);
    }

    /// Appends the compressed clusters: one behind the other, as QEMU has them.
    fn add_packed(&mut self) {
        for guest in PACKED {
            let text: Vec<u8> = (0..CLUSTER as u32 / 4)
                .flat_map(|at| (at * at / (5 + guest as u32)).to_be_bytes())
                .collect();
            let packed = compress_to_vec(&text, 6);
            let at = self.bytes.len();
            self.bytes.extend(&packed);
            self.disk[Self::range(guest)].copy_from_slice(&text);
            let more = ((at + packed.len() - 1) / 512 - at / 512) as u64;
            self.set_entry(guest, COMPRESSED | more << 58 | at as u64);
        }
    }

    /// Writes the reference counts that are right.
    fn count(&mut self) {
        let clusters = self.bytes.len().div_ceil(CLUSTER);
        let mut counts = vec![1_u16; clusters];
        let first = FIRST_FREE / CLUSTER;
        counts[first.min(clusters)..].fill(0);
        for guest in (0..CLUSTERS).filter(|_| clusters > first) {
            let entry = self.entry(guest);
            if entry & COMPRESSED != 0 {
                let (from, more) = (self.packed(guest) / 512 * 512, entry >> 58 & 15);
                let last = from + (more as usize + 1) * 512 - 1;
                let packed = &mut counts[from / CLUSTER..=last / CLUSTER];
                packed.iter_mut().for_each(|count| *count += 1);
            } else if self.host(guest) != 0 {
                counts[self.host(guest) / CLUSTER] += 1;
            }
        }
        for (at, count) in counts.iter().enumerate() {
            let at = REFBLOCK + 2 * at;
            self.bytes[at..at + 2].copy_from_slice(&count.to_be_bytes());
        }
    }
}
