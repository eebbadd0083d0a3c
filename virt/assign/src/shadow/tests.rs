//! Tests against a model of tables and a model of type 1, whose calls the test makes step by step.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

use dma_map::iova::{Access, IovaRange};
use dma_map::mapper::{Optimistic, Window};
use guest_mem::{
    Access as MemAccess, Attachment, Budget, Found, Gpa, GuestRam, Iommu, Iova, LeaseTable, Next,
    PAGE_SIZE, Pages, Perm, PhysMem, Run, SourceId,
};
use machine::{Effects, Hold, HoldId, Invalidation, Progress, Scope, testing};
use proptest::prelude::*;
use vfio::ExternalMemory;

use super::{Limits, Shadow};
use crate::calls::{Call, CallId, Caller, Done, Refusal};
use crate::policy::HostPolicy;
use crate::reach::Reach;

const SOURCE: SourceId = SourceId::new(0, 3, 0);
/// RAM: two regions with a hole between them.
const RAM: [(u64, u64); 2] = [(0, 256), (512, 256)];
/// IOVAs that the host allows: all but the MSI window's stand-in.
const ALLOWED: [(u64, u64); 2] = [(0, 900), (910, 1 << 20)];
const DOMAIN: u32 = 7;
const MS: u64 = 1_000_000;

/// A guest's tables: by page of IOVA the page of guest memory and the permission.
#[derive(Clone, Debug)]
struct Tables {
    attachment: Attachment,
    domains: BTreeMap<u32, BTreeMap<u64, (u64, Access)>>,
    walks: Cell<u64>,
    leases: LeaseTableOf,
}

/// Never used.
#[derive(Debug)]
struct LeaseTableOf(LeaseTable);

impl Clone for LeaseTableOf {
    fn clone(&self) -> Self {
        Self(LeaseTable::new(0))
    }
}

impl Tables {
    fn new() -> Self {
        Self {
            attachment: Attachment::Off,
            domains: BTreeMap::new(),
            walks: Cell::new(0),
            leases: LeaseTableOf(LeaseTable::new(0)),
        }
    }

    fn domain(&mut self, domain: u32) -> &mut BTreeMap<u64, (u64, Access)> {
        self.domains.entry(domain).or_default()
    }

    /// Returns the mappings that the device may reach: those of the tables that lie in RAM and have
    /// allowed IOVAs.
    fn wanted(&self) -> BTreeMap<u64, (u64, Access)> {
        let Attachment::Domain(domain) = self.attachment else {
            return BTreeMap::new();
        };
        let pages = self.domains.get(&domain).into_iter().flatten();
        let inside = |runs: &[(u64, u64)], page: u64| {
            runs.iter()
                .any(|(first, pages)| (*first..first + pages).contains(&page))
        };
        pages
            .filter(|(iova, (gpa, _))| inside(&RAM, *gpa) && inside(&ALLOWED, **iova))
            .map(|(iova, to)| (*iova, *to))
            .collect()
    }
}

impl Iommu for Tables {
    type Leases = LeaseTable;

    fn translate<M: PhysMem>(&mut self, _: &M, _: SourceId, _: Iova, _: Perm) -> MemAccess<Run> {
        unreachable!("a shadow walks silently")
    }

    fn generation(&self, _: SourceId) -> u64 {
        0
    }

    fn leases(&self) -> &LeaseTable {
        &self.leases.0
    }

    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases.0
    }

    fn attachment<M: PhysMem>(&self, _: &M, source: SourceId) -> MemAccess<Attachment> {
        assert_eq!(source, SOURCE);
        Ok(self.attachment)
    }

    fn next_mapping<M: PhysMem>(
        &self,
        _: &M,
        source: SourceId,
        from: Iova,
        last: Iova,
        budget: &mut Budget,
    ) -> MemAccess<Next> {
        assert_eq!(source, SOURCE);
        self.walks.set(self.walks.get() + 1);
        let Attachment::Domain(domain) = self.attachment else {
            return Ok(Next::None);
        };
        budget.charge(Budget::ENTRY * 4);
        let range = from.raw() / PAGE_SIZE..=last.raw() / PAGE_SIZE;
        let found = self
            .domains
            .get(&domain)
            .and_then(|pages| pages.range(range).next());
        Ok(match found {
            None => Next::None,
            // Every third search ends here, as if its budget were spent.
            Some((page, _))
                if self.walks.get().is_multiple_of(3) && *page > from.raw() / PAGE_SIZE =>
            {
                Next::Budget(Iova::new(page * PAGE_SIZE))
            }
            Some((page, (gpa, access))) => Next::Found(Found {
                iova: Iova::new(page * PAGE_SIZE),
                gpa: Gpa::new(gpa * PAGE_SIZE),
                len: PAGE_SIZE,
                can_read: *access != Access::Write,
                can_write: *access != Access::Read,
            }),
        })
    }
}

