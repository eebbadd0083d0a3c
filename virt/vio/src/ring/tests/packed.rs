//! The packed layout: golden words, events, hostile drivers.

use proptest::prelude::*;

use super::super::chain::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, MAX_INDIRECT};
use super::super::packed::{DESC_F_AVAIL, DESC_F_USED};
use super::world::{PACKED, TABLES, World, segments, serve_one, violation};
use super::*;
use crate::fake_driver::FakePacked;
use crate::ring::{Ring, RingStart};

const NEXT: u16 = DESC_F_NEXT;
const WRITE: u16 = DESC_F_WRITE;
const INDIRECT: u16 = DESC_F_INDIRECT;
const AVAIL: u16 = DESC_F_AVAIL;

/// A ring of `size` whose memory the test writes itself.
struct Bare {
    driver: FakePacked<ArrayMem>,
    ring: Ring,
    dma: FlatDma,
    chain: Chain,
}

impl Bare {
    fn new(size: u16, features: u64) -> Self {
        let mem = ArrayMem::new(1 << 20);
        let driver = FakePacked::new(mem.clone(), Gpa::new(RINGS), 0, size);
        let ring = Ring::new(&driver.config(), 1024, features).unwrap();
        assert!(ring.is_packed());
        Self {
            driver,
            ring,
            dma: FlatDma::new(mem),
            chain: Chain::new(),
        }
    }

    fn peek(&mut self) -> Result<bool, RingStop> {
        self.ring.peek(&mut self.dma, &mut self.chain)
    }
}

#[test]
fn words_are_those_of_the_specification() {
    let mut bare = Bare::new(4, PACKED);
    // Two descriptors: 16 bytes to read, 0x200 to write, buffer id 0x0102; AVAIL is bit 7, USED
    // bit 15.
    let ring = [
        0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01, 0x10, 0, 0, 0, 0xff, 0xff, 0x81,
        0x00, //
        0x00, 0x00, 0x05, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0, 0, 0x02, 0x01, 0x82, 0x00,
    ];
    bare.driver.put(RINGS, &ring);
    assert_eq!(bare.peek(), Ok(true));
    let readable = segments(bare.chain.readable());
    assert_eq!(readable, [(0x0123_4567_89ab_cdef, 16)]);
    assert_eq!(segments(bare.chain.writable()), [(0x5_0000, 0x200)]);
    assert_eq!(bare.chain.head(), 0x102);
    let token = bare.ring.advance(&bare.chain);
    bare.ring.stage(&mut bare.dma, token, 0x200).unwrap();
    let before: [u8; 32] = bare.dma.mem().get(Gpa::new(RINGS));
    assert_eq!(before, ring, "staged is not shown");
    bare.ring.publish(&mut bare.dma).unwrap();
    // One used descriptor, where the chain began: length, id, AVAIL = USED = 1, WRITE.
    let after: [u8; 16] = bare.dma.mem().get(Gpa::new(RINGS));
    assert_eq!(after[8..], [0x00, 0x02, 0, 0, 0x02, 0x01, 0x82, 0x80]);
    assert_eq!(bare.dma.mem().get::<16>(Gpa::new(RINGS + 16)), ring[16..]);
    let position = bare.ring.position();
    let at = (2, true);
    assert_eq!(
        position,
        RingPosition::Packed {
            avail: at,
            used: at
        }
    );
    // The next two, then the second lap: AVAIL = 0 and USED = 1 make available, 0 and 0 are used.
    // No bytes: no WRITE.
    bare.driver.put_descriptor(2, BUFFER, 4, 7, NEXT | AVAIL);
    bare.driver.put_descriptor(3, BUFFER, 4, 7, AVAIL);
    assert!(serve_one(&mut bare.ring, &mut bare.dma, &mut bare.chain, 0));
    bare.driver.put_descriptor(0, BUFFER, 4, 9, AVAIL);
    assert_eq!(bare.peek(), Ok(false), "available in the lap before");
    bare.driver.put_descriptor(0, BUFFER, 4, 9, DESC_F_USED);
    serve_one(&mut bare.ring, &mut bare.dma, &mut bare.chain, 0);
    let after: [u8; 16] = bare.dma.mem().get(Gpa::new(RINGS));
    assert_eq!(after[8..], [0, 0, 0, 0, 9, 0, 0, 0]);
}

