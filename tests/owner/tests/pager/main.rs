//! The whole owner over memory of which any page may be absent at any access, and lie elsewhere
//! after each absence.
//!
//! A guest that the test plays keeps three disks and a network card busy, maps each request's
//! buffers at addresses of their own, and unmaps them with a wait behind it; a pager takes pages
//! away as the owner lets them go, most of them those that are used just now, and brings them back
//! for tickets in any order, or fails them; devices and the invalidation queue are reset while they
//! wait. Every byte of every request is checked against a model, every completion for being one
//! that is due, and every so often all of it has to come to rest.
//!
//! `PAGER_ACCESSES` sets how many accesses (a million, unless said otherwise), `PAGER_SEED` the
//! seed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod disk;
mod guest;
mod memory;
mod world;

use guest::Guest;
use memory::Kind;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

#[test]
fn every_access_may_wait_and_no_byte_and_no_completion_is_lost() {
    let accesses = number("PAGER_ACCESSES", 1_000_000);
    let seed = number("PAGER_SEED", 1);
    println!("seed {seed}");
    let mut guest = Guest::new(seed);
    while guest.machine.pager.totals().0 < accesses {
        for _ in 0..20_000 {
            guest.step();
        }
        guest.come_to_rest();
    }
    let done = &guest.done;
    println!("{done:?}");
    let (accesses, evictions, spared) = guest.machine.pager.totals();
    println!(
        "{accesses} accesses, {evictions} evictions, {spared} absent pages not fetched to be \
         overwritten"
    );
    let counts = guest.machine.pager.counts();
    for kind in Kind::ALL {
        let count = counts.get(&kind).copied().unwrap_or_default();
        println!("{kind:?}: {} of {} waited", count.pends, count.accesses);
        assert!(count.pends > 0, "no access waited: {kind:?}");
    }
    assert!(spared > 0);
    for (what, count) in [
        ("tickets failed", done.failed),
        ("tickets forgotten", done.forgotten),
        ("pages refused for a lease or a window", done.refused),
        ("resets of devices while they waited", done.resets_waiting),
        (
            "restarts of the queue while it waited",
            done.restarts_waiting,
        ),
        ("requests that failed with their memory", done.errors),
        ("buffers revoked in flight", done.revoked),
        ("frames received", done.frames),
    ] {
        assert!(count > 0, "no {what}");
    }
}
