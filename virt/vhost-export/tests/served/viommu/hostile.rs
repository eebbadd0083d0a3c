//! Front ends whose IOMMU messages are wrong. After each the connection goes on or ends, the device
//! has a defined state, and a neighbour is served.

use std::time::{Duration, Instant};

use vhost_user::wire::{IotlbAccess, MemRegion, Message, Request, RequestId};

use super::front::{PAGE, SPLIT, Viommu};
use super::verify;
use crate::common::raw::{Desc, NEXT, WRITE};
use crate::common::{Disk, Guest, PATIENCE, Server, feature, options, until};
use seeded::Random;
use sidecore::IdlePolicy;

const IOERR: u8 = 1;
const ALL: IotlbAccess = IotlbAccess::ReadWrite;

struct Scene {
    server: Server,
    neighbour: Guest,
}

impl Scene {
    fn new() -> Self {
        let disks = vec![Disk::ram("target"), Disk::ram("neighbour")];
        let server = Server::start(IdlePolicy::Sleep, disks);
        let neighbour = server.guest(1, options(feature::EVENT_IDX, 1, 8));
        Self { server, neighbour }
    }

    #[track_caller]
    fn front(&self) -> Viommu {
        Viommu::running(&self.server.path(0), feature::EVENT_IDX, 1, 8)
    }

    /// The device and its neighbour are whole.
    #[track_caller]
    fn is_whole(&mut self, viommu: &mut Viommu) {
        verify(viommu, 8, true);
        self.neighbour.verify(8);
    }
}

/// The bytes of an IOTLB message.
fn raw(iova: u64, size: u64, user_addr: u64, perm: u8, kind: u8) -> Vec<u8> {
    let mut payload = Vec::new();
    for word in [iova, size, user_addr] {
        payload.extend_from_slice(&word.to_ne_bytes());
    }
    payload.extend_from_slice(&[perm, kind, 0, 0, 0, 0, 0, 0]);
    let head = vhost_user::wire::Head::request(RequestId::IOTLB_MSG, true);
    Message::new(head, payload).to_bytes()
}

#[test]
fn updates_that_make_no_sense_are_refused_and_change_nothing() {
    let mut scene = Scene::new();
    let mut viommu = scene.front();
    verify(&mut viommu, 8, false);
    let regions = viommu.front.regions();
    let (first, second) = (regions[0], regions[1]);
    let inside = first.user_addr;
    let behind = first.user_addr + first.size;
    let table: [(&str, u64, u64, u64, u8); 10] = [
        ("size 0", 0x1000, 0, inside, 3),
        ("the iova wraps", u64::MAX - 0xfff, 0x1001, inside, 3),
        ("the user address wraps", 0x1000, 0x1000, u64::MAX - 10, 3),
        ("everything", 0, u64::MAX, inside, 3),
        ("outside", 0x1000, 0x1000, 0x1234_0000, 3),
        ("its end is outside", 0x1000, first.size + 1, inside, 3),
        (
            "over a hole to the next region",
            0x1000,
            second.user_addr - inside + 1,
            inside,
            3,
        ),
        ("one byte behind", 0x1000, 1, behind, 3),
        (
            "a guest address for a user address",
            0x1000,
            0x1000,
            first.guest_addr,
            3,
        ),
        ("unknown rights", 0x1000, 0x1000, inside, 7),
    ];
    for (what, iova, size, user, perm) in table {
        viommu.send_raw(&raw(iova, size, user, perm, 2));
        assert_ne!(viommu.wait_received(), 0, "{what}");
    }
    // Of kinds that only we send, or none.
    for kind in [0, 1, 4, 5, 255] {
        viommu.send_raw(&raw(0x1000, 0x1000, inside, 3, kind));
        assert_ne!(viommu.wait_received(), 0, "kind {kind}");
    }
    scene.is_whole(&mut viommu);
}

