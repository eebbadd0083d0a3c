//! Drivers that break the rules, one by one and at random.

use proptest::prelude::*;

use super::super::chain::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, MAX_INDIRECT};
use super::*;
use crate::fake_driver::ToBytes;

/// A queue of 8 whose head 0 is available, with these descriptors.
fn with(features: u64, descs: &[RawDescriptor]) -> Pair {
    let pair = Pair::new(8, features);
    for (at, &desc) in (0..).zip(descs) {
        pair.driver.put_descriptor(at, desc);
    }
    pair.driver.put_avail(0, 0);
    pair.driver.put_avail_idx(1);
    pair
}

#[track_caller]
fn violates(mut pair: Pair, want: Violation) {
    assert_eq!(pair.peek(), Err(RingStop::Violation(want)));
    assert_eq!(pair.ring.parked(), Some(Parked::Violation));
    // Neither doorbell nor ticket mends it.
    pair.ring.kick();
    pair.ring.ticket_done(guest_mem::Ticket(0));
    assert_eq!(pair.ring.parked(), Some(Parked::Violation));
    assert_eq!(pair.ring.stats().violations, 1);
}

#[test]
fn each_broken_rule_is_named() {
    let next = DESC_F_NEXT;
    let write = DESC_F_WRITE;
    violates(with(ALL, &[desc(BUFFER, 0, 0, 0)]), Violation::ZeroLength);
    violates(with(ALL, &[desc(BUFFER, 4, next, 8)]), Violation::Index(8));
    violates(with(ALL, &[desc(BUFFER, 4, next, 0)]), Violation::TooLong);
    violates(
        with(ALL, &[desc(BUFFER, 4, next, 1), desc(BUFFER, 4, next, 0)]),
        Violation::TooLong,
    );
    violates(
        with(
            ALL,
            &[desc(BUFFER, 4, next | write, 1), desc(BUFFER, 4, 0, 0)],
        ),
        Violation::Order,
    );
    violates(
        with(ALL, &[desc(u64::MAX - 2, 4, 0, 0)]),
        Violation::Wraps { addr: u64::MAX - 2 },
    );
    violates(
        with(ALL, &[desc(0, u32::MAX, next, 1), desc(0, 1, 0, 0)]),
        Violation::TooManyBytes,
    );
    let pair = Pair::new(8, ALL);
    pair.driver.put_avail(0, 8);
    pair.driver.put_avail_idx(1);
    violates(pair, Violation::Index(8));
}

#[test]
fn each_broken_rule_of_indirect_tables_is_named() {
    let indirect = DESC_F_INDIRECT;
    let table = |len, entries: &[RawDescriptor]| {
        let pair = with(ALL, &[desc(BUFFER, len, indirect, 0)]);
        for (at, entry) in (0..).zip(entries) {
            pair.driver.put(BUFFER + 16 * at, &entry.to_bytes());
        }
        pair
    };
    let plain = desc(BUFFER, 16, indirect, 0);
    violates(with(feature::VERSION_1, &[plain]), Violation::Indirect);
    let and_next = desc(BUFFER, 16, indirect | DESC_F_NEXT, 1);
    violates(with(ALL, &[and_next]), Violation::Indirect);
    violates(table(0, &[]), Violation::IndirectLength(0));
    violates(table(24, &[]), Violation::IndirectLength(24));
    let long = (MAX_INDIRECT + 1) * 16;
    violates(table(long, &[]), Violation::IndirectLength(long));
    violates(table(16, &[plain]), Violation::Indirect);
    let next = |to| desc(BUFFER, 4, DESC_F_NEXT, to);
    violates(table(32, &[next(2)]), Violation::Index(2));
    violates(table(32, &[next(1), next(0)]), Violation::TooLong);
    violates(
        table(32, &[next(1), desc(BUFFER, 0, 0, 0)]),
        Violation::ZeroLength,
    );
}

