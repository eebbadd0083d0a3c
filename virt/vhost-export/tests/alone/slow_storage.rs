//! Storage that is really slow: the kernel has begun a request and does not end it (`held-fs`). A
//! VMM that pauses its guest, plugs memory in or out, or resets the device meanwhile gets its
//! answer when the storage has given its own: the request is a success, and the disk alive.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::front::{Front, copy, event, fd, spare_memory};
use crate::common::{
    BLOCK, DISK, Disk, PATIENCE, Server, feature, logged, options, pattern, until,
};
use disk_image::{ImageDisk, ImageOptions};
use held_fs::{Gate, HeldFs, Kind};
use sidecore::{IdlePolicy, Sidecore, SidecoreBuilder};
use vhost_blk::queue::{Op, Status};
use vhost_export::Export;
use vhost_user::frontend::InflightRegion;
use vhost_user::wire::Request;
use vio::blk::{BlkClass, BlockIo, RawDisk, RawDiskOptions};

/// Duration for which the storage holds a request, beyond every limit here: five times the one
/// after which the end of a connection cancels.
const HELD: Duration = Duration::from_secs(5);
/// The block that held reads and writes access; it holds its pattern for a read, and other data for
/// a write.
const BLOCK_HELD: u64 = 500;
/// Every depth here: as many disks as possible share an io_uring.
const DEPTH: u32 = 16;

/// Request of a front end while a request is held.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    AddMemory,
    RemoveMemory,
    SetMemory,
    StopRing,
    Reset,
    Reconnect,
}

const ACTIONS: [Action; 6] = [
    Action::AddMemory,
    Action::RemoveMemory,
    Action::SetMemory,
    Action::StopRing,
    Action::Reset,
    Action::Reconnect,
];
const OPS: [(Op, Kind); 3] = [
    (Op::Read, Kind::Read),
    (Op::Write, Kind::Write),
    (Op::Flush, Kind::Sync),
];

/// Storage behind a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Buffered,
    Direct,
    Qcow2,
}

/// Content of a disk before `op`, raw and as a qcow2 image. Made once: there are many disks.
struct Contents {
    raw: Vec<u8>,
    qcow2: OnceLock<Vec<u8>>,
}

impl Contents {
    /// In every block its pattern, but in the one that a write is to change.
    fn before(op: Op) -> &'static Self {
        static PATTERN: OnceLock<Contents> = OnceLock::new();
        static TO_BE_WRITTEN: OnceLock<Contents> = OnceLock::new();
        let blocks = 0..DISK as u64 / u64::from(BLOCK);
        let of = |raw| Self {
            raw,
            qcow2: OnceLock::new(),
        };
        if op != Op::Write {
            return PATTERN.get_or_init(|| of(blocks.flat_map(pattern).collect()));
        }
        TO_BE_WRITTEN.get_or_init(|| {
            let mut raw: Vec<u8> = blocks.flat_map(pattern).collect();
            raw[BLOCK_HELD as usize * BLOCK as usize..][..BLOCK as usize].fill(0x11);
            of(raw)
        })
    }

    fn qcow2(&self) -> &[u8] {
        self.qcow2.get_or_init(|| qcow2_of(&self.raw))
    }
}

/// A disk in `fs` on which `op` is to be held.
fn disk(fs: &HeldFs, name: &str, format: Format, op: Op) -> Disk {
    let contents = Contents::before(op);
    let path = fs.path(name);
    // Past the file system, whose cache would answer the reads otherwise.
    let gate = fs.create(name, 0);
    let io: Box<dyn BlockIo> = match format {
        Format::Buffered | Format::Direct => {
            gate.contents()
                .write_all_at(&contents.raw, 0)
                .expect("memory");
            let options = RawDiskOptions {
                o_direct: format == Format::Direct,
                depth: DEPTH,
                ..Default::default()
            };
            Box::new(RawDisk::open(&path, options).expect("a disk"))
        }
        Format::Qcow2 => {
            gate.contents()
                .write_all_at(contents.qcow2(), 0)
                .expect("memory");
            let options = ImageOptions {
                depth: DEPTH,
                threads: 2,
                ..ImageOptions::default()
            };
            Box::new(ImageDisk::open(&path, options).expect("an image"))
        }
    };
    let mut disk = Disk::new(name, io);
    disk.blk.queues = 1;
    disk
}

