//! A device that is killed at each store of its journal, with the real trackers of
//! `vhost_user::inflight`, beside a driver that accounts for every request: none is lost, none is
//! returned twice, none comes back as another.
//!
//! A death is an unwinding out of the store. The ring's own stores between two of the journal's are
//! taken back afterwards, from the last on, as if the death had come earlier: all of them lie
//! between `advance` and `commit`.

mod journals;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

use vhost_user::backend::RingLayout;
use vhost_user::inflight::{
    MemRegion, Packed, PackedPosition, PackedRing, PackedSizes, Split, queue_region_len,
};

use self::journals::{KillCountdown, Killed, PackedJournal, SplitJournal, SurvivingRegion};
use super::world::{PACKED, segments};
use super::*;
use crate::fake_driver::{AnyDriver, Buffer};
use crate::ring::{Ring, RingStart, Token};

/// Decisions of a test, from a seed.
struct Choices(u64);

impl Choices {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound.max(1)
    }
}

struct Request {
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
    id: u16,
    executed: bool,
    returned: bool,
}

/// Memory, a driver that lives on, and the process that serves it, which may be dead.
struct Machine {
    countdown: KillCountdown,
    region: Arc<Mutex<MemRegion>>,
    features: u64,
    size: u16,
    base: u16,
    driver: AnyDriver<ArrayMem>,
    requests: Vec<Request>,
    dma: FlatDma,
    chain: Chain,
    ring: Option<Ring>,
    held: Vec<(Token, usize)>,
    deaths: u32,
}

/// The flags of a packed ring's descriptors, for recovery.
struct RingFlags<'a> {
    driver: &'a AnyDriver<ArrayMem>,
    countdown: KillCountdown,
}

impl PackedRing for RingFlags<'_> {
    fn flags(&self, at: u16) -> u16 {
        let gpa = self.driver.config().desc.raw() + 16 * u64::from(at) + 14;
        self.driver.mem().get_u16(Gpa::new(gpa))
    }

    fn set_flags(&mut self, at: u16, flags: u16) {
        self.countdown.store();
        let gpa = self.driver.config().desc.raw() + 16 * u64::from(at) + 14;
        self.driver.mem().put_u16(Gpa::new(gpa), flags);
    }
}

impl Machine {
    fn new(size: u16, features: u64, base: u16) -> Self {
        let layout = match features & feature::RING_PACKED {
            0 => RingLayout::Split,
            _ => RingLayout::Packed,
        };
        let memory = ArrayMem::new(1 << 20);
        let mut driver = AnyDriver::new(memory.clone(), Gpa::new(RINGS), 0, size, features);
        driver.start_at(base);
        Self {
            countdown: KillCountdown::default(),
            region: Arc::new(Mutex::new(MemRegion::new(queue_region_len(layout, size)))),
            features,
            size,
            base,
            driver,
            requests: Vec::new(),
            dma: FlatDma::new(memory),
            chain: Chain::new(),
            ring: None,
            held: Vec::new(),
            deaths: 0,
        }
    }

    /// Runs `step` in the process; if it dies, nothing of the process is left. Whether it lives.
    fn live(&mut self, step: impl FnOnce(&mut Self)) -> bool {
        match catch_unwind(AssertUnwindSafe(|| step(self))) {
            Ok(()) => return true,
            Err(payload) if payload.is::<Killed>() => {}
            Err(payload) => resume_unwind(payload),
        }
        self.ring = None;
        self.held.clear();
        self.deaths += 1;
        false
    }

    /// A new process takes over.
    fn start(&mut self) {
        let region = SurvivingRegion::new(&self.countdown, &self.region);
        let mut ring = Ring::new(&self.driver.config(), self.size, self.features).unwrap();
        match &self.driver {
            AnyDriver::Split(driver) => {
                let used = driver.used_idx();
                let (tracker, left) = Split::recover(region, self.size, used).unwrap();
                let start = RingStart::Split {
                    next_avail: left.next_avail,
                    next_used: used,
                    replay: left.heads,
                };
                ring.start(start).unwrap();
                ring.set_journal(Box::new(SplitJournal::new(tracker, &self.countdown)));
            }
            AnyDriver::Packed(_) => {
                let sizes = PackedSizes {
                    desc_num: self.size,
                    ring_size: self.size,
                };
                let base = PackedPosition {
                    idx: (self.base & 0x7fff) % self.size,
                    wrap: self.base >> 15 != 0,
                };
                let mut flags = RingFlags {
                    driver: &self.driver,
                    countdown: self.countdown.clone(),
                };
                let (tracker, left) = Packed::recover(region, sizes, base, &mut flags).unwrap();
                let position = |at: PackedPosition| (at.idx, at.wrap);
                let start = RingStart::Packed {
                    avail: position(left.avail),
                    used: position(left.used),
                    replay: left.requests.into_iter().map(journals::replay).collect(),
                };
                ring.start(start).unwrap();
                ring.set_journal(Box::new(PackedJournal::new(tracker, &self.countdown)));
            }
        }
        self.ring = Some(ring);
    }

