//! A guest of one VT-d unit, for tests: builds translation tables, submits descriptors, and drives
//! the unit through any of the three front ends with the same script.
//!
//! This crate also has the tests of the unit from the views of its guest, its functions and its
//! host: `vtd`'s own unit tests cannot use crates that depend on it. Tests of `vtd-client` use this
//! crate too.
#![forbid(unsafe_code)]
#![expect(missing_docs, reason = "names say it, as in a driver")]

use fake_mem::ArrayMem;
use guest_mem::{
    Gpa, Iommu, Iova, LeaseId, Leases, Perm, PhysMem, RegPage, RegisterPage, Run, SourceId, Stop,
};
use vtd::front::{LogEntry, Logged, Shared};
use vtd::spec::registers as reg;
use vtd::{AccessLen, Config, Event, Parked, Progress, Sink, Unit};

pub const RAM: u64 = 16 << 20;
/// Addresses of the structures with a fixed place.
pub const ROOT: u64 = 0x1000;
pub const CONTEXTS: u64 = 0x2000;
pub const QUEUE: u64 = 0x3000;
pub const STATUS: u64 = 0x4000;
const FIRST_FREE: u64 = 0x10_0000;

pub const IVA: u16 = 0x0f0;
pub const IOTLB: u16 = 0x0f8;
pub const FRCD: u16 = 0x220;

pub const R: u64 = 1;
pub const W: u64 = 2;
pub const RW: u64 = 3;
pub const PS: u64 = 0x80;

pub const DISK: SourceId = SourceId::new(0, 1, 0);
pub const NET: SourceId = SourceId::new(0, 2, 0);

/// The guest's memory, and the allocator of its table pages.
#[derive(Clone)]
pub struct Guest {
    pub mem: ArrayMem,
    next: u64,
}

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

impl Guest {
    /// Creates memory with an empty context table for bus 0.
    pub fn new() -> Self {
        let guest = Self {
            mem: ArrayMem::new(RAM),
            next: FIRST_FREE,
        };
        guest.put(ROOT, u128::from(CONTEXTS | 1));
        guest
    }

    pub fn put(&self, at: u64, value: u128) {
        self.mem.put_u64(Gpa::new(at), value as u64);
        self.mem.put_u64(Gpa::new(at + 8), (value >> 64) as u64);
    }

    pub fn page(&mut self) -> u64 {
        let page = self.next;
        self.next += 0x1000;
        page
    }

    /// Writes a context entry with tables. Address width `aw`: 1 is 39 bits and 3 levels, 2 is 48
    /// bits and 4 levels.
    pub fn context(&self, source: SourceId, table: u64, did: u16, aw: u64) {
        self.raw_context(source, table | 1, aw | u64::from(did) << 8);
    }

    pub fn raw_context(&self, source: SourceId, lo: u64, hi: u64) {
        let at = CONTEXTS + u64::from(source.devfn()) * 16;
        self.put(at, u128::from(hi) << 64 | u128::from(lo));
    }

    /// Returns the address of the entry for `iova` at `level`. Creates the tables above it.
    pub fn entry(&mut self, table: u64, levels: u32, iova: u64, level: u32) -> u64 {
        let mut table = table;
        for at in (level..=levels).rev() {
            let entry = table + (iova >> (12 + 9 * (at - 1)) & 0x1ff) * 8;
            if at == level {
                return entry;
            }
            let held = self.mem.get_u64(Gpa::new(entry));
            if held & 3 == 0 {
                let page = self.page();
                self.mem.put_u64(Gpa::new(entry), page | RW);
            }
            table = self.mem.get_u64(Gpa::new(entry)) & 0xf_ffff_ffff_f000;
        }
        unreachable!("level is at least 1")
    }

    pub fn map(&mut self, table: u64, levels: u32, iova: u64, pte: u64) {
        let level = 1;
        let entry = self.entry(table, levels, iova, level);
        self.mem.put_u64(Gpa::new(entry), pte);
    }

    pub fn map_large(&mut self, table: u64, levels: u32, iova: u64, level: u32, pte: u64) {
        let entry = self.entry(table, levels, iova, level);
        self.mem.put_u64(Gpa::new(entry), pte | PS);
    }
}

// Descriptors, as the literals that a driver would write.
pub const fn cc_global() -> u128 {
    0x11
}
pub const fn cc_domain(did: u16) -> u128 {
    0x21 | (did as u128) << 16
}
pub const fn cc_device(did: u16, sid: SourceId, fm: u8) -> u128 {
    0x31 | (did as u128) << 16 | (sid.0 as u128) << 32 | (fm as u128) << 48
}
pub const fn iotlb_global() -> u128 {
    0xd2
}
pub const fn iotlb_domain(did: u16) -> u128 {
    0xe2 | (did as u128) << 16
}
pub const fn iotlb_pages(did: u16, iova: u64, am: u8) -> u128 {
    0xf2 | (did as u128) << 16 | ((iova as u128) | am as u128) << 64
}
pub const fn wait_status(at: u64, data: u32) -> u128 {
    0x25 | (data as u128) << 32 | (at as u128) << 64
}
pub const fn wait_interrupt() -> u128 {
    0x15
}

