//! The engine against a model that has no caches: 1000 sequences of 60 to 180 operations, about
//! 120,000 in all.
//!
//! The model keeps, for every domain and page, the answers that a walk of the tables would have
//! given at any time since the last flush that covered them; for every device, the contexts that it
//! would have found since the last context flush. The engine must give one of those answers; a
//! refusal must be what the tables say *now*, because nothing not-present is cached. Waits must
//! complete exactly when no lease whose page was taken from it (and flushed) is left.

use fake_mem::ArrayMem;
use guest_mem::{DmaFault, Gpa, Iommu, Iova, LeaseId, Leases, Perm, SourceId, Stop};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use vtd_guest::*;

const SOURCES: usize = 3;
const DOMAINS: usize = 3;
/// Three groups of pages: 4 KiB ones, a 2 MiB region, a 1 GiB region.
const PAGES: [u64; 12] = [
    0x1000,
    0x2000,
    0x3000,
    0x4000,
    0x20_0000,
    0x20_1000,
    0x3f_f000,
    0x4000_0000,
    0x4000_1000,
    0x7fff_f000,
    0x7f_ffff_f000,
    0xffff_0000_0000, // beyond a 39-bit context
];

#[derive(Clone, Debug)]
enum Op {
    /// 4 KiB entry: domain, page, target page, permissions.
    Map(usize, usize, u64, u64),
    /// Large entry over a page: domain, page, level 2 or 3, target, permissions.
    MapLarge(usize, usize, u32, u64, u64),
    /// The entry at a level above a page: new permissions.
    Permissions(usize, usize, u32, u64),
    /// Device to domain, or to none.
    Context(usize, Option<usize>),
    Translate(usize, usize, bool),
    FlushPages(usize, usize, u8),
    FlushDomain(usize),
    FlushAll,
    ContextFlushDevice(usize),
    ContextFlushDomain(usize),
    ContextFlushAll,
    LeaseBegin(usize, usize, bool),
    LeaseEnd(usize),
    Wait,
}

fn op() -> impl Strategy<Value = Op> {
    // Mostly one device and two pages, or a change, its flush and a use of one page would rarely
    // meet.
    let s = prop_oneof![2 => Just(0), 1 => 0..SOURCES];
    let d = prop_oneof![2 => Just(0), 1 => 0..DOMAINS];
    let p = prop_oneof![1 => 0..2usize, 1 => 0..PAGES.len()];
    let am = prop_oneof![2 => 0..3u8, 1 => 0..19u8];
    prop_oneof![
        8 => (d.clone(), p.clone(), 0..8u64, 0..4u64).prop_map(|(d, p, t, r)| Op::Map(d, p, t, r)),
        2 => (d.clone(), p.clone(), 2..4u32, 0..3u64, 0..4u64)
            .prop_map(|(d, p, l, t, r)| Op::MapLarge(d, p, l, t, r)),
        2 => (d.clone(), p.clone(), 2..4u32, 0..4u64)
            .prop_map(|(d, p, l, r)| Op::Permissions(d, p, l, r)),
        2 => (s.clone(), prop::option::weighted(0.9, d.clone())).prop_map(|(s, d)| Op::Context(s, d)),
        20 => (s.clone(), p.clone(), any::<bool>()).prop_map(|(s, p, w)| Op::Translate(s, p, w)),
        4 => (d.clone(), p.clone(), am).prop_map(|(d, p, am)| Op::FlushPages(d, p, am)),
        2 => d.clone().prop_map(Op::FlushDomain),
        1 => Just(Op::FlushAll),
        1 => s.clone().prop_map(Op::ContextFlushDevice),
        1 => d.prop_map(Op::ContextFlushDomain),
        1 => Just(Op::ContextFlushAll),
        3 => (s, p, any::<bool>()).prop_map(|(s, p, w)| Op::LeaseBegin(s, p, w)),
        3 => (0..8usize).prop_map(Op::LeaseEnd),
        3 => Just(Op::Wait),
    ]
}

