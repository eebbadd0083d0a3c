//! Model-specific registers that exit: EFER, the local APIC's and its base, and those of the list
//! ([`eli::policy::msrs`]).

use bare::apic;
use eli::event::{self, Event};
use eli::policy::msrs::{self, Access, Answer};

use super::Processor;
use crate::host;
use crate::pages::{RCX, RDX};
use crate::report::{Cause, Count, Kind};
use crate::vmcb;

impl Processor {
    pub(super) fn msr(&mut self) -> (Kind, Cause) {
        const EFER: u32 = 0xc000_0080;
        const SVME: u64 = 1 << 12;
        let register = self.pages.registers.words[RCX] as u32;
        let is_write = self.pages.vmcb.get(vmcb::EXIT_INFO1) & 1 != 0;
        let low = self.pages.vmcb.get(vmcb::RAX) & 0xffff_ffff;
        let value = self.pages.registers.words[RDX] << 32 | low;
        let (read, kind, cause) = match (register, is_write) {
            (EFER, true) => {
                let is_allowed = self.write_efer(value);
                (is_allowed.then_some(0), Kind::Msr, Cause::Guest)
            }
            (EFER, false) => (
                Some(self.pages.vmcb.get(vmcb::EFER) & !SVME),
                Kind::Msr,
                Cause::Guest,
            ),
            // It stays as it is: on, and in x2APIC mode.
            (apic::BASE, true) => (Some(0), Kind::Msr, Cause::Guest),
            (apic::BASE, false) => (Some(apic::read(apic::BASE)), Kind::Msr, Cause::Guest),
            (0x800..=0x8ff, true) => self.apic_write(register, value),
            (0x800..=0x8ff, false) => self.apic_read(register),
            _ => (self.listed(register, is_write), Kind::Msr, Cause::Guest),
        };
        match read {
            None => self.raise(Event::exception(event::PROTECTION, Some(0))),
            Some(read) => {
                if !is_write {
                    self.pages.vmcb.set(vmcb::RAX, read & 0xffff_ffff);
                    self.pages.registers.words[RDX] = read >> 32;
                }
                self.pages.vmcb.skip(2);
            }
        }
        (kind, cause)
    }

    /// Returns another register, by the list; `None`: #GP.
    fn listed(&mut self, register: u32, is_write: bool) -> Option<u64> {
        let access = if is_write {
            Access::Write
        } else {
            Access::Read
        };
        match msrs::decide(register, access) {
            Answer::Real => host::read_register(register),
            Answer::Value(value) => Some(value),
            Answer::Dropped => {
                // Not logged: every kernel writes some.
                self.counters.add(Count::Refused, 1);
                Some(0)
            }
            Answer::Refused | Answer::Own => None,
        }
    }
}
