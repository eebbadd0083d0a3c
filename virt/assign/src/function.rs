//! An assigned device as a function of the machine's owner (the thread that owns all functions).
//!
//! ```text
//! guest's access ─ BAR ─▶ a memory slot (no exit)         areas: all pages but those of the MSI-X table
//!                    └──▶ trap ─▶ MSI-X table of ours, or the device's registers through VFIO
//!        ─ configuration space ─▶ GuestConfig ─▶ its effects: command, MSI, MSI-X, reset
//! device's interrupt ─▶ eventfd ─▶ KVM ─▶ guest           lines: a message for each, or none: kept
//! guest's IOMMU ─ invalidation ─▶ Shadow ─▶ container
//! ```
//! **Order of a command write.** Memory slots are removed before this function receives the write
//! that turns decoding off, and added after it has turned decoding on in the device
//! (`PlaceMemory`): a vCPU that accessed a slot while decoding is off would end the machine. Bus
//! mastering is turned off in the device before the guest's write is answered.
//!
//! **Errors visible to the guest.** DMA faults are not reported to it. After an error of the
//! device, or when the host wants the device back, the guest finds it gone: all reads return ones,
//! as from an empty slot.

use std::os::fd::RawFd;

use guest_mem::{Iommu, KeepAlive, Pages, PhysMem, SourceId, Ticket};
use machine::{
    DataPath, Effects, Function, FunctionContext, FunctionShape, Hold, HoldId, Invalidation,
    Progress, TicketResult,
};
use pci::msi::{Msi, MsiRegisters};
use pci::msix::MsixTable;
use platform::interrupt::{InterruptLines, Message};

use crate::areas::{Areas, Target};
use crate::calls::Caller;
use crate::config::{self, Dynamic, GuestConfig};
use crate::hardware::{Hardware, HostEvent, Vectors};
use crate::reach::Reach;
use crate::shadow::Shadow;
use crate::unreached::Unreached;

/// Number of polls between two checks for an event of the host that concerns the device. Each check
/// is a system call.
const NOTICE_PERIOD: u32 = 4096;

/// Parts of which a function is made.
pub struct Parts<H, C> {
    /// Requester id of the function, as the guest sees it.
    pub source: SourceId,
    /// The device.
    pub hardware: H,
    /// Configuration space, as the guest sees it.
    pub config: GuestConfig,
    /// Areas of its BARs: those that trap, and those that are mapped.
    pub areas: Areas,
    /// Interrupt lines, one for each vector.
    pub lines: Box<dyn InterruptLines>,
    /// Its mappings.
    pub shadow: Shadow<C>,
    /// Pages in use by all assigned devices of the machine.
    pub reach: Reach,
}

/// An assigned device. See the module documentation.
pub struct Assigned<H, C> {
    source: SourceId,
    hardware: H,
    config: GuestConfig,
    areas: Areas,
    lines: Box<dyn InterruptLines>,
    msi: Option<Msi>,
    msix: MsixTable,
    /// Messages of the lines, as this function last set them.
    routed: Vec<Option<Message>>,
    /// Vectors that are enabled in the device.
    vectors: Vectors,
    is_master: bool,
    shadow: Shadow<C>,
    reach: Reach,
    /// The device is cut off: the guest finds an empty slot.
    is_gone: bool,
    unreached: Unreached,
    polls: u32,
}

impl<H: Hardware, C: Caller> Assigned<H, C> {
    /// Creates the function. The host must have left the device with bus mastering off and without
    /// interrupts.
    pub fn new(parts: Parts<H, C>) -> Self {
        let lines = Self::lines_of(&parts.config);
        let vectors = parts.config.msix().map_or(0, |msix| msix.vectors);
        Self {
            source: parts.source,
            hardware: parts.hardware,
            areas: parts.areas,
            lines: parts.lines,
            msi: parts.config.msi().map(Msi::new),
            msix: MsixTable::new(vectors),
            config: parts.config,
            routed: vec![None; usize::from(lines)],
            vectors: Vectors::Off,
            is_master: false,
            shadow: parts.shadow,
            reach: parts.reach,
            is_gone: false,
            unreached: Unreached::default(),
            polls: 0,
        }
    }

    /// Its mappings.
    pub fn shadow(&self) -> &Shadow<C> {
        &self.shadow
    }

    /// Returns its mappings, to set another policy.
    pub fn shadow_mut(&mut self) -> &mut Shadow<C> {
        &mut self.shadow
    }

    /// Returns the number of interrupt lines, one for each vector, of a function with this
    /// configuration space.
    pub fn lines_of(config: &GuestConfig) -> u16 {
        let msix = config.msix().map_or(0, |msix| msix.vectors);
        msix.max(config.msi().map_or(0, |msi| u16::from(msi.vectors())))
    }

