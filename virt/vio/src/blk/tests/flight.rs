//! Requests that take their time: leases, drain, cancellation, reset, sleep.

use std::time::Duration;

use guest_mem::{Iommu, Iova, Perm, PhysMem};

use super::support::*;
use crate::blk::request::{STATUS_IOERR, STATUS_OK, kind};
use crate::blk::{BlkConfig, Transfer};
use crate::fake_driver::FakeDriver;
use crate::{ActivateError, Activity, CancelReason, QueueDevice, Service};

#[test]
fn a_lease_lasts_from_submission_to_just_before_the_used_index() {
    let (disk, control, _file) = slow(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA + 0x800, 0x2000)]);
    guest.settle(&mut dma);
    assert_eq!(
        (control.held(), dma.iommu.leases().len()),
        (1, 1),
        "three pages that follow each other"
    );
    assert!(
        dma.iommu
            .leases()
            .iter()
            .all(|lease| lease.perm == Perm::Write)
    );
    // Unmapping it now must wait for the device; a page beside it must not.
    dma.iommu.unmap(Iova::new(DATA + 0x10_0000), 4096);
    assert_eq!(dma.iommu.leases().stale(), 0);
    dma.iommu.unmap(Iova::new(DATA + 0x1000), 4096);
    assert_eq!(dma.iommu.leases().stale(), 1);
    control.release(1);
    guest.wait_used(&mut dma);
    assert_eq!(
        (dma.iommu.leases().len(), dma.iommu.leases().stale()),
        (0, 0)
    );
    assert_eq!(guest.status(0), STATUS_OK);
}

#[test]
fn bounced_transfers_hold_no_lease_and_meet_the_new_mapping_at_completion() {
    let (disk, control, _file) = slow(Transfer::Bounce);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.settle(&mut dma);
    assert_eq!((control.held(), dma.iommu.leases().len()), (1, 0));
    dma.iommu.unmap(Iova::new(DATA), 4096);
    control.release(1);
    guest.wait_used(&mut dma);
    assert_eq!(guest.status(0), STATUS_IOERR);
    assert_eq!(
        guest.driver.get(DATA, 512),
        [0; 512],
        "nothing reached the unmapped page"
    );
}