#[test]
fn an_update_across_regions_that_touch_leads_to_both() {
    let mut scene = Scene::new();
    let mut viommu = scene.front();
    let (place, memory) = crate::common::front::spare_memory();
    // Neighbours for the front end, in the other order for the guest.
    let half = place.size / 2;
    let piece = |at: u64, guest_addr: u64| MemRegion {
        guest_addr,
        size: half,
        user_addr: place.user_addr + at,
        mmap_offset: at,
    };
    let (low, high) = (
        piece(0, place.guest_addr + half),
        piece(half, place.guest_addr),
    );
    for region in [low, high] {
        let file = crate::common::front::copy(memory.file());
        viommu.front.call(Request::AddMemReg(region, file));
    }
    let at = 0x33_0000_0000;
    viommu.update(at, 2 * PAGE, place.user_addr + half - PAGE, ALL);
    // A read of a sector over the boundary.
    let boundary = half as usize;
    memory.zero(boundary - 256, 512);
    let before = read_raw(&mut viommu, at + PAGE - 256, 0);
    viommu.until("it is answered", |own| own.front.used() != before);
    let (mut low, mut high) = ([1; 256], [1; 256]);
    memory.read(boundary - 256, &mut low);
    memory.read(boundary, &mut high);
    assert_eq!((low, high), ([0; 256], [0; 256]));
    assert_eq!(viommu.front.status(), 0);
    restart_and_check(&mut scene, viommu);
}

/// Makes a read of a sector available by hand, in a ring that is served from here on by hand; the
/// used index before it.
fn read_raw(viommu: &mut Viommu, data: u64, sector: u64) -> u16 {
    let (header, status, _) = viommu.front.request(0, sector);
    viommu.front.descs(&[
        Desc(header, 16, NEXT, 1),
        Desc(data, 512, NEXT | WRITE, 2),
        Desc(status, 1, WRITE, 0),
    ]);
    let before = viommu.front.used();
    viommu.front.avail(&[0]);
    before
}

#[track_caller]
fn restart_and_check(scene: &mut Scene, mut viommu: Viommu) {
    viommu.restart();
    scene.is_whole(&mut viommu);
}

#[test]
fn a_refused_miss_is_the_fault_and_is_asked_for_once() {
    let mut scene = Scene::new();
    let mut viommu = scene.front();
    verify(&mut viommu, 8, false);
    viommu.restart();
    let nowhere = 0x55_0000_0000;
    for round in 1..=50 {
        viommu.asked.clear();
        let before = read_raw(&mut viommu, nowhere, 0);
        viommu.until("it fails", |own| {
            assert!(own.asked.len() < 100, "it is asked for again and again");
            own.front.used() != before
        });
        assert_eq!(viommu.front.status(), IOERR);
        let asked = viommu
            .asked
            .iter()
            .filter(|(page, _)| *page == nowhere / PAGE);
        // The guest's fault log has one line for it.
        assert_eq!(asked.count(), 1, "round {round}");
    }
    // Once the guest has mapped it, without saying so, it is.
    let data = viommu.front.layout.data(0, 0);
    viommu.map(nowhere, data, ALL);
    let before = read_raw(&mut viommu, nowhere, 0);
    viommu.until("it succeeds", |own| own.front.used() != before);
    assert_eq!(viommu.front.status(), 0);
    restart_and_check(&mut scene, viommu);
}

#[test]
fn an_answer_without_an_update_and_one_with_less_than_was_asked_for_are_refusals() {
    let mut scene = Scene::new();
    let nowhere = 0x55_0000_0000;
    for access in [None, Some(IotlbAccess::Read), Some(IotlbAccess::None)] {
        let mut viommu = scene.front();
        verify(&mut viommu, 8, false);
        viommu.restart();
        for _ in 0..10 {
            let before = read_raw(&mut viommu, nowhere, 0);
            let mut misses = 0;
            let start = Instant::now();
            while viommu.front.used() == before {
                assert!(start.elapsed() < PATIENCE, "{access:?}: it does not end");
                let Some((iova, asked)) = viommu.miss() else {
                    continue;
                };
                if iova != nowhere {
                    viommu.serve_miss(iova, asked);
                    continue;
                }
                misses += 1;
                assert_eq!(asked, IotlbAccess::Write);
                if let Some(access) = access {
                    let user = viommu.front.regions()[0].user_addr;
                    viommu.update(nowhere, PAGE, user, access);
                }
                viommu.answer(0);
            }
            assert_eq!((viommu.front.status(), misses), (IOERR, 1), "{access:?}");
        }
        restart_and_check(&mut scene, viommu);
    }
}

