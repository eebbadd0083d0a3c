//! The device as a PCI function: a virtio function whose rings are accessed without translation,
//! and whose requests are commands to the unit.
//!
//! The owner executes a poll's commands after the poll. Requests that need not wait are answered at
//! once, and the next poll in the same sweep publishes the answers.
//!
//! Its rings are polled, and the driver has to ring only for a sleeping core. The other mode,
//! *trapped*, is the reference: the rings are visited only after the driver rings, and
//! notifications are always enabled.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, fence};

use guest_mem::{Iommu as Unit, KeepAlive, Pages, PhysMem, SourceId, Ticket};
use machine::{
    CommandId, CommandResult, DataPath, Effects, Function, FunctionContext, FunctionCounts,
    FunctionShape, Hold, HoldId, Invalidation, Progress, RefusedAccess, TicketResult,
};
use platform::interrupt::Message;
use vio::Device;
use virtio_pci::VirtioFunction;

use crate::class::{Iommu, IommuClass, Tag};
use crate::wire::Request;

/// PCI function of the paravirtual IOMMU; see the module's head. It must be the first function of
/// its owner: the translations of the others depend on its requests.
pub struct IommuFunction {
    inner: VirtioFunction<Iommu>,
    asked: BTreeMap<CommandId, Tag>,
    /// Doorbell state of a trapped function.
    bell: Option<Bell>,
}

/// Doorbell state of a trapped function.
struct Bell {
    /// The doorbell was rung, or another event happened, since the last poll without work.
    is_rung: bool,
}

impl IommuFunction {
    /// Creates the function at `source`, for a unit with these endpoints; `source` is not among
    /// them.
    pub fn new(source: SourceId, endpoints: Vec<RangeInclusive<u16>>) -> Self {
        let device = Device::of(IommuClass::new(endpoints));
        Self {
            inner: VirtioFunction::new(source, device),
            asked: BTreeMap::new(),
            bell: None,
        }
    }

    /// Makes the function trapped. Its doorbells must arrive as writes
    /// ([`Function::bar_write`]), or as often as they are rung.
    #[must_use]
    pub fn trapped(mut self) -> Self {
        self.bell = Some(Bell { is_rung: true });
        self
    }

    /// Whether a poll may find anything.
    fn is_awake(&self, now: u64) -> bool {
        let is_due = || self.function().deadline().is_some_and(|at| at <= now);
        self.bell.as_ref().is_none_or(|bell| bell.is_rung) || is_due()
    }

    /// A poll of a trapped one may find something.
    fn wake(&mut self) {
        if let Some(bell) = &mut self.bell {
            bell.is_rung = true;
        }
    }

    /// Number of queues.
    pub fn queues(&self) -> u16 {
        self.inner.queues()
    }

    /// Returns the class, for operations that are not the driver's.
    pub fn class_mut(&mut self) -> &mut IommuClass {
        self.inner.device_mut().class_mut()
    }

    /// The virtio function, in the words of its trait.
    fn function(&self) -> &dyn Function<Request> {
        &self.inner
    }

    fn function_mut(&mut self) -> &mut dyn Function<Request> {
        &mut self.inner
    }

    /// Passes the driver's requests to the unit.
    fn ask(&mut self, out: &mut Effects<Request>) {
        while let Some((tag, request)) = self.class_mut().take_request() {
            self.asked.insert(out.command(request), tag);
        }
    }
}

impl Function<Request> for IommuFunction {
    fn source(&self) -> SourceId {
        self.function().source()
    }

    fn shape(&self) -> FunctionShape {
        FunctionShape {
            is_iommu: true,
            ..self.function().shape()
        }
    }

    fn config_read(&mut self, reg: u16, len: u8) -> u32 {
        self.function_mut().config_read(reg, len)
    }

