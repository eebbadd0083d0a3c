//! The two halves of going to sleep, called by hand.

use std::os::fd::AsRawFd;

use guest_mem::RegPage;
use sidecore::{Activity, Poller};
use vio::blk::request::{STATUS_OK, kind};

use machine::{FunctionLines, Op};
use virtio_pci::VirtioFunction;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vtd_port::VtdPort;

use super::doorbells::Bells;
use super::support::*;
use vtd::spec::registers as reg;

/// Polls until there is nothing to do.
fn idle(guest: &mut Guest<ByHand>) {
    guest.until("idle", |guest| guest.bus.poll() == Activity::Idle);
}

#[test]
fn a_register_page_that_cannot_be_armed_leaves_nothing_armed() {
    let mut guest = Guest::by_hand(Mode::Logged, NO_LIMIT, mem_disk());
    guest.verified_io(0);
    idle(&mut guest);
    assert_eq!(guest.driver.used_flags(), NO_NOTIFY, "polling");
    let Registers::Logged { log, .. } = &guest.registers else {
        unreachable!("logged mode");
    };
    let log = log.clone();
    log.state().is_stuck = true;
    assert!(guest.bus.arm().is_err());
    // The sidecore does not call `disarm` now: it polls on.
    assert!(log.state().is_registered);
    assert_eq!(
        guest.driver.used_flags(),
        NO_NOTIFY,
        "the driver was asked for doorbells that nobody hears"
    );
    guest.verified_io(1);
    let wait = guest.unmap(DATA);
    guest.until("the wait", |guest| guest.is_done(wait));
    assert_eq!(log.state().exits, 0);
    log.state().is_stuck = false;
    assert!(guest.bus.arm().is_ok());
    assert!(!log.state().is_registered);
    guest.bus.owner.disarm();
    assert!(log.state().is_registered);
}

#[test]
fn a_host_without_userfaultfd_keeps_a_shared_owner_awake_and_serving() {
    let mut guest = Guest::by_hand(Mode::Shared, NO_LIMIT, mem_disk());
    idle(&mut guest);
    match guest.bus.arm() {
        Ok(()) => {
            // Armed: the device asks for doorbells, and a descriptor waits for stores.
            assert_eq!(guest.driver.used_flags(), 0);
            assert_ne!(guest.bus.wakes.fds().count(), 0);
            guest.bus.owner.disarm();
        }
        Err(error) => {
            eprintln!("userfaultfd is not permitted here: {error:?}");
            assert_eq!(guest.driver.used_flags(), NO_NOTIFY);
        }
    }
    guest.verified_io(1);
    idle(&mut guest);
    assert_eq!(guest.driver.used_flags(), NO_NOTIFY);
}

#[test]
fn work_that_arrives_between_the_last_poll_and_arming_is_found() {
    for mode in MODES {
        let mut guest = Guest::by_hand(mode, NO_LIMIT, mem_disk());
        idle(&mut guest);
        guest.request(0, kind::IN, 3, DATA, 512);
        if guest.bus.arm().is_ok() {
            assert!(guest.bus.owner.has_work(), "{mode:?}: a request");
            guest.bus.owner.disarm();
        }
        guest.wait_used();
        idle(&mut guest);
        assert!(!guest.bus.owner.has_work(), "{mode:?}: nothing");
        if mode != Mode::Trap {
            // In `trap` this is a message, which the runtime looks for.
            guest.clear_pte(DATA);
            let wait = guest.submit(&[flush_page(DATA)]);
            if guest.bus.arm().is_ok() {
                assert!(guest.bus.owner.has_work(), "{mode:?}: a register");
                guest.bus.owner.disarm();
            }
            guest.until("the wait", |guest| guest.is_done(wait));
        }
    }
}

