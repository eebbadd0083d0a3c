//! The unit by itself: each status by name, waits, bounds; and against a `model`.

mod hints;
mod model;

use fake_mem::ArrayMem;
use guest_mem::{Attachment, Budget, Gpa, Iommu, LeaseId, Next, Perm, Stop, View};
use machine::{CommandId, CommandResult, UnitEvent};
use platform::interrupt::Message;

use super::revoke::{BUDGET, CHUNK, REMOVE};
use super::*;
use crate::wire::{ATTACH_BYPASS, DOMAIN_LAST, INPUT_LAST, MAP_READ, MAP_WRITE, PHYS_LAST};

/// Sink that records the unit's events.
#[derive(Default)]
struct Ear {
    done: Vec<(u64, CommandResult)>,
    events: Vec<UnitEvent>,
    invalidated: Vec<Invalidation>,
    refused: Vec<RefusedAccess>,
    /// Number of holds that each invalidation gets.
    holds: u32,
}

impl UnitSink for Ear {
    fn interrupt(&mut self, _: Message) {
        panic!("it has no interrupt of its own");
    }

    fn event(&mut self, event: UnitEvent) {
        self.events.push(event);
    }

    fn invalidated(&mut self, what: &Invalidation) -> u32 {
        self.invalidated.push(*what);
        self.holds
    }

    fn command_done(&mut self, id: CommandId, result: CommandResult) {
        self.done.push((id.0, result));
    }

    fn access_refused(&mut self, access: RefusedAccess) {
        self.refused.push(access);
    }
}

const DISK: SourceId = SourceId::new(0, 3, 0);
const NET: SourceId = SourceId::new(0, 4, 0);
/// The IOMMU's own function, which is no endpoint.
const OWN: SourceId = SourceId::new(0, 1, 0);

struct World {
    unit: PvIommu,
    mem: ArrayMem,
    ear: Ear,
    now: u64,
    asked: u64,
}

impl World {
    fn new() -> Self {
        Self::with(Config {
            max_leases: 64,
            drain_limit_ns: 1000,
            ..Config::default()
        })
    }

    fn with(config: Config) -> Self {
        Self {
            unit: PvIommu::new(Config {
                endpoints: vec![2 << 3..=0xff],
                ..config
            }),
            mem: ArrayMem::new(1 << 20),
            ear: Ear::default(),
            now: 0,
            asked: 0,
        }
    }

    /// Asks; the number of the request.
    fn ask(&mut self, what: Request) -> u64 {
        self.asked += 1;
        let id = CommandId(self.asked);
        let command = Command {
            id,
            source: OWN,
            what,
        };
        self.unit
            .command(command, &self.mem, self.now, &mut self.ear);
        self.asked
    }

    fn poll(&mut self) -> UnitPoll {
        RemappingUnit::<Request>::poll(&mut self.unit, &self.mem, self.now, &mut self.ear)
    }

    /// Returns the answer, if there is one.
    fn answer(&self, id: u64) -> Option<u8> {
        let answered = self.ear.done.iter().find(|(own, _)| *own == id);
        answered.map(|(_, result)| match result {
            CommandResult::Done => 0,
            CommandResult::Refused(status) => *status,
        })
    }

    /// Sends a request, and polls until it is answered.
    fn status(&mut self, what: Request) -> u8 {
        let id = self.ask(what);
        for _ in 0..10_000 {
            if let Some(status) = self.answer(id) {
                return status;
            }
            let _ = self.poll();
        }
        panic!("{what:?} is not answered");
    }

    fn attach(&mut self, source: SourceId, domain: u32) -> u8 {
        self.status(attach(source, domain, 0))
    }

    fn map(&mut self, domain: u32, first: u64, last: u64, phys: u64) -> u8 {
        self.status(map(domain, first, last, phys, 3))
    }

    fn unmap(&mut self, domain: u32, first: u64, last: u64) -> u8 {
        self.status(Request::Unmap {
            domain,
            first,
            last,
        })
    }