#[test]
fn neither_both_bits_nor_none_make_a_descriptor_available() {
    for wrap in [true, false] {
        let mut bare = Bare::new(4, PACKED);
        let at = (1, wrap);
        let start = RingStart::Packed {
            avail: at,
            used: at,
            replay: Vec::new(),
        };
        bare.ring.start(start).unwrap();
        for flags in [0, AVAIL, DESC_F_USED, AVAIL | DESC_F_USED] {
            bare.driver.put_descriptor(1, BUFFER, 4, 0, flags);
            let want = flags == if wrap { AVAIL } else { DESC_F_USED };
            let found = bare.ring.has_available(&mut bare.dma);
            assert_eq!(found, Ok(want), "{flags:#x} in lap {wrap}");
            bare.ring = Ring::new(&bare.driver.config(), 1024, PACKED).unwrap();
            let start = RingStart::Packed {
                avail: at,
                used: at,
                replay: Vec::new(),
            };
            bare.ring.start(start).unwrap();
        }
    }
}

#[test]
fn event_structures_are_those_of_the_specification() {
    let mut bare = Bare::new(8, PACKED);
    let at = (5, false);
    let start = RingStart::Packed {
        avail: at,
        used: at,
        replay: Vec::new(),
    };
    bare.ring.start(start).unwrap();
    assert_eq!(bare.driver.device_event(), (0, 0));
    bare.ring.disarm(&mut bare.dma).unwrap();
    assert_eq!(bare.driver.device_event(), (1, 0));
    bare.ring.arm(&mut bare.dma).unwrap();
    assert_eq!(bare.driver.device_event(), (2, 5));
    let words: [u8; 4] = bare.dma.mem().get(Gpa::new(RINGS + 16 * 8 + 4));
    assert_eq!(words, [5, 0, 2, 0]);
    // Without EVENT_IDX the descriptor is not named.
    let mut bare = Bare::new(8, PACKED & !feature::EVENT_IDX);
    bare.ring.arm(&mut bare.dma).unwrap();
    assert_eq!(bare.driver.device_event(), (0, 0));
    bare.driver.put_event(2, 0);
    add_one(&mut bare.driver, BUFFER);
    // DESC is not negotiated: whatever it means, an interrupt is safe.
    assert!(serve_one(&mut bare.ring, &mut bare.dma, &mut bare.chain, 0));
    for (flags, want) in [(0, true), (1, false)] {
        bare.driver.put_event(flags, 0);
        add_one(&mut bare.driver, BUFFER);
        let wanted = serve_one(&mut bare.ring, &mut bare.dma, &mut bare.chain, 0);
        assert_eq!(wanted, want);
    }
}

/// One chain of one buffer.
fn add_one(driver: &mut FakePacked<ArrayMem>, buffer: u64) {
    driver.stage(&[(buffer, 4)], &[]);
    driver.publish();
}

#[test]
fn an_interrupt_comes_when_the_event_is_stepped_over_and_only_then() {
    for size in 1..=5u16 {
        for position in 0..2 * size {
            let (idx, wrap) = (position % size, position / size == 0);
            for batch in 1..=size {
                for event in 0..2 * size {
                    let mut bare = Bare::new(size, PACKED);
                    bare.driver.start_at(idx, wrap);
                    let at = (idx, wrap);
                    let start = RingStart::Packed {
                        avail: at,
                        used: at,
                        replay: Vec::new(),
                    };
                    bare.ring.start(start).unwrap();
                    let (event_idx, event_wrap) = (event % size, event / size == 0);
                    let off_wrap = event_idx | u16::from(event_wrap) << 15;
                    bare.driver.put_event(2, off_wrap);
                    for _ in 0..batch {
                        bare.driver.stage(&[(BUFFER, 4)], &[]);
                    }
                    bare.driver.publish();
                    for _ in 0..batch {
                        assert_eq!(bare.peek(), Ok(true));
                        let token = bare.ring.advance(&bare.chain);
                        bare.ring.stage(&mut bare.dma, token, 0).unwrap();
                    }
                    let wanted = bare.ring.publish(&mut bare.dma).unwrap();
                    // Is it one of those that were written?
                    let want = (0..batch).any(|nth| (position + nth) % (2 * size) == event);
                    assert_eq!(wanted, want, "{size} {position} {batch} {event}");
                }
            }
        }
    }
}

#[test]
fn an_event_outside_the_ring_costs_an_interrupt() {
    let mut bare = Bare::new(4, PACKED);
    bare.driver.put_event(2, 4);
    add_one(&mut bare.driver, BUFFER);
    assert!(serve_one(&mut bare.ring, &mut bare.dma, &mut bare.chain, 0));
}

