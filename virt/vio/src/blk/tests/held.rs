//! Storage that is really slow: operations that the kernel has begun and that do not end
//! (`held-fs`).

use std::time::{Duration, Instant};

use fake_mem::FlatDma;
use guest_mem::{Gpa, Iommu, Iova};
use held_fs::{Gate, HeldFs, Kind};

use super::support::*;
use crate::blk::request::{STATUS_OK, kind};
use crate::blk::{RawDisk, RawDiskOptions, Transfer};
use crate::{CancelReason, QueueDevice, Service};

/// Bytes of a request; the sector it begins at.
const LEN: u32 = 4096;
const SECTOR: u64 = 64;

/// Whether a disk is opened with O_DIRECT, and its method of data transfer.
const WAYS: [(bool, Transfer); 3] = [
    (false, Transfer::Direct),
    (true, Transfer::Direct),
    (false, Transfer::Bounce),
];
/// A request of each kind, and how the file system knows it.
const KINDS: [(u32, Kind); 3] = [
    (kind::IN, Kind::Read),
    (kind::OUT, Kind::Write),
    (kind::FLUSH, Kind::Sync),
];

/// Guest with a held request, and the state that its outcome is checked by.
struct Scene {
    guest: Guest,
    dma: FlatDma,
    gate: Gate,
    kind: u32,
    /// The page cache lies between the disk and its storage.
    is_cached: bool,
    transfer: Transfer,
    what: String,
}

impl Scene {
    /// A request of this kind, held in the kernel.
    fn hold(
        fs: &HeldFs,
        (o_direct, transfer): (bool, Transfer),
        (kind, held): (u32, Kind),
        name: &str,
    ) -> Self {
        let name = format!("{name}-{o_direct}-{transfer:?}-{held:?}");
        let gate = fs.create(&name, 0);
        std::io::Write::write_all(&mut gate.contents(), &image()).unwrap();
        let options = RawDiskOptions {
            o_direct,
            transfer,
            depth: 32,
            ..Default::default()
        };
        let disk = RawDisk::open(&fs.path(&name), options).unwrap();
        let guest = Guest::new(Box::new(disk));
        let dma = guest.dma();
        let mut scene = Self {
            guest,
            dma,
            gate,
            kind,
            is_cached: !o_direct,
            transfer,
            what: name,
        };
        scene.gate.hold(&[held]);
        scene.request();
        let deadline = Instant::now() + Duration::from_secs(10);
        while scene.gate.held() == 0 {
            scene.guest.settle(&mut scene.dma);
            assert!(
                Instant::now() < deadline,
                "{}: not held: {:?}, counts {:?}",
                scene.what,
                scene.guest.blk.stats(),
                Kind::ALL.map(|kind| scene.gate.count(kind))
            );
        }
        scene
    }

    /// Makes the request available.
    fn request(&mut self) {
        let guest = &mut self.guest;
        match self.kind {
            kind::IN => guest.request(0, kind::IN, SECTOR, &[], &[(DATA, LEN)]),
            kind::OUT => {
                guest.driver.put(DATA, &[0x5a; LEN as usize]);
                guest.request(0, kind::OUT, SECTOR, &[(DATA, LEN)], &[])
            }
            _ => guest.request(0, kind::FLUSH, 0, &[], &[]),
        };
    }

    /// The request has been published as a success, and is one.
    fn check_success(&mut self) {
        self.guest.wait_used(&mut self.dma);
        assert_eq!(self.guest.status(0), STATUS_OK, "{}", self.what);
        self.check_data();
        assert!(!self.guest.blk.needs_reset(), "{}", self.what);
    }

    fn check_data(&self) {
        let at = SECTOR as usize * 512;
        let mut stored = vec![0; LEN as usize];
        std::os::unix::fs::FileExt::read_exact_at(self.gate.contents(), &mut stored, at as u64)
            .unwrap();
        match self.kind {
            kind::IN => assert!(
                self.guest.driver.get(DATA, LEN as usize) == image()[at..][..LEN as usize],
                "{}: other data were read",
                self.what
            ),
            kind::OUT => assert!(stored == [0x5a; LEN as usize], "{}: not written", self.what),
            _ => {}
        }
    }

    /// The disk serves the next request of every kind.
    fn check_alive(&mut self) {
        assert!(!self.guest.blk.needs_reset(), "{}", self.what);
        self.guest.driver.put(DATA, &[0xa5; LEN as usize]);
        let write = self.guest.run(kind::OUT, 8, &[(DATA, LEN)], &[]);
        let flush = self.guest.run(kind::FLUSH, 0, &[], &[]);
        let read = self.guest.run(kind::IN, 8, &[], &[(DATA + 0x2000, LEN)]);
        let statuses = [write.0, flush.0, read.0];
        assert_eq!(statuses, [STATUS_OK; 3], "{}", self.what);
        let bytes = self.guest.driver.get(DATA + 0x2000, LEN as usize);
        assert!(bytes == [0xa5; LEN as usize], "{}", self.what);
    }

