//! Fairness between pollers that always have work, and descriptors that misbehave.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::common::{eventfd, eventually};
use sidecore::{
    Activity, ArmError, IdlePolicy, Nanos, PollContext, Poller, Probe, Sidecore, SidecoreBuilder,
    Wakes,
};

/// Poller that always has work, in pieces of one cost.
struct AlwaysBusy {
    weight: u32,
    cost: u64,
    /// Most pieces per turn.
    batch: u32,
}

/// Probe that never fires, for pollers that rely on their descriptors.
struct Blind;

impl Probe for Blind {
    fn fires(&self) -> bool {
        false
    }
}

impl Poller for AlwaysBusy {
    type Message = ();
    type Probe = Blind;

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        for _ in 0..self.batch {
            if turn.is_spent() {
                break;
            }
            turn.charge(self.cost);
        }
        Activity::Busy
    }

    fn message(&mut self, (): (), _turn: &mut PollContext<'_>) {}

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        true
    }

    fn disarm(&mut self) {}

    fn weight(&self) -> u32 {
        self.weight
    }
}

/// Returns the service of each per weight, in the order given.
fn shares(gluttons: Vec<AlwaysBusy>) -> Vec<f64> {
    let weights: Vec<f64> = gluttons.iter().map(|g| f64::from(g.weight)).collect();
    let core = SidecoreBuilder::new("t").spawn(gluttons).unwrap();
    thread::sleep(Duration::from_millis(100));
    let stats = core.stats();
    let served = stats
        .pollers
        .iter()
        .map(|poller| poller.activity.cost as f64);
    served
        .zip(weights)
        .map(|(cost, weight)| cost / weight)
        .collect()
}

fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    sum * sum / (shares.len() as f64 * shares.iter().map(|x| x * x).sum::<f64>())
}

#[test]
fn sixteen_with_different_requests_are_served_alike() {
    let glutton = |n: u64| AlwaysBusy {
        weight: 1,
        // 4 KiB and 64 KiB.
        cost: if n.is_multiple_of(2) { 609 } else { 6_753 },
        batch: if n < 2 { 128 } else { 32 },
    };
    let shares = shares((0..16).map(glutton).collect());
    assert!(jain(&shares) >= 0.99, "{shares:?}");
}

#[test]
fn weights_1_2_4_are_kept() {
    let glutton = |weight| AlwaysBusy {
        weight,
        cost: 609,
        // No turn ends before its budget.
        batch: 256,
    };
    let shares = shares([1, 2, 4].map(glutton).into());
    let mean = shares.iter().sum::<f64>() / 3.0;
    assert!(
        shares.iter().all(|share| (share / mean - 1.0).abs() < 0.1),
        "{shares:?}"
    );
}

/// Poller that always has work, in pieces that take `takes_ns` by the clock and are charged `says`.
struct Worker {
    takes_ns: u64,
    says: u64,
    done_ns: Arc<AtomicU64>,
}

impl Poller for Worker {
    type Message = ();
    type Probe = Blind;

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        while !turn.is_spent() {
            let start = Nanos::now();
            while Nanos::now().since(start) < self.takes_ns {}
            self.done_ns.fetch_add(self.takes_ns, Ordering::Relaxed);
            turn.charge(self.says);
        }
        Activity::Busy
    }

    fn message(&mut self, (): (), _turn: &mut PollContext<'_>) {}

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        true
    }

    fn disarm(&mut self) {}
}

#[test]
fn a_poller_that_takes_longer_than_it_charges_pays_the_time() {
    let worker = |takes_ns, says| Worker {
        takes_ns,
        says,
        done_ns: Arc::default(),
    };
    let (honest, other) = (worker(1_000, 1_000), worker(50_000, 200));
    let done = [&honest, &other].map(|worker| Arc::clone(&worker.done_ns));
    let core = SidecoreBuilder::new("t")
        .spawn(vec![honest, other])
        .unwrap();
    // Some hundred turns of the poller that takes long, by either of the two counts.
    let [honest, other] = done;
    let long = 20_000_000;
    while honest
        .load(Ordering::Relaxed)
        .max(other.load(Ordering::Relaxed))
        < long
    {
        thread::sleep(Duration::from_millis(1));
    }
    core.stop();
    let (honest, other) = (
        honest.load(Ordering::Relaxed),
        other.load(Ordering::Relaxed),
    );
    // By their charges it would be 50 times as much.
    assert!(other < 4 * honest, "{other} ns beside {honest} ns");
}

#[test]
fn a_poller_alone_on_the_core_pays_only_what_it_charges() {
    const TAKES_NS: u64 = 50_000;
    const SAYS: u64 = 200;
    let alone = Worker {
        takes_ns: TAKES_NS,
        says: SAYS,
        done_ns: Arc::default(),
    };
    let done = Arc::clone(&alone.done_ns);
    let core = SidecoreBuilder::new("t").spawn(vec![alone]).unwrap();
    // Some hundred pieces.
    while done.load(Ordering::Relaxed) < 500 * TAKES_NS {
        thread::sleep(Duration::from_millis(1));
    }
    let cost = core.stats().pollers[0].activity.cost;
    let pieces = done.load(Ordering::Relaxed) / TAKES_NS;
    assert!(
        (1..=pieces * SAYS).contains(&cost),
        "{cost} for {pieces} pieces"
    );
}

