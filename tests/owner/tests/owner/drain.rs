//! Unmaps while the disk accesses the memory: leases, the drain limit, cancellation.

use std::time::{Duration, Instant};

use sidecore::{IdlePolicy, SidecoreBuilder};
use vio::blk::Transfer;
use vio::blk::request::{STATUS_IOERR, STATUS_OK, kind};
use vtd::spec::registers as reg;

use super::support::*;

/// A guest with one read into [`DATA`] held back by its disk.
fn reading(
    mode: Mode,
    transfer: Transfer,
    limit: Duration,
) -> (Guest<ByHand>, vio_faults::SlowControl) {
    let (device, control) = slow(transfer);
    let mut guest = Guest::by_hand(mode, limit, device);
    guest.request(0, kind::IN, 3, DATA, 512);
    guest.until("the request is held", |_| control.held() == 1);
    (guest, control)
}

fn sector(number: u64) -> Vec<u8> {
    image()[512 * number as usize..][..512].to_vec()
}

#[test]
fn an_unmap_completes_right_after_the_request_that_uses_the_page() {
    for mode in MODES {
        let (mut guest, control) = reading(mode, Transfer::Direct, NO_LIMIT);
        let wait = guest.unmap(DATA);
        guest.settle();
        assert!(!guest.is_done(wait), "{mode:?}: completed under a lease");
        assert_eq!(guest.counts().leases_drained, 1, "{mode:?}");
        control.release(1);
        let (_, len) = guest.wait_used();
        // The poll that published the request ended its lease; the next begins with the unit.
        guest.bus.turn();
        assert!(guest.is_done(wait), "{mode:?}: not right after the request");
        assert_eq!((len, guest.request_status(0)), (513, STATUS_OK));
        assert_eq!(guest.get(DATA, 512), sector(3), "{mode:?}");
    }
}

#[test]
fn the_page_is_out_of_reach_once_its_unmap_has_completed() {
    for mode in MODES {
        let (device, control) = slow(Transfer::Direct);
        let mut guest = Guest::by_hand(mode, NO_LIMIT, device);
        control.set_open(true);
        guest.verified_io(0);
        let wait = guest.unmap(DATA);
        guest.until("the wait", |guest| guest.is_done(wait));
        guest.put(DATA, &[0x55; 512]);
        guest.request(0, kind::IN, 3, DATA, 512);
        guest.wait_used();
        assert_eq!(guest.request_status(0), STATUS_IOERR, "{mode:?}");
        assert_eq!(guest.get(DATA, 512), [0x55; 512], "{mode:?}");
    }
}

#[test]
fn flushes_over_unchanged_leases_complete_at_once() {
    for mode in MODES {
        let (mut guest, control) = reading(mode, Transfer::Direct, NO_LIMIT);
        // As stock Linux's lazy mode: another page was unmapped, and the whole domain is flushed
        // for it.
        guest.clear_pte(DATA + 0x1000);
        for descriptor in [flush_domain(), 0xd2, 0x11, flush_page(DATA)] {
            let wait = guest.submit(&[descriptor]);
            // At most two polls: one takes the register and works, in shared mode one may be
            // behind.
            guest.bus.turn();
            guest.bus.turn();
            assert!(guest.is_done(wait), "{mode:?}: {descriptor:#x} waited");
        }
        assert_eq!((control.held(), guest.counts().leases_drained), (1, 0));
    }
}

#[test]
fn a_request_past_the_drain_limit_is_cancelled_and_its_unmap_completes() {
    for mode in MODES {
        let (mut guest, _control) = reading(mode, Transfer::Direct, LIMIT);
        guest.put(DATA, &[0x55; 512]);
        let wait = guest.unmap(DATA);
        guest.settle();
        guest.bus.skew += LIMIT.as_nanos() as u64 / 2;
        guest.settle();
        assert!(!guest.is_done(wait), "{mode:?}: before the limit");
        assert_eq!(guest.request_status(0), 0xff, "{mode:?}: before the limit");
        guest.bus.skew += LIMIT.as_nanos() as u64;
        guest.wait_used();
        guest.bus.turn();
        assert!(guest.is_done(wait), "{mode:?}: after the cancellation");
        assert_eq!(guest.request_status(0), STATUS_IOERR, "{mode:?}");
        assert_eq!(guest.get(DATA, 512), [0x55; 512], "{mode:?}");
        assert_eq!(guest.status() & 64, 0, "{mode:?}: the device still works");
    }
}

