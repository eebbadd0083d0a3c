//! Several pollers as one: they stay on one core, move together, and may call each other.
//!
//! A [`Group`] is a poller made of others, its **children**, for pollers that must be on the same
//! core, such as the ports of a switch: one child copies directly from another child's memory,
//! without a contended lock. To a core it is one poller. Among its children it does the work of a
//! core among pollers, with the same parts ([`Pollers`], [`Drr`]):
//!
//! ```text
//! turn: round over the active children, by deficit ─▶ child.poll(a turn of its own) ─▶ its cost is charged to the group's turn
//!          ▲ probes, deadlines, wakers, messages     budget spent: the round continues next turn
//! ```
//! - **Fairness.** Children share the group's part of the core by weight and deficit, and are
//!   charged as pollers are. The group's own weight is the sum of those that have work, so that a
//!   child gets the share that it would get by itself.
//! - **Descriptors** are each child's own: tokens cannot collide, and a descriptor that fires
//!   without work is muted alone ([`Wakes`]).
//! - **Idle.** The group's probe is that of all its children, one load each. It needs a lock, which
//!   is not contended at that time. There is one copy of the probes, so when a child releases
//!   memory, no other copy of its probe keeps that memory alive.
//! - **Arming.** Children stay armed until they are called, as pollers of a core do. If one cannot
//!   be armed, none stays armed.
//! - **A move** takes all children or none. Each is asked until it may leave; those that may leave
//!   take nothing new meanwhile. After [`HELD_NS`] without success, all are served again for
//!   [`SERVED_NS`] before the next try.
//! - **Waking each other.** A child whose work makes work for another sets that one's
//!   [`ChildWaker`], a bit that the group checks before each round and before it sleeps.
//!
//! Left out: adding and removing children, groups of groups (a group's descriptors have no room for
//! a second level).

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    clock::Nanos,
    drr::{self, Drr, Grant, State},
    poll_context::PollContext,
    poller::{Activity, ArmError, DetachReason, Poller, Probe},
    pollers::Pollers,
    serve::{CALL_BUDGET, MESSAGE_COST, READY_COST, READY_DEBT},
    wakes::Wakes,
};

/// Longest time for which children that may leave wait for the others, in nanoseconds.
const HELD_NS: u64 = 10_000_000;
/// Time for which all children are served between two tries, in nanoseconds.
const SERVED_NS: u64 = 9 * HELD_NS;

/// Wakers of the children of one group, by which children report work for each other. They are made
/// before the group, since children hold their parts of it.
#[derive(Clone, Debug)]
pub struct ChildWakers(Arc<[AtomicU64]>);

/// Waker of one child of a group: reports that the child has work.
#[derive(Clone, Debug)]
pub struct ChildWaker {
    all: Arc<[AtomicU64]>,
    child: usize,
}

impl ChildWakers {
    /// Creates the wakers of a group of `children` children.
    pub fn new(children: usize) -> Self {
        Self(
            (0..children.div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
        )
    }

    /// Returns the waker of child `child`.
    ///
    /// # Panics
    /// If there are not so many children.
    pub fn waker(&self, child: usize) -> ChildWaker {
        assert!(child / 64 < self.0.len(), "a child of the group");
        ChildWaker {
            all: Arc::clone(&self.0),
            child,
        }
    }

    fn are_set(&self) -> bool {
        // Set by this thread.
        self.0.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Calls `each` for the children whose bit is set, and resets the bits.
    fn take(&self, mut each: impl FnMut(usize)) {
        for (nth, word) in self.0.iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // Acquire: pairs with the Release of another thread's `wake`, so that the poll that
            // follows sees its work.
            let mut set = word.swap(0, Ordering::Acquire);
            while set != 0 {
                each(64 * nth + set.trailing_zeros() as usize);
                set &= set - 1;
            }
        }
    }
}

impl ChildWaker {
    /// Has the child polled in the group's next round. To be called from calls of the group's
    /// children only: from another thread it does not end the core's sleep.
    #[inline]
    pub fn wake(&self) {
        let (word, bit) = (&self.all[self.child / 64], 1 << (self.child % 64));
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Release);
        }
    }
}

/// The probes of a group's children, and whether a child was woken by another.
#[derive(Debug)]
pub struct GroupProbe<R> {
    probes: Arc<Mutex<Vec<Option<R>>>>,
    wakers: ChildWakers,
}

impl<R> Clone for GroupProbe<R> {
    fn clone(&self) -> Self {
        Self {
            probes: Arc::clone(&self.probes),
            wakers: self.wakers.clone(),
        }
    }
}

