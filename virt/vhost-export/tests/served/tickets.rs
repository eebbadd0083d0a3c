//! Guest memory that is not there yet: its tickets are delivered, fail, or are forgotten, and
//! queues that do not need the memory go on.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::common::front::Front;
use crate::common::{DISK, feature, open_soon, until};
use guest_mem::{
    Access, DmaFault, ForeignError, ForeignRam, ForeignRegion, Gpa, Hva, Intent, KeepAlive,
    PAGE_SIZE, PhysMem, Stop, Ticket,
};
use sidecore::{Handle, IdlePolicy, Sidecore, SidecoreBuilder};
use vhost_blk::queue::{Op, Status};
use vhost_export::{Export, ExportConfig, ExportMessage, ExportStats, RegionMemory};
use vhost_user::wire::Request;
use vio::blk::{Blk, BlkClass, BlkConfig, BlockIo, MemDisk};
use vio_faults::SlowDisk;

/// Absent pages, and the tickets asked for.
#[derive(Default)]
struct State {
    absent: BTreeSet<u64>,
    /// Absent for good.
    lost: BTreeSet<u64>,
    asked: BTreeMap<Ticket, Vec<u64>>,
    tickets: u64,
}

/// The pager's end.
#[derive(Clone, Default)]
struct Pager(Arc<Mutex<State>>);

impl Pager {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nobody panics holding it")
    }

    /// Takes the page of `gpa` away.
    fn evict(&self, gpa: u64) {
        self.state().absent.insert(gpa / PAGE_SIZE);
    }

    /// Waits until something has been asked for. Once: another ticket for it would be one too many.
    fn asked(&self) -> Ticket {
        until("memory is asked for", || !self.state().asked.is_empty());
        let asked: Vec<Ticket> = self.state().asked.keys().copied().collect();
        assert_eq!(asked.len(), 1);
        asked[0]
    }

    /// Ends a ticket, with success or not, and notifies the export.
    fn end(&self, ticket: Ticket, is_there: bool, export: &Handle<ExportMessage>) {
        let mut state = self.state();
        let pages = state.asked.remove(&ticket).expect("a ticket not ended");
        for page in pages {
            match is_there {
                true => state.absent.remove(&page),
                false => state.lost.insert(page),
            };
        }
        drop(state);
        let sent = export.send(ExportMessage::TicketDone(ticket));
        assert!(sent.is_ok(), "it runs");
    }
}

/// A front end's memory of which the pager has taken pages away.
#[derive(Clone)]
struct PagedRam {
    ram: ForeignRam,
    pager: Pager,
}

impl PagedRam {
    fn pass(&self, pieces: &[(Gpa, u64)]) -> Access<()> {
        let mut state = self.pager.state();
        let pages = pieces.iter().flat_map(|&(gpa, len)| {
            gpa.raw() / PAGE_SIZE..=(gpa.raw() + len.max(1) - 1) / PAGE_SIZE
        });
        let absent: Vec<u64> = pages.filter(|page| state.absent.contains(page)).collect();
        if let Some(lost) = absent.iter().find(|page| state.lost.contains(page)) {
            let gpa = Gpa::new(lost * PAGE_SIZE);
            return Err(DmaFault::NotRam { gpa }.into());
        }
        if absent.is_empty() {
            return Ok(());
        }
        // Pages that are being brought in for another access are not brought in again.
        let covers = |pages: &Vec<u64>| absent.iter().all(|page| pages.contains(page));
        if let Some((&ticket, _)) = state.asked.iter().find(|(_, pages)| covers(pages)) {
            return Err(Stop::Pending(ticket));
        }
        state.tickets += 1;
        let ticket = Ticket(state.tickets);
        state.asked.insert(ticket, absent);
        Err(Stop::Pending(ticket))
    }
}

impl PhysMem for PagedRam {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.pass(&[(gpa, 8)])?;
        self.ram.read_u64(gpa)
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.pass(&[(gpa, 4)])?;
        self.ram.store_u32_release(gpa, value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.pass(&[(gpa, buf.len() as u64)])?;
        self.ram.read(gpa, buf)
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.pass(&[(gpa, buf.len() as u64)])?;
        self.ram.write(gpa, buf)
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        self.pass(&[(gpa, len)])?;
        self.ram.host(gpa, len, intent)
    }

    fn run(&self, gpa: Gpa) -> Access<u64> {
        self.ram.run(gpa)
    }

