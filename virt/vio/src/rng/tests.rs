//! Tests of the entropy device with correct and incorrect drivers.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use fake_mem::{ArrayMem, FlatDma, PagedMem};
use guest_mem::{Gpa, Iova, NoIommu, Perm, PhysMem, SourceId, View};

use super::*;
use crate::fake_driver::{AnyDriver, CountIrq};
use crate::{QueueDevice, Service};

const BUFFER: u64 = 0x4_0000;
const SIZE: u16 = 16;
/// Limits that one answer exhausts.
const SLOW: RateLimits = RateLimits {
    operations: None,
    bytes: Some(Rate {
        per_second: 1000,
        burst: 64,
    }),
};

/// Source of bytes that count up from 1, as many as the test has left in it.
#[derive(Clone, Default)]
struct Counted(Arc<Mutex<(usize, u8)>>);

impl Counted {
    fn leave(&self, bytes: usize) {
        self.0.lock().unwrap().0 = bytes;
    }
}

impl EntropySource for Counted {
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (left, last) = &mut *self.0.lock().unwrap();
        let len = bytes.len().min(*left);
        for byte in &mut bytes[..len] {
            *last = last.wrapping_add(1).max(1);
            *byte = *last;
        }
        *left -= len;
        Ok(len)
    }
}

struct Guest {
    mem: ArrayMem,
    driver: AnyDriver<ArrayMem>,
    rng: Rng,
    irq: CountIrq,
}

impl Guest {
    fn new(source: impl EntropySource + 'static, limits: RateLimits, mask: u64) -> Self {
        let mem = ArrayMem::new(1 << 20);
        let mut rng = Rng::new(Box::new(source), limits);
        let features = rng.features() & mask;
        let driver = AnyDriver::new(mem.clone(), Gpa::new(0x1_0000), 0, SIZE, features);
        rng.activate(features, &[driver.config()], mem.keep_alive())
            .expect("a start");
        Self {
            mem,
            driver,
            rng,
            irq: CountIrq::default(),
        }
    }

    fn poll(&mut self, dma: &mut impl Dma, now_ns: u64) {
        for _ in 0..1000 {
            if self.rng.poll(dma, &mut self.irq, now_ns) == Activity::Idle {
                return;
            }
        }
        panic!("it is busy for ever");
    }

    /// Returns the lengths of the buffers that come back at `now_ns`.
    fn used(&mut self, now_ns: u64) -> Vec<u32> {
        self.poll(&mut FlatDma::new(self.mem.clone()), now_ns);
        std::iter::from_fn(|| self.driver.used())
            .map(|used| used.1)
            .collect()
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read(Gpa::new(at), &mut bytes).unwrap();
        bytes
    }
}

/// Runs a test over split and packed rings, with a source that has plenty.
fn both(test: impl Fn(Guest)) {
    for mask in [!feature::RING_PACKED, !0] {
        let source = Counted::default();
        source.leave(1 << 20);
        test(Guest::new(source, RateLimits::default(), mask));
    }
}

#[test]
fn buffers_are_filled_in_their_order_and_no_more_is_written() {
    both(|mut guest| {
        guest.driver.add(&[], &[(BUFFER, 3), (BUFFER + 0x100, 61)]);
        assert_eq!(guest.used(0), [64]);
        assert_eq!(guest.bytes(BUFFER, 4), [1, 2, 3, 0]);
        let second: Vec<u8> = (4..=64).chain([0]).collect();
        assert_eq!(guest.bytes(BUFFER + 0x100, 62), second);
        assert_eq!(guest.irq.total(), 1);
        let stats = guest.rng.stats();
        assert_eq!((stats.requests, stats.read_bytes, stats.errors), (1, 64, 0));
    });
}

#[test]
fn a_buffer_of_almost_4_gib_gets_a_bounded_answer() {
    both(|mut guest| {
        guest.driver.add(&[], &[(BUFFER, u32::MAX)]);
        assert_eq!(guest.used(0), [MAX_ANSWER as u32]);
        assert_eq!(guest.bytes(BUFFER + MAX_ANSWER as u64, 1), [0]);
    });
}

#[test]
fn buffers_of_0_bytes_and_of_4_gib_need_a_reset() {
    for writable in [&[(BUFFER, 0)][..], &[(BUFFER, u32::MAX), (BUFFER, 1)]] {
        both(|mut guest| {
            guest.driver.add(&[], writable);
            assert_eq!(guest.used(0), [0; 0]);
            assert!(guest.rng.needs_reset());
            assert_eq!(guest.irq.config, 1);
            assert_eq!(guest.bytes(BUFFER, 1), [0]);
        });
    }
}

