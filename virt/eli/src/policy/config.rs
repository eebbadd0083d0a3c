//! Configuration space of a guest that has one function of the machine's (PCI 3.0, §6; by the ports
//! 0xcf8 and 0xcfc).
//!
//! The assigned function's registers are read as they are; a mask selects the bits that may be
//! written. Its base addresses are virtual: sizing them is answered, moving them is refused, since
//! the hypervisor traps the page of its message table by address. Bridges that a kernel looks for
//! are visible and read-only: they hold the window of configuration space in memory, the base of
//! the power ports and the routes of interrupts. No other function is visible. The window itself is
//! not mapped, and hidden.
//!
//! ```text
//!   0xcf8 ── set_address ─▶ latch          0xcfc to 0xcff ── target ─▶ a register, or nothing
//!   read: real, or a value                 write: real with a value, dropped, or refused
//! ```

/// Base address registers of a function.
pub const BARS: usize = 6;
/// Bridges that are shown.
pub const SHOWN: usize = 4;

const COMMAND: u8 = 0x04;
const CACHE_LINE: u8 = 0x0c;
const BAR: u8 = 0x10;
const BAR_LAST: u8 = 0x24;
const ROM: u8 = 0x30;
const INTERRUPT_LINE: u8 = 0x3c;
/// Behind it are capabilities and function-specific registers.
const HEADER_LEN: u8 = 0x40;

/// Base address register: its value, and the value that it reads when it is sized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bar {
    /// Address and type, as firmware set them.
    pub value: u32,
    /// Answer of the function to all ones: the bits of the address that there are, and the type.
    pub size: u32,
}

/// The assigned function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Function {
    /// Bus << 8 | device << 3 | function.
    pub number: u16,
    /// Its base addresses.
    pub bars: [Bar; BARS],
    /// Offset of the MSI-X capability, if there is one.
    pub msix: Option<u8>,
    /// That of power management.
    pub power: Option<u8>,
    /// That of PCI Express.
    pub express: Option<u8>,
}

/// A register: four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Bus << 8 | device << 3 | function.
    pub function: u16,
    /// Its offset, a multiple of 4.
    pub register: u8,
    /// The first byte of it that is accessed.
    pub byte: u8,
    /// Number of bytes: 1, 2 or 4, which end with the register.
    pub size: u8,
}

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// The content of the machine's register.
    Real,
    /// This, in place of the register's four bytes.
    Value(u32),
}

/// Effect of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// The machine's register gets this, in the bytes that were written.
    Real(u32),
    /// Nothing is written; the guest continues.
    Dropped,
    /// Nothing is written, and the reason is logged.
    Refused(&'static str),
}

/// Configuration space.
#[derive(Clone, Debug, Default)]
pub struct Config {
    address: u32,
    shown: [Option<u16>; SHOWN],
    function: Option<Function>,
    /// The guest has written all ones to these base addresses last.
    is_sizing: [bool; BARS],
}

/// Bits of a register that a guest writes, and those that it clears by writing 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Mask {
    write: u32,
    clear: u32,
}

impl Config {
    /// Creates the policy with an assigned function, if there is one, and the visible bridges;
    /// those beyond [`SHOWN`] are hidden.
    #[must_use]
    pub fn new(function: Option<Function>, bridges: impl IntoIterator<Item = u16>) -> Self {
        let mut shown = [None; SHOWN];
        for (slot, bridge) in shown.iter_mut().zip(bridges) {
            *slot = Some(bridge);
        }
        Self {
            function,
            shown,
            ..Self::default()
        }
    }

    /// The assigned function.
    #[must_use]
    pub const fn function(&self) -> Option<&Function> {
        self.function.as_ref()
    }

    /// A write of four bytes to the address port.
    pub fn set_address(&mut self, value: u32) {
        const HELD: u32 = 0x80ff_fffc;
        self.address = value & HELD;
    }

    /// Returns the content of the address port.
    #[must_use]
    pub const fn address(&self) -> u32 {
        self.address
    }

    /// The register that an access of `size` bytes at the `byte`th data port is to. `None`: there
    /// is none, or it goes beyond it.
    #[must_use]
    pub const fn target(&self, byte: u8, size: u8) -> Option<Target> {
        const ENABLED: u32 = 1 << 31;
        if self.address & ENABLED == 0 || byte as u16 + size as u16 > 4 {
            return None;
        }
        Some(Target {
            function: (self.address >> 8) as u16,
            register: self.address as u8 & !3,
            byte,
            size,
        })
    }

