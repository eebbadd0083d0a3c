//! Ports that exit: those of the hypervisor's own, and those that are not on the list
//! ([`eli::policy::ports`]).

use eli::defence::Defence;
use eli::event::{self, Event};
use eli::policy::pit;
use eli::policy::ports::{Access, Answer, Rule, ones};

use super::Processor;
use super::end::End;
use crate::log::Hex;
use crate::pages::{RCX, RDI, RSI};
use crate::raw_ports::{MARKERS, PICS, is_config, is_own, through_read, through_write};
use crate::report::Cause;
use crate::vmcb;

/// An access, as an exit describes it.
#[derive(Clone, Copy)]
struct Io {
    port: u16,
    /// Bytes: 1, 2 or 4.
    size: u8,
    is_in: bool,
    is_string: bool,
    is_repeated: bool,
    /// Bits of a string's address and count.
    address: u64,
}

impl Io {
    fn of(info: u64) -> Self {
        Self {
            port: (info >> 16) as u16,
            size: (info >> 4 & 7) as u8,
            is_in: info & 1 != 0,
            is_string: info & 1 << 2 != 0,
            is_repeated: info & 1 << 3 != 0,
            address: match info >> 7 & 7 {
                1 => 0xffff,
                2 => 0xffff_ffff,
                _ => u64::MAX,
            },
        }
    }

    /// Returns a register, of which the instruction changed the bits of an address. A write of 32
    /// bits clears the upper half.
    const fn changed(self, old: u64, new: u64) -> u64 {
        match self.address {
            0xffff => old & !0xffff | new & 0xffff,
            bits => new & bits,
        }
    }
}

impl Processor {
    pub(super) fn io(&mut self) -> Cause {
        let io = Io::of(self.pages.vmcb.get(vmcb::EXIT_INFO1));
        let next = self.pages.vmcb.get(vmcb::EXIT_INFO2);
        if io.is_string {
            if let Err(event) = self.io_string(io, next) {
                self.raise(event);
            }
            return Cause::Guest;
        }
        self.pages.vmcb.set(vmcb::RIP, next);
        self.pages.vmcb.set(vmcb::SHADOW, 0);
        let rax = self.pages.vmcb.get(vmcb::RAX);
        if io.is_in {
            let value = u64::from(self.port_read(io.port, io.size));
            // A write of 32 bits clears the upper half.
            let mask = match io.size {
                4 => u64::MAX,
                size => u64::from(ones(size)),
            };
            self.pages.vmcb.set(vmcb::RAX, rax & !mask | value);
        } else {
            self.port_write(io.port, io.size, rax as u32 & ones(io.size));
        }
        Cause::Guest
    }

    /// Handles INS or OUTS: one element, behind which a repeated one exits again. Of the guest's
    /// kernel in 64-bit mode alone, where no segment but FS and GS has a base; those two are not
    /// checked.
    fn io_string(&mut self, io: Io, next: u64) -> Result<(), Event> {
        const LONG_MODE: u64 = 1 << 10;
        const LONG: u16 = 1 << 9;
        const DIRECTION: u64 = 1 << 10;
        const PROTECTION: Event = Event::exception(event::PROTECTION, Some(0));
        let vmcb = &self.pages.vmcb;
        let is_64 =
            vmcb.get(vmcb::EFER) & LONG_MODE != 0 && vmcb.get(vmcb::CS_ATTRIBUTES) & LONG != 0;
        if !is_64 || vmcb.get(vmcb::CPL) != 0 {
            self.refuse("a string to a port", &Hex(u64::from(io.port)));
            return Err(PROTECTION);
        }
        let is_backwards = vmcb.get(vmcb::RFLAGS) & DIRECTION != 0;
        let index = if io.is_in { RDI } else { RSI };
        let words = &self.pages.registers.words;
        let (count, start) = (words[RCX] & io.address, words[index] & io.address);
        if !io.is_repeated || count != 0 {
            let len = usize::from(io.size);
            let places = self.places(io, start)?;
            if !places[..len]
                .iter()
                .all(|place| self.machine.memory().contains(*place, 1))
            {
                self.refuse("a string of a port's outside of memory", &Hex(start));
                return Err(PROTECTION);
            }
            if io.is_in {
                let value = self.port_read(io.port, io.size);
                for (place, byte) in places[..len].iter().zip(value.to_le_bytes()) {
                    // It is there: checked above.
                    let _ = self.machine.memory().write(*place, &[byte]);
                }
            } else {
                let mut bytes = [0; 4];
                for (place, byte) in places[..len].iter().zip(&mut bytes) {
                    *byte = self.machine.memory().read8(*place).unwrap_or(0xff);
                }
                self.port_write(io.port, io.size, u32::from_le_bytes(bytes));
            }
            let step = if is_backwards {
                (len as u64).wrapping_neg()
            } else {
                len as u64
            };
            let words = &mut self.pages.registers.words;
            words[index] = io.changed(words[index], words[index].wrapping_add(step));
            if io.is_repeated {
                words[RCX] = io.changed(words[RCX], count - 1);
            }
        }
        if !io.is_repeated || count <= 1 {
            self.pages.vmcb.set(vmcb::RIP, next);
        }
        self.pages.vmcb.set(vmcb::SHADOW, 0);
        Ok(())
    }

