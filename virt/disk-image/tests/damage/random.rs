//! Random damage: one change at a time, or a cut, of small images. What is read is what a reader
//! says that shares no code with the crate and knows the whole file; or it fails.

use std::collections::HashSet;

use miniz_oxide::inflate::{TINFLStatus, decompress_to_vec_with_limit};
use seeded::Random;

use super::support::forge::{
    BITS, CLUSTER, CLUSTERS, COMPRESSED, COPIED, DATA, Forged, L1, L2, PACKED, REFBLOCK, REFTABLE,
    SPAN, Tail, ZEROES,
};
use super::support::{Driver, folder};
use super::{Role, open, put};

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// A reader of images with the tables of [`Forged`].
struct Reader<'a> {
    bytes: &'a [u8],
    version: u32,
    tables: HashSet<u64>,
}

impl<'a> Reader<'a> {
    /// Nothing: the tables cannot be followed.
    fn new(bytes: &'a [u8], version: u32) -> Option<Self> {
        let mut reader = Self {
            bytes,
            version,
            tables: HashSet::from([0, (L1 / CLUSTER) as u64, (REFTABLE / CLUSTER) as u64]),
        };
        for at in (REFTABLE..REFTABLE + CLUSTER).step_by(8) {
            let block = reader.word(at)? & OFFSET;
            if block != 0 && block.is_multiple_of(CLUSTER as u64) {
                reader.tables.insert(block >> BITS);
            }
        }
        let mut own = HashSet::new();
        for index in 0..2 {
            let entry = reader.word(L1 + 8 * index)?;
            let table = entry & OFFSET;
            if entry & !(OFFSET | COPIED) != 0 || !table.is_multiple_of(CLUSTER as u64) {
                return None;
            }
            if entry != 0 {
                let is_whole = table + CLUSTER as u64 <= bytes.len() as u64;
                if table == 0 || !is_whole || reader.tables.contains(&(table >> BITS)) {
                    return None;
                }
                own.insert(table >> BITS);
            }
        }
        reader.tables.extend(own);
        Some(reader)
    }

    fn word(&self, at: usize) -> Option<u64> {
        let bytes = self.bytes.get(at..at + 8)?;
        Some(u64::from_be_bytes(bytes.try_into().ok()?))
    }

    /// Content of a cluster of the disk; `None`: it cannot be read.
    fn read(&self, guest: u64) -> Option<Vec<u8>> {
        let len = Forged::range(guest).len();
        let table = (self.word(L1 + 8 * (guest / SPAN) as usize)? & OFFSET) as usize;
        let entry = match table {
            0 => 0,
            table => self.word(table + 8 * (guest % SPAN) as usize)?,
        };
        if entry & COMPRESSED != 0 {
            return self.unpack(entry).map(|data| data[..len].to_vec());
        }
        let offset = entry & OFFSET;
        if entry & !(OFFSET | COPIED | 1) != 0 || !offset.is_multiple_of(CLUSTER as u64) {
            return None;
        }
        if entry & 1 != 0 {
            return (self.version == 3).then(|| vec![0; len]);
        }
        if entry == 0 {
            return Some(vec![0; len]);
        }
        if self.tables.contains(&(offset >> BITS)) {
            return None;
        }
        let offset = offset as usize;
        self.bytes.get(offset..offset + len).map(<[u8]>::to_vec)
    }

    fn unpack(&self, entry: u64) -> Option<Vec<u8>> {
        let offset = (entry & ((1 << 58) - 1)) as usize;
        let end = offset / 512 * 512 + 512 * ((entry >> 58 & 15) as usize + 1);
        let file_end = self.bytes.len().next_multiple_of(512);
        let clusters = offset as u64 >> BITS..=(end as u64 - 1) >> BITS;
        if end > file_end || clusters.into_iter().any(|at| self.tables.contains(&at)) {
            return None;
        }
        let packed = self.bytes.get(offset..end.min(self.bytes.len()))?;
        match decompress_to_vec_with_limit(packed, CLUSTER) {
            Ok(data) => (data.len() == CLUSTER).then_some(data),
            Err(error) if error.status == TINFLStatus::HasMoreOutput => {
                (error.output.len() == CLUSTER).then_some(error.output)
            }
            Err(_) => None,
        }
    }
}