    fn reach(&mut self, source: SourceId, iova: u64, perm: Perm) -> Option<u64> {
        let run = self
            .unit
            .translate(&self.mem, source, Iova::new(iova), perm);
        match run {
            Ok(run) => Some(run.gpa.raw()),
            Err(Stop::Fault(_)) => None,
            Err(Stop::Pending(_)) => panic!("nothing is absent"),
        }
    }

    fn lease(&mut self, source: SourceId, iova: u64, len: u32) -> LeaseId {
        let mut view = View::new(&mut self.unit, &self.mem, source);
        let lease = guest_mem::Dma::lease(&mut view, Iova::new(iova), len, Perm::Write);
        lease.expect("it is mapped").id
    }
}

fn attach(source: SourceId, domain: u32, flags: u32) -> Request {
    Request::Attach {
        domain,
        endpoint: source.0.into(),
        flags,
        reserved: 0,
    }
}

fn detach(source: SourceId, domain: u32) -> Request {
    Request::Detach {
        domain,
        endpoint: source.0.into(),
    }
}

fn map(domain: u32, first: u64, last: u64, phys: u64, flags: u32) -> Request {
    Request::Map {
        domain,
        first,
        last,
        phys,
        flags,
    }
}

const INVAL: u8 = Status::Inval as u8;
const RANGE: u8 = Status::Range as u8;
const NOENT: u8 = Status::NoEnt as u8;
const NOMEM: u8 = Status::NoMem as u8;

#[test]
fn attach_is_refused_where_the_specification_says_so() {
    let mut world = World::new();
    let bypass = attach(DISK, 7, ATTACH_BYPASS);
    let reserved = Request::Attach {
        domain: 7,
        endpoint: DISK.0.into(),
        flags: 0,
        reserved: 1,
    };
    assert_eq!(world.status(reserved), INVAL);
    assert_eq!(world.status(attach(DISK, 7, 2)), INVAL, "an unknown flag");
    assert_eq!(world.attach(OWN, 7), NOENT, "the IOMMU itself");
    let nobody = Request::Attach {
        domain: 7,
        endpoint: 0x1_0018,
        flags: 0,
        reserved: 0,
    };
    assert_eq!(world.status(nobody), NOENT);
    assert_eq!(world.attach(DISK, DOMAIN_LAST + 1), RANGE);
    assert_eq!(world.unit.stats().domains, 0, "nothing was made");
    assert_eq!(world.attach(DISK, 7), 0);
    assert_eq!(world.attach(DISK, 7), 0, "again");
    assert_eq!(world.status(bypass), INVAL, "the domain is none of bypass");
    assert_eq!(
        world.reach(DISK, 0x5000, Perm::Read),
        None,
        "nor became one"
    );
    assert_eq!(world.status(attach(NET, 7, ATTACH_BYPASS)), INVAL);
    assert_eq!(world.status(attach(NET, 8, ATTACH_BYPASS)), 0);
    assert_eq!(world.attach(DISK, 8), INVAL);
    assert_eq!(world.reach(NET, 0x5123, Perm::Write), Some(0x5123));
}

#[test]
fn detach_is_refused_of_what_is_not_attached_there() {
    let mut world = World::new();
    assert_eq!(world.status(detach(DISK, 7)), INVAL);
    assert_eq!(world.status(detach(OWN, 7)), NOENT);
    assert_eq!(world.attach(DISK, 7), 0);
    assert_eq!(world.status(detach(DISK, 8)), INVAL);
    assert_eq!(world.status(detach(NET, 7)), INVAL);
    assert_eq!(world.map(7, 0x1000, 0x1fff, 0x8000), 0);
    assert_eq!(world.status(detach(DISK, 7)), 0);
    assert_eq!(world.reach(DISK, 0x1000, Perm::Read), None);
    assert_eq!(world.unit.stats().domains, 0, "it ceases to exist");
    assert_eq!(world.map(7, 0x1000, 0x1fff, 0x8000), NOENT);
    assert_eq!(world.attach(DISK, 7), 0);
    assert_eq!(world.reach(DISK, 0x1000, Perm::Read), None, "a new one");
}

