//! The machine: a VT-d unit with three disks and a network card behind it, a unit that remaps
//! interrupts by a table in memory with a fourth disk, all under one owner whose memory is the
//! [`Pager`], and called by hand.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use guest_mem::{
    Access, DmaFault, Gpa, Iova, KeepAlive, NoIommu, PAGE_SIZE, PhysMem, SourceId, Stop, Ticket,
};
use machine::{
    Absent, FunctionLines, Op, RemappingUnit, Target, UnitControl, UnitPoll, UnitSink, functions,
    units,
};
use platform::interrupt::{InterruptSink, Message};
use sidecore::{Nanos, PollContext, Poller, Reply, Wakes};
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, Transfer};
use vio::net::{FrameData, FrameReceiver, Net, NetHeader, NetPort, RxFrame, TxFrame};
use virtio_pci::VirtioFunction;
use virtio_pci::function::{COMMON, MSIX_TABLE, NOTIFY, NOTIFY_STRIDE};
use vtd::spec::registers as reg;
use vtd_port::VtdPort;

use crate::disk::LateDisk;
use crate::memory::{Area, Cpu, Kind, Pager};

units! {
    /// The units.
    pub enum Units: Infallible {
        Vtd(VtdPort),
        Remapper(Remapper),
    }
}

functions! {
    /// The functions.
    pub enum Functions: Infallible {
        Disk(VirtioFunction<Blk>),
        Net(VirtioFunction<Net>),
    }
}

pub type Owner = machine::Owner<Units, Functions, Pager>;
pub type Request = machine::Request<Owner>;

const PAGE: u64 = PAGE_SIZE;
pub const ROOT: u64 = PAGE;
pub const CONTEXTS: u64 = 2 * PAGE;
/// The invalidation queue: one page, 256 descriptors.
pub const QUEUE: u64 = 3 * PAGE;
pub const STATUS: u64 = 4 * PAGE;
pub const INTERRUPTS: u64 = 5 * PAGE;
/// Level 4, and behind it the tables below it.
pub const TABLES: u64 = 8 * PAGE;
/// Rings, 4 pages each.
pub const RINGS: u64 = 128 * PAGE;
/// For each function: a page of headers, one of status bytes, and four of indirect tables.
pub const REQUESTS: u64 = 176 * PAGE;
pub const DATA: u64 = 208 * PAGE;
pub const PAGES: u64 = 1024;
const DID: u128 = 7;

/// Functions 0 to 3 are disks, the last one is the network card.
pub const DISKS: usize = 4;
pub const NET: usize = 4;
/// The one behind the unit that translates nothing.
pub const UNMAPPED: usize = 2;
pub const SECTORS: u64 = 1024;
pub const QUEUE_SIZE: u16 = 256;
/// The same for disks and the network card's two queues.
pub const RING_PAGES: u64 = 4;

/// The split ring's parts, as the driver lays them out.
const DESC_LEN: u64 = 16 * QUEUE_SIZE as u64;
const AVAIL_LEN: u64 = 6 + 2 * QUEUE_SIZE as u64;

const EVENT_IDX: u64 = 1 << 29;
const PACKED: u64 = 1 << 34;

/// Returns the features that the driver of a function does not accept.
pub fn refused(function: usize) -> u64 {
    match function {
        // Event words in packed rings and in some of the split ones, flags in the others.
        0 | 3 => PACKED,
        1 => 0,
        _ => PACKED | EVENT_IDX,
    }
}

pub fn source(function: usize) -> SourceId {
    SourceId::new(0, 1 + function as u8, 0)
}

/// Interrupts by a table in memory: an entry of 16 bytes for each data value, whose low half says
/// that it is valid.
pub struct Remapper {
    none: NoIommu,
}

impl UnitControl for Remapper {
    fn has_work(&mut self) -> bool {
        false
    }
}

impl<C> RemappingUnit<C> for Remapper {
    type Iommu = NoIommu;

    fn iommu(&mut self) -> &mut NoIommu {
        &mut self.none
    }

    fn poll<M: PhysMem>(&mut self, _: &M, _: u64, _: &mut impl UnitSink) -> UnitPoll {
        UnitPoll::default()
    }

    fn remap<M: PhysMem>(&mut self, mem: &M, _: SourceId, message: Message) -> Access<Message> {
        let at = Gpa::new(INTERRUPTS + 16 * u64::from(message.data & 0xff));
        let entry = mem.read_u128(at)?;
        if entry & 1 == 0 {
            let iova = Iova::new(message.address);
            return Err(Stop::Fault(DmaFault::Blocked { iova }));
        }
        let data = (entry >> 64) as u32;
        Ok(Message { data, ..message })
    }
}

