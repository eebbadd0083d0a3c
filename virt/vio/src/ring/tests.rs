//! The ring against the fake driver, an independent implementation, and hostile memory.

mod both;
mod hostile;
mod journal;
mod kill;
mod model;
mod notify;
mod oracle;
mod packed;
mod world;

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Dma, Gpa, Iova, Pages, Perm};

use super::chain::RawDescriptor;
use super::*;
use crate::fake_driver::FakeDriver;
use crate::queue_config::{QueueConfig, feature};

const RINGS: u64 = 0x1_0000;
const BUFFER: u64 = 0x4_0000;
const ALL: u64 = feature::COMMON;

/// The split layout of `ring`.
fn split(ring: &mut Ring) -> &mut SplitQueue {
    match ring {
        Ring::Split(own) => own,
        Ring::Packed(_) => unreachable!("these tests have split rings"),
    }
}

/// Memory, a driver, and the device's side of its queue.
struct Pair {
    driver: FakeDriver<ArrayMem>,
    ring: Ring,
    dma: FlatDma,
    chain: Chain,
}

impl Pair {
    fn new(size: u16, features: u64) -> Self {
        let mem = ArrayMem::new(1 << 20);
        let driver = FakeDriver::new(mem.clone(), Gpa::new(RINGS), 0, size);
        let ring = Ring::new(&driver.config(), 1024, features).unwrap();
        Self {
            driver,
            ring,
            dma: FlatDma::new(mem),
            chain: Chain::new(),
        }
    }

    /// Whether there is a chain.
    fn peek(&mut self) -> Result<bool, RingStop> {
        self.ring.peek(&mut self.dma, &mut self.chain)
    }

    /// Takes one chain, which is there, and answers it with `len`.
    fn serve(&mut self, len: u32) -> Result<(), RingStop> {
        assert!(self.peek()?);
        let token = self.ring.advance(&self.chain);
        self.ring.stage(&mut self.dma, token, len)
    }
}

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
    RawDescriptor {
        addr,
        len,
        flags,
        next,
    }
}

#[test]
fn descriptor_layout_is_that_of_the_specification() {
    let addr = [0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01];
    let rest = [0x78, 0x56, 0x34, 0x12, 0x03, 0x00, 0xcd, 0xab];
    let (addr, rest) = (u64::from_le_bytes(addr), u64::from_le_bytes(rest));
    let want = desc(0x0123_4567_89ab_cdef, 0x1234_5678, 3, 0xabcd);
    assert_eq!(RawDescriptor::from_words(addr, rest), want);
}

#[test]
fn chains_read_as_rows_of_bytes_however_they_are_cut() {
    let mut pair = Pair::new(16, ALL);
    pair.driver.put(BUFFER, b"abcdefghij");
    pair.driver.add(
        &[(BUFFER, 1), (BUFFER + 1, 6), (BUFFER + 7, 3)],
        &[(BUFFER + 0x100, 2), (BUFFER + 0x200, 5)],
    );
    assert_eq!(split(&mut pair.ring).available(&mut pair.dma), Ok(1));
    pair.peek().unwrap();
    let mut got = [0; 7];
    let readable = pair.chain.readable();
    readable.read(&mut pair.dma, 2, &mut got).unwrap();
    assert_eq!(&got, b"cdefghi");
    assert!(
        readable.read(&mut pair.dma, 4, &mut got).is_err(),
        "past the end"
    );
    let writable = pair.chain.writable();
    assert_eq!((readable.len(), writable.len()), (10, 7));
    writable.write(&mut pair.dma, 1, b"WXYZ").unwrap();
    assert_eq!(pair.driver.get(BUFFER + 0x100, 2), b"\0W");
    assert_eq!(pair.driver.get(BUFFER + 0x200, 5), b"XYZ\0\0");
    let pieces: Vec<_> = writable.slice(1, 100).map(|piece| piece.len).collect();
    assert_eq!(pieces, [1, 5]);
}

#[test]
fn sixteen_bit_indices_wrap_with_the_whole_ring_outstanding() {
    let mut pair = Pair::new(8, ALL);
    // 8 × 9000 = 72,000 chains: past 2^16.
    for round in 0..9000u32 {
        for _ in 0..8 {
            pair.driver.stage(&[], &[(BUFFER, 0x4000)]);
        }
        pair.driver.publish();
        assert_eq!(
            split(&mut pair.ring).available(&mut pair.dma),
            Ok(8),
            "round {round}"
        );
        for at in 0..8 {
            pair.serve(round + at).unwrap();
        }
        assert_eq!(split(&mut pair.ring).available(&mut pair.dma), Ok(0));
        pair.ring.publish(&mut pair.dma).unwrap();
        for at in 0..8 {
            assert_eq!(pair.driver.used().expect("published").1, round + at);
        }
        assert_eq!(pair.driver.used(), None);
    }
}

