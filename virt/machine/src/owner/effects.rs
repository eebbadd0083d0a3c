//! Handling of events from remapping units, and of the effects that functions request.

use guest_mem::PhysMem;
use sidecore::Nanos;

use super::Owner;
use crate::function::ResolveFunction;
use crate::unit::{ResolveUnit, UnitEvent};

impl<U, F, M> Owner<U, F, M>
where
    U: ResolveUnit,
    F: ResolveFunction<U::Command>,
    M: PhysMem,
{
    /// Handles the pending events of units, and those that follow from them.
    #[inline]
    pub(super) fn settle(&mut self, now: Nanos) {
        while !self.pending.is_empty() {
            self.act_on_news(now);
        }
    }

    /// Handles one round of events. The number of rounds is bounded by the number of commands: a
    /// function starts no new request while it receives an answer.
    #[cold]
    pub(super) fn act_on_news(&mut self, now: Nanos) {
        for event in std::mem::take(&mut self.pending.events) {
            self.act_on(event);
        }
        for (id, result) in std::mem::take(&mut self.pending.answers) {
            let number = (id.0 >> 32) as usize;
            // The function may have been removed.
            if let Some(Some(slot)) = self.slots.get_mut(number) {
                let function = slot.function.get_mut();
                function.command_done(id, result, &mut slot.effects);
                slot.is_answered = true;
                self.apply(number, now);
            }
        }
        if std::mem::take(&mut self.pending.are_routes_stale) {
            for number in 0..self.slots.len() {
                self.connect_all(number);
            }
        }
    }

    pub(super) fn act_on(&mut self, event: UnitEvent) {
        match event {
            UnitEvent::DrainLimit { sources } => {
                self.totals.drain_limits += 1;
                for slot in self.slots.iter_mut().flatten() {
                    let function = slot.function.get_mut();
                    if sources.contains(&function.source()) {
                        tracing::warn!(
                            vm = %self.name,
                            device = %function.source(),
                            "an unmap waits for a request that does not end; cancelling it"
                        );
                        function.cancel_overdue();
                    }
                }
            }
        }
    }

    /// Carries out the effects that function number `number` has requested.
    #[inline]
    pub(super) fn apply(&mut self, number: usize, now: Nanos) {
        if let Some(Some(slot)) = self.slots.get(number)
            && !slot.effects.is_empty()
        {
            self.apply_some(number, now);
        }
    }

    pub(super) fn apply_some(&mut self, number: usize, now: Nanos) {
        let Some(Some(slot)) = self.slots.get_mut(number) else {
            return;
        };
        let (at, source) = (slot.unit, slot.effects.source());
        if !slot.effects.released.is_empty() {
            let held = slot.holds.len();
            let mut released = std::mem::take(&mut slot.effects.released);
            // Sorted for the search below, since a guest controls their number.
            released.sort_unstable();
            slot.holds
                .retain(|held| released.binary_search(&held.id).is_err());
            let gone = held - slot.holds.len();
            if gone > 0 {
                self.units[at].control_mut().release(gone as u32);
            }
        }
        if let Some(level) = slot.effects.pin.take()
            && let Some(pin) = &mut slot.function_lines.pin
        {
            pin.set(level);
        }
        if !slot.effects.messages.is_empty() {
            let unit = &mut self.units[at];
            for message in slot.effects.messages.drain(..) {
                self.interrupts.send(at, unit, &self.mem, source, message);
            }
        }
        if !slot.effects.routes.is_empty() {
            self.reroute(number);
        }
        let Some(Some(slot)) = self.slots.get_mut(number) else {
            return;
        };
        if !slot.effects.commands.is_empty() {
            let commands = std::mem::take(&mut slot.effects.commands);
            self.call_unit(at, commands, now);
        }
    }

    /// Records the new messages of a function's interrupt lines, and connects these lines.
    #[cold]
    pub(super) fn reroute(&mut self, number: usize) {
        let Some(Some(slot)) = self.slots.get_mut(number) else {
            return;
        };
        let changed = std::mem::take(&mut slot.effects.routes);
        for (line, message) in &changed {
            let at = usize::from(*line);
            if slot.routes.len() <= at {
                slot.routes.resize(at + 1, None);
            }
            slot.routes[at] = *message;
        }
        let unit = &mut self.units[slot.unit];
        self.interrupts
            .connect(unit, &self.mem, &mut slot.function, number, &changed);
    }

    /// Resolves the messages of a function's interrupt lines again, after remapping has changed.
    pub(super) fn connect_all(&mut self, number: usize) {
        let Some(Some(slot)) = self.slots.get_mut(number) else {
            return;
        };
        let lines: Vec<_> = (0..).zip(slot.routes.iter().copied()).collect();
        if !lines.is_empty() {
            let unit = &mut self.units[slot.unit];
            self.interrupts
                .connect(unit, &self.mem, &mut slot.function, number, &lines);
        }
    }

    /// Notifies function number `number` of the invalidations that it has held for longer than
    /// their limit.
    #[cold]
    pub(super) fn watch_holds(&mut self, number: usize, now: Nanos) {
        let Some(Some(slot)) = self.slots.get_mut(number) else {
            return;
        };
        for held in &mut slot.holds {
            if held.limit.is_some_and(|limit| now >= limit) {
                held.limit = None;
                self.totals.hold_limits += 1;
                let function = slot.function.get_mut();
                tracing::warn!(
                    vm = %self.name,
                    device = %function.source(),
                    "an invalidation has waited for this device's mappings for long"
                );
                function.hold_overdue(held.id, &mut slot.effects);
            }
        }
        self.apply(number, now);
    }
}