#[test]
fn map_is_refused_where_the_specification_says_so() {
    let mut world = World::new();
    assert_eq!(world.map(7, 0x1000, 0x1fff, 0x8000), NOENT);
    assert_eq!(world.attach(DISK, 7), 0);
    for (first, last, phys, expected) in [
        (0x1001, 0x1fff, 0x8000, RANGE),
        (0x1000, 0x1ffe, 0x8000, RANGE),
        (0x1000, 0x1fff, 0x8001, RANGE),
        // Start above end: 2^64 - 1 for one, and the page before the first.
        (0x2000, 0xfff, 0x8000, INVAL),
        (0x1000, 0xfff, 0x8000, INVAL),
        (u64::MAX - 0xfff, u64::MAX, 0x8000, RANGE),
        (0, u64::MAX, 0, RANGE),
        (INPUT_LAST + 1, INPUT_LAST + 0x1000, 0x8000, RANGE),
        (INPUT_LAST - 0xfff, INPUT_LAST + 0x1000, 0x8000, RANGE),
        (0x1000, 0x2fff, PHYS_LAST - 0xfff, RANGE),
        (0x1000, 0x1fff, u64::MAX - 0xfff, RANGE),
        // Over, into and around the window of interrupt messages.
        (0xfee0_0000, 0xfee0_0fff, 0x8000, INVAL),
        (0xfedf_f000, 0xfee0_0fff, 0x8000, INVAL),
        (0xfeef_f000, 0xfef0_0fff, 0x8000, INVAL),
        (0xfe00_0000, 0xffff_ffff, 0x8000, INVAL),
    ] {
        let status = world.map(7, first, last, phys);
        assert_eq!(status, expected, "{first:#x} to {last:#x} at {phys:#x}");
    }
    assert_eq!(world.status(map(7, 0x1000, 0x1fff, 0, 8)), INVAL, "a flag");
    assert_eq!(world.unit.stats().mappings, 0);
    assert_eq!(world.map(7, 0xfedf_f000, 0xfedf_ffff, 0x8000), 0, "before");
    assert_eq!(world.map(7, 0xfef0_0000, 0xfef0_0fff, 0x8000), 0, "behind");
    assert_eq!(world.map(7, INPUT_LAST - 0xfff, INPUT_LAST, 0x8000), 0);
    assert_eq!(world.map(7, 0x2000, 0x3fff, PHYS_LAST - 0x1fff), 0);
    for (first, last) in [
        (0x2000, 0x3fff),
        (0x1000, 0x2fff),
        (0x3000, 0x4fff),
        (0x1000, 0x4fff),
    ] {
        assert_eq!(world.map(7, first, last, 0), INVAL, "{first:#x} overlaps");
    }
    assert_eq!(
        world.reach(DISK, 0x1000, Perm::Read),
        None,
        "nothing changed"
    );
    assert_eq!(world.status(attach(NET, 8, ATTACH_BYPASS)), 0);
    assert_eq!(world.map(8, 0x1000, 0x1fff, 0x8000), INVAL, "bypass");
}

#[test]
fn unmap_takes_whole_mappings_or_nothing() {
    let mut world = World::new();
    assert_eq!(world.unmap(7, 0, 0xfff), NOENT);
    assert_eq!(world.attach(DISK, 7), 0);
    assert_eq!(world.unmap(7, 0x2000, 0x1fff), INVAL);
    assert_eq!(world.unmap(7, 0, u64::MAX), 0, "nothing is there");
    assert_eq!(world.map(7, 0x1000, 0x1fff, 0x8000), 0);
    assert_eq!(world.map(7, 0x2000, 0x4fff, 0x1_0000), 0);
    // All of the first one, and part of the second.
    for (first, last) in [(0x1000, 0x2fff), (0x3000, 0x4fff), (0x3000, 0x3fff)] {
        let status = world.unmap(7, first, last);
        assert_eq!(status, RANGE, "a part of a mapping");
        assert_eq!(world.reach(DISK, 0x1000, Perm::Read), Some(0x8000));
    }
    assert_eq!(world.reach(DISK, 0x4fff, Perm::Read), Some(0x1_2fff));
    // The last one that is found.
    assert_eq!(world.reach(DISK, 0x1000, Perm::Read), Some(0x8000));
    assert_eq!(world.unmap(7, 0, u64::MAX), 0);
    let reached = world.reach(DISK, 0x1000, Perm::Read);
    assert_eq!(reached, None, "after UNMAP");
    assert_eq!(world.unit.stats().mappings, 0);
    assert_eq!(world.status(attach(NET, 8, ATTACH_BYPASS)), 0);
    assert_eq!(world.unmap(8, 0, 0xfff), INVAL, "bypass");
}

