//! A hostile driver on one ring: bytes anywhere, also between the device's single accesses; ends in
//! any order; pages that go; journals; and successors that take the ring over where a killed
//! process left it.
//!
//! Invariants, for any content of memory:
//!
//! * nothing panics, and no call does more than a ring's worth of work (the harness would time
//!   out);
//! * a stop parks the ring, and a violation parks it until the end;
//! * a chain that is handed out has buffers that are not empty, do not wrap, and of fewer than 4
//!   GiB in all;
//! * taken and not published are never more than the ring has entries, and exactly those that the
//!   harness holds;
//! * the ring writes nothing but its own areas, and there, where the driver does not interfere,
//!   exactly the used elements of chains that were taken and staged;
//! * the position moves by what was taken and published, and by nothing else;
//! * a journal is notified of every request once, batches are closed before they are published, and
//!   a successor that starts from it takes exactly what was in flight first.

mod journal;
mod used;

use guest_mem::{Iova, Perm};
use vio::ring::{Chain, Parked, Ring, RingPosition, RingStart, RingStop, Token, Watch};
use vio::{QueueConfig, feature};

use crate::racing::Racing;
use crate::{Input, Script};
use journal::Record;
use used::Staged;

/// Guest memory in bytes, from address 0.
const MEMORY: usize = 0x3000;
/// Largest ring.
const MAX_SIZE: u16 = 64;

/// Flags in the first byte of the input.
const INDIRECT: u8 = 1;
const EVENT_IDX: u8 = 2;
const IN_ORDER: u8 = 4;
const JOURNAL: u8 = 8;
const LARGE_PAGES: u8 = 16;

/// A taken chain.
struct Held {
    token: Token,
    head: u16,
    writable: u32,
}

struct World {
    ring: Ring,
    dma: Racing,
    chain: Chain,
    config: QueueConfig,
    features: u64,
    held: Vec<Held>,
    /// Staged and not shown, in order.
    staged: Vec<Staged>,
    record: Option<Record>,
    /// Taken by the predecessor, to come first.
    replay: Vec<u16>,
    watch: Option<Watch>,
    /// The driver's stores when the first of `staged` was staged.
    stored_at_stage: usize,
    /// Some page may be out of reach.
    is_denied: bool,
}

/// The body of both targets.
pub(crate) fn run(data: &[u8], is_packed: bool) {
    let mut input = Input::new(data);
    let choice = input.u8();
    let size = u16::from(input.u8());
    let mut at = |align: u64| Iova::new(u64::from(input.u16()) / align * align);
    let config = QueueConfig {
        index: 3,
        size,
        desc: at(16),
        avail: at(if is_packed { 4 } else { 2 }),
        used: at(4),
    };
    let mut features = feature::VERSION_1;
    for (bit, feature) in [
        (INDIRECT, feature::INDIRECT_DESC),
        (EVENT_IDX, feature::EVENT_IDX),
        (IN_ORDER, feature::IN_ORDER),
    ] {
        if choice & bit != 0 {
            features |= feature;
        }
    }
    if is_packed {
        features |= feature::RING_PACKED;
    }
    let Ok(mut ring) = Ring::new(&config, MAX_SIZE, features) else {
        let is_size = size.is_power_of_two() || (is_packed && size != 0);
        assert!(!is_size || size > MAX_SIZE, "refused: {config:?}");
        return;
    };
    let mut dma = Racing::new(MEMORY);
    if choice & LARGE_PAGES != 0 {
        dma.flat.iommu.set_page(1 << 20);
    }
    let record = (choice & JOURNAL != 0).then(Record::default);
    if let Some(record) = &record {
        ring.set_journal(record.journal());
    }
    dma.flat.iommu.flush();
    let mut world = World {
        ring,
        dma,
        chain: Chain::new(),
        config,
        features,
        held: Vec::new(),
        staged: Vec::new(),
        record,
        replay: Vec::new(),
        watch: None,
        stored_at_stage: 0,
        is_denied: false,
    };
    while !input.is_empty() {
        world.step(&mut input);
        world.check();
    }
}

