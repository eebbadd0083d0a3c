//! Requests in flight, ends in any order, and a driver that does not wait.

use guest_mem::{Iommu, Iova, Perm, PhysMem};
use vio::blk::{Blk, BlkConfig, Transfer};
use vio::ring::{Ring, RingPosition};
use vio::{Activity, CancelReason, PollBudget, QueueConfig, QueueDevice, Service, StoppedQueue};

use super::MEMORY;
use super::irq::CountIrq;
use super::steps::{SECTORS, features};
use crate::Input;
use crate::held_disk::{Control, HeldDisk};
use crate::offer::{Memory, offer};
use crate::racing::Racing;

/// Visits within which a device without interference is idle, unless it feeds itself.
const PATIENCE: usize = 200;

struct World {
    dma: Racing,
    blk: Blk,
    control: Control,
    irq: CountIrq,
    features: u64,
    config: QueueConfig,
    now_ns: u64,
}

pub(super) fn run(mut input: Input<'_>) {
    let features_choice = input.u8();
    let disk_choice = input.u8();
    let mut at = |align: u64| Iova::new(u64::from(input.u16()) / align * align);
    let (desc, avail, used) = (at(16), at(4), at(4));
    let size = u16::from(input.u8() % 33);
    let transfer = match disk_choice & 3 {
        0 => Transfer::Direct,
        1 => Transfer::Nothing,
        _ => Transfer::Bounce,
    };
    let part = if disk_choice & 4 == 0 { 4 << 20 } else { 100 };
    let depth = u32::from(disk_choice >> 4 & 7) + 1;
    let (disk, control) = HeldDisk::new(transfer, disk_choice & 8 != 0, SECTORS, depth, part);
    let config = BlkConfig {
        queue_size: 32,
        packed: true,
        ..Default::default()
    };
    let blk = Blk::new(config, Box::new(disk)).expect("the configuration is valid");
    let mut world = World {
        dma: Racing::new(MEMORY),
        features: features(features_choice) & blk.features(),
        blk,
        control,
        irq: CountIrq::default(),
        config: QueueConfig {
            index: 0,
            size,
            desc,
            avail,
            used,
        },
        now_ns: 0,
    };
    if disk_choice & 0x80 != 0 {
        world.dma.flat.iommu.set_page(1 << 16);
    }
    if !world.begin() {
        return;
    }
    while !input.is_empty() {
        world.step(&mut input);
    }
    world.end();
}

struct RacingMemory<'a>(&'a Racing);

impl Memory for RacingMemory<'_> {
    fn store(&mut self, at: u64, bytes: &[u8]) {
        if let Ok(at) = at.try_into() {
            self.0.store(at, bytes);
        }
    }

    fn load(&self, at: u64) -> u16 {
        self.0.load(at)
    }
}

