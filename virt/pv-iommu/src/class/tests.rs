//! The device and its unit, driven through rings of either layout.

use fake_driver::AnyDriver;
use fake_mem::{ArrayMem, FlatDma, PendingDma};
use guest_mem::{Gpa, Iova, Perm, PhysMem, SourceId};
use machine::{
    Command, CommandId, CommandResult, Invalidation, RemappingUnit, UnitEvent, UnitSink,
};
use platform::interrupt::Message;
use vio::{Interrupt, QueueConfig, QueueDevice, Service};

use super::*;
use crate::unit::{Config, PvIommu};

type Driver = AnyDriver<ArrayMem, QueueConfig>;

const LAYOUTS: [u64; 2] = [!feature::RING_PACKED, !0];
/// Addresses of requests and their tails.
const AT: u64 = 0x4_0000;
const TAIL: u64 = 0x5_0000;
/// Content of buffers before the device has them.
const BEFORE: u8 = 0xee;

#[derive(Default)]
struct Irq {
    queues: [u64; 2],
    config: u64,
}

impl Interrupt for Irq {
    fn queue(&mut self, queue: u16) {
        self.queues[usize::from(queue)] += 1;
    }

    fn config(&mut self) {
        self.config += 1;
    }
}

/// Sink of the unit: records the events that the owner passes on to the class.
#[derive(Default)]
struct Between {
    answers: Vec<(u64, CommandResult)>,
    refused: Vec<RefusedAccess>,
}

impl UnitSink for Between {
    fn interrupt(&mut self, _: Message) {
        panic!("it has no interrupt of its own");
    }

    fn event(&mut self, event: UnitEvent) {
        panic!("{event:?}");
    }

    fn invalidated(&mut self, _: &Invalidation) -> u32 {
        0
    }

    fn command_done(&mut self, id: CommandId, result: CommandResult) {
        self.answers.push((id.0, result));
    }

    fn access_refused(&mut self, access: RefusedAccess) {
        self.refused.push(access);
    }
}

struct World {
    mem: ArrayMem,
    device: Iommu,
    unit: PvIommu,
    requests: Driver,
    events: Driver,
    between: Between,
    irq: Irq,
    tags: Vec<Tag>,
}

impl World {
    fn new(features: u64) -> Self {
        let mem = ArrayMem::new(1 << 20);
        let endpoints = vec![0x10..=0xff];
        let mut device = Device::of(IommuClass::new(endpoints.clone()));
        let features = device.features() & features;
        let requests = Driver::new(mem.clone(), Gpa::new(0x1_0000), 0, 16, features);
        let events = Driver::new(mem.clone(), Gpa::new(0x2_0000), 1, 16, features);
        let queues = [requests.config(), events.config()];
        device
            .activate(features, &queues, mem.keep_alive())
            .expect("a start");
        let unit = PvIommu::new(Config {
            endpoints,
            max_leases: 64,
            ..Config::default()
        });
        Self {
            mem,
            device,
            unit,
            requests,
            events,
            between: Between::default(),
            irq: Irq::default(),
            tags: Vec::new(),
        }
    }

    /// A sweep of the owner.
    fn sweep(&mut self, dma: &mut impl Dma) -> Activity {
        let activity = self.device.poll(dma, &mut self.irq, 0);
        while let Some((tag, what)) = self.device.class_mut().take_request() {
            let id = CommandId(self.tags.len() as u64);
            self.tags.push(tag);
            let source = SourceId::new(0, 1, 0);
            let command = Command { id, source, what };
            self.unit.command(command, &self.mem, 0, &mut self.between);
        }
        let _ = RemappingUnit::<Request>::poll(&mut self.unit, &self.mem, 0, &mut self.between);
        for (id, result) in self.between.answers.drain(..) {
            let status = match result {
                CommandResult::Done => 0,
                CommandResult::Refused(status) => status,
            };
            self.device
                .class_mut()
                .answer(self.tags[id as usize], status);
        }
        for refused in self.between.refused.drain(..) {
            self.device.class_mut().refused(&refused);
        }
        activity
    }

