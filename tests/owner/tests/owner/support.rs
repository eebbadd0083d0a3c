//! A guest for the owner's tests: RAM, IO page tables, an invalidation queue behind any of the
//! three front ends, and a driver of one virtio disk over virtio-pci. Its owner is called by hand
//! ([`ByHand`]), or runs on a real sidecore (a [`Handle`]).
//!
//! Everything the device sees lies [`IOVA`] bytes above its guest-physical address, so that an
//! access which is not translated misses.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fake_driver::{FakeDriver, Rings};
use guest_mem::{Gpa, GuestRam, NoIommu, PhysMem, RegPage, RegisterPage, SlotMapping, SourceId};
use machine::{FunctionLines, Op, Target, functions, units};
use platform::interrupt::{InterruptSink, Message};
use sidecore::{Activity, Answer, ArmError, Handle, Nanos, PollContext, Poller, Reply, Wakes};
use vio::Remote;
use vio::balloon::Balloon;
use vio::blk::request::kind;
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, RawDisk, RawDiskOptions, Transfer};
use vio_faults::{Fault, Rogue, RogueDisk, SlowControl, SlowDisk};
use virtio_pci::VirtioFunction;
use virtio_pci::function::{COMMON, DEVICE, MSIX_TABLE, NOTIFY};
use vtd::front::LogEntry;
use vtd::spec::registers as reg;
use vtd::{AccessLen, Unit};
use vtd_port::{VtdPort, WriteLog};

units! {
    /// The units of these machines.
    pub enum Units: Infallible {
        None(NoIommu),
        Vtd(VtdPort),
    }
}

functions! {
    /// Their functions.
    pub enum Functions: Infallible {
        Balloon(VirtioFunction<Balloon>),
        Disk(VirtioFunction<Disk>),
        Remote(VirtioFunction<Remote>),
    }
}

/// A disk, which may do wrong.
pub type Disk = RogueDisk;

pub type Owner = machine::Owner<Units, Functions, GuestRam>;
pub type Request = machine::Request<Owner>;

/// Counts of the owner and its unit.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    pub doorbells: u64,
    pub interrupts: u64,
    pub waits: u64,
    pub leases_drained: u64,
    pub faults: u64,
    pub gate_faults: u64,
    pub logged_writes: u64,
}

fn counts(owner: &mut Owner) -> Counts {
    let totals = owner.totals();
    let (stats, gate_faults, logged_writes) = match owner.unit(0) {
        Some(Units::Vtd(port)) => (
            port.stats().clone(),
            port.gate_faults(),
            port.logged_writes(),
        ),
        _ => Default::default(),
    };
    Counts {
        doorbells: totals.doorbells,
        interrupts: totals.interrupts,
        waits: stats.waits,
        leases_drained: stats.waits_parked,
        faults: stats.faults_recorded + stats.faults_collapsed + stats.faults_dropped,
        gate_faults,
        logged_writes,
    }
}

/// A vCPU's access to the function.
pub fn to_function(op: Op) -> impl FnOnce(Reply<u64>) -> Request {
    let target = Target::Function(0);
    move |reply| Request::Access { target, op, reply }
}

/// A vCPU's access to the unit's registers.
pub fn to_unit(op: Op) -> impl FnOnce(Reply<u64>) -> Request {
    let target = Target::Unit(0);
    move |reply| Request::Access { target, op, reply }
}

pub const RAM: u64 = 16 << 20;
pub const ROOT: u64 = 0x1000;
pub const CONTEXTS: u64 = 0x2000;
/// The invalidation queue: one page, 256 descriptors.
pub const QUEUE: u64 = 0x3000;
pub const STATUS: u64 = 0x4000;
pub const RINGS: u64 = 0x1_0000;
/// Request headers, 64 bytes each; the status byte is 48 bytes on.
pub const HEADERS: u64 = 0x2_0000;
pub const DATA: u64 = 0x10_0000;
/// Pages mapped there.
pub const DATA_PAGES: u64 = 16;
/// The top table, and behind it those below.
pub const TABLES: u64 = 0x80_0000;
/// Offset that a device adds to a guest-physical address.
pub const IOVA: u64 = 0x40_0000_0000;
const DID: u128 = 7;
pub const DISK: SourceId = SourceId::new(0, 1, 0);
pub const QUEUE_SIZE: u16 = 64;
pub const SECTORS: u64 = 2048;

