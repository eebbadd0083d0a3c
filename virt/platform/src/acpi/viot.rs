//! Virtual I/O Translation table (ACPI specification 6.5, §5.2.34): tells the guest which PCI
//! function is a virtio-iommu device and which functions are its endpoints.
//!
//! One node for the device, then one for each range of endpoints. All of them are in PCI segment 0.
//! An endpoint's number, by which the driver names it in requests, is its bus, device and function:
//! the table gives the number of a range's first endpoint, and the others count on from there.
//!
//! **What Linux does with it** (`drivers/acpi/viot.c`): until the device's driver has registered,
//! it binds no driver to an endpoint. Functions that another unit translates, or that must work
//! without that driver, therefore belong in no range; nor does the device's own function, which
//! [`build`] refuses.
//!
//! **Left out.** Endpoints and devices on MMIO (node types 2 and 4), several devices, other
//! segments.
//!
//! ```
//! use platform::acpi::viot;
//! // The device is 00:01.0; 00:02.0 has no IOMMU.
//! let table = viot::build(0x08, &viot::ranges_without(&[0x08, 0x10]));
//! assert_eq!(&table[..4], b"VIOT");
//! assert_eq!(table.len(), 48 + 16 + 3 * 24);
//! ```

use std::ops::RangeInclusive;

use acpi_tables::sdt::Sdt;

use super::{HEADER_LEN, OEM, OEM_REVISION, OEM_TABLE, bytes};

/// As QEMU has it; Linux does not look at it.
const REVISION: u8 = 0;
/// The common header, the number of nodes, the offset of the first one, reserved bytes.
const NODE_OFFSET: u16 = HEADER_LEN as u16 + 12;

/// Node type, in a node's first byte: endpoints that are PCI functions.
const PCI_RANGE: u8 = 1;
const PCI_RANGE_LEN: u16 = 24;
/// Node type: a virtio-iommu device that is a PCI function.
const VIRTIO_IOMMU_PCI: u8 = 3;
const VIRTIO_IOMMU_PCI_LEN: u16 = 16;

/// The bus that [`ranges_without`] covers: every function of bus 0.
const BUS_0: RangeInclusive<u16> = 0..=0xff;

/// Returns the table for the virtio-iommu device at `iommu` and its endpoints. Functions are given
/// as bus, device and function in 16 bits.
///
/// # Panics
/// If a range is empty, overlaps another one or contains `iommu`, or there are 65535 of them: the
/// VMM places the devices, not a guest.
pub fn build(iommu: u16, endpoints: &[RangeInclusive<u16>]) -> Vec<u8> {
    check(iommu, endpoints);
    let nodes = u16::try_from(1 + endpoints.len()).expect("ranges are fewer than functions");
    let mut body = Vec::new();
    body.extend(nodes.to_le_bytes());
    body.extend(NODE_OFFSET.to_le_bytes());
    body.extend([0; 8]); // reserved
    node_header(&mut body, VIRTIO_IOMMU_PCI, VIRTIO_IOMMU_PCI_LEN);
    body.extend(0u16.to_le_bytes()); // segment
    body.extend(iommu.to_le_bytes());
    body.extend([0; 8]); // reserved
    for range in endpoints {
        node_header(&mut body, PCI_RANGE, PCI_RANGE_LEN);
        body.extend(u32::from(*range.start()).to_le_bytes()); // number of the first endpoint
        body.extend([0; 4]); // first and last segment
        body.extend(range.start().to_le_bytes());
        body.extend(range.end().to_le_bytes());
        body.extend(NODE_OFFSET.to_le_bytes()); // output: the device's node, which is the first
        body.extend([0; 6]); // reserved
    }
    let len = HEADER_LEN as u32;
    let mut table = Sdt::new(*b"VIOT", len, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&body);
    bytes(&table)
}

fn node_header(body: &mut Vec<u8>, kind: u8, len: u16) {
    body.extend([kind, 0]);
    body.extend(len.to_le_bytes());
}

fn check(iommu: u16, endpoints: &[RangeInclusive<u16>]) {
    for (index, range) in endpoints.iter().enumerate() {
        assert!(!range.is_empty(), "no endpoint is in {range:x?}");
        assert!(
            !range.contains(&iommu),
            "the device at {iommu:#x} would be an endpoint of its own, in {range:x?}"
        );
        for other in &endpoints[..index] {
            let is_apart = range.end() < other.start() || other.end() < range.start();
            assert!(is_apart, "{range:x?} overlaps {other:x?}");
        }
    }
}

