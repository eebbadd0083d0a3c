//! Calls into units and functions with the concrete unit resolved, and the receiver of a unit's
//! reports.

use guest_mem::{Iommu, Leases, NoIommu, Pages, PhysMem};
use platform::interrupt::{InterruptSink, Message};
use sidecore::Nanos;

use super::{Held, Slot, UNIT_SOURCE};
use crate::function::{FunctionContext, Progress, ResolveFunction};
use crate::request::Op;
use crate::unit::{
    Command, CommandId, CommandResult, Hold, HoldId, Invalidation, RefusedAccess, RemappingUnit,
    Scope, UnitEvent, UnitPoll, UnitSink, UnitVisitor,
};

/// Reports of units on which the owner has not yet acted. Kept for its allocations.
#[derive(Default)]
pub(super) struct PendingUnitEvents {
    pub(super) events: Vec<UnitEvent>,
    pub(super) answers: Vec<(CommandId, CommandResult)>,
    pub(super) interrupts: u64,
    /// Interrupt remapping has changed.
    pub(super) are_routes_stale: bool,
}

impl PendingUnitEvents {
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.answers.is_empty() && !self.are_routes_stale
    }
}

/// Receiver of a unit's reports while it works.
pub(super) struct Listener<'a, F, C> {
    pub(super) unit: usize,
    pub(super) has_subscribers: bool,
    /// Time at which an invalidation held from now on is overdue.
    pub(super) hold_limit: Nanos,
    pub(super) next_hold: &'a mut HoldId,
    pub(super) slots: &'a mut [Option<Slot<F, C>>],
    pub(super) sink: &'a dyn InterruptSink,
    pub(super) pending: &'a mut PendingUnitEvents,
}

impl<F: ResolveFunction<C>, C> UnitSink for Listener<'_, F, C> {
    fn interrupt(&mut self, message: Message) {
        self.pending.interrupts += 1;
        self.sink.send(UNIT_SOURCE, message);
    }

    fn event(&mut self, event: UnitEvent) {
        self.pending.events.push(event);
    }

    fn invalidated(&mut self, what: &Invalidation) -> u32 {
        self.pending.are_routes_stale |= what.scope == Scope::Interrupts;
        if !self.has_subscribers {
            return 0;
        }
        let mut holds = 0;
        for slot in self.slots.iter_mut().flatten() {
            if !slot.hears_invalidations || slot.unit != self.unit {
                continue;
            }
            let id = *self.next_hold;
            if slot.function.get_mut().invalidated(what, id) == Hold::Yes {
                // 2^64 names last for any machine's lifetime.
                self.next_hold.0 += 1;
                let limit = Some(self.hold_limit);
                slot.holds.push(Held { id, limit });
                holds += 1;
            }
        }
        holds
    }

    fn command_done(&mut self, id: CommandId, result: CommandResult) {
        self.pending.answers.push((id, result));
    }

    #[cold]
    fn access_refused(&mut self, access: RefusedAccess) {
        for slot in self.slots.iter_mut().flatten() {
            if slot.is_iommu && slot.unit == self.unit {
                slot.function.get_mut().access_refused(&access);
            }
        }
    }
}

/// A call into a unit: the operation, the resources for it, and the receiver of its reports.
pub(super) struct UnitCall<'a, W, F, C, M> {
    pub(super) what: W,
    pub(super) mem: &'a M,
    pub(super) now: u64,
    pub(super) sink: Listener<'a, F, C>,
}

/// Operation of a [`UnitCall`]: a poll.
pub(super) struct PollUnit;

impl<F: ResolveFunction<C>, C, M: PhysMem> UnitVisitor<C> for UnitCall<'_, PollUnit, F, C, M> {
    type Out = UnitPoll;

    #[inline]
    fn visit<U: RemappingUnit<C>>(mut self, unit: &mut U) -> UnitPoll {
        unit.poll(self.mem, self.now, &mut self.sink)
    }
}

/// A register access.
impl<F: ResolveFunction<C>, C, M: PhysMem> UnitVisitor<C> for UnitCall<'_, Op, F, C, M> {
    type Out = u64;

    fn visit<U: RemappingUnit<C>>(mut self, unit: &mut U) -> u64 {
        unit.access(self.what, self.mem, self.now, &mut self.sink)
    }
}

/// Its functions' commands.
impl<F: ResolveFunction<C>, C, M: PhysMem> UnitVisitor<C>
    for UnitCall<'_, Vec<Command<C>>, F, C, M>
{
    type Out = ();

    fn visit<U: RemappingUnit<C>>(mut self, unit: &mut U) {
        for command in self.what {
            unit.command(command, self.mem, self.now, &mut self.sink);
        }
    }
}

/// Method of a function's data path to call.
#[derive(Clone, Copy)]
pub(super) enum Call {
    Poll,
    Arm,
    HasWork,
    Disarm,
}

/// A function, and the resources of a call into it besides its unit.
pub(super) struct FunctionCall<'a, F, C, M> {
    pub(super) slot: &'a mut Slot<F, C>,
    pub(super) bypass: &'a mut NoIommu,
    pub(super) mem: &'a M,
    pub(super) now: u64,
}

impl<'a, F, C, M> FunctionCall<'a, F, C, M> {
    #[inline]
    fn with<I>(self, unit: &'a mut I) -> (&'a mut F, FunctionContext<'a, I, M, C>) {
        let Slot {
            function, effects, ..
        } = self.slot;
        let cx = FunctionContext::new(unit, self.bypass, self.mem, self.now, effects);
        (function, cx)
    }
}

/// Calls a function's data path with its unit.
pub(super) struct CallFunction<'a, F, C, M> {
    pub(super) call: Call,
    pub(super) function_call: FunctionCall<'a, F, C, M>,
}

impl<F: ResolveFunction<C>, C, M: PhysMem> UnitVisitor<C> for CallFunction<'_, F, C, M> {
    type Out = Progress;

    #[inline]
    fn visit<U: RemappingUnit<C>>(self, unit: &mut U) -> Progress {
        let (function, mut cx) = self.function_call.with(unit.iommu());
        let cx = &mut cx;
        match self.call {
            Call::Poll => return function.poll(cx),
            Call::Arm => function.arm(cx),
            Call::HasWork if function.has_work(cx) => return Progress::Busy,
            Call::HasWork => {}
            Call::Disarm => function.disarm(cx),
        }
        Progress::Idle
    }
}

/// Asks a function which pages it uses.
pub(super) struct FunctionUses<'a, F, C, M> {
    pub(super) function_call: FunctionCall<'a, F, C, M>,
    pub(super) pages: &'a Pages,
}

impl<F: ResolveFunction<C>, C, M: PhysMem> UnitVisitor<C> for FunctionUses<'_, F, C, M> {
    type Out = u32;

    fn visit<U: RemappingUnit<C>>(self, unit: &mut U) -> u32 {
        let (function, mut cx) = self.function_call.with(unit.iommu());
        function.in_use(&mut cx, self.pages)
    }
}

/// Asks a unit which pages it uses.
pub(super) struct UnitUses<'a>(pub(super) &'a Pages);

impl<C> UnitVisitor<C> for UnitUses<'_> {
    type Out = u32;

    fn visit<U: RemappingUnit<C>>(self, unit: &mut U) -> u32 {
        unit.iommu().leases().in_use(self.0)
    }
}
