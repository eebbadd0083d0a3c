//! Two register pages whose writes are in one ring, with this process as KVM.

use guest_mem::{Gpa, RegisterPage, SlotMapping};
use kvm_bindings::{KVM_MEM_READONLY, kvm_regs};
use platform::layout;

use super::*;
use crate::coalesced::tests::FakeKvm;
use crate::testing::{Exit, Guest};

/// As [`vtd_port`] asks for: more than a ring has.
const BATCH: usize = 256;
const PAGES: [Range<u64>; 2] = [0x1_0000..0x1_1000, 0x1_1000..0x1_2000];

/// A unit that notes the writes it is given.
struct Noting {
    entries: ZoneEntries,
    /// Data of writes, in the order of their application.
    seen: Vec<u64>,
}

impl Noting {
    fn poll(&mut self, max: usize) -> usize {
        let seen = &mut self.seen;
        self.entries.drain(max, &mut |entry| {
            assert_eq!(
                (entry.offset, entry.len),
                ((entry.data % 0x1000) as u16 & !7, 8)
            );
            seen.push(entry.data);
        })
    }

    /// A write that exited: what was logged before it has been taken.
    fn access(&mut self, data: u64) {
        self.poll(BATCH);
        self.seen.push(data);
    }
}

struct Machine {
    kvm: FakeKvm,
    units: [Noting; 2],
    /// Values that drivers have written.
    written: [Vec<u64>; 2],
    exits: u32,
}

impl Machine {
    fn new() -> Self {
        let (kvm, ring) = FakeKvm::new();
        let ring = ZonedRing::over(ring);
        let noting = |addresses| Noting {
            entries: ring.entries(addresses).unwrap(),
            seen: Vec::new(),
        };
        Self {
            kvm,
            units: PAGES.map(noting),
            written: [Vec::new(), Vec::new()],
            exits: 0,
        }
    }

    fn write(&mut self, unit: usize, data: u64) {
        let address = PAGES[unit].start + ((data % 0x1000) & !7);
        self.written[unit].push(data);
        if !self.kvm.log(address, &data.to_le_bytes()) {
            self.exits += 1;
            self.units[unit].access(data);
        }
    }

    fn check(&self) {
        for (unit, written) in self.units.iter().zip(&self.written) {
            assert!(unit.entries.is_empty());
            assert_eq!(&unit.seen, written);
        }
    }
}

#[test]
fn a_unit_takes_its_own_writes_and_leaves_the_other_its() {
    let mut machine = Machine::new();
    assert!(machine.units.iter().all(|unit| unit.entries.is_empty()));
    for data in 0..10 {
        machine.write(data as usize % 2, data);
    }
    assert_eq!(machine.units[0].poll(BATCH), 5);
    assert!(machine.units[0].entries.is_empty());
    assert!(!machine.units[1].entries.is_empty(), "kept for it");
    machine.write(1, 10);
    assert_eq!(machine.units[1].poll(BATCH), 6);
    machine.check();
}

#[test]
fn a_write_that_exits_comes_after_all_that_its_unit_was_kept_and_logged() {
    let mut machine = Machine::new();
    // Kept for unit 1 by a poll of unit 0.
    machine.write(1, 1);
    machine.write(0, 2);
    machine.units[0].poll(BATCH);
    // The ring is filled by unit 0, with one of unit 1's in between; then unit 1's write exits.
    machine.write(1, 3);
    for data in 4..172 {
        machine.write(0, data);
    }
    assert_eq!(machine.exits, 0, "169 fit");
    machine.write(1, 172);
    assert_eq!(machine.exits, 1);
    assert_eq!(machine.units[1].seen, [1, 3, 172]);
    machine.units[0].poll(BATCH);
    machine.check();
}

/// Any interleaving of writes, polls of either unit and of any size: each unit sees what was
/// written to it, in that order.
#[test]
fn each_units_writes_keep_their_order_however_the_units_take_turns() {
    let mut state = 1_u64;
    let mut random = move |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    let mut exits = 0;
    for round in 0..200 {
        let mut machine = Machine::new();
        // Some machines poll seldom, so that the ring is full at times.
        let polls = [2, 20, 400][round % 3];
        for data in 0..2000 {
            machine.write(random(2) as usize, data);
            if random(polls) == 0 {
                let max = [1, 5, BATCH][random(3) as usize];
                machine.units[random(2) as usize].poll(max);
            }
        }
        exits += machine.exits;
        for unit in [0, 1] {
            machine.units[unit].poll(BATCH);
        }
        machine.check();
    }
    assert!(exits > 0, "the ring was never full");
}