impl<R: Probe> GroupProbe<R> {
    fn with<T>(&self, use_them: impl FnOnce(&mut Vec<Option<R>>) -> T) -> T {
        let locked = self.probes.lock();
        use_them(&mut locked.unwrap_or_else(PoisonError::into_inner))
    }
}

impl<R: Probe> Probe for GroupProbe<R> {
    #[inline]
    fn fires(&self) -> bool {
        let fires = |probe: &Option<R>| probe.as_ref().is_some_and(R::fires);
        self.wakers.are_set() || self.with(|probes| probes.iter().any(fires))
    }
}

/// A message to one child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToChild<M> {
    /// Number of the child. A message to a child that does not exist is dropped.
    pub child: usize,
    /// Message for the child.
    pub message: M,
}

/// State of a request that the group leave its core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Leaving {
    /// No request.
    #[default]
    No,
    /// Children that may leave wait for the others until this time.
    Tries(Nanos),
    /// All are served until this time.
    IsServed(Nanos),
}

/// Group of pollers. See the head of this module.
#[derive(Debug)]
pub struct Group<P: Poller> {
    name: String,
    children: Pollers<P>,
    drr: Drr,
    /// A round was begun and is not over.
    is_in_round: bool,
    /// Children that got work during a round.
    woken: Vec<usize>,
    /// Kept for its allocation.
    due: Vec<usize>,
    probe: GroupProbe<P::Probe>,
    leaving: Leaving,
    /// In this turn or the round before, a child had no work and could only wait.
    is_waiting: bool,
    /// Sum of the weights of those that have work.
    weight: u32,
}

impl<P: Poller> Group<P> {
    /// Creates a group of these children, numbered from 0.
    pub fn new(name: impl Into<String>, children: Vec<P>) -> Self {
        let wakers = ChildWakers::new(children.len());
        Self::with_wakers(name, children, wakers)
    }

    /// Creates a group whose children wake each other through `wakers`.
    ///
    /// # Panics
    /// If they are for fewer children.
    pub fn with_wakers(name: impl Into<String>, children: Vec<P>, wakers: ChildWakers) -> Self {
        assert!(
            wakers.0.len() >= children.len().div_ceil(64),
            "a waker for each child"
        );
        let mut group = Self {
            name: name.into(),
            children: Pollers::new(),
            drr: Drr::new(drr::QUANTUM),
            is_in_round: false,
            woken: Vec::new(),
            due: Vec::new(),
            probe: GroupProbe {
                probes: Arc::new(Mutex::new(Vec::new())),
                wakers,
            },
            leaving: Leaving::No,
            is_waiting: false,
            weight: 1,
        };
        for (at, child) in children.into_iter().enumerate() {
            group.drr.reset(at);
            group.children.insert(at, child, Wakes::default(), true);
            group.probe.with(|probes| probes.push(None));
            group.activate(at);
        }
        group
    }

    /// Returns the number of children.
    pub fn len(&self) -> usize {
        self.children.len()
    }

    /// Returns whether there are no children.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the children, in the order of their numbers.
    pub fn children(&self) -> impl Iterator<Item = &P> {
        let slots = (0..self.len()).filter_map(|at| self.children.get(at));
        slots.map(|slot| &slot.poller)
    }

    /// Returns the children, detached.
    pub fn into_children(mut self) -> Vec<P> {
        (0..self.len()).map(|at| self.children.remove(at)).collect()
    }

    /// Handles that child `at` has got work: it is polled in the next round.
    fn activate(&mut self, at: usize) {
        match self.is_in_round {
            true => self.woken.push(at),
            false => self.drr.activate(at),
        }
    }

