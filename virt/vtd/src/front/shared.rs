//! `shared`: the register page is plain memory that the guest reads and writes without any exit.
//!
//! No store is notified, and a store over an equal value leaves no trace, so the page is compared
//! with the value last seen or shown there. This is sufficient for each register:
//!
//! * *Output* (GSTS, IQH, recording registers but for F): stored, never read back; a guest that
//!   writes there only misleads itself.
//! * *GCMD*: after it is taken, the slot is left as the levels plus a reserved bit, so that any
//!   store of a guest differs from it, a second identical SRTP too.
//! * *FSTS, ICS*: while a status bit shows, so does a reserved tag bit; a written 1 over a shown 1
//!   then differs. Taken as write-1-to-clear, and repaired at once.
//! * *F of a recording register*: the store of 0x8000_0000 differs from the value shown there,
//!   because a reason is never 0.
//! * *FECTL, IECTL*: only IM is read; IP is private. So a message may leave just after masking.
//! * *CCMD, IOTLB*: taken while ICC or IVT is set, and answered by clearing it.
//! * *RTADDR, IQA, IRTA, IVA*: taken when the command that latches them is.
//! * *FEDATA, FEADDR*: taken when a message is about to leave, twice until stable, then FECTL
//!   again.
//!
//! Order of a sweep: load IQT first (acquire), then FSTS, ICS, FECTL, IECTL, CCMD, IOTLB, and GCMD
//! last; act on the status registers, then GCMD, CCMD and IOTLB, then the queue up to that tail. A
//! guest that sets SRTP and then submits flushes is so served in its order. Status repairs are
//! stored before any IQH: a guest that cleared IQE and submitted again must not read an old IQE
//! beside a new IQH. When GCMD turns the queue on, IQT is loaded once more: the value loaded before
//! may be older than the guest's clear.
//!
//! Called by the unit's owner, alone. The other side of every ordering is the guest's driver; see
//! [`RegPage`]. Each register is taken at most once per sweep, so a guest that stores in a loop
//! delays no other guest.
//!
//! Cost of a sweep that finds nothing: eight loads from three cache lines (more while faults show).

use guest_mem::{PhysMem, RegPage};

use super::{publish_all, publish_iqh, publish_records};
use crate::spec::fault::{FRCD_LEN, FaultRecording};
use crate::spec::registers::{
    CCMD, FEADDR, FECTL, FEDATA, FEUADDR, FSTS, GCMD, GSTS, GlobalCommand, GlobalStatus, ICS,
    IEADDR, IECTL, IEDATA, IEUADDR, IQA, IQH, IQT, IRTA, RTADDR,
};
use crate::unit::registers::{FRCD, IOTLB, IVA};
use crate::unit::{AccessLen, Progress, Sink, Unit};

/// Reserved bit of FSTS and ICS, shown while any status bit is.
pub const STATUS_TAG: u32 = 1 << 31;
/// Reserved bit of GCMD, shown when the command was taken.
pub const COMMAND_TAG: u32 = 1;
/// GCMD bits that are levels.
const COMMAND_LEVELS: u32 = GlobalCommand::new()
    .with_te(true)
    .with_eafl(true)
    .with_qie(true)
    .with_ire(true)
    .with_cfi(true)
    .into_bits();
/// ICC of CCMD, IVT of IOTLB.
const REQUEST: u64 = 1 << 63;
/// Tries at a register that the guest stores to at the same time; then its store is overwritten.
const TRIES: usize = 4;

/// A write-1-to-clear status register: FSTS or ICS.
#[derive(Clone, Copy, Debug)]
struct Status {
    offset: u16,
    shown: u32,
}

impl Status {
    fn tagged(&self, unit: &Unit) -> u32 {
        match unit.read(self.offset, AccessLen::B4) as u32 {
            0 => 0,
            status => status | STATUS_TAG,
        }
    }

    /// Takes a store of the guest, if `found` is one, and shows the outcome.
    fn take(&mut self, unit: &mut Unit, page: &impl RegPage, found: u32) {
        if found != self.shown {
            self.clear(unit, found);
            self.show(unit, page, found);
        }
    }

    fn clear(&self, unit: &mut Unit, stored: u32) {
        let bits = u64::from(stored & !STATUS_TAG);
        unit.write(self.offset, AccessLen::B4, bits);
    }