/// Messages that have arrived, by their data.
#[derive(Default)]
pub struct Arrived(Mutex<BTreeMap<u32, u64>>);

impl InterruptSink for Arrived {
    fn send(&self, _: SourceId, message: Message) {
        *self.0.lock().unwrap().entry(message.data).or_default() += 1;
    }
}

/// Data of the message of a function's vector, as it arrives.
fn arrives_as(function: usize, vector: u16) -> u32 {
    0x40 + 8 * function as u32 + u32::from(vector)
}

/// A cable from the card's output to its input.
#[derive(Clone, Default)]
pub struct Cable(Arc<Mutex<Frames>>);

#[derive(Default)]
struct Frames {
    under_way: VecDeque<Vec<u8>>,
    /// Since the last look.
    sent: Vec<Vec<u8>>,
}

impl Cable {
    /// Takes the frames that were sent since the last look.
    pub fn take_sent(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.0.lock().unwrap().sent)
    }
}

impl NetPort for Cable {
    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        let mut cable = self.0.lock().unwrap();
        for frame in frames {
            let mut bytes = vec![0; frame.len as usize];
            frame.read(0, &mut bytes);
            cable.under_way.push_back(bytes.clone());
            cable.sent.push(bytes);
        }
        0
    }

    fn has_frames(&mut self, _pair: u16) -> bool {
        !self.0.lock().unwrap().under_way.is_empty()
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        let mut cable = self.0.lock().unwrap();
        while let Some(frame) = cable.under_way.front()
            && to.room() != 0
        {
            let frame = RxFrame {
                header: NetHeader::PLAIN,
                data: FrameData::Bytes(frame),
            };
            if to.deliver(&[frame]) == 0 {
                return;
            }
            cable.under_way.pop_front();
        }
    }

    fn reset(&mut self) {
        self.0.lock().unwrap().under_way.clear();
    }
}

pub struct Machine {
    pub owner: Owner,
    pub pager: Pager,
    pub cpu: Cpu,
    pub cable: Cable,
    arrived: Arc<Arrived>,
    wakes: Wakes,
    tail: u64,
    waits: u32,
    /// Level, and the part of the address above it, of each table.
    tables: BTreeMap<(u32, u64), u64>,
}

impl Machine {
    pub fn new(seed: u64) -> Self {
        let pager = Pager::new(PAGES);
        name_areas(&pager);
        let arrived = Arc::<Arrived>::default();
        let mut owner = Owner::new("pager", pager.clone(), arrived.clone());
        let vtd = owner.add_unit(Units::Vtd(VtdPort::trap(vtd::Unit::new(
            vtd::Config::default(),
        ))));
        let remapper = owner.add_unit(Units::Remapper(Remapper {
            none: NoIommu::new(guest_mem::MAX_LEASES),
        }));
        let bytes = (SECTORS * 512) as usize;
        let disks: [(usize, Box<dyn BlockIo>, bool); DISKS] = [
            (
                vtd,
                Box::new(LateDisk::new(bytes, Transfer::Direct, seed)),
                false,
            ),
            (vtd, Box::new(MemDisk::new(vec![0; bytes], 16, false)), true),
            (
                remapper,
                Box::new(LateDisk::new(bytes, Transfer::Bounce, seed)),
                false,
            ),
            (
                vtd,
                Box::new(MemDisk::new(vec![0; bytes], 16, false)),
                false,
            ),
        ];
        for (number, (unit, io, packed)) in disks.into_iter().enumerate() {
            let config = BlkConfig {
                queue_size: QUEUE_SIZE,
                packed,
                ..BlkConfig::default()
            };
            let device = Blk::new(config, io).unwrap();
            let function = Functions::Disk(VirtioFunction::new(source(number), device));
            assert_eq!(owner.add(unit, function, FunctionLines::default()), number);
        }
        let cable = Cable::default();
        let net = Net::new([2, 0, 0, 0, 0, 1], QUEUE_SIZE, Box::new(cable.clone())).unwrap();
        let net = Functions::Net(VirtioFunction::new(source(NET), net));
        assert_eq!(owner.add(vtd, net, FunctionLines::default()), NET);
        let mut machine = Self {
            owner,
            cpu: Cpu(pager.clone()),
            pager,
            cable,
            arrived,
            wakes: Wakes::by_hand(),
            tail: 0,
            waits: 0,
            tables: BTreeMap::new(),
        };
        machine.boot();
        machine
    }

