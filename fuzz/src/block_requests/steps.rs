//! One chain per visit, beside the model.

use std::any::Any;

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Gpa, Iommu, Iova, Perm, PhysMem};
use vio::blk::request::feature as blk_feature;
use vio::blk::{Blk, BlkConfig, MemDisk, SECTOR};
use vio::ring::{Parked, RingPosition};
use vio::{PollBudget, QueueConfig, QueueDevice, feature};

use super::MEMORY;
use super::irq::CountIrq;
use super::model::{Bytes, End, Model, Terms};
use crate::Input;

/// The disk: 16 KiB.
pub(super) const SECTORS: u64 = 32;

/// A disk whose bytes tell their place.
pub(super) fn image() -> Vec<u8> {
    (0..SECTORS * SECTOR)
        .map(|at| (at / SECTOR * 5 + at) as u8)
        .collect()
}

/// The features that a byte chooses.
pub(super) fn features(choice: u8) -> u64 {
    let optional = [
        feature::INDIRECT_DESC,
        feature::EVENT_IDX,
        blk_feature::FLUSH,
        blk_feature::DISCARD,
        blk_feature::WRITE_ZEROES,
        feature::RING_PACKED,
        feature::IN_ORDER,
    ];
    let mut features = feature::VERSION_1;
    for (bit, feature) in optional.into_iter().enumerate() {
        if choice & 1 << bit != 0 {
            features |= feature;
        }
    }
    features
}

/// The guest and its device.
struct World {
    mem: ArrayMem,
    dma: FlatDma,
    blk: Blk,
    irq: CountIrq,
    model: Model,
    /// No page is denied, and the ring lies in memory.
    is_exact: bool,
}

/// Reads the first choices of the input: features, size, whether the disk is read-only, where the
/// ring lies.
fn setup(input: &mut Input<'_>) -> (u64, bool, QueueConfig) {
    let choice = input.u8();
    let shape = input.u8();
    let mut at = |align: u64| Iova::new(u64::from(input.u16()) / align * align);
    let config = QueueConfig {
        index: 0,
        size: 1 << (shape & 7).min(5),
        desc: at(16),
        avail: at(2),
        used: at(4),
    };
    (features(choice & 0x1f), shape & 0x80 != 0, config)
}

pub(super) fn run(mut input: Input<'_>) {
    let (features, read_only, queue) = setup(&mut input);
    let mem = ArrayMem::new(MEMORY as u64);
    let disk = MemDisk::new(image(), 4, read_only);
    let config = BlkConfig {
        queue_size: 32,
        ..Default::default()
    };
    let serial = config.serial;
    let mut blk = Blk::new(config, Box::new(disk)).expect("the configuration is valid");
    let features = features & blk.features();
    if blk.activate(features, &[queue], mem.keep_alive()).is_err() {
        return;
    }
    let terms = Terms {
        features,
        size: queue.size,
        desc: queue.desc.raw() as usize,
        avail: queue.avail.raw() as usize,
        used: queue.used.raw() as usize,
        sectors: SECTORS,
        read_only,
        serial,
    };
    let entries = usize::from(queue.size);
    let is_exact = [
        terms.desc + 16 * entries,
        terms.avail + 6 + 2 * entries,
        terms.used + 6 + 8 * entries,
    ]
    .iter()
    .all(|&end| end <= MEMORY);
    let mut world = World {
        dma: FlatDma::new(mem.clone()),
        mem,
        blk,
        irq: CountIrq::default(),
        model: Model {
            terms,
            memory: Bytes::new(Vec::new()),
            disk: Bytes::new(image()),
            next_avail: 0,
            next_used: 0,
            seen: 0,
        },
        is_exact,
    };
    while !input.is_empty() {
        world.step(&mut input);
    }
    world.end();
}

impl World {
    fn store(&mut self, at: u16, bytes: &[u8]) {
        let at = usize::from(at).min(MEMORY);
        let len = bytes.len().min(MEMORY - at);
        self.mem.put(Gpa::new(at as u64), &bytes[..len]);
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 9 {
            0 => {
                let at = input.u16();
                let len = input.u8();
                let bytes = input.bytes(len.into());
                self.store(at, bytes);
            }
            1 => self.offer(input),
            2..=4 => self.visit(),
            5 => self.blk.kick(0),
            6 => {
                self.arm();
            }
            7 => {
                self.is_exact = false;
                let page = u64::from(input.u8() % 4) * 4096;
                let perm = if input.u8() & 1 == 0 {
                    Perm::Read
                } else {
                    Perm::Write
                };
                self.dma.iommu.deny(Iova::new(page), 4096, perm);
            }
            _ => {
                self.dma.iommu.allow_all();
            }
        }
    }

