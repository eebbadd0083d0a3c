//! A follower of a VT-d unit's mappings (a shadow of them, the IOTLB of another process): it
//! receives the scope of each invalidation, and holds the guest's WAIT until it has dropped the
//! same.

use std::sync::mpsc::channel;
use std::time::Duration;

use guest_mem::{Iommu, Iova, KeepAlive, PhysMem, SourceId};
use machine::{
    DataPath, Effects, Function, FunctionContext, FunctionLines, FunctionShape, Hold, HoldId,
    Invalidation, Op, Progress, Scope, Target, functions, units,
};
use vtd::spec::registers as reg;
use vtd_port::VtdPort;

use crate::ByHand;

/// The invalidation queue, and the status word of its waits.
const QUEUE: u64 = 0x3000;
const STATUS: u64 = 0x4000;
/// Time for which an invalidation may be held, ns: longer than any of these tests takes.
const LIMIT: u64 = 100_000_000_000;

units! {
    enum Units: () {
        Vtd(VtdPort),
    }
}

functions! {
    enum Functions: () {
        Follower(Follower),
    }
}

/// Holds invalidations of pages, no others; releases as many as a write to its BAR says, oldest
/// first.
#[derive(Default)]
struct Follower {
    slot: u8,
    heard: Vec<Scope>,
    held: Vec<HoldId>,
    to_release: Vec<HoldId>,
    /// Whether it must not be left behind: it keeps holds that are overdue.
    insists: bool,
    overdue: Vec<HoldId>,
}

impl Function<()> for Follower {
    fn source(&self) -> SourceId {
        SourceId::new(0, 1 + self.slot, 0)
    }

    fn shape(&self) -> FunctionShape {
        FunctionShape {
            hears_invalidations: true,
            is_iommu: false,
            ..FunctionShape::new(Default::default())
        }
    }

    fn config_read(&mut self, _: u16, _: u8) -> u32 {
        u32::MAX
    }

    fn config_write(&mut self, _: u16, _: u8, _: u32, _: &KeepAlive, _: &mut Effects<()>) {}

    fn bar_read(&mut self, _: u8, _: u64, _: &mut [u8]) {}

    fn bar_write(&mut self, _: u8, _: u64, data: &[u8], _: &KeepAlive, _: &mut Effects<()>) {
        let released = self.held.drain(..usize::from(data[0]));
        self.to_release.extend(released);
    }

    fn invalidated(&mut self, what: &Invalidation, hold: HoldId) -> Hold {
        self.heard.push(what.scope);
        match what.scope {
            Scope::Range { .. } => {
                self.held.push(hold);
                Hold::Yes
            }
            _ => Hold::No,
        }
    }

    fn hold_overdue(&mut self, hold: HoldId, out: &mut Effects<()>) {
        self.overdue.push(hold);
        if !self.insists {
            out.release(hold);
        }
    }
}

impl DataPath<()> for Follower {
    fn poll<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, ()>) -> Progress {
        let released = self.to_release.drain(..);
        released.for_each(|hold| cx.effects.release(hold));
        Progress::Idle
    }

    fn has_work<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, ()>) -> bool {
        !self.to_release.is_empty()
    }
}

struct Guest {
    machine: ByHand<Units, Functions>,
    tail: u64,
    waits: u64,
}

impl Guest {
    /// With so many followers, which insist on being waited for or not.
    fn new(followers: u8, insists: bool) -> Self {
        let mut machine = ByHand::new();
        machine.owner = machine.owner.with_hold_limit(Duration::from_nanos(LIMIT));
        let unit = vtd::Unit::new(vtd::Config::default());
        let unit = machine.owner.add_unit(Units::Vtd(VtdPort::trap(unit)));
        for slot in 0..followers {
            let follower = Functions::Follower(Follower {
                slot,
                insists,
                ..Follower::default()
            });
            machine.owner.add(unit, follower, FunctionLines::default());
        }
        let mut guest = Self {
            machine,
            tail: 0,
            waits: 0,
        };
        guest.register(reg::IQA, 8, QUEUE);
        guest.register(reg::GCMD, 4, 1 << 26);
        guest
    }

    fn register(&mut self, offset: u16, len: u8, value: u64) {
        let op = Op::Write {
            bar: 0,
            offset: offset.into(),
            len,
            value,
        };
        self.machine.access(Target::Unit(0), op).unwrap();
    }