/// Returns the fewest ranges, in ascending order, that contain every function of bus 0 except
/// `excluded`. Functions of other buses may be among `excluded`, in any order.
pub fn ranges_without(excluded: &[u16]) -> Vec<RangeInclusive<u16>> {
    let endpoints = BUS_0.filter(|function| !excluded.contains(function));
    let mut ranges: Vec<RangeInclusive<u16>> = Vec::new();
    for function in endpoints {
        match ranges.last_mut() {
            Some(range) if range.end() + 1 == function => *range = *range.start()..=function,
            _ => ranges.push(function..=function),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acpi::is_complete;

    #[test]
    fn the_table_is_that_of_the_specification_byte_by_byte() {
        let table = build(0x0018, &[0x0000..=0x0017, 0x0020..=0x01ff]);
        #[rustfmt::skip]
        let expected = [
            // Signature, length, revision, checksum, OEM, OEM table, OEM revision.
            b'V', b'I', b'O', b'T', 112, 0, 0, 0, 0, 0x7e, b'E', b'X', b'I', b'T', b'L', b'S',
            b'E', b'X', b'I', b'T', b'L', b'E', b'S', b'S', 1, 0, 0, 0,
            // Creator and its revision: the library's.
            b'R', b'V', b'A', b'T', 0, 0, 0, 1,
            // Three nodes from byte 48 on.
            3, 0, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            // 48: virtio-iommu on PCI, 16 bytes, segment 0, 00:03.0.
            3, 0, 16, 0, 0, 0, 0x18, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            // 64: PCI range, 24 bytes, endpoint 0, segments 0 to 0, 00:00.0 to 00:02.7, node 48.
            1, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x17, 0, 48, 0, 0, 0, 0, 0, 0, 0,
            // 88: PCI range, 24 bytes, endpoint 20h, segments 0 to 0, 00:04.0 to 01:1f.7, node 48.
            1, 0, 24, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0xff, 0x01, 48, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(table, expected);
        assert!(is_complete(&table));
    }

    #[test]
    fn a_device_without_endpoints_is_one_node() {
        let table = build(0xfff8, &[]);
        assert_eq!(table.len(), 64);
        assert_eq!(table[36..38], [1, 0]);
        assert_eq!(table[52..56], [0, 0, 0xf8, 0xff]);
        assert!(is_complete(&table));
    }

    #[test]
    fn ranges_that_no_guest_could_use_are_refused() {
        let refused: [(&str, &[RangeInclusive<u16>]); 5] = [
            ("the device is the last one", &[0..=8]),
            ("the device is the first one", &[16..=24, 8..=15]),
            ("empty", &[RangeInclusive::new(3, 2)]),
            ("overlap at one function", &[16..=24, 24..=32]),
            ("one inside the other", &[16..=24, 17..=18]),
        ];
        for (why, endpoints) in refused {
            let built = std::panic::catch_unwind(|| build(8, endpoints));
            assert!(built.is_err(), "{why}");
        }
        build(8, &[9..=15, 0..=7, 16..=0xffff]);
    }

    #[test]
    fn ranges_leave_out_the_ends_and_neighbours() {
        assert_eq!(ranges_without(&[]), [0..=255]);
        assert_eq!(ranges_without(&[0]), [1..=255]);
        assert_eq!(ranges_without(&[255, 256]), [0..=254]);
        let several = ranges_without(&[17, 16, 24, 16, 26]);
        assert_eq!(several, [0..=15, 18..=23, 25..=25, 27..=255]);
        assert_eq!(ranges_without(&(0..=255).collect::<Vec<_>>()), []);
    }

    /// 2,000 sets of up to 255 functions, from a xorshift generator (Marsaglia, 13, 7, 17).
    #[test]
    fn ranges_cover_exactly_the_others_and_none_could_be_joined() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u16
        };
        for _ in 0..2_000 {
            let excluded: Vec<_> = (0..next() % 256).map(|_| next() % 300).collect();
            let ranges = ranges_without(&excluded);
            let covered: Vec<_> = ranges.iter().cloned().flatten().collect();
            let others: Vec<_> = (0..256).filter(|of| !excluded.contains(of)).collect();
            assert_eq!(covered, others, "without {excluded:?}");
            for pair in ranges.windows(2) {
                assert!(pair[0].end() + 1 < *pair[1].start(), "{ranges:?}");
            }
        }
    }
}
