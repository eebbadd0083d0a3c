//! Loom's model of going to sleep: the real [`park`], gate and mailbox, against drivers
//! of both notification styles and senders, in every interleaving with a bounded number of
//! preemptions and with every value that the C11 memory model lets a load return.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p sidecore --lib --release model
//! ```
//! The world is small: each driver publishes one or two items. The sidecore sweeps over those whose
//! probes fire or whose descriptors did, and parks whenever a sweep found nothing; it ends when it
//! has seen everything. If it sleeps when all drivers and senders are done and without a
//! notification, a wake-up was lost. A model that cannot fail proves nothing: each patch in
//! `tests/mutants/sidecore` takes a single step away, and the wake-up is lost.

#![expect(clippy::unwrap_used, reason = "a poisoned lock fails the test")]

use loom::{
    model::Builder,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU32, Ordering, fence},
    },
    thread,
};

use super::*;
use crate::{
    mailbox::{MailboxReceiver, mailbox},
    poll_context::PollContext,
    poller::{Activity, Probe},
    wakes::Wakes,
};

/// All eventfds of the model, in one: what `epoll_wait` sleeps on.
#[derive(Debug)]
struct Notifiers {
    state: Mutex<Rung>,
    changed: Condvar,
}

#[derive(Debug)]
struct Rung {
    /// One counter per eventfd; slot 0 is the mailbox's.
    slots: [u32; 4],
    /// Number of drivers and senders that have not ended. Not part of the protocol: it
    /// distinguishes a lost wake-up from one still to come.
    at_work: usize,
}

impl Notifiers {
    fn new(at_work: usize) -> Self {
        Notifiers {
            state: Mutex::new(Rung {
                slots: [0; 4],
                at_work,
            }),
            changed: Condvar::new(),
        }
    }

    fn one_is_done(&self) {
        self.state.lock().unwrap().at_work -= 1;
        self.changed.notify_one();
    }
}

#[derive(Debug, Clone)]
struct SlotNotifier {
    notifiers: Arc<Notifiers>,
    slot: usize,
}

impl SlotNotifier {
    fn drain(&self) {
        self.notifiers.state.lock().unwrap().slots[self.slot] = 0;
    }
}

impl Notifier for SlotNotifier {
    fn notify(&self) {
        self.notifiers.state.lock().unwrap().slots[self.slot] += 1;
        self.notifiers.changed.notify_one();
    }
}

/// `epoll_wait` with no timeout: level-triggered, so nothing is taken but what the mailbox
/// notified.
struct NotifierWaiter(Arc<Notifiers>);

impl Waiter for NotifierWaiter {
    fn wait(&mut self, _deadline: Option<Nanos>) -> io::Result<Wake> {
        let mut state = self.0.state.lock().unwrap();
        while state.slots == [0; 4] {
            let is_lost = state.at_work == 0;
            assert!(
                !is_lost,
                "lost wake-up: asleep with work to do and nobody to ring"
            );
            state = self.0.changed.wait(state).unwrap();
        }
        state.slots[0] = 0;
        Ok(Wake::Fd)
    }
}

/// Way in which a queue requests notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    /// avail_event: notify when the index passes this one. Left behind while polling.
    EventIdx,
    /// NO_NOTIFY in the used ring's flags: set while polling.
    Flag,
    /// A word of completions whose writer always notifies, as io_uring with an eventfd does.
    Always,
}

/// The two words that driver and device share.
#[derive(Debug)]
struct Words {
    avail: AtomicU32,
    wish: AtomicU32,
}

/// avail_event after many entries have gone by: no index of the model.
const BEHIND: u32 = 1000;

/// Runs the driver: publishes items `0..count`.
fn drive(style: Style, words: &Words, notifier: &SlotNotifier, count: u32, has_barrier: bool) {
    for index in 0..count {
        words.avail.store(index + 1, Ordering::Release);
        if has_barrier {
            // The driver's mb(); pairs with the fence in `park`.
            fence(Ordering::SeqCst);
        }
        let wish = words.wish.load(Ordering::Relaxed);
        let wants = match style {
            Style::EventIdx => wish == index,
            Style::Flag => wish == 0,
            Style::Always => true,
        };
        if wants {
            notifier.notify();
        }
    }
}

struct Queue {
    style: Style,
    words: Arc<Words>,
    notifier: SlotNotifier,
    last_avail: u32,
    /// Number of times that arming fails.
    failures: u32,
    has_blind_probe: bool,
}

