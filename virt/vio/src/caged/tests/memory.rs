//! Memory that is unmapped while the worker is at work, and memory that is absent.

use fake_mem::PendingDma;
use guest_mem::{Iommu, Iova, Perm};

use super::*;
use crate::blk::request::{STATUS_IOERR, STATUS_OK, kind};
use crate::blk::tests::support::DATA;
use crate::{Activity, PollBudget, QueueDevice, Service};

#[test]
fn buffer_unmapped_meanwhile_is_refused_and_unchanged() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    let mut dma = caged.guest.dma();
    caged.guest.driver.put(DATA, &[0xee; 8192]);
    let to = [(DATA, 512), (DATA + 4096, 512)];
    caged.guest.request(0, kind::IN, 0, &[], &to);
    let _ = caged.guest.blk.poll(&mut dma, &mut caged.guest.irq, 0);
    assert_eq!(caged.guest.blk.in_flight(), 1);
    // Nothing is held: the unmap is complete at once.
    assert_eq!(dma.iommu.leases().len(), 0);
    dma.iommu.unmap(Iova::new(DATA + 4096), 4096);
    assert_eq!(caged.wait_used(&mut dma).1, 1);
    assert_eq!(caged.guest.status(0), STATUS_IOERR);
    assert_eq!(caged.guest.driver.get(DATA + 4096, 512), [0xee; 512]);
    assert_eq!(dma.iommu.faults(), [(Iova::new(DATA + 4096), Perm::Write)]);
}

#[test]
fn memory_the_device_may_not_read_never_reaches_the_worker() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    let mut dma = caged.guest.dma();
    dma.iommu.deny(Iova::new(DATA), 4096, Perm::Read);
    caged.guest.request(0, kind::OUT, 0, &[(DATA, 512)], &[]);
    let _ = caged.guest.blk.poll(&mut dma, &mut caged.guest.irq, 0);
    assert_eq!(caged.guest.blk.in_flight(), 0);
    assert_eq!(caged.wait_used(&mut dma).1, 1);
    assert_eq!(caged.guest.status(0), STATUS_IOERR);
}

#[test]
fn a_status_that_cannot_be_written_ends_the_device() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    let mut dma = caged.guest.dma();
    let header = caged.guest.header(0, kind::FLUSH, 0);
    caged.guest.driver.add(&[(header, 16)], &[(DATA, 1)]);
    let _ = caged.guest.blk.poll(&mut dma, &mut caged.guest.irq, 0);
    dma.iommu.unmap(Iova::new(DATA), 4096);
    for _ in 0..4 {
        caged.served.as_mut().expect("a worker").step();
        let _ = caged.guest.blk.poll(&mut dma, &mut caged.guest.irq, 0);
    }
    assert!(caged.guest.blk.needs_reset());
}

/// A write and a read of three windows each, of which access `k` waits; whether there were fewer.
fn run_with_a_wait_at(k: u64) -> bool {
    let mut caged = CagedGuest::new(small(), mem_disk());
    let mut dma = PendingDma::kth(caged.guest.dma(), k);
    let (len, to) = (10_240u32, DATA + 0x8000);
    caged.guest.driver.put(DATA, &vec![k as u8; len as usize]);
    caged.guest.request(0, kind::OUT, 2, &[(DATA, len)], &[]);
    caged.guest.request(1, kind::IN, 40, &[], &[(to, len)]);
    let mut used = 0;
    for _ in 0..100 {
        let _ = caged.guest.blk.poll(&mut dma, &mut caged.guest.irq, 0);
        caged.served.as_mut().expect("a worker").step();
        for ticket in dma.take_tickets() {
            caged.guest.blk.ticket_done(ticket);
        }
        while caged.guest.driver.used().is_some() {
            used += 1;
        }
    }
    assert_eq!(used, 2, "access {k}");
    let statuses = [caged.guest.status(0), caged.guest.status(1)];
    assert_eq!(statuses, [STATUS_OK; 2]);
    let read = caged.guest.driver.get(to, len as usize);
    assert_eq!(read, image()[40 * 512..][..len as usize]);
    caged.run(kind::IN, 2, &[], &[(to, len)]);
    let read = caged.guest.driver.get(to, len as usize);
    assert_eq!(read, vec![k as u8; len as usize]);
    dma.accesses() <= k
}

#[test]
fn every_access_may_wait_and_no_byte_is_lost() {
    let accesses = (0..1000).position(run_with_a_wait_at);
    // Beside those of the rings: two headers, three windows each way, two statuses.
    assert!(accesses.expect("they end") > 10, "{accesses:?}");
}

#[test]
fn a_stopped_device_shows_nothing_until_it_is_served_again() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    let mut dma = caged.guest.dma();
    caged.guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    let _ = caged.guest.blk.poll(&mut dma, &mut caged.guest.irq, 0);
    caged.guest.blk.set_service(Service::Stopped);
    // The worker has nothing of the guest's memory: a pause waits for nothing.
    assert!(!caged.guest.blk.touches_memory());
    caged.served.as_mut().expect("a worker").step();
    let visit = &mut PollBudget::alone(0);
    let _ = caged.guest.blk.visit(&mut dma, &mut caged.guest.irq, visit);
    assert_eq!(caged.guest.blk.in_flight(), 0);
    assert_eq!(caged.guest.status(0), 0xff);
    assert!(caged.guest.blk.save().is_none(), "one is not shown");
    caged.guest.blk.set_service(Service::Full);
    assert_eq!(caged.wait_used(&mut dma).1, 513);
    caged.guest.blk.set_service(Service::Stopped);
    assert!(caged.guest.blk.save().is_some());
    let idle = caged.guest.blk.poll(&mut dma, &mut caged.guest.irq, 0);
    assert_eq!(idle, Activity::Idle);
}