/// Target of a page, and the access allowed to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Answer {
    gpa: u64,
    permissions: u64,
}

struct Held {
    id: LeaseId,
    source: usize,
    page: usize,
    gpa: u64,
    bit: u64,
    must_drain: bool,
}

struct Model {
    guest: Guest,
    machine: Machine<ArrayMem>,
    tables: [u64; DOMAINS],
    /// Answers since the last flush that covered them.
    answers: BTreeMap<(usize, usize), BTreeSet<Answer>>,
    /// Domains that a device has had since the last context flush that covered it.
    contexts: [BTreeSet<Option<usize>>; SOURCES],
    now: [Option<usize>; SOURCES],
    leases: Vec<Held>,
}

fn source(index: usize) -> SourceId {
    // The last two share a slot of the context cache.
    [
        SourceId::new(0, 1, 0),
        SourceId::new(0, 2, 0),
        SourceId::new(1, 2, 0),
    ][index]
}

/// Domain 2 is a 39-bit one.
fn levels(domain: usize) -> u32 {
    if domain == 2 { 3 } else { 4 }
}

fn did(domain: usize) -> u16 {
    // Equal in the low byte, in case tags have only that.
    [1, 257, 7][domain]
}

impl Model {
    fn new() -> Self {
        let mut guest = Guest::new();
        // Bus 1 has its contexts behind those of bus 0's.
        let bus_1 = guest.page();
        guest.put(ROOT + 16, u128::from(bus_1 | 1));
        let tables = [guest.page(), guest.page(), guest.page()];
        let mut machine = Machine::trap(guest.mem.clone());
        machine.boot();
        let mut model = Self {
            guest,
            machine,
            tables,
            answers: BTreeMap::new(),
            contexts: Default::default(),
            now: [None; SOURCES],
            leases: Vec::new(),
        };
        for contexts in &mut model.contexts {
            contexts.insert(None);
        }
        model
    }

    /// The oracle: a plain walk with no caches and no code of the engine.
    fn walk(&self, domain: usize, page: usize) -> Option<Answer> {
        let iova = PAGES[page];
        let width = 12 + 9 * levels(domain);
        if iova >> width != 0 {
            return None;
        }
        let mut table = self.tables[domain];
        let mut permissions = 3;
        for level in (1..=levels(domain)).rev() {
            let shift = 12 + 9 * (level - 1);
            let pte = self
                .guest
                .mem
                .get_u64(Gpa::new(table + (iova >> shift) % 512 * 8));
            permissions &= pte % 4;
            if permissions == 0 {
                return None;
            }
            let address = pte & 0x000f_ffff_ffff_f000;
            if level == 1 || pte & 0x80 != 0 {
                let gpa = address + iova % (1 << shift);
                return Some(Answer { gpa, permissions });
            }
            table = address;
        }
        None
    }

    /// A domain's tables have changed: new answers become possible.
    fn observe(&mut self, domain: usize) {
        for page in 0..PAGES.len() {
            let answer = self.walk(domain, page);
            let answers = self.answers.entry((domain, page)).or_default();
            answers.extend(answer);
        }
    }

    /// A flush: only today's answers are left of what it covers.
    fn forget(&mut self, covers: impl Fn(usize, u64) -> bool) {
        self.answers
            .retain(|(domain, page), _| !covers(*domain, PAGES[*page]));
        (0..DOMAINS).for_each(|domain| self.observe(domain));
    }

    fn flush(&mut self, descriptor: u128) {
        self.machine.submit(&[descriptor]);
    }

