//! A device model that has been taken over, in the process that has the guest's memory and in one
//! of its own: what it finds and overwrites there, and what reaches the guest.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fake_driver::FakeDriver;
use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Gpa, Iova, PhysMem};
use vio::blk::request::{STATUS_OK, kind};
use vio::blk::{Blk, BlkConfig, BlockIo, RawDisk, RawDiskOptions, Transfer, UringRefusal};
use vio::{Interrupt, QueueConfig, QueueDevice};
use vio_faults::scan::{
    ATTACK_BYTES, OVERWRITTEN, SCAN, SCANNING_ID, SCRIBBLE, ScanDisk, ScanReport, own, secret,
};
use vmm::run::worker::{WorkerConfig, WorkerDisk, start};

/// Bytes of the disk, and of the guest's memory.
const DISK: u64 = 2 << 20;
const MEMORY: u64 = 8 << 20;
/// The ring, a header with its status, the data of requests.
const RING: u64 = 0x1_0000;
const HEADER: u64 = 0x2_0000;
const STATUS: u64 = HEADER + 16;
const DATA: u64 = 0x10_0000;
/// Pages that no request names.
const SECRETS: u64 = 0x20_0000;
const PAGES: u64 = 1000;
const PAGE: u64 = 4096;

/// Held by each test: the attack in this process finds the guests of all.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct NullIrq;

impl Interrupt for NullIrq {
    fn queue(&mut self, _: u16) {}
    fn config(&mut self) {}
}

/// A guest of one disk, with secrets in its memory.
struct Guest<D> {
    mem: ArrayMem,
    driver: FakeDriver<ArrayMem>,
    dma: FlatDma,
    device: D,
}

impl<D: QueueDevice> Guest<D> {
    fn new(mut device: D) -> Self {
        let mem = ArrayMem::new(MEMORY);
        let driver: FakeDriver<ArrayMem> = FakeDriver::new(mem.clone(), Gpa::new(RING), 0, 64);
        let rings = driver.config();
        let queue = QueueConfig {
            index: rings.index,
            size: rings.size,
            desc: rings.desc,
            avail: rings.avail,
            used: rings.used,
        };
        let features = device.features();
        device
            .activate(features, &[queue], mem.keep_alive())
            .unwrap();
        let mut guest = Self {
            dma: FlatDma::new(mem.clone()),
            mem,
            driver,
            device,
        };
        for page in 0..PAGES {
            guest.fill(SECRETS + page * PAGE, PAGE, secret);
        }
        guest
    }

    /// Fills memory with a word, of which no copy stays elsewhere but on the stack.
    fn fill(&mut self, at: u64, len: u64, word: fn() -> u64) {
        let bytes: Vec<u8> = (0..len / 8).flat_map(|_| word().to_le_bytes()).collect();
        self.driver.put(at, &bytes);
    }

    /// Makes a request of `len` bytes at `data`.
    fn request(&mut self, kind: u32, offset: u64, data: u64, len: u32) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&(offset / 512).to_le_bytes());
        self.driver.put(HEADER, &header);
        self.driver.put(STATUS, &[0xff]);
        let (header, status) = ((HEADER, 16), (STATUS, 1));
        match kind {
            kind::OUT => self.driver.add(&[header, (data, len)], &[status]),
            _ => self.driver.add(&[header], &[(data, len), status]),
        };
    }

    fn poll(&mut self) {
        let _ = self.device.poll(&mut self.dma, &mut NullIrq, 0);
    }

    /// Polls until the request is over; its status.
    fn complete(&mut self) -> u8 {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.driver.used().is_none() {
            assert!(Instant::now() < deadline, "a request does not end");
            self.poll();
        }
        self.mem.get::<1>(Gpa::new(STATUS))[0]
    }

    /// Has the device model search memory for what the guest has there, and in a request.
    fn scan(&mut self) -> ScanReport {
        self.fill(DATA, PAGE, own);
        self.request(kind::OUT, 0, DATA, PAGE as u32);
        assert_eq!(self.complete(), STATUS_OK);
        // No longer in the guest's memory.
        self.driver.put(DATA, &[0; PAGE as usize]);
        self.request(kind::IN, DISK - SCAN, DATA, ATTACK_BYTES);
        assert_eq!(self.complete(), STATUS_OK);
        let report = self.driver.get(DATA, ScanReport::BYTES);
        ScanReport::from_bytes(&report.try_into().unwrap())
    }

    /// Number of pages whose words are all `word`.
    fn pages_of(&self, word: fn() -> u64) -> u64 {
        let is_whole = |page: &u64| {
            let bytes = self.driver.get(SECRETS + page * PAGE, PAGE as usize);
            bytes.chunks(8).all(|bytes| bytes == word().to_le_bytes())
        };
        (0..PAGES).filter(is_whole).count() as u64
    }

    /// All memory but the ring, the request's header and status, and its data.
    fn rest(&self) -> Vec<u8> {
        let mut rest = self.driver.get(0, MEMORY as usize);
        rest[RING as usize..HEADER as usize + PAGE as usize].fill(0);
        rest[DATA as usize..][..ATTACK_BYTES as usize].fill(0);
        rest
    }
}

