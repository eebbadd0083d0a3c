//! Requests of other threads.

use std::sync::mpsc::Sender;
use std::time::Duration;

use guest_mem::{PhysMem, Ticket};
use sidecore::{Nanos, PollContext, Reply};

use super::{Owner, Slot};
use crate::function::ResolveFunction;
use crate::interrupts::Pending;
use crate::request::{Op, Target, TicketResult};
use crate::unit::ResolveUnit;

/// Bound on the steps of a unit that one register write may set off before its vCPU goes on. Each
/// step does a bounded batch and reports whether more can be done at once. The remainder (a long
/// queue over many leases) is left to the sweeps that follow.
const STEPS_OF_A_WRITE: u32 = 64;

/// Limit on the time for which requests may hold up the end of the machine. It gives those that are
/// then cancelled time to finish by themselves.
const END_DRAIN_LIMIT: Duration = Duration::from_secs(1);

impl<U, F, M> Owner<U, F, M>
where
    U: ResolveUnit,
    F: ResolveFunction<U::Command>,
    M: PhysMem,
{
    pub(super) fn access(
        &mut self,
        target: Target,
        op: Op,
        reply: Reply<u64>,
        turn: &mut PollContext<'_>,
    ) {
        match target {
            Target::Unit(at) => {
                let value = self.access_unit(at, op, turn);
                reply.send(value);
            }
            Target::Function(number) => self.access_function(number, op, reply),
        }
    }

    /// Performs an access to a unit's registers that exited. Everything that a write sets off,
    /// except waits for leases, is done before the vCPU goes on: a trapped write costs one exit
    /// however much it asks for.
    pub(super) fn access_unit(&mut self, at: usize, op: Op, turn: &mut PollContext<'_>) -> u64 {
        if at >= self.units.len() {
            return u64::MAX;
        }
        let now = Nanos::now();
        let value = self.call_unit(at, op, now);
        self.settle(now);
        if matches!(op, Op::Write { .. }) {
            for _ in 0..STEPS_OF_A_WRITE {
                let polled = self.poll_unit(at, now);
                turn.charge(polled.cost);
                if !polled.is_busy {
                    break;
                }
            }
        }
        value
    }

    pub(super) fn access_function(&mut self, number: usize, op: Op, reply: Reply<u64>) {
        let now = Nanos::now();
        let Some(Some(slot)) = self.slots.get_mut(number) else {
            // It has been removed: ones, as from an empty slot.
            return reply.send(u64::MAX);
        };
        let Slot {
            function, effects, ..
        } = slot;
        let function = function.get_mut();
        let keep = &self.keep;
        let mut value = 0;
        let mut stops = false;
        match op {
            Op::ConfigRead { reg, len } => value = u64::from(function.config_read(reg, len)),
            Op::ConfigWrite {
                reg,
                len,
                value: written,
            } => {
                function.config_write(reg, len, written, keep, effects);
                stops = !function.is_silent() && self.end.is_none();
            }
            Op::Read { bar, offset, len } => {
                let mut data = [0; 8];
                let len = usize::from(len).min(8);
                function.bar_read(bar, offset, &mut data[..len]);
                value = u64::from_le_bytes(data);
            }
            Op::Write {
                bar,
                offset,
                len,
                value: written,
            } => {
                let len = usize::from(len).min(8);
                let data = &written.to_le_bytes()[..len];
                function.bar_write(bar, offset, data, keep, effects);
            }
        }
        // Before the answer, so that the vCPU's interrupts are sent and its lines connected when it
        // goes on.
        self.apply(number, now);
        self.settle(now);
        match self.slots.get_mut(number) {
            Some(Some(slot)) if stops => slot.stopping.push(reply),
            _ => reply.send(value),
        }
    }

    pub(super) fn ticket_done(&mut self, ticket: Ticket, result: TicketResult) {
        for unit in &mut self.units {
            unit.control_mut().ticket_done(ticket, result);
        }
        for slot in self.slots.iter_mut().flatten() {
            slot.function.get_mut().ticket_done(ticket, result);
        }
        // The retried access finds out whether the table is there or never will be.
        for retry in self.interrupts.take_pending(ticket) {
            match retry {
                Pending::Message {
                    unit,
                    source,
                    message,
                } => self.send(unit, source, message),
                Pending::Line { function, .. } => self.connect_all(function),
            }
        }
    }

    pub(super) fn end(&mut self, end: Sender<usize>) {
        self.end = Some(end);
        self.drain_limit = self.drain_limit.min(END_DRAIN_LIMIT);
        for slot in self.slots.iter_mut().flatten() {
            slot.function.get_mut().end();
            slot.stop_limit = None;
            slot.stopping.drain(..).for_each(|reply| reply.send(0));
        }
    }
}