/// The bytes of a qcow2 image with these contents.
fn qcow2_of(contents: &[u8]) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a directory");
    let (raw, image) = (dir.path().join("raw"), dir.path().join("qcow2"));
    std::fs::write(&raw, contents).expect("space");
    let status = Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .args([&raw, &image])
        .status();
    assert!(status.expect("qemu-img runs").success());
    std::fs::read(&image).expect("it was made")
}

fn formats() -> Vec<Format> {
    if Command::new("qemu-img").arg("--version").output().is_ok() {
        return vec![Format::Buffered, Format::Direct, Format::Qcow2];
    }
    println!("skipped for qcow2: no qemu-img on the PATH (Debian: qemu-utils)");
    vec![Format::Buffered, Format::Direct]
}

/// One disk, one request that is held, and what is asked for meanwhile.
#[derive(Clone, Debug)]
struct Cell {
    action: Action,
    op: Op,
    kind: Kind,
    format: Format,
    tracked: bool,
    /// Its server, and its disk there.
    at: (usize, usize),
    socket: PathBuf,
    gate: Gate,
}

impl Cell {
    fn what(&self) -> String {
        let tracked = if self.tracked { "with" } else { "without" };
        format!(
            "{:?} while a {:?} of a {:?} disk is held, {tracked} an inflight region",
            self.action, self.op, self.format
        )
    }

    /// Starts a guest. Returns it, its inflight region if the cell wants one, and the eventfd that
    /// signals that the device needs a reset.
    fn start(&self) -> (Front, Option<InflightRegion>, OwnedFd) {
        let front = Front::try_connect(&self.socket, 1, 8);
        let mut front = front.expect("the server accepts");
        front.set_features(feature::EVENT_IDX);
        let region = self.tracked.then(|| front.track());
        front.share();
        front.serve(0);
        let err = event();
        front.call(Request::SetVringErr(fd(0, Some(copy(&err)))));
        if self.op == Op::Flush {
            // Something to flush.
            assert!(front.io().submit(0, Op::Write, 900));
            assert_eq!(front.io().drain(), (1, 0), "{}", self.what());
        }
        (front, region, err)
    }

    /// Puts the request in flight, and into the kernel.
    fn hold(&self, front: &mut Front) {
        self.gate.hold(&[self.kind]);
        assert!(front.io().submit(0, self.op, BLOCK_HELD));
        self.gate.wait_until_held(1);
    }

    /// Whether its disk needs a core of its own: io_uring's workers take buffered writes of one
    /// thread's files one after the other if the files happen to share a place in a table of 64,
    /// and one that waits for another may still be cancelled.
    fn is_alone(&self) -> bool {
        self.format == Format::Buffered && self.op == Op::Write
    }

    /// Asks, is answered after the release, and finds everything well.
    fn act(&self, mut front: Front, region: Option<InflightRegion>, released: &AtomicBool) {
        let what = self.what();
        let (spare, extra) = spare_memory();
        match self.action {
            Action::AddMemory => front.call(Request::AddMemReg(spare, copy(extra.file()))),
            // Of the guest's own: the ring's memory is away for a moment, as when QEMU rearranges
            // it.
            Action::RemoveMemory => {
                let own = front.regions()[0];
                front.call(Request::RemMemReg(own));
                front.call(Request::AddMemReg(own, copy(front.memory.file())));
            }
            Action::SetMemory => front.share(),
            Action::StopRing => {
                let base = front.stop(0);
                assert_eq!(base, front.own_base(0), "{what}");
                // It is there with the answer, not later.
                assert_eq!(front.io().collect(), (1, 0), "{what}");
            }
            Action::Reset => front.call(Request::ResetDevice),
            Action::Reconnect => front = self.reconnect(front, region.as_ref(), released),
        }
        assert!(
            released.load(Ordering::Acquire),
            "answered too early: {what}"
        );
        match self.action {
            Action::Reset => {
                front.set_features(feature::EVENT_IDX);
                front.share();
                front.serve(0);
            }
            Action::StopRing => front.serve(0),
            _ => {
                assert_eq!(front.io().drain(), (1, 0), "{what}");
            }
        }
        // What was written is there; every kind of request works.
        assert!(front.io().submit(
            0,
            Op::Read,
            if self.op == Op::Write { BLOCK_HELD } else { 7 }
        ));
        assert!(front.io().submit(0, Op::Write, 901));
        assert!(front.io().submit(0, Op::Flush, 0));
        assert_eq!(front.io().drain(), (3, 0), "{what}");
        front.stop(0);
    }

