//! The guest's view of its local APIC, which is the real one as far as policy lets it.

use bare::apic;
use eli::policy::{self, Command, LVT_MASKED, Lvt, Why};
use eli::{Ended, Vector};

use crate::host;
use crate::report::{Cause, Kind};
use crate::vm::Vm;

const LVTS: [(u32, Lvt); 6] = [
    (apic::LVT_TIMER, Lvt::Timer),
    (apic::LVT_THERMAL, Lvt::Thermal),
    (apic::LVT_PERFORMANCE, Lvt::Performance),
    (apic::LVT_LINT0, Lvt::Lint0),
    (apic::LVT_LINT1, Lvt::Lint1),
    (apic::LVT_ERROR, Lvt::Error),
];
const SPURIOUS_ON: u64 = 1 << 8;
const SPURIOUS_VECTOR: u64 = 0xff;

/// What the guest wrote, where the real register has something else.
pub struct Lapic {
    /// Its identifier.
    pub id: u32,
    lvt: [u32; LVTS.len()],
    spurious: u64,
    command: u64,
}

impl Lapic {
    /// As firmware left it.
    pub fn new() -> Self {
        Self {
            id: apic::read(apic::ID) as u32,
            lvt: LVTS.map(|(register, _)| apic::read(register) as u32),
            spurious: SPURIOUS_VECTOR,
            command: 0,
        }
    }

    /// The timer's vector, if it is not masked.
    pub fn timer_vector(&self) -> Option<Vector> {
        let entry = self.lvt[0];
        (entry & LVT_MASKED == 0 && entry as Vector >= eli::gate::FIRST_INTERRUPT)
            .then_some(entry as Vector)
    }
}

/// What a read gives (`None`: #GP), and how the exit is counted.
type Outcome = (Option<u64>, Kind, Cause);

impl Vm {
    /// The guest's task priority.
    pub fn set_task_priority(&mut self, priority: u8) {
        let real = self.core.set_task_priority(priority);
        let real = if self.options.defend { real } else { priority };
        // SAFETY: the host's class stays open; without defences that is what is to be shown.
        unsafe { apic::write(apic::TPR, u64::from(real)) }
    }

    /// A write.
    pub fn apic_write(&mut self, register: u32, value: u64) -> Outcome {
        let other = (Some(0), Kind::Apic, Cause::Guest);
        match register {
            apic::EOI => return (Some(0), Kind::Eoi, self.eoi()),
            apic::TPR => self.set_task_priority(value as u8),
            apic::SPURIOUS => self.write_spurious(value),
            apic::ICR => {
                self.lapic.command = value;
                return self.command(value);
            }
            apic::SELF_IPI => {
                let command = value & 0xff | 1 << 18;
                return self.command(command);
            }
            apic::TIMER_INITIAL | apic::TIMER_DIVIDE => {
                let bits = if register == apic::TIMER_DIVIDE {
                    0xb
                } else {
                    0xffff_ffff
                };
                // SAFETY: when the timer interrupts is the guest's; with which vector was looked at.
                unsafe { apic::write(register, value & bits) }
                return (Some(0), Kind::Timer, Cause::Timer);
            }
            // Error status: written before it is read.
            0x828 => {
                // SAFETY: it clears what was noted.
                unsafe { apic::write(register, 0) }
            }
            _ => match LVTS.iter().position(|lvt| lvt.0 == register) {
                Some(index) => self.write_lvt(index, value as u32),
                None => return (None, Kind::Apic, Cause::Guest),
            },
        }
        other
    }