    fn settle(&mut self) {
        let mut dma = FlatDma::new(self.mem.clone());
        for _ in 0..100 {
            let activity = self.sweep(&mut dma);
            if activity == Activity::Idle && !self.device.has_work(&mut dma) {
                return;
            }
        }
        panic!("it is busy for ever");
    }

    /// Asks by these buffers; the used length, and the bytes of the writable part.
    fn ask(
        &mut self,
        request: &[u8],
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
    ) -> (u32, Vec<u8>) {
        self.requests.put(AT, request);
        self.requests.put(TAIL, &[BEFORE; 0x100]);
        self.requests.add(readable, writable);
        self.settle();
        let (_, len) = self.requests.used().expect("it is given back");
        let bytes = writable
            .iter()
            .flat_map(|&(at, len)| read(&self.mem, at, len as usize));
        (len, bytes.collect())
    }

    /// The status of a request in one piece, with a tail of its own.
    fn status(&mut self, request: &[u8]) -> u8 {
        let (len, tail) = self.ask(request, &[(AT, request.len() as u32)], &[(TAIL, 4)]);
        assert_eq!((len, &tail[1..]), (4, &[0, 0, 0][..]));
        tail[0]
    }

    fn reach(&mut self, iova: u64, perm: Perm) -> Option<u64> {
        use guest_mem::Iommu;
        let run = self.unit.translate(&self.mem, DISK, Iova::new(iova), perm);
        run.ok().map(|run| run.gpa.raw())
    }
}

const DISK: SourceId = SourceId::new(0, 3, 0);

fn read(mem: &ArrayMem, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mem.read(Gpa::new(at), &mut bytes).expect("RAM");
    bytes
}

fn words(kind: u8, words: &[u32]) -> Vec<u8> {
    let words = words.iter().flat_map(|word| word.to_le_bytes());
    [kind, 0, 0, 0].into_iter().chain(words).collect()
}

fn attach(domain: u32) -> Vec<u8> {
    words(1, &[domain, DISK.0.into(), 0, 0])
}

fn detach(domain: u32) -> Vec<u8> {
    words(2, &[domain, DISK.0.into(), 0, 0])
}

fn map(domain: u32, page: u32, phys: u32) -> Vec<u8> {
    let (first, last) = (page << 12, (page << 12) + 0xfff);
    words(3, &[domain, first, 0, last, 0, phys, 0, 3])
}

fn unmap(domain: u32, page: u32) -> Vec<u8> {
    words(4, &[domain, page << 12, 0, (page << 12) + 0xfff, 0, 0])
}

fn probe(endpoint: u32) -> Vec<u8> {
    words(5, &[&[endpoint], &[0; 16][..]].concat())
}

#[test]
fn flags_of_features_that_were_not_accepted_are_unknown() {
    const INVAL: u8 = Status::Inval as u8;
    let bypass = words(1, &[7, DISK.0.into(), wire::ATTACH_BYPASS, 0]);
    let mmio = words(3, &[7, 0x1000, 0, 0x1fff, 0, 0x9000, 0, 7]);
    for layout in LAYOUTS {
        let mut world = World::new(layout);
        assert_eq!([&attach(7), &mmio].map(|asked| world.status(asked)), [0, 0]);
        assert_eq!(
            [&detach(7), &bypass].map(|asked| world.status(asked)),
            [0, 0]
        );

        let mut world = World::new(layout & !wire::feature::BYPASS_CONFIG);
        assert_eq!(world.status(&bypass), INVAL);
        assert_eq!(world.status(&attach(7)), 0);
        assert_eq!(world.status(&mmio), 0);

        let mut world = World::new(layout & !wire::feature::MMIO);
        assert_eq!(world.status(&attach(7)), 0);
        assert_eq!(world.status(&mmio), INVAL);
        assert_eq!(world.reach(0x1000, Perm::Read), None);
        // The slots are as they were.
        assert_eq!(world.status(&map(7, 1, 0x9000)), 0);
        assert_eq!(world.reach(0x1000, Perm::Read), Some(0x9000));
    }
}

