//! A disk that touches buffers again, driven as a guest would.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fake_driver::FakeDriver;
use fake_mem::{ArrayMem, FlatDma, PendingDma};
use guest_mem::{Dma, Gpa, Iova, Perm, PhysMem};
use vio::blk::request::{STATUS_OK, kind};
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk};
use vio::{Interrupt, QueueConfig, QueueDevice};
use vio_faults::{
    Attempts, Fault, LateOptions, LateStats, ROGUE_BYTES, Rogue, RogueDisk, SlowDisk,
};

const TRIGGER: u64 = 5;
const JUDGE: u64 = 6;
const LIMIT_MS: u64 = 100;
const HEADER: u64 = 0x2_0000;
const STATUS: u64 = HEADER + 48;
/// Where the trigger is read to.
const OWN: u64 = 0x3_0000;
/// A buffer.
const A: u64 = 0x4_0000;
/// Another.
const B: u64 = 0x5_0000;

struct NullIrq;

impl Interrupt for NullIrq {
    fn queue(&mut self, _: u16) {}
    fn config(&mut self) {}
}

/// Milliseconds that pass when a test says so.
#[derive(Clone, Default)]
struct Time(Arc<AtomicU64>);

impl Time {
    fn pass(&self, ms: u64) {
        self.0.fetch_add(ms, Ordering::Relaxed);
    }

    fn clock(&self) -> vio_faults::Clock {
        let time = self.clone();
        Box::new(move || Duration::from_millis(time.0.load(Ordering::Relaxed)))
    }
}

/// A disk whose sectors hold their numbers.
fn disk() -> Box<dyn BlockIo> {
    let image = (0..64 * 512_u32).map(|at| (at / 512) as u8).collect();
    Box::new(MemDisk::new(image, 16, false))
}

struct Guest {
    driver: FakeDriver<ArrayMem>,
    disk: RogueDisk,
    time: Time,
}

impl Guest {
    fn new() -> (Self, FlatDma) {
        Self::over(disk())
    }

    fn over(io: Box<dyn BlockIo>) -> (Self, FlatDma) {
        let mem = ArrayMem::new(1 << 20);
        let driver: FakeDriver<ArrayMem> = FakeDriver::new(mem.clone(), Gpa::new(0x1_0000), 0, 16);
        let blk = Blk::new(BlkConfig::default(), io).expect("a disk");
        let fault = Fault::Late(LateOptions {
            probe: TRIGGER,
            judge: JUDGE,
            limit: Duration::from_millis(LIMIT_MS),
            most: 3,
        });
        let time = Time::default();
        let mut disk = Rogue::with_clock(blk, Some(fault), time.clock());
        let rings = driver.config();
        let queue = QueueConfig {
            index: rings.index,
            size: rings.size,
            desc: rings.desc,
            avail: rings.avail,
            used: rings.used,
        };
        let features = disk.features();
        disk.activate(features, &[queue], mem.keep_alive())
            .expect("a start");
        (Self { driver, disk, time }, FlatDma::new(mem))
    }

    /// Makes a request of 512 bytes available, its header at `header`.
    fn add(&mut self, kind: u32, sector: u64, header: u64, data: u64) {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.put(header, &bytes);
        let (head, data, status) = ((header, 16), (data, 512), (header + 48, 1));
        match kind {
            kind::IN => self.driver.add(&[head], &[data, status]),
            _ => self.driver.add(&[head, data], &[status]),
        };
    }

    /// Waits for the end of a request.
    fn wait<D: Dma>(&mut self, dma: &mut D, mut each: impl FnMut(&mut RogueDisk, &D)) {
        for _ in 0..1_000 {
            if self.driver.used().is_some() {
                return;
            }
            let _ = self.disk.poll(dma, &mut NullIrq, 0);
            each(&mut self.disk, dma);
        }
        panic!("no end of it");
    }

    /// Reads or writes, and waits for the end.
    fn run<D: Dma>(&mut self, kind: u32, sector: u64, data: u64, dma: &mut D) {
        self.add(kind, sector, HEADER, data);
        self.wait(dma, |_, _| {});
        assert_eq!(self.driver.get(STATUS, 1), [STATUS_OK]);
    }

    fn trigger<D: Dma>(&mut self, dma: &mut D) {
        self.run(kind::IN, TRIGGER, OWN, dma);
    }

    fn judge<D: Dma>(&mut self, dma: &mut D) {
        self.run(kind::IN, JUDGE, OWN, dma);
    }

    fn stats(&self) -> LateStats {
        self.disk.class().attacks().late
    }
}

fn attempts(blocked: u64, allowed: u64) -> Attempts {
    Attempts { blocked, allowed }
}

#[test]
fn a_buffer_is_touched_at_each_trigger_until_the_limit() {
    let (mut guest, mut dma) = Guest::new();
    guest.trigger(&mut dma);
    guest.run(kind::IN, 1, A, &mut dma);
    // The age counts from the request behind it.
    guest.time.pass(1_000);
    guest.trigger(&mut dma);
    assert_eq!(guest.driver.get(A, 8), ROGUE_BYTES);
    assert_eq!(
        (guest.stats().early, guest.stats().allowed_max_ms),
        (attempts(0, 1), Some(0))
    );
    guest.time.pass(LIMIT_MS - 1);
    dma.iommu.unmap(Iova::new(A), 4096);
    guest.trigger(&mut dma);
    assert_eq!(
        (guest.stats().early, guest.stats().late),
        (attempts(1, 1), attempts(0, 0))
    );
    guest.time.pass(1);
    guest.trigger(&mut dma);
    assert_eq!(guest.stats().unjudged, attempts(1, 0));
    guest.judge(&mut dma);
    assert_eq!(guest.stats().late, attempts(1, 0));
    assert_eq!(guest.stats().blocked_min_ms, Some(LIMIT_MS - 1));
    // It is forgotten then.
    guest.judge(&mut dma);
    assert_eq!(guest.stats().late, attempts(1, 0));
    assert_eq!(dma.iommu.faults(), [(Iova::new(A), Perm::Write); 3]);
}

