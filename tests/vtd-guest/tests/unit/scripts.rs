//! Register scripts through the three front ends.
//!
//! A script that obeys the polling rule (it waits for the answer to a store before a store that
//! would hide it) must give identical results in `trap`, `logged` and `shared`, with a slow owner
//! that looks only when the guest waits and with a fast one that looks after every store. The rest
//! must agree in `trap` and `logged`, and leave `shared` bounded and safe; each says which rule it
//! breaks.

use fake_mem::{ArrayMem, PendingMem};
use guest_mem::{DmaFault, Gpa, Iommu, Iova, Perm, PhysMem, RegPage, RegisterPage, Run, Stop};
use vtd::front::Shared;
use vtd::spec::registers as reg;
use vtd::{AccessLen, Config, Event, Parked, Progress, Unit};
use vtd_guest::*;

/// Everything a guest or a device can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Observation {
    Register(u16, u64),
    Status(u32),
    Translated(Result<Run, Stop>),
    Record([u32; 4]),
    Messages(Vec<(u64, u32)>),
    Events(Vec<Event>),
    Rest(Progress),
}

/// A machine that notes what it sees.
struct Scene<M: PhysMem> {
    m: Machine<M>,
    guest: Guest,
    table: u64,
    seen: Vec<Observation>,
}

impl<M: PhysMem + HasRam> Scene<M> {
    /// The guest waits for a register.
    fn poll(&mut self, offset: u16, mask: u32, want: u32) {
        self.m.poll(offset, mask, want);
        let value = u64::from(self.m.read4(offset));
        self.seen.push(Observation::Register(offset, value));
    }

    fn read4(&mut self, offset: u16) {
        let value = u64::from(self.m.read4(offset));
        self.seen.push(Observation::Register(offset, value));
    }

    fn read8(&mut self, offset: u16) {
        let value = self.m.read8(offset);
        self.seen.push(Observation::Register(offset, value));
    }

    /// Gives the owner time; notes how it rests and what came out.
    fn rest(&mut self) {
        let progress = self.m.settle();
        self.seen.push(Observation::Rest(progress));
        let messages = std::mem::take(&mut self.m.out.messages);
        self.seen.push(Observation::Messages(messages));
        let events = std::mem::take(&mut self.m.out.events);
        self.seen.push(Observation::Events(events));
        let status = self.m.status();
        self.seen.push(Observation::Status(status));
    }

    fn translate(&mut self, iova: u64, perm: Perm) {
        let answer = self.m.translate(DISK, iova, perm);
        self.seen.push(Observation::Translated(answer));
    }

    fn map(&mut self, iova: u64, pte: u64) {
        let table = self.table;
        self.guest.map(table, 4, iova, pte);
    }

    fn record(&mut self, index: u16) {
        let dwords = record(&mut self.m, index);
        self.seen.push(Observation::Record(dwords));
    }

    /// Returns everything that can be read at the end. CAP and the like included; GCMD is
    /// write-only, RTADDR to IVA are the guest's own values, FECTL.IP is not shown in `shared`.
    fn finish(mut self) -> Vec<Observation> {
        self.rest();
        for offset in [reg::VER, reg::GSTS, reg::FSTS, reg::ICS] {
            self.read4(offset);
        }
        for offset in [reg::CAP, reg::ECAP, reg::IQH, reg::IQT, reg::CCMD, IOTLB] {
            self.read8(offset);
        }
        for index in 0..16 {
            self.record(index);
        }
        self.seen
    }
}

fn scene<M: PhysMem + HasRam>(
    mode: Mode,
    is_eager: bool,
    wrap: impl Fn(ArrayMem) -> M,
) -> Scene<M> {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    let mut m = Machine::new(mode, Config::default(), wrap(guest.mem.clone()));
    m.is_eager = is_eager;
    Scene {
        m,
        guest,
        table,
        seen: Vec::new(),
    }
}

trait Script {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>);
}

fn play<S: Script>(mode: Mode, is_eager: bool) -> Vec<Observation> {
    let mut s = scene(mode, is_eager, |mem| mem);
    S::run(&mut s);
    s.finish()
}

