//! One virtio device as a PCI function: what lies behind its BAR, and the state between driver and
//! device.
//!
//! Specification: Virtio 1.2, §4.1 (modern interface only). Everything here runs on the sidecore
//! that owns the device; a vCPU's access arrives as a message and is answered from here. Layout of
//! the one BAR:
//!
//! | offset | what |
//! |---|---|
//! | 0x0000 | common configuration (§4.1.4.3) |
//! | 0x1000 | ISR status (§4.1.4.5) |
//! | 0x2000 | device configuration (§4.1.4.6) |
//! | 0x3000 | doorbells, four bytes a queue (§4.1.4.4); normally caught by eventfds in the kernel |
//! | 0x4000 | MSI-X table |
//! | 0x5000 | MSI-X pending bits |
//!
//! Stopping (`lifecycle.rs`): a reset and the end of the machine are not over before no request is
//! in flight and no lease is held. Until then the driver reads a non-zero status. The answer to the
//! configuration write that cleared Bus Master waits ([`Function::is_silent`]), unless what is in
//! flight goes through buffers of ours and so reaches no guest memory. The end is a stop for good
//! ([`Function::end`]), for which no driver waits.
//!
//! A device that keeps translations beyond a call is notified of those that are revoked. It may
//! hold the guest's wait for the invalidation until it has dropped them too
//! ([`QueueDevice::invalidated`]). Holds end with the device's reset.
//!
//! A device that is served elsewhere interrupts without a call into this module
//! ([`VirtioFunction::with_lines`]): the function only updates the message behind each queue's
//! signal, after every write that may have changed it.

use std::os::fd::RawFd;

use guest_mem::{Dma, Iommu, Iova, KeepAlive, Pages, PhysMem, SourceId, Ticket};
use machine::{
    DataPath, Effects, Function, FunctionContext, FunctionCounts, FunctionShape, Hold, HoldId,
    Invalidation, Progress, Scope, TicketResult,
};
use pci::bars::COMMAND_BUS_MASTER;
use pci::config::ConfigSpace;
use pci::msix::MsixTable;
use platform::interrupt::{InterruptLines, Message};
use vio::{Activity, CancelReason, Interrupt, QueueDevice, Revoked, Service};

use crate::common::{CommonConfig, Effect};
use crate::config;
pub use crate::config::{
    BAR_SIZE, COMMON, DEVICE, ISR, MSIX_PENDING, MSIX_TABLE, NOTIFY, NOTIFY_STRIDE,
};
use crate::lifecycle::{Lifecycle, StopReason};

/// ISR bits (§4.1.4.5), kept for drivers that look although MSI-X is on.
const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// A virtio device with its transport state.
pub struct VirtioFunction<D> {
    source: SourceId,
    config: ConfigSpace,
    /// Offset of the configuration access capability.
    access: u16,
    device: D,
    common: CommonConfig,
    msix: MsixTable,
    isr: u8,
    lifecycle: Lifecycle,
    lines: Option<Lines>,
}

/// Interrupt lines of a device that is served elsewhere, with the message last set for each queue's
/// line.
struct Lines {
    lines: Box<dyn InterruptLines>,
    messages: Vec<Option<Message>>,
}

/// A device's interrupts, on their way to the MSI-X table.
struct Vectors<'a> {
    common: &'a CommonConfig,
    msix: &'a mut MsixTable,
    isr: &'a mut u8,
    out: &'a mut Vec<Message>,
}

impl Interrupt for Vectors<'_> {
    fn queue(&mut self, queue: u16) {
        *self.isr |= ISR_QUEUE;
        self.msix.raise(self.common.queue_vector(queue), self.out);
    }

    fn config(&mut self) {
        *self.isr |= ISR_CONFIG;
        self.msix.raise(self.common.config_vector(), self.out);
    }
}

impl<D: QueueDevice> VirtioFunction<D> {
    /// The device at `source`, reset. One vector for each queue and one for configuration changes.
    pub fn new(source: SourceId, device: D) -> Self {
        let sizes = device.queue_sizes().to_vec();
        let vectors = u16::try_from(sizes.len() + 1).expect("a device has few queues");
        let common = CommonConfig::new(device.features(), &sizes, vectors);
        let (config, access) = config::space(device.device_type(), vectors);
        Self {
            source,
            config,
            access,
            device,
            common,
            msix: MsixTable::new(vectors),
            isr: 0,
            lifecycle: Lifecycle::new(),
            lines: None,
        }
    }

