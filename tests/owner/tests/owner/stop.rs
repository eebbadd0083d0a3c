//! Status = 0 and clearing Bus Master answer when the function is quiet, and not before.

use std::time::Duration;

use vio::blk::Transfer;
use vio::blk::request::{STATUS_OK, kind};

use super::support::*;

const MODE: Mode = Mode::Logged;

fn two_in_flight() -> (Guest<ByHand>, vio_faults::SlowControl) {
    two_in_flight_within(NO_LIMIT)
}

fn two_in_flight_within(limit: Duration) -> (Guest<ByHand>, vio_faults::SlowControl) {
    let (device, control) = slow(Transfer::Direct);
    let mut guest = Guest::by_hand(MODE, limit, device);
    guest.request(0, kind::IN, 3, DATA, 512);
    guest.request(1, kind::IN, 4, DATA + 0x1000, 512);
    guest.until("both are held", |_| control.held() == 2);
    (guest, control)
}

/// Everything the guest can see of its memory.
fn memory(guest: &Guest<ByHand>) -> Vec<u8> {
    guest.get(0, RAM as usize)
}

/// Tempts a function that is to stop: requests, doorbells, time.
fn tempt(guest: &mut Guest<ByHand>) -> Vec<u8> {
    guest.request(2, kind::IN, 5, DATA + 0x2000, 512);
    let before = memory(guest);
    guest.ring_doorbell();
    guest.settle();
    guest.messages.take();
    before
}

#[test]
fn status_reads_non_zero_until_every_request_has_ended() {
    let (mut guest, control) = two_in_flight();
    guest.set_status(0);
    for held in [2, 1] {
        assert_eq!(control.held(), held);
        guest.settle();
        assert_ne!(guest.status(), 0, "{held} requests in flight");
        control.release(1);
        guest.until("one less", |_| control.held() == held - 1);
    }
    guest.until("reset", |guest| guest.status() == 0);
    assert_eq!(guest.driver.used_idx(), 0, "no ring is touched any more");
    control.set_open(true);
    let before = tempt(&mut guest);
    assert!(memory(&guest) == before, "written to after the answer");
    guest.restart_driver();
    guest.verified_io(0);
}

#[test]
fn clearing_bus_master_is_answered_when_every_request_has_ended_to_every_vcpu() {
    let (mut guest, control) = two_in_flight();
    let first = guest.bus.ask_later(set_command(2));
    let second = guest.bus.ask_later(set_command(2));
    guest.settle();
    control.release(1);
    guest.until("one less", |_| control.held() == 1);
    guest.settle();
    assert_eq!((first.try_take(), second.try_take()), (None, None));
    control.set_open(true);
    guest.until("the answer", |_| first.try_take().is_some());
    assert_eq!(second.try_take(), Some(0));
    let before = tempt(&mut guest);
    assert!(memory(&guest) == before, "written to after the answer");
    // On again, without a reset: what had ended is shown, and the third request is taken.
    guest.bus.ask(set_command(6));
    for _ in 0..3 {
        guest.wait_used();
    }
    assert!((0..3).all(|slot| guest.request_status(slot) == STATUS_OK));
    assert_eq!(guest.get(DATA, 512), image()[3 * 512..4 * 512]);
}

#[test]
fn a_reset_behind_requests_that_never_end_cancels_them_at_the_drain_limit() {
    let limit = Duration::from_millis(50);
    let (mut guest, control) = two_in_flight_within(limit);
    guest.set_status(0);
    guest.settle();
    assert_ne!(guest.status(), 0, "before the limit");
    guest.bus.skew += 2 * limit.as_nanos() as u64;
    guest.until("reset", |guest| guest.status() == 0);
    assert_eq!(control.held(), 0);
    guest.restart_driver();
    control.set_open(true);
    guest.verified_io(0);
}

#[test]
fn clearing_bus_master_waits_past_the_drain_limit_and_breaks_nothing() {
    let limit = Duration::from_millis(50);
    for uncancellable in [false, true] {
        let (mut guest, control) = two_in_flight_within(limit);
        control.set_uncancellable(uncancellable);
        let answer = guest.bus.ask_later(set_command(2));
        guest.settle();
        guest.bus.skew += 20 * limit.as_nanos() as u64;
        guest.settle();
        assert_eq!((answer.try_take(), control.held()), (None, 2));
        control.set_open(true);
        guest.until("the answer", |_| answer.try_take().is_some());
        guest.bus.ask(set_command(6));
        for _ in 0..2 {
            guest.wait_used();
        }
        assert!((0..2).all(|slot| guest.request_status(slot) == STATUS_OK));
        guest.verified_io(2);
    }
}

#[test]
fn a_stop_behind_a_request_that_cannot_be_cancelled_is_never_answered_falsely() {
    let limit = Duration::from_millis(50);
    let (mut guest, control) = two_in_flight_within(limit);
    control.set_uncancellable(true);
    guest.set_status(0);
    guest.settle();
    guest.bus.skew += 20 * limit.as_nanos() as u64;
    guest.settle();
    assert_ne!(guest.status(), 0, "the disk may still write to the buffers");
    control.set_open(true);
    guest.until("reset", |guest| guest.status() == 0);
}

#[test]
fn a_function_that_was_never_bus_master_does_no_dma() {
    let (owner, parts) = machine(MODE, NO_LIMIT, mem_disk());
    let mut guest = Guest::new(ByHand::new(owner), parts);
    guest.boot();
    guest.negotiate();
    assert_eq!(guest.status(), 15, "DRIVER_OK");
    let before = tempt(&mut guest);
    assert!(memory(&guest) == before, "DMA without Bus Master");
    guest.bus.ask(set_command(6));
    guest.wait_used();
    assert_eq!(guest.request_status(2), STATUS_OK);
}

#[test]
fn an_unmap_that_waited_completes_in_the_drain_of_a_stop() {
    for mode in MODES {
        let (device, control) = slow(Transfer::Direct);
        let mut guest = Guest::by_hand(mode, NO_LIMIT, device);
        guest.request(0, kind::IN, 3, DATA, 512);
        guest.until("it is held", |_| control.held() == 1);
        let wait = guest.unmap(DATA);
        guest.settle();
        guest.set_status(0);
        control.release(1);
        guest.until("reset", |guest| guest.status() == 0);
        // As a sidecore would: it polls as long as that finds anything, and then asks before it
        // sleeps.
        use sidecore::{Activity, Poller};
        while guest.bus.poll() == Activity::Busy {}
        assert!(
            guest.is_done(wait) || guest.bus.owner.has_work(),
            "{mode:?}: the wait would be slept over"
        );
    }
}