/// Type 1, version 2, as seen from the device; calls wait until they are made.
#[derive(Clone, Default)]
struct Kernel(Arc<Mutex<Inside>>);

#[derive(Default)]
struct Inside {
    waiting: VecDeque<(CallId, Call)>,
    done: VecDeque<Done>,
    /// By first page: pages, page of host memory, permission.
    mappings: BTreeMap<u64, (u64, u64, Access)>,
    base: u64,
    most: usize,
    /// The next unmap fails.
    fails: bool,
    is_closed: bool,
    made: Vec<String>,
}

impl Kernel {
    fn with<R>(&self, f: impl FnOnce(&mut Inside) -> R) -> R {
        f(&mut self.0.lock().unwrap())
    }

    /// Makes so many of the calls that wait.
    fn make(&self, count: usize) {
        self.with(|inside| {
            for _ in 0..count {
                let Some((id, call)) = inside.waiting.pop_front() else {
                    return;
                };
                inside.made.push(format!("{call:?}"));
                let result = inside.call(call);
                inside.done.push_back(Done { id, result, ns: 1 });
            }
        });
    }

    /// Returns the mappings that the device reaches, page by page.
    fn reached(&self) -> BTreeMap<u64, (u64, Access)> {
        self.with(|inside| {
            let mut pages = BTreeMap::new();
            for (first, (count, gpa, access)) in &inside.mappings {
                for page in 0..*count {
                    pages.insert(first + page, (gpa + page, *access));
                }
            }
            pages
        })
    }
}

impl Inside {
    fn call(&mut self, call: Call) -> Result<(), Refusal> {
        let refusal = |is_full, text: &str| {
            Err(Refusal {
                is_full,
                text: text.to_owned(),
            })
        };
        match call {
            Call::Map { .. } | Call::Unmap { .. } if self.is_closed => refusal(false, "closed"),
            Call::Map {
                range,
                memory,
                access,
            } => {
                let (first, last) = (range.first().raw(), range.last().raw());
                assert!(self.overlapping(range).is_empty(), "EEXIST: {range}");
                assert_eq!(memory.len(), range.pages() * PAGE_SIZE);
                if self.mappings.len() >= self.most {
                    return refusal(true, "ENOSPC");
                }
                let gpa = gpa_of(self.base, memory.address());
                self.mappings.insert(first, (last - first + 1, gpa, access));
                Ok(())
            }
            Call::Unmap { range, pages } => {
                if std::mem::take(&mut self.fails) {
                    return refusal(false, "EIO");
                }
                let gone = self.overlapping(range);
                for (first, count) in &gone {
                    let is_inside =
                        *first >= range.first().raw() && first + count - 1 <= range.last().raw();
                    assert!(is_inside, "EINVAL: {range} cuts {first}+{count}");
                    self.mappings.remove(first);
                }
                assert_eq!(
                    gone.iter().map(|(_, count)| count).sum::<u64>(),
                    pages,
                    "size"
                );
                Ok(())
            }
            Call::Reset => Ok(()),
            Call::Close => {
                self.mappings.clear();
                self.is_closed = true;
                Ok(())
            }
        }
    }

    fn overlapping(&self, range: IovaRange) -> Vec<(u64, u64)> {
        let (first, last) = (range.first().raw(), range.last().raw());
        let all = self.mappings.iter();
        all.filter(|(at, (count, ..))| **at <= last && **at + count > first)
            .map(|(at, (count, ..))| (*at, *count))
            .collect()
    }
}

/// RAM is one mapping in this process, region behind region.
fn gpa_of(base: u64, hva: u64) -> u64 {
    let page = (hva - base) / PAGE_SIZE;
    if page < RAM[0].1 {
        page
    } else {
        page - RAM[0].1 + RAM[1].0
    }
}