fn image() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(DISK).unwrap();
    file
}

/// A disk in a worker that is taken over, without a filter of system calls.
fn worker() -> vio::caged::Caged {
    let disk = WorkerDisk {
        program: env!("CARGO_BIN_EXE_exitless-lab").into(),
        arguments: Vec::new(),
        file: image(),
        read_only: false,
        direct: false,
        id: SCANNING_ID.into(),
        device: BlkConfig::default(),
    };
    let config = WorkerConfig {
        is_unconfined: true,
        restarts: true,
    };
    start("image".into(), disk, config).unwrap()
}

/// The attack on the process that has the guest's memory succeeds: it is one.
#[test]
fn device_model_in_process_finds_and_overwrites_guest_memory() {
    let _alone = alone();
    let options = RawDiskOptions {
        transfer: Transfer::Direct,
        depth: 16,
        ..RawDiskOptions::default()
    };
    let refusal = UringRefusal {
        what: "a test",
        error: io::Error::from_raw_os_error(libc::EPERM),
    };
    let disk = RawDisk::with_threads(image(), options, refusal).unwrap();
    let disk: Box<dyn BlockIo> = Box::new(ScanDisk::new(Box::new(disk)));
    let mut guest = Guest::new(Blk::new(BlkConfig::default(), disk).unwrap());
    let report = guest.scan();
    println!("attack_pages_in_process {}", report.secret_pages);
    println!("attack_bytes_in_process {}", report.overwritten);
    assert!(report.secret_pages >= PAGES, "{report:?}");
    assert_eq!(guest.pages_of(|| OVERWRITTEN), PAGES);
}

#[test]
fn device_model_in_a_worker_finds_its_requests_bytes_alone() {
    let _alone = alone();
    let mut guest = Guest::new(worker());
    let report = guest.scan();
    println!("attack_pages_worker {}", report.secret_pages);
    println!("attack_bytes_worker {}", report.secret_bytes);
    println!("{report:?}");
    assert_eq!((report.secret_pages, report.secret_bytes), (0, 0));
    // It does search, and does overwrite: the request before is in its area still.
    assert!(
        report.own_bytes >= PAGE - u64::from(ATTACK_BYTES),
        "{report:?}"
    );
    assert!(
        report.overwritten >= PAGE - u64::from(ATTACK_BYTES),
        "{report:?}"
    );
    assert_eq!(guest.pages_of(secret), PAGES);
}

/// A worker that overwrites all it shares is ended, and what it has stored stays there.
#[test]
fn worker_that_overwrites_the_area_writes_nothing_of_the_guest() {
    let _alone = alone();
    let mut guest = Guest::new(worker());
    let before = guest.rest();
    guest.request(kind::IN, DISK - SCRIBBLE, DATA, ATTACK_BYTES);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !guest.device.needs_reset() {
        assert!(
            Instant::now() < deadline,
            "a device goes on over an area of ones"
        );
        guest.poll();
    }
    assert!(
        guest.rest() == before,
        "memory outside of its request has changed"
    );
}

/// 1,000 reads into pages that are unmapped while the worker has the request.
#[test]
fn worker_answers_after_an_unmap_reach_nothing() {
    let _alone = alone();
    let mut guest = Guest::new(worker());
    // A read that is left alone arrives.
    guest.request(kind::IN, 0, DATA, 512);
    assert_eq!(guest.complete(), STATUS_OK);
    let mut blocked = 0;
    for page in 0..PAGES {
        let at = SECRETS + page * PAGE;
        loop {
            guest.request(kind::IN, 0, at, 512);
            guest.poll();
            if guest.device.in_flight() == 1 {
                break;
            }
            // Answered within the poll, before anything could be unmapped: it arrives.
            assert_eq!(guest.complete(), STATUS_OK);
            guest.fill(at, PAGE, secret);
        }
        guest.dma.iommu.unmap(Iova::new(at), PAGE);
        blocked += u32::from(guest.complete() != STATUS_OK);
    }
    println!("after_unmap_blocked_of_1000 {blocked}");
    assert_eq!(blocked, 1000);
    assert_eq!(guest.pages_of(secret), PAGES);
}