/// Identical in all modes, at both paces, and with every access pending once.
fn agrees_everywhere<S: Script>() {
    let reference = play::<S>(Mode::Trap, false);
    for mode in MODES {
        for is_eager in [false, true] {
            assert_eq!(
                play::<S>(mode, is_eager),
                reference,
                "{mode:?}, eager: {is_eager}"
            );
        }
        let mut s = scene(mode, false, PendingMem::every);
        S::run(&mut s);
        assert_eq!(s.finish(), reference, "{mode:?}, pending everywhere");
    }
}

/// Identical wherever writes are ordered; `shared` comes to rest and goes on serving.
fn agrees_in_trap_and_logged<S: Script>() {
    let reference = play::<S>(Mode::Trap, false);
    assert_eq!(play::<S>(Mode::Logged, false), reference);
    assert_eq!(play::<S>(Mode::Logged, true), reference);
    for is_eager in [false, true] {
        let mut s = scene(Mode::Shared, is_eager, |mem| mem);
        S::run(&mut s);
        s.m.settle();
    }
}

fn enable_events<M: PhysMem + HasRam>(s: &mut Scene<M>) {
    s.m.write4(reg::FEDATA, 0x31);
    s.m.write4(reg::FEADDR, 0xfee0_0000);
    s.m.write4(reg::FEUADDR, 0);
    s.m.write4(reg::FECTL, 0);
    s.m.settle();
}

/// The order in which stock Linux brings a unit up (without interrupt remapping).
struct LinuxBoot;
impl Script for LinuxBoot {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        for offset in [reg::CAP, reg::ECAP] {
            s.read8(offset);
        }
        for offset in [reg::VER, reg::GSTS, reg::FSTS] {
            s.read4(offset);
        }
        s.m.write4(reg::IQT, 0);
        s.m.write8(reg::IQA, QUEUE);
        s.m.write4(reg::GCMD, 0x0400_0000);
        s.poll(reg::GSTS, 0x0400_0000, 0x0400_0000);
        // `enable_drhd_fault_handling` writes the status back to itself.
        let fsts = s.m.read4(reg::FSTS);
        s.m.write4(reg::FSTS, fsts);
        s.m.write8(reg::RTADDR, ROOT);
        s.m.write4(reg::GCMD, 0x4400_0000);
        s.poll(reg::GSTS, 0x4000_0000, 0x4000_0000);
        s.m.submit_wait(&[cc_global()]);
        s.m.submit_wait(&[iotlb_global()]);
        enable_events(s);
        s.poll(reg::FECTL, 0x8000_0000, 0);
        s.m.write4(reg::GCMD, 0x8400_0000);
        s.poll(reg::GSTS, 0x8000_0000, 0x8000_0000);
        // Strict I/O: map, use, unmap, flush; twice round the ring.
        for turn in 0..300u64 {
            let iova = 0xffff_f000 - (turn % 5) * 0x1000;
            s.map(iova, (0x80_0000 + turn * 0x1000) | RW);
            s.translate(iova + 8, Perm::Write);
            s.map(iova, 0);
            s.m.submit_wait(&[iotlb_pages(1, iova, 0)]);
        }
        s.translate(0xffff_f000, Perm::Write);
        s.rest();
    }
}

#[test]
fn linux_boot_and_strict_io_is_the_same_in_every_mode() {
    agrees_everywhere::<LinuxBoot>();
}

/// kexec: the root table is set again with RTPS already 1, so nothing is waited for before the
/// flushes.
struct SecondRootTable;
impl Script for SecondRootTable {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.boot();
        s.map(0x1000, 0x5000 | RW);
        s.translate(0x1000, Perm::Read);
        let contexts = s.guest.page();
        let root = s.guest.page();
        let table = s.guest.page();
        s.guest.put(root, u128::from(contexts | 1));
        s.guest.put(
            contexts + u64::from(DISK.devfn()) * 16,
            (0x202 << 64) | u128::from(table | 1),
        );
        s.guest.map(table, 4, 0x1000, 0x9000 | RW);
        for _ in 0..2 {
            s.m.write8(reg::RTADDR, root);
            s.m.write4(reg::GCMD, 0xc400_0000);
            s.m.submit_wait(&[cc_global(), iotlb_global()]);
            s.translate(0x1000, Perm::Read);
        }
    }
}

#[test]
fn a_second_identical_srtp_is_seen_and_precedes_the_flushes_behind_it() {
    agrees_everywhere::<SecondRootTable>();
    let seen = play::<SecondRootTable>(Mode::Shared, false);
    let run = Run {
        gpa: Gpa::new(0x9000),
        len: 0x1000,
    };
    assert!(seen.contains(&Observation::Translated(Ok(run))));
}