    fn gather(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<()> {
        let places = pieces.iter().map(|&(gpa, len, _)| (gpa, len));
        self.pass(&places.collect::<Vec<_>>())
    }

    fn keep_alive(&self) -> KeepAlive {
        self.ram.keep_alive()
    }
}

impl RegionMemory for PagedRam {
    fn with_regions(&self, regions: &[ForeignRegion]) -> Result<Self, ForeignError> {
        Ok(Self {
            ram: self.ram.with_regions(regions)?,
            pager: self.pager.clone(),
        })
    }

    fn is_lost(&self) -> bool {
        self.ram.is_lost()
    }
}

/// An export whose core sleeps whenever it can: only messages and descriptors wake it.
struct Scene {
    core: Sidecore<Export<BlkClass, PagedRam>>,
    pager: Pager,
    dir: tempfile::TempDir,
}

const EVENT_IDX: [u64; 2] = [feature::EVENT_IDX, feature::EVENT_IDX | feature::PACKED];

impl Scene {
    fn new(io: Box<dyn BlockIo>) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("s")).expect("a socket");
        let config = BlkConfig {
            queues: 2,
            packed: true,
            ..BlkConfig::default()
        };
        let blk = Blk::new(config, io).expect("a disk");
        let pager = Pager::default();
        let memory = PagedRam {
            ram: ForeignRam::empty(),
            pager: pager.clone(),
        };
        let config = ExportConfig::new("paged");
        let export = Export::with_memory(config, blk, listener, memory).expect("an export");
        let core = SidecoreBuilder::new("paged").idle(IdlePolicy::Sleep);
        Self {
            core: core.spawn(vec![export]).expect("a thread"),
            pager,
            dir,
        }
    }

    fn ram() -> Self {
        Self::new(Box::new(MemDisk::new(vec![0; DISK], 64, false)))
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    fn front(&self, features: u64) -> Front {
        Front::running(&self.path(), features, 2, 8)
    }

    fn end(&self, ticket: Ticket, is_there: bool) {
        self.pager.end(ticket, is_there, &self.core.handle(0));
    }

    /// The page of the next request's data in queue 0 goes away.
    fn evict_data(&self, front: &mut Front) {
        let own = &mut front.queues[0];
        let slot = own.take_slot().expect("a slot");
        own.release(slot);
        self.pager
            .evict(front.layout.gpa(front.layout.data(0, slot)));
    }

    fn stats(&self) -> ExportStats {
        let stats = self.core.handle(0).call(ExportMessage::Stats);
        stats.expect("it answers")
    }

    /// Everything that has been submitted comes back well.
    fn check_alive(&self, front: &mut Front) {
        let outstanding = usize::from(front.io().outstanding());
        assert_eq!(front.io().drain(), (outstanding, 0));
        front.io().verify(16);
        assert_eq!(self.stats().device.violations, 0);
    }
}

#[test]
fn a_request_goes_on_when_its_page_is_there_and_other_queues_do_not_wait() {
    for features in EVENT_IDX {
        let scene = Scene::ram();
        let mut front = scene.front(features);
        scene.evict_data(&mut front);
        assert!(front.io().submit(0, Op::Write, 3));
        let ticket = scene.pager.asked();
        for block in 4..40 {
            assert!(front.io().submit(1, Op::Write, block));
            until("the other queue is served", || front.io().reap(1).is_some());
        }
        // A ticket that no queue waits for is ignored.
        let sent = scene
            .core
            .handle(0)
            .send(ExportMessage::TicketDone(Ticket(99)));
        assert!(sent.is_ok(), "it runs");
        assert_eq!(front.io().collect(), (0, 0));
        scene.end(ticket, true);
        scene.check_alive(&mut front);
    }
}

#[test]
fn a_page_that_cannot_be_had_fails_its_request_alone() {
    for features in EVENT_IDX {
        let scene = Scene::ram();
        let mut front = scene.front(features);
        scene.evict_data(&mut front);
        assert!(front.io().submit(0, Op::Write, 3));
        assert!(front.io().submit(0, Op::Write, 4));
        let ticket = scene.pager.asked();
        scene.end(ticket, false);
        let mut done = Vec::new();
        until("both have ended", || {
            done.extend(front.io().reap(0));
            done.len() == 2
        });
        let status = |block: u64| {
            let own = done.iter().find(|done| done.extent.sector == block * 8);
            own.map(|done| done.status)
        };
        assert_eq!(status(3), Some(Status::IoError));
        assert_eq!(status(4), Some(Status::Ok));
        scene.pager.state().absent.clear();
        scene.check_alive(&mut front);
    }
}