/// Message of MSI-X entry `vector`, as the driver programs it.
pub const fn message(vector: u32) -> (u64, u32) {
    (0xfee0_0000 | (vector as u64) << 12, 0x40 + vector)
}
/// Message of fault events.
pub const FAULT_MESSAGE: (u64, u32) = (0xfee0_8000, 0x30);

/// The used ring's flag by which a device says that it needs no doorbells (without EVENT_IDX).
pub const NO_NOTIFY: u16 = 1;

pub const R: u64 = 1;
pub const W: u64 = 2;
pub const RW: u64 = 3;

/// The unit's own limit.
pub const LIMIT: Duration = Duration::from_secs(1);
/// Limit that no test reaches: a wait that needs it would be seen to hang.
pub const NO_LIMIT: Duration = Duration::from_secs(3600);
/// Time within which every expected event must happen.
pub const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Trap,
    Logged,
    Shared,
}

pub const MODES: [Mode; 3] = [Mode::Trap, Mode::Logged, Mode::Shared];

/// Messages that would have reached a local APIC.
#[derive(Clone, Default)]
pub struct Messages(Arc<Mutex<Vec<(u64, u32)>>>);

impl Messages {
    pub fn take(&self) -> Vec<(u64, u32)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    pub fn count(&self, message: (u64, u32)) -> usize {
        let sent = self.0.lock().unwrap();
        sent.iter().filter(|sent| **sent == message).count()
    }
}

impl InterruptSink for Messages {
    fn send(&self, _from: SourceId, message: Message) {
        self.0.lock().unwrap().push((message.address, message.data));
    }
}

/// KVM's coalesced ring, played by a list.
#[derive(Clone, Default)]
pub struct FakeLog(Arc<Mutex<LogState>>);

#[derive(Default)]
pub struct LogState {
    entries: VecDeque<LogEntry>,
    pub is_registered: bool,
    /// The kernel refuses to unregister.
    pub is_stuck: bool,
    pub exits: u64,
}

impl FakeLog {
    pub fn state(&self) -> MutexGuard<'_, LogState> {
        self.0.lock().unwrap()
    }

    /// A vCPU writes; false: it exits to user space instead.
    fn write(&self, entry: LogEntry) -> bool {
        let mut state = self.state();
        // KVM's ring has 170 entries and keeps one free.
        let fits = state.is_registered && state.entries.len() < 169;
        if fits {
            state.entries.push_back(entry);
        } else {
            state.exits += 1;
        }
        fits
    }
}

impl WriteLog for FakeLog {
    fn drain(&mut self, max: usize, take: &mut dyn FnMut(LogEntry)) -> usize {
        let count = max.min(self.state().entries.len());
        for _ in 0..count {
            // Not under the lock: vCPUs go on logging.
            let entry = self.state().entries.pop_front();
            take(entry.expect("only we take"));
        }
        count
    }

    fn is_empty(&self) -> bool {
        self.state().entries.is_empty()
    }

    fn unregister(&mut self) -> io::Result<()> {
        let mut state = self.state();
        if state.is_stuck {
            return Err(io::Error::other("stuck"));
        }
        state.is_registered = false;
        Ok(())
    }

    fn register(&mut self) -> io::Result<()> {
        self.state().is_registered = true;
        Ok(())
    }
}

/// The guest's way to the registers.
pub enum Registers {
    Trap,
    Logged {
        page: RegisterPage,
        log: FakeLog,
    },
    Shared {
        page: RegisterPage,
        /// The memory slot's own mapping, which arming protects.
        slot: u64,
    },
}

