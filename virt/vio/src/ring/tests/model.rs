//! Random runs of both layouts beside the account of [`World`]: chains of any shape, completions in
//! any order, wraps, waits at any access.

use proptest::prelude::*;
use proptest::sample::Index;

use super::world::{PACKED, World};
use super::*;
use crate::fake_driver::AnyDriver;
use fake_mem::PendingDma;

#[derive(Clone, Debug)]
enum Op {
    /// Lengths of readable and writable buffers, and whether in a table.
    Offer(Vec<u32>, Vec<u32>, bool),
    Publish,
    Take,
    /// Most chains of the row, and the part of each that is written, as below.
    AnswerRow(usize, u8),
    /// Index of the chain, and the part of it that is written: 0 nothing, 1 half, otherwise all.
    End(Index, u8),
    Show,
    Reap,
    Flush,
    Arm,
    Disarm,
}

fn op() -> impl Strategy<Value = Op> {
    let lens = || prop::collection::vec(1u32..0x1000, 0..4);
    let shape = (lens(), lens(), any::<bool>());
    let shape = shape.prop_filter("a chain has a descriptor", |(read, write, _)| {
        !read.is_empty() || !write.is_empty()
    });
    prop_oneof![
        8 => shape.prop_map(|(read, write, indirect)| Op::Offer(read, write, indirect)),
        4 => Just(Op::Publish),
        6 => Just(Op::Take),
        6 => (0usize..40, 0u8..6).prop_map(|(most, much)| Op::AnswerRow(most, much)),
        8 => (any::<Index>(), 0u8..6).prop_map(|(which, much)| Op::End(which, much)),
        5 => Just(Op::Show),
        5 => Just(Op::Reap),
        1 => Just(Op::Flush),
        1 => Just(Op::Arm),
        1 => Just(Op::Disarm),
    ]
}

fn written(all: u32, much: u8) -> u32 {
    match much {
        0 => 0,
        1 => all / 2,
        _ => all,
    }
}

fn step(world: &mut World, op: &Op) {
    match op {
        Op::Offer(read, write, indirect) => {
            world.offer(read, write, *indirect);
        }
        Op::Publish => {
            world.driver.publish();
        }
        Op::Take => {
            world.take();
        }
        Op::AnswerRow(most, much) => {
            world.answer_row(*most, |all| written(all, *much));
        }
        Op::End(which, much) => {
            if !world.held.is_empty() {
                let which = which.index(world.held.len());
                let all = world.held[which].1.writable_len();
                world.end(which, written(all, *much));
            }
        }
        Op::Show => {
            world.publish();
        }
        Op::Reap => world.reap(),
        Op::Flush => world.flush(),
        Op::Arm => world.again(|ring, dma, _| ring.arm(dma)),
        Op::Disarm => world.again(|ring, dma, _| ring.disarm(dma)),
    }
}