    /// The connection is lost in mid-request; the same guest's VMM tries until it is served again.
    fn reconnect(
        &self,
        front: Front,
        region: Option<&InflightRegion>,
        released: &AtomicBool,
    ) -> Front {
        let Front {
            connection,
            memory,
            layout,
            queues,
            features,
            ..
        } = front;
        drop(connection);
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "no way back: {}", self.what());
            let Ok(mut next) = Front::try_connect(&self.socket, 1, 8) else {
                thread::sleep(Duration::from_millis(50));
                continue;
            };
            assert!(released.load(Ordering::Acquire), "{}", self.what());
            (next.memory, next.layout, next.queues) = (memory, layout, queues);
            next.features = features;
            let set = next.connection.set_features(features);
            set.expect("SET_FEATURES");
            if let Some(region) = region {
                next.track_in(region);
            }
            next.share();
            next.start_at_used(0);
            next.enable(0, true);
            return next;
        }
    }
}

#[test]
fn a_held_request_ends_well_whatever_is_asked_for_meanwhile() {
    let _turn = crate::among_others();
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let mut cells = Vec::new();
    let (mut disks, mut alone) = (Vec::new(), Vec::new());
    for format in formats() {
        for (op, kind) in OPS {
            for action in ACTIONS {
                for tracked in [false, true] {
                    let name = format!("disk-{}", cells.len());
                    let disk = disk(&fs, &name, format, op);
                    let mut cell = Cell {
                        action,
                        op,
                        kind,
                        format,
                        tracked,
                        at: (0, disks.len()),
                        socket: PathBuf::new(),
                        gate: fs.gate(&name),
                    };
                    if cell.is_alone() {
                        alone.push(Server::start(IdlePolicy::Sleep, vec![disk]));
                        cell.at = (alone.len(), 0);
                    } else {
                        disks.push(disk);
                    }
                    cells.push(cell);
                }
            }
        }
    }
    let neighbour_at = disks.len();
    disks.push(Disk::ram("neighbour"));
    let mut servers = vec![Server::start(IdlePolicy::Sleep, disks)];
    servers.extend(alone);
    for cell in &mut cells {
        let (server, disk) = cell.at;
        cell.socket = servers[server].path(disk);
    }
    let _release = fs.release_at_end();
    let mut started: Vec<_> = cells.iter().map(Cell::start).collect();
    for (cell, (front, ..)) in cells.iter().zip(&mut started) {
        cell.hold(front);
    }
    let released = AtomicBool::new(false);
    let mut errs = Vec::new();
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (cell, (front, region, err)) in cells.iter().zip(started) {
            errs.push(err);
            let released = &released;
            threads.push(scope.spawn(move || cell.act(front, region, released)));
        }
        // Meanwhile the others of the core are served, and it sleeps.
        let server = &servers[0];
        let start = Instant::now();
        let mut neighbour = server.guest(neighbour_at, options(feature::EVENT_IDX, 1, 8));
        neighbour.verify(64);
        thread::sleep(HELD / 2);
        let cpu = server.cpu();
        thread::sleep(HELD / 4);
        let used = server.cpu() - cpu;
        neighbour.verify(64);
        thread::sleep(HELD.saturating_sub(start.elapsed()));
        released.store(true, Ordering::Release);
        for cell in &cells {
            cell.gate.release();
        }
        for thread in threads {
            thread.join().expect("no panic");
        }
        // Of that, reconnecting front ends are turned away some 500 times.
        assert!(used < HELD / 8, "{used:?} of waiting");
    });
    for (cell, err) in cells.iter().zip(errs) {
        let (server, disk) = cell.at;
        let stats = servers[server].stats(disk);
        let what = cell.what();
        assert_eq!(
            (stats.device.violations, stats.device.errors),
            (0, 0),
            "{what}"
        );
        let is_cut = cell.action == Action::Reconnect;
        assert_eq!(stats.cancelled, u64::from(is_cut), "{what}");
        let mut count = [0; 8];
        assert!(
            rustix::io::read(&err, &mut count).is_err(),
            "needs a reset: {what}"
        );
    }
}

/// A disk with one held request and a front end that has asked for a change of memory.
fn waiting(fs: &HeldFs, name: &str, kind: Kind, op: Op) -> (Server, Front, Gate) {
    let mut disk = disk(fs, name, Format::Direct, op);
    disk.config.drain_limit_ns = 200_000_000;
    let server = Server::start(IdlePolicy::Sleep, vec![disk]);
    let gate = fs.gate(name);
    let mut front = Front::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    gate.hold(&[kind]);
    assert!(front.io().submit(0, op, BLOCK_HELD));
    gate.wait_until_held(1);
    (server, front, gate)
}