/// Available index, and the part of it that has been seen.
struct Avail {
    words: Arc<Words>,
    seen: u32,
    /// Has no probe: relies on the descriptors only.
    is_blind: bool,
}

impl Probe for Avail {
    fn fires(&self) -> bool {
        !self.is_blind && self.words.avail.load(Ordering::Relaxed) != self.seen
    }
}

impl Poller for Queue {
    type Message = ();
    type Probe = Avail;

    fn poll(&mut self, _turn: &mut PollContext<'_>) -> Activity {
        let avail = self.words.avail.load(Ordering::Acquire);
        let has_new = avail != self.last_avail;
        self.last_avail = avail;
        if has_new {
            Activity::Busy
        } else {
            Activity::Idle
        }
    }

    fn message(&mut self, (): (), _turn: &mut PollContext<'_>) {}

    fn ready(&mut self, _token: u32, _turn: &mut PollContext<'_>) {
        self.notifier.drain();
    }

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        if self.failures > 0 {
            self.failures -= 1;
            return Err(ArmError::new("not yet"));
        }
        let wish = match self.style {
            Style::EventIdx => self.last_avail,
            Style::Flag => 0,
            Style::Always => return Ok(()),
        };
        self.words.wish.store(wish, Ordering::Relaxed);
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        self.words.avail.load(Ordering::Relaxed) != self.last_avail
    }

    fn disarm(&mut self) {
        if self.style == Style::Flag {
            self.words.wish.store(1, Ordering::Relaxed);
        }
    }

    fn probe(&self, slot: &mut Option<Avail>) {
        *slot = Some(Avail {
            words: Arc::clone(&self.words),
            seen: self.last_avail,
            is_blind: self.has_blind_probe,
        });
    }
}

/// Parameters of one explored model.
#[derive(Clone, Copy, Debug)]
struct World {
    /// The queues and the number of items that their drivers publish.
    queues: &'static [(Style, u32)],
    /// Number of senders, which send one message each.
    senders: u32,
    /// Number of times that arming the last poller fails.
    failures: u32,
    /// Probes that never fire.
    has_blind_probes: bool,
    /// The drivers execute their barrier.
    has_barrier: bool,
    /// Loom's bound on preemptions (threads that block give way without limit).
    preemptions: usize,
}

const WORLD: World = World {
    queues: &[],
    senders: 0,
    failures: 0,
    has_blind_probes: false,
    has_barrier: true,
    preemptions: 2,
};

impl World {
    /// Explores the model.
    fn explore(self) {
        let mut builder = Builder::new();
        // `SIDECORE_PREEMPTIONS` for longer searches.
        let asked = std::env::var("SIDECORE_PREEMPTIONS").ok();
        let preemptions = asked.map_or(self.preemptions, |n| n.parse().expect("a number"));
        builder.preemption_bound = Some(preemptions);
        let executions = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counter = std::sync::Arc::clone(&executions);
        builder.check(move || {
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            self.once();
        });
        println!("{self:?}: {executions:?} executions");
    }

    fn once(self) {
        let notifiers = Arc::new(Notifiers::new(self.queues.len() + self.senders as usize));
        let notifier = |slot| SlotNotifier {
            notifiers: Arc::clone(&notifiers),
            slot,
        };
        let (sender, mut receiver) = mailbox::<(), _>(notifier(0));
        let mut pollers = Pollers::new();
        let mut threads = Vec::new();
        for (index, &(style, count)) in self.queues.iter().enumerate() {
            let wish = if style == Style::Flag { 1 } else { BEHIND };
            let words = Arc::new(Words {
                avail: AtomicU32::new(0),
                wish: AtomicU32::new(wish),
            });
            let (notifier, of_driver) = (
                notifier(index + 1),
                (Arc::clone(&words), notifier(index + 1)),
            );
            let is_last = index + 1 == self.queues.len();
            let queue = Queue {
                style,
                words,
                notifier,
                last_avail: 0,
                failures: if is_last { self.failures } else { 0 },
                has_blind_probe: self.has_blind_probes,
            };
            pollers.insert(index, queue, Wakes::by_hand(), true);
            threads.push(thread::spawn(move || {
                let (words, notifier) = of_driver;
                drive(style, &words, &notifier, count, self.has_barrier);
                notifier.notifiers.one_is_done();
            }));
        }
        for _ in 0..self.senders {
            let sender = sender.clone();
            threads.push(thread::spawn(move || {
                sender.send(0, ()).unwrap();
                sender.gate().notifier().notifiers.one_is_done();
            }));
        }
        self.serve(&mut pollers, &mut receiver, &notifiers);
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }

