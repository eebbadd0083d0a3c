//! Requests of a driver of virtio-iommu, through its rings, with accesses of two devices between
//! them. Each request is given back with a status or unwritten. A device reaches what the requests
//! that succeeded have mapped. A request that removes a mapping is not answered while an access
//! that began before it can reach the mapping.
//!
//! The input is a sequence of actions: one byte, and the arguments behind it. Requests are half
//! made of small numbers, so that they meet, and half of any bytes.

use std::collections::BTreeMap;

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Gpa, Iommu as _, Iova, LeaseId, Leases, Perm, PhysMem, SourceId};
use machine::{
    Command, CommandId, CommandResult, Invalidation, RefusedAccess, RemappingUnit, UnitEvent,
    UnitSink,
};
use platform::interrupt::Message;
use pv_iommu::class::{Iommu, IommuClass, Tag};
use pv_iommu::{Config, PvIommu, Request};
use vio::{Device, Interrupt, QueueConfig, QueueDevice, feature};

use crate::Input;

/// Most actions of one input.
const ACTIONS: usize = 200;
const ENTRIES: u16 = 8;
const RING: u64 = 0x4000;
const DATA: u64 = 0x1_0000;
const TAIL: u64 = 0x2_0000;
const EVENT: u64 = 0x3_0000;
const UNWRITTEN: u8 = 0xee;
const MAX_MAPPINGS: usize = 12;
const DEVICES: [u16; 2] = [0x18, 0x20];

struct NoInterrupts;

impl Interrupt for NoInterrupts {
    fn queue(&mut self, _queue: u16) {}

    fn config(&mut self) {}
}

#[derive(Default)]
struct Between {
    answers: Vec<(CommandId, CommandResult)>,
    refused: Vec<RefusedAccess>,
}

impl UnitSink for Between {
    fn interrupt(&mut self, _: Message) {}

    fn event(&mut self, _: UnitEvent) {}

    fn invalidated(&mut self, _: &Invalidation) -> u32 {
        0
    }

    fn command_done(&mut self, id: CommandId, result: CommandResult) {
        self.answers.push((id, result));
    }

    fn access_refused(&mut self, access: RefusedAccess) {
        self.refused.push(access);
    }
}

/// Mappings, as the requests that succeeded say.
#[derive(Default)]
struct Shadow {
    attached: BTreeMap<u16, u32>,
    is_bypass: bool,
    domains: BTreeMap<u32, Domain>,
}

#[derive(Default)]
struct Domain {
    is_bypass: bool,
    /// First and last address, where it leads, rights.
    mappings: Vec<(u64, u64, u64, u32)>,
}

impl Shadow {
    fn leave(&mut self, endpoint: u16) {
        if let Some(domain) = self.attached.remove(&endpoint)
            && !self.attached.values().any(|other| *other == domain)
        {
            self.domains.remove(&domain);
        }
    }

    /// A request has been carried out.
    fn apply(&mut self, request: Request) {
        match request {
            Request::Attach {
                domain,
                endpoint,
                flags,
                ..
            } => {
                let endpoint = u16::try_from(endpoint).expect("it exists");
                if self.attached.get(&endpoint) != Some(&domain) {
                    self.leave(endpoint);
                }
                self.attached.insert(endpoint, domain);
                let own = self.domains.entry(domain).or_default();
                own.is_bypass |= flags & 1 != 0;
            }
            Request::Detach { domain, endpoint } => {
                let endpoint = u16::try_from(endpoint).expect("it exists");
                assert_eq!(self.attached.get(&endpoint), Some(&domain));
                self.leave(endpoint);
            }
            Request::Map {
                domain,
                first,
                last,
                phys,
                flags,
            } => {
                let own = self.domains.get_mut(&domain).expect("it exists");
                assert!(!own.is_bypass && first <= last);
                assert!((first | last.wrapping_add(1) | phys).is_multiple_of(4096));
                let mut others = own.mappings.iter();
                assert!(others.all(|&(from, to, ..)| last < from || to < first));
                own.mappings.push((first, last, phys, flags));
                let all: usize = self.domains.values().map(|own| own.mappings.len()).sum();
                assert!(all <= MAX_MAPPINGS);
            }
            Request::Unmap {
                domain,
                first,
                last,
            } => {
                let own = self.domains.get_mut(&domain).expect("it exists");
                own.mappings.retain(|&(from, to, ..)| {
                    let is_inside = first <= from && to <= last;
                    assert!(is_inside || to < first || last < from, "one is split");
                    !is_inside
                });
            }
            Request::SetBypass(is_bypass) => self.is_bypass = is_bypass,
            Request::Reset => {
                self.attached.clear();
                self.domains.clear();
            }
        }
    }

