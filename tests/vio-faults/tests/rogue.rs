//! A rogue disk driven as a guest would.

use fake_driver::FakeDriver;
use fake_mem::{ArrayMem, FlatDma, PendingDma};
use guest_mem::{Dma, Gpa, Iova, Perm, PhysMem};
use vio::blk::request::{STATUS_OK, kind};
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, RawDisk, RawDiskOptions, Transfer};
use vio::{Interrupt, QueueConfig, QueueDevice};
use vio_faults::{Fault, ROGUE_BYTES, Rogue, RogueDisk, RogueStats};

const SECTOR: u64 = 5;
const HEADER: u64 = 0x2_0000;
const STATUS: u64 = HEADER + 48;
const DATA: u64 = 0x4_0000;
const NOWHERE: Iova = Iova::new(0xdead_0000);

/// Interrupts that go nowhere: the guest polls.
struct NullIrq;

impl Interrupt for NullIrq {
    fn queue(&mut self, _: u16) {}
    fn config(&mut self) {}
}

/// The driver's queue, as the device names it.
fn queue(driver: &FakeDriver<ArrayMem>) -> QueueConfig {
    let rings = driver.config();
    QueueConfig {
        index: rings.index,
        size: rings.size,
        desc: rings.desc,
        avail: rings.avail,
        used: rings.used,
    }
}

struct Guest {
    mem: ArrayMem,
    driver: FakeDriver<ArrayMem>,
    disk: RogueDisk,
}

impl Guest {
    fn new(io: Box<dyn BlockIo>, fault: Fault) -> Self {
        let mem = ArrayMem::new(1 << 20);
        let driver = FakeDriver::new(mem.clone(), Gpa::new(0x1_0000), 0, 16);
        let blk = Blk::new(BlkConfig::default(), io).expect("a disk");
        let mut disk = Rogue::new(blk, Some(fault));
        let features = disk.features();
        disk.activate(features, &[queue(&driver)], mem.keep_alive())
            .expect("a start");
        Self { mem, driver, disk }
    }

    fn dma(&self) -> FlatDma {
        let mut dma = FlatDma::new(self.mem.clone());
        dma.iommu.unmap(NOWHERE, 4096);
        dma
    }

    /// Reads or writes the 512 bytes at `DATA`, and waits for the end.
    fn run<D: Dma>(
        &mut self,
        kind: u32,
        sector: u64,
        dma: &mut D,
        mut each: impl FnMut(&mut RogueDisk, &D),
    ) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.put(HEADER, &header);
        let (header, data, status) = ((HEADER, 16), (DATA, 512), (STATUS, 1));
        match kind {
            kind::IN => self.driver.add(&[header], &[data, status]),
            _ => self.driver.add(&[header, data], &[status]),
        };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while self.driver.used().is_none() {
            let _ = self.disk.poll(dma, &mut NullIrq, 0);
            each(&mut self.disk, dma);
            assert!(std::time::Instant::now() < deadline, "no end of it");
        }
        assert_eq!(self.driver.get(STATUS, 1), [STATUS_OK]);
    }
}

fn image() -> Vec<u8> {
    (0..64 * 512_u32).map(|at| (at / 512) as u8).collect()
}

/// Every way in which data get between a disk and a guest.
fn disks() -> Vec<Box<dyn BlockIo>> {
    let file = |transfer| -> Box<dyn BlockIo> {
        let (mut file, path) = (tempfile(), image());
        std::io::Write::write_all(&mut file, &path).expect("a file");
        let options = RawDiskOptions {
            transfer,
            ..RawDiskOptions::default()
        };
        Box::new(RawDisk::from_file(file, options).expect("a disk"))
    };
    vec![
        Box::new(MemDisk::new(image(), 16, false)),
        file(Transfer::Direct),
        file(Transfer::Bounce),
    ]
}

fn tempfile() -> std::fs::File {
    let fd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC);
    fd.expect("memory").into()
}

#[test]
fn dma_to_an_unmapped_address_is_blocked_and_the_request_completes() {
    for io in disks() {
        let fault = Fault::DmaUnmapped {
            sector: SECTOR,
            iova: NOWHERE,
        };
        let mut guest = Guest::new(io, fault);
        let mut dma = guest.dma();
        for sector in [SECTOR - 1, SECTOR] {
            assert!(dma.iommu.faults().is_empty());
            guest.run(kind::IN, sector, &mut dma, |_, _| {});
            assert_eq!(guest.driver.get(DATA, 512), [sector as u8; 512]);
        }
        assert_eq!(dma.iommu.faults(), [(NOWHERE, Perm::Write)]);
        let want = RogueStats {
            blocked: 1,
            ..RogueStats::default()
        };
        assert_eq!(guest.disk.class().attacks(), want);
        // A write there is none of the trigger's business.
        guest.run(kind::OUT, SECTOR, &mut dma, |_, _| {});
        assert_eq!(guest.disk.class().attacks(), want);
    }
}

#[test]
fn writes_into_a_write_buffer_are_blocked_or_do_harm() {
    for io in disks() {
        let mut guest = Guest::new(io, Fault::WriteToReadOnly { sector: SECTOR });
        let mut dma = guest.dma();
        guest.driver.put(DATA, &[0x11; 512]);
        dma.iommu.deny(Iova::new(DATA), 4096, Perm::Write);
        guest.run(kind::OUT, SECTOR, &mut dma, |_, _| {});
        assert_eq!(dma.iommu.faults(), [(Iova::new(DATA), Perm::Write)]);
        assert_eq!(guest.driver.get(DATA, 8), [0x11; 8]);
        // Without protection the same device corrupts the guest: the attack is real, and the disk
        // has what was written.
        dma.iommu.allow_all();
        guest.run(kind::OUT, SECTOR, &mut dma, |_, _| {});
        assert_eq!(guest.driver.get(DATA, 8), ROGUE_BYTES);
        let want = RogueStats {
            blocked: 1,
            allowed: 1,
            ..RogueStats::default()
        };
        assert_eq!(guest.disk.class().attacks(), want);
        guest.run(kind::IN, SECTOR, &mut dma, |_, _| {});
        assert_eq!(guest.driver.get(DATA, 512), [0x11; 512]);
    }
}

#[test]
fn a_wait_at_any_access_changes_nothing_of_the_attack() {
    let run = |wait: &dyn Fn(FlatDma) -> PendingDma<FlatDma>| {
        let io = Box::new(MemDisk::new(image(), 16, false));
        let mut guest = Guest::new(io, Fault::WriteToReadOnly { sector: SECTOR });
        let mut inner = guest.dma();
        inner.iommu.deny(Iova::new(DATA), 4096, Perm::Write);
        let mut dma = wait(inner);
        guest.run(kind::OUT, SECTOR, &mut dma, |disk, dma| {
            for ticket in dma.take_tickets() {
                disk.ticket_done(ticket);
            }
        });
        (guest.disk.class().attacks().blocked, dma.accesses())
    };
    let (blocked, accesses) = run(&PendingDma::never);
    assert_eq!(blocked, 1);
    for k in 0..accesses {
        assert_eq!(run(&|dma| PendingDma::kth(dma, k)).0, 1, "access {k}");
    }
    assert_eq!(run(&PendingDma::every).0, 1);
}