    /// Runs the sidecore: sweeps and parks until it has seen everything.
    fn serve(
        self,
        pollers: &mut Pollers<Queue>,
        receiver: &mut MailboxReceiver<(), SlotNotifier>,
        notifiers: &Arc<Notifiers>,
    ) {
        let mut waiter = NotifierWaiter(Arc::clone(notifiers));
        let mut wakes = Wakes::by_hand();
        let mut turn = PollContext::new(Nanos(0), 1, &mut wakes);
        let mut is_active = vec![true; self.queues.len()];
        let mut messages = 0;
        loop {
            let mut activity = Activity::Idle;
            receiver.look();
            while receiver.take().is_some() {
                messages += 1;
                activity = Activity::Busy;
            }
            pollers.scan(|at| is_active[at] = true);
            for at in (0..self.queues.len()).filter(|&at| is_active[at]) {
                if pollers.touch(at).poller.poll(&mut turn) == Activity::Busy {
                    activity = Activity::Busy;
                }
            }
            let has_all = (0..)
                .zip(self.queues)
                .all(|(at, &(_, n))| pollers.get(at).unwrap().poller.last_avail == n);
            if has_all && messages == self.senders {
                return;
            }
            if activity == Activity::Busy {
                continue;
            }
            for (at, is_active) in is_active.iter_mut().enumerate() {
                if std::mem::take(is_active) {
                    assert!(pollers.probe(at));
                }
            }
            let gate = Arc::clone(receiver.gate());
            match park(pollers, &gate, receiver.seen(), &mut waiter) {
                Parked::Slept(_) => {
                    let notified = notifiers.state.lock().unwrap().slots;
                    for at in (0..self.queues.len()).filter(|&at| notified[at + 1] > 0) {
                        pollers.touch(at).poller.ready(0, &mut turn);
                        is_active[at] = true;
                    }
                }
                Parked::WorkFound => pollers
                    .take_found()
                    .into_iter()
                    .for_each(|at| is_active[at] = true),
                Parked::NotArmed(_) => {}
            }
        }
    }
}

const EVENT_IDX: World = World {
    queues: &[(Style::EventIdx, 2)],
    ..WORLD
};
const FLAG: World = World {
    queues: &[(Style::Flag, 2)],
    ..WORLD
};
const MAIL: World = World {
    senders: 2,
    ..WORLD
};
const BOTH_QUEUES: World = World {
    queues: &[(Style::EventIdx, 1), (Style::Flag, 1)],
    ..WORLD
};
/// One queue is served while the other stays armed.
const STAYS_ARMED: World = World {
    queues: &[(Style::EventIdx, 2), (Style::Flag, 1)],
    preemptions: 1,
    ..WORLD
};
/// Beside a queue that cannot be armed at the first try.
const FAILS_ONCE: World = World {
    queues: &[(Style::EventIdx, 1), (Style::Flag, 0)],
    failures: 1,
    has_blind_probes: true,
    ..WORLD
};
/// Only descriptors and the re-check find work.
const BLIND: World = World {
    has_blind_probes: true,
    ..STAYS_ARMED
};
const EVERYTHING: World = World {
    queues: &[(Style::EventIdx, 1), (Style::Flag, 1), (Style::Always, 1)],
    senders: 1,
    preemptions: 1,
    ..WORLD
};

#[test]
fn model_event_idx_loses_no_wake_up() {
    EVENT_IDX.explore();
}

#[test]
fn model_flag_loses_no_wake_up() {
    FLAG.explore();
}

#[test]
fn model_two_senders_lose_no_wake_up() {
    MAIL.explore();
}

#[test]
fn model_two_queues_lose_no_wake_up() {
    BOTH_QUEUES.explore();
}

#[test]
fn model_a_queue_that_stays_armed_loses_no_wake_up() {
    STAYS_ARMED.explore();
}

#[test]
fn model_blind_probes_lose_no_wake_up() {
    BLIND.explore();
}

#[test]
fn model_a_failure_to_arm_loses_no_wake_up() {
    FAILS_ONCE.explore();
}

#[test]
fn model_two_queues_a_completion_and_a_sender_lose_no_wake_up() {
    EVERYTHING.explore();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_driver_without_barrier() {
    World {
        has_barrier: false,
        ..EVENT_IDX
    }
    .explore();
}