/// Sends without waiting for an answer.
fn send(front: &mut Front, request: Request) {
    let mut sender = vhost_user::channel::Sender::default();
    sender.push(request.encode(true)).expect("room");
    let flushed = sender
        .flush(front.connection.socket())
        .expect("a connection");
    assert_eq!(flushed, vhost_user::channel::Flushed::All);
}

#[test]
fn wait_for_a_file_is_logged_once_and_so_is_its_end() {
    let _turn = crate::among_others();
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (_server, mut front, gate) = waiting(&fs, "logged", Kind::Write, Op::Write);
    let _release = fs.release_at_end();
    let path = fs.path("logged").display().to_string();
    let lines = move || {
        let log = logged();
        let own = log.lines().filter(|line| line.contains("export=logged"));
        let own: Vec<String> = own.map(str::to_owned).collect();
        let of = |text: &str| own.iter().filter(|line| line.contains(text)).count();
        (of(&path), of("the storage has answered after"))
    };
    let opener = thread::spawn(move || {
        until("the wait is logged", || lines() == (1, 0));
        // Once, however long it lasts.
        thread::sleep(Duration::from_millis(500));
        assert_eq!(lines(), (1, 0), "{}", logged());
        gate.release();
        lines
    });
    front.share();
    let lines = opener.join().expect("no panic");
    until("its end is logged", || lines() == (1, 1));
    assert_eq!(front.io().drain(), (1, 0));
}

#[test]
fn a_front_end_that_goes_while_its_message_waits_is_noticed() {
    let _turn = crate::among_others();
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (server, mut front, gate) = waiting(&fs, "gone", Kind::Sync, Op::Flush);
    let _release = fs.release_at_end();
    let regions = front.regions();
    let table = regions
        .into_iter()
        .map(|region| (region, copy(front.memory.file())));
    let table = Request::SetMemTable(table.collect());
    send(&mut front, table);
    // More behind it, which the export does not read now.
    for _ in 0..20 {
        send(&mut front, Request::GetFeatures);
    }
    thread::sleep(Duration::from_millis(300));
    assert_eq!(
        server.stats(0).cancelled,
        0,
        "a change of memory cancels nothing"
    );
    drop(front);
    server.until(0, "its requests are cancelled", |stats| {
        stats.cancelled == 1
    });
    gate.release();
    until("the next one is served", || {
        Front::try_connect(&server.path(0), 1, 8).is_ok()
    });
}

/// The finished requests of a ring are published when it stops, though another ring of the device
/// broke the protocol.
#[test]
fn a_stop_shows_what_has_finished_of_a_device_that_needs_a_reset() {
    let _turn = crate::among_others();
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let mut disk = disk(&fs, "broken", Format::Direct, Op::Write);
    disk.blk.queues = 2;
    let server = Server::start(IdlePolicy::Sleep, vec![disk]);
    let _release = fs.release_at_end();
    let gate = fs.gate("broken");
    let mut front = Front::running(&server.path(0), feature::EVENT_IDX, 2, 8);
    gate.hold(&[Kind::Write]);
    assert!(front.io().submit(1, Op::Write, BLOCK_HELD));
    gate.wait_until_held(1);
    // An available index that no driver reaches.
    front.jump(40_000);
    server.until(0, "the device needs a reset", |stats| {
        stats.device.violations == 1
    });
    gate.release();
    let base = front.stop(1);
    assert_eq!(base, front.own_base(1));
    let done = front.io().reap(1).expect("it was shown before the answer");
    assert_eq!(done.status, Status::Ok);
}

/// Devices of a core share what wakes it. One that waits is woken for each answer of another, for
/// nothing, and is not muted for that: its own answer would come late.
#[test]
fn a_disk_that_does_not_answer_hears_of_its_end_at_once_beside_a_busy_one() {
    let _turn = crate::among_others();
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let disks = ["held", "busy"].map(|name| disk(&fs, name, Format::Direct, Op::Read));
    let server = Server::start(IdlePolicy::Sleep, disks.into());
    let _release = fs.release_at_end();
    let gate = fs.gate("held");
    let mut held = Front::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    let mut busy = Front::running(&server.path(1), feature::EVENT_IDX, 1, 8);
    gate.hold(&[Kind::Read]);
    assert!(held.io().submit(0, Op::Read, BLOCK_HELD));
    gate.wait_until_held(1);
    for block in 0..200 {
        assert!(busy.io().submit(0, Op::Read, block));
        assert_eq!(busy.io().drain(), (1, 0));
    }
    assert_eq!(server.core().stats().core.mutes, 0);
    assert_eq!(held.io().collect(), (0, 0));
    gate.release();
    assert_eq!(held.io().drain(), (1, 0));
}

