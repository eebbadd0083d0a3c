//! Headers that a driver must not send, and what is made of those that it may.

use super::*;

const NEEDS: u8 = NetHeader::NEEDS_CSUM;

fn header(flags: u8, gso_type: u8, gso_size: u16, csum_start: u16, csum_offset: u16) -> NetHeader {
    NetHeader {
        flags,
        gso_type: GsoType(gso_type),
        hdr_len: 54,
        gso_size,
        csum_start,
        csum_offset,
    }
}

/// Sends a frame of `len` bytes with `header`, of a driver that has accepted `mask`, and returns
/// the header that the port receives; `None`: the frame was dropped.
fn sent(header: NetHeader, len: usize, mask: u64) -> Option<NetHeader> {
    let wire = Wire::default();
    wire.ends().can = Some(PortCapabilities {
        send: Offloads::ALL,
        ..PortCapabilities::PLAIN
    });
    let mut guest = Guest::new(Box::new(wire.clone()), mask);
    // Behind everything else, since the frame may be long.
    let at = 0x20_0000;
    guest.mem.put(Gpa::new(at), &header.to_bytes(0));
    guest.mem.put(Gpa::new(at + 12), &vec![0x5a; len]);
    guest.tx.add(&[(at, (HEADER_LEN + len) as u32)], &[]);
    guest.poll();
    assert!(guest.tx.used().is_some(), "the buffer comes back");
    assert!(!guest.net.needs_reset());
    let ends = wire.ends();
    let stats = guest.net.stats();
    assert_eq!(stats.errors, u64::from(ends.sent_headers.is_empty()));
    ends.sent_headers.first().copied()
}

#[test]
fn a_header_is_passed_on_as_far_as_it_was_negotiated_and_fits() {
    let tso = header(NEEDS, GsoType::TCPV4.0, 1448, 34, 16);
    both(|mask| {
        assert_eq!(sent(tso, 60_000, mask), Some(tso));
        assert_eq!(
            sent(header(NEEDS, 0, 0, 34, 16), 1000, mask)
                .unwrap()
                .csum_start,
            34
        );
        let v6 = header(NEEDS, GsoType::TCPV6.0 | GsoType::ECN, 1448, 54, 16);
        assert_eq!(sent(v6, 65_553, mask), Some(v6));
        let uso = header(NEEDS, GsoType::UDP_L4.0, 1200, 34, 6);
        assert_eq!(sent(uso, 9000, mask), Some(uso));
        // Fields that mean nothing are not passed on, nor are unknown flags.
        assert_eq!(
            sent(header(0xfe & !4, 0, 7, 9, 9), 60, mask)
                .unwrap()
                .csum_start,
            0
        );
        for (what, header, len, without) in [
            ("a sum past the end", header(NEEDS, 0, 0, 99, 0), 100, 0),
            (
                "a sum that ends past it",
                header(NEEDS, 0, 0, 90, 9),
                100,
                0,
            ),
            (
                "a sum at the end of all",
                header(NEEDS, 0, 0, u16::MAX, u16::MAX),
                1518,
                0,
            ),
            (
                "segments of nothing",
                header(NEEDS, GsoType::TCPV4.0, 0, 34, 16),
                9000,
                0,
            ),
            (
                "segments without sums",
                header(0, GsoType::TCPV4.0, 1448, 34, 16),
                9000,
                0,
            ),
            ("an unknown type", header(NEEDS, 2, 1448, 34, 16), 9000, 0),
            ("UFO", header(NEEDS, 3, 1448, 34, 16), 9000, 0),
            (
                "ECN of nothing",
                header(NEEDS, GsoType::ECN, 1448, 34, 16),
                900,
                0,
            ),
            (
                "ECN of UDP",
                header(NEEDS, GsoType::ECN | GsoType::UDP_L4.0, 1448, 34, 16),
                900,
                0,
            ),
            (
                "a long frame that is no segment",
                header(NEEDS, 0, 0, 34, 16),
                9000,
                0,
            ),
            ("a frame above 64 KiB", tso, 65_554, 0),
            ("TSO4 not negotiated", tso, 9000, net_feature::HOST_TSO4),
            ("TSO6 not negotiated", v6, 9000, net_feature::HOST_TSO6),
            ("ECN not negotiated", v6, 9000, net_feature::HOST_ECN),
            ("USO not negotiated", uso, 9000, net_feature::HOST_USO),
        ] {
            assert_eq!(sent(header, len, mask & !without), None, "{what}");
        }
        // The length of headers is a hint.
        let lying = NetHeader {
            hdr_len: u16::MAX,
            ..tso
        };
        assert_eq!(sent(lying, 9000, mask), Some(lying));
        // Nothing negotiated: whatever the header says, as the specification has it.
        let none = mask & !net_feature::CSUM;
        assert_eq!(
            sent(header(NEEDS, 0, 0, 99, 0), 100, none),
            Some(NetHeader::PLAIN)
        );
    });
}

