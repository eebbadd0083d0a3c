//! Instructions that exit: CPUID, model-specific registers, ports.

use bare::{apic, port, processor};
use eli::event::{self, Event};

use super::{MARKERS, Vm};
use crate::log::Hex;
use crate::pages::{RBX, RCX, RDX};
use crate::power;
use crate::report::{Cause, Kind};
use crate::vmcb;

impl Vm {
    pub(super) fn cpuid(&mut self) -> Cause {
        let vmcb = &mut self.pages.vmcb;
        let words = &mut self.pages.registers.words;
        let leaf = vmcb.get(vmcb::RAX) as u32;
        let [mut a, mut b, mut c, mut d] = processor::cpuid(leaf, words[RCX] as u32);
        let cr4 = vmcb.get(vmcb::CR4);
        let mirror = |word: u32, bit: u32, on: bool| word & !(1 << bit) | u32::from(on) << bit;
        match leaf {
            // A hypervisor is there; no MONITOR, no deadline timer, and OSXSAVE is the guest's.
            1 => c = mirror(c & !(1 << 3 | 1 << 24) | 1 << 31, 27, cr4 & 1 << 18 != 0),
            // No five levels of paging, and OSPKE is the guest's.
            7 => c = mirror(c & !(1 << 16), 4, cr4 & 1 << 22 != 0),
            // No virtualization inside, nor its leaf.
            0x8000_0001 => c &= !(1 << 2),
            0x8000_000a => [a, b, c, d] = [0; 4],
            // A hypervisor vouches for x2APIC, without which Linux turns it off where there is no
            // interrupt remapping. It has KVM's name and none of its features.
            0x4000_0000 => [a, b, c, d] = [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d],
            0x4000_0001 => [a, b, c, d] = [0; 4],
            _ => {}
        }
        vmcb.set(vmcb::RAX, u64::from(a));
        words[RBX] = u64::from(b);
        words[RCX] = u64::from(c);
        words[RDX] = u64::from(d);
        vmcb.skip(2);
        Cause::Guest
    }

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

    pub(super) fn io(&mut self) -> Cause {
        let info = self.pages.vmcb.get(vmcb::EXIT_INFO1);
        let number = (info >> 16) as u16;
        let (is_in, is_string) = (info & 1 != 0, info & 4 != 0);
        let size = (info >> 4 & 7) as u32;
        let next = self.pages.vmcb.get(vmcb::EXIT_INFO2);
        let rax = self.pages.vmcb.get(vmcb::RAX);
        // Whole accesses of one of our ports: anything else would reach its neighbour unseen.
        let is_power = number != 0 && power::ports().contains(&number);
        let is_pic = matches!(number, 0x20 | 0x21 | 0xa0 | 0xa1);
        let fits = match number {
            MARKERS => size == 1,
            _ if is_pic => size == 1,
            _ if is_power => size == 2,
            _ => true,
        };
        if is_string || !fits {
            self.refuse(
                "an access to a port of the hypervisor's",
                &Hex(u64::from(number)),
            );
            self.raise(Event::exception(event::PROTECTION, Some(0)));
            return Cause::Guest;
        }
        self.pages.vmcb.set(vmcb::RIP, next);
        self.pages.vmcb.set(vmcb::SHADOW, 0);
        if is_in {
            let (value, mask) = match size {
                // SAFETY: the 8259s' registers: reading them does no harm.
                1 if is_pic => (u64::from(unsafe { port::in8(number) }), 0xff),
                // SAFETY: power's: as above.
                2 if is_power => (u64::from(unsafe { port::in16(number) }), 0xffff),
                1 => (0xff, 0xff),
                2 => (0xffff, 0xffff),
                _ => (0xffff_ffff, u64::MAX),
            };
            self.pages.vmcb.set(vmcb::RAX, rax & !mask | value);
            return Cause::Guest;
        }
        match number {
            MARKERS => self.marker(rax as u8),
            _ if is_pic => match self.chips.pic_written(number, rax as u8) {
                Ok(writes) => {
                    for (port, byte) in [(number & !1, writes.first), (number, writes.then)] {
                        if let Some(byte) = byte {
                            // SAFETY: the 8259s' vectors stay above the exceptions'.
                            unsafe { port::out8(port, byte) }
                        }
                    }
                }
                Err(why) => self.refuse("the setting of an 8259", &why),
            },
            _ if is_power => {
                if rax as u16 & power::SLEEP != 0 {
                    self.report("end", &self.measurement.total());
                    // Whatever kind of sleep it asks for: from any other than the last, firmware
                    // would go on without us.
                    power::off()
                }
                // SAFETY: no sleep.
                unsafe { port::out16(number, rax as u16) }
            }
            // The log's: the guest writes no line of it.
            _ => {}
        }
        Cause::Guest
    }
}