    /// Asks the device to be quiet for `time`, and it says that it is not.
    fn stays_in_flight(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            assert_eq!(self.guest.stop(&mut self.dma), 1, "{}", self.what);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Polls until the device is quiet.
    fn drain(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.guest.stop(&mut self.dma) != 0 {
            assert!(Instant::now() < deadline, "{}: it never ends", self.what);
        }
    }
}

/// Does `check` with every way of opening a disk and every kind of request held, side by side.
///
/// Each scene has a thread of its own, and so io_uring's workers of its own: those of one thread's
/// rings take buffered writes of different files one after the other if the files happen to share a
/// place in a table of 64, and a scene whose write is held would now and then stop another's.
fn every_scene(name: &str, check: impl Fn(Scene) + Sync) {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (fs, check) = (&fs, &check);
    std::thread::scope(|scope| {
        let cells = WAYS.iter().flat_map(|way| KINDS.map(|kind| (*way, kind)));
        let scene = |(way, kind)| {
            scope.spawn(move || {
                // For a panic only, after which the kernel would wait for ever: dropped when all
                // have ended.
                let release = fs.release_at_end();
                check(Scene::hold(fs, way, kind, name));
                release
            })
        };
        let scenes: Vec<_> = cells.map(scene).collect();
        let ends: Vec<_> = scenes.into_iter().map(|scene| scene.join()).collect();
        assert!(ends.iter().all(Result::is_ok), "see above");
    });
}

#[test]
fn a_request_that_outlasts_a_stop_is_a_success_when_the_device_goes_on() {
    every_scene("resume", |mut scene| {
        scene.stays_in_flight(Duration::from_millis(1500));
        scene.gate.release();
        scene.drain();
        assert_eq!(scene.guest.driver.used_idx(), 0, "{}: stopped", scene.what);
        scene.guest.blk.set_service(Service::Full);
        scene.check_success();
        scene.check_alive();
    });
}

#[test]
fn a_reset_ends_after_the_last_access_to_memory_and_leaves_the_disk_alive() {
    every_scene("reset", |mut scene| {
        scene.stays_in_flight(Duration::from_millis(300));
        // The driver loses patience, and nothing comes of it.
        scene.guest.blk.cancel(CancelReason::Reset);
        scene.stays_in_flight(Duration::from_millis(300));
        scene.gate.release();
        scene.drain();
        let data = scene.guest.driver.get(DATA, LEN as usize);
        // With the reset's answer, everything that could be written has been; bounced data are
        // discarded.
        if scene.kind != kind::IN || scene.transfer == Transfer::Direct {
            scene.check_data();
        }
        scene.guest.reactivate();
        std::thread::sleep(Duration::from_millis(20));
        let later = scene.guest.driver.get(DATA, LEN as usize);
        assert!(data == later, "{}: written to after the reset", scene.what);
        scene.check_alive();
    });
}

#[test]
fn the_memory_of_a_dropped_disk_stays_while_the_kernel_may_write_it() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let scene = Scene::hold(&fs, WAYS[1], KINDS[0], "drop");
    let Scene { guest, gate, .. } = scene;
    let (mem, blk) = (guest.mem.clone(), guest.blk);
    drop(blk);
    // The page is written after the disk has gone: it is still the guest's.
    assert_eq!(mem.get::<1>(Gpa::new(DATA)), [0]);
    gate.release();
    let deadline = Instant::now() + Duration::from_secs(10);
    while mem.get::<1>(Gpa::new(DATA + 1)) == [0] {
        assert!(Instant::now() < deadline, "the read never ends");
    }
}

#[test]
fn a_direct_request_past_the_drain_limit_needs_a_reset_while_its_page_may_be_written() {
    every_scene("overdue", |mut scene| {
        let what = scene.what.clone();
        scene.dma.iommu.unmap(Iova::new(DATA), 4096);
        let stale = scene.dma.iommu.leases().stale();
        scene.guest.blk.cancel(CancelReason::Unmap);
        if stale == 0 {
            // A flush, or data that are copied later: no unmap waits for it.
            scene.guest.settle(&mut scene.dma);
            assert_eq!(scene.guest.blk.in_flight(), 1, "{what}");
            assert!(!scene.guest.blk.needs_reset(), "{what}");
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while stale != 0 && !scene.guest.blk.needs_reset() && scene.guest.blk.in_flight() != 0 {
            let _ = scene
                .guest
                .blk
                .poll(&mut scene.dma, &mut scene.guest.irq, 0);
            assert!(
                Instant::now() < deadline,
                "{what}: nobody says that it cannot be cancelled"
            );
        }
        if scene.guest.blk.in_flight() == 0 {
            // A read into the page cache waits for read-ahead before a thread of the kernel takes
            // it: until then it can be cancelled, and its page is out of reach.
            assert!(scene.kind == kind::IN && scene.is_cached, "{what}");
            assert_eq!(scene.dma.iommu.leases().len(), 0, "{what}");
        } else {
            assert_eq!(
                scene.dma.iommu.leases().stale(),
                stale,
                "{what}: it may still be written"
            );
        }
        scene.gate.release();
        scene.drain();
        assert_eq!(scene.dma.iommu.leases().stale(), 0, "{what}");
        scene.guest.reactivate();
        scene.check_alive();
    });
}

#[test]
fn a_request_that_has_succeeded_when_it_is_cancelled_is_a_success() {
    every_scene("late", |mut scene| {
        scene.gate.release();
        while !scene.guest.blk.has_work(&mut scene.dma) {
            std::thread::yield_now();
        }
        // It has ended, and the device does not know yet.
        if scene.transfer == Transfer::Direct {
            scene.dma.iommu.unmap(Iova::new(DATA), 4096);
        }
        scene.guest.blk.cancel(CancelReason::Unmap);
        scene.check_success();
        scene.check_alive();
    });
}
