//! Any cache against the simplest record of mappings: the users of each, and since when it is
//! stale.
//!
//! The world plays the mapper: it makes and destroys mappings and checks every answer of the cache.
//! After every step the cache's answers must fit the world, and its contract and counters must fit
//! the world's record.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use address::PhysAddr;
use iova::{Access, IovaPfn, IovaRange};

use super::reuse::{Batch, Expired, Key, Progress, Released, ReuseCache, RiskContract};

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Live {
        users: u64,
    },
    Idle {
        since_ns: u64,
    },
    /// In a batch.
    Going {
        since_ns: u64,
    },
}

/// Rules for the answers of a structure, beyond those of safety.
#[derive(Clone, Copy)]
pub struct Rules {
    /// Bounds that it keeps.
    pub contract: RiskContract,
    /// A live mapping may be given to a second user.
    pub is_sharing: bool,
    /// Whether it finds every idle mapping of a key.
    pub finds_all_idle: bool,
    /// Nothing is refused or goes before it is due unless the bound is reached.
    pub keeps_while_it_can: bool,
}

/// A cache, and its mapper's record.
pub struct World<C> {
    cache: C,
    rules: Rules,
    /// Nothing is evicted before, unless the bound is reached.
    residency_ns: u64,
    mappings: BTreeMap<u64, (Key, State)>,
    /// One entry per user.
    users: Vec<u64>,
    now_ns: u64,
    fresh: u64,
    own: Batch,
    foreign: Batch,
    /// Another thread has torn some down since the owner last handled a notice.
    has_notice: bool,
}

/// One step of the mapper. Those called `Outside` are another core's, by the cache's expirer if it
/// has one.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// A map of this key.
    Map(Key),
    /// An unmap of the user with this number, modulo their number.
    Unmap(usize),
    /// Time that passes, ns.
    Wait(u64),
    /// A tick.
    Expire,
    /// A tick.
    ExpireOutside,
    /// Everything idle goes.
    Drain,
    /// Everything idle goes.
    DrainOutside,
    /// A teardown of what has gone.
    TearDown,
    /// A teardown of what has gone.
    TearDownOutside,
}

impl Step {
    /// Choices of [`chosen`](Self::chosen), by which steps have their shares.
    pub const CHOICES: u32 = 95;

    /// The step that `choice`, below [`CHOICES`](Self::CHOICES), stands for; any `number` will do.
    /// Small ones map.
    pub fn chosen(choice: u32, number: u64) -> Self {
        match choice {
            0..30 => Self::Map(key(number)),
            30..60 => Self::Unmap(number as usize % 1000),
            60..68 => Self::Wait(number % 60),
            68 => Self::Wait(1000 + number % 4000),
            69..73 => Self::Expire,
            73..77 => Self::ExpireOutside,
            77 => Self::Drain,
            78 => Self::DrainOutside,
            79..91 => Self::TearDown,
            _ => Self::TearDownOutside,
        }
    }
}

/// One of few pages, so that they meet again; accesses and sizes that must not alias.
fn key(number: u64) -> Key {
    let access = [Access::Read, Access::ReadWrite][(number / 24 % 2) as usize];
    let at = PhysAddr::new((number % 12) << 12);
    Key::new(at, 1 + number / 12 % 2, access).expect("a few pages")
}

impl<C: ReuseCache> World<C> {
    /// A world without a mapping, around an empty cache. Batches have `room` entries.
    pub fn new(cache: C, rules: Rules, residency_ns: u64, room: usize) -> Self {
        Self {
            cache,
            rules,
            residency_ns,
            mappings: BTreeMap::new(),
            users: Vec::new(),
            now_ns: 0,
            fresh: 0,
            own: Batch::with_room(room),
            foreign: Batch::with_room(room),
            has_notice: false,
        }
    }