/// A poller with one descriptor.
struct Listener {
    bell: Option<File>,
    heard: Arc<AtomicU64>,
    /// Leaves the descriptor readable.
    is_deaf: bool,
}

impl Poller for Listener {
    type Message = Option<File>;
    type Probe = Blind;

    fn attached(&mut self, wakes: &mut Wakes) -> std::io::Result<()> {
        self.bell
            .as_ref()
            .map_or(Ok(()), |bell| wakes.add(bell.as_raw_fd(), 3))
    }

    fn poll(&mut self, _turn: &mut PollContext<'_>) -> Activity {
        Activity::Idle
    }

    /// Takes another descriptor instead. The old one is closed without being removed, which is an
    /// error.
    fn message(&mut self, bell: Option<File>, turn: &mut PollContext<'_>) {
        self.bell = bell;
        if let Some(bell) = &self.bell {
            turn.wakes().add(bell.as_raw_fd(), 3).unwrap();
        }
    }

    fn ready(&mut self, token: u32, _turn: &mut PollContext<'_>) {
        assert_eq!(token, 3);
        self.heard.fetch_add(1, Ordering::Relaxed);
        if let Some(mut bell) = self.bell.as_ref().filter(|_| !self.is_deaf) {
            let _ = bell.read(&mut [0; 8]);
        }
    }

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn probe(&self, slot: &mut Option<Blind>) {
        *slot = Some(Blind);
    }
}

fn listening(is_deaf: bool) -> (Sidecore<Listener>, File, Arc<AtomicU64>) {
    let bell = eventfd();
    let heard = Arc::new(AtomicU64::new(0));
    let listener = Listener {
        bell: Some(bell.try_clone().unwrap()),
        heard: Arc::clone(&heard),
        is_deaf,
    };
    let core = SidecoreBuilder::new("t")
        .idle(IdlePolicy::Sleep)
        .spawn(vec![listener])
        .unwrap();
    (core, bell, heard)
}

fn ring(mut bell: &File) {
    bell.write_all(&1u64.to_ne_bytes()).unwrap();
}

/// Returns the CPU time of the sidecore during 200 ms.
fn cpu_of<P: Poller>(core: &Sidecore<P>, mut meanwhile: impl FnMut()) -> Duration {
    let (before, start) = (core.thread_cpu_time().unwrap(), Instant::now());
    while start.elapsed() < Duration::from_millis(200) {
        meanwhile();
    }
    core.thread_cpu_time().unwrap() - before
}

#[test]
fn a_descriptor_that_stays_readable_is_muted_and_the_core_sleeps() {
    let (core, bell, heard) = listening(true);
    ring(&bell);
    eventually("muted", || core.stats().core.mutes >= 4);
    let used = cpu_of(&core, || thread::sleep(Duration::from_millis(10)));
    assert!(used < Duration::from_millis(10), "{used:?} of 200 ms");
    let stats = core.stats();
    assert_eq!(stats.pollers[0].activity.mutes, stats.core.mutes);
    // Not for ever: it is registered again, up to 16 ms later.
    let before = heard.load(Ordering::Relaxed);
    eventually("looked at again", || {
        heard.load(Ordering::Relaxed) > before + 3
    });
}

#[test]
fn a_storm_of_kicks_for_nothing_costs_little() {
    let (core, bell, heard) = listening(false);
    let used = cpu_of(&core, || {
        ring(&bell);
        (0..200).for_each(|_| std::hint::spin_loop());
    });
    let heard = heard.load(Ordering::Relaxed);
    assert!(
        used < Duration::from_millis(40),
        "{used:?} of 200 ms, {heard} heard"
    );
    assert!(core.stats().core.mutes > 0 && heard > 0);
}

#[test]
fn a_descriptor_closed_before_it_was_removed_does_not_keep_the_core_awake() {
    let (core, bell, heard) = listening(false);
    ring(&bell);
    eventually("heard", || heard.load(Ordering::Relaxed) == 1);
    // The file lives on in `bell`, as one of another process would.
    core.handle(0).send(None).ok().unwrap();
    // Rung until the list is built anew: a ring that comes before the message is still handled, and
    // read away. While the file is in the list its events are taken for the poller's; then they are
    // muted, and belong to no registered descriptor.
    eventually("built anew", || {
        ring(&bell);
        core.stats().core.rebuilds >= 1
    });
    let used = cpu_of(&core, || thread::sleep(Duration::from_millis(10)));
    assert!(used < Duration::from_millis(10), "{used:?} of 200 ms");
    let other = eventfd();
    core.handle(0)
        .send(Some(other.try_clone().unwrap()))
        .ok()
        .unwrap();
    let before = heard.load(Ordering::Relaxed);
    ring(&other);
    eventually("another is heard", || {
        heard.load(Ordering::Relaxed) > before
    });
}
