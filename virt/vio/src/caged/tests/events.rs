//! Workers that die, that are started again, that do nothing, and that lie.

use super::*;
use crate::blk::request::{STATUS_OK, kind};
use crate::blk::tests::support::DATA;
use crate::ring::Violation;
use crate::{CancelReason, QueueDevice, Service};

impl CagedGuest {
    /// The worker has died.
    fn die(&mut self) {
        self.served = None;
        self.control.tell(WorkerEvent::Ended);
    }

    /// Another one begins, over the same contents.
    fn revive(&mut self, io: Box<dyn BlockIo>) {
        let area = Area::create(self.shape).expect("a memory file");
        self.served = Some(Served::of(&area, &self.config, io));
        self.control.tell(WorkerEvent::Started(area));
    }

    fn poll(&mut self) {
        let mut dma = self.guest.dma();
        let _ = self.guest.blk.poll(&mut dma, &mut self.guest.irq, 0);
    }

    fn step(&mut self) {
        self.served.as_mut().expect("a worker").step();
    }
}

#[test]
fn next_worker_begins_requests_of_a_dead_one_again() {
    // It dies before it answers, after it has answered, and between two windows.
    for steps in 0..4 {
        let (len, to) = (10_240u32, DATA + 0x8000);
        let mut caged = CagedGuest::new(small(), mem_disk());
        caged.guest.driver.put(DATA, &[9; 10_240]);
        caged.guest.request(0, kind::OUT, 4, &[(DATA, len)], &[]);
        caged.guest.request(1, kind::IN, 100, &[], &[(to, len)]);
        for _ in 0..steps {
            caged.poll();
            caged.step();
        }
        caged.die();
        caged.poll();
        assert_eq!(caged.guest.blk.in_flight(), 0, "nothing is in flight");
        caged.guest.request(2, kind::FLUSH, 0, &[], &[]);
        caged.poll();
        assert!(!caged.guest.blk.needs_reset());
        caged.revive(mem_disk());
        let mut shown = 0;
        for _ in 0..100 {
            caged.poll();
            caged.step();
            while caged.guest.driver.used().is_some() {
                shown += 1;
            }
        }
        assert_eq!(shown, 3, "after {steps} steps");
        for slot in 0..3 {
            assert_eq!(caged.guest.status(slot), STATUS_OK);
        }
        let read = caged.run(kind::IN, 4, &[], &[(DATA, len)]);
        assert_eq!(read, (STATUS_OK, len + 1));
        assert_eq!(caged.guest.driver.get(DATA, 10_240), [9; 10_240]);
        let read = caged.guest.driver.get(to, 10_240);
        assert_eq!(read, image()[51_200..][..10_240]);
    }
}

#[test]
fn a_worker_that_is_gone_fails_the_device_of_each_driver() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    caged.guest.request(0, kind::FLUSH, 0, &[], &[]);
    caged.poll();
    caged.die();
    caged.control.tell(WorkerEvent::Gone);
    caged.poll();
    assert_eq!(caged.guest.blk.violation(), Some(Violation::Worker));
    assert_eq!(caged.guest.irq.config, 1);
    caged.guest.reactivate();
    caged.poll();
    assert_eq!(caged.guest.blk.violation(), Some(Violation::Worker));
}

#[test]
fn a_worker_that_lies_is_ended_and_its_device_with_it() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    caged.guest.driver.put(DATA, &[0xee; 1024]);
    caged.guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    caged.poll();
    let area = &mut caged.served.as_mut().expect("a worker").area;
    let slot = area.next_submission().expect("good").expect("one").slot;
    // More than the window has room for.
    area.answer(slot, worker_area::Verdict::Over, 513);
    area.publish();
    caged.poll();
    assert_eq!(caged.guest.blk.violation(), Some(Violation::Worker));
    assert_eq!(caged.control.facts().ends, [true]);
    assert_eq!(caged.guest.driver.get(DATA, 1024), [0xee; 1024]);
    // The kernel may be at work for it until it has ended.
    assert_eq!(caged.guest.blk.in_flight(), 1);
    caged.die();
    caged.poll();
    assert_eq!(caged.guest.blk.in_flight(), 0);
}

#[test]
fn a_reset_that_has_waited_too_long_ends_the_worker() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    caged.guest.request(0, kind::FLUSH, 0, &[], &[]);
    caged.poll();
    // It is stopped: an unmap waits for nothing, a reset for the request.
    assert_eq!(caged.guest.blk.cancel(CancelReason::Unmap), 0);
    caged.guest.blk.set_service(Service::Stopped);
    caged.poll();
    assert_eq!(caged.guest.blk.in_flight(), 1);
    assert_eq!(caged.guest.blk.cancel(CancelReason::Reset), 1);
    assert_eq!(caged.control.facts().ends, [false]);
    caged.poll();
    assert_eq!(caged.guest.blk.in_flight(), 1, "it has not ended");
    caged.die();
    caged.poll();
    assert_eq!(caged.guest.blk.in_flight(), 0);
    caged.guest.reactivate();
    caged.revive(mem_disk());
    let read = caged.run(kind::IN, 0, &[], &[(DATA, 512)]);
    assert_eq!(read, (STATUS_OK, 513));
}

#[test]
fn more_requests_than_slots_wait_for_them() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    for slot in 0..20 {
        let at = DATA + slot * 4096;
        caged.guest.request(slot, kind::IN, slot, &[], &[(at, 512)]);
    }
    caged.poll();
    assert_eq!(caged.guest.blk.in_flight(), 8);
    assert!(caged.guest.blk.stats().backpressure > 0);
    let mut dma = caged.guest.dma();
    // Nothing to do until the worker answers: the core may sleep.
    caged.guest.settle(&mut dma);
    assert!(!caged.guest.blk.has_work(&mut dma));
    for _ in 0..20 {
        assert_eq!(caged.wait_used(&mut dma).1, 513);
    }
    for slot in 0..20 {
        let read = caged.guest.driver.get(DATA + slot * 4096, 512);
        assert_eq!(read, image()[slot as usize * 512..][..512]);
    }
}

#[test]
fn a_worker_that_sleeps_is_kicked_and_wakes_an_owner_that_does() {
    let mut caged = CagedGuest::new(small(), mem_disk());
    caged.guest.request(0, kind::FLUSH, 0, &[], &[]);
    caged.poll();
    assert_eq!(caged.control.facts().kicks, 0);
    let served = caged.served.as_mut().expect("a worker");
    served.worker.step(&mut served.area).expect("a good owner");
    assert!(!served.area.publish());
    served.area.arm();
    caged.guest.request(1, kind::FLUSH, 0, &[], &[]);
    caged.poll();
    assert_eq!(caged.control.facts().kicks, 1);
    let mut dma = caged.guest.dma();
    caged.guest.blk.arm(&mut dma);
    let served = caged.served.as_mut().expect("a worker");
    served.area.disarm();
    served.worker.step(&mut served.area).expect("a good owner");
    assert!(served.area.publish());
    assert!(caged.guest.blk.has_work(&mut dma));
}
