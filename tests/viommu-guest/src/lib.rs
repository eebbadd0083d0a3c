//! A guest of one paravirtual IOMMU, for tests and benchmarks: the function on virtio-pci, an owner
//! that is called directly or runs on a sidecore, and a driver that waits for each request as
//! Linux's does.
#![forbid(unsafe_code)]
#![expect(missing_docs, reason = "names say it, as in a driver")]

use std::sync::Arc;

use fake_driver::{FakeDriver, Rings};
use guest_mem::{Gpa, GuestRam, PhysMem, SourceId};
use machine::{FunctionLines, Op, Target, functions, units};
use platform::interrupt::{InterruptSink, Message};
use pv_iommu::{IommuFunction, PvIommu, Request as Change};
use sidecore::{Activity, Handle, Nanos, PollContext, Poller, Reply, Wakes};
use virtio_pci::function::{COMMON, NOTIFY, NOTIFY_STRIDE};

units! {
    pub enum Units: Change {
        Paravirtual(PvIommu),
    }
}

functions! {
    pub enum Functions: Change {
        Iommu(IommuFunction),
    }
}

pub type Owner = machine::Owner<Units, Functions, GuestRam>;
pub type Request = machine::Request<Owner>;

pub const RAM: u64 = 4 << 20;
const RINGS: u64 = 0x1_0000;
/// Addresses of the request in flight, and of its tail, which the device writes.
const REQUEST: u64 = 0x2_0000;
const TAIL: u64 = 0x2_1000;
const QUEUE_SIZE: u16 = 64;
/// Index of the request queue.
const REQUESTS: u16 = 0;

/// Number of turns that a request may take: minutes, with either bus.
const PATIENCE: u64 = 1 << 28;

pub const IOMMU: SourceId = SourceId::new(0, 1, 0);
pub const DISK: SourceId = SourceId::new(0, 2, 0);

/// Interrupt messages that are dropped: the driver polls.
struct Nobody;

impl InterruptSink for Nobody {
    fn send(&self, _from: SourceId, _message: Message) {}
}

/// Creates an owner with the unit and its function, and guest memory. If `is_trapped`, each kick is
/// a message to the owner.
pub fn machine(is_trapped: bool) -> (Owner, GuestRam) {
    let ram = GuestRam::new(&[(Gpa::new(0), RAM)]).expect("memory");
    let endpoints = vec![DISK.0..=0xff];
    let unit = PvIommu::new(pv_iommu::Config {
        endpoints: endpoints.clone(),
        ..pv_iommu::Config::default()
    });
    let mut function = IommuFunction::new(IOMMU, endpoints);
    if is_trapped {
        function = function.trapped();
    }
    let mut owner = Owner::new("viommu", ram.clone(), Arc::new(Nobody));
    let unit = owner.add_unit(Units::Paravirtual(unit));
    owner.add(unit, Functions::Iommu(function), FunctionLines::default());
    (owner, ram)
}

/// Path of the guest's register accesses to the owner, and of the owner's progress.
pub trait Bus {
    fn ask(&mut self, op: Op) -> u64;
    /// Gives the owner time to work while the guest waits.
    fn turn(&mut self);
}

/// Returns the message that a register access of the guest sends to the owner.
fn access(op: Op) -> impl FnOnce(Reply<u64>) -> Request {
    let target = Target::Function(0);
    move |reply| Request::Access { target, op, reply }
}

/// An owner without a thread: the caller makes it sweep.
pub struct ByHand {
    pub owner: Owner,
    pub wakes: Wakes,
    /// Number of sweeps so far.
    pub sweeps: u64,
}

impl ByHand {
    pub fn new(owner: Owner) -> Self {
        let wakes = Wakes::by_hand();
        Self {
            owner,
            wakes,
            sweeps: 0,
        }
    }

    pub fn sweep(&mut self) -> Activity {
        self.sweeps += 1;
        self.owner
            .poll(&mut PollContext::new(Nanos::now(), 1600, &mut self.wakes))
    }

    pub fn unit(&mut self) -> &mut PvIommu {
        let Units::Paravirtual(unit) = self.owner.unit(0).expect("it has one");
        unit
    }
}

impl Bus for ByHand {
    fn ask(&mut self, op: Op) -> u64 {
        let (reply, answer) = Reply::pair();
        let mut turn = PollContext::new(Nanos::now(), 1600, &mut self.wakes);
        self.owner.message(access(op)(reply), &mut turn);
        answer.try_take().expect("an answer at once")
    }

    fn turn(&mut self) {
        let _ = self.sweep();
    }
}

impl Bus for Handle<Request> {
    fn ask(&mut self, op: Op) -> u64 {
        self.call(access(op)).expect("the sidecore runs")
    }

    fn turn(&mut self) {
        std::hint::spin_loop();
    }
}

/// The guest, with its driver.
pub struct Guest<B> {
    pub bus: B,
    pub ram: GuestRam,
    driver: FakeDriver<GuestRam>,
    /// Number of doorbells that were rung on the device's request.
    pub kicks: u64,
}

