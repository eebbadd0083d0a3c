//! Entries of L2 tables and the data that they refer to, and files that were cut.

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use super::kinds::*;
use super::support::forge::{
    CLUSTER, COMPRESSED, COPIED, Forged, L1, L2, LAST, REFBLOCK, REFTABLE, SPAN, ZEROES,
};

/// Entries of clusters with data.
pub fn data() -> Vec<Damage> {
    vec![
        damage(V3, "data outside the file", |f| {
            f.set_entry(1, COPIED | FAR)
        })
        .loses(&[1], "outside the file"),
        damage(V3, "data in the middle of a cluster", |f| {
            f.change_entry(1, |entry| entry + 512)
        })
        .loses(&[1], "beginning of a cluster"),
        damage(V3, "data with reserved low bits", |f| {
            f.change_entry(1, |entry| entry | 4)
        })
        .loses(&[1], "reserved"),
        damage(V3, "data with reserved high bits", |f| {
            f.change_entry(1, |entry| entry | 1 << 60)
        })
        .loses(&[1], "reserved"),
        damage(V3, "data that have lost their offset", |f| {
            f.set_entry(1, COPIED)
        })
        .loses(&[1], "header's offset")
        .unseen("QEMU takes it for none"),
        damage(V3, "data on the L1 table", |f| {
            f.set_entry(1, COPIED | L1 as u64)
        })
        .loses(&[1], "something else"),
        damage(V3, "data on an L2 table", |f| {
            f.set_entry(1, COPIED | L2[1] as u64)
        })
        .loses(&[1], "something else"),
        damage(V3, "data on a refcount block", |f| {
            f.set_entry(1, COPIED | REFBLOCK as u64)
        })
        .loses(&[1], "something else"),
        damage(V3, "data on the refcount table", |f| {
            f.set_entry(1, COPIED | REFTABLE as u64)
        })
        .loses(&[1], "something else"),
        damage(V3, "two clusters of the disk in one of the file", |f| {
            let at = f.entry(1);
            f.set_entry(2, at);
            f.disk.copy_within(Forged::range(1), Forged::range(2).start);
        })
        .refused_for_writing("something else"),
    ]
}

/// Entries of clusters that read as zeroes.
pub fn zeroes() -> Vec<Damage> {
    vec![
        damage(V2, "the flag of zeroes in version 2", |f| {
            f.change_entry(1, |entry| entry | 1)
        })
        .loses(&[1], "version 2")
        .unseen("QEMU's check counts clusters alone; its reads fail"),
        damage(
            V2,
            "the flag of zeroes in version 2, without a cluster",
            |f| f.set_entry(30, 1),
        )
        .loses(&[30], "version 2")
        .unseen("QEMU's check counts clusters alone; its reads fail"),
        damage(V3, "zeroes with reserved bits", |f| {
            f.set_entry(ZEROES[0], 1 | 1 << 56)
        })
        .loses(&[ZEROES[0]], "reserved"),
        damage(V3, "zeroes in the middle of a cluster", |f| {
            f.change_entry(ZEROES[1], |entry| entry + 512)
        })
        .loses(&[ZEROES[1]], "beginning of a cluster"),
        damage(V3, "the cluster kept for zeroes outside the file", |f| {
            f.set_entry(ZEROES[1], COPIED | FAR | 1)
        })
        .refused_for_writing("outside the file"),
    ]
}

/// Files that were cut.
pub fn cut_files() -> Vec<Damage> {
    vec![
        damage(V3, "a file cut in data", |f| {
            let at = f.host(SPAN + 2) + 100;
            f.bytes.truncate(at);
        })
        .loses(&[SPAN + 2, SPAN + 3, 8, 9, 10, 11, LAST], ""),
        damage(V3, "a file cut between data", |f| {
            let at = f.host(SPAN + 3);
            f.bytes.truncate(at);
        })
        .loses(&[SPAN + 3, 8, 9, 10, 11, LAST], ""),
        damage(V3, "a file cut in its last data", |f| {
            let len = f.bytes.len();
            f.bytes.truncate(len - 1);
        })
        .loses(&[LAST], "cut short")
        .unseen(HALF_READ),
        damage(V3, "a file cut before its last data", |f| {
            let at = f.host(LAST);
            f.bytes.truncate(at);
        })
        .loses(&[LAST], "outside the file"),
        damage(Packed, "a file cut in its last compressed data", |f| {
            let len = f.bytes.len();
            f.bytes.truncate(len - 2);
        })
        .loses(&[11], "end early")
        .unseen(HALF_READ),
        damage(Packed, "a file cut in its last compressed sector", |f| {
            let at = f.packed(11) + 1;
            f.bytes.truncate(at);
        })
        .loses(&[11], "")
        .unseen(HALF_READ),
    ]
}

/// Entries of compressed clusters, and their data.
pub fn compressed() -> Vec<Damage> {
    vec![
        damage(V3, "compressed data outside the file", |f| {
            f.set_entry(9, COMPRESSED | FAR)
        })
        .loses(&[9], "outside the file"),
        damage(V3, "compressed data at an offset of 58 bits", |f| {
            f.change_entry(9, |entry| entry | 1 << 57)
        })
        .loses(&[9], "outside the file"),
        damage(Packed, "compressed data that reach beyond the file", |f| {
            f.change_entry(11, |entry| entry | 15 << 58)
        })
        .loses(&[11], "outside the file"),
        damage(V3, "compressed data on a table", |f| {
            f.set_entry(9, COMPRESSED | L2[1] as u64)
        })
        .loses(&[9], "something else"),
        damage(V3, "compressed data with the flag of a count", |f| {
            f.change_entry(9, |entry| entry | COPIED)
        })
        .refused_for_writing("reserved"),
        damage(V3, "compressed data that are none", |f| {
            let at = f.packed(9);
            f.bytes[at] = 0xff;
        })
        .fails(&[9])
        .unseen("its check does not decompress"),
        damage(V3, "compressed data that end early", |f| {
            let at = f.packed(9);
            let short = miniz_oxide::deflate::compress_to_vec(&[1; 100], 6);
            f.bytes[at..at + short.len()].copy_from_slice(&short);
        })
        .fails(&[9])
        .unseen("its check does not decompress"),
        // A buffer that goes round, as a library's may, would have something there.
        damage(
            V3,
            "compressed data that refer to before their beginning",
            |f| {
                let at = f.packed(9);
                let next = f.packed(10);
                let is_one = |flip: &usize| {
                    let mut packed = f.bytes[at..next].to_vec();
                    packed[flip / 8] ^= 1 << (flip % 8);
                    inflates(&packed, 0)
                        && !inflates(&packed, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF)
                };
                let flip = (0..8 * (next - at)).find(is_one).expect("one of all");
                f.bytes[at + flip / 8] ^= 1 << (flip % 8);
            },
        )
        .fails(&[9])
        .unseen("its check does not decompress"),
    ]
}

/// Whether compressed data say a whole cluster.
fn inflates(packed: &[u8], flags: u32) -> bool {
    let mut cluster = vec![0; CLUSTER];
    let mut state = DecompressorOxide::new();
    let (status, _, written) = decompress(&mut state, packed, &mut cluster, 0, flags);
    matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput) && written == CLUSTER
}