    /// Calls child `at`, disarmed, with its own descriptors, for `budget`.
    fn call<T>(
        &mut self,
        at: usize,
        turn: &mut PollContext<'_>,
        budget: u64,
        call: impl FnOnce(&mut P, &mut PollContext<'_>) -> T,
    ) -> T {
        let slot = self.children.touch(at);
        let mut own = turn.part_turn(at, budget);
        call(&mut slot.poller, &mut own)
    }

    /// Takes `cost` off a child's account and the turn's.
    fn charge(&mut self, at: usize, cost: u64, turn: &mut PollContext<'_>) {
        if cost > 0 {
            self.drr.charge(at, cost);
            turn.charge(cost);
        }
    }

    /// Puts the children that have got work into the round.
    fn begin_round(&mut self, now: Nanos) {
        let drr = &mut self.drr;
        self.woken.drain(..).for_each(|at| drr.activate(at));
        let count = self.children.len();
        self.probe.wakers.take(|at| {
            if at < count {
                drr.wake(at);
            }
        });
        self.probe.with(|probes| {
            for (at, probe) in probes.iter().enumerate() {
                if probe.as_ref().is_some_and(P::Probe::fires) {
                    drr.wake(at);
                }
            }
        });
        if self.children.is_due(now) {
            self.children.due(now, &mut self.due);
            self.due.drain(..).for_each(|at| drr.wake(at));
        }
        self.is_waiting = false;
        self.drr.begin_round();
        self.is_in_round = true;
    }

    /// Gives one child its turn, and returns the turn's end if it was measured. `start`: the end of
    /// the turn before, if that was measured.
    fn visit(
        &mut self,
        visit: Grant,
        start: Option<Nanos>,
        turn: &mut PollContext<'_>,
    ) -> (Activity, Option<Nanos>) {
        let at = visit.flow;
        let is_measured = self.drr.is_contended(at);
        let is_interruption = self.drr.is_interruption();
        let start = is_measured.then(|| start.unwrap_or_else(Nanos::now));
        let (activity, is_drained, requests, weight, (cost, end)) =
            self.call(at, turn, visit.budget, |child, own| {
                let activity = child.poll(own);
                let is_busy = activity == Activity::Busy;
                let end = is_measured.then(Nanos::now);
                let took = start.zip(end).map(|(start, end)| end.since(start));
                let cost = own.cost(is_busy, took, is_interruption);
                if is_busy {
                    own.wakes().forgive();
                }
                (
                    activity,
                    own.is_drained(),
                    own.counted_requests(is_busy),
                    child.weight(),
                    (cost, end),
                )
            });
        turn.took(requests);
        self.drr.set_weight(at, weight);
        self.charge(at, cost, turn);
        self.children.asked(at);
        let state = match activity {
            Activity::Busy if is_drained && self.renew_probe(at) => State::Away,
            Activity::Busy => State::Backlogged,
            Activity::Waiting => State::Waiting,
            Activity::Idle => match self.renew_probe(at) {
                true => State::Away,
                false => State::Waiting,
            },
        };
        self.is_waiting |= activity == Activity::Waiting;
        self.drr.finish(at, state);
        (activity, end)
    }

    /// Renews the probe after an `Idle` poll; returns false if the child wants to be polled at each
    /// sweep.
    fn renew_probe(&mut self, at: usize) -> bool {
        let slot = self.children.get(at).expect("a child that was polled");
        self.probe.with(|probes| {
            slot.poller.probe(&mut probes[at]);
            probes[at].is_some()
        })
    }

    /// Lends each child its own descriptors, out of the group's, for the duration of `use_them`.
    fn lend<T>(&mut self, wakes: &mut Wakes, use_them: impl FnOnce(&mut Pollers<P>) -> T) -> T {
        let swap = |children: &mut Pollers<P>, wakes: &mut Wakes| {
            for at in 0..children.len() {
                if let Some(slot) = children.get_mut(at) {
                    std::mem::swap(&mut slot.wakes, wakes.part(at));
                }
            }
        };
        swap(&mut self.children, wakes);
        let outcome = use_them(&mut self.children);
        swap(&mut self.children, wakes);
        outcome
    }

    /// Asks all children, even if one refuses: each prepares for it.
    fn all_may_detach(&mut self, detach_reason: DetachReason) -> bool {
        (0..self.len()).fold(true, |all, at| {
            self.children.touch(at).poller.may_detach(detach_reason) & all
        })
    }

    fn all_stay(&mut self) {
        for at in 0..self.len() {
            self.children.touch(at).poller.stays();
            self.activate(at);
        }
    }
}

impl<P: Poller> Poller for Group<P> {
    type Message = ToChild<P::Message>;
    type Probe = GroupProbe<P::Probe>;

    fn attached(&mut self, wakes: &mut Wakes) -> io::Result<()> {
        for at in 0..self.len() {
            let child = &mut self.children.touch(at).poller;
            if let Err(error) = child.attached(wakes.part(at)) {
                for former in 0..at {
                    let child = &mut self.children.touch(former).poller;
                    child.detaching(wakes.part(former));
                }
                wakes.clear();
                return Err(error);
            }
        }
        self.leaving = Leaving::No;
        (0..self.len()).for_each(|at| self.activate(at));
        Ok(())
    }

    fn detaching(&mut self, wakes: &mut Wakes) {
        for at in 0..self.len() {
            let child = &mut self.children.touch(at).poller;
            child.detaching(wakes.part(at));
        }
    }

