//! A machine with assigned devices, and its guest: tables in RAM, a queue of descriptors, registers
//! that trap.
//!
//! The unit, the owner, the functions, their call threads and their containers' tables are the real
//! ones; the kernel behind the tables, the devices and the interrupt lines are fakes. After each
//! turn of the owner [`World::check`] compares what devices reach with what is in use.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use assign::calls::CallThread;
use assign::function::{Assigned, Parts};
use assign::policy::HostPolicy;
use assign::reach::Reach;
use assign::shadow::{Counts, Limits, Mode, Shadow};
use assign::vfio_device::{Held, VfioTable};
use dma_map::iova::Access;
use guest_mem::{Gpa, GuestRam, PAGE_SIZE, Pages, SourceId};
use machine::{FunctionLines, Op, Request, Target, functions, units};
use platform::interrupt::{InterruptSink, Message};
use sidecore::{Nanos, PollContext, Poller, Reply, Wakes};
use vfio::testing::{FakeCall, FakeKernel};
use vtd::spec::registers as reg;
use vtd::{AddressWidth, Config, Unit};
use vtd_guest::{iotlb_domain, iotlb_global, iotlb_pages, wait_status};
use vtd_port::VtdPort;

use crate::fakes::{CountedCalls, FakeHardware, FakeLines, OpenCalls};
use crate::images;
use crate::memory::{Memory, REGIONS};

units! {
    /// The unit.
    pub enum Units: Infallible {
        Vtd(VtdPort),
    }
}

functions! {
    /// The devices.
    pub enum Functions: Infallible {
        Assigned(Assigned<FakeHardware, CountedCalls>),
    }
}

pub type Owner<M> = machine::Owner<Units, Functions, M>;

/// Addresses of the guest's structures; tables are made from [`TABLES`] on.
pub const ROOT: u64 = 0x1000;
pub const CONTEXTS: u64 = 0x2000;
pub const QUEUE: u64 = 0x3000;
pub const STATUS: u64 = 0x4000;
pub const TABLES: u64 = 0x10_0000;
/// Pages for the guest's data: first page and pages.
pub const DATA: u64 = 0x40_0000 / PAGE_SIZE;

pub const R: u64 = 1;
pub const W: u64 = 2;
pub const RW: u64 = 3;

/// A range that the host's IOMMU does not allow: first page, and the one behind the last.
pub const RESERVED: (u64, u64) = (0x20_0010, 0x20_0020);
/// The MSI window, likewise.
pub const MSI_WINDOW: (u64, u64) = (0xfee00, 0xfef00);
/// The unit's register page, which is no memory.
pub const REGISTERS: u64 = 0xfed9_0000;

const MS: u64 = 1_000_000;
/// Time of a turn, ns.
const TURN: u64 = 100;
/// Longest time for anything that is expected to happen.
const PATIENCE: Duration = Duration::from_secs(30);
/// Turns in which nothing that was to happen would be left.
const MANY: usize = 300;

/// Interrupts of the unit, which no test looks at.
struct NoSink;

impl InterruptSink for NoSink {
    fn send(&self, _: SourceId, _: Message) {}
}

/// Options of an assigned device.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub policy: HostPolicy,
    pub allows_pass_through: bool,
    pub maps_while_off: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            policy: HostPolicy::Strict,
            allows_pass_through: true,
            maps_while_off: false,
        }
    }
}

/// A device, as the test has it.
pub struct AssignedDevice {
    pub number: usize,
    pub source: SourceId,
    pub kernel: FakeKernel,
    pub hardware: FakeHardware,
    pub lines: FakeLines,
    /// Resets that were asked for; each is over when the lock is free.
    pub resets: Arc<Mutex<u32>>,
    calls: OpenCalls,
}

impl AssignedDevice {
    /// Whether a call is under way that nothing holds.
    fn is_busy(&self) -> bool {
        let is_held = self.kernel.held() > 0 || self.resets.try_lock().is_err();
        self.calls.get() > 0 && !is_held
    }
}

pub struct World<M> {
    // Before the owner.
    pub seats: Vec<AssignedDevice>,
    pub owner: Owner<M>,
    pub mem: M,
    pub reach: Reach,
    /// The clock, ns. It goes on by [`TURN`] a turn and by [`later`](Self::later), so what has so
    /// long to happen has it on a busy host, too.
    clock: Nanos,
    wakes: Wakes,
    tail: u64,
    waits: u32,
    next_table: u64,
}