    /// Replaces `held`, which the page was seen to hold, by the present status.
    fn show(&mut self, unit: &mut Unit, page: &impl RegPage, mut held: u32) {
        for _ in 0..TRIES {
            let status = self.tagged(unit);
            self.shown = status;
            match page.compare_exchange32(self.offset, held, status) {
                Ok(_) => return,
                Err(stored) => {
                    self.clear(unit, stored);
                    held = stored;
                }
            }
        }
        self.shown = self.tagged(unit);
        page.store32(self.offset, self.shown);
    }

    fn publish(&mut self, unit: &mut Unit, page: &impl RegPage) {
        if self.tagged(unit) != self.shown {
            self.show(unit, page, self.shown);
        }
    }
}

/// CCMD or IOTLB.
#[derive(Clone, Copy, Debug)]
struct Request {
    offset: u16,
    /// The guest's value while the unit works on it.
    taken: Option<u64>,
}

impl Request {
    fn enter(offset: u16, unit: &Unit) -> Self {
        let value = unit.read(offset, AccessLen::B8);
        let taken = (value & REQUEST != 0).then_some(value);
        Self { offset, taken }
    }

    fn publish(&mut self, unit: &Unit, page: &impl RegPage) {
        let Some(taken) = self.taken else { return };
        let answer = unit.read(self.offset, AccessLen::B8);
        if answer & REQUEST == 0 {
            self.taken = None;
            // Failure: the guest wrote while its request was in progress, which it may not. The
            // next sweep decides whether the written value is a request.
            let _ = page.compare_exchange64(self.offset, taken, answer);
        }
    }
}

/// Registers that one sweep loads, in this order.
struct Loaded {
    iqt: u32,
    fsts: u32,
    ics: u32,
    fectl: u32,
    iectl: u32,
    ccmd: u64,
    iotlb: u64,
    gcmd: u32,
}

impl Loaded {
    fn new(page: &impl RegPage) -> Self {
        // Field expressions are evaluated as written: IQT before everything, GCMD after everything.
        Self {
            iqt: page.load32(IQT),
            fsts: page.load32(FSTS),
            ics: page.load32(ICS),
            fectl: page.load32(FECTL),
            iectl: page.load32(IECTL),
            ccmd: page.load64(CCMD),
            iotlb: page.load64(IOTLB),
            gcmd: page.load32(GCMD),
        }
    }
}

/// The register page of a unit in `shared` mode: the values last seen and shown there.
#[derive(Clone, Debug)]
pub struct Shared {
    iqt: u32,
    fsts: Status,
    ics: Status,
    fectl: u32,
    iectl: u32,
    ccmd: Request,
    iotlb: Request,
    gcmd: u32,
    iqh: u64,
    gsts: u32,
    records: Vec<FaultRecording>,
    /// `Unit::changes` when the page was last brought up to date.
    seen: u64,
}

impl Shared {
    /// Begins this mode: shows all registers in `page`, which the guest must not see before. Any
    /// time, also with commands in progress.
    pub fn enter(unit: &mut Unit, page: &impl RegPage) -> Self {
        publish_all(unit, page);
        let level = |offset| unit.read(offset, AccessLen::B4) as u32;
        // IM without IP, which is private here.
        let masked = |offset| level(offset) & 1 << 31;
        let levels = GlobalStatus::from_bits(level(GSTS)).with_tes(unit.is_translating());
        let mut shared = Self {
            iqt: level(IQT),
            fsts: Status {
                offset: FSTS,
                shown: level(FSTS),
            },
            ics: Status {
                offset: ICS,
                shown: level(ICS),
            },
            fectl: masked(FECTL),
            iectl: masked(IECTL),
            ccmd: Request::enter(CCMD, unit),
            iotlb: Request::enter(IOTLB, unit),
            gcmd: levels.into_bits() & COMMAND_LEVELS | COMMAND_TAG,
            iqh: unit.read(IQH, AccessLen::B8),
            gsts: level(GSTS),
            records: unit.faults.records.to_vec(),
            seen: unit.changes(),
        };
        page.store32(FECTL, shared.fectl);
        page.store32(IECTL, shared.iectl);
        page.store32(GCMD, shared.gcmd);
        shared.fsts.publish(unit, page);
        shared.ics.publish(unit, page);
        shared
    }