/// Records messages and events of the unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordingSink {
    pub messages: Vec<(u64, u32)>,
    pub events: Vec<Event>,
}

impl Sink for RecordingSink {
    fn msi(&mut self, address: u64, data: u32) {
        self.messages.push((address, data));
    }
    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Trap,
    Logged,
    Shared,
}

pub const MODES: [Mode; 3] = [Mode::Trap, Mode::Logged, Mode::Shared];

enum Front {
    Trap,
    Logged(Logged, Vec<LogEntry>),
    Shared(Shared),
}

/// A unit behind one front end, its memory, and the guest's view of its registers.
pub struct Machine<M: PhysMem> {
    pub unit: Unit,
    pub mem: M,
    pub page: RegisterPage,
    pub out: RecordingSink,
    pub now: u64,
    pub tail: u64,
    front: Front,
    leases: Vec<LeaseId>,
    /// In the page modes, whether the unit works after every write, like a fast sidecore.
    pub is_eager: bool,
}

impl<M: PhysMem> Machine<M> {
    pub fn new(mode: Mode, config: Config, mem: M) -> Self {
        let mut unit = Unit::new(config);
        let page = RegisterPage::in_heap();
        let front = match mode {
            Mode::Trap => Front::Trap,
            Mode::Logged => Front::Logged(Logged::enter(&unit, &page), Vec::new()),
            Mode::Shared => Front::Shared(Shared::enter(&mut unit, &page)),
        };
        Self {
            unit,
            mem,
            page,
            out: RecordingSink::default(),
            now: 0,
            tail: 0,
            front,
            leases: Vec::new(),
            is_eager: false,
        }
    }

    pub fn trap(mem: M) -> Self {
        Self::new(Mode::Trap, Config::default(), mem)
    }

    /// Stores to a register, as the guest does.
    pub fn write(&mut self, offset: u16, len: AccessLen, value: u64) {
        match &mut self.front {
            Front::Trap => {
                self.unit.write(offset, len, value);
                self.settle();
            }
            Front::Logged(_, log) => log.push(LogEntry {
                offset,
                len: len.bytes() as u8,
                data: value,
            }),
            Front::Shared(_) => match len {
                AccessLen::B4 => self.page.store32(offset, value as u32),
                AccessLen::B8 => self.page.store64(offset, value),
            },
        }
        if self.is_eager {
            self.settle();
        }
    }

    pub fn write4(&mut self, offset: u16, value: u32) {
        self.write(offset, AccessLen::B4, u64::from(value));
    }

    pub fn write8(&mut self, offset: u16, value: u64) {
        self.write(offset, AccessLen::B8, value);
    }

    /// Loads a register, as the guest does, without the tag bits that the shared front end adds.
    pub fn read(&mut self, offset: u16, len: AccessLen) -> u64 {
        let value = match (&self.front, len) {
            (Front::Trap, _) => self.unit.read(offset, len),
            (_, AccessLen::B4) => u64::from(self.page.load32(offset)),
            (_, AccessLen::B8) => self.page.load64(offset),
        };
        let is_status =
            matches!(self.front, Front::Shared(_)) && [reg::FSTS, reg::ICS].contains(&offset);
        if is_status {
            value & 0x7fff_ffff
        } else {
            value
        }
    }

    pub fn read4(&mut self, offset: u16) -> u32 {
        self.read(offset, AccessLen::B4) as u32
    }

    pub fn read8(&mut self, offset: u16) -> u64 {
        self.read(offset, AccessLen::B8)
    }

    fn once(&mut self) -> Progress {
        match &mut self.front {
            Front::Trap => self.unit.step(&self.mem, self.now, &mut self.out),
            Front::Logged(front, log) => {
                if !log.is_empty() {
                    let entry = log.remove(0);
                    let _ = front.apply(&mut self.unit, entry);
                }
                let progress = front.step(
                    &mut self.unit,
                    &self.page,
                    &self.mem,
                    self.now,
                    &mut self.out,
                );
                if log.is_empty() || matches!(progress, Progress::Parked(Parked::Ticket(_))) {
                    progress
                } else {
                    Progress::Busy
                }
            }
            Front::Shared(front) => front.sweep(
                &mut self.unit,
                &self.page,
                &self.mem,
                self.now,
                &mut self.out,
            ),
        }
    }

    /// Lets the unit work until it is idle, and completes every ticket. Bounded: a unit that never
    /// becomes idle fails the test.
    pub fn settle(&mut self) -> Progress {
        for _ in 0..100_000 {
            match self.once() {
                Progress::Busy => {}
                Progress::Parked(Parked::Ticket(ticket)) => self.unit.ticket_done(ticket),
                rest => return rest,
            }
        }
        panic!("the unit does not come to rest");
    }

    pub fn poll(&mut self, offset: u16, mask: u32, want: u32) {
        self.settle();
        let value = self.read4(offset);
        assert_eq!(value & mask, want, "register {offset:#x} is {value:#x}");
    }
}