fn features() -> impl Strategy<Value = u64> {
    let optional = prop::sample::subsequence(
        vec![feature::EVENT_IDX, feature::RING_PACKED, feature::IN_ORDER],
        0..=3,
    );
    optional.prop_map(|bits| {
        let base = feature::VERSION_1 | feature::INDIRECT_DESC;
        bits.iter().fold(base, |sum, bit| sum | bit)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]

    #[test]
    fn every_chain_is_seen_once_and_returned_once(
        ops in prop::collection::vec(op(), 1..150),
        features in features(),
        size in prop_oneof![1u16..12, Just(256u16), Just(300)],
        position in prop_oneof![Just(0x8000u16), Just(65530), any::<u16>()],
        waits: bool,
    ) {
        let packed = features & feature::RING_PACKED != 0;
        let size = if packed { size } else { size.next_power_of_two() };
        let mut world = World::new(size, features);
        if waits {
            world.dma = PendingDma::every(FlatDma::new(world.driver.mem().clone()));
        }
        world.start_at(position);
        for op in &ops {
            step(&mut world, op);
        }
        world.drain();
    }
}

#[test]
fn a_row_has_all_chains_of_one_descriptor_up_to_the_first_other_one() {
    let bits = [feature::RING_PACKED, feature::IN_ORDER];
    for features in [0, bits[0], bits[1], bits[0] | bits[1]].map(|bits| ALL | bits) {
        let mut world = World::new(32, features);
        // Round and round, with something taken before it, and not returned.
        for round in 0..50 {
            assert!(world.offer(&[4], &[8], false) && world.offer(&[3], &[], false));
            world.offer(&[], &[5], false);
            world.offer(&[6], &[], false);
            world.offer(&[7], &[], round % 3 == 0);
            world.offer(&[4, 4], &[], false);
            world.offer(&[4], &[], false);
            world.driver.publish();
            assert_eq!(world.answer_row(40, |all| all), 0, "the first is not one");
            assert!(world.take());
            assert_eq!(world.answer_row(1, |all| all), 1);
            let rest = if round % 3 == 0 { 2 } else { 3 };
            assert_eq!(world.answer_row(40, |all| all), rest);
            assert_eq!(world.answer_row(40, |all| all), 0);
            if round % 7 == 0 {
                world.publish();
            }
            world.drain();
        }
    }
}

#[test]
fn a_row_ends_before_a_chain_that_is_wrong_and_that_is_found_as_ever() {
    for features in [ALL, PACKED] {
        for (addr, len) in [(0x1000, 0), (u64::MAX, 2)] {
            let mut world = World::new(8, features);
            for _ in 0..3 {
                world.offer(&[4], &[], false);
            }
            let id = world.offered[2].id;
            match &world.driver {
                AnyDriver::Split(driver) => {
                    driver.put_descriptor(id, RawDescriptor::from_words(addr, len));
                }
                AnyDriver::Packed(driver) => driver.put_descriptor(2, addr, len as u32, id, 0x80),
            }
            world.driver.publish();
            assert!(world.take());
            assert_eq!(world.answer_row(8, |_| 0), 1);
            assert_eq!(world.answer_row(8, |_| 0), 0);
            assert_eq!(world.ring.parked(), None);
            let found = world.ring.peek(&mut world.dma, &mut world.chain);
            assert!(matches!(found, Err(RingStop::Violation(_))), "{found:?}");
        }
    }
}

#[test]
fn a_row_in_a_ring_that_has_moved_is_given_back_all_the_same() {
    for features in [ALL, PACKED, ALL | feature::IN_ORDER] {
        let mut world = World::new(8, features);
        for _ in 0..3 {
            world.offer(&[], &[4], false);
        }
        world.driver.publish();
        assert!(world.has_available());
        // Known before: a first look makes windows.
        assert!(world.take());
        let mut row = [Single::EMPTY; 8];
        let found = world.ring.peek_singles(&mut world.dma, &mut row).unwrap();
        assert_eq!(found, 2);
        world.flush();
        world.answer(&row[..2], |all| all);
        world.drain();
        assert_eq!(world.returned, 3);
    }
}

/// Chains of one to three descriptors, in batches that end in the other order, then whatever is
/// left.
fn script(world: &mut World) {
    for round in 0..12u32 {
        for at in 0..3 {
            let write = vec![8; (round as usize + at) % 3];
            world.offer(&[16], &write, round % 4 == 3);
        }
        world.driver.publish();
        while world.take() {}
        while !world.held.is_empty() {
            let last = world.held.len() - 1;
            let len = world.held[last].1.writable_len();
            world.end(last, len);
        }
        if round % 2 == 0 {
            world.publish();
            world.reap();
            world.again(|ring, dma, _| ring.disarm(dma));
        }
        if round % 5 == 0 {
            world.again(|ring, dma, _| ring.arm(dma));
            world.flush();
        }
    }
    world.drain();
}

#[test]
fn a_wait_at_any_one_access_changes_nothing() {
    for features in [
        ALL,
        PACKED,
        ALL | feature::IN_ORDER,
        PACKED | feature::IN_ORDER,
    ] {
        for size in [16, 512] {
            let run = |dma: fn(FlatDma, u64) -> PendingDma<FlatDma>, k| {
                let mut world = World::new(size, features);
                world.dma = dma(FlatDma::new(world.driver.mem().clone()), k);
                script(&mut world);
                let memory = world.driver.mem().get::<0x4000>(Gpa::new(RINGS));
                (world.dma.accesses(), world.returned, memory)
            };
            let (accesses, returned, memory) = run(|dma, _| PendingDma::never(dma), 0);
            assert!(accesses > 5 && returned > 30, "{accesses} {returned}");
            for k in 0..accesses {
                let (_, other_returned, other) = run(PendingDma::kth, k);
                assert_eq!(other_returned, returned);
                assert!(other == memory, "access {k} of {accesses}, {features:#x}");
            }
        }
    }
}

#[test]
fn laps_go_by_with_the_whole_ring_outstanding() {
    for (features, size) in [(ALL, 8), (PACKED, 1), (PACKED, 7), (PACKED, 8)] {
        let mut world = World::new(size, features);
        for round in 0..9000 {
            for _ in 0..size {
                assert!(world.offer(&[4], &[], false));
            }
            assert!(!world.offer(&[4], &[], false));
            world.driver.publish();
            for _ in 0..size {
                assert!(world.take());
            }
            assert!(!world.has_available());
            assert_eq!(world.ring.in_flight(), size);
            // Backwards in every other round.
            while !world.held.is_empty() {
                let which = if round % 2 == 0 {
                    0
                } else {
                    world.held.len() - 1
                };
                world.end(which, 0);
            }
            assert_eq!(world.publish(), usize::from(size));
            world.reap();
        }
        assert_eq!(world.returned, 9000 * usize::from(size));
    }
}