    /// Ends this mode: the unit takes over the registers that the page kept for the guest, so that
    /// it answers reads as the page did. Sweep before, with the guest's processors stopped.
    pub fn leave(self, unit: &mut Unit, page: &impl RegPage) {
        for offset in [RTADDR, IRTA, IVA] {
            unit.write(offset, AccessLen::B8, page.load64(offset));
        }
        for offset in [FEDATA, FEADDR, FEUADDR, IEDATA, IEADDR, IEUADDR] {
            unit.write(offset, AccessLen::B4, u64::from(page.load32(offset)));
        }
    }

    /// Takes the guest's stores, works, publishes the results, then sends interrupts.
    pub fn sweep<M: PhysMem>(
        &mut self,
        unit: &mut Unit,
        page: &impl RegPage,
        mem: &M,
        now_ns: u64,
        sink: &mut impl Sink,
    ) -> Progress {
        let loaded = Loaded::new(page);
        if self.has_changes(unit, page, &loaded) {
            return self.work(unit, page, mem, now_ns, sink, &loaded);
        }
        let is_due = unit.deadline().is_some_and(|deadline| now_ns >= deadline);
        if is_due || unit.needs_step() || unit.changes() != self.seen {
            return self.work(unit, page, mem, now_ns, sink, &loaded);
        }
        unit.standing()
    }

    /// Whether the guest has stored anything that a sweep takes: for a last look before sleeping.
    pub fn has_stores(&self, unit: &Unit, page: &impl RegPage) -> bool {
        self.has_changes(unit, page, &Loaded::new(page))
    }

    fn has_changes(&self, unit: &Unit, page: &impl RegPage, loaded: &Loaded) -> bool {
        loaded.iqt != self.iqt
            || loaded.fsts != self.fsts.shown
            || loaded.ics != self.ics.shown
            || loaded.fectl != self.fectl
            || loaded.iectl != self.iectl
            || loaded.gcmd != self.gcmd
            || loaded.ccmd & REQUEST != 0 && self.ccmd.taken.is_none()
            || loaded.iotlb & REQUEST != 0 && self.iotlb.taken.is_none()
            || self.fsts.shown != 0 && self.has_record_stores(unit, page)
    }

    fn has_record_stores(&self, unit: &Unit, page: &impl RegPage) -> bool {
        debug_assert_eq!(self.records.len(), unit.faults.records.len());
        (0..self.records.len()).any(|index| self.record_store(index, page).is_some())
    }

    /// Returns the highest dword of recording register `index`, if the register shows a fault and
    /// has been stored to.
    fn record_store(&self, index: usize, page: &impl RegPage) -> Option<u32> {
        let shown = self.records[index];
        if !shown.f() {
            return None;
        }
        let found = page.load32(record_offset(index));
        (found != highest_dword(shown)).then_some(found)
    }

    #[cold]
    fn work<M: PhysMem>(
        &mut self,
        unit: &mut Unit,
        page: &impl RegPage,
        mem: &M,
        now_ns: u64,
        sink: &mut impl Sink,
        loaded: &Loaded,
    ) -> Progress {
        self.take_records(unit, page);
        self.fsts.take(unit, page, loaded.fsts);
        self.ics.take(unit, page, loaded.ics);
        self.take_event_control(unit, loaded.fectl, loaded.iectl);
        let iqt = self.take_command(unit, page, loaded);
        self.take_requests(unit, page, loaded);
        if iqt != self.iqt {
            self.iqt = iqt;
            unit.write(IQT, AccessLen::B4, u64::from(iqt));
        }
        let progress = unit.run(mem, now_ns, sink, &mut publish_iqh(page));
        self.publish(unit, page);
        if unit.has_messages() {
            refresh_message(unit, page, [FEDATA, FEADDR, FEUADDR]);
            refresh_message(unit, page, [IEDATA, IEADDR, IEUADDR]);
            self.take_event_control(unit, page.load32(FECTL), page.load32(IECTL));
            unit.send_messages(sink);
            self.seen = unit.changes();
        }
        progress
    }

    /// F bits first: PPF is derived from them, and FSTS is shown next.
    fn take_records(&mut self, unit: &mut Unit, page: &impl RegPage) {
        if self.fsts.shown == 0 {
            return;
        }
        let mut has_stores = false;
        for index in 0..self.records.len() {
            let Some(found) = self.record_store(index, page) else {
                continue;
            };
            has_stores = true;
            let offset = record_offset(index);
            unit.write(offset, AccessLen::B4, u64::from(found));
            let record = unit.faults.records[index];
            self.records[index] = record;
            // Failure: stored to again, which the next sweep sees.
            let _ = page.compare_exchange32(offset, found, highest_dword(record));
        }
        if has_stores {
            unit.faults.raise_unseen(&self.records);
        }
    }

