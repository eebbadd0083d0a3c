//! State of the guest's interrupts: the mode machine ([`eli::Core`]), its local APIC's registers,
//! whose vectors are the assigned device's, and the event that the next entry begins with.
//!
//! The mode machine's own states are drawn at [`eli`]; every call that changes it is one function
//! here, and nothing else reaches it but to read. The event:
//! ```text
//!   none ── raise ─▶ exception
//!   none ── raise_software ─▶ event of an INT instruction
//!   none ── inject ─▶ planned interrupt
//!   each ── exited: the entry is over ─▶ none, or the same if the exit cut its delivery off
//! ```

use bare::apic;
use eli::alias::Full;
use eli::event::{Event, Kind as EventKind};
use eli::gate::Gate;
use eli::hosts::Source;
use eli::watchdog::{Came, Masking, Samples, Service, Ticks};
use eli::{
    Acknowledged, Core, Cpu, DirectModes, Disposition, EntryControls, EoiOutcome, Fault,
    Reflection, Vector, VectorSet,
};

use crate::io_core;
use crate::lapic::Lapic;
use crate::report::{Cause, Count, Counters};
use crate::vmcb::{self, Vmcb};

/// The host's tick: when it is due, and whether the guest keeps it waiting.
struct Tick {
    due: Ticks,
    masking: Masking,
    samples: Samples,
}

/// The state.
pub struct Interrupts {
    core: Core,
    lapic: Lapic,
    /// Vectors of the assigned device's messages.
    device: VectorSet,
    /// Vectors of the block function's messages.
    block: VectorSet,
    service: Service,
    /// The host's tick, if there is one.
    tick: Option<Tick>,
    /// The entry begins with an INT instruction's event.
    is_software: bool,
    /// A non-maskable interrupt of the guest's is requested.
    wants_nmi: bool,
    /// The guest is in the handler of one.
    is_in_nmi: bool,
    /// Interrupts that met the guest's own absent gate, without defences.
    own_gates: u32,
}

impl Interrupts {
    /// Creates the state of a guest that is yet to be entered.
    pub fn new(direct_modes: DirectModes) -> Self {
        Self {
            core: Core::new(direct_modes),
            lapic: Lapic::new(),
            device: VectorSet::EMPTY,
            block: VectorSet::EMPTY,
            service: Service::default(),
            tick: None,
            is_software: false,
            wants_nmi: false,
            is_in_nmi: false,
            own_gates: 0,
        }
    }

    /// Returns the mode machine.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// Returns the local APIC's registers.
    pub fn lapic(&self) -> &Lapic {
        &self.lapic
    }

    /// Returns the local APIC's registers, to record what the guest wrote.
    pub fn lapic_mut(&mut self) -> &mut Lapic {
        &mut self.lapic
    }

    /// Vectors of the assigned device's messages.
    pub fn device(&self) -> VectorSet {
        self.device
    }

    /// Vectors of the block function's messages.
    pub fn block(&self) -> VectorSet {
        self.block
    }

    /// Returns whether the last entry was in direct mode.
    pub fn was_direct(&self) -> bool {
        self.core.last().direct
    }

    /// Returns the cause to which exits of one of the guest's vectors are charged.
    pub fn cause(&self, vector: Option<Vector>) -> Cause {
        match vector {
            Some(vector) if self.device.contains(vector) => Cause::Device,
            Some(vector) if self.block.contains(vector) => Cause::Paravirtual,
            Some(vector) if self.lapic.timer_vector() == Some(vector) => Cause::Timer,
            _ => Cause::Guest,
        }
    }

    /// Returns the cause to which exits of a vector of the real local APIC's are charged.
    pub fn cause_of_real(&self, real: Option<Vector>) -> Cause {
        match real {
            // Another processor of the guest's has sent something.
            Some(real) if Source::of(real) == Some(Source::Message) => Cause::Guest,
            Some(real) if Source::of(real) == Some(Source::Completion) => Cause::Paravirtual,
            Some(real) if Source::of(real).is_some() => Cause::Host,
            real => self.cause(real.map(|real| self.core.guests(real))),
        }
    }

    /// Plans an entry, with `real` in service at the local APIC. What it injects is for
    /// [`inject`](Self::inject), once the gate is shown.
    pub fn plan(&mut self, vmcb: &Vmcb, is_stepping: bool, real: VectorSet) -> EntryControls {
        let cpu = Cpu {
            interrupts: vmcb.interrupts(),
            shadow: vmcb.get(vmcb::SHADOW) & 1 != 0,
            event: vmcb.has_event(),
            stepping: is_stepping,
        };
        self.core.plan(cpu, real)
    }