#[test]
fn an_answer_may_overtake_its_update() {
    let mut scene = Scene::new();
    let mut viommu = scene.front();
    verify(&mut viommu, 8, false);
    for round in 0..200 {
        viommu.invalidate(0, u64::MAX);
        assert!(viommu.io().submit(0, vhost_blk::queue::Op::Read, round % 8));
        let start = Instant::now();
        while viommu.io().outstanding() != 0 {
            assert!(start.elapsed() < PATIENCE);
            if let Some((iova, _)) = viommu.miss() {
                let (page, _) = viommu.table[&(iova / PAGE)];
                let user = viommu.user(page * PAGE);
                let update = viommu.update_message(iova / PAGE * PAGE, PAGE, user, ALL);
                // On their way at once, on two sockets.
                viommu.send(update);
                viommu.answer(0);
                assert_eq!(viommu.wait_received(), 0);
            }
            let (_, bad) = viommu.io().collect();
            assert_eq!(bad, 0, "round {round}: taken for refused");
        }
    }
    scene.is_whole(&mut viommu);
}

#[test]
fn invalidations_of_any_shape_are_answered() {
    let mut scene = Scene::new();
    let mut viommu = scene.front();
    verify(&mut viommu, 8, false);
    for (iova, size, is_good) in [
        (0, 0, true),
        (0x1000, 0, false),
        (0xfef0_0000, 0xffff_ffff_0110_0000, true),
        (0xfef0_0000, 0xffff_ffff_0110_0001, false),
        (u64::MAX, 1, true),
        (u64::MAX, 2, false),
        (0, u64::MAX, true),
        (1, u64::MAX, true),
        (1 << 40, 3, true),
    ] {
        viommu.send_raw(&raw(iova, size, 0, 0, 3));
        let answer = viommu.wait_received();
        assert_eq!(answer == 0, is_good, "{iova:#x}, {size:#x}");
    }
    // By the thousand, while requests come.
    for round in 0..2_000 {
        if round % 100 == 0 {
            viommu.io().submit(0, vhost_blk::queue::Op::Read, 1);
        }
        viommu.invalidate(0, 0xfedf_ffff);
        viommu.invalidate(0xfef0_0000, u64::MAX);
        if round % 10 == 0 {
            viommu.pump();
            viommu.io().collect();
        }
    }
    let (_, bad) = viommu.drain();
    assert_eq!(bad, 0);
    scene.is_whole(&mut viommu);
}

#[test]
fn updates_by_the_thousand_are_answered_and_evict_each_other() {
    let mut scene = Scene::new();
    let mut viommu = scene.front();
    // So that nothing is asked for meanwhile: the front end does not answer below.
    verify(&mut viommu, 8, false);
    let user = viommu.front.regions()[0].user_addr;
    let mut random = Random::new(7);
    for round in 0..100_000_u64 {
        let at = (1 << 40) + 2 * PAGE * round;
        viommu.send(viommu.update_message(at, PAGE - random.below(100), user, ALL));
        if round % 64 == 63 {
            for _ in 0..64 {
                assert_eq!(viommu.wait_received(), 0);
            }
        }
    }
    for _ in 0..100_000 % 64 {
        assert_eq!(viommu.wait_received(), 0);
    }
    scene.is_whole(&mut viommu);
}