#[test]
fn a_queue_that_stops_forgets_its_ticket_and_keeps_its_request() {
    for features in EVENT_IDX {
        let scene = Scene::ram();
        let mut front = scene.front(features);
        scene.evict_data(&mut front);
        assert!(front.io().submit(0, Op::Write, 3));
        let ticket = scene.pager.asked();
        // The stop does not wait for the ticket, and the request has not been taken.
        let base = front.stop(0);
        assert_ne!(base, front.own_base(0));
        scene.end(ticket, true);
        let size = front.layout.ring_size;
        front.place(0, size, base);
        front.call(front.kick_request(0));
        scene.check_alive(&mut front);
    }
}

/// Finished, and not to be published before its page is there: only a stop has to wait for that.
#[test]
fn a_stop_waits_for_a_page_of_a_request_that_has_ended() {
    let below = Box::new(MemDisk::new(vec![0; DISK], 64, false));
    let (disk, control) = SlowDisk::new(below).expect("a socket pair");
    let scene = Scene::new(Box::new(disk));
    let mut front = scene.front(feature::EVENT_IDX);
    let status = front.layout.gpa(front.layout.status(0, 0));
    let ended = |front: &mut Front| {
        control.set_open(false);
        assert!(front.io().submit(0, Op::Write, 0));
        until("it is in flight", || control.held() == 1);
        scene.pager.evict(status);
        control.set_open(true);
        scene.pager.asked()
    };

    let ticket = ended(&mut front);
    let (pager, export) = (scene.pager.clone(), scene.core.handle(0));
    let opener = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        pager.end(ticket, true, &export);
    });
    let base = front.stop(0);
    opener.join().expect("no panic");
    assert_eq!(base, front.own_base(0));
    assert_eq!(front.io().outstanding(), 1);
    assert_eq!(front.io().drain(), (1, 0));
    front.fresh_rings();
    front.serve(0);

    // A reset and the end of a connection forget it.
    let ticket = ended(&mut front);
    front.call(Request::ResetDevice);
    scene.end(ticket, true);
    front.set_features(feature::EVENT_IDX);
    front.serve(0);
    front.serve(1);
    let ticket = ended(&mut front);
    drop(front);
    let mut front = scene.front(feature::EVENT_IDX);
    scene.end(ticket, true);
    let opener = open_soon(&control);
    scene.check_alive(&mut front);
    opener.join().expect("no panic");
}

#[test]
fn a_ring_whose_memory_is_absent_starts_when_it_is_there() {
    for features in EVENT_IDX {
        let scene = Scene::ram();
        // A packed ring is read before it runs only to find what a predecessor left.
        let start = || {
            let mut front = Front::sharing(&scene.path(), features, 2, 8);
            let region = front.track();
            front.serve(1);
            let places = front.layout.places(0);
            let is_packed = features & feature::PACKED != 0;
            let at = if is_packed {
                places.desc
            } else {
                places.device
            };
            scene.pager.evict(front.layout.gpa(at));
            (front, region)
        };
        let (mut front, _region) = start();
        let pager = scene.pager.clone();
        let export = scene.core.handle(0);
        let opener = std::thread::spawn(move || {
            let ticket = pager.asked();
            std::thread::sleep(std::time::Duration::from_millis(20));
            pager.end(ticket, true, &export);
        });
        front.serve(0);
        opener.join().expect("no panic");
        scene.check_alive(&mut front);
        drop(front);

        // The front end goes first: the next one that connects is served.
        let (mut front, _region) = start();
        front.describe(0);
        let mut sender = vhost_user::channel::Sender::default();
        let kick = front.kick_request(0).encode(true);
        sender.push(kick).expect("room");
        let flushed = sender.flush(std::os::fd::AsFd::as_fd(&front.connection.socket()));
        flushed.expect("a connection");
        let ticket = scene.pager.asked();
        drop(front);
        until("the next one is served", || {
            Front::try_connect(&scene.path(), 2, 8).is_ok()
        });
        scene.end(ticket, true);
        let mut front = scene.front(features);
        scene.check_alive(&mut front);
    }
}

#[test]
fn memory_that_is_replaced_is_asked_anew() {
    let scene = Scene::ram();
    let mut front = scene.front(feature::EVENT_IDX);
    scene.evict_data(&mut front);
    assert!(front.io().submit(0, Op::Write, 3));
    let former = scene.pager.asked();
    // As a pager that serves one memory at a time: it drops the former's tickets.
    scene.pager.state().asked.clear();
    front.share();
    let ticket = scene.pager.asked();
    assert_ne!(ticket, former);
    scene.end(ticket, true);
    scene.check_alive(&mut front);
}