    fn submit(&mut self, choices: &mut Choices) {
        let number = self.requests.len() as u64 + 1;
        let (read, write) = (1 + choices.below(2) as u64, choices.below(3) as u64);
        let indirect = choices.below(4) == 0;
        let need = if indirect { 1 } else { (read + write) as usize };
        if self.driver.free() < need {
            return;
        }
        let at = |nth: u64| (number << 24 | nth << 8, 8);
        let readable: Vec<Buffer> = (0..read).map(at).collect();
        let writable: Vec<Buffer> = (read..read + write).map(at).collect();
        let id = if indirect {
            // As many tables as the ring has entries, and more: none is reused too early.
            let table = Gpa::new(0x8_0000 + 0x80 * (number % 0x1000));
            self.driver.stage_indirect(table, &readable, &writable)
        } else {
            self.driver.stage(&readable, &writable)
        };
        self.requests.push(Request {
            readable,
            writable,
            id,
            executed: false,
            returned: false,
        });
        self.driver.publish();
    }

    fn reap(&mut self) {
        while let Some((id, len)) = self.driver.used() {
            let at = self
                .requests
                .iter()
                .position(|own| own.id == id && !own.returned);
            let own = &mut self.requests[at.expect("returned twice")];
            assert!(own.executed, "returned before it was executed");
            assert_eq!(len, own.writable.len() as u32 * 8);
            own.returned = true;
        }
    }

    fn fetch(&mut self, count: usize) {
        for _ in 0..count {
            let ring = self.ring.as_mut().expect("alive");
            if !ring.peek(&mut self.dma, &mut self.chain).unwrap() {
                break;
            }
            let readable = segments(self.chain.readable());
            let number = (readable[0].0 >> 24) as usize - 1;
            let own = &mut self.requests[number];
            assert!(!own.returned, "a returned request is taken again");
            assert_eq!(readable, own.readable);
            assert_eq!(segments(self.chain.writable()), own.writable);
            assert_eq!(self.chain.head(), own.id);
            let token = ring.advance(&self.chain);
            // Behind the journal's stores, so that a death in them is one before.
            own.executed = true;
            self.held.push((token, number));
        }
    }

    fn complete(&mut self, count: usize, choices: &mut Choices) {
        let ring = self.ring.as_mut().expect("alive");
        for _ in 0..count.min(self.held.len()) {
            let (token, number) = self.held.swap_remove(choices.below(self.held.len()));
            let len = self.requests[number].writable.len() as u32 * 8;
            ring.stage(&mut self.dma, token, len).unwrap();
        }
        self.countdown.snapshot(ring_memory(&self.driver));
        let published = catch_unwind(AssertUnwindSafe(|| ring.publish(&mut self.dma).unwrap()));
        if let Err(payload) = published {
            if payload.is::<Killed>() {
                self.take_back_stores(choices);
            }
            resume_unwind(payload);
        }
    }