impl Caller for Kernel {
    fn submit(&mut self, id: CallId, call: Call) {
        self.with(|inside| inside.waiting.push_back((id, call)));
    }

    fn take(&mut self) -> Option<Done> {
        self.with(|inside| inside.done.pop_front())
    }

    fn has_done(&mut self) -> bool {
        self.with(|inside| !inside.done.is_empty())
    }
}

struct World {
    tables: Tables,
    ram: GuestRam,
    kernel: Kernel,
    reach: Reach,
    shadow: Shadow<Kernel>,
    effects: Effects<()>,
    now: u64,
    next: u64,
    held: BTreeSet<HoldId>,
}

impl World {
    fn new(policy: HostPolicy) -> Self {
        let regions = RAM.map(|(first, pages)| (Gpa::new(first * PAGE_SIZE), pages * PAGE_SIZE));
        let ram = GuestRam::new(&regions).unwrap();
        let base = ram
            .host(Gpa::new(0), 1, guest_mem::Intent::Read)
            .unwrap()
            .raw();
        let kernel = Kernel::default();
        kernel.with(|inside| (inside.base, inside.most) = (base, usize::MAX));
        let reach = Reach::default();
        let limits = Limits {
            ram: RAM.to_vec(),
            allowed: ALLOWED.to_vec(),
            allows_pass_through: true,
            maps_while_off: false,
        };
        let shadow = Shadow::new(SOURCE, limits, policy, reach.clone(), kernel.clone());
        Self {
            tables: Tables::new(),
            ram,
            kernel,
            reach,
            shadow,
            effects: testing::effects(0, SOURCE),
            now: 1,
            next: 0,
            held: BTreeSet::new(),
        }
    }

    fn in_domain(policy: HostPolicy) -> Self {
        let mut world = Self::new(policy);
        world.tables.attachment = Attachment::Domain(DOMAIN);
        world.tell(Scope::All);
        world.finish();
        world
    }

    fn tell(&mut self, scope: Scope) {
        let hold = HoldId(self.next);
        self.next += 1;
        if self.shadow.told(&Invalidation { scope }, hold) == Hold::Yes {
            self.held.insert(hold);
        }
    }

    fn pages(&mut self, first: u64, pages: u64) {
        let iova = Iova::new(first * PAGE_SIZE);
        let len = pages * PAGE_SIZE;
        self.tell(Scope::Range {
            domain: DOMAIN,
            iova,
            len,
        });
    }

    /// Whether anything was done.
    fn poll(&mut self) -> bool {
        let progress = self
            .shadow
            .poll(&self.tables, &self.ram, self.now, &mut self.effects);
        for hold in testing::take_released(&mut self.effects) {
            assert!(self.held.remove(&hold), "{hold:?} is released once");
        }
        self.check_reach();
        progress != Progress::Idle
    }

    /// Asserts that all pages that the device reaches are in use.
    fn check_reach(&self) {
        let reached = self.kernel.reached();
        let gpas: BTreeSet<u64> = reached.values().map(|(gpa, _)| *gpa).collect();
        let gpas: Vec<_> = gpas
            .into_iter()
            .map(|gpa| Gpa::new(gpa * PAGE_SIZE))
            .collect();
        for some in gpas.chunks(32) {
            let pages = Pages::new(some).unwrap();
            assert_eq!(self.reach.in_use(&pages), pages.all(), "{some:?}");
        }
    }

    /// Until all that was held is released.
    fn finish(&mut self) {
        for _ in 0..100_000 {
            let is_busy = self.poll();
            if self.held.is_empty() {
                return;
            }
            if !is_busy {
                self.kernel.make(1);
                self.check_reach();
            }
        }
        panic!("what is held is never released");
    }

    /// Polls until nothing is under way any more.
    fn settle(&mut self) {
        loop {
            self.kernel.make(usize::MAX);
            let is_busy = self.poll();
            let is_idle = self
                .kernel
                .with(|inside| inside.waiting.is_empty() && inside.done.is_empty());
            if !is_busy && is_idle {
                return;
            }
        }
    }

    fn map(&mut self, first: u64, gpa: u64, pages: u64, access: Access) {
        for page in 0..pages {
            self.tables
                .domain(DOMAIN)
                .insert(first + page, (gpa + page, access));
        }
    }

