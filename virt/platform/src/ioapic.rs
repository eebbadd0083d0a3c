//! I/O APIC (Intel 82093AA, version 0x20): 24 pins, redirection entries to MSI messages.
//!
//! KVM keeps the local APICs; this chip is emulated here because interrupt remapping is impossible
//! with one inside KVM. A pin that fires becomes the message that its redirection entry describes.
//! For level-triggered pins KVM must report the end of interrupt to us, which it does for vectors
//! it finds in its GSI routing table: every change of a redirection entry is mirrored there through
//! [`RouteSink`].
//!
//! Called by vCPU threads (registers, end of interrupt) and by the devices that drive a pin (the
//! UART). One lock protects the registers; messages and routes are sent after it is released,
//! because a sink enters KVM.
//!
//! Left out: INIT/NMI/SMI/ExtINT checks (the delivery mode goes into the message as it is), virtual
//! wire.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_mem::SourceId;

use crate::bus::{AccessCause, BusDevice};
use crate::interrupt::{InterruptPin, InterruptSink, Message};

/// Pins of the chip.
pub const PINS: usize = 24;

/// Register selector, offset of the 32-bit access window's index.
const IOREGSEL: u64 = 0x00;
/// Data window.
const IOWIN: u64 = 0x10;
/// End of interrupt by vector (chips of version 0x20 on).
const EOI: u64 = 0x40;
/// Register 0: identification, bits 27:24.
const IOAPICID: u8 = 0x00;
/// Register 1: version and highest entry.
const IOAPICVER: u8 = 0x01;
/// Register 2: arbitration id.
const IOAPICARB: u8 = 0x02;
/// Registers 0x10 to 0x3f: redirection table, low then high half of each entry.
const IOREDTBL: u8 = 0x10;

/// Version 0x20.
const VERSION: u32 = 0x20;

/// Per pin, the message of a level-triggered entry that is not masked.
pub type Routes = [Option<Message>; PINS];

/// One redirection table entry (82093AA §3.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Redirection(u64);

impl Redirection {
    /// Masked, everything else zero (reset value).
    const RESET: Self = Self(1 << 16);
    /// Delivery status (12) and remote IRR (14): read-only.
    const READ_ONLY: u64 = 1 << 12 | 1 << 14;
    const REMOTE_IRR: u64 = 1 << 14;

    fn vector(self) -> u8 {
        self.0 as u8
    }

    fn is_level(self) -> bool {
        self.0 & 1 << 15 != 0
    }

    fn is_masked(self) -> bool {
        self.0 & 1 << 16 != 0
    }

    fn remote_irr(self) -> bool {
        self.0 & Self::REMOTE_IRR != 0
    }

    /// Returns the message: destination id (63:56) and mode (11) in the address; vector, delivery
    /// mode and trigger in the data (Intel SDM volume 3 §11.11).
    fn message(self) -> Message {
        let destination = self.0 >> 56 & 0xff;
        let logical = self.0 >> 11 & 1;
        let address = 0xfee0_0000 | destination << 12 | logical << 2;
        let delivery = (self.0 >> 8 & 7) as u32;
        let level = u32::from(self.is_level());
        let data = u32::from(self.vector()) | delivery << 8 | level << 14 | level << 15;
        Message { address, data }
    }
}

/// Receiver of every pin's message, so that KVM reports ends of interrupt for level-triggered pins.
pub trait RouteSink: Send + Sync {
    /// Sets the routes of all pins; `None` for a pin that is masked or edge-triggered.
    fn update(&self, routes: &Routes);
}

struct State {
    select: u8,
    id: u8,
    table: [Redirection; PINS],
    /// Level of each input.
    lines: u32,
}

impl State {
    fn routes(&self) -> Routes {
        self.table
            .map(|entry| (entry.is_level() && !entry.is_masked()).then(|| entry.message()))
    }

    /// Fires `pin` if its entry allows: a level-triggered one fires only after its last interrupt
    /// was acknowledged.
    fn fire(&mut self, pin: usize) -> Option<Message> {
        let entry = &mut self.table[pin];
        if entry.is_masked() || (entry.is_level() && entry.remote_irr()) {
            return None;
        }
        if entry.is_level() {
            entry.0 |= Redirection::REMOTE_IRR;
        }
        Some(entry.message())
    }

    fn line(&self, pin: usize) -> bool {
        self.lines & 1 << pin != 0
    }

    fn read(&self, register: u8) -> u32 {
        match register {
            IOAPICID | IOAPICARB => u32::from(self.id) << 24,
            IOAPICVER => VERSION | (PINS as u32 - 1) << 16,
            _ => match self.entry_index(register) {
                Some((pin, high)) => (self.table[pin].0 >> if high { 32 } else { 0 }) as u32,
                None => u32::MAX,
            },
        }
    }

    fn entry_index(&self, register: u8) -> Option<(usize, bool)> {
        let index = register.checked_sub(IOREDTBL)?;
        let pin = usize::from(index / 2);
        (pin < PINS).then_some((pin, index % 2 == 1))
    }
}

/// Message and routes to send once the lock is released.
#[derive(Default)]
struct Outcome {
    message: Option<Message>,
    routes: Option<Routes>,
}