/// Parts of a machine other than its owner.
pub struct Parts {
    pub ram: GuestRam,
    pub registers: Registers,
    pub messages: Messages,
}

/// A machine with one function.
pub fn machine(mode: Mode, drain_limit: Duration, device: Disk) -> (Owner, Parts) {
    let unit = Unit::new(vtd::Config {
        drain_limit_ns: drain_limit.as_nanos() as u64,
        ..vtd::Config::default()
    });
    let ram = GuestRam::new(&[(Gpa::new(0), RAM)]).unwrap();
    let messages = Messages::default();
    let page = RegisterPage::new().unwrap();
    let (port, registers) = match mode {
        Mode::Trap => (VtdPort::trap(unit), Registers::Trap),
        Mode::Logged => {
            let mut log = FakeLog::default();
            log.register().unwrap();
            let port = VtdPort::logged(unit, page.clone(), Box::new(log.clone()));
            (port, Registers::Logged { page, log })
        }
        Mode::Shared => {
            let mapping = Arc::new(SlotMapping::of_page(page.memfd()).unwrap());
            let slot = mapping.hva().raw();
            let port = VtdPort::shared(unit, page.clone(), mapping);
            (port, Registers::Shared { page, slot })
        }
    };
    let owner = owner_of(
        (format!("{mode:?}"), &ram, &messages),
        Units::Vtd(port),
        Functions::Disk(VirtioFunction::new(DISK, device)),
        FunctionLines::default(),
    )
    .with_drain_limit(drain_limit);
    (
        owner,
        Parts {
            ram,
            registers,
            messages,
        },
    )
}

/// An owner of one unit and one function.
pub fn owner_of(
    (name, ram, messages): (String, &GuestRam, &Messages),
    unit: Units,
    function: Functions,
    function_lines: FunctionLines,
) -> Owner {
    let mut owner = Owner::new(name, ram.clone(), Arc::new(messages.clone()));
    let unit = owner.add_unit(unit);
    owner.add(unit, function, function_lines);
    owner
}

/// A disk image whose sectors tell their number.
pub fn image() -> Vec<u8> {
    (0..SECTORS * 512)
        .map(|at| (at / 512 * 7 + at % 509) as u8)
        .collect()
}

pub fn blk(io: Box<dyn BlockIo>, fault: Option<Fault>) -> Disk {
    let config = BlkConfig {
        queue_size: QUEUE_SIZE,
        ..BlkConfig::default()
    };
    Rogue::new(Blk::new(config, io).unwrap(), fault)
}

pub fn mem_disk() -> Disk {
    blk(Box::new(MemDisk::new(image(), 16, false)), None)
}

pub fn raw_disk(transfer: Transfer) -> Box<RawDisk> {
    let mut file = tempfile::tempfile().unwrap();
    io::Write::write_all(&mut file, &image()).unwrap();
    let options = RawDiskOptions {
        transfer,
        depth: 16,
        ..RawDiskOptions::default()
    };
    Box::new(RawDisk::from_file(file, options).unwrap())
}

/// A disk that holds every request back until the test releases it.
pub fn slow(transfer: Transfer) -> (Disk, SlowControl) {
    let (disk, control) = SlowDisk::new(raw_disk(transfer)).unwrap();
    (blk(Box::new(disk), None), control)
}

/// Path of the guest's exits to the owner, and of the owner's turns.
pub trait Bus {
    fn ask<R>(&mut self, question: impl FnOnce(Reply<R>) -> Request) -> R;
    fn turn(&mut self);
}

/// An owner called by the test.
pub struct ByHand {
    pub owner: Owner,
    /// Wakes that the owner has registered.
    pub wakes: Wakes,
    /// Lead of its clock over the host's, in ns.
    pub skew: u64,
}