/// Does what Linux's fault handler does: FSTS, records from FRI on, each cleared, then FSTS.
fn handle_faults<M: PhysMem + HasRam>(s: &mut Scene<M>) {
    s.rest();
    s.read4(reg::FSTS);
    let mut index = (s.m.read4(reg::FSTS) >> 8 & 0xff) as u16;
    for turn in 0.. {
        assert!(turn < 16, "the handler goes in a circle");
        let dwords = record(&mut s.m, index);
        if dwords[3] & 0x8000_0000 == 0 {
            break;
        }
        s.seen.push(Observation::Record(dwords));
        s.m.write4(FRCD + index * 16 + 12, 0x8000_0000);
        index = (index + 1) % 16;
    }
    s.m.write4(reg::FSTS, 0x83);
    s.poll(reg::FSTS, !0, 0);
}

struct Faults;
impl Script for Faults {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.boot();
        enable_events(s);
        s.map(0x1000, 0x5000 | R);
        for round in 0..20 {
            // 1, 2, ... 20 distinct faults: from the seventeenth on, overflow.
            for fault in 0..=round {
                s.translate(0x1000 + fault * 0x10_0000, Perm::Write);
                s.translate(0x1000 + fault * 0x10_0000, Perm::Write);
            }
            handle_faults(s);
        }
    }
}

#[test]
fn faults_are_recorded_announced_and_cleared_the_same_in_every_mode() {
    agrees_everywhere::<Faults>();
}

/// After IQE Linux mends the descriptor, clears IQE, and submits again at once.
struct QueueError;
impl Script for QueueError {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.boot();
        enable_events(s);
        for bad in [
            0xf,
            0x4,
            0x3,
            cc_global() | 1 << 127,
            wait_status(RAM, 1),
            0,
        ] {
            let at = s.m.tail;
            s.m.submit(&[bad, wait_status(STATUS, 2)]);
            s.rest();
            s.poll(reg::FSTS, 0x10, 0x10);
            s.read8(reg::IQH);
            s.guest.put(QUEUE + at, iotlb_global());
            s.m.write4(reg::FSTS, 0x10);
            s.m.submit(&[wait_status(STATUS + 8, 3)]);
            s.rest();
            s.poll(reg::FSTS, !0, 0);
            s.read8(reg::IQH);
        }
        // A tail outside the queue.
        let tail = s.m.tail as u32;
        s.m.write4(reg::IQT, 0x2000);
        s.poll(reg::FSTS, 0x10, 0x10);
        s.m.write4(reg::IQT, tail);
        s.m.write4(reg::FSTS, 0x10);
        s.poll(reg::FSTS, !0, 0);
        s.rest();
    }
}

#[test]
fn queue_errors_stop_and_resume_the_same_in_every_mode() {
    agrees_everywhere::<QueueError>();
}

/// Memory of a guest that looks at it between the unit's stores, to check the order within a sweep:
/// a guest that sees the status word sees IQH behind its descriptor, and IQE repaired before IQH
/// moves.
struct Watcher {
    mem: ArrayMem,
    page: RegisterPage,
    looks: std::cell::RefCell<Vec<(u64, u32)>>,
}
impl PhysMem for Watcher {
    fn read_u64(&self, gpa: Gpa) -> guest_mem::Access<u64> {
        self.mem.read_u64(gpa)
    }
    fn store_u32_release(&self, gpa: Gpa, value: u32) -> guest_mem::Access<()> {
        let look = (self.page.load64(reg::IQH), self.page.load32(reg::FSTS));
        self.looks.borrow_mut().push(look);
        self.mem.store_u32_release(gpa, value)
    }
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> guest_mem::Access<()> {
        self.mem.read(gpa, buf)
    }
    fn write(&self, gpa: Gpa, buf: &[u8]) -> guest_mem::Access<()> {
        self.mem.write(gpa, buf)
    }
    fn host(
        &self,
        gpa: Gpa,
        len: u64,
        intent: guest_mem::Intent,
    ) -> guest_mem::Access<guest_mem::Hva> {
        self.mem.host(gpa, len, intent)
    }
    fn keep_alive(&self) -> guest_mem::KeepAlive {
        self.mem.keep_alive()
    }
}
impl HasRam for Watcher {
    fn ram(&self) -> &ArrayMem {
        &self.mem
    }
}

