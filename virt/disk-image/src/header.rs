//! The qcow2 header, as far as this crate must know it (QEMU's `docs/interop/qcow2.txt`, "Header").
//!
//! The library (`imago`) reads the header again. It is read here first for two reasons: the library
//! ignores encryption, writes to an image before it has found that it cannot, and checks no offset
//! against the file's length; and the storage layer must know where the tables are. For an image
//! that is only read, the library gets a header with only the fields checked here
//! ([`Layout::bare_header`]). All numbers are big-endian.
//!
//! [`Layout::parse`] refuses images that cannot be read, [`Layout::check_counts`] those that cannot
//! be written.

use std::io;

use crate::file_io::{FileIo, read_known};
use crate::options::ImageErrorKind;

/// Bits of a table entry that hold an offset in the file (§ "L1 table entry", "Refcount table
/// entry").
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// An L2 entry refers to compressed data (§ "L2 table entry").
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// Bytes of the header that are read: a header of version 3 without extensions.
pub(crate) const HEADER_BYTES: usize = 104;
/// Bytes of a header of version 2.
const V2_HEADER_BYTES: u64 = 72;
/// Bytes of [`Layout::bare_header`]: a header of version 3, and the end of its extensions.
pub(crate) const BARE_HEADER_BYTES: usize = HEADER_BYTES + 8;
const MAGIC: u32 = 0x5146_49fb;
/// Largest L1 table, in bytes (QEMU's limit, and the library's).
const MAX_L1_BYTES: u64 = 32 << 20;
/// Largest refcount table, in bytes (likewise).
const MAX_REFTABLE_BYTES: u64 = 8 << 20;
/// Reference counts are out of date (incompatible feature 0). Reading does not need them.
const DIRTY: u64 = 1;
/// QEMU has found the image corrupt (incompatible feature 1).
const CORRUPT: u64 = 1 << 1;
/// Other incompatible features that version 3 defines, from bit 2 on.
const INCOMPATIBLE: [&str; 3] = [
    "an external data file is",
    "another compression than zlib is",
    "extended L2 entries are",
];

/// Reads a big-endian 32-bit number at `at`; the caller has checked that it lies inside.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Reads a big-endian 64-bit number at `at`; the caller has checked that it lies inside.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

/// Location of the tables of an image. Offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub cluster_bits: u32,
    /// Size of the disk.
    pub size: u64,
    pub l1_offset: u64,
    pub l1_entries: u64,
    pub reftable_offset: u64,
    pub reftable_bytes: u64,
    /// A reference count has 2 to this power bits, 0 to 6.
    pub refcount_order: u32,
    /// Version 2 has no zero clusters.
    pub version: u32,
    pub snapshots: u32,
    pub snapshots_offset: u64,
    /// Bytes of the header before its extensions.
    pub header_bytes: u64,
}

impl Layout {
    /// Reads the layout from the first bytes of an image, with `file_len` bytes in its file, and
    /// checks what reading needs.
    pub(crate) fn parse(
        header: &[u8; HEADER_BYTES],
        file_len: u64,
    ) -> Result<Self, ImageErrorKind> {
        let corrupt = |what: String| Err(ImageErrorKind::Corrupt(what));
        if be32(header, 0) != MAGIC {
            return Err(ImageErrorKind::NotQcow2);
        }
        let version = be32(header, 4);
        if version != 2 && version != 3 {
            return Err(ImageErrorKind::Unsupported(format!("version {version} is")));
        }
        if version == 3 {
            check_features(be64(header, 72))?;
        }
        if be32(header, 32) != 0 {
            return Err(ImageErrorKind::Unsupported("encryption is".into()));
        }
        let layout = Self {
            cluster_bits: be32(header, 20),
            size: be64(header, 24),
            l1_offset: be64(header, 40),
            l1_entries: u64::from(be32(header, 36)),
            reftable_offset: be64(header, 48),
            // Set below, once `cluster_bits`, by which it is shifted, is checked.
            reftable_bytes: 0,
            refcount_order: if version == 2 { 4 } else { be32(header, 96) },
            version,
            snapshots: be32(header, 60),
            snapshots_offset: be64(header, 64),
            header_bytes: match version {
                2 => V2_HEADER_BYTES,
                _ => u64::from(be32(header, 100)),
            },
        };
        if !(9..=21).contains(&layout.cluster_bits) {
            return corrupt(format!("clusters of 2^{} bytes", layout.cluster_bits));
        }
        let layout = Self {
            reftable_bytes: u64::from(be32(header, 56)) << layout.cluster_bits,
            ..layout
        };
        let least = if version == 2 { V2_HEADER_BYTES } else { 104 };
        if !(least..=layout.cluster_bytes()).contains(&layout.header_bytes) {
            return corrupt(format!("a header of {} bytes", layout.header_bytes));
        }
        if layout.size == 0 || !layout.size.is_multiple_of(vio::blk::SECTOR) {
            return Err(ImageErrorKind::Size(layout.size));
        }
        let l1_bytes = layout.l1_entries * 8;
        let needed = layout.size.div_ceil(layout.l2_span());
        if layout.l1_entries < needed {
            return corrupt(format!(
                "its L1 table has {} entries, and the disk needs {needed}",
                layout.l1_entries
            ));
        }
        layout.check_table("L1", layout.l1_offset, l1_bytes, MAX_L1_BYTES, file_len)?;
        let l1_end = layout.l1_offset + l1_bytes;
        if layout.has_reftable(file_len)
            && layout.l1_offset < layout.reftable_offset + layout.reftable_bytes
            && layout.reftable_offset < l1_end
        {
            return corrupt("its L1 table and its refcount table overlap".into());
        }
        Ok(layout)
    }

