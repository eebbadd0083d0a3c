//! A device behind an IOMMU: the translations that its back end may have, and the order in which it
//! receives them.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use super::back_end::ReceivedIotlbMessage;
use super::*;
use guest_mem::{Access, Attachment, Budget, DmaFault, Found, Next, Perm, Stop, Ticket};
use vhost_user::backend::RingBase;
use vhost_user::channel::{Receiver, Sender};
use vhost_user::wire::{
    BackendRequest, IotlbAccess, IotlbMessage, IotlbRange, Message, ProtocolFeatures,
};
use vio::{RemoteMemory, Revoked};

use crate::exchange::EVERYTHING;

const ACCESS_PLATFORM: u64 = 1 << 33;
/// User address of guest-physical address 0.
const USER: u64 = 1 << 44;
const DOMAIN: u32 = 5;
/// IOVA of the rings of queue 0, in pages; they go to the same page of memory.
const RINGS: u64 = 0xff00;

/// The guest's tables, page by page: where it goes, and whether the device may read and write.
pub(super) struct Tables {
    pub ram: GuestRam,
    pub attachment: Attachment,
    pub pages: BTreeMap<u64, (u64, bool, bool)>,
    /// Refusals that the IOMMU has recorded.
    pub recorded: u64,
    /// Tables are absent.
    pub is_absent: bool,
}

impl RemoteMemory for Tables {
    fn attachment(&self) -> Access<Attachment> {
        match self.is_absent {
            true => Err(Stop::Pending(Ticket(1))),
            false => Ok(self.attachment),
        }
    }

    fn next_mapping(&self, from: Iova, last: Iova, _: &mut Budget) -> Access<Next> {
        let range = from.raw() >> 12..=last.raw() >> 12;
        let Some((page, &(gpa, can_read, can_write))) = self.pages.range(range).next() else {
            return Ok(Next::None);
        };
        Ok(Next::Found(Found {
            iova: Iova::new(page << 12),
            gpa: Gpa::new(gpa << 12),
            len: 4096,
            can_read,
            can_write,
        }))
    }

