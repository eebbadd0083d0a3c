//! Random frames between every pair of offload sets, compared with the naive model: NET_FRAMES of
//! them (20,000).

mod packets;

use net_offload::{Checksum, NetHeader, Offloads};
use packets::delivered::delivered;
use packets::{Expected, Packet, all_sets};
use seeded::Random;

fn frames() -> u64 {
    let given = std::env::var("NET_FRAMES").ok();
    given.map_or(20_000, |text| text.parse().expect("NET_FRAMES is a number"))
}

fn seed() -> u64 {
    let given = std::env::var("NET_SEED").ok();
    given.map_or(1, |text| text.parse().expect("NET_SEED is a number"))
}

/// A partial sum of 0 and one of 0xffff are the same number.
fn same(got: &[Expected], expected: &[Expected], at: usize) -> bool {
    got.len() == expected.len()
        && got.iter().zip(expected).all(|(got, expected)| {
            let mut bytes = got.bytes.clone();
            if got.needs_checksum && got.bytes[at..at + 2] == [0, 0] {
                bytes[at..at + 2].copy_from_slice(&[0xff; 2]);
            }
            let mut other = expected.bytes.clone();
            if expected.needs_checksum && expected.bytes[at..at + 2] == [0, 0] {
                other[at..at + 2].copy_from_slice(&[0xff; 2]);
            }
            bytes == other
                && (got.gso_type, got.needs_checksum)
                    == (expected.gso_type, expected.needs_checksum)
        })
}

#[test]
fn random_frames_between_every_pair_of_offload_sets() {
    let mut random = Random::new(seed());
    let sets = all_sets();
    let (mut segments, mut whole) = (0u64, 0u64);
    for nth in 0..frames() {
        let packet = Packet::random(&mut random);
        let pair = nth as usize % (sets.len() * sets.len());
        let (sender, receiver) = (sets[pair / sets.len()], sets[pair % sets.len()]);
        let (mut header, frame) = packet.sent(sender);
        // A hint that lies.
        if random.chance(0.5) {
            header.hdr_len = random.bits() as u16;
        }
        // Scattered, in up to eight pieces; another receiver before, whose frames must leave no
        // trace.
        let mut rest = &frame[..];
        let mut pieces = Vec::new();
        for _ in 0..random.below(8) {
            let (front, back) = rest.split_at(random.below(rest.len() as u64 + 1) as usize);
            pieces.push(front);
            rest = back;
        }
        pieces.push(rest);
        let other = sets[random.below(sets.len() as u64) as usize];
        let got = delivered(&header, &pieces[..], sender, &[other, receiver]);
        let got = got.unwrap_or_else(|error| panic!("{error}: {header:?} {packet:?}"));
        let expected = packet.expected(sender, receiver);
        assert!(
            same(&got[1], &expected, packet.checksum_at()),
            "frame {nth} from {sender:?} to {receiver:?}: {header:?} {packet:?}\n{:x?}\n{:x?}",
            got[1],
            expected
        );
        segments += expected.len() as u64;
        whole += u64::from(expected[0].gso_type.0 != 0);
    }
    println!(
        "{} frames, delivered as {segments}, {whole} unsegmented",
        frames()
    );
    assert!(segments > frames() * 2 && whole > frames() / 50);
}

/// If a sender passes a wrong sum as the partial one, the receiver finds the checksum wrong.
#[test]
fn a_wrong_checksum_stays_wrong() {
    let mut random = Random::new(seed() + 1);
    for _ in 0..500 {
        let packet = Packet::random(&mut random);
        let (header, mut frame) = packet.sent(Offloads::ALL);
        let at = packet.checksum_at();
        let wrong = 1 + random.below(0xfffe) as u16;
        let sum = u16::from_be_bytes([frame[at], frame[at + 1]]);
        let sum = Checksum::new().word(sum).word(wrong).partial();
        frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        let got = delivered(&header, &frame[..], Offloads::ALL, &[Offloads::NONE]);
        let right = packet.expected(Offloads::ALL, Offloads::NONE);
        for (got, right) in got.expect("the header is right")[0].iter().zip(right) {
            assert_ne!(got.bytes[at..at + 2], right.bytes[at..at + 2]);
        }
    }
}

/// Any bytes in header and frame: an answer or an error, no panic, and never more than was
/// announced.
#[test]
fn any_header_over_any_frame() {
    let mut random = Random::new(seed() + 2);
    let sets = all_sets();
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..frames() * 5 {
        let packet = Packet::random(&mut random);
        let (header, mut frame) = packet.sent(Offloads::ALL);
        let mut bytes = header.to_bytes(0);
        for _ in 0..random.below(4) {
            let at = random.below(12) as usize;
            bytes[at] = if random.chance(0.5) {
                random.bits() as u8
            } else {
                0
            };
        }
        for _ in 0..random.below(4) {
            let at = random.below(frame.len().min(100) as u64) as usize;
            frame[at] = random.bits() as u8;
        }
        if random.chance(0.2) {
            frame.truncate(random.below(frame.len() as u64) as usize);
        }
        let set = |random: &mut Random| sets[random.below(sets.len() as u64) as usize];
        let (sender, receiver) = (set(&mut random), set(&mut random));
        let header = NetHeader::from_bytes(&bytes);
        match delivered(&header, &frame[..], sender, &[receiver]) {
            Ok(_) => taken += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(taken > 100 && refused > 100, "{taken} {refused}");
}