    /// A read.
    #[must_use]
    pub fn read(&self, target: Target) -> Read {
        match &self.function {
            Some(function) if function.number == target.function => match target.register {
                BAR..=BAR_LAST => {
                    let at = usize::from(target.register - BAR) / 4;
                    let Bar { value, size } = function.bars[at];
                    Read::Value(if self.is_sizing[at] { size } else { value })
                }
                // It has none that the guest could map.
                ROM => Read::Value(0),
                _ => Read::Real,
            },
            _ if self.shown.contains(&Some(target.function)) => Read::Real,
            _ => Read::Value(u32::MAX),
        }
    }

    /// A write of `value`, whose bytes stand where the register has them, while the machine's
    /// register holds `old`.
    pub fn write(&mut self, target: Target, value: u32, old: u32) -> Write {
        let Some(function) = self
            .function
            .filter(|function| function.number == target.function)
        else {
            return match self.shown.contains(&Some(target.function)) {
                // Every kernel sizes the registers that it finds.
                true if target.register < HEADER_LEN => Write::Dropped,
                true => Write::Refused("a bridge"),
                false => Write::Refused("a function that is not the guest's"),
            };
        };
        match target.register {
            BAR..=BAR_LAST => self.write_bar(&function, target, value),
            ROM => Write::Dropped,
            register => {
                let Mask { write, clear } = function.mask(register);
                let lanes = target.lanes();
                if (write | clear) & lanes == 0 {
                    return Write::Dropped;
                }
                // A bit that is cleared by 1 is written 0, unless the guest clears it.
                let kept = old & !write & !clear;
                Write::Real((kept | value & (write | clear)) & lanes)
            }
        }
    }

    fn write_bar(&mut self, function: &Function, target: Target, value: u32) -> Write {
        let at = usize::from(target.register - BAR) / 4;
        let Bar { value: own, size } = function.bars[at];
        if target.size != 4 {
            return Write::Refused("part of a base address");
        }
        // Type bits are not written. A register that has no address bits is not there.
        let address = size & function.address_bits(at);
        self.is_sizing[at] = value & address == address && value != own;
        if address == 0 || self.is_sizing[at] {
            Write::Dropped
        } else if (value ^ own) & address == 0 {
            // After a reset of the function, its driver does that.
            Write::Real(own)
        } else {
            Write::Refused("a base address moved")
        }
    }
}

impl Function {
    /// Bits of a base address register that are an address's.
    fn address_bits(&self, at: usize) -> u32 {
        const WIDE: u32 = 0b100;
        const IO: u32 = 1;
        let is_upper = at > 0 && self.bars[at - 1].size & 0b111 == WIDE && !self.is_upper(at - 1);
        match self.bars[at].size {
            _ if is_upper => u32::MAX,
            size if size & IO != 0 => !0b11,
            _ => !0b1111,
        }
    }

    /// Whether it is the upper half of the one before.
    fn is_upper(&self, at: usize) -> bool {
        at > 0 && self.bars[at - 1].size & 0b111 == 0b100 && !self.is_upper(at - 1)
    }

    /// Bits of a register that may be written.
    fn mask(&self, register: u8) -> Mask {
        let at = |capability: Option<u8>, offset: u8| {
            capability.is_some_and(|start| start.checked_add(offset) == Some(register))
        };
        let (write, clear) = match register {
            // I/O and memory decoding, bus master, no line; error bits of the status.
            COMMAND => (0x0407, 0xf900_0000),
            CACHE_LINE | INTERRUPT_LINE => (0xff, 0),
            // On, and all masked.
            _ if at(self.msix, 0) => (0xc000_0000, 0),
            // The state; wake-up events.
            _ if at(self.power, 4) => (0x0103, 0x8000),
            // Relaxed ordering, longer tags, no snooping, longest request, reset of the function;
            // error bits of the status. Not reports of errors, which may be non-maskable
            // interrupts, nor the longest payload, which bridges know too.
            _ if at(self.express, 8) => (0xf910, 0x000f_0000),
            _ => (0, 0),
        };
        Mask { write, clear }
    }
}

impl Target {
    /// Bits of the register that are accessed.
    #[must_use]
    pub const fn lanes(self) -> u32 {
        super::ports::ones(self.size) << (self.byte * 8)
    }