#[test]
fn iqe_is_repaired_before_iqh_moves_and_iqh_is_shown_before_the_status_word() {
    for mode in [Mode::Logged, Mode::Shared] {
        let guest = Guest::new();
        let watcher = Watcher {
            mem: guest.mem.clone(),
            page: RegisterPage::in_heap(),
            looks: Default::default(),
        };
        let mut m = Machine::new(mode, Config::default(), watcher);
        m.mem.page = m.page.clone();
        m.boot();
        m.mem.looks.borrow_mut().clear();
        let at = m.tail;
        m.submit(&[0xf]);
        m.poll(reg::FSTS, 0x10, 0x10);
        guest.put(QUEUE + at, cc_global());
        m.write4(reg::FSTS, 0x10);
        m.submit(&[wait_status(STATUS, 5), wait_status(STATUS, 6)]);
        m.settle();
        let expected = [(at + 0x20, 0), (at + 0x30, 0)];
        assert_eq!(*m.mem.looks.borrow(), expected, "{mode:?}");
    }
}

/// Register-based invalidation, as used when the queue is not available.
struct RegisterInvalidation;
impl Script for RegisterInvalidation {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.write8(reg::RTADDR, ROOT);
        s.m.write4(reg::GCMD, 0x4000_0000);
        s.poll(reg::GSTS, !0, 0x4000_0000);
        s.m.write8(reg::CCMD, 1 << 63 | 1 << 61);
        s.poll(reg::CCMD + 4, 0x8000_0000, 0);
        s.m.write8(IOTLB, 1 << 63 | 1 << 60);
        s.poll(IOTLB + 4, 0x8000_0000, 0);
        s.m.write4(reg::GCMD, 0x8000_0000);
        s.poll(reg::GSTS, !0, 0xc000_0000);
        for round in 0..3u64 {
            s.map(0x4000, (0x5000 + round * 0x1000) | RW);
            // Without the flush the old entry may still answer; it does.
            s.translate(0x4000, Perm::Read);
            s.m.write8(IVA, 0x4000);
            s.m.write8(IOTLB, 1 << 63 | 3 << 60 | 1 << 32);
            s.poll(IOTLB + 4, 0x8000_0000, 0);
            s.translate(0x4000, Perm::Read);
        }
        // After the pages, because a context flush may drop them as well.
        s.m.write8(reg::CCMD, 1 << 63 | 3 << 61 | u64::from(DISK.0) << 16 | 1);
        s.poll(reg::CCMD + 4, 0x8000_0000, 0);
        s.translate(0x4000, Perm::Read);
        // Refused.
        s.m.write8(IOTLB, 1 << 63);
        s.poll(IOTLB + 4, 0x8000_0000, 0);
    }
}

#[test]
fn register_invalidations_are_the_same_in_every_mode() {
    agrees_everywhere::<RegisterInvalidation>();
}

/// Leases hold back a wait, a drain limit passes, leases end.
struct Leases;
impl Script for Leases {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.boot();
        s.map(0x1000, 0x5000 | RW);
        s.map(0x2000, 0x6000 | RW);
        s.m.begin(DISK, 0x1000, 512, Perm::Write);
        s.m.begin(DISK, 0x2000, 512, Perm::Read);
        s.map(0x1000, 0);
        s.m.submit(&[
            iotlb_domain(1),
            wait_status(STATUS, 2),
            wait_status(STATUS, 3),
        ]);
        s.rest();
        s.m.now = 2_000_000_000;
        s.rest();
        s.m.end_first();
        s.rest();
        s.m.submit(&[iotlb_global(), wait_status(STATUS, 4)]);
        s.rest();
        // Translation goes off: the other access has to end first.
        s.m.write4(reg::GCMD, 0x0400_0000);
        s.rest();
        s.read4(reg::GSTS);
        s.m.end_first();
        s.poll(reg::GSTS, 0x8000_0000, 0);
    }
}

#[test]
fn parked_waits_are_the_same_in_every_mode() {
    agrees_everywhere::<Leases>();
}