    fn idle(&self) -> impl Iterator<Item = (u64, Key, u64)> + '_ {
        let all = self.mappings.iter();
        all.filter_map(|(&number, &(key, state))| match state {
            State::Idle { since_ns } => Some((number, key, since_ns)),
            _ => None,
        })
    }

    fn stale(&self) -> u64 {
        let is_live = |state: &State| matches!(state, State::Live { .. });
        let stale = self.mappings.values().filter(|(_, state)| !is_live(state));
        stale.count() as u64
    }

    fn map(&mut self, key: Key) {
        let had_idle = self.idle().any(|(_, k, _)| k == key);
        let number = match self.cache.acquire(key, self.now_ns) {
            Some(range) => {
                let number = range.first().raw();
                let (known, state) = self.mappings.get_mut(&number).expect("it is mapped");
                assert_eq!((*known, range.pages()), (key, key.pages()));
                *state = match *state {
                    State::Idle { .. } => State::Live { users: 1 },
                    State::Live { users } if self.rules.is_sharing => {
                        State::Live { users: users + 1 }
                    }
                    other => panic!("given out while {other:?}"),
                };
                number
            }
            None => {
                assert!(!(had_idle && self.rules.finds_all_idle), "{key:?} is idle");
                self.fresh += 4;
                let range =
                    IovaRange::new(IovaPfn::new(self.fresh), key.pages()).expect("in the space");
                let state = State::Live { users: 1 };
                self.mappings.insert(self.fresh, (key, state));
                self.cache.insert(key, range, self.now_ns);
                self.fresh
            }
        };
        self.users.push(number);
    }

    fn unmap(&mut self, at: usize) {
        if self.users.is_empty() {
            return;
        }
        if core::mem::take(&mut self.has_notice) {
            self.cache.torn_down(&mut Batch::with_room(1), self.now_ns);
        }
        let number = self.users.swap_remove(at % self.users.len());
        let (key, state) = self.mappings[&number];
        let State::Live { users } = state else {
            panic!("{state:?} has a user");
        };
        let range = IovaRange::new(IovaPfn::new(number), key.pages()).expect("in the space");
        let before = self.own.entries().len();
        let stale_before = self.stale();
        let released = self.cache.release(key, range, self.now_ns, &mut self.own);
        match released {
            Released::InUse => {
                assert!(users > 1);
                let state = State::Live { users: users - 1 };
                self.mappings.insert(number, (key, state));
            }
            Released::Kept => {
                assert_eq!(users, 1);
                let since_ns = self.now_ns;
                self.mappings
                    .insert(number, (key, State::Idle { since_ns }));
            }
            Released::TearDown => {
                assert_eq!(users, 1);
                self.mappings.remove(&number);
                let max_stale = self.rules.contract.max_stale;
                if self.rules.keeps_while_it_can {
                    assert_eq!(Some(stale_before), max_stale, "refused with room");
                }
            }
        }
        let peak = stale_before + u64::from(released == Released::Kept);
        self.has_gone(before, peak);
    }

    /// The owner's batch has grown since it had `before` entries.
    fn has_gone(&mut self, before: usize, peak: u64) {
        let gained = self.own.entries()[before..].to_vec();
        let max_stale = self.rules.contract.max_stale;
        if let Some(bound) = max_stale {
            assert!(peak <= bound, "{peak} stale, {bound} allowed");
        }
        for expired in &gained {
            let oldest = self.idle().map(|(_, _, since_ns)| since_ns).min();
            let is_early = self.now_ns - expired.since_ns < self.residency_ns;
            if self.rules.keeps_while_it_can {
                assert_eq!(oldest, Some(expired.since_ns), "not the oldest");
                assert!(!is_early || Some(peak) == max_stale, "gone with room");
            }
            self.goes(expired);
        }
    }

    fn goes(&mut self, expired: &Expired) {
        let number = expired.range.first().raw();
        let (_, state) = self.mappings.get_mut(&number).expect("it is mapped");
        let since_ns = expired.since_ns;
        assert_eq!(*state, State::Idle { since_ns });
        *state = State::Going { since_ns };
    }

    fn tear_down(&mut self, is_foreign: bool) {
        let batch = if is_foreign {
            &mut self.foreign
        } else {
            &mut self.own
        };
        for expired in batch.entries() {
            self.mappings.remove(&expired.range.first().raw());
        }
        if is_foreign {
            if let Some(expirer) = self.cache.expirer() {
                expirer.torn_down(batch, self.now_ns);
                self.has_notice = true;
            }
        } else {
            self.cache.torn_down(batch, self.now_ns);
        }
        assert!(batch.is_empty());
    }

    /// Expires or drains, from outside or as the owner. Whatever is due must be gone when the
    /// answer is `Done`.
    fn sweep(&mut self, is_foreign: bool, is_drain: bool) {
        let (now_ns, residency_ns) = (self.now_ns, self.residency_ns);
        let promised_ns = self.rules.contract.max_age_ns.unwrap_or(u64::MAX);
        let batch = if is_foreign {
            &mut self.foreign
        } else {
            &mut self.own
        };
        let before = batch.entries().len();
        let progress = match (is_foreign.then(|| self.cache.expirer()), is_drain) {
            (Some(None), _) => return,
            (Some(Some(expirer)), false) => expirer.expire(now_ns, batch),
            (Some(Some(expirer)), true) => expirer.drain(batch),
            (None, false) => self.cache.expire(now_ns, batch),
            (None, true) => self.cache.drain(batch),
        };
        let is_full = batch.is_full();
        let gained = batch.entries()[before..].to_vec();
        for expired in &gained {
            let age_ns = now_ns - expired.since_ns;
            let least_ns = if is_foreign {
                promised_ns
            } else {
                residency_ns
            };
            assert!(is_drain || age_ns >= least_ns, "gone after {age_ns} ns");
            self.goes(expired);
        }
        match progress {
            Progress::More => assert!(is_full),
            Progress::Done => {
                let left = self
                    .idle()
                    .find(|&(_, _, since_ns)| is_drain || now_ns - since_ns >= promised_ns);
                assert_eq!(left, None, "left at {now_ns}");
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Map(key) => self.map(key),
            Step::Unmap(at) => self.unmap(at),
            Step::Wait(ns) => self.now_ns += ns,
            Step::Expire => self.sweep(false, false),
            Step::ExpireOutside => self.sweep(true, false),
            Step::Drain => self.sweep(false, true),
            Step::DrainOutside => self.sweep(true, true),
            Step::TearDown => self.tear_down(false),
            Step::TearDownOutside => self.tear_down(true),
        }
        let counts = self.cache.counts();
        assert_eq!(counts.stale, self.stale());
        assert!(counts.stale_max >= counts.stale);
        let bound = self.rules.contract.max_stale;
        assert!(bound.is_none_or(|bound| counts.stale_max <= bound));
    }

    /// Ends every use and every idleness: nothing may be left.
    fn end(mut self) {
        while !self.users.is_empty() {
            self.unmap(0);
        }
        for is_foreign in [true, false] {
            self.tear_down(is_foreign);
        }
        while self.stale() > 0 {
            self.sweep(false, true);
            self.tear_down(false);
        }
        assert!(self.mappings.is_empty(), "{:?}", self.mappings);
        assert_eq!(self.cache.counts().entries, 0);
    }

    /// Runs these steps, then ends every use.
    ///
    /// # Panics
    /// At the first answer of the cache that does not fit.
    pub fn run(mut self, steps: &[Step]) {
        for &step in steps {
            self.step(step);
        }
        self.end();
    }
}

/// Earliest age at which an owner expires a mapping: three quarters of 100 ns.
pub const EARLIEST_NS: u64 = 75;

/// At most `quota` mappings, each for 100 ns.
pub fn idle_only(quota: usize) -> Rules {
    Rules {
        contract: RiskContract {
            max_stale: Some(quota as u64),
            max_age_ns: Some(100),
        },
        is_sharing: false,
        finds_all_idle: true,
        keeps_while_it_can: true,
    }
}