impl ByHand {
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            wakes: Wakes::by_hand(),
            skew: 0,
        }
    }

    pub fn poll(&mut self) -> Activity {
        self.poll_at(Nanos(Nanos::now().0 + self.skew))
    }

    pub fn poll_at(&mut self, now: Nanos) -> Activity {
        self.owner
            .poll(&mut PollContext::new(now, 1600, &mut self.wakes))
    }

    pub fn arm(&mut self) -> Result<(), ArmError> {
        self.owner.arm(&mut self.wakes)
    }

    pub fn message(&mut self, request: Request) {
        let mut turn = PollContext::new(Nanos::now(), 1600, &mut self.wakes);
        self.owner.message(request, &mut turn);
    }

    /// A question whose answer may take its time.
    pub fn ask_later<R>(&mut self, question: impl FnOnce(Reply<R>) -> Request) -> Answer<R> {
        let (reply, answer) = Reply::pair();
        self.message(question(reply));
        answer
    }
}

impl Bus for ByHand {
    fn ask<R>(&mut self, question: impl FnOnce(Reply<R>) -> Request) -> R {
        let answer = self.ask_later(question);
        answer.try_take().expect("an answer at once")
    }

    fn turn(&mut self) {
        let _ = self.poll();
    }
}

impl Bus for Handle<Request> {
    fn ask<R>(&mut self, question: impl FnOnce(Reply<R>) -> Request) -> R {
        self.call(question).expect("the sidecore runs")
    }

    fn turn(&mut self) {
        std::thread::yield_now();
    }
}

/// The guest.
pub struct Guest<B> {
    pub bus: B,
    pub ram: GuestRam,
    pub registers: Registers,
    pub messages: Messages,
    pub driver: FakeDriver<GuestRam>,
    tail: u64,
    waits: u32,
    next_table: u64,
}

impl Guest<ByHand> {
    /// A machine by hand, its driver started.
    pub fn by_hand(mode: Mode, drain_limit: Duration, device: Disk) -> Self {
        let (owner, parts) = machine(mode, drain_limit, device);
        let mut guest = Self::new(ByHand::new(owner), parts);
        guest.boot();
        guest.start_driver();
        guest
    }

    /// Many turns: nothing that could happen now is left.
    pub fn settle(&mut self) {
        for _ in 0..200 {
            self.bus.turn();
        }
    }
}

impl<B: Bus> Guest<B> {
    pub fn new(bus: B, parts: Parts) -> Self {
        let Parts {
            ram,
            registers,
            messages,
        } = parts;
        let mut driver = FakeDriver::new(ram.clone(), Gpa::new(RINGS), 0, QUEUE_SIZE);
        driver.set_iova_offset(IOVA);
        Self {
            bus,
            ram,
            registers,
            messages,
            driver,
            tail: 0,
            waits: 0,
            next_table: TABLES + 0x1000,
        }
    }

    pub fn put(&self, gpa: u64, bytes: &[u8]) {
        self.ram.write(Gpa::new(gpa), bytes).unwrap();
    }

    pub fn get(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read(Gpa::new(gpa), &mut bytes).unwrap();
        bytes
    }

