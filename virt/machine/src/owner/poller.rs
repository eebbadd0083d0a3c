//! The owner as a sidecore's poller: its sweep, sleeping and waking.

use guest_mem::PhysMem;
use sidecore::{Activity, AlwaysPoll, ArmError, Nanos, PollContext, Poller, Wakes};

use super::resolve::{Call, CallFunction, PollUnit};
use super::{Held, Owner, Slot};
use crate::function::{Progress, ResolveFunction};
use crate::request::Request;
use crate::unit::{ResolveUnit, UnitPoll};

/// Number of idle sweeps between two reads of the doorbell eventfds. So a driver that rings unasked
/// (a queue whose ring faulted retries at once) is served, and an idle sweep needs no system calls.
const DOORBELL_PERIOD: u32 = 1024;

impl<U, F, M> Owner<U, F, M>
where
    U: ResolveUnit,
    F: ResolveFunction<U::Command>,
    M: PhysMem,
{
    pub(super) fn poll_units(&mut self, now: Nanos) -> UnitPoll {
        let mut all = UnitPoll::default();
        for at in 0..self.units.len() {
            let polled = self.poll_unit(at, now);
            all.is_busy |= polled.is_busy;
            all.cost += polled.cost;
        }
        all
    }

    pub(super) fn poll_unit(&mut self, at: usize, now: Nanos) -> UnitPoll {
        let polled = self.call_unit(at, PollUnit, now);
        self.settle(now);
        polled
    }

    pub(super) fn call(&mut self, number: usize, call: Call, now: Nanos) -> Progress {
        let Some((unit, function_call)) = self.lend_to(number, now) else {
            return Progress::Idle;
        };
        let progress = unit.with(CallFunction {
            call,
            function_call,
        });
        self.apply(number, now);
        self.settle(now);
        progress
    }

    pub(super) fn poll_functions(&mut self, now: Nanos) -> Activity {
        let mut activity = Activity::Idle;
        for number in 0..self.slots.len() {
            let mut progress = self.call(number, Call::Poll, now);
            if let Some(Some(slot)) = self.slots.get_mut(number)
                && std::mem::take(&mut slot.is_answered)
            {
                // Called once: commands that this call asks for are answered in the next sweep.
                match self.call(number, Call::Poll, now) {
                    Progress::Idle => {}
                    other => progress = other,
                }
            }
            let Some(Some(slot)) = self.slots.get_mut(number) else {
                continue;
            };
            if progress != Progress::Idle {
                activity = Activity::Busy;
            }
            let is_overdue = |held: &Held| held.limit.is_some_and(|limit| now >= limit);
            if slot.holds.iter().any(is_overdue) {
                self.watch_holds(number, now);
            }
            let Some(Some(slot)) = self.slots.get_mut(number) else {
                continue;
            };
            if progress == Progress::Stopping || slot.is_watched() || self.end.is_some() {
                self.watch(number, now);
            }
        }
        activity
    }

    /// Handles a stop: checks its limit, and replies to the callers that wait for it.
    #[cold]
    pub(super) fn watch(&mut self, number: usize, now: Nanos) {
        let Some(Some(slot)) = self.slots.get_mut(number) else {
            return;
        };
        slot.watch_stop(now, self.drain_limit, &self.name);
        let function = slot.function.get();
        if function.is_silent() {
            slot.stopping.drain(..).for_each(|reply| reply.send(0));
        }
        if !function.has_ended() {
            return;
        }
        if let Some(end) = &self.end
            && !slot.is_told
        {
            slot.is_told = true;
            // The receiver may be gone.
            let _ = end.send(number);
        }
        if slot.removal.is_some()
            && let Some(slot) = self.slots[number].take()
            && let Some(told) = slot.removal
        {
            let source = slot.effects.source();
            if !slot.holds.is_empty() {
                // It has ended, so it reaches nothing any more.
                let holds = slot.holds.len() as u32;
                self.units[slot.unit].control_mut().release(holds);
            }
            self.interrupts.forget(number, source);
            let _ = told.send(source);
        }
    }

    pub(super) fn drain_doorbells(&mut self) {
        for slot in self.slots.iter_mut().flatten() {
            let function = slot.function.get_mut();
            if let Some(doorbells) = &mut slot.function_lines.doorbells {
                doorbells.drain(&mut |queue| function.ring(queue));
            }
        }
    }

    /// Registers every descriptor that may wake the owner.
    pub(super) fn listen(&mut self, wakes: &mut Wakes) -> std::io::Result<()> {
        self.is_listening = true;
        self.wake_fds.clear();
        let mut add = |fd| self.wake_fds.push((fd, 0));
        for unit in &self.units {
            unit.control().wake_fd().into_iter().for_each(&mut add);
        }
        for slot in self.slots.iter().flatten() {
            if let Some(doorbells) = &slot.function_lines.doorbells {
                doorbells.fds(&mut add);
            }
            slot.function.get().wake_fds(&mut add);
        }
        wakes.replace(&self.wake_fds)
    }
}

