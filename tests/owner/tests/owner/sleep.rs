//! An owner that sleeps at every idle sweep, and a guest that waits for its answers: none is lost.
//!
//! The guest is a thread; its stores to a shared page go through the memory slot's mapping and meet
//! the write protection as a vCPU's would.

use std::num::NonZeroU32;
use std::time::Instant;

use sidecore::{IdlePolicy, Poller, SidecoreBuilder, Stats, Wakes};
use vio::blk::Transfer;
use vio::blk::request::kind;

use super::support::*;

/// Waits of one test; each is a store that may meet a sleeping owner.
const WAITS: u32 = 2000;

/// A small xorshift, to let stores fall into every phase of a sleep.
fn pause(random: &mut u32) {
    *random ^= *random << 13;
    *random ^= *random >> 17;
    *random ^= *random << 5;
    let start = Instant::now();
    let nanos = u128::from(*random % 60_000);
    while start.elapsed().as_nanos() < nanos {
        std::hint::spin_loop();
    }
}

/// Runs it; the sidecore's figures, and the guest for its own.
fn run(mode: Mode, device: Disk, every: u32) -> Option<(Stats, GuestFigures)> {
    let (mut owner, parts) = machine(mode, NO_LIMIT, device);
    if let Err(error) = owner.arm(&mut Wakes::by_hand()) {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        eprintln!("skipped: {mode:?}: {error}: {}", cause.unwrap_or_default());
        return None;
    }
    owner.disarm();
    let core = SidecoreBuilder::new("sleeper")
        .idle(IdlePolicy::adaptive())
        .force_sleep_every(NonZeroU32::new(every))
        .spawn(vec![owner])
        .unwrap();
    let mut guest = Guest::new(core.handle(0), parts);
    guest.boot();
    guest.start_driver();
    let mut random = 0x2545_f491;
    for round in 0..WAITS {
        guest.flush(&[flush_page(DATA)]);
        pause(&mut random);
        if round % 10 == 0 {
            // The other kinds of wake-up: a doorbell, if the device asked for one, and the
            // completion.
            guest.request(0, kind::IN, u64::from(round % 100), DATA, 512);
            guest.wait_used();
            assert_eq!(guest.request_status(0), 0, "{mode:?}: round {round}");
        }
    }
    let figures = GuestFigures {
        exits: match &guest.registers {
            Registers::Logged { log, .. } => log.state().exits,
            _ => 0,
        },
        waits: guest.counts().waits,
        gate_faults: guest.counts().gate_faults,
        logged: guest.counts().logged_writes,
    };
    let stats = core.stats();
    core.stop();
    Some((stats, figures))
}

struct GuestFigures {
    exits: u64,
    waits: u64,
    gate_faults: u64,
    logged: u64,
}

/// The file's completions wake it as well.
fn disk() -> Disk {
    blk(raw_disk(Transfer::Direct), None)
}

#[test]
fn no_store_to_a_shared_page_is_lost_on_an_owner_that_falls_asleep() {
    let Some((stats, guest)) = run(Mode::Shared, disk(), 1) else {
        return;
    };
    assert!(guest.waits >= u64::from(WAITS));
    // Not all: some stores come before the page is armed.
    let slept = stats.core.sleeps;
    assert!(slept >= u64::from(WAITS) / 4, "{slept} sleeps");
    assert!(
        guest.gate_faults >= u64::from(WAITS) / 10,
        "{} stores met the gate",
        guest.gate_faults
    );
}

#[test]
fn a_sleeper_wakes_to_try_a_ring_that_faulted_again() {
    let (owner, parts) = machine(Mode::Trap, NO_LIMIT, mem_disk());
    let core = SidecoreBuilder::new("sleeper")
        .idle(IdlePolicy::adaptive())
        .force_sleep_every(Some(NonZeroU32::MIN))
        .spawn(vec![owner])
        .unwrap();
    let mut guest = Guest::new(core.handle(0), parts);
    guest.boot();
    guest.start_driver();
    guest.clear_pte(RINGS);
    guest.flush(&[flush_page(RINGS)]);
    guest.request(0, kind::IN, 3, DATA, 512);
    guest.until("the ring faults", |guest| guest.counts().faults != 0);
    // The owner is not notified of the new mapping.
    guest.map(RINGS, RW);
    guest.wait_used();
    assert_eq!(guest.request_status(0), 0);
    assert_ne!(core.stats().core.sleeps, 0, "it slept");
    core.stop();
}

#[test]
fn no_logged_write_is_lost_on_an_owner_that_falls_asleep() {
    let (stats, guest) = run(Mode::Logged, disk(), 1).expect("a list can be armed");
    assert!(guest.waits >= u64::from(WAITS));
    let slept = stats.core.sleeps;
    assert!(slept >= u64::from(WAITS) / 4, "{slept} sleeps");
    assert_ne!(guest.exits, 0, "writes while unregistered");
    assert!(
        guest.exits + guest.logged >= u64::from(WAITS),
        "{} exits, {} logged",
        guest.exits,
        guest.logged
    );
}

#[test]
fn no_trapped_write_is_lost_on_an_owner_that_falls_asleep() {
    let (stats, guest) = run(Mode::Trap, disk(), 1).expect("nothing to arm");
    assert!(guest.waits >= u64::from(WAITS));
    let slept = stats.core.sleeps;
    assert!(slept >= u64::from(WAITS) / 4, "{slept} sleeps");
}

/// Seldom enough that most stores find it polling, and some find it on its way into sleep.
#[test]
fn no_store_is_lost_on_an_owner_that_sleeps_now_and_then() {
    for mode in MODES {
        if let Some((_, guest)) = run(mode, disk(), 37) {
            assert!(guest.waits >= u64::from(WAITS), "{mode:?}");
        }
    }
}