    /// Returns the physical addresses of an element's bytes.
    fn places(&mut self, io: Io, start: u64) -> Result<[u64; 4], Event> {
        const PAGE_FAULT: u8 = 14;
        const CODE_WRITE: u32 = 1 << 1;
        let mut places = [0; 4];
        for (at, place) in (0..).zip(&mut places[..usize::from(io.size)]) {
            let linear = start.wrapping_add(at);
            let Some(physical) = self.translate(linear) else {
                self.pages.vmcb.set(vmcb::CR2, linear);
                let code = if io.is_in { CODE_WRITE } else { 0 };
                return Err(Event::exception(PAGE_FAULT, Some(code)));
            };
            *place = physical;
        }
        Ok(places)
    }

    /// Carries out a read.
    fn port_read(&mut self, number: u16, size: u8) -> u32 {
        if is_own(number) {
            return ones(size);
        }
        if PICS.contains(&number) && size == 1 {
            return through_read(number, size);
        }
        if is_config(number) {
            return if self.defends(Defence::Config) {
                self.config_read(number, size)
            } else {
                through_read(number, size)
            };
        }
        match self.machine.ports().decide(number, size, Access::Read) {
            Answer::Through(_) => through_read(number, size),
            Answer::Nothing(value) => value,
            Answer::PowerOff | Answer::Reset => ones(size),
        }
    }

    /// Carries out a write.
    fn port_write(&mut self, number: u16, size: u8, value: u32) {
        if number == MARKERS && size == 1 {
            return self.marker(value as u8);
        }
        if is_own(number) {
            return;
        }
        if PICS.contains(&number) && size == 1 {
            return self.pic_write(number, value as u8);
        }
        if is_config(number) {
            return if self.defends(Defence::Config) {
                self.config_write(number, size, value);
            } else {
                through_write(number, size, value);
            };
        }
        if self.machine.ports().rule(number) == Rule::Timer && size == 1 {
            return self.timer_write(number, value as u8);
        }
        let access = Access::Write(value);
        match self.machine.ports().decide(number, size, access) {
            Answer::Through(value) => through_write(number, size, value),
            Answer::PowerOff => self.end(End::Power),
            Answer::Reset => self.end(End::Reset),
            Answer::Nothing(_) => {
                // Others are asked for by every kernel that looks for devices.
                if let Some(range) = self.machine.ports().range(number) {
                    self.refuse(range.what, &Hex(u64::from(number)));
                }
            }
        }
    }

    /// Handles a write to the first counter, or to the control word.
    fn timer_write(&mut self, number: u16, value: u8) {
        if !self.defends(Defence::Period) {
            return through_write(number, 1, u32::from(value));
        }
        let mut chips = self.machine.chips();
        let pit = chips.pit_mut();
        if number == pit::CONTROL {
            let word = pit.control(value);
            return through_write(number, 1, u32::from(word));
        }
        let write = pit.count(value);
        for byte in [write.first, write.second].into_iter().flatten() {
            through_write(number, 1, u32::from(byte));
        }
        drop(chips);
        if write.is_raised {
            self.refuse("a timer's count", &"its period is below 200 us");
        }
    }

    fn pic_write(&mut self, number: u16, value: u8) {
        let mut chips = self.machine.chips();
        match chips.pic_written(number, value) {
            Ok(writes) => {
                for (port, byte) in [(number & !1, writes.first), (number, writes.then)] {
                    if let Some(byte) = byte {
                        through_write(port, 1, u32::from(byte));
                    }
                }
            }
            Err(why) => {
                drop(chips);
                self.refuse("the setting of an 8259", &why);
            }
        }
    }
}
