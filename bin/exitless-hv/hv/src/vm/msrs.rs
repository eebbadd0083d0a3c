//! Model-specific registers.

use bare::apic;
use eli::event::{self, Event};

use super::Vm;
use crate::pages::{RCX, RDX};
use crate::report::{Cause, Kind};
use crate::vmcb;

impl Vm {
    pub(super) fn msr(&mut self) -> (Kind, Cause) {
        const EFER: u32 = 0xc000_0080;
        const SVME: u64 = 1 << 12;
        let register = self.pages.registers.words[RCX] as u32;
        let is_write = self.pages.vmcb.get(vmcb::EXIT_INFO1) & 1 != 0;
        let low = self.pages.vmcb.get(vmcb::RAX) & 0xffff_ffff;
        let value = self.pages.registers.words[RDX] << 32 | low;
        let (read, kind, cause) = match (register, is_write) {
            // SCE, LME, LMA, NXE, FFXSR, TCE: another bit would end the next entry.
            (EFER, true) if value & !0xcd01 != 0 => (None, Kind::Msr, Cause::Guest),
            (EFER, true) => {
                self.pages.vmcb.set(vmcb::EFER, value | SVME);
                (Some(0), Kind::Msr, Cause::Guest)
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
            _ => (None, Kind::Msr, Cause::Guest),
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
}