#[test]
fn each_broken_rule_is_named() {
    let with = |features, descs: &[(u64, u32, u16)]| {
        let mut bare = Bare::new(4, features);
        for (at, &(addr, len, flags)) in (0..).zip(descs) {
            bare.driver.put_descriptor(at, addr, len, 0, flags | AVAIL);
        }
        let found = violation(bare.peek());
        assert_eq!(bare.ring.parked(), Some(Parked::Violation));
        bare.ring.kick();
        assert!(bare.ring.is_faulted());
        assert_eq!(bare.ring.stats().violations, 1);
        found
    };
    let wraps = Violation::Wraps { addr: u64::MAX - 2 };
    assert_eq!(with(PACKED, &[(BUFFER, 0, 0)]), Violation::ZeroLength);
    assert_eq!(with(PACKED, &[(u64::MAX - 2, 4, 0)]), wraps);
    let many = [(0, u32::MAX, NEXT), (0, 1, 0)];
    assert_eq!(with(PACKED, &many), Violation::TooManyBytes);
    let order = [(BUFFER, 4, NEXT | WRITE), (BUFFER, 4, 0)];
    assert_eq!(with(PACKED, &order), Violation::Order);
    let endless = [(BUFFER, 4, NEXT); 4];
    assert_eq!(with(PACKED, &endless), Violation::TooLong);
    // Indirect: alone, and negotiated.
    let table = (TABLES, 16, INDIRECT);
    let plain = PACKED & !feature::INDIRECT_DESC;
    assert_eq!(with(plain, &[table]), Violation::Indirect);
    let goes_on = [(TABLES, 16, INDIRECT | NEXT), (BUFFER, 4, 0)];
    assert_eq!(with(PACKED, &goes_on), Violation::Indirect);
    assert_eq!(
        with(PACKED, &[(BUFFER, 4, NEXT), table]),
        Violation::Indirect
    );
    for len in [0, 24, (MAX_INDIRECT + 1) * 16] {
        let found = with(PACKED, &[(TABLES, len, INDIRECT)]);
        assert_eq!(found, Violation::IndirectLength(len));
    }
    assert_eq!(with(PACKED, &[table]), Violation::ZeroLength, "empty entry");
}

#[test]
fn descriptors_that_were_not_returned_cannot_be_offered_again() {
    let mut bare = Bare::new(2, PACKED);
    for at in 0..2 {
        bare.driver.put_descriptor(at, BUFFER, 4, at, AVAIL);
        assert_eq!(bare.peek(), Ok(true));
        bare.ring.advance(&bare.chain);
    }
    assert_eq!(bare.peek(), Ok(false));
    bare.driver.put_descriptor(0, BUFFER, 4, 0, DESC_F_USED);
    assert_eq!(violation(bare.peek()), Violation::TooLong);
    // Nor in part: a chain that reaches into what is in flight.
    let mut bare = Bare::new(4, PACKED);
    bare.driver.put_descriptor(0, BUFFER, 4, 0, AVAIL);
    assert_eq!(bare.peek(), Ok(true));
    bare.ring.advance(&bare.chain);
    for at in 1..4 {
        bare.driver.put_descriptor(at, BUFFER, 4, 0, AVAIL | NEXT);
    }
    assert_eq!(violation(bare.peek()), Violation::TooLong);
}

#[test]
fn the_buffer_id_is_the_driver_s_own_affair() {
    let mut bare = Bare::new(4, PACKED);
    for at in 0..2 {
        bare.driver.put_descriptor(at, BUFFER, 4, 0xffff, AVAIL);
        serve_one(&mut bare.ring, &mut bare.dma, &mut bare.chain, 0);
        let word = bare
            .dma
            .mem()
            .get_u16(Gpa::new(RINGS + 16 * u64::from(at) + 12));
        assert_eq!(word, 0xffff);
    }
}

#[test]
fn entries_of_a_table_follow_each_other_and_have_one_flag() {
    let mut bare = Bare::new(4, PACKED);
    bare.driver
        .put_descriptor(0, TABLES, 32, 3, INDIRECT | WRITE | AVAIL);
    // NEXT, INDIRECT and ids in a table are reserved.
    let entries = [
        0, 0, 4, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0xaa, 0xaa, 5, 0, //
        0, 0, 5, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0xbb, 0xbb, 0x86, 0x80,
    ];
    bare.driver.put(TABLES, &entries);
    assert_eq!(bare.peek(), Ok(true));
    assert_eq!(segments(bare.chain.readable()), [(0x4_0000, 6)]);
    assert_eq!(segments(bare.chain.writable()), [(0x5_0000, 7)]);
    assert_eq!(bare.chain.head(), 3);
}

#[test]
fn descriptor_word_that_showed_availability_is_not_read_again() {
    let mut bare = Bare::new(4, PACKED);
    bare.driver.put_descriptor(0, BUFFER, 4, 3, AVAIL);
    assert_eq!(bare.ring.has_available(&mut bare.dma), Ok(true));
    // The driver changes its mind: the word was read once.
    bare.driver.put_descriptor(0, BUFFER, 0, 9, INDIRECT | NEXT);
    assert_eq!(bare.peek(), Ok(true));
    assert_eq!(bare.chain.head(), 3);
    assert_eq!(bare.chain.readable().len(), 4);
}

