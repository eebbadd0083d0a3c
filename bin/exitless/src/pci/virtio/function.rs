//! One virtio device as a PCI function: what lies behind its BAR, and the state between driver and device.
//!
//! Specification: Virtio 1.2, §4.1 (modern interface only). Everything here runs on the sidecore that owns
//! the device; a vCPU's access arrives as a message and is answered from here. Layout of the one BAR:
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
//! Stopping: Status = 0 and clearing Bus Master are not over before the device is quiet: no request in flight
//! and no lease held. Until then the driver reads a non-zero status; the answer to the configuration write
//! that cleared Bus Master waits ([`VirtioFunction::is_silent`]), unless what is in flight goes through buffers of ours and so
//! reaches no guest memory. The end of the machine is a stop for good ([`VirtioFunction::end`]), and nobody waits for an answer.
//!
//! A device that is served elsewhere interrupts without us ([`VirtioFunction::with_calls`]): here it is only kept true which
//! message each queue's signal stands for, after every write that may have changed it.

use guest_mem::{Dma, KeepAlive, SourceId, Ticket};
use vio::{Activity, AnyDevice, DeviceStats, Interrupt, Quiesce, StopReason, VirtioDevice};

use super::common::{CommonConfig, Effect};
use super::config;
use super::msix::MsixTable;
use crate::irq::calls::CallLines;
use crate::irq::ioapic::Message;
use crate::irq::msi::MsiSink;
use crate::pci::bars::COMMAND_BUS_MASTER;
use crate::pci::config::ConfigSpace;

/// Size of the BAR in bytes.
pub const BAR_SIZE: u64 = 0x8000;
/// Offset of the common configuration.
pub const COMMON: u64 = 0x0000;
/// Offset of the ISR status byte.
pub const ISR: u64 = 0x1000;
/// Offset of the device's own configuration.
pub const DEVICE: u64 = 0x2000;
/// Offset of the doorbells.
pub const NOTIFY: u64 = 0x3000;
/// Bytes between the doorbells of two queues.
pub const NOTIFY_STRIDE: u64 = 4;
/// Offset of the MSI-X table.
pub const MSIX_TABLE: u64 = 0x4000;
/// Offset of the MSI-X pending bits.
pub const MSIX_PENDING: u64 = 0x5000;

/// ISR bits (§4.1.4.5), kept for drivers that look although MSI-X is on.
const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// A virtio device with its transport state.
pub struct VirtioFunction {
    source: SourceId,
    config: ConfigSpace,
    /// Where the configuration access capability lies.
    access: u16,
    device: AnyDevice,
    common: CommonConfig,
    msix: MsixTable,
    isr: u8,
    bus_master: bool,
    /// `activate` has succeeded and no reset has followed.
    active: bool,
    /// `quiesce` has answered Done since the last resume.
    quiet: bool,
    /// `quiesce` has been called since the last resume, and what is in flight does not touch guest memory.
    silent: bool,
    /// The machine has ended.
    over: bool,
    calls: Option<Calls>,
}

/// Interrupts of a device that is served elsewhere, and what each queue's is at present.
struct Calls {
    lines: Box<dyn CallLines>,
    messages: Vec<Option<Message>>,
}

/// A device's interrupts, on their way to the MSI-X table.
struct Lines<'a> {
    common: &'a CommonConfig,
    msix: &'a mut MsixTable,
    isr: &'a mut u8,
    sink: &'a dyn MsiSink,
}

impl Interrupt for Lines<'_> {
    fn queue(&mut self, queue: u16) {
        *self.isr |= ISR_QUEUE;
        self.msix.raise(self.common.queue_vector(queue), self.sink);
    }

    fn config(&mut self) {
        *self.isr |= ISR_CONFIG;
        self.msix.raise(self.common.config_vector(), self.sink);
    }
}

