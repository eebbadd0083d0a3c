//! Headers of frames (`net-offload`), with checksums and segmentation, and the switch's look at a
//! frame (`net-switch`): any header over any bytes, as any driver's offloads have it, for any
//! receiver.
//!
//! Of what is delivered: the number that was announced; a receiver gets nothing that it has not
//! taken on; the payloads of all segments are the frame's, in order; no segment has more than
//! `gso_size`; the transport's checksum of a completed segment is right if and only if that of each
//! other one is.
use std::ops::Range;

use net_offload::{
    Checked, Checksum, Delivery, GsoType, HEADER_LEN, HeaderRoom, NetHeader, Offloads,
};
use net_switch::{PortConfig, Switch, SwitchConfig, VidSet, VlanMode};

use crate::{Input, Script};

/// GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, GUEST_ECN, GUEST_USO4, GUEST_USO6 by the bits of a byte.
fn offloads(bits: u8) -> Offloads {
    let places = [1, 7, 8, 9, 54, 55];
    let set = places.iter().enumerate();
    let set = set.filter(|(at, _)| bits >> at & 1 != 0);
    Offloads::of_guest_features(set.fold(0, |all, (_, place)| all | 1 << place))
}

/// Runs one input: both ends' offloads, how far the frame is stretched, its header, its bytes.
///
/// # Panics
/// A receiver got what it may not.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (sender, receivers) = (offloads(input.u8()), [input.u8(), input.u8()].map(offloads));
    let stretch = usize::from(input.u16());
    let mut header = [0; HEADER_LEN];
    for byte in &mut header {
        *byte = input.u8();
    }
    let header = NetHeader::from_bytes(&header);
    let mut frame = input.bytes(usize::MAX).to_vec();
    if !frame.is_empty() {
        // Long frames of short inputs.
        frame.resize(frame.len() + stretch, 7);
    }
    look_up(&frame);
    let mut room = HeaderRoom::new();
    let cut = frame.len() / 3;
    let pieces = [&frame[..cut], &[], &frame[cut..]];
    let Ok(mut checked) = Checked::check(&header, &pieces[..], sender, &mut room) else {
        return;
    };
    for receiver in receivers {
        let count = checked.count(receiver);
        assert!(count <= net_offload::MAX_SEGMENTS);
        match checked.deliver(receiver) {
            Delivery::Unchanged(one) => {
                assert_eq!(count, 1);
                assert_allowed(&one.header, frame.len(), receiver);
                assert!(frame.starts_with(one.headers));
            }
            Delivery::Checksum(partial) => {
                assert_eq!(count, 1);
                assert!(partial.position() + 2 <= frame.len());
                let _ = partial.complete(&pieces[..]);
            }
            Delivery::Segments(mut segments) => {
                assert_eq!(segments.remaining(), count);
                let mut at = None;
                let mut sums = Vec::new();
                while let Some(mut segment) = segments.next() {
                    segment.complete(&pieces[..]);
                    let Range { start, end } = segment.payload();
                    assert!(at.is_none_or(|at| at == start) && start < end);
                    assert!(end - start <= usize::from(header.gso_size));
                    assert_allowed(&segment.header(), segment.frame_len(), receiver);
                    assert_eq!(segment.header().gso_type, GsoType::NONE);
                    if segment.is_incomplete() {
                        let l4 = usize::from(header.csum_start);
                        let sum = Checksum::new().bytes(&segment.headers()[l4..]);
                        sums.push(sum.bytes(&frame[start..end]).partial());
                    }
                    at = Some(end);
                }
                assert!(at == Some(frame.len()) && segments.remaining() == 0);
                // What the pseudo header adds differs by the length alone; all but the last are of
                // one.
                let sums = &sums[..sums.len().saturating_sub(1)];
                let same = |sum: &u16| sum % 0xffff == sums[0] % 0xffff;
                assert!(sums.iter().all(same), "{sums:x?}");
            }
        }
    }
}