    /// The accessed bytes of `word`, from bit 0 on.
    #[must_use]
    pub const fn part(self, word: u32) -> u32 {
        (word & self.lanes()) >> (self.byte * 8)
    }

    /// Whether the register is the command's.
    #[must_use]
    pub const fn is_command(self) -> bool {
        self.register == COMMAND
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NVME: u16 = 1 << 3;
    const HOST_BRIDGE: u16 = 0;
    const LPC: u16 = 0x1f << 3;
    const DISKS: u16 = 0x1f << 3 | 2;
    const MSI: u8 = 0x50;

    /// 16 KiB of registers at 0xfebf8000, 64 bits.
    fn config() -> Config {
        let mut bars = [Bar::default(); BARS];
        bars[0] = Bar {
            value: 0xfebf_8004,
            size: 0xffff_c004,
        };
        bars[1] = Bar {
            value: 0,
            size: u32::MAX,
        };
        let function = Function {
            number: NVME,
            bars,
            msix: Some(0x40),
            power: Some(0x60),
            express: Some(0x80),
        };
        Config::new(Some(function), [HOST_BRIDGE, LPC])
    }

    fn target(function: u16, register: u8, byte: u8, size: u8) -> Target {
        let mut config = Config::default();
        config.set_address(1 << 31 | u32::from(function) << 8 | u32::from(register));
        config.target(byte, size).unwrap()
    }

    fn word(function: u16, register: u8) -> Target {
        target(function, register, 0, 4)
    }

    #[test]
    fn e8_a_guest_writes_no_function_but_its_own_and_no_register_that_moves_anything() {
        let of = |function, register| word(function, register);
        for (what, target, value) in [
            (
                "the window of configuration space",
                of(HOST_BRIDGE, 0x60),
                0x3000_0001,
            ),
            ("the power base", of(LPC, 0x40), 0x701),
            ("routes of interrupts", of(LPC, 0x60), 0x0a0a_0a0a),
            ("system management", of(LPC, 0xa0), u32::MAX),
            ("another device's command", of(DISKS, 4), 6),
            ("another device's message", of(DISKS, 0x84), 0xfee0_1000),
            ("a function on another bus", of(0x0108, 4), 6),
        ] {
            let write = config().write(target, value, 0);
            assert!(matches!(write, Write::Refused(_)), "{what}: {write:?}");
        }
        for register in (0..=0xff).step_by(4) {
            for bridge in [HOST_BRIDGE, LPC] {
                let write = config().write(word(bridge, register), u32::MAX, 0);
                assert!(!matches!(write, Write::Real(_)), "{register:#x}: {write:?}");
            }
        }
        // Each register of its own but base addresses: for any written value only these bits
        // change.
        for register in (0..=0xff)
            .step_by(4)
            .filter(|at| !(BAR..=BAR_LAST).contains(at))
        {
            for old in [0, u32::MAX, 0x5555_aaaa] {
                for value in [0, u32::MAX, 0x1234_5678] {
                    let (write, clear) = match register {
                        4 => (0x0407, 0xf900_0000),
                        0x0c | 0x3c => (0xff, 0),
                        0x40 => (0xc000_0000, 0),
                        0x64 => (0x0103, 0x8000),
                        0x88 => (0xf910, 0x000f_0000),
                        _ => (0, 0),
                    };
                    match config().write(word(NVME, register), value, old) {
                        Write::Real(real) => {
                            assert_ne!(write | clear, 0, "{register:#x}");
                            // Those that are neither stay, those cleared by 1 stay where the guest
                            // writes 0.
                            assert_eq!((real ^ old) & !(write | clear), 0, "{register:#x}");
                            assert_eq!(real & clear, value & clear, "{register:#x}");
                            assert_eq!(real & write, value & write, "{register:#x}");
                        }
                        _ => assert_eq!(write | clear, 0, "{register:#x}"),
                    }
                }
            }
        }
        // Its message capability, were there one, would be a way past the table.
        assert_eq!(config().write(word(NVME, MSI), 1 << 16, 0), Write::Dropped);
    }

    #[test]
    fn e8_base_addresses_are_sized_and_not_moved() {
        let mut config = config();
        let (low, high, none) = (word(NVME, 0x10), word(NVME, 0x14), word(NVME, 0x18));
        // As a kernel does it, the two halves one after the other.
        assert_eq!(config.read(low), Read::Value(0xfebf_8004));
        assert_eq!(config.write(low, u32::MAX, 0), Write::Dropped);
        assert_eq!(config.read(low), Read::Value(0xffff_c004));
        assert_eq!(config.write(low, 0xfebf_8004, 0), Write::Real(0xfebf_8004));
        assert_eq!(config.read(low), Read::Value(0xfebf_8004));
        assert_eq!(config.write(high, u32::MAX, 0), Write::Dropped);
        assert_eq!(config.read(high), Read::Value(u32::MAX));
        assert_eq!(config.write(high, 0, 0), Write::Real(0));
        assert_eq!(config.read(high), Read::Value(0));
        assert_eq!(config.write(none, u32::MAX, 0), Write::Dropped);
        assert_eq!(config.read(none), Read::Value(0));
        // Without the type bits, as some write it back.
        assert_eq!(config.write(low, 0xfebf_8000, 0), Write::Real(0xfebf_8004));
        // Elsewhere, and in halves.
        for (target, value) in [
            (low, 0xfebf_4004),
            (low, 0x3000_0004),
            (low, 4),
            (high, 1),
            (target(NVME, 0x10, 2, 2), 0xfebe_0000),
            (target(NVME, 0x10, 1, 1), 0x4000),
        ] {
            let write = config.write(target, value, 0);
            assert!(
                matches!(write, Write::Refused(_)),
                "{target:x?} {value:#x}: {write:?}"
            );
            assert_eq!(config.read(low), Read::Value(0xfebf_8004));
            assert_eq!(config.read(high), Read::Value(0));
        }
        // No expansion memory.
        assert_eq!(config.write(word(NVME, 0x30), u32::MAX, 0), Write::Dropped);
        assert_eq!(config.read(word(NVME, 0x30)), Read::Value(0));
    }

    #[test]
    fn functions_that_are_not_the_guests_read_as_all_ones() {
        let mut config = config();
        for function in 0..=u16::MAX {
            let read = config.read(word(function, 0));
            let is_there = [NVME, HOST_BRIDGE, LPC].contains(&function);
            assert_eq!(read == Read::Real, is_there, "{function:#x}: {read:?}");
        }
        // The latch: reserved bits, no access without the enable bit, none across registers.
        config.set_address(0x7fff_ffff);
        assert_eq!(config.address(), 0x00ff_fffc);
        assert_eq!(config.target(0, 4), None);
        config.set_address(1 << 31 | u32::from(NVME) << 8 | 7);
        assert_eq!(config.address() as u8, 4);
        for (byte, size) in [(1, 4), (2, 4), (3, 2), (3, 4)] {
            assert_eq!(config.target(byte, size), None, "{size} bytes at {byte}");
        }
        let upper = config.target(2, 2).unwrap();
        assert_eq!(
            (upper.lanes(), upper.part(0x1234_5678)),
            (0xffff_0000, 0x1234)
        );
        let last = config.target(3, 1).unwrap();
        assert_eq!((last.lanes(), last.part(0x1234_5678)), (0xff00_0000, 0x12));
        // Without a device there are bridges alone.
        let mut none = Config::new(None, [HOST_BRIDGE]);
        assert_eq!(none.read(word(NVME, 0)), Read::Value(u32::MAX));
        assert!(matches!(none.write(word(NVME, 4), 6, 0), Write::Refused(_)));
    }

    #[test]
    fn part_of_a_register_changes_that_part_alone() {
        let mut config = config();
        // Command, without touching the status behind it, whose bits are set.
        let command = target(NVME, 4, 0, 2);
        assert_eq!(config.write(command, 6, 0xf910_0103), Write::Real(0x0106));
        let status = target(NVME, 4, 2, 2);
        assert_eq!(
            config.write(status, 0, 0xf910_0103),
            Write::Real(0x0010_0000)
        );
        assert_eq!(
            config.write(status, 0x8000_0000, 0xf910_0103),
            Write::Real(0x8010_0000)
        );
        // Messages on, by their upper byte.
        let control = target(NVME, 0x40, 3, 1);
        assert_eq!(
            config.write(control, 0x8000_0000, 0x0040_0011),
            Write::Real(0x8000_0000)
        );
        assert_eq!(
            config.write(target(NVME, 0x40, 0, 1), 0x05, 0x0040_0011),
            Write::Dropped
        );
    }
}