#[test]
fn a_fault_met_while_arming_is_reported_before_the_sleep() {
    for mode in MODES {
        let mut guest = Guest::by_hand(mode, NO_LIMIT, mem_disk());
        guest.verified_io(0);
        guest.unmap(RINGS);
        // The unit alone has its turn, by a write to a register that it does not have: the next to
        // touch the rings is `arm`.
        guest.bus.ask(to_unit(Op::Write {
            bar: 0,
            offset: 0xff8,
            len: 4,
            value: 0,
        }));
        guest.messages.take();
        if guest.bus.arm().is_err() {
            continue;
        }
        let found = guest.bus.owner.has_work();
        guest.bus.owner.disarm();
        assert!(found, "{mode:?}: the guest's interrupt would be slept over");
        guest.settle();
        assert_eq!(guest.messages.count(FAULT_MESSAGE), 1, "{mode:?}");
    }
}

#[test]
fn writes_past_a_full_log_keep_their_order() {
    let mut guest = Guest::by_hand(Mode::Logged, NO_LIMIT, mem_disk());
    guest.settle();
    let Registers::Logged { log, page } = &guest.registers else {
        unreachable!("logged mode");
    };
    let (log, page) = (log.clone(), page.clone());
    // One register, written until the log is full and the next write exits: the last value must
    // stay.
    let mut value = 0;
    while log.state().exits == 0 {
        value += 1;
        guest.write4(reg::FEDATA, value);
    }
    assert_eq!(value, 170, "KVM's ring holds 169");
    guest.settle();
    assert_eq!(page.load32(reg::FEDATA), value);
    let wait = guest.unmap(DATA);
    guest.until("the wait", |guest| guest.is_done(wait));
}

#[test]
fn a_doorbell_that_rang_for_nothing_does_not_keep_the_core_awake() {
    let (device, control) = slow(vio::blk::Transfer::Direct);
    let (_, parts) = machine(Mode::Trap, NO_LIMIT, mem_disk());
    let unit = vtd::Unit::new(vtd::Config::default());
    let function = VirtioFunction::new(DISK, device);
    let fds: Vec<_> = (0..function.queues())
        .map(|_| EventFd::new(EFD_NONBLOCK).unwrap())
        .collect();
    let bell = fds[0].as_raw_fd();
    let function_lines = FunctionLines {
        doorbells: Some(Box::new(Bells::new(fds))),
        pin: None,
    };
    let owner = owner_of(
        ("doorbells".into(), &parts.ram, &parts.messages),
        Units::Vtd(VtdPort::trap(unit)),
        Functions::Disk(function),
        function_lines,
    );
    let mut guest = Guest::new(ByHand::new(owner), parts);
    guest.boot();
    guest.start_driver();
    control.set_open(true);
    guest.verified_io(0);
    idle(&mut guest);
    for (round, is_live) in [(0, true), (1, true), (2, false)] {
        if !is_live {
            // Also while the function may not run, so that no poll of it takes the doorbell.
            guest.set_status(0);
            idle(&mut guest);
        }
        ring(bell);
        guest.bus.arm().unwrap();
        let fds: Vec<_> = guest.bus.wakes.fds().collect();
        assert!(fds.contains(&bell), "round {round}");
        assert!(is_readable(bell), "round {round}: it ends the sleep");
        guest.bus.owner.disarm();
        assert!(!is_readable(bell), "round {round}: and is heard");
        idle(&mut guest);
        assert_eq!(guest.counts().doorbells, round + 1);
    }
    // Unsolicited doorbells are consumed while polling, too.
    ring(bell);
    guest.until("heard", |_| !is_readable(bell));
    guest.restart_driver();
    guest.request(0, kind::IN, 3, DATA, 512);
    guest.wait_used();
    assert_eq!(guest.request_status(0), STATUS_OK);
}

fn ring(bell: i32) {
    let one = 1_u64;
    // SAFETY: eight bytes from a local, to a descriptor that the owner keeps open.
    let written = unsafe { libc::write(bell, (&raw const one).cast(), 8) };
    assert_eq!(written, 8);
}

fn is_readable(fd: i32) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one structure, as said.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}