    /// After a flush that covers some leases: those whose page went elsewhere must drain. A device
    /// whose context changed is covered by a domain's flush only once its context has been flushed.
    fn revoke(&mut self, covers: impl Fn(&Held, Option<usize>) -> bool) {
        for index in 0..self.leases.len() {
            let lease = &self.leases[index];
            let domain = self.now[lease.source];
            let is_settled = self.contexts[lease.source].len() == 1;
            if !covers(lease, domain.filter(|_| is_settled)) {
                continue;
            }
            let answer = domain.and_then(|domain| self.walk(domain, lease.page));
            let holds =
                answer.is_some_and(|a| a.gpa == lease.gpa && a.permissions & lease.bit != 0);
            self.leases[index].must_drain |= !holds;
        }
    }

    fn translate(&mut self, s: usize, page: usize, is_write: bool) -> Option<u64> {
        let (perm, bit) = if is_write {
            (Perm::Write, 2)
        } else {
            (Perm::Read, 1)
        };
        match self.machine.translate(source(s), PAGES[page], perm) {
            Ok(run) => {
                let gpa = run.gpa.raw();
                let domains = self.contexts[s].iter().flatten();
                let possible = domains.filter_map(|domain| self.answers.get(&(*domain, page)));
                let mut possible = possible.flatten();
                assert!(
                    possible.any(|a| a.gpa == gpa && a.permissions & bit != 0),
                    "{gpa:#x} was never right since the last flush"
                );
                // One of the contexts is what the engine holds, so the answer of its width counts.
                Some(gpa)
            }
            Err(Stop::Fault(DmaFault::Blocked { .. })) => {
                let refuses = |domain: &Option<usize>| {
                    let answer = domain.and_then(|domain| self.walk(domain, page));
                    answer.is_none_or(|a| a.permissions & bit == 0)
                };
                let mut contexts = self.contexts[s].iter();
                assert!(contexts.any(refuses), "refused what the tables allow");
                None
            }
            Err(stop) => panic!("{stop:?}"),
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Map(d, p, target, permissions) => {
                let at = self.entry(d, p, 1);
                let pte = (0x80_0000 + target * 0x1000) | permissions;
                self.guest.mem.put_u64(Gpa::new(at), pte);
                self.observe(d);
            }
            Op::MapLarge(d, p, level, target, permissions) => {
                let at = self.entry(d, p, level);
                // Only over nothing: replacing a table is what `Permissions` plays with.
                if self.guest.mem.get_u64(Gpa::new(at)) & PS != 0
                    || self.guest.mem.get_u64(Gpa::new(at)) == 0
                {
                    let pte = (target << (12 + 9 * (level - 1))) | permissions | PS;
                    self.guest.mem.put_u64(Gpa::new(at), pte);
                }
                self.observe(d);
            }
            Op::Permissions(d, p, level, permissions) => {
                let at = self.entry(d, p, level);
                let pte = self.guest.mem.get_u64(Gpa::new(at));
                if pte != 0 {
                    self.guest.mem.put_u64(Gpa::new(at), pte & !3 | permissions);
                }
                self.observe(d);
            }
            Op::Context(s, domain) => {
                let (lo, hi) = match domain {
                    None => (0, 0),
                    Some(d) => {
                        let aw = u128::from(levels(d) - 2);
                        (u128::from(self.tables[d] | 1), aw | u128::from(did(d)) << 8)
                    }
                };
                let table = if s == 2 {
                    self.guest.mem.get_u64(Gpa::new(ROOT + 16)) & !1
                } else {
                    CONTEXTS
                };
                let at = table + u64::from(source(s).devfn()) * 16;
                self.guest.put(at, hi << 64 | lo);
                self.now[s] = domain;
                self.contexts[s].insert(domain);
            }
            Op::Translate(s, p, is_write) => {
                self.translate(s, p, is_write);
            }
            Op::FlushPages(d, p, am) => {
                let len = 0x1000u64 << am;
                let start = PAGES[p] & !(len - 1);
                self.flush(iotlb_pages(did(d), PAGES[p] & !0xfff, am));
                let inside = move |iova: u64| iova & !(len - 1) == start;
                self.forget(|domain, iova| domain == d && inside(iova));
                self.revoke(|lease, domain| domain == Some(d) && inside(PAGES[lease.page]));
            }
            Op::FlushDomain(d) => {
                self.flush(iotlb_domain(did(d)));
                self.forget(|domain, _| domain == d);
                self.revoke(|_, domain| domain == Some(d));
            }
            Op::FlushAll => {
                self.flush(iotlb_global());
                self.forget(|_, _| true);
                self.revoke(|_, _| true);
            }
            Op::ContextFlushDevice(s) => {
                self.flush(cc_device(0, source(s), 0));
                self.contexts[s] = [self.now[s]].into();
                self.revoke(|lease, _| lease.source == s);
            }
            Op::ContextFlushDomain(d) => {
                self.flush(cc_domain(did(d)));
                for s in 0..SOURCES {
                    self.contexts[s].remove(&Some(d));
                    self.contexts[s].insert(self.now[s]);
                }
                self.revoke(|lease, domain| domain == Some(d) && lease.source < SOURCES);
            }
            Op::ContextFlushAll => {
                self.flush(cc_global());
                for s in 0..SOURCES {
                    self.contexts[s] = [self.now[s]].into();
                }
                self.revoke(|_, _| true);
            }
            Op::LeaseBegin(s, page, is_write) => {
                if self.leases.len() == 8 {
                    return;
                }
                let Some(gpa) = self.translate(s, page, is_write) else {
                    return;
                };
                let perm = if is_write { Perm::Write } else { Perm::Read };
                let iova = Iova::new(PAGES[page]);
                let unit = &mut self.machine.unit;
                let id = unit
                    .leases_mut()
                    .begin(source(s), iova, Gpa::new(gpa), 512, perm)
                    .expect("there is room for eight");
                self.leases.push(Held {
                    id,
                    source: s,
                    page,
                    gpa,
                    bit: if is_write { 2 } else { 1 },
                    must_drain: false,
                });
            }
            Op::LeaseEnd(index) => {
                if index < self.leases.len() {
                    let lease = self.leases.swap_remove(index);
                    self.machine.unit.leases_mut().end(lease.id);
                }
            }
            Op::Wait => self.wait(),
        }
    }