    /// Gives the owner turns until `done`; panics when it takes too long.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "never: {what}");
            self.bus.turn();
        }
    }

    pub fn counts(&mut self) -> Counts {
        self.bus.ask(|reply| Request::ask(reply, counts))
    }

    // Registers.

    pub fn write_register(&mut self, offset: u16, len: AccessLen, value: u64) {
        let exits = match &self.registers {
            Registers::Trap => true,
            Registers::Logged { log, .. } => !log.write(LogEntry {
                offset,
                len: len.bytes() as u8,
                data: value,
            }),
            Registers::Shared { slot, .. } => {
                store(*slot + u64::from(offset), len, value);
                false
            }
        };
        if exits {
            self.bus.ask(to_unit(Op::Write {
                bar: 0,
                offset: offset.into(),
                len: len.bytes() as u8,
                value,
            }));
        }
    }

    pub fn write4(&mut self, offset: u16, value: u32) {
        self.write_register(offset, AccessLen::B4, u64::from(value));
    }

    pub fn write8(&mut self, offset: u16, value: u64) {
        self.write_register(offset, AccessLen::B8, value);
    }

    pub fn read4(&mut self, offset: u16) -> u32 {
        match &self.registers {
            Registers::Trap => self.bus.ask(to_unit(Op::Read {
                bar: 0,
                offset: offset.into(),
                len: 4,
            })) as u32,
            Registers::Logged { page, .. } | Registers::Shared { page, .. } => page.load32(offset),
        }
    }

    /// Tables, then the registers in the order of stock Linux.
    pub fn boot(&mut self) {
        self.put(ROOT, &(CONTEXTS | 1).to_le_bytes());
        let context = u128::from(TABLES | 1) | (2 | DID << 8) << 64;
        self.put(
            CONTEXTS + 16 * u64::from(DISK.devfn()),
            &context.to_le_bytes(),
        );
        self.map(RINGS, RW);
        self.map(HEADERS, RW);
        for page in 0..DATA_PAGES {
            self.map(DATA + 0x1000 * page, RW);
        }
        self.write8(reg::IQT, 0);
        self.write8(reg::IQA, QUEUE);
        self.command(0x0400_0000, 0x0400_0000);
        self.write4(reg::FEDATA, FAULT_MESSAGE.1);
        self.write4(reg::FEADDR, FAULT_MESSAGE.0 as u32);
        self.write4(reg::FECTL, 0);
        self.write8(reg::RTADDR, ROOT);
        self.command(0x4400_0000, 0x4000_0000);
        self.flush(&[0x11, 0xd2]);
        self.command(0x8400_0000, 0x8000_0000);
    }

    fn command(&mut self, command: u32, answer: u32) {
        self.write4(reg::GCMD, command);
        self.until("GSTS", |guest| guest.read4(reg::GSTS) & answer == answer);
    }

    // Tables and invalidation.

    fn entry(&mut self, iova: u64) -> u64 {
        let mut table = TABLES;
        for level in (2..=4).rev() {
            let at = table + (iova >> (12 + 9 * (level - 1)) & 0x1ff) * 8;
            let mut entry = self.ram.read_u64(Gpa::new(at)).unwrap();
            if entry & RW == 0 {
                entry = self.next_table | RW;
                self.next_table += 0x1000;
                self.put(at, &entry.to_le_bytes());
            }
            table = entry & 0xf_ffff_ffff_f000;
        }
        table + (iova >> 12 & 0x1ff) * 8
    }

    /// Maps the page at `gpa`, [`IOVA`] above.
    pub fn map(&mut self, gpa: u64, rights: u64) {
        self.map_at(gpa + IOVA, gpa, rights);
    }

    pub fn map_at(&mut self, iova: u64, gpa: u64, rights: u64) {
        let at = self.entry(iova);
        self.put(at, &(gpa | rights).to_le_bytes());
    }

    pub fn clear_pte(&mut self, gpa: u64) {
        let at = self.entry(gpa + IOVA);
        self.put(at, &[0; 8]);
    }

    /// Descriptors and a wait into the queue; answers the wait's number.
    pub fn submit(&mut self, descriptors: &[u128]) -> u32 {
        self.waits += 1;
        let wait = 0x25 | u128::from(self.waits) << 32 | u128::from(STATUS) << 64;
        for descriptor in descriptors.iter().chain([&wait]) {
            self.put(QUEUE + self.tail, &descriptor.to_le_bytes());
            self.tail = (self.tail + 16) % 0x1000;
        }
        self.write4(reg::IQT, self.tail as u32);
        self.waits
    }

    /// Whether wait number `wait` has completed.
    pub fn is_done(&self, wait: u32) -> bool {
        let status = self.ram.read_u64(Gpa::new(STATUS)).unwrap() as u32;
        status >= wait
    }

    pub fn flush(&mut self, descriptors: &[u128]) {
        let wait = self.submit(descriptors);
        self.until("a wait descriptor", |guest| guest.is_done(wait));
    }

    /// Unmaps a page as Linux does in strict mode; answers the number of the wait.
    pub fn unmap(&mut self, gpa: u64) -> u32 {
        self.clear_pte(gpa);
        self.submit(&[flush_page(gpa)])
    }

    // The function.

    pub fn config_write(&mut self, reg: u16, len: u8, value: u32) {
        self.bus
            .ask(to_function(Op::ConfigWrite { reg, len, value }));
    }

    pub fn config_read(&mut self, reg: u16, len: u8) -> u32 {
        self.bus.ask(to_function(Op::ConfigRead { reg, len })) as u32
    }

    pub fn bar_write(&mut self, offset: u64, bytes: &[u8]) {
        let mut data = [0; 8];
        data[..bytes.len()].copy_from_slice(bytes);
        self.bus.ask(to_function(Op::Write {
            bar: 0,
            offset,
            len: bytes.len() as u8,
            value: u64::from_le_bytes(data),
        }));
    }

    pub fn bar_read(&mut self, offset: u64, len: usize) -> u64 {
        self.bus.ask(to_function(Op::Read {
            bar: 0,
            offset,
            len: len as u8,
        }))
    }

    pub fn status(&mut self) -> u8 {
        self.bar_read(COMMON + 0x14, 1) as u8
    }

    pub fn set_status(&mut self, status: u8) {
        self.bar_write(COMMON + 0x14, &[status]);
    }

    /// The MSI-X capability's message control word.
    pub fn msix_control(&mut self) -> u16 {
        let mut at = self.config_read(0x34, 1) as u16;
        while self.config_read(at, 1) != 0x11 {
            at = self.config_read(at + 1, 1) as u16;
            assert_ne!(at, 0, "no MSI-X capability");
        }
        at + 2
    }

    /// Finds the device reset, negotiates, and sets DRIVER_OK. Vector 0 is the configuration's, 1
    /// the queue's.
    pub fn start_driver(&mut self) {
        self.config_write(0x04, 2, 0x6);
        self.negotiate();
    }

    pub fn negotiate(&mut self) {
        self.set_status(0);
        self.until("reset", |guest| guest.status() == 0);
        let control = self.msix_control();
        self.config_write(control, 2, 0x8000);
        for vector in 0..2 {
            let (address, data) = message(vector);
            let entry = MSIX_TABLE + 16 * u64::from(vector);
            self.bar_write(entry, &address.to_le_bytes());
            self.bar_write(entry + 8, &data.to_le_bytes());
            self.bar_write(entry + 12, &[0; 4]);
        }
        self.set_status(3);
        for half in 0..2_u32 {
            self.bar_write(COMMON, &half.to_le_bytes());
            let offered = self.bar_read(COMMON + 4, 4) as u32;
            // Not EVENT_IDX: an interrupt for every completion.
            let accepted = offered & !(u32::from(half == 0) << 29);
            self.bar_write(COMMON + 8, &half.to_le_bytes());
            self.bar_write(COMMON + 12, &accepted.to_le_bytes());
        }
        self.set_status(3 | 8);
        assert_eq!(self.status(), 3 | 8, "FEATURES_OK");
        let queue: Rings = self.driver.config();
        self.bar_write(COMMON + 0x10, &0_u16.to_le_bytes());
        self.bar_write(COMMON + 0x16, &queue.index.to_le_bytes());
        self.bar_write(COMMON + 0x18, &queue.size.to_le_bytes());
        self.bar_write(COMMON + 0x1a, &1_u16.to_le_bytes());
        for (at, area) in [(0x20, queue.desc), (0x28, queue.avail), (0x30, queue.used)] {
            self.bar_write(COMMON + at, &area.raw().to_le_bytes());
        }
        self.bar_write(COMMON + 0x1c, &1_u16.to_le_bytes());
        self.set_status(3 | 8 | 4);
        assert_eq!(
            self.bar_read(DEVICE, 8),
            SECTORS,
            "the disk's capacity, and the driver is on"
        );
    }

    /// A fresh driver after a reset, with its rings cleared.
    pub fn restart_driver(&mut self) {
        self.driver = FakeDriver::new(self.ram.clone(), Gpa::new(RINGS), 0, QUEUE_SIZE);
        self.driver.set_iova_offset(IOVA);
        self.negotiate();
    }

    pub fn ring_doorbell(&mut self) {
        self.bar_write(NOTIFY, &0_u16.to_le_bytes());
    }

    /// Makes a request available: header `slot`, data at `gpa`.
    pub fn request(&mut self, slot: u64, op: u32, sector: u64, gpa: u64, len: u32) -> u16 {
        let at = HEADERS + 64 * slot;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&op.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.put(at, &header);
        self.put(at + 48, &[0xff]);
        let (header, data, status) = ((at + IOVA, 16), (gpa + IOVA, len), (at + 48 + IOVA, 1));
        let head = match op {
            kind::IN => self.driver.add(&[header], &[data, status]),
            _ => self.driver.add(&[header, data], &[status]),
        };
        // Published, with a fence behind it: does the device want a kick?
        if self.driver.used_flags() & NO_NOTIFY == 0 {
            self.ring_doorbell();
        }
        head
    }

    pub fn request_status(&self, slot: u64) -> u8 {
        self.get(HEADERS + 64 * slot + 48, 1)[0]
    }

    /// Waits for the next used element.
    pub fn wait_used(&mut self) -> (u16, u32) {
        let mut used = None;
        self.until("a used element", |guest| {
            used = guest.driver.used();
            used.is_some()
        });
        used.unwrap()
    }

    /// Writes a sector and reads it back into another page.
    #[track_caller]
    pub fn verified_io(&mut self, round: u64) {
        let sector = 64 + round * 5 % 512;
        let pattern: Vec<u8> = (0..512).map(|at| (at * 3 + round * 11) as u8).collect();
        let (from, to) = (DATA + 0xe000, DATA + 0xf000);
        self.put(from, &pattern);
        self.put(to, &[0; 512]);
        for (op, gpa) in [(kind::OUT, from), (kind::IN, to)] {
            let head = self.request(60, op, sector, gpa, 512);
            assert_eq!(self.wait_used().0, head);
            assert_eq!(self.request_status(60), 0, "status of request kind {op}");
        }
        assert_eq!(self.get(to, 512), pattern);
    }
}