    /// If the death came at the first store behind the ring's own, it may have come before some of
    /// those.
    fn take_back_stores(&mut self, choices: &mut Choices) {
        let Some(before) = self.countdown.died_at_commit() else {
            return;
        };
        let after = ring_memory(&self.driver);
        let at = self.driver.config().desc.raw();
        let changed = |range: std::ops::Range<usize>| {
            let words = range
                .step_by(8)
                .filter(|&at| before[at..at + 8] != after[at..at + 8]);
            words.collect::<Vec<_>>()
        };
        let put = |word: usize| {
            let bytes = &before[word..word + 8];
            self.driver.put(at + word as u64, bytes);
        };
        match &self.driver {
            AnyDriver::Split(driver) => {
                // The last one is the index; the driver does not see those before it.
                if choices.below(2) == 0 {
                    let used = (driver.config().used.raw() - at) as usize & !7;
                    put(used);
                }
            }
            AnyDriver::Packed(_) => {
                // In the ring's order from the first, which was stored last.
                let mut words = changed(0..usize::from(self.size) * 16);
                let first = usize::from(self.countdown.used_before()) * 16 + 8;
                let split = words
                    .iter()
                    .position(|&word| word == first)
                    .expect("the first");
                words.rotate_left(split);
                let others = words.split_off(1);
                if choices.below(3) != 0 {
                    put(first);
                    let kept = choices.below(others.len() + 1);
                    others[kept..].iter().for_each(|&word| put(word));
                }
            }
        }
    }

    /// A run whose first process dies at its `deaths[0]`-th store, the second at its
    /// `deaths[1]`-th, and so on; the last one lives.
    fn run(&mut self, choices: &mut Choices, deaths: &[u32]) -> u32 {
        let mut deaths = deaths.iter().copied();
        self.countdown.ends_at(deaths.next());
        let mut alive = self.live(Self::start);
        for _ in 0..60 {
            while !alive {
                // The guest runs on.
                for _ in 0..choices.below(3) {
                    self.reap();
                    self.submit(choices);
                }
                self.countdown.ends_at(deaths.next());
                alive = self.live(Self::start);
            }
            let count = 1 + choices.below(4);
            alive = match choices.below(8) {
                0..3 => {
                    self.submit(choices);
                    true
                }
                3 | 4 => self.live(|own| own.fetch(count)),
                5 | 6 => self.live(|own| own.complete(count, choices)),
                _ => {
                    self.reap();
                    true
                }
            };
        }
        while !alive {
            self.countdown.ends_at(deaths.next());
            alive = self.live(Self::start);
        }
        self.countdown.ends_at(None);
        self.fetch(usize::MAX);
        self.complete(usize::MAX, choices);
        self.reap();
        assert!(self.requests.iter().all(|own| own.returned), "lost");
        // And in the end nothing is left for a successor.
        self.start();
        let ring = self.ring.as_mut().expect("alive");
        assert_eq!(
            (ring.replaying(), ring.has_available(&mut self.dma)),
            (0, Ok(false))
        );
        self.countdown.stored()
    }
}

fn ring_memory(driver: &AnyDriver<ArrayMem>) -> Vec<u8> {
    let base = driver.config().desc;
    driver.mem().get::<0x400>(Gpa::new(base.raw())).to_vec()
}

fn killed_at_each_store(features: u64, sizes: &[u16]) {
    let (mut stores, mut deaths) = (0, 0);
    for &size in sizes {
        for seed in 0..4 {
            let machine = || {
                // So that indices wrap soon, in either lap.
                let base = if features & feature::RING_PACKED == 0 {
                    65530
                } else {
                    (seed as u16) << 13 | 3
                };
                (Machine::new(size, features, base), Choices(seed * 77 + 1))
            };
            let (mut one, mut choices) = machine();
            let all = one.run(&mut choices, &[]);
            stores += all;
            for first in 1..=all {
                for second in [
                    None,
                    Some(1),
                    Some(2),
                    Some(1 + (first * 7 + seed as u32) % 23),
                ] {
                    let when: Vec<u32> = std::iter::once(first).chain(second).collect();
                    let (mut own, mut choices) = machine();
                    own.run(&mut choices, &when);
                    deaths += own.deaths;
                }
            }
        }
    }
    assert!(
        stores > 200 && deaths > 3 * stores,
        "{stores} stores, {deaths} deaths"
    );
}

#[test]
fn no_request_is_lost_or_returned_twice_wherever_a_split_device_is_killed() {
    killed_at_each_store(ALL, &[1, 4, 8]);
}

#[test]
fn no_request_is_lost_or_returned_twice_wherever_a_packed_device_is_killed() {
    killed_at_each_store(PACKED, &[1, 5, 8]);
}

#[test]
fn nor_with_in_order() {
    killed_at_each_store(ALL | feature::IN_ORDER, &[4]);
    killed_at_each_store(PACKED | feature::IN_ORDER, &[5]);
}
