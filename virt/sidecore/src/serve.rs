//! Calls of the loop into its pollers: messages, readable descriptors, turns, and the charge for
//! each.
//!
//! A turn is charged its poller's estimate, or, where another poller has had work since before it,
//! the time that it took if that was more: the core is divided by the estimates among pollers that
//! keep to them, and by the clock among those that do not (a large discard in memory, a system call
//! that the kernel makes long). It costs one clock reading per such turn, which is the beginning of
//! the next. While no other poller has work, a long turn takes no time from any poller. A turn that
//! asks ([`PollContext::others_wait`]) ends when its time is over, or before, for a poller that has
//! got work meanwhile. Work of other threads for a poller is not charged: see [`PollContext`].

use std::sync::atomic::Ordering;

use crate::{
    clock::Nanos,
    drr::{self, Drr, Grant, State},
    poll_context::{End, Others, PollContext},
    poller::{Activity, Poller, Probe},
    run::{Core, EVENTS, LOOK_EVERY_NS, epoll_with},
    stats::PollerState,
    wakes::{self, Source},
};

/// Messages handed out per sweep, so that a storm of them does not starve the queues.
const MAIL_BATCH: usize = 64;
/// Least charge for a message, in cost units.
pub(crate) const MESSAGE_COST: u64 = 300;
/// Least charge for a readable descriptor, in cost units: the system call that empties it, and its
/// share of the poll of the epoll.
pub(crate) const READY_COST: u64 = 1_000;
/// Budget of the handling of a message or of a readable descriptor, in cost units. Beyond it the
/// poller should continue in its turn.
pub(crate) const CALL_BUDGET: u64 = 1_600;
/// Deficit below which a poller is not notified of readable descriptors until it has repaid: four
/// turns' debt.
pub(crate) const READY_DEBT: i64 = -(4 * drr::QUANTUM as i64);

impl<P: Poller> Core<P> {
    /// Takes orders, then delivers messages.
    pub(crate) fn hand_out_mail(&mut self) -> Activity {
        // Before the orders are taken: a later one is announced anew.
        let was_announced = self.receiver.look();
        if self.stash.is_empty() && !was_announced {
            return Activity::Idle;
        }
        let mut activity = self.take_orders();
        for _ in 0..MAIL_BATCH {
            let Some(addressed) = self.stash.pop_front().or_else(|| self.receiver.take()) else {
                break;
            };
            self.shared_stats.heartbeat.0.mail_taken.add(1);
            activity = Activity::Busy;
            let mut at = self.slots.get(&addressed.poller).copied();
            if at.is_none() {
                // The poller arrived just before its first message, and after the orders were
                // taken.
                self.take_orders();
                at = self.slots.get(&addressed.poller).copied();
            }
            if let Some(at) = at {
                self.deliver(at, addressed.message);
            }
        }
        activity
    }

    pub(crate) fn deliver(&mut self, at: usize, message: P::Message) {
        let Some(member) = &self.members[at] else {
            return;
        };
        let counters = &member.shared_stats.counters.0;
        let in_poller = &self.shared_stats.heartbeat.0.in_poller;
        in_poller.store(member.shared_stats.id, Ordering::Relaxed);
        self.shared_stats.core.0.messages.add(1);
        counters.messages.add(1);
        let slot = self.pollers.touch(at);
        let mut turn = PollContext::new(self.now, CALL_BUDGET, &mut slot.wakes);
        slot.poller.message(message, &mut turn);
        let cost = turn.spent().max(MESSAGE_COST);
        counters.cost.add(cost);
        self.shared_stats.core.0.cost.add(cost);
        self.drr.charge(at, cost);
        self.drr.activate(at);
    }

    /// Notifies pollers of their readable descriptors. Busy if one did something.
    pub(crate) fn look(&mut self, timeout_ns: Option<u64>) -> Activity {
        self.next_look = self.now.after(LOOK_EVERY_NS);
        if self.members.is_empty() {
            return Activity::Idle;
        }
        self.shared_stats.core.0.looks.add(1);
        // An error is a signal; the epoll is polled again soon.
        let ready = self.epoll.wait(&mut self.events, timeout_ns).unwrap_or(0);
        self.take_events(ready)
    }

    /// Handles the first `ready` events.
    pub(crate) fn take_events(&mut self, ready: usize) -> Activity {
        let mut activity = Activity::Idle;
        let mut stray = None;
        for index in 0..ready.min(EVENTS) {
            let data = self.events[index].u64;
            if data == wakes::NOTIFIER {
                self.receiver.gate().notifier().drain();
                continue;
            }
            let (at, fd) = wakes::source(data);
            let source = self.pollers.get(at);
            let source = source.and_then(|slot| slot.wakes.source(fd));
            match source {
                Some(source) => {
                    if self.ready(at, fd, source) == Activity::Busy {
                        activity = Activity::Busy;
                    }
                }
                None => stray = Some(data),
            }
        }
        if stray.is_some() && stray == self.stray {
            self.rebuild_epoll();
            stray = None;
        }
        self.stray = stray;
        activity
    }