    fn submit(&mut self, low: u64, high: u64) {
        self.machine.put(QUEUE + self.tail, &[low, high]);
        self.tail += 16;
        self.register(reg::IQT, 8, self.tail);
    }

    /// A wait that writes its number.
    fn wait(&mut self) -> u64 {
        self.waits += 1;
        self.submit(0x25 | self.waits << 32, STATUS);
        self.waits
    }

    /// The number of the last wait that is over.
    fn done(&mut self) -> u64 {
        self.machine.poll();
        self.machine.get(STATUS) & 0xffff_ffff
    }

    fn follower(&mut self, number: usize) -> &mut Follower {
        let Some(Functions::Follower(follower)) = self.machine.owner.function(number) else {
            unreachable!("it was not removed")
        };
        follower
    }

    /// Pages of a domain are invalidated, and the guest waits: the wait's number.
    fn unmap(&mut self) -> u64 {
        self.submit(0x32 | 5 << 16, 0x7_0000);
        self.wait()
    }

    /// Has the follower release so many, oldest first.
    fn release(&mut self, number: usize, count: u64) {
        self.machine.write(Target::Function(number), 0, 0, count);
        self.machine.poll();
    }

    /// The limit of what is held now has passed.
    fn wait_for_limit(&mut self) {
        let now = std::mem::replace(&mut self.machine.now, sidecore::Nanos::now().0 + 2 * LIMIT);
        self.machine.poll();
        self.machine.now = now;
    }
}

#[test]
fn a_subscriber_receives_the_scope_and_holds_the_wait_behind_it() {
    let mut guest = Guest::new(1, false);
    // A domain, then two pages of it.
    guest.submit(0x22 | 5 << 16, 0);
    let wait = guest.wait();
    assert_eq!(guest.done(), wait, "it does not hold this one");
    guest.submit(0x32 | 5 << 16, 0x7_0000 | 1);
    let wait = guest.wait();
    let (domain, iova, len) = (5, Iova::new(0x7_0000), 0x2000);
    let pages = Scope::Range { domain, iova, len };
    assert_eq!(guest.follower(0).heard, [Scope::Domain(5), pages]);
    (0..10).for_each(|_| assert_eq!(guest.done(), wait - 1));
    guest.release(0, 1);
    assert_eq!(guest.done(), wait);
}

#[test]
fn an_overdue_hold_is_reported_once_and_released_by_a_follower_that_does_not_insist() {
    let mut guest = Guest::new(1, false);
    let wait = guest.unmap();
    guest.done();
    guest.wait_for_limit();
    assert_eq!(guest.done(), wait);
    assert_eq!(guest.machine.owner.totals().hold_limits, 1);
    // A release that comes too late lets nothing else go.
    let wait = guest.unmap();
    guest.release(0, 1);
    assert_eq!(guest.done(), wait - 1);
    guest.release(0, 1);
    assert_eq!(guest.done(), wait);
}

#[test]
fn a_wait_never_completes_without_a_follower_that_insists() {
    let mut guest = Guest::new(1, true);
    let wait = guest.unmap();
    guest.done();
    for _ in 0..3 {
        guest.wait_for_limit();
        assert_eq!(guest.done(), wait - 1);
    }
    assert_eq!(guest.machine.owner.totals().hold_limits, 1);
    assert_eq!(guest.follower(0).overdue.len(), 1);
    guest.release(0, 1);
    assert_eq!(guest.done(), wait);
}

#[test]
fn a_release_too_many_does_not_let_the_hold_of_another_function_go() {
    let mut guest = Guest::new(2, true);
    let wait = guest.unmap();
    guest.done();
    let hold = guest.follower(0).held[0];
    let others = guest.follower(1).held[0];
    assert_ne!(hold, others);
    // Its own twice, and the other's name.
    let follower = guest.follower(0);
    follower.to_release = vec![hold, hold, others, HoldId(99)];
    guest.machine.poll();
    assert_eq!(guest.done(), wait - 1);
    guest.release(1, 1);
    assert_eq!(guest.done(), wait);
}

#[test]
fn a_follower_that_is_removed_holds_nothing_any_more() {
    let mut guest = Guest::new(2, true);
    let wait = guest.unmap();
    guest.done();
    guest.release(1, 1);
    assert_eq!(guest.done(), wait - 1);
    let (told, removed) = channel();
    guest.machine.owner.remove(0, told);
    guest.machine.poll();
    assert_eq!(removed.try_recv(), Ok(SourceId::new(0, 1, 0)));
    assert_eq!(guest.done(), wait);
}
