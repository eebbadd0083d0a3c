//! Measurement of a wake's latency and cost on this machine, made before a core begins.
//!
//! The priced policy weighs CPU time against the latency that a wake adds; that latency is 5 µs on
//! one host and 50 µs on the next. It cannot be measured at work, where the time of a guest's kick
//! is not recorded. So a new core falls asleep a few times, while another thread records the time
//! and notifies it, from another CPU, as a guest's kick does. Takes about 3 ms; only cores with
//! that policy do it.

use std::{
    io,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{
    clock::Nanos,
    gate::Notifier,
    sys::{self, EpollFd, EventFd, ThreadClock},
};

/// Sleeps tried; odd, so that there is a median.
const ROUNDS: u32 = 9;
/// Time from falling asleep to being woken: long enough to be asleep, as briefly as a busy core is.
const NAP: Duration = Duration::from_micros(150);
/// Time after which either side gives up.
const PATIENCE: Duration = Duration::from_secs(1);

/// One core and its waker.
#[derive(Debug)]
pub(crate) struct WakeCalibration {
    notifier: EventFd,
    epoll: EpollFd,
    /// Round for which the core is about to sleep.
    asleep: AtomicU32,
    /// Time at which the waker notified it.
    notified_at: AtomicU64,
}

impl WakeCalibration {
    pub(crate) fn new() -> io::Result<Self> {
        let (notifier, epoll) = (EventFd::new()?, EpollFd::new()?);
        epoll.add(notifier.as_raw_fd(), 0)?;
        Ok(WakeCalibration {
            notifier,
            epoll,
            asleep: AtomicU32::new(0),
            notified_at: AtomicU64::new(0),
        })
    }

    /// Runs the core's part, on its thread: returns the median latency of a wake and the mean CPU
    /// time of a park, in nanoseconds. `None` if a notification does not come in time.
    pub(crate) fn sleep(&self, clock: ThreadClock) -> Option<(u64, u64)> {
        let mut late = Vec::new();
        let before = clock.read().ok()?;
        for round in 1..=ROUNDS {
            // Release: the waker, which acquires it, notifies a core that has emptied its notifier.
            self.asleep.store(round, Ordering::Release);
            let patience = PATIENCE.as_nanos() as u64;
            let woken = self.epoll.wait(&mut sys::no_events::<1>(), Some(patience));
            let now = Nanos::now();
            if woken.ok()? == 0 {
                return None;
            }
            self.notifier.drain();
            // Acquire: pairs with the waker's release, which the eventfd orders anyway.
            late.push(now.since(Nanos(self.notified_at.load(Ordering::Acquire))));
        }
        let cpu_ns = clock.read().ok()?.saturating_sub(before) / u64::from(ROUNDS);
        late.sort_unstable();
        Some((late[late.len() / 2], cpu_ns))
    }

    /// Runs the waker's part, on another thread.
    pub(crate) fn wake(&self) {
        for round in 1..=ROUNDS {
            let start = Instant::now();
            while self.asleep.load(Ordering::Acquire) < round {
                if start.elapsed() > PATIENCE {
                    return;
                }
                thread::yield_now();
            }
            // The core is a few instructions from its sleep. This time lets it get there; the
            // measured latency does not depend on it.
            thread::sleep(NAP);
            self.notified_at.store(Nanos::now().0, Ordering::Release);
            self.notifier.notify();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_wake_takes_some_time_and_a_missing_waker_is_not_waited_for() {
        let calibration = Arc::new(WakeCalibration::new().unwrap());
        let of_core = Arc::clone(&calibration);
        let core = thread::spawn(move || of_core.sleep(ThreadClock::of_this_thread().unwrap()));
        calibration.wake();
        let (late_ns, cpu_ns) = core.join().unwrap().unwrap();
        assert!(late_ns > 0 && cpu_ns > 0);

        let alone = WakeCalibration::new().unwrap();
        let clock = ThreadClock::of_this_thread().unwrap();
        assert_eq!(alone.sleep(clock), None);
    }
}