proptest! {
    /// Whatever passes can be completed and segmented as far as the header goes.
    #[test]
    fn no_header_that_passes_points_outside_its_frame(
        bytes in any::<[u8; HEADER_LEN]>(),
        kind in prop::sample::select(vec![None, Some(0u8), Some(1), Some(4), Some(5), Some(0x81)]),
        len in 14u32..=MAX_FRAME,
        allowed in 0u64..64,
    ) {
        let mut header = NetHeader::from_bytes(&bytes);
        prop_assert_eq!(NetHeader::from_bytes(&header.to_bytes(7)), header);
        header.gso_type = kind.map_or(header.gso_type, GsoType);
        let bits = allowed & 1 | allowed << 6 & 0x3f80;
        let allowed = Offloads::of_device_features(bits);
        match header.check(len, allowed) {
            Ok(passed) => {
                prop_assert!(passed.is_plain() || allowed.contains(Offloads::CSUM));
                let segments = [
                    (0, true),
                    (1, allowed.contains(Offloads::TSO4)),
                    (4, allowed.contains(Offloads::TSO6)),
                    (5, allowed.contains(Offloads::USO4)),
                    (0x81, allowed.contains(Offloads::TSO4.with(Offloads::ECN))),
                    (0x84, allowed.contains(Offloads::TSO6.with(Offloads::ECN))),
                ];
                prop_assert!(segments.contains(&(passed.gso_type.0, true)));
                if passed.flags & NetHeader::NEEDS_CSUM != 0 {
                    let end = u32::from(passed.csum_start) + u32::from(passed.csum_offset) + 2;
                    prop_assert!(end <= len);
                }
                prop_assert!(passed.gso_type == GsoType::NONE || passed.gso_size != 0);
            }
            Err(HeaderError::NotNegotiated(kind)) => prop_assert_eq!(kind, header.gso_type),
            Err(HeaderError::ChecksumNotNegotiated) => prop_assert_eq!(allowed, Offloads::NONE),
            Err(HeaderError::ChecksumOutside) => prop_assert!(header.flags & NEEDS != 0),
            Err(HeaderError::SegmentChecksum) => prop_assert!(header.flags & NEEDS == 0),
            Err(HeaderError::SegmentSize) => prop_assert_eq!(header.gso_size, 0),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn a_frame_that_leaves_over_what_the_driver_has_not_taken_on_is_dropped() {
    both(|mask| {
        let wire = Wire::default();
        wire.ends().can = Some(PortCapabilities {
            receive: Offloads::ALL,
            ..PortCapabilities::PLAIN
        });
        let tso = header(NEEDS, GsoType::TCPV4.0, 1448, 34, 16);
        for (without, arrives) in [
            (0, true),
            (net_feature::GUEST_TSO4, false),
            (net_feature::GUEST_CSUM, false),
        ] {
            let mut guest = Guest::new(Box::new(wire.clone()), mask & !without);
            wire.ends().header = tso;
            wire.ends().to_guest.push_back(vec![7; 9000]);
            guest.give(10, 4096);
            guest.poll();
            let got = guest.received();
            assert_eq!(
                got.len(),
                if arrives { 3 } else { 0 },
                "without {without:#x}"
            );
            if arrives {
                let bytes: [u8; HEADER_LEN] = guest.get(BUFFERS, HEADER_LEN).try_into().unwrap();
                assert_eq!(NetHeader::from_bytes(&bytes), tso);
                assert_eq!(bytes[10..], [3, 0]);
            }
        }
    });
}