/// The kind of mistake that let one byte through beside a page (NOTES of other devices): each end,
/// with the neighbours mapped before, after, or not.
#[test]
fn a_byte_at_either_end_of_a_mapping_goes_where_it_belongs() {
    let pages = [(0x1000, 0x9000), (0x2000, 0x5000), (0x3000, 0xd000)];
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]] {
        for left_out in 0..4 {
            let mut world = World::new();
            assert_eq!(world.attach(DISK, 1), 0);
            for at in order.into_iter().filter(|&at| at != left_out) {
                let (iova, phys) = pages[at];
                let status = world.map(1, iova, iova + 0xfff, phys);
                assert_eq!(status, 0, "{iova:#x}, beside the others");
            }
            for (at, (iova, phys)) in pages.into_iter().enumerate() {
                for offset in [0, 1, 0xffe, 0xfff] {
                    let expected = (at != left_out).then_some(phys + offset);
                    let reached = world.reach(DISK, iova + offset, Perm::Write);
                    assert_eq!(reached, expected, "{:#x}", iova + offset);
                }
            }
            for beside in [0xfff, 0x4000] {
                let reached = world.reach(DISK, beside, Perm::Read);
                assert_eq!(reached, None, "beside all mappings: {beside:#x}");
            }
        }
    }
}

#[test]
fn directions_are_kept_and_refusals_told_with_their_reason() {
    let mut world = World::new();
    assert_eq!(world.reach(DISK, 0x1000, Perm::Read), None);
    assert_eq!(world.attach(DISK, 1), 0);
    for (at, flags) in [(0, 0), (1, MAP_READ), (2, MAP_WRITE), (3, 7)] {
        let first = 0x1000 * (at + 1);
        assert_eq!(world.status(map(1, first, first + 0xfff, 0, flags)), 0);
        let reads = world.reach(DISK, first, Perm::Read).is_some();
        let writes = world.reach(DISK, first, Perm::Write).is_some();
        assert_eq!((reads, writes), (flags & 1 != 0, flags & 2 != 0));
    }
    assert!(
        UnitControl::has_work(&mut world.unit),
        "to tell of refusals"
    );
    let _ = world.poll();
    let told: Vec<_> = world.ear.refused.iter().collect();
    let reasons: Vec<_> = told.iter().map(|told| told.reason).collect();
    assert_eq!(reasons, [1, 2, 2, 2, 2]);
    assert_eq!((told[0].source, told[0].iova.raw()), (DISK, 0x1000));
    assert_eq!(told[4].perm, Perm::Read);
    assert!(!UnitControl::has_work(&mut world.unit));
    // By the million: a bounded record, all counted.
    for _ in 0..10_000 {
        assert_eq!(world.reach(DISK, 0x9000, Perm::Read), None);
    }
    let _ = world.poll();
    assert_eq!(world.ear.refused.len(), 5 + MAX_REFUSED);
    assert_eq!(world.unit.stats().faults, 10_005);
}