#[test]
fn misses_are_bounded_whatever_the_guest_asks() {
    let mut scene = Scene::new();
    let mut viommu = Viommu::running(&scene.server.path(0), SPLIT, 1, 8);
    verify(&mut viommu, 8, false);
    viommu.restart();
    viommu.asked.clear();
    // Requests of 250 pages each that are nowhere, all at once.
    let (header, status, _) = viommu.front.request(0, 0);
    let mut descs = vec![Desc(header, 16, NEXT, 1)];
    for page in 0..250 {
        descs.push(Desc(
            0x55_0000_0000 + page * PAGE,
            512,
            NEXT | WRITE,
            page as u16 + 2,
        ));
    }
    descs.push(Desc(status, 1, WRITE, 0));
    viommu.front.descs(&descs);
    let before = viommu.front.used();
    viommu.front.avail(&[0, 0, 0, 0]);
    std::thread::sleep(Duration::from_millis(50));
    let mut open = 0;
    while viommu.miss().is_some() {
        open += 1;
    }
    assert!(open <= guest_mem::MAX_MISSES, "{open} misses at a time");
    let waiting = viommu.asked.split_off(viommu.asked.len() - open);
    for (page, access) in waiting {
        viommu.serve_miss(page * PAGE, access);
    }
    viommu.until("they fail", |own| {
        own.front.used() == before.wrapping_add(4)
    });
    assert_eq!(viommu.front.status(), IOERR);
    restart_and_check(&mut scene, viommu);
}

#[test]
fn malformed_answer_to_a_miss_ends_the_connection() {
    let mut scene = Scene::new();
    let messages = [
        // To nothing.
        Message::reply_u64(RequestId(1), 0).to_bytes(),
        // Not a reply, another request, too short, too long, another protocol.
        Message::new(
            vhost_user::wire::Head::request(RequestId(1), false),
            vec![0; 8],
        )
        .to_bytes(),
        Message::reply_u64(RequestId(2), 0).to_bytes(),
        Message::new(vhost_user::wire::Head::reply(RequestId(1)), vec![0; 4]).to_bytes(),
        Message::new(vhost_user::wire::Head::reply(RequestId(1)), vec![0; 4096]).to_bytes(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ];
    for bytes in messages {
        let mut viommu = scene.front();
        verify(&mut viommu, 8, false);
        viommu.answer_with(&bytes);
        viommu.front.ended();
        drop(viommu);
        let mut next = scene.front();
        scene.is_whole(&mut next);
    }
}

#[test]
fn a_channel_that_ends_makes_misses_faults_and_another_one_mends_it() {
    let mut scene = Scene::new();
    let mut viommu = scene.front();
    verify(&mut viommu, 8, false);
    viommu.restart();
    verify(&mut viommu, 8, false);
    viommu.close_channel();
    viommu.invalidate(0, u64::MAX);
    // The ring's own addresses fault: it is parked, and nothing hangs.
    viommu.front.avail(&[]);
    scene
        .server
        .until(0, "the ring rests", |stats| stats.device.ring_faults != 0);
    scene.neighbour.verify(8);
    viommu.front.stop(0);
    drop(viommu);
    let mut next = scene.front();
    scene.is_whole(&mut next);
}

#[test]
fn a_channel_that_holds_descriptors_or_is_no_socket_costs_nobody_else() {
    let mut scene = Scene::new();
    let mut viommu = scene.front();
    verify(&mut viommu, 8, false);
    // Replaced by what cannot be sent to.
    let event = crate::common::front::event();
    viommu.front.call(Request::SetBackendReqFd(event));
    viommu.invalidate(0, u64::MAX);
    viommu.front.avail(&[]);
    let faults = |stats: &vhost_export::ExportStats| stats.device.ring_faults != 0;
    scene.server.until(0, "the ring rests", faults);
    scene.neighbour.verify(8);
    drop(viommu);
    let mut next = scene.front();
    scene.is_whole(&mut next);
}

#[test]
fn a_ring_at_an_address_of_nothing_does_not_start_and_the_driver_is_notified() {
    let mut scene = Scene::new();
    let mut viommu = Viommu::connect(&scene.server.path(0), feature::EVENT_IDX, 1, 8);
    let err = viommu.err(0);
    let used = viommu.iova(viommu.front.layout.places(0).device);
    viommu.unmap(used);
    viommu.serve_all();
    viommu.until("the driver is notified", |_| Viommu::is_signalled(&err));
    assert_eq!(viommu.front.stop(0), 0);
    viommu.map_all();
    viommu.front.fresh_rings();
    viommu.serve_all();
    scene.is_whole(&mut viommu);
    until("nothing is left", || {
        scene.server.stats(0).device.in_flight == 0
    });
}