#[test]
fn a_driver_attaches_maps_unmaps_and_detaches() {
    for features in LAYOUTS {
        let mut world = World::new(features);
        assert_eq!(world.status(&attach(7)), 0);
        assert_eq!(world.status(&map(7, 1, 0x9000)), 0);
        assert_eq!(world.reach(0x1234, Perm::Write), Some(0x9234));
        assert_eq!(world.status(&map(7, 1, 0x9000)), Status::Inval as u8);
        assert_eq!(world.status(&unmap(7, 1)), 0);
        assert_eq!(world.reach(0x1234, Perm::Write), None);
        assert_eq!(world.status(&detach(7)), 0);
        assert_eq!(world.status(&unmap(7, 1)), Status::NoEnt as u8);
        assert!(!world.device.needs_reset());
        assert_eq!(world.device.in_flight(), 0);
    }
}

#[test]
fn many_in_one_batch_are_done_in_their_order() {
    for features in LAYOUTS {
        let mut world = World::new(features);
        let all = [
            attach(7),
            map(7, 1, 0x9000),
            map(7, 2, 0xa000),
            unmap(7, 1),
            map(7, 1, 0xb000),
        ];
        for (at, request) in (0_u64..).zip(&all) {
            let (from, to) = (AT + 0x100 * at, TAIL + 0x100 * at);
            world.requests.put(from, request);
            world.requests.put(to, &[BEFORE; 4]);
            world
                .requests
                .stage(&[(from, request.len() as u32)], &[(to, 4)]);
        }
        world.requests.publish();
        world.settle();
        let used = std::iter::from_fn(|| world.requests.used()).count();
        assert_eq!(used, all.len());
        for at in 0..all.len() as u64 {
            assert_eq!(read(&world.mem, TAIL + 0x100 * at, 4), [0; 4]);
        }
        assert_eq!(world.reach(0x1000, Perm::Read), Some(0xb000));
        assert!(world.irq.queues[0] <= 2, "{}", world.irq.queues[0]);
    }
}

#[test]
fn requests_that_do_not_parse_are_returned_unwritten() {
    for features in LAYOUTS {
        let mut world = World::new(features);
        for kind in [0, 6, 0x7f, 0xff] {
            let request = words(kind, &[7; 17]);
            let (len, tail) = world.ask(&request, &[(AT, 72)], &[(TAIL, 4)]);
            assert_eq!((len, tail), (0, vec![BEFORE; 4]), "type {kind}");
        }
        for request in [attach(7), detach(7), map(7, 1, 0), unmap(7, 1), probe(0x18)] {
            for len in 1..request.len() as u32 {
                let (used, tail) = world.ask(&request, &[(AT, len)], &[(TAIL, 4)]);
                assert_eq!(
                    (used, tail),
                    (0, vec![BEFORE; 4]),
                    "{} of {len}",
                    request[0]
                );
            }
            for room in 1..TAIL_LEN {
                let whole = [(AT, request.len() as u32)];
                let (used, tail) = world.ask(&request, &whole, &[(TAIL, room)]);
                assert_eq!((used, tail), (0, vec![BEFORE; room as usize]));
            }
            let (used, _) = world.ask(&request, &[(AT, request.len() as u32)], &[]);
            assert_eq!(used, 0, "no tail at all");
        }
        let (used, tail) = world.ask(&[], &[], &[(TAIL, 4)]);
        assert_eq!((used, tail), (0, vec![BEFORE; 4]), "nothing to read");
        // Outside of memory.
        let (used, tail) = world.ask(&[], &[(1 << 40, 20)], &[(TAIL, 4)]);
        assert_eq!((used, tail), (0, vec![BEFORE; 4]));
        assert_eq!(world.unit.stats().attaches, 0);
        assert!(!world.device.needs_reset());
        assert_eq!(world.status(&attach(7)), 0, "it goes on");
    }
}