    /// A chain as a driver makes it, of what the input says: its buffers, a header, and an
    /// available entry.
    fn offer(&mut self, input: &mut Input<'_>) {
        let terms = self.model.terms;
        let size = terms.size;
        let head = input.u8();
        let header_at = input.u16() % MEMORY as u16;
        let kind = u32::from(input.u8());
        let sector = u64::from(input.u8());
        let count = input.u8() % 6;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.store(header_at, &header);
        let mut put = |nth: u8, addr: u64, len: u32, flags: u16| {
            let index = (u16::from(head) + u16::from(nth)) % size;
            let next = (index + 1) % size;
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&addr.to_le_bytes());
            bytes[8..12].copy_from_slice(&len.to_le_bytes());
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            bytes[14..].copy_from_slice(&next.to_le_bytes());
            self.store((terms.desc as u64 + 16 * u64::from(index)) as u16, &bytes);
        };
        put(0, header_at.into(), 16, u16::from(count != 0));
        for nth in 1..=count {
            let addr = input.u16().into();
            let len = input.u16();
            // The upper bit: the device writes it.
            let write = if len & 0x8000 != 0 { 2 } else { 0 };
            let more = u16::from(nth != count);
            put(nth, addr, (len & 0x7fff).into(), write | more);
        }
        let idx = self.avail_idx();
        let slot = idx % size;
        let entry = (terms.avail as u64 + 4 + 2 * u64::from(slot)) as u16;
        self.store(entry, &(u16::from(head) % size).to_le_bytes());
        self.store(
            (terms.avail as u64 + 2) as u16,
            &idx.wrapping_add(1).to_le_bytes(),
        );
    }

    fn avail_idx(&self) -> u16 {
        let mut bytes = [0; 2];
        // Outside of memory the value does not matter.
        let at = Gpa::new(self.model.terms.avail as u64 + 2);
        let _ = self.mem.read(at, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY];
        self.mem
            .read(Gpa::new(0), &mut bytes)
            .expect("all of it is RAM");
        bytes
    }

    /// Returns the content of the disk; may store a flag in the used ring.
    fn disk(&mut self) -> Vec<u8> {
        self.blk.disarm(&mut self.dma);
        let disk: &dyn Any = self.blk.backend();
        let disk: &MemDisk = disk.downcast_ref().expect("it was made with one");
        disk.bytes().to_vec()
    }

    fn parked(&mut self) -> Option<Parked> {
        self.blk.ring(0).expect("it was activated").parked()
    }

    fn position(&mut self) -> (u16, u16) {
        match self.blk.ring(0).expect("it was activated").position() {
            RingPosition::Split {
                next_avail,
                next_used,
            } => (next_avail, next_used),
            RingPosition::Packed { .. } => panic!("a packed ring"),
        }
    }

    fn visit(&mut self) {
        // NO_NOTIFY is stored now, before the look, and need not be stored by the visit.
        let disk = self.disk();
        let may_run = self.parked().is_none() && !self.blk.needs_reset();
        let before = self.irq.clone();
        let was_broken = self.blk.needs_reset();
        self.model.memory = Bytes::new(self.contents());
        self.model.disk = Bytes::new(disk);
        let _ = self
            .blk
            .visit(&mut self.dma, &mut self.irq, &mut PollBudget::new(0, 1));
        let memory = self.contents();
        let parked = self.parked();
        let disk = self.disk();
        if !self.is_exact {
            self.check_disk_loosely(&disk);
            let (next_avail, next_used) = self.position();
            self.model.next_avail = next_avail;
            self.model.next_used = next_used;
            return;
        }
        let end = if may_run {
            self.model.look()
        } else {
            End::Nothing
        };
        assert_eq!(self.blk.needs_reset(), was_broken || end == End::Broken);
        if end == End::Broken {
            assert_eq!(self.irq.config, before.config + 1);
        } else if !was_broken {
            let position = (self.model.next_avail, self.model.next_used);
            assert_eq!(self.position(), position, "{end:?}");
            let is_faulted = end == End::Fault || !may_run;
            assert_eq!(parked.is_some(), is_faulted, "{end:?}");
            let sent = self.irq.queues - before.queues;
            match end {
                End::Served(None) => assert!(sent <= 1, "{sent} for one request"),
                _ => assert_eq!(sent, u64::from(end == End::Served(Some(true))), "{end:?}"),
            }
        }
        self.model.memory.check(&memory, "memory");
        self.model.disk.check(&disk, "the disk");
    }

    /// Pages are denied: what was done is not known, but only one chain can have been looked at.
    fn check_disk_loosely(&mut self, disk: &[u8]) {
        let old = &self.model.disk.bytes;
        if old == disk {
            return;
        }
        assert!(!self.model.terms.read_only, "a read-only disk was written");
        let first = (0..disk.len()).find(|&at| old[at] != disk[at]);
        let last = (0..disk.len()).rfind(|&at| old[at] != disk[at]);
        let (Some(first), Some(last)) = (first, last) else {
            return;
        };
        // Every chain that the driver could have meant, with what it says of the disk.
        let is_meant = (0..self.model.terms.size).any(|head| {
            self.model
                .may_change(head)
                .is_some_and(|range| range.contains(&first) && range.contains(&last))
        });
        assert!(is_meant, "no request says {first:#x} to {last:#x}");
    }

    fn arm(&mut self) {
        if self.parked().is_some() || self.blk.needs_reset() {
            return;
        }
        self.blk.arm(&mut self.dma);
        let seen = self.model.seen;
        let has_work = self.blk.has_work(&mut self.dma);
        if !self.is_exact {
            return;
        }
        // A look at the index, as in a visit.
        let (next_avail, _) = self.position();
        let idx = self.avail_idx();
        if seen == next_avail {
            if idx.wrapping_sub(next_avail) > self.model.terms.size {
                assert!(self.blk.needs_reset() && has_work);
                // To be announced by the next visit.
                let config = self.irq.config;
                let _ = self
                    .blk
                    .visit(&mut self.dma, &mut self.irq, &mut PollBudget::new(0, 1));
                assert_eq!(self.irq.config, config + 1);
                return;
            }
            self.model.seen = idx;
        }
        assert_eq!(has_work, self.model.seen != next_avail);
    }

    fn end(mut self) {
        assert_eq!(self.blk.in_flight(), 0);
        assert_eq!(self.dma.iommu.leases().len(), 0);
        self.blk.reset();
        assert!(!self.blk.needs_reset());
    }
}