    /// Begins the next entry with this interrupt, as planned.
    pub fn inject(&self, vmcb: &mut Vmcb, event: Event, counts: &Counters) {
        let is_device = self.device.contains(event.vector);
        counts.add(Count::DeviceInjected, is_device.into());
        vmcb.set(vmcb::EVENT, event.field());
    }

    /// Ends an entry, which exited `during` a delivery or none. A delivery that was cut off begins
    /// the next entry, unless the exit `is_exception`: such an exit reports the delivery itself.
    pub fn exited(&mut self, vmcb: &mut Vmcb, during: Option<Event>, is_exception: bool) {
        let was_software = core::mem::take(&mut self.is_software);
        vmcb.set(vmcb::EVENT, 0);
        if !is_exception && let Some(event) = self.core.again(during, was_software) {
            self.is_software = event.kind == EventKind::Software;
            vmcb.set(vmcb::EVENT, event.field());
        }
    }

    /// Begins the next entry with this exception.
    pub fn raise(&mut self, vmcb: &mut Vmcb, event: Event) {
        self.is_software = false;
        vmcb.set(vmcb::EVENT, event.field());
    }

    /// Begins the next entry with the event of the INT instruction of `len` bytes at the guest's
    /// instruction pointer.
    pub fn raise_software(&mut self, vmcb: &mut Vmcb, event: Event, len: u64) {
        vmcb.skip(len);
        let next = vmcb.get(vmcb::RIP);
        vmcb.set(vmcb::NEXT_RIP, next);
        vmcb.set(vmcb::EVENT, event.field());
        self.is_software = true;
    }

    /// Requests a non-maskable interrupt of the guest's. Two that are requested are one.
    pub fn request_nmi(&mut self) {
        self.wants_nmi = true;
    }

    /// Begins the next entry with it, if one is requested, none is handled, and no other event
    /// comes first. Whether it does.
    pub fn inject_nmi(&mut self, vmcb: &mut Vmcb) -> bool {
        let can = self.wants_nmi && !self.is_in_nmi && !vmcb.has_event();
        if can {
            (self.wants_nmi, self.is_in_nmi) = (false, true);
            self.raise(vmcb, Event::nmi());
        }
        can
    }

    /// Takes notice that the guest's handler of one has returned.
    pub fn nmi_ended(&mut self) {
        self.is_in_nmi = false;
    }

    /// Resets the state: the processor got INIT. The host's tick, and what vectors are at the real
    /// local APIC, stay.
    pub fn reset(&mut self) {
        self.core.reset();
        self.service = Service::default();
        (self.is_software, self.wants_nmi, self.is_in_nmi) = (false, false, false);
    }

    /// Takes an interrupt that another processor of the guest's sends.
    pub fn request(&mut self, vector: Vector) {
        self.core.request(vector);
    }

    /// Takes the start of the host's tick, and the times between ticks, its own and the watchdog's.
    pub fn set_tick(&mut self, start_us: u64, tick_us: u64, watchdog_us: u64) {
        self.tick = Some(Tick {
            due: Ticks::new(start_us, tick_us),
            masking: Masking::new(tick_us),
            samples: Samples::new(watchdog_us),
        });
    }

    /// Hands acknowledged interrupts to the mode machine, and ends those that it says. Returns
    /// whether the host's tick is among them.
    pub fn acknowledge(
        &mut self,
        taken: &[Acknowledged],
        real: VectorSet,
        counts: &Counters,
    ) -> bool {
        let (device, timer) = (self.device, self.lapic.timer_vector());
        let (mut has_tick, mut has_completion) = (false, false);
        self.core
            .acknowledge(taken, real, |vector, Disposition { eois, to }| {
                (0..eois).for_each(|_| apic::eoi());
                match to {
                    Some(Source::Tick) => {
                        has_tick = true;
                        counts.add(Count::Ticks, 1);
                    }
                    Some(Source::Message) => {}
                    Some(Source::Completion) => has_completion = true,
                    None => {
                        counts.add(Count::DeviceCaught, device.contains(vector).into());
                        counts.add(Count::TimerCaught, (timer == Some(vector)).into());
                    }
                }
            });
        if has_completion {
            let vectors = io_core::take_requested();
            vectors.iter().for_each(|vector| self.core.request(vector));
        }
        has_tick
    }

    /// Takes the time of a tick of the host's, which was found waiting for a guest that masks it,
    /// or not. Returns its delay, µs, if there is injection from now on because of it.
    pub fn took_tick(&mut self, now_us: u64, was_found: bool) -> Option<u64> {
        let tick = self.tick.as_mut()?;
        let late_us = tick.due.take(now_us);
        if !(was_found && tick.masking.found(late_us, now_us)) {
            return None;
        }
        self.core.suspend();
        Some(late_us)
    }