#[test]
fn a_request_past_the_drain_limit_takes_none_of_its_neighbours_with_it() {
    for mode in MODES {
        let (mut guest, control) = reading(mode, Transfer::Direct, LIMIT);
        guest.request(1, kind::IN, 4, DATA + 0x1000, 512);
        guest.until("both are held", |_| control.held() == 2);
        let wait = guest.unmap(DATA);
        guest.settle();
        guest.bus.skew += 2 * LIMIT.as_nanos() as u64;
        guest.wait_used();
        guest.bus.turn();
        assert!(guest.is_done(wait), "{mode:?}: after the cancellation");
        assert_eq!(guest.request_status(0), STATUS_IOERR, "{mode:?}");
        guest.settle();
        assert_eq!(control.held(), 1, "{mode:?}: the other goes on");
        control.release(1);
        guest.wait_used();
        assert_eq!(guest.request_status(1), STATUS_OK, "{mode:?}");
        assert_eq!(guest.get(DATA + 0x1000, 512), sector(4), "{mode:?}");
    }
}

#[test]
fn an_uncancellable_request_ends_in_needs_reset_and_never_in_a_false_completion() {
    for mode in MODES {
        let (mut guest, control) = reading(mode, Transfer::Direct, LIMIT);
        control.set_uncancellable(true);
        guest.messages.take();
        let wait = guest.unmap(DATA);
        guest.settle();
        guest.bus.skew += 2 * LIMIT.as_nanos() as u64;
        guest.settle();
        assert_eq!(guest.status(), 64 | 15, "{mode:?}");
        assert_eq!(guest.messages.take(), [message(0)], "{mode:?}");
        guest.bus.skew += 20 * LIMIT.as_nanos() as u64;
        guest.settle();
        assert!(
            !guest.is_done(wait),
            "{mode:?}: false completion: the disk may still write there"
        );
        // It ends after all: now the promise holds, and the device can be reset and used.
        control.set_open(true);
        guest.until("the wait", |guest| guest.is_done(wait));
        guest.restart_driver();
        guest.verified_io(1);
    }
}

#[test]
fn another_machine_on_the_sidecore_does_not_notice_a_request_that_never_ends() {
    let limit = Duration::from_millis(50);
    for mode in MODES {
        let (device, control) = slow(Transfer::Direct);
        control.set_uncancellable(true);
        let (hung, hung_parts) = machine(mode, limit, device);
        let (well, well_parts) = machine(mode, limit, mem_disk());
        let core = SidecoreBuilder::new("two")
            .idle(IdlePolicy::adaptive())
            .spawn(vec![hung, well])
            .unwrap();
        let mut hung = Guest::new(core.handle(0), hung_parts);
        let mut well = Guest::new(core.handle(1), well_parts);
        for guest in [&mut hung, &mut well] {
            guest.boot();
            guest.start_driver();
        }
        hung.request(0, kind::IN, 3, DATA, 512);
        hung.until("the request is held", |_| control.held() == 1);
        let wait = hung.unmap(DATA);
        let start = Instant::now();
        let mut rounds = 0;
        // Before, at and after the limit of the other machine. Each step of a round is bounded on
        // its own.
        while start.elapsed() < 4 * limit || rounds < 10 {
            well.verified_io(rounds);
            well.clear_pte(DATA);
            well.flush(&[flush_page(DATA)]);
            well.map(DATA, RW);
            rounds += 1;
        }
        assert!(!hung.is_done(wait), "{mode:?}");
        assert_eq!(hung.status() & 64, 64, "{mode:?}");
        assert_eq!(well.status() & 64, 0, "{mode:?}");
        control.set_open(true);
        hung.until("the wait", |guest| guest.is_done(wait));
        core.stop();
    }
}

#[test]
fn bounced_requests_delay_no_unmap_and_write_nothing_to_the_page_later() {
    for mode in MODES {
        let (mut guest, control) = reading(mode, Transfer::Bounce, NO_LIMIT);
        guest.put(DATA, &[0x55; 512]);
        let wait = guest.unmap(DATA);
        guest.bus.turn();
        guest.bus.turn();
        assert!(guest.is_done(wait), "{mode:?}: no lease, so nothing drains");
        guest.messages.take();
        control.release(1);
        guest.wait_used();
        assert_eq!(guest.request_status(0), STATUS_IOERR, "{mode:?}");
        assert_eq!(guest.get(DATA, 512), [0x55; 512], "{mode:?}");
        guest.settle();
        assert_eq!(guest.read4(reg::FSTS) & 2, 2, "{mode:?}: PPF");
        assert_eq!(guest.messages.count(FAULT_MESSAGE), 1, "{mode:?}");
        assert_eq!(guest.counts().faults, 1, "{mode:?}");
    }
}