    fn reach(&self, endpoint: u16, iova: u64, perm: Perm) -> Option<u64> {
        let domain = self.attached.get(&endpoint);
        let Some(domain) = domain.and_then(|domain| self.domains.get(domain)) else {
            return self.is_bypass.then_some(iova);
        };
        if domain.is_bypass {
            return Some(iova);
        }
        let right = if perm == Perm::Write { 2 } else { 1 };
        let mut all = domain.mappings.iter();
        let found = all.find(|(first, last, ..)| (*first..=*last).contains(&iova))?;
        (found.3 & right != 0).then(|| found.2 + (iova - found.0))
    }
}

/// A lease: name, device, page, where that led when it began.
type Lease = (LeaseId, u16, u64, u64);

struct World {
    mem: ArrayMem,
    device: Iommu,
    unit: PvIommu,
    between: Between,
    /// And the leases that each has to outlast.
    asked: BTreeMap<CommandId, (Tag, Vec<LeaseId>)>,
    next: u64,
    shadow: Shadow,
    available: u16,
    events: u16,
    leases: Vec<Lease>,
}

fn config(index: u16) -> QueueConfig {
    let base = RING * (u64::from(index) + 1);
    QueueConfig {
        index,
        size: ENTRIES,
        desc: Iova::new(base),
        avail: Iova::new(base + 0x1000),
        used: Iova::new(base + 0x2000),
    }
}

impl World {
    fn new() -> Self {
        let mem = ArrayMem::new(1 << 20);
        let endpoints = vec![0x10..=0xff];
        let mut device = Device::of(IommuClass::new(endpoints.clone()));
        let features = device.features() & !(feature::RING_PACKED | feature::EVENT_IDX);
        device
            .activate(features, &[config(0), config(1)], mem.keep_alive())
            .expect("a good start");
        let unit = PvIommu::new(Config {
            endpoints,
            max_domains: 3,
            max_mappings: MAX_MAPPINGS,
            max_leases: 64,
            drain_limit_ns: u64::MAX,
        });
        Self {
            mem,
            device,
            unit,
            between: Between::default(),
            asked: BTreeMap::new(),
            next: 0,
            shadow: Shadow::default(),
            available: 0,
            events: 0,
            leases: Vec::new(),
        }
    }

    fn sweep(&mut self) {
        let mut dma = FlatDma::new(self.mem.clone());
        let _ = self.device.poll(&mut dma, &mut NoInterrupts, 0);
        while let Some((tag, what)) = self.device.class_mut().take_request() {
            let id = CommandId(self.next);
            self.next += 1;
            let before = self.reached();
            let source = SourceId(8);
            let command = Command { id, source, what };
            let refused = self.unit.stats().refused;
            self.unit.command(command, &self.mem, 0, &mut self.between);
            if self.unit.stats().refused == refused {
                // Small as they are, all are carried out within the call, but for their waits.
                self.shadow.apply(what);
            }
            let after = self.reached();
            let changed = self.leases.iter().zip(before.iter().zip(&after));
            // One that was out of reach by then, and is in reach of something again, has lost
            // nothing now.
            let taken = changed
                .filter(|((.., gpa), (before, after))| **before == Some(*gpa) && before != after);
            let waits = taken.map(|((lease, ..), _)| *lease).collect();
            self.asked.insert(id, (tag, waits));
        }
        let _ = RemappingUnit::<Request>::poll(&mut self.unit, &self.mem, 0, &mut self.between);
        for (id, result) in std::mem::take(&mut self.between.answers) {
            let (tag, waits) = self.asked.remove(&id).expect("it is answered once");
            let is_under_way = |lease: &LeaseId| self.leases.iter().any(|own| own.0 == *lease);
            assert!(!waits.iter().any(is_under_way), "an access is under way");
            let status = match result {
                CommandResult::Done => 0,
                CommandResult::Refused(status) => {
                    assert!([2, 4, 5, 6, 8].contains(&status), "{status}");
                    status
                }
            };
            self.device.class_mut().answer(tag, status);
        }
        for refused in std::mem::take(&mut self.between.refused) {
            self.device.class_mut().refused(&refused);
        }
    }