#[test]
fn a_read_only_buffer_comes_back_empty_beside_others() {
    both(|mut guest| {
        guest.driver.add(&[(BUFFER, 64)], &[]);
        guest.driver.add(&[(BUFFER, 64)], &[(BUFFER + 64, 8)]);
        assert_eq!(guest.used(0), [0, 8]);
        assert_eq!(guest.bytes(BUFFER, 64), [0; 64]);
        assert_eq!(guest.rng.stats().errors, 1);
        assert!(!guest.rng.needs_reset());
    });
}

#[test]
fn a_buffer_that_the_iommu_refuses_comes_back_empty() {
    both(|mut guest| {
        let mut dma = FlatDma::new(guest.mem.clone());
        dma.iommu.deny(Iova::new(BUFFER), 4096, Perm::Write);
        guest.driver.add(&[], &[(BUFFER, 64)]);
        guest.driver.add(&[], &[(BUFFER + 4096, 4)]);
        guest.poll(&mut dma, 0);
        let used: Vec<_> = std::iter::from_fn(|| guest.driver.used()).collect();
        assert_eq!(used.iter().map(|used| used.1).collect::<Vec<_>>(), [0, 4]);
        assert_eq!(dma.iommu.faults().len(), 1);
        assert!(!guest.rng.needs_reset());
    });
}

#[test]
fn an_answer_into_absent_pages_waits_once_for_all_of_them() {
    both(|mut guest| {
        let mem = PagedMem::new(guest.mem.clone());
        let pages: Vec<_> = (0..4).map(|at| (BUFFER + 0x1000 * at, 16)).collect();
        mem.evict(Gpa::new(BUFFER), 0x4000);
        guest.driver.add(&[], &pages);
        let mut iommu = NoIommu::new(1);
        let mut view = View::new(&mut iommu, &mem, SourceId::new(0, 1, 0));
        guest.poll(&mut view, 0);
        assert_eq!(guest.driver.used(), None);
        for ticket in mem.tickets() {
            mem.deliver(ticket);
            guest.rng.ticket_done(ticket);
        }
        guest.poll(&mut view, 0);
        assert_eq!(guest.driver.used().map(|used| used.1), Some(64));
        assert_eq!(guest.rng.stats().pends, 1);
    });
}

#[test]
fn random_bytes_that_cannot_be_written_count_against_the_limit() {
    let source = Counted::default();
    source.leave(1 << 20);
    let mut guest = Guest::new(source.clone(), SLOW, !0);
    let mem = PagedMem::new(guest.mem.clone());
    guest.driver.add(&[], &[(BUFFER, 64)]);
    let mut iommu = NoIommu::new(1);
    let mut view = View::new(&mut iommu, &mem, SourceId::new(0, 1, 0));
    // The page is brought in, and evicted again before the device accesses it.
    for _ in 0..100 {
        mem.evict(Gpa::new(BUFFER), 0x1000);
        guest.poll(&mut view, 0);
        for ticket in mem.tickets() {
            guest.rng.ticket_done(ticket);
        }
    }
    let drawn = (1 << 20) - source.0.lock().unwrap().0;
    assert!((64..=128).contains(&drawn), "{drawn}");
    assert!(guest.rng.opens_at_ns().is_some());
}

#[test]
fn a_chain_that_wants_no_bytes_does_not_reach_a_source_that_fails() {
    let fails = Arc::new(AtomicBool::new(true));
    let mut guest = Guest::new(Failing(fails), HOST_LIMITS, !0);
    guest.driver.add(&[(BUFFER, 8)], &[]);
    assert_eq!(guest.used(0), [0]);
    assert_eq!(guest.rng.class().failures(), 0);
}

#[test]
fn a_limited_device_says_when_it_goes_on_and_sleeps_until_then() {
    let source = Counted::default();
    source.leave(1 << 20);
    let mut guest = Guest::new(source, SLOW, !0);
    for _ in 0..4 {
        guest.driver.add(&[], &[(BUFFER, 64)]);
    }
    // A second one may begin before the burst is exhausted.
    let first = guest.used(0);
    assert!((1..=2).contains(&first.len()), "{first:?}");
    let mut dma = FlatDma::new(guest.mem.clone());
    let mut times = vec![0];
    while guest.rng.has_work(&mut dma) || guest.rng.opens_at_ns().is_some() {
        assert!(!guest.rng.has_work(&mut dma), "it would be visited in vain");
        let at = guest.rng.opens_at_ns().expect("a deadline");
        assert_eq!(guest.used(at - 1), [0; 0], "too early");
        let _ = guest.used(at);
        times.push(at);
        assert!(times.is_sorted(), "{times:?}");
    }
    assert_eq!(guest.rng.stats().requests, 4);
    assert!(guest.rng.stats().throttled != 0);
    assert!(*times.last().unwrap() >= 128_000_000, "{times:?}");
}

