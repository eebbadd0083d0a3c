//! Classification of faults that may be interrupts.

use super::{Core, Injection};
use crate::Vector;
use crate::event::{self, Event, Kind};
use crate::gate::{self, Gate};

/// A fault that exited and may be caused by an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// #NP or #GP, with its code.
    pub fault: Event,
    /// Event whose delivery was interrupted ([`Event::from_field`] of EXITINTINFO).
    pub during: Option<Event>,
    /// The guest's own gate for that vector.
    pub gate: Gate,
    /// The guest's privilege level.
    pub privilege: u8,
}

/// Classification of such a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reflection {
    /// A real interrupt, acknowledged, by its vector at the real local APIC: to be handed to
    /// [`Core::acknowledge`].
    Interrupt(Vector),
    /// An INT instruction whose gate is hidden from it: to be injected, with the instruction
    /// pointer behind the instruction.
    Software(Injection),
    /// The guest's own fault, to be injected.
    Guest(Event),
    /// The guest's third fault in a row.
    Shutdown,
}

impl Core {
    /// Classifies a #NP or #GP of the guest's.
    pub fn reflect(&mut self, fault: Fault) -> Reflection {
        let Some(during) = fault.during else {
            return Reflection::Guest(fault.fault);
        };
        let vector = during.vector;
        let names_gate = fault
            .fault
            .code
            .is_some_and(|code| code & event::CODE_IDT != 0);
        match during.kind {
            Kind::External if names_gate => self.reflect_external(vector, fault),
            Kind::Software if names_gate && vector >= gate::FIRST_INTERRUPT => {
                self.reflect_software(vector, fault)
            }
            _ => match during.then(fault.fault) {
                Some(event) => Reflection::Guest(event),
                None => Reflection::Shutdown,
            },
        }
    }

    fn reflect_external(&mut self, vector: Vector, fault: Fault) -> Reflection {
        // An injected interrupt has the guest's vector, and goes through the table only while no
        // real interrupt does.
        let was_injected = self.injected == Some(vector);
        // The shadow's gate is the guest's own, which is not present. The interrupt is in service,
        // as it would be without a host, and the guest receives the fault. If the interrupt were
        // injected again, it would fault forever.
        let is_own = was_injected || self.last.direct && self.assigned.contains(vector);
        if is_own {
            self.counts.own_gates += 1;
            let code = u32::from(vector) << 3 | event::CODE_IDT | event::CODE_EXTERNAL;
            return Reflection::Guest(Event::exception(fault.fault.vector, Some(code)));
        }
        self.counts.reflected += 1;
        Reflection::Interrupt(vector)
    }

    fn reflect_software(&mut self, vector: Vector, fault: Fault) -> Reflection {
        let code = u32::from(vector) << 3 | event::CODE_IDT;
        let guest = |vector| Reflection::Guest(Event::exception(vector, Some(code)));
        if !self.engaged {
            // Through the guest's own table: its result there is right.
            return guest(fault.fault.vector);
        }
        // In the processor's order: limit, type, privilege, presence.
        if !gate::is_within(self.guest_limit, vector) || !fault.gate.is_gate() {
            return guest(event::PROTECTION);
        }
        if fault.gate.privilege() < fault.privilege {
            return guest(event::PROTECTION);
        }
        if !fault.gate.is_present() {
            return guest(event::NOT_PRESENT);
        }
        self.counts.software += 1;
        let event = Event {
            vector,
            kind: Kind::Software,
            code: None,
        };
        Reflection::Software(Injection {
            event,
            opens: self.open(vector),
        })
    }
}