/// The chip. See the module's head.
pub struct Ioapic {
    state: Mutex<State>,
    /// Requester of its messages.
    source: SourceId,
    messages: Arc<dyn InterruptSink>,
    routes: Arc<dyn RouteSink>,
}

impl Ioapic {
    /// Creates a chip after reset, which sends its interrupts to `messages` as requester `source`
    /// and its routes to `routes`.
    pub fn new(
        source: SourceId,
        messages: Arc<dyn InterruptSink>,
        routes: Arc<dyn RouteSink>,
    ) -> Self {
        let state = State {
            select: 0,
            id: 0,
            table: [Redirection::RESET; PINS],
            lines: 0,
        };
        Self {
            state: Mutex::new(state),
            source,
            messages,
            routes,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No panic can leave the registers half changed, so a poisoned lock is used as it is.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, outcome: Outcome) {
        if let Some(routes) = outcome.routes {
            self.routes.update(&routes);
        }
        if let Some(message) = outcome.message {
            self.messages.send(self.source, message);
        }
    }

    /// Drives input `pin` (0 to 23). A rising edge fires an edge-triggered entry, a high level a
    /// level-triggered one (all lines are active high).
    pub fn set_line(&self, pin: u8, high: bool) {
        self.drive(pin, high);
    }

    /// Drives input `pin` as [`set_line`](Self::set_line); returns whether a message was sent.
    fn drive(&self, pin: u8, high: bool) -> bool {
        let pin = usize::from(pin);
        assert!(
            pin < PINS,
            "the chip has {PINS} pins, not one numbered {pin}"
        );
        let mut state = self.state();
        let was_high = state.line(pin);
        if high {
            state.lines |= 1 << pin;
        } else {
            state.lines &= !(1 << pin);
        }
        let message = (high && (!was_high || state.table[pin].is_level()))
            .then(|| state.fire(pin))
            .flatten();
        drop(state);
        self.finish(Outcome {
            message,
            routes: None,
        });
        message.is_some()
    }

    /// Drives one rising edge on `pin`. Returns whether a message was sent: an edge on a masked pin
    /// is lost.
    pub fn pulse(&self, pin: u8) -> bool {
        let is_sent = self.drive(pin, true);
        self.drive(pin, false);
        is_sent
    }

    /// Handles a vCPU's end of the interrupt with this vector: level-triggered pins with it may
    /// fire again.
    pub fn end_of_interrupt(&self, vector: u8) {
        let mut messages = [None; PINS];
        let mut state = self.state();
        for (pin, message) in messages.iter_mut().enumerate() {
            let entry = state.table[pin];
            if entry.is_level() && entry.remote_irr() && entry.vector() == vector {
                state.table[pin].0 &= !Redirection::REMOTE_IRR;
                if state.line(pin) {
                    *message = state.fire(pin);
                }
            }
        }
        drop(state);
        for message in messages.into_iter().flatten() {
            self.messages.send(self.source, message);
        }
    }

    fn write_window(&self, value: u32) {
        let mut state = self.state();
        let register = state.select;
        let mut outcome = Outcome::default();
        if register == IOAPICID {
            state.id = (value >> 24 & 0xf) as u8;
        } else if let Some((pin, high)) = state.entry_index(register) {
            let old = state.table[pin].0;
            let new = if high {
                old & 0xffff_ffff | u64::from(value) << 32
            } else {
                old & !0xffff_ffff | u64::from(value)
            };
            let mut entry =
                Redirection(new & !Redirection::READ_ONLY | old & Redirection::READ_ONLY);
            if !entry.is_level() {
                // Linux acknowledges by switching a pin to edge and back; the switch drops remote
                // IRR.
                entry.0 &= !Redirection::REMOTE_IRR;
            }
            state.table[pin] = entry;
            if entry.0 != old {
                outcome.routes = Some(state.routes());
            }
            if entry.is_level() && state.line(pin) {
                outcome.message = state.fire(pin);
            }
        }
        drop(state);
        self.finish(outcome);
    }
}

/// A function's legacy pin on an input of the chip. Level 1 is asserted, whatever polarity the
/// guest programs.
pub struct IoapicPin {
    /// The chip.
    pub chip: Arc<Ioapic>,
    /// Its input, 0 to 23.
    pub input: u8,
}

impl InterruptPin for IoapicPin {
    fn set(&mut self, level: bool) {
        self.chip.set_line(self.input, level);
    }
}

impl BusDevice for Ioapic {
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause {
        let state = self.state();
        let value = match offset {
            IOREGSEL => u32::from(state.select),
            IOWIN => state.read(state.select),
            _ => u32::MAX,
        };
        drop(state);
        let bytes = value.to_le_bytes();
        for (to, from) in data.iter_mut().zip(bytes) {
            *to = from;
        }
        AccessCause::Register
    }

    fn write(&self, offset: u64, data: &[u8]) -> AccessCause {
        let mut bytes = [0; 4];
        let len = data.len().min(4);
        bytes[..len].copy_from_slice(&data[..len]);
        match offset {
            IOREGSEL => self.state().select = bytes[0],
            EOI => self.end_of_interrupt(bytes[0]),
            IOWIN if data.len() == 4 => self.write_window(u32::from_le_bytes(bytes)),
            _ => {}
        }
        AccessCause::Register
    }
}

#[cfg(test)]
mod tests;
