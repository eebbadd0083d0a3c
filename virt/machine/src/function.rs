//! Interface of a function to its owner: [`Function`] and [`DataPath`], the resources of one call
//! ([`FunctionContext`]), and the effects that a call asks for ([`Effects`]).

use std::ops::Range;
use std::os::fd::RawFd;

use guest_mem::{Iommu, KeepAlive, NoIommu, Pages, PhysMem, SourceId, Ticket, View};
use pci::bars::{BARS, BarKind};
use platform::interrupt::Message;

use crate::request::TicketResult;
use crate::unit::{Command, CommandId, CommandResult, Hold, HoldId, Invalidation, RefusedAccess};

/// Properties of a function that never change, for handles that other threads use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionShape {
    /// Kind of each BAR.
    pub bars: [BarKind; BARS],
    /// Location of the doorbells: a BAR, and a range of offsets in it in bytes.
    pub doorbells: Option<(u8, Range<u64>)>,
    /// Whether it subscribes to its unit's invalidations ([`Function::invalidated`]).
    pub hears_invalidations: bool,
    /// Whether it presents its unit to the guest: it reports the accesses that the unit refuses
    /// ([`Function::access_refused`]), and its doorbells are the IOMMU's.
    pub is_iommu: bool,
}

impl FunctionShape {
    /// Returns a shape with these BARs, without doorbells, and subscribed to neither invalidations
    /// nor refused accesses.
    pub fn new(bars: [BarKind; BARS]) -> Self {
        Self {
            bars,
            doorbells: None,
            hears_invalidations: false,
            is_iommu: false,
        }
    }
}

/// Counters of one function since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FunctionCounts {
    /// Requests and frames served.
    pub requests: u64,
    /// Interrupt messages sent.
    pub interrupts: u64,
    /// Times a queue waited for memory that was absent.
    pub pends: u64,
}

/// Result of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// Nothing to do until something arrives.
    Idle,
    /// Something was done, or is left to do at once.
    Busy,
    /// Busy with a stop: a request in flight has not ended.
    Stopping,
}

/// Effects that a function asks for during a call. The owner carries them out after the call, in
/// the order of the fields.
#[derive(Debug)]
pub struct Effects<C> {
    /// Changes of its unit's mappings. Each ends in [`Function::command_done`].
    pub(crate) commands: Vec<Command<C>>,
    /// Interrupts to send: each goes through its unit's interrupt remapping.
    pub messages: Vec<Message>,
    /// Messages for its interrupt lines, before remapping; `None`: the line's signals are kept.
    pub(crate) routes: Vec<(u16, Option<Message>)>,
    /// Level of its legacy pin, where that has changed.
    pub(crate) pin: Option<bool>,
    /// Invalidations that it has held and now releases.
    pub(crate) released: Vec<HoldId>,
    source: SourceId,
    next_command: u64,
}

impl<C> Effects<C> {
    /// Makes the empty list of function number `number`, whose requester is `source`.
    pub(crate) fn new(number: usize, source: SourceId) -> Self {
        Self {
            commands: Vec::new(),
            messages: Vec::new(),
            routes: Vec::new(),
            pin: None,
            released: Vec::new(),
            source,
            next_command: (number as u64) << 32,
        }
    }

    /// Asks for a change of its unit's mappings and returns the command's name.
    pub fn command(&mut self, what: C) -> CommandId {
        let id = CommandId(self.next_command);
        // The lower half wraps: no function has 2^32 commands under way.
        self.next_command = id.0 & !u64::from(u32::MAX) | u64::from((id.0 as u32).wrapping_add(1));
        let source = self.source;
        self.commands.push(Command { id, source, what });
        id
    }

    /// Sets the message that signals of `line` send from now on; `None`: the signals are kept.
    pub fn route(&mut self, line: u16, message: Option<Message>) {
        self.routes.push((line, message));
    }

    /// Drives the legacy pin.
    pub fn set_pin(&mut self, level: bool) {
        self.pin = Some(level);
    }

