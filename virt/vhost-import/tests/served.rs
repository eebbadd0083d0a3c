//! Requests of a driver, served by a real daemon's parts (`vhost-export` on a sidecore) in the same
//! process: data both ways, and a daemon that goes away and comes back with requests in flight.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use fake_driver::{FakeDriver, Rings};
use guest_mem::{Gpa, GuestRam, PhysMem};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use sidecore::{IdlePolicy, Sidecore, SidecoreBuilder};
use vhost_export::{Export, ExportConfig};
use vhost_import::{Import, ImportConfig};
use vio::blk::request::kind;
use vio::blk::{Blk, BlkClass, BlkConfig, RawDisk, RawDiskOptions};
use vio::{QueueConfig, RemoteDevice};

const RAM: u64 = 4 << 20;
const RINGS: u64 = 0x1_0000;
const HEADERS: u64 = 0x2_0000;
const DATA: u64 = 0x10_0000;
const SIZE: u16 = 64;
const SECTORS: u64 = 2048;
const PATIENCE: Duration = Duration::from_secs(20);

fn daemon(socket: &Path, disk: &File) -> Sidecore<Export<BlkClass>> {
    let _ = std::fs::remove_file(socket);
    let io = RawDisk::from_file(disk.try_clone().unwrap(), RawDiskOptions::default()).unwrap();
    let blk = Blk::new(BlkConfig::default(), Box::new(io)).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    let export = Export::new(ExportConfig::new("test"), blk, listener).unwrap();
    SidecoreBuilder::new("daemon")
        .idle(IdlePolicy::Sleep)
        .spawn(vec![export])
        .unwrap()
}

struct Guest {
    import: Import,
    driver: FakeDriver<GuestRam>,
    ram: GuestRam,
    kick: OwnedFd,
    call: OwnedFd,
    /// Used elements taken.
    used: u16,
}

impl Guest {
    fn new(socket: &Path) -> Self {
        let ram = GuestRam::new(&[(Gpa::new(0), RAM)]).unwrap();
        let fd = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let (kick, call) = (fd(), fd());
        let clone = |fd: &OwnedFd| vec![fd.try_clone().unwrap()];
        let mut import = Import::connect(
            ImportConfig::new("test", socket),
            ram.clone(),
            clone(&kick),
            clone(&call),
        )
        .unwrap();
        let driver = FakeDriver::new(ram.clone(), Gpa::new(RINGS), 0, SIZE);
        let features = import.features();
        let rings: Rings = driver.config();
        let queue = QueueConfig {
            index: rings.index,
            size: rings.size,
            desc: rings.desc,
            avail: rings.avail,
            used: rings.used,
        };
        import.start(features, &[queue]).unwrap();
        Self {
            import,
            driver,
            ram,
            kick,
            call,
            used: 0,
        }
    }

    /// Makes request `slot` available, and kicks.
    fn submit(&mut self, slot: u64, op: u32, sector: u64) {
        let at = HEADERS + 64 * slot;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&op.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.ram.write(Gpa::new(at), &header).unwrap();
        self.ram.write(Gpa::new(at + 48), &[0xff]).unwrap();
        let (header, data, status) = ((at, 16), (DATA + 4096 * slot, 4096), (at + 48, 1));
        match op {
            kind::IN => self.driver.add(&[header], &[data, status]),
            _ => self.driver.add(&[header, data], &[status]),
        };
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Waits for calls until that many requests have come back, all of them well.
    fn reap(&mut self, slots: u64) {
        let deadline = Instant::now() + PATIENCE;
        let mut back = 0;
        loop {
            while self.driver.used().is_some() {
                back += 1;
                self.used = self.used.wrapping_add(1);
            }
            if back == slots {
                break;
            }
            assert!(Instant::now() < deadline, "{back} of {slots} came back");
            // To be called for the next one, unless it has come meanwhile.
            self.driver.put_used_event(self.used);
            fence(Ordering::SeqCst);
            if self.driver.used_idx() != self.used {
                continue;
            }
            let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
            let second = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            let called = poll(&mut fds, Some(&second)).unwrap();
            assert_eq!(called, 1, "no call within a second");
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        for slot in 0..slots {
            let mut status = [0xff];
            let at = Gpa::new(HEADERS + 64 * slot + 48);
            self.ram.read(at, &mut status).unwrap();
            assert_eq!(status, [0], "status of request {slot}");
        }
    }

    fn data(&self, slot: u64) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        self.ram
            .read(Gpa::new(DATA + 4096 * slot), &mut bytes)
            .unwrap();
        bytes
    }

    fn set_data(&self, slot: u64, round: u64) {
        let at = Gpa::new(DATA + 4096 * slot);
        self.ram.write(at, &pattern(slot, round)).unwrap();
    }
}

fn pattern(slot: u64, round: u64) -> Vec<u8> {
    (0..4096_u64)
        .map(|at| (at * 7 + slot * 31 + round * 101) as u8)
        .collect()
}

#[test]
fn data_go_both_ways_and_outlive_their_daemon() {
    const SLOTS: u64 = 16;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(SECTORS * 512).unwrap();
    let mut core = daemon(&socket, &disk);
    let mut guest = Guest::new(&socket);
    for round in 0..4 {
        for slot in 0..SLOTS {
            guest.set_data(slot, round);
            guest.submit(slot, kind::OUT, slot * 8);
        }
        if round % 2 == 1 {
            // Perhaps with some in flight: they come back from the next one.
            drop(core.stop());
            core = daemon(&socket, &disk);
        }
        guest.reap(SLOTS);
        for slot in 0..SLOTS {
            guest.set_data(slot, u64::MAX / 200);
            guest.submit(slot, kind::IN, slot * 8);
        }
        guest.reap(SLOTS);
        for slot in 0..SLOTS {
            assert_eq!(guest.data(slot), pattern(slot, round), "round {round}");
        }
    }
    let deadline = Instant::now() + PATIENCE;
    while !guest.import.stop() {
        assert!(Instant::now() < deadline, "the ring does not stop");
    }
    assert!(!guest.import.needs_reset());
    drop(core.stop());
}