    /// The queues' interrupts come by `lines`, one for each, and not from the device.
    #[must_use]
    pub fn with_lines(mut self, lines: Box<dyn InterruptLines>) -> Self {
        let messages = vec![None; usize::from(self.queues())];
        self.lines = Some(Lines { lines, messages });
        self
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, for what its owner asks of it and no driver does: between two polls, with
    /// another to follow.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Number of queues.
    pub fn queues(&self) -> u16 {
        self.msix.vectors() - 1
    }

    /// Brings the lines up to date with vectors, masks and enables.
    fn route_lines<C>(&mut self, out: &mut Effects<C>) {
        let Some(lines) = &mut self.lines else {
            return;
        };
        for (queue, now) in (0..).zip(&mut lines.messages) {
            let wanted = self.msix.message(self.common.queue_vector(queue));
            if *now != wanted {
                *now = wanted;
                out.route(queue, wanted);
            }
        }
    }

    /// Adds the pending bits of lines to those of the table in `data`.
    fn add_pending_lines(&self, offset: u64, data: &mut [u8]) {
        let Some(lines) = &self.lines else {
            return;
        };
        for queue in 0..self.queues() {
            let vector = u64::from(self.common.queue_vector(queue));
            let byte = usize::try_from((vector / 8).wrapping_sub(offset)).unwrap_or(usize::MAX);
            if let Some(byte) = data.get_mut(byte)
                && vector < u64::from(self.msix.vectors())
                && lines.lines.is_pending(queue)
            {
                *byte |= 1 << (vector % 8);
            }
        }
    }

    fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset & !0xfff {
            COMMON => {
                self.common.set_generation(self.device.config_generation());
                self.common.read(offset - COMMON, data);
            }
            ISR if offset == ISR => {
                if let Some(byte) = data.first_mut() {
                    *byte = std::mem::take(&mut self.isr);
                }
            }
            DEVICE => self.device.read_config(offset - DEVICE, data),
            MSIX_TABLE => self.msix.read(offset - MSIX_TABLE, data),
            MSIX_PENDING => {
                self.msix.read_pending(offset - MSIX_PENDING, data);
                self.add_pending_lines(offset - MSIX_PENDING, data);
            }
            _ => {}
        }
    }

    fn write_bar<C>(&mut self, offset: u64, data: &[u8], keep: &KeepAlive, out: &mut Effects<C>) {
        match offset & !0xfff {
            COMMON => match self.common.write(offset - COMMON, data) {
                Effect::None => {}
                Effect::Reset => self.lifecycle.stop(StopReason::Reset),
                Effect::Start => self.start(keep, out),
            },
            DEVICE => self.device.write_config(offset - DEVICE, data),
            NOTIFY => {
                if let Ok(queue) = u16::try_from((offset - NOTIFY) / NOTIFY_STRIDE) {
                    self.kick(queue);
                }
            }
            MSIX_TABLE => self
                .msix
                .write(offset - MSIX_TABLE, data, &mut out.messages),
            _ => {}
        }
        if matches!(offset & !0xfff, COMMON | MSIX_TABLE) {
            self.route_lines(out);
        }
    }

    /// Bus Master of the command register.
    fn is_master(&self) -> bool {
        self.config.bars().command() & COMMAND_BUS_MASTER != 0
    }

    /// Whether a stop is over; true also when none was asked for.
    fn is_stopped(&self) -> bool {
        self.lifecycle.draining().is_none()
    }

    fn kick(&mut self, queue: u16) {
        if self.lifecycle.is_live() && queue < self.queues() {
            self.device.kick(queue);
        }
    }

    fn start<C>(&mut self, keep: &KeepAlive, out: &mut Effects<C>) {
        if !self.lifecycle.may_activate() {
            // After the end: the driver's status stands, and its doorbells do nothing.
            return;
        }
        let queues = self.common.queue_configs();
        match self
            .device
            .activate(self.common.driver_features(), &queues, keep.clone())
        {
            Ok(()) => {
                self.lifecycle.activate(self.is_master());
                // What was made available before DRIVER_OK rang no doorbell that counts.
                for queue in &queues {
                    self.kick(queue.index);
                }
            }
            Err(error) => {
                tracing::warn!(source = %self.source, %error, "device refused to start");
                if self.common.set_needs_reset() {
                    let Self {
                        common, msix, isr, ..
                    } = self;
                    Vectors {
                        common,
                        msix,
                        isr,
                        out: &mut out.messages,
                    }
                    .config();
                }
            }
        }
    }

    /// Releases invalidations that the device holds no longer.
    fn release_holds<C>(&mut self, out: &mut Effects<C>) {
        while let Some(hold) = self.device.take_released() {
            out.release(HoldId(hold));
        }
    }