impl VirtioFunction {
    /// The device at `source`, reset. One vector for each queue and one for configuration changes.
    pub fn new(source: SourceId, device: AnyDevice) -> Self {
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
            bus_master: false,
            active: false,
            quiet: false,
            silent: false,
            over: false,
            calls: None,
        }
    }

    /// The queues' interrupts come by `lines`, one for each, and not from the device.
    #[must_use]
    pub fn with_calls(mut self, lines: Box<dyn CallLines>) -> Self {
        let messages = vec![None; usize::from(self.queues())];
        self.calls = Some(Calls { lines, messages });
        self
    }

    /// Brings the lines up to date with vectors, masks and enables.
    fn connect_calls(&mut self) {
        let Some(calls) = &mut self.calls else {
            return;
        };
        for (queue, now) in (0..).zip(&mut calls.messages) {
            let wanted = self.msix.message(self.common.queue_vector(queue));
            if *now != wanted {
                *now = wanted;
                calls.lines.connect(queue, wanted);
            }
        }
    }

    /// Adds the pending bits of lines to what the table says of `data`.
    fn add_pending_calls(&self, offset: u64, data: &mut [u8]) {
        let Some(calls) = &self.calls else {
            return;
        };
        for queue in 0..self.queues() {
            let vector = u64::from(self.common.queue_vector(queue));
            let byte = usize::try_from((vector / 8).wrapping_sub(offset)).unwrap_or(usize::MAX);
            if let Some(byte) = data.get_mut(byte)
                && vector < u64::from(self.msix.vectors())
                && calls.lines.is_pending(queue)
            {
                *byte |= 1 << (vector % 8);
            }
        }
    }

    /// The requester its DMA carries.
    pub fn source(&self) -> SourceId {
        self.source
    }

    /// Number of queues.
    pub fn queues(&self) -> u16 {
        self.msix.vectors() - 1
    }

    /// Where the doorbells are decoded: the address of queue 0's, while memory decoding is on.
    pub fn doorbells(&self) -> Option<u64> {
        self.config.bars().decoded(0).map(|base| base + NOTIFY)
    }

    /// The device's counters.
    pub fn stats(&self) -> DeviceStats {
        self.device.stats()
    }

    /// Messages delivered.
    pub fn interrupts(&self) -> u64 {
        self.msix.sent()
    }

    /// A vCPU reads configuration space.
    pub fn config_read(&mut self, reg: u16, len: u8) -> u32 {
        if reg == self.access + config::ACCESS_DATA
            && let Some((offset, bytes)) = config::access_target(&self.config, self.access)
        {
            let mut data = [0; 4];
            self.bar_read(offset, &mut data[..bytes]);
            return u32::from_le_bytes(data);
        }
        self.config.read(reg, len)
    }

    /// A vCPU writes configuration space. When Bus Master is cleared, wait for
    /// [`is_silent`](Self::is_silent) before answering; when decoding changes, look at
    /// [`doorbells`](Self::doorbells) again.
    pub fn config_write(
        &mut self,
        reg: u16,
        len: u8,
        value: u32,
        keep: &KeepAlive,
        sink: &dyn MsiSink,
    ) {
        if reg == self.access + config::ACCESS_DATA {
            if let Some((offset, bytes)) = config::access_target(&self.config, self.access) {
                self.bar_write(offset, &value.to_le_bytes()[..bytes], keep, sink);
            }
            return;
        }
        let changes = self.config.write(reg, len, value);
        if changes.msix_control {
            let (enabled, masked) = self.config.msix_control();
            self.msix.set_control(enabled, masked, sink);
        }
        self.set_bus_master(self.config.bars().command() & COMMAND_BUS_MASTER != 0, sink);
        self.connect_calls();
    }

    /// A vCPU reads the BAR.
    pub fn bar_read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset & !0xfff {
            COMMON => self.common.read(offset - COMMON, data),
            ISR if offset == ISR => {
                if let Some(byte) = data.first_mut() {
                    *byte = std::mem::take(&mut self.isr);
                }
            }
            DEVICE => self.device.read_config(offset - DEVICE, data),
            MSIX_TABLE => self.msix.read(offset - MSIX_TABLE, data),
            MSIX_PENDING => {
                self.msix.read_pending(offset - MSIX_PENDING, data);
                self.add_pending_calls(offset - MSIX_PENDING, data);
            }
            _ => {}
        }
    }

    /// A vCPU writes the BAR. `keep` keeps guest memory mapped for a device that starts.
    pub fn bar_write(&mut self, offset: u64, data: &[u8], keep: &KeepAlive, sink: &dyn MsiSink) {
        match offset & !0xfff {
            COMMON => match self.common.write(offset - COMMON, data) {
                Effect::None => {}
                Effect::Reset => self.quiet = !self.active,
                Effect::Start => self.start(keep, sink),
            },
            DEVICE => self.device.write_config(offset - DEVICE, data),
            NOTIFY => {
                if let Ok(queue) = u16::try_from((offset - NOTIFY) / NOTIFY_STRIDE) {
                    self.kick(queue);
                }
            }
            MSIX_TABLE => self.msix.write(offset - MSIX_TABLE, data, sink),
            _ => {}
        }
        if matches!(offset & !0xfff, COMMON | MSIX_TABLE) {
            self.connect_calls();
        }
    }

    fn set_bus_master(&mut self, on: bool, sink: &dyn MsiSink) {
        if on == self.bus_master {
            return;
        }
        self.bus_master = on;
        self.msix.set_bus_master(on, sink);
        self.quiet = !self.active;
        self.silent = false;
        if on && self.active && !self.common.is_resetting() {
            self.device.resume();
        }
    }

    /// Whether a stop asked for (reset, Bus Master off, the end) is over; true when none was asked for.
    pub fn is_drained(&self) -> bool {
        let waits_for_all = self.common.is_resetting() || self.over;
        !self.is_stopping() || !self.active || self.quiet || (self.silent && !waits_for_all)
    }

    /// Whether the function does no DMA until it is started again; true also when no stop was asked for.
    pub fn is_silent(&self) -> bool {
        self.is_drained() || self.silent
    }

    fn is_stopping(&self) -> bool {
        self.common.is_resetting() || !self.bus_master || self.over
    }

    /// The machine has ended: the function stops for good.
    pub fn end(&mut self) {
        self.over = true;
        self.quiet = !self.active;
    }

    /// Whether [`end`](Self::end) was called and nothing is in flight any more.
    pub fn has_ended(&self) -> bool {
        self.over && self.is_drained()
    }

    /// A doorbell rang, or one may have been missed (after a start).
    pub fn kick(&mut self, queue: u16) {
        if self.is_live() && queue < self.queues() {
            self.device.kick(queue);
        }
    }

    /// Passes a completed ticket on.
    #[expect(
        dead_code,
        reason = "guest RAM in memory never pends; a swapper's tickets arrive here"
    )]
    pub fn ticket_done(&mut self, ticket: Ticket) {
        self.device.ticket_done(ticket);
    }

    /// A stop has lasted for the drain limit.
    pub fn stop_overdue(&mut self) {
        self.device.stop_overdue(if self.over {
            StopReason::End
        } else if self.common.is_resetting() {
            StopReason::Reset
        } else {
            StopReason::Pause
        });
    }

    /// The drain limit has passed with leases of this function still held.
    pub fn cancel_overdue(&mut self) {
        self.device.cancel_overdue();
    }

    /// A bounded batch of the device's work, or of stopping it.
    pub fn poll(&mut self, dma: &mut impl Dma, sink: &dyn MsiSink, now_ns: u64) -> Activity {
        if !self.active {
            self.finish_reset();
            return Activity::Idle;
        }
        let mut activity = Activity::Idle;
        if !self.is_drained() {
            // Before the device is polled: a function that may not do DMA takes nothing from its rings. Leases may
            // end here, which the IOMMU wants to see, so this is activity.
            activity = Activity::Busy;
            self.quiet = self.device.quiesce(dma) == Quiesce::Done;
            self.silent = !self.device.touches_memory();
        }
        let Self {
            common,
            msix,
            isr,
            device,
            ..
        } = self;
        let mut lines = Lines {
            common,
            msix,
            isr,
            sink,
        };
        if device.poll(dma, &mut lines, now_ns) == Activity::Busy {
            activity = Activity::Busy;
        }
        if self.device.needs_reset() {
            // The device has sent the configuration interrupt; who looks because of it is answered after this poll.
            self.common.set_needs_reset();
        }
        self.finish_reset();
        activity
    }

    /// Asks the driver for doorbells.
    pub fn arm(&mut self, dma: &mut impl Dma) {
        if self.is_live() {
            self.device.arm(dma);
        }
    }

    /// Whether a poll would find anything. A stop under way counts.
    pub fn has_work(&mut self, dma: &mut impl Dma) -> bool {
        self.active && (!self.is_drained() || self.device.has_work(dma))
    }

    /// Takes [`arm`](Self::arm) back.
    pub fn disarm(&mut self, dma: &mut impl Dma) {
        if self.is_live() {
            self.device.disarm(dma);
        }
    }

    /// What the device's back end wakes by. None while it may not run: nobody would read what has arrived.
    pub fn wake_fds(&self) -> Vec<std::os::fd::RawFd> {
        if self.is_live() {
            self.device.wake_fds()
        } else {
            Vec::new()
        }
    }

    fn is_live(&self) -> bool {
        self.active && !self.is_stopping() && self.common.is_running()
    }

    fn start(&mut self, keep: &KeepAlive, sink: &dyn MsiSink) {
        let queues = self.common.queue_configs();
        match self
            .device
            .activate(self.common.driver_features(), &queues, keep.clone())
        {
            Ok(()) => {
                self.active = true;
                self.quiet = false;
                self.silent = false;
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
                    Lines {
                        common,
                        msix,
                        isr,
                        sink,
                    }
                    .config();
                }
            }
        }
    }

    fn finish_reset(&mut self) {
        if !self.common.is_resetting() || (self.active && !self.quiet) {
            return;
        }
        if self.active {
            self.device.reset();
        }
        self.active = false;
        self.isr = 0;
        self.common.reset();
        // The MSI-X table is PCI state: a virtio reset leaves it (§4.1.4.3.1 resets the vector registers only).
        self.connect_calls();
        if let Some(calls) = &mut self.calls {
            (0..)
                .zip(&calls.messages)
                .for_each(|(queue, _)| calls.lines.forget(queue));
        }
    }
}