/// Damages the image; a description, and whether the header is damaged.
fn damage(forged: &mut Forged, random: &mut Random) -> (String, bool) {
    let pick = |random: &mut Random, from: &[u64]| from[random.below(from.len() as u64) as usize];
    let entries = || [DATA.as_slice(), &PACKED, &ZEROES, &[7, 30, SPAN + 5]].concat();
    match random.below(8) {
        0 => {
            let len = random.below(forged.bytes.len() as u64) as usize;
            forged.bytes.truncate(len);
            (format!("cut to {len:#x}"), len < L2[0])
        }
        1 => {
            // Near its end, where most that remains is whole.
            let len = forged.bytes.len() - random.below(2000) as usize;
            forged.bytes.truncate(len);
            (format!("cut to {len:#x}"), false)
        }
        2 => {
            let (at, bit) = (random.below(112) as usize, random.below(8));
            forged.bytes[at] ^= 1 << bit;
            (format!("bit {bit} of byte {at} of the header"), true)
        }
        3 => {
            let at = [L1, L1 + 8, REFTABLE, REFBLOCK][random.below(4) as usize];
            let bit = random.below(64);
            let word = forged.get64(at) ^ 1 << bit;
            forged.put64(at, word);
            (format!("bit {bit} of the word at {at:#x}"), false)
        }
        4 | 5 => {
            let guest = pick(random, &entries());
            let bit = random.below(64);
            let entry = forged.entry(guest) ^ 1 << bit;
            forged.set_entry(guest, entry);
            (format!("bit {bit} of the entry of {guest}"), false)
        }
        6 => {
            let guest = pick(random, &entries());
            let flags = [0, 1, COPIED, COPIED | 1, COMPRESSED, COMPRESSED | 2 << 58]
                [random.below(6) as usize];
            let step = [CLUSTER as u64, 512, 1][random.below(3) as usize];
            let end = forged.bytes.len() as u64 + 3 * CLUSTER as u64;
            let entry = flags | (random.below(end / step) * step);
            forged.set_entry(guest, entry);
            (format!("the entry {entry:#x} of {guest}"), false)
        }
        _ => {
            let at = random.below(forged.bytes.len() as u64) as usize;
            let bit = random.below(8);
            forged.bytes[at] ^= 1 << bit;
            (format!("bit {bit} of byte {at:#x}"), at < 112)
        }
    }
}

/// `DISK_IMAGE_ROUNDS=100000` makes more of them.
#[test]
fn random_damage_never_reads_as_something_else() {
    let rounds = std::env::var("DISK_IMAGE_ROUNDS")
        .ok()
        .and_then(|rounds| rounds.parse().ok())
        .unwrap_or(500);
    let mut random = Random::new(7);
    let (folder, _) = folder();
    let pristine = [
        (2, Tail::Data),
        (3, Tail::Data),
        (2, Tail::Compressed),
        (3, Tail::Compressed),
    ]
    .map(|(version, tail)| Forged::new(version, tail));
    let (mut refused, mut failed, mut right) = (0, 0, 0);
    for round in 0..rounds {
        let whole = &pristine[round % pristine.len()];
        let mut forged = whole.clone();
        let (what, is_header) = damage(&mut forged, &mut random);
        let is_cut = forged.bytes.len() != whole.bytes.len();
        put(folder.path(), &forged);
        let reader = Reader::new(&forged.bytes, forged.version);
        for role in [Role::ReadOnly, Role::Behind, Role::Written] {
            let cell = format!("round {round}, {what}, {role:?}");
            let disk = match open(folder.path(), role) {
                Ok(disk) => disk,
                Err(error) => {
                    let may_be = is_header || reader.is_none() || role == Role::Written;
                    assert!(may_be, "{cell}: {error:?}");
                    refused += 1;
                    continue;
                }
            };
            let reader = reader
                .as_ref()
                .unwrap_or_else(|| panic!("{cell}: it was opened"));
            if is_header {
                // A size or a version that is another; all that is known is that it does not fall
                // over.
                continue;
            }
            let mut driver = Driver::new(disk);
            for guest in 0..CLUSTERS {
                let is_used =
                    DATA.contains(&guest) || PACKED.contains(&guest) || ZEROES.contains(&guest);
                if !is_used && ![7, 30, SPAN + 5].contains(&guest) {
                    continue;
                }
                let range = Forged::range(guest);
                let read = driver.read(range.start as u64, range.len() as u32).ok();
                let said = reader.read(guest);
                assert!(
                    read == said,
                    "{cell}: cluster {guest}: {:?}, {:?}",
                    read.is_some(),
                    said.is_some()
                );
                if is_cut && let Some(read) = &read {
                    assert!(
                        *read == whole.disk[range],
                        "{cell}: cluster {guest} was another"
                    );
                }
                *(if read.is_some() {
                    &mut right
                } else {
                    &mut failed
                }) += 1;
            }
        }
    }
    println!("{rounds} rounds: {refused} refused, {failed} clusters failed, {right} read right");
    assert!(refused > 0 && failed > 0 && right > 0);
}
