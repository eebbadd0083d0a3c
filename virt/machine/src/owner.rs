//! Owner of remapping units and functions: a poller of the machine's sidecore.
//!
//! Everything that reaches a function or a unit from another thread arrives here as a
//! [`Request`](crate::Request). So nothing here has a lock, translation and invalidation are
//! ordered by program order, and an answer means that the operation is done.
//!
//! One sweep: the units first, so that an unmap is seen before the next translation; then each
//! function, with its unit resolved once. The effects that a function asks for ([`Effects`]) are
//! carried out after its call: changes of mappings, interrupts through the unit's remapping, routes
//! of its interrupt lines. A function whose commands are answered there is called once more, since
//! a guest may be waiting for them. A wait for leases that ended in this sweep completes in the
//! next.
//!
//! An operation that may take long (a stop that drains, a remapping table that is absent) is a
//! state: the reply is kept, and sent when the function is silent or the machine has ended.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use guest_mem::{Iommu, KeepAlive, Leases, NoIommu, Pages, PhysMem, SourceId};
use platform::doorbell::Doorbells;
use platform::interrupt::{InterruptPin, InterruptSink, Message};
use sidecore::{Nanos, Reply};

use crate::function::{Effects, FunctionCounts, ResolveFunction};
use crate::interrupts::Interrupts;
use crate::unit::{HoldId, ResolveUnit, UnitVisitor};

mod access;
mod effects;
mod poller;
mod resolve;

use resolve::{FunctionCall, FunctionUses, Listener, PendingUnitEvents, UnitCall, UnitUses};

/// Limit on the time that requests may hold up an unmap or a stop, unless the user says otherwise.
const DRAIN_LIMIT: Duration = Duration::from_nanos(guest_mem::DRAIN_LIMIT_NS);

/// Limit on the time for which a function may hold an invalidation before it is notified
/// ([`Function::hold_overdue`](crate::Function::hold_overdue)), unless the program says otherwise.
const HOLD_LIMIT: Duration = Duration::from_secs(1);

/// The requester of the units' own interrupts, which nothing remaps.
const UNIT_SOURCE: SourceId = SourceId::new(0xff, 0x1f, 0);

/// Leases past all units at a time
/// ([`FunctionContext::bypass_view`](crate::FunctionContext::bypass_view)).
const BYPASS_LEASES: usize = 1024;

/// Connections of a function to its hypervisor. A hypervisor may lack either.
#[derive(Default)]
pub struct FunctionLines {
    /// Its doorbells, which the owner reads; its port places them ([`port`](crate::port)).
    pub doorbells: Option<Box<dyn Doorbells>>,
    /// Its legacy interrupt pin.
    pub pin: Option<Box<dyn InterruptPin>>,
}

/// A function, its connections, and the replies that wait for it to stop: at most one of each vCPU.
struct Slot<F, C> {
    function: F,
    unit: usize,
    hears_invalidations: bool,
    is_iommu: bool,
    effects: Effects<C>,
    function_lines: FunctionLines,
    /// A command of it has been answered since its last poll began.
    is_answered: bool,
    /// Messages of its interrupt lines, before remapping.
    routes: Vec<Option<Message>>,
    /// Invalidations that it holds, oldest first.
    holds: Vec<Held>,
    stopping: Vec<Reply<u64>>,
    /// Time at which the stop under way is overdue; `u64::MAX` once that has been handled.
    stop_limit: Option<Nanos>,
    /// The function's end has been sent to the receiver of the machine's end.
    is_told: bool,
    /// Set when the function is to be dropped once it has ended: receives its requester.
    removal: Option<Sender<SourceId>>,
}

/// An invalidation that a function holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    id: HoldId,
    /// Time at which it is overdue; `None` once its function has been notified.
    limit: Option<Nanos>,
}

impl<F: ResolveFunction<C>, C> Slot<F, C> {
    /// Returns whether a caller waits for a stop of it, or may have to.
    fn is_watched(&self) -> bool {
        self.stop_limit.is_some() || !self.stopping.is_empty() || self.removal.is_some()
    }

    /// Checks a stop against its limit. A stop waits for the requests in flight, however slow the
    /// storage: the memory of a request that cannot be cancelled may still be written. At the limit
    /// the log says so. A reset or the machine's end then cancels the requests that can be
    /// cancelled; a pause does not, since a cancelled request would fail in the guest.
    #[cold]
    fn watch_stop(&mut self, now: Nanos, limit: Duration, vm: &str) {
        let function = self.function.get_mut();
        if function.is_drained() {
            self.stop_limit = None;
            return;
        }
        let due = *self.stop_limit.get_or_insert(after(now, limit));
        if now >= due {
            self.stop_limit = Some(Nanos(u64::MAX));
            tracing::warn!(
                vm,
                device = %function.source(),
                "a stop waits for requests that the storage has not finished"
            );
            function.stop_overdue();
        }
    }
}