#[test]
fn set_up_refuses_bad_sizes_and_addresses() {
    let good = Bare::new(8, PACKED).driver.config();
    let new = |config: QueueConfig, max| Ring::new(&config, max, PACKED).is_ok();
    let size = |size| new(QueueConfig { size, ..good }, 256);
    assert_eq!(
        [0, 1, 3, 256, 257].map(size),
        [false, true, true, true, false]
    );
    let far = |size| new(QueueConfig { size, ..good }, u16::MAX);
    assert_eq!([32767, 32768, 32769].map(far), [true, true, false]);
    let moved = |by: u64| {
        let at = |base: Iova| Iova::new(base.raw() + by);
        let QueueConfig {
            desc, avail, used, ..
        } = good;
        [
            new(
                QueueConfig {
                    desc: at(desc),
                    ..good
                },
                256,
            ),
            new(
                QueueConfig {
                    avail: at(avail),
                    ..good
                },
                256,
            ),
            new(
                QueueConfig {
                    used: at(used),
                    ..good
                },
                256,
            ),
        ]
    };
    assert_eq!(moved(8), [false, true, true]);
    assert_eq!(moved(2), [false, false, false]);
}

/// A descriptor word that is nonsense in interesting ways.
fn nonsense() -> impl Strategy<Value = (u64, u32, u16, u16)> {
    let addr = prop_oneof![4 => 0u64..0x8_0000, 1 => any::<u64>()];
    let len = prop_oneof![4 => 0u32..256, 2 => (0u32..8).prop_map(|n| n * 16), 1 => any::<u32>()];
    let bits = prop_oneof![
        4 => Just(AVAIL), 3 => Just(DESC_F_USED), 1 => Just(0), 1 => Just(AVAIL | DESC_F_USED)
    ];
    let flags = (prop_oneof![6 => 0u16..8, 1 => any::<u16>()], bits);
    (
        addr,
        len,
        any::<u16>(),
        flags.prop_map(|(flags, bits)| flags & 0x7f7f | bits),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]

    #[test]
    fn nonsense_neither_panics_nor_loops_nor_grows(
        rounds in prop::collection::vec(
            (prop::collection::vec((0u16..8, nonsense()), 1..8), 0u8..6, any::<u32>()), 1..24),
        size in 1u16..8,
        in_order: bool,
    ) {
        let features = PACKED | if in_order { feature::IN_ORDER } else { 0 };
        let mut bare = Bare::new(size, features);
        let mut held = Vec::new();
        for (writes, action, event) in rounds {
            for (at, (addr, len, id, flags)) in writes {
                bare.driver.put_descriptor(at % size, addr, len, id, flags);
            }
            bare.driver.put_event((event >> 16) as u16, event as u16);
            if bare.ring.parked().is_some() {
                break;
            }
            match action {
                0..3 => {
                    if bare.peek() == Ok(true) {
                        let (readable, writable) = (bare.chain.readable(), bare.chain.writable());
                        let all = readable.segments().iter().chain(writable.segments());
                        let mut total = 0u64;
                        for segment in all {
                            prop_assert_ne!(segment.len, 0);
                            let last = segment.iova.checked_add(u64::from(segment.len) - 1);
                            prop_assert!(last.is_some());
                            total += u64::from(segment.len);
                        }
                        let sum = u64::from(readable.len()) + u64::from(writable.len());
                        prop_assert_eq!(total, sum);
                        held.push(bare.ring.advance(&bare.chain));
                    }
                }
                3 if !held.is_empty() => {
                    let token = held.swap_remove(event as usize % held.len());
                    let len = (event >> 8).min(token.writable());
                    bare.ring.stage(&mut bare.dma, token, len).unwrap();
                }
                4 => {
                    bare.ring.publish(&mut bare.dma).unwrap();
                }
                _ => {
                    bare.ring.arm(&mut bare.dma).unwrap();
                    bare.ring.disarm(&mut bare.dma).unwrap();
                }
            }
            prop_assert!(bare.ring.in_flight() <= size);
        }
    }
}

#[test]
fn packed_rings_reach_over_pages() {
    // 300 descriptors: two pages, wherever the wait is.
    for k in 0..12 {
        let mut world = World::new(300, PACKED);
        world.dma = fake_mem::PendingDma::kth(FlatDma::new(world.driver.mem().clone()), k);
        world.start_at(250);
        for round in 0..20 {
            for _ in 0..30 {
                world.offer(&[16], &[8], round % 2 == 0);
            }
            world.driver.publish();
            while world.take() {}
            while !world.held.is_empty() {
                world.end(0, 8);
            }
            world.publish();
            world.reap();
        }
        world.drain();
    }
}
