//! What a block device costs per request: `cargo run --release -p vio --example blk_cost`.
//!
//! 4 KiB reads of a null and of a RAM disk, batches of 1 and 32, split and packed: one [`Blk::visit`] per batch. Same
//! arrangement as `ring_cost`, and the same warning: all on one core, so no line comes from another cache. Prints the
//! tenth percentile of 2000 laps, nanoseconds per request.

use std::sync::Arc;
use std::time::Instant;

use guest_mem::{
    DirectMap, Dma, ForeignRam, ForeignRegion, Gpa, GuestRam, Iova, Perm, PhysMem, SourceId, View,
};
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, NullDisk};
use vio::ring::Ring;
use vio::{Interrupt, QueueConfig, VirtioDevice, Visit, feature};

const MIB: u64 = 1 << 20;
const SIZE: u16 = 1024;
const LAPS: usize = 2000;
const DESC: u64 = 0x10_0000;
const DRIVER: u64 = 0x11_0000;
const DEVICE: u64 = 0x12_0000;
const TABLE: u64 = 0x20_0000;
const FEATURES: u64 = feature::VERSION_1 | feature::INDIRECT_DESC | feature::EVENT_IDX;

#[derive(Clone, Copy)]
struct Case {
    packed: bool,
    indirect: bool,
    in_order: bool,
    batch: u16,
}

impl Case {
    fn features(self) -> u64 {
        let packed = if self.packed { feature::RING_PACKED } else { 0 };
        let in_order = if self.in_order { feature::IN_ORDER } else { 0 };
        FEATURES | packed | in_order
    }

    fn descs(self) -> u16 {
        if self.indirect { 1 } else { 3 }
    }
}

/// The driver: every lap offers as many chains as the ring holds.
struct Driver {
    ram: GuestRam,
    case: Case,
    wrap: bool,
    at: u16,
    avail: u16,
}

impl Driver {
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
                let slot = u64::from((self.avail + chain) % SIZE);
                let head = (chain * self.case.descs()).to_le_bytes();
                let written = self.ram.write(Gpa::new(DRIVER + 4 + 2 * slot), &head);
                written.expect("inside RAM");
            }
        }
        chains
    }
}

/// The tenth percentile: laps without an interruption.
fn tenth(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 10]
}

/// Nobody to interrupt.
struct Quiet;

impl Interrupt for Quiet {
    fn queue(&mut self, _queue: u16) {}
    fn config(&mut self) {}
}

fn run(
    ram: &ForeignRam,
    guest: &GuestRam,
    case: Case,
    disk: Box<dyn BlockIo>,
) -> Result<f64, Box<dyn std::error::Error>> {
    for at in (DESC..TABLE).step_by(8) {
        guest
            .write(Gpa::new(at), &[0; 8])
            .map_err(|stop| format!("{stop:?}"))?;
    }
    let config = QueueConfig {
        index: 0,
        size: SIZE,
        desc: Iova::new(DESC),
        avail: Iova::new(DRIVER),
        used: Iova::new(DEVICE),
    };
    let mut blk = Blk::new(
        BlkConfig {
            queue_size: SIZE,
            packed: true,
            ..BlkConfig::default()
        },
        disk,
    )?;
    blk.begin(case.features(), ram.keep_alive())?;
    blk.add_queue(Ring::new(&config, SIZE, case.features())?)?;
    let mut direct = DirectMap::new();
    let source = SourceId::new(0, 1, 0);
    let mut driver = Driver {
        ram: guest.clone(),
        case,
        wrap: true,
        at: 0,
        avail: 0,
    };
    driver.table();
    let mut other = DirectMap::new();
    let index = View::new(&mut other, ram, source).window(Iova::new(DRIVER), 4, Perm::Write);
    let index = index.map_err(|stop| format!("{stop:?}"))?;
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
            let before = blk.stats().requests;
            let cost = if matches!(batch, 1) {
                1
            } else {
                u64::from(batch) * 600
            };
            let _ = blk.visit(
                &mut View::new(&mut direct, ram, source),
                &mut Quiet,
                &mut Visit::new(0, cost),
            );
            let done = (blk.stats().requests - before) as u16;
            left -= done.min(left);
        }
        laps.push(start.elapsed().as_nanos() as f64 / f64::from(chains));
    }
    Ok(tenth(laps))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let guest = GuestRam::new(&[(Gpa::new(0), 16 * MIB)])?;
    let file = Arc::new(guest.memfd().try_clone_to_owned()?);
    let ram = ForeignRam::empty().with_regions(&[ForeignRegion {
        gpa: Gpa::new(0),
        len: 16 * MIB,
        file,
        offset: 0,
    }])?;
    for packed in [false, true] {
        for batch in [1, 32] {
            let case = Case {
                packed,
                indirect: false,
                in_order: false,
                batch,
            };
            let null = run(&ram, &guest, case, Box::new(NullDisk::new(MIB)))?;
            let memory = run(
                &ram,
                &guest,
                case,
                Box::new(MemDisk::new(vec![0; MIB as usize], 256, false)),
            )?;
            let layout = if packed { "packed" } else { "split" };
            println!("{layout:6} batch {batch:2}   null {null:6.1} ns   ram {memory:6.1} ns");
        }
    }
    Ok(())
}