    // Time and messages.

    pub fn poll(&mut self) {
        let mut turn = PollContext::new(Nanos::now(), 1600, &mut self.wakes);
        let _ = self.owner.poll(&mut turn);
    }

    /// The owner goes to sleep, looks once more, and is woken.
    pub fn doze(&mut self) {
        self.owner
            .arm(&mut self.wakes)
            .expect("nothing to arm by the host");
        let _ = self.owner.has_work();
        self.owner.disarm();
        self.poll();
    }

    fn message(&mut self, request: Request) {
        let mut turn = PollContext::new(Nanos::now(), 1600, &mut self.wakes);
        self.owner.message(request, &mut turn);
    }

    /// A vCPU's access, whose answer has to wait while a stop is under way.
    fn access(&mut self, target: Target, op: Op) -> u64 {
        let (reply, answer) = Reply::pair();
        self.message(Request::Access { target, op, reply });
        for _ in 0..10_000 {
            if let Some(value) = answer.try_take() {
                return value;
            }
            self.poll();
        }
        panic!("{op:?} is never answered");
    }

    pub fn ticket_done(&mut self, ticket: Ticket, result: Result<(), Absent>) {
        self.message(Request::TicketDone(ticket, result));
    }

    /// Asks the owner for these pages, and takes away those that it releases.
    pub fn evict(&mut self, pages: &[u64]) -> u32 {
        let gpas: Vec<Gpa> = pages.iter().map(|page| Gpa::new(page * PAGE)).collect();
        let pages = guest_mem::Pages::new(&gpas).expect("at most 32");
        let (reply, answer) = Reply::pair();
        self.message(Request::Evict {
            pages: Box::new(pages),
            reply,
        });
        answer.try_take().expect("answered at once")
    }

    /// Interrupts of a function's vector since the last look.
    pub fn take_interrupts(&self, function: usize, vector: u16) -> u64 {
        let data = arrives_as(function, vector);
        self.arrived.0.lock().unwrap().remove(&data).unwrap_or(0)
    }

    // The remapping unit.

    fn write(&mut self, offset: u16, len: u8, value: u64) {
        self.access(
            Target::Unit(0),
            Op::Write {
                bar: 0,
                offset: offset.into(),
                len,
                value,
            },
        );
    }

    fn read4(&mut self, offset: u16) -> u32 {
        let offset = offset.into();
        self.access(
            Target::Unit(0),
            Op::Read {
                bar: 0,
                offset,
                len: 4,
            },
        ) as u32
    }

    fn command(&mut self, command: u32, bit: u32, wanted: u32) {
        self.write(reg::GCMD, 4, command.into());
        for _ in 0..10_000 {
            if self.read4(reg::GSTS) & bit == wanted {
                return;
            }
            self.poll();
            self.serve();
        }
        panic!("command {command:#x} never ends");
    }

    /// Every ticket's memory comes.
    pub fn serve(&mut self) {
        for ticket in self.pager.tickets() {
            self.pager.deliver(ticket);
            self.ticket_done(ticket, Ok(()));
        }
    }

    fn boot(&mut self) {
        self.cpu.put(ROOT, &(CONTEXTS | 1).to_le_bytes());
        let context = u128::from(TABLES | 1) | (2 | DID << 8) << 64;
        for function in (0..=NET).filter(|function| *function != UNMAPPED) {
            let at = CONTEXTS + 16 * u64::from(source(function).devfn());
            self.cpu.put(at, &context.to_le_bytes());
        }
        self.pager.name(TABLES, Area::Only(Kind::Level4));
        self.tables.insert((4, 0), TABLES);
        // What is not data lies where it lies.
        for page in RINGS / PAGE..DATA / PAGE {
            self.map(page * PAGE, page * PAGE);
        }
        for entry in 0..0x100_u64 {
            let entry = u128::from(entry) << 64 | 1;
            let at = INTERRUPTS + 16 * (entry >> 64) as u64;
            self.cpu.put(at, &entry.to_le_bytes());
        }
        self.write(reg::RTADDR, 8, ROOT);
        self.command(0x4000_0000, 0x4000_0000, 0x4000_0000);
        self.start_queue();
        self.command(0x8400_0000, 0x8000_0000, 0x8000_0000);
    }

