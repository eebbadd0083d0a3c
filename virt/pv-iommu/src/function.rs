//! The device as a PCI function: a virtio function whose rings are reached past the unit, and whose requests are its commands.
//!
//! The owner carries a poll's commands out behind the poll; the answers come at once for what need not wait, and are shown
//! by the next poll.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::fd::RawFd;

use guest_mem::{Iommu as Unit, KeepAlive, Pages, PhysMem, SourceId, Ticket};
use machine::{
    CommandId, CommandResult, Cx, DataPath, Effects, Function, FunctionCounts, FunctionShape, Hold,
    HoldId, Invalidation, Progress, RefusedAccess, TicketResult,
};
use platform::interrupt::Message;
use vio::Device;
use virtio_pci::VirtioFunction;

use crate::class::{Iommu, IommuClass, Tag};
use crate::wire::Request;

/// See the module's head. To be the first function of its owner: what others translate by depends on its requests.
pub struct IommuFunction {
    inner: VirtioFunction<Iommu>,
    asked: BTreeMap<CommandId, Tag>,
}

impl IommuFunction {
    /// At `source`, of a unit with these endpoints, of which it is none.
    pub fn new(source: SourceId, endpoints: Vec<RangeInclusive<u16>>) -> Self {
        let device = Device::of(IommuClass::new(endpoints));
        Self {
            inner: VirtioFunction::new(source, device),
            asked: BTreeMap::new(),
        }
    }

    /// Number of queues.
    pub fn queues(&self) -> u16 {
        self.inner.queues()
    }

    /// The class, for what no driver asks of it.
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

    /// Gives the unit what the driver has asked for.
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
            hears_refusals: true,
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
    }

    fn ring(&mut self, queue: u16) {
        self.function_mut().ring(queue);
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
    }

    fn cancel_overdue(&mut self) {
        self.function_mut().cancel_overdue();
    }

    fn end(&mut self) {
        self.function_mut().end();
    }

    fn has_ended(&self) -> bool {
        self.function().has_ended()
    }

    fn ticket_done(&mut self, ticket: Ticket, result: TicketResult) {
        self.function_mut().ticket_done(ticket, result);
    }

    fn command_done(&mut self, id: CommandId, result: CommandResult, _out: &mut Effects<Request>) {
        let status = match result {
            CommandResult::Done => 0,
            CommandResult::Refused(status) => status,
        };
        if let Some(tag) = self.asked.remove(&id) {
            self.class_mut().answer(tag, status);
        }
    }

    fn access_refused(&mut self, access: &RefusedAccess) {
        self.class_mut().refused(access);
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
    fn poll<I: Unit, M: PhysMem>(&mut self, cx: &mut Cx<'_, I, M, Request>) -> Progress {
        let now = cx.now();
        let (mut dma, effects) = cx.split_bypass();
        let progress = self.inner.poll_through(&mut dma, effects, now);
        self.ask(effects);
        progress
    }

    fn arm<I: Unit, M: PhysMem>(&mut self, cx: &mut Cx<'_, I, M, Request>) {
        self.inner.arm_through(&mut cx.bypass_view());
    }

    fn has_work<I: Unit, M: PhysMem>(&mut self, cx: &mut Cx<'_, I, M, Request>) -> bool {
        self.inner.has_work_through(&mut cx.bypass_view())
    }

    fn disarm<I: Unit, M: PhysMem>(&mut self, cx: &mut Cx<'_, I, M, Request>) {
        self.inner.disarm_through(&mut cx.bypass_view());
    }

    fn in_use<I: Unit, M: PhysMem>(
        &mut self,
        cx: &mut Cx<'_, I, M, Request>,
        pages: &Pages,
    ) -> u32 {
        self.inner.in_use_through(&cx.bypass_view(), pages)
    }
}
