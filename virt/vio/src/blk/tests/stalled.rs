//! A host that lacks something for a while: descriptors, memory.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use fake_mem::FlatDma;
use guest_mem::{Iommu, Iova};

use super::support::*;
use crate::blk::request::{STATUS_IOERR, STATUS_OK, kind};
use crate::blk::{BlockIo, Completion, Op, Outcome, Piece, Transfer};
use crate::ring::RETRY_NS;
use crate::{Activity, CancelReason, QueueDevice, Service, pass_down};

/// Whether a host lacks resources, and the number of times that it was asked for them.
#[derive(Default)]
struct Host {
    lacks: AtomicBool,
    asked: AtomicU32,
}

impl Host {
    fn asked(&self) -> u32 {
        self.asked.load(Ordering::Relaxed)
    }

    fn set_lacking(&self, lacks: bool) {
        self.lacks.store(lacks, Ordering::Relaxed);
    }
}

/// Begins nothing while the host lacks descriptors.
struct Lacking {
    below: Box<dyn BlockIo>,
    host: Arc<Host>,
    early: Vec<Completion>,
}

impl BlockIo for Lacking {
    pass_down!();

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        self.host.asked.fetch_add(1, Ordering::Relaxed);
        if self.host.lacks.load(Ordering::Relaxed) {
            let outcome = Outcome::NotBegun(libc::EMFILE);
            return self.early.push(Completion { slot, outcome });
        }
        self.below.submit(slot, op, pieces);
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.early);
        self.below.poll(done);
    }

    fn has_completions(&mut self) -> bool {
        !self.early.is_empty() || self.below.has_completions()
    }

    fn cancel(&mut self, slot: u32) {
        self.below.cancel(slot);
    }

    fn arm(&mut self) {
        self.below.arm();
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        self.below.wake_fds(fds);
    }
}

/// Asks for a sector into a page of its own.
fn read(guest: &mut Guest, slot: u64) {
    guest.request(slot, kind::IN, slot, &[], &[(DATA + 4096 * slot, 512)]);
}

/// A guest of a host that lacks something, and three requests of it that wait for that since the
/// time 0.
fn waiting(transfer: Transfer) -> (Guest, FlatDma, Arc<Host>) {
    let host = Arc::new(Host::default());
    host.set_lacking(true);
    let (below, _) = raw_disk(transfer);
    let mut guest = Guest::new(Box::new(Lacking {
        below,
        host: Arc::clone(&host),
        early: Vec::new(),
    }));
    let mut dma = guest.dma();
    for slot in 0..3 {
        read(&mut guest, slot);
    }
    guest.settle(&mut dma);
    assert_eq!((guest.driver.used(), guest.blk.in_flight()), (None, 3));
    assert_eq!(guest.blk.opens_at_ns(), Some(RETRY_NS));
    (guest, dma, host)
}

#[test]
fn requests_that_a_host_cannot_begin_wait_and_end_well_once_it_can() {
    for transfer in [Transfer::Direct, Transfer::Bounce] {
        let (mut guest, mut dma, host) = waiting(transfer);
        assert_eq!(host.asked(), 3);
        guest.blk.arm(&mut dma);
        assert!(!guest.blk.has_work(&mut dma), "it sleeps");
        // What comes meanwhile asks for nothing.
        read(&mut guest, 3);
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, RETRY_NS - 1);
        assert_eq!((guest.blk.in_flight(), host.asked()), (4, 3));
        // One of them is tried, without success.
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, RETRY_NS);
        assert_eq!((guest.blk.in_flight(), host.asked()), (4, 4));
        assert_eq!(guest.blk.opens_at_ns(), Some(2 * RETRY_NS));
        host.set_lacking(false);
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 2 * RETRY_NS - 1);
        assert_eq!(host.asked(), 4, "too early");
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 2 * RETRY_NS);
        assert_eq!(host.asked(), 8);
        assert_eq!(guest.blk.opens_at_ns(), None);
        for _ in 0..4 {
            guest.wait_used(&mut dma);
        }
        assert_eq!([0, 1, 2, 3].map(|slot| guest.status(slot)), [STATUS_OK; 4]);
        for slot in 0..4 {
            let at = slot as usize * 512;
            let bytes = guest.driver.get(DATA + 4096 * slot, 512);
            assert_eq!(bytes, image()[at..at + 512]);
        }
        assert_eq!(dma.iommu.leases().len(), 0);
        assert_eq!(guest.blk.stats().errors, 0);
    }
}

#[test]
fn a_stopped_device_goes_on_with_what_waits() {
    let (mut guest, mut dma, host) = waiting(Transfer::Direct);
    assert_eq!(guest.stop(&mut dma), 3);
    assert_eq!(guest.blk.opens_at_ns(), Some(RETRY_NS));
    host.set_lacking(false);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while guest.blk.in_flight() != 0 {
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, RETRY_NS);
        assert!(std::time::Instant::now() < deadline);
    }
    guest.blk.set_service(Service::Full);
    guest.settle(&mut dma);
    assert_eq!([0, 1, 2].map(|slot| guest.status(slot)), [STATUS_OK; 3]);
}

#[test]
fn request_that_waits_for_the_host_ends_at_once_when_cancelled() {
    let (mut guest, mut dma, host) = waiting(Transfer::Direct);
    guest.blk.arm(&mut dma);
    assert_eq!(guest.blk.cancel(CancelReason::Reset), 3);
    assert!(guest.blk.has_work(&mut dma), "nobody would hear of it");
    while guest.blk.poll(&mut dma, &mut guest.irq, 1) == Activity::Busy {}
    assert_eq!((guest.blk.in_flight(), dma.iommu.leases().len()), (0, 0));
    assert_eq!((guest.blk.opens_at_ns(), host.asked()), (None, 3));
    guest.blk.reset();
}

#[test]
fn an_unmap_that_has_waited_too_long_fails_what_holds_its_pages_and_no_other() {
    let (mut guest, mut dma, _host) = waiting(Transfer::Direct);
    dma.iommu.unmap(Iova::new(DATA + 4096), 4096);
    guest.blk.cancel(CancelReason::Unmap);
    while guest.blk.poll(&mut dma, &mut guest.irq, 1) == Activity::Busy {}
    assert!(guest.driver.used().is_some());
    assert_eq!(guest.driver.used(), None);
    assert_eq!(guest.status(1), STATUS_IOERR);
    assert_eq!(guest.blk.in_flight(), 2);
}