    fn unmap(&mut self, first: u64, pages: u64) {
        for page in first..first + pages {
            self.tables.domain(DOMAIN).remove(&page);
        }
    }

    fn made(&self) -> Vec<String> {
        self.kernel.with(|inside| std::mem::take(&mut inside.made))
    }

    /// Asserts that the device reaches the mappings of the tables, and in addition at most the
    /// stale mappings that the policy permits.
    fn check(&self) {
        let (wanted, reached) = (self.tables.wanted(), self.kernel.reached());
        for (iova, to) in &wanted {
            assert_eq!(reached.get(iova), Some(to), "page {iova}");
        }
        let extra: Vec<_> = reached
            .keys()
            .filter(|page| !wanted.contains_key(page))
            .collect();
        if self.shadow.policy() == HostPolicy::Strict {
            assert_eq!(
                extra,
                Vec::<&u64>::new(),
                "a page that the guest has unmapped"
            );
        }
        let risk = self.shadow.risk();
        risk.check(0).expect("the contract");
    }
}

fn policies() -> [HostPolicy; 4] {
    let window = Window {
        entries: 4,
        age: std::time::Duration::from_millis(10),
    };
    [
        HostPolicy::Strict,
        HostPolicy::Async(window),
        HostPolicy::Deferred(window),
        HostPolicy::Optimistic(Optimistic::of(4)),
    ]
}

#[test]
fn a_map_is_in_the_book_before_its_call_and_waited_for() {
    for policy in policies() {
        let mut world = World::in_domain(policy);
        world.map(64, 8, 4, Access::ReadWrite);
        world.pages(64, 4);
        world.poll();
        assert_eq!(world.kernel.with(|inside| inside.waiting.len()), 1);
        assert_eq!(world.reach.pages(), 4, "in use before the call");
        assert_eq!(world.held.len(), 1, "{policy:?}: the WAIT waits for a map");
        world.finish();
        assert_eq!(
            world.made().last().unwrap(),
            "map [0x40000; 4 pages] ReadWrite"
        );
    }
}

#[test]
fn a_strict_unmap_is_in_the_book_until_its_call_has_returned() {
    let mut world = World::in_domain(HostPolicy::Strict);
    world.map(64, 8, 1, Access::ReadWrite);
    world.pages(64, 1);
    world.finish();
    world.unmap(64, 1);
    world.pages(64, 1);
    world.poll();
    assert_eq!((world.reach.pages(), world.held.len()), (1, 1));
    world.kernel.make(1);
    assert_eq!(world.reach.pages(), 1, "the answer has not been looked at");
    world.poll();
    assert_eq!((world.reach.pages(), world.held.len()), (0, 0));
}

#[test]
fn mappings_unmapped_together_share_one_call_with_gaps_between() {
    let mut world = World::in_domain(HostPolicy::Strict);
    for page in [64, 66, 68, 80] {
        world.map(page, page - 60, 1, Access::ReadWrite);
    }
    world.pages(64, 32);
    world.finish();
    world.made();
    for page in [64, 66, 68] {
        world.unmap(page, 1);
    }
    world.pages(64, 16);
    world.finish();
    assert_eq!(world.made(), ["unmap [0x40000; 5 pages] 3"]);
}

#[test]
fn a_mapping_that_is_cut_goes_and_the_rest_of_it_comes_back_in_pages() {
    for policy in policies() {
        let mut world = World::in_domain(policy);
        world.map(64, 8, 8, Access::ReadWrite);
        world.pages(64, 8);
        world.finish();
        world.unmap(66, 1);
        world.pages(66, 1);
        world.finish();
        world.check();
        assert_eq!(world.shadow.counts().cut, 1);
        assert_eq!(world.kernel.with(|inside| inside.mappings.len()), 7);
        // From now on this domain is mapped in single pages.
        world.map(128, 16, 4, Access::Read);
        world.pages(128, 4);
        world.finish();
        assert_eq!(world.kernel.with(|inside| inside.mappings.len()), 11);
    }
}