    fn config_write(
        &mut self,
        reg: u16,
        len: u8,
        value: u32,
        keep: &KeepAlive,
        out: &mut Effects<Request>,
    ) {
        self.function_mut().config_write(reg, len, value, keep, out);
        self.ask(out);
        self.wake();
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        self.function_mut().bar_read(bar, offset, data);
    }

    fn bar_write(
        &mut self,
        bar: u8,
        offset: u64,
        data: &[u8],
        keep: &KeepAlive,
        out: &mut Effects<Request>,
    ) {
        self.function_mut().bar_write(bar, offset, data, keep, out);
        // A write of `bypass` holds before the driver's next access.
        self.ask(out);
        self.wake();
    }

    fn ring(&mut self, queue: u16) {
        self.function_mut().ring(queue);
        self.wake();
    }

    fn wake_fds(&self, add: &mut dyn FnMut(RawFd)) {
        self.function().wake_fds(add);
    }

    fn deadline(&self) -> Option<u64> {
        self.function().deadline()
    }

    fn is_drained(&self) -> bool {
        self.function().is_drained()
    }

    fn is_silent(&self) -> bool {
        self.function().is_silent()
    }

    fn stop_overdue(&mut self) {
        self.function_mut().stop_overdue();
        self.wake();
    }

    fn cancel_overdue(&mut self) {
        self.function_mut().cancel_overdue();
        self.wake();
    }

    fn end(&mut self) {
        self.function_mut().end();
        self.wake();
    }

    fn has_ended(&self) -> bool {
        self.function().has_ended()
    }

    fn ticket_done(&mut self, ticket: Ticket, result: TicketResult) {
        self.function_mut().ticket_done(ticket, result);
        self.wake();
    }

    fn command_done(&mut self, id: CommandId, result: CommandResult, _out: &mut Effects<Request>) {
        let status = match result {
            CommandResult::Done => 0,
            CommandResult::Refused(status) => status,
        };
        if let Some(tag) = self.asked.remove(&id) {
            self.class_mut().answer(tag, status);
        }
        self.wake();
    }

    fn access_refused(&mut self, access: &RefusedAccess) {
        self.class_mut().refused(access);
        self.wake();
    }

    /// Its own accesses are not translated.
    fn invalidated(&mut self, _what: &Invalidation, _hold: HoldId) -> Hold {
        Hold::No
    }

    fn connect(&mut self, lines: &[(u16, Option<Message>)]) {
        self.function_mut().connect(lines);
    }

    fn counts(&self) -> FunctionCounts {
        self.function().counts()
    }
}

impl DataPath<Request> for IommuFunction {
    fn poll<I: Unit, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, Request>,
    ) -> Progress {
        let now = cx.now();
        if !self.is_awake(now) {
            return Progress::Idle;
        }
        let (mut dma, effects) = cx.split_bypass();
        let progress = self.inner.poll_through(&mut dma, effects, now);
        self.ask(effects);
        if let Some(bell) = &mut self.bell {
            // Before the requests that it has taken are answered, so that a driver which waits for
            // an answer rings again.
            self.inner.arm_through(&mut dma);
            if progress == Progress::Idle {
                // The driver's side: its index is written, then the suppression read.
                fence(Ordering::SeqCst);
                bell.is_rung = self.inner.has_work_through(&mut dma);
            }
        }
        progress
    }

    fn arm<I: Unit, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, Request>) {
        self.inner.arm_through(&mut cx.bypass_view());
    }

    fn has_work<I: Unit, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, Request>,
    ) -> bool {
        self.inner.has_work_through(&mut cx.bypass_view())
    }

    fn disarm<I: Unit, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, Request>) {
        // The driver of a trapped function keeps ringing.
        if self.bell.is_none() {
            self.inner.disarm_through(&mut cx.bypass_view());
        }
    }

    fn in_use<I: Unit, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, Request>,
        pages: &Pages,
    ) -> u32 {
        self.inner.in_use_through(&cx.bypass_view(), pages)
    }
}
