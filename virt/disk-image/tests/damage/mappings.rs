//! What L2 tables refer to, and files that were cut.

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use super::kinds::*;
use super::support::forge::{
    CLUSTER, COMPRESSED, COPIED, Forged, L1, L2, LAST, REFBLOCK, REFTABLE, SPAN, ZEROES,
};

pub fn mappings() -> Vec<Damage> {
    use Image::{Packed, V2, V3};
    vec![
        mapping(
            "data outside the file",
            V3,
            |f| f.set_entry(1, COPIED | FAR),
            &[1],
            "outside the file",
            Something,
        ),
        mapping(
            "data in the middle of a cluster",
            V3,
            |f| {
                let at = f.entry(1) + 512;
                f.set_entry(1, at);
            },
            &[1],
            "beginning of a cluster",
            Something,
        ),
        mapping(
            "data with reserved low bits",
            V3,
            |f| {
                let at = f.entry(1) | 4;
                f.set_entry(1, at);
            },
            &[1],
            "reserved",
            Something,
        ),
        mapping(
            "data with reserved high bits",
            V3,
            |f| {
                let at = f.entry(1) | 1 << 60;
                f.set_entry(1, at);
            },
            &[1],
            "reserved",
            Something,
        ),
        mapping(
            "data that have lost their offset",
            V3,
            |f| f.set_entry(1, COPIED),
            &[1],
            "header's offset",
            Nothing("QEMU takes it for none"),
        ),
        mapping(
            "data on the L1 table",
            V3,
            |f| f.set_entry(1, COPIED | L1 as u64),
            &[1],
            "something else",
            Something,
        ),
        mapping(
            "data on an L2 table",
            V3,
            |f| f.set_entry(1, COPIED | L2[1] as u64),
            &[1],
            "something else",
            Something,
        ),
        mapping(
            "data on a refcount block",
            V3,
            |f| f.set_entry(1, COPIED | REFBLOCK as u64),
            &[1],
            "something else",
            Something,
        ),
        mapping(
            "data on the refcount table",
            V3,
            |f| f.set_entry(1, COPIED | REFTABLE as u64),
            &[1],
            "something else",
            Something,
        ),
        mapping(
            "the flag of zeroes in version 2",
            V2,
            |f| {
                let at = f.entry(1) | 1;
                f.set_entry(1, at);
            },
            &[1],
            "version 2",
            Nothing("QEMU's check counts clusters alone; its reads fail"),
        ),
        mapping(
            "the flag of zeroes in version 2, without a cluster",
            V2,
            |f| f.set_entry(30, 1),
            &[30],
            "version 2",
            Nothing("QEMU's check counts clusters alone; its reads fail"),
        ),
        mapping(
            "zeroes with reserved bits",
            V3,
            |f| f.set_entry(ZEROES[0], 1 | 1 << 56),
            &[ZEROES[0]],
            "reserved",
            Something,
        ),
        mapping(
            "zeroes in the middle of a cluster",
            V3,
            |f| {
                let at = f.entry(ZEROES[1]) + 512;
                f.set_entry(ZEROES[1], at);
            },
            &[ZEROES[1]],
            "beginning of a cluster",
            Something,
        ),
        writing(
            "the cluster kept for zeroes outside the file",
            V3,
            |f| f.set_entry(ZEROES[1], COPIED | FAR | 1),
            "outside the file",
            Something,
        ),
        writing(
            "two clusters of the disk in one of the file",
            V3,
            |f| {
                let at = f.entry(1);
                f.set_entry(2, at);
                f.disk.copy_within(Forged::range(1), Forged::range(2).start);
            },
            "something else",
            Something,
        ),
        mapping(
            "a file cut in data",
            V3,
            |f| {
                let at = f.host(SPAN + 2) + 100;
                f.bytes.truncate(at);
            },
            &[SPAN + 2, SPAN + 3, 8, 9, 10, 11, LAST],
            "",
            Something,
        ),
        mapping(
            "a file cut between data",
            V3,
            |f| {
                let at = f.host(SPAN + 3);
                f.bytes.truncate(at);
            },
            &[SPAN + 3, 8, 9, 10, 11, LAST],
            "",
            Something,
        ),
        mapping(
            "a file cut in its last data",
            V3,
            |f| {
                let len = f.bytes.len();
                f.bytes.truncate(len - 1);
            },
            &[LAST],
            "cut short",
            Nothing(HALF_READ),
        ),
        mapping(
            "a file cut before its last data",
            V3,
            |f| {
                let at = f.host(LAST);
                f.bytes.truncate(at);
            },
            &[LAST],
            "outside the file",
            Something,
        ),
        mapping(
            "a file cut in its last compressed data",
            Packed,
            |f| {
                let len = f.bytes.len();
                f.bytes.truncate(len - 2);
            },
            &[11],
            "end early",
            Nothing(HALF_READ),
        ),
        mapping(
            "a file cut in its last compressed sector",
            Packed,
            |f| {
                let at = f.packed(11) + 1;
                f.bytes.truncate(at);
            },
            &[11],
            "",
            Nothing(HALF_READ),
        ),
        mapping(
            "compressed data outside the file",
            V3,
            |f| f.set_entry(9, COMPRESSED | FAR),
            &[9],
            "outside the file",
            Something,
        ),
        mapping(
            "compressed data at an offset of 58 bits",
            V3,
            |f| {
                let at = f.entry(9) | 1 << 57;
                f.set_entry(9, at);
            },
            &[9],
            "outside the file",
            Something,
        ),
        mapping(
            "compressed data that reach beyond the file",
            Packed,
            |f| {
                let at = f.entry(11) | 15 << 58;
                f.set_entry(11, at);
            },
            &[11],
            "outside the file",
            Something,
        ),
        mapping(
            "compressed data on a table",
            V3,
            |f| f.set_entry(9, COMPRESSED | L2[1] as u64),
            &[9],
            "something else",
            Something,
        ),
        writing(
            "compressed data with the flag of a count",
            V3,
            |f| {
                let at = f.entry(9) | COPIED;
                f.set_entry(9, at);
            },
            "reserved",
            Something,
        ),
        Damage {
            what: "compressed data that are none",
            image: V3,
            make: |f| {
                let at = f.packed(9);
                f.bytes[at] = 0xff;
            },
            reading: Fails(&[9]),
            writing: Fails(&[9]),
            qemu: Nothing("its check does not decompress"),
        },
        Damage {
            what: "compressed data that end early",
            image: V3,
            make: |f| {
                let at = f.packed(9);
                let short = miniz_oxide::deflate::compress_to_vec(&[1; 100], 6);
                f.bytes[at..at + short.len()].copy_from_slice(&short);
            },
            reading: Fails(&[9]),
            writing: Fails(&[9]),
            qemu: Nothing("its check does not decompress"),
        },
        // A buffer that goes round, as a library's may, would have something there.
        Damage {
            what: "compressed data that refer to before their beginning",
            image: V3,
            make: |f| {
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
            reading: Fails(&[9]),
            writing: Fails(&[9]),
            qemu: Nothing("its check does not decompress"),
        },
    ]
}

/// Whether compressed data say a whole cluster.
fn inflates(packed: &[u8], flags: u32) -> bool {
    let mut cluster = vec![0; CLUSTER];
    let mut state = DecompressorOxide::new();
    let (status, _, written) = decompress(&mut state, packed, &mut cluster, 0, flags);
    matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput) && written == CLUSTER
}