#[test]
fn an_unmap_waits_for_its_own_leases_and_those_behind_it_go_on() {
    let mut world = World::new();
    assert_eq!(world.attach(DISK, 1), 0);
    assert_eq!(world.attach(NET, 2), 0);
    for page in 1..=4_u64 {
        assert_eq!(world.map(1, page << 12, (page << 12) + 0xfff, 0x1_0000), 0);
    }
    assert_eq!(world.map(2, 0x1000, 0x1fff, 0x2_0000), 0);
    let (first, second) = (world.lease(DISK, 0x1000, 64), world.lease(DISK, 0x2000, 64));
    let other = world.lease(NET, 0x1000, 64);
    let unmap = |domain, page: u64| Request::Unmap {
        domain,
        first: page << 12,
        last: (page << 12) + 0xfff,
    };
    let (one, two) = (world.ask(unmap(1, 1)), world.ask(unmap(1, 2)));
    let (free, foreign) = (world.ask(unmap(1, 3)), world.ask(unmap(2, 1)));
    assert_eq!(world.answer(free), Some(0), "nobody uses it");
    let _ = world.poll();
    for id in [one, two, foreign] {
        assert_eq!(world.answer(id), None);
    }
    assert_eq!(world.reach(DISK, 0x1000, Perm::Read), None, "at once");
    assert_eq!(
        world.map(1, 0x1000, 0x1fff, 0x3_0000),
        0,
        "and others go on"
    );
    // Neither its own end nor another's page makes another request ready.
    world.unit.leases_mut().end(second);
    assert!(UnitControl::has_work(&mut world.unit));
    let _ = world.poll();
    let answers = [one, two, foreign].map(|id| world.answer(id));
    let own = "the second one's access has ended";
    assert_eq!(answers, [None, Some(0), None], "{own}");
    assert!(!UnitControl::has_work(&mut world.unit));
    world.unit.leases_mut().end(other);
    world.unit.leases_mut().end(first);
    let _ = world.poll();
    let answers = [one, foreign].map(|id| world.answer(id));
    assert_eq!(answers, [Some(0), Some(0)]);
    assert_eq!(world.unit.stats().waits, 3);
}

#[test]
fn a_lease_that_one_unmap_has_found_is_waited_for_by_the_next_as_well() {
    let mut world = World::new();
    assert_eq!(world.attach(DISK, 1), 0);
    assert_eq!(world.map(1, 0x1000, 0x1fff, 0x1_0000), 0);
    assert_eq!(world.map(1, 0x2000, 0x2fff, 0x1_1000), 0);
    // One access over both pages.
    let lease = world.unit.leases_mut().begin(
        DISK,
        Iova::new(0x1800),
        Gpa::new(0x1_0800),
        0x1000,
        Perm::Write,
    );
    let lease = lease.expect("room");
    let page = |page: u64| Request::Unmap {
        domain: 1,
        first: page << 12,
        last: (page << 12) + 0xfff,
    };
    let (one, two) = (world.ask(page(1)), world.ask(page(2)));
    let gone = world.ask(detach(DISK, 1));
    let _ = world.poll();
    for id in [one, two, gone] {
        let answer = world.answer(id);
        assert_eq!(
            answer, None,
            "request {id} is answered before the access ends"
        );
    }
    world.unit.leases_mut().end(lease);
    let _ = world.poll();
    for id in [one, two, gone] {
        assert_eq!(world.answer(id), Some(0), "request {id}");
    }
}

#[test]
fn a_wait_that_lasts_has_its_devices_told_once() {
    let mut world = World::new();
    assert_eq!(world.attach(DISK, 1), 0);
    assert_eq!(world.map(1, 0x1000, 0x1fff, 0x1_0000), 0);
    let lease = world.lease(DISK, 0x1000, 64);
    let id = world.ask(Request::Unmap {
        domain: 1,
        first: 0,
        last: 0xffff,
    });
    assert_eq!(UnitControl::deadline(&world.unit), Some(1000));
    world.now = 999;
    let _ = world.poll();
    assert!(world.ear.events.is_empty());
    world.now = 1000;
    for _ in 0..3 {
        let _ = world.poll();
    }
    let sources = vec![DISK];
    assert_eq!(world.ear.events, [UnitEvent::DrainLimit { sources }]);
    assert_eq!(UnitControl::deadline(&world.unit), None);
    assert_eq!(world.answer(id), None);
    world.unit.leases_mut().end(lease);
    let _ = world.poll();
    assert_eq!(world.answer(id), Some(0));
}