    /// Releases an invalidation that [`Function::invalidated`] has held under this name. A name
    /// that is not held any more has no effect.
    pub fn release(&mut self, hold: HoldId) {
        self.released.push(hold);
    }

    #[inline]
    pub(crate) fn source(&self) -> SourceId {
        self.source
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
            && self.commands.is_empty()
            && self.routes.is_empty()
            && self.pin.is_none()
            && self.released.is_empty()
    }
}

/// Resources for one call into a function: its remapping unit, guest memory, and the list of its
/// effects.
pub struct FunctionContext<'a, I, M, C> {
    unit: &'a mut I,
    bypass: &'a mut NoIommu,
    mem: &'a M,
    source: SourceId,
    now: u64,
    /// Effects that the function asks for.
    pub effects: &'a mut Effects<C>,
}

impl<'a, I, M, C> FunctionContext<'a, I, M, C> {
    /// Lends `unit`, `bypass` and `mem` at `now` (ns of a monotonic clock) to the function whose
    /// effects these are.
    #[inline]
    pub(crate) fn new(
        unit: &'a mut I,
        bypass: &'a mut NoIommu,
        mem: &'a M,
        now: u64,
        effects: &'a mut Effects<C>,
    ) -> Self {
        Self {
            unit,
            bypass,
            mem,
            source: effects.source(),
            now,
            effects,
        }
    }
}

impl<I: Iommu, M: PhysMem, C> FunctionContext<'_, I, M, C> {
    /// Returns guest memory as the function's DMA sees it. The view has no state of its own.
    #[inline]
    pub fn view(&mut self) -> View<'_, I, M> {
        View::new(self.unit, self.mem, self.source)
    }

    /// Returns the view together with the list of effects.
    #[inline]
    pub fn split(&mut self) -> (View<'_, I, M>, &mut Effects<C>) {
        (View::new(self.unit, self.mem, self.source), self.effects)
    }

    /// Returns guest memory at guest-physical addresses, without translation: for a function whose
    /// accesses its own unit must not translate, such as the request queue of a paravirtual IOMMU.
    #[inline]
    pub fn bypass_view(&mut self) -> View<'_, NoIommu, M> {
        View::new(self.bypass, self.mem, self.source)
    }

    /// Returns the bypass view together with the list of effects.
    #[inline]
    pub fn split_bypass(&mut self) -> (View<'_, NoIommu, M>, &mut Effects<C>) {
        (View::new(self.bypass, self.mem, self.source), self.effects)
    }

    /// Returns the unit, guest memory and the list of effects, for a function that follows its
    /// unit's mappings: it walks the tables ([`Iommu::next_mapping`]) and asks for host memory at
    /// guest-physical addresses.
    #[inline]
    pub fn follow(&mut self) -> (&I, &M, &mut Effects<C>) {
        (self.unit, self.mem, self.effects)
    }

    /// Returns monotonic time, ns.
    #[inline]
    pub fn now(&self) -> u64 {
        self.now
    }
}

/// Control interface of a function: everything but its data path. All calls come from the owner's
/// thread; none blocks.
///
/// **Stopping.** A write that stops the function (reset, Bus Master off) is answered only once the
/// function does no more DMA, as [`is_silent`](Self::is_silent) reports. The end of the machine and
/// a removal stop the function for good.
pub trait Function<C>: Send {
    /// Returns the requester of its DMA and its interrupts.
    fn source(&self) -> SourceId;

    /// Returns the properties that never change.
    fn shape(&self) -> FunctionShape;

    /// Reads `len` (1, 2 or 4) bytes of configuration space.
    fn config_read(&mut self, reg: u16, len: u8) -> u32;

    /// Writes `len` (1, 2 or 4) bytes of configuration space.
    fn config_write(
        &mut self,
        reg: u16,
        len: u8,
        value: u32,
        keep: &KeepAlive,
        out: &mut Effects<C>,
    );