/// A test that fails while calls are held ends, too: call threads are joined when the owner is
/// dropped, which is after the seats.
impl Drop for AssignedDevice {
    fn drop(&mut self) {
        self.kernel.release();
    }
}

impl World<GuestRam> {
    /// One device, under the policy.
    pub fn strict() -> Self {
        Self::with(Options::default())
    }
}

impl<M: Memory> World<M> {
    pub fn with(options: Options) -> Self {
        let mut world = Self::empty();
        world.assign(options);
        world
    }

    /// A machine without a device.
    pub fn empty() -> Self {
        let mem = M::new();
        let mut owner = Owner::new("assigned", mem.clone(), Arc::new(NoSink));
        let config = Config {
            width: AddressWidth::Bits39,
            caching_mode: true,
            ..Config::default()
        };
        owner.add_unit(Units::Vtd(VtdPort::trap(Unit::new(config))));
        mem.put_u64(ROOT, CONTEXTS | 1);
        Self {
            owner,
            mem,
            reach: Reach::default(),
            seats: Vec::new(),
            clock: Nanos::now(),
            wakes: Wakes::by_hand(),
            tail: 0,
            waits: 0,
            next_table: TABLES,
        }
    }

    /// Adds a device; its place among the seats.
    pub fn assign(&mut self, options: Options) -> usize {
        let place = self.seats.len();
        let source = SourceId::new(0, 3 + place as u8, 0);
        let (kernel, hardware) = (FakeKernel::new(), FakeHardware::default());
        let (lines, resets) = (FakeLines::default(), Arc::<Mutex<u32>>::default());
        let asked = resets.clone();
        let reset = move || {
            *asked.lock().unwrap() += 1;
            Ok(())
        };
        // As in a real one: the groups cannot be taken off while the device is open, which its
        // hardware and the mappings of its BARs keep.
        kernel.set_detachable(false);
        let (container, device) = (kernel.clone(), hardware.clone());
        let hide = move || container.set_detachable(device.device().is_stopped);
        let table = VfioTable::new(kernel.clone(), Held::new(reset, hide), None);
        let thread = CallThread::start("calls", table).expect("a thread");
        let calls = OpenCalls::default();
        let caller = CountedCalls::new(thread, calls.clone());
        let pages = |(at, len): (u64, u64)| (at / PAGE_SIZE, len / PAGE_SIZE);
        let limits = Limits {
            ram: REGIONS.map(pages).to_vec(),
            allowed: vec![
                (0, MSI_WINDOW.0),
                (MSI_WINDOW.1, RESERVED.0 - MSI_WINDOW.1),
                (RESERVED.1, (1 << 27) - RESERVED.1),
            ],
            allows_pass_through: options.allows_pass_through,
            maps_while_off: options.maps_while_off,
        };
        let reach = self.reach.clone();
        let mut shadow = Shadow::new(source, limits, options.policy, reach, caller);
        shadow.look();
        let (config, areas) = images::drive();
        let assigned = Assigned::new(Parts {
            source,
            hardware: hardware.clone(),
            config,
            areas,
            lines: Box::new(lines.clone()),
            shadow,
            reach: self.reach.clone(),
        });
        let function = Functions::Assigned(assigned);
        let number = self.owner.add(0, function, FunctionLines::default());
        self.seats.push(AssignedDevice {
            number,
            source,
            kernel,
            hardware,
            lines,
            resets,
            calls,
        });
        place
    }

    /// One turn of the owner.
    pub fn poll(&mut self) {
        self.clock.0 += TURN;
        let _ = self
            .owner
            .poll(&mut PollContext::new(self.clock, 1600, &mut self.wakes));
        self.check();
    }

    /// Checks that each page that a device reaches is in use.
    pub fn check(&self) {
        for seat in &self.seats {
            let mut vaddrs: Vec<(u64, u64)> = Vec::new();
            for mapping in seat.kernel.mapped() {
                vaddrs.push((mapping.vaddr, mapping.range.pages()));
            }
            for record in seat.kernel.calls() {
                if let (FakeCall::Map { range, vaddr, .. }, None) = (record.call, record.answer) {
                    vaddrs.push((vaddr, range.pages()));
                }
            }
            for (vaddr, pages) in vaddrs {
                let gpa = self.mem.gpa_of(vaddr).expect("RAM is mapped");
                for page in 0..pages {
                    let at = Gpa::new(gpa + page * PAGE_SIZE);
                    assert!(
                        self.reach.touches(at, PAGE_SIZE),
                        "a device reaches {at:?}, which is not in use"
                    );
                }
            }
        }
    }