#[test]
fn an_invalidation_that_a_follower_holds_holds_the_request() {
    let mut world = World::new();
    assert_eq!(world.attach(DISK, 1), 0);
    assert_eq!(world.map(1, 0x1000, 0x1fff, 0x1_0000), 0);
    world.ear.holds = 2;
    let id = world.ask(Request::Unmap {
        domain: 1,
        first: 0x1000,
        last: 0x1fff,
    });
    let scope = Scope::Range {
        domain: 1,
        iova: Iova::new(0x1000),
        len: 0x1000,
    };
    assert_eq!(world.ear.invalidated, [Invalidation { scope }]);
    for (released, answer) in [(1, None), (1, Some(0))] {
        UnitControl::release(&mut world.unit, released);
        let _ = world.poll();
        assert_eq!(world.answer(id), answer);
    }
}

#[test]
fn reattached_or_detached_endpoint_loses_its_old_mappings() {
    let mut world = World::new();
    assert_eq!(world.attach(DISK, 1), 0);
    assert_eq!(world.map(1, 0x1000, 0x1fff, 0x1_0000), 0);
    assert_eq!(world.attach(NET, 1), 0);
    let lease = world.lease(DISK, 0x1000, 64);
    let kept = world.lease(NET, 0x1000, 64);
    let before = world.unit.generation(DISK);
    let of_net = world.unit.generation(NET);
    let moved = world.ask(attach(DISK, 2, 0));
    assert_ne!(world.unit.generation(DISK), before);
    assert_eq!(world.unit.generation(NET), of_net, "nothing of it changed");
    assert_eq!(world.reach(DISK, 0x1000, Perm::Read), None);
    assert_eq!(world.reach(NET, 0x1000, Perm::Read), Some(0x1_0000));
    assert_eq!(world.answer(moved), None, "an access is under way");
    world.unit.leases_mut().end(lease);
    let _ = world.poll();
    assert_eq!(world.answer(moved), Some(0));
    assert!(!world.unit.leases().is_stale(kept));
    world.unit.leases_mut().end(kept);
}

#[test]
fn bypass_is_off_at_first_and_its_end_waits_for_what_it_let_begin() {
    let mut world = World::new();
    assert_eq!(world.reach(DISK, 0x5000, Perm::Write), None);
    assert_eq!(world.status(Request::SetBypass(true)), 0);
    assert_eq!(world.reach(DISK, 0x5000, Perm::Write), Some(0x5000));
    let before = world.unit.generation(DISK);
    let lease = world.lease(DISK, 0x5000, 64);
    let off = world.ask(Request::SetBypass(false));
    assert_ne!(world.unit.generation(DISK), before);
    assert_eq!(world.reach(DISK, 0x5000, Perm::Write), None);
    assert_eq!(world.answer(off), None);
    world.unit.leases_mut().end(lease);
    let _ = world.poll();
    assert_eq!(world.answer(off), Some(0));
}

#[test]
fn a_reset_leaves_nothing_attached_and_frees_all() {
    let mut world = World::new();
    assert_eq!(world.attach(DISK, 1), 0);
    assert_eq!(world.attach(NET, 2), 0);
    for page in 0..1000_u64 {
        assert_eq!(world.map(1, page << 12, (page << 12) + 0xfff, 0), 0);
    }
    assert_eq!(world.map(2, 0x1000, 0x1fff, 0), 0);
    assert_eq!(world.status(Request::Reset), 0);
    assert_eq!(world.reach(DISK, 0, Perm::Read), None);
    assert_eq!(world.reach(NET, 0x1000, Perm::Read), None);
    while world.poll().is_busy {}
    let stats = world.unit.stats();
    assert_eq!((stats.domains, stats.mappings), (0, 0));
    assert_eq!(stats.removed, 1001);
}

