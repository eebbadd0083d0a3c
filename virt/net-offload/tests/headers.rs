//! Wrong headers, by name.

mod packets;

use net_offload::{GsoType, HeaderError, MAX_FRAME, NetHeader, Offloads};
use packets::Packet;
use packets::delivered::delivered;
use seeded::Random;

fn check(header: NetHeader, frame: &[u8]) -> Result<(), HeaderError> {
    delivered(&header, frame, Offloads::ALL, &[Offloads::NONE]).map(drop)
}

/// A plain TCP packet over IPv4 of three segments.
fn packet() -> Packet {
    let mut random = Random::new(7);
    Packet {
        tags: vec![],
        is_v6: false,
        is_udp: false,
        options: vec![],
        extensions: vec![],
        tcp_options: vec![],
        payload: vec![7; 3000],
        size: 1200,
        has_ecn: false,
        flags: 0x18,
        ..Packet::random(&mut random)
    }
}

#[test]
fn csum_start_past_the_end() {
    let (header, frame) = packet().sent(Offloads::ALL);
    let plain = NetHeader {
        gso_type: GsoType::NONE,
        ..header
    };
    let len = frame.len() as u16;
    for (csum_start, csum_offset, is_right) in [
        (len - 2, 0, true),
        (34, len - 36, true),
        (len - 1, 0, false),
        (34, len - 35, false),
        (len, 0, false),
        (u16::MAX, u16::MAX, false),
        (34, u16::MAX, false),
        // In the network's header.
        (33, 20, false),
        (14, 20, false),
        (0, 16, false),
    ] {
        let header = NetHeader {
            csum_start,
            csum_offset,
            ..plain
        };
        let expected = if is_right {
            Ok(())
        } else {
            Err(HeaderError::ChecksumOutside)
        };
        assert_eq!(
            check(header, &frame),
            expected,
            "{csum_start} + {csum_offset}"
        );
    }
    // Without NEEDS_CSUM neither means anything.
    let header = NetHeader {
        csum_start: u16::MAX,
        ..NetHeader::default()
    };
    assert_eq!(check(header, &frame), Ok(()));
}

#[test]
fn gso_size_0() {
    let (header, frame) = packet().sent(Offloads::ALL);
    let header = NetHeader {
        gso_size: 0,
        ..header
    };
    assert_eq!(check(header, &frame), Err(HeaderError::SegmentSize));
}

#[test]
fn hdr_len_that_lies_is_not_read() {
    let (header, frame) = packet().sent(Offloads::ALL);
    for hdr_len in [0, 1, 33, 55, 3000, u16::MAX] {
        let header = NetHeader { hdr_len, ..header };
        assert_eq!(check(header, &frame), Ok(()));
    }
}

#[test]
fn type_against_protocol() {
    let mut udp = packet();
    udp.is_udp = true;
    let v6 = Packet {
        is_v6: true,
        ..packet()
    };
    for (packet, types) in [
        (packet(), [GsoType::TCPV6, GsoType::UDP_L4]),
        (v6, [GsoType::TCPV4, GsoType::UDP_L4]),
        (udp, [GsoType::TCPV4, GsoType::TCPV6]),
    ] {
        let (header, frame) = packet.sent(Offloads::ALL);
        for gso_type in types {
            let header = NetHeader { gso_type, ..header };
            assert_eq!(
                check(header, &frame),
                Err(HeaderError::Protocol),
                "{gso_type:?}"
            );
        }
    }
    let (header, frame) = packet().sent(Offloads::ALL);
    for code in [2, 3, 6, 7, 0x80, 0x83, 0x85, 0x41, 0xff] {
        let header = NetHeader {
            gso_type: GsoType(code),
            ..header
        };
        let error = HeaderError::NotNegotiated(GsoType(code));
        assert_eq!(check(header, &frame), Err(error));
    }
    // An ARP frame whose header claims TCP.
    let mut arp = frame.clone();
    arp[12..14].copy_from_slice(&[8, 6]);
    assert_eq!(check(header, &arp), Err(HeaderError::Protocol));
}

#[test]
fn offload_not_negotiated_is_refused_and_without_csum_the_header_is_not_read() {
    let (header, frame) = packet().sent(Offloads::ALL);
    let sent = |sender| delivered(&header, &frame[..], sender, &[Offloads::ALL]);
    let error = HeaderError::NotNegotiated(GsoType::TCPV4);
    assert_eq!(sent(Offloads::CSUM), Err(error));
    assert_eq!(sent(Offloads::CSUM.with(Offloads::TSO6)), Err(error));
    let got = &sent(Offloads::NONE).expect("any header is right")[0][0];
    assert_eq!((got.needs_checksum, got.gso_type), (false, GsoType::NONE));
    assert_eq!(got.bytes, frame);
}

