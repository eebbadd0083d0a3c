//! Bytes against the document's structures, worked out by hand; sizes against libvhost-user's.

use zerocopy::FromBytes;

use super::super::layout::{PackedEntry, PackedHead, SplitDesc, SplitHead};
use super::*;
use crate::backend::RingLayout;

#[test]
#[cfg(target_endian = "little")]
fn split_region_has_the_documents_bytes() {
    let region = MemRegion::new(queue_region_len(RingLayout::Split, 3));
    let (mut split, _) = Split::recover(region, 3, 0x1234).unwrap();
    for head in [2, 0, 1] {
        split.begin(head).unwrap();
    }
    split.complete(0).unwrap();
    split.commit();
    split.complete(2).unwrap();
    let expected: [u8; 64] = [
        0, 0, 0, 0, 0, 0, 0, 0, // features
        1, 0, 3, 0, 2, 0, 0x35, 0x12, // version, desc_num, last_batch_head, used_idx
        0, 0, 0, 0, 0, 0, 0, 0, // desc[0]: inflight, padding, next
        1, 0, 0, 0, 0, 0, 0, 0, // counter
        1, 0, 0, 0, 0, 0, 0, 0, // desc[1]
        2, 0, 0, 0, 0, 0, 0, 0, //
        1, 0, 0, 0, 0, 0, 0, 0, // desc[2]: its next is 0
        0, 0, 0, 0, 0, 0, 0, 0, //
    ];
    assert_eq!(split.into_region().bytes(), expected);
}

struct NoRing;

impl PackedRing for NoRing {
    fn flags(&self, at: u16) -> u16 {
        unreachable!("no batch was open, but {at} was looked at")
    }

    fn set_flags(&mut self, at: u16, flags: u16) {
        unreachable!("{flags:#x} at {at}")
    }
}

#[test]
#[cfg(target_endian = "little")]
fn packed_region_has_the_documents_bytes() {
    let region = MemRegion::new(queue_region_len(RingLayout::Packed, 3));
    let sizes = PackedSizes {
        desc_num: 3,
        ring_size: 3,
    };
    let base = PackedPosition { idx: 2, wrap: true };
    let (mut packed, _) = Packed::recover(region, sizes, base, &mut NoRing).unwrap();
    let desc = PackedDesc {
        addr: 0x1112_1314_1516_1718,
        len: 0x2122_2324,
        id: 0x3132,
        flags: 0x4142,
    };
    let one = packed.begin(&[desc]).unwrap();
    packed.begin(&[desc, desc]).unwrap();
    packed.complete(one).unwrap();
    packed.advance();
    let copy = [
        0x32, 0x31, 0x42, 0x41, 0x24, 0x23, 0x22, 0x21, // id, flags, len
        0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, // addr
    ];
    let mut expected = vec![
        0, 0, 0, 0, 0, 0, 0, 0, // features
        1, 0, 3, 0, 0, 0, 3, 0, // version, desc_num, free_head, old_free_head
        0, 0, 2, 0, 0, 1, 0, 0, // used_idx, old_used_idx, wrap counters, padding
        0, 0, 0, 0, 0, 0, 0, 0, //
    ];
    // inflight, padding, next, last, num; counter
    expected.extend([1, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend(copy);
    expected.extend([1, 0, 2, 0, 2, 0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend(copy);
    expected.extend([0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend(copy);
    assert_eq!(packed.into_region().bytes(), expected);
}

#[test]
#[cfg(target_endian = "little")]
fn fields_lie_where_the_document_has_them() {
    let bytes: [u8; 32] = std::array::from_fn(|at| at as u8);
    let head = SplitHead::read_from_prefix(&bytes).unwrap().0;
    assert_eq!(head.features, 0x0706_0504_0302_0100);
    assert_eq!((head.version, head.desc_num), (0x0908, 0x0b0a));
    assert_eq!((head.last_batch_head, head.used_idx), (0x0d0c, 0x0f0e));

    let desc = SplitDesc::read_from_prefix(&bytes).unwrap().0;
    assert_eq!((desc.inflight, desc.padding), (0, [1, 2, 3, 4, 5]));
    assert_eq!((desc.next, desc.counter), (0x0706, 0x0f0e_0d0c_0b0a_0908));

    let head = PackedHead::read_from_prefix(&bytes).unwrap().0;
    assert_eq!(head.features, 0x0706_0504_0302_0100);
    assert_eq!((head.version, head.desc_num), (0x0908, 0x0b0a));
    assert_eq!((head.free_head, head.old_free_head), (0x0d0c, 0x0f0e));
    assert_eq!((head.used_idx, head.old_used_idx), (0x1110, 0x1312));
    assert_eq!(head.used_wrap_counter, 20);
    assert_eq!(head.old_used_wrap_counter, 21);
    assert_eq!(head.padding, [22, 23, 24, 25, 26, 27, 28]);
    assert_eq!(head.tail, [29, 30, 31]);

    let entry = PackedEntry::read_from_prefix(&bytes).unwrap().0;
    assert_eq!((entry.inflight, entry.padding), (0, 1));
    assert_eq!(
        (entry.next, entry.last, entry.num),
        (0x0302, 0x0504, 0x0706)
    );
    assert_eq!(entry.counter, 0x0f0e_0d0c_0b0a_0908);
    assert_eq!((entry.id, entry.flags), (0x1110, 0x1312));
    assert_eq!(
        (entry.len, entry.addr),
        (0x1716_1514, 0x1f1e_1d1c_1b1a_1918)
    );
}

#[test]
fn sizes_are_those_of_other_back_ends() {
    // libvhost-user: ALIGN_UP(16 * queue_size + 2, 64).
    for desc_num in 1..=32768_u16 {
        let len = queue_region_len(RingLayout::Split, desc_num);
        let theirs = (16 * usize::from(desc_num) + 2).next_multiple_of(64);
        assert_eq!(len, theirs, "{desc_num} entries");
    }
    assert_eq!(queue_region_len(RingLayout::Split, 128), 2112);
    assert_eq!(queue_region_len(RingLayout::Packed, 128), 4160);
    assert_eq!(queue_region_len(RingLayout::Packed, 1), 64);
    assert_eq!(region_len(RingLayout::Split, 4, 128), Some(8448));
    assert_eq!(
        region_len(RingLayout::Packed, 256, 32768),
        Some(256 * (32 * 32768 + 64))
    );
    for (queues, desc_num) in [(0, 1), (1, 0), (257, 1), (1, 32769)] {
        assert_eq!(region_len(RingLayout::Split, queues, desc_num), None);
    }
}