    fn finish_reset<C>(&mut self, out: &mut Effects<C>) {
        if !self.common.is_resetting() || !self.is_stopped() {
            return;
        }
        if self.lifecycle.is_active() {
            self.device.reset();
        }
        self.lifecycle.reset();
        self.isr = 0;
        self.common.reset();
        // The MSI-X table is PCI state: a virtio reset leaves it (§4.1.4.3.1 resets the vector
        // registers only).
        self.route_lines(out);
        if let Some(lines) = &mut self.lines {
            (0..)
                .zip(&lines.messages)
                .for_each(|(queue, _)| lines.lines.forget(queue));
        }
    }
}

impl<D: QueueDevice + Send, C> Function<C> for VirtioFunction<D> {
    fn source(&self) -> SourceId {
        self.source
    }

    fn shape(&self) -> FunctionShape {
        FunctionShape {
            bars: config::bar_kinds(),
            doorbells: Some((0, NOTIFY..MSIX_TABLE)),
            hears_invalidations: self.device.hears_invalidations(),
            is_iommu: false,
        }
    }

    fn config_read(&mut self, reg: u16, len: u8) -> u32 {
        if reg == self.access + config::ACCESS_DATA
            && let Some((offset, bytes)) = config::access_target(&self.config, self.access)
        {
            let mut data = [0; 4];
            self.read_bar(offset, &mut data[..bytes]);
            return u32::from_le_bytes(data);
        }
        self.config.read(reg, len)
    }

    fn config_write(
        &mut self,
        reg: u16,
        len: u8,
        value: u32,
        keep: &KeepAlive,
        out: &mut Effects<C>,
    ) {
        if reg == self.access + config::ACCESS_DATA {
            if let Some((offset, bytes)) = config::access_target(&self.config, self.access) {
                self.write_bar(offset, &value.to_le_bytes()[..bytes], keep, out);
            }
            return;
        }
        let was_master = self.is_master();
        if self.config.write(reg, len, value) {
            let (enabled, masked) = self.config.msix_control();
            self.msix.set_control(enabled, masked, &mut out.messages);
        }
        let is_master = self.is_master();
        if is_master != was_master {
            self.msix.set_bus_master(is_master, &mut out.messages);
            if self.lifecycle.set_bus_master(is_master) {
                self.device.set_service(Service::Full);
            }
        }
        self.route_lines(out);
    }

    fn bar_read(&mut self, _bar: u8, offset: u64, data: &mut [u8]) {
        self.read_bar(offset, data);
    }

    fn bar_write(
        &mut self,
        _bar: u8,
        offset: u64,
        data: &[u8],
        keep: &KeepAlive,
        out: &mut Effects<C>,
    ) {
        self.write_bar(offset, data, keep, out);
    }

    fn ring(&mut self, queue: u16) {
        self.kick(queue);
    }

    /// Adds none while the device may not run: no call would read them. The exception is a device
    /// that keeps translations, which may have to report that it has dropped some.
    fn wake_fds(&self, add: &mut dyn FnMut(RawFd)) {
        let may_hold = self.lifecycle.is_active() && self.device.hears_invalidations();
        if self.lifecycle.is_live() || may_hold {
            self.device.wake_fds().into_iter().for_each(add);
        }
    }

    fn deadline(&self) -> Option<u64> {
        // A stop waits for what is in flight, and that may have to be tried again.
        let is_served = self.lifecycle.is_live() || self.device.in_flight() != 0;
        is_served.then(|| self.device.opens_at_ns()).flatten()
    }

    fn is_drained(&self) -> bool {
        self.is_stopped()
    }

    fn is_silent(&self) -> bool {
        self.lifecycle.is_silent()
    }

    fn stop_overdue(&mut self) {
        let reason = match self.lifecycle.draining() {
            Some(StopReason::End) => CancelReason::End,
            Some(StopReason::Reset) => CancelReason::Reset,
            // A request that a pause cancelled would fail in the guest.
            Some(StopReason::Pause) | None => return,
        };
        self.device.cancel(reason);
    }

    fn cancel_overdue(&mut self) {
        self.device.cancel(CancelReason::Unmap);
    }

    fn end(&mut self) {
        self.lifecycle.stop(StopReason::End);
    }

    fn has_ended(&self) -> bool {
        self.lifecycle.has_ended()
    }

    fn ticket_done(&mut self, ticket: Ticket, _result: TicketResult) {
        self.device.ticket_done(ticket);
    }

