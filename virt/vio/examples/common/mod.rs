//! Harness of the two examples: a guest's memory without an IOMMU, seen as another process's, a
//! driver that fills one ring, and laps in which a device serves the chains offered.
//!
//! The driver fills the ring between the timed parts; in split rings it stores the index inside
//! them, once per batch.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use guest_mem::{
    DirectMap, Dma, ForeignRam, ForeignRegion, Gpa, GuestRam, Iova, Perm, PhysMem, SourceId, Stop,
    View,
};
use vio::ring::Ring;
use vio::{QueueConfig, feature};

pub const MIB: u64 = 1 << 20;
/// Entries of the ring.
pub const SIZE: u16 = 1024;
pub const LAPS: usize = 2000;
const DESC: u64 = 0x10_0000;
const DRIVER: u64 = 0x11_0000;
const DEVICE: u64 = 0x12_0000;
const TABLE: u64 = 0x20_0000;
const FEATURES: u64 = feature::VERSION_1 | feature::INDIRECT_DESC | feature::EVENT_IDX;

/// Shape of the chains that the driver offers: header, 4 KiB to be written by the device, status.
#[derive(Clone, Copy)]
pub struct Case {
    pub packed: bool,
    pub indirect: bool,
    pub in_order: bool,
    /// Chains at a time, of those that the ring holds.
    pub batch: u16,
}

impl Case {
    pub fn features(self) -> u64 {
        let packed = if self.packed { feature::RING_PACKED } else { 0 };
        let in_order = if self.in_order { feature::IN_ORDER } else { 0 };
        FEATURES | packed | in_order
    }

    /// Its layout, in a word.
    pub fn layout(self) -> &'static str {
        if self.packed { "packed" } else { "split" }
    }

    fn descs(self) -> u16 {
        if self.indirect { 1 } else { 3 }
    }
}

/// The driver: every lap offers as many chains as the ring holds.
struct Driver<'a> {
    ram: &'a GuestRam,
    case: Case,
    wrap: bool,
    at: u16,
    avail: u16,
}

impl Driver<'_> {
    fn word(&self, gpa: u64, value: u64) {
        let written = self.ram.write(Gpa::new(gpa), &value.to_le_bytes());
        written.expect("inside RAM");
    }

    fn table(&self) {
        let (next, write) = (1u64 << 32, 2u64 << 32);
        let packed = |flags: u64| (flags >> 32) << 48;
        for chain in 0..u64::from(SIZE) {
            let at = TABLE + 64 * chain;
            let entries = [(16, next, 1u64), (4096, next | write, 2), (1, write, 0)];
            for (nth, (len, flags, link)) in (0..).zip(entries) {
                let rest = if self.case.packed {
                    len | packed(flags & write)
                } else {
                    len | flags | link << 48
                };
                self.word(at + 16 * nth, 0x80_0000);
                self.word(at + 16 * nth + 8, rest);
            }
        }
    }

    /// Fills the ring; how many chains that were. Split: the index is left to the timed part.
    fn fill(&mut self) -> u16 {
        let chains = SIZE / self.case.descs();
        for chain in 0..chains {
            for nth in 0..self.case.descs() {
                let last = nth + 1 == self.case.descs();
                let write = if nth == 0 { 0 } else { 2 };
                let (addr, len, flags) = if self.case.indirect {
                    (TABLE + 64 * u64::from(chain), 48, 4)
                } else {
                    (
                        0x80_0000,
                        [16, 4096, 1][usize::from(nth)],
                        write | u64::from(!last),
                    )
                };
                if self.case.packed {
                    let bits = if self.wrap { 1 << 7 } else { 1 << 15 };
                    let at = DESC + 16 * u64::from(self.at);
                    self.word(at, addr);
                    self.word(at + 8, len | u64::from(chain) << 32 | (flags | bits) << 48);
                    self.at += 1;
                    if self.at == SIZE {
                        (self.at, self.wrap) = (0, !self.wrap);
                    }
                } else {
                    let index = u64::from(chain * self.case.descs() + nth);
                    self.word(DESC + 16 * index, addr);
                    self.word(DESC + 16 * index + 8, len | flags << 32 | (index + 1) << 48);
                }
            }
            if !self.case.packed {
                let slot = u64::from(self.avail.wrapping_add(chain) % SIZE);
                let head = (chain * self.case.descs()).to_le_bytes();
                let written = self.ram.write(Gpa::new(DRIVER + 4 + 2 * slot), &head);
                written.expect("inside RAM");
            }
        }
        chains
    }
}

/// A guest's memory: its own handle, and ours.
pub struct World {
    guest: GuestRam,
    pub ram: ForeignRam,
}

impl World {
    pub fn new() -> Result<Self, Box<dyn Error>> {
        let guest = GuestRam::new(&[(Gpa::new(0), 16 * MIB)])?;
        let region = ForeignRegion {
            gpa: Gpa::new(0),
            len: 16 * MIB,
            file: Arc::new(guest.memfd().expect("a file").try_clone_to_owned()?),
            offset: 0,
        };
        let ram = ForeignRam::empty().with_regions(&[region])?;
        Ok(Self { guest, ram })
    }

    /// Returns a ring that was never used.
    pub fn ring(&self, case: Case) -> Result<Ring, Box<dyn Error>> {
        for at in (DESC..TABLE).step_by(8) {
            self.guest.write(Gpa::new(at), &[0; 8]).map_err(stopped)?;
        }
        let config = QueueConfig {
            index: 0,
            size: SIZE,
            desc: Iova::new(DESC),
            avail: Iova::new(DRIVER),
            used: Iova::new(DEVICE),
        };
        Ok(Ring::new(&config, SIZE, case.features())?)
    }

    /// Returns a device's view of the memory.
    pub fn view<'a>(&'a self, direct: &'a mut DirectMap) -> View<'a, DirectMap, ForeignRam> {
        View::new(direct, &self.ram, SourceId::new(0, 1, 0))
    }

    /// Fills a new ring of `case` and has `visit` serve it batch after batch, lap after lap.
    /// Returns nanoseconds per chain.
    ///
    /// # Errors
    /// The error of `visit`, or the driver cannot reach its ring.
    pub fn time(
        &self,
        case: Case,
        mut visit: impl FnMut(&mut View<'_, DirectMap, ForeignRam>, u16) -> Result<(), Box<dyn Error>>,
    ) -> Result<f64, Box<dyn Error>> {
        let mut driver = Driver {
            ram: &self.guest,
            case,
            wrap: true,
            at: 0,
            avail: 0,
        };
        driver.table();
        let (mut direct, mut other) = (DirectMap::new(), DirectMap::new());
        let index = self
            .view(&mut other)
            .window(Iova::new(DRIVER), 4, Perm::Write);
        let index = index.map_err(stopped)?;
        let mut laps = Vec::with_capacity(LAPS);
        for _ in 0..LAPS {
            let chains = driver.fill();
            let start = Instant::now();
            let mut left = chains;
            while left != 0 {
                let batch = left.min(case.batch);
                if !case.packed {
                    driver.avail = driver.avail.wrapping_add(batch);
                    index.store_u16(2, driver.avail);
                }
                visit(&mut self.view(&mut direct), batch)?;
                left -= batch;
            }
            laps.push(start.elapsed().as_nanos() as f64 / f64::from(chains));
        }
        Ok(tenth(laps))
    }
}

/// The tenth percentile: laps without an interruption.
pub fn tenth(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 10]
}

fn stopped(stop: Stop) -> Box<dyn Error> {
    format!("{stop:?}").into()
}
