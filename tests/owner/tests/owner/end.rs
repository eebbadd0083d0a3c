//! The end of the machine: no vCPU waits for a stop any more, and the end of each function is
//! reported when its requests have ended.

use std::sync::mpsc::{TryRecvError, channel};
use std::time::Duration;

use vio::blk::Transfer;
use vio::blk::request::{STATUS_OK, kind};
use vio_faults::SlowControl;

use super::support::*;

/// A guest with a read into [`DATA`] that its disk holds and will not cancel.
fn held(transfer: Transfer, limit: Duration) -> (Guest<ByHand>, SlowControl) {
    let (device, control) = slow(transfer);
    control.set_uncancellable(true);
    let mut guest = Guest::by_hand(Mode::Logged, limit, device);
    guest.request(0, kind::IN, 3, DATA, 512);
    guest.until("the request is held", |_| control.held() == 1);
    (guest, control)
}

fn end(guest: &mut Guest<ByHand>) -> std::sync::mpsc::Receiver<usize> {
    let (tell, ended) = channel();
    guest.bus.message(Request::End(tell));
    ended
}

#[test]
fn a_vcpu_that_waits_for_a_stop_that_cannot_drain_goes_on_at_the_end() {
    let (mut guest, control) = held(Transfer::Direct, LIMIT);
    let waits = guest.bus.ask_later(set_command(2));
    guest.settle();
    guest.bus.skew += 5 * LIMIT.as_nanos() as u64;
    guest.settle();
    assert_eq!(waits.try_take(), None, "its memory may still be written");
    let ended = end(&mut guest);
    assert_eq!(waits.try_take(), Some(0), "the machine has ended");
    // One that comes only now does not wait either.
    guest.bus.ask(set_command(6));
    guest.bus.ask(set_command(2));
    guest.settle();
    assert_eq!(
        ended.try_recv(),
        Err(TryRecvError::Empty),
        "the disk is at it"
    );
    control.set_open(true);
    guest.until("its end", |_| ended.try_recv() == Ok(0));
}

#[test]
fn a_function_that_has_ended_takes_no_more_requests() {
    let (device, control) = slow(Transfer::Direct);
    control.set_open(true);
    let mut guest = Guest::by_hand(Mode::Logged, LIMIT, device);
    guest.verified_io(0);
    let ended = end(&mut guest);
    guest.until("its end", |_| ended.try_recv() == Ok(0));
    guest.request(1, kind::IN, 3, DATA, 512);
    guest.ring_doorbell();
    guest.settle();
    assert_eq!(guest.request_status(1), 0xff);
}

#[test]
fn bus_master_off_is_answered_at_once_while_bounced_requests_are_held() {
    let (mut guest, control) = held(Transfer::Bounce, NO_LIMIT);
    guest.put(DATA, &[0x55; 512]);
    let answer = guest.bus.ask_later(set_command(2));
    guest.bus.turn();
    assert_eq!(answer.try_take(), Some(0), "nothing reaches guest memory");
    control.set_open(true);
    guest.settle();
    assert_eq!(
        guest.get(DATA, 512),
        [0x55; 512],
        "written without Bus Master"
    );
    assert_eq!(guest.request_status(0), 0xff);
    // On again: the request has its end.
    guest.bus.ask(set_command(6));
    guest.wait_used();
    assert_eq!(guest.request_status(0), STATUS_OK);
    assert_eq!(guest.get(DATA, 512), image()[3 * 512..4 * 512]);
}

#[test]
fn a_reset_waits_for_bounced_requests_that_a_later_write_must_not_overtake() {
    let (mut guest, control) = held(Transfer::Bounce, NO_LIMIT);
    let answer = guest.bus.ask_later(set_command(2));
    guest.bus.turn();
    assert_eq!(answer.try_take(), Some(0));
    guest.set_status(0);
    guest.settle();
    assert_ne!(guest.status(), 0, "the request is with the disk");
    control.set_open(true);
    guest.until("reset", |guest| guest.status() == 0);
}