    fn start_queue(&mut self) {
        self.write(reg::IQT, 8, 0);
        self.write(reg::IQA, 8, QUEUE);
        self.command(0x8400_0000, 0x0400_0000, 0x0400_0000);
        self.tail = 0;
    }

    /// Switches the invalidation queue off in any state, and on again: what was in it is forgotten.
    /// Translation stays on.
    pub fn restart_queue(&mut self) {
        self.command(0x8000_0000, 0x0400_0000, 0);
        self.start_queue();
    }

    /// Goes on after a descriptor that could not be fetched, or a status word that could not be
    /// written.
    pub fn clear_queue_error(&mut self) {
        self.write(reg::FSTS, 4, 0x7f);
    }

    /// Descriptors into the queue, and a wait behind them; its number.
    pub fn submit(&mut self, descriptors: &[u128]) -> u32 {
        self.waits += 1;
        let wait = 0x25 | u128::from(self.waits) << 32 | u128::from(STATUS) << 64;
        for descriptor in descriptors.iter().chain([&wait]) {
            self.cpu.put(QUEUE + self.tail, &descriptor.to_le_bytes());
            self.tail = (self.tail + 16) % PAGE;
        }
        self.write(reg::IQT, 8, self.tail);
        self.waits
    }

    /// The wait that has completed last.
    pub fn completed_wait(&self) -> u32 {
        self.cpu.read_u64(Gpa::new(STATUS)).unwrap() as u32
    }

    pub fn flush_pages(iova: u64) -> [u128; 8] {
        std::array::from_fn(|at| 0xf2 | DID << 16 | u128::from(iova + at as u64 * PAGE) << 64)
    }

    pub fn flush_everything() -> [u128; 2] {
        [0x11, 0xd2]
    }

    pub fn flush_domain() -> u128 {
        0xe2 | DID << 16
    }

    fn entry(&mut self, iova: u64) -> u64 {
        for level in (1..=3).rev() {
            let above = iova >> (12 + 9 * level);
            if self.tables.contains_key(&(level, above)) {
                continue;
            }
            let table = TABLES + self.tables.len() as u64 * PAGE;
            assert!(table < RINGS, "room for tables");
            let kind = [Kind::Level1, Kind::Level2, Kind::Level3][level as usize - 1];
            self.pager.name(table, Area::Only(kind));
            let parent = self.tables[&(level + 1, above >> 9)];
            self.cpu
                .put(parent + (above & 0x1ff) * 8, &(table | 3).to_le_bytes());
            self.tables.insert((level, above), table);
        }
        self.tables[&(1, iova >> 21)] + (iova >> 12 & 0x1ff) * 8
    }

    pub fn map(&mut self, iova: u64, gpa: u64) {
        let at = self.entry(iova);
        self.cpu.put(at, &(gpa | 3).to_le_bytes());
    }

    pub fn unmap(&mut self, iova: u64) {
        let at = self.entry(iova);
        self.cpu.put(at, &[0; 8]);
    }

    // Functions.

    pub fn bar_write(&mut self, function: usize, offset: u64, bytes: &[u8]) {
        let mut data = [0; 8];
        data[..bytes.len()].copy_from_slice(bytes);
        let op = Op::Write {
            bar: 0,
            offset,
            len: bytes.len() as u8,
            value: u64::from_le_bytes(data),
        };
        self.access(Target::Function(function), op);
    }

    pub fn bar_read(&mut self, function: usize, offset: u64, len: u8) -> u64 {
        let op = Op::Read {
            bar: 0,
            offset,
            len,
        };
        self.access(Target::Function(function), op)
    }

    pub fn status(&mut self, function: usize) -> u8 {
        self.bar_read(function, COMMON + 0x14, 1) as u8
    }

    fn set_status(&mut self, function: usize, status: u8) {
        self.bar_write(function, COMMON + 0x14, &[status]);
    }

    pub fn ring(&mut self, function: usize, queue: u16) {
        let at = NOTIFY + NOTIFY_STRIDE * u64::from(queue);
        self.bar_write(function, at, &queue.to_le_bytes());
    }

    /// Asks for a reset, and polls until it is over. Nothing else happens meanwhile: no memory
    /// comes.
    pub fn reset(&mut self, function: usize) {
        self.set_status(function, 0);
        for _ in 0..10_000 {
            if self.status(function) == 0 {
                return;
            }
            self.poll();
        }
        panic!("the reset of function {function} is never over");
    }