    /// Checks what writing needs in addition: usable reference counts.
    pub(crate) fn check_counts(
        &self,
        header: &[u8; HEADER_BYTES],
        file_len: u64,
    ) -> Result<(), ImageErrorKind> {
        if self.version == 3 && be64(header, 72) & DIRTY != 0 {
            return Err(ImageErrorKind::Marked("dirty"));
        }
        if self.refcount_order > 6 {
            let order = self.refcount_order;
            return Err(ImageErrorKind::Corrupt(format!(
                "reference counts of 2^{order} bits"
            )));
        }
        self.check_table(
            "refcount",
            self.reftable_offset,
            self.reftable_bytes,
            MAX_REFTABLE_BYTES,
            file_len,
        )
    }

    /// Returns whether offset and size of the refcount table are valid in a file of this length.
    pub(crate) fn has_reftable(&self, file_len: u64) -> bool {
        let (offset, bytes) = (self.reftable_offset, self.reftable_bytes);
        self.check_table("refcount", offset, bytes, MAX_REFTABLE_BYTES, file_len)
            .is_ok()
    }

    /// Returns the header for a library that only reads the image: the checked fields, without
    /// extensions and without a backing file.
    pub(crate) fn bare_header(&self) -> [u8; BARE_HEADER_BYTES] {
        let mut header = [0; BARE_HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC.to_be_bytes());
        put(4, &self.version.to_be_bytes());
        put(20, &self.cluster_bits.to_be_bytes());
        put(24, &self.size.to_be_bytes());
        // It was read from 32 bits.
        put(36, &(self.l1_entries as u32).to_be_bytes());
        put(40, &self.l1_offset.to_be_bytes());
        // The order of 16-bit counts, and the header's length; the rest ends the extensions.
        put(96, &4_u32.to_be_bytes());
        put(100, &(HEADER_BYTES as u32).to_be_bytes());
        header
    }

    fn check_table(
        &self,
        name: &str,
        offset: u64,
        bytes: u64,
        most: u64,
        file_len: u64,
    ) -> Result<(), ImageErrorKind> {
        let what = if bytes == 0 || bytes > most {
            format!("its {name} table has {bytes} bytes")
        } else if offset == 0 || !offset.is_multiple_of(self.cluster_bytes()) {
            format!("its {name} table is at {offset:#x}")
        } else if offset.checked_add(bytes).is_none_or(|end| end > file_len) {
            format!(
                "its {name} table ({bytes} bytes at {offset:#x}) is outside the file ({file_len} \
                 bytes)"
            )
        } else {
            return Ok(());
        };
        Err(ImageErrorKind::Corrupt(what))
    }

    /// Bytes of a cluster, 512 to 2 Mi.
    pub(crate) fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the disk that one L2 table describes.
    pub(crate) fn l2_span(&self) -> u64 {
        1 << (2 * self.cluster_bits - 3)
    }

    /// Returns offset and length, in whole sectors, of the data of an L2 entry with the flag
    /// "compressed" (§ "Compressed Clusters Descriptor": the offset in the lower bits, then the
    /// sectors after the first).
    pub(crate) fn compressed(&self, entry: u64) -> (u64, u64) {
        let width = 62 - (self.cluster_bits - 8);
        let offset = entry & ((1 << width) - 1) & !511;
        let more = (entry & (COMPRESSED - 1)) >> width;
        (offset, (more + 1) * 512)
    }

    /// The binary logarithm of the clusters that one refcount block counts.
    pub(crate) fn refblock_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }
}

fn check_features(incompatible: u64) -> Result<(), ImageErrorKind> {
    if incompatible & CORRUPT != 0 {
        return Err(ImageErrorKind::Marked("corrupt"));
    }
    let incompatible = incompatible & !DIRTY;
    if incompatible == 0 {
        return Ok(());
    }
    let bit = incompatible.trailing_zeros() as usize;
    let name = match bit.checked_sub(2).and_then(|at| INCOMPATIBLE.get(at)) {
        Some(name) => (*name).to_owned(),
        None => format!("incompatible feature {bit} is"),
    };
    Err(ImageErrorKind::Unsupported(name))
}

/// Reads the header of a file of `len` bytes; one too short for a header reads as zeroes beyond its
/// end.
pub(crate) fn read(file: &dyn FileIo, len: u64) -> io::Result<[u8; HEADER_BYTES]> {
    let mut header = [0; HEADER_BYTES];
    read_known(file, &mut header, 0, len)?;
    Ok(header)
}
