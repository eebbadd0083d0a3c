//! A guest of one caged disk, which knows what each sector must hold.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::Result;
use fake_driver::FakeDriver;
use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Gpa, Iommu, PhysMem};
use seeded::Random;
use vio::blk::BlkConfig;
use vio::blk::request::{STATUS_OK, kind};
use vio::caged::Caged;
use vio::{Interrupt, QueueConfig, QueueDevice};
use vmm::run::worker::{WorkerConfig, WorkerDisk, start};

const EXITLESS: &str = env!("CARGO_BIN_EXE_exitless");
/// Sectors of the disk.
pub const SECTORS: u64 = 4096;
/// Requests at a time.
const DEPTH: u64 = 16;
/// Header, status and data of request `n`.
const HEADERS: u64 = 0x2_0000;
const DATA: u64 = 0x10_0000;
/// Bytes of a request's data at most: more than a slot of the area has.
const LONGEST: u64 = 192 << 10;

struct NullIrq;

impl Interrupt for NullIrq {
    fn queue(&mut self, _: u16) {}
    fn config(&mut self) {}
}

/// A request that is out.
#[derive(Clone, Copy)]
struct Made {
    place: u64,
    is_write: bool,
    sector: u64,
    sectors: u64,
    byte: u8,
}

pub struct Guest {
    mem: ArrayMem,
    driver: FakeDriver<ArrayMem>,
    pub device: Caged,
    dma: FlatDma,
    out: BTreeMap<u16, Made>,
    /// Contents of each sector as last acknowledged.
    model: Vec<u8>,
}

impl Guest {
    pub fn start(file: &File, config: WorkerConfig) -> Result<Self> {
        let disk = WorkerDisk {
            program: EXITLESS.into(),
            arguments: Vec::new(),
            file: file.try_clone()?,
            read_only: false,
            direct: false,
            id: "test".into(),
            device: BlkConfig::default(),
        };
        let mut device = start("image".into(), disk, config)?;
        let mem = ArrayMem::new(8 << 20);
        let driver: FakeDriver<ArrayMem> = FakeDriver::new(mem.clone(), Gpa::new(0x1_0000), 0, 256);
        let rings = driver.config();
        let queue = QueueConfig {
            index: rings.index,
            size: rings.size,
            desc: rings.desc,
            avail: rings.avail,
            used: rings.used,
        };
        let features = device.features();
        device.activate(features, &[queue], mem.keep_alive())?;
        Ok(Self {
            dma: FlatDma::new(mem.clone()),
            mem,
            driver,
            device,
            out: BTreeMap::new(),
            model: vec![0; SECTORS as usize],
        })
    }

    pub fn leases(&self) -> usize {
        self.dma.iommu.leases().len()
    }

    /// Makes requests, no two of which touch one sector.
    pub fn make_some(&mut self, random: &mut Random) {
        let share = SECTORS / DEPTH;
        for place in 0..DEPTH {
            let sectors = 1 + random.below((LONGEST / 512).min(share));
            let sector = place * share + random.below(share - sectors + 1);
            let made = Made {
                place,
                is_write: random.below(3) != 0,
                sector,
                sectors,
                byte: random.bits() as u8,
            };
            self.make(made);
        }
    }

    fn make(&mut self, made: Made) {
        let header_at = HEADERS + made.place * 64;
        let data = DATA + made.place * LONGEST;
        let kind = if made.is_write { kind::OUT } else { kind::IN };
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&made.sector.to_le_bytes());
        self.driver.put(header_at, &header);
        self.driver.put(header_at + 48, &[0xff]);
        let len = made.sectors * 512;
        if made.is_write {
            self.driver.put(data, &vec![made.byte; len as usize]);
        }
        let (header, status) = ((header_at, 16), (header_at + 48, 1));
        let data = (data, len as u32);
        let head = match made.is_write {
            true => self.driver.add(&[header, data], &[status]),
            false => self.driver.add(&[header], &[data, status]),
        };
        self.out.insert(head, made);
    }

    /// Polls the device once, and checks what it shows.
    pub fn poll(&mut self) {
        let _ = self.device.poll(&mut self.dma, &mut NullIrq, 0);
        while let Some((head, _)) = self.driver.used() {
            let made = self.out.remove(&head).expect("a request that is out");
            let status = self.mem.get::<1>(Gpa::new(HEADERS + made.place * 64 + 48))[0];
            assert_eq!(status, STATUS_OK);
            let sectors = made.sector as usize..(made.sector + made.sectors) as usize;
            if made.is_write {
                self.model[sectors].fill(made.byte);
                continue;
            }
            let data = DATA + made.place * LONGEST;
            let read = self.driver.get(data, made.sectors as usize * 512);
            for (read, &byte) in read.chunks(512).zip(&self.model[sectors]) {
                assert!(
                    read.iter().all(|read| *read == byte),
                    "sector {}",
                    made.sector
                );
            }
        }
    }

    /// Polls until everything is acknowledged.
    pub fn finish(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.out.is_empty() {
            self.poll();
            std::thread::yield_now();
            assert!(Instant::now() < deadline, "{:?}", self.device.stats());
        }
    }

    /// Compares the file with what was acknowledged.
    pub fn check(&self, file: &File) {
        let mut bytes = vec![0; self.model.len() * 512];
        file.read_exact_at(&mut bytes, 0).unwrap();
        for (sector, (bytes, wanted)) in bytes.chunks(512).zip(&self.model).enumerate() {
            assert!(bytes.iter().all(|byte| byte == wanted), "sector {sector}");
        }
    }
}
