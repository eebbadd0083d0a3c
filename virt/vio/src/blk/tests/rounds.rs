//! Number of waits of a device over absent memory: not one for each piece of a request in turn, nor
//! one for each request.

use std::time::{Duration, Instant};

use fake_mem::{ArrayMem, PagedMem};
use guest_mem::{Gpa, Iommu, NoIommu, PhysMem, SourceId, View};

use super::support::{MEMORY, RINGS, SECTORS, image, mem_disk, raw_disk};
use crate::QueueDevice;
use crate::blk::request::{STATUS_OK, kind};
use crate::blk::{Blk, BlkConfig, BlockIo, Transfer};
use crate::fake_driver::{AnyDriver, CountIrq};

/// One page each for every request: its indirect table, its header, its status byte; two for its
/// data.
const TABLES: u64 = 0x20_0000;
const HEADERS: u64 = 0x40_0000;
const STATUSES: u64 = 0x60_0000;
const DATA: u64 = 0x80_0000;

/// Memory of which all but the rings is absent, and a disk that has started.
struct World {
    array: ArrayMem,
    mem: PagedMem,
    driver: AnyDriver<ArrayMem>,
    blk: Blk,
    irq: CountIrq,
    iommu: NoIommu,
}

impl World {
    fn new(io: Box<dyn BlockIo>, packed: bool) -> Self {
        let config = BlkConfig {
            packed,
            ..BlkConfig::default()
        };
        let mut blk = Blk::new(config, io).unwrap();
        let array = ArrayMem::new(MEMORY);
        let (features, at) = (blk.features(), Gpa::new(RINGS));
        let driver = AnyDriver::new(array.clone(), at, 0, config.queue_size, features);
        blk.activate(features, &[driver.config()], array.keep_alive())
            .unwrap();
        let mem = PagedMem::new(array.clone());
        mem.evict(Gpa::new(TABLES), MEMORY - TABLES);
        Self {
            array,
            mem,
            driver,
            blk,
            irq: CountIrq::default(),
            iommu: NoIommu::new(guest_mem::MAX_LEASES),
        }
    }

    /// Makes request number `at` available, by an indirect table.
    fn request(&mut self, at: u64, kind: u32, sector: u64, data: &[(u64, u32)]) {
        let page = |area: u64| area + 0x1000 * at;
        let header = [u64::from(kind), sector].map(u64::to_le_bytes);
        self.array
            .put(Gpa::new(page(HEADERS)), header.as_flattened());
        self.array.put(Gpa::new(page(STATUSES)), &[0xff]);
        let (mut readable, mut writable) = (vec![(page(HEADERS), 16)], Vec::new());
        match kind {
            kind::IN => writable.extend(data),
            _ => readable.extend(data),
        }
        writable.push((page(STATUSES), 1));
        let table = Gpa::new(page(TABLES));
        self.driver.stage_indirect(table, &readable, &writable);
    }

    /// Lets the device run until `count` requests are answered; how often all that was asked for
    /// had to be brought in.
    fn rounds(&mut self, count: u64) -> u32 {
        self.driver.publish();
        let deadline = Instant::now() + Duration::from_secs(20);
        let (mut used, mut rounds) = (0, 0);
        loop {
            for _ in 0..16 {
                let mut view = View::new(&mut self.iommu, &self.mem, SourceId::new(0, 1, 0));
                let _ = self.blk.poll(&mut view, &mut self.irq, 0);
                while self.driver.used().is_some() {
                    used += 1;
                }
            }
            if used == count {
                break;
            }
            let tickets = self.mem.tickets();
            rounds += u32::from(!tickets.is_empty());
            if count == 1 {
                let held = self.iommu.leases().len();
                assert!(
                    held == 0 || tickets.is_empty(),
                    "{held} leases of one that waits"
                );
            }
            for ticket in tickets {
                self.mem.deliver(ticket);
                self.blk.ticket_done(ticket);
            }
            assert!(Instant::now() < deadline, "{:?}", self.blk.stats());
        }
        assert_eq!(self.iommu.leases().len(), 0);
        for at in 0..count {
            let status = self.array.get(Gpa::new(STATUSES + 0x1000 * at));
            assert_eq!(status, [STATUS_OK], "request {at}");
        }
        rounds
    }
}

/// Every way of moving data, in rings of both layouts.
fn all(test: impl Fn(World, u32)) {
    for packed in [false, true] {
        for kind in [kind::IN, kind::OUT] {
            test(World::new(mem_disk(), packed), kind);
            test(World::new(raw_disk(Transfer::Direct).0, packed), kind);
            test(World::new(raw_disk(Transfer::Bounce).0, packed), kind);
        }
    }
}

#[test]
fn a_request_of_4_mib_waits_for_its_table_its_header_and_all_the_rest() {
    all(|mut world, kind| {
        // Pieces that do not touch, in reverse order, and not in whole pages.
        let data: Vec<_> = (0..64)
            .rev()
            .map(|at| (DATA + at * 0x1_f000 + 0x200, 0x1_0000))
            .collect();
        world.request(0, kind, 0, &data);
        let rounds = world.rounds(1);
        assert!((1..=3).contains(&rounds), "kind {kind}: {rounds} rounds");
        if kind == kind::IN {
            let mut image = image();
            for (at, len) in data {
                let rest = image.split_off(len as usize);
                let mut read = vec![0; len as usize];
                world.array.read(Gpa::new(at), &mut read).unwrap();
                assert!(read == image, "{at:#x}");
                image = rest;
            }
        }
    });
}

#[test]
fn requests_behind_one_that_waits_do_not_wait_in_turn() {
    for (skew, len) in [(0, 0x1000), (0x600, 0x200), (0xe00, 0x400)] {
        all(|mut world, kind| {
            const COUNT: u64 = 256;
            for at in 0..COUNT {
                let sector = at * 8 % SECTORS;
                world.request(at, kind, sector, &[(DATA + 0x2000 * at + skew, len)]);
            }
            let rounds = world.rounds(COUNT);
            assert!(
                rounds <= 5,
                "kind {kind}, {len:#x} bytes: {rounds} rounds, {:?}",
                world.blk.backend().transfer()
            );
        });
    }
}