    fn invalidated(&mut self, what: &Invalidation, hold: HoldId) -> Hold {
        let revoked = match what.scope {
            Scope::Interrupts => return Hold::No,
            Scope::Source(source, ignored) if (source.0 ^ self.source.0) & !ignored != 0 => {
                return Hold::No;
            }
            Scope::All | Scope::Source(..) => Revoked::Everything,
            Scope::Domain(domain) => Revoked::Domain(domain),
            Scope::Range { domain, iova, len } => {
                let last = iova.raw().saturating_add(len.saturating_sub(1));
                Revoked::Pages {
                    domain,
                    first: iova,
                    last: Iova::new(last),
                }
            }
        };
        match self.device.invalidated(revoked, hold.0) {
            true => Hold::Yes,
            false => Hold::No,
        }
    }

    fn hold_overdue(&mut self, hold: HoldId, out: &mut Effects<C>) {
        self.device.hold_overdue(hold.0);
        self.release_holds(out);
    }

    fn connect(&mut self, connected: &[(u16, Option<Message>)]) {
        if let Some(lines) = &mut self.lines {
            lines.lines.connect(connected);
        }
    }

    fn counts(&self) -> FunctionCounts {
        let stats = self.device.stats();
        FunctionCounts {
            requests: stats.requests,
            interrupts: self.msix.sent(),
            pends: stats.pends,
        }
    }
}

/// The data path through a view of memory: the unit's, or past it for a device that the unit itself
/// is asked by.
impl<D: QueueDevice> VirtioFunction<D> {
    /// As [`DataPath::poll`], at `now` (ns).
    pub fn poll_through<C>(
        &mut self,
        dma: &mut impl Dma,
        effects: &mut Effects<C>,
        now: u64,
    ) -> Progress {
        if !self.lifecycle.is_active() {
            self.finish_reset(effects);
            return Progress::Idle;
        }
        let is_stopping = !self.is_stopped();
        if is_stopping {
            // Before the device is polled: a function that may not do DMA takes nothing from its
            // rings. Leases may end here, which the IOMMU wants to see, so this is activity.
            self.device.set_service(Service::Stopped);
        }
        let Self {
            common,
            msix,
            isr,
            device,
            ..
        } = self;
        let mut vectors = Vectors {
            common,
            msix,
            isr,
            out: &mut effects.messages,
        };
        let activity = device.poll(dma, &mut vectors, now);
        if is_stopping {
            let touches_memory = self.device.touches_memory();
            self.lifecycle
                .drain(self.device.in_flight(), touches_memory);
        }
        if self.device.needs_reset() {
            // The device has sent the configuration interrupt; a register read that follows from it
            // is answered after this poll.
            self.common.set_needs_reset();
        }
        self.finish_reset(effects);
        self.release_holds(effects);
        match activity {
            _ if !self.is_stopped() => Progress::Stopping,
            Activity::Idle if !is_stopping => Progress::Idle,
            _ => Progress::Busy,
        }
    }

    /// As [`DataPath::arm`].
    pub fn arm_through(&mut self, dma: &mut impl Dma) {
        if self.lifecycle.is_live() {
            self.device.arm(dma);
        }
    }

    /// As [`DataPath::has_work`].
    pub fn has_work_through(&mut self, dma: &mut impl Dma) -> bool {
        self.lifecycle.is_active() && (!self.is_stopped() || self.device.has_work(dma))
    }

    /// As [`DataPath::disarm`].
    pub fn disarm_through(&mut self, dma: &mut impl Dma) {
        if self.lifecycle.is_live() {
            self.device.disarm(dma);
        }
    }

    /// As [`DataPath::in_use`]. Nothing before the device is activated and after its reset. While
    /// it may do no DMA its windows are kept, and count.
    pub fn in_use_through(&mut self, dma: &impl Dma, pages: &Pages) -> u32 {
        if self.lifecycle.is_active() {
            self.device.in_use(dma, pages)
        } else {
            0
        }
    }
}

impl<D: QueueDevice + Send, C> DataPath<C> for VirtioFunction<D> {
    fn poll<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) -> Progress {
        let now = cx.now();
        let (mut dma, effects) = cx.split();
        self.poll_through(&mut dma, effects, now)
    }

    fn arm<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) {
        self.arm_through(&mut cx.view());
    }

    fn has_work<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) -> bool {
        self.has_work_through(&mut cx.view())
    }

    fn disarm<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, C>) {
        self.disarm_through(&mut cx.view());
    }

    fn in_use<I: Iommu, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, C>,
        pages: &Pages,
    ) -> u32 {
        self.in_use_through(&cx.view(), pages)
    }
}

#[cfg(test)]
mod tests;