#[test]
fn domains_and_mappings_have_a_limit() {
    let mut world = World::with(Config {
        max_domains: 2,
        max_mappings: 3,
        max_leases: 64,
        ..Config::default()
    });
    let third = SourceId::new(0, 5, 0);
    assert_eq!((world.attach(DISK, 1), world.attach(NET, 2)), (0, 0));
    assert_eq!(world.attach(third, 3), NOMEM);
    assert_eq!(world.attach(DISK, 3), 0, "its own domain goes");
    assert_eq!(world.attach(third, 2), 0, "one that is there");
    for page in 0..3_u64 {
        assert_eq!(world.map(2, page << 12, (page << 12) + 0xfff, 0), 0);
    }
    assert_eq!(world.map(3, 0, 0xfff, 0), NOMEM);
    assert_eq!(world.unmap(2, 0, 0xfff), 0);
    assert_eq!(world.map(3, 0, 0xfff, 0), 0);
}

#[test]
fn an_unmap_of_very_many_goes_on_over_many_polls_and_what_comes_behind_waits() {
    const MANY: u64 = 65_536;
    let mut world = World::new();
    assert_eq!(world.attach(DISK, 1), 0);
    for page in 0..MANY {
        assert_eq!(world.map(1, page << 12, (page << 12) + 0xfff, 0), 0);
    }
    // Takes the cost of mapping them.
    let _ = world.poll();
    let all = world.ask(Request::Unmap {
        domain: 1,
        first: 0,
        last: u64::MAX,
    });
    let again = world.ask(map(1, 0, 0xfff, 0x5000, 3));
    // Regardless of the number of requests behind it, a sweep's work is at most a poll's and the
    // work that the first request has begun.
    for _ in 0..200 {
        world.ask(Request::SetBypass(false));
    }
    let polled = world.poll();
    let most = 2 * (BUDGET + CHUNK as u64 * REMOVE);
    assert!(polled.cost <= most, "{polled:?}");
    let mut polls = 0;
    while world.answer(again).is_none() {
        assert!(UnitControl::has_work(&mut world.unit));
        let polled = world.poll();
        // A budget, and the last piece.
        assert!(polled.cost <= BUDGET + CHUNK as u64 * REMOVE, "{polled:?}");
        polls += 1;
    }
    assert!(polls > 50, "{polls}");
    assert_eq!((world.answer(all), world.answer(again)), (Some(0), Some(0)));
    assert_eq!(world.reach(DISK, 0, Perm::Read), Some(0x5000));
    assert_eq!(world.unit.stats().mappings, 1);
}

#[test]
fn followers_see_what_devices_reach() {
    let mut world = World::new();
    let attachment = |world: &World| world.unit.attachment(&world.mem, DISK).unwrap();
    assert_eq!(attachment(&world), Attachment::Absent);
    assert_eq!(world.attach(DISK, 9), 0);
    assert_eq!(attachment(&world), Attachment::Domain(9));
    assert_eq!(world.map(9, 0x1000, 0x2fff, 0x1_0000), 0);
    assert_eq!(
        world.status(map(9, 0x5000, 0x5fff, 0x2_0000, 0)),
        0,
        "for nobody"
    );
    assert_eq!(world.status(map(9, 0x6000, 0x6fff, 0x3_0000, 1)), 0);
    let mut found = Vec::new();
    let mut from = 0x1800;
    while let Ok(Next::Found(next)) = world.unit.next_mapping(
        &world.mem,
        DISK,
        Iova::new(from),
        Iova::new(0x67ff),
        &mut Budget::unlimited(),
    ) {
        found.push((next.iova.raw(), next.gpa.raw(), next.len, next.can_write));
        from = next.iova.raw() + next.len;
    }
    let expected = [
        (0x1800, 0x1_0800, 0x1800, true),
        (0x6000, 0x3_0000, 0x800, false),
    ];
    assert_eq!(found, expected);
}