/// Interrupts of both kinds, masked and not.
struct Events;
impl Script for Events {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.boot();
        s.m.write4(reg::IEDATA, 0x55);
        s.m.write4(reg::IEADDR, 0xfee0_2000);
        s.m.write4(reg::IECTL, 0);
        s.m.submit(&[wait_interrupt() | wait_status(STATUS, 1)]);
        s.rest();
        s.poll(reg::ICS, 1, 1);
        s.m.write4(reg::ICS, 1);
        s.poll(reg::ICS, 1, 0);
        s.m.write4(reg::IECTL, 0x8000_0000);
        s.m.submit(&[wait_interrupt()]);
        s.rest();
        s.m.write4(reg::IEDATA, 0x56);
        s.m.write4(reg::IECTL, 0);
        s.rest();
        s.translate(0x9000, Perm::Read);
        s.rest();
        enable_events(s);
        s.rest();
        s.m.write4(reg::FECTL, 0x8000_0000);
        s.rest();
        handle_faults(s);
        s.translate(0x9000, Perm::Read);
        s.rest();
        s.m.write4(reg::FECTL, 0);
        s.rest();
        handle_faults(s);
    }
}

#[test]
fn events_are_the_same_in_every_mode() {
    agrees_everywhere::<Events>();
}

/// Off and on again with a tail left over: the sweep must not go by the old one.
struct QueueRestart;
impl Script for QueueRestart {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.boot();
        s.m.write4(reg::GCMD, 0x8000_0000);
        s.poll(reg::GSTS, 0x0400_0000, 0);
        s.m.write4(reg::IQT, 0);
        s.m.tail = 0;
        for slot in 0..256 {
            s.guest.put(QUEUE + slot * 16, 0xf);
        }
        s.m.write8(reg::IQA, QUEUE);
        s.m.write4(reg::GCMD, 0x8400_0000);
        s.poll(reg::GSTS, 0x0400_0000, 0x0400_0000);
        s.m.submit_wait(&[cc_global()]);
        s.poll(reg::FSTS, !0, 0);
    }
}

#[test]
fn the_queue_restarts_from_the_new_tail_in_every_mode() {
    agrees_everywhere::<QueueRestart>();
}

/// Breaks the rule: one-shots stored over each other without waiting, as kvm-unit-tests does.
struct OneShotsWithoutWaiting;
impl Script for OneShotsWithoutWaiting {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.write8(reg::IQA, QUEUE);
        s.m.write4(reg::GCMD, 0x0400_0000);
        s.m.write8(reg::RTADDR, ROOT);
        s.m.write4(reg::GCMD, 0x4400_0000);
        s.m.write4(reg::GCMD, 0x0500_0000);
        s.m.write4(reg::GCMD, 0x8400_0000);
        s.rest();
        s.read4(reg::GSTS);
        s.map(0x1000, 0x5000 | RW);
        s.translate(0x1000, Perm::Read);
    }
}

/// Breaks the rule: SRTP with one table, then another, then TE off and on, unwaited.
struct RootTablesInARow;
impl Script for RootTablesInARow {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.boot();
        for root in [0x7000, RAM, ROOT] {
            s.m.write8(reg::RTADDR, root);
            s.m.write4(reg::GCMD, 0xc400_0000);
            s.m.write4(reg::GCMD, 0x0400_0000);
            s.m.write4(reg::GCMD, 0x8400_0000);
        }
        s.rest();
        s.map(0x1000, 0x5000 | RW);
        s.translate(0x1000, Perm::Read);
    }
}

/// Breaks the rule: writes every register, aligned or not, with nonsense, unwaited.
struct Nonsense;
impl Script for Nonsense {
    fn run<M: PhysMem + HasRam>(s: &mut Scene<M>) {
        s.m.boot();
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..3000 {
            // xorshift: any fixed sequence will do.
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let offset = ((x >> 20) as u16 % 0x330) & !3;
            if x & 1 == 0 && offset.is_multiple_of(8) {
                s.m.write8(offset, x.rotate_left(23));
            } else {
                s.m.write4(offset, (x >> 32) as u32);
            }
            if x.is_multiple_of(7) {
                let _ =
                    s.m.unit
                        .translate(&s.m.mem, DISK, Iova::new(x >> 24), Perm::Write);
            }
        }
        s.m.settle();
        // Trap and logged may differ in when the owner saw a refusal, so what is asked comes after.
        s.rest();
    }
}

