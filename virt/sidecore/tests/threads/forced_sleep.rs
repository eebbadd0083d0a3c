//! Forced sleeps: producers and a sidecore that sleeps at every idle sweep take turns, so that
//! nearly every item has to wake it, at any point of its way into sleep. A lost wake-up stops the
//! exchange, and fails the test.
//!
//! The ring is one of real virtio's: an index and avail_event in shared memory, and an eventfd as
//! the kick; a second one has a flag. `SIDECORE_FORCED_SLEEPS` is the number of sleeps to reach in
//! each test (default 20,000 each).

use std::{num::NonZeroU32, sync::atomic::Ordering, time::Instant};

use crate::common::{Device, Ring, Style, wait_for};
use sidecore::{Handle, IdlePolicy, SidecoreBuilder};

fn target() -> u64 {
    std::env::var("SIDECORE_FORCED_SLEEPS").map_or(20_000, |n| n.parse().expect("a number"))
}

/// Publishes one item at a time, at times that drift through the sidecore's way into sleep, until
/// there have been `target` sleeps.
fn exchange(styles: &[Style], has_mail: bool, has_probe: bool) {
    let rings: Vec<_> = styles.iter().map(|&style| Ring::new(style)).collect();
    let core = SidecoreBuilder::new("sleepy")
        .idle(IdlePolicy::Poll)
        .force_sleep_every(NonZeroU32::new(1))
        .spawn(
            rings
                .iter()
                .map(|ring| Device::new(ring, has_probe))
                .collect(),
        )
        .expect("eventfds and threads are to be had");
    let handles: Vec<Handle<()>> = (0..rings.len()).map(|index| core.handle(index)).collect();
    let (mut round, mut kicks, mut sent) = (0u64, 0u64, 0u64);
    let start = Instant::now();
    while !round.is_multiple_of(256) || core.stats().core.sleeps < target() {
        let which = (round % rings.len() as u64) as usize;
        let ring = &rings[which];
        let before = ring.messages.load(Ordering::Relaxed);
        kicks += u64::from(ring.publish());
        // A kick returns when the sidecore has been through its whole turn; a second item or a
        // message, 0 to some 30 µs later, meets it anywhere on its way: sweeping, arming, asleep.
        (0..round * 37 % 2048).for_each(|_| std::hint::spin_loop());
        if has_mail && round.is_multiple_of(3) {
            handles[which].send(()).expect("it runs");
            sent += 1;
            wait_for("message", || {
                ring.messages.load(Ordering::Acquire) == before + 1
            });
        } else {
            kicks += u64::from(ring.publish());
        }
        let avail = ring.avail.load(Ordering::Relaxed);
        wait_for("kick", || ring.used.load(Ordering::Acquire) == avail);
        round += 1;
    }
    let elapsed = start.elapsed();
    let stats = core.stats().core;
    println!("{round} rounds, {kicks} kicks, {sent} messages in {elapsed:?}: {stats:?}");
    assert!(stats.sleeps >= target() && stats.sleeps == stats.sleeps_forced);
    assert!(
        kicks >= stats.wakes_fd,
        "each wake by a descriptor needs a kick"
    );
    assert!(stats.wakes_mailbox <= sent, "at most one bell per message");
    core.stop();
}

#[test]
fn event_idx_survives_forced_sleeps() {
    exchange(&[Style::EventIdx], false, true);
}

#[test]
fn flag_survives_forced_sleeps() {
    exchange(&[Style::Flag], false, true);
}

#[test]
fn both_styles_and_messages_survive_forced_sleeps() {
    exchange(&[Style::EventIdx, Style::Flag], true, true);
}

/// Each sleep arms all, and each wake disarms all.
#[test]
fn pollers_without_probe_survive_forced_sleeps() {
    exchange(&[Style::EventIdx, Style::Flag], true, false);
}