    /// Submits a wait; ends leases until it completes, and checks that it was held back rightly.
    fn wait(&mut self) {
        self.machine.mem.put_u32(Gpa::new(STATUS), 0);
        self.machine.submit(&[wait_status(STATUS, 1)]);
        loop {
            self.machine.settle();
            let is_done = self.machine.status() == 1;
            let must_wait = self.leases.iter().any(|lease| lease.must_drain);
            assert!(!(is_done && must_wait), "completed under a revoked access");
            if is_done {
                return;
            }
            assert!(
                self.machine.unit.leases().stale() > 0,
                "held back by nothing"
            );
            // The revoked ones first; then the others that the engine found stale.
            let revoked = self.leases.iter().position(|lease| lease.must_drain);
            let lease = self.leases.swap_remove(revoked.unwrap_or(0));
            self.machine.unit.leases_mut().end(lease.id);
        }
    }

    /// Address of the entry over a page at `level`. A large entry in the way is removed first, as a
    /// driver does that splits a page.
    fn entry(&mut self, d: usize, p: usize, level: u32) -> u64 {
        let iova = PAGES[p] % (1 << (12 + 9 * levels(d)));
        for above in (level + 1..=3).rev() {
            let at = Gpa::new(self.guest.entry(self.tables[d], levels(d), iova, above));
            if self.guest.mem.get_u64(at) & PS != 0 {
                self.guest.mem.put_u64(at, 0);
            }
        }
        self.guest.entry(self.tables[d], levels(d), iova, level)
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_answer_was_right_since_the_last_flush(ops in vec(op(), 60..=180)) {
        let mut model = Model::new();
        for s in 0..SOURCES {
            model.apply(&Op::Context(s, Some(s)));
            model.apply(&Op::ContextFlushDevice(s));
        }
        for op in &ops {
            model.apply(op);
        }
        model.wait();
    }
}
