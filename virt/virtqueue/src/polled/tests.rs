//! The queue against a driver in an array, hostile ones among them.

use std::cell::RefCell;

use seeded::Random;

use super::*;
use crate::chain::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

const SIZE: u16 = 8;
const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFER: u64 = 0x4000;

/// Memory from 0 up to its length.
struct Array(RefCell<Vec<u8>>);

impl Array {
    fn new() -> Self {
        Self(RefCell::new(vec![0; 0x8000]))
    }

    fn range(&self, at: Iova, len: usize) -> Result<std::ops::Range<usize>, OutOfReach> {
        let start = usize::try_from(at.raw()).map_err(|_| OutOfReach(at))?;
        let end = start.checked_add(len).ok_or(OutOfReach(at))?;
        let is_there = end <= self.0.borrow().len();
        is_there.then_some(start..end).ok_or(OutOfReach(at))
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.write(Iova::new(at), bytes).unwrap();
    }

    fn put16(&self, at: u64, value: u16) {
        self.put(at, &value.to_le_bytes());
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.read(Iova::new(at), &mut bytes).unwrap();
        bytes
    }

    fn desc(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        let at = DESC + 16 * u64::from(index);
        self.put(at, &addr.to_le_bytes());
        self.put(at + 8, &rest.to_le_bytes());
    }

    /// Makes the chain at `head` available as entry `idx`.
    fn offer(&self, idx: u16, head: u16) {
        self.put16(AVAIL + 4 + 2 * u64::from(idx % SIZE), head);
        self.put16(AVAIL + 2, idx.wrapping_add(1));
    }
}

impl Memory for Array {
    fn read(&self, at: Iova, buf: &mut [u8]) -> Result<(), OutOfReach> {
        buf.copy_from_slice(&self.0.borrow()[self.range(at, buf.len())?]);
        Ok(())
    }

    fn write(&self, at: Iova, buf: &[u8]) -> Result<(), OutOfReach> {
        let range = self.range(at, buf.len())?;
        self.0.borrow_mut()[range].copy_from_slice(buf);
        Ok(())
    }