#[test]
fn an_access_that_the_iommu_lets_through_at_the_limit_counts_as_late() {
    let (mut guest, mut dma) = Guest::new();
    guest.trigger(&mut dma);
    guest.run(kind::IN, 1, A, &mut dma);
    guest.trigger(&mut dma);
    guest.time.pass(LIMIT_MS);
    guest.judge(&mut dma);
    assert_eq!(guest.stats().late, attempts(0, 1));
    assert_eq!(guest.stats().allowed_max_ms, Some(LIMIT_MS));
}

#[test]
fn no_buffer_is_touched_after_the_last_of_the_late_accesses() {
    let (mut guest, mut dma) = Guest::new();
    guest.trigger(&mut dma);
    for _ in 0..5 {
        guest.run(kind::IN, 1, A, &mut dma);
        guest.trigger(&mut dma);
        guest.time.pass(LIMIT_MS);
        guest.judge(&mut dma);
    }
    assert_eq!(
        (guest.stats().late, guest.stats().early),
        (attempts(0, 3), attempts(0, 3))
    );
}

#[test]
fn a_buffer_that_is_used_again_is_as_young_as_its_last_use() {
    let (mut guest, mut dma) = Guest::new();
    guest.trigger(&mut dma);
    for sector in [1, 2] {
        guest.run(kind::IN, sector, A, &mut dma);
        guest.time.pass(LIMIT_MS);
        guest.run(kind::IN, sector, B, &mut dma);
    }
    // A is used as something else: as the header of a request.
    guest.add(kind::IN, 3, A, OWN);
    guest.wait(&mut dma, |_, _| {});
    guest.trigger(&mut dma);
    // B, which was read to last; what the request behind was read to is where the trigger is.
    assert_eq!(guest.stats().early, attempts(0, 1));
    assert_eq!(guest.stats().late, attempts(0, 0));
}

#[test]
fn a_buffer_of_a_write_is_read_and_not_written() {
    let (mut guest, mut dma) = Guest::new();
    guest.trigger(&mut dma);
    guest.driver.put(A, &[0x11; 512]);
    dma.iommu.deny(Iova::new(A), 4096, Perm::Write);
    guest.run(kind::OUT, 1, A, &mut dma);
    guest.trigger(&mut dma);
    assert_eq!(guest.stats().early, attempts(0, 1));
    assert_eq!(guest.driver.get(A, 8), [0x11; 8]);
}

#[test]
fn reads_before_the_first_trigger_are_left_alone() {
    let (mut guest, mut dma) = Guest::new();
    guest.run(kind::IN, 1, A, &mut dma);
    guest.trigger(&mut dma);
    guest.trigger(&mut dma);
    assert_eq!(guest.stats(), LateStats::default());
    assert_eq!(guest.driver.get(A, 8), [1; 8]);
}

#[test]
fn requests_that_are_in_flight_together_leave_no_buffer() {
    let (slow, control) = SlowDisk::new(disk()).expect("an eventfd");
    let (mut guest, mut dma) = Guest::over(Box::new(slow));
    control.release(1);
    guest.trigger(&mut dma);
    guest.add(kind::IN, 1, HEADER, A);
    guest.add(kind::IN, 2, HEADER + 64, B);
    let _ = guest.disk.poll(&mut dma, &mut NullIrq, 0);
    assert_eq!(guest.disk.in_flight(), 2);
    control.release(3);
    guest.wait(&mut dma, |_, _| {});
    guest.wait(&mut dma, |_, _| {});
    guest.trigger(&mut dma);
    assert_eq!(guest.stats(), LateStats::default());
    assert_eq!(guest.driver.get(A, 8), [1; 8]);
}

#[test]
fn a_wait_at_any_access_changes_nothing_of_the_attack() {
    let run = |wait: &dyn Fn(FlatDma) -> PendingDma<FlatDma>| {
        let (mut guest, inner) = Guest::new();
        let mut dma = wait(inner);
        let requests = [(TRIGGER, OWN), (1, A), (2, B), (TRIGGER, OWN), (JUDGE, OWN)];
        for (at, (sector, data)) in requests.into_iter().enumerate() {
            if at == 4 {
                guest.time.pass(LIMIT_MS);
            }
            guest.add(kind::IN, sector, HEADER, data);
            guest.wait(&mut dma, |disk, dma| {
                for ticket in dma.take_tickets() {
                    disk.ticket_done(ticket);
                }
            });
        }
        let LateStats { early, late, .. } = guest.stats();
        ((early, late), dma.accesses())
    };
    let wanted = (attempts(0, 2), attempts(0, 2));
    let (seen, accesses) = run(&PendingDma::never);
    assert_eq!(seen, wanted);
    for k in 0..accesses {
        assert_eq!(run(&|dma| PendingDma::kth(dma, k)).0, wanted, "access {k}");
    }
    assert_eq!(run(&PendingDma::every).0, wanted);
}