    /// Applies the effects of a write to configuration space.
    fn follow<E>(&mut self, changed: config::Effects, out: &mut Effects<E>) {
        // The tables deliver nothing themselves: their messages are set in the lines.
        let mut none = Vec::new();
        if let Some(command) = changed.command {
            self.is_master = command.bus_master;
            self.hardware
                .set_command(command.memory, command.bus_master);
            self.msix.set_bus_master(command.bus_master, &mut none);
            if let Some(msi) = &mut self.msi {
                msi.set_bus_master(command.bus_master, &mut none);
            }
        }
        if let (Some(msi), Some(registers)) = (&mut self.msi, &changed.msi) {
            msi.set_registers(registers, &mut none);
        }
        if let Some(control) = changed.msix {
            self.msix
                .set_control(control.is_enabled, control.is_masked, &mut none);
        }
        if changed.msi.is_some() || changed.msix.is_some() {
            self.set_vectors();
        }
        self.route(out);
    }

    /// Enables in the device the vectors that the guest has enabled. If a guest has enabled both,
    /// which is its error, MSI-X takes precedence over MSI.
    fn set_vectors(&mut self) {
        let registers: Option<MsiRegisters> = self.config.space().msi_registers();
        let vectors = if self.config.space().msix_control().0 {
            Vectors::Msix(self.msix.vectors())
        } else {
            match (&self.msi, registers) {
                (Some(msi), Some(registers)) if registers.is_enabled => {
                    Vectors::Msi(u16::from(msi.allocated()))
                }
                _ => Vectors::Off,
            }
        };
        if vectors == self.vectors {
            return;
        }
        // All vectors are enabled at once: later ones cannot be added (`VFIO_IRQ_INFO_NORESIZE`).
        self.vectors = match self.hardware.set_vectors(vectors) {
            Ok(()) => vectors,
            Err(error) => {
                tracing::error!(device = %self.source, %error, "the device's interrupts cannot be \
                     turned on");
                Vectors::Off
            }
        };
    }

    /// Returns the message of a line; `None` if an interrupt stays pending.
    fn message(&self, line: u16) -> Option<Message> {
        match self.vectors {
            Vectors::Off => None,
            Vectors::Msix(_) => self.msix.message(line),
            Vectors::Msi(_) => self.msi.as_ref()?.message(u8::try_from(line).ok()?),
        }
    }

    /// Sets the messages of the lines that have changed.
    fn route<E>(&mut self, out: &mut Effects<E>) {
        for line in (0..).take(self.routed.len()) {
            let message = self.message(line);
            let routed = &mut self.routed[usize::from(line)];
            if *routed != message {
                *routed = message;
                out.route(line, message);
            }
        }
    }

    /// Reads the pending bits of the MSI-X vectors, from the byte at `offset` of the array on.
    fn read_pending(&self, offset: u64, data: &mut [u8]) {
        let is_on = matches!(self.vectors, Vectors::Msix(_));
        for (at, byte) in (offset..).zip(data) {
            let bits = (0..8).filter(|bit| {
                let vector = at.saturating_mul(8).saturating_add(*bit);
                let vector = u16::try_from(vector).ok();
                let vector = vector.filter(|vector| *vector < self.msix.vectors());
                is_on && vector.is_some_and(|vector| self.lines.is_pending(vector))
            });
            *byte = bits.fold(0, |byte, bit| byte | 1 << bit);
        }
    }

    fn dynamic(&self, what: Dynamic) -> u32 {
        match what {
            Dynamic::DeviceStatus(at) => self.hardware.read_config(at).into(),
            Dynamic::MsiPending => {
                let is_on = matches!(self.vectors, Vectors::Msi(_));
                let vectors = (0..32).filter(|vector| {
                    is_on
                        && usize::from(*vector) < self.routed.len()
                        && self.lines.is_pending(*vector)
                });
                vectors.fold(0, |bits, vector| bits | 1 << vector)
            }
        }
    }

    /// Resets the device, at the guest's request.
    fn reset<E>(&mut self, out: &mut Effects<E>) {
        let changed = self.config.reset();
        self.follow(changed, out);
        self.msix = MsixTable::new(self.msix.vectors());
        self.msi = self.config.msi().map(Msi::new);
        for line in (0..).take(self.routed.len()) {
            self.lines.forget(line);
        }
        self.shadow.reset_device();
    }

    /// Ends the device's DMA. The guest finds an empty slot from then on.
    #[cold]
    fn cut_off(&mut self, why: &str) {
        if self.is_gone {
            return;
        }
        self.is_gone = true;
        tracing::error!(device = %self.source, "the device is cut off from its guest: {why}");
        self.hardware.stop();
        self.shadow.end();
    }

    #[cold]
    fn look_for_notices(&mut self) {
        match self.hardware.notice() {
            Some(HostEvent::Error) => {
                self.cut_off("it has reported an error that was not corrected")
            }
            Some(HostEvent::Request) => self.cut_off("the host asks for it"),
            None => {}
        }
    }