    /// Ends the injection that masking was answered by, when its time is over.
    pub fn resume(&mut self, now_us: impl FnOnce() -> u64) {
        if self.core.is_suspended()
            && let Some(tick) = &self.tick
            && tick.masking.is_over(now_us())
        {
            self.core.resume();
        }
    }

    /// Takes a non-maskable interrupt. Returns its source.
    pub fn take_nmi(&mut self, now_us: impl FnOnce() -> u64) -> Came {
        const WATCHDOG: Came = Came {
            sample: false,
            watchdog: true,
        };
        let tick = self.tick.as_mut();
        tick.map_or(WATCHDOG, |tick| tick.samples.take(now_us()))
    }

    /// Returns whether there is a tick of the host's, and no sample is set.
    pub fn wants_sample(&self) -> bool {
        let tick = self.tick.as_ref();
        tick.is_some_and(|tick| !tick.samples.is_set())
    }

    /// Returns when the next sample is to be, if it has to be set.
    pub fn next_sample(&mut self, now_us: u64, entropy: u64) -> Option<u64> {
        self.tick.as_mut()?.samples.next(now_us, entropy)
    }

    /// Takes a tick of the watchdog's, at which `real` is in service. Returns how many EOIs end it,
    /// if it is to be ended.
    pub fn watchdog(&mut self, real: VectorSet) -> Option<u8> {
        let is_held = self.core.is_held(real);
        self.service
            .tick(is_held)
            .then(|| self.core.fall_back(real))
    }

    /// Takes a write of the EOI register. Returns its account.
    pub fn guest_eoi(&mut self, real: VectorSet, counts: &Counters) -> Cause {
        let done = self.core.guest_eoi(real);
        (0..done.eois).for_each(|_| apic::eoi());
        match done.ended {
            EoiOutcome::Virtual(vector) => self.cause(Some(vector)),
            EoiOutcome::Real(vector) => {
                counts.add(Count::DeviceCompleted, self.device.contains(vector).into());
                self.cause(Some(vector))
            }
            EoiOutcome::Nothing => Cause::Guest,
        }
    }

    /// Sets the guest's task priority. Returns the real one.
    pub fn set_task_priority(&mut self, priority: u8) -> u8 {
        self.core.set_task_priority(priority)
    }

    /// Takes `vector` for the guest's. Returns which one it is at the real local APIC.
    ///
    /// # Errors
    /// No other is left for it.
    pub fn claim(&mut self, vector: Vector) -> Result<Vector, Full> {
        self.core.claim(vector)
    }

    /// Takes an interrupt of the guest's to itself. Returns whether the real local APIC is to send
    /// it.
    pub fn send(&mut self, vector: Vector) -> bool {
        self.core.send(vector)
    }

    /// Sets the guest's spurious vector.
    pub fn set_spurious(&mut self, vector: Vector) {
        self.core.set_spurious(vector);
    }

    /// Sets the vectors of the device's messages. Returns whether they had others.
    pub fn set_device(&mut self, vectors: VectorSet) -> bool {
        let had_others = vectors != self.device;
        self.device = vectors;
        had_others
    }

    /// Sets the vectors of the block function's messages. Returns whether it had others.
    pub fn set_block(&mut self, vectors: VectorSet) -> bool {
        let had_others = vectors != self.block;
        self.block = vectors;
        had_others
    }

    /// Sets the vectors that are delivered without an exit. Returns whether others were.
    pub fn assign(&mut self, vectors: VectorSet) -> bool {
        let had_others = vectors != self.core.assigned();
        if had_others {
            self.core.assign(vectors);
        }
        had_others
    }

    /// Sets the limit of the guest's table, and whether it has a shadow.
    pub fn load_table(&mut self, limit: u32, is_shadowed: bool) {
        self.core.load_table(limit, is_shadowed);
    }

    /// Returns the gate that the shadow has for the guest's own.
    pub fn shadow(&self, vector: Vector, own: Gate) -> Gate {
        self.core.shadow(vector, own)
    }

    /// Decides about a fault.
    pub fn reflect(&mut self, fault: Fault) -> Reflection {
        self.core.reflect(fault)
    }

    /// Counts an interrupt that met the guest's own absent gate, without defences. Returns how many
    /// did.
    pub fn met_own_gate(&mut self) -> u32 {
        self.own_gates += 1;
        self.own_gates
    }

    /// Returns a vector of the host's among those in service, which it takes back from the guest.
    pub fn audit(&mut self, real: VectorSet) -> Option<Vector> {
        self.core.audit(real)
    }
}