    /// A read.
    pub fn apic_read(&mut self, register: u32) -> Outcome {
        let word =
            |set: eli::VectorSet, first: u32| u64::from(set.word((register - first) as usize));
        let value = match register {
            apic::TPR => u64::from(self.core.task_priority()),
            apic::SPURIOUS => self.lapic.spurious,
            apic::ICR => self.lapic.command,
            0x810..=0x817 => word(self.core.in_service(host::in_service()), apic::ISR),
            0x820..=0x827 => apic::read(register) | word(self.core.requested(), apic::IRR),
            apic::TIMER_CURRENT | apic::TIMER_INITIAL => {
                return (Some(apic::read(register)), Kind::Timer, Cause::Timer);
            }
            0x802 | 0x803 | 0x80a | 0x80d | 0x818..=0x81f | 0x828 | apic::TIMER_DIVIDE => {
                apic::read(register)
            }
            _ => match LVTS.iter().position(|lvt| lvt.0 == register) {
                Some(index) => u64::from(self.lapic.lvt[index]),
                None => return (None, Kind::Apic, Cause::Guest),
            },
        };
        (Some(value), Kind::Apic, Cause::Guest)
    }

    fn eoi(&mut self) -> Cause {
        let done = self.core.guest_eoi(host::in_service());
        (0..done.eois).for_each(|_| apic::eoi());
        match done.ended {
            Ended::Virtual(vector) => self.cause(Some(vector)),
            Ended::Real(vector) => {
                self.counts.device_completed += u64::from(self.device.contains(vector));
                self.cause(Some(vector))
            }
            Ended::Nothing => Cause::Guest,
        }
    }

    fn command(&mut self, value: u64) -> Outcome {
        let done = (Some(0), Kind::Apic, Cause::Guest);
        if !self.options.defend {
            // SAFETY: it is not; that is what is to be shown.
            unsafe { apic::write(apic::ICR, value) }
            return done;
        }
        match policy::command(value, self.lapic.id) {
            Command::ToSelf(vector) => {
                if self.claim("an interrupt to itself", vector) {
                    // SAFETY: a fixed interrupt to this processor, with a vector that is no exception's and not the host's.
                    unsafe { apic::write(apic::SELF_IPI, u64::from(vector)) }
                }
            }
            Command::ToNobody => {}
            Command::Refused(why) => self.refuse("an interrupt command", &why),
        }
        done
    }

    fn write_spurious(&mut self, value: u64) {
        self.lapic.spurious = value & (SPURIOUS_ON | SPURIOUS_VECTOR);
        let wanted = value as Vector;
        // It stays on: the host's interrupts come this way too.
        let vector =
            if wanted < eli::gate::FIRST_INTERRUPT || !self.claim("the spurious vector", wanted) {
                SPURIOUS_VECTOR
            } else {
                u64::from(wanted)
            };
        // SAFETY: a vector that has a handler.
        unsafe { apic::write(apic::SPURIOUS, SPURIOUS_ON | vector) }
    }

    /// What firmware left is looked at like what the guest writes: LINT1 is an NMI, mostly.
    pub fn adopt_lvts(&mut self) {
        for index in 0..LVTS.len() {
            let value = self.lapic.lvt[index];
            self.write_lvt(index, value);
        }
    }

    fn write_lvt(&mut self, index: usize, value: u32) {
        let (register, entry) = LVTS[index];
        self.lapic.lvt[index] = value;
        // What no entry has would raise #GP here: vector, mode, polarity and trigger, mask; the timer's has its own.
        let bits = if entry == Lvt::Timer {
            0x3_00ff
        } else {
            0x1_a7ff
        };
        let mut write = policy::lvt(entry, value);
        if !self.options.defend {
            write.real = value;
        } else if let Some(why) = write.why {
            // LINT1 as NMI is what every kernel writes; there is no such line here.
            if entry != Lvt::Lint1 || why != Why::DeliveryMode(4) {
                self.refuse("an entry of the local vector table", &why);
            }
        } else if let Some(vector) = write.wants
            && !self.claim("the local vector table", vector)
        {
            write.real = value | LVT_MASKED;
        }
        // SAFETY: masked, or fixed with a vector that is the guest's; ExtINT, whose vectors are looked at elsewhere.
        unsafe { apic::write(register, u64::from(write.real & bits)) }
        if entry == Lvt::Timer {
            let through = self.assigns_timer() && self.lapic.timer_vector().is_some();
            for count in [apic::TIMER_INITIAL, apic::TIMER_CURRENT] {
                self.let_through(count, through, false);
            }
            self.assigned_changed();
        }
    }
}