impl<B: Bus> Guest<B> {
    /// Creates a guest whose driver has started.
    pub fn new(bus: B, ram: GuestRam) -> Self {
        let driver = FakeDriver::new(ram.clone(), Gpa::new(RINGS), REQUESTS, QUEUE_SIZE);
        let mut guest = Self {
            bus,
            ram,
            driver,
            kicks: 0,
        };
        guest.negotiate();
        guest
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 8];
        bytes[..data.len()].copy_from_slice(data);
        self.bus.ask(Op::Write {
            bar: 0,
            offset,
            len: data.len() as u8,
            value: u64::from_le_bytes(bytes),
        });
    }

    fn read(&mut self, offset: u64, len: u8) -> u64 {
        self.bus.ask(Op::Read {
            bar: 0,
            offset,
            len,
        })
    }

    /// Initializes the device: memory and bus mastering on; reset, all features, the request queue
    /// (virtio 1.2 §3.1.1).
    fn negotiate(&mut self) {
        self.bus.ask(Op::ConfigWrite {
            reg: 0x04,
            len: 2,
            value: 6,
        });
        let status = COMMON + 0x14;
        self.write(status, &[0]);
        self.write(status, &[3]);
        for half in 0..2_u32 {
            self.write(COMMON, &half.to_le_bytes());
            let mut accepted = self.read(COMMON + 4, 4) as u32;
            if half == 1 {
                // A split ring: bit 34 is RING_PACKED.
                accepted &= !4;
            }
            self.write(COMMON + 8, &half.to_le_bytes());
            self.write(COMMON + 12, &accepted.to_le_bytes());
        }
        self.write(status, &[3 | 8]);
        let rings: Rings = self.driver.config();
        self.write(COMMON + 0x16, &rings.index.to_le_bytes());
        self.write(COMMON + 0x18, &rings.size.to_le_bytes());
        for (at, area) in [(0x20, rings.desc), (0x28, rings.avail), (0x30, rings.used)] {
            self.write(COMMON + at, &area.raw().to_le_bytes());
        }
        self.write(COMMON + 0x1c, &1_u16.to_le_bytes());
        self.write(status, &[3 | 8 | 4]);
        assert_eq!(self.read(status, 1), 15, "the device is on");
    }

    /// Adds a request to the ring. Returns whether the device wants a notification.
    pub fn put(&mut self, request: &[u8]) -> bool {
        self.driver.put(REQUEST, request);
        self.driver.put(TAIL, &[0xff; 4]);
        self.driver
            .add(&[(REQUEST, request.len() as u32)], &[(TAIL, 4)]);
        self.driver.publish_and_ask()
    }

    /// Rings the doorbell.
    pub fn kick(&mut self) {
        self.kicks += 1;
        let at = NOTIFY + NOTIFY_STRIDE * u64::from(REQUESTS);
        self.write(at, &REQUESTS.to_le_bytes());
    }

    /// Returns the status of the request in flight, once it is completed.
    pub fn answer(&mut self) -> Option<u8> {
        let (_, len) = self.driver.used()?;
        let mut tail = [0; 4];
        self.ram.read(Gpa::new(TAIL), &mut tail).expect("memory");
        assert_eq!((len, &tail[1..]), (4, &[0, 0, 0][..]));
        Some(tail[0])
    }

    /// Makes a request and waits for it. Returns its status.
    pub fn request(&mut self, request: &[u8]) -> u8 {
        if self.put(request) {
            self.kick();
        }
        for _ in 0..PATIENCE {
            if let Some(status) = self.answer() {
                return status;
            }
            self.bus.turn();
        }
        panic!("no answer");
    }
}

/// Returns the bytes of a request of this type.
fn words(kind: u8, words: &[u32]) -> Vec<u8> {
    let words = words.iter().flat_map(|word| word.to_le_bytes());
    [kind, 0, 0, 0].into_iter().chain(words).collect()
}

pub fn attach(domain: u32, endpoint: SourceId) -> Vec<u8> {
    words(1, &[domain, endpoint.0.into(), 0, 0])
}

pub fn detach(domain: u32, endpoint: SourceId) -> Vec<u8> {
    words(2, &[domain, endpoint.0.into(), 0, 0])
}

/// Returns a MAP request of one page, for reads and writes.
pub fn map(domain: u32, iova: u64, phys: u64) -> Vec<u8> {
    let last = iova + 0xfff;
    let halves = [iova, last, phys].map(|word| [word as u32, (word >> 32) as u32]);
    words(3, &[&[domain], halves.as_flattened(), &[3]].concat())
}

pub fn unmap(domain: u32, iova: u64) -> Vec<u8> {
    let halves = [iova, iova + 0xfff].map(|word| [word as u32, (word >> 32) as u32]);
    words(4, &[&[domain], halves.as_flattened(), &[0]].concat())
}