#[test]
fn staged_elements_are_invisible_until_published() {
    let mut pair = Pair::new(8, ALL);
    pair.driver.add(&[], &[(BUFFER, 8)]);
    pair.serve(7).unwrap();
    assert_eq!(pair.driver.used(), None);
    assert_eq!(pair.driver.used_idx(), 0);
    pair.ring.publish(&mut pair.dma).unwrap();
    assert_eq!(pair.driver.used(), Some((0, 7)));
}

#[test]
fn used_elements_may_straddle_pages() {
    let mem = ArrayMem::new(1 << 20);
    let config = QueueConfig {
        index: 0,
        size: 1024,
        desc: Iova::new(0x1_0000),
        avail: Iova::new(0x2_0ffe),
        // Element 1 starts 4 bytes before a page's end.
        used: Iova::new(0x3_0ff0),
    };
    let mut ring = Ring::new(&config, 1024, ALL).unwrap();
    let mut dma = FlatDma::new(mem.clone());
    for head in 0..3 {
        let token = Token::new(head, 1, 0, 0, 0x200);
        ring.stage(&mut dma, token, 0x100 + u32::from(head))
            .unwrap();
    }
    // The driver's index at 0x21000, the first bytes of a second page.
    mem.put_u16(Gpa::new(0x2_1000), 5);
    assert_eq!(split(&mut ring).available(&mut dma), Ok(5));
    ring.publish(&mut dma).unwrap();
    assert_eq!(mem.get_u16(Gpa::new(0x3_0ff2)), 3);
    assert_eq!(mem.get_u32(Gpa::new(0x3_0ffc)), 1);
    assert_eq!(mem.get_u32(Gpa::new(0x3_1000)), 0x101);
    assert_eq!(mem.get_u32(Gpa::new(0x3_1004)), 2);
}

#[test]
fn set_up_refuses_bad_sizes_and_addresses() {
    let good = Pair::new(8, ALL).driver.config();
    let size = |size| SplitQueue::new(&QueueConfig { size, ..good }, 256, ALL).is_ok();
    assert_eq!(
        [0, 1, 3, 256, 512].map(size),
        [false, true, false, true, false]
    );
    let refused = |config: QueueConfig| SplitQueue::new(&config, 256, ALL).is_err();
    assert!(refused(QueueConfig {
        desc: Iova::new(0x1_0008),
        ..good
    }));
    assert!(refused(QueueConfig {
        avail: Iova::new(0x1_0001),
        ..good
    }));
    assert!(refused(QueueConfig {
        used: Iova::new(0x1_0002),
        ..good
    }));
    assert!(refused(QueueConfig {
        used: Iova::new(u64::MAX - 3),
        ..good
    }));
}

#[test]
fn a_ring_fault_is_recorded_once_until_a_doorbell() {
    let mut pair = Pair::new(8, ALL);
    pair.driver.add(&[(BUFFER, 4)], &[]);
    assert_eq!(split(&mut pair.ring).available(&mut pair.dma), Ok(1));
    pair.dma.iommu.deny(Iova::new(RINGS), 4096, Perm::Read);
    assert!(split(&mut pair.ring).available(&mut pair.dma).is_err());
    assert_eq!(pair.ring.parked(), Some(Parked::Fault));
    assert_eq!(pair.dma.iommu.faults().len(), 1);
    pair.ring.ticket_done(guest_mem::Ticket(1));
    assert_eq!(
        pair.ring.parked(),
        Some(Parked::Fault),
        "no ticket mends a fault"
    );
    // The doorbell tries again, and the fault is still there.
    pair.ring.kick();
    assert!(split(&mut pair.ring).available(&mut pair.dma).is_err());
    assert_eq!(pair.dma.iommu.faults().len(), 2);
    pair.dma.iommu.allow_all();
    pair.ring.kick();
    assert_eq!(split(&mut pair.ring).available(&mut pair.dma), Ok(1));
    assert_eq!(pair.ring.stats().faults, 2);
}

#[test]
fn a_flush_of_unchanged_pages_costs_no_fault() {
    let mut pair = Pair::new(8, ALL);
    for round in 1..4 {
        pair.driver.add(&[(BUFFER, 4)], &[]);
        pair.dma.iommu.flush();
        assert_eq!(split(&mut pair.ring).available(&mut pair.dma), Ok(1));
        pair.serve(0).unwrap();
        pair.dma.iommu.flush();
        pair.ring.publish(&mut pair.dma).unwrap();
        assert_eq!(pair.driver.used_idx(), round);
    }
    assert!(pair.dma.iommu.faults().is_empty());
}