    /// Turns until something is so.
    pub fn until(&mut self, what: &str, is_so: impl Fn(&mut Self) -> bool) {
        let since = Instant::now();
        while !is_so(self) {
            assert!(since.elapsed() < PATIENCE, "it does not come: {what}");
            self.poll();
            std::thread::yield_now();
        }
    }

    /// Many turns: nothing that could happen now is left, but what calls that are held would bring.
    pub fn settle(&mut self) {
        let since = Instant::now();
        let mut quiet = 0;
        while quiet < MANY {
            assert!(since.elapsed() < PATIENCE, "it does not come to rest");
            let before = self.progress();
            self.poll();
            let is_busy = self.seats.iter().any(AssignedDevice::is_busy);
            quiet = match is_busy || before != self.progress() {
                true => 0,
                false => quiet + 1,
            };
            std::thread::yield_now();
        }
    }

    fn progress(&self) -> Vec<usize> {
        let calls = self.seats.iter().map(|seat| seat.kernel.calls().len());
        calls.collect()
    }

    pub fn message(&mut self, request: Request<Owner<M>>) {
        let mut turn = PollContext::new(self.clock, 1600, &mut self.wakes);
        self.owner.message(request, &mut turn);
    }

    fn access(&mut self, target: Target, op: Op) -> u64 {
        let (reply, answer) = Reply::pair();
        self.message(Request::Access { target, op, reply });
        let value = answer.try_take().expect("an answer at once");
        self.check();
        value
    }

    fn write_register(&mut self, offset: u16, len: u8, value: u64) {
        let op = Op::Write {
            bar: 0,
            offset: offset.into(),
            len,
            value,
        };
        self.access(Target::Unit(0), op);
    }

    fn read_register(&mut self, offset: u16) -> u64 {
        let op = Op::Read {
            bar: 0,
            offset: offset.into(),
            len: 4,
        };
        self.access(Target::Unit(0), op)
    }

    pub fn config_read(&mut self, seat: usize, reg: u16, len: u8) -> u32 {
        let target = Target::Function(self.seats[seat].number);
        self.access(target, Op::ConfigRead { reg, len }) as u32
    }

    pub fn config_write(&mut self, seat: usize, reg: u16, len: u8, value: u32) {
        let target = Target::Function(self.seats[seat].number);
        self.access(target, Op::ConfigWrite { reg, len, value });
    }

    pub fn bar_read(&mut self, seat: usize, offset: u64, len: u8) -> u64 {
        let target = Target::Function(self.seats[seat].number);
        let bar = 0;
        self.access(target, Op::Read { bar, offset, len })
    }

    pub fn bar_write(&mut self, seat: usize, offset: u64, len: u8, value: u64) {
        let target = Target::Function(self.seats[seat].number);
        let op = Op::Write {
            bar: 0,
            offset,
            len,
            value,
        };
        self.access(target, op);
    }

    /// GSTS has these bits as wanted.
    fn has_status(&mut self, mask: u64, want: u64) -> bool {
        self.read_register(reg::GSTS) & mask == want
    }

    /// The queue is turned on, a root table latched, and everything invalidated: with translation
    /// off.
    pub fn start_unit(&mut self) {
        self.write_register(reg::IQT, 8, 0);
        self.write_register(reg::IQA, 8, QUEUE);
        self.write_register(reg::GCMD, 4, 0x0400_0000);
        self.until("the queue is on", |world| {
            world.has_status(0x0400_0000, 0x0400_0000)
        });
        self.latch_root();
    }

    /// SRTP, and the global invalidations that follow it.
    pub fn latch_root(&mut self) {
        self.write_register(reg::RTADDR, 8, ROOT);
        let on = self.read_register(reg::GSTS) & 0x8400_0000;
        self.write_register(reg::GCMD, 4, 0x4000_0000 | on);
        self.until("the root table is latched", |world| {
            world.has_status(0x4000_0000, 0x4000_0000)
        });
        self.flush(&[vtd_guest::cc_global()]);
        self.flush(&[iotlb_global()]);
    }

