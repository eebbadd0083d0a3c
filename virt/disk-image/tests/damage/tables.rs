//! The L1 table, L2 tables, reference counts and snapshots.

use super::kinds::*;
use super::support::forge::{CLUSTER, CLUSTERS, COPIED, Forged, L1, L2, REFBLOCK, REFTABLE, SPAN};

/// The L1 table, and its entries.
pub fn l1() -> Vec<Damage> {
    vec![
        damage(V3, "an L1 table outside the file", |f| f.put64(40, FAR)).refused("L1 table"),
        damage(V3, "an L1 table in the middle of a cluster", |f| {
            f.put64(40, L1 as u64 + 512)
        })
        .refused("L1 table"),
        damage(V3, "an L1 table that is too small", |f| f.put32(36, 1)).refused("L1 table"),
        damage(V3, "an L1 table that is too large", |f| {
            f.put32(36, u32::MAX)
        })
        .refused("L1 table"),
        damage(V3, "an L1 table on the refcount table", |f| {
            f.put64(40, REFTABLE as u64)
        })
        .refused("overlap"),
        damage(V3, "a file cut in its L1 table", |f| {
            f.bytes.truncate(L1 + 8)
        })
        .refused("L1 table"),
        // The data of the first table are behind the second.
        damage(V3, "a file cut in an L2 table", |f| {
            f.bytes.truncate(L2[1] + 2048)
        })
        .reading(Refused("cut short"))
        .writing(Refused("outside the file")),
        damage(V3, "a file cut before an L2 table", |f| {
            f.bytes.truncate(L2[1])
        })
        .refused("outside the file"),
        damage(V3, "an L2 table outside the file", |f| {
            f.put64(L1 + 8, COPIED | FAR)
        })
        .refused("outside the file"),
        damage(V3, "an L2 table in the middle of a cluster", |f| {
            f.put64(L1 + 8, COPIED | (L2[1] as u64 + 512))
        })
        .refused("beginning of a cluster"),
        damage(V3, "an L1 entry with reserved bits", |f| {
            f.put64(L1 + 8, COPIED | L2[1] as u64 | 1 << 57)
        })
        .refused("reserved"),
        damage(V3, "an L1 entry with reserved low bits", |f| {
            f.put64(L1 + 8, COPIED | L2[1] as u64 | 2)
        })
        .refused("reserved"),
        damage(V3, "an L1 entry that has lost its offset", |f| {
            f.put64(L1 + 8, COPIED)
        })
        .refused("header's offset"),
        damage(V3, "an L2 table on the L1 table", |f| {
            f.put64(L1 + 8, COPIED | L1 as u64)
        })
        .refused("something else"),
        damage(V3, "an L2 table on a refcount block", |f| {
            f.put64(L1 + 8, COPIED | REFBLOCK as u64)
        })
        .refused("something else"),
        damage(V3, "an L2 table on the refcount table", |f| {
            f.put64(L1 + 8, COPIED | REFTABLE as u64)
        })
        .refused("something else"),
        damage(V3, "two L1 entries with one L2 table", |f| {
            f.put64(L1 + 8, COPIED | L2[0] as u64);
            for guest in SPAN..CLUSTERS {
                let (from, to) = (Forged::range(guest - SPAN), Forged::range(guest));
                let from = from.start..from.start + to.len();
                f.disk.copy_within(from, to.start);
            }
        })
        .refused_for_writing("something else"),
    ]
}

/// Reference counts.
pub fn counts() -> Vec<Damage> {
    vec![
        damage(V3, "a refcount table outside the file", |f| {
            f.put64(48, FAR)
        })
        .refused_for_writing("refcount table"),
        damage(V3, "a refcount table in the middle of a cluster", |f| {
            f.put64(48, REFTABLE as u64 + 8)
        })
        .refused_for_writing("refcount table"),
        damage(V3, "a refcount table that is too large", |f| {
            f.put32(56, u32::MAX)
        })
        .refused_for_writing("refcount table"),
        damage(V3, "a refcount block outside the file", |f| {
            f.put64(REFTABLE, FAR)
        })
        .refused_for_writing("outside the file"),
        damage(V3, "a refcount block in the middle of a cluster", |f| {
            f.put64(REFTABLE, REFBLOCK as u64 + 512)
        })
        .refused_for_writing("beginning of a cluster"),
        damage(V3, "no refcount block", |f| f.put64(REFTABLE, 0))
            .refused_for_writing("cannot be counted"),
        damage(V3, "reference counts of 128 bits", |f| f.put32(96, 7))
            .refused_for_writing("reference counts"),
        damage(V3, "counts that are too low", |f| {
            f.bytes[REFBLOCK..REFBLOCK + 24].fill(0)
        }),
    ]
}

/// Snapshots.
pub fn snapshots() -> Vec<Damage> {
    vec![
        damage(V3, "a snapshot table outside the file", |f| {
            f.put32(60, 1);
            f.put64(64, FAR);
        })
        .refused_for_writing("snapshot table"),
        damage(V3, "more snapshots than can be", |f| {
            f.put32(60, u32::MAX);
            f.put64(64, L1 as u64);
        })
        .refused_for_writing("snapshots"),
        damage(V3, "a snapshot without an L1 table", |f| {
            let at = f.bytes.len().next_multiple_of(CLUSTER);
            f.bytes.resize(at + 40, 0);
            f.put32(60, 1);
            f.put64(64, at as u64);
            f.put64(at, FAR);
            f.put32(at + 8, 1);
        })
        .refused_for_writing("snapshot 0"),
    ]
}