#[test]
fn requests_and_tails_may_be_cut_anywhere() {
    for features in LAYOUTS {
        let request = map(7, 1, 0x9000);
        for cut in 1..request.len() as u64 {
            let mut world = World::new(features);
            assert_eq!(world.status(&attach(7)), 0);
            let rest = request.len() as u64 - cut;
            let readable = [(AT, cut as u32), (AT + cut, rest as u32)];
            let tail = [(TAIL, 1), (TAIL + 1, 1), (TAIL + 2, 1), (TAIL + 3, 1)];
            let (used, bytes) = world.ask(&request, &readable, &tail);
            assert_eq!((used, bytes), (4, vec![0; 4]), "cut at {cut}");
            assert_eq!(world.reach(0x1000, Perm::Read), Some(0x9000));
        }
        // Longer than it need be, at both ends.
        let mut world = World::new(features);
        let (used, bytes) = world.ask(&attach(7), &[(AT, 0x1000)], &[(TAIL, 8)]);
        assert_eq!((used, &bytes[..4]), (4, &[0; 4][..]));
        assert_eq!(bytes[4..], [BEFORE; 4]);
    }
}

#[test]
fn a_tail_outside_of_memory_costs_the_answer_and_nothing_else() {
    for features in LAYOUTS {
        let mut world = World::new(features);
        world.requests.put(AT, &attach(7));
        world.requests.add(&[(AT, 20)], &[(1 << 40, 4)]);
        world.settle();
        assert_eq!(world.requests.used().map(|used| used.1), Some(0));
        assert_eq!(world.unit.stats().attaches, 1, "it was carried out");
        assert_eq!(world.status(&detach(7)), 0);
    }
}

#[test]
fn properties_are_told_of_endpoints_that_exist() {
    for features in LAYOUTS {
        let mut world = World::new(features);
        let whole = PROBE_SIZE + TAIL_LEN;
        let (used, bytes) = world.ask(&probe(0x18), &[(AT, 72)], &[(TAIL, whole)]);
        assert_eq!(used, whole);
        assert_eq!(bytes[..64], wire::properties());
        assert_eq!(bytes[64..], [0; 4]);
        for nobody in [0x8, 0x100, 0x1_0018] {
            let (used, bytes) = world.ask(&probe(nobody), &[(AT, 72)], &[(TAIL, whole)]);
            assert_eq!(used, whole);
            assert_eq!(bytes[64..], [Status::NoEnt as u8, 0, 0, 0]);
        }
        for room in [4, 5, PROBE_SIZE, whole - 1] {
            let (_, bytes) = world.ask(&probe(0x18), &[(AT, 72)], &[(TAIL, room)]);
            let (list, tail) = bytes.split_at(room as usize - 4);
            assert_eq!(tail, [Status::Inval as u8, 0, 0, 0], "{room} bytes");
            assert!(list.iter().all(|&byte| byte == BEFORE), "no property");
        }
    }
}

#[test]
fn the_configuration_says_what_it_is_and_takes_bypass_alone() {
    let mut world = World::new(!0);
    let space = |world: &World| {
        let mut space = [0xff; 48];
        world.device.read_config(0, &mut space);
        space
    };
    let before = space(&world);
    assert_eq!(before[..40], wire::config(false));
    assert_eq!(before[40..], [0; 8]);
    for offset in (0..36).chain(37..64) {
        world.device.write_config(offset, &[1]);
    }
    world.settle();
    assert_eq!(space(&world), before);
    assert_eq!(world.reach(0x5000, Perm::Read), None);
    for (written, shown) in [(1, 1), (0, 0), (3, 1), (2, 0)] {
        world.device.write_config(36, &[written, 9, 9, 9]);
        world.settle();
        assert_eq!(space(&world)[36..40], [shown, 0, 0, 0]);
        let expected = (shown == 1).then_some(0x5000);
        assert_eq!(world.reach(0x5000, Perm::Read), expected);
    }
    // As one word that begins before it.
    world.device.write_config(32, &[9, 9, 9, 9, 1]);
    world.settle();
    assert_eq!(space(&world)[32..37], [64, 0, 0, 0, 1]);
    // It outlasts a reset of the device.
    world.device.set_service(Service::Stopped);
    world.device.reset();
    assert_eq!(space(&world)[36], 1);
}

