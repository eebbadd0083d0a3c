//! Costs of the runtime itself: of a sweep over idle pollers with probes, of a sleep and wake with
//! them, and of a turn.
//!
//! ```text
//! cargo run --release -p sidecore --example costs
//! ```
//! Each idle poller has a word of its own, on a page of its own, as a ring in guest memory would
//! be, and an eventfd. Figures are wall-clock times, the least of several windows.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use sidecore::{
    Activity, ArmError, IdlePolicy, PollContext, Poller, Probe, Sidecore, SidecoreBuilder, Wakes,
};

/// One page.
#[repr(align(4096))]
struct Word(AtomicU32);

/// A stretch of shared memory, and one word in it.
#[derive(Clone)]
struct SharedWord(Arc<Vec<Word>>, usize);

impl SharedWord {
    fn word(&self) -> &AtomicU32 {
        &self.0[self.1].0
    }
}

/// Probe as for a ring: a pointer that was computed before, the last value seen there, and a
/// reference that keeps the memory mapped.
struct RingProbe {
    word: *const AtomicU32,
    seen: u32,
    _place: SharedWord,
}

// SAFETY: the word is shared memory, accessed atomically only.
unsafe impl Send for RingProbe {}

impl Probe for RingProbe {
    fn fires(&self) -> bool {
        // SAFETY: `_place` keeps the word in being.
        unsafe { &*self.word }.load(Ordering::Relaxed) != self.seen
    }
}

struct Device {
    place: SharedWord,
    seen: u32,
    served: Arc<AtomicU64>,
    kick: Arc<File>,
    is_busy: bool,
}

impl Poller for Device {
    type Message = ();
    type Probe = RingProbe;

    fn attached(&mut self, wakes: &mut Wakes) -> std::io::Result<()> {
        wakes.add(self.kick.as_raw_fd(), 0)
    }

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        if self.is_busy {
            turn.charge(turn.budget());
            return Activity::Busy;
        }
        let now = self.place.word().load(Ordering::Acquire);
        if now == self.seen {
            return Activity::Idle;
        }
        self.seen = now;
        self.served.fetch_add(1, Ordering::Release);
        turn.charge(200);
        Activity::Busy
    }

    fn message(&mut self, (): (), _turn: &mut PollContext<'_>) {}

    fn ready(&mut self, _token: u32, _turn: &mut PollContext<'_>) {
        let _ = (&*self.kick).read(&mut [0; 8]);
    }

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        self.place.word().load(Ordering::Relaxed) != self.seen
    }

    fn disarm(&mut self) {}

    fn probe(&self, slot: &mut Option<RingProbe>) {
        match slot {
            Some(probe) => probe.seen = self.seen,
            None => {
                *slot = Some(RingProbe {
                    word: self.place.word(),
                    seen: self.seen,
                    _place: self.place.clone(),
                });
            }
        }
    }
}

fn devices(count: usize) -> Vec<Device> {
    let kick = || {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        assert!(fd >= 0, "an eventfd");
        // SAFETY: a new descriptor, which no other value owns.
        Arc::new(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    };
    let words = Arc::new(
        (0..count)
            .map(|_| Word(AtomicU32::new(0)))
            .collect::<Vec<_>>(),
    );
    (0..count)
        .map(|at| Device {
            place: SharedWord(Arc::clone(&words), at),
            seen: 0,
            served: Arc::new(AtomicU64::new(0)),
            kick: kick(),
            is_busy: false,
        })
        .collect()
}

fn start(policy: IdlePolicy, devices: Vec<Device>) -> Sidecore<Device> {
    let core = SidecoreBuilder::new("costs").idle(policy);
    core.spawn(devices).expect("a sidecore")
}

/// Returns the least result of `measure` in 40 windows of 5 ms: other programs only add to it.
fn least(mut measure: impl FnMut() -> f64) -> f64 {
    (0..40).map(|_| measure()).fold(f64::INFINITY, f64::min)
}

/// Nanoseconds of an idle sweep.
fn sweep(count: usize) -> f64 {
    let core = start(IdlePolicy::Poll, devices(count));
    least(|| {
        let before = core.stats().core;
        std::thread::sleep(Duration::from_millis(5));
        let after = core.stats().core;
        (after.idle_ns - before.idle_ns) as f64 / (after.sweeps_idle - before.sweeps_idle) as f64
    })
}

/// Microseconds awake, of wall clock and of CPU time, per sleep and wake for one of `count`
/// devices; and from kick to service.
fn park(count: usize) -> (f64, f64, f64) {
    let devices = devices(count);
    let (place, served) = (devices[0].place.clone(), Arc::clone(&devices[0].served));
    let kick = Arc::clone(&devices[0].kick);
    let core = start(IdlePolicy::Sleep, devices);
    let mut latency = Duration::ZERO;
    let before = (core.stats().core, core.thread_cpu_time().expect("a clock"));
    const ROUNDS: u32 = 3000;
    for round in 1..=ROUNDS {
        while !core.watch().is_asleep() {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        place.word().store(round, Ordering::Release);
        (&*kick).write_all(&1u64.to_ne_bytes()).expect("room");
        while served.load(Ordering::Acquire) != u64::from(round) {
            std::hint::spin_loop();
        }
        latency += start.elapsed();
    }
    let cpu = core.thread_cpu_time().expect("a clock") - before.1;
    let after = core.stats().core;
    let sleeps = (after.sleeps - before.0.sleeps) as f64;
    let awake = after.arming_ns + after.busy_ns + after.idle_ns;
    let awake_before = before.0.arming_ns + before.0.busy_ns + before.0.idle_ns;
    (
        (awake - awake_before) as f64 / sleeps / 1e3,
        cpu.as_secs_f64() * 1e6 / sleeps,
        latency.as_secs_f64() * 1e6 / f64::from(ROUNDS),
    )
}

/// Nanoseconds per turn with `busy` pollers that only charge, beside 256 idle ones.
fn turn(busy: usize) -> f64 {
    let mut devices = devices(256 + busy);
    devices[..busy]
        .iter_mut()
        .for_each(|device| device.is_busy = true);
    let core = start(IdlePolicy::Poll, devices);
    let polls = |stats: &sidecore::Stats| -> u64 {
        let polls = stats
            .pollers
            .iter()
            .map(|poller| poller.activity.polls_busy);
        polls.sum()
    };
    least(|| {
        let before = core.stats();
        std::thread::sleep(Duration::from_millis(5));
        let after = core.stats();
        let busy_ns = after.core.busy_ns - before.core.busy_ns;
        busy_ns as f64 / (polls(&after) - polls(&before)) as f64
    })
}

fn main() {
    for count in [1, 16, 256, 1024] {
        println!("idle sweep, {count:4} pollers: {:8.0} ns", sweep(count));
    }
    for count in [1, 256, 1024] {
        let (awake, cpu, latency) = park(count);
        println!(
            "sleep and wake for one of {count:4}: awake {awake:.1} us, CPU {cpu:.1} us, from kick \
             to service {latency:.1} us"
        );
    }
    for busy in [1, 16] {
        println!("turn, {busy:2} busy of 256 idle: {:8.0} ns", turn(busy));
    }
}
