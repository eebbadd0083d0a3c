//! Somebody who follows a VT-d unit's mappings (a shadow of them, the IOTLB of another process): it hears what each
//! invalidation covers, and holds the guest's WAIT until it has forgotten the same.

use guest_mem::{Iommu, Iova, KeepAlive, PhysMem, SourceId};
use machine::{
    Cx, DataPath, Effects, Function, FunctionShape, Hold, Invalidation, Op, Progress, Scope,
    Target, Wires, functions, units,
};
use vtd::spec::registers as reg;
use vtd_port::VtdPort;

use crate::ByHand;

/// The invalidation queue, and the status word of its waits.
const QUEUE: u64 = 0x3000;
const STATUS: u64 = 0x4000;
/// How long an invalidation may be held.
const LIMIT: u64 = 1_000_000;

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

/// Holds invalidations of pages, no others; lets go of what is released by a write to its BAR.
#[derive(Default)]
struct Follower {
    heard: Vec<Scope>,
    released: u64,
}

impl Function<()> for Follower {
    fn source(&self) -> SourceId {
        SourceId::new(0, 1, 0)
    }

    fn shape(&self) -> FunctionShape {
        FunctionShape {
            hears_invalidations: true,
            ..FunctionShape::new(Default::default())
        }
    }

    fn config_read(&mut self, _: u16, _: u8) -> u32 {
        u32::MAX
    }

    fn config_write(&mut self, _: u16, _: u8, _: u32, _: &KeepAlive, _: &mut Effects<()>) {}

    fn bar_read(&mut self, _: u8, _: u64, _: &mut [u8]) {}

    fn bar_write(&mut self, _: u8, _: u64, data: &[u8], _: &KeepAlive, _: &mut Effects<()>) {
        self.released += u64::from(data[0]);
    }

    fn invalidated(&mut self, what: &Invalidation) -> Hold {
        self.heard.push(what.scope);
        match what.scope {
            Scope::Range { .. } => Hold::Yes,
            _ => Hold::No,
        }
    }
}

impl DataPath<()> for Follower {
    fn poll<I: Iommu, M: PhysMem>(&mut self, cx: &mut Cx<'_, I, M, ()>) -> Progress {
        (0..std::mem::take(&mut self.released)).for_each(|_| cx.effects.release());
        Progress::Idle
    }

    fn has_work<I: Iommu, M: PhysMem>(&mut self, _: &mut Cx<'_, I, M, ()>) -> bool {
        self.released > 0
    }
}

struct Guest {
    machine: ByHand<Units, Functions>,
    tail: u64,
    waits: u64,
}

impl Guest {
    fn new() -> Self {
        let mut machine = ByHand::new();
        let unit = machine
            .owner
            .add_unit(Units::Vtd(VtdPort::trap(vtd::Unit::new(vtd::Config {
                hold_limit_ns: LIMIT,
                ..vtd::Config::default()
            }))));
        let follower = Functions::Follower(Follower::default());
        machine.owner.add(unit, follower, Wires::default());
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

    fn heard(&mut self) -> Vec<Scope> {
        let Some(Functions::Follower(follower)) = self.machine.owner.function(0) else {
            unreachable!("it was not removed")
        };
        std::mem::take(&mut follower.heard)
    }
}

#[test]
fn a_subscriber_hears_what_is_covered_and_holds_the_wait_behind_it() {
    let mut guest = Guest::new();
    // A domain, then two pages of it.
    guest.submit(0x22 | 5 << 16, 0);
    let wait = guest.wait();
    assert_eq!(guest.done(), wait, "it does not hold this one");
    guest.submit(0x32 | 5 << 16, 0x7_0000 | 1);
    let wait = guest.wait();
    let (domain, iova, len) = (5, Iova::new(0x7_0000), 0x2000);
    let pages = Scope::Range { domain, iova, len };
    assert_eq!(guest.heard(), [Scope::Domain(5), pages]);
    (0..10).for_each(|_| assert_eq!(guest.done(), wait - 1));
    guest.machine.write(Target::Function(0), 0, 0, 1);
    guest.machine.poll();
    assert_eq!(guest.done(), wait);
}

#[test]
fn a_hold_that_is_not_released_ends_at_the_limit_and_is_told() {
    let mut guest = Guest::new();
    guest.submit(0x32 | 5 << 16, 0x7_0000);
    let wait = guest.wait();
    guest.done();
    guest.machine.now = sidecore::Nanos::now().0 + 2 * LIMIT;
    guest.machine.poll();
    assert_eq!(guest.done(), wait);
    assert_eq!(guest.machine.owner.totals().hold_limits, 1);
    // A release that comes too late lets nothing else go.
    guest.machine.write(Target::Function(0), 0, 0, 1);
    guest.machine.poll();
    guest.submit(0x32 | 5 << 16, 0x7_0000);
    let wait = guest.wait();
    assert_eq!(guest.done(), wait - 1);
}