impl<U, F, M> Poller for Owner<U, F, M>
where
    U: ResolveUnit,
    U::Command: Send,
    F: ResolveFunction<U::Command>,
    M: PhysMem + Send,
{
    type Message = Request<Self>;
    type Probe = AlwaysPoll;

    fn detaching(&mut self, wakes: &mut Wakes) {
        wakes.clear();
        self.is_listening = false;
    }

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        if self.is_listening {
            self.is_listening = false;
            turn.wakes().clear();
        }
        let now = turn.now();
        let units = self.poll_units(now);
        turn.charge(units.cost);
        let functions = self.poll_functions(now);
        if units.is_busy || functions == Activity::Busy {
            self.idle_sweeps = 0;
            return Activity::Busy;
        }
        self.idle_sweeps = self.idle_sweeps.wrapping_add(1);
        if self.idle_sweeps.is_multiple_of(DOORBELL_PERIOD) {
            self.drain_doorbells();
        }
        Activity::Idle
    }

    fn message(&mut self, request: Request<Self>, turn: &mut PollContext<'_>) {
        match request {
            Request::Access { target, op, reply } => self.access(target, op, reply, turn),
            Request::TicketDone(ticket, result) => self.ticket_done(ticket, result),
            Request::Evict { pages, reply } => {
                let began = Nanos::now();
                reply.send(self.evict(&pages));
                turn.charge(Nanos::now().0.saturating_sub(began.0));
            }
            Request::Inspect(question) => question(self),
            Request::End(end) => self.end(end),
        }
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        for at in 0..self.units.len() {
            if let Err(error) = self.units[at].control_mut().arm() {
                self.disarm_units(at);
                return Err(ArmError::new(error));
            }
        }
        let now = Nanos::now();
        for number in 0..self.slots.len() {
            let _ = self.call(number, Call::Arm, now);
        }
        self.listen(wakes).map_err(|error| {
            self.disarm();
            ArmError::new(error)
        })
    }

    fn has_work(&mut self) -> bool {
        let now = Nanos::now();
        let functions = (0..self.slots.len()).any(|number| {
            let waits = |slot: &Slot<F, U::Command>| !slot.stopping.is_empty();
            self.slots[number].as_ref().is_some_and(waits)
                || self.call(number, Call::HasWork, now) != Progress::Idle
        });
        // Units last: an access to a ring may have been refused and recorded, and the guest must be
        // notified of that.
        functions
            || self
                .units
                .iter_mut()
                .any(|unit| unit.control_mut().has_work())
    }

    fn disarm(&mut self) {
        self.disarm_units(self.units.len());
        self.drain_doorbells();
        let now = Nanos::now();
        for number in 0..self.slots.len() {
            let _ = self.call(number, Call::Disarm, now);
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        let units = self
            .units
            .iter()
            .filter_map(|unit| unit.control().deadline());
        let functions = self.slots.iter().flatten();
        let functions = functions.filter_map(|slot| slot.function.get().deadline());
        let slots = self.slots.iter().flatten();
        let holds = slots.flat_map(|slot| slot.holds.iter().filter_map(|held| held.limit));
        units.chain(functions).map(Nanos).chain(holds).min()
    }

    fn arm_cost(&self) -> u64 {
        self.units
            .iter()
            .map(|unit| unit.control().arm_cost())
            .sum()
    }

    fn name(&self) -> &str {
        &self.name
    }
}

impl<U: ResolveUnit, F, M> Owner<U, F, M> {
    /// Disarms the first `armed` units.
    fn disarm_units(&mut self, armed: usize) {
        for unit in &mut self.units[..armed] {
            if let Err(error) = unit.control_mut().disarm() {
                tracing::error!(vm = %self.name, %error, "the register page cannot be disarmed");
            }
        }
    }
}
