//! A disk that answers no sooner than a given time after it was asked, whatever is below it.
//!
//! For measurements: a file in memory answers before the guest that asked has gone idle, which no
//! disk does, and then it depends on a race whether an interrupt finds the guest running or halted.
//! With the latency of a disk it always finds it halted. Each answer is later than that by another
//! part of two thirds of it: answers that always took the same time could keep step with the
//! guest's clock tick, and whether the two then meet at every request or never would be luck.
//!
//! An operation reaches the disk below at once; its completion is held back. Until it is reported
//! the slot is in flight: its leases are held, and it can be cancelled only as far as the disk
//! below can.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece};
use vio::pass_down;

/// See the head of the module.
pub struct LatencyDisk {
    below: Box<dyn BlockIo>,
    latency: Duration,
    /// Operations so far: what the next one's part is made of.
    asked: u64,
    /// When each slot in flight may be reported, at the earliest.
    due: HashMap<u32, Instant>,
    /// Completions held back, in the order the disk below reported them.
    held: VecDeque<(Instant, Completion)>,
    scratch: Vec<Completion>,
    timer: OwnedFd,
}

impl LatencyDisk {
    /// `below`, which answers `latency` to five thirds of it after it is asked.
    ///
    /// # Errors
    /// The system has no timer descriptor left.
    pub fn new(below: Box<dyn BlockIo>, latency: Duration) -> io::Result<Self> {
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        Ok(Self {
            below,
            latency,
            asked: 0,
            due: HashMap::new(),
            held: VecDeque::new(),
            scratch: Vec::new(),
            timer,
        })
    }

    /// Returns the duration of the next operation: parts that follow each other by the golden ratio
    /// fill the span evenly, however many there are, and come the same in each run.
    fn next(&mut self) -> Duration {
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        self.asked += 1;
        let part = (self.asked.wrapping_mul(GOLDEN) >> 32) as f64 / 2_f64.powi(32);
        self.latency + self.latency.mul_f64(part * 2.0 / 3.0)
    }

    /// Takes what the disk below has finished.
    fn collect(&mut self) {
        self.below.poll(&mut self.scratch);
        let now = Instant::now();
        for completion in self.scratch.drain(..) {
            let due = match completion.outcome {
                // The slot stays in flight: this is no answer of the disk.
                Outcome::NotCancellable => now,
                Outcome::NotBegun(_) => {
                    self.due.remove(&completion.slot);
                    now
                }
                Outcome::Done | Outcome::Failed(_) => {
                    self.due.remove(&completion.slot).unwrap_or(now)
                }
            };
            self.held.push_back((due, completion));
        }
    }

    /// Sets the timer `after` from now; zero switches it off.
    fn set_timer(&self, after: Duration) {
        let value = Itimerspec {
            it_interval: Timespec::default(),
            // A latency is far below 2^63 seconds.
            it_value: Timespec {
                tv_sec: after.as_secs() as i64,
                tv_nsec: after.subsec_nanos().into(),
            },
        };
        // Our own timer and a valid time: it cannot fail.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value);
    }
}