/// A disk on a core that sleeps, a front end whose read is held, and another core.
fn held_before_a_move(fs: &HeldFs) -> (Server, Front, Sidecore<Export<BlkClass>>) {
    let disk = disk(fs, "moves", Format::Direct, Op::Read);
    let server = Server::start(IdlePolicy::Sleep, vec![disk]);
    let other = SidecoreBuilder::new("other").idle(IdlePolicy::Sleep);
    let other = other.spawn(Vec::new()).expect("a thread");
    let mut front = Front::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    let gate = fs.gate("moves");
    gate.hold(&[Kind::Read]);
    assert!(front.io().submit(0, Op::Read, BLOCK_HELD));
    gate.wait_until_held(1);
    (server, front, other)
}

/// Makes a write, and waits for its end beside what is held.
fn write_one(front: &mut Front, block: u64) {
    assert!(front.io().submit(0, Op::Write, block));
    until("a write is answered", || front.io().collect() == (1, 0));
}

/// A move waits for what is in flight, and storage may hold that for as long as it likes.
#[test]
fn a_disk_that_is_to_move_is_served_where_it_is_until_it_may() {
    let _turn = crate::among_others();
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (server, mut front, other) = held_before_a_move(&fs);
    let _release = fs.release_at_end();
    let handle = server.handle(0);
    thread::scope(|scope| {
        let mover = scope.spawn(|| server.core().move_to(&handle, &other, PATIENCE));
        // Several pauses long.
        let since = Instant::now();
        while since.elapsed() < Duration::from_millis(500) {
            write_one(&mut front, 0);
        }
        assert!(!mover.is_finished(), "it was served after the move only");
        fs.gate("moves").release();
        assert!(mover.join().expect("no panic"));
    });
    assert_eq!(front.io().drain(), (1, 0));
    for block in 0..20 {
        assert!(front.io().submit(0, Op::Write, block));
        assert_eq!(front.io().drain(), (1, 0));
    }
    assert_eq!(other.stats().pollers.len(), 1);
}

#[test]
fn a_disk_whose_move_is_given_up_goes_on_at_once() {
    let _turn = crate::among_others();
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (server, mut front, other) = held_before_a_move(&fs);
    let _release = fs.release_at_end();
    // In a pause, and between two.
    for limit in [5, 50] {
        let limit = Duration::from_millis(limit);
        assert!(!server.core().move_to(&server.handle(0), &other, limit));
        for block in 0..20 {
            write_one(&mut front, block);
        }
    }
    fs.gate("moves").release();
    assert_eq!(front.io().drain(), (1, 0));
}

/// The descriptors that wake a core for a disk belong to the core: after a move they are others.
#[test]
fn a_disk_that_has_moved_wakes_its_new_core() {
    let _turn = crate::among_others();
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let server = Server::start(
        IdlePolicy::Sleep,
        vec![disk(&fs, "moves", Format::Direct, Op::Read)],
    );
    let _release = fs.release_at_end();
    let other = SidecoreBuilder::new("other").idle(IdlePolicy::Sleep);
    let other = other.spawn(Vec::new()).expect("a thread");
    let mut front = Front::running(&server.path(0), feature::EVENT_IDX, 1, 8);
    for (from, to) in [(server.core(), &other), (&other, server.core())] {
        for block in 0..20 {
            assert!(front.io().submit(0, Op::Read, block));
            assert_eq!(front.io().drain(), (1, 0));
        }
        assert!(from.move_to(&server.handle(0), to, PATIENCE));
        let before = to.stats().core;
        for block in 0..20 {
            assert!(front.io().submit(0, Op::Read, block));
            assert_eq!(front.io().drain(), (1, 0));
        }
        let after = to.stats().core;
        assert!(after.sleeps > before.sleeps);
        assert_eq!(after.arm_failures, before.arm_failures);
    }
    other.stop();
}