impl World {
    fn begin(&mut self) -> bool {
        let keep = self.dma.mem().keep_alive();
        self.blk
            .begin(self.features, keep)
            .expect("offered features");
        match Ring::new(&self.config, 32, self.features) {
            Ok(ring) => {
                self.blk.add_queue(ring).expect("there is none yet");
                true
            }
            Err(_) => false,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        self.now_ns += 1000;
        match input.u8() % 12 {
            0 => {
                let at = input.u16();
                let len = input.u8();
                self.dma.store(at.into(), input.bytes(len.into()));
            }
            1 | 2 => self.offer(input),
            3 | 4 => {
                let _ = self.visit(u64::from(input.u8()) * 100);
            }
            5 => {
                let (which, how) = (input.u8(), input.u8());
                self.control.end_one(which, how);
            }
            6 => self.control.behave(input.u8()),
            7 => self.blk.kick(0),
            8 => {
                self.blk.arm(&mut self.dma);
                let _ = self.blk.has_work(&mut self.dma);
                self.blk.disarm(&mut self.dma);
            }
            9 => {
                let count = input.u8() % 4;
                self.dma.plan_from(input, count, u8::MAX);
            }
            10 => {
                let what = input.u8();
                let page = Iova::new(u64::from(what % 4) * 4096);
                match what >> 5 {
                    0 => self.dma.flat.iommu.deny(page, 4096, Perm::Read),
                    1 => self.dma.flat.iommu.deny(page, 4096, Perm::Write),
                    2 => self.dma.flat.iommu.flush(),
                    _ => self.dma.flat.iommu.allow_all(),
                }
            }
            _ => match input.u8() % 5 {
                0 => {
                    self.stop();
                }
                1 => self.blk.pause_queue(0, true),
                2 => self.blk.pause_queue(0, false),
                3 => {
                    self.blk.cancel(CancelReason::Unmap);
                }
                _ => self.reset(),
            },
        }
        self.check();
    }

    fn offer(&mut self, input: &mut Input<'_>) {
        let is_packed = self.features & vio::feature::RING_PACKED != 0;
        let dma = &self.dma;
        offer(input, &self.config, is_packed, &mut RacingMemory(dma));
    }

    fn visit(&mut self, budget: u64) -> Activity {
        let mut visit = PollBudget::new(self.now_ns, budget);
        self.blk.visit(&mut self.dma, &mut self.irq, &mut visit)
    }

    /// Checks the invariants.
    fn check(&mut self) {
        let size = self.config.size;
        let in_flight = self.blk.in_flight();
        if let Some(ring) = self.blk.ring(0) {
            assert!(u32::from(ring.in_flight()) >= in_flight);
            assert!(ring.in_flight() <= size && ring.staged() <= ring.in_flight());
        }
    }

    /// Stops the ring, and starts it where it stood.
    fn stop(&mut self) {
        let stopped = self.blk.stop_queue(0, &mut self.dma, &mut self.irq);
        let Some(StoppedQueue { position, .. }) = stopped else {
            return;
        };
        let mut ring =
            Ring::new(&self.config, 32, self.features).expect("it was made like that before");
        let start = match position {
            RingPosition::Split {
                next_avail,
                next_used,
            } => vio::ring::RingStart::Split {
                next_avail,
                next_used,
                replay: Vec::new(),
            },
            RingPosition::Packed { avail, used } => vio::ring::RingStart::Packed {
                avail,
                used,
                replay: Vec::new(),
            },
        };
        ring.start(start).expect("where a ring stood it can start");
        self.blk.add_queue(ring).expect("the other one is gone");
    }

    /// Waits for what is in flight.
    fn drain(&mut self) {
        self.dma.plan(Vec::new());
        self.control.behave(0);
        for _ in 0..PATIENCE {
            self.blk.set_service(Service::Stopped);
            let _ = self.visit(0);
            if self.blk.in_flight() == 0 {
                return;
            }
            self.blk.cancel(CancelReason::Reset);
            while self.control.end_one(0, 0) {}
        }
        panic!("requests in flight do not end: {:?}", self.blk.stats());
    }

    fn reset(&mut self) {
        self.drain();
        assert_eq!(self.dma.flat.iommu.leases().len(), 0, "a lease is left");
        self.blk.reset();
        assert!(self.begin());
    }

    /// Ends the run: once neither the driver nor the disk interferes, everything must end.
    fn end(mut self) {
        self.dma.plan(Vec::new());
        self.dma.flat.iommu.allow_all();
        self.control.behave(0);
        self.blk.pause_queue(0, false);
        self.blk.kick(0);
        let mut visits = 0;
        while !self.blk.needs_reset() {
            while self.control.end_one(0, 0) {}
            if self.visit(10_000) == Activity::Idle && self.blk.in_flight() == 0 {
                break;
            }
            visits += 1;
            if visits == PATIENCE {
                // Its own used elements lie where the driver's available entries do: it may go on
                // for ever.
                break;
            }
        }
        let is_whole = !self.blk.needs_reset() && visits != PATIENCE;
        if let Some(ring) = self.blk.ring(0)
            && is_whole
            && ring.parked().is_none()
        {
            assert_eq!((ring.in_flight(), ring.staged()), (0, 0), "not returned");
        }
        self.drain();
        assert_eq!(self.dma.flat.iommu.leases().len(), 0, "a lease is left");
        self.blk.reset();
    }
}