#[test]
fn unwaited_one_shots_are_lost_nowhere_that_writes_are_ordered() {
    agrees_in_trap_and_logged::<OneShotsWithoutWaiting>();
    let seen = play::<OneShotsWithoutWaiting>(Mode::Logged, false);
    assert!(seen.contains(&Observation::Register(reg::GSTS, 0xc400_0000)));
}

#[test]
fn root_tables_in_a_row_leave_shared_safe() {
    agrees_in_trap_and_logged::<RootTablesInARow>();
}

#[test]
fn nonsense_leaves_every_mode_at_rest() {
    for mode in MODES {
        for is_eager in [false, true] {
            let mut s = scene(mode, is_eager, |mem| mem);
            Nonsense::run(&mut s);
            s.m.settle();
        }
    }
}

#[test]
fn log_entries_of_odd_length_or_place_are_ignored() {
    use vtd::front::{LogEntry, Logged};
    let mut unit = Unit::new(Config::default());
    let page = RegisterPage::in_heap();
    let mut logged = Logged::enter(&unit, &page);
    let before = unit.save();
    for (offset, len) in [
        (0x18, 0),
        (0x18, 1),
        (0x18, 2),
        (0x18, 3),
        (0x18, 255),
        (0x1c, 8),
        (0xffff, 4),
    ] {
        let entry = LogEntry {
            offset,
            len,
            data: u64::MAX,
        };
        assert!(!logged.apply(&mut unit, entry));
    }
    assert_eq!(unit.save(), before);
    // 8 bytes are two registers.
    let entry = LogEntry {
        offset: reg::FEADDR,
        len: 8,
        data: 0x1234_5678,
    };
    assert!(!logged.apply(&mut unit, entry));
    assert_eq!(unit.read(reg::FEADDR, AccessLen::B4), 0x1234_5678);
}

#[test]
fn a_guest_that_hammers_a_register_delays_a_sweep_boundedly() {
    // A page on which every status compare-exchange meets another store of the guest.
    struct Hammered(RegisterPage);
    impl RegPage for Hammered {
        fn load32(&self, offset: u16) -> u32 {
            self.0.load32(offset)
        }
        fn load64(&self, offset: u16) -> u64 {
            self.0.load64(offset)
        }
        fn store32(&self, offset: u16, value: u32) {
            self.0.store32(offset, value);
        }
        fn store64(&self, offset: u16, value: u64) {
            self.0.store64(offset, value);
        }
        fn compare_exchange32(&self, offset: u16, _: u32, _: u32) -> Result<u32, u32> {
            Err(self.0.load32(offset) ^ 0x10)
        }
        fn compare_exchange64(&self, offset: u16, _: u64, _: u64) -> Result<u64, u64> {
            Err(self.0.load64(offset) ^ 1)
        }
    }
    let page = Hammered(RegisterPage::in_heap());
    let mem = Guest::new().mem;
    let mut out = RecordingSink::default();
    let mut unit = Unit::new(Config::default());
    let mut shared = Shared::enter(&mut unit, &page);
    for value in 0..100u32 {
        for offset in [reg::GCMD, reg::FSTS, reg::ICS, reg::FECTL, reg::IQT] {
            page.store32(offset, value.wrapping_mul(0x0400_0100));
        }
        page.store64(reg::CCMD, 1 << 63 | 1 << 61);
        let progress = shared.sweep(&mut unit, &page, &mem, 0, &mut out);
        assert_ne!(progress, Progress::Parked(Parked::Drain));
    }
}

#[test]
fn sweeping_nothing_writes_nothing() {
    let guest = Guest::new();
    let mut m = Machine::new(Mode::Shared, Config::default(), guest.mem.clone());
    m.boot();
    let before = m.unit.stats().clone();
    let bytes: Vec<u64> = (0..0x1000).step_by(8).map(|at| m.page.load64(at)).collect();
    for _ in 0..1000 {
        assert_eq!(m.settle(), Progress::Idle);
    }
    assert_eq!(*m.unit.stats(), before);
    let after: Vec<u64> = (0..0x1000).step_by(8).map(|at| m.page.load64(at)).collect();
    assert_eq!(after, bytes);
}