    fn take_event_control(&mut self, unit: &mut Unit, fectl: u32, iectl: u32) {
        for (offset, found, seen) in [
            (FECTL, fectl, &mut self.fectl),
            (IECTL, iectl, &mut self.iectl),
        ] {
            if found != *seen {
                *seen = found;
                unit.write(offset, AccessLen::B4, u64::from(found));
            }
        }
    }

    /// Takes GCMD with the registers that it latches; returns the tail for the queue.
    fn take_command(&mut self, unit: &mut Unit, page: &impl RegPage, loaded: &Loaded) -> u32 {
        if loaded.gcmd == self.gcmd {
            return loaded.iqt;
        }
        let command = GlobalCommand::from_bits(loaded.gcmd & !COMMAND_TAG);
        let gsts = unit.read(GSTS, AccessLen::B4) as u32;
        let queue_was_on = GlobalStatus::from_bits(gsts).qies();
        if command.srtp() {
            unit.write(RTADDR, AccessLen::B8, page.load64(RTADDR));
        }
        if command.sirtp() {
            unit.write(IRTA, AccessLen::B8, page.load64(IRTA));
        }
        if command.qie() && !queue_was_on {
            unit.write(IQA, AccessLen::B8, page.load64(IQA));
        }
        unit.write(GCMD, AccessLen::B4, u64::from(command.into_bits()));
        self.gcmd = command.into_bits() & COMMAND_LEVELS | COMMAND_TAG;
        // Failure: the guest has stored another command, which the next sweep takes.
        let _ = page.compare_exchange32(GCMD, loaded.gcmd, self.gcmd);
        if command.qie() && !queue_was_on {
            return page.load32(IQT);
        }
        loaded.iqt
    }

    fn take_requests(&mut self, unit: &mut Unit, page: &impl RegPage, loaded: &Loaded) {
        if loaded.ccmd & REQUEST != 0 && self.ccmd.taken.is_none() {
            self.ccmd.taken = Some(loaded.ccmd);
            unit.write(CCMD, AccessLen::B8, loaded.ccmd);
        }
        if loaded.iotlb & REQUEST != 0 && self.iotlb.taken.is_none() {
            self.iotlb.taken = Some(loaded.iotlb);
            unit.write(IVA, AccessLen::B8, page.load64(IVA));
            unit.write(IOTLB, AccessLen::B8, loaded.iotlb);
        }
    }

    fn publish(&mut self, unit: &mut Unit, page: &impl RegPage) {
        publish_records(unit, page, &mut self.records);
        self.fsts.publish(unit, page);
        self.ics.publish(unit, page);
        let iqh = unit.read(IQH, AccessLen::B8);
        if iqh != self.iqh {
            self.iqh = iqh;
            page.store64(IQH, iqh);
        }
        self.ccmd.publish(unit, page);
        self.iotlb.publish(unit, page);
        let gsts = unit.read(GSTS, AccessLen::B4) as u32;
        if gsts != self.gsts {
            self.gsts = gsts;
            page.store32(GSTS, gsts);
        }
        self.seen = unit.changes();
    }
}

fn record_offset(index: usize) -> u16 {
    // At most 222 registers behind 0x220; F is in the last dword of each.
    FRCD + index as u16 * FRCD_LEN + 12
}

fn highest_dword(record: FaultRecording) -> u32 {
    (record.into_bits() >> 96) as u32
}

/// A guest writes these in three stores; take them when two readings agree. After [`TRIES`] the
/// last one is used: a guest that keeps changing them chooses where its own interrupt goes.
fn refresh_message(unit: &mut Unit, page: &impl RegPage, offsets: [u16; 3]) {
    let load = || offsets.map(|offset| page.load32(offset));
    let mut message = load();
    for _ in 0..TRIES {
        let again = load();
        if again == message {
            break;
        }
        message = again;
    }
    for (offset, value) in offsets.into_iter().zip(message) {
        unit.write(offset, AccessLen::B4, u64::from(value));
    }
}