    /// Asks for translation, on or off; does not wait.
    pub fn ask_translation(&mut self, on: bool) {
        let bit = if on { 0x8000_0000 } else { 0 };
        self.write_register(reg::GCMD, 4, 0x0400_0000 | bit);
    }

    pub fn is_translating(&mut self) -> bool {
        self.has_status(0x8000_0000, 0x8000_0000)
    }

    pub fn translate(&mut self, on: bool) {
        self.ask_translation(on);
        self.until("translation is switched", |world| {
            world.is_translating() == on
        });
    }

    /// All of it, with each seat in a domain of its own: 1 and on. The tables of each.
    pub fn boot(&mut self) -> Vec<u64> {
        self.start_unit();
        let mut tables = Vec::new();
        for seat in 0..self.seats.len() {
            let table = self.table();
            self.attach(seat, table, seat as u16 + 1);
            tables.push(table);
        }
        self.translate(true);
        tables
    }

    /// The guest stores a word.
    pub fn put(&self, at: u64, value: u64) {
        self.mem.put_u64(at, value);
    }

    /// The guest loads a word.
    pub fn get(&self, at: u64) -> u64 {
        self.mem.get_u64(at)
    }

    /// A page for a table.
    pub fn table(&mut self) -> u64 {
        let page = self.next_table;
        self.next_table += PAGE_SIZE;
        (0..512).for_each(|at| self.mem.put_u64(page + at * 8, 0));
        page
    }

    /// Writes the context entry of a seat, without an invalidation.
    pub fn context(&mut self, seat: usize, low: u64, did: u16) {
        let at = CONTEXTS + u64::from(self.seats[seat].source.devfn()) * 16;
        self.mem.put_u64(at, 0);
        // Three levels.
        self.mem.put_u64(at + 8, 1 | u64::from(did) << 8);
        self.mem.put_u64(at, low);
    }

    /// Puts a seat into a domain, and tells.
    pub fn attach(&mut self, seat: usize, table: u64, did: u16) {
        self.context(seat, table | 1, did);
        self.tell_context(seat, did);
    }

    /// Invalidates as Linux does: `Source`, then `Domain`.
    pub fn tell_context(&mut self, seat: usize, did: u16) {
        let source = self.seats[seat].source;
        self.flush(&[vtd_guest::cc_device(did, source, 0)]);
        self.flush(&[iotlb_domain(did)]);
    }

    /// Address of the entry of an IOVA's page at a level, with the tables above it.
    pub fn entry(&mut self, table: u64, page: u64, level: u32) -> u64 {
        let mut table = table;
        for at in (level..=3).rev() {
            let entry = table + (page >> (9 * (at - 1)) & 0x1ff) * 8;
            if at == level {
                return entry;
            }
            if self.mem.get_u64(entry) & 3 == 0 {
                let below = self.table();
                self.mem.put_u64(entry, below | RW);
            }
            table = self.mem.get_u64(entry) & 0xf_ffff_ffff_f000;
        }
        unreachable!("levels are 1 to 3")
    }

    /// Sets the entries of pages, without an invalidation; 0 permissions: none.
    pub fn set(&mut self, table: u64, page: u64, to: u64, pages: u64, perm: u64) {
        for at in 0..pages {
            let entry = self.entry(table, page + at, 1);
            let value = if perm == 0 {
                0
            } else {
                ((to + at) * PAGE_SIZE) | perm
            };
            self.mem.put_u64(entry, value);
        }
    }

    /// Maps pages, tells and waits. A power of two.
    pub fn map(&mut self, (table, did): (u64, u16), page: u64, to: u64, pages: u64, perm: u64) {
        self.set(table, page, to, pages, perm);
        self.flush(&[tell(did, page, pages)]);
    }

    /// Unmaps pages, tells and waits.
    pub fn unmap(&mut self, (table, did): (u64, u16), page: u64, pages: u64) {
        self.set(table, page, 0, pages, 0);
        self.flush(&[tell(did, page, pages)]);
    }