#[test]
fn a_stale_iova_that_goes_elsewhere_is_torn_down_first_and_one_that_comes_back_is_found() {
    for policy in policies() {
        let mut world = World::in_domain(policy);
        world.map(64, 8, 2, Access::ReadWrite);
        world.pages(64, 2);
        world.finish();
        world.unmap(64, 2);
        world.pages(64, 2);
        world.finish();
        world.made();
        world.map(64, 8, 2, Access::ReadWrite);
        world.pages(64, 2);
        world.finish();
        let hits = u64::from(matches!(policy, HostPolicy::Optimistic(_)));
        assert_eq!(world.shadow.counts().hits, hits);
        world.unmap(64, 2);
        world.pages(64, 2);
        world.finish();
        world.map(65, 99, 1, Access::ReadWrite);
        world.pages(65, 1);
        world.finish();
        world.check();
        assert_eq!(
            world.kernel.reached(),
            BTreeMap::from([(65, (99, Access::ReadWrite))])
        );
    }
}

#[test]
fn stale_mappings_go_when_their_age_is_over_without_being_told() {
    for policy in policies() {
        let mut world = World::in_domain(policy);
        world.map(64, 8, 3, Access::ReadWrite);
        world.pages(64, 4);
        world.finish();
        world.unmap(64, 3);
        world.pages(64, 4);
        world.finish();
        if let Some(deadline) = world.shadow.deadline() {
            assert_eq!(deadline, world.now + 10 * MS);
            world.now = deadline;
        }
        world.settle();
        assert_eq!(world.kernel.reached(), BTreeMap::new(), "{policy:?}");
        assert_eq!(world.reach.pages(), 0);
        let age = if policy == HostPolicy::Strict {
            0
        } else {
            10 * MS
        };
        assert!(world.shadow.risk().stale_times.max_ns <= age);
    }
}

#[test]
fn translation_off_detach_and_a_switch_of_the_domain_take_all_before_they_complete() {
    for policy in policies() {
        for attachment in [
            Attachment::Off,
            Attachment::Absent,
            Attachment::Domain(DOMAIN + 1),
        ] {
            let mut world = World::in_domain(policy);
            for page in 0..6 {
                world.map(64 + 2 * page, page, 1, Access::ReadWrite);
            }
            world.pages(64, 16);
            world.finish();
            world.unmap(64, 3);
            world.pages(64, 4);
            world.finish();
            world.tables.attachment = attachment;
            world.tell(Scope::Source(SOURCE, 0));
            world.finish();
            if policy == HostPolicy::Strict || !matches!(attachment, Attachment::Domain(_)) {
                assert_eq!(
                    world.kernel.reached(),
                    BTreeMap::new(),
                    "{policy:?} {attachment:?}"
                );
            }
            world.check();
        }
    }
}

#[test]
fn pass_through_maps_all_of_memory_in_slices_and_goes_again() {
    let mut world = World::in_domain(HostPolicy::Strict);
    world.map(64, 8, 2, Access::ReadWrite);
    world.pages(64, 2);
    world.finish();
    world.tables.attachment = Attachment::PassThrough;
    world.tell(Scope::All);
    world.finish();
    let all = RAM.iter().map(|(_, pages)| pages).sum::<u64>();
    let reached = world.kernel.reached();
    assert_eq!(reached.len() as u64, all);
    assert!(reached.iter().all(|(iova, (gpa, _))| iova == gpa));
    assert_eq!(world.reach.pages(), all);
    world.tables.attachment = Attachment::Domain(DOMAIN);
    world.tell(Scope::All);
    world.finish();
    world.check();
}

#[test]
fn pages_outside_ram_or_not_allowed_are_refused_and_their_neighbours_mapped() {
    let mut world = World::in_domain(HostPolicy::Strict);
    // Across the end of a region, and across the forbidden window.
    world.map(64, 250, 12, Access::ReadWrite);
    world.map(895, 512, 20, Access::ReadWrite);
    world.tell(Scope::All);
    world.finish();
    world.check();
    assert_eq!(world.kernel.reached().len(), 6 + 10);
    let counts = world.shadow.counts();
    assert_eq!((counts.not_ram, counts.not_allowed), (1, 1));
}

#[test]
fn a_full_container_gives_up_what_is_stale_and_then_refuses_that_map_alone() {
    let mut world = World::in_domain(HostPolicy::Optimistic(Optimistic::of(4)));
    world.kernel.with(|inside| inside.most = 2);
    for page in [64, 70] {
        world.map(page, page, 1, Access::ReadWrite);
    }
    world.tell(Scope::All);
    world.finish();
    world.unmap(64, 1);
    world.pages(64, 1);
    world.finish();
    world.map(80, 80, 1, Access::ReadWrite);
    world.pages(80, 1);
    world.finish();
    world.check();
    assert_eq!(world.shadow.counts().refused, 0);
    world.map(90, 90, 1, Access::ReadWrite);
    world.pages(90, 1);
    world.finish();
    assert_eq!(world.shadow.counts().refused, 1);
    assert_eq!(world.reach.pages(), 2, "what was refused is not in use");
}

