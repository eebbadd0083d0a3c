//! Forced sleeps: producers and a sidecore that sleeps at every idle sweep take turns, so that
//! nearly every item has to wake it, at whatever moment of its way into sleep it comes. A lost
//! wake-up stops the exchange, and the test says so.
//!
//! The ring is one of real virtio's: an index and avail_event in shared memory, and an eventfd as
//! the kick; beside it one with a flag. `SIDECORE_FORCED_SLEEPS` is the number of sleeps to reach
//! in each test (default 20,000 each).

use std::{
    fs::File,
    io::{Read, Write},
    num::NonZeroU32,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use sidecore::{Activity, ArmError, Handle, IdlePolicy, Nanos, Poller, SidecoreBuilder};

#[derive(Clone, Copy, PartialEq)]
enum Style {
    EventIdx,
    Flag,
}

struct Ring {
    style: Style,
    avail: AtomicU32,
    /// avail_event, or 1 for NO_NOTIFY.
    wish: AtomicU32,
    /// Items taken, which a polling guest would see as the used index.
    used: AtomicU32,
    /// Messages taken.
    messages: AtomicU64,
    kick: File,
}

impl Ring {
    fn new(style: Style) -> Arc<Ring> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: a new descriptor that nobody else owns.
        let kick = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        Arc::new(Ring {
            style,
            avail: AtomicU32::new(0),
            wish: AtomicU32::new(1),
            used: AtomicU32::new(0),
            messages: AtomicU64::new(0),
            kick,
        })
    }

    /// The driver: one more item; true if it had to kick.
    fn publish(&self) -> bool {
        let old = self.avail.load(Ordering::Relaxed);
        self.avail.store(old.wrapping_add(1), Ordering::Release);
        // The driver's mb(); pairs with the sidecore's fence between arming and its last look.
        fence(Ordering::SeqCst);
        let wish = self.wish.load(Ordering::Relaxed);
        let wants = match self.style {
            Style::EventIdx => wish == old,
            Style::Flag => wish == 0,
        };
        if wants {
            (&self.kick)
                .write_all(&1u64.to_ne_bytes())
                .expect("the counter has room");
        }
        wants
    }
}

struct Device {
    ring: Arc<Ring>,
    last_avail: u32,
    fds: [RawFd; 1],
}

impl Device {
    fn new(ring: &Arc<Ring>) -> Device {
        Device {
            ring: Arc::clone(ring),
            last_avail: 0,
            fds: [ring.kick.as_raw_fd()],
        }
    }
}

impl Poller for Device {
    type Message = ();

    fn poll(&mut self, _now: Nanos) -> Activity {
        let avail = self.ring.avail.load(Ordering::Acquire);
        if avail == self.last_avail {
            return Activity::Idle;
        }
        self.last_avail = avail;
        self.ring.used.store(avail, Ordering::Release);
        Activity::Busy
    }

    fn message(&mut self, (): ()) {
        self.ring.messages.fetch_add(1, Ordering::Release);
    }

    fn arm(&mut self) -> Result<(), ArmError> {
        let wish = if self.ring.style == Style::EventIdx {
            self.last_avail
        } else {
            0
        };
        self.ring.wish.store(wish, Ordering::Relaxed);
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        self.ring.avail.load(Ordering::Relaxed) != self.last_avail
    }

    fn disarm(&mut self) {
        if self.ring.style == Style::Flag {
            self.ring.wish.store(1, Ordering::Relaxed);
        }
        let _ = (&self.ring.kick).read(&mut [0; 8]);
    }

    fn wake_fds(&self) -> &[RawFd] {
        &self.fds
    }
}

fn target() -> u64 {
    std::env::var("SIDECORE_FORCED_SLEEPS").map_or(20_000, |n| n.parse().expect("a number"))
}

/// Waits for the sidecore to take what was published.
fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    let mut spins = 0u32;
    while !holds() {
        spins += 1;
        if spins.is_multiple_of(256) {
            std::thread::yield_now();
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "lost wake-up: {what}"
            );
        }
        std::hint::spin_loop();
    }
}

/// Publishes one at a time, at moments that drift through the sidecore's way into sleep, until
/// `target` sleeps have been slept.
fn exchange(styles: &[Style], has_mail: bool) {
    let rings: Vec<_> = styles.iter().map(|&style| Ring::new(style)).collect();
    let core = SidecoreBuilder::new("sleepy")
        .idle(IdlePolicy::Poll)
        .force_sleep_every(NonZeroU32::new(1))
        .spawn(rings.iter().map(Device::new).collect())
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
    exchange(&[Style::EventIdx], false);
}

#[test]
fn flag_survives_forced_sleeps() {
    exchange(&[Style::Flag], false);
}

#[test]
fn both_styles_and_messages_survive_forced_sleeps() {
    exchange(&[Style::EventIdx, Style::Flag], true);
}