#[test]
fn zones_do_not_overlap() {
    let (_kvm, ring) = FakeKvm::new();
    let ring = ZonedRing::over(ring);
    ring.entries(0x1000..0x2000).unwrap();
    assert!(ring.entries(0x1fff..0x3000).is_err());
    ring.entries(0x2000..0x3000).unwrap();
}

/// KVM logs writes to both pages of a machine with two units, and each that it logs no more exits.
#[test]
fn kvm_logs_the_writes_of_two_pages_in_one_ring() {
    // 2: mov [rsi], ecx; mov [r8], ecx; inc ecx; cmp ecx, edx; jne 2b; mov [r9], ecx.
    const CODE: [u8; 14] = [
        0x89, 0x0e, 0x41, 0x89, 0x08, 0xff, 0xc1, 0x39, 0xd1, 0x75, 0xf5, 0x41, 0x89, 0x09,
    ];
    const DONE: u64 = layout::VTD - 0x1000;
    let pages = [layout::VTD, layout::VTD_ASSIGNED];
    let Some(mut guest) = Guest::new(&CODE, &[layout::VTD & !0x1f_ffff]) else {
        return;
    };
    let ring = match ZonedRing::map(guest.vcpu.as_fd()) {
        Ok(ring) => ring,
        Err(error) => {
            eprintln!("skipped: KVM's coalesced ring: {error}");
            return;
        }
    };
    let mut logs = Vec::new();
    for at in pages {
        let page = RegisterPage::new().unwrap();
        let mapping = Arc::new(SlotMapping::of_page(page.memfd()).unwrap());
        let slot = guest.vm.map(Gpa::new(at), &mapping, KVM_MEM_READONLY);
        if let Err(error) = slot {
            eprintln!("skipped: {error}");
            return;
        }
        let zone = CoalescedZone::new(guest.vm.clone(), at, layout::VTD_SIZE as u32);
        logs.push(ring.log(zone).unwrap());
    }
    let start = |guest: &mut Guest, from: u64, to: u64| {
        guest.start(kvm_regs {
            rsi: pages[0] + 0x80,
            r8: pages[1] + 0x88,
            r9: DONE,
            rcx: from,
            rdx: to,
            ..Default::default()
        });
    };
    let drain = |log: &mut ZoneLog| {
        let mut seen = Vec::new();
        log.drain(BATCH, &mut |entry| seen.push((entry.offset, entry.data)));
        seen
    };
    // 50 to each, none of which exits.
    start(&mut guest, 0, 50);
    assert_eq!(guest.run(0), Exit::Write(DONE, 50));
    for (log, offset) in logs.iter_mut().zip([0x80, 0x88]) {
        assert!(!log.is_empty());
        let all: Vec<_> = (0..50).map(|data| (offset, data)).collect();
        assert_eq!(drain(log), all);
        assert!(log.is_empty());
    }
    // A page that is armed: its writes exit, and the other's do not.
    logs[0].unregister().unwrap();
    start(&mut guest, 7, 8);
    assert_eq!(guest.run(0), Exit::Write(pages[0] + 0x80, 7));
    assert_eq!(guest.run(0), Exit::Write(DONE, 8));
    assert_eq!(drain(&mut logs[0]), []);
    assert_eq!(drain(&mut logs[1]), [(0x88, 7)]);
    // The ring is full: what comes then exits, after 169.
    logs[0].register().unwrap();
    start(&mut guest, 0, 1000);
    let Exit::Write(address, data) = guest.run(0) else {
        panic!("registers are read without an exit");
    };
    assert_eq!((address, data), (pages[1] + 0x88, 84));
    let first: Vec<_> = (0..85).map(|data| (0x80, data)).collect();
    assert_eq!(drain(&mut logs[1]).len(), 84);
    assert_eq!(drain(&mut logs[0]), first);
}