#[test]
fn an_unmap_that_fails_cuts_the_device_off_before_its_wait_completes() {
    let mut world = World::in_domain(HostPolicy::Strict);
    world.map(64, 8, 2, Access::ReadWrite);
    world.map(80, 9, 1, Access::ReadWrite);
    world.tell(Scope::All);
    world.finish();
    world.unmap(64, 2);
    world.pages(64, 2);
    world.poll();
    world.kernel.with(|inside| inside.fails = true);
    world.kernel.make(1);
    world.poll();
    assert!(world.shadow.take_failure().is_some());
    world.poll();
    let waiting = world.kernel.with(|inside| inside.waiting.len());
    assert_eq!(waiting, 0, "the device is cut off before it is closed");
    world.shadow.end();
    assert_eq!(
        (world.held.len(), world.reach.pages()),
        (1, 3),
        "until the container is closed"
    );
    world.kernel.make(1);
    world.poll();
    assert_eq!((world.held.len(), world.reach.pages()), (0, 0));
    assert!(world.shadow.has_ended());
    // Nothing is held any more.
    world.pages(64, 1);
    assert!(world.held.is_empty());
}

#[test]
fn an_unmap_that_takes_too_long_cuts_the_device_off_at_once_and_its_wait_waits() {
    let mut world = World::in_domain(HostPolicy::Strict);
    world.map(64, 8, 2, Access::ReadWrite);
    world.tell(Scope::All);
    world.finish();
    world.unmap(64, 2);
    world.pages(64, 2);
    world.poll();
    world.now += 900 * MS;
    world.poll();
    world.shadow.hold_overdue();
    world.poll();
    assert_eq!(world.shadow.take_failure(), None);
    world.now = world.shadow.deadline().unwrap();
    world.poll();
    assert!(world.shadow.take_failure().is_some());
    world.shadow.end();
    assert_eq!((world.held.len(), world.reach.pages()), (1, 2));
    world.settle();
    assert_eq!((world.held.len(), world.reach.pages()), (0, 0));
}

#[test]
fn more_invalidations_than_are_looked_at_one_by_one_are_joined() {
    let mut world = World::in_domain(HostPolicy::Strict);
    for page in 0..1000 {
        world.map(64 + page % 300, page % 200, 1, Access::ReadWrite);
        world.pages(64 + page % 300, 1);
    }
    assert!(world.shadow.tasks.len() <= super::TASKS);
    world.finish();
    world.check();
}

/// A guest need not wait for the invalidations that it submits.
#[test]
fn invalidations_that_no_wait_follows_take_a_bounded_number_of_holds() {
    let mut world = World::in_domain(HostPolicy::Strict);
    world.map(64, 8, 1, Access::ReadWrite);
    world.pages(64, 1);
    // Its call is not made: the task lasts.
    world.poll();
    for round in 0..20_000 {
        world.pages(64 + round % 3 / 2, 1);
        if round % 100 == 0 {
            world.tell(Scope::All);
        }
    }
    assert!(world.held.len() <= 2 * super::TASKS, "{}", world.held.len());
    world.finish();
    world.check();
}

#[test]
fn mapping_that_expires_while_the_container_closes_is_released() {
    let mut world = World::in_domain(HostPolicy::Optimistic(Optimistic::of(4)));
    world.map(64, 8, 2, Access::ReadWrite);
    world.pages(64, 2);
    world.finish();
    world.unmap(64, 2);
    world.pages(64, 2);
    world.finish();
    assert_eq!(world.reach.pages(), 2, "stale");
    let expiry = world.shadow.deadline().unwrap();
    world.shadow.end();
    world.now = expiry;
    world.poll();
    world.settle();
    assert!(world.shadow.has_ended());
    assert_eq!((world.reach.pages(), world.shadow.risk().stale_now), (0, 0));
}