impl World {
    fn is_packed(&self) -> bool {
        self.ring.is_packed()
    }

    fn is_in_order(&self) -> bool {
        self.features & feature::IN_ORDER != 0
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 16 {
            0 | 1 => {
                let at = input.u16();
                let len = input.u8() % 65;
                self.dma.store(at.into(), input.bytes(len.into()));
            }
            2 => self.offer(input),
            3..=5 => self.take(),
            6 | 7 => self.stage(input),
            8 | 9 => self.publish(),
            10 => {
                let count = input.u8() % 4 + 1;
                self.dma.plan_from(input, count, 63);
            }
            11 => self.notify(input.u8()),
            12 => self.deny(input.u8()),
            13 => {
                self.ring.kick();
                assert_ne!(self.ring.parked(), Some(Parked::Fault));
            }
            14 => self.succeed(),
            _ => self.restart(input),
        }
    }

    /// Whether the ring may be used now; a stop must have parked it.
    fn stopped<T>(&self, result: Result<T, RingStop>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(RingStop::Access(_)) => {
                assert_eq!(self.ring.parked(), Some(Parked::Fault));
                None
            }
            Err(RingStop::Violation(violation)) => {
                assert_eq!(self.ring.parked(), Some(Parked::Violation), "{violation}");
                assert!(self.ring.is_faulted());
                None
            }
        }
    }

    fn is_parked(&self) -> bool {
        self.ring.parked().is_some()
    }

    /// A chain as a driver would make it, at the place where the ring looks next.
    fn offer(&mut self, input: &mut Input<'_>) {
        let at = input.u8();
        let shape = input.u8();
        let count = u16::from(shape & 3) + 1;
        let size = self.config.size;
        let desc = self.config.desc.raw() as u32;
        let position = self.ring.position();
        let first = match position {
            RingPosition::Split { .. } => u16::from(at) % size,
            RingPosition::Packed { avail, .. } => avail.0,
        };
        for nth in 0..count {
            let index = (first + nth) % size;
            let mut bytes = [0; 16];
            bytes[..2].copy_from_slice(&input.u16().to_le_bytes());
            bytes[8..10].copy_from_slice(&input.u16().to_le_bytes());
            let more = u16::from(nth + 1 != count);
            let write = u16::from(shape >> (2 + nth) & 1) << 1;
            let indirect = u16::from(shape >> 6 & 1) << 2;
            let flags = more | write | indirect;
            match position {
                RingPosition::Split { .. } => {
                    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
                    bytes[14..].copy_from_slice(&((index + 1) % size).to_le_bytes());
                }
                RingPosition::Packed { avail, .. } => {
                    let wrap = avail.1 == (first + nth < size);
                    let own: u16 = if wrap { 1 << 7 } else { 1 << 15 };
                    bytes[12..14].copy_from_slice(&u16::from(at).to_le_bytes());
                    bytes[14..].copy_from_slice(&(flags | own).to_le_bytes());
                }
            }
            self.dma
                .store(desc.saturating_add(16 * u32::from(index)), &bytes);
        }
        if let RingPosition::Split { .. } = position {
            let avail = self.config.avail.raw();
            let idx = self.dma.load(avail + 2);
            let slot = u64::from(idx % size);
            self.dma
                .store((avail + 4 + 2 * slot) as u32, &first.to_le_bytes());
            self.dma
                .store(avail as u32 + 2, &idx.wrapping_add(1).to_le_bytes());
        }
    }

    fn take(&mut self) {
        if self.is_parked() {
            return;
        }
        let before = self.ring.position();
        let found = self.ring.peek(&mut self.dma, &mut self.chain);
        assert_eq!(self.ring.position(), before, "peek consumes nothing");
        if self.stopped(found) != Some(true) {
            return;
        }
        self.check_chain();
        let head = self.chain.head();
        let replayed = (!self.replay.is_empty()).then(|| self.replay.remove(0));
        if let Some(replayed) = replayed {
            assert_eq!(head, replayed, "what a predecessor left comes first");
        }
        let token = self.ring.advance(&self.chain);
        self.check_advance(before, replayed.is_some());
        if let Some(record) = &self.record
            && replayed.is_none()
            && !record.knows(head, &self.ring)
        {
            // It was full: the ring rests for ever, and the chain counts as taken.
            assert_eq!(self.ring.parked(), Some(Parked::Violation));
        }
        self.held.push(Held {
            token,
            head,
            writable: self.chain.writable().len(),
        });
    }

    fn check_chain(&self) {
        let (readable, writable) = (self.chain.readable(), self.chain.writable());
        let mut total = 0_u64;
        for buffers in [&readable, &writable] {
            let mut sum = 0_u64;
            for segment in buffers.segments() {
                assert_ne!(segment.len, 0);
                let last = segment.iova.raw().checked_add(u64::from(segment.len) - 1);
                assert!(last.is_some(), "{segment:?} wraps");
                sum += u64::from(segment.len);
            }
            assert_eq!(sum, u64::from(buffers.len()));
            total += sum;
        }
        assert!(total != 0 && total <= u64::from(u32::MAX));
        assert!(self.chain.descriptors() <= 1024 + usize::from(self.config.size));
        if !self.is_packed() {
            assert!(self.chain.head() < self.config.size);
        }
    }

    /// The position moved by one chain.
    fn check_advance(&self, before: RingPosition, was_replayed: bool) {
        match (before, self.ring.position()) {
            (
                RingPosition::Split {
                    next_avail: old,
                    next_used: old_used,
                },
                RingPosition::Split {
                    next_avail,
                    next_used,
                },
            ) => {
                let moved = next_avail.wrapping_sub(old);
                assert_eq!((moved, next_used), (u16::from(!was_replayed), old_used));
            }
            (
                RingPosition::Packed {
                    avail: old,
                    used: old_used,
                },
                RingPosition::Packed { avail, used },
            ) => {
                assert_eq!(used, old_used);
                assert!(avail != old || was_replayed);
                assert!(avail.0 < self.config.size);
            }
            other => panic!("{other:?}"),
        }
    }

    fn stage(&mut self, input: &mut Input<'_>) {
        let (which, much) = (input.u8(), input.u8());
        if self.is_parked() || self.held.is_empty() {
            return;
        }
        let at = usize::from(which) % self.held.len();
        let Held {
            token,
            head,
            writable,
        } = self.held[at];
        let len = match much {
            0..=127 => writable,
            other => u32::from(other).min(writable),
        };
        let before = self.ring.staged();
        if self.staged.is_empty() {
            self.stored_at_stage = self.dma.stored();
        }
        let staged = self.ring.stage(&mut self.dma, token, len);
        if self.stopped(staged).is_none() {
            assert_eq!(self.ring.staged(), before);
            return;
        }
        self.held.remove(at);
        self.staged.push(Staged { head, len });
        if !self.is_in_order() {
            assert_eq!(usize::from(self.ring.staged()), self.staged.len());
        }
    }

    fn publish(&mut self) {
        if self.is_parked() {
            return;
        }
        let before = self.ring.position();
        let staged = self.ring.staged();
        let stores = self.dma.stored();
        let old = self.dma.contents();
        if let Some(record) = &self.record {
            record.batch_begins();
        }
        let published = self.ring.publish(&mut self.dma);
        let shown = self.stopped(published);
        let is_shown = shown.is_some();
        if let Some(record) = &self.record {
            record.batch_ended(is_shown && staged != 0, staged);
        }
        if !is_shown || staged == 0 {
            assert_eq!(self.ring.position(), before);
            return;
        }
        assert_eq!(self.ring.staged(), 0);
        let is_quiet = self.dma.stored() == stores;
        if let Some(is_wanted) = shown
            && is_quiet
        {
            self.check_interrupt(before, is_wanted);
        }
        if self.is_in_order() {
            // Which of those staged were shown only the order of taking tells; the journal and the
            // counts check it.
            self.staged.drain(..usize::from(staged));
        } else {
            if is_quiet {
                self.check_used(before, &old);
            }
            self.staged.clear();
        }
    }

    /// Checks the interrupt where the driver did not interfere: it is wanted exactly if the
    /// driver's event field, or its flags, say so (virtio 1.2 §2.7.7, §2.8.10); also if they cannot
    /// be read.
    fn check_interrupt(&self, before: RingPosition, is_wanted: bool) {
        let has_event_idx = self.features & feature::EVENT_IDX != 0;
        let area = self.config.avail.raw();
        let size = u64::from(self.config.size);
        let (end, is_packed) = match before {
            RingPosition::Split { .. } => (area + 6 + 2 * size, false),
            RingPosition::Packed { .. } => (area + 4, true),
        };
        if end > MEMORY as u64 || self.is_denied {
            return;
        }
        let want = match (before, self.ring.position()) {
            (RingPosition::Split { next_used: old, .. }, RingPosition::Split { next_used, .. }) => {
                if has_event_idx {
                    let event = self.dma.load(area + 4 + 2 * size);
                    // Among those just shown.
                    let shown = next_used.wrapping_sub(old);
                    (0..shown).any(|nth| old.wrapping_add(nth) == event)
                } else {
                    self.dma.load(area) & 1 == 0
                }
            }
            (RingPosition::Packed { used: old, .. }, RingPosition::Packed { used, .. }) => {
                let (event, flags) = (self.dma.load(area), self.dma.load(area + 2) & 3);
                let event = (event & 0x7fff, event & 0x8000 != 0);
                match flags {
                    1 => false,
                    2 if has_event_idx && event.0 < self.config.size => {
                        let mut at = old;
                        let mut is_passed = false;
                        while at != used {
                            is_passed |= at == event;
                            at = if u64::from(at.0) + 1 == size {
                                (0, !at.1)
                            } else {
                                (at.0 + 1, at.1)
                            };
                        }
                        is_passed
                    }
                    _ => true,
                }
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(is_wanted, want, "an interrupt, packed: {is_packed}");
    }

    fn notify(&mut self, how: u8) {
        if self.is_parked() {
            return;
        }
        match how % 4 {
            0 => {
                let armed = self.ring.arm(&mut self.dma);
                if self.stopped(armed).is_none() {
                    return;
                }
                let found = self.ring.has_available(&mut self.dma);
                self.stopped(found);
            }
            1 => {
                let disarmed = self.ring.disarm(&mut self.dma);
                self.stopped(disarmed);
            }
            2 => self.ring.watch_in(&mut self.dma, &mut self.watch),
            _ => {
                // A hint, which must not touch memory that is gone.
                let _ = self.watch.as_ref().is_some_and(Watch::fires);
            }
        }
    }

    fn deny(&mut self, what: u8) {
        self.is_denied = match what >> 4 {
            0..=7 => true,
            8..=9 => self.is_denied,
            _ => false,
        };
        let page = Iova::new(u64::from(what % 3) * 4096);
        let iommu = &mut self.dma.flat.iommu;
        match what >> 4 {
            0..=3 => iommu.deny(page, 4096, Perm::Read),
            4..=7 => iommu.deny(page, 4096, Perm::Write),
            8..=9 => iommu.flush(),
            _ => iommu.allow_all(),
        }
    }

    fn fresh(&mut self) -> Ring {
        self.held.clear();
        self.staged.clear();
        self.watch = None;
        Ring::new(&self.config, MAX_SIZE, self.features).expect("it was made like that before")
    }

    /// The process is killed, and another one goes on from ring and journal.
    fn succeed(&mut self) {
        let Some(record) = &self.record else { return };
        if record.is_refusing() {
            return;
        }
        let (start, heads) = record.start(self.ring.position());
        let mut ring = self.fresh();
        let Some(record) = &self.record else { return };
        ring.start(start).expect("what was taken can be replayed");
        ring.set_journal(record.journal());
        self.ring = ring;
        self.replay = heads;
        let want = self.replay.len();
        assert_eq!(usize::from(self.ring.replaying()), want);
    }

    /// Another ring, that starts wherever the input says.
    fn restart(&mut self, input: &mut Input<'_>) {
        let count = input.u8() % 5;
        let (avail, used) = (input.u16(), input.u16());
        let replay: Vec<u16> = (0..count).map(|_| input.u8().into()).collect();
        let start = if self.is_packed() {
            let split = |at: u16| (at & 0x7fff, at & 0x8000 != 0);
            RingStart::Packed {
                avail: split(avail),
                used: split(used),
                replay: Vec::new(),
            }
        } else {
            RingStart::Split {
                next_avail: avail,
                next_used: used,
                replay: replay.clone(),
            }
        };
        let mut ring = self.fresh();
        let replay = if ring.start(start).is_ok() && !self.is_packed() {
            replay
        } else {
            Vec::new()
        };
        if self.record.is_some() {
            let record = Record::with(&replay);
            ring.set_journal(record.journal());
            self.record = Some(record);
        }
        self.ring = ring;
        self.replay = replay;
    }

    /// Checks the invariants.
    fn check(&mut self) {
        let size = self.config.size;
        let (in_flight, staged) = (self.ring.in_flight(), self.ring.staged());
        assert!(in_flight <= size && staged <= in_flight);
        assert_eq!(usize::from(in_flight), self.held.len() + self.staged.len());
        assert_eq!(usize::from(self.ring.replaying()), self.replay.len());
        let is_idle = in_flight == 0 && self.replay.is_empty();
        assert_eq!(self.ring.save().is_some(), is_idle);
        let own = self.own_areas();
        self.dma.check_unchanged(&own);
    }

    /// Returns the areas that the ring may write.
    fn own_areas(&self) -> Vec<std::ops::Range<usize>> {
        let entries = usize::from(self.config.size);
        let at = |iova: Iova, len: usize| {
            let at = iova.raw() as usize;
            at..at + len
        };
        if self.is_packed() {
            vec![at(self.config.desc, 16 * entries), at(self.config.used, 4)]
        } else {
            vec![at(self.config.used, 6 + 8 * entries)]
        }
    }
}

/// Valid traffic: every combination of features, chains of every shape, two laps, ends in both
/// orders, a race, and a successor.
pub(crate) fn seeds(is_packed: bool) -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for choice in 0..32 {
        for size in if is_packed { [3, 8] } else { [4, 8] } {
            seeds.push(seed(choice, size));
        }
    }
    seeds
}

fn seed(choice: u8, size: u8) -> Vec<u8> {
    let mut script = Script::new();
    script.u8(choice).u8(size);
    script.u16(0).u16(0xc00).u16(0x1004);
    for round in 0..6 {
        for nth in 0..2 {
            let count = (round + nth) % 3;
            script.u8(2).u8(nth).u8(count | 8 << (round % 2));
            for _ in 0..=count {
                script.u16(0x2000).u16(64);
            }
            script.u8(3);
        }
        if round == 3 {
            script.u8(14).u8(3).u8(3);
            script.u8(10).u8(0).u8(3).u16(2).u8(2).u16(0xffff);
        }
        script.u8(11).u8(0).u8(11).u8(2).u8(11).u8(1);
        script
            .u8(6)
            .u8(round % 2)
            .u8(0)
            .u8(8)
            .u8(6)
            .u8(0)
            .u8(200)
            .u8(8);
        script.u8(12).u8(0x90);
    }
    script.end()
}
