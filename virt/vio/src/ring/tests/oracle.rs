//! Our walk beside that of the `virtio-queue` crate, on rings that keep the rules.

use proptest::prelude::*;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;

const MEMORY: usize = 1 << 20;
const TABLES: u64 = 0x8_0000;

/// One chain: lengths of its readable and writable buffers, and whether it is indirect.
type Shape = (Vec<u32>, Vec<u32>, bool);

fn shape() -> impl Strategy<Value = Shape> {
    let lens = || prop::collection::vec(1u32..0x1_0000, 0..4);
    (lens(), lens(), any::<bool>()).prop_filter("a chain has a descriptor", |(read, write, _)| {
        !read.is_empty() || !write.is_empty()
    })
}

/// Chain as both walks must see it: head, then {address, length, writable}.
type Walked = (u16, Vec<(u64, u32, bool)>);

fn ours(pair: &mut Pair, ahead: u16) -> Walked {
    let at = Lookahead {
        chains: ahead,
        descs: ahead,
    };
    let found = split(&mut pair.ring).peek_ahead(&mut pair.dma, at, &mut pair.chain);
    assert_eq!(found, Ok(true), "a valid chain");
    let list = |buffers: Buffers<'_>, writable| {
        let segments = buffers.segments().iter();
        segments
            .map(move |piece| (piece.iova.raw(), piece.len, writable))
            .collect::<Vec<_>>()
    };
    let mut walked = list(pair.chain.readable(), false);
    walked.extend(list(pair.chain.writable(), true));
    (pair.chain.head(), walked)
}

fn theirs(pair: &Pair, next_avail: u16, count: u16) -> Vec<Walked> {
    let mem = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    mem.write_slice(&pair.driver.get(0, MEMORY), GuestAddress(0))
        .unwrap();
    let config = pair.driver.config();
    let mut queue = Queue::new(config.size).unwrap();
    queue.set_size(config.size);
    queue
        .try_set_desc_table_address(GuestAddress(config.desc.raw()))
        .unwrap();
    queue
        .try_set_avail_ring_address(GuestAddress(config.avail.raw()))
        .unwrap();
    queue
        .try_set_used_ring_address(GuestAddress(config.used.raw()))
        .unwrap();
    queue.set_next_avail(next_avail);
    queue.set_ready(true);
    (0..count)
        .map(|_| {
            let chain = queue.pop_descriptor_chain(&mem).expect("a chain");
            let head = chain.head_index();
            (
                head,
                chain
                    .map(|desc| (desc.addr().0, desc.len(), desc.is_write_only()))
                    .collect(),
            )
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn both_walk_the_same_chains(
        rounds in prop::collection::vec(
            (prop::collection::vec(shape(), 1..6), any::<prop::sample::Index>()), 1..8),
    ) {
        let mut pair = Pair::new(32, ALL);
        let mut next_avail = 0u16;
        let mut waiting = Vec::new();
        for (shapes, pick) in rounds {
            let mut added = 0;
            for (at, (read, write, indirect)) in (0..).zip(&shapes) {
                let buffers = |lens: &[u32], base: u64| -> Vec<(u64, u32)> {
                    (0..).zip(lens).map(|(at, &len)| (base + 0x1_0000 * at, len)).collect()
                };
                let (read, write) = (buffers(read, 7), buffers(write, 0x1000_0000));
                if pair.driver.free() < read.len() + write.len() {
                    break;
                }
                if *indirect {
                    let table = Gpa::new(TABLES + 0x1000 * u64::from(next_avail % 64) + 0x100 * at);
                    pair.driver.stage_indirect(table, &read, &write);
                } else {
                    pair.driver.stage(&read, &write);
                }
                added += 1;
            }
            pair.driver.publish();
            prop_assert_eq!(split(&mut pair.ring).available(&mut pair.dma), Ok(added));
            let want = theirs(&pair, next_avail, added);
            let got: Vec<Walked> = (0..added).map(|ahead| ours(&mut pair, ahead)).collect();
            prop_assert_eq!(&got, &want);
            for (head, _) in &got {
                prop_assert_eq!(pair.peek(), Ok(true));
                prop_assert_eq!(pair.chain.head(), *head);
                waiting.push(pair.ring.advance(&pair.chain));
            }
            next_avail += added;
            // Some end, out of order, so that later chains are scattered over the table.
            for _ in 0..waiting.len() / 2 {
                let token = waiting.swap_remove(pick.index(waiting.len()));
                pair.ring.stage(&mut pair.dma, token, 0).unwrap();
            }
            pair.ring.publish(&mut pair.dma).unwrap();
            while pair.driver.used().is_some() {}
        }
    }
}