/// Returns the time `limit` after `now`.
fn after(now: Nanos, limit: Duration) -> Nanos {
    let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    Nanos(now.0.saturating_add(limit))
}

/// Arguments of a call into a function: its unit, and its other resources.
type Called<'a, U, F, M> = (
    &'a mut U,
    FunctionCall<'a, F, <U as ResolveUnit>::Command, M>,
);

/// Counters of the owner, and sums over its units and functions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Sum of the values read from the doorbell eventfds: an exit each.
    pub doorbells: u64,
    /// Those of `doorbells` that belong to functions that are IOMMUs.
    pub iommu_doorbells: u64,
    /// Requests and frames served by all functions but IOMMUs.
    pub requests: u64,
    /// Requests served by functions that are IOMMUs.
    pub iommu_requests: u64,
    /// Messages sent, the units' own included.
    pub interrupts: u64,
    /// Times that queues of all functions waited for memory that was absent.
    pub pends: u64,
    /// Interrupts that remapping has blocked.
    pub blocked_interrupts: u64,
    /// Times the unit's drain limit has passed.
    pub drain_limits: u64,
    /// Holds of invalidations that were not released within the limit.
    pub hold_limits: u64,
}

/// The owner. See the module's head.
pub struct Owner<U: ResolveUnit, F, M> {
    name: String,
    mem: M,
    keep: KeepAlive,
    units: Vec<U>,
    slots: Vec<Option<Slot<F, U::Command>>>,
    bypass: NoIommu,
    interrupts: Interrupts,
    pending: PendingUnitEvents,
    has_subscribers: bool,
    /// Kept for its allocation.
    wake_fds: Vec<(RawFd, u32)>,
    /// Whether they are registered: from `arm` to the poll that follows it, since no one empties
    /// them while it polls.
    is_listening: bool,
    idle_sweeps: u32,
    drain_limit: Duration,
    hold_limit: Duration,
    /// Name of the next hold.
    next_hold: HoldId,
    totals: Totals,
    /// Set once the machine has ended: receives the number of each function that has ended.
    end: Option<Sender<usize>>,
}