    fn load_u16(&self, at: Iova) -> Result<u16, OutOfReach> {
        let mut bytes = [0; 2];
        self.read(at, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn store_u16(&self, at: Iova, value: u16) -> Result<(), OutOfReach> {
        self.write(at, &value.to_le_bytes())
    }
}

fn config() -> QueueConfig {
    QueueConfig {
        index: 0,
        size: SIZE,
        desc: Iova::new(DESC),
        avail: Iova::new(AVAIL),
        used: Iova::new(USED),
    }
}

type Chain = FixedChain<{ SIZE as usize }>;

fn queue(features: u64) -> (Array, PolledQueue, Chain) {
    let queue = PolledQueue::new(&config(), SIZE, features).unwrap();
    (Array::new(), queue, Chain::default())
}

#[test]
fn chains_go_round_the_ring_past_sixteen_bits() {
    let (memory, mut queue, mut chain) = queue(feature::EVENT_IDX);
    memory.desc(2, BUFFER, 16, DESC_F_NEXT, 5);
    memory.desc(5, BUFFER + 16, 512, DESC_F_NEXT | DESC_F_WRITE, 1);
    memory.desc(1, BUFFER + 528, 1, DESC_F_WRITE, 0);
    assert_eq!(queue.next(&memory, &mut chain), Ok(false));
    for round in 0..70_000_u32 {
        let idx = round as u16;
        memory.offer(idx, 2);
        assert_eq!(queue.next(&memory, &mut chain), Ok(true), "round {round}");
        assert_eq!((chain.readable_len(), chain.writable_len()), (16, 513));
        assert_eq!((chain.readable().len(), chain.writable().len()), (1, 2));
        // The event is the element that the driver waits for.
        memory.put16(AVAIL + 4 + 2 * u64::from(SIZE), idx);
        assert_eq!(queue.complete(&memory, chain.head(), round), Ok(true));
        let element = memory.get::<8>(USED + 4 + 8 * u64::from(idx % SIZE));
        assert_eq!(u64::from_le_bytes(element), 2 | u64::from(round) << 32);
        assert_eq!(
            u16::from_le_bytes(memory.get(USED + 2)),
            idx.wrapping_add(1)
        );
        assert_eq!(queue.next(&memory, &mut chain), Ok(false));
    }
}

#[test]
fn interrupts_are_sent_only_where_the_driver_wants_them() {
    let (memory, mut queue, mut chain) = queue(feature::EVENT_IDX);
    memory.desc(0, BUFFER, 1, DESC_F_WRITE, 0);
    // It waits for the third element.
    memory.put16(AVAIL + 4 + 2 * u64::from(SIZE), 2);
    let wanted = [0, 1, 2, 3].map(|idx| {
        memory.offer(idx, 0);
        queue.next(&memory, &mut chain).unwrap();
        queue.complete(&memory, 0, 1).unwrap()
    });
    assert_eq!(wanted, [false, false, true, false]);

    let (memory, mut queue, mut chain) = self::queue(0);
    queue.start(&memory).unwrap();
    assert_eq!(memory.get::<2>(USED), [1, 0], "NO_NOTIFY");
    memory.desc(0, BUFFER, 1, DESC_F_WRITE, 0);
    let wanted = [0, 1].map(|idx| {
        memory.put16(AVAIL, idx);
        memory.offer(idx, 0);
        queue.next(&memory, &mut chain).unwrap();
        queue.complete(&memory, 0, 1).unwrap()
    });
    assert_eq!(wanted, [true, false], "NO_INTERRUPT");
}

#[test]
fn hostile_rings_stop_once_and_for_good() {
    type Case = (&'static str, fn(&Array), fn(QueueStop) -> bool);
    let cases: [Case; 9] = [
        (
            "a loop",
            |memory| {
                memory.desc(0, BUFFER, 1, DESC_F_NEXT, 1);
                memory.desc(1, BUFFER, 1, DESC_F_NEXT, 0);
                memory.offer(0, 0);
            },
            |why| why == Violation::TooLong.into(),
        ),
        (
            "a head outside the table",
            |memory| memory.offer(0, SIZE),
            |why| why == Violation::Index(SIZE).into(),
        ),
        (
            "a link outside the table",
            |memory| {
                memory.desc(0, BUFFER, 1, DESC_F_NEXT, 0xffff);
                memory.offer(0, 0);
            },
            |why| why == Violation::Index(0xffff).into(),
        ),
        (
            "an index that jumps ahead",
            |memory| memory.put16(AVAIL + 2, SIZE + 1),
            |why| {
                matches!(
                    why,
                    QueueStop::Violation(Violation::AvailTooFar {
                        idx: 9,
                        next_avail: 0
                    })
                )
            },
        ),
        (
            "an index that jumps back",
            |memory| memory.put16(AVAIL + 2, 0xffff),
            |why| matches!(why, QueueStop::Violation(Violation::AvailTooFar { .. })),
        ),
        (
            "a length that wraps",
            |memory| {
                memory.desc(0, u64::MAX - 1, 3, 0, 0);
                memory.offer(0, 0);
            },
            |why| matches!(why, QueueStop::Violation(Violation::Wraps { .. })),
        ),
        (
            "lengths that overflow",
            |memory| {
                memory.desc(0, 0, u32::MAX, DESC_F_NEXT, 1);
                memory.desc(1, 0, 1, 0, 0);
                memory.offer(0, 0);
            },
            |why| why == Violation::TooManyBytes.into(),
        ),
        (
            "a table of descriptors, which was not offered",
            |memory| {
                memory.desc(0, BUFFER, 32, DESC_F_INDIRECT, 0);
                memory.offer(0, 0);
            },
            |why| why == Violation::Indirect.into(),
        ),
        (
            "a readable buffer behind a writable one",
            |memory| {
                memory.desc(0, BUFFER, 1, DESC_F_WRITE | DESC_F_NEXT, 1);
                memory.desc(1, BUFFER, 1, 0, 0);
                memory.offer(0, 0);
            },
            |why| why == Violation::Order.into(),
        ),
    ];
    for (what, attack, is_answer) in cases {
        let (memory, mut queue, mut chain) = queue(0);
        attack(&memory);
        let why = queue.next(&memory, &mut chain).expect_err(what);
        assert!(is_answer(why), "{what}: {why}");
        // Mended too late.
        memory.desc(0, BUFFER, 1, 0, 0);
        memory.put16(AVAIL + 4, 0);
        memory.put16(AVAIL + 2, 1);
        assert_eq!(queue.next(&memory, &mut chain), Err(why), "{what}");
        assert_eq!(queue.complete(&memory, 0, 0), Err(why), "{what}");
        assert_eq!(queue.stopped(), Some(why));
    }
}

#[test]
fn rings_outside_of_memory_stop_the_queue_and_no_set_up_wraps() {
    for (desc, avail, used) in [(0x8000, AVAIL, USED), (DESC, 0x7fff_fffe, USED)] {
        let config = QueueConfig {
            desc: Iova::new(desc),
            avail: Iova::new(avail),
            used: Iova::new(used),
            ..config()
        };
        let memory = Array::new();
        memory.offer(0, 0);
        let mut queue = PolledQueue::new(&config, SIZE, 0).unwrap();
        let why = queue.next(&memory, &mut Chain::default());
        assert!(matches!(why, Err(QueueStop::OutOfReach(_))), "{why:?}");
    }
    let with = |change: fn(&mut QueueConfig)| {
        let mut config = config();
        change(&mut config);
        PolledQueue::new(&config, SIZE, 0).err()
    };
    assert_eq!(with(|config| config.size = 6), Some(Unfit::Size));
    assert_eq!(with(|config| config.size = 16), Some(Unfit::Size));
    assert_eq!(
        with(|config| config.used = Iova::new(USED + 2)),
        Some(Unfit::Alignment)
    );
    assert_eq!(
        with(|config| config.desc = Iova::new(!0xf)),
        Some(Unfit::Alignment)
    );
}

/// For any content of memory: bounded, never a panic, and no segment that wraps or is empty.
#[test]
fn any_bytes_are_walked_within_bounds() {
    let mut random = Random::new(36);
    for _ in 0..20_000 {
        let (memory, mut queue, mut chain) = queue(random.below(2) * feature::EVENT_IDX);
        for at in (DESC..DESC + 16 * u64::from(SIZE)).step_by(8) {
            // Small numbers are likelier to be links and flags.
            let word =
                random.bits() & random.bits() & 0x0007_0007_0000_ffff | random.below(2) << 63;
            memory.put(at, &word.to_le_bytes());
        }
        for entry in 0..u64::from(SIZE) {
            memory.put16(AVAIL + 4 + 2 * entry, random.below(10) as u16);
        }
        memory.put16(AVAIL + 2, random.below(10) as u16);
        for _ in 0..SIZE {
            match queue.next(&memory, &mut chain) {
                Ok(true) => {
                    let all = chain.readable().iter().chain(chain.writable());
                    let bytes: u64 = all.clone().map(|one| u64::from(one.len)).sum();
                    assert!(all.clone().all(|one| one.len != 0));
                    assert!(all.count() <= usize::from(SIZE));
                    let sums = chain.readable_len().checked_add(chain.writable_len());
                    assert_eq!(sums.map(u64::from), Some(bytes));
                    queue.complete(&memory, chain.head(), 0).unwrap();
                }
                Ok(false) | Err(_) => break,
            }
        }
    }
}