#[test]
fn another_policy_tears_down_what_the_last_one_kept() {
    let mut world = World::in_domain(HostPolicy::Optimistic(Optimistic::of(4)));
    world.map(64, 8, 4, Access::ReadWrite);
    world.pages(64, 4);
    world.finish();
    world.unmap(64, 4);
    world.pages(64, 4);
    world.finish();
    world.shadow.set_policy(HostPolicy::Strict);
    world.settle();
    assert_eq!(world.kernel.reached(), BTreeMap::new());
    world.check();
}

#[derive(Clone, Debug)]
enum Step {
    Map(u64, u64, u64, u8),
    Unmap(u64, u64),
    /// Invalidates the smallest aligned power of two around, the domain, or everything.
    Tell(u8),
    Attach(u8),
    Poll,
    Make(usize),
    Pass(u64),
    Finish,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0_u64..40, 0_u64..60, 1_u64..9, 0_u8..3).prop_map(|(i, g, n, a)| Step::Map(i, g, n, a)),
        5 => (0_u64..44, 1_u64..9).prop_map(|(i, n)| Step::Unmap(i, n)),
        6 => (0_u8..8).prop_map(Step::Tell),
        1 => (0_u8..5).prop_map(Step::Attach),
        6 => Just(Step::Poll),
        6 => (1_usize..4).prop_map(Step::Make),
        2 => (0_u64..12).prop_map(Step::Pass),
        4 => Just(Step::Finish),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    /// Runs a correct guest (it invalidates its changes before it waits) under each policy, with
    /// calls that are made late. All pages reached are in use, and when nothing is held, the device
    /// reaches exactly the mappings of the tables.
    #[test]
    fn the_device_reaches_what_the_tables_say(
        policy in 0_usize..4,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut world = World::in_domain(policies()[policy]);
        let mut dirty: Option<(u64, u64)> = None;
        for step in steps {
            let touch = |dirty: &mut Option<(u64, u64)>, first: u64, last: u64| {
                let (a, b) = dirty.unwrap_or((first, last));
                *dirty = Some((a.min(first), b.max(last)));
            };
            match step {
                Step::Map(iova, gpa, pages, access) => {
                    let access = [Access::ReadWrite, Access::Read, Access::Write][usize::from(access)];
                    let free = (iova..iova + pages)
                        .all(|page| !world.tables.domain(DOMAIN).contains_key(&page));
                    if free || iova % 3 == 0 {
                        world.map(iova, gpa, pages, access);
                        touch(&mut dirty, iova, iova + pages - 1);
                    }
                }
                Step::Unmap(iova, pages) => {
                    world.unmap(iova, pages);
                    touch(&mut dirty, iova, iova + pages - 1);
                }
                Step::Tell(how) => {
                    if let Some((first, last)) = dirty.take() {
                        match how {
                            0 => world.tell(Scope::Domain(DOMAIN)),
                            1 => world.tell(Scope::All),
                            _ => {
                                let pages = (first ^ last).checked_ilog2().map_or(1, |bit| 2 << bit);
                                world.pages(first & !(pages - 1), pages);
                            }
                        }
                    }
                }
                Step::Attach(how) => {
                    world.tables.attachment = [
                        Attachment::Domain(DOMAIN),
                        Attachment::Off,
                        Attachment::Domain(DOMAIN + 1),
                        Attachment::PassThrough,
                        Attachment::Absent,
                    ][usize::from(how)];
                    world.tell(Scope::All);
                    if how != 0 {
                        world.finish();
                        world.tables.attachment = Attachment::Domain(DOMAIN);
                        world.tell(Scope::Source(SOURCE, 0));
                    }
                    dirty = None;
                }
                Step::Poll => { world.poll(); }
                Step::Make(count) => {
                    world.kernel.make(count);
                    world.check_reach();
                }
                Step::Pass(ms) => {
                    // The owner is woken in time, and calls take none.
                    world.settle();
                    for _ in 0..ms {
                        world.now += MS;
                        world.settle();
                    }
                }
                Step::Finish => {
                    if dirty.is_none() {
                        world.finish();
                        world.check();
                    }
                }
            }
        }
        world.tell(Scope::All);
        world.finish();
        world.check();
        world.shadow.end();
        world.settle();
        prop_assert_eq!(world.kernel.reached(), BTreeMap::new());
        prop_assert_eq!(world.reach.pages(), 0);
    }
}