#[test]
fn a_source_that_has_nothing_is_asked_again_and_none_is_lost() {
    both(|mut guest| {
        let source = Counted::default();
        guest.rng.class_mut().source = Box::new(source.clone());
        guest.driver.add(&[], &[(BUFFER, 8)]);
        assert_eq!(guest.used(5), [0; 0]);
        let mut dma = FlatDma::new(guest.mem.clone());
        assert!(!guest.rng.has_work(&mut dma));
        assert_eq!(guest.rng.opens_at_ns(), Some(5 + RETRY_NS));
        assert_eq!(guest.used(5 + RETRY_NS), [0; 0], "it still has nothing");
        assert_eq!(guest.rng.opens_at_ns(), Some(5 + 2 * RETRY_NS));
        source.leave(3);
        assert_eq!(
            guest.used(5 + 2 * RETRY_NS),
            [3],
            "less than the buffer has"
        );
        assert_eq!(guest.rng.opens_at_ns(), None);
    });
}

#[test]
fn a_paused_device_answers_nothing_and_a_saved_one_has_its_ring() {
    both(|mut guest| {
        guest.rng.set_service(Service::Stopped);
        guest.driver.add(&[], &[(BUFFER, 8)]);
        assert_eq!(guest.used(0), [0; 0]);
        let saved = guest.rng.save().expect("nothing is in flight");
        assert_eq!((saved.device_type, saved.queues.len()), (4, 1));
        guest.rng.set_service(Service::Full);
        assert_eq!(guest.used(0), [8]);
    });
}

#[test]
fn the_host_gives_bytes_that_differ() {
    let mut source = HostEntropy::open().expect("this host has getrandom");
    let (mut first, mut second) = ([0; 64], [0; 64]);
    let lens = [&mut first, &mut second].map(|bytes| source.fill(bytes).unwrap());
    assert_eq!(lens, [64, 64]);
    assert_ne!(first, second);
}

#[test]
fn only_an_answer_that_will_change_by_itself_is_no_error() {
    for errno in [Errno::AGAIN, Errno::INTR] {
        assert_eq!(given(Err(errno)).unwrap(), 0);
    }
    for errno in [Errno::PERM, Errno::NOSYS, Errno::FAULT, Errno::INVAL] {
        let raw = given(Err(errno)).unwrap_err().raw_os_error();
        assert_eq!(raw, Some(errno.raw_os_error()));
    }
}

/// Source that fails while the flag is set, and has plenty otherwise.
struct Failing(Arc<AtomicBool>);

impl EntropySource for Failing {
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.0.load(Relaxed) {
            true => Err(Errno::PERM.into()),
            false => Ok(bytes.len()),
        }
    }
}

#[test]
fn a_source_that_fails_is_asked_again_and_counted_apart() {
    let fails = Arc::new(AtomicBool::new(true));
    let mut guest = Guest::new(Failing(fails.clone()), RateLimits::default(), !0);
    guest.driver.add(&[], &[(BUFFER, 8)]);
    for try_ in 0..3 {
        let now_ns = 5 + try_ * RETRY_NS;
        assert_eq!(guest.used(now_ns), [0; 0]);
        assert_eq!(guest.used(now_ns + 1), [0; 0], "not asked again so soon");
        assert_eq!(guest.rng.opens_at_ns(), Some(now_ns + RETRY_NS));
        assert_eq!(guest.rng.class().failures(), try_ + 1);
    }
    let stats = guest.rng.stats();
    assert_eq!((stats.throttled, stats.errors, stats.requests), (0, 0, 0));
    fails.store(false, Relaxed);
    assert_eq!(guest.used(5 + 3 * RETRY_NS), [8]);
}

#[test]
fn a_guest_that_never_stops_asking_gets_1_mib_a_second_of_the_host() {
    let source = Counted::default();
    source.leave(usize::MAX);
    let mut guest = Guest::new(source, HOST_LIMITS, !0);
    let mut waiting = 0;
    let mut bytes = 0;
    for ms in 0..4000 {
        while waiting < SIZE {
            guest.driver.add(&[], &[(BUFFER, u32::MAX)]);
            waiting += 1;
        }
        let used = guest.used(ms * 1_000_000);
        waiting -= used.len() as u16;
        bytes += used.into_iter().map(u64::from).sum::<u64>();
    }
    // Four seconds, a burst, and one answer that begins before the limit is reached.
    let most = (4 << 20) + (64 << 10) + MAX_ANSWER as u64;
    assert!((4 << 20..=most).contains(&bytes), "{bytes}");
}
