//! Random runs of both layouts beside the account of [`World`]: chains of any shape, completions in any order, wraps,
//! waits at any access.

use proptest::prelude::*;
use proptest::sample::Index;

use super::world::{PACKED, World};
use super::*;
use fake_mem::PendingDma;

#[derive(Clone, Debug)]
enum Op {
    /// Lengths of readable and writable buffers, and whether in a table.
    Offer(Vec<u32>, Vec<u32>, bool),
    Publish,
    Take,
    /// Which, and how much of it is written: 0 nothing, 1 half, otherwise all.
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
        10 => Just(Op::Take),
        8 => (any::<Index>(), 0u8..6).prop_map(|(which, much)| Op::End(which, much)),
        5 => Just(Op::Show),
        5 => Just(Op::Reap),
        1 => Just(Op::Flush),
        1 => Just(Op::Arm),
        1 => Just(Op::Disarm),
    ]
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
        Op::End(which, much) => {
            if !world.held.is_empty() {
                let which = which.index(world.held.len());
                let all = world.held[which].1.writable_len();
                let len = match much {
                    0 => 0,
                    1 => all / 2,
                    _ => all,
                };
                world.end(which, len);
            }
        }
        Op::Show => {
            world.show();
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

/// Chains of one to three descriptors, in batches that end in the other order, then whatever is left.
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
            world.show();
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
            assert_eq!(world.show(), usize::from(size));
            world.reap();
        }
        assert_eq!(world.returned, 9000 * usize::from(size));
    }
}