    fn may_detach(&mut self, detach_reason: DetachReason) -> bool {
        if detach_reason == DetachReason::End {
            return self.all_may_detach(detach_reason);
        }
        let now = Nanos::now();
        let until = match self.leaving {
            Leaving::IsServed(until) if until > now => return false,
            Leaving::Tries(until) => until,
            Leaving::No | Leaving::IsServed(_) => now.after(HELD_NS),
        };
        self.leaving = Leaving::Tries(until);
        if self.all_may_detach(detach_reason) {
            self.leaving = Leaving::No;
            return true;
        }
        if until <= now {
            self.leaving = Leaving::IsServed(now.after(SERVED_NS));
            self.all_stay();
        }
        false
    }

    fn stays(&mut self) {
        self.leaving = Leaving::No;
        self.all_stay();
    }

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        let mut activity = Activity::Idle;
        let mut turned_at = None;
        loop {
            let before = turn.spent();
            if !self.is_in_round {
                self.begin_round(turn.now());
            }
            while !turn.is_spent() && !turn.others_wait() {
                let Some(visit) = self.drr.next() else {
                    self.is_in_round = false;
                    break;
                };
                let (of_child, end) = self.visit(visit, turned_at, turn);
                turned_at = end;
                if of_child == Activity::Busy {
                    activity = Activity::Busy;
                }
            }
            // A child that has done something may have woken another, and be finished itself.
            let goes_on = self.drr.has_backlogged()
                || (turn.spent() != before && self.probe.wakers.are_set());
            if turn.is_spent() || turn.others_wait() || !goes_on {
                break;
            }
        }
        self.weight = self.drr.hungry_weight().max(1);
        let is_more_to_do = self.is_in_round
            || self.drr.has_backlogged()
            || !self.woken.is_empty()
            || self.probe.wakers.are_set();
        match is_more_to_do || activity == Activity::Busy {
            true => Activity::Busy,
            false if self.is_waiting => Activity::Waiting,
            false => Activity::Idle,
        }
    }

    fn message(&mut self, message: ToChild<P::Message>, turn: &mut PollContext<'_>) {
        let ToChild { child: at, message } = message;
        if at >= self.len() {
            return;
        }
        let cost = self.call(at, turn, CALL_BUDGET, |child, own| {
            child.message(message, own);
            own.spent().max(MESSAGE_COST)
        });
        self.charge(at, cost, turn);
        self.activate(at);
    }

    fn ready(&mut self, token: u32, turn: &mut PollContext<'_>) {
        let Some(at) = turn.part().filter(|at| *at < self.len()) else {
            return;
        };
        self.activate(at);
        if self.drr.deficit(at) < READY_DEBT {
            // It will fire again, which then finds work.
            turn.charge(1);
            return;
        }
        let spent = self.call(at, turn, CALL_BUDGET, |child, own| {
            child.ready(token, own);
            own.spent()
        });
        self.drr.charge(at, spent.max(READY_COST));
        // The core charges the same amount, and from it sees whether the descriptor fired without
        // work.
        turn.charge(spent);
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        let armed = self.lend(wakes, Pollers::arm);
        if armed.is_err() {
            for at in 0..self.len() {
                self.children.touch(at);
            }
        }
        armed
    }

    fn has_work(&mut self) -> bool {
        // Re-checks the children that stay armed; the others are asked themselves.
        let children = &self.children;
        let is_any_kept_firing = self.probe.with(|probes| {
            let mut all = probes.iter().enumerate();
            all.any(|(at, probe)| {
                !children.is_fresh(at) && probe.as_ref().is_some_and(P::Probe::fires)
            })
        });
        let has_work = self.children.last_look();
        for at in self.children.take_found() {
            self.activate(at);
        }
        has_work || is_any_kept_firing || self.probe.wakers.are_set()
    }

    /// Does nothing: children are disarmed when they are about to be called.
    fn disarm(&mut self) {}

    fn probe(&self, slot: &mut Option<Self::Probe>) {
        let has_all = self.probe.with(|probes| probes.iter().all(Option::is_some));
        match has_all {
            true => {
                slot.get_or_insert_with(|| self.probe.clone());
            }
            false => *slot = None,
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        let held = match self.leaving {
            Leaving::Tries(until) => Some(until),
            Leaving::No | Leaving::IsServed(_) => None,
        };
        self.children.earliest().into_iter().chain(held).min()
    }

    fn arm_cost(&self) -> u64 {
        self.children.arm_cost_ns()
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn weight(&self) -> u32 {
        self.weight
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