#[test]
fn faults_are_told_by_the_event_queue_and_those_without_a_buffer_wait() {
    for features in LAYOUTS {
        let mut world = World::new(features);
        assert_eq!(world.reach(0x1234, Perm::Write), None);
        world.settle();
        assert_eq!(world.irq.queues[1], 0, "there is no buffer");
        // One that is too short, and one that is not.
        world.events.put(TAIL, &[BEFORE; 0x100]);
        world.events.add(&[], &[(TAIL, 23)]);
        world
            .events
            .add(&[], &[(TAIL + 0x40, 16), (TAIL + 0x80, 16)]);
        world.settle();
        let lens: Vec<_> = std::iter::from_fn(|| world.events.used().map(|used| used.1)).collect();
        assert_eq!(lens, [0, 24]);
        assert_eq!(read(&world.mem, TAIL, 23), [BEFORE; 23]);
        let report = [
            read(&world.mem, TAIL + 0x40, 16),
            read(&world.mem, TAIL + 0x80, 8),
        ]
        .concat();
        let expected = wire::fault(1, DISK.0.into(), 0x1234, true);
        assert_eq!(report, expected);
        // Buffers alone are no work, nor taken.
        world.events.add(&[], &[(TAIL, 24)]);
        world.settle();
        assert_eq!(world.events.used(), None);
        assert_eq!(world.irq.queues[1], 1, "the driver asks for the first");
        assert_eq!(world.reach(0x5678, Perm::Read), None);
        world.settle();
        assert_eq!(world.events.used().map(|used| used.1), Some(24));
    }
}

#[test]
fn faults_that_find_no_place_are_counted() {
    let mut world = World::new(!0);
    for _ in 0..10 {
        for _ in 0..40 {
            assert_eq!(world.reach(0x1000, Perm::Read), None);
        }
        world.settle();
    }
    let lost = world.device.class().lost_refusals();
    assert_eq!(lost, 400 - MAX_REFUSALS as u64);
    for _ in 0..MAX_REFUSALS {
        world.events.add(&[], &[(TAIL, 24)]);
        world.settle();
        assert_eq!(world.events.used().map(|used| used.1), Some(24));
    }
    world.events.add(&[], &[(TAIL, 24)]);
    world.settle();
    assert_eq!(world.events.used(), None);
}

#[test]
fn a_reset_detaches_everything_and_forgets_what_nobody_was_told() {
    let mut world = World::new(!0);
    assert_eq!(world.status(&attach(7)), 0);
    assert_eq!(world.status(&map(7, 1, 0x9000)), 0);
    assert_eq!(world.reach(0x7000, Perm::Read), None);
    world.settle();
    world.device.set_service(Service::Stopped);
    world.device.reset();
    let mut dma = FlatDma::new(world.mem.clone());
    let _ = world.sweep(&mut dma);
    assert_eq!(world.reach(0x1000, Perm::Read), None);
    assert_eq!(world.unit.stats().domains, 0);
}

/// A wait at any access of a request's way changes nothing of its outcome.
#[test]
fn a_request_survives_a_wait_at_each_access() {
    for features in LAYOUTS {
        let mut nth = 0;
        loop {
            let mut world = World::new(features);
            world.requests.put(AT, &attach(7));
            world.requests.put(TAIL, &[BEFORE; 4]);
            world.requests.add(&[(AT, 20)], &[(TAIL, 4)]);
            let mut dma = PendingDma::kth(FlatDma::new(world.mem.clone()), nth);
            let mut has_waited = false;
            for _ in 0..20 {
                let _ = world.sweep(&mut dma);
                for ticket in dma.take_tickets() {
                    has_waited = true;
                    world.device.ticket_done(ticket);
                }
            }
            assert_eq!(world.requests.used().map(|used| used.1), Some(4), "{nth}");
            assert_eq!(read(&world.mem, TAIL, 4), [0; 4]);
            assert_eq!(world.unit.stats().attaches, 1, "access {nth}");
            if !has_waited {
                assert!(nth >= 5, "only {nth} accesses");
                break;
            }
            nth += 1;
        }
    }
}