#[test]
fn a_direct_part_before_an_indirect_table_is_one_chain() {
    let mut pair = with(
        ALL,
        &[
            desc(BUFFER, 4, DESC_F_NEXT, 1),
            // Its own WRITE flag says nothing.
            desc(BUFFER + 0x100, 32, DESC_F_INDIRECT | DESC_F_WRITE, 0),
        ],
    );
    let entries = [
        desc(0x100, 6, DESC_F_NEXT, 1),
        desc(0x200, 7, DESC_F_WRITE, 0),
    ];
    for (at, entry) in (0..).zip(entries) {
        pair.driver.put(BUFFER + 0x100 + 16 * at, &entry.to_bytes());
    }
    assert_eq!(pair.peek(), Ok(true));
    assert_eq!(
        (pair.chain.readable().len(), pair.chain.writable().len()),
        (10, 7)
    );
}

#[test]
fn an_index_that_runs_ahead_by_more_than_the_ring_is_a_violation() {
    let mut pair = Pair::new(8, ALL);
    pair.driver.put_avail_idx(9);
    let want = Violation::AvailTooFar {
        idx: 9,
        next_avail: 0,
    };
    assert_eq!(
        split(&mut pair.ring).available(&mut pair.dma),
        Err(want.into())
    );
    // Also backwards.
    let mut pair = Pair::new(8, ALL);
    pair.driver.put_avail_idx(0xffff);
    assert!(split(&mut pair.ring).available(&mut pair.dma).is_err());
    let mut pair = Pair::new(8, ALL);
    pair.driver.put_avail_idx(8);
    assert_eq!(split(&mut pair.ring).available(&mut pair.dma), Ok(8));
}

/// Descriptors that are nonsense in interesting ways more often than random bytes would be.
fn descriptor() -> impl Strategy<Value = RawDescriptor> {
    let addr = prop_oneof![
        4 => 0u64..0x8_0000,
        1 => any::<u64>(),
        1 => (0u64..64).prop_map(|below| u64::MAX - below),
    ];
    let len = prop_oneof![
        4 => 0u32..256,
        2 => (0u32..8).prop_map(|entries| entries * 16),
        1 => any::<u32>(),
    ];
    let flags = prop_oneof![6 => 0u16..8, 1 => any::<u16>()];
    let next = prop_oneof![6 => 0u16..16, 1 => any::<u16>()];
    (addr, len, flags, next).prop_map(|(addr, len, flags, next)| desc(addr, len, flags, next))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn nonsense_neither_panics_nor_loops_nor_grows(
        table in prop::collection::vec(descriptor(), 16),
        indirect in prop::collection::vec(descriptor(), 8),
        heads in prop::collection::vec(prop_oneof![8 => 0u16..16, 1 => any::<u16>()], 16),
        idx in prop_oneof![8 => 0u16..17, 1 => any::<u16>()],
    ) {
        let mut pair = Pair::new(16, ALL);
        for (at, desc) in (0..).zip(&table) {
            pair.driver.put_descriptor(at, *desc);
        }
        // Where the small addresses of indirect descriptors point, often.
        for page in 0..8u64 {
            for (at, desc) in (0..).zip(&indirect) {
                pair.driver.put(BUFFER + page * 4096 + 16 * at, &desc.to_bytes());
            }
        }
        for (at, head) in (0..).zip(&heads) {
            pair.driver.put_avail(at, *head);
        }
        pair.driver.put_avail_idx(idx);
        if let Ok(count) = split(&mut pair.ring).available(&mut pair.dma) {
            for _ in 0..count {
                if pair.peek().is_err() {
                    prop_assert!(pair.ring.parked().is_some());
                    break;
                }
                let (readable, writable) = (pair.chain.readable(), pair.chain.writable());
                let segments = readable.segments().iter().chain(writable.segments());
                let mut total = 0u64;
                let mut count = 0;
                for segment in segments {
                    prop_assert_ne!(segment.len, 0);
                    prop_assert!(segment.iova.checked_add(u64::from(segment.len) - 1).is_some());
                    total += u64::from(segment.len);
                    count += 1;
                }
                prop_assert!(count <= 16 + MAX_INDIRECT);
                prop_assert_eq!(total, u64::from(readable.len()) + u64::from(writable.len()));
                pair.ring.advance(&pair.chain);
            }
        }
    }
}