#[test]
fn quiesce_waits_for_what_is_in_flight_and_takes_nothing_new() {
    let (disk, control, _file) = slow(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.request(1, kind::IN, 1, &[], &[(DATA + 0x1000, 512)]);
    guest.settle(&mut dma);
    guest.request(2, kind::IN, 2, &[], &[(DATA + 0x2000, 512)]);
    assert_eq!(guest.stop(&mut dma), 2);
    control.release(1);
    drain(&mut guest, &mut dma, 1);
    control.set_open(true);
    drain(&mut guest, &mut dma, 0);
    assert_eq!(
        (dma.iommu.leases().len(), guest.blk.stats().requests),
        (0, 2)
    );
    assert_eq!(
        guest.driver.used_idx(),
        0,
        "no ring is touched after the quiesce"
    );
    // Bus Master back on: the ended ones are published, the third is taken.
    guest.blk.set_service(Service::Full);
    for _ in 0..3 {
        guest.wait_used(&mut dma);
    }
    assert!((0..3).all(|slot| guest.status(slot) == STATUS_OK));
}

/// Stops the device until `want` requests are in flight.
fn drain(guest: &mut Guest, dma: &mut fake_mem::FlatDma, want: u32) {
    let deadline = std::time::Instant::now() + Duration::from_secs(2);
    loop {
        let _ = guest.blk.poll(dma, &mut guest.irq, 0);
        let answer = guest.stop(dma);
        if answer == want {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{answer:?}");
    }
}

#[test]
fn reset_forgets_the_ring_and_the_next_driver_starts_clean() {
    let (disk, control, _file) = slow(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.settle(&mut dma);
    let config = [guest.driver.config()];
    let features = guest.blk.features();
    let again = guest
        .blk
        .activate(features, &config, guest.mem.keep_alive());
    assert_eq!(again, Err(ActivateError::NotQuiesced { in_flight: 1 }));
    control.set_open(true);
    drain(&mut guest, &mut dma, 0);
    guest.reactivate();
    assert_eq!(guest.driver.used_idx(), 0);
    assert_eq!(guest.run(kind::IN, 3, &[], &[(DATA, 512)]).0, STATUS_OK);
}

#[test]
#[should_panic(expected = "has not been quiesced")]
fn reset_with_a_request_in_flight_is_our_bug() {
    let (disk, _control, _file) = slow(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.settle(&mut dma);
    guest.blk.reset();
}

#[test]
fn cancelled_requests_end_with_an_error_and_free_their_pages() {
    let (disk, _control, _file) = slow(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.request(1, kind::OUT, 0, &[(DATA + 0x1000, 512)], &[]);
    guest.settle(&mut dma);
    dma.iommu.unmap(Iova::new(DATA), 0x2000);
    assert_eq!(dma.iommu.leases().stale(), 2);
    guest.blk.cancel(CancelReason::Unmap);
    for _ in 0..2 {
        guest.wait_used(&mut dma);
    }
    assert_eq!([guest.status(0), guest.status(1)], [STATUS_IOERR; 2]);
    assert_eq!(dma.iommu.leases().stale(), 0);
    assert!(!guest.blk.needs_reset());
    assert_eq!(guest.blk.stats().cancelled, 2);
}

#[test]
fn an_overdue_unmap_cancels_the_requests_of_its_pages_only() {
    let (disk, control, _file) = slow(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.request(1, kind::OUT, 1, &[(DATA + 0x1000, 512)], &[]);
    guest.request(2, kind::FLUSH, 0, &[], &[]);
    guest.settle(&mut dma);
    assert_eq!(control.held(), 3);
    dma.iommu.unmap(Iova::new(DATA), 4096);
    guest.blk.cancel(CancelReason::Unmap);
    assert!(
        guest.blk.has_work(&mut dma),
        "whose pages they are is found in a visit"
    );
    guest.wait_used(&mut dma);
    guest.settle(&mut dma);
    assert_eq!(control.held(), 2, "only one was cancelled");
    assert_eq!(dma.iommu.leases().stale(), 0);
    // A later unmap of pages that no request has is not held against them either.
    guest.blk.cancel(CancelReason::Unmap);
    guest.settle(&mut dma);
    assert_eq!((control.held(), guest.blk.stats().cancelled), (2, 1));
    control.set_open(true);
    for _ in 0..2 {
        guest.wait_used(&mut dma);
    }
    assert_eq!(
        [0, 1, 2].map(|slot| guest.status(slot)),
        [STATUS_IOERR, STATUS_OK, STATUS_OK]
    );
}

#[test]
fn an_overdue_unmap_cancels_no_bounced_request() {
    let (disk, control, _file) = slow(Transfer::Bounce);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::OUT, 0, &[(DATA, 512)], &[]);
    guest.settle(&mut dma);
    dma.iommu.unmap(Iova::new(DATA), 4096);
    guest.blk.cancel(CancelReason::Unmap);
    guest.settle(&mut dma);
    assert_eq!((control.held(), guest.blk.stats().cancelled), (1, 0));
    control.release(1);
    guest.wait_used(&mut dma);
    assert_eq!(guest.status(0), STATUS_OK);
}

#[test]
fn request_that_cannot_be_cancelled_keeps_its_lease_and_needs_a_reset() {
    let (disk, control, _file) = slow(Transfer::Direct);
    control.set_uncancellable(true);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.settle(&mut dma);
    dma.iommu.unmap(Iova::new(DATA), 4096);
    guest.blk.cancel(CancelReason::Unmap);
    guest.settle(&mut dma);
    assert!(guest.blk.needs_reset());
    assert_eq!(
        (guest.irq.config, dma.iommu.leases().stale()),
        (1, 1),
        "never a false completion"
    );
    // New requests are not taken, and the reset waits.
    guest.request(1, kind::IN, 1, &[], &[(DATA + 0x1000, 512)]);
    guest.settle(&mut dma);
    assert_eq!(guest.blk.stats().requests, 1);
    assert_eq!(guest.stop(&mut dma), 1);
    // It ends after all: the lease goes, and the device can be reset and used.
    control.set_open(true);
    drain(&mut guest, &mut dma, 0);
    assert_eq!(
        (dma.iommu.leases().stale(), guest.driver.used_idx()),
        (0, 0)
    );
    guest.reactivate();
    assert!(!guest.blk.needs_reset());
    assert_eq!(guest.run(kind::IN, 3, &[], &[(DATA, 512)]).0, STATUS_OK);
}

#[test]
fn a_faulted_used_ring_loses_no_completion() {
    let (disk, control, _file) = slow(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.settle(&mut dma);
    dma.iommu.deny(Iova::new(RINGS), 0x2000, Perm::Write);
    control.release(1);
    let deadline = std::time::Instant::now() + Duration::from_secs(2);
    while guest.blk.stats().ring_faults == 0 {
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
        assert!(std::time::Instant::now() < deadline);
    }
    guest.settle(&mut dma);
    // Recorded once, parked, and the page is free although nothing could be published.
    assert_eq!((dma.iommu.faults().len(), dma.iommu.leases().len()), (1, 0));
    assert!(!guest.blk.has_work(&mut dma));
    dma.iommu.allow_all();
    guest.blk.kick(0);
    assert_eq!(guest.wait_used(&mut dma).1, 513);
}

#[test]
fn queues_are_served_side_by_side() {
    let config = BlkConfig {
        queues: 3,
        queue_size: 64,
        ..Default::default()
    };
    let mut guest = Guest::with(raw_disk(Transfer::Direct).0, config, !0);
    // The driver enables queues 0 and 2 only.
    let mut other = FakeDriver::new(guest.mem.clone(), guest_mem::Gpa::new(0x4_0000), 2, 64);
    guest.blk.reset();
    let queues = [guest.driver.config(), other.config()];
    let features = guest.blk.features();
    guest
        .blk
        .activate(features, &queues, guest.mem.keep_alive())
        .unwrap();
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    let header = guest.header(1, kind::IN, 1);
    other.add(&[(header, 16)], &[(DATA + 512, 512), (header + 48, 1)]);
    guest.wait_used(&mut dma);
    let deadline = std::time::Instant::now() + Duration::from_secs(2);
    while other.used().is_none() {
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
        assert!(std::time::Instant::now() < deadline);
    }
    assert_eq!(guest.driver.get(DATA, 1024), image()[..1024]);
    assert_eq!(guest.irq.queues, [1, 0, 1]);
    // Queue numbers that are wrong.
    let _ = guest.stop(&mut dma);
    for (index, size) in [(3, 64), (0, 64)] {
        let mut bad = other.config();
        (bad.index, bad.size) = (index, size);
        let queues = [guest.driver.config(), bad];
        let refused = guest
            .blk
            .activate(features, &queues, guest.mem.keep_alive());
        assert_eq!(refused, Err(ActivateError::QueueIndex { index }));
    }
}

#[test]
fn the_owner_can_sleep_on_the_descriptors_until_the_disk_is_done() {
    for transfer in [Transfer::Direct, Transfer::Bounce] {
        let (disk, control, _file) = slow(transfer);
        let mut guest = Guest::new(disk);
        let mut dma = guest.dma();
        for round in 0..50 {
            guest.request(0, kind::IN, round, &[], &[(DATA, 512)]);
            guest.settle(&mut dma);
            guest.blk.arm(&mut dma);
            assert!(!guest.blk.has_work(&mut dma), "held by the gate");
            let waker = control.clone();
            let thread = std::thread::spawn(move || waker.release(1));
            // Sleep, wake, poll, as often as it takes; no time-out may pass.
            let used = loop {
                let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
                if let Some(used) = guest.driver.used() {
                    break used;
                }
                guest.blk.arm(&mut dma);
                if !guest.blk.has_work(&mut dma) {
                    assert!(
                        readable_within(&guest.blk.wake_fds(), 3000),
                        "a wake-up was lost"
                    );
                }
                guest.blk.disarm(&mut dma);
            };
            assert_eq!(used.1, 513);
            thread.join().unwrap();
        }
        assert_eq!(guest.blk.poll(&mut dma, &mut guest.irq, 0), Activity::Idle);
    }
}

#[test]
fn a_driver_that_suppresses_interrupts_gets_none_and_one_when_it_asks() {
    let mut guest = Guest::new(mem_disk());
    let mut dma = guest.dma();
    guest.driver.put_used_event(9);
    for round in 0..20 {
        guest.request(0, kind::IN, round, &[], &[(DATA, 512)]);
        guest.wait_used(&mut dma);
        assert_eq!(guest.irq.total(), u64::from(round >= 9), "round {round}");
    }
    let stats = guest.blk.stats();
    assert_eq!((stats.publishes, stats.interrupts), (20, 1));
}

#[test]
fn the_ring_itself_wakes_a_sleeper() {
    let mut guest = Guest::new(raw_disk(Transfer::Direct).0);
    let mut dma = guest.dma();
    let mut sleeps = 0;
    for _ in 0..200 {
        // The kernel never does this one inline.
        guest.request(0, kind::FLUSH, 0, &[], &[]);
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
        while guest.driver.used().is_none() {
            guest.blk.arm(&mut dma);
            if !guest.blk.has_work(&mut dma) {
                sleeps += 1;
                // The time is looked at too: at its end poll(2) asks the descriptors once more, and
                // would find the completion that woke no thread.
                let start = std::time::Instant::now();
                let woken = readable_within(&guest.blk.wake_fds(), 10_000);
                assert!(
                    woken && start.elapsed() < Duration::from_secs(9),
                    "a wake-up was lost"
                );
            }
            guest.blk.disarm(&mut dma);
            let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
        }
        assert_eq!(guest.status(0), STATUS_OK);
    }
    assert!(sleeps > 0, "every flush was faster than one look");
    // Nothing left: the descriptors are quiet once armed, and stay so while polling.
    guest.blk.arm(&mut dma);
    assert!(!guest.blk.has_work(&mut dma) && !readable_within(&guest.blk.wake_fds(), 0));
    guest.blk.disarm(&mut dma);
    guest.request(0, kind::FLUSH, 0, &[], &[]);
    guest.wait_used(&mut dma);
    assert!(!readable_within(&guest.blk.wake_fds(), 0));
}

#[test]
fn a_device_is_saved_between_requests_only() {
    let (disk, control, _file) = slow(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    assert_eq!(guest.blk.save(), None, "it runs");
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.settle(&mut dma);
    assert_eq!(guest.stop(&mut dma), 1);
    assert_eq!(guest.blk.save(), None, "a request is in flight");
    control.set_open(true);
    drain(&mut guest, &mut dma, 0);
    assert_eq!(guest.blk.save(), None, "the guest has not been told of it");
    guest.blk.set_service(Service::Full);
    guest.wait_used(&mut dma);
    assert_eq!(guest.stop(&mut dma), 0);
    let saved = guest.blk.save().expect("quiesced and published");
    let config = guest.driver.config();
    assert_eq!(
        (saved.device_type, saved.features),
        (2, guest.blk.features())
    );
    assert_eq!(saved.queues.len(), 1);
    let queue = &saved.queues[0];
    assert_eq!((queue.next_avail, queue.next_used, queue.size), (1, 1, 64));
    assert_eq!(
        [queue.desc, queue.avail, queue.used],
        [config.desc, config.avail, config.used].map(Iova::raw)
    );
    let text = serde_json::to_string(&saved).unwrap();
    assert_eq!(
        serde_json::from_str::<crate::SavedDevice<crate::blk::SavedBlk>>(&text).unwrap(),
        saved
    );
}