    #[cold]
    fn say_unreached(&self) {
        tracing::warn!(
            device = %self.source,
            "the guest drives the device and has not turned translation on: the device reaches \
             nothing, and its requests time out. \
             The guest needs a driver for its IOMMU (Linux: intel_iommu=on); with --device \
             …,dma-before-te=on the device reaches all \
             of the guest's memory until then"
        );
    }

    /// Returns whether the guest finds an empty slot.
    fn is_absent(&self) -> bool {
        self.is_gone || self.shadow.is_resetting()
    }
}

impl<H: Hardware, C: Caller, E> Function<E> for Assigned<H, C> {
    fn source(&self) -> SourceId {
        self.source
    }

    fn shape(&self) -> FunctionShape {
        FunctionShape {
            hears_invalidations: true,
            is_iommu: false,
            ..FunctionShape::new(self.config.bar_kinds())
        }
    }

    fn config_read(&mut self, reg: u16, len: u8) -> u32 {
        if self.is_absent() {
            return u32::MAX;
        }
        self.config.read(reg, len, |what| self.dynamic(what))
    }

    fn config_write(&mut self, reg: u16, len: u8, value: u32, _: &KeepAlive, out: &mut Effects<E>) {
        if self.is_gone {
            return;
        }
        let changed = self.config.write(reg, len, value);
        self.follow(changed, out);
        if changed.function_reset {
            self.reset(out);
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if self.is_absent() {
            return;
        }
        let pieces: Vec<_> = self.areas.pieces(bar, offset, data.len() as u64).collect();
        for piece in pieces {
            // The range is inside `data`, which has at most 8 bytes.
            let part = &mut data[piece.bytes.start as usize..piece.bytes.end as usize];
            match piece.target {
                Target::MsixTable(at) => self.msix.read(at, part),
                Target::MsixPending(at) => self.read_pending(at, part),
                Target::Registers(at) => self.hardware.read_bar(bar, at, part),
                Target::Beyond => {}
            }
        }
    }

    fn bar_write(
        &mut self,
        bar: u8,
        offset: u64,
        data: &[u8],
        _: &KeepAlive,
        out: &mut Effects<E>,
    ) {
        if self.is_absent() {
            return;
        }
        let pieces: Vec<_> = self.areas.pieces(bar, offset, data.len() as u64).collect();
        for piece in pieces {
            let part = &data[piece.bytes.start as usize..piece.bytes.end as usize];
            match piece.target {
                Target::MsixTable(at) => {
                    self.msix.write(at, part, &mut Vec::new());
                    self.route(out);
                }
                Target::Registers(at) => self.hardware.write_bar(bar, at, part),
                Target::MsixPending(_) | Target::Beyond => {}
            }
        }
    }

    fn wake_fds(&self, add: &mut dyn FnMut(RawFd)) {
        self.shadow.wake_fd().into_iter().for_each(&mut *add);
        self.hardware.wake_fds(add);
    }

    fn deadline(&self) -> Option<u64> {
        let deadlines = [self.shadow.deadline(), self.unreached.deadline()];
        deadlines.into_iter().flatten().min()
    }

    fn end(&mut self) {
        self.hardware.stop();
        self.is_gone = true;
        self.shadow.end();
    }

    fn has_ended(&self) -> bool {
        self.shadow.has_ended()
    }

    fn ticket_done(&mut self, ticket: Ticket, _: TicketResult) {
        self.shadow.ticket_done(ticket);
    }

    fn invalidated(&mut self, what: &Invalidation, hold: HoldId) -> Hold {
        self.shadow.told(what, hold)
    }

    fn hold_overdue(&mut self, _: HoldId, _: &mut Effects<E>) {
        self.shadow.hold_overdue();
    }

    fn connect(&mut self, lines: &[(u16, Option<Message>)]) {
        self.lines.connect(lines);
    }
}

impl<H: Hardware, C: Caller, E> DataPath<E> for Assigned<H, C> {
    fn poll<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, E>) -> Progress {
        let now = cx.now();
        let (unit, mem, out) = cx.follow();
        let progress = self.shadow.poll(unit, mem, now, out);
        if let Some(why) = self.shadow.take_failure() {
            self.cut_off(&why);
        }
        if self
            .unreached
            .look(self.is_master && self.shadow.is_off(), now)
        {
            self.say_unreached();
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(NOTICE_PERIOD) {
            self.look_for_notices();
        }
        progress
    }

    fn has_work<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, E>) -> bool {
        self.look_for_notices();
        self.shadow.has_work()
    }

    fn in_use<I: Iommu, M: PhysMem>(
        &mut self,
        _: &mut FunctionContext<'_, I, M, E>,
        pages: &Pages,
    ) -> u32 {
        self.reach.in_use(pages)
    }
}