#[test]
fn a_fault_between_a_handlers_loop_and_its_clear_is_announced_again() {
    for mode in [Mode::Logged, Mode::Shared] {
        let mut s = scene(mode, false, |mem| mem);
        s.m.boot();
        enable_events(&mut s);
        assert!(s.m.translate(DISK, 0x1000, Perm::Read).is_err());
        s.m.settle();
        assert_eq!(s.m.out.messages.len(), 1);
        // The handler has read record 0, found record 1 clear, and its clear is not yet seen ...
        s.m.write4(FRCD + 12, 0x8000_0000);
        // ... when the next fault comes.
        assert!(s.m.translate(DISK, 0x2000, Perm::Read).is_err());
        s.m.write4(reg::FSTS, 0x83);
        s.m.settle();
        assert_eq!(s.m.out.messages.len(), 2, "{mode:?}");
        assert_eq!(s.m.read4(reg::FSTS), 0x102);
    }
}

#[test]
fn shared_can_be_entered_and_left_while_the_guest_runs() {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    let mut m = Machine::trap(guest.mem.clone());
    m.boot();
    assert!(m.translate(DISK, 0x9000, Perm::Read).is_err());
    m.settle();
    let registers = |unit: &Unit| {
        let all = (0..0x1000).step_by(8);
        all.map(|at| unit.read(at, AccessLen::B8))
            .collect::<Vec<_>>()
    };
    let before = registers(&m.unit);
    let mut shared = Shared::enter(&mut m.unit, &m.page);
    assert!(!shared.has_stores(&m.unit, &m.page));
    assert_eq!(m.page.load32(reg::FSTS), 0x8000_0002);
    m.page.store64(reg::RTADDR, 0x7000);
    m.page.store32(reg::FEDATA, 0x77);
    shared.sweep(&mut m.unit, &m.page, &m.mem, 0, &mut m.out);
    shared.leave(&mut m.unit, &m.page);
    let mut expected = before;
    expected[usize::from(reg::RTADDR) / 8] = 0x7000;
    expected[usize::from(reg::FECTL) / 8] |= 0x77 << 32;
    assert_eq!(registers(&m.unit), expected);
}

/// The whole script once per access number, with that access pending.
fn survives_a_pend_at_every_access<S: Script>(mode: Mode) {
    let reference = play::<S>(mode, false);
    let mut count = scene(mode, false, PendingMem::never);
    S::run(&mut count);
    let accesses = count.m.mem.accesses();
    assert!(accesses > 20, "the script reaches memory");
    for k in 0..accesses {
        let mut s = scene(mode, false, |mem| PendingMem::kth(mem, k));
        S::run(&mut s);
        assert_eq!(s.finish(), reference, "{mode:?}, access {k}");
    }
}

#[test]
fn a_pend_at_any_access_changes_no_result() {
    for mode in MODES {
        survives_a_pend_at_every_access::<QueueError>(mode);
        survives_a_pend_at_every_access::<RegisterInvalidation>(mode);
        survives_a_pend_at_every_access::<Leases>(mode);
        survives_a_pend_at_every_access::<Events>(mode);
        survives_a_pend_at_every_access::<SecondRootTable>(mode);
    }
}

#[test]
fn a_parked_unit_ignores_foreign_tickets() {
    let guest = Guest::new();
    let mem = PendingMem::kth(guest.mem.clone(), 0);
    let mut m = Machine::new(Mode::Trap, Config::default(), mem);
    m.unit.write(reg::IQA, AccessLen::B8, QUEUE);
    m.unit.write(reg::GCMD, AccessLen::B4, 0x0400_0000);
    guest.put(QUEUE, wait_status(STATUS, 8));
    m.unit.write(reg::IQT, AccessLen::B4, 0x10);
    let Progress::Parked(Parked::Ticket(ticket)) = m.unit.step(&m.mem, 0, &mut m.out) else {
        panic!("the descriptor fetch pends");
    };
    m.unit.ticket_done(guest_mem::Ticket(ticket.0 + 1));
    assert!(!m.unit.needs_step());
    let parked = Progress::Parked(Parked::Ticket(ticket));
    assert_eq!(m.unit.step(&m.mem, 0, &mut m.out), parked);
    m.unit.ticket_done(ticket);
    assert!(m.unit.needs_step());
    assert_eq!(m.unit.step(&m.mem, 0, &mut m.out), Progress::Idle);
    assert_eq!(m.status(), 8);
    let blocked = |answer| matches!(answer, Err(Stop::Fault(DmaFault::Blocked { .. })));
    assert!(!blocked(m.translate(DISK, 0, Perm::Read)));
}