    /// Returns the page to which each lease's page leads now.
    fn reached(&self) -> Vec<Option<u64>> {
        let reach = |&(_, device, page, _): &Lease| self.shadow.reach(device, page, Perm::Write);
        self.leases.iter().map(reach).collect()
    }

    fn put_desc(&self, index: u16, nth: u16, at: u64, len: u32, flags: u16) {
        let desc = RING * (u64::from(index) + 1) + 16 * u64::from(nth);
        self.mem.put_u64(Gpa::new(desc), at);
        self.mem.put_u32(Gpa::new(desc + 8), len);
        self.mem.put_u16(Gpa::new(desc + 12), flags);
        self.mem.put_u16(Gpa::new(desc + 14), nth + 1);
    }

    /// Makes a request available that is cut into two, with this much room for its answer. It is
    /// waited for unless leases may hold it.
    fn ask(&mut self, bytes: &[u8], cut: usize, room: u32) {
        if self.device.in_flight() != 0 {
            // Its descriptors are in use.
            self.end_leases();
        }
        self.mem.put(Gpa::new(DATA), bytes);
        self.mem.put(Gpa::new(TAIL), &[UNWRITTEN; 80]);
        let cut = cut % (bytes.len() + 1);
        let (mut nth, mut at) = (0, DATA);
        for part in [cut, bytes.len() - cut] {
            if part != 0 {
                self.put_desc(0, nth, at, part as u32, 1);
                nth += 1;
                at += part as u64;
            }
        }
        match room {
            0 if nth == 0 => return,
            0 => {
                // The last one ends the chain.
                let desc = RING + 16 * u64::from(nth - 1);
                self.mem.put_u16(Gpa::new(desc + 12), 0);
            }
            _ => self.put_desc(0, nth, TAIL, room, 2),
        }
        self.available = self.available.wrapping_add(1);
        self.mem.put_u16(Gpa::new(RING + 0x1002), self.available);
        for _ in 0..4 {
            self.sweep();
        }
        if self.device.in_flight() == 0 {
            let used = self.mem.get_u16(Gpa::new(RING + 0x2002));
            assert_eq!(used, self.available, "it is not given back");
        }
    }

    fn end_leases(&mut self) {
        for (lease, ..) in std::mem::take(&mut self.leases) {
            self.unit.leases_mut().end(lease);
        }
        for _ in 0..4 {
            self.sweep();
        }
        assert_eq!(self.device.in_flight(), 0, "nothing is waited for");
        assert!(self.asked.is_empty());
    }

    fn access(&mut self, device: u16, iova: u64, perm: Perm) {
        let source = SourceId(device);
        let run = self
            .unit
            .translate(&self.mem, source, Iova::new(iova), perm);
        let gpa = run.ok().map(|run| run.gpa.raw());
        assert_eq!(gpa, self.shadow.reach(device, iova, perm), "{iova:#x}");
    }

    fn lease(&mut self, device: u16, page: u64) {
        let source = SourceId(device);
        let Some(gpa) = self.shadow.reach(device, page, Perm::Write) else {
            return;
        };
        let begun =
            self.unit
                .leases_mut()
                .begin(source, Iova::new(page), Gpa::new(gpa), 4096, Perm::Write);
        if let Ok(lease) = begun {
            self.leases.push((lease, device, page, gpa));
        }
    }
}