    fn ready(&mut self, at: usize, fd: i32, source: Source) -> Activity {
        if self.drr.deficit(at) < READY_DEBT {
            // It will fire again.
            self.drr.activate(at);
            return Activity::Idle;
        }
        let Some(member) = &self.members[at] else {
            return Activity::Idle;
        };
        let (core, counters) = (&self.shared_stats.core.0, &member.shared_stats.counters.0);
        let in_poller = &self.shared_stats.heartbeat.0.in_poller;
        in_poller.store(member.shared_stats.id, Ordering::Relaxed);
        let slot = self.pollers.touch(at);
        let is_muted = slot.wakes.of(source.part).strike(fd, self.now);
        core.mutes.add(u64::from(is_muted));
        counters.mutes.add(u64::from(is_muted));
        core.readies.add(1);
        counters.readies.add(1);
        let mut turn =
            PollContext::new(self.now, CALL_BUDGET, &mut slot.wakes).of_part(source.part);
        slot.poller.ready(source.token, &mut turn);
        let spent = turn.spent();
        if spent > 0 {
            slot.wakes.of(source.part).forgive();
        }
        let cost = spent.max(READY_COST);
        counters.cost.add(cost);
        core.cost.add(cost);
        self.drr.charge(at, cost);
        self.drr.activate(at);
        if spent > 0 {
            Activity::Busy
        } else {
            Activity::Idle
        }
    }

    /// Rebuilds the epoll, after an event of no registered descriptor came twice: a descriptor was
    /// closed before it was removed. See `wakes.rs`.
    #[cold]
    fn rebuild_epoll(&mut self) {
        self.shared_stats.core.0.rebuilds.add(1);
        // If no new epoll can be created, the old one stays, with its stray events.
        if let Ok(epoll) = epoll_with(self.receiver.gate().notifier()) {
            for at in 0..self.pollers.len() {
                if let Some(slot) = self.pollers.get_mut(at) {
                    slot.wakes.reconnect(&epoll);
                }
            }
            self.epoll = epoll;
        }
    }

    /// Gives one poller its turn. `start`: the end of the turn before, if that was measured.
    pub(crate) fn visit(&mut self, visit: Grant, start: Option<Nanos>) -> Visited {
        let at = visit.flow;
        let Some(member) = &self.members[at] else {
            self.drr.finish(at, State::Away);
            return Visited {
                activity: Activity::Idle,
                end: start,
                is_cut: false,
            };
        };
        let is_measured = self.drr.is_contended(at);
        let start = is_measured.then(|| start.unwrap_or_else(Nanos::now));
        let counters = &member.shared_stats.counters.0;
        let in_poller = &self.shared_stats.heartbeat.0.in_poller;
        in_poller.store(member.shared_stats.id, Ordering::Relaxed);
        let (slot, probes) = self.pollers.touch_beside(at);
        let drr = &self.drr;
        let beside = OtherPollers { probes, drr };
        let mut turn = PollContext::new(self.now, visit.budget, &mut slot.wakes);
        if probes.len() > 1 {
            turn = turn.beside(&beside, probes.len());
        }
        if let Some(start) = start {
            turn = turn.measured_from(start);
        }
        let activity = slot.poller.poll(&mut turn);
        let is_drained = turn.is_drained();
        let is_cut =
            turn.end() == Some(End::Interrupted) && activity == Activity::Busy && !is_drained;
        self.requests += turn.counted_requests(activity == Activity::Busy);
        let end = is_measured.then(Nanos::now);
        let took = start.zip(end).map(|(start, end)| end.since(start));
        let cost = turn.cost(activity == Activity::Busy, took, self.drr.is_interruption());
        self.drr.set_weight(at, slot.poller.weight());
        if activity == Activity::Busy {
            slot.wakes.forgive();
            counters.polls_busy.add(1);
        } else {
            counters.polls_idle.add(1);
        }
        if cost > 0 {
            counters.cost.add(cost);
            self.shared_stats.core.0.cost.add(cost);
            self.drr.charge(at, cost);
        }
        self.pollers.asked(at);
        self.is_waiting |= activity == Activity::Waiting;
        let (state, shown) = match activity {
            Activity::Busy if is_drained && self.pollers.probe(at) => {
                (State::Away, PollerState::Idle)
            }
            Activity::Busy => (State::Backlogged, PollerState::Busy),
            Activity::Waiting => (State::Waiting, PollerState::Waiting),
            Activity::Idle if self.pollers.probe(at) => (State::Away, PollerState::Idle),
            Activity::Idle => (State::Waiting, PollerState::Idle),
        };
        match is_cut {
            true => self.drr.cut(at),
            false => self.drr.finish(at, state),
        }
        member.shared_stats.set_state(shown);
        Visited {
            activity,
            end,
            is_cut,
        }
    }
}

/// Outcome of a turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visited {
    pub(crate) activity: Activity,
    /// Time at which it ended, if it was measured.
    pub(crate) end: Option<Nanos>,
    /// It ended because another poller has got work.
    pub(crate) is_cut: bool,
}

/// The core's other pollers, during the turn of one.
struct OtherPollers<'a, B> {
    probes: &'a [Option<B>],
    drr: &'a Drr,
}

impl<B: Probe> Others for OtherPollers<'_, B> {
    fn wait(&self) -> bool {
        let fires = |probe: &Option<B>| probe.as_ref().is_some_and(B::fires);
        (0..)
            .zip(self.probes)
            .any(|(at, probe)| fires(probe) && self.drr.may_interrupt(at))
    }
}