    /// Writes descriptors and a WAIT; what its status and the tail will be.
    pub fn prepare(&mut self, descriptors: &[u128]) -> (u32, u64) {
        self.waits += 1;
        let wait = wait_status(STATUS, self.waits);
        for descriptor in descriptors.iter().chain([&wait]) {
            let at = QUEUE + self.tail;
            self.put(at, *descriptor as u64);
            self.put(at + 8, (*descriptor >> 64) as u64);
            self.tail = (self.tail + 16) % PAGE_SIZE;
        }
        (self.waits, self.tail)
    }

    /// Submits descriptors and a WAIT; what its status will be.
    pub fn submit(&mut self, descriptors: &[u128]) -> u32 {
        let (wait, tail) = self.prepare(descriptors);
        self.write_register(reg::IQT, 8, tail);
        wait
    }

    /// Whether the WAIT of this status has completed.
    pub fn is_complete(&self, wait: u32) -> bool {
        self.mem.get_u64(STATUS) as u32 >= wait
    }

    pub fn complete(&mut self, wait: u32) {
        self.until("a WAIT completes", |world| world.is_complete(wait));
    }

    /// Submits, and waits for it.
    pub fn flush(&mut self, descriptors: &[u128]) {
        let wait = self.submit(descriptors);
        self.complete(wait);
    }

    /// Pages that a device reaches: IOVA page, page of guest memory, permission.
    pub fn reached(&self, seat: usize) -> Vec<(u64, u64, Access)> {
        let mapped = self.seats[seat].kernel.mapped();
        let pages = mapped.iter().flat_map(|mapping| {
            let gpa = self.mem.gpa_of(mapping.vaddr).expect("RAM is mapped") / PAGE_SIZE;
            let first = mapping.range.first().raw();
            let access = mapping.access;
            (0..mapping.range.pages()).map(move |page| (first + page, gpa + page, access))
        });
        pages.collect()
    }

    /// The same without the permission.
    pub fn pages(&self, seat: usize) -> Vec<(u64, u64)> {
        let reached = self.reached(seat);
        reached.iter().map(|(page, to, _)| (*page, *to)).collect()
    }

    pub fn assigned(&mut self, seat: usize) -> &mut Assigned<FakeHardware, CountedCalls> {
        let number = self.seats[seat].number;
        match self.owner.function(number) {
            Some(Functions::Assigned(assigned)) => assigned,
            None => panic!("it was assigned"),
        }
    }

    pub fn counts(&mut self, seat: usize) -> Counts {
        self.assigned(seat).shadow().counts()
    }

    pub fn mode(&mut self, seat: usize) -> Mode {
        self.assigned(seat).shadow().mode()
    }

    /// Asks for the eviction of these pages: those that went.
    pub fn evict(&mut self, pages: &[u64]) -> Vec<u64> {
        let (reply, answer) = Reply::pair();
        let named: Vec<_> = pages
            .iter()
            .map(|page| Gpa::new(page * PAGE_SIZE))
            .collect();
        let named = Box::new(Pages::new(&named).expect("32 pages at most"));
        self.message(Request::Evict {
            pages: named,
            reply,
        });
        let gone = answer.try_take().expect("an answer at once");
        let bits = (0..).zip(pages);
        bits.filter(|(bit, _)| gone >> bit & 1 != 0)
            .map(|(_, page)| *page)
            .collect()
    }

    /// Returns those of these pages that are in use.
    pub fn in_use(&self, pages: &[u64]) -> Vec<u64> {
        let is_used = |page: &u64| self.reach.touches(Gpa::new(page * PAGE_SIZE), PAGE_SIZE);
        pages.iter().copied().filter(is_used).collect()
    }

    /// The machine goes on so many ms later.
    pub fn later(&mut self, ms: u64) {
        self.clock.0 += ms * MS;
        self.poll();
    }

    /// Takes a device away; the receiver gets its source when it is gone.
    pub fn remove(&mut self, seat: usize) -> Receiver<SourceId> {
        let (told, gone) = channel();
        self.owner.remove(self.seats[seat].number, told);
        gone
    }

    /// Calls so far of a seat's container.
    pub fn calls(&self, seat: usize) -> usize {
        self.seats[seat].kernel.calls().len()
    }
}

/// Invalidation of an aligned power of two of pages.
pub fn tell(did: u16, page: u64, pages: u64) -> u128 {
    assert!(pages.is_power_of_two() && page.is_multiple_of(pages));
    iotlb_pages(did, page * PAGE_SIZE, pages.ilog2() as u8)
}
