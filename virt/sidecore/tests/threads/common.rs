//! A bounded wait; a ring like virtio's, with an available index and a request for kicks in shared
//! memory, and an eventfd; and the poller that serves it.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use sidecore::{Activity, ArmError, PollContext, Poller, Probe, Wakes};

/// Waits for an effect of another thread; fails the test after ten seconds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(10), "never: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Returns a non-blocking eventfd.
pub fn eventfd() -> File {
    // SAFETY: no pointers; the result is checked.
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: a new descriptor, which no other value owns.
    File::from(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[derive(Clone, Copy, PartialEq)]
pub enum Style {
    EventIdx,
    Flag,
}

pub struct Ring {
    pub style: Style,
    pub avail: AtomicU32,
    /// avail_event, or 1 for NO_NOTIFY.
    pub wish: AtomicU32,
    /// Items taken, which a polling guest would see as the used index.
    pub used: AtomicU32,
    /// Messages taken.
    pub messages: AtomicU64,
    pub kick: File,
}

impl Ring {
    pub fn new(style: Style) -> Arc<Ring> {
        Arc::new(Ring {
            style,
            avail: AtomicU32::new(0),
            wish: AtomicU32::new(1),
            used: AtomicU32::new(0),
            messages: AtomicU64::new(0),
            kick: eventfd(),
        })
    }

    /// Publishes one more item, as the driver; returns whether it had to kick.
    pub fn publish(&self) -> bool {
        let old = self.avail.load(Ordering::Relaxed);
        self.avail.store(old.wrapping_add(1), Ordering::Release);
        // The driver's mb(); pairs with the sidecore's fence between arming and its re-check.
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

pub struct Device {
    ring: Arc<Ring>,
    last_avail: u32,
    has_probe: bool,
}

/// Available index, and the part of it that has been seen.
pub struct Avail {
    ring: Arc<Ring>,
    seen: u32,
}

impl Probe for Avail {
    fn fires(&self) -> bool {
        self.ring.avail.load(Ordering::Relaxed) != self.seen
    }
}

impl Device {
    pub fn new(ring: &Arc<Ring>, has_probe: bool) -> Device {
        Device {
            ring: Arc::clone(ring),
            last_avail: 0,
            has_probe,
        }
    }
}

impl Poller for Device {
    type Message = ();
    type Probe = Avail;

    fn attached(&mut self, wakes: &mut Wakes) -> std::io::Result<()> {
        wakes.add(self.ring.kick.as_raw_fd(), 7)
    }

    fn ready(&mut self, token: u32, _turn: &mut PollContext<'_>) {
        assert_eq!(token, 7);
        let _ = (&self.ring.kick).read(&mut [0; 8]);
    }

    fn probe(&self, slot: &mut Option<Avail>) {
        match slot {
            Some(avail) => avail.seen = self.last_avail,
            None if self.has_probe => {
                *slot = Some(Avail {
                    ring: Arc::clone(&self.ring),
                    seen: self.last_avail,
                });
            }
            None => {}
        }
    }

    fn poll(&mut self, _turn: &mut PollContext<'_>) -> Activity {
        let avail = self.ring.avail.load(Ordering::Acquire);
        if avail == self.last_avail {
            return Activity::Idle;
        }
        self.last_avail = avail;
        self.ring.used.store(avail, Ordering::Release);
        Activity::Busy
    }

    fn message(&mut self, (): (), _turn: &mut PollContext<'_>) {
        self.ring.messages.fetch_add(1, Ordering::Release);
    }

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
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
    }
}

/// Waits for the sidecore to take everything that was published.
pub fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
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