#[test]
fn segmentation_without_or_with_another_checksum() {
    let (header, frame) = packet().sent(Offloads::ALL);
    for wrong in [
        NetHeader { flags: 0, ..header },
        NetHeader {
            csum_start: header.csum_start + 2,
            ..header
        },
        NetHeader {
            csum_offset: 6,
            ..header
        },
    ] {
        assert_eq!(check(wrong, &frame), Err(HeaderError::SegmentChecksum));
    }
}

#[test]
fn frames_of_0_13_and_65554_bytes() {
    let bytes = vec![0; MAX_FRAME + 1];
    for (len, is_right) in [
        (0, false),
        (13, false),
        (14, true),
        (65_553, true),
        (65_554, false),
    ] {
        let expected = if is_right {
            Ok(())
        } else {
            Err(HeaderError::FrameLength(len))
        };
        assert_eq!(check(NetHeader::default(), &bytes[..len]), expected);
    }
}

#[test]
fn lengths_and_fragments_that_contradict_the_frame() {
    let (header, frame) = packet().sent(Offloads::ALL);
    let with = |at: usize, bytes: &[u8]| {
        let mut frame = frame.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        check(header, &frame)
    };
    // IPv4 length, more fragments, an offset, header length 4 and 15 words, TCP header length 4
    // words.
    assert_eq!(with(16, &[0, 40]), Err(HeaderError::Length));
    assert_eq!(with(20, &[0x20, 0]), Err(HeaderError::Fragment));
    assert_eq!(with(20, &[0, 1]), Err(HeaderError::Fragment));
    assert_eq!(with(14, &[0x44]), Err(HeaderError::Malformed));
    assert_eq!(with(46, &[0x40]), Err(HeaderError::Malformed));
    let mut longer = frame.clone();
    longer.push(0);
    assert_eq!(check(header, &longer), Err(HeaderError::Length));
    // Cut at every length: none is taken, and none is a panic.
    for len in 0..100 {
        assert!(check(header, &frame[..len]).is_err(), "{len}");
    }
}

#[test]
fn a_frame_costs_at_most_its_bound_of_segments() {
    let mut packet = packet();
    packet.payload = vec![1; 60_000];
    packet.size = 1;
    let (header, frame) = packet.sent(Offloads::ALL);
    assert_eq!(
        check(header, &frame),
        Err(HeaderError::TooManySegments(60_000))
    );
    packet.size = 48;
    let (header, frame) = packet.sent(Offloads::ALL);
    assert_eq!(check(header, &frame), Ok(()));
    packet.is_udp = true;
    let (header, frame) = packet.sent(Offloads::ALL);
    assert_eq!(
        check(header, &frame),
        Err(HeaderError::TooManySegments(1_250))
    );
    packet.size = 469;
    let (header, frame) = packet.sent(Offloads::ALL);
    assert_eq!(check(header, &frame), Ok(()));
}

#[test]
fn headers_longer_than_the_room_are_refused() {
    let mut packet = Packet {
        is_v6: true,
        ..packet()
    };
    packet.extensions = vec![(60, vec![0; 254]), (60, vec![0; 254])];
    let (header, frame) = packet.sent(Offloads::ALL);
    assert_eq!(check(header, &frame), Err(HeaderError::HeadersTooLong));
    // Nine tags, of which eight are parsed.
    packet.extensions.clear();
    packet.tags = vec![[0x8100, 1]; 9];
    let (header, frame) = packet.sent(Offloads::ALL);
    assert_eq!(check(header, &frame), Err(HeaderError::Protocol));
    packet.tags.pop();
    let (header, frame) = packet.sent(Offloads::ALL);
    assert_eq!(check(header, &frame), Ok(()));
}

#[test]
fn cwr_is_in_the_first_segment_alone_and_fin_and_psh_in_the_last() {
    let mut packet = packet();
    packet.has_ecn = true;
    // CWR, ACK, PSH, FIN.
    packet.flags = 0x99;
    packet.sequence = u32::MAX - 1_500;
    packet.id = u16::MAX - 1;
    let (header, frame) = packet.sent(Offloads::ALL);
    let got = delivered(&header, &frame[..], Offloads::ALL, &[Offloads::NONE]);
    let got = &got.expect("a right header")[0];
    let flags = Vec::from_iter(got.iter().map(|one| one.bytes[14 + 20 + 13]));
    assert_eq!(flags, [0x90, 0x10, 0x19], "flags of the segments");
    let word = |one: &packets::Expected, at: usize| {
        u32::from_be_bytes(one.bytes[at..at + 4].try_into().expect("4 bytes"))
    };
    let ids = Vec::from_iter(got.iter().map(|one| word(one, 18) >> 16));
    assert_eq!(ids, [0xfffe, 0xffff, 0]);
    let sequence = Vec::from_iter(got.iter().map(|one| word(one, 38)));
    assert_eq!(sequence, [u32::MAX - 1_500, u32::MAX - 300, 899]);
    let lengths = Vec::from_iter(got.iter().map(|one| word(one, 16) >> 16));
    assert_eq!(lengths, [1_240, 1_240, 640]);
}