/// A store as a vCPU makes it: through the memory slot's mapping, where it may have to wait for the
/// owner.
fn store(at: u64, len: AccessLen, value: u64) {
    let at = std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
    // SAFETY: `at` is an aligned register in the page that the owner's `SlotMapping` maps, and
    // every test keeps its owner until its guests have ended; other accesses to the page are atomic
    // as well.
    unsafe {
        match len {
            AccessLen::B4 => {
                AtomicU32::from_ptr(at.cast()).store(value as u32, Ordering::Release);
            }
            AccessLen::B8 => AtomicU64::from_ptr(at.cast()).store(value, Ordering::Release),
        }
    }
}

/// Page-selective invalidation of the page at `gpa`, draining reads and writes.
pub fn flush_page(gpa: u64) -> u128 {
    0xf2 | DID << 16 | u128::from((gpa + IOVA) & !0xfff) << 64
}

/// Domain-selective invalidation.
pub fn flush_domain() -> u128 {
    0xe2 | DID << 16
}

/// A write of the function's command register: 6 is memory space and Bus Master, 2 memory space
/// alone.
pub fn set_command(command: u32) -> impl FnOnce(Reply<u64>) -> Request {
    to_function(Op::ConfigWrite {
        reg: 4,
        len: 2,
        value: command,
    })
}
