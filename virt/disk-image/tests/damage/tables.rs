//! The L1 table, L2 tables, reference counts and snapshots.

use super::kinds::*;
use super::support::forge::{CLUSTER, CLUSTERS, COPIED, Forged, L1, L2, REFBLOCK, REFTABLE, SPAN};

pub fn tables() -> Vec<Damage> {
    use Image::V3;
    vec![
        both(
            "an L1 table outside the file",
            V3,
            |f| f.put64(40, FAR),
            "L1 table",
            Something,
        ),
        both(
            "an L1 table in the middle of a cluster",
            V3,
            |f| f.put64(40, L1 as u64 + 512),
            "L1 table",
            Something,
        ),
        both(
            "an L1 table that is too small",
            V3,
            |f| f.put32(36, 1),
            "L1 table",
            Something,
        ),
        both(
            "an L1 table that is too large",
            V3,
            |f| f.put32(36, u32::MAX),
            "L1 table",
            Something,
        ),
        both(
            "an L1 table on the refcount table",
            V3,
            |f| f.put64(40, REFTABLE as u64),
            "overlap",
            Something,
        ),
        both(
            "a file cut in its L1 table",
            V3,
            |f| f.bytes.truncate(L1 + 8),
            "L1 table",
            Something,
        ),
        Damage {
            what: "a file cut in an L2 table",
            image: V3,
            make: |f| f.bytes.truncate(L2[1] + 2048),
            reading: Refused("cut short"),
            // The data of the first table are behind the second.
            writing: Refused("outside the file"),
            qemu: Something,
        },
        both(
            "a file cut before an L2 table",
            V3,
            |f| f.bytes.truncate(L2[1]),
            "outside the file",
            Something,
        ),
        both(
            "an L2 table outside the file",
            V3,
            |f| f.put64(L1 + 8, COPIED | FAR),
            "outside the file",
            Something,
        ),
        both(
            "an L2 table in the middle of a cluster",
            V3,
            |f| f.put64(L1 + 8, COPIED | (L2[1] as u64 + 512)),
            "beginning of a cluster",
            Something,
        ),
        both(
            "an L1 entry with reserved bits",
            V3,
            |f| f.put64(L1 + 8, COPIED | L2[1] as u64 | 1 << 57),
            "reserved",
            Something,
        ),
        both(
            "an L1 entry with reserved low bits",
            V3,
            |f| f.put64(L1 + 8, COPIED | L2[1] as u64 | 2),
            "reserved",
            Something,
        ),
        both(
            "an L1 entry that has lost its offset",
            V3,
            |f| f.put64(L1 + 8, COPIED),
            "header's offset",
            Something,
        ),
        both(
            "an L2 table on the L1 table",
            V3,
            |f| f.put64(L1 + 8, COPIED | L1 as u64),
            "something else",
            Something,
        ),
        both(
            "an L2 table on a refcount block",
            V3,
            |f| f.put64(L1 + 8, COPIED | REFBLOCK as u64),
            "something else",
            Something,
        ),
        both(
            "an L2 table on the refcount table",
            V3,
            |f| f.put64(L1 + 8, COPIED | REFTABLE as u64),
            "something else",
            Something,
        ),
        writing(
            "two L1 entries with one L2 table",
            V3,
            |f| {
                f.put64(L1 + 8, COPIED | L2[0] as u64);
                for guest in SPAN..CLUSTERS {
                    let (from, to) = (Forged::range(guest - SPAN), Forged::range(guest));
                    let from = from.start..from.start + to.len();
                    f.disk.copy_within(from, to.start);
                }
            },
            "something else",
            Something,
        ),
        writing(
            "a refcount table outside the file",
            V3,
            |f| f.put64(48, FAR),
            "refcount table",
            Something,
        ),
        writing(
            "a refcount table in the middle of a cluster",
            V3,
            |f| f.put64(48, REFTABLE as u64 + 8),
            "refcount table",
            Something,
        ),
        writing(
            "a refcount table that is too large",
            V3,
            |f| f.put32(56, u32::MAX),
            "refcount table",
            Something,
        ),
        writing(
            "a refcount block outside the file",
            V3,
            |f| f.put64(REFTABLE, FAR),
            "outside the file",
            Something,
        ),
        writing(
            "a refcount block in the middle of a cluster",
            V3,
            |f| f.put64(REFTABLE, REFBLOCK as u64 + 512),
            "beginning of a cluster",
            Something,
        ),
        writing(
            "no refcount block",
            V3,
            |f| f.put64(REFTABLE, 0),
            "cannot be counted",
            Something,
        ),
        writing(
            "reference counts of 128 bits",
            V3,
            |f| f.put32(96, 7),
            "reference counts",
            Something,
        ),
        Damage {
            what: "counts that are too low",
            image: V3,
            make: |f| f.bytes[REFBLOCK..REFBLOCK + 24].fill(0),
            reading: Fine,
            writing: Fine,
            qemu: Something,
        },
        writing(
            "a snapshot table outside the file",
            V3,
            |f| {
                f.put32(60, 1);
                f.put64(64, FAR);
            },
            "snapshot table",
            Something,
        ),
        writing(
            "more snapshots than can be",
            V3,
            |f| {
                f.put32(60, u32::MAX);
                f.put64(64, L1 as u64);
            },
            "snapshots",
            Something,
        ),
        writing(
            "a snapshot without an L1 table",
            V3,
            |f| {
                let at = f.bytes.len().next_multiple_of(CLUSTER);
                f.bytes.resize(at + 40, 0);
                f.put32(60, 1);
                f.put64(64, at as u64);
                f.put64(at, FAR);
                f.put32(at + 8, 1);
            },
            "snapshot 0",
            Something,
        ),
    ]
}