impl<U, F, M> Owner<U, F, M>
where
    U: ResolveUnit,
    F: ResolveFunction<U::Command>,
    M: PhysMem,
{
    /// Creates an owner of `mem` alone. Interrupts go to `sink`.
    pub fn new(name: impl Into<String>, mem: M, sink: Arc<dyn InterruptSink>) -> Self {
        Self {
            name: name.into(),
            keep: mem.keep_alive(),
            mem,
            units: Vec::new(),
            slots: Vec::new(),
            bypass: NoIommu::new(BYPASS_LEASES),
            interrupts: Interrupts::new(sink),
            pending: PendingUnitEvents::default(),
            has_subscribers: false,
            wake_fds: Vec::new(),
            is_listening: false,
            idle_sweeps: 0,
            drain_limit: DRAIN_LIMIT,
            hold_limit: HOLD_LIMIT,
            next_hold: HoldId(0),
            totals: Totals::default(),
            end: None,
        }
    }

    /// Sets how long a device may take to stop before its requests are cancelled; units have limits
    /// of their own, for unmaps.
    #[must_use]
    pub fn with_drain_limit(mut self, limit: Duration) -> Self {
        self.drain_limit = limit;
        self
    }

    /// Sets how long a function may hold an invalidation before it is notified
    /// ([`Function::hold_overdue`](crate::Function::hold_overdue)).
    #[must_use]
    pub fn with_hold_limit(mut self, limit: Duration) -> Self {
        self.hold_limit = limit;
        self
    }

    /// Adds a unit and returns its number.
    pub fn add_unit(&mut self, unit: U) -> usize {
        self.units.push(unit);
        self.units.len() - 1
    }

    /// Adds a function whose DMA and interrupts go through unit number `unit`, and returns its
    /// number in requests.
    ///
    /// # Panics
    /// If there is no such unit: a builder's error.
    pub fn add(&mut self, unit: usize, function: F, function_lines: FunctionLines) -> usize {
        assert!(unit < self.units.len(), "there is no unit {unit}");
        let free = self.slots.iter().position(Option::is_none);
        let number = free.unwrap_or(self.slots.len());
        let shape = function.get().shape();
        self.has_subscribers |= shape.hears_invalidations;
        let slot = Some(Slot {
            unit,
            hears_invalidations: shape.hears_invalidations,
            is_iommu: shape.is_iommu,
            effects: Effects::new(number, function.get().source()),
            function,
            function_lines,
            is_answered: false,
            routes: Vec::new(),
            holds: Vec::new(),
            stopping: Vec::new(),
            stop_limit: None,
            is_told: false,
            removal: None,
        });
        match free {
            Some(_) => self.slots[number] = slot,
            None => self.slots.push(slot),
        }
        number
    }

    /// Removes a function whose port is unplugged. The function stops for good. Once nothing of it
    /// is in flight it is dropped, and its requester is sent to `told`.
    pub fn remove(&mut self, number: usize, told: Sender<SourceId>) {
        if let Some(Some(slot)) = self.slots.get_mut(number) {
            slot.function.get_mut().end();
            slot.removal = Some(told);
        }
    }

    /// Evicts those of `pages` that nothing here reaches without asking memory again: no lease, no
    /// window, no function that counts them as in use. Returns a bit for each evicted page. They
    /// are absent from the next access on.
    pub fn evict(&mut self, pages: &Pages) -> u32 {
        let mut used = self.bypass.leases().in_use(pages);
        for unit in &mut self.units {
            used |= unit.with(UnitUses(pages));
        }
        let now = Nanos::now();
        for number in 0..self.slots.len() {
            if let Some((unit, function_call)) = self.lend_to(number, now) {
                used |= unit.with(FunctionUses {
                    function_call,
                    pages,
                });
            }
        }
        self.mem.let_go(pages, pages.all() & !used)
    }

    /// Returns unit number `at`, for questions that only the program that composed it can ask.
    pub fn unit(&mut self, at: usize) -> Option<&mut U> {
        self.units.get_mut(at)
    }

    /// Returns function number `at`, likewise.
    pub fn function(&mut self, at: usize) -> Option<&mut F> {
        self.slots
            .get_mut(at)?
            .as_mut()
            .map(|slot| &mut slot.function)
    }

    /// Returns the memory.
    pub fn memory(&mut self) -> &mut M {
        &mut self.mem
    }

    /// Returns sums over everything owned.
    pub fn totals(&mut self) -> Totals {
        self.drain_doorbells();
        let mut totals = self.totals;
        totals.interrupts += self.interrupts.sent() + self.pending.interrupts;
        totals.blocked_interrupts = self.interrupts.blocked();
        for slot in self.slots.iter().flatten() {
            let doorbells = slot.function_lines.doorbells.as_ref();
            let rung = doorbells.map_or(0, |bells| bells.rung());
            totals.doorbells += rung;
            let FunctionCounts {
                requests, pends, ..
            } = slot.function.get().counts();
            totals.pends += pends;
            if slot.is_iommu {
                totals.iommu_doorbells += rung;
                totals.iommu_requests += requests;
            } else {
                totals.requests += requests;
            }
        }
        totals
    }

    /// Sends an interrupt of a source that is no function (an I/O APIC) through a unit's remapping.
    pub fn send(&mut self, unit: usize, source: SourceId, message: Message) {
        if let Some(resolved) = self.units.get_mut(unit) {
            self.interrupts
                .send(unit, resolved, &self.mem, source, message);
        }
    }

    /// Returns the unit of function `number`, and the other resources of a call into it.
    #[inline]
    fn lend_to(&mut self, number: usize, now: Nanos) -> Option<Called<'_, U, F, M>> {
        let slot = self.slots.get_mut(number)?.as_mut()?;
        let unit = &mut self.units[slot.unit];
        let function_call = FunctionCall {
            slot,
            bypass: &mut self.bypass,
            mem: &self.mem,
            now: now.0,
        };
        Some((unit, function_call))
    }

    /// Has unit number `at` do `what`.
    fn call_unit<W, R>(&mut self, at: usize, what: W, now: Nanos) -> R
    where
        for<'a> UnitCall<'a, W, F, U::Command, M>: UnitVisitor<U::Command, Out = R>,
    {
        let sink = Listener {
            unit: at,
            has_subscribers: self.has_subscribers,
            hold_limit: after(now, self.hold_limit),
            next_hold: &mut self.next_hold,
            slots: &mut self.slots,
            sink: self.interrupts.sink(),
            pending: &mut self.pending,
        };
        self.units[at].with(UnitCall {
            what,
            mem: &self.mem,
            now: now.0,
            sink,
        })
    }
}