    /// Reads 1 to 8 bytes of a BAR.
    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes 1 to 8 bytes of a BAR. `keep` keeps guest memory mapped for a device that starts.
    fn bar_write(
        &mut self,
        bar: u8,
        offset: u64,
        data: &[u8],
        keep: &KeepAlive,
        out: &mut Effects<C>,
    );

    /// Handles a ring of doorbell number `queue`.
    fn ring(&mut self, queue: u16) {
        let _ = queue;
    }

    /// Passes to `add` the descriptors that its back end wakes by, once armed.
    fn wake_fds(&self, add: &mut dyn FnMut(RawFd)) {
        let _ = add;
    }

    /// Returns the time, in ns, at which it must be polled again even if nothing has arrived.
    fn deadline(&self) -> Option<u64> {
        None
    }

    /// Returns whether a stop that was asked for is over; true when none was asked for. The
    /// default, as that of the methods on stopping below, suits a function that has nothing in
    /// flight between two calls.
    fn is_drained(&self) -> bool {
        true
    }

    /// Returns whether it does no DMA until it is started again; true also when no stop was asked
    /// for.
    fn is_silent(&self) -> bool {
        self.is_drained()
    }

    /// Reports that a stop has lasted for the drain limit; called once.
    fn stop_overdue(&mut self) {}

    /// Cancels the requests for which an unmap has waited for the drain limit.
    fn cancel_overdue(&mut self) {}

    /// Stops the function for good: the machine has ended, or the function is removed.
    fn end(&mut self) {}

    /// Returns whether nothing is in flight any more after [`end`](Self::end).
    fn has_ended(&self) -> bool {
        self.is_drained()
    }

    /// Reports that the wait for `ticket` has ended: the memory is there, or never will be. The
    /// ticket may be another function's. The default suits a function that retries at every poll.
    fn ticket_done(&mut self, ticket: Ticket, result: TicketResult) {
        let _ = (ticket, result);
    }

    /// Reports that a command has ended.
    fn command_done(&mut self, id: CommandId, result: CommandResult, out: &mut Effects<C>) {
        let _ = (id, result, out);
    }

    /// Reports an access that its unit has refused, of any function under it. The next poll may
    /// tell the guest.
    fn access_refused(&mut self, access: &RefusedAccess) {
        let _ = access;
    }

    /// Reports an invalidation by its unit, and returns whether the function holds it, under the
    /// name `hold`. It is called while the unit works: the function acts on it in its next poll.
    fn invalidated(&mut self, what: &Invalidation, hold: HoldId) -> Hold {
        let _ = (what, hold);
        Hold::No
    }

    /// Reports an invalidation that it has held for the owner's limit; called once for each. The
    /// invalidation completes only when it is released. The default releases it: right for a
    /// follower whose lag costs no protection.
    fn hold_overdue(&mut self, hold: HoldId, out: &mut Effects<C>) {
        out.release(hold);
    }

    /// Passes the messages of its interrupt lines, after remapping: all that change together, so
    /// that a hypervisor's table is sent once.
    fn connect(&mut self, lines: &[(u16, Option<Message>)]) {
        let _ = lines;
    }

    /// Returns its counters. Default: all zero.
    fn counts(&self) -> FunctionCounts {
        FunctionCounts::default()
    }
}

/// Data path of a function: generic over the concrete unit and memory, so that no access is
/// dispatched dynamically.
pub trait DataPath<C>: Function<C> {
    /// Does a bounded batch of its work, or of stopping.
    fn poll<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) -> Progress;

    /// Asks the driver for doorbells, where it would not ring them otherwise. The caller then
    /// issues a fence and calls [`has_work`](Self::has_work).
    fn arm<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) {
        let _ = cx;
    }

    /// Returns whether a poll would find anything. A stop under way counts.
    fn has_work<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) -> bool;

    /// Reverts [`arm`](Self::arm).
    fn disarm<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) {
        let _ = cx;
    }

    /// Returns those of `pages` that it may reach without asking memory again, by something that
    /// outlives a call and is no lease: a window, a mapping of a host's IOMMU, another process. The
    /// default is all of them. If a page in use is missing from the answer, the function may write
    /// into it after it has been given to another user; a page too many only keeps memory.
    fn in_use<I: Iommu, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, C>,
        pages: &Pages,
    ) -> u32 {
        let _ = cx;
        pages.all()
    }
}