/// Submission of descriptors at the tail of a queue of 256 entries, followed by a store to IQT.
impl<M: PhysMem + HasRam> Machine<M> {
    /// Initializes the unit as a driver does: latches the tables, turns the queue on, invalidates,
    /// turns translation on.
    pub fn boot(&mut self) {
        self.write8(reg::IQT, 0);
        self.write8(reg::IQA, QUEUE);
        self.write4(reg::GCMD, 0x0400_0000);
        self.poll(reg::GSTS, 0x0400_0000, 0x0400_0000);
        self.write8(reg::RTADDR, ROOT);
        self.write4(reg::GCMD, 0x4400_0000);
        self.poll(reg::GSTS, 0x4000_0000, 0x4000_0000);
        self.submit_wait(&[cc_global()]);
        self.submit_wait(&[iotlb_global()]);
        self.write4(reg::GCMD, 0x8400_0000);
        self.poll(reg::GSTS, 0x8000_0000, 0x8000_0000);
    }

    /// Writes descriptors at the tail, without the store to IQT.
    pub fn fill(&mut self, descriptors: &[u128]) {
        for descriptor in descriptors {
            let at = Gpa::new(QUEUE + self.tail);
            let ram = self.mem.ram();
            ram.put(at, &descriptor.to_le_bytes());
            self.tail = (self.tail + 16) % 0x1000;
        }
    }

    pub fn submit(&mut self, descriptors: &[u128]) {
        self.fill(descriptors);
        self.write4(reg::IQT, self.tail as u32);
    }

    /// Submits descriptors and a wait as Linux does, then zeroes the status word. Panics if the
    /// wait does not complete.
    pub fn submit_wait(&mut self, descriptors: &[u128]) {
        let mut all = descriptors.to_vec();
        all.push(wait_status(STATUS, 2));
        self.submit(&all);
        self.settle();
        assert_eq!(self.status(), 2, "wait did not complete");
        self.mem.ram().put_u32(Gpa::new(STATUS), 0);
    }

    pub fn status(&self) -> u32 {
        self.mem.ram().get_u32(Gpa::new(STATUS))
    }

    pub fn translate(&mut self, source: SourceId, iova: u64, perm: Perm) -> Result<Run, Stop> {
        for _ in 0..100 {
            match self
                .unit
                .translate(&self.mem, source, Iova::new(iova), perm)
            {
                Err(Stop::Pending(ticket)) => self.unit.ticket_done(ticket),
                done => return done,
            }
        }
        panic!("the translation does not come to rest");
    }

    pub fn lease(&mut self, source: SourceId, iova: u64, len: u32, perm: Perm) -> LeaseId {
        let run = self
            .translate(source, iova, perm)
            .unwrap_or_else(|stop| panic!("lease: {stop:?}"));
        assert!(run.len >= u64::from(len));
        self.unit
            .leases_mut()
            .begin(source, Iova::new(iova), run.gpa, len, perm)
            .unwrap_or_else(|fault| panic!("lease: {fault:?}"))
    }

    pub fn begin(&mut self, source: SourceId, iova: u64, len: u32, perm: Perm) {
        let id = self.lease(source, iova, len, perm);
        self.leases.push(id);
    }

    pub fn end_first(&mut self) {
        let id = self.leases.remove(0);
        self.unit.leases_mut().end(id);
    }
}

/// Access to the underlying array of a memory, for the guest's own accesses.
pub trait HasRam {
    fn ram(&self) -> &ArrayMem;
}
impl HasRam for ArrayMem {
    fn ram(&self) -> &ArrayMem {
        self
    }
}
impl HasRam for fake_mem::PagedMem {
    fn ram(&self) -> &ArrayMem {
        self.array()
    }
}
impl HasRam for fake_mem::PendingMem<ArrayMem> {
    fn ram(&self) -> &ArrayMem {
        self.inner()
    }
}

/// Expects a run of `len` bytes at `gpa`.
#[track_caller]
pub fn assert_run(answer: Result<Run, Stop>, gpa: u64, len: u64) {
    assert_eq!(
        answer,
        Ok(Run {
            gpa: Gpa::new(gpa),
            len
        })
    );
}

/// Returns the dwords of fault recording register `index`.
pub fn record<M: PhysMem>(machine: &mut Machine<M>, index: u16) -> [u32; 4] {
    [0, 4, 8, 12].map(|at| machine.read4(FRCD + index * 16 + at))
}

/// Expects a recorded fault: source, page, reason, and whether the access was a read.
#[track_caller]
pub fn assert_record<M: PhysMem>(
    machine: &mut Machine<M>,
    index: u16,
    source: SourceId,
    iova: u64,
    reason: u32,
    perm: Perm,
) {
    let t = if perm == Perm::Read { 0x4000_0000 } else { 0 };
    let page = iova & !0xfff;
    assert_eq!(
        record(machine, index),
        [
            page as u32,
            (page >> 32) as u32,
            u32::from(source.0),
            0x8000_0000 | t | reason
        ]
    );
}