    /// Returns the features that the driver of a function accepts.
    pub fn features(&mut self, function: usize) -> u64 {
        let mut offered = 0;
        for half in 0..2_u32 {
            self.bar_write(function, COMMON, &half.to_le_bytes());
            offered |= self.bar_read(function, COMMON + 4, 4) << (32 * half);
        }
        offered & !refused(function)
    }

    /// Brings the function up from its reset with these queues.
    pub fn start(&mut self, function: usize, queues: &[vio::QueueConfig]) {
        self.config_write(function, 4, 6);
        let control = self.msix_control(function);
        self.config_write(function, control, 0x8000);
        for vector in 0..=queues.len() as u16 {
            let entry = MSIX_TABLE + 16 * u64::from(vector);
            let data = arrives_as(function, vector);
            self.bar_write(function, entry, &0xfee0_0000_u64.to_le_bytes());
            self.bar_write(function, entry + 8, &data.to_le_bytes());
            self.bar_write(function, entry + 12, &[0; 4]);
        }
        self.set_status(function, 3);
        let features = self.features(function);
        for half in 0..2_u32 {
            let accepted = (features >> (32 * half)) as u32;
            self.bar_write(function, COMMON + 8, &half.to_le_bytes());
            self.bar_write(function, COMMON + 12, &accepted.to_le_bytes());
        }
        self.set_status(function, 3 | 8);
        assert_eq!(self.status(function), 3 | 8, "FEATURES_OK");
        for queue in queues {
            self.bar_write(function, COMMON + 0x16, &queue.index.to_le_bytes());
            self.bar_write(function, COMMON + 0x18, &queue.size.to_le_bytes());
            self.bar_write(function, COMMON + 0x1a, &(queue.index + 1).to_le_bytes());
            for (at, area) in [(0x20, queue.desc), (0x28, queue.avail), (0x30, queue.used)] {
                self.bar_write(function, COMMON + at, &area.raw().to_le_bytes());
            }
            self.bar_write(function, COMMON + 0x1c, &1_u16.to_le_bytes());
        }
        self.set_status(function, 3 | 8 | 4);
        assert_eq!(self.status(function), 15, "DRIVER_OK");
    }

    fn config_write(&mut self, function: usize, reg: u16, value: u32) {
        let op = Op::ConfigWrite { reg, len: 2, value };
        self.access(Target::Function(function), op);
    }

    fn config_read(&mut self, function: usize, reg: u16) -> u16 {
        let op = Op::ConfigRead { reg, len: 1 };
        self.access(Target::Function(function), op) as u16
    }

    fn msix_control(&mut self, function: usize) -> u16 {
        let mut at = self.config_read(function, 0x34);
        while self.config_read(function, at) != 0x11 {
            at = self.config_read(function, at + 1);
        }
        at + 2
    }
}

/// The base of a function's queue.
pub fn ring_base(function: usize, queue: u16) -> u64 {
    RINGS + (2 * function as u64 + u64::from(queue)) * RING_PAGES * PAGE
}

fn name_areas(pager: &Pager) {
    for (at, kind) in [
        (0, Kind::RootEntry),
        (CONTEXTS, Kind::ContextEntry),
        (QUEUE, Kind::QueueDescriptor),
        (STATUS, Kind::WaitStatus),
        (INTERRUPTS, Kind::InterruptEntry),
    ] {
        pager.name(at, Area::Only(kind));
    }
    for (function, queue) in [(0, 0), (1, 0), (2, 0), (3, 0), (NET, 0), (NET, 1)] {
        let base = ring_base(function, queue);
        if refused(function) & PACKED == 0 {
            pager.name(base, Area::Ring(Kind::Descriptor, Kind::UsedRing));
            pager.name(base + DESC_LEN, Area::Only(Kind::DriverEvent));
            pager.name(base + DESC_LEN + 4, Area::Only(Kind::DeviceEvent));
        } else {
            pager.name(base, Area::Only(Kind::Descriptor));
            pager.name(base + DESC_LEN, Area::Only(Kind::AvailIndex));
            let used = (base + DESC_LEN + AVAIL_LEN).next_multiple_of(4);
            pager.name(used, Area::Only(Kind::UsedRing));
        }
    }
    for function in 0..=NET as u64 {
        let base = REQUESTS + function * 6 * PAGE;
        pager.name(base, Area::Only(Kind::RequestHeader));
        pager.name(base + PAGE, Area::Only(Kind::StatusByte));
        pager.name(base + 2 * PAGE, Area::Only(Kind::IndirectTable));
    }
    pager.name(DATA, Area::Data);
}