impl BlockIo for LatencyDisk {
    pass_down!();

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        let latency = self.next();
        self.due.insert(slot, Instant::now() + latency);
        self.below.submit(slot, op, pieces);
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        if self.due.is_empty() && self.held.is_empty() {
            return self.below.poll(done);
        }
        self.collect();
        let now = Instant::now();
        self.held.retain(|(due, completion)| {
            let is_due = *due <= now;
            if is_due {
                done.push(*completion);
            }
            !is_due
        });
    }

    /// Collects nothing: the device asks once its timer is set, and an operation collected now
    /// would wake no sleeper.
    fn has_completions(&mut self) -> bool {
        let now = Instant::now();
        self.below.has_completions() || self.held.iter().any(|(due, _)| *due <= now)
    }

    fn cancel(&mut self, slot: u32) {
        if self.held.iter().any(|(_, held)| held.slot == slot) {
            // Done below, and only waiting to be said: say it now.
            for (due, _) in self.held.iter_mut().filter(|(_, held)| held.slot == slot) {
                *due = Instant::now();
            }
            return;
        }
        self.due.remove(&slot);
        self.below.cancel(slot);
    }

    fn arm(&mut self) {
        self.below.arm();
        if let Some(first) = self.held.iter().map(|(due, _)| *due).min() {
            // At least 1 ns: zero would switch the timer off.
            let after = first.saturating_duration_since(Instant::now());
            self.set_timer(after.max(Duration::from_nanos(1)));
        }
    }

    fn disarm(&mut self) {
        self.set_timer(Duration::ZERO);
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        fds.push(self.timer.as_raw_fd());
        self.below.wake_fds(fds);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use rustix::event::{PollFd, PollFlags, poll as wait};
    use vio::blk::MemDisk;

    use super::*;
    use crate::SlowDisk;

    /// Whether one of the disk's descriptors becomes readable within five seconds.
    #[expect(unsafe_code, reason = "descriptors come as numbers")]
    fn becomes_readable(fds: &[RawFd]) -> bool {
        let mut polls: Vec<_> = fds
            .iter()
            .map(|&fd| {
                // SAFETY: the disk that said it is there has it open, and outlives this call.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                PollFd::from_borrowed_fd(fd, PollFlags::IN)
            })
            .collect();
        let limit = Timespec {
            tv_sec: 5,
            tv_nsec: 0,
        };
        matches!(wait(&mut polls, Some(&limit)), Ok(1..))
    }

    fn disk(latency: Duration) -> LatencyDisk {
        let below = Box::new(MemDisk::new(vec![0; 4096], 4, false));
        LatencyDisk::new(below, latency).unwrap()
    }

    fn poll(disk: &mut LatencyDisk) -> Vec<Completion> {
        let mut done = Vec::new();
        disk.poll(&mut done);
        done
    }

    #[test]
    fn an_operation_ends_after_its_latency_and_not_before() {
        let latency = Duration::from_millis(20);
        let mut disk = disk(latency);
        let start = Instant::now();
        disk.submit(1, Op::Flush, &[]);
        disk.flush();
        assert!(poll(&mut disk).is_empty());
        let done = loop {
            let done = poll(&mut disk);
            if !done.is_empty() {
                break done;
            }
        };
        assert!(start.elapsed() >= latency);
        assert_eq!(
            done,
            [Completion {
                slot: 1,
                outcome: Outcome::Done
            }]
        );
        assert!(poll(&mut disk).is_empty());
    }

    #[test]
    fn answers_are_spread_evenly() {
        let mut disk = disk(Duration::from_millis(6));
        let mut parts = [0; 4];
        for _ in 0..400 {
            let late = disk.next() - disk.latency;
            parts[late.as_millis() as usize] += 1;
        }
        assert!(
            parts.iter().all(|part| (97..=103).contains(part)),
            "{parts:?}"
        );
    }

    /// Waits as an owner does that sleeps whenever it may; `between` happens behind the first
    /// arming.
    fn wait_asleep(disk: &mut LatencyDisk, between: impl FnOnce()) -> Vec<Completion> {
        let mut between = Some(between);
        loop {
            let done = poll(disk);
            if !done.is_empty() {
                return done;
            }
            disk.arm();
            if let Some(between) = between.take() {
                between();
            }
            if !disk.has_completions() {
                let mut fds = Vec::new();
                disk.wake_fds(&mut fds);
                assert!(becomes_readable(&fds), "nothing wakes the owner");
            }
            disk.disarm();
        }
    }

    #[test]
    fn a_sleeping_owner_is_woken_when_it_is_due() {
        let mut disk = disk(Duration::from_millis(10));
        disk.submit(0, Op::Flush, &[]);
        disk.flush();
        assert_eq!(wait_asleep(&mut disk, || {}).len(), 1);
    }

    #[test]
    fn completion_below_after_arming_wakes_the_sleeper() {
        let below = Box::new(MemDisk::new(vec![0; 4096], 4, false));
        let (below, control) = SlowDisk::new(below).unwrap();
        let mut disk = LatencyDisk::new(Box::new(below), Duration::from_millis(20)).unwrap();
        disk.submit(0, Op::Flush, &[]);
        disk.flush();
        assert_eq!(wait_asleep(&mut disk, || control.release(1)).len(), 1);
    }

    #[test]
    fn cancelling_what_is_done_below_reports_it_at_once() {
        let mut disk = disk(Duration::from_secs(3600));
        disk.submit(2, Op::Flush, &[]);
        disk.flush();
        assert!(poll(&mut disk).is_empty());
        disk.cancel(2);
        assert_eq!(
            poll(&mut disk),
            [Completion {
                slot: 2,
                outcome: Outcome::Done
            }]
        );
    }
}