fn assert_allowed(header: &NetHeader, len: usize, receiver: Offloads) {
    let needs = match header.gso_type.kind() {
        GsoType::NONE => Offloads::NONE,
        GsoType::TCPV4 => Offloads::TSO4,
        GsoType::TCPV6 => Offloads::TSO6,
        _ => Offloads::CSUM,
    };
    assert!(receiver.contains(needs));
    assert!(!header.gso_type.has_ecn() || receiver.contains(Offloads::ECN));
    if header.flags & NetHeader::NEEDS_CSUM != 0 {
        assert!(receiver.contains(Offloads::CSUM));
        let end = usize::from(header.csum_start) + usize::from(header.csum_offset) + 2;
        assert!(end <= len);
    }
    assert!(header.gso_type == GsoType::NONE || header.gso_size != 0);
}

fn look_up(frame: &[u8]) {
    let mut switch = Switch::new(SwitchConfig::default());
    let trunk = PortConfig {
        vlan: VlanMode::Trunk {
            native: None,
            tagged: VidSet::all(),
        },
        ..PortConfig::default()
    };
    let from = switch.add(trunk, 0).expect("room for a port");
    let other = switch.add(PortConfig::default(), 0);
    let other = other.expect("room for a port");
    if let Ok(forward) = switch.forward(from, &frame[..frame.len().min(18)], 0) {
        assert!(!forward.ports.contains(from) && forward.ports.contains(other));
        assert!(switch.retag(&forward, other).removes);
    }
}

/// TCP over IPv4 and, behind two tags, over IPv6 with options; UDP; a checksum alone.
pub fn seeds() -> Vec<Vec<u8>> {
    let head = |gso_type: u8, l4: u16, offset: u16, stretch: u16| {
        let mut script = Script::new();
        script.u8(63).u8(1).u8(0).u16(stretch);
        script.u8(1).u8(gso_type).u16(l4 + 20).u16(500);
        script.u16(l4).u16(offset).u16(0);
        script
    };
    let addresses = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    let tcp = [[1, 2, 3, 4, 0, 0, 0, 9], [0, 0, 0, 8, 0x50, 0x99, 1, 1]].concat();
    let mut v4 = head(1, 34, 16, 3_000);
    v4.bytes(&addresses).bytes(&[8, 0, 0x45, 0]);
    v4.bytes(&(3_040u16).to_be_bytes())
        .bytes(&[0, 1, 0x40, 0, 64, 6, 0, 0]);
    v4.bytes(&[10, 0, 0, 1, 10, 0, 0, 2]);
    v4.bytes(&tcp).bytes(&[0, 0, 0, 0]);
    let mut v6 = head(0x84, 14 + 8 + 40 + 8, 16, 4_000);
    v6.bytes(&addresses);
    v6.bytes(&[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6, 0x86, 0xdd]);
    v6.bytes(&[0x60, 0, 0, 0]).bytes(&(4_028u16).to_be_bytes());
    v6.bytes(&[60, 64]).bytes(&[0xfe; 32]);
    v6.bytes(&[6, 0, 1, 4, 0, 0, 0, 0]);
    v6.bytes(&tcp).bytes(&[0, 0, 0, 0]);
    let mut udp = head(5, 34, 6, 2_000);
    udp.bytes(&addresses).bytes(&[8, 0, 0x45, 0]);
    udp.bytes(&(2_028u16).to_be_bytes())
        .bytes(&[0, 1, 0, 0, 64, 17, 0, 0]);
    udp.bytes(&[10, 0, 0, 1, 10, 0, 0, 2]);
    udp.bytes(&[0, 9, 0, 9])
        .bytes(&(2_008u16).to_be_bytes())
        .bytes(&[0, 0]);
    let mut sum = head(0, 34, 16, 60);
    sum.bytes(&addresses).bytes(&[0x81, 0, 0, 1, 8, 0]);
    [v4, v6, udp, sum].map(|mut seed| seed.end()).to_vec()
}
