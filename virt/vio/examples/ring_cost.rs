//! What a ring costs the device per request: `cargo run --release -p vio --example ring_cost [NAME]`.
//!
//! Cases `layout/shape/batch`: has_available, peek, advance and stage of each of `batch` chains, then one publish; shape
//! is `direct3` (header, data, status, as a block device has them) or `indirect3` (the same in a table). The memory is a
//! guest's without an IOMMU, seen through a `View`; the driver fills the ring between the timed parts (in split rings it
//! stores the index inside them, once per batch). All on one core, so no line comes from another cache: a floor, not a
//! forecast. Prints the tenth percentile of 2000 laps, nanoseconds per request and per look at
//! a ring with nothing new; no test: a shared machine's times say little.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use guest_mem::{
    DirectMap, Dma, ForeignRam, ForeignRegion, Gpa, GuestRam, Iova, Perm, PhysMem, SourceId, View,
};
use vio::ring::{Chain, Ring, RingStop};
use vio::{QueueConfig, feature};

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

/// One batch.
#[inline(never)]
fn visit<D: Dma>(
    ring: &mut Ring,
    dma: &mut D,
    chain: &mut Chain,
    batch: u16,
) -> Result<u16, RingStop> {
    let mut done = 0;
    while done < batch && ring.peek(dma, chain)? {
        let token = ring.advance(chain);
        ring.stage(dma, black_box(token), chain.writable().len())?;
        done += 1;
    }
    black_box(ring.publish(dma)?);
    Ok(done)
}

fn run(
    ram: &ForeignRam,
    guest: &GuestRam,
    case: Case,
) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let refused = |stop: RingStop| format!("{stop:?}");
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
    let mut ring = Ring::new(&config, SIZE, case.features())?;
    let mut chain = Chain::new();
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
            let mut view = View::new(&mut direct, ram, source);
            let done = visit(&mut ring, &mut view, &mut chain, batch).map_err(refused)?;
            assert_eq!(done, batch);
            left -= batch;
        }
        laps.push(start.elapsed().as_nanos() as f64 / f64::from(chains));
    }
    let mut idle = Vec::with_capacity(LAPS);
    for _ in 0..LAPS {
        let start = Instant::now();
        for _ in 0..1000 {
            let mut view = View::new(&mut direct, ram, source);
            assert!(!black_box(ring.has_available(&mut view).map_err(refused)?));
        }
        idle.push(start.elapsed().as_nanos() as f64 / 1000.0);
    }
    Ok((tenth(laps), tenth(idle)))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let guest = GuestRam::new(&[(Gpa::new(0), 16 * MIB)])?;
    let region = ForeignRegion {
        gpa: Gpa::new(0),
        len: 16 * MIB,
        file: Arc::new(guest.memfd().try_clone_to_owned()?),
        offset: 0,
    };
    let ram = ForeignRam::empty().with_regions(&[region])?;
    let filter = std::env::args().nth(1).unwrap_or_default();
    for packed in [false, true] {
        for (indirect, in_order) in [(false, false), (true, false), (false, true)] {
            for batch in [1, 32] {
                let case = Case {
                    packed,
                    indirect,
                    in_order,
                    batch,
                };
                let layout = if packed { "packed" } else { "split" };
                let shape = if indirect { "indirect3" } else { "direct3" };
                let order = if in_order { "/in_order" } else { "" };
                let name = format!("{layout}/{shape}{order}/{batch}");
                if !name.contains(&filter) {
                    continue;
                }
                let (ns, idle) = run(&ram, &guest, case)?;
                println!("{name:<32} {ns:8.2} ns {idle:8.2} ns");
            }
        }
    }
    Ok(())
}