/// A closed set of functions. [`functions!`](crate::functions) makes one.
pub trait ResolveFunction<C>: Send {
    /// Returns the function.
    fn get(&self) -> &dyn Function<C>;
    /// Returns the function, to be changed.
    fn get_mut(&mut self) -> &mut dyn Function<C>;
    /// See [`DataPath::poll`].
    fn poll<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) -> Progress;
    /// See [`DataPath::arm`].
    fn arm<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>);
    /// See [`DataPath::has_work`].
    fn has_work<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) -> bool;
    /// See [`DataPath::disarm`].
    fn disarm<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>);
    /// See [`DataPath::in_use`].
    fn in_use<I: Iommu, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, C>,
        pages: &Pages,
    ) -> u32;
}

/// The empty set: for a machine of units alone.
pub enum NoFunction {}

impl<C> ResolveFunction<C> for NoFunction {
    fn get(&self) -> &dyn Function<C> {
        match *self {}
    }

    fn get_mut(&mut self) -> &mut dyn Function<C> {
        match *self {}
    }

    fn poll<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, C>) -> Progress {
        match *self {}
    }

    fn arm<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, C>) {
        match *self {}
    }

    fn has_work<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, C>) -> bool {
        match *self {}
    }

    fn disarm<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, C>) {
        match *self {}
    }

    fn in_use<I: Iommu, M: PhysMem>(
        &mut self,
        _: &mut FunctionContext<'_, I, M, C>,
        _: &Pages,
    ) -> u32 {
        match *self {}
    }
}

/// Makes a closed set of functions: an enum of types that have a [`DataPath`], matched once per
/// poll.
#[macro_export]
macro_rules! functions {
    ($(#[$meta:meta])* $vis:vis enum $name:ident: $command:ty {
        $($(#[$variant_meta:meta])* $variant:ident($function:ty)),+ $(,)?
    }) => {
        $(#[$meta])*
        $vis enum $name {
            $($(#[$variant_meta])* $variant($function)),+
        }

        impl $crate::ResolveFunction<$command> for $name {
            fn get(&self) -> &dyn $crate::Function<$command> {
                match self { $(Self::$variant(function) => function),+ }
            }

            fn get_mut(&mut self) -> &mut dyn $crate::Function<$command> {
                match self { $(Self::$variant(function) => function),+ }
            }

            $crate::functions!(@path $command; poll -> $crate::function::Progress; $($variant)+);
            $crate::functions!(@path $command; arm -> (); $($variant)+);
            $crate::functions!(@path $command; has_work -> bool; $($variant)+);
            $crate::functions!(@path $command; disarm -> (); $($variant)+);

            fn in_use<I: $crate::function::__private::Iommu, M: $crate::function::__private::PhysMem>(
                &mut self,
                cx: &mut $crate::FunctionContext<'_, I, M, $command>,
                pages: &$crate::function::__private::Pages,
            ) -> u32 {
                match self { $(Self::$variant(function) => $crate::DataPath::in_use(function, cx, pages)),+ }
            }
        }
    };
    (@path $command:ty; $method:ident -> $out:ty; $($variant:ident)+) => {
        fn $method<I: $crate::function::__private::Iommu, M: $crate::function::__private::PhysMem>(
            &mut self,
            cx: &mut $crate::FunctionContext<'_, I, M, $command>,
        ) -> $out {
            match self { $(Self::$variant(function) => $crate::DataPath::$method(function, cx)),+ }
        }
    };
}

/// For [`functions!`](crate::functions).
#[doc(hidden)]
pub mod __private {
    pub use guest_mem::{Iommu, Pages, PhysMem};
}