    fn read_u16(&mut self, at: Iova) -> Access<u16> {
        let Some((gpa, true, _)) = self.pages.get(&(at.raw() >> 12)) else {
            return Err(DmaFault::Blocked { iova: at }.into());
        };
        let mut bytes = [0; 2];
        self.ram
            .read(Gpa::new((gpa << 12) + at.raw() % 4096), &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn record_refusal(&mut self, _: Iova, _: Perm) {
        self.recorded += 1;
    }
}

/// A guest behind an IOMMU, whose owner is the test, and its back end.
struct World {
    guest: Guest,
    tables: Tables,
    now_ns: u64,
    released: Vec<u64>,
    back_end: BackEnd,
}

fn plan() -> Plan {
    let plan = super::plan();
    Plan {
        features: plan.features | ACCESS_PLATFORM,
        protocol: plan.protocol | ProtocolFeatures::BACKEND_REQ,
        ..plan
    }
}

fn pages(first: u64, count: u64) -> IotlbRange {
    IotlbRange {
        first: first << 12,
        last: ((first + count) << 12) - 1,
    }
}

fn update(first: u64, count: u64, gpa_page: u64, access: IotlbAccess) -> ReceivedIotlbMessage {
    ReceivedIotlbMessage::Update(pages(first, count), USER + (gpa_page << 12), access)
}

fn revoked(first: u64, count: u64) -> Revoked {
    let IotlbRange { first, last } = pages(first, count);
    Revoked::Pages {
        domain: DOMAIN,
        first: Iova::new(first),
        last: Iova::new(last),
    }
}

fn connect(back_end: &BackEnd) -> Result<Guest, ImportError> {
    Guest::try_connect(ImportConfig {
        has_iommu: true,
        reply_limit: Duration::from_secs(20),
        ..config(back_end.path(), 1)
    })
}

impl World {
    /// Returns a world whose rings are served; the messages that this took are cleared.
    fn new(plan: Plan) -> Self {
        let world = Self::begun(plan);
        world.back_end.seen().told.clear();
        world
    }

    /// The rings are served.
    fn begun(plan: Plan) -> Self {
        let back_end = BackEnd::new(plan);
        let guest = connect(&back_end).unwrap();
        let tables = Tables {
            ram: guest.ram.clone(),
            attachment: Attachment::Domain(DOMAIN),
            pages: BTreeMap::from([(RINGS, (1, true, true))]),
            recorded: 0,
            is_absent: false,
        };
        let mut world = Self {
            guest,
            tables,
            now_ns: 0,
            released: Vec::new(),
            back_end,
        };
        world.start();
        world.until("served", |world| world.back_end.seen().is_serving(0));
        world
    }

    fn ring() -> QueueConfig {
        QueueConfig {
            desc: Iova::new(RINGS << 12),
            avail: Iova::new((RINGS << 12) + 0x400),
            used: Iova::new((RINGS << 12) + 0x800),
            ..ring(0)
        }
    }

    fn start(&mut self) {
        let features = self.guest.import.features();
        self.guest.import.start(features, &[Self::ring()]).unwrap();
    }

    /// As the owner does it.
    fn poll(&mut self) {
        let import = &mut self.guest.import;
        let has_events = import.has_events();
        if has_events {
            import.take_events();
        }
        if has_events || import.is_waiting() {
            import.serve(&mut self.tables, self.now_ns);
        }
        self.released
            .extend(std::iter::from_fn(|| import.take_released()));
    }

    #[track_caller]
    fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        eventually(what, || {
            self.poll();
            is_so(self)
        });
    }

    /// It polls for a while, in which nothing else may happen than what the caller looks for.
    fn rest(&mut self) {
        for _ in 0..20 {
            self.poll();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn channel(&self) -> std::os::unix::net::UnixStream {
        let channel = self.back_end.seen().channel.clone().unwrap();
        let channel = std::os::unix::net::UnixStream::from(channel.try_clone().unwrap());
        channel.set_nonblocking(true).unwrap();
        channel
    }

    /// Sends a miss of the back end. Returns whether the answer reports an entry.
    fn miss(&mut self, iova: u64, access: IotlbAccess) -> bool {
        let channel = self.channel();
        ask(&channel, iova, access);
        self.answer(&channel)
    }

    fn answer(&mut self, channel: &std::os::unix::net::UnixStream) -> bool {
        let mut receiver = Receiver::default();
        let mut answer = None;
        self.until("an answer", |_| {
            answer = receiver.receive(channel).unwrap();
            answer.is_some()
        });
        let Message { head, payload, .. } = answer.unwrap();
        assert!(head.is_reply());
        payload == [0; 8]
    }

    fn told(&self) -> Vec<ReceivedIotlbMessage> {
        self.back_end.seen().told.clone()
    }

    fn invalidate(&mut self, what: Revoked, hold: u64) -> bool {
        self.guest.import.invalidated(what, hold)
    }
}

fn miss_of(iova: u64, access: IotlbAccess) -> Message {
    BackendRequest::Iotlb(IotlbMessage::Miss { iova, access }).encode(true)
}

fn ask(channel: &std::os::unix::net::UnixStream, iova: u64, access: IotlbAccess) {
    let mut sender = Sender::default();
    sender.push(miss_of(iova, access)).unwrap();
    sender.flush(channel).unwrap();
}

#[test]
fn a_back_end_that_knows_of_no_iommu_is_refused_with_what_it_lacks() {
    let without = |feature| Plan {
        protocol: plan().protocol.without(feature),
        ..plan()
    };
    let no_platform = Plan {
        features: super::plan().features,
        ..plan()
    };
    for (plan, lacks) in [
        (no_platform, "ACCESS_PLATFORM"),
        (without(ProtocolFeatures::BACKEND_REQ), "BACKEND_REQ"),
        (without(ProtocolFeatures::REPLY_ACK), "REPLY_ACK"),
    ] {
        let error = connect(&BackEnd::new(plan)).map(drop).unwrap_err();
        let text = vhost_user::chain(&error);
        assert!(text.contains(lacks), "{text}");
    }
}

#[test]
fn rings_are_told_where_the_driver_has_put_them_behind_entries_for_their_pages() {
    let world = World::begun(plan());
    let rings = update(RINGS, 1, 1, IotlbAccess::ReadWrite);
    assert_eq!(world.told(), [rings]);
    let seen = world.back_end.seen();
    let ring = &seen.started[0];
    let expected = World::ring();
    assert_eq!(
        (ring.desc, ring.avail, ring.used),
        (
            expected.desc.raw(),
            expected.avail.raw(),
            expected.used.raw()
        )
    );
    // Whatever the driver has accepted.
    let accepted = seen.features.last().copied().unwrap();
    assert_eq!(accepted & ACCESS_PLATFORM, ACCESS_PLATFORM);
}

#[test]
fn a_driver_that_does_not_accept_access_platform_is_translated_all_the_same() {
    let mut world = World::new(plan());
    world.guest.stop();
    world.guest.import.reset();
    let features = world.guest.import.features() & !ACCESS_PLATFORM;
    world
        .guest
        .import
        .start(features, &[World::ring()])
        .unwrap();
    world.until("served again", |world| {
        world.back_end.seen().started.len() == 2
    });
    let accepted = world.back_end.seen().features.last().copied().unwrap();
    assert_eq!(accepted & ACCESS_PLATFORM, ACCESS_PLATFORM);
}

#[test]
fn a_miss_is_answered_with_exactly_what_the_tables_allow_as_far_as_it_goes_on() {
    use IotlbAccess::{Read, ReadWrite, Write};
    let mut world = World::new(plan());
    world.tables.pages.extend([
        (0x10, (0x20, true, false)),
        (0x11, (0x21, true, false)),
        // Another access; another place; another region.
        (0x12, (0x22, true, true)),
        (0x13, (0x30, true, true)),
        (0x14, (HIGH >> 12, false, true)),
        (0x15, ((HIGH >> 12) + 1, false, true)),
        // Past the end of memory: no entry, and none for what lies beyond.
        (0x16, ((RAM >> 12) - 1, true, true)),
        (0x17, (RAM >> 12, true, true)),
    ]);
    assert!(world.miss(0x10_123, Read));
    assert!(world.miss(0x12_000, ReadWrite));
    assert!(world.miss(0x13_fff, Write));
    assert!(world.miss(0x14_001, Write));
    assert!(world.miss(0x16_000, Read));
    let expected = [
        update(0x10, 2, 0x20, Read),
        update(0x12, 1, 0x22, ReadWrite),
        update(0x13, 1, 0x30, ReadWrite),
        update(0x14, 2, HIGH >> 12, Write),
        update(0x16, 1, (RAM >> 12) - 1, ReadWrite),
    ];
    assert_eq!(world.told(), expected, "entries are what the tables allow");
    // No mapping, not so, outside of memory, outside of all spaces, for nothing: an answer, and no
    // entry.
    for (iova, access) in [
        (0x99_000, Read),
        (0x10_000, Write),
        (0x10_000, ReadWrite),
        (0x14_000, Read),
        (0x17_000, Read),
        (1 << 63, Read),
        (u64::MAX, Write),
        (0x10_000, IotlbAccess::None),
    ] {
        assert!(!world.miss(iova, access), "{iova:#x} {access:?}");
    }
    assert_eq!(world.told(), expected);
    assert_eq!(world.tables.recorded, 8);
}

#[test]
fn where_nothing_is_translated_an_entry_is_a_region() {
    for attachment in [Attachment::Off, Attachment::PassThrough] {
        let mut world = World::new(plan());
        world.tables.attachment = attachment;
        assert!(world.miss(0x5_432, IotlbAccess::Write));
        assert!(world.miss(HIGH + 0x5_432, IotlbAccess::Read));
        assert!(!world.miss(RAM, IotlbAccess::Read));
        let low = update(0, RAM >> 12, 0, IotlbAccess::ReadWrite);
        let high = update(HIGH >> 12, RAM >> 12, HIGH >> 12, IotlbAccess::ReadWrite);
        assert_eq!(world.told(), [low, high]);
        world.tables.attachment = Attachment::Absent;
        assert!(!world.miss(0x5_432, IotlbAccess::Read));
    }
}

/// An entry that was read before an invalidation is sent before it.
#[test]
fn entries_and_invalidations_leave_in_the_order_in_which_the_owner_made_them() {
    let mut world = World::new(plan());
    let channel = world.channel();
    for round in 0..50 {
        world.back_end.seen().told.clear();
        let (old, new) = (0x20 + round, 0x80 + round);
        world.tables.pages.insert(0x10, (old, true, true));
        ask(&channel, 0x10_000, IotlbAccess::Read);
        eventually("asked", || world.guest.import.has_events());
        // In one go, as an owner's poll does it.
        world.poll();
        world.tables.pages.insert(0x10, (new, true, true));
        world.invalidate(revoked(0x10, 1), round);
        assert!(world.answer(&channel));
        assert!(world.miss(0x10_000, IotlbAccess::Read));
        world.until("forgotten", |world| world.told().len() == 3);
        let expected = [
            update(0x10, 1, old, IotlbAccess::ReadWrite),
            ReceivedIotlbMessage::Invalidate(pages(0x10, 1)),
            update(0x10, 1, new, IotlbAccess::ReadWrite),
        ];
        assert_eq!(world.told(), expected, "round {round}");
    }
}

#[test]
fn an_invalidation_is_held_until_the_back_end_has_answered_it() {
    let mut world = World::new(Plan {
        forgets_slowly: true,
        ..plan()
    });
    assert!(world.invalidate(revoked(0x10, 4), 70));
    world.until("told", |world| !world.told().is_empty());
    assert!(world.invalidate(revoked(0x20, 1), 71));
    // One that finds the last still here joins it, and needs no hold of its own.
    let holds = match world.invalidate(revoked(0x30, 1), 72) {
        true => vec![70, 71, 72],
        false => vec![70, 71],
    };
    world.rest();
    assert_eq!(world.released, [], "nothing has been answered");
    for answered in 1..=3 {
        world.back_end.seen().forgotten = 1;
        let released = match answered {
            3 => holds.len(),
            2 => holds.len() - 1,
            _ => 1,
        };
        world.until("forgotten", |world| world.released.len() >= released);
        world.until("answered", |world| world.back_end.seen().forgotten == 0);
        world.rest();
        assert_eq!(
            world.released,
            holds[..released],
            "{answered} of three are forgotten"
        );
    }
    let expected = [
        ReceivedIotlbMessage::Invalidate(pages(0x10, 4)),
        ReceivedIotlbMessage::Invalidate(pages(0x20, 1)),
        ReceivedIotlbMessage::Invalidate(pages(0x30, 1)),
    ];
    assert_eq!(world.told(), expected);
    assert!(!world.guest.import.needs_reset());
}

#[test]
fn misses_are_answered_while_an_invalidation_waits_if_they_are_refused() {
    let mut world = World::new(Plan {
        forgets_slowly: true,
        ..plan()
    });
    assert!(world.invalidate(revoked(0x10, 4), 1));
    world.until("told", |world| !world.told().is_empty());
    assert!(!world.miss(0x99_000, IotlbAccess::Read));
    world.back_end.seen().forgotten = 1;
    world.until("forgotten", |world| world.released == [1]);
}

#[test]
fn invalidations_of_other_devices_are_not_forwarded() {
    let mut world = World::new(plan());
    let others = Revoked::Pages {
        domain: DOMAIN + 1,
        first: Iova::new(0),
        last: Iova::new(u64::MAX),
    };
    assert!(!world.invalidate(others, 1));
    assert!(!world.invalidate(Revoked::Domain(DOMAIN + 1), 2));
    world.rest();
    assert_eq!(world.told(), []);
    // Its own, whole; then it has nothing that could be revoked.
    assert!(world.invalidate(Revoked::Domain(DOMAIN), 3));
    assert!(!world.invalidate(Revoked::Everything, 4));
    assert!(!world.invalidate(revoked(0, 1), 5));
    world.until("forgotten", |world| world.released == [3]);
    assert_eq!(world.told(), [ReceivedIotlbMessage::Invalidate(EVERYTHING)]);
    // Untranslated memory has a domain that is not known.
    world.tables.attachment = Attachment::PassThrough;
    assert!(world.miss(0, IotlbAccess::Read));
    assert!(!world.invalidate(others, 6));
    assert!(world.invalidate(Revoked::Domain(99), 7));
}

#[test]
fn a_back_end_that_does_not_forget_in_time_is_cut_off_and_needs_a_reset() {
    let mut world = World::new(Plan {
        forgets_slowly: true,
        ..plan()
    });
    assert!(world.invalidate(revoked(0x10, 1), 1));
    world.until("told", |world| !world.told().is_empty());
    assert!(world.invalidate(revoked(0x20, 1), 2));
    world.guest.import.hold_overdue(1);
    // At once, and all of them.
    world.poll();
    world.released.sort_unstable();
    assert_eq!(world.released, [1, 2]);
    assert!(world.guest.import.needs_reset());
    assert!(!world.invalidate(revoked(0x20, 1), 3), "nobody is told");
    world.until("another connection", |world| {
        world.back_end.seen().connections == 2
    });
    world.poll();
    world.released.sort_unstable();
    assert_eq!(world.released, [1, 2], "not again with the connection");
    assert_eq!(world.back_end.seen().started.len(), 1, "it is not served");
    world.guest.stop();
    world.guest.import.reset();
    assert!(!world.guest.import.needs_reset());
    world.start();
    world.until("served again", |world| {
        world.back_end.seen().started.len() == 2
    });
}

#[test]
fn a_back_end_that_refuses_to_forget_needs_a_reset() {
    let mut world = World::new(Plan {
        refuses_to_forget: true,
        ..plan()
    });
    assert!(world.invalidate(revoked(0x10, 1), 1));
    world.until("released", |world| world.released == [1]);
    world.until("broken", |world| world.guest.import.needs_reset());
}

#[test]
fn a_back_end_that_dies_holds_nothing_and_goes_on_where_its_rings_stand() {
    let mut world = World::new(Plan {
        forgets_slowly: true,
        ..plan()
    });
    assert!(world.invalidate(revoked(0x10, 1), 1));
    world.until("told", |world| !world.told().is_empty());
    assert!(world.invalidate(revoked(0x20, 1), 2));
    // The rings' page goes to the page where queue 0 is without an IOMMU.
    world.guest.set_indices(0, 9, 5);
    let World {
        guest,
        tables,
        now_ns,
        released,
        back_end,
    } = world;
    let mut world = World {
        back_end: back_end.restart(plan()),
        guest,
        tables,
        now_ns,
        released,
    };
    world.until("served again", |world| world.back_end.seen().is_serving(0));
    world.released.sort_unstable();
    assert_eq!(world.released, [1, 2]);
    assert_eq!(world.back_end.seen().started[0].base, RingBase::Split(5));
    let rings = update(RINGS, 1, 1, IotlbAccess::ReadWrite);
    assert_eq!(world.told(), [rings], "its IOTLB began empty");
    assert!(!world.guest.import.needs_reset());
}

#[test]
fn rings_that_are_not_mapped_any_more_when_it_comes_back_need_a_reset() {
    let mut world = World::new(plan());
    world.tables.pages.clear();
    world.back_end = {
        let World { back_end, .. } = &mut world;
        let placeholder = BackEnd::new(plan());
        std::mem::replace(back_end, placeholder).restart(plan())
    };
    world.until("broken", |world| world.guest.import.needs_reset());
}

#[test]
fn a_reset_has_everything_forgotten_before_other_rings_are_told() {
    let mut world = World::new(plan());
    world.guest.stop();
    world.guest.import.reset();
    // Nothing is held for a device that is reset.
    assert!(!world.invalidate(revoked(RINGS, 1), 1));
    world.tables.pages.insert(RINGS, (2, true, true));
    world.start();
    world.until("served again", |world| {
        world.back_end.seen().started.len() == 2
    });
    let expected = [
        ReceivedIotlbMessage::Invalidate(EVERYTHING),
        update(RINGS, 1, 2, IotlbAccess::ReadWrite),
    ];
    assert_eq!(world.told(), expected);
}

#[test]
fn holds_end_with_a_reset() {
    let mut world = World::new(Plan {
        forgets_slowly: true,
        ..plan()
    });
    world.guest.stop();
    assert!(world.invalidate(revoked(0x10, 1), 1));
    world.guest.import.reset();
    world.poll();
    assert_eq!(world.released, [1]);
    world.back_end.seen().forgotten = 2;
}

#[test]
fn a_miss_waits_for_tables_that_are_absent_and_others_behind_it_too() {
    let mut world = World::new(plan());
    world.tables.pages.insert(0x10, (0x20, true, true));
    world.tables.is_absent = true;
    let channel = world.channel();
    ask(&channel, 0x10_000, IotlbAccess::Read);
    world.until("it waits", |world| world.guest.import.is_waiting());
    world.rest();
    assert_eq!(world.told(), []);
    world.tables.is_absent = false;
    assert!(world.answer(&channel));
    assert!(!world.guest.import.is_waiting());
}

/// As many as it can send, refused and not; it reads no answer until its own socket is full, and
/// then all of them.
#[test]
fn any_number_of_misses_is_answered_in_bounds_and_spares_the_guests_log() {
    const MISSES: u64 = 20_000;
    let mut world = World::new(plan());
    world.tables.pages.insert(0x10, (0x20, true, true));
    let channel = world.channel();
    let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
    let (mut sent, mut answered, mut entries) = (0, 0, 0);
    let deadline = Instant::now() + PATIENCE;
    while answered < MISSES {
        assert!(Instant::now() < deadline, "{answered} of {sent}");
        let iova = if sent % 100 == 0 { 0x10_000 } else { 0x99_000 };
        if sent < MISSES && sender.push(miss_of(iova, IotlbAccess::Read)).is_ok() {
            sent += 1;
        } else {
            world.poll();
            while let Some(answer) = receiver.receive(&channel).unwrap() {
                answered += 1;
                entries += u64::from(answer.payload == [0; 8]);
            }
        }
        sender.flush(&channel).unwrap();
    }
    assert_eq!(entries, MISSES / 100);
    assert_eq!(world.told().len() as u64, MISSES / 100);
    assert_eq!(world.tables.recorded, 16, "no time has passed");
    world.now_ns = 250_000_000;
    for _ in 0..5 {
        assert!(!world.miss(0x99_000, IotlbAccess::Read));
    }
    assert_eq!(world.tables.recorded, 18);
    // And what matters goes on.
    assert!(world.invalidate(revoked(0x10, 1), 1));
    world.until("forgotten", |world| world.released == [1]);
}

#[test]
fn a_back_end_that_asks_nonsense_is_connected_to_again() {
    let update = IotlbMessage::Update {
        range: EVERYTHING,
        user_addr: 0,
        access: IotlbAccess::ReadWrite,
    };
    let messages = [
        BackendRequest::Iotlb(update).encode(false),
        Message::reply_u64(vhost_user::wire::RequestId(1), 0),
        Message::new(
            vhost_user::wire::Head::request(vhost_user::wire::RequestId(77), true),
            vec![],
        ),
    ];
    for message in messages {
        let mut world = World::new(plan());
        let channel = world.channel();
        let mut sender = Sender::default();
        sender.push(message).unwrap();
        sender.flush(&channel).unwrap();
        world.until("served again", |world| {
            world.back_end.seen().started.len() == 2
        });
        assert!(!world.guest.import.needs_reset());
    }
}

#[test]
fn request_other_than_a_miss_is_answered_and_changes_nothing() {
    let mut world = World::new(plan());
    let channel = world.channel();
    let mut sender = Sender::default();
    let fails = IotlbMessage::AccessFail {
        iova: 0x10_000,
        access: IotlbAccess::Write,
    };
    sender
        .push(BackendRequest::Iotlb(fails).encode(true))
        .unwrap();
    sender
        .push(BackendRequest::ConfigChange.encode(true))
        .unwrap();
    sender.flush(&channel).unwrap();
    assert!(world.answer(&channel));
    assert!(!world.answer(&channel));
    assert_eq!(world.told(), []);
    let _ = channel.as_fd();
}

#[test]
fn a_back_end_that_needs_an_entry_to_stop_gets_it() {
    let mut world = World::new(Plan {
        misses_at_stop: Some(0x10_008),
        ..plan()
    });
    world.tables.pages.insert(0x10, (0x20, true, true));
    // More than one start, so that nothing of one stop is left for the next.
    for _ in 0..3 {
        world.until("stopped", |world| world.guest.import.stop());
        assert_eq!(
            world.told().last(),
            Some(&update(0x10, 1, 0x20, IotlbAccess::ReadWrite))
        );
        let channel = world.channel();
        assert!(world.answer(&channel), "there is an entry");
        let started = world.back_end.seen().started.len();
        world.guest.import.resume();
        world.until("served again", |world| {
            world.back_end.seen().started.len() > started
        });
    }
    assert_eq!(world.back_end.seen().connections, 1);
}