/// A request of small numbers.
fn small(kind: u8, input: &mut Input<'_>) -> Vec<u8> {
    let mut request = vec![kind, 0, 0, 0];
    let mut word = |word: u32| request.extend(word.to_le_bytes());
    let domain = u32::from(input.u8() % 4);
    match kind {
        1 | 2 => {
            let endpoint = match input.u8() % 4 {
                0 => 7,
                other => u32::from(DEVICES[usize::from(other % 2)]),
            };
            let flags = u32::from(input.u8().is_multiple_of(8));
            [domain, endpoint, flags, 0].into_iter().for_each(&mut word);
        }
        3 | 4 => {
            let (page, pages) = (u32::from(input.u8() % 8), u32::from(input.u8() % 4));
            let (first, last) = (page << 12, ((page + pages + 1) << 12) - 1);
            [domain, first, 0, last, 0].into_iter().for_each(&mut word);
            if kind == 3 {
                let phys = u32::from(input.u8() % 16) << 12;
                [phys, 0, u32::from(input.u8() % 4)]
                    .into_iter()
                    .for_each(&mut word);
            } else {
                word(0);
            }
        }
        _ => {
            [&[u32::from(input.u8())], &[0; 16][..]]
                .concat()
                .into_iter()
                .for_each(word);
        }
    }
    request
}

/// The body.
///
/// # Panics
/// If device or unit breaks one of its promises.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut world = World::new();
    for _ in 0..ACTIONS {
        if input.is_empty() {
            break;
        }
        let action = input.u8();
        match action % 8 {
            0..=2 => {
                let kind = input.u8() % 5 + 1;
                let request = small(kind, &mut input);
                let room = if kind == 5 { 68 } else { 4 };
                world.ask(&request, usize::from(action >> 3), room);
            }
            3 => {
                let (cut, room) = (usize::from(input.u8()), u32::from(input.u8() % 80));
                let len = usize::from(input.u8() % 76);
                let bytes = input.bytes(len).to_vec();
                world.ask(&bytes, cut, room);
            }
            4 => {
                let device = DEVICES[usize::from(action >> 7)];
                world.lease(device, u64::from(input.u8() % 12) << 12);
            }
            5 => world.end_leases(),
            6 => {
                world.device.write_config(36, &[action >> 7]);
                world.sweep();
            }
            _ => {
                // A buffer for a report, unless the ring is full of them.
                let used = world.mem.get_u16(Gpa::new(2 * RING + 0x2002));
                if world.events.wrapping_sub(used) < ENTRIES {
                    world.events = world.events.wrapping_add(1);
                }
                world.put_desc(1, 0, EVENT, u32::from(input.u8() % 32) + 1, 2);
                world.mem.put_u16(Gpa::new(2 * RING + 0x1002), world.events);
                world.sweep();
            }
        }
        for device in DEVICES {
            for page in 0..12 {
                for (offset, perm) in [(0, Perm::Read), (0xfff, Perm::Write)] {
                    world.access(device, (page << 12) + offset, perm);
                }
            }
        }
        assert!(
            !world.device.needs_reset(),
            "{:?}",
            world.device.violation()
        );
        let stats = world.unit.stats();
        assert!(stats.mappings <= MAX_MAPPINGS as u64 && stats.domains <= 3);
    }
    world.end_leases();
}

/// Valid traffic.
pub fn seeds() -> Vec<Vec<u8>> {
    let small = |cut: u8, kind: u8, rest: &[u8]| {
        let mut bytes = vec![cut << 3, kind - 1];
        bytes.extend(rest);
        bytes
    };
    let attach = small(9, 1, &[1, 1, 1]);
    let map = small(3, 3, &[1, 2, 1, 5, 3]);
    let unmap = small(0, 4, &[1, 2, 1]);
    let detach = small(5, 2, &[1, 1, 1]);
    let probe = small(1, 5, &[0, 0x18]);
    let lease = vec![0x84, 2];
    let all = [
        probe.clone(),
        attach.clone(),
        map.clone(),
        lease.clone(),
        unmap.clone(),
        vec![5],
        map.clone(),
        detach.clone(),
        vec![7, 24],
    ];
    vec![
        all.concat(),
        [&[0x86][..], &lease, &[0x06], &attach, &map, &lease, &detach].concat(),
        [
            &attach[..],
            &[3, 0, 4, 20, 1, 0, 0, 0, 2, 0, 0, 0, 0x20, 0, 0, 0],
        ]
        .concat(),
    ]
}
